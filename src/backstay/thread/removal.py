"""Deleting by rule: which checkpoints go is decided by ``retention``; the store never lets go of what is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backstay.errors import Corrupted, InvalidInput
from backstay.model.checkpoint import CheckpointMeta
from backstay.model.damaged import Damaged
from backstay.store.base import PAGE_ROWS_MAX, Backend, LaneKey, Query, Removed, Row
from backstay.thread.cursor import Context, Cursor
from backstay.thread.interrupts import pending_checkpoints
from backstay.thread.record import entry_of
from backstay.thread.records import all_records
from backstay.thread.retention import Keep, Pruned

REBUILT_FROM = "counters_since_delta_snapshot"
"""Metadata by which LangGraph says that some values are not in a checkpoint, but in the writes of its ancestors."""


def rows_of(store: Backend, lane: LaneKey, payload: bool) -> list[Row]:
    """Return all rows of a branch, newest first."""
    rows: list[Row] = []
    before: int | None = None
    while True:
        query = Query(*lane, before=before, payload=payload)
        page = store.find(query)
        rows += page
        if len(page) < PAGE_ROWS_MAX:
            return rows
        before = page[-1].seq


def prune(
    store: Backend,
    context: Context,
    thread: str | None,
    keep: Keep,
    dry_run: bool,
    token: str | None,
    spare_ancestors: bool = True,
) -> Pruned:
    """Delete what the rules do not want, branch by branch, but nothing that was tagged or forked meanwhile.

    ``spare_ancestors`` keeps the ancestors from whose writes a checkpoint that stays is rebuilt. What cannot be read
    stays and is reported, and so does what it may need or protect: its parent, or the thread of an interrupt.
    """
    if not isinstance(keep, Keep):
        raise InvalidInput("prune needs to know what to keep", hint="For example prune(backstay.Keep(last=10))")
    lanes = store.lanes(context.namespace, thread, None)
    every = lanes if thread is None else (store.lanes(context.namespace, None, None))
    needed = {lane.origin for lane in every if lane.origin is not None}
    waiting, damaged = pending_checkpoints(store, context.namespace, thread)
    needed |= waiting
    unclear = {entry.thread_id for entry in damaged}
    doomed: list[str] = []
    kept = 0
    removed = Removed()
    for lane in lanes:
        try:
            rows = rows_of(store, lane.key, payload=False)
            metas, found, spared = judged(rows)
            damaged += found
            going = [] if lane.key.thread in unclear else keep.doomed(metas, context.now(), needed | spared)
            if spare_ancestors:
                going = without_ancestors(metas, going)
            if going and not dry_run:
                removed += store.delete(context.namespace, going, True, token, tagged=keep.tagged, forked=True)
        except Corrupted as error:
            damaged.append(Damaged(thread_id=lane.key.thread, id=error.checkpoint, seq=0, error=error))
            continue
        doomed += going
        kept += len(rows) - len(going)
    deleted = len(doomed) if dry_run else removed.checkpoints
    return Pruned(deleted, kept, removed.bytes, dry_run, tuple(doomed), tuple(damaged))


def judged(rows: Sequence[Row]) -> tuple[list[CheckpointMeta], list[Damaged], set[str]]:
    """Return what can be read of rows, what cannot, and the parents of that: it may be rebuilt from their writes."""
    entries = [(row, entry_of(row)) for row in rows]
    damaged = [(row, entry) for row, entry in entries if isinstance(entry, Damaged)]
    metas = [entry for _, entry in entries if not isinstance(entry, Damaged)]
    return metas, [entry for _, entry in damaged], {row.parent_id for row, _ in damaged if row.parent_id is not None}


def without_ancestors(branch: Sequence[CheckpointMeta], doomed: Sequence[str]) -> list[str]:
    """Return what may go of a branch, given newest first, without changing what those that stay are rebuilt from."""
    going, needed = set(doomed), set[str | None]()
    for meta in branch:
        if meta.id in needed:
            going.discard(meta.id)
        if meta.id not in going and REBUILT_FROM in meta.metadata:
            needed.add(meta.parent_id)
    return [name for name in doomed if name in going]


def delete_before(store: Backend, context: Context, cursor: Cursor, step: int) -> int:
    """Delete a branch's checkpoints before a step, but never its newest nor one that waits; return how many went.

    If any cannot be read, it stays, the others go, and Corrupted says so.
    """
    waiting, damaged = pending_checkpoints(store, context.namespace, cursor.lane.thread)
    if damaged:  # nobody knows what waits
        raise damaged[0].error
    metas, damaged, stay = judged(rows_of(store, cursor.lane, payload=False))
    stay |= waiting
    going = without_ancestors(metas, [meta.id for meta in metas[1:] if meta.step < step and meta.id not in stay])
    removed = store.delete(context.namespace, going, True, cursor.token)
    if damaged:
        raise Corrupted(
            f"{removed.checkpoints} checkpoints were deleted, but not all before the step: {damaged[0].error.what}",
            thread=cursor.lane.thread,
            checkpoint=damaged[0].id,
            hint="It was kept. Delete it with thread.delete(id), or repair the store",
        )
    return removed.checkpoints


def delete_one(store: Backend, cursor: Cursor, name: str) -> int:
    """Delete one checkpoint of the handle's thread, also a branch's newest; return how many went."""
    lane, token = cursor.lane, cursor.token
    rows = store.find(Query(lane.namespace, ids=(name,)))
    if not rows or rows[0].lane.thread != lane.thread:
        return 0
    return _with_lease(
        cursor, rows[0].lane, lambda: store.delete(lane.namespace, [name], False, token), whole=False
    ).checkpoints


def delete_thread(store: Backend, cursor: Cursor) -> Removed:
    """Delete the handle's thread."""
    lane, token = cursor.lane, cursor.token
    return _with_lease(cursor, lane, lambda: store.delete_thread(lane.namespace, lane.thread, token), whole=True)


def _with_lease(cursor: Cursor, lane: LaneKey, delete: Callable[[], Removed], whole: bool) -> Removed:
    """Delete through a handle. If its branch goes, the lease on it goes too: that is no loss."""
    hold = cursor.hold
    if hold is None or hold.lane != lane:
        return delete()
    hold.end()
    try:
        removed = delete()
    except BaseException:
        hold.stay()
        raise
    if whole or removed.lanes:
        hold.ended()
        cursor.hold = None
    else:
        hold.stay()
    return removed


def clear(store: Backend, context: Context) -> Removed:
    """Delete every thread of the namespace."""
    removed = Removed()
    named = thread_names(store, context)
    # Runs that died before their first checkpoint leave no branch behind, but a lease or a session.
    leases = store.leases(context.namespace, None, False)
    sessions = all_records(store, "session", context.namespace, None)
    named += [row.lane.thread for row in leases] + [row.lane.thread for row in sessions]
    for name in dict.fromkeys(named):
        removed += store.delete_thread(context.namespace, name)
    # ... or effects only. One that is left names a thread of which nothing else is known.
    while left := (store.records("effect", context.namespace, None, False, 0, 1)):
        removed += store.delete_thread(context.namespace, left[0].lane.thread)
    return removed


def thread_names(store: Backend, context: Context) -> list[str]:
    """Return the names of all threads that have a branch, oldest first."""
    lanes = store.lanes(context.namespace, None, None)
    return list(dict.fromkeys(lane.key.thread for lane in lanes))
