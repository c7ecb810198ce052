"""All data of the memory store, as dictionaries. Only mutations change them, and no question is decided here.

Every list and every delete finds its rows by a dictionary or a sorted list of numbers, so its cost does not depend on
the other threads of the store.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.manifest import Source
from backstay.store.base import PAGE_ROWS_MAX, Branch, Head, Query, Row, WriteRow
from backstay.store.leases import NO_LEASE, BranchKey, ClockReading, LeaseGrant, LeaseRow, LeaseStatus
from backstay.store.memory.chunks import Content, StoredBytes
from backstay.store.reachability import Losses, collect, losses
from backstay.store.records import KINDS, RUNNING, Kind, Record, RunQuery, record_id

K = TypeVar("K")
V = TypeVar("V")
SEQ = attrgetter("seq")


class Numbered(Generic[V]):
    """Values by number, listed in the order of their numbers. Putting or dropping a value twice does nothing more."""

    def __init__(self) -> None:
        self._values: dict[int, V] = {}
        self._order: list[int] = []

    def put(self, number: int, value: V) -> None:
        """Store a value."""
        self._values[number] = value
        at = bisect_left(self._order, number)
        if self._order[at : at + 1] != [number]:
            self._order.insert(at, number)

    def drop(self, number: int) -> None:
        """Remove a value if it exists."""
        at = bisect_left(self._order, number)
        if self._order[at : at + 1] == [number]:
            del self._order[at]
        self._values.pop(number, None)

    def __len__(self) -> int:
        return len(self._order)

    def get(self, number: int) -> V | None:
        """Return a value, or None."""
        return self._values.get(number)

    def above(self, number: int) -> Iterator[V]:
        """Iterate over the values with higher numbers, lowest first."""
        return (self._values[self._order[at]] for at in range(bisect_right(self._order, number), len(self._order)))

    def below(self, number: int | None) -> Iterator[V]:
        """Iterate over the values with lower numbers, or over all, highest first."""
        end = len(self._order) if number is None else bisect_left(self._order, number)
        return (self._values[self._order[at]] for at in range(end - 1, -1, -1))


class Counters(NamedTuple):
    """The highest numbers given out so far. Deletes never bring a number back."""

    number: int = 0  # of threads and branches
    stream: int = 0
    record: int = 0


class ThreadNumbers(NamedTuple):
    """A thread's number, and the sequence number of its next checkpoint."""

    namespace: str
    thread: str
    number: int
    next_seq: int


RunList = tuple[str | None, ...]
"""The name of a list of runs: a namespace, and optionally a thread, graph, status, scope and branch."""


class RecordTable:
    """All records, by name; in lists by kind, and for deletes by thread. Runs also by what lists and claims ask for."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Record] = {}
        self._listed: dict[tuple[Kind, bool], Numbered[bytes]] = {
            (kind, open_only): Numbered() for kind in KINDS for open_only in (False, True)
        }
        self._of_thread: dict[tuple[str, str], dict[bytes, None]] = {}
        self._runs: dict[RunList, Numbered[bytes]] = {}
        self._due: dict[tuple[str, str, str], list[tuple[int, int, bytes]]] = {}
        self.last_number = 0

    def __iter__(self) -> Iterator[Record]:
        return iter(self._kept.values())

    def put(self, record: Record) -> None:
        """Store a record."""
        name = record_id(record.kind, record.branch, record.key)
        self.last_number = max(self.last_number, record.number)
        if name in self._kept and self._kept[name].number != record.number:
            self._drop(name)
        self._list_run(name, record)
        self._kept[name] = record
        self._of_thread.setdefault(record.branch[:2], {})[name] = None
        self._listed[record.kind, False].put(record.number, name)
        if record.open:
            self._listed[record.kind, True].put(record.number, name)
        else:
            self._listed[record.kind, True].drop(record.number)

    def find(self, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        """Return one record, or None."""
        return self._kept.get(record_id(kind, branch, key))

    def of_thread(self, namespace: str, thread: str) -> list[Record]:
        """Return all records of a thread."""
        return [self._kept[name] for name in self._of_thread.get((namespace, thread), ())]

    def listed(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int
    ) -> list[Record]:
        """See ``Backend.records``."""
        found: Iterable[Record]
        if thread is None:
            found = (self._kept[name] for name in self._listed[kind, open_only].above(after))
            found = (record for record in found if record.branch.namespace == namespace)
        else:
            found = (self._kept[name] for name in self._of_thread.get((namespace, thread), ()))
            found = (record for record in found if record.kind == kind and record.number > after)
            found = (record for record in found if record.open or not open_only)
            found = sorted(found, key=lambda record: record.number)
        return list(islice(found, max(0, min(limit, PAGE_ROWS_MAX))))

    # Runs -----------------------------------------------------------------------------------------------------------

    def newest_run(self, branch: BranchKey) -> Record | None:
        """Return the newest run of a branch, or None."""
        runs = self._runs.get((*branch, None))
        return None if runs is None else next((self._kept[name] for name in runs.below(None)), None)

    def runs(self, query: RunQuery) -> list[Record]:
        """See ``Backend.runs``."""
        place = (
            (query.namespace, query.thread)
            if query.thread is not None
            else (query.namespace, query.graph, query.status)
        )
        runs = self._runs.get(place)
        found = () if runs is None else (self._kept[name] for name in runs.below(query.before))
        return list(islice(filter(query.names, found), max(0, min(query.limit, PAGE_ROWS_MAX))))

    def count_runs(self, namespace: str, status: str) -> int:
        """Return how many runs have a status."""
        return len(self._runs.get((namespace, None, status), ()))

    def running(self, namespace: str, graphs: Collection[tuple[str, str]]) -> Iterator[Record]:
        """Iterate over the runs of these graphs that a process executes, or did when it died; oldest first."""
        lists = (self._runs.get((namespace, name, RUNNING)) for name in dict.fromkeys(name for name, _ in graphs))
        found = (map(self._kept.__getitem__, runs.above(0)) for runs in lists if runs is not None)
        every = heapq.merge(*found, key=lambda run: run.number)
        return (run for run in every if run.run is not None and run.run[1:3] in graphs)

    def due(self, namespace: str, graphs: Collection[tuple[str, str]], now_us: int) -> Iterator[Record]:
        """Iterate over the runs of these graphs that are due, earliest first."""
        lists = [self._due.get((namespace, *graph), []) for graph in dict.fromkeys(graphs)]
        ready = (takewhile(lambda entry: entry[0] <= now_us, listed) for listed in lists)
        return (self._kept[name] for _, _, name in heapq.merge(*ready))

    def _list_run(self, name: bytes, record: Record) -> None:
        """Put a run into its lists, and take it out of those that it was in before."""
        before = self._kept.get(name)
        places = _run_lists(record)
        for place in _run_lists(before) - places if before is not None else ():
            self._unlist_run(place, record.number)
        for place in places:
            self._runs.setdefault(place, Numbered()).put(record.number, name)
        for run, is_due in ((None if before is None else before.run, False), (record.run, True)):
            if run is None or run.due_us is None:
                continue
            listed = self._due.setdefault((record.branch.namespace, run.graph, run.fingerprint), [])
            entry = (run.due_us, record.number, name)
            at = bisect_left(listed, entry)
            if (listed[at : at + 1] == [entry]) != is_due:
                listed[at : at + (not is_due)] = [entry] if is_due else []

    def _unlist_run(self, place: RunList, number: int) -> None:
        runs = self._runs.get(place)
        if runs is not None:
            runs.drop(number)
            if not len(runs):
                self._runs.pop(place, None)

    def drop(self, records: Iterable[Record]) -> None:
        """Delete these records."""
        for record in list(records):
            self._drop(record_id(record.kind, record.branch, record.key))

    def _drop(self, name: bytes) -> None:
        record = self._kept[name]
        for place in _run_lists(record):
            self._unlist_run(place, record.number)
        if record.run is not None:
            self._list_run(name, replace(record, run=None))
        for open_only in (True, False):
            self._listed[record.kind, open_only].drop(record.number)
        names = self._of_thread.get(record.branch[:2], {})
        names.pop(name, None)
        if not names:
            self._of_thread.pop(record.branch[:2], None)
        del self._kept[name]  # last: until then an interrupted drop finds it again


def _run_lists(record: Record) -> set[RunList]:
    """Return the lists that a run is in; none for other records."""
    run, space = record.run, record.branch.namespace
    if run is None:
        return set()
    mixed: set[RunList] = {(space, graph, status) for graph in (None, run.graph) for status in (None, run.status)}
    return mixed | {(space, record.branch.thread), (*record.branch, None)}


Writes = dict[tuple[str, int], WriteRow]


@dataclass
class MemoryThread:
    """A thread: its number, the sequence number of its next checkpoint, its branches, and its pending writes."""

    number: int
    next_seq: int = 1
    branches: dict[BranchKey, MemoryBranch] = field(default_factory=dict)
    writes: dict[tuple[str, str], Writes] = field(default_factory=dict)  # by scope and checkpoint


@dataclass
class MemoryBranch:
    """A branch with its rows, the sources they need, and its lease. A branch that was only leased has no rows."""

    key: BranchKey
    number: int
    last_seq: int = 0
    lease: LeaseRow = NO_LEASE
    origin: str | None = None
    rows: list[Row] = field(default_factory=list)  # in rising order of seq
    sources: dict[Source, bool] = field(default_factory=dict)  # -> whether the branch owns the stream
    scattered: set[Source] = field(default_factory=set)  # those that came back after an absence: see ``collect``

    def around(self, seq: int) -> list[Row]:
        """Return the row before this number and the row after it, as far as they exist; neither has it."""
        at = bisect_left(self.rows, seq, key=SEQ)
        after = at + 1 if at < len(self.rows) and self.rows[at].seq == seq else at
        return [*self.rows[max(0, at - 1) : at], *self.rows[after : after + 1]]

    @property
    def head_seq(self) -> int:
        """Sequence number of the newest checkpoint; 0 if the branch has none."""
        return self.rows[-1].seq if self.rows else 0

    def shown(self) -> Branch:
        """Return the branch as lists show it."""
        head = self.rows[-1].id if self.rows else None
        return Branch(self.key, self.number, head, self.head_seq, self.last_seq, self.lease.epoch, self.origin)

    def held(self) -> LeaseGrant:
        """Return the lease as its holder gets it."""
        return LeaseGrant(self.key, self.number, self.lease.epoch)

    def lease_status(self, now: ClockReading) -> LeaseStatus:
        """Return the lease as lists show it."""
        lease = self.lease
        return LeaseStatus(self.key, self.number, lease.owner or "", lease.epoch, lease.left_us(now), lease.token or "")


class Tables:
    """Threads, branches, rows and their data. ``collects`` is off while a replay applies many mutations."""

    def __init__(self, kept: StoredBytes, collects: bool = True) -> None:
        self.threads: dict[tuple[str, str], MemoryThread] = {}
        self.branches: dict[BranchKey, MemoryBranch] = {}
        self.rows: dict[tuple[str, str], Row] = {}
        self.tags: dict[tuple[str, str], tuple[str, ...]] = {}
        self.thread_order: Numbered[tuple[str, str]] = Numbered()
        self.branch_order: Numbered[MemoryBranch] = Numbered()
        self.leased: dict[BranchKey, MemoryBranch] = {}
        self.forks: dict[tuple[str, str], dict[BranchKey, None]] = {}  # by the checkpoint they were forked from
        self.users: dict[Source, dict[BranchKey, None]] = {}  # the branches that refer to a source
        self.bytes = kept
        self.records = RecordTable()
        self.last_number = 0
        self.last_stream = 0
        self.dropped: list[Content] = []  # bytes no longer needed; the directory store frees their space
        self._collects = collects
        self._deferred: set[BranchKey] = set()  # branches to collect when the replay ends

    # Reading ------------------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Return the highest numbers given out."""
        return Counters(self.last_number, self.last_stream, self.records.last_number)

    def thread_numbers(self) -> list[ThreadNumbers]:
        """Return every thread with its numbers."""
        return [ThreadNumbers(*name, thread.number, thread.next_seq) for name, thread in self.threads.items()]

    def number_of(self, branch: BranchKey) -> int:
        """Return the number of the branch's thread, or the next free one if the thread does not exist yet."""
        thread = self.threads.get(branch[:2])
        return thread.number if thread is not None else self.last_number + 1

    def shown(self, row: Row, payload: bool, writes: bool) -> Row:
        """Return a row as ``find`` returns it."""
        tags = self.tags.get((row.branch.namespace, row.id), ())
        pending = self.writes_of(row.branch, row.id) if writes else {}
        ordered = tuple(sorted(pending.values(), key=lambda w: (w.task_path, w.task_id, w.index)))
        if not payload:
            return row._replace(tags=tags, writes=ordered, base=None, manifest=b"")
        base = self.bytes.blobs.get(row.base) if row.base is not None else None
        digest = row.parent_digest
        if row.parent_id is not None and (row.branch.namespace, row.parent_id) in self.rows:
            digest = self.rows[row.branch.namespace, row.parent_id].digest if digest is None else digest
        return row._replace(
            tags=tags, writes=ordered, base_data=None if base is None else base.read(), parent_digest=digest
        )

    def head(self, key: BranchKey) -> Head | None:
        """Return a branch's head with its payload, or None if the branch does not exist."""
        branch = self.branches.get(key)
        if branch is None:
            return None
        owned = {
            stream: end
            for stream, own in branch.sources.items()
            if own and isinstance(stream, int) and (end := self.bytes.end(stream)) is not None
        }
        row = self.shown(branch.rows[-1], payload=True, writes=True) if branch.rows else None
        return Head(row, branch.number, branch.last_seq, branch.lease.epoch, owned)

    def writes_of(self, branch: BranchKey, checkpoint: str) -> Writes:
        """Return the pending writes of a checkpoint."""
        thread = self.threads.get(branch[:2])
        return {} if thread is None else thread.writes.get((branch.scope, checkpoint), {})

    def first_of_forks(self, namespace: str, checkpoint: str) -> list[Row]:
        """Return the oldest row of each branch that was forked from a checkpoint."""
        forks = (self.branches[key] for key in self.forks.get((namespace, checkpoint), ()))
        return [fork.rows[0] for fork in forks if fork.rows]

    def is_head(self, row: Row) -> bool:
        """Return whether a row is the newest of its branch."""
        branch = self.branches.get(row.branch)
        return branch is not None and bool(branch.rows) and branch.rows[-1].id == row.id

    def has_more(self, namespace: str, thread: str, besides: BranchKey) -> bool:
        """Return whether a thread has or had anything but this one branch."""
        found = self.threads[namespace, thread]
        return (
            found.next_seq > 1
            or any(key != besides for key in found.branches)
            or any(found.writes.values())
            or bool(self.records.of_thread(namespace, thread))
        )

    def has_lost_checkpoint(self, record: Record) -> bool:
        """Return whether a record belongs to a checkpoint that does not exist."""
        return record.checkpoint is not None and (record.branch.namespace, record.checkpoint) not in self.rows

    def awaited(self, namespace: str, thread: str) -> set[str | None]:
        """Return the checkpoints of a thread that have an open record."""
        return {record.checkpoint for record in self.records.of_thread(namespace, thread) if record.open}

    # Changing, by mutations only ----------------------------------------------------------------------------------

    def thread(self, namespace: str, thread: str, number: int) -> MemoryThread:
        """Return a thread; create it with this number if it is missing."""
        self.last_number = max(self.last_number, number)
        found = self.threads.setdefault((namespace, thread), MemoryThread(number))
        self.thread_order.put(found.number, (namespace, thread))
        return found

    def drop_thread(self, namespace: str, thread: str) -> None:
        """Remove a thread whose branches are gone."""
        found = self.threads.get((namespace, thread))
        if found is not None:
            self.thread_order.drop(found.number)
            self.threads.pop((namespace, thread))

    def branch(self, key: BranchKey, number: int) -> MemoryBranch:
        """Return a branch; create it with this number if it is missing."""
        self.last_number = max(self.last_number, number)
        branch = self.branches.get(key) or MemoryBranch(key, number)
        self.threads[key[:2]].branches[key] = branch
        self.branch_order.put(branch.number, branch)
        self.branches[key] = branch
        return branch

    def drop_branch(self, key: BranchKey) -> None:
        """Remove a branch, if it exists, with its references."""
        branch = self.branches.get(key)
        if branch is None:
            return
        self.unrefer(key, list(branch.sources))
        self.set_lease(branch, NO_LEASE)
        self.set_origin(branch, None)
        self.branch_order.drop(branch.number)
        self.threads[key[:2]].branches.pop(key, None)
        self.branches.pop(key)

    def set_lease(self, branch: MemoryBranch, lease: LeaseRow) -> None:
        """Give a branch this lease."""
        branch.lease = lease
        if lease.token is None:
            self.leased.pop(branch.key, None)
        else:
            self.leased[branch.key] = branch

    def set_origin(self, branch: MemoryBranch, origin: str | None) -> None:
        """Record which checkpoint a branch was forked from."""
        space = branch.key.namespace
        if branch.origin is not None and branch.origin != origin:
            _discard(self.forks, (space, branch.origin), branch.key)
        branch.origin = origin
        if origin is not None:
            self.forks.setdefault((space, origin), {})[branch.key] = None

    def refer(self, branch: MemoryBranch, sources: Mapping[Source, bool]) -> None:
        """Add references of a branch, each with whether it owns the stream."""
        for source, own in sources.items():
            if source in branch.sources:
                branch.scattered.add(source)
            self.users.setdefault(source, {})[branch.key] = None
            branch.sources.setdefault(source, own)

    def unrefer(self, branch: BranchKey, sources: Iterable[Source]) -> None:
        """Remove references of a branch."""
        found = self.branches[branch]
        for source in sources:
            _discard(self.users, source, branch)
            found.scattered.discard(source)
            found.sources.pop(source, None)

    def add_row(self, branch: MemoryBranch, row: Row) -> None:
        """Add the newest row of a branch. Added again, it may be followed by others of its batch."""
        at = bisect_left(branch.rows, row.seq, key=SEQ)
        is_there = at < len(branch.rows) and branch.rows[at].seq == row.seq
        branch.rows[at : at + is_there] = [row]
        self.rows[row.branch.namespace, row.id] = row

    def reserve_numbers(self, counters: Counters, threads: Iterable[ThreadNumbers] = ()) -> None:
        """Never give these numbers out again; create the threads that are missing."""
        self.last_number = max(self.last_number, counters.number)
        self.last_stream = max(self.last_stream, counters.stream)
        self.records.last_number = max(self.records.last_number, counters.record)
        for numbers in threads:
            thread = self.thread(numbers.namespace, numbers.thread, numbers.number)
            thread.next_seq = max(thread.next_seq, numbers.next_seq)

    def take_rows_out(self, digests: Mapping[str, bytes], space: str) -> None:
        """Take rows out of their branches. Their children keep their digests.

        A child is the next row of the branch, or the first of a fork; any other has the digest already.
        """
        spans: dict[BranchKey, list[int]] = {}
        for name, digest in digests.items():
            for child in self.first_of_forks(space, name):
                if child.parent_id == name and child.parent_digest is None:
                    self.replace_row(child._replace(parent_digest=digest))
            row = self.rows.get((space, name))
            if row is not None:
                spans.setdefault(row.branch, []).append(row.seq)
        for key, seqs in spans.items():
            branch = self.branches.get(key)
            if branch is None:
                continue
            low = bisect_left(branch.rows, min(seqs), key=SEQ)
            high = bisect_right(branch.rows, max(seqs), key=SEQ)
            left = []
            for row in branch.rows[low : high + 1]:  # with the row after them, which may be a child
                if row.id in digests:
                    continue
                if row.parent_id is not None and row.parent_id in digests and row.parent_digest is None:
                    row = row._replace(parent_digest=digests[row.parent_id])
                    self.rows[space, row.id] = row
                left.append(row)
            branch.rows[low : high + 1] = left

    def replace_row(self, row: Row) -> None:
        """Store another version of a row, if its branch has the row."""
        branch = self.branches.get(row.branch)
        at = bisect_left(branch.rows, row.seq, key=SEQ) if branch is not None else 0
        if branch is not None and at < len(branch.rows) and branch.rows[at].seq == row.seq:
            branch.rows[at] = row
            self.rows[row.branch.namespace, row.id] = row

    def forget_rows(self, digests: Mapping[str, bytes], space: str) -> None:
        """Remove these rows and their tags from the indexes."""
        for name in digests:
            self.tags.pop((space, name), None)
            self.rows.pop((space, name), None)

    def collect(self, touched: Mapping[BranchKey, MemoryBranch], deleted: Collection[Row] | None = None) -> int:
        """Drop references that the touched branches no longer need, then unreferenced bytes; return how many bytes.

        ``deleted`` are the rows that were taken out of these branches; None means that any bytes may be unneeded.
        """
        if not self._collects:
            self._deferred.update(touched)
            return 0
        return collect(self, self._losses(touched, deleted))

    def _losses(self, touched: Mapping[BranchKey, MemoryBranch], deleted: Collection[Row] | None) -> Losses[BranchKey]:
        """Return what may be unneeded now: everything, if it is not known what the deleted rows needed."""
        every: dict[BranchKey, set[Source]] = {key: set(branch.sources) for key, branch in touched.items()}
        if deleted is not None:
            near = {row[:3]: row for each in deleted for row in self._around(each)}  # by branch and number
            for row in deleted:
                near.pop(row[:3], None)
            try:
                lost = losses(map(_needs, deleted), map(_needs, near.values()), self.bytes.blob)
            except (Corrupted, DecodeError):
                return Losses(set().union(*every.values()), every, set(), {}, False)
            # Sources that an emptied branch refers to, although none of its rows needed them, are lost too.
            emptied = [every[key] for key, branch in touched.items() if not branch.rows]
            return lost._replace(sources=lost.sources | (set().union(*emptied) - lost.needed))
        return Losses(set().union(*every.values()), every, set(), {}, False)

    def _around(self, row: Row) -> list[Row]:
        """Return the rows that may share bytes with a deleted one: before and after it, and across forks."""
        space, branch = row.branch.namespace, self.branches[row.branch]
        found = branch.around(row.seq)
        if branch.origin is not None and (not found or found[0].seq > row.seq):
            found += [self.rows[name] for name in [(space, branch.origin)] if name in self.rows]
        return found + self.first_of_forks(space, row.id)

    # The rest of what ``collect`` needs.

    @property
    def lost(self) -> dict[int, list[tuple[int, int]]]:
        """Return nothing: every process that applies a mutation must drop the same bytes."""
        return {}

    def read_blob(self, name: bytes) -> bytes:
        """Return the bytes of a blob."""
        return self.bytes.blob(name)

    def manifests(self, branch: BranchKey) -> Iterator[tuple[bytes | None, bytes]]:
        """Iterate over the base and manifest of every row of a branch."""
        return ((row.base, row.manifest) for row in self.branches[branch].rows)

    def is_scattered(self, branch: BranchKey, source: Source) -> bool:
        """Return whether rows that need a source may be anywhere in a branch."""
        return source in self.branches[branch].scattered

    def referring(self, source: Source) -> list[BranchKey]:
        """Return the branches that refer to a source."""
        return list(self.users.get(source, ()))

    def chunks(self, stream: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stored ranges of a stream that overlap this one."""
        return self.bytes.chunks(stream, start, end)

    def drop_chunks(self, stream: int, chunks: Collection[tuple[int, int]]) -> int:
        """Drop stored ranges; return how many bytes."""
        return self._freed(self.bytes.drop_chunks(stream, chunks))

    def drop_blob(self, name: bytes) -> int:
        """Drop a blob; return how many bytes."""
        return self._freed(self.bytes.drop(name))

    def _freed(self, bodies: list[Content]) -> int:
        self.dropped += bodies
        return sum(body.stored for body in bodies)

    def drop_unreferenced(self) -> int:
        """Drop all bytes that no branch refers to; return how many."""
        if not self._collects:
            return 0
        unreferenced = [source for source in self.bytes.names() if source not in self.users]
        return self._freed([body for source in unreferenced for body in self.bytes.drop(source)])

    def collect_deferred(self) -> None:
        """Do the collecting that was deferred while many mutations were applied."""
        self._collects = True
        self.collect({key: self.branches[key] for key in self._deferred if key in self.branches})
        self._deferred.clear()
        self.drop_unreferenced()


def _discard(index: dict[K, dict[V, None]], key: K, value: V) -> None:
    """Remove a value from an index, and its key with the last one."""
    values = index.get(key, {})
    values.pop(value, None)
    if not values:
        index.pop(key, None)


def _needs(row: Row) -> tuple[BranchKey, bytes | None, bytes]:
    return row.branch, row.base, row.manifest


# Which rows of the memory store match a query, in order.


def find_rows(query: Query, tables: Tables) -> list[Row]:
    """Return the rows of the answer, newest first."""
    candidates: Iterable[Row]
    if query.heads_of_threads:
        threads = (tables.threads[name] for name in tables.thread_order.below(query.before))
        heads = (
            [branch.rows[-1] for branch in thread.branches.values() if branch.rows and query.covers(branch.key)]
            for thread in threads
        )
        candidates = (max(rows, key=SEQ) for rows in heads if rows)
    elif query.ids is not None:
        found = (tables.rows.get((query.namespace, name)) for name in dict.fromkeys(query.ids))
        candidates = sorted((row for row in found if row is not None), key=_order, reverse=True)
    else:
        thread = tables.threads.get((query.namespace, query.thread or ""))
        own = {} if thread is None else thread.branches
        if query.scope is not None and query.branch is not None:  # not a search among all others
            one = own.get(BranchKey(query.namespace, query.thread or "", query.scope, query.branch))
            branches = [] if one is None else [one]
        else:
            branches = [each for each in own.values() if query.covers(each.key)]
        pages = [_before(each.rows, query.before) for each in branches]
        candidates = pages[0] if len(pages) == 1 else heapq.merge(*pages, key=_order, reverse=True)
    matching = (
        row
        for row in candidates
        if query.names(row) and (query.tag is None or query.tag in tables.tags.get((query.namespace, row.id), ()))
    )
    limit = max(0, min(query.limit, PAGE_ROWS_MAX))
    return [tables.shown(row, query.payload, query.writes) for row in islice(matching, limit)]


def _before(rows: list[Row], seq: int | None) -> Iterator[Row]:
    """Yield a branch's rows, newest first, starting before a cursor: a page costs only the rows it shows."""
    end = len(rows) if seq is None else bisect_left(rows, seq, key=SEQ)
    return (rows[at] for at in range(end - 1, -1, -1))


def _order(row: Row) -> tuple[int, int]:
    return row.seq, row.thread_number
