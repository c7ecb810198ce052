from __future__ import annotations

import array
import asyncio
import collections
import concurrent.futures
import datetime
import enum
import fractions
import functools
import io
import ipaddress
import pathlib
import queue
import re
import socket
import sqlite3
import threading
import types
import zoneinfo
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ormsgpack
import pytest

from backstay import register
from backstay.codec import decode, encode
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


class SubBytearray(bytearray):
    pass


class SubOrderedDict(collections.OrderedDict[str, int]):
    pass


class SubDefaultdict(collections.defaultdict[str, int]):
    pass


class SubCounter(collections.Counter[str]):
    pass


class SubDeque(collections.deque[int]):
    pass


class SubPath(type(pathlib.Path())):  # type: ignore[misc] # why: before Python 3.12 Path itself has no subclasses
    pass


class SubAddress(ipaddress.IPv4Address):
    pass


class SubFraction(fractions.Fraction):
    pass


class SubTuple(tuple[int, ...]):
    __slots__ = ()


class Pair(NamedTuple):
    left: int
    right: int


class Colour(enum.StrEnum):
    RED = "red"


@dataclass
class Unregistered:
    a: int


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


def with_attribute(value: Any) -> Any:
    value.extra = SECRET
    return value


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
    memoryview(SECRET.encode()),
    collections.defaultdict(lambda: SECRET),
    collections.defaultdict(Plain, a=1),
    collections.defaultdict(complex),
    collections.defaultdict(functools.partial(list, SECRET)),
    with_attribute(collections.OrderedDict(a=1)),
    with_attribute(collections.Counter("a")),
    range(2**70_000),
    fractions.Fraction(1, 2**70_000),
    collections.deque([1]).__iter__(),
    SubBytearray(SECRET.encode()),
    SubOrderedDict(a=1),
    SubDefaultdict(int),
    SubCounter("a"),
    SubDeque([1]),
    SubPath(SECRET),
    SubAddress("192.0.2.1"),
    SubFraction(1, 2),
    SubTuple([1]),
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
        (lambda x: collections.OrderedDict(a=collections.deque([1, x])), "state.a[1]"),
        (lambda x: collections.defaultdict(list, a=[collections.Counter({7: x})]), "state.a[0][7]"),
        (lambda x: [bytearray(b"a"), {"b": x}], "state[1].b"),
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


async def coroutine() -> None:
    """Is never awaited, on purpose."""


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


def future() -> asyncio.Future[None]:
    loop = asyncio.new_event_loop()
    try:
        return loop.create_future()
    finally:
        loop.close()


NAME = "Store its name, and look it up after loading"
LIVE = "It belongs to this process: keep it outside the state"
REGISTER = "Register the class with @backstay.register"
HINTS: list[tuple[Any, str]] = [
    (coroutine, "did you forget await?"),
    (future, "did you forget await?"),
    (generator, "Make a list of it"),
    (async_generator, r"\[item async for item in \.\.\.\]"),
    (lambda: map(str, []), "Make a list of it"),
    (lambda: {}.keys(), "Make a list of it"),
    (lambda: {}.values(), "Make a list of it"),
    (lambda: {}.items(), "Make a list of it"),
    (lambda: collections.OrderedDict().items(), "Make a list of it"),
    (lambda: iter(()), "Make a list of it"),
    (lambda: generator, NAME),
    (lambda: len, NAME),
    (lambda: [].append, NAME),
    (lambda: functools.partial(len), NAME),
    (lambda: functools.cache(lambda: 1), NAME),
    (lambda: pytest, NAME),
    (lambda: Plain, NAME),
    (lambda: Colour, NAME),
    (io.BytesIO, r"\.getvalue\(\)"),
    (lambda: io.TextIOWrapper(io.BytesIO()), LIVE),
    (socket.socket, LIVE),
    (threading.Lock, LIVE),
    (threading.RLock, LIVE),
    (threading.Thread, LIVE),
    (threading.Event, LIVE),
    (queue.Queue, LIVE),
    (concurrent.futures.Future, LIVE),
    (asyncio.Lock, LIVE),
    (lambda: sqlite3.connect(":memory:"), LIVE),
    (lambda: ValueError(SECRET), r"repr\(error\)"),
    (lambda: re.compile(SECRET), r"\.pattern"),
    (lambda: re.match("a", "a"), r"\.groups\(\)"),
    (lambda: memoryview(b"a"), "Convert it to bytes"),
    (lambda: types.MappingProxyType({}), "Convert it to dict"),
    (lambda: array.array("b"), r"\.tolist\(\)"),
    (lambda: np.ma.masked_array([1]), r"\.tolist\(\)"),
    (lambda: np.dtype("i4"), r"\.tolist\(\)"),
    (lambda: np.array([object()]), "Convert it to lists or a plain dtype"),
    (lambda: collections.defaultdict(lambda: 1), "Use a built-in type such as list or int as the factory"),
    (lambda: SubOrderedDict(), "Convert it to OrderedDict, or register the class with encode= and decode="),
    (lambda: SubTuple(), "Convert it to tuple, or register"),
    (lambda: SubDatetime(2024, 1, 1), "Convert it to datetime, or register"),
    (lambda: Pair(1, 2), REGISTER),
    (lambda: Colour.RED, REGISTER),
    (lambda: Unregistered(1), REGISTER),
    (Plain, REGISTER),
]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(("make", "hint"), HINTS)
def test_the_hint_fits_the_type(make: Any, hint: str) -> None:
    value = make()

    with pytest.raises(EncodeError, match=f"state.x: .* cannot be stored.*{hint}") as caught:
        encode({"x": value}, "state")

    assert caught.value.hint is not None
    assert SECRET not in str(caught.value)
    close = getattr(value, "close", None)
    if close is not None and not isinstance(value, type):
        close()


def test_a_path_that_has_the_text_of_another_is_refused() -> None:
    """Before Python 3.12, the file ``c:`` of the current folder has the text of a drive."""
    path = pathlib.PureWindowsPath("./c:")

    if pathlib.PureWindowsPath(str(path)).drive == path.drive:
        assert decode(encode(path)).drive == path.drive
    else:
        with pytest.raises(EncodeError, match="text of another path"):
            encode(path)


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
