"""The memory store: the reference. The shortest correct store; read this first.

Everything lives in dictionaries behind one lock, so every verb is atomic by itself. Nothing survives the process:
``memory:`` is for tests, for trying things out, and for comparing the other stores with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence

from holdfast.errors import Conflict, NotFound, StoreError
from holdfast.pieces.coverage import Coverage
from holdfast.pieces.piece import Range
from holdfast.store.base import (
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
    id_is_taken,
    one_by_one,
    required_is_gone,
)
from holdfast.store.boot import Clock, Moment
from holdfast.store.effects import EffectRow, is_same_call
from holdfast.store.interrupts import InterruptRow
from holdfast.store.leases import Claim, Held, LeaseRow
from holdfast.store.memory.chunks import KeptBytes, source_name
from holdfast.store.memory.effect import EffectTable
from holdfast.store.memory.find import rows_meant
from holdfast.store.memory.interrupt import InterruptTable
from holdfast.store.memory.lane import KeptLane, KeptThread
from holdfast.store.memory.session import SessionTable
from holdfast.store.sessions import SessionRow
from holdfast.store.tenure import FREE


def process_clock() -> Moment:
    """Return the moment it is now: this process's own clock will do, since nothing outlives the process."""
    return Moment(time.monotonic_ns() // 1000, "")


class MemoryStore:
    """Keeps checkpoints in this process only."""

    def __init__(self, url: str = "memory:", clock: Clock = process_clock) -> None:
        self.url = url
        self._clock = clock
        self._lock = threading.RLock()
        self._threads: dict[tuple[str, str], KeptThread] = {}
        self._lanes: dict[LaneKey, KeptLane] = {}
        self._rows: dict[tuple[str, str], Row] = {}
        self._tags: dict[tuple[str, str], list[str]] = {}
        self._writes: dict[tuple[str, str, str, str], dict[tuple[str, int], WriteRow]] = {}
        self._bytes = KeptBytes()
        self._sessions = SessionTable()
        self._interrupts = InterruptTable()
        self._effects = EffectTable()
        self._next_number = 1
        self._closed = False

    # Reading ------------------------------------------------------------------------------------------------------

    def head(self, lane: LaneKey) -> Head | None:
        with self._open():
            found = self._lanes.get(lane)
            if found is None:
                return None
            owned = {
                stream: end
                for stream, own in found.sources.items()
                if own and isinstance(stream, int) and (end := self._bytes.end(stream)) is not None
            }
            row = self._shown(found.rows[-1], payload=True, writes=True) if found.rows else None
            return Head(row, found.number, found.last_seq, found.tenure.epoch, owned)

    def find(self, query: Query) -> list[Row]:
        with self._open():
            rows = rows_meant(query, self._rows, self._lanes.values())
            limit = max(0, min(query.limit, PAGE_ROWS_MAX))
            return [self._shown(row, query.payload, query.writes) for row in rows if self._matches(row, query)][:limit]

    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        with self._open():
            return [
                lane.shown()
                for lane in self._sorted_lanes(namespace, thread)
                if lane.last_seq and scope in (None, lane.key.scope)
            ]

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        with self._open():
            return [self._bytes.read(piece) for piece in ranges]

    def sizes(self) -> Sizes:
        with self._open():
            sources = self._bytes.sizes()
            rows = sum(len(row.manifest) + len(row.notes) for row in self._rows.values())
            return Sizes(sum(sources.values()) + rows, sources, rows)

    # Writing ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> int:
        with self._open():
            return self._bytes.reserve(count)

    def commit(self, commit: Commit) -> Committed:
        with self._open():
            key = commit.lane
            existing = self._rows.get((key.namespace, commit.id))
            lane = self._lanes.get(key)
            if existing is not None and not (commit.replaces_head and self._is_head(lane, existing)):
                if lane is None or (existing.lane, existing.digest) != (key, commit.digest):
                    raise id_is_taken(commit)
                return Committed(lane.number, existing.seq, False)
            self._check_writer(lane, commit)
            thread = self._thread(key)
            if lane is None:
                lane = self._lanes[key] = KeptLane(key, self._number())
            if not lane.last_seq:
                lane.origin = commit.requires
            if commit.claim is not None:
                lane.tenure = lane.tenure.extended(commit.claim, self._clock())
            if existing is not None:
                self._forget([existing])
            row = commit.row(thread.number, thread.next_seq)
            row = row if existing is None else row._replace(parent_digest=commit.parent_digest)
            thread.next_seq += 1
            lane.last_seq = row.seq
            lane.rows.append(row)
            self._rows[key.namespace, row.id] = row
            if commit.tags or existing is not None:
                self._tags[key.namespace, row.id] = sorted(commit.tags)
            self._keep_bytes(lane, commit)
            if existing is not None:
                self._collect({lane.key: lane})
            return Committed(lane.number, row.seq, True)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        with self._open():
            rows = [self._rows.get((commit.lane.namespace, commit.id)) for commit in commits]
            stored = {row.id: (self._lanes[row.lane].number, row.seq, row.digest) for row in rows if row is not None}
            lane = self._lanes.get(commits[0].lane) if commits else None
            return one_by_one(commits, stored, lane.number if lane else 0, self.commit)

    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        with self._open():
            self._thread(lane)
            kept = self._writes.setdefault((lane.namespace, lane.thread, lane.scope, checkpoint), {})
            for row in writes:
                if replace or (row.task_id, row.index) not in kept:
                    kept[row.task_id, row.index] = row

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        with self._open():
            if (namespace, checkpoint) not in self._rows:
                raise NotFound(checkpoint, checkpoint=checkpoint)
            tags = sorted({*self._tags.get((namespace, checkpoint), ()), *add} - set(remove))
            self._tags[namespace, checkpoint] = tags
            return tuple(tags)

    # Deleting -----------------------------------------------------------------------------------------------------

    def delete(
        self,
        namespace: str,
        checkpoints: Collection[str],
        spare: bool,
        token: str | None = None,
        *,
        tagged: bool = False,
        forked: bool = False,
    ) -> Removed:
        with self._open():
            found = [self._rows.get((namespace, name)) for name in dict.fromkeys(checkpoints)]
            doomed = [row for row in found if row is not None and not self._is_spared(row, spare, tagged, forked)]
            for row in doomed:
                lane = self._lanes[row.lane]
                if self._is_head(lane, row):
                    lane.tenure.check_delete(lane.key, token, self._clock())
            return self._remove(doomed)

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        with self._open():
            now = self._clock()
            lanes = self._sorted_lanes(namespace, thread)
            for lane in sorted(lanes, key=lambda lane: lane.tenure.left_us(now)):
                lane.tenure.check_delete(lane.key, token, now)
            removed = self._remove([row for lane in lanes for row in lane.rows])
            for key in [lane.key for lane in lanes if not lane.last_seq]:
                del self._lanes[key]
            for name in [name for name in self._writes if name[:2] == (namespace, thread)]:
                del self._writes[name]
            self._sessions.drop_thread(namespace, thread)
            self._effects.drop(namespace, thread)
            self._threads.pop((namespace, thread), None)
            return removed

    # Leases -------------------------------------------------------------------------------------------------------

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        with self._open():
            found = self._lanes.get(lane)
            tenure = (found.tenure if found else FREE).acquired(lane, claim, self._clock())
            if found is None:
                self._thread(lane)
                found = self._lanes[lane] = KeptLane(lane, self._number())
            found.tenure = tenure
            return found.held()

    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        with self._open():
            found = self._lanes.get(lane)
            tenure = (found.tenure if found else FREE).renewed(lane, epoch, claim, self._clock())
            if found is not None:
                found.tenure = tenure

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        with self._open():
            found = self._lanes.get(lane)
            if found is None:
                return
            found.tenure = found.tenure.released(lane, epoch, token, self._clock())
            if not found.last_seq:
                del self._lanes[lane]
                self._drop_unused_thread(*lane[:2])

    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseRow]:
        with self._open():
            now = self._clock()
            rows = [lane.lease(now) for lane in self._leased(namespace, now) if thread in (None, lane.key.thread)]
            return [row for row in rows if not expired_only or row.left_us <= 0]

    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        with self._open():
            now = self._clock()
            leased = self._leased(namespace, now)
            mine = [lane for lane in leased if lane.tenure.token == claim.token]
            expired = [lane for lane in leased if lane.tenure.token != claim.token and lane.tenure.left_us(now) <= 0]
            taken = [*mine, *expired[: max(0, count - len(mine))]]
            for lane in taken:
                lane.tenure = lane.tenure.acquired(lane.key, claim, now)
            return [lane.held() for lane in taken]

    # Sessions -----------------------------------------------------------------------------------------------------

    def begin(self, session: SessionRow, ttl_us: int) -> None:
        with self._open():
            if self._sessions.begin(session, ttl_us, self._clock()):
                self._thread(session.lane)

    def beat(self, namespace: str, session: str, seen_us: int, ttl_us: int) -> bool:
        with self._open():
            return self._sessions.beat(namespace, session, seen_us, ttl_us, self._clock())

    def end(self, namespace: str, session: str, ended_us: int, reason: str) -> bool:
        with self._open():
            return self._sessions.end(namespace, session, ended_us, reason)

    def sessions(self, namespace: str, thread: str | None, active_only: bool) -> list[SessionRow]:
        with self._open():
            return self._sessions.listed(namespace, thread, active_only, self._clock())

    # Interrupts ---------------------------------------------------------------------------------------------------

    def interrupt(self, row: InterruptRow) -> InterruptRow:
        with self._open():
            space = row.lane.namespace
            paused = self._rows.get((space, row.checkpoint))
            is_there = paused is not None and paused.lane[:3] == row.lane[:3]
            if not is_there and self._interrupts.find(space, row.id) is None:
                raise NotFound(row.checkpoint, checkpoint=row.checkpoint, thread=row.lane.thread)
            return self._interrupts.record(row)

    def decide(
        self, namespace: str, interrupt: str, digest: bytes, decision: bytes, by: str, decided_us: int
    ) -> InterruptRow:
        with self._open():
            return self._interrupts.decide(namespace, interrupt, digest, decision, by, decided_us)

    def consume(self, namespace: str, interrupt: str, by: str, epoch: int, consumed_us: int) -> InterruptRow:
        with self._open():
            return self._interrupts.consume(namespace, interrupt, by, epoch, consumed_us)

    def interrupts(
        self, namespace: str, thread: str | None, pending_only: bool, after: int, limit: int
    ) -> list[InterruptRow]:
        with self._open():
            return self._interrupts.listed(namespace, thread, pending_only, after, limit)

    def find_interrupt(self, namespace: str, interrupt: str) -> InterruptRow | None:
        with self._open():
            return self._interrupts.find(namespace, interrupt)

    # Effects ------------------------------------------------------------------------------------------------------

    def begin_effect(
        self, row: EffectRow, epoch: int | None, token: str | None, retry_of: int | None = None
    ) -> EffectRow:
        with self._open():
            stored = self._effects.find(row.lane, row.key)
            if stored is not None and is_same_call(row, stored):
                return stored
            lane = self._lanes.get(row.lane)
            (lane.tenure if lane else FREE).check_writer(row.lane, epoch, token, self._clock())
            self._thread(row.lane)
            return self._effects.begin(row, retry_of)

    def end_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int
    ) -> EffectRow:
        with self._open():
            return self._effects.end(lane, key, attempt, owner, status, body, ended_us)

    def settle_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int, by: str
    ) -> EffectRow:
        with self._open():
            return self._effects.end(lane, key, attempt, owner, status, body, ended_us, by)

    def find_effect(self, lane: LaneKey, key: str) -> EffectRow | None:
        with self._open():
            return self._effects.find(lane, key)

    def effects(self, namespace: str, thread: str | None, after: int, limit: int) -> list[EffectRow]:
        with self._open():
            return self._effects.listed(namespace, thread, after, limit)

    # Upkeep -------------------------------------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        with self._open():
            referred = {source for lane in self._lanes.values() for source in lane.sources}
            found = [
                Finding("orphan", f"source {source_name(source)}", "bytes that no branch refers to")
                for source in self._bytes.sizes().keys() - referred
            ]
            return found + [
                Finding("orphan", f"interrupt {row.id}", "its checkpoint is not there", row.lane.thread, row.checkpoint)
                for row in self._interrupts
                if (row.lane.namespace, row.checkpoint) not in self._rows
            ]

    def compact(self) -> int:
        with self._open():
            return 0

    def close(self) -> None:
        with self._lock:
            self._closed = True

    # Inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> threading.RLock:
        if self._closed:
            raise StoreError("the store is closed", hint="Open it again with holdfast.open")
        return self._lock

    def _thread(self, lane: LaneKey) -> KeptThread:
        if lane[:2] not in self._threads:
            self._threads[lane[:2]] = KeptThread(self._number())
        return self._threads[lane[:2]]

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    @staticmethod
    def _is_head(lane: KeptLane | None, row: Row) -> bool:
        return lane is not None and bool(lane.rows) and lane.rows[-1].id == row.id

    def _is_spared(self, row: Row, alive: bool, tagged: bool, forked: bool) -> bool:
        space = row.lane.namespace
        return (
            (alive and (self._is_head(self._lanes[row.lane], row) or self._interrupts.is_awaited(space, row.id)))
            or (tagged and bool(self._tags.get((space, row.id))))
            or (forked and any(lane.origin == row.id and lane.key.namespace == space for lane in self._lanes.values()))
        )

    def _sorted_lanes(self, namespace: str, thread: str | None) -> list[KeptLane]:
        lanes = sorted(self._lanes.values(), key=lambda lane: lane.number)
        return [lane for lane in lanes if lane.key.namespace == namespace and thread in (None, lane.key.thread)]

    def _leased(self, namespace: str, now: Moment) -> list[KeptLane]:
        """Return the lanes with a lease that was not released, the one that expired first first."""
        leased = [lane for lane in self._sorted_lanes(namespace, None) if lane.tenure.token is not None]
        return sorted(leased, key=lambda lane: lane.tenure.left_us(now))

    def _drop_unused_thread(self, namespace: str, thread: str) -> None:
        """Delete a thread that has nothing in it and never had a checkpoint, so that no number is given out twice."""
        name = (namespace, thread)
        has_lanes = any(key[:2] == name for key in self._lanes)
        has_writes = any(key[:2] == name for key, writes in self._writes.items() if writes)
        has_more = self._sessions.has_any(*name) or self._effects.has_any(*name)
        if self._threads[name].next_seq == 1 and not (has_lanes or has_writes or has_more):
            del self._threads[name]

    def _check_writer(self, lane: KeptLane | None, commit: Commit) -> None:
        tenure = lane.tenure if lane else FREE
        tenure.check_commit(commit.lane, commit.epoch, commit.claim, self._clock())
        seen = (lane.number, lane.last_seq, lane.head_seq) if lane else (0, 0, 0)
        if seen != (commit.number, commit.last_seq, commit.head_seq):
            raise Conflict("the branch has moved on", thread=commit.lane.thread, checkpoint=commit.id)
        if commit.requires is not None:
            source = self._rows.get((commit.lane.namespace, commit.requires))
            if source is None or commit.parent_digest not in (None, source.digest):
                raise required_is_gone(commit)

    def _keep_bytes(self, lane: KeptLane, commit: Commit) -> None:
        self._bytes.keep(commit)
        for source in commit.sources:
            lane.sources.setdefault(source, source in commit.owned)

    def _matches(self, row: Row, query: Query) -> bool:
        return (
            query.names(row)
            and (query.step_max is None or row.step <= query.step_max)
            and (query.tag is None or query.tag in self._tags.get((query.namespace, row.id), ()))
            and all(needle in row.notes for needle in query.needles)
        )

    def _shown(self, row: Row, payload: bool, writes: bool) -> Row:
        tags = tuple(self._tags.get((row.lane.namespace, row.id), ()))
        pending = self._writes.get((*row.lane[:3], row.id), {}) if writes else {}
        ordered = tuple(sorted(pending.values(), key=lambda w: (w.task_path, w.task_id, w.index)))
        if not payload:
            return row._replace(tags=tags, writes=ordered, base=None, manifest=b"")
        base_data = self._bytes.blobs.get(row.base) if row.base is not None else None
        digest = row.parent_digest
        if digest is None and row.parent_id is not None and (row.lane.namespace, row.parent_id) in self._rows:
            digest = self._rows[row.lane.namespace, row.parent_id].digest
        return row._replace(tags=tags, writes=ordered, base_data=base_data, parent_digest=digest)

    def _remove(self, doomed: list[Row]) -> Removed:
        touched = {row.lane: self._lanes[row.lane] for row in doomed}
        self._forget(doomed)
        for row in doomed:
            self._writes.pop((*row.lane[:3], row.id), None)
            self._interrupts.drop(row.lane.namespace, row.id)
        empty = [lane for lane in touched.values() if not lane.rows]
        for lane in empty:
            del self._lanes[lane.key]
            self._effects.drop(*lane.key)
        return Removed(len(doomed), len(empty), self._collect(touched))

    def _forget(self, doomed: list[Row]) -> None:
        """Take rows away; their children keep their digests."""
        digests = {(row.lane.namespace, row.id): row.digest for row in doomed}
        for key in digests:
            del self._rows[key]
            self._tags.pop(key, None)
        for lane in self._lanes.values():
            space = lane.key.namespace
            lane.rows = [self._orphaned(row, digests) for row in lane.rows if (space, row.id) not in digests]

    def _orphaned(self, row: Row, digests: dict[tuple[str, str], bytes]) -> Row:
        if row.parent_id is None or row.parent_digest is not None:
            return row
        digest = digests.get((row.lane.namespace, row.parent_id))
        if digest is None:
            return row
        changed = row._replace(parent_digest=digest)
        self._rows[row.lane.namespace, row.id] = changed
        return changed

    def _collect(self, touched: dict[LaneKey, KeptLane]) -> int:
        """Drop the references the touched lanes no longer need, then the bytes nobody needs; return how many."""
        candidates = {source for lane in touched.values() for source in lane.sources}
        coverage = Coverage(self._bytes.blobs.__getitem__)
        for lane in self._lanes.values():
            if lane.key in touched or candidates & lane.sources.keys():
                needed = {source for row in lane.rows for source in coverage.add(row.manifest, row.base)}
                lane.sources = {source: own for source, own in lane.sources.items() if source in needed}
        referred = {source for lane in self._lanes.values() for source in lane.sources}
        return sum(self._bytes.trim(source, source in referred, coverage) for source in candidates)
