"""Everything a store knows, as dictionaries, and how each fact changes it. No question is decided here.

Taking in a fact may be interrupted between any two instructions, and is then begun again: whatever part of it was done
before, it ends in the same. So what tells which parts are still to be done is changed after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.coverage import Coverage
from backstay.pieces.manifest import Source
from backstay.store.base import Removed, Row, WriteRow
from backstay.store.lane import LaneKey
from backstay.store.memory.chunks import Body, KeptBytes
from backstay.store.memory.fact import (
    BytesKept,
    Counters,
    Deleted,
    Fact,
    LaneDropped,
    LaneSet,
    Marked,
    Rebuilt,
    RecordSet,
    RowSet,
    Saved,
    Several,
    Tagged,
    ThreadDeleted,
    ThreadMark,
    Wrote,
)
from backstay.store.memory.lane import KeptLane, KeptThread
from backstay.store.memory.records import KeptRecord, RecordTable
from backstay.store.records import Record
from backstay.store.survey import sources_of

NOTHING = Removed()


class Tables:
    """Threads, lanes, rows and what belongs to them. ``collects`` is off while many facts are taken in at once."""

    def __init__(self, kept: KeptBytes, collects: bool = True) -> None:
        self.threads: dict[tuple[str, str], KeptThread] = {}
        self.lanes: dict[LaneKey, KeptLane] = {}
        self.rows: dict[tuple[str, str], Row] = {}
        self.tags: dict[tuple[str, str], tuple[str, ...]] = {}
        self.writes: dict[tuple[str, str, str, str], dict[tuple[str, int], WriteRow]] = {}
        self.bytes = kept
        self.records = RecordTable()
        self.last_number = 0
        self.last_stream = 0
        self.dropped: list[Body] = []  # bytes that were let go; whoever keeps files looks here
        self._collects = collects
        self._owed: set[LaneKey] = set()  # lanes whose bytes were not looked through when something of them went

    # Reading ------------------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Return the numbers given out last."""
        return Counters(self.last_number, self.last_stream, self.records.last_number)

    def thread_marks(self) -> list[ThreadMark]:
        """Return every thread with its numbers."""
        return [ThreadMark(*name, thread.number, thread.next_seq) for name, thread in self.threads.items()]

    def number_of(self, lane: LaneKey) -> int:
        """Return the number of the lane's thread, or the next one if there is no such thread yet."""
        thread = self.threads.get(lane[:2])
        return thread.number if thread is not None else self.last_number + 1

    def shown(self, row: Row, payload: bool, writes: bool) -> Row:
        """Return a row as ``find`` gives it."""
        tags = self.tags.get((row.lane.namespace, row.id), ())
        pending = self.writes.get((*row.lane[:3], row.id), {}) if writes else {}
        ordered = tuple(sorted(pending.values(), key=lambda w: (w.task_path, w.task_id, w.index)))
        if not payload:
            return row._replace(tags=tags, writes=ordered, base=None, manifest=b"")
        base = self.bytes.blobs.get(row.base) if row.base is not None else None
        digest = row.parent_digest
        if row.parent_id is not None and (row.lane.namespace, row.parent_id) in self.rows:
            digest = self.rows[row.lane.namespace, row.parent_id].digest if digest is None else digest
        return row._replace(
            tags=tags, writes=ordered, base_data=None if base is None else base.read(), parent_digest=digest
        )

    def is_head(self, row: Row) -> bool:
        """Tell whether a row is the newest of its lane."""
        lane = self.lanes.get(row.lane)
        return lane is not None and bool(lane.rows) and lane.rows[-1].id == row.id

    def has_more(self, namespace: str, thread: str, besides: LaneKey) -> bool:
        """Tell whether a thread has or had anything but this one lane."""
        name = (namespace, thread)
        return (
            self.threads[name].next_seq > 1
            or any(key[:2] == name for key in self.lanes if key != besides)
            or any(key[:2] == name for key, writes in self.writes.items() if writes)
            or any(record.lane[:2] == name for record in self.records)
        )

    def lacks_checkpoint(self, record: Record) -> bool:
        """Tell whether a record belongs to a checkpoint that is not there."""
        return record.checkpoint is not None and (record.lane.namespace, record.checkpoint) not in self.rows

    def has_open_record(self, namespace: str, checkpoint: str) -> bool:
        """Tell whether a checkpoint has a record that is open."""
        return any(
            record.open and (record.lane.namespace, record.checkpoint) == (namespace, checkpoint)
            for record in self.records
        )

    # Changing -----------------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> Removed:
        """Take a fact in; return what it took away."""
        removed: Removed = _TAKEN_IN_BY[type(fact)](self, fact)
        return removed

    def _several(self, fact: Several) -> Removed:
        return sum((self.apply(each) for each in fact.facts), NOTHING)

    def _saved(self, fact: Saved) -> Removed:
        row, space = fact.row, fact.row.lane.namespace
        thread = self._thread(*row.lane[:2], row.thread_number)
        lane = self._lane(row.lane, fact.lane_number)
        if fact.replaces is not None:
            self._leave_out({row.id: fact.replaces}, space)
            self._forget({row.id: fact.replaces}, space)
        if not lane.last_seq:
            lane.origin = fact.origin
        if fact.tenure is not None:
            lane.tenure = fact.tenure
        thread.next_seq = max(thread.next_seq, row.seq + 1)
        lane.last_seq = max(lane.last_seq, row.seq)
        _add(lane.rows, row)
        self.rows[space, row.id] = row
        if row.tags:
            self.tags[space, row.id] = row.tags
        self.bytes.keep(fact.blobs, fact.chunks)
        for source, own in fact.sources.items():
            lane.sources.setdefault(source, own)
        if fact.replaces is not None:
            self.collect({lane.key: lane})
        return NOTHING

    def _lane_set(self, fact: LaneSet) -> Removed:
        self._thread(*fact.key[:2], fact.thread_number)
        lane = self._lane(fact.key, fact.number)
        lane.tenure = fact.tenure
        lane.last_seq = max(lane.last_seq, fact.last_seq)
        lane.origin = lane.origin or fact.origin
        return NOTHING

    def _lane_dropped(self, fact: LaneDropped) -> Removed:
        self._mark(fact.counters, ())
        if fact.key[:2] in self.threads and not self.has_more(*fact.key[:2], besides=fact.key):
            del self.threads[fact.key[:2]]
        self.lanes.pop(fact.key, None)
        return NOTHING

    def _wrote(self, fact: Wrote) -> Removed:
        self._thread(*fact.lane[:2], fact.thread_number)
        kept = self.writes.setdefault((*fact.lane[:3], fact.checkpoint), {})
        kept.update({(row.task_id, row.index): row for row in fact.rows})
        return NOTHING

    def _tagged(self, fact: Tagged) -> Removed:
        self.tags[fact.lane.namespace, fact.checkpoint] = fact.tags
        return NOTHING

    def _deleted(self, fact: Deleted) -> Removed:
        self._mark(fact.counters, fact.threads)
        space = fact.namespace
        doomed = [row for name in fact.digests if (row := self.rows.get((space, name))) is not None]
        touched = {row.lane: self.lanes[row.lane] for row in doomed if row.lane in self.lanes}
        self._leave_out(fact.digests, space)
        empty = [lane for lane in touched.values() if not lane.rows]
        for row in doomed:
            self.writes.pop((*row.lane[:3], row.id), None)
        names = {row.id for row in doomed}
        gone = set() if fact.keeps_bytes else {lane.key for lane in empty}
        self.records.drop(
            lambda record: (
                (record.lane.namespace == space and record.checkpoint in names)
                or (record.kind == "effect" and record.lane in gone)
            )
        )
        freed = 0 if fact.keeps_bytes else self.collect(touched)
        for lane in empty:
            self.lanes.pop(lane.key, None)
        self._forget(fact.digests, space)
        return Removed(len(doomed), len(empty), freed)

    def _thread_deleted(self, fact: ThreadDeleted) -> Removed:
        name = (fact.namespace, fact.thread)
        removed = self._deleted(Deleted(fact.namespace, fact.digests, fact.counters, ()))
        for key in [key for key in self.lanes if key[:2] == name]:
            self.lanes.pop(key, None)
        for each in [each for each in self.writes if each[:2] == name]:
            self.writes.pop(each, None)
        self.records.drop(lambda record: record.lane[:2] == name)
        self.threads.pop(name, None)
        return removed

    def _record_set(self, fact: RecordSet) -> Removed:
        self._thread(*fact.record.lane[:2], fact.thread_number)
        self.records.put(KeptRecord(fact.record, fact.expiry))
        return NOTHING

    def _marked(self, fact: Marked) -> Removed:
        self._mark(fact.counters, fact.threads)
        return NOTHING

    def _bytes_kept(self, fact: BytesKept) -> Removed:
        self.bytes.keep(fact.blobs, fact.chunks, replace=True)
        return NOTHING

    def _row_set(self, fact: RowSet) -> Removed:
        row, lane = fact.row, self.lanes.get(fact.row.lane)
        if lane is not None:
            lane.rows = [row if each.seq == row.seq else each for each in lane.rows]
            self.rows[row.lane.namespace, row.id] = row
            for source in fact.sources:
                lane.sources.setdefault(source, False)
            thread = self.threads[row.lane[:2]]
            thread.next_seq = max(thread.next_seq, fact.last_seq + 1)
            lane.last_seq = max(lane.last_seq, fact.last_seq)
        return NOTHING

    def _rebuilt(self, fact: Rebuilt) -> Removed:
        needs = [(lane, sources_of(row, self.bytes.blob)) for lane in self.lanes.values() for row in lane.rows]
        for lane, sources in needs:
            for source in sources:
                lane.sources.setdefault(source, False)
        if not fact.drops:
            return NOTHING
        self.records.drop(self.lacks_checkpoint)
        freed = self.collect(self.lanes)
        return Removed(bytes=freed + (self._drop_unreferred() if self._collects else 0))

    def settle(self) -> None:
        """Make up, after many facts, for the collecting that was left out."""
        self._collects = True
        self.collect({key: self.lanes[key] for key in self._owed if key in self.lanes})
        self._owed.clear()
        self._drop_unreferred()

    # Inside -------------------------------------------------------------------------------------------------------

    def _drop_unreferred(self) -> int:
        referred = {source for lane in self.lanes.values() for source in lane.sources}
        nothing = Coverage(self.bytes.blob)
        gone = [
            body for source in self.bytes.sizes().keys() - referred for body in self.bytes.trim(source, False, nothing)
        ]
        self.dropped += gone
        return sum(body.stored for body in gone)

    def _thread(self, namespace: str, thread: str, number: int) -> KeptThread:
        self.last_number = max(self.last_number, number)
        return self.threads.setdefault((namespace, thread), KeptThread(number))

    def _lane(self, key: LaneKey, number: int) -> KeptLane:
        self.last_number = max(self.last_number, number)
        if key not in self.lanes:
            self.lanes[key] = KeptLane(key, number)
        return self.lanes[key]

    def _mark(self, counters: Counters, threads: Iterable[ThreadMark]) -> None:
        self.last_number = max(self.last_number, counters.number)
        self.last_stream = max(self.last_stream, counters.stream)
        self.records.last_number = max(self.records.last_number, counters.record)
        for mark in threads:
            thread = self._thread(mark.namespace, mark.thread, mark.number)
            thread.next_seq = max(thread.next_seq, mark.next_seq)

    def _leave_out(self, digests: Mapping[str, bytes], space: str) -> None:
        """Take rows out of their lanes; their children, wherever they are, keep their digests."""
        for lane in self.lanes.values():
            if lane.key.namespace == space:
                lane.rows = [self._orphaned(row, digests) for row in lane.rows if row.id not in digests]

    def _forget(self, digests: Mapping[str, bytes], space: str) -> None:
        """Know nothing of these rows any more."""
        for name in digests:
            self.tags.pop((space, name), None)
            self.rows.pop((space, name), None)

    def _orphaned(self, row: Row, digests: Mapping[str, bytes]) -> Row:
        if row.parent_id is None or row.parent_id not in digests or row.parent_digest is not None:
            return row
        changed = row._replace(parent_digest=digests[row.parent_id])
        self.rows[row.lane.namespace, row.id] = changed
        return changed

    def collect(self, touched: Mapping[LaneKey, KeptLane]) -> int:
        """Drop the references the touched lanes no longer need, then the bytes nobody needs; return how many."""
        if not self._collects:
            self._owed.update(touched)
            return 0
        candidates = {source for lane in touched.values() for source in lane.sources}
        coverage = Coverage(self.bytes.blob)
        needs: dict[LaneKey, set[Source]] = {}
        try:
            for lane in self.lanes.values():
                if lane.key in touched or candidates & lane.sources.keys():
                    needs[lane.key] = {source for row in lane.rows for source in coverage.add(row.manifest, row.base)}
        except (Corrupted, DecodeError):  # what is needed cannot be known, so everything stays
            return 0
        kept = {
            key: {source: own for source, own in self.lanes[key].sources.items() if source in needed}
            for key, needed in needs.items()
        }
        referred = {source for key, lane in self.lanes.items() for source in kept.get(key, lane.sources)}
        gone = [body for source in candidates for body in self.bytes.trim(source, source in referred, coverage)]
        self.dropped += gone
        for key, sources in kept.items():  # last: from these it is known what may go
            self.lanes[key].sources = sources
        return sum(body.stored for body in gone)


def _add(rows: list[Row], row: Row) -> None:
    """Add a row at the end, unless this very one is there already, perhaps with others of its batch behind it."""
    at = len(rows)
    while at and rows[at - 1].seq > row.seq:
        at -= 1
    if not at or rows[at - 1] is not row:
        rows.append(row)


_TAKEN_IN_BY: dict[type, Callable[[Tables, Any], Removed]] = {
    Saved: Tables._saved,
    LaneSet: Tables._lane_set,
    LaneDropped: Tables._lane_dropped,
    Wrote: Tables._wrote,
    Tagged: Tables._tagged,
    Deleted: Tables._deleted,
    ThreadDeleted: Tables._thread_deleted,
    RecordSet: Tables._record_set,
    Marked: Tables._marked,
    BytesKept: Tables._bytes_kept,
    RowSet: Tables._row_set,
    Rebuilt: Tables._rebuilt,
    Several: Tables._several,
}
