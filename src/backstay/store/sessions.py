"""The session part of the store contract: which runs are active, so that one that died can be told from one that ended.

A session begins, beats while its process lives, and ends with a reason. One that neither ended nor beats any more was
interrupted. A session gives no right to write (a lease does) and does not keep others out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backstay.store.lane import LaneKey


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One session. Moments are the caller's clock, for people; ``left_us`` is the store's, for telling who is gone."""

    id: str
    lane: LaneKey
    owner: str
    process: str  # names the process exactly; see thread.process
    note: str
    started_us: int
    seen_us: int  # of the last beat
    ended_us: int | None = None
    reason: str | None = None  # why it ended; None while it has not
    left_us: int = 0  # how long after now it would be taken for dead without another beat; 0 or less = overdue


class Sessions(Protocol):
    """The verbs on sessions."""

    def begin(self, session: SessionRow, ttl_us: int) -> None:
        """Record a session as active until ``ttl_us`` from now. Again with the same id: like ``beat``.

        The thread is made if it is not there, so that a run that dies before its first checkpoint is found too.
        """

    def beat(self, namespace: str, session: str, seen_us: int, ttl_us: int) -> bool:
        """Say that a session lives; return False if it is not there or has ended."""

    def end(self, namespace: str, session: str, ended_us: int, reason: str) -> bool:
        """Record why a session ended; the first reason stays. Return False if it is not there or had ended before."""

    def sessions(self, namespace: str, thread: str | None, active_only: bool) -> list[SessionRow]:
        """Return sessions, the one begun first first. ``active_only``: those that have not ended, alive or not."""
