"""Making the file as small as it can be: merge what is left of small rows, then give free pages back."""

from __future__ import annotations

import apsw

from backstay.pieces.piece import STREAM_BYTES_MAX
from backstay.store.layout import address_of
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import WINDOWS_BYTES, merge_window
from backstay.store.sqlite.select import every


def compact_database(connection: apsw.Connection) -> int:
    """Merge and compress all streams, give free pages back and empty the log; return by how much the file shrank."""
    before = _file_bytes(connection)
    for stream, _ in every(connection, queries.STREAM_SIZES):
        connection.execute("BEGIN IMMEDIATE")
        try:
            _compact_stream(connection, stream)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        else:
            connection.execute("COMMIT")
    give_pages_back(connection)
    every(connection, "PRAGMA wal_checkpoint(TRUNCATE)")
    return max(0, before - _file_bytes(connection))


def give_pages_back(connection: apsw.Connection) -> None:
    """Cut free pages off the file; it shrinks when the log is next folded in, without waiting for readers here."""
    every(connection, "PRAGMA incremental_vacuum")


def _compact_stream(connection: apsw.Connection, stream: int) -> None:
    first = address_of(stream, 0)
    rows = every(connection, queries.CHUNK_SIZES, (first, first + STREAM_BYTES_MAX))
    length = WINDOWS_BYTES[-1]
    for window in sorted({(address - first) // length for address, _, _ in rows}):
        merge_window(connection, first + window * length, length)


def _file_bytes(connection: apsw.Connection) -> int:
    return int(connection.pragma("page_count")) * int(connection.pragma("page_size"))
