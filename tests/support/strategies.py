"""Hypothesis strategies for everything a state may hold, and the strict equality that round trips need.

``==`` is not strict enough: to it, 1 equals True, 0.0 equals -0.0, a list subclass equals a list, and NaN differs.
"""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

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
    )


def scalars() -> st.SearchStrategy[Any]:
    """Any encodable value that holds no other."""
    return st.one_of(_hashable_scalars(), st.just(Decimal("sNaN")))


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
        return st.one_of(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(st.text(), inner, max_size=5),
            st.dictionaries(hashables(), inner, max_size=4),
            st.sets(hashables(), max_size=4),
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


def _same_timezone(left: timezone, right: timezone) -> bool:
    return left.utcoffset(None) == right.utcoffset(None) and left.tzname(None) == right.tzname(None)


_COMPARE: dict[type, Any] = {
    float: lambda left, right: _bits(left) == _bits(right),
    complex: _same_complex,
    Decimal: lambda left, right: left.as_tuple() == right.as_tuple(),
    list: _same_items,
    tuple: _same_items,
    dict: _same_dict,
    set: _same_set,
    frozenset: _same_set,
    datetime: _same_time,
    time: _same_time,
    timezone: _same_timezone,
    ZoneInfo: lambda left, right: left is right,
    date: date.__eq__,
    UUID: UUID.__eq__,
}
