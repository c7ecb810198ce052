"""The table of built-in types: which ext code each has, and how it is written and read.

None, bool, int of 64 bits, float, str, bytes, list and dict with str keys are msgpack's own; everything else is an
ext of the code given here, so no data of the user's can look like a marker of ours. Codes are part of the stored
format: they are never reused or renumbered.

Looked up by exact type. A subclass is another type, which would come back as its base.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

from backstay.codec import arrays, times
from backstay.codec.limits import DECIMAL_CHARS_MAX, INT_BITS_MAX
from backstay.codec.refusal import Refused
from backstay.errors import DecodeError

PackLevel = Callable[[object], bytes]  # a value -> its msgpack, one ext level further down
UnpackLevel = Callable[[bytes], Any]


class Builtin(NamedTuple):
    """How one type is stored."""

    code: int  # its msgpack ext code
    pack: Callable[[Any, PackLevel], bytes]
    unpack: Callable[[bytes, UnpackLevel], Any]


class Pairs:
    """A dict with a key that is not a str, on its way through the C encoder, which takes no other keys."""

    __slots__ = ("source",)

    def __init__(self, source: dict[Any, Any]) -> None:
        self.source = source


TUPLE, SET, FROZENSET, PAIRS, INT, DECIMAL, FRACTION, UUID_, COMPLEX = range(1, 10)
DATETIME, DATE, TIME, TIMEDELTA, TIMEZONE, ZONEINFO = range(16, 22)
ARRAY, SCALAR = 32, 33
OBJECT: Final = 64

_COMPLEX: Final = struct.Struct(">dd")


def _pack_tuple(value: tuple[Any, ...], level: PackLevel) -> bytes:
    return level(list(value))


def _unpack_tuple(data: bytes, level: UnpackLevel) -> tuple[Any, ...]:
    return tuple(_list(data, level))


def _pack_set(value: set[Any] | frozenset[Any], level: PackLevel) -> bytes:
    # Sorted by their bytes, so that equal sets are equal bytes whatever order they were filled in.
    items = sorted(map(level, value))
    return _array_head(len(items)) + b"".join(items)


def _array_head(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2) if count < 65_536 else b"\xdd" + count.to_bytes(4)


def _unpack_set(data: bytes, level: UnpackLevel) -> set[Any]:
    items = _list(data, level)
    result = set(items)
    if len(result) != len(items):
        raise DecodeError("set holds an item twice")
    return result


def _unpack_frozenset(data: bytes, level: UnpackLevel) -> frozenset[Any]:
    return frozenset(_unpack_set(data, level))


def _pack_pairs(value: Pairs, level: PackLevel) -> bytes:
    return level([part for pair in value.source.items() for part in pair])


def _unpack_pairs(data: bytes, level: UnpackLevel) -> dict[Any, Any]:
    flat = _list(data, level)
    result = dict(zip(flat[::2], flat[1::2], strict=True))
    if len(result) * 2 != len(flat):
        raise DecodeError("dict holds a key twice")
    return result


def _list(data: bytes, level: UnpackLevel) -> list[Any]:
    items = level(data)
    if type(items) is not list:
        raise DecodeError("tuple, set or dict is stored as something other than an array")
    return items


def _pack_int(value: int, _: PackLevel) -> bytes:
    bits = value.bit_length()
    if bits > INT_BITS_MAX:
        raise Refused(f"int has more than {INT_BITS_MAX} bits")
    return value.to_bytes(bits // 8 + 1, signed=True)


def _unpack_int(data: bytes, _: UnpackLevel) -> int:
    if len(data) > INT_BITS_MAX // 8 + 1:
        raise DecodeError(f"int has more than {INT_BITS_MAX} bits")
    value = int.from_bytes(data, signed=True)
    # The shortest form only, and only what msgpack's own ints cannot hold.
    if value.bit_length() // 8 + 1 != len(data) or -(2**63) <= value < 2**64 or value.bit_length() > INT_BITS_MAX:
        raise DecodeError("large int is not in its only form")
    return value


def _pack_decimal(value: Decimal, _: PackLevel) -> bytes:
    # Upper case, since the exponent's letter depends on the caller's decimal context.
    text = str(value).upper()
    if len(text) > DECIMAL_CHARS_MAX:
        raise Refused(f"Decimal has more than {DECIMAL_CHARS_MAX} characters")
    return text.encode()


def _unpack_decimal(data: bytes, _: UnpackLevel) -> Decimal:
    if len(data) > DECIMAL_CHARS_MAX:
        raise DecodeError(f"Decimal has more than {DECIMAL_CHARS_MAX} characters")
    text = data.decode("ascii")
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        raise DecodeError("Decimal is no number") from error
    if str(value).upper() != text:
        raise DecodeError("Decimal is not in its only form")
    return value


def _pack_fraction(value: Fraction, level: PackLevel) -> bytes:
    return level([value.numerator, value.denominator])


def _unpack_fraction(data: bytes, level: UnpackLevel) -> Fraction:
    numerator, denominator = _list(data, level)
    if type(numerator) is not int or type(denominator) is not int or denominator < 1:
        raise DecodeError("Fraction is not two ints")
    value = Fraction(numerator, denominator)
    if value.denominator != denominator:
        raise DecodeError("Fraction is not in its lowest terms")
    return value


def _pack_complex(value: complex, _: PackLevel) -> bytes:
    return _COMPLEX.pack(value.real, value.imag)


def _unpack_complex(data: bytes, _: UnpackLevel) -> complex:
    return complex(*_COMPLEX.unpack(data))


def _pack_uuid(value: UUID, _: PackLevel) -> bytes:
    return value.bytes


def _unpack_uuid(data: bytes, _: UnpackLevel) -> UUID:
    return UUID(bytes=data)


def _build_array(data: bytes, _: UnpackLevel) -> Any:
    return arrays.build_array(data)


def _build_scalar(data: bytes, _: UnpackLevel) -> Any:
    return arrays.build_scalar(data)


BY_TYPE: Final[dict[type, Builtin]] = {
    tuple: Builtin(TUPLE, _pack_tuple, _unpack_tuple),
    set: Builtin(SET, _pack_set, _unpack_set),
    frozenset: Builtin(FROZENSET, _pack_set, _unpack_frozenset),
    Pairs: Builtin(PAIRS, _pack_pairs, _unpack_pairs),
    int: Builtin(INT, _pack_int, _unpack_int),
    Decimal: Builtin(DECIMAL, _pack_decimal, _unpack_decimal),
    Fraction: Builtin(FRACTION, _pack_fraction, _unpack_fraction),
    UUID: Builtin(UUID_, _pack_uuid, _unpack_uuid),
    complex: Builtin(COMPLEX, _pack_complex, _unpack_complex),
    datetime: Builtin(DATETIME, times.pack_datetime, times.unpack_datetime),
    date: Builtin(DATE, times.pack_date, times.unpack_date),
    time: Builtin(TIME, times.pack_time, times.unpack_time),
    timedelta: Builtin(TIMEDELTA, times.pack_timedelta, times.unpack_timedelta),
    timezone: Builtin(TIMEZONE, times.pack_timezone, times.unpack_timezone),
    ZoneInfo: Builtin(ZONEINFO, times.pack_zoneinfo, times.unpack_zoneinfo),
}

_ARRAY: Final = Builtin(ARRAY, arrays.pack_array, _build_array)
_SCALAR: Final = Builtin(SCALAR, arrays.pack_scalar, _build_scalar)

BY_CODE: Final[dict[int, Builtin]] = {entry.code: entry for entry in (*BY_TYPE.values(), _ARRAY, _SCALAR)}
# What stored numpy values are called where numpy is not imported.
NUMPY_NAMES: Final = {ARRAY: "numpy.ndarray", SCALAR: "numpy.generic"}

assert len(BY_CODE) == len(BY_TYPE) + 2
assert OBJECT not in BY_CODE


def builtin(cls: type) -> Builtin | None:
    """Return how a built-in type is stored; numpy's types count once numpy has been imported by someone."""
    entry = BY_TYPE.get(cls)
    if entry is not None:
        return entry
    if arrays.is_array(cls):
        return BY_TYPE.setdefault(cls, _ARRAY)
    if arrays.is_scalar(cls):
        return BY_TYPE.setdefault(cls, _SCALAR)
    return None
