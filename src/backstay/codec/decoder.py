"""msgpack to values. Any bytes whatever give a value or DecodeError, in bounded time and memory.

Nothing is imported, constructed or called but the built-in types and the classes registered here by object. The
payload of an ext is one level of msgpack of its own; before the C decoder goes into it, its depth is known to be
within the limits, because the decoder's native stack is not.
"""

from __future__ import annotations

from typing import Any, Final

import ormsgpack

from backstay.codec import arrays
from backstay.codec.depth import deeper_than, may_be_deeper_than
from backstay.codec.limits import (
    DECODER_DEPTH,
    DEPTH_MAX,
    EXT_DEPTH_MAX,
    EXT_INNER_DEPTH_MAX,
    NAME_BYTES_MAX,
    VALUE_BYTES_MAX,
    VERSION_MAX,
)
from backstay.codec.opaque import Opaque
from backstay.codec.plain import END, END_BYTES, PAIR, unpack_whole
from backstay.codec.registry import BY_NAME, head
from backstay.codec.values import BY_CODE, NUMPY_NAMES, OBJECT
from backstay.errors import DecodeError

# Arrays of one around the value, so many that the C decoder's own limit is reached where ours is.
_WRAPPERS: Final = DECODER_DEPTH - DEPTH_MAX - 1
_WRAPPED: Final = b"\x91" * _WRAPPERS + PAIR
# Below this, looking at every byte is cheaper than decoding the wrappers.
_SMALL_BYTES: Final = 16 * 1024


def decode(*parts: bytes) -> Any:
    """Return the value whose msgpack the parts are, one after the other."""
    size = sum(map(len, parts))
    if size > VALUE_BYTES_MAX:
        raise DecodeError(f"value has {size} bytes, more than the {VALUE_BYTES_MAX} allowed")
    run = _Run()
    try:
        return run.top(parts, size)
    except DecodeError:
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise run.translated(error) from error


def decode_stored(data: bytes) -> Any:
    """Return the value of short bytes that a store vouches for: as ``decode``, without guarding against forged ones.

    Lists of checkpoints decode a record for each row, nearly always of plain types.
    """
    try:
        return ormsgpack.unpackb(data)
    except ValueError:  # an ext, or no value at all: the full decoder tells
        return decode(data)


class _Run:
    """The decoding of one value."""

    _depth = 0
    _failure: BaseException | None = None

    def top(self, parts: tuple[bytes, ...], size: int) -> Any:
        """Decode the outermost level."""
        if size <= _SMALL_BYTES:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            if not may_be_deeper_than(data, DEPTH_MAX):
                value, end = ormsgpack.unpackb(PAIR + data + END_BYTES, ext_hook=self._extend)  # as in unpack_whole
                if type(end) is not int or end != END:
                    raise DecodeError("bytes are left over after a value")
                return value
        pair = ormsgpack.unpackb(b"".join((_WRAPPED, *parts, END_BYTES)), ext_hook=self._extend)
        for _ in range(_WRAPPERS):
            (pair,) = pair
        if type(pair[1]) is not int or pair[1] != END:
            raise DecodeError("bytes are left over after the value")
        return pair[0]

    def translated(self, error: Exception) -> BaseException:
        """Return what to raise: the failure inside an ext if there was one, since the C decoder drops it."""
        failure = self._failure or error
        if isinstance(failure, (DecodeError, MemoryError)) or not isinstance(failure, Exception):
            return failure
        if failure is error:
            return DecodeError(f"bytes are no valid value: {error}")
        return DecodeError(f"stored value cannot be rebuilt: {type(failure).__name__}")

    def _extend(self, code: int, data: bytes) -> Any:
        self._depth += 1
        try:
            if self._depth > EXT_DEPTH_MAX:
                raise DecodeError(f"value is nested deeper than {EXT_DEPTH_MAX} levels")
            return self._ext(code, data)
        except BaseException as failure:
            if self._failure is None:
                self._failure = failure
            raise
        finally:
            self._depth -= 1

    def _ext(self, code: int, data: bytes) -> Any:
        if code == OBJECT:
            return self._object(data)
        known = BY_CODE.get(code)
        if known is None:
            raise DecodeError(f"value has a part of an unknown type (ext {code})", hint="Read it with a newer Backstay")
        if code in NUMPY_NAMES and arrays.numpy() is None:
            return Opaque(NUMPY_NAMES[code], 1, data, code, decode)
        return known.unpack(data, self._inner)

    def _inner(self, data: bytes) -> Any:
        if deeper_than(data, EXT_INNER_DEPTH_MAX):
            raise DecodeError(f"value is nested deeper than {EXT_INNER_DEPTH_MAX} levels inside another type")
        return unpack_whole(data, self._extend)

    def _object(self, data: bytes) -> Any:
        name, version, start = _split(data)
        content = data[start:]
        entry = BY_NAME.get(name)
        if entry is None or version > entry.version:
            return Opaque(name, version, content, OBJECT, decode)
        return entry.build(version, self._inner(content))


def _split(data: bytes) -> tuple[str, int, int]:
    """Return the name and version in front of an object's content, and where that begins."""
    name_at, name_end = _name_span(data)
    name = data[name_at:name_end].decode()
    # A version is a msgpack int of up to five bytes; the bytes after it are the content.
    version = ormsgpack.unpackb(data[name_end : name_end + 5] + bytes(4))
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise DecodeError("stored object has no version")
    expected = head(name, version)
    if not data.startswith(expected):
        raise DecodeError("stored object's name and version are not in their only form")
    return name, version, len(expected)


def _name_span(data: bytes) -> tuple[int, int]:
    first, second, third = data[:3].ljust(3, b"\x00")
    if first == 0x93 and 0xA1 <= second <= 0xBF:
        return 2, 2 + (second & 31)
    if first == 0x93 and second == 0xD9 and third <= NAME_BYTES_MAX:
        return 3, 3 + third
    raise DecodeError("stored object has no name")
