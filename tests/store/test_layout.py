"""Stored bodies check themselves: a changed bit is found where the row is read, even if only a part of a value is."""

from __future__ import annotations

import random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import DecodeError
from backstay.store.layout import COMPRESS_BYTES_MIN, is_compressed, joined, pack_body, patched, unpack_body
from backstay.store.postgres.rows import split_fresh

TEXT: Final = random.Random(7).choices([b"checkpoint ", b"thread ", b"branch "], k=100)
BODIES: Final = {"few bytes": b"abc", "no bytes": b"", "text": b"".join(TEXT), "noise": random.Random(7).randbytes(700)}


@given(st.binary(max_size=2000), st.sampled_from([0, COMPRESS_BYTES_MIN, 5000]))
def test_a_body_gives_the_bytes_back(data: bytes, least: int) -> None:
    assert unpack_body(len(data), pack_body(data, least)) == data


@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES)
def test_no_flipped_bit_gives_other_bytes(data: bytes) -> None:
    body = pack_body(data)
    assert is_compressed(len(data), body) == (data == BODIES["text"])
    refused = 0
    for bit in range(8 * len(body)):
        changed = bytearray(body)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert unpack_body(len(data), bytes(changed)) == data  # a bit of a frame that says nothing about the bytes
        except DecodeError:
            refused += 1
    assert refused > 8 * len(body) - 16
    assert joined([(0, len(data), body), (len(data), len(data), bytes(changed))]) is None


def test_a_repaired_row_is_whole_again_or_still_known_to_be_damaged() -> None:
    data = BODIES["noise"]
    body = pack_body(data)
    spoiled = bytearray(body)
    spoiled[100] ^= 1
    for start, end, is_whole in ((0, 700, True), (50, 200, True), (101, 700, False), (0, 100, False)):
        patch = patched([(1000, len(data), bytes(spoiled))], 1000 + start, data[start:end])
        assert (patch.drop, patch.add) == ([], [])
        [(number, healed)] = patch.change
        assert number == 0
        if is_whole:
            assert healed == body
        else:
            with pytest.raises(DecodeError, match="checksum"):
                unpack_body(len(data), healed)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), st.integers(0, 10**6))
def test_every_part_of_a_row_of_several_saves_is_checked(parts: list[bytes], at: int) -> None:
    body = b"".join(parts)
    checks = b"".join(len(part).to_bytes(4) + pack_body(part)[-4:] for part in parts)
    assert joined(split_fresh(0, body, checks)) == body
    both = bytearray(body + checks)
    both[at % len(both)] ^= 1 << at % 7
    assert joined(split_fresh(0, bytes(both[: len(body)]), bytes(both[len(body) :]))) is None
