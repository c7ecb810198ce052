"""Reading checkpoints back: one, or page by page, each verified and decoded by the serializer of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from backstay.errors import BackstayError, Corrupted, DecodeError
from backstay.integrations.langgraph.batch import Batch
from backstay.integrations.langgraph.delta import is_carried
from backstay.integrations.langgraph.description import (
    ID,
    NS,
    PARENT,
    SOURCES,
    checkpoint_from,
    metadata_of,
)
from backstay.integrations.langgraph.desk import Desk, Desks
from backstay.integrations.langgraph.names import Place, ReadId, config_of, forking
from backstay.integrations.langgraph.sealed import SEALED_LIST, load_sealed
from backstay.integrations.langgraph.values import from_body, load
from backstay.model.checkpoint import CheckpointMeta, bare
from backstay.pieces.manifest import MARKS, RUN
from backstay.pieces.tip import Live, Tip
from backstay.store.base import Backend, Query, Row, WriteRow
from backstay.thread.cursor import Context, Cursor
from backstay.thread.damage import unread
from backstay.thread.history import Filter
from backstay.thread.load import decode_live, is_there, verify_digest
from backstay.thread.record import values_of

PAGE_ROWS_MAX = 128


@dataclass(slots=True)
class Reader:
    """Reads with one serializer. ``desks`` remembers what a put on it would have to read again."""

    context: Context
    serde: SerializerProtocol
    desks: Desks | None = None

    def get(self, store: Backend, place: Place, checkpoint_id: str | None) -> CheckpointTuple | None:
        """Return a checkpoint, or the newest of its namespace."""
        namespace = self.context.namespace
        if checkpoint_id is None:
            query = Query(namespace, place.thread, place.scope, limit=1, payload=True, writes=True)
        else:
            query = Query(namespace, ids=(place.name(checkpoint_id),), payload=True, writes=True)
        failed: Row | None = None
        while True:
            rows = store.find(query)
            if not rows:
                return None
            row = rows[0]
            heads = {row.id} if checkpoint_id is None else (self.heads(store, place.thread, place.scope))
            try:
                return (self.read(store, [row], heads))[0]
            except Corrupted:
                if failed == row or (is_there(store, row)):
                    raise
                failed = row  # superseded and deleted while it was read

    def heads(self, store: Backend, thread: str, scope: str | None) -> set[str]:
        """Return the ids of the newest checkpoints of all branches."""
        lanes = store.lanes(self.context.namespace, thread, scope)
        return {lane.head for lane in lanes if lane.head is not None}

    def read(self, store: Backend, rows: Sequence[Row], heads: set[str]) -> list[CheckpointTuple]:
        """Return the checkpoints of rows that were found with payload and writes."""
        batch = Batch.load(store, rows)
        found = []
        for row, tip in batch.rows:
            values = values_of(row)
            verify_digest(row, values, tip.entries())
            found.append(self._tuple(row, values, tip, heads, batch))
            if self.desks is not None and len(rows) == 1 and row.id in heads:
                self.desks.keep(Desk(Cursor(row.lane, None, tip)), row)
        return found

    def _tuple(self, row: Row, values: dict[str, Any], tip: Tip, heads: set[str], batch: Batch) -> CheckpointTuple:
        meta = bare(CheckpointMeta, values)
        place = place_of_row(row, meta.metadata)
        try:
            checkpoint_id = id_of_row(place, row, meta.metadata)
            if RUN not in tip.lives or MARKS not in tip.lives:
                raise _stranger()
            run, marks = (decode_live(tip.lives[key]) for key in (RUN, MARKS))
            channels = {
                key: batch.value(live, partial(self._value, key))
                for key, live in tip.lives.items()
                if isinstance(key, str)
            }
            checkpoint = checkpoint_from(run, marks, channels, checkpoint_id, meta.created_at, self.serde)
            writes = [self._write(write) for write in row.writes if not is_carried(write)]
        except BackstayError as error:
            error.thread, error.checkpoint = error.thread or row.lane.thread, error.checkpoint or row.id
            raise
        parent = parent_of_row(place, row, meta.metadata)
        return CheckpointTuple(
            config_of(place, ReadId(checkpoint_id, row.id not in heads)),  # type: ignore[arg-type]
            checkpoint,
            metadata_of(meta.trigger, meta.metadata),  # type: ignore[arg-type]
            None if parent is None else config_of(place, forking(parent)),  # type: ignore[arg-type]
            writes,
        )

    def _value(self, channel: str, live: Live) -> Any:
        assert live.parts is not None
        return self._decoded(live.entry.kind, live.entry.count, live.parts, f"channel_values.{channel}")

    def _decoded(self, kind: str, count: int, parts: Sequence[bytes], path: str) -> Any:
        if kind == SEALED_LIST:
            return load_sealed(count, parts, lambda typed: load(self.serde, typed, path))
        return load(self.serde, from_body(kind, count, parts), path)

    def _write(self, row: WriteRow) -> tuple[str, str, Any]:
        return row.task_id, row.channel, self.value_of(row)

    def value_of(self, row: WriteRow) -> Any:
        """Return the value of a pending write."""
        return self._decoded(row.kind, row.count, [row.body], f"writes.{row.channel}")


@dataclass(slots=True)
class Listing:
    """A list of one thread's checkpoints, newest first, page by page; nothing is held between pages."""

    reader: Reader
    query: Query
    wanted: Filter
    before_id: str | None = None  # only those with a lower id, if the one to begin before is of another namespace
    left: int | None = None
    done: bool = False
    size: int = 8
    heads: set[str] | None = None
    failure: Corrupted | None = None  # about the checkpoint that comes next

    def next_page(self, store: Backend) -> list[CheckpointTuple]:
        """Return the next ones, and remember where they ended."""
        if self.heads is None:
            assert self.query.thread is not None
            self.heads = self.reader.heads(store, self.query.thread, self.query.scope)
            lost = unread(store, self.query.namespace, self.query.thread)
            self.failure = lost[0].error if lost else None
        if self.failure is not None:
            raise self.failure
        narrow = self.wanted != Filter() or self.before_id is not None
        size = self.size if narrow or self.left is None else min(self.left, PAGE_ROWS_MAX)
        query = replace(self.query, limit=size, payload=not narrow, writes=not narrow)
        rows = store.find(query)
        self.size = min(self.size * 4, PAGE_ROWS_MAX)
        if rows:
            self.query = replace(self.query, before=rows[-1].seq)
        wanted = self._matching(rows)[: self.left]
        if narrow and wanted:
            names = Query(query.namespace, ids=tuple(row.id for row in wanted), payload=True, writes=True)
            wanted = store.find(names)
        found = self._read(store, wanted, self.heads)
        if self.left is not None:
            self.left -= len(found)
        self.done = self.failure is None and (len(rows) < size or self.left == 0)
        return found

    def _matching(self, rows: list[Row]) -> list[Row]:
        """Return the rows that are wanted, up to one that cannot be read: the next page raises its error."""
        found = []
        try:
            for row in rows:
                if self._matches(row):
                    found.append(row)
        except Corrupted as error:
            self.failure = error
        return found

    def _read(self, store: Backend, rows: list[Row], heads: set[str]) -> list[CheckpointTuple]:
        try:
            return self.reader.read(store, rows, heads)
        except Corrupted:
            pass
        found = []
        for row in rows:  # one by one, to leave out what was deleted while the list was read, and nothing else
            try:
                found += self.reader.read(store, [row], heads)
            except Corrupted as error:
                if is_there(store, row):
                    self.failure = error
                    break
        return found

    def _matches(self, row: Row) -> bool:
        meta = bare(CheckpointMeta, values_of(row))
        if not self.wanted.matches(meta):
            return False
        if self.before_id is None:
            return True
        return id_of_row(place_of_row(row, meta.metadata), row, meta.metadata) < self.before_id


def listing(
    store: Backend,
    reader: Reader,
    thread: str,
    ns: str | None,
    checkpoint_id: str | None,
    filter: Mapping[str, Any] | None,
    before: str | None,
    limit: int | None,
) -> Listing:
    """Return the list of a thread's checkpoints: of one namespace or all, with one id or all."""
    wanted = filter_of(filter or {})
    scope = None if ns is None else Place(thread, ns).scope
    namespace = reader.context.namespace
    query = Query(namespace, thread, scope)
    listed = Listing(reader, query, wanted, left=limit, done=limit is not None and limit <= 0)
    if checkpoint_id is not None:
        query = replace(query, ids=(Place(thread, ns or "").name(checkpoint_id),))
        listed.query = query
    if before is not None:
        seq = None
        if ns is not None:
            name = Place(thread, ns).name(before)
            rows = store.find(Query(namespace, ids=(name,)))
            seq = rows[0].seq if rows else None
        if seq is None:
            listed.before_id = str(before)
        else:
            listed.query = replace(query, before=seq)
    return listed


def filter_of(wanted: Mapping[str, Any]) -> Filter:
    """Return LangGraph's filter, all keys equal, as ours."""
    where = dict(wanted)
    source = where.pop("source", None)
    if source is None and "source" not in wanted:
        return Filter(where=where)
    if source in SOURCES:
        return Filter(trigger=source, where=where)
    return Filter(where={**where, "source": source})


def place_of_row(row: Row, metadata: Mapping[str, Any]) -> Place:
    """Return the thread and namespace of a row."""
    return Place(row.lane.thread, metadata.get(NS, row.lane.scope))


def id_of_row(place: Place, row: Row, metadata: Mapping[str, Any]) -> str:
    """Return LangGraph's id of a row."""
    found = metadata.get(ID) or place.original(row.id)
    if found is None:
        raise _stranger()
    return str(found)


def _stranger() -> DecodeError:
    return DecodeError(
        "the checkpoint was not saved by LangGraph",
        hint="Change a graph's thread with graph.update_state(…), and keep others under names of their own",
    )


def parent_of_row(place: Place, row: Row, metadata: Mapping[str, Any]) -> str | None:
    """Return LangGraph's id of a row's parent, or None."""
    if PARENT in metadata:
        return str(metadata[PARENT])
    return None if row.parent_id is None else place.original(row.parent_id)
