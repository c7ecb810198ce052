"""The newest checkpoint of a branch that is good, when the newest one may not be. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backstay.errors import BackstayError
from backstay.model.checkpoint import Checkpoint
from backstay.store.base import Backend, LaneKey, Query
from backstay.thread.access import access_of, handle_of
from backstay.thread.load import get
from backstay.thread.store import Store
from backstay.thread.thread import Thread

PAGE_ROWS = 100


@dataclass(frozen=True, slots=True)
class Recovered:
    """A checkpoint that verifies, and whether it had to come from the backup."""

    checkpoint: Checkpoint
    from_backup: bool
    passed_over: int  # how many newer ones there are that do not verify


def newest_good(thread: Thread, *, backup: Store | None = None) -> Recovered | None:
    """Load the branch's checkpoints, newest first, until one verifies; if none does, those of the backup; else None."""
    lane = handle_of(thread).cursor.lane
    stores = [(access_of(thread).store, lane, False)]
    if backup is not None:
        stores.append((access_of(backup).store, LaneKey(backup.namespace, *lane[1:]), True))
    passed = 0
    for backend, place, from_backup in stores:
        for name in _names(backend, place):
            try:
                found = get(backend, place.namespace, name)
            except BackstayError:
                passed += 1
                continue
            if found is not None:
                return Recovered(found, from_backup, passed)
    return None


def _names(backend: Backend, lane: LaneKey) -> Iterator[str]:
    """Iterate over the ids of a branch's checkpoints, newest first; of a list that cannot be read, none."""
    before: int | None = None
    while True:
        try:
            page = backend.find(Query(*lane, before=before, limit=PAGE_ROWS))
        except BackstayError:
            return
        yield from (row.id for row in page)
        if len(page) < PAGE_ROWS:
            return
        before = page[-1].seq
