"""Retention: rules for what to keep, and the deletes that follow from them. The store never deletes needed bytes.

With checkpoints go their interrupts, and the calls, effects and runs that no remaining checkpoint can ask for: see
``obsolete``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from backstay.errors import Corrupted, Fenced, InvalidInput, counted
from backstay.model.checkpoint import CheckpointMeta
from backstay.model.runs import RunStatus
from backstay.operations.arguments import LOOP_POSITION
from backstay.operations.cursor import Cursor, Services
from backstay.operations.interrupts import is_over, pending_checkpoints
from backstay.operations.listing import every_branch
from backstay.operations.obsolete import Gone, drop_obsolete
from backstay.operations.records import all_records
from backstay.operations.rows import Damaged, entry_of, to_microseconds
from backstay.operations.run_records import row_of, threads_with_runs
from backstay.operations.runs import unfinished_loop
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Query, Removed, Row

DELETE_ROWS = 400
"""How many checkpoints are deleted in one transaction, so that other writers wait only for a moment."""

_DAYS_MAX = timedelta.max.days


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Rules for what to keep. A checkpoint stays if any rule keeps it; pruning deletes the others.

    These are always kept: each branch's newest checkpoint, checkpoints that branches were forked from, checkpoints with
    an open interrupt, the position of an unfinished loop, and, unless ``tagged=False``, tagged ones. Rules apply to
    each branch separately.

    Calls and effects of runs are deleted as soon as no remaining checkpoint can ask for them, by resuming or by
    replaying from it. Effects under your own keys (``thread.effect``), and those whose outcome is unknown, stay. Runs
    that are over are deleted with their last checkpoint, except each branch's newest and those started with a key.

    ``finished_days`` deletes whole threads, with everything in them: threads all of whose runs ended at least so many
    days ago, and which have had no checkpoint since then. Those with an open interrupt, a running lease or an effect
    with an unknown outcome stay, and so do those with a tagged checkpoint, unless ``tagged=False``, and those on which
    no run was ever recorded. Without another rule, nothing else is deleted.
    """

    last: int | None = None  # this many of the newest
    days: float | None = None  # all that are younger than this
    every: int | None = None  # all whose step is a multiple of this
    milestones: int | None = None  # this many, evenly spread, with the first and the last
    tagged: bool = True
    finished_days: float | None = None  # threads with unfinished runs, and with runs that ended later than this

    def __post_init__(self) -> None:
        for name in ("last", "every", "milestones"):
            value = getattr(self, name)
            least = 2 if name == "milestones" else 1
            if value is not None and (type(value) is not int or value < least):
                raise InvalidInput(f"Keep({name}=…) must be a whole number, {least} or more, not {value!r:.40}")
        for name in ("days", "finished_days"):
            days = getattr(self, name)
            if days is not None and (
                isinstance(days, bool) or not isinstance(days, int | float) or not math.isfinite(days) or days < 0
            ):
                raise InvalidInput(f"Keep({name}=…) must be a number of days, 0 or more, not {days!r:.40}")
        if not self.has_checkpoint_rule and self.finished_days is None:
            raise InvalidInput("Keep needs at least one rule", hint="For example Keep(last=10) or Keep(days=30)")

    @property
    def has_checkpoint_rule(self) -> bool:
        """Return whether any rule is about single checkpoints, and not about whole threads."""
        return (self.last, self.days, self.every, self.milestones) != (None, None, None, None)

    def to_delete(self, branch: Sequence[CheckpointMeta], now: datetime, protected: Collection[str]) -> list[str]:
        """Return the ids to delete, of one branch's checkpoints given newest first."""
        if not self.has_checkpoint_rule:
            return []
        kept = set(protected)
        if branch:
            kept.add(branch[0].id)
        kept.update(meta.id for meta in branch[: self.last or 0])
        if self.tagged:
            kept.update(meta.id for meta in branch if meta.tags)
        if self.every is not None:
            kept.update(meta.id for meta in branch if meta.step % self.every == 0)
        if self.days is not None:
            age = _age(self.days)
            kept.update(meta.id for meta in branch if now - meta.created_at < age)
        if self.milestones is not None and branch:
            count = min(self.milestones, len(branch) + 1)  # the number given may be huge
            kept.update(branch[round(index * (len(branch) - 1) / (count - 1))].id for index in range(count))
        return [meta.id for meta in branch if meta.id not in kept]


def _age(days: float) -> timedelta:
    return timedelta(days=min(days, _DAYS_MAX))


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of a prune: everything that it deleted, or would delete.

    The numbers include what whole threads held. Records are not counted in ``bytes``.
    """

    deleted: int  # checkpoints
    kept: int
    bytes: int  # freed; 0 for a dry run, which cannot know
    dry_run: bool
    checkpoints: tuple[str, ...]  # the ids deleted
    damaged: tuple[Damaged, ...] = ()  # kept, with what they may need
    effects: int = 0  # calls and effects
    runs: int = 0
    threads: int = 0  # whole threads

    def __str__(self) -> str:
        verb = "would delete" if self.dry_run else "deleted"
        freed = "" if self.dry_run else f", {self.bytes} bytes freed"
        records = ((self.effects, "call or effect", "calls and effects"), (self.runs, "run", "runs"))
        others = "".join(f", {count} {one if count == 1 else many}" for count, one, many in records if count)
        whole = f" ({counted(self.threads, 'whole thread')})" if self.threads else ""
        done = f"{verb} {counted(self.deleted, 'checkpoint')}{others}{whole}, kept {counted(self.kept, 'checkpoint')}"
        done = f"{done}{freed}"
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
    work = _Prune(store, services, keep, dry_run, token, keep_ancestors)
    finished = work.delete_finished(thread)
    waiting, unreadable = pending_checkpoints(store, services, thread, dry_run)
    work.damaged += unreadable
    unclear = {entry.thread_id for entry in unreadable}
    batch: list[tuple[str, int, list[str]]] = []
    size = 0
    for branch in every_branch(store, services.namespace, thread):
        if branch.key.thread in finished:  # only in a dry run is it still there
            continue
        try:
            stay, going = work.choose(branch.key, waiting, branch.key.thread in unclear)
        except Corrupted as error:
            work.damaged.append(Damaged(thread_id=branch.key.thread, id=error.checkpoint, seq=0, error=error))
            continue
        batch.append((branch.key.thread, stay, going))
        size += len(going) + 1
        if size >= DELETE_ROWS:
            work.delete(batch)
            batch, size = [], 0
    work.delete(batch)
    if keep.has_checkpoint_rule:
        work.drop_records()
    return work.result()


@dataclass(slots=True)
class _Prune:
    """One prune, and what it has deleted so far, or would delete."""

    store: Backend
    services: Services
    keep: Keep
    dry_run: bool
    token: str | None
    keep_ancestors: bool
    checkpoints: list[str] = field(default_factory=list)
    removed: Removed = field(default_factory=Removed)
    kept: int = 0
    effects: int = 0
    runs: int = 0
    threads: int = 0
    damaged: list[Damaged] = field(default_factory=list)
    gone: dict[str, Gone] = field(default_factory=dict)  # of each thread with checkpoints of runs

    def choose(self, branch: BranchKey, waiting: Collection[str], is_unclear: bool) -> tuple[int, list[str]]:
        """Return how many checkpoints of a branch stay, and the ids of the others."""
        rows = rows_of(self.store, branch, payload=False)
        metas, found, stay = split_damaged(rows)
        self.damaged += found
        stay.update(row.id for row in rows if row.id in waiting)
        stay.update(unfinished_loop(metas))
        going = [] if is_unclear else self.keep.to_delete(metas, self.services.now(), stay)
        going = unforked(self.store, branch.namespace, going)
        going = protect_ancestors(metas, going) if self.keep_ancestors else going
        if any(meta.run_id is not None or meta.graph is not None or LOOP_POSITION in meta.metadata for meta in metas):
            to_delete = set(going)
            self.gone.setdefault(branch.thread, Gone()).add(branch, (meta for meta in metas if meta.id in to_delete))
        return len(rows) - len(going), going

    def delete(self, batch: Sequence[tuple[str, int, list[str]]]) -> None:
        """Delete checkpoints, given for each branch: its thread, how many rows stay, the ids to delete."""
        names = [name for _, _, going in batch for name in going]
        namespace, tagged = self.services.namespace, self.keep.tagged
        try:
            for done in (
                () if self.dry_run else delete_many(self.store, namespace, names, self.token, tagged, forked=True)
            ):
                self.removed += done
        except Corrupted as error:
            if len(batch) == 1:
                self.damaged.append(Damaged(thread_id=batch[0][0], id=error.checkpoint, seq=0, error=error))
            for each in batch if len(batch) > 1 else ():  # find out which branch it is
                self.delete([each])
            return
        self.checkpoints += names
        self.kept += sum(stay for _, stay, _ in batch)

    def drop_records(self) -> None:
        """Delete the obsolete records of each thread with runs, unless one of its checkpoints is damaged."""
        without = set(self.checkpoints) if self.dry_run else ()
        skipped = {entry.thread_id for entry in self.damaged}
        for name, gone in self.gone.items():
            if not skipped & {name, None}:  # None: something of any thread cannot be read
                dropped = drop_obsolete(self.store, self.services.namespace, name, gone, without, self.dry_run)
                self.effects += dropped.effects
                self.runs += dropped.runs
                self.damaged += dropped.damaged

    def delete_finished(self, thread: str | None) -> set[str]:
        """Delete the threads all of whose runs ended long ago; return their names."""
        deleted: set[str] = set()
        if self.keep.finished_days is None:
            return deleted
        store, namespace = self.store, self.services.namespace
        for name in [thread] if thread is not None else threads_with_runs(store, namespace, _ENDED):
            try:
                found = _finished_thread(store, self.services, name, self.keep)
                if found is None:
                    continue
                if not self.dry_run:
                    self.removed += store.delete_thread(namespace, name)
            except Corrupted as error:
                self.damaged.append(Damaged(thread_id=name, id=error.checkpoint, seq=0, error=error))
                continue
            except Fenced:  # a run has just started
                continue
            rows, runs, effects = found
            deleted.add(name)
            self.checkpoints += [row.id for row in rows]
            self.threads += 1
            self.runs += runs
            self.effects += effects
        return deleted

    def result(self) -> Pruned:
        """Return what was deleted."""
        deleted = len(self.checkpoints) if self.dry_run else self.removed.checkpoints
        ids, records = tuple(self.checkpoints), (self.effects, self.runs, self.threads)
        return Pruned(deleted, self.kept, self.removed.bytes, self.dry_run, ids, tuple(self.damaged), *records)


# Whole threads ----------------------------------------------------------------------------------------------------

_ENDED = (RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.FAILED)


def _finished_thread(store: Backend, services: Services, name: str, keep: Keep) -> tuple[list[Row], int, int] | None:
    """Return the checkpoints of a thread that may be deleted, and how many runs and effects it has; else None."""
    assert keep.finished_days is not None
    namespace = services.namespace

    def ended_runs() -> int | None:
        """Return how many runs the thread has; None if one has not ended, or not long enough ago."""
        count = 0
        for record in all_records(store, "run", namespace, name):
            row = row_of(record)
            if row.status not in _ENDED or row.ended_us is None or row.ended_us > latest_us:
                return None
            count += 1
        return count

    age = _age(keep.finished_days)
    latest_us = to_microseconds(services.now()) - age // timedelta(microseconds=1)
    if not ended_runs():
        return None
    for unread in store.unread(namespace, name):
        raise unread
    rows = rows_of_thread(store, namespace, name)
    if (
        any(row.created_us > latest_us or (keep.tagged and row.tags) for row in rows)
        or any(lease.left_us > 0 for lease in store.leases(namespace, name, False))
        or any(not is_over(store, record) for record in all_records(store, "interrupt", namespace, name, True))
    ):
        return None
    effects = [record.open for record in all_records(store, "effect", namespace, name)]
    if any(effects):
        return None
    runs = ended_runs()  # again, because this took a while: a run may have been submitted
    return None if runs is None else (rows, runs, len(effects))


def rows_of_thread(store: Backend, namespace: str, thread: str) -> list[Row]:
    """Return all rows of a thread, newest first."""
    rows: list[Row] = []
    query = Query(namespace, thread)
    while True:
        page = store.find(query)
        rows += page
        if len(page) < PAGE_ROWS_MAX:
            return rows
        query = Query(namespace, thread, before=page[-1].seq)


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
    # A run that died before its first checkpoint leaves a lease or a run but no branch.
    leases = store.leases(services.namespace, None, False)
    runs = all_records(store, "run", services.namespace, None)
    named += [row.branch.thread for row in leases] + [row.branch.thread for row in runs]
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
