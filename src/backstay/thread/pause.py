"""Pausing a run from outside: anybody may ask, from any process, without the lease; it stops at its next boundary.

A request is an interrupt on the branch's newest checkpoint. It holds the run up until somebody decides on it: approved,
the run goes on; deferred, it stays where it is and asks again; rejected, it does not go on in this branch any more. One
request is open at a time: its id is made of the one before it, so of two that come at once one is recorded.
"""

from __future__ import annotations

from backstay.errors import IdTaken, NotFound
from backstay.model.decision import REASON_LENGTH_MAX, DecisionKind
from backstay.model.ids import check_id, check_label
from backstay.model.interrupt import Interrupt, InterruptKind
from backstay.store.base import Backend, Query
from backstay.store.records import Record
from backstay.thread import interrupts
from backstay.thread.cursor import Context, Cursor
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.records import all_records


def request_pause(store: Backend, context: Context, cursor: Cursor, reason: str, by: str) -> InterruptRecord:
    """Record that somebody wants the run to stop; return the request that is open already, if there is one."""
    check_id(by, "by")
    check_label(reason, "reason", length_max=REASON_LENGTH_MAX)
    while True:
        rows = _requests(store, cursor, pending=False)
        newest = interrupts.record_of(rows[-1]) if rows else None
        if newest is not None and newest.decision is None:
            return newest
        payload = {"pause": True, "by": by, "reason": reason}
        recorded = _record(store, context, cursor, newest.id if newest else "", payload, reason)
        if recorded is not None:
            return recorded


def pause_requested(store: Backend, context: Context, cursor: Cursor) -> InterruptRecord | None:
    """Return the oldest request to pause this branch that no run has consumed; one read, unless very many wait."""
    rows = _requests(store, cursor, pending=True)
    return interrupts.record_of(rows[0]) if rows else None


def obey(store: Backend, context: Context, cursor: Cursor) -> InterruptRecord | None:
    """Return the request that a run must stop for, None if it may go on.

    Approvals are consumed. A request that was deferred is consumed too, but not before it was made again.
    """
    while True:
        found = pause_requested(store, context, cursor)
        if found is None or found.decision is None or found.decision.kind is DecisionKind.REJECT:
            return found
        if found.decision.kind is DecisionKind.DEFER:
            _record(store, context, cursor, found.id, found.interrupt.payload, found.interrupt.prompt)
        interrupts.consume(store, context, cursor, found, None)
        if found.decision.kind is not DecisionKind.APPROVE:
            return found


def _requests(store: Backend, cursor: Cursor, pending: bool) -> list[Record]:
    """Return the requests to pause this branch, oldest first."""
    found = all_records(store, "interrupt", cursor.lane.namespace, cursor.lane.thread, pending)
    return [record for record in found if record.lane == cursor.lane and interrupts.is_pause(record.key)]


def _record(
    store: Backend, context: Context, cursor: Cursor, before: str, payload: object, prompt: str
) -> InterruptRecord | None:
    """Record the request that follows another one; None if somebody else did."""
    name = interrupts.reserved_id(interrupts.PAUSE, (*cursor.lane, before))
    asked = Interrupt(id=name, kind=InterruptKind.USER_REQUEST, payload=payload, prompt=prompt)
    while True:
        newest = _newest(store, cursor)
        try:
            return interrupts.keep(store, context, cursor, newest, asked)
        except IdTaken:
            return None
        except NotFound:
            if (_newest(store, cursor)) == newest:
                raise  # else it went meanwhile, and there is another


def _newest(store: Backend, cursor: Cursor) -> str:
    rows = store.find(Query(*cursor.lane, limit=1))
    if not rows:
        lane = cursor.lane
        raise NotFound(
            f"branch {lane.branch!r} of thread {lane.thread!r} has no checkpoint, so there is nothing to pause",
            thread=lane.thread,
            hint="Check the id of the thread; a run is paused after its first save",
        )
    return rows[0].id
