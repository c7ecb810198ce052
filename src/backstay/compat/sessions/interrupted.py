"""Sessions that did not end: what a person is shown after a crash."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedSession:
    """A session whose process is gone and that gave no reason for its end."""

    session_id: str
    last_iteration: int
    last_activity: datetime
    task_description: str | None = None
    owner: str | None = None
    resume_hint: str = ""

    def __str__(self) -> str:
        task = f" ({self.task_description!r})" if self.task_description else ""
        owner = f", run by {self.owner!r}" if self.owner else ""
        seen = self.last_activity.isoformat(sep=" ", timespec="seconds")
        hint = f". {self.resume_hint}" if self.resume_hint else ""
        return f"session {self.session_id!r}{task}: iteration {self.last_iteration}, last active {seen}{owner}{hint}"


def render(sessions: Iterable[InterruptedSession]) -> str:
    """Return the sessions as text, one a line, with what to do next."""
    lines = [f"  {number}. {session}" for number, session in enumerate(sessions, 1)]
    if not lines:
        return "No session was interrupted"
    return "\n".join([f"{len(lines)} interrupted {'session' if len(lines) == 1 else 'sessions'}:", *lines])
