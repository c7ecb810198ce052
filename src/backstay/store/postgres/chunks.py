"""Reading the bytes of streams and blobs: any number of ranges in one statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from backstay.errors import Corrupted
from backstay.pieces.coverage import assemble
from backstay.pieces.piece import STREAM_BYTES_MAX, Range
from backstay.store.layout import address_of, unpack_stored
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.select import every


def read_ranges(connection: DeadlineConnection, ranges: Iterable[Range]) -> list[list[bytes]]:
    """Return the bytes of each range, in the parts they are stored in."""
    wanted = list(ranges)
    streams = [piece for piece in wanted if isinstance(piece.source, int)]
    rows = every(connection, queries.BYTES, _bound(wanted, streams))
    blobs: dict[bytes, bytes] = {}
    chunks: list[list[tuple[int, bytes]]] = [[] for _ in streams]
    for number, address, digest, size, body in rows:
        if digest is not None:
            blobs[digest] = unpack_stored(size, body, f"blob {digest.hex()[:16]}")
        else:
            source = streams[number - 1].source
            assert isinstance(source, int)
            chunks[number - 1].append((address - address_of(source, 0), unpack_stored(size, body, f"stream {source}")))
    parts = iter(chunks)
    return [
        _of_blob(blobs, piece) if isinstance(piece.source, bytes) else _of_stream(next(parts), piece)
        for piece in wanted
    ]


def _bound(wanted: Sequence[Range], streams: Sequence[Range]) -> dict[str, list[int] | list[bytes]]:
    firsts = [address_of(piece.source, 0) for piece in streams if isinstance(piece.source, int)]
    return {
        "first": firsts,
        "start": [first + piece.start for first, piece in zip(firsts, streams, strict=True)],
        "end": [
            first + min(piece.start + piece.length, STREAM_BYTES_MAX)
            for first, piece in zip(firsts, streams, strict=True)
        ],
        "blobs": list({piece.source for piece in wanted if isinstance(piece.source, bytes)}),
    }


def _of_blob(blobs: dict[bytes, bytes], piece: Range) -> list[bytes]:
    assert isinstance(piece.source, bytes)
    whole = blobs.get(piece.source)
    if whole is None:
        raise Corrupted(f"blob {piece.source.hex()[:16]} is missing")
    if piece.start + piece.length > len(whole):
        raise Corrupted(f"blob {piece.source.hex()[:16]} is shorter than its manifest says")
    return [whole[piece.start : piece.start + piece.length]]


def _of_stream(rows: list[tuple[int, bytes]], piece: Range) -> list[bytes]:
    rows.sort(key=lambda row: row[0])
    data = assemble(iter(rows), piece.start, piece.length)
    if data is None:
        raise Corrupted(f"bytes {piece.start} to {piece.start + piece.length} of stream {piece.source!r} are missing")
    return data
