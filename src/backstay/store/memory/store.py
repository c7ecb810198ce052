"""The memory store: the reference implementation. It is the shortest correct store, so read it first.

Every verb reads the tables, decides, and ends in one mutation (``mutations.py``), which ``_apply`` applies. All of it
happens under one lock (``transactions.py``), so every verb is atomic. Nothing survives the process: ``memory:`` is for
tests and experiments, and for comparing the other stores with. The directory store extends this one: it writes each
mutation to a log before it applies it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

from backstay.errors import Corrupted, StoreRefused
from backstay.pieces.manifest import Range, Source
from backstay.store.base import (
    PAGE_ROWS_MAX,
    Branch,
    BranchKey,
    Commit,
    Committed,
    Finding,
    Head,
    NamespaceTotals,
    Query,
    Removed,
    Row,
    Sizes,
    WriteRow,
    branch_moved,
    check_batch,
    first_results,
    id_is_taken,
    no_checkpoint,
    required_is_gone,
    tags_after,
)
from backstay.store.leases import NO_LEASE, Clock, ClockReading, LeaseGrant, LeaseRequest, LeaseRow, LeaseStatus
from backstay.store.memory.chunks import MemoryContent
from backstay.store.memory.mutations import (
    BranchDropped,
    BranchStored,
    CheckpointsDeleted,
    CheckpointStored,
    MutationGroup,
    Rebuilt,
    RecordsDropped,
    RecordStored,
    TagsChanged,
    ThreadDeleted,
    WritesStored,
)
from backstay.store.memory.repair import plan_rebuild, plan_restore
from backstay.store.memory.tables import MemoryBranch, ThreadNumbers, find_rows
from backstay.store.memory.transactions import MemoryTransactions, reading, writing
from backstay.store.records import (
    Fence,
    Kind,
    Record,
    RunQuery,
    StoredRun,
    checkpoint_is_gone,
    is_repeated,
    once_per_branch,
    run_changed,
    winner,
    written,
)


def process_clock() -> ClockReading:
    """Return the time now. The process's own clock is enough, since nothing outlives the process."""
    return ClockReading(time.monotonic_ns() // 1000, "")


class MemoryStore(MemoryTransactions):
    """Stores checkpoints in this process only."""

    def __init__(self, url: str = "memory:", clock: Clock = process_clock) -> None:
        super().__init__(url)
        self._clock = clock

    # Reading ------------------------------------------------------------------------------------------------------

    @reading
    def head(self, branch: BranchKey) -> Head | None:
        return self._tables.head(branch)

    @reading
    def find(self, query: Query) -> list[Row]:
        return find_rows(query, self._tables)

    @reading
    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []

    @reading
    def branches(
        self, namespace: str, thread: str | None, scope: str | None, after: int = 0, limit: int = PAGE_ROWS_MAX
    ) -> list[Branch]:
        found = (
            branch.shown()
            for branch in self._branches_after(namespace, thread, after)
            if branch.last_seq and scope in (None, branch.key.scope)
        )
        return list(islice(found, max(0, min(limit, PAGE_ROWS_MAX))))

    @reading
    def forked(self, namespace: str, checkpoints: Collection[str]) -> set[str]:
        return {name for name in checkpoints if (namespace, name) in self._tables.forks}

    @reading
    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        return [self._tables.bytes.read(piece) for piece in ranges]

    @reading
    def sizes(self, sources: Collection[Source] | None = None) -> Sizes:
        stored, rows = self._tables.bytes, self._tables.rows.values()
        every = stored.sizes(stored.names())
        total = sum(every.values()) + sum(len(row.manifest) + len(row.notes) for row in rows)
        return Sizes(total, every if sources is None else stored.sizes(sources))

    @reading
    def totals(self, namespace: str) -> NamespaceTotals:
        branches = [branch for branch in self._branches_after(namespace, None, 0) if branch.last_seq]
        sizes = [row.size for (space, _), row in self._tables.rows.items() if space == namespace]
        return NamespaceTotals(len({branch.key.thread for branch in branches}), len(branches), len(sizes), sum(sizes))

    # Writing ------------------------------------------------------------------------------------------------------

    @writing
    def reserve(self, count: int) -> int:
        self._tables.last_stream += count
        return self._tables.last_stream - count + 1

    @writing
    def commit(self, commit: Commit) -> Committed:
        tables, key = self._tables, commit.branch
        existing = tables.rows.get((key.namespace, commit.id))
        branch = tables.branches.get(key)
        replaces = existing is not None and tables.is_head(existing) and commit.replaces(existing.digest, existing.seq)
        if existing is not None and not replaces:
            if branch is None or (existing.branch, existing.digest) != (key, commit.digest):
                raise id_is_taken(commit)
            return Committed(branch.number, existing.seq, False)
        self._check_writer(branch, commit)
        mutation = self._saved(commit, self._next_seq(key), existing)
        self._apply(mutation)
        return Committed(mutation.branch_number, mutation.row.seq, True)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        return self._commit_all(commits) if commits else []

    @writing
    def _commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        tables, key = self._tables, commits[0].branch
        rows = [tables.rows.get((key.namespace, commit.id)) for commit in commits]
        stored = {row.id: (tables.branches[row.branch].number, row.seq, row.digest) for row in rows if row is not None}
        branch = tables.branches.get(key)
        done = first_results(commits, stored, branch.number if branch else 0)
        if done is not None:
            return done
        self._check_writer(branch, commits[0])
        first_seq = self._next_seq(key)
        mutations = [
            self._saved(commit, first_seq + at, None, commits[at - 1] if at else None)
            for at, commit in enumerate(commits)
        ]
        self._apply(MutationGroup(mutations))
        return [Committed(mutation.branch_number, mutation.row.seq, True) for mutation in mutations]

    @writing
    def write(self, branch: BranchKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        kept = self._tables.writes_of(branch, checkpoint)
        new = {(row.task_id, row.index): row for row in (writes if replace else reversed(writes))}
        rows = [row for name, row in new.items() if replace or name not in kept]
        self._apply(WritesStored(branch, self._tables.number_of(branch), checkpoint, rows))

    @writing
    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        row = self._tables.rows.get((namespace, checkpoint))
        if row is None:
            raise no_checkpoint(checkpoint)
        before = self._tables.tags.get((namespace, checkpoint), ())
        tags = tags_after(before, add, remove)
        if tags != before:
            self._apply(TagsChanged(row.branch, checkpoint, tags))
        return tags

    # Deleting -----------------------------------------------------------------------------------------------------

    @writing
    def delete(
        self,
        namespace: str,
        checkpoints: Collection[str],
        protect: bool,
        token: str | None = None,
        *,
        tagged: bool = False,
        forked: bool = False,
    ) -> Removed:
        tables = self._tables
        awaited: dict[str, set[str | None]] = {}
        to_delete = []
        for name in dict.fromkeys(checkpoints):
            row = tables.rows.get((namespace, name))
            if row is None:
                continue
            is_head = tables.is_head(row)
            thread = row.branch.thread
            if protect and thread not in awaited:
                awaited[thread] = tables.awaited(namespace, thread)
            if protect and (is_head or name in awaited[thread]):
                continue
            if (tagged and tables.tags.get((namespace, name))) or (forked and (namespace, name) in tables.forks):
                continue
            if is_head:
                tables.branches[row.branch].lease.check_delete(row.branch, token, self._clock())
            to_delete.append(row)
        return self._apply(self._deleted(namespace, to_delete)) if to_delete else Removed()

    @writing
    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        if (namespace, thread) not in self._tables.threads:
            return Removed()
        now = self._clock()
        branches = self._branches_after(namespace, thread, 0)
        for branch in sorted(branches, key=lambda branch: branch.lease.left_us(now)):
            branch.lease.check_delete(branch.key, token, now)
        digests = {row.id: row.digest for branch in branches for row in branch.rows}
        return self._apply(ThreadDeleted(namespace, thread, digests, self._tables.counters()))

    # Leases -------------------------------------------------------------------------------------------------------

    @writing
    def acquire(self, branch: BranchKey, request: LeaseRequest, run: Record | None = None) -> LeaseGrant:
        found = self._tables.branches.get(branch)
        lease = (found.lease if found else NO_LEASE).acquired(branch, request, self._clock())
        if found is None:
            found = MemoryBranch(branch, self._branch_number(branch))
        stored = self._run_stored(run)
        leased = self._leased_as(found, lease)
        self._apply(leased if stored is None else MutationGroup([leased, stored]))
        kept = None if run is None else self._tables.records.find("run", run.branch, run.key)
        return LeaseGrant(branch, found.number, lease.epoch, kept)

    @writing
    def renew(self, branch: BranchKey, epoch: int, request: LeaseRequest) -> None:
        found = self._tables.branches.get(branch)
        lease = (found.lease if found else NO_LEASE).renewed(branch, epoch, request, self._clock())
        if found is not None:
            self._apply(self._leased_as(found, lease))

    @writing
    def release(self, branch: BranchKey, epoch: int, token: str, run: Record | None = None) -> None:
        found = self._tables.branches.get(branch)
        if found is None:
            return
        lease = found.lease.released(branch, epoch, token, self._clock())
        stored = self._run_stored(run)
        changes: list[RecordStored | BranchDropped | BranchStored] = [] if stored is None else [stored]
        if not found.last_seq:
            changes.append(BranchDropped(branch, self._tables.counters()))
        elif lease != found.lease:
            changes.append(self._leased_as(found, lease))
        if changes:
            self._apply(changes[0] if len(changes) == 1 else MutationGroup(changes))

    @reading
    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseStatus]:
        now = self._clock()
        rows = (branch.lease_status(now) for branch in self._tables.leased.values())
        found = [
            row
            for row in rows
            if row.branch.namespace == namespace
            and thread in (None, row.branch.thread)
            and (not expired_only or row.left_us <= 0)
        ]
        return sorted(found, key=lambda row: (row.left_us, row.number))

    @writing
    def claim(
        self,
        namespace: str,
        graphs: Collection[tuple[str, str]],
        count: int,
        request: LeaseRequest,
        now_us: int,
        dead: Collection[str],
        change: Callable[[Record], Record | None],
    ) -> list[LeaseGrant]:
        tables, now = self._tables, self._clock()

        def is_free(key: BranchKey) -> bool:
            lease = tables.branches[key].lease if key in tables.branches else NO_LEASE
            return lease.left_us(now) <= 0 or lease.token in dead

        every = chain(tables.records.running(namespace, graphs), tables.records.due(namespace, graphs, now_us))
        free = once_per_branch((run, change(run)) for run in every if is_free(run.branch))
        taken = []
        for run, changed in list(islice(free, max(0, count))):
            branch = tables.branches.get(run.branch) or MemoryBranch(run.branch, self._branch_number(run.branch))
            lease = branch.lease.acquired(run.branch, request._replace(over=branch.lease.epoch), now)
            stored = written(changed, run, 0)
            leased = self._leased_as(branch, lease)
            self._apply(MutationGroup([leased, RecordStored(stored, leased.thread_number)]))
            taken.append(LeaseGrant(run.branch, branch.number, lease.epoch, stored))
        return taken

    # Records ------------------------------------------------------------------------------------------------------

    @reading
    def record(self, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        return self._tables.records.find(kind, branch, key)

    @writing
    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        tables = self._tables
        stored = tables.records.find(record.kind, record.branch, record.key)
        if stored is not None and is_repeated(record, stored):
            return stored
        if fence is not None:
            branch = tables.branches.get(record.branch)
            lease = branch.lease if branch else NO_LEASE
            lease.check_writer(record.branch, fence.epoch, fence.token, self._clock())
        if (won := winner(record, stored)) is not None:
            return won
        if stored is None and record.checkpoint is not None:
            row = tables.rows.get((record.branch.namespace, record.checkpoint))
            if row is None or row.branch[:3] != record.branch[:3]:
                raise checkpoint_is_gone(record)
        new = written(record, stored, tables.records.last_number + 1)
        change, also = RecordStored(new, tables.number_of(record.branch)), self._run_stored(run, new.number)
        self._apply(change if also is None else MutationGroup([change, also]))
        return new

    def _run_stored(self, run: Record | None, taken: int = 0) -> RecordStored | None:
        """Return the mutation that stores a run with another change; None if there is none, or it was stored before."""
        if run is None:
            return None
        stored = self._tables.records.find("run", run.branch, run.key)
        if stored is not None and is_repeated(run, stored):
            return None
        if (stored is None and run.version) or winner(run, stored) is not None:
            raise run_changed(run, stored)
        new = written(run, stored, max(self._tables.records.last_number, taken) + 1)
        return RecordStored(new, self._tables.number_of(run.branch))

    @reading
    def records(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int
    ) -> list[Record]:
        return self._tables.records.listed(kind, namespace, thread, open_only, after, limit)

    @writing
    def drop_records(self, records: Collection[Record]) -> int:
        kept = self._tables.records
        found = [(record, kept.find(record.kind, record.branch, record.key)) for record in records]
        names = [
            (record.kind, record.branch, record.key, record.version)
            for record, stored in found
            if stored is not None and stored.version == record.version
        ]
        if names:
            self._apply(RecordsDropped(names, self._tables.counters()))
        return len(names)

    @reading
    def run(self, branch: BranchKey) -> StoredRun | None:
        found = self._tables.records.newest_run(branch)
        return None if found is None else self._stored_run(found, self._clock())

    @reading
    def runs(self, query: RunQuery) -> list[StoredRun]:
        now = self._clock()
        return [self._stored_run(record, now) for record in self._tables.records.runs(query)]

    @reading
    def count_runs(self, namespace: str, statuses: Collection[str]) -> dict[str, int]:
        counts = {status: self._tables.records.count_runs(namespace, status) for status in statuses}
        return {status: count for status, count in counts.items() if count}

    def _stored_run(self, record: Record, now: ClockReading) -> StoredRun:
        branch = self._tables.branches.get(record.branch)
        lease = None if branch is None or branch.lease.token is None else branch.lease_status(now)
        return StoredRun(record, lease, branch.rows[-1].step if branch is not None and branch.rows else None)

    # Maintenance --------------------------------------------------------------------------------------------------

    @reading
    def check(self) -> list[Finding]:
        plan = plan_rebuild(self._tables, drop=True)
        return [*plan.findings, *plan.unrepairable]

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        run = self._read if dry_run else self._write
        return run(partial(self._rebuild, dry_run, drop))

    def _rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        findings = plan_rebuild(self._tables, drop).findings
        if findings and not dry_run:
            self._apply(Rebuilt(drop))
        return findings

    @writing
    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        self._apply(plan_restore(self._tables, blobs, chunks, rows))

    @writing
    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        row = self._tables.rows.get((namespace, checkpoint))
        if row is None:
            raise no_checkpoint(checkpoint)
        if not force:
            self._tables.branches[row.branch].lease.check_delete(row.branch, None, self._clock())
        self._apply(self._deleted(namespace, [row], keeps_bytes=True))

    def backup(self, path: Path) -> None:
        raise StoreRefused(
            "a store in memory has no files to copy", hint="Export its threads with backstay.bundle.export_bundle"
        )

    @writing
    def compact(self, full: bool = False) -> int:
        return 0

    # Deciding -----------------------------------------------------------------------------------------------------

    def _deleted(self, namespace: str, to_delete: Sequence[Row], keeps_bytes: bool = False) -> CheckpointsDeleted:
        tables = self._tables
        names = dict.fromkeys(row.branch[:2] for row in to_delete)
        marks = [ThreadNumbers(*name, tables.threads[name].number, tables.threads[name].next_seq) for name in names]
        digests = {row.id: row.digest for row in to_delete}
        touched = dict.fromkeys(row.branch for row in to_delete)
        branches = {key: all(row.id in digests for row in tables.branches[key].rows) for key in touched}
        return CheckpointsDeleted(namespace, digests, branches, tables.counters(), marks, keeps_bytes)

    def _branch_number(self, key: BranchKey) -> int:
        """Return the branch's number; for a new branch the next free one, after its thread's."""
        branch = self._tables.branches.get(key)
        return branch.number if branch else max(self._tables.last_number, self._tables.number_of(key)) + 1

    def _next_seq(self, key: BranchKey) -> int:
        thread = self._tables.threads.get(key[:2])
        return thread.next_seq if thread is not None else 1

    def _saved(self, commit: Commit, seq: int, replaced: Row | None, before: Commit | None = None) -> CheckpointStored:
        """Return the mutation of a commit; ``before`` is the commit right before it in the same batch."""
        tables, key = self._tables, commit.branch
        branch = tables.branches.get(key)
        row = commit.row(tables.number_of(key), seq)
        if replaced is not None:
            row = row._replace(parent_digest=commit.parent_digest)
        elif commit.parent_digest is not None and commit.parent_id is not None:
            # A delete looks for children only in the next row of the branch and in the first rows of forks.
            rows = branch.rows if branch is not None else []
            previous = before if before is not None else rows[-1] if rows else None
            if previous is None and commit.forked_from == commit.parent_id:
                previous = tables.rows.get((key.namespace, commit.parent_id))
            if previous is None or (previous.id, previous.digest) != (commit.parent_id, commit.parent_digest):
                row = row._replace(parent_digest=commit.parent_digest)
        lease = None
        if commit.claim is not None:
            lease = (branch.lease if branch else NO_LEASE).extended(commit.claim, self._clock())
        return CheckpointStored(
            row,
            self._branch_number(key),
            {name: MemoryContent(data) for name, data in commit.blobs.items()},
            [(stream, offset, MemoryContent(data)) for stream, offset, data in commit.chunks],
            {source: source in commit.owned for source in commit.sources},
            commit.forked_from,
            lease,
            None if replaced is None else replaced.digest,
        )

    def _check_writer(self, branch: MemoryBranch | None, commit: Commit) -> None:
        token = None if commit.claim is None else commit.claim.token
        (branch.lease if branch else NO_LEASE).check_writer(commit.branch, commit.epoch, token, self._clock())
        seen = (branch.number, branch.last_seq, branch.head_seq) if branch else (0, 0, 0)
        if seen != (commit.number, commit.last_seq, commit.head_seq):
            raise branch_moved(commit)
        if commit.requires is not None:
            source = self._tables.rows.get((commit.branch.namespace, commit.requires))
            if source is None or not commit.may_take(source.digest):
                raise required_is_gone(commit)

    def _leased_as(self, branch: MemoryBranch, lease: LeaseRow) -> BranchStored:
        return BranchStored(
            branch.key, branch.number, self._tables.number_of(branch.key), lease, branch.last_seq, branch.origin
        )

    def _branches_after(self, namespace: str, thread: str | None, after: int) -> Iterable[MemoryBranch]:
        """Return the branches of a thread, or of all, with a higher number, in the order of their numbers."""
        if thread is None:
            return (branch for branch in self._tables.branch_order.above(after) if branch.key.namespace == namespace)
        found = self._tables.threads.get((namespace, thread))
        own = [] if found is None else [branch for branch in found.branches.values() if branch.number > after]
        return sorted(own, key=lambda branch: branch.number)
