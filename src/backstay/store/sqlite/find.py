"""Finding checkpoints: heads, lists and look-ups, and the bytes that their manifests name."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice
from typing import Any

import apsw

from backstay.errors import Corrupted
from backstay.pieces.manifest import Range, Source
from backstay.store.base import PAGE_ROWS_MAX, Branch, BranchKey, Head, Query, Row, Sizes, head_is_lost, lost_head
from backstay.store.layout import SEQ_BITS, SEQ_MAX, key_of, span_of
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import read_ranges
from backstay.store.sqlite.rows import (
    branch_of,
    fetch_all,
    fetch_one,
    fetch_value,
    find_branch,
    pack_id,
    read_branch,
    read_row,
    read_rows,
    unpack_id,
    with_writes,
)
from backstay.store.sqlite.transactions import SqliteTransactions, reading


class SqliteReads(SqliteTransactions):
    """The verbs that read checkpoints, branches and bytes."""

    @reading
    def head(self, connection: apsw.Connection, branch: BranchKey) -> Head | None:
        found = find_branch(connection, branch)
        if found is None:
            return None
        key = key_of(found.number, found.head)
        fields = connection.execute(queries.HEAD, (found.thread, branch.scope, key)).fetchone()
        row = None
        if fields is not None:
            *_, has_tags, has_writes = fields
            row = read_row(branch, found.thread, fields[:-2], True, tags(connection, key) if has_tags else ())
            row = with_writes(connection, row) if has_writes else row
        elif found.last_seq or found.head:
            raise head_is_lost(branch)
        owned = dict(fetch_all(connection, queries.OWNED, (found.number,)))
        return Head(row, found.number, found.last_seq, found.lease.epoch, owned)

    @reading
    def find(self, connection: apsw.Connection, query: Query) -> list[Row]:
        if query.ids is not None:
            rows = rows_by_id(connection, query)
        elif query.heads_of_threads:
            rows = heads_of_threads(connection, query)
        else:
            rows = rows_of_branches(connection, query)
        return [with_writes(connection, row) for row in rows] if query.writes else rows

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []  # the call that needs an unreadable page raises the error

    @reading
    def branches(
        self, connection: apsw.Connection, namespace: str, thread: str | None, scope: str | None
    ) -> list[Branch]:
        found = fetch_all(connection, queries.BRANCHES, {"namespace": namespace, "thread": thread, "scope": scope})
        return [
            Branch(
                read_branch(key),
                id_of(connection, key_of(number, head)),
                head,
                last_seq,
                epoch,
                None if origin is None else unpack_id(origin),
            )
            for number, _, *key, head, last_seq, epoch, origin in found
        ]

    @reading
    def fetch(self, connection: apsw.Connection, ranges: Iterable[Range]) -> list[list[bytes]]:
        return read_ranges(connection, ranges)

    @reading
    def sizes(self, connection: apsw.Connection) -> Sizes:
        sources: dict[Source, int] = dict(fetch_all(connection, queries.BLOB_SIZES))
        sources.update(fetch_all(connection, queries.STREAM_SIZES))
        pages = connection.pragma("page_count")
        return Sizes(pages * connection.pragma("page_size"), sources, fetch_value(connection, queries.ROW_BYTES))


def is_head(connection: apsw.Connection, key: int) -> bool:
    """Return whether a checkpoint is the newest of its branch."""
    return bool(fetch_value(connection, queries.HEAD_OF_BRANCH, (key >> SEQ_BITS,)) == key & SEQ_MAX)


def id_of(connection: apsw.Connection, key: int) -> str | None:
    """Return the id of the checkpoint with this key, or None."""
    stored = fetch_value(connection, queries.ID_BY_KEY, (key,))
    return None if stored is None else unpack_id(stored)


def tags(connection: apsw.Connection, key: int) -> tuple[str, ...]:
    """Return a checkpoint's tags in order."""
    return tuple(name for (name,) in fetch_all(connection, queries.TAGS, (key,)))


def _conditions(query: Query) -> tuple[str, dict[str, Any]]:
    """Return the conditions that every list may have, as SQL and its bound values."""
    text = ""
    bound: dict[str, Any] = {"limit": max(0, min(query.limit, PAGE_ROWS_MAX))}
    if query.step_max is not None:
        text += queries.AND_STEP_MAX
        bound["step_max"] = max(-(1 << 63), min(query.step_max, (1 << 63) - 1))
    if query.tag is not None:
        text += queries.AND_TAG
        bound["tag"] = query.tag
    return text, bound


def rows_of_branches(connection: apsw.Connection, query: Query) -> list[Row]:
    """Return rows of a thread's branches, newest first."""
    branches = fetch_all(
        connection,
        queries.BRANCHES_OF_THREAD,
        {"namespace": query.namespace, "thread": query.thread, "scope": query.scope, "branch": query.branch},
    )
    pages = [_rows_of_branch(connection, query, branch) for branch in branches]
    if len(pages) == 1:
        return pages[0]
    merged = heapq.merge(*pages, key=lambda row: row.seq, reverse=True)
    return list(islice(merged, max(0, min(query.limit, PAGE_ROWS_MAX))))


def _rows_of_branch(connection: apsw.Connection, query: Query, branch: tuple[Any, ...]) -> list[Row]:
    number, thread, *key = branch
    conditions, bound = _conditions(query)
    low, high = span_of(number, query.before)
    select = queries.ROWS_OF_BRANCH_WITH_PAYLOAD if query.payload else queries.ROWS_OF_BRANCH
    statement = select.replace("?", ":low", 1).replace("?", ":high", 1) + conditions + queries.NEWEST_FIRST
    found = fetch_all(connection, statement, {**bound, "low": low, "high": high})
    if not found:
        return []
    tagged: dict[int, tuple[str, ...]] = {}
    for checkpoint, name in fetch_all(connection, queries.TAGS_BETWEEN, (found[-1][0], found[0][0])):
        tagged[checkpoint] = (*tagged.get(checkpoint, ()), name)
    return read_rows(BranchKey(*key), thread, found, query.payload, tagged)


def heads_of_threads(connection: apsw.Connection, query: Query) -> list[Row]:
    """Return the newest row of each thread, newest thread first."""
    conditions, bound = _conditions(query)
    bound.update(namespace=query.namespace, scope=query.scope, before=query.before)
    statement = queries.HEADS_OF_THREADS + conditions + queries.NEWEST_THREAD_FIRST
    found = fetch_all(connection, statement, bound)
    rows = []
    for fields in found:
        branch, thread, key = BranchKey(*fields[1:5]), fields[0], fields[5]
        if key is None:
            rows.append(lost_head(branch, thread))
        else:
            rows.append(read_row(branch, thread, fields[5:], False, tags(connection, key)))
    return rows


def rows_by_id(connection: apsw.Connection, query: Query) -> list[Row]:
    """Return the rows with these ids that also match the rest of the query, newest first."""
    conditions, bound = _conditions(query)
    del bound["limit"]
    statement = (queries.ROW_BY_ID_WITH_PAYLOAD if query.payload else queries.ROW_BY_ID) + conditions
    rows = []
    for name in dict.fromkeys(query.ids or ()):
        fields = fetch_one(connection, statement, {**bound, "id": pack_id(query.namespace, name)})
        if fields is None:
            continue
        thread, key = branch_of(connection, fields[0])
        row = read_row(key, thread, fields, query.payload, tags(connection, fields[0]))
        if query.names(row):
            rows.append(row)
    rows.sort(key=lambda row: (row.seq, row.thread_number), reverse=True)
    return rows[: max(0, min(query.limit, PAGE_ROWS_MAX))]
