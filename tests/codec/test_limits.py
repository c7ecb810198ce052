from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import ormsgpack
import pytest

from backstay.codec import decode, encode, msgpack
from backstay.codec.msgpack import deeper_than
from backstay.errors import DecodeError, EncodeError


def lists(depth: int, inner: Any = None) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


def tuples(depth: int, inner: Any = None) -> Any:
    for _ in range(depth):
        inner = (inner,)
    return inner


def ext(code: int, payload: bytes) -> bytes:
    return ormsgpack.packb(ormsgpack.Ext(code, payload))


def nested_ext(depth: int, around: bytes = b"\x91", inner: bytes = b"\xc0") -> bytes:
    for _ in range(depth):
        inner = ext(1, around + inner)
    return inner


@pytest.mark.parametrize("filler", [b"", b"x" * 20_000], ids=["small", "large"])
def test_lists_nest_to_the_limit_and_no_further_on_both_sides(filler: bytes) -> None:
    inner = filler.decode()

    assert decode(encode(lists(msgpack.DEPTH_MAX, inner))) == lists(msgpack.DEPTH_MAX, inner)
    with pytest.raises(EncodeError, match="nested too deep"):
        encode(lists(msgpack.DEPTH_MAX + 1, inner))
    with pytest.raises(DecodeError):
        decode(b"\x91" * (msgpack.DEPTH_MAX + 1) + encode(inner))


def test_dicts_nest_to_the_limit_and_no_further_on_both_sides() -> None:
    data = b"\x81\xa1k" * msgpack.DEPTH_MAX + b"\xc0"

    assert encode(decode(data)) == data
    with pytest.raises(DecodeError):
        decode(b"\x81\xa1k" + data)
    with pytest.raises(EncodeError, match="nested too deep"):
        encode({"k": decode(data)})


def test_tuples_nest_to_the_limit_and_no_further_on_both_sides() -> None:
    data = nested_ext(msgpack.EXT_DEPTH_MAX)

    assert encode(tuples(msgpack.EXT_DEPTH_MAX)) == data
    assert decode(data) == tuples(msgpack.EXT_DEPTH_MAX)
    with pytest.raises(EncodeError, match="nested too deep"):
        encode(tuples(msgpack.EXT_DEPTH_MAX + 1))
    with pytest.raises(DecodeError, match="nested deeper"):
        decode(nested_ext(msgpack.EXT_DEPTH_MAX + 1))


NESTED: dict[int, Callable[[Any], Any]] = {
    11: lambda inner: OrderedDict({0: inner}),
    12: lambda inner: defaultdict(None, {0: inner}),
    13: lambda inner: Counter({0: inner}),
    14: lambda inner: deque([inner]),
}


@pytest.mark.parametrize("code", NESTED)
def test_other_containers_nest_to_the_limit_and_no_further_on_both_sides(code: int) -> None:
    around = NESTED[code]
    deepest: Any = None
    for _ in range(msgpack.EXT_DEPTH_MAX):
        deepest = around(deepest)
    inside = msgpack.EXT_INNER_DEPTH_MAX - 1  # the container's own array is the first

    assert encode(decode(encode(deepest))) == encode(deepest)
    assert decode(encode(around(lists(inside)))) == around(lists(inside))
    for too_deep in (around(deepest), around(lists(inside + 1))):
        with pytest.raises(EncodeError, match="nested too deep"):
            encode(too_deep)
    for first in (b"\x92\x00", b"\x93\xc0\x00"):
        with pytest.raises(DecodeError):
            decode(ext(code, first + encode(deepest)))
        with pytest.raises(DecodeError):
            decode(ext(code, first + encode(lists(inside + 1))))


@pytest.mark.parametrize("filler", ["", "中" * 300, "\U0001f600" * 9000], ids=["short", "text", "long"])
def test_lists_inside_a_tuple_nest_to_the_limit_and_no_further_on_both_sides(filler: str) -> None:
    inside = msgpack.EXT_INNER_DEPTH_MAX - 1  # the tuple's own array is the first

    assert decode(encode((lists(inside, filler),))) == (lists(inside, filler),)
    with pytest.raises(EncodeError, match="nested too deep"):
        encode((lists(inside + 1, filler),))
    with pytest.raises(DecodeError, match="nested deeper"):
        decode(ext(1, b"\x91" * (inside + 2) + encode(filler)))


def test_many_containers_beside_each_other_are_not_deep() -> None:
    value: Any = ([{"a": [index]} for index in range(1000)], {1: [[]] * 1000})

    assert decode(encode(value)) == value


def test_a_value_at_every_depth_limit_at_once_decodes_on_a_threads_stack() -> None:
    value: Any = 0
    for _ in range(msgpack.EXT_DEPTH_MAX):
        value = (lists(msgpack.EXT_INNER_DEPTH_MAX - 1, value),)
    value = lists(msgpack.DEPTH_MAX, value)
    done: list[bytes] = []
    thread = threading.Thread(target=lambda: done.append(encode(decode(encode(value)))))
    thread.start()
    thread.join()

    assert done == [encode(value)]


@pytest.mark.parametrize("depth", [201, 256, 1100, 200_000])
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa0", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\xa0"])
def test_hostile_nesting_is_refused_or_read_but_never_crashes(head: bytes, depth: int) -> None:
    for data in (head * depth + b"\xc0", ext(1, head * depth + b"\xc0"), nested_ext(64, head * depth)):
        try:
            value = decode(data)
        except DecodeError:
            continue
        assert encode(value) is not None


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"]
)
def test_a_count_of_four_thousand_million_with_nothing_behind_it_is_refused(head: bytes) -> None:
    for data in (head, ext(1, head), head * 100, ext(2, head * 100)):
        with pytest.raises(DecodeError):
            decode(data)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_int_has_at_most_so_many_bits_on_both_sides(sign: int) -> None:
    largest = sign * (2**msgpack.INT_BITS_MAX - 1)

    assert decode(encode(largest)) == largest
    with pytest.raises(EncodeError, match="bits"):
        encode(2 * largest)
    with pytest.raises(DecodeError):
        decode(ext(5, (2 * largest).to_bytes(msgpack.INT_BITS_MAX // 8 + 1, signed=True)))


def test_a_decimal_has_at_most_so_many_characters_on_both_sides() -> None:
    largest = Decimal("1" * msgpack.DECIMAL_CHARS_MAX)

    assert decode(encode(largest)) == largest
    with pytest.raises(EncodeError, match="characters"):
        encode(Decimal("1" * (msgpack.DECIMAL_CHARS_MAX + 1)))
    with pytest.raises(DecodeError, match="characters"):
        decode(ext(6, b"1" * (msgpack.DECIMAL_CHARS_MAX + 1)))


def test_an_array_has_at_most_so_many_dimensions_on_both_sides() -> None:
    largest = np.zeros((1,) * msgpack.ARRAY_DIMS_MAX, dtype="u1")

    assert decode(encode(largest)).shape == largest.shape
    with pytest.raises(DecodeError, match="layout"):
        decode(ext(32, ormsgpack.packb(["|u1", [1] * (msgpack.ARRAY_DIMS_MAX + 1), "C", b"\x00"])))
    if int(np.__version__.split(".")[0]) >= 2:  # the first to allow more
        with pytest.raises(EncodeError, match="dimensions"):
            encode(largest.reshape((1,) * (msgpack.ARRAY_DIMS_MAX + 1)))


def test_a_value_has_at_most_so_many_bytes_on_both_sides() -> None:
    head = 5
    largest = bytes(msgpack.VALUE_BYTES_MAX - head)
    data = encode(largest)

    assert len(data) == msgpack.VALUE_BYTES_MAX
    assert decode(data) == largest
    with pytest.raises(DecodeError, match="more than"):
        decode(data, b"\x00")
    with pytest.raises(EncodeError, match="more than"):
        encode(largest + b"\x00")


@pytest.mark.parametrize("limit", [1, 32, 255])
@pytest.mark.parametrize("noise", [b"", b"\xa0" * 400, b"\xc4\xff" + b"\x91" * 255, b"\xcb" + b"\x91" * 8])
def test_depth_is_judged_the_same_by_scan_and_by_decoder(limit: int, noise: bytes) -> None:
    count = 1 if noise[:1] in (b"\xc4", b"\xcb") else len(noise)
    head = b"\xdc" + (count + 1).to_bytes(2)
    at_limit = head + noise + b"\x91" * (limit - 1) + b"\xc0"
    beyond = head + noise + b"\x91" * limit + b"\xc0"

    assert not deeper_than(at_limit, limit)
    assert deeper_than(beyond, limit)
