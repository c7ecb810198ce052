"""Session rows, by PostgreSQL's clock. Each verb is one statement."""

from __future__ import annotations

from backstay.store.base import LaneKey
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.rows import pack_id, unpack_id
from backstay.store.sessions import SessionRow


def begin(connection: DeadlineConnection, session: SessionRow, ttl_us: int) -> None:
    """Record a session; see ``Sessions.begin``."""
    connection.run(
        queries.BEGIN_SESSION,
        {
            **session.lane._asdict(),
            "id": pack_id(session.lane.namespace, session.id),
            "owner": session.owner,
            "process": session.process,
            "note": session.note,
            "started": session.started_us,
            "seen": session.seen_us,
            "ttl_us": ttl_us,
        },
    )


def beat(connection: DeadlineConnection, namespace: str, session: str, seen_us: int, ttl_us: int) -> bool:
    """Say that a session lives."""
    bound = {"seen": seen_us, "ttl_us": ttl_us, "id": pack_id(namespace, session)}
    return connection.one(queries.BEAT, bound) is not None


def end(connection: DeadlineConnection, namespace: str, session: str, ended_us: int, reason: str) -> bool:
    """Record why a session ended."""
    return connection.one(queries.END_SESSION, (ended_us, reason, pack_id(namespace, session))) is not None


def sessions(connection: DeadlineConnection, namespace: str, thread: str | None, active_only: bool) -> list[SessionRow]:
    """Return sessions, the one begun first first."""
    found = connection.every(queries.SESSIONS, {"namespace": namespace, "thread": thread, "active": active_only})
    return [SessionRow(unpack_id(name), LaneKey(*fields[:4]), *fields[4:]) for name, *fields in found]
