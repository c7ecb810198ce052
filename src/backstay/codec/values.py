"""The built-in types: which ext code each has, and how it is written and read.

None, bool, int of 64 bits, float, str, bytes, list and dict with str keys are msgpack's own types; every other type is
an ext with the code given here, so no user data can look like one of our markers. Codes are part of the stored format:
they are never reused or renumbered. A type is looked up exactly, because a subclass would come back as its base.

Dates and times are plain msgpack arrays. A time zone is null (naive), ``[offset in microseconds, name or null]`` for a
fixed offset, or the key of a zone of the IANA database. Other tzinfo classes are refused: their meaning is code, not
data. A key is looked up only if this machine's database has it, so stored bytes cannot name a file or package.

A path is its text. A ``Path`` is a type of one platform: on the other platform it is loaded as an ``Opaque`` whose
``value`` is the pure path. No path touches the file system. An IP address is its bytes, not its text, which differs
between versions of Python; then the prefix length of a network or interface, and the scope of an IPv6 address.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from itertools import chain
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final, NamedTuple
from uuid import UUID
from zoneinfo import TZPATH, ZoneInfo, available_timezones

import ormsgpack

from backstay.codec import arrays
from backstay.codec.msgpack import DECIMAL_CHARS_MAX, INT_BITS_MAX, Unencodable, header, unpack_array
from backstay.codec.registry import Opaque
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
BYTEARRAY, ORDERED_DICT, DEFAULTDICT, COUNTER, DEQUE, RANGE = range(10, 16)
DATETIME, DATE, TIME, TIMEDELTA, TIMEZONE, ZONEINFO = range(16, 22)
PURE_POSIX_PATH, PURE_WINDOWS_PATH, POSIX_PATH, WINDOWS_PATH = range(22, 26)
IPV4_ADDRESS, IPV6_ADDRESS, IPV4_NETWORK, IPV6_NETWORK, IPV4_INTERFACE, IPV6_INTERFACE = range(26, 32)
ARRAY, SCALAR = 32, 33
OBJECT: Final = 64

MUTABLE: Final = frozenset({list, dict, set, bytearray, OrderedDict, defaultdict, Counter, deque})
"""The built-in types whose values can change in place."""

_FACTORIES: Final[dict[str | None, Any]] = {None: None} | {
    cls.__name__: cls for cls in (list, dict, set, int, float, str, tuple, bool, frozenset, bytes)
}
_COMPLEX: Final = struct.Struct(">dd")
_ZONE_KEY: Final = re.compile(r"[A-Za-z0-9_+\-]+(/[A-Za-z0-9_+\-]+)*", re.ASCII)
_ZONE_KEY_CHARS_MAX: Final = 64
_MICROSECOND: Final = timedelta(microseconds=1)


# Containers and numbers -------------------------------------------------------------------------------------------


def pack_set(value: set[Any] | frozenset[Any], level: PackLevel) -> bytes:
    """Write the items sorted by their bytes, so that equal sets have equal bytes."""
    return b"".join((header(len(value), 0x90, 0xDC), *sorted(map(level, value))))


def unpack_set(data: bytes, level: UnpackLevel) -> set[Any]:
    """Refuse items that are equal: the set would be smaller than what was stored."""
    items = unpack_list(data, level)
    result = set(items)
    if len(result) != len(items):
        raise DecodeError("a stored set contains the same item twice")
    return result


def pack_ordered(value: OrderedDict[Any, Any] | Counter[Any], level: PackLevel) -> bytes:
    """Write keys and values in turn."""
    if value.__dict__:
        raise Unencodable(f"{type(value).__name__} has attributes beyond its items")
    return level(list(chain.from_iterable(value.items())))


def pack_defaultdict(value: defaultdict[Any, Any], level: PackLevel) -> bytes:
    """Write the name of the factory, then keys and values in turn."""
    for name, factory in _FACTORIES.items():
        if factory is value.default_factory:
            return level([name, *chain.from_iterable(value.items())])
    raise Unencodable(
        "the factory of a defaultdict is code, which cannot be stored, unless it is a built-in type",
        "Use a built-in type such as list or int as the factory, or convert it to dict",
    )


def unpack_defaultdict(data: bytes, level: UnpackLevel) -> defaultdict[Any, Any]:
    """Accept the factories of the closed list only."""
    name, *flat = unpack_list(data, level)
    if type(name) not in (str, type(None)) or name not in _FACTORIES:
        raise DecodeError("a stored defaultdict has a factory that Backstay does not write")
    return defaultdict(_FACTORIES[name], _pairs(flat))


def unpack_deque(data: bytes, level: UnpackLevel) -> deque[Any]:
    """Refuse more items than ``maxlen``: the first ones would be dropped silently."""
    maxlen, *items = unpack_list(data, level)
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(items)):
        raise DecodeError("a stored deque is longer than its maxlen")
    return deque(items, maxlen)


def unpack_range(data: bytes, level: UnpackLevel) -> range:
    """Build it from its three ints."""
    start, stop, step = unpack_list(data, level)
    if not (type(start) is type(stop) is type(step) is int) or step == 0:
        raise DecodeError("a stored range is not three ints with a step other than 0")
    return range(start, stop, step)


def _pairs(flat: list[Any]) -> dict[Any, Any]:
    """Build a dict from keys and values in turn."""
    result = dict(zip(flat[::2], flat[1::2], strict=True))
    if len(result) * 2 != len(flat):
        raise DecodeError("a stored dict contains the same key twice")
    return result


def unpack_pairs(data: bytes, level: UnpackLevel) -> dict[Any, Any]:
    """Build a dict from the array of its keys and values in turn."""
    return _pairs(unpack_list(data, level))


def unpack_list(data: bytes, level: UnpackLevel) -> list[Any]:
    """Read the array that every container is stored as."""
    items = level(data)
    if type(items) is not list:
        raise DecodeError("a stored container is not an array")
    return items


def pack_int(value: int, _: PackLevel) -> bytes:
    """Write an int that msgpack's own ints cannot hold."""
    bits = value.bit_length()
    if bits > INT_BITS_MAX:
        raise Unencodable(f"int has more than {INT_BITS_MAX} bits")
    return value.to_bytes(bits // 8 + 1, signed=True)


def unpack_int(data: bytes, _: UnpackLevel) -> int:
    """Accept the shortest form only, and only ints that msgpack's own cannot hold."""
    if len(data) > INT_BITS_MAX // 8 + 1:
        raise DecodeError(f"int has more than {INT_BITS_MAX} bits")
    value = int.from_bytes(data, signed=True)
    if value.bit_length() // 8 + 1 != len(data) or -(2**63) <= value < 2**64 or value.bit_length() > INT_BITS_MAX:
        raise DecodeError("a stored large int is not in canonical form")
    return value


def pack_decimal(value: Decimal, _: PackLevel) -> bytes:
    """Write the digits in upper case, since the exponent's letter depends on the caller's decimal context."""
    text = str(value).upper()
    if len(text) > DECIMAL_CHARS_MAX:
        raise Unencodable(f"Decimal has more than {DECIMAL_CHARS_MAX} characters")
    return text.encode()


def unpack_decimal(data: bytes, _: UnpackLevel) -> Decimal:
    """Accept only the text that ``pack_decimal`` writes."""
    if len(data) > DECIMAL_CHARS_MAX:
        raise DecodeError(f"Decimal has more than {DECIMAL_CHARS_MAX} characters")
    text = data.decode("ascii")
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        raise DecodeError("a stored Decimal is not a number") from error
    if str(value).upper() != text:
        raise DecodeError("a stored Decimal is not in canonical form")
    return value


def unpack_fraction(data: bytes, level: UnpackLevel) -> Fraction:
    """Accept lowest terms only."""
    numerator, denominator = unpack_list(data, level)
    if type(numerator) is not int or type(denominator) is not int or denominator < 1:
        raise DecodeError("a stored Fraction is not two ints")
    value = Fraction(numerator, denominator)
    if value.denominator != denominator:
        raise DecodeError("a stored Fraction is not in its lowest terms")
    return value


# Dates and times --------------------------------------------------------------------------------------------------


@cache
def _all_zones() -> frozenset[str]:
    # Reads every zone file, so only for machines that have the database as a package instead of files.
    return frozenset(available_timezones())


def _zone(key: str) -> ZoneInfo:
    if len(key) > _ZONE_KEY_CHARS_MAX or not _ZONE_KEY.fullmatch(key):
        raise DecodeError("a time zone key does not have the form Area/City")
    if not any(Path(root, key).is_file() for root in TZPATH) and key not in _all_zones():
        raise DecodeError(f"this machine's database has no time zone {key!r}", hint="Install the tzdata package")
    try:
        return ZoneInfo(key)
    except (ValueError, OSError, LookupError) as error:
        raise DecodeError(f"this machine cannot read the time zone {key!r}") from error


def _zone_key(zone: ZoneInfo) -> str:
    try:
        same = _zone(zone.key) is zone
    except (DecodeError, TypeError):  # a zone read from a file may have no key
        same = False
    if not same:
        reason = "a ZoneInfo that differs from the machine's own zone of that key cannot be stored"
        raise Unencodable(reason, "Use ZoneInfo(key)")
    return zone.key


def _plain_zone(zone: tzinfo | None) -> object:
    if zone is None:
        return None
    if type(zone) is timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined] # why: the only way to know whether a name was given
        return [offset // _MICROSECOND, name[0] if name else None]
    if type(zone) is ZoneInfo:
        return _zone_key(zone)
    reason = f"tzinfo of type {type(zone).__qualname__} cannot be stored exactly"
    raise Unencodable(reason, "Use datetime.timezone or zoneinfo.ZoneInfo")


def _rich_zone(plain: Any) -> tzinfo | None:
    if plain is None:
        return None
    if type(plain) is str:
        return _zone(plain)
    offset, name = plain
    if name is not None and type(name) is not str:
        raise DecodeError("the name of a stored time zone is not text")
    delta = timedelta(microseconds=_ints([offset])[0])
    return timezone(delta) if name is None else timezone(delta, name)


def _ints(parts: list[Any]) -> list[Any]:
    if any(type(part) is not int for part in parts):
        raise DecodeError("part of a stored date or time is not an int")
    return parts


def pack_datetime(value: datetime, _: object) -> bytes:
    """``[year, month, day, hour, minute, second, microsecond, fold, zone]``."""
    day = [value.year, value.month, value.day]
    clock = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return ormsgpack.packb([*day, *clock, _plain_zone(value.tzinfo)])


def unpack_datetime(data: bytes, _: object) -> datetime:
    """Build it from its nine parts."""
    *parts, zone = unpack_array(data, 9)
    *clock, fold = _ints(parts)
    return datetime(*clock, tzinfo=_rich_zone(zone), fold=fold)  # type: ignore[misc] # why: 7 parts, counted above


def pack_time(value: time, _: object) -> bytes:
    """``[hour, minute, second, microsecond, fold, zone]``."""
    parts = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return ormsgpack.packb([*parts, _plain_zone(value.tzinfo)])


def unpack_time(data: bytes, _: object) -> time:
    """Build it from its six parts."""
    *parts, zone = unpack_array(data, 6)
    *clock, fold = _ints(parts)
    return time(*clock, tzinfo=_rich_zone(zone), fold=fold)  # type: ignore[misc] # why: 4 parts, counted above


def unpack_timezone(data: bytes, _: object) -> tzinfo:
    """Build a fixed offset."""
    zone = _rich_zone(unpack_array(data, 2))
    if type(zone) is not timezone:
        raise DecodeError("a stored fixed time zone is of another type")
    return zone


# Paths and addresses ----------------------------------------------------------------------------------------------


def pack_path(value: PurePath, _: object) -> bytes:
    """Write the text of a path. Names of files that are not UTF-8 have lone surrogates in Python."""
    text = str(value)
    again = type(value)(text)
    # Some Windows paths have the text of another path: before Python 3.12, the file "c:x" of this folder is "c:x".
    if (again.drive, again.root, again.parts) != (value.drive, value.root, value.parts):
        raise Unencodable(f"{type(value).__name__} has the text of another path")
    return text.encode("utf-8", "surrogatepass")


def unpack_path(cls: type[PurePath], data: bytes, _: object = None) -> Any:
    """Accept only the text that ``pack_path`` writes."""
    text = data.decode("utf-8", "surrogatepass")
    path = cls(text)
    if str(path) != text:
        raise DecodeError("a stored path is not in canonical form")
    return path


def _concrete_path(code: int, cls: type[PurePath], pure: type[PurePath]) -> Builtin:
    """Return how a ``Path`` is stored. One of the other platform cannot exist here, so its bytes are kept."""
    opened = partial(unpack_path, pure)

    def keep(data: bytes, _: object) -> Opaque:
        opened(data)
        return Opaque(f"pathlib.{cls.__name__}", 1, data, code, opened)

    return Builtin(code, pack_path, partial(unpack_path, cls) if cls is type(Path()) else keep)


def pack_ip(value: Any, _: object) -> bytes:
    """Write the address, the prefix length of a network or interface, and the scope."""
    address = getattr(value, "network_address", value)
    prefix = getattr(getattr(value, "network", value), "prefixlen", None)
    scope = getattr(address, "scope_id", None) or ""
    return bytes(address.packed) + (b"" if prefix is None else bytes((prefix,))) + scope.encode()


def unpack_ip(cls: Any, address_type: Any, size: int, data: bytes, _: object) -> Any:
    """Build it from its parts. The classes refuse a wrong length, prefix or scope, and bits beyond the prefix."""
    address = address_type(data[:size])
    scope_at = size if cls is address_type else size + 1
    if scope := data[scope_at:].decode():
        address = address_type(f"{address}%{scope}")
    return address if cls is address_type else cls((str(address), data[size]))


# The table --------------------------------------------------------------------------------------------------------

BY_TYPE: Final[dict[type, Builtin]] = {
    tuple: Builtin(TUPLE, lambda value, level: level(list(value)), lambda data, level: tuple(unpack_list(data, level))),
    set: Builtin(SET, pack_set, unpack_set),
    frozenset: Builtin(FROZENSET, pack_set, lambda data, level: frozenset(unpack_set(data, level))),
    Pairs: Builtin(PAIRS, lambda value, level: level(list(chain.from_iterable(value.source.items()))), unpack_pairs),
    int: Builtin(INT, pack_int, unpack_int),
    Decimal: Builtin(DECIMAL, pack_decimal, unpack_decimal),
    Fraction: Builtin(FRACTION, lambda value, level: level([value.numerator, value.denominator]), unpack_fraction),
    UUID: Builtin(UUID_, lambda value, _: value.bytes, lambda data, _: UUID(bytes=data)),
    complex: Builtin(
        COMPLEX, lambda value, _: _COMPLEX.pack(value.real, value.imag), lambda data, _: complex(*_COMPLEX.unpack(data))
    ),
    bytearray: Builtin(BYTEARRAY, lambda value, _: bytes(value), lambda data, _: bytearray(data)),
    OrderedDict: Builtin(ORDERED_DICT, pack_ordered, lambda data, level: OrderedDict(unpack_pairs(data, level))),
    defaultdict: Builtin(DEFAULTDICT, pack_defaultdict, unpack_defaultdict),
    Counter: Builtin(COUNTER, pack_ordered, lambda data, level: Counter(unpack_pairs(data, level))),
    deque: Builtin(DEQUE, lambda value, level: level([value.maxlen, *value]), unpack_deque),
    range: Builtin(RANGE, lambda value, level: level([value.start, value.stop, value.step]), unpack_range),
    datetime: Builtin(DATETIME, pack_datetime, unpack_datetime),
    date: Builtin(
        DATE,
        lambda value, _: ormsgpack.packb([value.year, value.month, value.day]),
        lambda data, _: date(*_ints(unpack_array(data, 3))),
    ),
    time: Builtin(TIME, pack_time, unpack_time),
    timedelta: Builtin(
        TIMEDELTA,
        lambda value, _: ormsgpack.packb([value.days, value.seconds, value.microseconds]),
        lambda data, _: timedelta(*_ints(unpack_array(data, 3))),
    ),
    timezone: Builtin(TIMEZONE, lambda value, _: ormsgpack.packb(_plain_zone(value)), unpack_timezone),
    ZoneInfo: Builtin(ZONEINFO, lambda value, _: _zone_key(value).encode(), lambda data, _: _zone(data.decode())),
    PurePosixPath: Builtin(PURE_POSIX_PATH, pack_path, partial(unpack_path, PurePosixPath)),
    PureWindowsPath: Builtin(PURE_WINDOWS_PATH, pack_path, partial(unpack_path, PureWindowsPath)),
    PosixPath: _concrete_path(POSIX_PATH, PosixPath, PurePosixPath),
    WindowsPath: _concrete_path(WINDOWS_PATH, WindowsPath, PureWindowsPath),
    IPv4Address: Builtin(IPV4_ADDRESS, pack_ip, partial(unpack_ip, IPv4Address, IPv4Address, 4)),
    IPv6Address: Builtin(IPV6_ADDRESS, pack_ip, partial(unpack_ip, IPv6Address, IPv6Address, 16)),
    IPv4Network: Builtin(IPV4_NETWORK, pack_ip, partial(unpack_ip, IPv4Network, IPv4Address, 4)),
    IPv6Network: Builtin(IPV6_NETWORK, pack_ip, partial(unpack_ip, IPv6Network, IPv6Address, 16)),
    IPv4Interface: Builtin(IPV4_INTERFACE, pack_ip, partial(unpack_ip, IPv4Interface, IPv4Address, 4)),
    IPv6Interface: Builtin(IPV6_INTERFACE, pack_ip, partial(unpack_ip, IPv6Interface, IPv6Address, 16)),
}

_ARRAY: Final = Builtin(ARRAY, arrays.pack_array, lambda data, _: arrays.build_array(data))
_SCALAR: Final = Builtin(SCALAR, arrays.pack_scalar, lambda data, _: arrays.build_scalar(data))

BY_CODE: Final[dict[int, Builtin]] = {entry.code: entry for entry in (*BY_TYPE.values(), _ARRAY, _SCALAR)}
# The names of stored numpy values where numpy is not imported.
NUMPY_NAMES: Final = {ARRAY: "numpy.ndarray", SCALAR: "numpy.generic"}

assert len(BY_CODE) == len(BY_TYPE) + 2
assert OBJECT not in BY_CODE


def builtin(cls: type) -> Builtin | None:
    """Return how a built-in type is stored; numpy's types count once the program has imported numpy."""
    entry = BY_TYPE.get(cls)
    if entry is not None:
        return entry
    if arrays.is_array(cls):
        return BY_TYPE.setdefault(cls, _ARRAY)
    if arrays.is_scalar(cls):
        return BY_TYPE.setdefault(cls, _SCALAR)
    return None
