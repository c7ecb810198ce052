"""Interrupts: the decision, and then the consumer, is set by a statement that changes nothing if it comes too late."""

from __future__ import annotations

from typing import Any

import apsw

from backstay.errors import NotFound
from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.interrupts import InterruptRow, interrupt_missing, interrupt_taken
from backstay.store.lane import LaneKey
from backstay.store.layout import SEQ_BITS
from backstay.store.sqlite import queries
from backstay.store.sqlite.collect import lane_of
from backstay.store.sqlite.rows import Shape, StoredId, pack_id, unpack_id
from backstay.store.sqlite.select import every, one


def record(connection: apsw.Connection, row: InterruptRow) -> InterruptRow:
    """See ``Interrupts.interrupt``."""
    first = find_interrupt(connection, row.lane.namespace, row.id)
    if first is not None:
        if (first.digest, first.lane, first.checkpoint) != (row.digest, row.lane, row.checkpoint):
            raise interrupt_taken(row)
        return first
    name, checkpoint = (pack_id(row.lane.namespace, each) for each in (row.id, row.checkpoint))
    thread = _thread_paused(connection, row)
    described = (row.lane.scope, row.lane.branch, checkpoint, row.digest, row.created_us, row.body)
    connection.execute(queries.ADD_INTERRUPT, (name, thread, *described))
    return _get(connection, row.lane.namespace, row.id)


def decide(
    connection: apsw.Connection, namespace: str, interrupt: str, digest: bytes, decision: bytes, by: str, at_us: int
) -> InterruptRow:
    """See ``Interrupts.decide``."""
    connection.execute(queries.DECIDE, (decision, by, at_us, pack_id(namespace, interrupt), digest))
    return _get(connection, namespace, interrupt)


def consume(
    connection: apsw.Connection, namespace: str, interrupt: str, by: str, epoch: int, at_us: int
) -> InterruptRow:
    """See ``Interrupts.consume``."""
    bound = {"id": pack_id(namespace, interrupt), "by": by, "epoch": epoch, "at": at_us}
    connection.execute(queries.CONSUME, bound)
    return _get(connection, namespace, interrupt)


def interrupts(
    connection: apsw.Connection, namespace: str, thread: str | None, pending_only: bool, after: int, limit: int
) -> list[InterruptRow]:
    """See ``Interrupts.interrupts``."""
    if thread is None:
        conditions = queries.AND_PENDING_ANYWHERE if pending_only else ""
    else:
        conditions = queries.AND_PAUSED_IN_THREAD + (queries.AND_PENDING if pending_only else "")
    statement = queries.INTERRUPTS + conditions + queries.RECORDED_FIRST
    most = max(0, min(limit, PAGE_ROWS_MAX))
    bound = {"namespace": namespace, "thread": thread, "after": after, "limit": most}
    return [_read(fields) for fields in every(connection, statement, bound)]


def find_interrupt(connection: apsw.Connection, namespace: str, interrupt: str) -> InterruptRow | None:
    """See ``Interrupts.find_interrupt``."""
    fields = one(connection, queries.INTERRUPT, (pack_id(namespace, interrupt),))
    return None if fields is None else _read(fields)


def is_awaited(connection: apsw.Connection, key: int, name: StoredId) -> bool:
    """Tell whether a checkpoint has an interrupt that is not consumed."""
    return one(connection, queries.IS_AWAITED, (key >> SEQ_BITS, name)) is not None


def _thread_paused(connection: apsw.Connection, row: InterruptRow) -> int:
    """Return the number of the thread the checkpoint is in, which must be the one named."""
    found = one(connection, queries.IDENTITY, (pack_id(row.lane.namespace, row.checkpoint),))
    if found is not None:
        thread, *lane = lane_of(connection, found[0])
        if LaneKey(*lane)[:3] == row.lane[:3]:
            return thread
    raise NotFound(row.checkpoint, checkpoint=row.checkpoint, thread=row.lane.thread)


def _get(connection: apsw.Connection, namespace: str, interrupt: str) -> InterruptRow:
    row = find_interrupt(connection, namespace, interrupt)
    if row is None:
        raise interrupt_missing(interrupt)
    return row


_INTERRUPT = Shape("interrupt", "id text text text text id bytes bytes int int bytes? text? int? text? int int?")


def _read(fields: tuple[Any, ...]) -> InterruptRow:
    _INTERRUPT.check(fields)
    name, *lane = fields[:5]
    checkpoint, *rest = fields[5:]
    return InterruptRow(unpack_id(name), LaneKey(*lane), unpack_id(checkpoint), *rest)
