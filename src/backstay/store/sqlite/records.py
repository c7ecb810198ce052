"""Records: read, compared and written in one transaction. Each kind is one stretch of the table."""

from __future__ import annotations

from typing import Any

import apsw

from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.layout import SEQ_BITS
from backstay.store.records import Fence, Kind, Record, checkpoint_is_gone, is_repeated, record_id, winner, written
from backstay.store.sqlite import queries
from backstay.store.sqlite.lane import NO_LANE, find_lane, lane_of, thread_of
from backstay.store.sqlite.rows import (
    NUMBER_MAX,
    Shape,
    StoredId,
    every,
    kind_of,
    one,
    pack_id,
    scalar,
    span_of_kind,
    unpack_id,
)
from backstay.store.sqlite.transactions import Transactions, reading, writing

_RECORD = Shape("record", "int text text text text text bytes int id? int int? text?")


class Records(Transactions):
    """The verbs on records."""

    @reading
    def record(self, connection: apsw.Connection, kind: Kind, lane: LaneKey, key: str) -> Record | None:
        return _find(connection, record_id(kind, lane, key), self._clock())

    @writing
    def put_record(
        self, connection: apsw.Connection, record: Record, ttl_us: int | None = None, fence: Fence | None = None
    ) -> Record:
        name, lane, now = record_id(record.kind, record.lane, record.key), record.lane, self._clock()
        stored = _find(connection, name, now)
        if stored is not None and is_repeated(record, stored):
            return stored
        if fence is not None:
            tenure = (find_lane(connection, lane) or NO_LANE).tenure
            tenure.check_writer(lane, fence.epoch, fence.token, now)
        if (kept := winner(record, stored)) is not None:
            return kept
        ends = (None, None) if ttl_us is None else (now.us + ttl_us, now.boot)
        changed = (record.version + 1, record.open, *ends, record.body)
        if stored is not None:
            connection.execute(queries.CHANGE_RECORD, (*changed, name))
            return written(record, stored, 0, ttl_us)
        thread, checkpoint = _place(connection, record)
        number = int(scalar(connection, queries.NEXT_RECORD))
        place = span_of_kind(record.kind)[0] | number
        connection.execute(
            queries.ADD_RECORD, (place, name, thread, lane.scope, lane.branch, record.key, checkpoint, *changed)
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
        found, now = every(connection, queries.RECORDS[thread is not None, open_only], bound), self._clock()
        return [_read(fields, now) for fields in found]


def has_open_record(connection: apsw.Connection, key: int, name: StoredId) -> bool:
    """Tell whether a checkpoint has a record that is open."""
    return one(connection, queries.HAS_OPEN_RECORD, (key >> SEQ_BITS, name)) is not None


def _find(connection: apsw.Connection, name: bytes, now: Moment) -> Record | None:
    fields = one(connection, queries.RECORD, (name,))
    return None if fields is None else _read(fields, now)


def _place(connection: apsw.Connection, record: Record) -> tuple[int, StoredId | None]:
    """Return the number of a new record's thread, and its checkpoint as it is stored, which must be there."""
    if record.checkpoint is None:
        return thread_of(connection, record.lane)[0], None
    name = pack_id(record.lane.namespace, record.checkpoint)
    found = one(connection, queries.IDENTITY, (name,))
    if found is not None:
        thread, *lane = lane_of(connection, found[0])
        if LaneKey(*lane)[:3] == record.lane[:3]:
            return thread, name
    raise checkpoint_is_gone(record)


def _read(fields: tuple[Any, ...], now: Moment) -> Record:
    _RECORD.check(fields)
    place, *lane, key, body, version, checkpoint, is_open, expires, boot = fields
    left_us = 0 if expires is None else now.left_us(expires, boot)
    return Record(
        kind_of(place),
        LaneKey(*lane),
        key,
        body,
        bool(is_open),
        None if checkpoint is None else unpack_id(checkpoint),
        version,
        place & NUMBER_MAX,
        left_us,
    )
