"""What is said beside a result: what was passed over and why, and what went wrong without harm."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from backstay.compat.sessions.data import CheckpointMeta

T_co = TypeVar("T_co", covariant=True)


class Skipped(NamedTuple):
    """Something that was passed over, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return self.why if self.why.startswith(self.what) else f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class RecoveryReport(Generic[T_co]):
    """The newest checkpoint that is intact, and everything newer that is not. It is true if there is one.

    ``notes`` says what else is odd, such as a ``latest.json`` that names another checkpoint.
    """

    session_id: str
    data: T_co | None = None
    path: Path | None = None  # of a session directory; None in a store
    from_backup: bool = False
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.data is not None

    def __str__(self) -> str:
        if self.data is None:
            found = f"session {self.session_id!r}: no intact checkpoint"
        else:
            identity = getattr(self.data, "checkpoint_id", None) or getattr(self.data, "id", "")
            found = f"session {self.session_id!r}: checkpoint {str(identity)!r}"
        lines = [found + (" from its backup" if self.from_backup else "")]
        lines += [f"  skipped {item}" for item in self.skipped]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Scan:
    """All of a session's directory: intact checkpoints, newest first, what is damaged, and what crashes left behind."""

    good: tuple[CheckpointMeta, ...] = ()
    damaged: tuple[Skipped, ...] = ()
    leftovers: tuple[str, ...] = ()
    backups: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Diary:
    """The last problems that did not make a call fail. Bounded, because a disk that is full stays so for a while."""

    limit: int = 100
    entries: list[Skipped] = field(default_factory=list)

    def add(self, what: str, why: str) -> None:
        """Note a problem."""
        self.entries.append(Skipped(what, why))
        del self.entries[: -self.limit]
