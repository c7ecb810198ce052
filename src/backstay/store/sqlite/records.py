"""Records: read, compared and written in one transaction. Each kind is one range of the table."""

from __future__ import annotations

from typing import Any

from backstay.errors import Corrupted
from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.layout import SEQ_BITS, UNREADABLE
from backstay.store.leases import NO_LEASE, BranchKey, ClockReading
from backstay.store.records import Fence, Kind, Record, checkpoint_is_gone, is_repeated, record_id, winner, written
from backstay.store.sqlite import queries
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import (
    CHECK_HINT,
    NUMBER_MAX,
    ColumnTypes,
    StoredId,
    branch_of,
    count_up,
    fetch_all,
    fetch_one,
    find_branch,
    find_thread,
    kind_of,
    pack_id,
    readable_names,
    seal,
    span_of_kind,
    thread_of,
    unpack_id,
)
from backstay.store.sqlite.transactions import SqliteTransactions, reading, writing

_RECORD = ColumnTypes("record", "int text text text text text bytes int id? int int? text? int int int int")


class SqliteRecords(SqliteTransactions):
    """The verbs on records."""

    @reading
    def record(self, connection: Connection, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        return _find(connection, kind, branch, key, self._clock())

    @writing
    def put_record(
        self, connection: Connection, record: Record, ttl_us: int | None = None, fence: Fence | None = None
    ) -> Record:
        name, branch, now = record_id(record.kind, record.branch, record.key), record.branch, self._clock()
        stored = _find(connection, record.kind, branch, record.key, now)
        if stored is not None and is_repeated(record, stored):
            return stored
        if fence is not None:
            found = find_branch(connection, branch)
            (found.lease if found else NO_LEASE).check_writer(branch, fence.epoch, fence.token, now)
        if (kept := winner(record, stored)) is not None:
            return kept
        ends = (None, None) if ttl_us is None else (now.us + ttl_us, now.boot)
        changed = (record.version + 1, record.open, record.body, *ends)
        if stored is not None:
            branch = stored.branch  # an interrupt or session may be written from another branch, and stays where it is
            place, thread = span_of_kind(record.kind)[0] | stored.number, thread_of(connection, branch)[0]
            checkpoint = None if stored.checkpoint is None else pack_id(branch.namespace, stored.checkpoint)
            own = _seal(place, thread, branch, record.key, checkpoint, ends)
            connection.execute(queries.CHANGE_RECORD, (*changed, own, name))
            return written(record, stored, 0, ttl_us)
        thread, checkpoint = _place(connection, record)
        number = count_up(connection, "record", 1)
        place = span_of_kind(record.kind)[0] | number
        names = (place, name, thread, branch.scope, branch.name, record.key, checkpoint)
        own = _seal(place, thread, branch, record.key, checkpoint, ends)
        connection.execute(queries.ADD_RECORD, (*names, *changed, own))
        return written(record, None, number, ttl_us)

    @reading
    def records(
        self,
        connection: Connection,
        kind: Kind,
        namespace: str,
        thread: str | None,
        open_only: bool,
        after: int,
        limit: int,
    ) -> list[Record]:
        low, high = span_of_kind(kind, after)
        most, way = max(0, min(limit, PAGE_ROWS_MAX)), (thread is not None, open_only)
        bound = {"namespace": namespace, "thread": thread, "low": low, "high": high, "limit": most}
        found, now = fetch_all(connection, queries.RECORDS[way], bound), self._clock()
        if len(found) < most and way in queries.RECORD_COUNTS:
            # The list ends here: once for each list, because counting takes time in proportion to all of it.
            bound["low"] = span_of_kind(kind)[0]
            number, counted, again = fetch_all(connection, queries.RECORD_COUNTS[way], bound)[0]
            if counted != again or (
                thread is not None and number is None and find_thread(connection, namespace, thread)
            ):
                what = f"some {'open ' if open_only else ''}records of kind {kind} cannot be found"
                raise Corrupted(what, thread=thread, hint=CHECK_HINT)
        return [_read(fields, now, listed=True) for fields in found]


def has_open_record(connection: Connection, key: int, name: StoredId) -> bool:
    """Return whether a checkpoint has an open record."""
    return fetch_one(connection, queries.HAS_OPEN_RECORD, (key >> SEQ_BITS, name)) is not None


def _find(connection: Connection, kind: Kind, branch: BranchKey, key: str, now: ClockReading) -> Record | None:
    """Return a record, or None if there is none. Work that its record says was done must not look undone."""
    fields = fetch_one(connection, queries.RECORD, (record_id(kind, branch, key),))
    if fields is not None:
        return _read(fields, now)
    named = (branch.namespace, branch.thread, key, *span_of_kind(kind), kind, branch.scope, branch.name)
    if fetch_one(connection, queries.RECORD_AGAIN, named) is not None:
        raise Corrupted(f"{kind} {key!r} cannot be found by its name", thread=branch.thread, hint=CHECK_HINT)
    return None


def _place(connection: Connection, record: Record) -> tuple[int, StoredId | None]:
    """Return the number of a new record's thread, and its checkpoint as stored; NotFound if that does not exist."""
    if record.checkpoint is None:
        return thread_of(connection, record.branch)[0], None
    name = pack_id(record.branch.namespace, record.checkpoint)
    found = fetch_one(connection, queries.IDENTITY, (name,))
    if found is not None:
        branch = branch_of(connection, found[0])
        if branch.key[:3] == record.branch[:3]:
            return branch.thread, name
    raise checkpoint_is_gone(record)


def _seal(
    place: int,
    thread: int,
    branch: BranchKey,
    key: str,
    checkpoint: StoredId | None,
    ends: tuple[int | None, str | None],
) -> int:
    return seal(place, thread, branch.scope, branch.name, key, checkpoint, *ends)


def _read(fields: tuple[Any, ...], now: ClockReading, listed: bool = False) -> Record:
    """Return a record; of a damaged one a list shows the name, without a body."""
    place, *names, key, body, version, checkpoint, is_open, expires, boot, own, thread, floor, thread_seal = fields
    branch = BranchKey(*names)
    is_sound = _RECORD.fits(fields) and own == _seal(place, thread, branch, key, checkpoint, (expires, boot))
    if not is_sound or thread_seal != seal(thread, branch.namespace, branch.thread, floor):
        if listed:
            key = key if isinstance(key, str) else UNREADABLE
            return Record(kind_of(place), readable_names(branch), key, b"", bool(is_open), number=place & NUMBER_MAX)
        what = f"the row of {kind_of(place)} {key!r}, or of its thread, is damaged"
        raise Corrupted(what, thread=branch.thread, hint=CHECK_HINT)
    left_us = 0 if expires is None else now.left_us(expires, boot)
    return Record(
        kind_of(place),
        branch,
        key,
        body,
        bool(is_open),
        None if checkpoint is None else unpack_id(checkpoint),
        version,
        place & NUMBER_MAX,
        left_us,
    )
