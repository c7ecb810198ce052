"""Finding rows: each kind of list or look-up is one statement, and so one round trip and one snapshot."""

from __future__ import annotations

from typing import Any

from backstay.store.base import PAGE_ROWS_MAX, Head, LaneKey, Query, Row, head_is_lost, lost_head
from backstay.store.layout import SEQ_MAX
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.rows import pack_id, read_row
from backstay.store.postgres.select import every, one

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


def find_head(connection: DeadlineConnection, lane: LaneKey) -> Head | None:
    """Return a lane's head with its payload and writes, and the ends of the streams it owns."""
    found = one(connection, queries.HEAD, lane)
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


def find_rows(connection: DeadlineConnection, query: Query) -> list[Row]:
    """Return matching rows, newest first."""
    limit = max(0, min(query.limit, PAGE_ROWS_MAX))
    conditions, bound = _conditions(query)
    bound.update(namespace=query.namespace, scope=query.scope, limit=limit)
    shape = (query.payload, query.writes)
    if query.ids is not None:
        bound["ids"] = [pack_id(query.namespace, name) for name in dict.fromkeys(query.ids)]
        rows = _read(connection, _BY_ID[shape] + conditions, bound, query)
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
    return _read(connection, statement.replace("{conditions}", conditions), bound, query)


def _read(connection: DeadlineConnection, statement: str, bound: dict[str, Any], query: Query) -> list[Row]:
    rows = []
    for _, thread, *fields in every(connection, statement, bound):
        lane, columns = LaneKey(*fields[:4]), tuple(fields[4:])
        if columns[0] is None:
            rows.append(lost_head(lane, thread))
        else:
            rows.append(read_row(lane, thread, columns, query.payload, query.writes))
    return rows


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
