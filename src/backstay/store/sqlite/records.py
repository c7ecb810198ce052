"""Records: read, compared and written in one transaction. Each kind is one range of the table."""

from __future__ import annotations

from typing import Any

import apsw

from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.layout import SEQ_BITS
from backstay.store.leases import BranchKey, ClockReading
from backstay.store.records import Fence, Kind, Record, checkpoint_is_gone, is_repeated, record_id, winner, written
from backstay.store.sqlite import queries
from backstay.store.sqlite.rows import (
    NO_BRANCH,
    NUMBER_MAX,
    ColumnTypes,
    StoredId,
    branch_of,
    fetch_all,
    fetch_one,
    fetch_value,
    find_branch,
    kind_of,
    pack_id,
    span_of_kind,
    thread_of,
    unpack_id,
)
from backstay.store.sqlite.transactions import SqliteTransactions, reading, writing

_RECORD = ColumnTypes("record", "int text text text text text bytes int id? int int? text?")


class SqliteRecords(SqliteTransactions):
    """The verbs on records."""

    @reading
    def record(self, connection: apsw.Connection, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        return _find(connection, record_id(kind, branch, key), self._clock())

    @writing
    def put_record(
        self, connection: apsw.Connection, record: Record, ttl_us: int | None = None, fence: Fence | None = None
    ) -> Record:
        name, branch, now = record_id(record.kind, record.branch, record.key), record.branch, self._clock()
        stored = _find(connection, name, now)
        if stored is not None and is_repeated(record, stored):
            return stored
        if fence is not None:
            lease = (find_branch(connection, branch) or NO_BRANCH).lease
            lease.check_writer(branch, fence.epoch, fence.token, now)
        if (kept := winner(record, stored)) is not None:
            return kept
        ends = (None, None) if ttl_us is None else (now.us + ttl_us, now.boot)
        changed = (record.version + 1, record.open, *ends, record.body)
        if stored is not None:
            connection.execute(queries.CHANGE_RECORD, (*changed, name))
            return written(record, stored, 0, ttl_us)
        thread, checkpoint = _place(connection, record)
        number = int(fetch_value(connection, queries.NEXT_RECORD))
        place = span_of_kind(record.kind)[0] | number
        connection.execute(
            queries.ADD_RECORD, (place, name, thread, branch.scope, branch.name, record.key, checkpoint, *changed)
        )
        return written(record, None, number, ttl_us)

    @reading
    def records(
        self,
        connection: apsw.Connection,
        kind: Kind,
        namespace: str,
        thread: str | None,
        open_only: bool,
        after: int,
        limit: int,
    ) -> list[Record]:
        low, high = span_of_kind(kind, after)
        most = max(0, min(limit, PAGE_ROWS_MAX))
        bound = {"namespace": namespace, "thread": thread, "low": low, "high": high, "limit": most}
        found, now = fetch_all(connection, queries.RECORDS[thread is not None, open_only], bound), self._clock()
        return [_read(fields, now) for fields in found]


def has_open_record(connection: apsw.Connection, key: int, name: StoredId) -> bool:
    """Return whether a checkpoint has an open record."""
    return fetch_one(connection, queries.HAS_OPEN_RECORD, (key >> SEQ_BITS, name)) is not None


def _find(connection: apsw.Connection, name: bytes, now: ClockReading) -> Record | None:
    fields = fetch_one(connection, queries.RECORD, (name,))
    return None if fields is None else _read(fields, now)


def _place(connection: apsw.Connection, record: Record) -> tuple[int, StoredId | None]:
    """Return the number of a new record's thread, and its checkpoint as stored; NotFound if that does not exist."""
    if record.checkpoint is None:
        return thread_of(connection, record.branch)[0], None
    name = pack_id(record.branch.namespace, record.checkpoint)
    found = fetch_one(connection, queries.IDENTITY, (name,))
    if found is not None:
        thread, branch = branch_of(connection, found[0])
        if branch[:3] == record.branch[:3]:
            return thread, name
    raise checkpoint_is_gone(record)


def _read(fields: tuple[Any, ...], now: ClockReading) -> Record:
    _RECORD.check(fields)
    place, *branch, key, body, version, checkpoint, is_open, expires, boot = fields
    left_us = 0 if expires is None else now.left_us(expires, boot)
    return Record(
        kind_of(place),
        BranchKey(*branch),
        key,
        body,
        bool(is_open),
        None if checkpoint is None else unpack_id(checkpoint),
        version,
        place & NUMBER_MAX,
        left_us,
    )
