"""Statistics: how many bytes a store takes, by thread and key, compared with full copies of every state."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay.errors import Corrupted
from backstay.operations.cursor import Services
from backstay.operations.listing import unreadable
from backstay.operations.load import open_head_state
from backstay.operations.retention import rows_of
from backstay.operations.rows import Damaged, readable_id
from backstay.pieces.manifest import SYSTEM_NAMES, Range, Source
from backstay.store.base import Backend, Branch


@dataclass(frozen=True, slots=True)
class ThreadStats:
    """The share of one thread. ``keys`` counts stored bytes by key; a shared blob counts for every thread."""

    thread_id: str
    checkpoints: int
    branches: int
    stored_bytes: int
    full_copy_bytes: int  # the size of full copies of all states
    keys: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stats:
    """The content of a store in numbers, and how many bytes it takes."""

    total_bytes: int
    checkpoints: int
    full_copy_bytes: int
    threads: tuple[ThreadStats, ...]
    damaged: tuple[Damaged, ...] = ()  # checkpoints with unreadable manifests: counted, but not by key

    @property
    def ratio(self) -> float:
        """Return how many times smaller the store is than full copies would be."""
        return self.full_copy_bytes / self.total_bytes if self.total_bytes else 0.0


def stats(store: Backend, services: Services, thread: str | None) -> Stats:
    """Measure a store, or one thread of it."""
    sizes = store.sizes()
    damaged = unreadable(store, services.namespace, thread)
    branches: dict[str, list[Branch]] = {}
    for branch in store.branches(services.namespace, thread, None):
        branches.setdefault(branch.key.thread, []).append(branch)
    threads = []
    for name, own in branches.items():
        sources: dict[str, set[Source]] = {}
        inline: dict[str, int] = {}
        count = full = described = 0
        for row in (row for branch in own for row in rows_of(store, branch.key, payload=True)):
            count += 1
            full += row.size
            described += len(row.manifest) + len(row.notes)
            try:
                state = open_head_state(store, row, {})
            except Corrupted as error:
                damaged.append(Damaged(thread_id=name, id=readable_id(row), seq=row.seq, error=error))
                continue
            for key, value in state.values.items():
                shown = key if isinstance(key, str) else f"({SYSTEM_NAMES.get(key, key)})"
                of_value = {piece.source for piece in value.pieces if isinstance(piece, Range)}
                sources.setdefault(shown, set()).update(of_value)
                inline[shown] = inline.get(shown, 0) + len(value.entry.body or b"")
        keys = {key: sum(sizes.sources.get(s, 0) for s in of) + inline.get(key, 0) for key, of in sources.items()}
        stored = described + sum(sizes.sources.get(source, 0) for source in set().union(*sources.values()))
        threads.append(ThreadStats(name, count, len(own), stored, full, keys))
    checkpoints, full_copies = sum(each.checkpoints for each in threads), sum(each.full_copy_bytes for each in threads)
    return Stats(sizes.total, checkpoints, full_copies, tuple(threads), tuple(damaged))
