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
from backstay.store.base import Query
from backstay.store.interrupts import InterruptRow
from backstay.thread import interrupts
from backstay.thread.cursor import Context, Cursor
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.perform import Flow, ask


def request_pause(context: Context, cursor: Cursor, reason: str, by: str) -> Flow[InterruptRecord]:
    """Record that somebody wants the run to stop; return the request that is open already, if there is one."""
    check_id(by, "by")
    check_label(reason, "reason", length_max=REASON_LENGTH_MAX)
    while True:
        rows = yield from _requests(cursor, pending=False)
        newest = rows[-1] if rows else None
        if newest is not None and newest.decision is None:
            return interrupts.record_of(newest)
        payload = {"pause": True, "by": by, "reason": reason}
        recorded = yield from _record(context, cursor, newest.id if newest else "", payload, reason)
        if recorded is not None:
            return recorded


def pause_requested(context: Context, cursor: Cursor) -> Flow[InterruptRecord | None]:
    """Return the oldest request to pause this branch that no run has consumed; one read, unless very many wait."""
    rows = yield from _requests(cursor, pending=True)
    return interrupts.record_of(rows[0]) if rows else None


def obey(context: Context, cursor: Cursor) -> Flow[InterruptRecord | None]:
    """Return the request that a run must stop for, None if it may go on.

    Approvals are consumed. A request that was deferred is consumed too, but not before it was made again.
    """
    while True:
        found = yield from pause_requested(context, cursor)
        if found is None or found.decision is None or found.decision.kind is DecisionKind.REJECT:
            return found
        if found.decision.kind is DecisionKind.DEFER:
            yield from _record(context, cursor, found.id, found.interrupt.payload, found.interrupt.prompt)
        yield from interrupts.consume(context, cursor, found, None)
        if found.decision.kind is not DecisionKind.APPROVE:
            return found


def _requests(cursor: Cursor, pending: bool) -> Flow[list[InterruptRow]]:
    """Return the requests to pause this branch, oldest first."""
    found: list[InterruptRow] = []
    after = 0
    while True:
        rows = yield from ask(interrupts.paging(cursor.lane.namespace, cursor.lane.thread, pending, after))
        found += [row for row in rows if row.lane == cursor.lane and interrupts.is_pause(row.id)]
        if len(rows) < interrupts.PAGE_ROWS:
            return found
        after = rows[-1].number


def _record(
    context: Context, cursor: Cursor, before: str, payload: object, prompt: str
) -> Flow[InterruptRecord | None]:
    """Record the request that follows another one; None if somebody else did."""
    name = interrupts.reserved_id(interrupts.PAUSE, (*cursor.lane, before))
    asked = Interrupt(id=name, kind=InterruptKind.USER_REQUEST, payload=payload, prompt=prompt)
    while True:
        newest = yield from _newest(cursor)
        try:
            return (yield from interrupts.keep(context, cursor, newest, asked))
        except IdTaken:
            return None
        except NotFound:
            if (yield from _newest(cursor)) == newest:
                raise  # else it went meanwhile, and there is another


def _newest(cursor: Cursor) -> Flow[str]:
    rows = yield from ask(lambda store: store.find(Query(*cursor.lane, limit=1)))
    if not rows:
        lane = cursor.lane
        raise NotFound(
            f"branch {lane.branch!r} of thread {lane.thread!r} has no checkpoint, so there is nothing to pause",
            thread=lane.thread,
            hint="Check the id of the thread; a run is paused after its first save",
        )
    return rows[0].id
