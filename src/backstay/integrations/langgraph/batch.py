"""Checkpoints of a list, read together: what they have in common is fetched, checked and decoded once.

From step to step most values stay and lists grow at their end. So of each key only the longest value of the batch is
fetched; those that are the same, or a beginning of it, are found by their digests, which one pass over the bytes gives
for every length. A flat list or dictionary is decoded once, at its longest; each checkpoint has a list or dictionary of
its own, whose elements are the same objects: texts, numbers, and LangChain's messages. Anything that is nested deeper
is decoded for each checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from backstay.integrations.langgraph.messages import MESSAGE_CLASSES
from backstay.integrations.langgraph.sealed import SEALED_LIST
from backstay.integrations.langgraph.values import LIST, MAP
from backstay.pieces.manifest import Key
from backstay.pieces.piece import Range
from backstay.pieces.tip import Live, Tip
from backstay.store.base import Backend, Row
from backstay.thread.load import fill, open_tip

Decode = Callable[[Live], Any]
_SHARED = frozenset({str, int, float, bool, bytes, type(None), *MESSAGE_CLASSES})
_UNKNOWN = object()
COUNTED = frozenset({LIST, MAP, SEALED_LIST})
"""The kinds of values that have a count of elements, so that it is known how many a beginning of them has."""


@dataclass(slots=True)
class Batch:
    """Some rows with the bytes of all their values at hand."""

    rows: list[tuple[Row, Tip]] = field(default_factory=list)
    _longest: dict[int, Live] = field(default_factory=dict)  # by id() of a value: the one of which it is a beginning
    _decoded: dict[int, Any] = field(default_factory=dict)  # by id() of a longest one, if its elements may be shared

    @classmethod
    def load(cls, store: Backend, rows: Sequence[Row]) -> Batch:
        """Bring the bytes of all values of these rows into memory, checked against their digests."""
        batch = cls()
        by_key: dict[Key, list[Live]] = {}
        for row in rows:
            tip = open_tip(store, row, {})
            batch.rows.append((row, tip))
            for key, live in tip.lives.items():
                if live.parts is None:
                    by_key.setdefault(key, []).append(live)
        if len(rows) > 1:
            groups = [lives for lives in by_key.values() if len(lives) > 1]
            longest = [max(lives, key=lambda live: live.entry.size) for lives in groups]
            _fetch(store, longest)
            for top, lives in zip(longest, groups, strict=True):
                batch._share(top, lives)
        for row, tip in batch.rows:
            fill(store, tip, list(tip.lives), row)
        return batch

    def value(self, live: Live, decode: Decode) -> Any:
        """Return a value: decoded, or copied from what was decoded already."""
        top = self._longest.get(id(live))
        if top is None:
            return decode(live)
        known = self._decoded.get(id(top), _UNKNOWN)
        if known is _UNKNOWN:
            value = decode(top)
            known = self._decoded[id(top)] = value if _is_flat(value) else None
        # Only some kinds tell how many elements a beginning has.
        count = len(known) if live.entry.digest == top.entry.digest and known is not None else live.entry.count
        if known is None or (count != len(known) and live.entry.kind not in COUNTED):
            return decode(live)
        return known[:count] if type(known) is list else dict(islice(known.items(), count))

    def _share(self, top: Live, lives: list[Live]) -> None:
        """Give values that are a beginning of the longest one its bytes."""
        data = top.data()
        digests = _digests(data, {live.entry.size for live in lives})
        if digests[top.entry.size] != top.entry.digest:
            top.parts = None  # damaged, or deleted meanwhile: it is read on its own, and named if it is wrong
            return
        view = memoryview(data)
        for live in lives:
            if live.entry.kind == top.entry.kind and live.entry.digest == digests[live.entry.size]:
                live.parts = [cast(bytes, view[: live.entry.size])]  # not a copy: mostly nobody looks at it
                self._longest[id(live)] = top


def _fetch(store: Backend, lives: Sequence[Live]) -> None:
    ranges = [piece for live in lives for piece in live.pieces if isinstance(piece, Range)]
    found = iter(store.fetch(ranges))
    for live in lives:
        live.parts = [part for piece in live.pieces for part in (next(found) if isinstance(piece, Range) else (piece,))]


def _is_flat(value: Any) -> bool:
    """Tell whether copies of a container may share its elements."""
    if type(value) is dict:
        return all(type(each) in _SHARED for each in value.values())
    return type(value) is list and all(type(each) in _SHARED for each in value)


def _digests(data: bytes, sizes: set[int]) -> dict[int, bytes]:
    """Return the digests of the beginnings of these lengths."""
    view, hasher, done = memoryview(data), hashlib.sha256(), 0
    digests = {}
    for size in sorted(sizes):
        hasher.update(view[done:size])
        digests[size] = hasher.copy().digest()
        done = size
    return digests
