"""Interrupt rows. A decision and its consumption are each one conditional UPDATE: who comes second changes nothing."""

from __future__ import annotations

from typing import Any

from backstay.errors import IdTaken, NotFound
from backstay.store.base import LaneKey
from backstay.store.interrupts import InterruptRow
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.rows import pack_id, unpack_id

LIMIT_MAX = 1 << 31
"""More than anybody can take; PostgreSQL's own limit is a bigint."""


def add_interrupt(connection: DeadlineConnection, row: InterruptRow) -> InterruptRow:
    """Record an interrupt; see ``Interrupts.interrupt``."""
    connection.run(
        queries.ADD_INTERRUPT,
        {
            **row.lane._asdict(),
            "id": pack_id(row.lane.namespace, row.id),
            "checkpoint": pack_id(row.lane.namespace, row.checkpoint),
            "digest": row.digest,
            "body": row.body,
            "created": row.created_us,
        },
    )
    stored = _stored(connection, row.lane.namespace, row.id)
    if stored is None:
        raise NotFound(row.checkpoint, thread=row.lane.thread, checkpoint=row.checkpoint)
    if (stored.lane, stored.checkpoint, stored.digest) != (row.lane, row.checkpoint, row.digest):
        raise IdTaken(
            f"interrupt {row.id} exists with other content",
            thread=stored.lane.thread,
            checkpoint=stored.checkpoint,
            hint="Give each interrupt its own id, or none",
        )
    return stored


def decide(
    connection: DeadlineConnection,
    namespace: str,
    interrupt: str,
    digest: bytes,
    decision: bytes,
    by: str,
    decided_us: int,
) -> InterruptRow:
    """Set the decision if there is none; return the row as it is now."""
    connection.run(queries.DECIDE, (decision, by, decided_us, pack_id(namespace, interrupt), digest))
    return _must_find(connection, namespace, interrupt)


def consume(
    connection: DeadlineConnection, namespace: str, interrupt: str, by: str, epoch: int, consumed_us: int
) -> InterruptRow:
    """Set the consumer if there is none that counts; return the row as it is now."""
    bound = {"by": by, "epoch": epoch, "moment": consumed_us, "id": pack_id(namespace, interrupt)}
    connection.run(queries.CONSUME, bound)
    return _must_find(connection, namespace, interrupt)


def interrupts(
    connection: DeadlineConnection, namespace: str, thread: str | None, pending_only: bool, after: int, limit: int
) -> list[InterruptRow]:
    """Return interrupts in the order in which they were recorded."""
    bound = {
        "namespace": namespace,
        "thread": thread,
        "pending": pending_only,
        "after": after,
        "limit": max(0, min(limit, LIMIT_MAX)),
    }
    return [_read(fields) for fields in connection.every(queries.INTERRUPTS, bound)]


def find_interrupt(connection: DeadlineConnection, namespace: str, interrupt: str) -> InterruptRow | None:
    """Return one interrupt, or None."""
    found = connection.one(queries.INTERRUPT, (pack_id(namespace, interrupt),))
    return None if found is None else _read(found)


def _stored(connection: DeadlineConnection, namespace: str, interrupt: str) -> InterruptRow | None:
    """Return one interrupt, or None, when everything up to it is on a synchronous standby too."""
    found = connection.one(queries.INTERRUPT_AS_STORED, (pack_id(namespace, interrupt),))
    return None if found is None else _read(found)


def _must_find(connection: DeadlineConnection, namespace: str, interrupt: str) -> InterruptRow:
    row = _stored(connection, namespace, interrupt)
    if row is None:
        raise NotFound(f"interrupt {interrupt}", hint="It went with its checkpoint, or never was")
    return row


def _read(fields: tuple[Any, ...]) -> InterruptRow:
    name, *lane, checkpoint, digest, body, created = fields[:9]
    return InterruptRow(unpack_id(name), LaneKey(*lane), unpack_id(checkpoint), digest, body, created, *fields[9:])
