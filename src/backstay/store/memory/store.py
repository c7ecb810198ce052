"""The memory store: the reference. The shortest correct store; read this first.

Every verb looks at the tables, refuses or decides, and ends in one fact (``fact.py``), which ``_keep`` takes in. All of
it happens behind one lock (``keeper.py``), so every verb is atomic by itself. Nothing survives the process: ``memory:``
is for tests, for trying things out, and for comparing the other stores with. The directory store is this one with facts
that are written down before they are taken in.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from backstay.errors import Conflict, Corrupted, NotFound
from backstay.pieces.piece import Range
from backstay.store.base import (
    PAGE_ROWS_MAX,
    Commit,
    Committed,
    Finding,
    Head,
    Lane,
    LaneKey,
    Query,
    Removed,
    Row,
    Sizes,
    WriteRow,
    check_batch,
    first_results,
    id_is_taken,
    required_is_gone,
)
from backstay.store.boot import Clock, Moment
from backstay.store.leases import Claim, Held, LeaseRow
from backstay.store.memory.chunks import Whole
from backstay.store.memory.fact import (
    Deleted,
    LaneDropped,
    LaneSet,
    Rebuilt,
    RecordSet,
    Saved,
    Several,
    Tagged,
    ThreadDeleted,
    ThreadMark,
    Wrote,
)
from backstay.store.memory.find import rows_meant
from backstay.store.memory.keeper import Keeper, reading, writing
from backstay.store.memory.lane import KeptLane
from backstay.store.memory.mend import plan_rebuild, restored
from backstay.store.memory.records import KeptRecord
from backstay.store.records import Fence, Kind, Record, checkpoint_is_gone, is_repeated, winner, written
from backstay.store.tenure import FREE, Tenure


def process_clock() -> Moment:
    """Return the moment it is now: this process's own clock will do, since nothing outlives the process."""
    return Moment(time.monotonic_ns() // 1000, "")


class MemoryStore(Keeper):
    """Keeps checkpoints in this process only."""

    def __init__(self, url: str = "memory:", clock: Clock = process_clock) -> None:
        super().__init__(url)
        self._clock = clock

    # Reading ------------------------------------------------------------------------------------------------------

    @reading
    def head(self, lane: LaneKey) -> Head | None:
        return self._head(lane)

    def _head(self, lane: LaneKey) -> Head | None:
        found = self._tables.lanes.get(lane)
        if found is None:
            return None
        owned = {
            stream: end
            for stream, own in found.sources.items()
            if own and isinstance(stream, int) and (end := self._tables.bytes.end(stream)) is not None
        }
        row = self._tables.shown(found.rows[-1], payload=True, writes=True) if found.rows else None
        return Head(row, found.number, found.last_seq, found.tenure.epoch, owned)

    @reading
    def find(self, query: Query) -> list[Row]:
        return self._find(query)

    def _find(self, query: Query) -> list[Row]:
        tables = self._tables
        limit = max(0, min(query.limit, PAGE_ROWS_MAX))
        matching = islice(rows_meant(query, tables.rows, tables.lanes.values(), tables.tags), limit)
        return [self._tables.shown(row, query.payload, query.writes) for row in matching]

    @reading
    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []

    @reading
    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        return [
            lane.shown()
            for lane in self._sorted_lanes(namespace, thread)
            if lane.last_seq and scope in (None, lane.key.scope)
        ]

    @reading
    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        return [self._tables.bytes.read(piece) for piece in ranges]

    @reading
    def sizes(self) -> Sizes:
        return self._sizes()

    def _sizes(self) -> Sizes:
        sources = self._tables.bytes.sizes()
        rows = sum(len(row.manifest) + len(row.notes) for row in self._tables.rows.values())
        return Sizes(sum(sources.values()) + rows, sources, rows)

    # Writing ------------------------------------------------------------------------------------------------------

    @writing
    def reserve(self, count: int) -> int:
        self._tables.last_stream += count
        return self._tables.last_stream - count + 1

    @writing
    def commit(self, commit: Commit) -> Committed:
        tables, key = self._tables, commit.lane
        existing = tables.rows.get((key.namespace, commit.id))
        lane = tables.lanes.get(key)
        if existing is not None and not (commit.replaces_head and tables.is_head(existing)):
            if lane is None or (existing.lane, existing.digest) != (key, commit.digest):
                raise id_is_taken(commit)
            return Committed(lane.number, existing.seq, False)
        self._check_writer(lane, commit)
        fact = self._saved(commit, self._next_seq(key), existing)
        self._keep(fact)
        return Committed(fact.lane_number, fact.row.seq, True)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        return self._commit_all(commits) if commits else []

    @writing
    def _commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        tables, key = self._tables, commits[0].lane
        rows = [tables.rows.get((key.namespace, commit.id)) for commit in commits]
        stored = {row.id: (tables.lanes[row.lane].number, row.seq, row.digest) for row in rows if row is not None}
        lane = tables.lanes.get(key)
        done = first_results(commits, stored, lane.number if lane else 0)
        if done is not None:
            return done
        self._check_writer(lane, commits[0])
        first_seq = self._next_seq(key)
        facts = [
            self._saved(commit, first_seq + at, None, commits[at - 1] if at else None)
            for at, commit in enumerate(commits)
        ]
        self._keep(Several(facts))
        return [Committed(fact.lane_number, fact.row.seq, True) for fact in facts]

    @writing
    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        kept = self._tables.writes.get((*lane[:3], checkpoint), {})
        new = {(row.task_id, row.index): row for row in (writes if replace else reversed(writes))}
        rows = [row for name, row in new.items() if replace or name not in kept]
        self._keep(Wrote(lane, self._tables.number_of(lane), checkpoint, rows))

    @writing
    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        row = self._tables.rows.get((namespace, checkpoint))
        if row is None:
            raise NotFound(checkpoint, checkpoint=checkpoint)
        before = self._tables.tags.get((namespace, checkpoint), ())
        tags = tuple(sorted({*before, *add} - set(remove)))
        if tags != before:
            self._keep(Tagged(row.lane, checkpoint, tags))
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
        found = [tables.rows.get((namespace, name)) for name in dict.fromkeys(checkpoints)]
        doomed = [row for row in found if row is not None and not self._is_protected(row, protect, tagged, forked)]
        if not doomed:
            return Removed()
        for row in doomed:
            if tables.is_head(row):
                tables.lanes[row.lane].tenure.check_delete(row.lane, token, self._clock())
        return self._keep(self._deleted(namespace, doomed))

    @writing
    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        if (namespace, thread) not in self._tables.threads:
            return Removed()
        now = self._clock()
        lanes = self._sorted_lanes(namespace, thread)
        for lane in sorted(lanes, key=lambda lane: lane.tenure.left_us(now)):
            lane.tenure.check_delete(lane.key, token, now)
        digests = {row.id: row.digest for lane in lanes for row in lane.rows}
        return self._keep(ThreadDeleted(namespace, thread, digests, self._tables.counters()))

    # Leases -------------------------------------------------------------------------------------------------------

    @writing
    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        found = self._tables.lanes.get(lane)
        tenure = (found.tenure if found else FREE).acquired(lane, claim, self._clock())
        if found is None:
            found = KeptLane(lane, self._lane_number(lane))
        self._keep(self._leased_as(found, tenure))
        return Held(lane, found.number, tenure.epoch)

    @writing
    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        found = self._tables.lanes.get(lane)
        tenure = (found.tenure if found else FREE).renewed(lane, epoch, claim, self._clock())
        if found is not None:
            self._keep(self._leased_as(found, tenure))

    @writing
    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        found = self._tables.lanes.get(lane)
        if found is None:
            return
        tenure = found.tenure.released(lane, epoch, token, self._clock())
        if not found.last_seq:
            self._keep(LaneDropped(lane, self._tables.counters()))
        elif tenure != found.tenure:
            self._keep(self._leased_as(found, tenure))

    @reading
    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseRow]:
        now = self._clock()
        rows = [lane.lease(now) for lane in self._leased(namespace, now) if thread in (None, lane.key.thread)]
        return [row for row in rows if not expired_only or row.left_us <= 0]

    @writing
    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        now = self._clock()
        leased = self._leased(namespace, now)
        mine = [lane for lane in leased if lane.tenure.token == claim.token]
        expired = [lane for lane in leased if lane.tenure.token != claim.token and lane.tenure.left_us(now) <= 0]
        taken = [*mine, *expired[: max(0, count - len(mine))]]
        if taken:
            self._keep(Several([self._leased_as(e, e.tenure.acquired(e.key, claim, now)) for e in taken]))
        return [lane.held() for lane in taken]

    # Records ------------------------------------------------------------------------------------------------------

    @reading
    def record(self, kind: Kind, lane: LaneKey, key: str) -> Record | None:
        kept = self._tables.records.find(kind, lane, key)
        return None if kept is None else kept.shown(self._clock())

    @writing
    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        tables, now = self._tables, self._clock()
        kept = tables.records.find(record.kind, record.lane, record.key)
        stored = None if kept is None else kept.shown(now)
        if stored is not None and is_repeated(record, stored):
            return stored
        if fence is not None:
            lane = tables.lanes.get(record.lane)
            (lane.tenure if lane else FREE).check_writer(record.lane, fence.epoch, fence.token, now)
        if (won := winner(record, stored)) is not None:
            return won
        if stored is None and record.checkpoint is not None:
            row = tables.rows.get((record.lane.namespace, record.checkpoint))
            if row is None or row.lane[:3] != record.lane[:3]:
                raise checkpoint_is_gone(record)
        new = written(record, stored, tables.records.last_number + 1, None)
        expiry = None if ttl_us is None else now._replace(us=now.us + ttl_us)
        self._keep(RecordSet(new, tables.number_of(record.lane), expiry))
        return KeptRecord(new, expiry).shown(now)

    @reading
    def records(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int
    ) -> list[Record]:
        return self._tables.records.listed(kind, namespace, thread, open_only, after, limit, self._clock())

    # Upkeep -------------------------------------------------------------------------------------------------------

    @reading
    def check(self) -> list[Finding]:
        return self._check()

    def _check(self) -> list[Finding]:
        plan = plan_rebuild(self._tables, drop=True)
        return [*plan.findings, *plan.hopeless]

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        run = self._read if dry_run else self._write
        return run(partial(self._rebuild, dry_run, drop))

    def _rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        findings = plan_rebuild(self._tables, drop).findings
        if findings and not dry_run:
            self._keep(Rebuilt(drop))
        return findings

    @writing
    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        self._keep(restored(self._tables, blobs, chunks, rows))

    @writing
    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        row = self._tables.rows.get((namespace, checkpoint))
        if row is None:
            raise NotFound(checkpoint, checkpoint=checkpoint)
        if not force:
            self._tables.lanes[row.lane].tenure.check_delete(row.lane, None, self._clock())
        self._keep(self._deleted(namespace, [row], keeps_bytes=True))

    @writing
    def compact(self) -> int:
        return 0

    # Deciding -----------------------------------------------------------------------------------------------------

    def _deleted(self, namespace: str, doomed: Sequence[Row], keeps_bytes: bool = False) -> Deleted:
        tables = self._tables
        names = dict.fromkeys(row.lane[:2] for row in doomed)
        marks = [ThreadMark(*name, tables.threads[name].number, tables.threads[name].next_seq) for name in names]
        return Deleted(namespace, {row.id: row.digest for row in doomed}, tables.counters(), marks, keeps_bytes)

    def _lane_number(self, key: LaneKey) -> int:
        """Return the lane's number; if it must be made, the next one, with its thread's before it."""
        lane = self._tables.lanes.get(key)
        return lane.number if lane else max(self._tables.last_number, self._tables.number_of(key)) + 1

    def _next_seq(self, key: LaneKey) -> int:
        thread = self._tables.threads.get(key[:2])
        return thread.next_seq if thread is not None else 1

    def _has_parent(self, commit: Commit, before: Commit | None) -> bool:
        if commit.parent_id is None:
            return True
        if before is not None and before.id == commit.parent_id:
            return before.digest == commit.parent_digest
        parent = self._tables.rows.get((commit.lane.namespace, commit.parent_id))
        return parent is not None and parent.digest == commit.parent_digest

    def _saved(self, commit: Commit, seq: int, replaced: Row | None, before: Commit | None = None) -> Saved:
        """Return the fact of a commit; ``before`` is the one right before it in the same batch."""
        tables, key = self._tables, commit.lane
        lane = tables.lanes.get(key)
        row = commit.row(tables.number_of(key), seq)
        if replaced is not None or (commit.keeps_parent_digest and not self._has_parent(commit, before)):
            row = row._replace(parent_digest=commit.parent_digest)
        tenure = None
        if commit.claim is not None:
            tenure = (lane.tenure if lane else FREE).extended(commit.claim, self._clock())
        return Saved(
            row,
            self._lane_number(key),
            {name: Whole(data) for name, data in commit.blobs.items()},
            [(stream, offset, Whole(data)) for stream, offset, data in commit.chunks],
            {source: source in commit.owned for source in commit.sources},
            commit.forked_from,
            tenure,
            None if replaced is None else replaced.digest,
        )

    def _check_writer(self, lane: KeptLane | None, commit: Commit) -> None:
        token = None if commit.claim is None else commit.claim.token
        (lane.tenure if lane else FREE).check_writer(commit.lane, commit.epoch, token, self._clock())
        seen = (lane.number, lane.last_seq, lane.head_seq) if lane else (0, 0, 0)
        if seen != (commit.number, commit.last_seq, commit.head_seq):
            raise Conflict("the branch has moved on", thread=commit.lane.thread, checkpoint=commit.id)
        if commit.requires is not None:
            source = self._tables.rows.get((commit.lane.namespace, commit.requires))
            if source is None or commit.parent_digest not in (None, source.digest):
                raise required_is_gone(commit)

    def _leased_as(self, lane: KeptLane, tenure: Tenure) -> LaneSet:
        return LaneSet(lane.key, lane.number, self._tables.number_of(lane.key), tenure, lane.last_seq, lane.origin)

    def _is_protected(self, row: Row, protect: bool, tagged: bool, forked: bool) -> bool:
        tables, space = self._tables, row.lane.namespace
        return (
            (protect and (tables.is_head(row) or tables.has_open_record(space, row.id)))
            or (tagged and bool(tables.tags.get((space, row.id))))
            or (forked and any(lane.origin == row.id and lane.key.namespace == space for lane in tables.lanes.values()))
        )

    def _sorted_lanes(self, namespace: str, thread: str | None) -> list[KeptLane]:
        lanes = sorted(self._tables.lanes.values(), key=lambda lane: lane.number)
        return [lane for lane in lanes if lane.key.namespace == namespace and thread in (None, lane.key.thread)]

    def _leased(self, namespace: str, now: Moment) -> list[KeptLane]:
        """Return the lanes with a lease that was not released, the one that expired first first."""
        leased = [lane for lane in self._sorted_lanes(namespace, None) if lane.tenure.token is not None]
        return sorted(leased, key=lambda lane: lane.tenure.left_us(now))
