"""Sessions: rows that are begun, beaten and ended, each in one statement."""

from __future__ import annotations

from typing import Any

import apsw

from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.sessions import SessionRow
from backstay.store.sqlite import queries
from backstay.store.sqlite.lane import thread_of
from backstay.store.sqlite.rows import Shape, StoredId, pack_id, unpack_id
from backstay.store.sqlite.select import every, one


def begin(connection: apsw.Connection, session: SessionRow, ttl_us: int, now: Moment) -> bool:
    """See ``Sessions.begin``."""
    lane = session.lane
    name = pack_id(lane.namespace, session.id)
    if one(connection, queries.HAS_SESSION, (name,)) is not None:
        return beat(connection, name, session.seen_us, ttl_us, now)
    thread, _ = thread_of(connection, lane)
    described = (session.owner, session.process, session.note, session.started_us, session.seen_us)
    bound = (name, thread, lane.scope, lane.branch, *described, now.us + ttl_us, now.boot)
    connection.execute(queries.ADD_SESSION, bound)
    return True


def beat(connection: apsw.Connection, name: StoredId, seen_us: int, ttl_us: int, now: Moment) -> bool:
    """See ``Sessions.beat``."""
    return one(connection, queries.BEAT, (seen_us, now.us + ttl_us, now.boot, name)) is not None


def end(connection: apsw.Connection, name: StoredId, ended_us: int, reason: str) -> bool:
    """See ``Sessions.end``."""
    return one(connection, queries.END_SESSION, (ended_us, reason, name)) is not None


def sessions(
    connection: apsw.Connection, namespace: str, thread: str | None, active_only: bool, now: Moment
) -> list[SessionRow]:
    """See ``Sessions.sessions``."""
    if thread is None:
        conditions = queries.AND_ACTIVE_ANYWHERE if active_only else ""
    else:
        conditions = queries.AND_RUN_IN_THREAD + (queries.AND_ACTIVE if active_only else "")
    statement = queries.SESSIONS + conditions + queries.BEGUN_FIRST
    return [_read(fields, now) for fields in every(connection, statement, {"namespace": namespace, "thread": thread})]


_SESSION = Shape("session", "id text text text text text text text int int int? text? int text")


def _read(fields: tuple[Any, ...], now: Moment) -> SessionRow:
    _SESSION.check(fields)
    name, *lane = fields[:5]
    owner, process, note, started, seen, ended, reason, expires, boot = fields[5:]
    left_us = now.left_us(expires, boot) if ended is None else 0
    return SessionRow(unpack_id(name), LaneKey(*lane), owner, process, note, started, seen, ended, reason, left_us)
