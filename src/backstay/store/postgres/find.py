"""Reading: each verb is one statement, and so one round trip and one snapshot, but for ``sizes``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from backstay.errors import Corrupted
from backstay.pieces.coverage import assemble
from backstay.pieces.piece import STREAM_BYTES_MAX, Range
from backstay.store.base import PAGE_ROWS_MAX, Head, Lane, LaneKey, Query, Row, head_is_lost, lost_head
from backstay.store.layout import SEQ_MAX, address_of, unpack_stored
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.link import Link
from backstay.store.postgres.rows import pack_id, read_row, unpack_id

LANE_FIELDS = 6
"""How many columns ``LANE_COLUMNS`` has."""

_BY_ID = {
    (False, False): queries.ROWS_BY_ID,
    (False, True): queries.ROWS_BY_ID_WITH_WRITES,
    (True, False): queries.ROWS_BY_ID_WITH_PAYLOAD,
    (True, True): queries.ROWS_BY_ID_WITH_BOTH,
}
_OF_LANES = {
    (False, False): queries.ROWS_OF_LANES,
    (False, True): queries.ROWS_OF_LANES_WITH_WRITES,
    (True, False): queries.ROWS_OF_LANES_WITH_PAYLOAD,
    (True, True): queries.ROWS_OF_LANES_WITH_BOTH,
}


class Reading:
    """The verbs that read checkpoints, branches and bytes."""

    _link: Link

    def head(self, lane: LaneKey) -> Head | None:
        def work(connection: DeadlineConnection) -> Head | None:
            found = connection.one(queries.HEAD, lane)
            if found is None:
                return None
            number, thread = found[:2]
            last_seq, epoch, streams, ends = found[LANE_FIELDS : LANE_FIELDS + 4]
            fields = found[LANE_FIELDS + 4 :]
            if fields[0] is None and last_seq:
                raise head_is_lost(lane)
            row = None if fields[0] is None else read_row(lane, thread, fields, payload=True, writes=True)
            owned = {stream: (end - (stream << 28) if end else 0) for stream, end in zip(streams, ends, strict=True)}
            return Head(row, number, last_seq, epoch, owned)

        return self._link.read(work)

    def find(self, query: Query) -> list[Row]:
        limit = max(0, min(query.limit, PAGE_ROWS_MAX))
        conditions, bound = _conditions(query)
        bound.update(namespace=query.namespace, scope=query.scope, limit=limit)
        shape = (query.payload, query.writes)
        if query.ids is not None:
            bound["ids"] = [pack_id(query.namespace, name) for name in dict.fromkeys(query.ids)]
            rows = self._rows(_BY_ID[shape] + conditions, bound, query)
            rows = [row for row in rows if query.names(row)]
            rows.sort(key=lambda row: (row.seq, row.thread_number), reverse=True)
            return rows[:limit]
        if query.heads_of_threads:
            bound["before"] = query.before
            statement = queries.HEADS_OF_THREADS_WITH_WRITES if query.writes else queries.HEADS_OF_THREADS
        else:
            before = SEQ_MAX if query.before is None else min(max(query.before, 0), SEQ_MAX)
            bound.update(thread=query.thread, branch=query.branch, before=before)
            statement = _OF_LANES[shape]
        return self._rows(statement.replace("{conditions}", conditions), bound, query)

    def _rows(self, statement: str, bound: dict[str, Any], query: Query) -> list[Row]:
        def work(connection: DeadlineConnection) -> list[Row]:
            rows = []
            for _, thread, *fields in connection.every(statement, bound):
                lane, columns = LaneKey(*fields[:4]), tuple(fields[4:])
                if columns[0] is None:
                    rows.append(lost_head(lane, thread))
                else:
                    rows.append(read_row(lane, thread, columns, query.payload, query.writes))
            return rows

        return self._link.read(work)

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []  # a page that cannot be read is an error of the call that needs it

    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        bound = {"namespace": namespace, "thread": thread, "scope": scope}

        def work(connection: DeadlineConnection) -> list[Lane]:
            return [
                Lane(
                    LaneKey(*fields[2:6]),
                    None if head is None else unpack_id(head),
                    head_seq,
                    last_seq,
                    epoch,
                    None if origin is None else unpack_id(origin),
                )
                for *fields, head, head_seq, last_seq, epoch, origin in connection.every(queries.LANES, bound)
            ]

        return self._link.read(work)

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        wanted = list(ranges)
        return self._link.read(lambda connection: read_ranges(connection, wanted))


def _conditions(query: Query) -> tuple[str, dict[str, Any]]:
    """Return the conditions that any kind of list may have, as SQL and what is bound to it."""
    text = ""
    bound: dict[str, Any] = {}
    if query.step_max is not None:
        text += queries.AND_STEP_MAX
        bound["step_max"] = max(-(1 << 63), min(query.step_max, (1 << 63) - 1))
    if query.tag is not None:
        text += queries.AND_TAG
        bound["tag"] = query.tag
    return text, bound


def read_ranges(connection: DeadlineConnection, wanted: Sequence[Range]) -> list[list[bytes]]:
    """Return the bytes of each range, in the parts they are stored in."""
    streams = [piece for piece in wanted if isinstance(piece.source, int)]
    rows = connection.every(queries.BYTES, _bound(wanted, streams))
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
