"""Pending writes in their tables: a row for each task, and the pieces of what is too long for it.

A page takes only whole rows, so rows of some kilobytes would leave much of each page empty; and rows that are kept in
the order of a key fill their pages to two thirds. Pieces are small and always added at the end, so they fill theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import apsw

from backstay.pieces.coverage import is_needed, merge_ranges
from backstay.store.base import LaneKey, Row, WriteRow
from backstay.store.layout import uuid_bytes, uuid_text
from backstay.store.sqlite import queries
from backstay.store.sqlite.lane import thread_of
from backstay.store.sqlite.rows import StoredId, every, one, pack_id, scalar
from backstay.store.writes import Packed, by_task, merge, merged, pack, read

PIECE_BYTES = 260
"""Smaller ones cost more rows, larger ones leave more of a page of 4 KiB empty: a tenth is lost, whatever comes."""

INLINE_BYTES_MAX = 80
"""What is not longer stands in the task's own row: a piece would cost more than the emptier page does."""


def put_writes(
    connection: apsw.Connection, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool
) -> None:
    """Keep the results of finished tasks; see ``Backend.write``."""
    thread = thread_of(connection, lane)[0]
    name = pack_id(lane.namespace, checkpoint)
    for task, new in by_task(writes).items():
        key = (thread, lane.scope, name, uuid_bytes(task) or task)
        found = one(connection, queries.WRITES_OF_TASK, key)
        if found is None:
            _put(connection, key, pack(merge((), new, replace)))
            continue
        stored = merged(task, _packed(connection, *found), new, replace, lane.thread, checkpoint)
        if stored is not None:
            drop_writes(connection, queries.DROP_WRITES_OF_TASK, key)
            _put(connection, key, stored)


def with_writes(connection: apsw.Connection, row: Row) -> Row:
    """Return the row with its pending writes."""
    name = pack_id(row.lane.namespace, row.id)
    found = every(connection, queries.WRITES, (row.thread_number, row.lane.scope, name))
    if not found:
        return row
    tasks = [
        (uuid_text(task) if isinstance(task, bytes) else task, _packed(connection, *stored)) for task, *stored in found
    ]
    return row._replace(writes=read(tasks, row.lane.thread, row.id))


def drop_writes(connection: apsw.Connection, statement: str, bound: tuple[object, ...]) -> None:
    """Drop rows of writes by one of the statements for that, with their pieces."""
    for pieces, first in every(connection, statement, bound):
        if isinstance(first, int):
            connection.execute(queries.DROP_PIECES, (first, first + pieces))


def lost_pieces(connection: apsw.Connection) -> list[int]:
    """Return the numbers of pieces that belong to no row."""
    needed = merge_ranges([(first, first + pieces) for first, pieces in every(connection, queries.PIECES_NEEDED)])
    return [number for (number,) in connection.execute(queries.PIECES) if not is_needed(number, number + 1, needed)]


def _put(connection: apsw.Connection, key: tuple[int, str, StoredId, StoredId], packed: Packed) -> None:
    size, body = packed
    if len(body) <= INLINE_BYTES_MAX:
        connection.execute(queries.ADD_WRITES, (*key, size, 0, body))
        return
    first = scalar(connection, queries.NEXT_PIECE)
    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
    connection.executemany(queries.ADD_PIECE, list(enumerate(pieces, first)))
    connection.execute(queries.ADD_WRITES, (*key, size, len(pieces), first))


def _packed(connection: apsw.Connection, size: int, pieces: int, body: object) -> Packed:
    if isinstance(body, int):
        found = every(connection, queries.PIECES_OF, (body, body + pieces))
        return Packed(size, b"".join(piece for (piece,) in found))
    return Packed(size, body if isinstance(body, bytes) else b"")
