"""The room that the tables take, and making them smaller: merge small rows, then let PostgreSQL reuse the room.

Merged rows stand at the same addresses, so manifests do not change. Each stream is one short transaction that holds its
owner's thread, so a saver waits for at most one stream.
"""

from __future__ import annotations

import itertools
from functools import partial

from backstay.pieces.manifest import Source
from backstay.pieces.piece import STREAM_BYTES_MAX
from backstay.store.base import Sizes
from backstay.store.layout import Chunk, address_of, pack_body, touching, unpack_body
from backstay.store.postgres import queries
from backstay.store.postgres.collect import lock_threads
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.link import Link
from backstay.store.postgres.target import Target

WINDOW_BYTES = 262_144
TABLES = ("fresh", "chunk", "blob", "checkpoint", "write", "lane", "thread")


class Space:
    """The verbs about the room that everything takes."""

    _link: Link
    _target: Target

    def sizes(self) -> Sizes:
        def work(connection: DeadlineConnection) -> Sizes:
            sources: dict[Source, int] = dict(connection.every(queries.BLOB_SIZES))
            sources.update(connection.every(queries.STREAM_SIZES))
            total = connection.scalar(queries.TABLE_BYTES, (self._target.schema,))
            return Sizes(total, sources, connection.scalar(queries.ROW_BYTES))

        return self._link.read(work)

    def compact(self) -> int:
        def table_bytes(connection: DeadlineConnection) -> int:
            return int(connection.scalar(queries.TABLE_BYTES, (self._target.schema,)))

        before = self._link.read(table_bytes)
        for (stream,) in self._link.read(lambda connection: connection.every(queries.STREAMS)):
            self._link.change(partial(_compact_stream, stream=stream))
        for table in TABLES:
            self._link.read(partial(DeadlineConnection.run, statement=f"VACUUM {{schema}}.{table}"))
        return max(0, before - self._link.read(table_bytes))


def _compact_stream(connection: DeadlineConnection, stream: int) -> None:
    connection.run(queries.ONE_DELETER)
    thread = connection.scalar(queries.OWNER_THREAD, (stream,))
    if thread is not None:
        lock_threads(connection, [thread])
    first = address_of(stream, 0)
    rows = connection.every(queries.CHUNKS_OF_STREAM, (first, first + STREAM_BYTES_MAX))
    for _, window in itertools.groupby(rows, key=lambda row: (row[0] - first) // WINDOW_BYTES):
        for run_of_rows in touching(list(window)):
            _merge(connection, run_of_rows)


def _merge(connection: DeadlineConnection, rows: list[Chunk]) -> None:
    if len(rows) == 1:
        return  # by itself it was packed when it was saved
    data = b"".join(unpack_body(size, body) for _, size, body in rows)
    connection.every(queries.DROP_CHUNKS, ([address for address, _, _ in rows],))
    connection.run(queries.ADD_CHUNK, (rows[0][0], len(data), pack_body(data)))
