"""Where sessions can be looked for after a crash: what both kinds of places, directories and stores, can tell."""

from __future__ import annotations

from typing import Protocol, TypeVar

from backstay.compat.sessions.interrupted import InterruptedSession
from backstay.compat.sessions.report import RecoveryReport, Skipped

T_co = TypeVar("T_co", covariant=True)


class SessionSource(Protocol[T_co]):
    """A place with sessions, whose checkpoints are of one type."""

    def interrupted(self) -> tuple[list[InterruptedSession], list[Skipped]]:
        """Return the sessions that did not end and whose process is gone, last active first, and what is unreadable."""

    def recover(self, session_id: str, branch: str) -> RecoveryReport[T_co]:
        """Return the newest intact checkpoint of a session, with what was passed over."""

    def activate(self, session_id: str, owner: str | None, task: str) -> None:
        """Record that this process runs a session."""

    def terminate(self, session_id: str, reason: str) -> bool:
        """Record why a session ended; return False if there was none to end."""
