"""Deleting by rule: which checkpoints go is decided by ``retention``; the store never lets go of what is needed."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.store.base import PAGE_ROWS_MAX, Backend, LaneKey, Query, Removed, Row
from holdfast.thread.cursor import Context
from holdfast.thread.perform import Flow, ask
from holdfast.thread.record import meta_of
from holdfast.thread.retention import Keep, Pruned


def rows_of(lane: LaneKey, payload: bool) -> Flow[list[Row]]:
    """Return all rows of a branch, newest first."""
    rows: list[Row] = []
    before: int | None = None
    while True:
        query = Query(*lane, before=before, payload=payload)
        page = yield from ask(_finding(query))
        rows += page
        if len(page) < PAGE_ROWS_MAX:
            return rows
        before = page[-1].seq


def prune(context: Context, thread: str | None, keep: Keep, dry_run: bool) -> Flow[Pruned]:
    """Delete what the rules do not want, branch by branch."""
    lanes = yield from ask(lambda store: store.lanes(context.namespace, thread, None))
    every = lanes if thread is None else (yield from ask(lambda store: store.lanes(context.namespace, None, None)))
    origins = {lane.origin for lane in every if lane.origin is not None}
    doomed: list[str] = []
    kept = 0
    removed = Removed()
    for lane in lanes:
        rows = yield from rows_of(lane.key, payload=False)
        going = keep.doomed([meta_of(row) for row in rows], context.now(), origins)
        doomed += going
        kept += len(rows) - len(going)
        if going and not dry_run:
            removed += yield from ask(_deleting(context.namespace, going))
    deleted = len(doomed) if dry_run else removed.checkpoints
    return Pruned(deleted, kept, removed.bytes, dry_run, tuple(doomed))


def delete_before(context: Context, lane: LaneKey, step: int) -> Flow[Removed]:
    """Delete a branch's checkpoints before a step, but never its newest."""
    rows = yield from rows_of(lane, payload=False)
    going = [row.id for row in rows if row.step < step]
    return (yield from ask(_deleting(context.namespace, going)))


def clear(context: Context) -> Flow[Removed]:
    """Delete every thread of the namespace."""
    removed = Removed()
    for name in (yield from thread_names(context)):
        removed += yield from ask(_deleting_thread(context.namespace, name))
    return removed


def thread_names(context: Context) -> Flow[list[str]]:
    """Return the names of all threads that have a branch, oldest first."""
    lanes = yield from ask(lambda store: store.lanes(context.namespace, None, None))
    return list(dict.fromkeys(lane.key.thread for lane in lanes))


def _finding(query: Query) -> Callable[[Backend], list[Row]]:
    return lambda store: store.find(query)


def _deleting(namespace: str, names: list[str]) -> Callable[[Backend], Removed]:
    return lambda store: store.delete(namespace, names, True)


def _deleting_thread(namespace: str, name: str) -> Callable[[Backend], Removed]:
    return lambda store: store.delete_thread(namespace, name)
