"""Copying threads and deleting from them, without changing what remains."""

from __future__ import annotations

from collections.abc import Collection

from backstay.errors import Conflict
from backstay.integrations.langgraph.delta import carried_writes, rebuilt_channels, walk
from backstay.integrations.langgraph.description import PARENT
from backstay.integrations.langgraph.names import Place
from backstay.integrations.langgraph.read import id_of_row, parent_of_row, place_of_row
from backstay.model.checkpoint import CheckpointMeta, bare
from backstay.model.damaged import Damaged
from backstay.pieces.manifest import root_digest
from backstay.store.base import PAGE_ROWS_MAX, Backend, Commit, Committed, LaneKey, Query, Removed, Row
from backstay.thread.cursor import Context
from backstay.thread.history import Filter
from backstay.thread.load import open_tip
from backstay.thread.record import NO_PARENT, checkpoint_digest, encode_notes, meta_of, values_of
from backstay.thread.removal import REBUILT_FROM, judged, prune, thread_names
from backstay.thread.retention import Keep, Pruned


def keep_latest(store: Backend, context: Context, thread: str) -> Removed:
    """Delete all but the newest checkpoint of each namespace of a thread."""
    newest: dict[str, Row] = {}
    doomed: list[str] = []
    for row in rows_of_thread(store, context, thread):
        if newest.setdefault(row.lane.scope, row) is not row:
            doomed.append(row.id)
    return delete(store, context, thread, doomed)


def delete_runs(store: Backend, context: Context, run_ids: Collection[str]) -> Removed:
    """Delete the checkpoints of these runs, in all threads."""
    removed = Removed()
    wanted = [Filter(where={"run_id": run_id}) for run_id in run_ids]
    damaged: list[Damaged] = []
    for thread in thread_names(store, context):
        metas, unjudged, _ = judged(rows_of_thread(store, context, thread))
        damaged += unjudged
        doomed = [meta.id for meta in metas if any(each.matches(meta) for each in wanted)]
        removed += delete(store, context, thread, doomed)
    if damaged:  # it may be of one of the runs
        raise damaged[0].error
    return removed


def retain(store: Backend, context: Context, thread: str | None, keep: Keep, dry_run: bool) -> Pruned:
    """Delete what the rules do not want; what stays is as it was, channels that are kept as writes included."""
    plan = prune(store, context, thread, keep, True, None, spare_ancestors=False)
    if dry_run or not plan.checkpoints:
        return plan
    names = [thread] if thread is not None else (thread_names(store, context))
    for name in names:
        carry_over(store, context, name, set(plan.checkpoints))
    return prune(store, context, thread, keep, False, None, spare_ancestors=False)


def delete(store: Backend, context: Context, thread: str, doomed: Collection[str]) -> Removed:
    """Delete checkpoints of a thread, after what is needed of them was given to those that stay."""
    if not doomed:
        return Removed()
    carry_over(store, context, thread, set(doomed))
    return store.delete(context.namespace, doomed, False)


def carry_over(store: Backend, context: Context, thread: str, doomed: set[str]) -> None:
    """Give checkpoints that stay what they need of a parent that goes."""
    for row in rows_of_thread(store, context, thread, writes=True):
        if row.id in doomed or row.parent_id not in doomed or REBUILT_FROM not in meta_of(row).metadata:
            continue
        channels = rebuilt_channels(meta_of(row).metadata)
        if channels:
            carried = carried_writes(walk(store, row, channels))
            store.write(row.lane, row.id, carried, True)


def rows_of_thread(
    store: Backend, context: Context, thread: str, payload: bool = False, writes: bool = False
) -> list[Row]:
    """Return the rows of a thread, of all namespaces, newest first."""
    rows: list[Row] = []
    before: int | None = None
    while True:
        query = Query(context.namespace, thread, before=before, payload=payload, writes=writes)
        page = store.find(query)
        rows += page
        if len(page) < PAGE_ROWS_MAX:
            return rows
        before = page[-1].seq


# Copying ----------------------------------------------------------------------------------------------------------


def copy_thread(store: Backend, context: Context, source: str, target: str) -> None:
    """Copy a thread with all namespaces, branches and writes; the bytes are shared, not copied.

    An interrupted copy is completed by repeating it; a target that holds anything else is refused.
    """
    rows = rows_of_thread(store, context, source, payload=True, writes=True)
    rows.reverse()
    names = {row.id: _copied_name(row, target) for row in rows}
    strangers = {row.id for row in (rows_of_thread(store, context, target))} - set(names.values())
    if strangers:
        raise Conflict(
            f"thread {target!r} has checkpoints of its own, {min(strangers)} for one",
            thread=target,
            hint="Copy into a thread that does not exist yet, or delete that one first",
        )
    copies: dict[LaneKey, Committed] = {}
    digests: dict[str, bytes] = {}
    for row in rows:
        lane = row.lane._replace(thread=target)
        commit = _copy(store, row, lane, names, digests, copies.get(lane))
        committed = store.commit(commit)
        digests[commit.id] = commit.digest
        copies[lane] = committed
        if row.writes:
            store.write(lane, commit.id, row.writes, False)


def _copied_name(row: Row, target: str) -> str:
    metadata = meta_of(row).metadata
    place = place_of_row(row, metadata)
    return Place(target, place.ns).name(id_of_row(place, row, metadata))


def _copy(
    store: Backend, row: Row, lane: LaneKey, names: dict[str, str], digests: dict[str, bytes], before: Committed | None
) -> Commit:
    """Return the commit that stores the content of a row in another thread."""
    tip = open_tip(store, row, {})
    values = values_of(row)
    metadata = values.get("metadata", {})
    parent = None if row.parent_id is None else names.get(row.parent_id)
    if parent is None and row.parent_id is not None:  # it was deleted; what is left is its name
        lost = parent_of_row(place_of_row(row, metadata), row, metadata)
        values["metadata"] = {**metadata, PARENT: lost}
    meta = bare(CheckpointMeta, {**values, "id": names[row.id], "thread_id": lane.thread, "parent_id": parent})
    notes, entries = encode_notes(meta, row.created_us), tip.entries()
    digest_before = NO_PARENT if parent is None else digests[parent]
    return Commit(
        lane=lane,
        number=0 if before is None else before.number,
        last_seq=0 if before is None else before.seq,
        head_seq=0 if before is None else before.seq,
        epoch=0,
        id=meta.id,
        parent_id=parent,
        step=row.step,
        created_us=row.created_us,
        digest=checkpoint_digest(digest_before, root_digest(entries), list(entries), meta, row.created_us, notes),
        notes=notes,
        size=row.size,
        manifest=row.manifest,
        base=row.base,
        tags=row.tags,
        sources=tip.sources,
        requires=row.id,
    )
