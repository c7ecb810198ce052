"""Reading checkpoints back: one, or page by page, each verified and decoded with the serializer of the call."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, cast

from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from backstay.errors import BackstayError, Corrupted
from backstay.langgraph.delta import CARRIED
from backstay.langgraph.encoding import (
    HEADS,
    SOURCES,
    checkpoint_from,
    from_body,
    load,
    metadata_of,
    names_of,
    not_langgraph,
)
from backstay.langgraph.lists import ENCRYPTED_LIST, MESSAGE_CLASSES, load_encrypted
from backstay.langgraph.names import GraphLocation, ReadId, config_of
from backstay.langgraph.put import CachedHead, HeadCache
from backstay.model.checkpoint import CheckpointMeta, unchecked
from backstay.operations.cursor import Cursor, Services
from backstay.operations.diff import Diff, diff
from backstay.operations.listing import Filter, every_branch, unreadable
from backstay.operations.load import is_stored, load_values, open_head_state, verify_digest
from backstay.operations.rows import meta_of, values_of
from backstay.pieces.head_state import HeadState, StoredValue
from backstay.pieces.manifest import RUN, VERSIONS, Key, Range
from backstay.store.base import Backend, Query, Row, WriteRow

PAGE_ROWS_MAX = 128

Decode = Callable[[StoredValue], Any]
_SHARED = frozenset({str, int, float, bool, bytes, type(None), *MESSAGE_CLASSES})
_UNKNOWN = object()
COUNTED = frozenset({*HEADS, ENCRYPTED_LIST})
"""The kinds of values that store a count of their elements."""


# Reading many at once ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReadBatch:
    """Some rows with all their values loaded; bytes that rows share are fetched, verified and decoded once.

    From step to step most values stay the same and lists grow at the end. So only the longest value of each key is
    fetched. Digests show which other values are equal to it or a prefix of it; one pass over the bytes gives the digest
    of every length. A flat list or dictionary is decoded once, at its longest. Each checkpoint gets its own container
    with the same elements: texts, numbers and LangChain's messages. Deeper values are decoded per checkpoint.
    """

    rows: list[tuple[Row, HeadState]] = field(default_factory=list)
    _longest: dict[int, StoredValue] = field(default_factory=dict)  # by id() of a value: the value it is a prefix of
    _decoded: dict[int, Any] = field(default_factory=dict)  # by id() of a longest value whose elements may be shared

    @classmethod
    def load(cls, store: Backend, rows: Sequence[Row]) -> ReadBatch:
        """Load and verify the values of these rows."""
        batch = cls()
        by_key: dict[Key, list[StoredValue]] = {}
        for row in rows:
            head_state = open_head_state(store, row, {})
            batch.rows.append((row, head_state))
            for key, stored in head_state.values.items():
                if stored.parts is None:
                    by_key.setdefault(key, []).append(stored)
        if len(rows) > 1:
            batch._load_shared(store, [group for group in by_key.values() if len(group) > 1])
        for row, head_state in batch.rows:
            load_values(store, head_state, list(head_state.values), row)
        return batch

    def _load_shared(self, store: Backend, groups: Sequence[Sequence[StoredValue]]) -> None:
        """Fetch the longest value of each group and give its bytes to the values that are a prefix of it."""
        longest = [max(group, key=lambda stored: stored.entry.size) for group in groups]
        ranges = [piece for top in longest for piece in top.pieces if isinstance(piece, Range)]
        fetched = iter(store.fetch(ranges))
        for top, group in zip(longest, groups, strict=True):
            top.parts = [
                part for piece in top.pieces for part in (next(fetched) if isinstance(piece, Range) else (piece,))
            ]
            view, hasher, done = memoryview(top.data()), hashlib.sha256(), 0
            digests: dict[int, bytes] = {}
            for size in sorted({stored.entry.size for stored in group}):
                hasher.update(view[done:size])
                digests[size] = hasher.copy().digest()
                done = size
            if digests[top.entry.size] != top.entry.digest:
                top.parts = None  # damaged or just deleted: it is read again by itself, and reported if it is damaged
                continue
            for stored in group:
                if stored.entry.kind == top.entry.kind and stored.entry.digest == digests[stored.entry.size]:
                    stored.parts = [cast(bytes, view[: stored.entry.size])]  # not a copy: most are never looked at
                    self._longest[id(stored)] = top

    def value(self, stored: StoredValue, decode: Decode) -> Any:
        """Return a value: decode it, or copy it from one that is decoded already."""
        top = self._longest.get(id(stored))
        if top is None:
            return decode(stored)
        known = self._decoded.get(id(top), _UNKNOWN)
        if known is _UNKNOWN:
            value = decode(top)
            items = value.values() if type(value) is dict else value if type(value) is list else (value,)
            may_share = type(value) in (dict, list) and all(type(each) in _SHARED for each in items)
            known = self._decoded[id(top)] = value if may_share else None
        count = len(known) if stored.entry.digest == top.entry.digest and known is not None else stored.entry.count
        if known is None or (count != len(known) and stored.entry.kind not in COUNTED):
            return decode(stored)
        return known[:count] if type(known) is list else dict(islice(known.items(), count))


@dataclass(slots=True)
class Reader:
    """Reads with one serializer, and remembers heads in the saver's cache for the next put."""

    services: Services
    serde: SerializerProtocol
    cache: HeadCache | None = None

    def get(self, store: Backend, location: GraphLocation, checkpoint_id: str | None) -> CheckpointTuple | None:
        """Return a checkpoint, or the newest of its namespace."""
        query = self.query(location, checkpoint_id, payload=True)
        failed: Row | None = None
        while True:
            rows = store.find(query)
            if not rows:
                return None
            row = rows[0]
            heads = {row.id} if checkpoint_id is None else self.heads(store, location.thread, location.scope)
            try:
                return self.read(store, [row], heads)[0]
            except Corrupted:
                if failed == row or is_stored(store, row):
                    raise
                failed = row  # it got a successor and was deleted during the read

    def query(self, location: GraphLocation, checkpoint_id: str | None, *, payload: bool) -> Query:
        """Return the query that finds a checkpoint with its writes, or the newest of its namespace."""
        namespace = self.services.namespace
        if checkpoint_id is None:
            return Query(namespace, location.thread, location.scope, limit=1, payload=payload, writes=True)
        return Query(namespace, ids=(location.name(checkpoint_id),), payload=payload, writes=True)

    def heads(self, store: Backend, thread: str, scope: str | None) -> set[str]:
        """Return the ids of the newest checkpoints of all branches."""
        branches = every_branch(store, self.services.namespace, thread, scope)
        return {branch.head for branch in branches if branch.head is not None}

    def read(self, store: Backend, rows: Sequence[Row], heads: set[str]) -> list[CheckpointTuple]:
        """Return the checkpoints of rows that were found with payload and writes."""
        batch = ReadBatch.load(store, rows)
        found = []
        for row, head_state in batch.rows:
            values = values_of(row)
            verify_digest(row, values, head_state.entries())
            try:
                found.append(self._tuple(row, unchecked(CheckpointMeta, values), head_state, heads, batch))
            except BackstayError as error:
                error.thread, error.checkpoint = error.thread or row.branch.thread, error.checkpoint or row.id
                raise
            if self.cache is not None and len(rows) == 1 and row.id in heads:
                self.cache.add(CachedHead(Cursor(row.branch, None, head_state)), row)
        return found

    def _tuple(
        self, row: Row, meta: CheckpointMeta, head_state: HeadState, heads: set[str], batch: ReadBatch
    ) -> CheckpointTuple:
        location, checkpoint_id, parent = names_of(meta)
        if RUN not in head_state.values or VERSIONS not in head_state.values:
            raise not_langgraph()
        names, versions = (head_state.values[key].value() for key in (RUN, VERSIONS))
        channels = {
            key: batch.value(stored, partial(self._channel, key))
            for key, stored in head_state.values.items()
            if isinstance(key, str)
        }
        return CheckpointTuple(
            config_of(location, ReadId(checkpoint_id, row.id not in heads)),  # type: ignore[arg-type]
            checkpoint_from(names, versions, channels, checkpoint_id, meta.created_at, self.serde),
            metadata_of(meta.trigger, meta.metadata),  # type: ignore[arg-type]
            None if parent is None else config_of(location, ReadId(parent, forks=True)),  # type: ignore[arg-type]
            [(write.task_id, write.channel, self.value_of(write)) for write in row.writes if write.task_id != CARRIED],
        )

    def _channel(self, channel: str, stored: StoredValue) -> Any:
        assert stored.parts is not None
        return self._decoded(stored.entry.kind, stored.entry.count, stored.parts, f"channel_values.{channel}")

    def value_of(self, row: WriteRow) -> Any:
        """Return the value of a pending write."""
        return self._decoded(row.kind, row.count, [row.body], f"writes.{row.channel}")

    def _decoded(self, kind: str, count: int, parts: Sequence[bytes], path: str) -> Any:
        if kind == ENCRYPTED_LIST:
            return load_encrypted(count, parts, lambda typed: load(self.serde, typed, path))
        return load(self.serde, from_body(kind, count, parts), path)


# Lists ------------------------------------------------------------------------------------------------------------


def pages_of_thread(
    store: Backend,
    reader: Reader,
    thread: str,
    ns: str | None,
    checkpoint_id: str | None,
    filter: Mapping[str, Any] | None,
    before: str | None,
    limit: int | None,
) -> Iterator[list[CheckpointTuple]]:
    """Yield a thread's checkpoints, newest first, page by page: of one namespace or all, with one id or all."""
    # LangGraph's filter compares metadata for equality; its key "source" is our trigger.
    where = dict(filter or {})
    trigger = where.pop("source") if where.get("source") in SOURCES else None
    wanted = Filter(trigger=trigger, where=where)
    namespace, location = reader.services.namespace, GraphLocation(thread, ns or "")
    query = Query(namespace, thread, None if ns is None else location.scope)
    if checkpoint_id is not None:
        query = replace(query, ids=(location.name(checkpoint_id),))
    before_id: str | None = None
    if before is not None:
        rows = [] if ns is None else store.find(Query(namespace, ids=(location.name(before),)))
        if rows:
            query = replace(query, before=rows[0].seq)
        else:
            before_id = before  # it is in another namespace: only lower ids are listed
    if limit is None or limit > 0:
        yield from _pages(store, reader, query, wanted, before_id, limit)


def _pages(
    store: Backend, reader: Reader, query: Query, wanted: Filter, before_id: str | None, left: int | None
) -> Iterator[list[CheckpointTuple]]:
    """Yield pages of growing size, and hold nothing in the store between them."""
    assert query.thread is not None
    heads = reader.heads(store, query.thread, query.scope)
    for lost in unreadable(store, query.namespace, query.thread):
        raise lost.error
    narrow = wanted != Filter() or before_id is not None
    size, more = 8, True
    failure: Corrupted | None = None  # about the next checkpoint; it is raised after those before it
    while more:
        limit = size if narrow or left is None else min(left, PAGE_ROWS_MAX)
        rows = store.find(replace(query, limit=limit, payload=not narrow, writes=not narrow))
        size, more = min(size * 4, PAGE_ROWS_MAX), len(rows) == limit
        if rows:
            query = replace(query, before=rows[-1].seq)
        matching: list[Row] = []
        try:
            matching.extend(row for row in rows if _matches(row, wanted, before_id))
        except Corrupted as error:
            failure = error
        matching = matching[:left]
        if narrow and matching:
            names = tuple(row.id for row in matching)
            matching = store.find(Query(query.namespace, ids=names, payload=True, writes=True))
        found, damage = _read_page(store, reader, matching, heads)
        if left is not None:
            left -= len(found)
        yield found
        if failure := damage or failure:
            raise failure
        more = more and left != 0


def _matches(row: Row, wanted: Filter, before_id: str | None) -> bool:
    meta = meta_of(row)
    if not wanted.matches(meta):
        return False
    return before_id is None or names_of(meta)[1] < before_id


def _read_page(
    store: Backend, reader: Reader, rows: list[Row], heads: set[str]
) -> tuple[list[CheckpointTuple], Corrupted | None]:
    """Return the checkpoints of these rows up to a damaged one, and its damage."""
    try:
        return reader.read(store, rows, heads), None
    except Corrupted:
        pass
    # One by one, so that only the checkpoints deleted during the read are left out.
    found: list[CheckpointTuple] = []
    for row in rows:
        try:
            found += reader.read(store, [row], heads)
        except Corrupted as error:
            if is_stored(store, row):
                return found, error
    return found, None


# Comparing --------------------------------------------------------------------------------------------------------

CLASS = "class"
"""The key that holds the class name of an object, before its fields."""

_PLAIN = (str, int, float, bool, bytes, type(None))
_DEPTH_MAX = 32


def compare(before: CheckpointTuple, after: CheckpointTuple) -> Diff:
    """Return what changed in the channel values between two checkpoints."""
    one, two = (readable(each.checkpoint["channel_values"]) for each in (before, after))
    return dataclasses.replace(diff(one, two), before=before.checkpoint["id"], after=after.checkpoint["id"])


def readable(value: Any, depth: int = 0) -> Any:
    """Return a value as plain data; an object becomes a dictionary of its fields, or its ``repr``.

    So a diff matches messages by their ids, and shows the fields that have changed.
    """
    if isinstance(value, _PLAIN):
        return value
    if depth > _DEPTH_MAX:
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): readable(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [readable(each, depth + 1) for each in value]
    if callable(dump := getattr(value, "model_dump", None)):
        fields = dict(dump())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    else:
        return repr(value)
    return {CLASS: type(value).__name__, **{name: readable(each, depth + 1) for name, each in fields.items()}}
