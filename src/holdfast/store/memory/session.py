"""The sessions of the memory store."""

from __future__ import annotations

from dataclasses import replace

from holdfast.store.boot import Moment
from holdfast.store.sessions import SessionRow

_Kept = tuple[SessionRow, Moment]  # and when it is taken for dead


class SessionTable:
    """All sessions, in the order in which they began."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Kept] = {}

    def begin(self, session: SessionRow, ttl_us: int, now: Moment) -> bool:
        """See ``Sessions.begin``; return whether it is a new one, whose thread the caller must make."""
        name = (session.lane.namespace, session.id)
        if name in self._kept:
            self.beat(*name, session.seen_us, ttl_us, now)
            return False
        self._kept[name] = replace(session, ended_us=None, reason=None), _after(now, ttl_us)
        return True

    def beat(self, namespace: str, session: str, seen_us: int, ttl_us: int, now: Moment) -> bool:
        """See ``Sessions.beat``."""
        row = self._active(namespace, session)
        if row is None:
            return False
        self._kept[namespace, session] = replace(row, seen_us=seen_us), _after(now, ttl_us)
        return True

    def end(self, namespace: str, session: str, ended_us: int, reason: str) -> bool:
        """See ``Sessions.end``."""
        row = self._active(namespace, session)
        if row is None:
            return False
        expiry = self._kept[namespace, session][1]
        self._kept[namespace, session] = replace(row, ended_us=ended_us, reason=reason), expiry
        return True

    def listed(self, namespace: str, thread: str | None, active_only: bool, now: Moment) -> list[SessionRow]:
        """See ``Sessions.sessions``."""
        return [
            replace(row, left_us=now.left_us(*expiry) if row.ended_us is None else 0)
            for row, expiry in self._kept.values()
            if row.lane.namespace == namespace
            and thread in (None, row.lane.thread)
            and not (active_only and row.ended_us is not None)
        ]

    def has_any(self, namespace: str, thread: str) -> bool:
        """Tell whether a thread has sessions."""
        return any(row.lane[:2] == (namespace, thread) for row, _ in self._kept.values())

    def drop_thread(self, namespace: str, thread: str) -> None:
        """Delete the sessions of a thread."""
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0].lane[:2] != (namespace, thread)}

    def _active(self, namespace: str, session: str) -> SessionRow | None:
        kept = self._kept.get((namespace, session))
        return kept[0] if kept is not None and kept[0].ended_us is None else None


def _after(now: Moment, ttl_us: int) -> Moment:
    return now._replace(us=now.us + ttl_us)
