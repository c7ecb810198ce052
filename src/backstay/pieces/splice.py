"""What changed between two byte strings: the runs to copy from the old one and the bytes that are new.

Law: ``patch(old, splice(old, new)) == new`` for any two byte strings. How small the result is is a matter of effort,
which is bounded: common prefix and suffix by binary search over ``memcmp``, then a limited number of anchors (short
samples of the old bytes looked up in the new ones with ``bytes.find``). Runs under ``RUN_BYTES_MIN`` are not worth an
address and count as new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

RUN_BYTES_MIN = 256
ANCHOR_BYTES = 48
ANCHOR_OFFSETS = (0, 8, 64, 512, 4096)
ANCHOR_SPREAD = 12
"""Besides the fixed offsets, this many samples spread evenly over the old bytes."""

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
    """Return edits that make ``new`` of ``old``."""
    budget = _Budget(SEARCHES_MAX)
    return list(_between(_Window(old, 0, len(old)), _Window(new, 0, len(new)), budget))


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


class _Budget:
    def __init__(self, searches: int) -> None:
        self.searches = searches

    def spend(self) -> bool:
        self.searches -= 1
        return self.searches >= 0


class _Window(NamedTuple):
    data: bytes
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def bytes(self) -> bytes:
        return self.data[self.start : self.end]


def _between(old: _Window, new: _Window, budget: _Budget) -> Iterator[Edit]:
    """Edits for one window: what both ends share, then what an anchor finds in the middle, else new bytes."""
    old_bytes, new_bytes = old.bytes(), new.bytes()
    prefix = common_prefix(old_bytes, new_bytes)
    if prefix < RUN_BYTES_MIN and prefix < new.size:
        prefix = 0
    suffix = common_suffix(old_bytes[prefix:], new_bytes[prefix:])
    if suffix < RUN_BYTES_MIN:
        suffix = 0
    if prefix:
        yield Copy(old.start, prefix)
    yield from _middle(
        _Window(old.data, old.start + prefix, old.end - suffix),
        _Window(new.data, new.start + prefix, new.end - suffix),
        budget,
    )
    if suffix:
        yield Copy(old.end - suffix, suffix)


def _middle(old: _Window, new: _Window, budget: _Budget) -> Iterator[Edit]:
    if new.size < RUN_BYTES_MIN or old.size < RUN_BYTES_MIN:
        if new.size:
            yield new.bytes()
        return
    match = _anchor(old, new, budget)
    if match is None:
        yield new.bytes()
        return
    old_at, new_at, length = match
    yield from _between(_Window(old.data, old.start, old_at), _Window(new.data, new.start, new_at), budget)
    yield Copy(old_at, length)
    yield from _between(
        _Window(old.data, old_at + length, old.end), _Window(new.data, new_at + length, new.end), budget
    )


def _anchor(old: _Window, new: _Window, budget: _Budget) -> tuple[int, int, int] | None:
    """Return (old position, new position, length) of a common run found through a sample, or None."""
    step = max(old.size // ANCHOR_SPREAD, ANCHOR_BYTES)
    for offset in (*ANCHOR_OFFSETS, *range(step, old.size, step)):
        at = old.start + offset
        if at + ANCHOR_BYTES > old.end:
            continue
        if not budget.spend():
            return None
        found = new.data.find(old.data[at : at + ANCHOR_BYTES], new.start, new.end)
        if found < 0:
            continue
        before = common_suffix(old.data[old.start : at], new.data[new.start : found])
        length = before + common_prefix(old.data[at : old.end], new.data[found : new.end])
        if length >= RUN_BYTES_MIN:
            return at - before, found - before, length
    return None
