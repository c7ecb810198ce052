"""Finding rows: the statements that lists and look-ups are made of."""

from __future__ import annotations

import heapq
from itertools import islice
from typing import Any

import apsw

from backstay.store.base import PAGE_ROWS_MAX, LaneKey, Query, Row, lost_head
from backstay.store.layout import SEQ_BITS, SEQ_MAX, span_of
from backstay.store.sqlite import queries
from backstay.store.sqlite.collect import lane_of
from backstay.store.sqlite.rows import pack_id, read_row, read_rows, unpack_id
from backstay.store.sqlite.select import every, one, scalar


def is_head(connection: apsw.Connection, key: int) -> bool:
    """Tell whether a checkpoint is the newest of its lane."""
    return bool(scalar(connection, queries.HEAD_OF_LANE, (key >> SEQ_BITS,)) == key & SEQ_MAX)


def id_of(connection: apsw.Connection, key: int) -> str | None:
    """Return the id of the checkpoint with this key, or None."""
    stored = scalar(connection, queries.ID_BY_KEY, (key,))
    return None if stored is None else unpack_id(stored)


def tags(connection: apsw.Connection, key: int) -> tuple[str, ...]:
    """Return a checkpoint's tags in order."""
    return tuple(name for (name,) in every(connection, queries.TAGS, (key,)))


def _conditions(query: Query) -> tuple[str, dict[str, Any]]:
    """Return the conditions that any kind of list may have, as SQL and what is bound to it."""
    text = ""
    bound: dict[str, Any] = {"limit": max(0, min(query.limit, PAGE_ROWS_MAX))}
    if query.step_max is not None:
        text += queries.AND_STEP_MAX
        bound["step_max"] = max(-(1 << 63), min(query.step_max, (1 << 63) - 1))
    if query.tag is not None:
        text += queries.AND_TAG
        bound["tag"] = query.tag
    return text, bound


def rows_of_lanes(connection: apsw.Connection, query: Query) -> list[Row]:
    """Return rows of one thread's lanes, newest first over all of them."""
    lanes = every(
        connection,
        queries.LANES_OF_THREAD,
        {"namespace": query.namespace, "thread": query.thread, "scope": query.scope, "branch": query.branch},
    )
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
    found = every(connection, statement, {**bound, "low": low, "high": high})
    if not found:
        return []
    tagged: dict[int, tuple[str, ...]] = {}
    for checkpoint, name in every(connection, queries.TAGS_BETWEEN, (found[-1][0], found[0][0])):
        tagged[checkpoint] = (*tagged.get(checkpoint, ()), name)
    return read_rows(LaneKey(*key), thread, found, query.payload, tagged)


def heads_of_threads(connection: apsw.Connection, query: Query) -> list[Row]:
    """Return the newest row of each thread, the thread made last first."""
    conditions, bound = _conditions(query)
    bound.update(namespace=query.namespace, scope=query.scope, before=query.before)
    statement = queries.HEADS_OF_THREADS + conditions + queries.NEWEST_THREAD_FIRST
    found = every(connection, statement, bound)
    rows = []
    for fields in found:
        lane, thread, key = LaneKey(*fields[1:5]), fields[0], fields[5]
        if key is None:
            rows.append(lost_head(lane, thread))
        else:
            rows.append(read_row(lane, thread, fields[5:], False, tags(connection, key)))
    return rows


def rows_by_id(connection: apsw.Connection, query: Query) -> list[Row]:
    """Return the rows with these ids that match the rest of the query too, newest first."""
    conditions, bound = _conditions(query)
    del bound["limit"]
    statement = (queries.ROW_BY_ID_WITH_PAYLOAD if query.payload else queries.ROW_BY_ID) + conditions
    rows = []
    for name in dict.fromkeys(query.ids or ()):
        fields = one(connection, statement, {**bound, "id": pack_id(query.namespace, name)})
        if fields is None:
            continue
        thread, *key = lane_of(connection, fields[0])
        row = read_row(LaneKey(*key), thread, fields, query.payload, tags(connection, fields[0]))
        if query.names(row):
            rows.append(row)
    rows.sort(key=lambda row: (row.seq, row.thread_number), reverse=True)
    return rows[: max(0, min(query.limit, PAGE_ROWS_MAX))]
