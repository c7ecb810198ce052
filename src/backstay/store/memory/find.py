"""Which rows of the memory store a query means, in order: those it may mean, and of these what else it asks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

from backstay.store.base import Query, Row
from backstay.store.memory.lane import KeptLane


def rows_meant(
    query: Query,
    rows: Mapping[tuple[str, str], Row],
    lanes: Iterable[KeptLane],
    tags: Mapping[tuple[str, str], tuple[str, ...]],
) -> Iterator[Row]:
    """Give the rows of the answer, however long it may get."""
    found = _heads(query, lanes) if query.heads_of_threads else _candidates(query, rows, lanes)
    return (
        row
        for row in found
        if query.names(row)
        and (query.step_max is None or row.step <= query.step_max)
        and (query.tag is None or query.tag in tags.get((query.namespace, row.id), ()))
    )


def _candidates(query: Query, rows: Mapping[tuple[str, str], Row], lanes: Iterable[KeptLane]) -> Iterable[Row]:
    if query.ids is not None:
        found = [row for name in dict.fromkeys(query.ids) if (row := rows.get((query.namespace, name))) is not None]
        return sorted(found, key=_place, reverse=True)
    meant = [lane.rows for lane in lanes if lane.key[:2] == (query.namespace, query.thread)]
    if len(meant) == 1:
        return _before(meant[0], query.before)
    return heapq.merge(*(_before(kept, query.before) for kept in meant), key=_place, reverse=True)


def _before(rows: list[Row], seq: int | None) -> Iterator[Row]:
    """Give a lane's rows, the newest first, from a cursor on: a page costs what it shows."""
    end = len(rows)
    if seq is not None:
        low = 0
        while low < end:
            middle = (low + end) // 2
            low, end = (middle + 1, end) if rows[middle].seq < seq else (low, middle)
        end = low
    return (rows[at] for at in range(end - 1, -1, -1))


def _place(row: Row) -> tuple[int, int]:
    return row.seq, row.thread_number


def _heads(query: Query, lanes: Iterable[KeptLane]) -> list[Row]:
    newest: dict[int, Row] = {}
    for lane in lanes:
        if lane.rows and (query.scope is None or lane.key.scope == query.scope):
            row = lane.rows[-1]
            newest[row.thread_number] = max(row, newest.get(row.thread_number, row), key=lambda each: each.seq)
    return sorted(newest.values(), key=lambda row: row.thread_number, reverse=True)
