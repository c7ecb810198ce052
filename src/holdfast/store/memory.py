"""The memory store: the reference. The shortest correct store; read this first.

Everything lives in dictionaries behind one lock, so every verb is atomic by itself. Nothing survives the process:
``memory:`` is for tests, for trying things out, and for comparing the other stores with.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.errors import Conflict, Corrupted, Fenced, IdTaken, NotFound, StoreError
from holdfast.pieces.coverage import Coverage, assemble, is_needed
from holdfast.pieces.manifest import Source
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
)

T = TypeVar("T")


@dataclass
class _Lane:
    key: LaneKey
    number: int
    last_seq: int = 0
    epoch: int = 0
    origin: str | None = None
    rows: list[Row] = field(default_factory=list)  # in rising order of seq
    sources: dict[Source, bool] = field(default_factory=dict)  # -> whether the lane owns the stream


@dataclass
class _Thread:
    number: int
    next_seq: int = 1


class MemoryStore:
    """Keeps checkpoints in this process only."""

    def __init__(self, url: str = "memory:") -> None:
        self.url = url
        self._lock = threading.RLock()
        self._threads: dict[tuple[str, str], _Thread] = {}
        self._lanes: dict[LaneKey, _Lane] = {}
        self._rows: dict[tuple[str, str], Row] = {}
        self._tags: dict[tuple[str, str], list[str]] = {}
        self._writes: dict[tuple[str, str, str, str], dict[tuple[str, int], WriteRow]] = {}
        self._blobs: dict[bytes, bytes] = {}
        self._streams: dict[int, list[tuple[int, bytes]]] = {}
        self._next_stream = 1
        self._next_number = 1
        self._closed = False

    # Reading ------------------------------------------------------------------------------------------------------

    def head(self, lane: LaneKey) -> Head | None:
        with self._open():
            found = self._lanes.get(lane)
            if found is None:
                return None
            owned = {
                stream: self._streams[stream][-1][0] + len(self._streams[stream][-1][1])
                for stream, own in found.sources.items()
                if own and isinstance(stream, int) and self._streams.get(stream)
            }
            row = self._shown(found.rows[-1], payload=True, writes=True) if found.rows else None
            return Head(row, found.number, found.last_seq, found.epoch, owned)

    def find(self, query: Query) -> list[Row]:
        with self._open():
            rows = self._heads(query) if query.heads_of_threads else self._candidates(query)
            limit = max(0, min(query.limit, PAGE_ROWS_MAX))
            return [self._shown(row, query.payload, query.writes) for row in rows if self._matches(row, query)][:limit]

    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        with self._open():
            return [
                Lane(
                    lane.key,
                    lane.rows[-1].id if lane.rows else None,
                    lane.rows[-1].seq if lane.rows else 0,
                    lane.last_seq,
                    lane.epoch,
                    lane.origin,
                )
                for lane in sorted(self._lanes.values(), key=lambda lane: lane.number)
                if lane.key.namespace == namespace
                and thread in (None, lane.key.thread)
                and scope in (None, lane.key.scope)
            ]

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        with self._open():
            return [self._read(piece) for piece in ranges]

    def sizes(self) -> Sizes:
        with self._open():
            sources: dict[Source, int] = {name: len(data) for name, data in self._blobs.items()}
            sources.update({s: sum(len(data) for _, data in chunks) for s, chunks in self._streams.items()})
            rows = sum(len(row.manifest) + len(row.notes) for row in self._rows.values())
            return Sizes(sum(sources.values()) + rows, sources, rows)

    # Writing ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> int:
        with self._open():
            first = self._next_stream
            self._next_stream += count
            return first

    def commit(self, commit: Commit) -> Committed:
        with self._open():
            key = commit.lane
            existing = self._rows.get((key.namespace, commit.id))
            lane = self._lanes.get(key)
            if existing is not None and not (commit.replaces_head and self._is_head(lane, existing)):
                return _first_result(existing, lane, commit)
            self._check_writer(lane, commit)
            thread = self._thread(key)
            if lane is None:
                lane = self._lanes[key] = _Lane(key, self._number(), origin=commit.requires)
            if existing is not None:
                self._forget([existing])
            row = commit.row(thread.number, thread.next_seq)
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

    def delete(self, namespace: str, checkpoints: Collection[str], spare_heads: bool) -> Removed:
        with self._open():
            doomed = [row for name in set(checkpoints) if (row := self._rows.get((namespace, name))) is not None]
            heads = {lane.rows[-1].id for lane in self._lanes.values() if lane.rows and lane.key.namespace == namespace}
            doomed = [row for row in doomed if not (spare_heads and row.id in heads)]
            return self._remove(doomed)

    def delete_thread(self, namespace: str, thread: str) -> Removed:
        with self._open():
            lanes = [lane for lane in self._lanes.values() if lane.key[:2] == (namespace, thread)]
            removed = self._remove([row for lane in lanes for row in lane.rows])
            for key in [key for key in self._writes if key[:2] == (namespace, thread)]:
                del self._writes[key]
            self._threads.pop((namespace, thread), None)
            return removed

    # Upkeep -------------------------------------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        with self._open():
            referred = {source for lane in self._lanes.values() for source in lane.sources}
            stored: set[Source] = {*self._blobs, *self._streams}
            return [
                Finding("orphan", f"source {_name(source)}", "bytes that no branch refers to")
                for source in stored - referred
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

    def _thread(self, lane: LaneKey) -> _Thread:
        if lane[:2] not in self._threads:
            self._threads[lane[:2]] = _Thread(self._number())
        return self._threads[lane[:2]]

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    @staticmethod
    def _is_head(lane: _Lane | None, row: Row) -> bool:
        return lane is not None and bool(lane.rows) and lane.rows[-1].id == row.id

    def _check_writer(self, lane: _Lane | None, commit: Commit) -> None:
        head_seq = lane.rows[-1].seq if lane and lane.rows else 0
        number, last_seq, epoch = (lane.number, lane.last_seq, lane.epoch) if lane else (0, 0, 0)
        if epoch != commit.epoch:
            raise Fenced(
                "a newer owner holds this branch", epoch=commit.epoch, current=epoch, thread=commit.lane.thread
            )
        if (number, last_seq, head_seq) != (commit.number, commit.last_seq, commit.head_seq):
            raise Conflict("the branch has moved on", thread=commit.lane.thread, checkpoint=commit.id)
        if commit.requires is not None and (commit.lane.namespace, commit.requires) not in self._rows:
            raise NotFound(commit.requires, checkpoint=commit.requires)

    def _keep_bytes(self, lane: _Lane, commit: Commit) -> None:
        for name, data in commit.blobs.items():
            self._blobs.setdefault(name, data)
        for stream, offset, data in commit.chunks:
            insort(self._streams.setdefault(stream, []), (offset, data))
        for source in commit.sources:
            lane.sources.setdefault(source, source in commit.owned)

    def _read(self, piece: Range) -> list[bytes]:
        if isinstance(piece.source, bytes):
            rows = [(0, self._blobs[piece.source])] if piece.source in self._blobs else []
        else:
            rows = self._streams.get(piece.source, [])
        data = assemble(((o, d) for o, d in rows if o + len(d) > piece.start), piece.start, piece.length)
        if data is None:
            raise Corrupted(f"bytes of {_name(piece.source)} are missing")
        return data

    def _candidates(self, query: Query) -> list[Row]:
        if query.ids is not None:
            rows = [
                row for name in dict.fromkeys(query.ids) if (row := self._rows.get((query.namespace, name))) is not None
            ]
        else:
            rows = [row for lane in self._lanes.values() for row in lane.rows]
        return sorted(rows, key=lambda row: (row.seq, row.thread_number), reverse=True)

    def _heads(self, query: Query) -> list[Row]:
        newest: dict[int, Row] = {}
        for lane in self._lanes.values():
            if lane.rows and (query.scope is None or lane.key.scope == query.scope):
                row = lane.rows[-1]
                if row.thread_number not in newest or newest[row.thread_number].seq < row.seq:
                    newest[row.thread_number] = row
        return sorted(newest.values(), key=lambda row: row.thread_number, reverse=True)

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
        base_data = self._blobs.get(row.base) if row.base is not None else None
        digest = row.parent_digest
        if digest is None and row.parent_id is not None and (row.lane.namespace, row.parent_id) in self._rows:
            digest = self._rows[row.lane.namespace, row.parent_id].digest
        return row._replace(tags=tags, writes=ordered, base_data=base_data, parent_digest=digest)

    def _remove(self, doomed: list[Row]) -> Removed:
        touched = {row.lane: self._lanes[row.lane] for row in doomed}
        self._forget(doomed)
        for row in doomed:
            self._writes.pop((*row.lane[:3], row.id), None)
        empty = [lane for lane in touched.values() if not lane.rows]
        for lane in empty:
            del self._lanes[lane.key]
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

    def _collect(self, touched: dict[LaneKey, _Lane]) -> int:
        """Drop the references the touched lanes no longer need, then the bytes nobody needs; return how many."""
        candidates = {source for lane in touched.values() for source in lane.sources}
        coverage = Coverage(self._blobs.__getitem__)
        for lane in self._lanes.values():
            if lane.key in touched or candidates & lane.sources.keys():
                needed = {source for row in lane.rows for source in coverage.add(row.manifest, row.base)}
                lane.sources = {source: own for source, own in lane.sources.items() if source in needed}
        referred = {source for lane in self._lanes.values() for source in lane.sources}
        return sum(self._trim(source, source in referred, coverage) for source in candidates)

    def _trim(self, source: Source, referred: bool, coverage: Coverage) -> int:
        if isinstance(source, bytes):
            return 0 if referred else len(self._blobs.pop(source, b""))
        chunks = self._streams.get(source, [])
        ranges = coverage.ranges(source) if referred else []
        kept = [(offset, data) for offset, data in chunks if is_needed(offset, offset + len(data), ranges)]
        freed = sum(len(data) for _, data in chunks) - sum(len(data) for _, data in kept)
        if kept:
            self._streams[source] = kept
        else:
            self._streams.pop(source, None)
        return freed


def _first_result(existing: Row, lane: _Lane | None, commit: Commit) -> Committed:
    if lane is not None and existing.digest == commit.digest and existing.lane == commit.lane:
        return Committed(lane.number, existing.seq, False)
    raise IdTaken(
        f"checkpoint {commit.id} exists with other content",
        thread=existing.lane.thread,
        checkpoint=commit.id,
        hint="Give each checkpoint its own id, or none",
    )


def _name(source: Source) -> str:
    return f"stream {source}" if isinstance(source, int) else f"blob {source.hex()[:16]}"
