"""All data of the memory store, as dictionaries. Only mutations change them, and no question is decided here."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.manifest import Coverage, Source
from backstay.store.base import PAGE_ROWS_MAX, Branch, Head, Query, Row, Sizes, WriteRow
from backstay.store.leases import NO_LEASE, BranchKey, ClockReading, LeaseGrant, LeaseRow, LeaseStatus
from backstay.store.memory.chunks import Content, StoredBytes
from backstay.store.records import KINDS, Kind, Record, record_id


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


class MemoryRecord(NamedTuple):
    """A record, and when it expires if it has a time to live."""

    record: Record
    expiry: ClockReading | None

    def shown(self, now: ClockReading) -> Record:
        """Return the record with its remaining time."""
        return self.record if self.expiry is None else replace(self.record, left_us=now.left_us(*self.expiry))


class RecordTable:
    """All records, by kind and name."""

    def __init__(self) -> None:
        self._kept: dict[Kind, dict[bytes, MemoryRecord]] = {kind: {} for kind in KINDS}
        self.last_number = 0

    def __iter__(self) -> Iterator[Record]:
        return (kept.record for by_name in self._kept.values() for kept in by_name.values())

    def put(self, kept: MemoryRecord) -> None:
        """Store a record."""
        record = kept.record
        self.last_number = max(self.last_number, record.number)
        self._kept[record.kind][record_id(record.kind, record.branch, record.key)] = kept

    def find(self, kind: Kind, branch: BranchKey, key: str) -> MemoryRecord | None:
        """Return one record, or None."""
        return self._kept[kind].get(record_id(kind, branch, key))

    def listed(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int, now: ClockReading
    ) -> list[Record]:
        """See ``Backend.records``."""
        found = [
            kept
            for kept in self._kept[kind].values()
            if kept.record.number > after
            and kept.record.branch.namespace == namespace
            and thread in (None, kept.record.branch.thread)
            and (kept.record.open or not open_only)
        ]
        found.sort(key=lambda kept: kept.record.number)
        return [kept.shown(now) for kept in found[: max(0, min(limit, PAGE_ROWS_MAX))]]

    def drop(self, is_gone: Callable[[Record], bool]) -> None:
        """Delete all records for which ``is_gone`` is true."""
        self._kept = {
            kind: {name: kept for name, kept in by_name.items() if not is_gone(kept.record)}
            for kind, by_name in self._kept.items()
        }


@dataclass
class MemoryThread:
    """A thread: its number, and the sequence number of its next checkpoint."""

    number: int
    next_seq: int = 1


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

    @property
    def head_seq(self) -> int:
        """Sequence number of the newest checkpoint; 0 if the branch has none."""
        return self.rows[-1].seq if self.rows else 0

    def shown(self) -> Branch:
        """Return the branch as lists show it."""
        head = self.rows[-1].id if self.rows else None
        return Branch(self.key, head, self.head_seq, self.last_seq, self.lease.epoch, self.origin)

    def held(self) -> LeaseGrant:
        """Return the lease as its holder gets it."""
        return LeaseGrant(self.key, self.number, self.lease.epoch)

    def lease_status(self, now: ClockReading) -> LeaseStatus:
        """Return the lease as lists show it."""
        lease = self.lease
        return LeaseStatus(self.key, self.number, lease.owner or "", lease.epoch, lease.left_us(now))


class Tables:
    """Threads, branches, rows and their data. ``collects`` is off while a replay applies many mutations."""

    def __init__(self, kept: StoredBytes, collects: bool = True) -> None:
        self.threads: dict[tuple[str, str], MemoryThread] = {}
        self.branches: dict[BranchKey, MemoryBranch] = {}
        self.rows: dict[tuple[str, str], Row] = {}
        self.tags: dict[tuple[str, str], tuple[str, ...]] = {}
        self.writes: dict[tuple[str, str, str, str], dict[tuple[str, int], WriteRow]] = {}
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
        pending = self.writes.get((*row.branch[:3], row.id), {}) if writes else {}
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

    def sizes(self) -> Sizes:
        """Return how many bytes everything takes."""
        sources = self.bytes.sizes()
        rows = sum(len(row.manifest) + len(row.notes) for row in self.rows.values())
        return Sizes(sum(sources.values()) + rows, sources, rows)

    def is_head(self, row: Row) -> bool:
        """Return whether a row is the newest of its branch."""
        branch = self.branches.get(row.branch)
        return branch is not None and bool(branch.rows) and branch.rows[-1].id == row.id

    def has_more(self, namespace: str, thread: str, besides: BranchKey) -> bool:
        """Return whether a thread has or had anything but this one branch."""
        name = (namespace, thread)
        return (
            self.threads[name].next_seq > 1
            or any(key[:2] == name for key in self.branches if key != besides)
            or any(key[:2] == name for key, writes in self.writes.items() if writes)
            or any(record.branch[:2] == name for record in self.records)
        )

    def has_lost_checkpoint(self, record: Record) -> bool:
        """Return whether a record belongs to a checkpoint that does not exist."""
        return record.checkpoint is not None and (record.branch.namespace, record.checkpoint) not in self.rows

    def has_open_record(self, namespace: str, checkpoint: str) -> bool:
        """Return whether a checkpoint has an open record."""
        return any(
            record.open and (record.branch.namespace, record.checkpoint) == (namespace, checkpoint)
            for record in self.records
        )

    # Changing, by mutations only ----------------------------------------------------------------------------------

    def thread(self, namespace: str, thread: str, number: int) -> MemoryThread:
        """Return a thread; create it with this number if it is missing."""
        self.last_number = max(self.last_number, number)
        return self.threads.setdefault((namespace, thread), MemoryThread(number))

    def branch(self, key: BranchKey, number: int) -> MemoryBranch:
        """Return a branch; create it with this number if it is missing."""
        self.last_number = max(self.last_number, number)
        if key not in self.branches:
            self.branches[key] = MemoryBranch(key, number)
        return self.branches[key]

    def reserve_numbers(self, counters: Counters, threads: Iterable[ThreadNumbers] = ()) -> None:
        """Never give these numbers out again; create the threads that are missing."""
        self.last_number = max(self.last_number, counters.number)
        self.last_stream = max(self.last_stream, counters.stream)
        self.records.last_number = max(self.records.last_number, counters.record)
        for numbers in threads:
            thread = self.thread(numbers.namespace, numbers.thread, numbers.number)
            thread.next_seq = max(thread.next_seq, numbers.next_seq)

    def take_rows_out(self, digests: Mapping[str, bytes], space: str) -> None:
        """Take rows out of their branches. Their children, in any branch, keep their digests."""
        for branch in self.branches.values():
            if branch.key.namespace != space:
                continue
            left = []
            for row in branch.rows:
                if row.id in digests:
                    continue
                if row.parent_id is not None and row.parent_id in digests and row.parent_digest is None:
                    row = row._replace(parent_digest=digests[row.parent_id])
                    self.rows[space, row.id] = row
                left.append(row)
            branch.rows = left

    def forget_rows(self, digests: Mapping[str, bytes], space: str) -> None:
        """Remove these rows and their tags from the indexes."""
        for name in digests:
            self.tags.pop((space, name), None)
            self.rows.pop((space, name), None)

    def collect(self, touched: Mapping[BranchKey, MemoryBranch]) -> int:
        """Drop references that the touched branches no longer need, then unreferenced bytes; return how many bytes."""
        if not self._collects:
            self._deferred.update(touched)
            return 0
        candidates = {source for branch in touched.values() for source in branch.sources}
        coverage = Coverage(self.bytes.blob)
        needs: dict[BranchKey, set[Source]] = {}
        try:
            for branch in self.branches.values():
                if branch.key in touched or candidates & branch.sources.keys():
                    needs[branch.key] = {
                        source for row in branch.rows for source in coverage.add(row.manifest, row.base)
                    }
        except (Corrupted, DecodeError):  # the needs of a branch are unknown, so all bytes stay
            return 0
        kept = {
            key: {source: own for source, own in self.branches[key].sources.items() if source in needed}
            for key, needed in needs.items()
        }
        referred = {source for key, branch in self.branches.items() for source in kept.get(key, branch.sources)}
        gone = [body for source in candidates for body in self.bytes.trim(source, source in referred, coverage)]
        self.dropped += gone
        for key, sources in kept.items():  # last, because the candidates come from them
            self.branches[key].sources = sources
        return sum(body.stored for body in gone)

    def drop_unreferenced(self) -> int:
        """Drop all bytes that no branch refers to; return how many."""
        if not self._collects:
            return 0
        referred = {source for branch in self.branches.values() for source in branch.sources}
        nothing = Coverage(self.bytes.blob)
        unreferenced = self.bytes.sizes().keys() - referred
        gone = [body for source in unreferenced for body in self.bytes.trim(source, False, nothing)]
        self.dropped += gone
        return sum(body.stored for body in gone)

    def collect_deferred(self) -> None:
        """Do the collecting that was deferred while many mutations were applied."""
        self._collects = True
        self.collect({key: self.branches[key] for key in self._deferred if key in self.branches})
        self._deferred.clear()
        self.drop_unreferenced()


# Which rows of the memory store match a query, in order.


def find_rows(query: Query, tables: Tables) -> list[Row]:
    """Return the rows of the answer, newest first."""
    candidates: Iterable[Row]
    if query.heads_of_threads:
        newest: dict[int, Row] = {}
        for branch in tables.branches.values():
            if branch.rows and (query.scope is None or branch.key.scope == query.scope):
                row = branch.rows[-1]
                newest[row.thread_number] = max(row, newest.get(row.thread_number, row), key=lambda each: each.seq)
        candidates = sorted(newest.values(), key=lambda row: row.thread_number, reverse=True)
    elif query.ids is not None:
        found = (tables.rows.get((query.namespace, name)) for name in dict.fromkeys(query.ids))
        candidates = sorted((row for row in found if row is not None), key=_order, reverse=True)
    else:
        name = (query.namespace, query.thread)
        pages = [_before(each.rows, query.before) for each in tables.branches.values() if each.key[:2] == name]
        candidates = pages[0] if len(pages) == 1 else heapq.merge(*pages, key=_order, reverse=True)
    matching = (
        row
        for row in candidates
        if query.names(row)
        and (query.step_max is None or row.step <= query.step_max)
        and (query.tag is None or query.tag in tables.tags.get((query.namespace, row.id), ()))
    )
    limit = max(0, min(query.limit, PAGE_ROWS_MAX))
    return [tables.shown(row, query.payload, query.writes) for row in islice(matching, limit)]


def _before(rows: list[Row], seq: int | None) -> Iterator[Row]:
    """Yield a branch's rows, newest first, starting before a cursor: a page costs only the rows it shows."""
    end = len(rows)
    if seq is not None:
        low = 0
        while low < end:
            middle = (low + end) // 2
            low, end = (middle + 1, end) if rows[middle].seq < seq else (low, middle)
        end = low
    return (rows[at] for at in range(end - 1, -1, -1))


def _order(row: Row) -> tuple[int, int]:
    return row.seq, row.thread_number
