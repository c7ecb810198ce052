"""Mutations: the outcome of a verb, decided and numbered, and how it changes the tables.

A verb of this store reads the tables, decides, and ends in one mutation; nothing else changes the tables. The memory
store applies a mutation and forgets it. The directory store writes it to a log first, and opens by applying the same
mutations in the same order. So a mutation holds results (numbers, sequence numbers, the lease's holder and expiry) and
never a question that a clock or another writer could answer differently the second time. ``apply`` changes the tables
and returns what was removed.

An interrupt may arrive between any two instructions of ``apply``, which then runs again from the start and must end in
the same tables. So each change that marks a part as done comes after that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backstay.pieces.manifest import Source
from backstay.store.base import Removed, Row, WriteRow
from backstay.store.leases import BranchKey, LeaseRow
from backstay.store.memory.chunks import Content
from backstay.store.memory.tables import Counters, Tables, ThreadNumbers
from backstay.store.reachability import sources_of
from backstay.store.records import Kind, Record

NOTHING = Removed()


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """A checkpoint was added at the end of a branch, with its new bytes. The branch is created if it is missing."""

    row: Row
    branch_number: int
    blobs: Mapping[bytes, Content] = field(default_factory=dict)
    chunks: Sequence[tuple[int, int, Content]] = ()
    sources: Mapping[Source, bool] = field(default_factory=dict)  # -> whether the branch owns the stream
    origin: str | None = None  # of the branch, if this is its first checkpoint
    lease: LeaseRow | None = None  # the lease as this save extended it
    replaces: bytes | None = None  # digest of the head it replaces under the same id; children of that head keep it

    def apply(self, tables: Tables) -> Removed:
        row, space = self.row, self.row.branch.namespace
        thread = tables.thread(*row.branch[:2], row.thread_number)
        branch = tables.branch(row.branch, self.branch_number)
        replaced = tables.rows.get((space, row.id)) if self.replaces is not None else None
        if self.replaces is not None:
            tables.take_rows_out({row.id: self.replaces}, space)
            tables.forget_rows({row.id: self.replaces}, space)
        if not branch.last_seq:
            tables.set_origin(branch, self.origin)
        if self.lease is not None:
            tables.set_lease(branch, self.lease)
        thread.next_seq = max(thread.next_seq, row.seq + 1)
        branch.last_seq = max(branch.last_seq, row.seq)
        tables.add_row(branch, row)
        if row.tags:
            tables.tags[space, row.id] = row.tags
        tables.bytes.put(self.blobs, self.chunks)
        tables.refer(branch, self.sources)
        if self.replaces is not None:
            # Applied again, the old row may be forgotten already; then all bytes of the branch are looked at.
            is_known = replaced is not None and replaced.seq != row.seq
            tables.collect({branch.key: branch}, [replaced] if replaced is not None and is_known else None)
        return NOTHING


@dataclass(frozen=True, slots=True)
class BranchStored:
    """A branch exists and has this lease."""

    key: BranchKey
    number: int
    thread_number: int
    lease: LeaseRow
    last_seq: int = 0
    origin: str | None = None

    def apply(self, tables: Tables) -> Removed:
        tables.thread(*self.key[:2], self.thread_number)
        branch = tables.branch(self.key, self.number)
        tables.set_lease(branch, self.lease)
        branch.last_seq = max(branch.last_seq, self.last_seq)
        tables.set_origin(branch, branch.origin or self.origin)
        return NOTHING


@dataclass(frozen=True, slots=True)
class BranchDropped:
    """A branch without a checkpoint was removed when its lease was released."""

    key: BranchKey
    counters: Counters

    def apply(self, tables: Tables) -> Removed:
        tables.reserve_numbers(self.counters)
        is_last = self.key[:2] in tables.threads and not tables.has_more(*self.key[:2], besides=self.key)
        tables.drop_branch(self.key)
        if is_last:
            tables.drop_thread(*self.key[:2])
        return NOTHING


@dataclass(frozen=True, slots=True)
class WritesStored:
    """Results of tasks are stored with a checkpoint."""

    branch: BranchKey
    thread_number: int
    checkpoint: str
    rows: Sequence[WriteRow]

    def apply(self, tables: Tables) -> Removed:
        thread = tables.thread(*self.branch[:2], self.thread_number)
        stored = thread.writes.setdefault((self.branch.scope, self.checkpoint), {})
        stored.update({(row.task_id, row.index): row for row in self.rows})
        return NOTHING


@dataclass(frozen=True, slots=True)
class TagsChanged:
    """A checkpoint has these tags now."""

    branch: BranchKey
    checkpoint: str
    tags: tuple[str, ...]

    def apply(self, tables: Tables) -> Removed:
        tables.tags[self.branch.namespace, self.checkpoint] = self.tags
        return NOTHING


@dataclass(frozen=True, slots=True)
class CheckpointsDeleted:
    """Checkpoints were deleted. Their children keep their digests.

    A replay may not find the checkpoints, because a rewrite has dropped them from their branch's log. Effects and
    writes that were stored before their branch existed are in another log, so the mutation itself names the branches.
    """

    namespace: str
    digests: Mapping[str, bytes]
    branches: Mapping[BranchKey, bool]  # the checkpoints' branches -> whether no checkpoint is left there
    counters: Counters
    threads: Sequence[ThreadNumbers]
    keeps_bytes: bool = False  # and effects: the checkpoints went into quarantine

    def apply(self, tables: Tables) -> Removed:
        tables.reserve_numbers(self.counters, self.threads)
        space, names = self.namespace, self.digests
        rows = [row for name in names if (row := tables.rows.get((space, name))) is not None]
        touched = {key: tables.branches[key] for key in self.branches if key in tables.branches}
        tables.take_rows_out(names, space)
        scopes = {key[:3]: tables.threads[key[:2]].writes for key in self.branches if key[:2] in tables.threads}
        for (_, _, scope), writes in scopes.items():
            for name in names if len(names) < len(writes) else [name for _, name in writes if name in names]:
                writes.pop((scope, name), None)
        emptied = {key for key, is_empty in self.branches.items() if is_empty}
        for thread in {key[:2] for key in self.branches}:
            tables.records.drop(
                record
                for record in tables.records.of_thread(*thread)
                if record.checkpoint in names
                or (record.kind == "effect" and record.branch in emptied and not self.keeps_bytes)
            )
        freed = 0 if self.keeps_bytes else tables.collect(touched, [row for row in rows if row.branch in touched])
        gone = [key for key in emptied & touched.keys() if not touched[key].rows]
        for key in gone:
            tables.drop_branch(key)
        tables.forget_rows(names, space)
        return Removed(len(rows), len(gone), freed)


@dataclass(frozen=True, slots=True)
class ThreadDeleted:
    """A thread was deleted with everything in it. Children in other threads keep its checkpoints' digests."""

    namespace: str
    thread: str
    digests: Mapping[str, bytes]
    counters: Counters

    def apply(self, tables: Tables) -> Removed:
        name = (self.namespace, self.thread)
        # Asked of the index, which forgets its rows last: an interrupted apply runs again and must collect their bytes.
        rows = (tables.rows.get((self.namespace, each)) for each in self.digests)
        emptied = {row.branch: True for row in rows if row is not None}
        removed = CheckpointsDeleted(self.namespace, self.digests, emptied, self.counters, ()).apply(tables)
        tables.records.drop(tables.records.of_thread(*name))
        thread = tables.threads.get(name)
        for key in list(thread.branches) if thread is not None else ():
            tables.drop_branch(key)
        tables.drop_thread(*name)
        return removed


@dataclass(frozen=True, slots=True)
class RecordStored:
    """A record has this content now."""

    record: Record
    thread_number: int

    def apply(self, tables: Tables) -> Removed:
        tables.thread(*self.record.branch[:2], self.thread_number)
        tables.records.put(self.record)
        return NOTHING


@dataclass(frozen=True, slots=True)
class RecordsDropped:
    """Records were deleted, each if it still has this version."""

    names: Sequence[tuple[Kind, BranchKey, str, int]]  # kind, branch, key, version
    counters: Counters

    def apply(self, tables: Tables) -> Removed:
        tables.reserve_numbers(self.counters)
        found = [(tables.records.find(kind, branch, key), version) for kind, branch, key, version in self.names]
        tables.records.drop(record for record, version in found if record is not None and record.version == version)
        return NOTHING


@dataclass(frozen=True, slots=True)
class NumbersReserved:
    """These numbers are taken, and these threads exist, even if nothing else about them is known."""

    counters: Counters
    threads: Sequence[ThreadNumbers] = ()

    def apply(self, tables: Tables) -> Removed:
        tables.reserve_numbers(self.counters, self.threads)
        return NOTHING


@dataclass(frozen=True, slots=True)
class BytesStored:
    """Bytes are stored here, replacing older bytes at the same addresses."""

    blobs: Mapping[bytes, Content] = field(default_factory=dict)
    chunks: Sequence[tuple[int, int, Content]] = ()

    def apply(self, tables: Tables) -> Removed:
        tables.bytes.put(self.blobs, self.chunks, replace=True)
        return NOTHING


@dataclass(frozen=True, slots=True)
class RowRestored:
    """A repair replaced a checkpoint's row; its branch also needs these sources.

    If the row is a head, ``last_seq`` is the branch's new one, so that writers that saw the old head get a Conflict.
    Otherwise it is 0.
    """

    row: Row
    sources: tuple[Source, ...]
    last_seq: int = 0

    def apply(self, tables: Tables) -> Removed:
        row, branch = self.row, tables.branches.get(self.row.branch)
        if branch is not None:
            tables.replace_row(row)
            tables.refer(branch, dict.fromkeys(self.sources, False))
            branch.scattered.update(branch.sources)  # it may no longer need what its neighbours need
            thread = tables.threads[row.branch[:2]]
            thread.next_seq = max(thread.next_seq, self.last_seq + 1)
            branch.last_seq = max(branch.last_seq, self.last_seq)
        return NOTHING


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A repair derived the references again from rows and manifests; ``drops`` also removed unreferenced data."""

    drops: bool

    def apply(self, tables: Tables) -> Removed:
        for branch in tables.branches.values():
            for row in branch.rows:
                tables.refer(branch, dict.fromkeys(sources_of(row, tables.bytes.blob), False))
            branch.scattered.update(branch.sources)
        if not self.drops:
            return NOTHING
        tables.records.drop(filter(tables.has_lost_checkpoint, tables.records))
        return Removed(bytes=tables.collect(tables.branches) + tables.drop_unreferenced())


@dataclass(frozen=True, slots=True)
class MutationGroup:
    """Mutations that are applied together, or none of them."""

    mutations: Sequence[Mutation]

    def apply(self, tables: Tables) -> Removed:
        return sum((each.apply(tables) for each in self.mutations), NOTHING)


Mutation = (
    CheckpointStored
    | BranchStored
    | BranchDropped
    | WritesStored
    | TagsChanged
    | CheckpointsDeleted
    | ThreadDeleted
    | RecordStored
    | RecordsDropped
    | NumbersReserved
    | BytesStored
    | RowRestored
    | Rebuilt
    | MutationGroup
)
