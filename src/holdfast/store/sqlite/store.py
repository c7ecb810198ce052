"""The SQLite store: one file, many threads and processes.

Writes go through the group commit of ``writer``; reads have connections of their own, so neither waits for the other.
A process that forks is safe: connections are closed before the fork and opened again, on both sides, when needed.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import apsw

from holdfast.errors import Conflict, Fenced, IdTaken, NotFound, StoreError
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
from holdfast.store.sqlite import queries
from holdfast.store.sqlite.check import check_database
from holdfast.store.sqlite.chunks import add_blob, add_chunk, read_ranges, stream_end
from holdfast.store.sqlite.collect import delete_rows, delete_thread, set_aside, span_of
from holdfast.store.sqlite.compact import compact_database, give_pages_back
from holdfast.store.sqlite.database import Database, resolve_path, translated
from holdfast.store.sqlite.rows import SEQ_BITS, SEQ_MAX, key_of, pack_id, read_row, read_write, unpack_id
from holdfast.store.sqlite.writer import Writer

TIMEOUT_S = 30.0
"""How long a call waits for other processes before it raises StoreBusy."""


class SqliteStore:
    """Keeps checkpoints in one SQLite file."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._gate = _Gate()
        self._database = Database(resolve_path(url), timeout_s)
        self._writer = Writer(self._database)
        self._readers: list[apsw.Connection] = []
        _stores.add(self)

    # Reading ------------------------------------------------------------------------------------------------------

    def head(self, lane: LaneKey) -> Head | None:
        with self._reading() as connection:
            found = connection.execute(queries.LANE, lane).fetchone()
            if found is None:
                return None
            number, thread, head, last_seq, epoch, _ = found
            key = key_of(number, head)
            fields = connection.execute(queries.ROW_BY_KEY_WITH_PAYLOAD, (key,)).fetchone()
            row = None
            if fields is not None:
                row = _with_writes(connection, read_row(lane, thread, fields, True, _tags(connection, key)))
            owned = {
                stream: stream_end(connection, stream) for (stream,) in connection.execute(queries.OWNED, (number,))
            }
            return Head(row, number, last_seq, epoch, owned)

    def find(self, query: Query) -> list[Row]:
        with self._reading() as connection:
            if query.ids is not None:
                rows = _rows_by_id(connection, query)
            elif query.heads_of_threads:
                rows = _heads_of_threads(connection, query)
            else:
                rows = _rows_of_lanes(connection, query)
            return [_with_writes(connection, row) for row in rows] if query.writes else rows

    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        with self._reading() as connection:
            wanted = {"namespace": namespace, "thread": thread, "scope": scope}
            return [
                Lane(
                    LaneKey(*key),
                    _id_of(connection, key_of(number, head)),
                    head,
                    last_seq,
                    epoch,
                    None if origin is None else unpack_id(origin),
                )
                for number, _, *key, head, last_seq, epoch, origin in connection.execute(queries.LANES, wanted).fetchall()
            ]

    def fetch(self, ranges: Iterable[Range]) -> list[bytes]:
        with self._reading() as connection:
            return read_ranges(connection, ranges)

    def sizes(self) -> Sizes:
        with self._reading() as connection:
            sources: dict[Source, int] = dict(connection.execute(queries.BLOB_SIZES).fetchall())
            sources.update(connection.execute(queries.STREAM_SIZES).fetchall())
            pages = connection.pragma("page_count")
            return Sizes(pages * connection.pragma("page_size"), sources, connection.execute(queries.ROW_BYTES).get)

    # Writing ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> int:
        def job(connection: apsw.Connection) -> int:
            return int(connection.execute(queries.RESERVE, (count,)).get) - count

        return self._write(job)

    def commit(self, commit: Commit) -> Committed:
        return self._write(lambda connection: _commit(connection, commit), commit.id)

    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        statement = queries.PUT_WRITE if replace else queries.ADD_WRITE
        name = pack_id(lane.namespace, checkpoint)

        def job(connection: apsw.Connection) -> bool:
            thread = _thread(connection, lane)[0]
            for row in writes:
                fields = (row.task_id, row.index, row.task_path, row.channel, row.kind, row.count, row.body)
                connection.execute(statement, (thread, lane.scope, name, *fields))
            return True

        self._write(job, checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        def job(connection: apsw.Connection) -> tuple[str, ...]:
            found = connection.execute(queries.IDENTITY, (pack_id(namespace, checkpoint),)).fetchone()
            if found is None:
                raise NotFound(checkpoint, checkpoint=checkpoint)
            connection.executemany(queries.ADD_TAG, [(found[0], name) for name in add])
            connection.executemany(queries.DROP_TAG, [(found[0], name) for name in remove])
            return _tags(connection, found[0])

        return self._write(job, checkpoint)

    # Deleting -----------------------------------------------------------------------------------------------------

    def delete(self, namespace: str, checkpoints: Collection[str], spare_heads: bool) -> Removed:
        def job(connection: apsw.Connection) -> Removed:
            keys = []
            for name in checkpoints:
                found = connection.execute(queries.IDENTITY, (pack_id(namespace, name),)).fetchone()
                if found is not None and not (spare_heads and _is_head(connection, found[0])):
                    keys.append(found[0])
            return delete_rows(connection, keys)

        removed = self._write(job)
        self._shrink(removed)
        return removed

    def delete_thread(self, namespace: str, thread: str) -> Removed:
        def job(connection: apsw.Connection) -> Removed:
            found = connection.execute(queries.THREAD, (namespace, thread)).fetchone()
            return Removed() if found is None else delete_thread(connection, found[0])

        removed = self._write(job)
        self._shrink(removed)
        return removed

    # Upkeep -------------------------------------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        with self._reading() as connection:
            return check_database(connection)

    def compact(self) -> int:
        with self._gate:
            self._database.lock.acquire()
            try:
                with translated(self._database.path), contextlib.closing(self._database.connect()) as connection:
                    return compact_database(connection)
            finally:
                self._database.lock.release()

    def close(self) -> None:
        if self._gate.close():
            _stores.discard(self)
            self._disconnect()
            self._database.lock.close()

    # Inside -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[apsw.Connection]:
        """Give a connection of its own, inside one snapshot, to a read that may be made of several statements."""
        with self._gate, translated(self._database.path):
            connection = self._readers.pop() if self._readers else self._database.connect()
            try:
                connection.execute("BEGIN")
                yield connection
            except BaseException:
                connection.close()  # whatever went wrong, this connection's state is not to be relied on
                raise
            else:
                connection.execute("COMMIT")
                self._readers.append(connection)

    def _write(self, job: Any, name: str | None = None) -> Any:
        with self._gate:
            return self._writer.submit(job, name)

    def _shrink(self, removed: Removed) -> None:
        if removed.bytes or removed.checkpoints:
            with self._gate:
                self._database.lock.acquire()
                try:
                    with translated(self._database.path), contextlib.closing(self._database.connect()) as connection:
                        give_pages_back(connection)
                finally:
                    self._database.lock.release()

    def _disconnect(self) -> None:
        self._writer.close()
        while self._readers:
            self._readers.pop().close()


# Forking ----------------------------------------------------------------------------------------------------------


class _Gate:
    """Counts the calls under way, so that a close or a fork can wait for them, and refuses calls after a close."""

    def __init__(self) -> None:
        self._renew()
        self._closed = False

    def __enter__(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                "the store was opened in another process than this copy of it",
                hint="Open the store after forking, or fork with os.fork or multiprocessing",
            )
        with self._changed:
            while self._shut:
                self._changed.wait()
            if self._closed:
                raise StoreError("the store is closed", hint="Open it again with holdfast.open")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._shut and not self._inside:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in any more and wait until everybody is out."""
        with self._changed:
            self._shut = True
            while self._inside:
                self._changed.wait()

    def reopen(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def close(self) -> bool:
        """Shut for good; return False if it was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._shut = True
            while self._inside:
                self._changed.wait()
            self._shut = False
            self._changed.notify_all()
            return True

    def renew(self) -> None:
        """Begin anew in a forked process, where nobody else is inside."""
        self._renew()

    def _renew(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._shut = False
        self._process = os.getpid()


_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()


def _before_fork() -> None:
    # A child that has an inherited SQLite connection to a file can lose committed data even through connections of its
    # own, because SQLite thinks it still holds the parent's locks. So there must be none at the moment of the fork.
    for store in list(_stores):
        store._gate.shut()
        store._disconnect()


def _after_fork_in_parent() -> None:
    for store in list(_stores):
        store._gate.reopen()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._gate.renew()
        store._writer = Writer(store._database)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )


# Statements with their parts ----------------------------------------------------------------------------------------


def _commit(connection: apsw.Connection, commit: Commit) -> Committed:
    key = commit.lane
    name = pack_id(key.namespace, commit.id)
    found = connection.execute(queries.LANE, key).fetchone()
    number, thread, head, last_seq, epoch, seq = found or (0, 0, 0, 0, 0, 0)
    if (number, last_seq) != (commit.number, commit.last_seq) or commit.replaces_head or not found:
        existing = connection.execute(queries.IDENTITY, (name,)).fetchone()
        if existing is not None and not (commit.replaces_head and existing[0] == key_of(number, head)):
            return _first_result(commit, number, existing)
    else:
        existing = None
    if epoch != commit.epoch:
        raise Fenced("a newer owner holds this branch", epoch=commit.epoch, current=epoch, thread=key.thread)
    if (number, last_seq) != (commit.number, commit.last_seq):
        raise Conflict("the branch has moved on", thread=key.thread, checkpoint=commit.id)
    if commit.requires is not None:
        _require(connection, commit)
    if not found:
        thread, seq = _thread(connection, key)
        origin = None if commit.requires is None else pack_id(key.namespace, commit.requires)
        number = connection.execute(queries.ADD_LANE, (thread, key.scope, key.branch, origin)).get
    if existing is not None:
        set_aside(connection, existing[0], name, existing[1])
    try:
        _insert(connection, commit, key_of(number, seq), name)
    except apsw.ConstraintError:
        taken = connection.execute(queries.IDENTITY, (name,)).fetchone()
        if taken is None:
            raise
        return _first_result(commit, number, taken)
    connection.execute(queries.NUMBER_THREAD, (seq + 1, thread))
    connection.execute(queries.MOVE_LANE, (seq, seq, number))
    _insert_bytes(connection, commit, number)
    if existing is not None:
        delete_rows(connection, [existing[0]])
    return Committed(number, seq, True)


def _insert(connection: apsw.Connection, commit: Commit, key: int, name: str | bytes) -> None:
    parent = None if commit.parent_id is None else pack_id(commit.lane.namespace, commit.parent_id)
    connection.execute(
        queries.ADD_CHECKPOINT,
        (
            key,
            name,
            parent,
            commit.step,
            commit.created_us,
            commit.digest,
            commit.size,
            commit.notes,
            commit.base,
            commit.manifest,
        ),
    )
    for tag in commit.tags:
        connection.execute(queries.ADD_TAG, (key, tag))


def _insert_bytes(connection: apsw.Connection, commit: Commit, lane: int) -> None:
    for name, data in commit.blobs.items():
        add_blob(connection, name, data)
    for stream, offset, data in commit.chunks:
        add_chunk(connection, stream, offset, data)
    for source in commit.sources:
        connection.execute(queries.ADD_REF, (lane, source, source in commit.owned))


def _first_result(commit: Commit, lane: int, existing: tuple[int, bytes]) -> Committed:
    key, digest = existing
    if digest == commit.digest and key >> SEQ_BITS == lane:
        return Committed(lane, key & SEQ_MAX, False)
    raise IdTaken(
        f"checkpoint {commit.id} exists with other content",
        thread=commit.lane.thread,
        checkpoint=commit.id,
        hint="Give each checkpoint its own id, or none",
    )


def _require(connection: apsw.Connection, commit: Commit) -> None:
    assert commit.requires is not None
    name = pack_id(commit.lane.namespace, commit.requires)
    if connection.execute(queries.IDENTITY, (name,)).fetchone() is None:
        raise NotFound(commit.requires, checkpoint=commit.requires, hint="It was deleted in the meantime")


def _thread(connection: apsw.Connection, lane: LaneKey) -> tuple[int, int]:
    """Return the thread's number and next sequence number; make the thread if there is none."""
    found = connection.execute(queries.THREAD, lane[:2]).fetchone()
    if found is not None:
        return int(found[0]), int(found[1])
    return int(connection.execute(queries.ADD_THREAD, lane[:2]).get), 1


def _is_head(connection: apsw.Connection, key: int) -> bool:
    return bool(connection.execute(queries.HEAD_OF_LANE, (key >> SEQ_BITS,)).get == key & SEQ_MAX)


def _id_of(connection: apsw.Connection, key: int) -> str | None:
    fields = connection.execute(queries.ROW_BY_KEY_WITH_PAYLOAD, (key,)).fetchone()
    return None if fields is None else unpack_id(fields[1])


def _tags(connection: apsw.Connection, key: int) -> tuple[str, ...]:
    return tuple(name for (name,) in connection.execute(queries.TAGS, (key,)))


def _with_writes(connection: apsw.Connection, row: Row) -> Row:
    name = pack_id(row.lane.namespace, row.id)
    writes = connection.execute(queries.WRITES, (row.thread_number, row.lane.scope, name)).fetchall()
    return replace(row, writes=tuple(map(read_write, writes))) if writes else row


def _conditions(query: Query) -> tuple[str, dict[str, Any]]:
    """Return the conditions that any kind of list may have, as SQL and what is bound to it."""
    text = "".join(
        (
            queries.AND_STEP_MAX if query.step_max is not None else "",
            queries.AND_TAG if query.tag is not None else "",
            *(queries.AND_NEEDLE.format(number=number) for number in range(len(query.needles))),
        )
    )
    bound: dict[str, Any] = {"limit": max(0, min(query.limit, PAGE_ROWS_MAX))}
    if query.step_max is not None:
        bound["step_max"] = query.step_max
    if query.tag is not None:
        bound["tag"] = query.tag
    bound.update({f"needle{number}": needle for number, needle in enumerate(query.needles)})
    return text, bound


def _rows_of_lanes(connection: apsw.Connection, query: Query) -> list[Row]:
    lanes = connection.execute(
        queries.LANES_OF_THREAD,
        {"namespace": query.namespace, "thread": query.thread, "scope": query.scope, "branch": query.branch},
    ).fetchall()
    pages = [_rows_of_lane(connection, query, lane) for lane in lanes]
    if len(pages) == 1:
        return pages[0]
    merged = heapq.merge(*pages, key=lambda row: row.seq, reverse=True)
    return list(islice(merged, max(0, min(query.limit, PAGE_ROWS_MAX))))


def _rows_of_lane(connection: apsw.Connection, query: Query, lane: tuple[Any, ...]) -> list[Row]:
    number, thread, *key = lane
    conditions, bound = _conditions(query)
    low, high = span_of(number, query.before)
    select = queries.ROWS_OF_LANE_WITH_PAYLOAD if query.payload else queries.ROWS_OF_LANE
    statement = select.replace("?", ":low", 1).replace("?", ":high", 1) + conditions + queries.NEWEST_FIRST
    found = connection.execute(statement, {**bound, "low": low, "high": high}).fetchall()
    if not found:
        return []
    lane_key = LaneKey(*key)
    tags: dict[int, tuple[str, ...]] = {}
    for checkpoint, name in connection.execute(queries.TAGS_BETWEEN, (found[-1][0], found[0][0])):
        tags[checkpoint] = (*tags.get(checkpoint, ()), name)
    return [read_row(lane_key, thread, fields, query.payload, tags.get(fields[0], ())) for fields in found]


def _heads_of_threads(connection: apsw.Connection, query: Query) -> list[Row]:
    conditions, bound = _conditions(query)
    bound.update(namespace=query.namespace, scope=query.scope, before=query.before)
    statement = queries.HEADS_OF_THREADS + conditions + queries.NEWEST_THREAD_FIRST
    found = connection.execute(statement, bound).fetchall()
    return [
        read_row(LaneKey(*fields[1:5]), fields[0], fields[5:], False, _tags(connection, fields[5])) for fields in found
    ]


def _rows_by_id(connection: apsw.Connection, query: Query) -> list[Row]:
    assert query.ids is not None
    statement = queries.ROW_BY_ID_WITH_PAYLOAD if query.payload else queries.ROW_BY_ID
    rows = []
    for name in query.ids[: query.limit]:
        fields = connection.execute(statement, (pack_id(query.namespace, name),)).fetchone()
        if fields is not None:
            thread, *key = connection.execute(queries.LANE_BY_ID, (fields[0] >> SEQ_BITS,)).fetchone()
            rows.append(read_row(LaneKey(*key), thread, fields, query.payload, _tags(connection, fields[0])))
    return rows
