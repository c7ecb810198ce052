"""The sessions of the memory store."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from backstay.store.boot import Moment
from backstay.store.sessions import SessionRow


class KeptSession(NamedTuple):
    """A session, when it is taken for dead, and the how-many-eth it is."""

    row: SessionRow
    expiry: Moment
    order: int


class SessionTable:
    """All sessions. What a verb would make of one is asked for first, then put."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], KeptSession] = {}
        self.last_order = 0

    def begun(self, session: SessionRow, ttl_us: int, now: Moment) -> KeptSession | None:
        """Return the session as it is when it begins, or lives on; None if it had ended."""
        if (session.lane.namespace, session.id) in self._kept:
            return self.seen(session.lane.namespace, session.id, session.seen_us, ttl_us, now)
        return KeptSession(replace(session, ended_us=None, reason=None), _after(now, ttl_us), self.last_order + 1)

    def seen(self, namespace: str, session: str, seen_us: int, ttl_us: int, now: Moment) -> KeptSession | None:
        """Return the session after a beat; None if it is not there or has ended."""
        kept = self._active(namespace, session)
        return kept and kept._replace(row=replace(kept.row, seen_us=seen_us), expiry=_after(now, ttl_us))

    def ended(self, namespace: str, session: str, ended_us: int, reason: str) -> KeptSession | None:
        """Return the session after its end; None if it is not there or had ended before."""
        kept = self._active(namespace, session)
        return kept and kept._replace(row=replace(kept.row, ended_us=ended_us, reason=reason))

    def put(self, kept: KeptSession) -> None:
        """Keep a session as it is now."""
        self.last_order = max(self.last_order, kept.order)
        self._kept[kept.row.lane.namespace, kept.row.id] = kept

    def find(self, namespace: str, session: str) -> KeptSession | None:
        """Return one session, or None."""
        return self._kept.get((namespace, session))

    def listed(self, namespace: str, thread: str | None, active_only: bool, now: Moment) -> list[SessionRow]:
        """See ``Sessions.sessions``."""
        return [
            replace(row, left_us=now.left_us(*expiry) if row.ended_us is None else 0)
            for row, expiry, _ in sorted(self._kept.values(), key=lambda kept: kept.order)
            if row.lane.namespace == namespace
            and thread in (None, row.lane.thread)
            and not (active_only and row.ended_us is not None)
        ]

    def has_any(self, namespace: str, thread: str) -> bool:
        """Tell whether a thread has sessions."""
        return any(kept.row.lane[:2] == (namespace, thread) for kept in self._kept.values())

    def drop_thread(self, namespace: str, thread: str) -> None:
        """Delete the sessions of a thread."""
        self._kept = {name: kept for name, kept in self._kept.items() if kept.row.lane[:2] != (namespace, thread)}

    def _active(self, namespace: str, session: str) -> KeptSession | None:
        kept = self._kept.get((namespace, session))
        return kept if kept is not None and kept.row.ended_us is None else None


def _after(now: Moment, ttl_us: int) -> Moment:
    return now._replace(us=now.us + ttl_us)
