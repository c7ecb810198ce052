"""The bytes of streams and blobs in their tables.

A save appends one small row to a stream. When an append crosses a 64 KiB boundary of its stream, the rows that start in
the finished window become one compressed row **at the same addresses**, and four of those become one when it crosses a
256 KiB boundary. Manifests do not change, every byte is rewritten twice, and no background work is needed. Readers see
either the old rows or the new one, because the merge happens inside the save's own transaction.
"""

from __future__ import annotations

from collections.abc import Iterable

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.manifest import OFFSET_BITS, Range, assemble
from backstay.store.layout import (
    COMPRESS_AT_ONCE_BYTES,
    address_of,
    is_compressed,
    joined,
    pack_body,
    touching,
    unpack_body,
    unpack_stored,
)
from backstay.store.sqlite import queries
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import CHECK_HINT, fetch_all, fetch_one

WINDOWS_BYTES = (65536, 262144)
"""Small windows first, so that little stays uncompressed; then large ones, which compress better and load faster."""


def add_chunk(connection: Connection, stream: int, offset: int, data: bytes) -> None:
    """Append bytes to a stream; merge the rows of every window that this finishes."""
    body = pack_body(data, COMPRESS_AT_ONCE_BYTES)
    connection.execute(queries.ADD_CHUNK, (stream << OFFSET_BITS | offset, len(data), body))
    for length in WINDOWS_BYTES:
        window = offset // length
        if (offset + len(data)) // length > window and offset % length:
            merge_window(connection, address_of(stream, window * length), length)


def merge_window(connection: Connection, start: int, length: int) -> None:
    """Merge each run of adjacent rows that start in [start, start + length) into one row."""
    rows = fetch_all(connection, queries.CHUNKS_IN_WINDOW, (start, start + length))
    for run in touching(rows):
        data = None if len(run) == 1 and is_compressed(*run[0][1:]) else joined(run)
        if data is None:
            continue
        connection.execute(queries.DROP_CHUNKS, (run[0][0], run[-1][0] + 1))
        connection.execute(queries.ADD_CHUNK, (run[0][0], len(data), pack_body(data)))


def add_blob(connection: Connection, name: bytes, data: bytes) -> None:
    """Store a blob unless it exists."""
    if fetch_one(connection, queries.HAS_BLOB, (name,)) is None:
        connection.execute(queries.ADD_BLOB, (name, len(data), pack_body(data)))


def read_blob(connection: Connection, name: bytes) -> bytes:
    """Return a blob's bytes."""
    row = fetch_one(connection, queries.BLOB, (name,))
    if row is None:
        raise Corrupted(f"blob {name.hex()[:16]} is missing", hint=CHECK_HINT)
    return unpack_stored(row[0], row[1], f"blob {name.hex()[:16]}")


def read_ranges(connection: Connection, ranges: Iterable[Range]) -> list[list[bytes]]:
    """Return the bytes of each range, in the parts they are stored in."""
    blobs: dict[bytes, bytes] = {}
    found: list[list[bytes]] = []
    for piece in ranges:
        if isinstance(piece.source, bytes):
            if piece.source not in blobs:
                blobs[piece.source] = read_blob(connection, piece.source)
            whole = blobs[piece.source]
            if piece.start + piece.length > len(whole):
                raise Corrupted(f"blob {piece.source.hex()[:16]} is shorter than its manifest says", hint=CHECK_HINT)
            found.append([whole[piece.start : piece.start + piece.length]])
        else:
            stream, start, end = piece.source, piece.start, piece.start + piece.length
            first = address_of(stream, 0)
            bound = {"start": first + start, "stream": first, "end": first + end}
            rows = fetch_all(connection, queries.CHUNKS, bound)
            try:
                unpacked = [(address - first, unpack_body(size, body)) for address, size, body in rows]
            except DecodeError as error:
                raise Corrupted(f"stream {stream} is damaged: {error.what}", hint=CHECK_HINT) from error
            data = assemble(unpacked, start, piece.length)
            if data is None:
                raise Corrupted(f"bytes {start} to {end} of stream {stream} are missing", hint=CHECK_HINT)
            found.append(data)
    return found
