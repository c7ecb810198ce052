"""Read checkpoints, branches and bytes. Each verb except ``sizes`` is one statement: one round trip, one snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from backstay.errors import Corrupted
from backstay.pieces.manifest import STREAM_BYTES_MAX, Range, assemble
from backstay.store.base import PAGE_ROWS_MAX, Branch, BranchKey, Head, Query, Row, head_is_lost, lost_head
from backstay.store.layout import SEQ_MAX, address_of, unpack_stored
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.rows import pack_id, read_row, split_fresh, unpack_id

CHECK_HINT = "store.check() lists what is affected; restore a backup"
BRANCH_FIELDS = 6
"""Number of columns in ``BRANCH_COLUMNS``."""

_BY_ID = {
    (False, False): queries.ROWS_BY_ID,
    (False, True): queries.ROWS_BY_ID_WITH_WRITES,
    (True, False): queries.ROWS_BY_ID_WITH_PAYLOAD,
    (True, True): queries.ROWS_BY_ID_WITH_BOTH,
}
_OF_BRANCHES = {
    (False, False): queries.ROWS_OF_BRANCHES,
    (False, True): queries.ROWS_OF_BRANCHES_WITH_WRITES,
    (True, False): queries.ROWS_OF_BRANCHES_WITH_PAYLOAD,
    (True, True): queries.ROWS_OF_BRANCHES_WITH_BOTH,
}


class PostgresReads:
    """The verbs that read checkpoints, branches and bytes."""

    _pool: RetryingPool

    def head(self, branch: BranchKey) -> Head | None:
        def work(connection: DeadlineConnection) -> Head | None:
            found = connection.one(queries.HEAD, branch)
            if found is None:
                return None
            number, thread = found[:2]
            last_seq, epoch, streams, ends = found[BRANCH_FIELDS : BRANCH_FIELDS + 4]
            fields = found[BRANCH_FIELDS + 4 :]
            if fields[0] is None and last_seq:
                raise head_is_lost(branch)
            row = None if fields[0] is None else read_row(branch, thread, fields, payload=True, writes=True)
            owned = {stream: (end - (stream << 28) if end else 0) for stream, end in zip(streams, ends, strict=True)}
            return Head(row, number, last_seq, epoch, owned)

        return self._pool.read(work)

    def find(self, query: Query) -> list[Row]:
        limit = max(0, min(query.limit, PAGE_ROWS_MAX))
        bound: dict[str, Any] = {"namespace": query.namespace, "scope": query.scope, "limit": limit}
        conditions = ""
        if query.tag is not None:
            conditions += queries.AND_TAG
            bound["tag"] = query.tag
        shape = (query.payload, query.writes)
        if query.ids is not None:
            bound["ids"] = [pack_id(query.namespace, name) for name in dict.fromkeys(query.ids)]
            rows = self._rows(_BY_ID[shape] + conditions, bound, query)
            rows = [row for row in rows if query.names(row)]
            rows.sort(key=lambda row: (row.seq, row.thread_number), reverse=True)
            return rows[:limit]
        if query.heads_of_threads:
            bound["before"] = (1 << 63) - 1 if query.before is None else query.before
            statement = queries.HEADS_OF_THREADS_WITH_WRITES if query.writes else queries.HEADS_OF_THREADS
        else:
            before = SEQ_MAX if query.before is None else min(max(query.before, 0), SEQ_MAX)
            bound.update(thread=query.thread, branch=query.branch, before=before)
            statement = _OF_BRANCHES[shape].replace("{branches}", _where(None, query.scope, query.branch))
        return self._rows(statement.replace("{conditions}", conditions), bound, query)

    def _rows(self, statement: str, bound: dict[str, Any], query: Query) -> list[Row]:
        def work(connection: DeadlineConnection) -> list[Row]:
            rows = []
            for _, thread, *fields in connection.every(statement, bound):
                branch, columns = BranchKey(*fields[:4]), tuple(fields[4:])
                if columns[0] is None:
                    rows.append(lost_head(branch, thread))
                else:
                    rows.append(read_row(branch, thread, columns, query.payload, query.writes))
            return rows

        return self._pool.read(work)

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []  # the call that needs an unreadable page raises the error

    def branches(
        self, namespace: str, thread: str | None, scope: str | None, after: int = 0, limit: int = PAGE_ROWS_MAX
    ) -> list[Branch]:
        bound: dict[str, Any] = {"namespace": namespace, "thread": thread, "scope": scope, "after": after}
        bound["limit"] = max(0, min(limit, PAGE_ROWS_MAX))

        statement = queries.BRANCHES.replace("{conditions}", _where(thread, scope, None))

        def work(connection: DeadlineConnection) -> list[Branch]:
            return [
                Branch(
                    BranchKey(*fields[2:6]),
                    fields[0],
                    None if head is None else unpack_id(head),
                    head_seq,
                    last_seq,
                    epoch,
                    None if origin is None else unpack_id(origin),
                )
                for *fields, head, head_seq, last_seq, epoch, origin in connection.every(statement, bound)
            ]

        return self._pool.read(work)

    def forked(self, namespace: str, checkpoints: Collection[str]) -> set[str]:
        names = {pack_id(namespace, name): name for name in checkpoints}
        found = self._pool.read(lambda connection: connection.every(queries.FORKED, (list(names),)))
        return {names[origin] for (origin,) in found}

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        wanted = list(ranges)
        return self._pool.read(lambda connection: read_ranges(connection, wanted))


def _where(thread: str | None, scope: str | None, branch: str | None) -> str:
    """Return conditions for the names that are given; one for any name would keep an index from being used."""
    names = {queries.AND_THREAD: thread, queries.AND_SCOPE: scope, queries.AND_BRANCH: branch}
    return " ".join(condition for condition, name in names.items() if name is not None)


def read_ranges(connection: DeadlineConnection, wanted: Sequence[Range]) -> list[list[bytes]]:
    """Return the bytes of each range, in the parts they are stored in."""
    streams = [(piece.source, piece.start, piece.length) for piece in wanted if isinstance(piece.source, int)]
    firsts = [address_of(stream, 0) for stream, _, _ in streams]
    bound = {
        "first": firsts,
        "start": [first + start for first, (_, start, _) in zip(firsts, streams, strict=True)],
        "end": [
            first + min(start + length, STREAM_BYTES_MAX)
            for first, (_, start, length) in zip(firsts, streams, strict=True)
        ],
        "blobs": list({piece.source for piece in wanted if isinstance(piece.source, bytes)}),
    }
    blobs: dict[bytes, bytes] = {}
    chunks: list[list[tuple[int, bytes]]] = [[] for _ in streams]
    for number, place, digest, whole, stored, checks in connection.every(queries.BYTES, bound):
        if digest is not None:
            blobs[digest] = unpack_stored(whole, stored, f"blob {digest.hex()[:16]}")
            continue
        rows = [(place, whole, stored)] if checks is None else split_fresh(place, stored, checks)
        for address, size, body in rows:
            part = unpack_stored(size, body, f"stream {streams[number - 1][0]}")
            chunks[number - 1].append((address - firsts[number - 1], part))
    parts = iter(chunks)
    return [_assembled(blobs, piece, None if isinstance(piece.source, bytes) else next(parts)) for piece in wanted]


def _assembled(blobs: dict[bytes, bytes], piece: Range, rows: list[tuple[int, bytes]] | None) -> list[bytes]:
    """Return the bytes of one range from its blob, or from the rows of its stream."""
    end = piece.start + piece.length
    if isinstance(piece.source, bytes):
        whole = blobs.get(piece.source)
        if whole is None:
            raise Corrupted(f"blob {piece.source.hex()[:16]} is missing", hint=CHECK_HINT)
        if end > len(whole):
            raise Corrupted(f"blob {piece.source.hex()[:16]} is shorter than its manifest says", hint=CHECK_HINT)
        return [whole[piece.start : end]]
    data = assemble(iter(sorted(rows or (), key=lambda row: row[0])), piece.start, piece.length)
    if data is None:
        raise Corrupted(f"bytes {piece.start} to {end} of stream {piece.source} are missing", hint=CHECK_HINT)
    return data
