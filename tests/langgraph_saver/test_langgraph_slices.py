"""Slices of msgpack and JSON: each is what a decoder would have read there, and damage is a ``DecodeError``."""

from __future__ import annotations

import json
import random
from typing import Any

import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from backstay.errors import DecodeError
from backstay.langgraph.importer import slices
from backstay.langgraph.importer.tables import SourceRef, checked, split
from support.running import Show

EXTENSIONS = st.builds(ormsgpack.Ext, st.integers(0, 127), st.binary(max_size=40))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
KEYS = st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1)
VALUES = st.recursive(
    SCALARS | EXTENSIONS,
    lambda inner: st.lists(inner, max_size=18) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


def packed(value: Any) -> bytes:
    return ormsgpack.packb(value, option=ormsgpack.OPT_NON_STR_KEYS)


@given(VALUES, st.binary(max_size=5))
def test_a_value_ends_where_the_encoder_ended_it(value: Any, rest: bytes) -> None:
    data = packed(value)

    assert slices.end_of(data + rest) == len(data)
    assert slices.end_of(rest + data, len(rest)) == len(rest) + len(data)


@given(st.dictionaries(st.text(max_size=40), VALUES, max_size=3))
def test_slices_of_a_map_are_the_values_encoded_alone(values: dict[str, Any]) -> None:
    assert dict(slices.msgpack_items(packed(values))) == {name: packed(value) for name, value in values.items()}


@given(VALUES)
def test_no_shorter_bytes_are_a_value(value: Any) -> None:
    data = packed(value)

    for size in range(len(data)):
        with pytest.raises(DecodeError):
            slices.end_of(data[:size])


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_an_array_of_encoded_values_is_the_list_encoded(count: int) -> None:
    assert slices.array_of([packed(7)] * count) == packed([7] * count)
    assert slices.end_of(packed([7] * count)) == len(packed([7] * count))


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 65_535, 65_536])
def test_every_length_of_text_bytes_and_extensions_is_understood(size: int) -> None:
    for value in ("x" * size, b"x" * size, ormsgpack.Ext(5, b"x" * size)):
        data = packed(value)

        assert slices.end_of(data) == len(data)
    assert slices.binary_in(packed(b"x" * size)) == b"x" * size
    assert slices.binary_in(packed("x" * size)) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "missing"),
        (b"\xc1", "does not start a value"),
        (b"\xa2x", "is cut off"),
        (b"\xa2\xff\xff", "not UTF-8"),
        (b"\xdd\xff\xff\xff\xff\x01", "more values than there are bytes"),
        (b"\xdf\xff\xff\xff\xff\x01", "more values than there are bytes"),
        (b"\xc9\xff\xff\xff\xff\x05", "is cut off"),
        (b"\x91" * 200_000 + b"\x01", "nested more than"),
        (b"\x91" * slices.DEPTH_MAX + b"\x01", "nested more than"),
    ],
)
def test_damage_is_named(data: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        slices.end_of(data)


def test_what_is_just_deep_enough_is_read() -> None:
    data = b"\x91" * (slices.DEPTH_MAX - 2) + b"\x01"

    assert slices.end_of(data) == len(data)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x90", b"\x81\x01\x02", b"\x81\xa1x\x01\x00", b"\x81\x90\x01"])
def test_only_a_map_with_names_has_items(data: bytes) -> None:
    with pytest.raises(DecodeError):
        list(slices.msgpack_items(data))


def test_plain_data_holds_no_extension() -> None:
    with pytest.raises(DecodeError):
        slices.plain_msgpack(packed([ormsgpack.Ext(2, packed(["os", "system", {}]))]))


@given(st.dictionaries(st.text(max_size=20), PLAIN, max_size=6), st.sampled_from([None, 2]))
def test_slices_of_an_object_are_its_own_text(values: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(values, indent=indent).encode()

    found = dict(slices.json_items(text))

    assert {name: json.loads(part) for name, part in found.items()} == values
    assert slices.plain_json(text) == values
    assert all(part in text for part in found.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{}x",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        '{"a":1 "b":2}',
        "{1:2}",
        '{"a":' + "[" * 100_000,
        "\ufeff{}",
    ],
)
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(DecodeError):
        list(slices.json_items(text.encode()))
    with pytest.raises(DecodeError):
        list(slices.json_items(text.encode("utf-16")))


def whole_checkpoint() -> dict[str, Any]:
    return {
        "v": 4,
        "id": "1f0",
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": {"messages": [HumanMessage("hello", id="m")], "count": 3, "nothing": None, "raw": b"\0"},
        "channel_versions": {"messages": "1.5", "count": 2},
        "versions_seen": {"node": {"messages": "1.5"}},
        "updated_channels": ["messages"],
    }


def test_mutated_checkpoints_give_slices_or_a_decode_error(show: Show) -> None:
    """Bytes are flipped, changed, cut out and doubled; whatever comes of it, nothing else is raised."""
    _, good = JsonPlusSerializer().dumps_typed(whole_checkpoint())
    dice, spot, read = random.Random(20260101), SourceRef("", "1f0", None), 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(data))
            match dice.randrange(4):
                case 0:
                    data[at] ^= 1 << dice.randrange(8)
                case 1:
                    data[at] = dice.randrange(256)
                case 2:
                    del data[at : at + dice.randint(1, 8)]
                case 3:
                    data[at:at] = data[at : at + dice.randint(1, 8)]
        try:
            found = split("msgpack", bytes(data), spot)
        except DecodeError:
            continue
        read += 1
        assert checked(found, spot)["id"] == "1f0"
        assert all(type(value.data) is bytes for value in found["channel_values"].values())

    show("mutated checkpoints that are still one", f"{read} of 1000")
    assert 0 < read < 1000
