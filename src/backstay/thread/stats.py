"""Measuring: what a store takes, thread by thread and key by key, against what full copies would take."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay.errors import Corrupted
from backstay.model.damaged import Damaged
from backstay.pieces.manifest import SYSTEM_NAMES, Source
from backstay.pieces.piece import Range
from backstay.store.base import Backend, LaneKey
from backstay.thread.cursor import Context
from backstay.thread.damage import unread
from backstay.thread.load import open_tip
from backstay.thread.record import readable_id
from backstay.thread.removal import rows_of


@dataclass(frozen=True, slots=True)
class ThreadStats:
    """One thread's share. ``keys`` counts stored bytes of values by key; shared blobs count for every thread."""

    thread_id: str
    checkpoints: int
    branches: int
    stored_bytes: int
    full_copy_bytes: int  # what storing every state in full would take
    keys: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a store holds and what it takes."""

    total_bytes: int
    checkpoints: int
    full_copy_bytes: int
    threads: tuple[ThreadStats, ...]
    damaged: tuple[Damaged, ...] = ()  # checkpoints whose manifests cannot be read: they count, but not by key

    @property
    def ratio(self) -> float:
        """Return how many times smaller the store is than full copies would be."""
        return self.full_copy_bytes / self.total_bytes if self.total_bytes else 0.0


def stats(store: Backend, context: Context, thread: str | None) -> Stats:
    """Measure the store, thread by thread."""
    sizes = store.sizes()
    lanes = store.lanes(context.namespace, thread, None)
    names = list(dict.fromkeys(lane.key.thread for lane in lanes))
    found = []
    damaged = unread(store, context.namespace, thread)
    for name in names:
        mine = [lane.key for lane in lanes if lane.key.thread == name]
        found.append(_thread_stats(store, name, mine, dict(sizes.sources), damaged))
    return Stats(
        sizes.total,
        sum(item.checkpoints for item in found),
        sum(item.full_copy_bytes for item in found),
        tuple(found),
        tuple(damaged),
    )


def _thread_stats(
    store: Backend, name: str, lanes: list[LaneKey], sizes: dict[Source, int], damaged: list[Damaged]
) -> ThreadStats:
    keys: dict[str, set[Source]] = {}
    inline: dict[str, int] = {}
    count = full = own = 0
    for lane in lanes:
        for row in rows_of(store, lane, payload=True):
            count += 1
            full += row.size
            own += len(row.manifest) + len(row.notes)
            try:
                tip = open_tip(store, row, {})
            except Corrupted as error:
                damaged.append(Damaged(thread_id=name, id=readable_id(row), seq=row.seq, error=error))
                continue
            for key, live in tip.lives.items():
                shown = key if isinstance(key, str) else f"({SYSTEM_NAMES.get(key, key)})"
                sources = {piece.source for piece in live.pieces if isinstance(piece, Range)}
                keys.setdefault(shown, set()).update(sources)
                inline[shown] = inline.get(shown, 0) + len(live.entry.body or b"")
    by_key = {key: sum(sizes.get(s, 0) for s in found) + inline.get(key, 0) for key, found in keys.items()}
    stored = own + sum(sizes.get(source, 0) for source in set().union(*keys.values()))
    return ThreadStats(name, count, len(lanes), stored, full, by_key)
