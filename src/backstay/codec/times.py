"""Dates and times: how each is written as a plain msgpack array, and read back.

A time zone is null (naive), ``[offset in microseconds, name or null]`` for a fixed offset, or the key of a zone of the
IANA database. Other tzinfo classes are refused: what they mean is code, not data. A key is looked up only if the
database on this machine has it, so bytes can name no file or package of their choice.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from functools import cache
from pathlib import Path
from typing import Any, Final
from zoneinfo import TZPATH, ZoneInfo, available_timezones

import ormsgpack

from backstay.codec.plain import unpack_array
from backstay.codec.refusal import Refused
from backstay.errors import DecodeError

_KEY: Final = re.compile(r"[A-Za-z0-9_+\-]+(/[A-Za-z0-9_+\-]+)*", re.ASCII)
_KEY_CHARS_MAX: Final = 64
_MICROSECOND: Final = timedelta(microseconds=1)


@cache
def _all_zones() -> frozenset[str]:
    # Reads every zone file, so only for machines that have the database as a package instead of files.
    return frozenset(available_timezones())


def _zone(key: str) -> ZoneInfo:
    if len(key) > _KEY_CHARS_MAX or not _KEY.fullmatch(key):
        raise DecodeError("time zone key is not of the form Area/City")
    if any(Path(root, key).is_file() for root in TZPATH) or key in _all_zones():
        return _cached_zone(key)
    raise DecodeError(f"time zone {key!r} is not in this machine's database", hint="Install the tzdata package")


def _cached_zone(key: str) -> ZoneInfo:
    try:
        return ZoneInfo(key)
    except (ValueError, OSError, LookupError) as error:
        raise DecodeError(f"time zone {key!r} cannot be read on this machine") from error


def _plain_zone(zone: tzinfo | None) -> object:
    if zone is None:
        return None
    if type(zone) is timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined] # why: only way to tell a name given from one derived
        return [offset // _MICROSECOND, name[0] if name else None]
    if type(zone) is ZoneInfo:
        return _zone_key(zone)
    raise Refused(
        f"tzinfo of type {type(zone).__qualname__} cannot be stored exactly",
        "Use datetime.timezone or zoneinfo.ZoneInfo",
    )


def _zone_key(zone: ZoneInfo) -> str:
    try:
        same = _zone(zone.key) is zone
    except (DecodeError, TypeError):  # a zone read from a file may have no key
        same = False
    if not same:
        raise Refused("ZoneInfo that is not the machine's own zone of that key cannot be stored", "Use ZoneInfo(key)")
    return zone.key


def _rich_zone(plain: Any) -> tzinfo | None:
    if plain is None:
        return None
    if type(plain) is str:
        return _zone(plain)
    offset, name = plain
    delta = timedelta(microseconds=_int(offset))
    if name is None:
        return timezone(delta)
    if type(name) is not str:
        raise DecodeError("name of a time zone is no text")
    return timezone(delta, name)


def _int(value: Any) -> int:
    if type(value) is not int:
        raise DecodeError("part of a date or time is no int")
    return value


def pack_datetime(value: datetime, _: object) -> bytes:
    """``[year, month, day, hour, minute, second, microsecond, fold, zone]``."""
    day = [value.year, value.month, value.day]
    clock = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return ormsgpack.packb([*day, *clock, _plain_zone(value.tzinfo)])


def unpack_datetime(data: bytes, _: object) -> datetime:
    """Build it from its nine parts."""
    *parts, fold, zone = unpack_array(data, 9)
    return datetime(*map(_int, parts), tzinfo=_rich_zone(zone), fold=_int(fold))  # type: ignore[misc, arg-type] # why: 7 parts, counted above


def pack_time(value: time, _: object) -> bytes:
    """``[hour, minute, second, microsecond, fold, zone]``."""
    parts = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return ormsgpack.packb([*parts, _plain_zone(value.tzinfo)])


def unpack_time(data: bytes, _: object) -> time:
    """Build it from its six parts."""
    hour, minute, second, microsecond, fold, zone = unpack_array(data, 6)
    clock = (_int(hour), _int(minute), _int(second), _int(microsecond))
    return time(*clock, tzinfo=_rich_zone(zone), fold=_int(fold))


def pack_date(value: date, _: object) -> bytes:
    """``[year, month, day]``."""
    return ormsgpack.packb([value.year, value.month, value.day])


def unpack_date(data: bytes, _: object) -> date:
    """Build it from its three parts."""
    year, month, day = unpack_array(data, 3)
    return date(_int(year), _int(month), _int(day))


def pack_timedelta(value: timedelta, _: object) -> bytes:
    """``[days, seconds, microseconds]``, as Python normalises them."""
    return ormsgpack.packb([value.days, value.seconds, value.microseconds])


def unpack_timedelta(data: bytes, _: object) -> timedelta:
    """Build it from its three parts."""
    days, seconds, microseconds = unpack_array(data, 3)
    return timedelta(_int(days), _int(seconds), _int(microseconds))


def pack_timezone(value: timezone, _: object) -> bytes:
    """``[offset in microseconds, name or null]``."""
    return ormsgpack.packb(_plain_zone(value))


def unpack_timezone(data: bytes, _: object) -> tzinfo:
    """Build a fixed offset."""
    zone = _rich_zone(unpack_array(data, 2))
    if type(zone) is not timezone:
        raise DecodeError("fixed time zone expected")
    return zone


def pack_zoneinfo(value: ZoneInfo, _: object) -> bytes:
    """Write the key, as UTF-8."""
    return _zone_key(value).encode()


def unpack_zoneinfo(data: bytes, _: object) -> ZoneInfo:
    """Look the key up."""
    return _zone(data.decode())
