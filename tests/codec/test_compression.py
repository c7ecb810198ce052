from __future__ import annotations

import os
import sys
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.codec import compress, decompress
from backstay.errors import DecodeError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


@given(st.binary())
def test_data_comes_back_the_same(data: bytes) -> None:
    assert decompress(compress(data), len(data)) == data


@pytest.mark.parametrize("size", [0, 1, 65_536, 1_000_000])
def test_every_size_comes_back_the_same(size: int) -> None:
    for data in (bytes(size), os.urandom(size)):
        assert decompress(compress(data), size) == data


@pytest.mark.parametrize("wrong", [0, 1, 99, 101, 10_000])
def test_another_size_than_recorded_is_refused(wrong: int) -> None:
    with pytest.raises(DecodeError, match="does not hold"):
        decompress(compress(b"x" * 100), wrong)


def test_a_bomb_is_refused_without_allocating_what_it_holds() -> None:
    bomb = zstd.compress(bytes(256 * 1024 * 1024), level=19)
    assert len(bomb) < 32 * 1024
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decompress(bomb, 65_536)
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_damaged_cut_or_extended_frames_are_refused() -> None:
    plain = os.urandom(500) * 2
    good = compress(plain)
    bad = [
        b"",
        b"junk",
        good[:-1],
        good + b"\x00",
        good + good,
        good[4:],
        *(good[:cut] for cut in range(0, len(good), 7)),
    ]

    for data in bad:
        with pytest.raises(DecodeError):
            decompress(data, len(plain))


def test_threads_do_not_share_a_compressor() -> None:
    failed: list[int] = []

    def work(seed: int) -> None:
        block = bytes([seed]) * 60_000 + os.urandom(100)
        if any(decompress(compress(block), len(block)) != block for _ in range(100)):
            failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
