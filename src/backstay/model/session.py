"""Sessions: runs as lists show them, active, ended or interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from backstay.model.checkpoint import MAIN, CheckpointMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of one branch. It has not ended as long as ``reason`` is None."""

    id: str
    thread_id: str
    branch: str
    scope: str
    owner: str
    note: str
    started_at: datetime
    last_seen: datetime
    ended_at: datetime | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedRun:
    """A run that did not end and whose process is gone; ``checkpoint`` is the newest of its branch."""

    session_id: str
    thread_id: str
    branch: str
    scope: str
    owner: str
    note: str
    started_at: datetime
    last_seen: datetime
    checkpoint: CheckpointMeta | None = None

    @property
    def hint(self) -> str:
        """Return what to do next."""
        if self.checkpoint is None:
            return "Start it again: it saved nothing"
        parts = [repr(self.thread_id)]
        if self.branch != MAIN:
            parts.append(f"branch={self.branch!r}")
        if self.scope:
            parts.append(f"scope={self.scope!r}")
        return f"Resume it from store.thread({', '.join(parts)}).latest()"

    def __str__(self) -> str:
        place = f"thread {self.thread_id!r}" + (f" branch {self.branch!r}" if self.branch != MAIN else "")
        if self.checkpoint is None:
            point = "before its first checkpoint"
        else:
            following = f", before {self.checkpoint.next_node!r}" if self.checkpoint.next_node else ""
            point = f"after step {self.checkpoint.step}{following}"
        what = f" ({self.note!r})" if self.note else ""
        return (
            f"{place}{what} was interrupted {point}: run by {self.owner!r} since {_moment(self.started_at)}, "
            f"last seen {_moment(self.last_seen)}. {self.hint}"
        )


def _moment(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds")
