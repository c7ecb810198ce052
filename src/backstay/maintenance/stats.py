"""Statistics: how many bytes a store or a thread takes, compared with full copies of every state."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay.errors import Corrupted
from backstay.operations.cursor import Services
from backstay.operations.listing import every_branch, unreadable
from backstay.operations.load import open_head_state
from backstay.operations.retention import rows_of
from backstay.operations.rows import Damaged, readable_id
from backstay.pieces.manifest import SYSTEM_NAMES, Range, Source
from backstay.store.base import Backend


@dataclass(frozen=True, slots=True)
class Stats:
    """The content of a store in numbers. ``total_bytes`` counts all namespaces, everything else this one."""

    total_bytes: int
    threads: int
    branches: int
    checkpoints: int
    full_copy_bytes: int  # the size of full copies of all states
    damaged: tuple[Damaged, ...] = ()  # parts of the store that cannot be read, whose checkpoints are not counted

    @property
    def ratio(self) -> float:
        """Return how many times smaller the store is than full copies would be."""
        return self.full_copy_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ThreadStats:
    """The content of one thread in numbers. A value that other threads share counts in full for each of them."""

    thread_id: str
    branches: int
    checkpoints: int
    stored_bytes: int
    full_copy_bytes: int
    keys: dict[str, int] = field(default_factory=dict)  # stored bytes by key
    damaged: tuple[Damaged, ...] = ()  # checkpoints that cannot be read: counted, but not by key


def stats(store: Backend, services: Services) -> Stats:
    """Measure a store, without reading its states."""
    namespace = services.namespace
    return Stats(store.sizes(()).total, *store.totals(namespace), tuple(unreadable(store, namespace, None)))


def thread_stats(store: Backend, services: Services, thread: str) -> ThreadStats:
    """Measure a thread, by reading every manifest."""
    damaged = unreadable(store, services.namespace, thread)
    sources: dict[str, set[Source]] = {}
    inline: dict[str, int] = {}
    branches = checkpoints = full = described = 0
    for branch in every_branch(store, services.namespace, thread):
        branches += 1
        for row in rows_of(store, branch.key, payload=True):
            checkpoints += 1
            full += row.size
            described += len(row.manifest) + len(row.notes)
            try:
                state = open_head_state(store, row, {})
            except Corrupted as error:
                damaged.append(Damaged(thread_id=thread, id=readable_id(row), seq=row.seq, error=error))
                continue
            for key, value in state.values.items():
                shown = key if isinstance(key, str) else f"({SYSTEM_NAMES.get(key, key)})"
                of_value = {piece.source for piece in value.pieces if isinstance(piece, Range)}
                sources.setdefault(shown, set()).update(of_value)
                inline[shown] = inline.get(shown, 0) + len(value.entry.body or b"")
    used: set[Source] = set().union(*sources.values())
    taken = store.sizes(used).sources
    keys = {key: sum(taken.get(source, 0) for source in of) + inline.get(key, 0) for key, of in sources.items()}
    stored = described + sum(taken.get(source, 0) for source in used)
    return ThreadStats(thread, branches, checkpoints, stored, full, keys, tuple(damaged))
