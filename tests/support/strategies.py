"""Hypothesis strategies for everything a state may hold, and the strict equality that round trips need.

``==`` is not strict enough: to it, 1 equals True, 0.0 equals -0.0, a list subclass equals a list, and NaN differs.
"""

from __future__ import annotations

import ipaddress
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from copy import copy
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

FACTORIES = (None, list, dict, set, int, float, str, tuple, bool, frozenset, bytes)
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu")


def _fixed_zones() -> st.SearchStrategy[tzinfo]:
    offsets = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59))
    return st.one_of(st.just(UTC), st.builds(timezone, offsets), st.builds(timezone, offsets, st.text()))


def _zones() -> st.SearchStrategy[tzinfo | None]:
    return st.one_of(st.none(), _fixed_zones(), st.sampled_from(ZONES).map(ZoneInfo))


def _in_zones(naive: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold), naive, _zones(), st.integers(0, 1))


def _hashable_scalars() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**300), 2**300),
        st.floats(),
        st.text(),
        st.binary(),
        _in_zones(st.datetimes(datetime(2, 1, 1), datetime(9998, 12, 31))),
        st.dates(),
        _in_zones(st.times()),
        st.timedeltas(),
        _fixed_zones(),
        st.sampled_from(ZONES).map(ZoneInfo),
        st.decimals().filter(lambda number: not number.is_snan()),
        st.builds(Fraction, st.integers(), st.integers(1, 2**80)),
        st.uuids(),
        st.complex_numbers(),
        st.builds(range, st.integers(), st.integers(), st.integers().filter(bool)),
        _paths(),
        _ips(),
    )


def _paths() -> st.SearchStrategy[Any]:
    names = st.text(st.characters())  # lone surrogates too: names of files that are not UTF-8 have them
    kinds = st.sampled_from([PurePosixPath, PureWindowsPath, Path])
    paths = st.builds(lambda kind, parts: kind(*parts), kinds, st.lists(names, max_size=3))
    # Python gives some odd Windows paths the text of another path, or copies them as another path.
    return paths.filter(lambda path: _same_path(path, type(path)(str(path))) and _same_path(path, copy(path)))


def _ips() -> st.SearchStrategy[Any]:
    scoped = st.builds(
        lambda address, scope: ipaddress.IPv6Address(f"{address}%{scope}"),
        st.ip_addresses(v=6),
        st.text(min_size=1).filter(lambda scope: not set(scope) & set("%/")),
    )
    # A copy of such an address loses its scope in some versions of Python, and the tests compare with copies.
    is_copied = copy(ipaddress.IPv6Address("::%0")) == ipaddress.IPv6Address("::%0")
    address = st.one_of(st.ip_addresses(), scoped) if is_copied else st.ip_addresses()

    def ranged(at: Any, prefix: int, kind: str) -> Any:
        pair = (str(at), min(prefix, at.max_prefixlen))
        return ipaddress.ip_interface(pair) if kind == "interface" else ipaddress.ip_network(pair, strict=False)

    return st.one_of(
        address, st.builds(ranged, address, st.integers(0, 128), st.sampled_from(["interface", "network"]))
    )


def scalars() -> st.SearchStrategy[Any]:
    """Any encodable value that holds no other."""
    return st.one_of(_hashable_scalars(), st.just(Decimal("sNaN")), st.binary().map(bytearray))


def hashables() -> st.SearchStrategy[Any]:
    """Any encodable value that can be a dict's key or a set's item."""
    return st.recursive(
        _hashable_scalars(),
        lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
        max_leaves=5,
    )


def values() -> st.SearchStrategy[Any]:
    """Any encodable value, nested."""

    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        any_dict = st.dictionaries(hashables(), inner, max_size=4)
        return st.one_of(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(st.text(), inner, max_size=5),
            any_dict,
            st.sets(hashables(), max_size=4),
            any_dict.map(OrderedDict),
            st.builds(defaultdict, st.sampled_from(FACTORIES), any_dict),
            st.dictionaries(hashables(), st.one_of(st.integers(), inner), max_size=4).map(Counter),
            st.builds(deque, st.lists(inner, max_size=5), st.one_of(st.none(), st.integers(0, 8))),
        )

    return st.recursive(scalars(), around, max_leaves=15)


def states() -> st.SearchStrategy[dict[str, Any]]:
    """Any state: channels by name."""
    return st.dictionaries(st.text(max_size=10), values(), max_size=6)


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal in type, order and bits, all the way down."""
    if type(left) is not type(right):
        return False
    compare = _COMPARE.get(type(left))
    if compare is not None:
        return bool(compare(left, right))
    if type(left).__module__ == "numpy":
        return bool((left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()))
    return bool(left == right)


def _same_items(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def _same_dict(left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    return _same_items(list(left), list(right)) and _same_items(list(left.values()), list(right.values()))


def _same_set(left: Any, right: Any) -> bool:
    # Not by order: the hash of a NaN, and so its position, differs from object to object.
    rest = list(right)
    for item in left:
        found = next((at for at, other in enumerate(rest) if same(item, other)), None)
        if found is None:
            return False
        rest.pop(found)
    return not rest


def _bits(number: float) -> bytes:
    return struct.pack(">d", number)


def _same_complex(left: complex, right: complex) -> bool:
    return _bits(left.real) == _bits(right.real) and _bits(left.imag) == _bits(right.imag)


def _same_time(left: Any, right: Any) -> bool:
    plain = left.replace(tzinfo=None) == right.replace(tzinfo=None) and left.fold == right.fold
    return plain and same(left.tzinfo, right.tzinfo)


def _same_path(left: PurePath, right: PurePath) -> bool:
    # Their ``==`` ignores upper and lower case on Windows.
    return str(left) == str(right) and (left.drive, left.root, left.parts) == (right.drive, right.root, right.parts)


def _same_timezone(left: timezone, right: timezone) -> bool:
    return left.utcoffset(None) == right.utcoffset(None) and left.tzname(None) == right.tzname(None)


_COMPARE: dict[type, Any] = {
    float: lambda left, right: _bits(left) == _bits(right),
    complex: _same_complex,
    Decimal: lambda left, right: left.as_tuple() == right.as_tuple(),
    list: _same_items,
    tuple: _same_items,
    dict: _same_dict,
    OrderedDict: _same_dict,
    Counter: _same_dict,
    defaultdict: lambda left, right: left.default_factory is right.default_factory and _same_dict(left, right),
    deque: lambda left, right: left.maxlen == right.maxlen and _same_items(left, right),
    range: lambda left, right: repr(left) == repr(right),
    PureWindowsPath: _same_path,
    set: _same_set,
    frozenset: _same_set,
    datetime: _same_time,
    time: _same_time,
    timezone: _same_timezone,
    ZoneInfo: lambda left, right: left is right,
    date: date.__eq__,
    UUID: UUID.__eq__,
}
