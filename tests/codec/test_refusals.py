from __future__ import annotations

import array
import collections
import datetime
import functools
import zoneinfo
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ormsgpack
import pytest

from backstay import register
from backstay.codec import encode
from backstay.errors import EncodeError


class Plain:
    pass


class SubDict(dict[str, int]):
    pass


class SubStr(str):
    __slots__ = ()


class SubBytes(bytes):
    pass


class SubFloat(float):
    pass


class SubDatetime(datetime.datetime):
    pass


class OddZone(datetime.tzinfo):
    def utcoffset(self, at: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(0)

    def dst(self, at: datetime.datetime | None) -> None:
        return None

    def tzname(self, at: datetime.datetime | None) -> None:
        return None


@register
@dataclass
class Letter:
    subject: Any
    tags: list[Any] = field(default_factory=list)

    @functools.cached_property
    def cached(self) -> int:
        return 1


@register(encode=lambda value: 1 // 0, decode=lambda value: value)
class Broken:
    pass


def self_containing() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def with_cache() -> Letter:
    letter = Letter(1)
    assert letter.cached == 1
    return letter


SECRET = "hunter2"

OFFENDERS: list[Any] = [
    object(),
    Plain(),
    Plain,
    len,
    bytearray(SECRET.encode()),
    memoryview(SECRET.encode()),
    collections.OrderedDict(a=SECRET),
    collections.defaultdict(list),
    collections.deque([SECRET]),
    collections.Counter("a"),
    SubDict(a=1),
    SubStr(SECRET),
    SubBytes(b"x"),
    SubFloat(1.5),
    SubDatetime(2024, 1, 1),
    datetime.datetime(2024, 1, 1, tzinfo=OddZone()),
    datetime.time(1, tzinfo=OddZone()),
    zoneinfo.ZoneInfo.no_cache("Europe/Berlin"),
    SECRET + "\ud800",
    2**70_000,
    -(2**70_000),
    range(3),
    array.array("b", [1]),
    iter([]),
    ValueError(SECRET),
    np.array([object()], dtype=object),
    np.zeros(1, dtype=[("a", "i4")]),
    np.longdouble(1),
    np.ma.masked_array([1]),
    with_cache(),
    Broken(),
]


@pytest.mark.parametrize("offender", OFFENDERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("around", "path"),
    [
        (lambda x: x, "state"),
        (lambda x: {"messages": [1, 2, 3, {"when": x}]}, "state.messages[3].when"),
        (lambda x: {"a": (b"\xc4", {"ke y": x})}, "state.a[1]['ke y']"),
        (lambda x: {5: {"b": [x]}}, "state[5].b[0]"),
        (lambda x: Letter(subject="s", tags=[x]), "state.tags[0]"),
        (lambda x: {"é": {None: (x,)}}, "state.é[None][0]"),
    ],
)
def test_what_cannot_come_back_equal_is_refused_by_its_path(offender: Any, around: Any, path: str) -> None:
    with pytest.raises(EncodeError) as caught:
        encode(around(offender), "state")

    assert caught.value.path == path
    assert str(caught.value).startswith(f"serialization error: {path}: ")
    assert SECRET not in str(caught.value)


def test_an_unknown_class_is_named_with_the_way_to_register_it() -> None:
    with pytest.raises(EncodeError, match=r"Plain cannot be stored\. Register the class with @backstay\.register"):
        encode([Plain()])


def test_a_foreign_tzinfo_is_named() -> None:
    with pytest.raises(EncodeError, match=r"state\.when: tzinfo of type OddZone cannot be stored exactly"):
        encode({"when": datetime.datetime(2024, 1, 1, tzinfo=OddZone())}, "state")


@pytest.mark.parametrize("value", [self_containing(), {"a": self_containing()}, (self_containing(),)], ids=type)
def test_a_value_that_contains_itself_is_refused(value: Any) -> None:
    with pytest.raises(EncodeError, match="contains itself"):
        encode(value)


@pytest.mark.parametrize("key", [SubStr("b"), Plain(), (1, Plain()), "\ud800", SubBytes(b"")], ids=type)
def test_a_key_that_cannot_be_stored_is_refused(key: Any) -> None:
    with pytest.raises(EncodeError, match="key"):
        encode({"a": 1, key: 2})


def test_an_offender_in_a_set_is_refused() -> None:
    with pytest.raises(EncodeError, match="Plain"):
        encode({"s": {1, (2, Plain())}})


def test_many_dicts_with_other_keys_among_nested_tuples_take_one_retry_not_one_for_each_level() -> None:
    value: Any = None
    for _ in range(30):
        value = (value, {1: 2})

    assert len(encode(value)) > 30


@pytest.mark.parametrize("raw", [ormsgpack.Ext(1, b"\x90"), ormsgpack.Fragment(b"\xc0")], ids=type)
def test_hand_written_msgpack_is_refused_where_the_search_meets_it(raw: Any) -> None:
    with pytest.raises(EncodeError, match=r"Ext|Fragment"):
        encode({"a": raw, "b": b"bytes"})


def test_an_interrupt_during_encoding_is_no_encode_error() -> None:
    def stop(value: object) -> object:
        raise KeyboardInterrupt

    @register(encode=stop, decode=lambda value: value)
    class Stopping:
        pass

    with pytest.raises(KeyboardInterrupt):
        encode([Stopping()])
