"""Putting bytes back into rows of a stream that are there already, damaged or not. Bytes only, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backstay.errors import BackstayError
from backstay.store.layout import Chunk, unpack_body


class Patch(NamedTuple):
    """What becomes of the rows, which are named by their place among those given. All bytes are uncompressed."""

    drop: list[int]  # those that cannot be unpacked any more
    change: list[tuple[int, bytes]]  # those that get other bytes, as many as before
    add: list[tuple[int, bytes]]  # new ones, by their address


def patched(rows: Sequence[Chunk], start: int, data: bytes) -> Patch:
    """Return what makes the bytes from the address ``start`` on these; ``rows`` are all that may touch them, in order.

    A row that can be unpacked keeps its place and its other bytes. What no row is left for becomes rows of its own.
    """
    patch = Patch([], [], [])
    position, end = start, start + len(data)
    for number, (address, size, body) in enumerate(rows):
        if address >= end or address + size <= start:
            continue
        whole = _unpacked(size, body)
        if whole is None:
            patch.drop.append(number)
            continue
        if position < address:
            patch.add.append((position, data[position - start : address - start]))
        low, high = max(start, address), min(end, address + size)
        changed = whole[: low - address] + data[low - start : high - start] + whole[high - address :]
        if changed != whole:
            patch.change.append((number, changed))
        position = max(position, high)
    if position < end:
        patch.add.append((position, data[position - start :]))
    return patch


def _unpacked(size: int, body: bytes) -> bytes | None:
    try:
        whole = unpack_body(size, body)
    except BackstayError:
        return None
    return whole if len(whole) == size else None
