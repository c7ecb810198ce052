from __future__ import annotations

import ipaddress
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import ormsgpack
import pytest
from hypothesis import given, settings

from backstay.codec import Opaque, decode, encode
from backstay.codec.values import BY_CODE, BY_TYPE
from backstay.errors import DecodeError
from support.running import effort
from support.strategies import FACTORIES, same, states, values

BERLIN = ZoneInfo("Europe/Berlin")

HASHABLE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
    2**4096,
    0.0,
    -0.0,
    1.5,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack(">d", bytes.fromhex("fff0000000000001"))[0],
    "",
    "text",
    "中文 \U0001f600 \x00",
    b"",
    b"\x00\xff\xc4\xc7",
    (),
    (1, "a", (2,)),
    frozenset(),
    frozenset({1, "a", (2,)}),
    datetime(2024, 1, 2, 3, 4, 5, 6),
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
    datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-5, seconds=1), "X")),
    datetime.min,
    datetime.max,
    date(1, 1, 1),
    time(1, 2, 3, 4, fold=1),
    time(1, tzinfo=BERLIN),
    timedelta(-1, 5, 6),
    timedelta.max,
    UTC,
    timezone(timedelta(hours=1), "CET"),
    timezone(timedelta(0), "UTC"),
    BERLIN,
    Decimal("1.10"),
    Decimal("1E+500"),
    Decimal("-0E-7"),
    Decimal("NaN123"),
    Decimal("-Infinity"),
    Fraction(-1, 3),
    Fraction(2**100, 3),
    UUID(int=5),
    complex(-0.0, math.nan),
    range(0),
    range(1, 1),
    range(5, -(2**100), -3),
    range(0, 4, 3),
    PurePosixPath(),
    PurePosixPath("//a/../b c/中"),
    PurePosixPath("not utf-8 \udcff"),
    PureWindowsPath("C:/Users/x"),
    PureWindowsPath(r"\\server\share\a"),
    PureWindowsPath("c:relative"),
    PureWindowsPath("a/c:x"),
    Path("/no/such/file"),
    Path("a\0b"),
    ipaddress.ip_address("192.0.2.1"),
    ipaddress.ip_address("::ffff:192.0.2.1"),
    ipaddress.ip_address("fe80::1%eth0"),
    ipaddress.ip_network("10.0.0.0/8"),
    ipaddress.ip_network("0.0.0.0/0"),
    ipaddress.ip_network("192.0.2.1/32"),
    ipaddress.ip_network("2001:db8::/48"),
    ipaddress.ip_network("fe80::%1/64"),
    ipaddress.ip_interface("192.0.2.1/24"),
    ipaddress.ip_interface("fe80::1%eth0/64"),
    np.float64(1.5),
    np.float32(math.nan),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.datetime64("2024-01-02T03:04", "m"),
    np.datetime64("NaT", "s"),
    np.timedelta64(5, "us"),
    np.str_("a\x00"),
    np.str_(""),
    np.bytes_(b"a\x00"),
]

UNHASHABLE: list[Any] = [
    [],
    [1, [2]],
    {},
    {"a": {"b": 1}},
    {1: 2, None: 3, "x": 4},
    set(),
    {1, 2.5, "a", None},
    Decimal("sNaN1"),
    bytearray(),
    bytearray(b"\x00\xc4\xc7"),
    OrderedDict(),
    OrderedDict([("b", 1), ("a", [2]), (3, (4,))]),
    *(defaultdict(factory, {"a": 1, 2: [3]}) for factory in FACTORIES),
    Counter(),
    Counter({"b": 0, "a": -3, 5: 2**70, "c": 1.5}),
    deque(),
    deque([1, [2], (3,)], maxlen=3),
    deque(maxlen=0),
    deque(["a"]),
    [bytearray(b"a"), b"a", {"k": (bytearray(b"b"), {1: bytearray()})}],
    OrderedDict(a=defaultdict(list, b=[deque([Counter("c"), bytearray(b"d")])])),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::3],
    np.array(5),
    np.zeros((0, 3)),
    np.array([], dtype="U"),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array([True, False]),
    np.array(["2024-01-01"], dtype="M8[25s]"),
    np.array([1 + 2j], dtype="c8"),
]

AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda inner: inner,
    "in a list": lambda inner: [1, inner],
    "in a tuple": lambda inner: (inner, 1),
    "in a dict": lambda inner: {"k": inner},
    "in a dict with int keys": lambda inner: {1: inner, "k": [inner]},
    "in other containers": lambda inner: OrderedDict(
        a=inner, b=defaultdict(list, k=[inner]), c=Counter({"k": inner}), d=deque([inner, 1], maxlen=2)
    ),
    "deeper": lambda inner: [({"a": [(inner,)]}, {2: (inner,)})],
}

AS_KEY: dict[str, Callable[[Any], Any]] = {
    "as a key": lambda inner: {inner: 1, "other": 2},
    "in a set": lambda inner: {inner},
    "in a frozenset": lambda inner: frozenset({inner, (1, 2)}),
    "as a key of other dicts": lambda inner: OrderedDict([("k", 1), (inner, defaultdict(int, {inner: 2}))]),
    "in a key": lambda inner: {(1, inner): inner},
}


def name(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("value", [*HASHABLE, *UNHASHABLE], ids=name)
def test_every_built_in_type_comes_back_equal_and_of_the_same_type(value: Any, around: Callable[[Any], Any]) -> None:
    data = encode(around(value))

    assert same(decode(data), around(value))
    assert encode(decode(data)) == data


@pytest.mark.parametrize("around", AS_KEY.values(), ids=AS_KEY)
@pytest.mark.parametrize("value", HASHABLE, ids=name)
def test_every_hashable_type_can_be_a_key_or_an_item_of_a_set(value: Any, around: Callable[[Any], Any]) -> None:
    whole = around(value)

    assert same(decode(encode(whole)), whole)


def test_the_table_above_has_an_example_of_every_type_of_the_codec() -> None:
    shown = {type(value) for value in [*HASHABLE, *UNHASHABLE]}

    other_platforms = pathlib.PosixPath if type(Path()) is pathlib.WindowsPath else pathlib.WindowsPath
    missing = {cls.__name__ for cls in BY_TYPE if cls not in shown and cls.__module__ != "numpy"}
    assert missing == {"Pairs", other_platforms.__name__}
    assert all(-128 <= code < 128 for code in BY_CODE)


@given(values())
@settings(max_examples=25 * effort())
def test_any_value_comes_back_the_same_and_encodes_to_the_same_bytes_again(value: Any) -> None:
    data = encode(value)

    assert same(decode(data), value)
    assert encode(decode(data)) == data


@given(states())
def test_parts_decode_as_their_concatenation(state: dict[str, Any]) -> None:
    data = encode(state)
    at = len(data) // 3

    assert same(decode(data[:at], b"", data[at:]), state)


def test_equal_sets_encode_to_equal_bytes_whatever_their_order() -> None:
    up = set(range(0, 80_000, 8))
    down = set(range(79_992, -1, -8))

    assert encode(up) == encode(down)
    assert decode(encode(up)) == up


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    value = {3: 1, "a": 2, 1: 3}

    assert list(decode(encode(value))) == [3, "a", 1]


@pytest.mark.parametrize("code", [*BY_CODE, 64])
def test_bytes_and_text_that_look_like_our_markers_come_back_as_they_were(code: int) -> None:
    marker = bytes([0xC7, 3, code, 1, 2, 3])
    value = {"lc": 1, "__ext__": code, marker.decode("latin1"): marker, "b": [marker, {marker: (marker,)}]}

    assert same(decode(encode(value)), value)


def test_an_array_comes_back_writable_and_owning_its_memory() -> None:
    array = decode(encode(np.arange(3)))
    array[0] = 9
    array.resize(5, refcheck=False)

    assert array.tolist() == [9, 1, 2, 0, 0]


def test_fortran_order_is_kept() -> None:
    array = decode(encode(np.asfortranarray(np.ones((2, 3)))))

    assert array.flags.f_contiguous
    assert not array.flags.c_contiguous


def test_a_decimal_does_not_depend_on_the_callers_context() -> None:
    with localcontext(Context(prec=2, capitals=0)):
        data = encode(Decimal("1.23456E+50"))
        assert same(decode(data), Decimal("1.23456E+50"))

    assert data == encode(Decimal("1.23456E+50"))


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "No/Where", "", "UTC\x00", "a" * 65])
def test_a_time_zone_that_is_not_in_the_database_is_refused(key: str) -> None:
    raw = key.encode()

    with pytest.raises(DecodeError):
        decode(bytes([0xC7, len(raw), 21]) + raw)


def test_bytes_left_over_are_refused() -> None:
    for junk in (b"\x00", b"\xc0", encode(1) * 3, bytes(20_000)):
        with pytest.raises(DecodeError, match="extra bytes"):
            decode(encode([1]) + junk)


def test_a_path_of_the_other_platform_is_kept_and_can_be_read() -> None:
    """It cannot exist here, so it is an Opaque that is stored again unchanged."""
    code, pure = (24, PurePosixPath) if type(Path()) is pathlib.WindowsPath else (25, PureWindowsPath)
    data = ormsgpack.packb([ormsgpack.Ext(code, b"notes.txt")])
    (path,) = decode(data)

    assert type(path) is Opaque
    assert path.name == f"pathlib.{pure.__name__.removeprefix('Pure')}"
    assert same(path.value, pure("notes.txt"))
    assert encode([path]) == data


def test_a_loaded_container_keeps_its_behaviour() -> None:
    index, last, count = decode(encode([defaultdict(list), deque([1, 2], maxlen=2), Counter("aab")]))
    index["new"].append(1)
    last.append(3)

    assert index == {"new": [1]}
    assert list(last) == [2, 3]
    assert count.most_common(1) == [("a", 2)]
    assert count["missing"] == 0
