"""Copying threads, and deleting from them without changing the checkpoints that remain."""

from __future__ import annotations

from collections.abc import Collection

from backstay.errors import Conflict
from backstay.langgraph.delta import carried_writes, walk
from backstay.langgraph.encoding import PARENT, names_of
from backstay.model.checkpoint import CheckpointMeta, unchecked
from backstay.operations.cursor import Services
from backstay.operations.listing import Filter
from backstay.operations.load import open_head_state
from backstay.operations.retention import REBUILT_FROM, Keep, Pruned, prune, split_damaged, thread_names
from backstay.operations.rows import NO_PARENT, Damaged, checkpoint_digest, checksum, encode_fields, meta_of, values_of
from backstay.pieces.manifest import root_digest
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Commit, Committed, Query, Removed, Row


def keep_latest(store: Backend, services: Services, thread: str) -> Removed:
    """Delete all but the newest checkpoint of each namespace of a thread."""
    newest: dict[str, Row] = {}
    to_delete: list[str] = []
    for row in rows_of_thread(store, services, thread):
        if newest.setdefault(row.branch.scope, row) is not row:
            to_delete.append(row.id)
    return delete(store, services, thread, to_delete)


def delete_runs(store: Backend, services: Services, run_ids: Collection[str]) -> Removed:
    """Delete the checkpoints of these runs, in all threads."""
    removed = Removed()
    wanted = [Filter(where={"run_id": run_id}) for run_id in run_ids]
    damaged: list[Damaged] = []
    for thread in thread_names(store, services):
        metas, unreadable, _ = split_damaged(rows_of_thread(store, services, thread))
        damaged += unreadable
        to_delete = [meta.id for meta in metas if any(each.matches(meta) for each in wanted)]
        removed += delete(store, services, thread, to_delete)
    if damaged:  # it may belong to one of the runs
        raise damaged[0].error
    return removed


def retain(store: Backend, services: Services, thread: str | None, keep: Keep, dry_run: bool) -> Pruned:
    """Delete the checkpoints that the rules do not keep; channels stored as writes stay complete."""
    plan = prune(store, services, thread, keep, True, None, keep_ancestors=False)
    if dry_run:
        return plan
    names = [thread] if thread is not None else thread_names(store, services)
    for name in names if plan.checkpoints else ():
        carry_over(store, services, name, set(plan.checkpoints))
    return prune(store, services, thread, keep, False, None, keep_ancestors=False)


def delete(store: Backend, services: Services, thread: str, to_delete: Collection[str]) -> Removed:
    """Delete checkpoints of a thread, after giving those that stay what they need of them."""
    if not to_delete:
        return Removed()
    carry_over(store, services, thread, set(to_delete))
    return store.delete(services.namespace, to_delete, False)


def carry_over(store: Backend, services: Services, thread: str, to_delete: set[str]) -> None:
    """Give the checkpoints that stay the writes that they need of a deleted parent."""
    for row in rows_of_thread(store, services, thread, writes=True):
        if row.id in to_delete or row.parent_id not in to_delete:
            continue
        channels = meta_of(row).metadata.get(REBUILT_FROM)
        if channels and isinstance(channels, dict):
            store.write(row.branch, row.id, carried_writes(walk(store, row, channels)), True)


def rows_of_thread(
    store: Backend, services: Services, thread: str, payload: bool = False, writes: bool = False
) -> list[Row]:
    """Return the rows of a thread, of all namespaces, newest first."""
    rows: list[Row] = []
    before: int | None = None
    while True:
        page = store.find(Query(services.namespace, thread, before=before, payload=payload, writes=writes))
        rows += page
        if len(page) < PAGE_ROWS_MAX:
            return rows
        before = page[-1].seq


# Copying ----------------------------------------------------------------------------------------------------------


def copy_thread(store: Backend, services: Services, source: str, target: str) -> None:
    """Copy a thread with all namespaces, branches and writes; the copy shares the bytes.

    Repeat an interrupted copy to complete it. A target with checkpoints of its own is refused.
    """
    rows = rows_of_thread(store, services, source, payload=True, writes=True)
    rows.reverse()
    names: dict[str, str] = {}
    for row in rows:
        location, checkpoint_id, _ = names_of(meta_of(row))
        names[row.id] = location._replace(thread=target).name(checkpoint_id)
    others = {row.id for row in rows_of_thread(store, services, target)} - set(names.values())
    if others:
        raise Conflict(
            f"thread {target!r} already has checkpoints of its own, for example {min(others)}",
            thread=target,
            hint="Copy to a thread that does not exist yet, or delete that thread first",
        )
    copies: dict[BranchKey, Committed] = {}
    digests: dict[str, bytes] = {}
    for row in rows:
        branch = row.branch._replace(thread=target)
        commit = _copy(store, row, branch, names, digests, copies.get(branch))
        copies[branch] = store.commit(commit)
        digests[commit.id] = commit.digest
        if row.writes:
            store.write(branch, commit.id, row.writes, False)


def _copy(
    store: Backend,
    row: Row,
    branch: BranchKey,
    names: dict[str, str],
    digests: dict[str, bytes],
    before: Committed | None,
) -> Commit:
    """Return the commit that stores the content of a row in another thread."""
    head_state = open_head_state(store, row, {})
    values = values_of(row)
    parent = None if row.parent_id is None else names.get(row.parent_id)
    if parent is None and row.parent_id is not None:  # the parent was deleted; its name remains
        values["metadata"] = {**values.get("metadata", {}), PARENT: names_of(meta_of(row))[2]}
    changed = {"id": names[row.id], "thread_id": branch.thread, "parent_id": parent}
    meta = unchecked(CheckpointMeta, {**values, **changed})
    fields, entries = encode_fields(meta), head_state.entries()
    parent_digest = None if parent is None else digests[parent]
    digest = checkpoint_digest(
        parent_digest or NO_PARENT, root_digest(entries), list(entries), meta, row.created_us, fields
    )
    return Commit(
        branch=branch,
        number=0 if before is None else before.number,
        last_seq=0 if before is None else before.seq,
        head_seq=0 if before is None else before.seq,
        epoch=0,
        id=meta.id,
        parent_id=parent,
        step=row.step,
        created_us=row.created_us,
        digest=digest,
        notes=fields + checksum(fields, meta.id, parent, row.step, row.created_us, digest, row.size),
        size=row.size,
        manifest=row.manifest,
        base=row.base,
        tags=row.tags,
        sources=head_state.sources,
        requires=row.id,
        parent_digest=parent_digest,
        origin=parent,
    )
