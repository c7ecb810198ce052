"""numpy arrays and scalars: dtype and shape as text and ints, and the elements' own bytes.

Stored bytes never cause an import of numpy: until the program itself has imported it, stored arrays come back as
``Opaque`` and are saved again unchanged. Object and structured dtypes are refused (they hold references), and so is
long double, whose bytes differ from machine to machine.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, Final

import ormsgpack

from backstay.codec.msgpack import ARRAY_DIMS_MAX, Unencodable, unpack_array
from backstay.errors import DecodeError

_DTYPE: Final = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?", re.ASCII)
_KINDS: Final = "biufcmMSU"
_UNICODE_MAX: Final = 0x10FFFF


def numpy() -> Any:
    """Return numpy if the program has imported it, else None."""
    # If it is imported, this only waits for another thread that is importing it.
    return None if sys.modules.get("numpy") is None else import_numpy()


def import_numpy() -> Any:
    """Return numpy if it is installed, else None. The name is ours, never one from stored bytes."""
    try:
        import numpy as module
    except ImportError:
        return None
    return module


def is_array(cls: type) -> bool:
    """Return whether a class is numpy's own array; False without importing numpy."""
    return sys.modules.get("numpy") is not None and cls is numpy().ndarray


def is_scalar(cls: type) -> bool:
    """Return whether a class is one of numpy's own scalars; False without importing numpy."""
    return sys.modules.get("numpy") is not None and cls.__module__ == "numpy" and issubclass(cls, numpy().generic)


def _check(dtype: Any) -> None:
    if dtype.kind not in _KINDS or not _DTYPE.fullmatch(dtype.str):
        raise Unencodable(
            f"numpy dtype of kind {dtype.kind!r} cannot be stored", "Convert it to lists or a plain dtype"
        )
    if dtype.kind in "fc" and dtype.type in (numpy().longdouble, numpy().clongdouble):
        raise Unencodable("numpy long double differs from machine to machine", "Convert it to float64 or complex128")


def pack_array(value: Any, _: object) -> bytes:
    """``[dtype, shape, "C" or "F", bytes]``."""
    _check(value.dtype)
    if value.ndim > ARRAY_DIMS_MAX:
        raise Unencodable(f"numpy array has more than {ARRAY_DIMS_MAX} dimensions")
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return ormsgpack.packb([value.dtype.str, list(value.shape), order, value.tobytes(order)])


def build_array(data: bytes) -> Any:
    """Build a writable array that owns its memory."""
    name, shape, order, content = unpack_array(data, 4)
    dtype = _dtype(name)
    if type(shape) is not list or not all(type(side) is int and side >= 0 for side in shape):
        raise DecodeError("the shape of a stored numpy array is not a list of counts")
    if len(shape) > ARRAY_DIMS_MAX or order not in ("C", "F"):
        raise DecodeError("a stored numpy array has a layout that Backstay does not write")
    if type(content) is not bytes or math.prod(shape) * dtype.itemsize != len(content):
        raise DecodeError("the bytes of a stored numpy array do not fit its shape")
    _check_content(dtype, content)
    if not content:
        return numpy().empty(shape, dtype, order)
    return numpy().ndarray(shape, dtype, content, order=order).copy(order)


def pack_scalar(value: Any, _: object) -> bytes:
    """``[dtype, bytes]``, or ``["S" or "U", content]`` because numpy drops trailing NULs."""
    dtype = value.dtype
    if dtype.kind == "U":
        return ormsgpack.packb(["U", str.__str__(value)])
    if dtype.kind == "S":
        return ormsgpack.packb(["S", bytes(value)])
    _check(dtype)
    if numpy().dtype(dtype.str).type is not type(value):
        raise Unencodable(
            f"numpy type {type(value).__name__} has the same layout as another", "Use a sized type as int64"
        )
    return ormsgpack.packb([dtype.str, value.tobytes()])


def build_scalar(data: bytes) -> Any:
    """Build a numpy scalar."""
    name, content = unpack_array(data, 2)
    if name == "U" and type(content) is str:
        return numpy().str_(content)
    if type(content) is not bytes:
        raise DecodeError("a stored numpy scalar has no bytes")
    if name == "S":
        return numpy().bytes_(content)
    dtype = _dtype(name)
    if dtype.kind in "SU" or dtype.itemsize != len(content) or not content:
        raise DecodeError("the bytes of a stored numpy scalar do not fit its type")
    _check_content(dtype, content)
    return numpy().frombuffer(content, dtype)[0]


def _dtype(name: object) -> Any:
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise DecodeError("a stored numpy dtype is not one that Backstay writes")
    dtype = numpy().dtype(name)
    if dtype.str != name or dtype.type in (numpy().longdouble, numpy().clongdouble):
        raise DecodeError("a stored numpy dtype is not one that Backstay writes")
    return dtype


def _check_content(dtype: Any, content: bytes) -> None:
    # numpy trusts its memory: other bytes would make an element that raises, or is neither true nor false, later.
    if dtype.kind == "b" and content.translate(None, b"\x00\x01"):
        raise DecodeError("a stored numpy bool is neither true nor false")
    if dtype.kind == "U" and content:
        points = numpy().frombuffer(content, numpy().dtype("u4").newbyteorder(dtype.byteorder))
        if int(points.max()) > _UNICODE_MAX:
            raise DecodeError("a stored numpy text has a code point that does not exist")
