"""The difference of two byte strings: the runs to copy from the old one and the bytes that are new.

``patch(old, splice(old, new)) == new`` holds for any two byte strings. The search for common runs is bounded: common
prefix and suffix by binary search over ``memcmp``, then a limited number of anchors (short samples of the old bytes,
found in the new ones with ``bytes.find``). Runs under ``RUN_BYTES_MIN`` cost more as an address and count as new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

RUN_BYTES_MIN = 256
ANCHOR_BYTES = 48
ANCHOR_OFFSETS = (0, 8, 64, 512, 4096)
ANCHOR_SPREAD = 12
"""In addition to the fixed offsets, this many samples are spread evenly over the old bytes."""

SEARCHES_MAX = 96
"""``bytes.find`` calls per comparison: bounds the cost of two byte strings that have nothing in common."""


class Copy(NamedTuple):
    """``length`` bytes of the old value from ``start`` on."""

    start: int
    length: int


Edit = Copy | bytes


def patch(old: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the new bytes."""
    return b"".join(old[e.start : e.start + e.length] if isinstance(e, Copy) else e for e in edits)


def splice(old: bytes, new: bytes) -> list[Edit]:
    """Return edits that turn ``old`` into ``new``."""
    searches = iter(range(SEARCHES_MAX))
    return list(_between(_Slice(old, 0, len(old)), _Slice(new, 0, len(new)), searches))


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the length of the longest common prefix; cost is a few copies of the shorter one, all in C."""
    shorter, longer = (a, b) if len(a) <= len(b) else (b, a)
    if longer.startswith(shorter):
        return len(shorter)
    low, high = 0, len(shorter)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def common_suffix(a: bytes, b: bytes) -> int:
    """Return the length of the longest common suffix."""
    shorter, longer = (a, b) if len(a) <= len(b) else (b, a)
    if longer.endswith(shorter):
        return len(shorter)
    low, high = 0, len(shorter)
    end_a, end_b = len(a), len(b)
    while high - low > 1:
        middle = (low + high) // 2
        if a[end_a - middle : end_a - low] == b[end_b - middle : end_b - low]:
            low = middle
        else:
            high = middle
    return low


class _Slice(NamedTuple):
    data: bytes
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def bytes(self) -> bytes:
        return self.data[self.start : self.end]


def _between(old: _Slice, new: _Slice, searches: Iterator[int]) -> Iterator[Edit]:
    """Yield edits for one window: what both ends share, then what an anchor finds in the middle, else new bytes."""
    old_bytes, new_bytes = old.bytes(), new.bytes()
    prefix = common_prefix(old_bytes, new_bytes)
    if prefix < RUN_BYTES_MIN and prefix < new.size:
        prefix = 0
    suffix = common_suffix(old_bytes[prefix:], new_bytes[prefix:])
    if suffix < RUN_BYTES_MIN:
        suffix = 0
    if prefix:
        yield Copy(old.start, prefix)
    old_rest = _Slice(old.data, old.start + prefix, old.end - suffix)
    new_rest = _Slice(new.data, new.start + prefix, new.end - suffix)
    match = _anchor(old_rest, new_rest, searches)
    if match is not None:
        old_at, new_at, length = match
        yield from _between(old_rest._replace(end=old_at), new_rest._replace(end=new_at), searches)
        yield Copy(old_at, length)
        rest = old_rest._replace(start=old_at + length), new_rest._replace(start=new_at + length)
        yield from _between(*rest, searches)
    elif new_rest.size:
        yield new_rest.bytes()
    if suffix:
        yield Copy(old.end - suffix, suffix)


def _anchor(old: _Slice, new: _Slice, searches: Iterator[int]) -> tuple[int, int, int] | None:
    """Return (old position, new position, length) of a common run found through a sample, or None."""
    if new.size < RUN_BYTES_MIN or old.size < RUN_BYTES_MIN:
        return None
    step = max(old.size // ANCHOR_SPREAD, ANCHOR_BYTES)
    for offset in (*ANCHOR_OFFSETS, *range(step, old.size, step)):
        at = old.start + offset
        if at + ANCHOR_BYTES > old.end:
            continue
        if next(searches, None) is None:
            return None
        found = new.data.find(old.data[at : at + ANCHOR_BYTES], new.start, new.end)
        if found < 0:
            continue
        before = common_suffix(old.data[old.start : at], new.data[new.start : found])
        length = before + common_prefix(old.data[at : old.end], new.data[found : new.end])
        if length >= RUN_BYTES_MIN:
            return at - before, found - before, length
    return None
