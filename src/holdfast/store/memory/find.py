"""Which rows of the memory store a query may mean, in order; what else it asks of them is looked at one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.store.base import Query, Row
from holdfast.store.memory.lane import KeptLane


def rows_meant(query: Query, rows: Mapping[tuple[str, str], Row], lanes: Iterable[KeptLane]) -> list[Row]:
    """Return the rows to look at, the one that comes first in the answer first."""
    return _heads(query, lanes) if query.heads_of_threads else _candidates(query, rows, lanes)


def _candidates(query: Query, rows: Mapping[tuple[str, str], Row], lanes: Iterable[KeptLane]) -> list[Row]:
    if query.ids is not None:
        found = [row for name in dict.fromkeys(query.ids) if (row := rows.get((query.namespace, name))) is not None]
    else:
        found = [row for lane in lanes for row in lane.rows]
    return sorted(found, key=lambda row: (row.seq, row.thread_number), reverse=True)


def _heads(query: Query, lanes: Iterable[KeptLane]) -> list[Row]:
    newest: dict[int, Row] = {}
    for lane in lanes:
        if lane.rows and (query.scope is None or lane.key.scope == query.scope):
            row = lane.rows[-1]
            newest[row.thread_number] = max(row, newest.get(row.thread_number, row), key=lambda each: each.seq)
    return sorted(newest.values(), key=lambda row: row.thread_number, reverse=True)
