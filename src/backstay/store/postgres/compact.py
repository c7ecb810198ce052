"""Making the tables as small as they can be: merge small rows, then let PostgreSQL reuse what that freed.

Merged rows stand at the same addresses, so manifests do not change. Each stream is one short transaction that holds its
owner's thread, so a saver waits for at most one stream.
"""

from __future__ import annotations

import itertools
from functools import partial

from backstay.pieces.piece import STREAM_BYTES_MAX
from backstay.store.layout import Chunk, address_of, pack_body, touching, unpack_body
from backstay.store.postgres import queries
from backstay.store.postgres.collect import lock_threads
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.link import Link
from backstay.store.postgres.select import every, run, scalar

WINDOW_BYTES = 262_144
TABLES = ("fresh", "chunk", "blob", "checkpoint", "write", "lane", "thread")


def compact_tables(link: Link, schema: str) -> int:
    """Merge all streams and vacuum; return by how much the tables shrank."""
    before = link.read(lambda connection: int(scalar(connection, queries.TABLE_BYTES, (schema,))))
    for (stream,) in link.read(lambda connection: every(connection, queries.STREAMS)):
        link.change(partial(_compact_stream, stream=stream))
    for table in TABLES:
        link.read(partial(run, statement=f"VACUUM {{schema}}.{table}"))
    return max(0, before - link.read(lambda connection: int(scalar(connection, queries.TABLE_BYTES, (schema,)))))


def _compact_stream(connection: DeadlineConnection, stream: int) -> None:
    run(connection, queries.ONE_DELETER)
    thread = scalar(connection, queries.OWNER_THREAD, (stream,))
    if thread is not None:
        lock_threads(connection, [thread])
    first = address_of(stream, 0)
    rows = every(connection, queries.CHUNKS_OF_STREAM, (first, first + STREAM_BYTES_MAX))
    for _, window in itertools.groupby(rows, key=lambda row: (row[0] - first) // WINDOW_BYTES):
        for run_of_rows in touching(list(window)):
            _merge(connection, run_of_rows)


def _merge(connection: DeadlineConnection, rows: list[Chunk]) -> None:
    if len(rows) == 1:
        return  # by itself it was packed when it was saved
    data = b"".join(unpack_body(size, body) for _, size, body in rows)
    every(connection, queries.DROP_CHUNKS, ([address for address, _, _ in rows],))
    run(connection, queries.ADD_CHUNK, (rows[0][0], len(data), pack_body(data)))
