"""Retention: rules for what to keep, and the deletes that follow from them. The store never deletes needed bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from backstay.errors import Corrupted, InvalidInput, counted
from backstay.model.checkpoint import CheckpointMeta
from backstay.operations.cursor import Cursor, Services
from backstay.operations.interrupts import pending_checkpoints
from backstay.operations.listing import every_branch
from backstay.operations.records import all_records
from backstay.operations.rows import Damaged, entry_of
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Query, Removed, Row

DELETE_ROWS = 400
"""How many checkpoints are deleted in one transaction, so that other writers wait only for a moment."""

_DAYS_MAX = timedelta.max.days


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Rules for what to keep. A checkpoint stays if any rule keeps it; pruning deletes the others.

    These are always kept: each branch's newest checkpoint, checkpoints that branches were forked from, checkpoints with
    an open interrupt, and, unless ``tagged=False``, tagged ones. Rules apply to each branch separately.
    """

    last: int | None = None  # this many of the newest
    days: float | None = None  # all that are younger than this
    every: int | None = None  # all whose step is a multiple of this
    milestones: int | None = None  # this many, evenly spread, with the first and the last
    tagged: bool = True

    def __post_init__(self) -> None:
        for name in ("last", "every", "milestones"):
            value = getattr(self, name)
            least = 2 if name == "milestones" else 1
            if value is not None and (type(value) is not int or value < least):
                raise InvalidInput(f"Keep({name}=…) must be a whole number, {least} or more, not {value!r:.40}")
        days = self.days
        if days is not None and (
            isinstance(days, bool) or not isinstance(days, int | float) or not math.isfinite(days) or days < 0
        ):
            raise InvalidInput(f"Keep(days=…) must be a number of days, 0 or more, not {days!r:.40}")
        if (self.last, self.days, self.every, self.milestones) == (None, None, None, None):
            raise InvalidInput("Keep needs at least one rule", hint="For example Keep(last=10) or Keep(days=30)")

    def to_delete(self, branch: Sequence[CheckpointMeta], now: datetime, protected: Collection[str]) -> list[str]:
        """Return the ids to delete, of one branch's checkpoints given newest first."""
        kept = set(protected)
        if branch:
            kept.add(branch[0].id)
        kept.update(meta.id for meta in branch[: self.last or 0])
        if self.tagged:
            kept.update(meta.id for meta in branch if meta.tags)
        if self.every is not None:
            kept.update(meta.id for meta in branch if meta.step % self.every == 0)
        if self.days is not None:
            age = timedelta(days=min(self.days, _DAYS_MAX))
            kept.update(meta.id for meta in branch if now - meta.created_at < age)
        if self.milestones is not None and branch:
            count = min(self.milestones, len(branch) + 1)  # the number given may be huge
            kept.update(branch[round(index * (len(branch) - 1) / (count - 1))].id for index in range(count))
        return [meta.id for meta in branch if meta.id not in kept]


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of a prune: everything that it deleted, or would delete."""

    deleted: int
    kept: int
    bytes: int  # freed; 0 for a dry run, which cannot know
    dry_run: bool
    checkpoints: tuple[str, ...]  # the ids deleted
    damaged: tuple[Damaged, ...] = ()  # kept, with what they may need

    def __str__(self) -> str:
        verb = "would delete" if self.dry_run else "deleted"
        freed = "" if self.dry_run else f", {self.bytes} bytes freed"
        done = f"{verb} {counted(self.deleted, 'checkpoint')}, kept {self.kept}{freed}"
        return done if not self.damaged else f"{done}; {len(self.damaged)} cannot be read and were kept"


REBUILT_FROM = "counters_since_delta_snapshot"
"""LangGraph sets this metadata if some values of a checkpoint are only in the writes of its ancestors."""


def rows_of(store: Backend, branch: BranchKey, payload: bool) -> list[Row]:
    """Return all rows of a branch, newest first."""
    rows: list[Row] = []
    before: int | None = None
    while True:
        query = Query(*branch, before=before, payload=payload)
        page = store.find(query)
        rows += page
        if len(page) < PAGE_ROWS_MAX:
            return rows
        before = page[-1].seq


def prune(
    store: Backend,
    services: Services,
    thread: str | None,
    keep: Keep,
    dry_run: bool,
    token: str | None,
    keep_ancestors: bool = True,
) -> Pruned:
    """Delete what the rules do not keep, but no checkpoints that were tagged or forked meanwhile.

    Many small branches share a transaction, and a large one takes several. ``keep_ancestors`` keeps the ancestors whose
    writes a remaining checkpoint is rebuilt from. Checkpoints that cannot be read stay and are reported; so do their
    parents, and all checkpoints of a thread with an unreadable interrupt.
    """
    if not isinstance(keep, Keep):
        raise InvalidInput("prune needs to know what to keep", hint="For example prune(backstay.Keep(last=10))")
    namespace = services.namespace
    waiting, damaged = pending_checkpoints(store, services, thread, dry_run)
    unclear = {entry.thread_id for entry in damaged}
    to_delete: list[str] = []
    kept = size = 0
    removed = Removed()
    batch: list[tuple[str, int, list[str]]] = []  # of each branch: its thread, how many rows stay, the ids to delete

    def apply(part: Sequence[tuple[str, int, list[str]]]) -> None:
        nonlocal kept, removed
        names = [name for _, _, going in part for name in going]
        try:
            for done in () if dry_run else delete_many(store, namespace, names, token, keep.tagged, forked=True):
                removed += done
        except Corrupted as error:
            if len(part) == 1:
                damaged.append(Damaged(thread_id=part[0][0], id=error.checkpoint, seq=0, error=error))
            for each in part if len(part) > 1 else ():  # find out which branch it is
                apply([each])
            return
        to_delete.extend(names)
        kept += sum(stay for _, stay, _ in part)

    for branch in every_branch(store, namespace, thread):
        try:
            rows = rows_of(store, branch.key, payload=False)
            metas, found, stay = split_damaged(rows)
            damaged += found
            stay.update(row.id for row in rows if row.id in waiting)
            going = [] if branch.key.thread in unclear else keep.to_delete(metas, services.now(), stay)
            going = unforked(store, namespace, going)
        except Corrupted as error:
            damaged.append(Damaged(thread_id=branch.key.thread, id=error.checkpoint, seq=0, error=error))
            continue
        going = protect_ancestors(metas, going) if keep_ancestors else going
        batch.append((branch.key.thread, len(rows) - len(going), going))
        size += len(going) + 1
        if size >= DELETE_ROWS:
            apply(batch)
            batch, size = [], 0
    apply(batch)
    deleted = len(to_delete) if dry_run else removed.checkpoints
    return Pruned(deleted, kept, removed.bytes, dry_run, tuple(to_delete), tuple(damaged))


def unforked(store: Backend, namespace: str, names: Sequence[str]) -> list[str]:
    """Return the ids that no branch was forked from."""
    forked = store.forked(namespace, names) if names else ()
    return [name for name in names if name not in forked]


def delete_many(
    store: Backend, namespace: str, names: Sequence[str], token: str | None, tagged: bool = False, forked: bool = False
) -> Iterator[Removed]:
    """Delete checkpoints that are not protected, in several transactions if there are many."""
    for start in range(0, len(names), DELETE_ROWS):
        yield store.delete(namespace, names[start : start + DELETE_ROWS], True, token, tagged=tagged, forked=forked)


def split_damaged(rows: Sequence[Row]) -> tuple[list[CheckpointMeta], list[Damaged], set[str]]:
    """Return the readable rows, the damaged ones, and the parents of the damaged ones, which may be needed."""
    entries = [(row, entry_of(row)) for row in rows]
    damaged = [(row, entry) for row, entry in entries if isinstance(entry, Damaged)]
    metas = [entry for _, entry in entries if not isinstance(entry, Damaged)]
    return metas, [entry for _, entry in damaged], {row.parent_id for row, _ in damaged if row.parent_id is not None}


def protect_ancestors(branch: Sequence[CheckpointMeta], to_delete: Sequence[str]) -> list[str]:
    """Return the ids of ``to_delete`` that no remaining checkpoint of the branch, newest first, is rebuilt from."""
    going, needed = set(to_delete), set[str | None]()
    for meta in branch:
        if meta.id in needed:
            going.discard(meta.id)
        if meta.id not in going and REBUILT_FROM in meta.metadata:
            needed.add(meta.parent_id)
    return [name for name in to_delete if name in going]


def delete_before(store: Backend, services: Services, cursor: Cursor, step: int) -> int:
    """Delete a branch's checkpoints before a step, but not its newest and those with open interrupts; return how many.

    Checkpoints that cannot be read stay; after deleting the others, Corrupted reports them.
    """
    waiting, damaged = pending_checkpoints(store, services, cursor.branch.thread)
    if damaged:  # it is not known which checkpoints have open interrupts
        raise damaged[0].error
    metas, damaged, stay = split_damaged(rows_of(store, cursor.branch, payload=False))
    stay |= waiting
    going = protect_ancestors(metas, [meta.id for meta in metas[1:] if meta.step < step and meta.id not in stay])
    removed = sum(delete_many(store, services.namespace, going, cursor.token), Removed())
    if damaged:
        raise Corrupted(
            f"{counted(removed.checkpoints, 'checkpoint')} deleted, but one was kept: {damaged[0].error.what}",
            thread=cursor.branch.thread,
            checkpoint=damaged[0].id,
            hint="Delete it with thread.delete_checkpoint(id), or repair the store with store.repair()",
        )
    return removed.checkpoints


def delete_one(store: Backend, cursor: Cursor, name: str) -> int:
    """Delete one checkpoint of the handle's thread, even a branch's newest; return how many were deleted."""
    branch, token = cursor.branch, cursor.token
    rows = store.find(Query(branch.namespace, ids=(name,), surely=True))
    if not rows or rows[0].branch.thread != branch.thread:
        return 0
    return _delete_under_lease(
        cursor, rows[0].branch, lambda: store.delete(branch.namespace, [name], False, token), whole=False
    ).checkpoints


def delete_thread(store: Backend, cursor: Cursor) -> Removed:
    """Delete the handle's thread."""
    branch, token = cursor.branch, cursor.token
    return _delete_under_lease(
        cursor, branch, lambda: store.delete_thread(branch.namespace, branch.thread, token), whole=True
    )


def _delete_under_lease(cursor: Cursor, branch: BranchKey, delete: Callable[[], Removed], whole: bool) -> Removed:
    """Delete through a handle. If the delete removes its branch, the lease ends too, and is not lost."""
    lease = cursor.lease
    if lease is None or lease.branch != branch:
        return delete()
    lease.start_release()
    try:
        removed = delete()
    except BaseException:
        lease.cancel_release()
        raise
    if whole or removed.branches:
        lease.finish_release()
        cursor.lease = None
    else:
        lease.cancel_release()
    return removed


def delete_all(store: Backend, services: Services) -> Removed:
    """Delete every thread of the namespace."""
    removed = Removed()
    named = thread_names(store, services)
    # A run that died before its first checkpoint leaves a lease or a session but no branch.
    leases = store.leases(services.namespace, None, False)
    sessions = all_records(store, "session", services.namespace, None)
    named += [row.branch.thread for row in leases] + [row.branch.thread for row in sessions]
    for name in dict.fromkeys(named):
        removed += store.delete_thread(services.namespace, name)
    # Or it leaves only effects, and then the thread can be found only by them.
    left_before = None
    while left := (store.records("effect", services.namespace, None, False, 0, 1)):
        if left == left_before:
            raise Corrupted(
                f"effect {left[0].key!r} cannot be deleted: its thread cannot be found",
                thread=left[0].branch.thread,
                hint="Repair the store with store.repair(): see docs/repair.md",
            )
        removed += store.delete_thread(services.namespace, left[0].branch.thread)
        left_before = left
    return removed


def thread_names(store: Backend, services: Services) -> list[str]:
    """Return the ids of all threads that have a branch, oldest first."""
    return list(dict.fromkeys(branch.key.thread for branch in every_branch(store, services.namespace, None)))
