"""Runs and effects as lists show them.

A **run** is one execution of a graph or loop on a branch, from its input to its end. It has a status and at most one
holder: every question about what is running, what died and what waits is a question about runs.

An **effect** is a call that must not happen twice. The ledger stores an intent before the call and a receipt after it.
An intent without a receipt means that the outcome is unknown: the process died, or the answer got lost. A hook or a
person finds out and records it as an ``Outcome``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any


class RunStatus(StrEnum):
    """The status of a run; the value is the stored name."""

    QUEUED = "queued"  # submitted, not started
    RUNNING = "running"  # a process executes it
    INTERRUPTED = "interrupted"  # waits for a person, or for a value that another program sends
    SLEEPING = "sleeping"  # waits for its ``wake_at``
    ABANDONED = "abandoned"  # unfinished, and no process executes it
    COMPLETED = "completed"
    FAILED = "failed"  # ended by an error; it can be resumed
    CANCELLED = "cancelled"  # stopped for good


UNFINISHED = (
    RunStatus.QUEUED,
    RunStatus.RUNNING,
    RunStatus.INTERRUPTED,
    RunStatus.SLEEPING,
    RunStatus.ABANDONED,
)
"""The statuses of runs that have not ended."""


class EffectStatus(StrEnum):
    """The progress of an effect; the value is the stored name."""

    INTENDED = "intended"  # started, no receipt: the outcome is unknown
    DONE = "done"
    FAILED = "failed"  # it was not done, so it may be retried


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EffectRecord:
    """One effect or durable call in the ledger, after its newest attempt."""

    key: str
    status: EffectStatus
    attempt: int  # from 1
    owner: str  # the call that made this attempt; starts with its host and process
    created_at: datetime  # of this attempt
    idempotency_key: str  # send it with the effect: it is the same in every attempt, process and restart
    thread_id: str
    branch: str
    scope: str
    result: Any = field(default=None, hash=False)  # if it is done
    error: str | None = None  # the type of its error; or, if it is done, why its result could not be stored
    ended_at: datetime | None = None
    settled_by: str | None = None  # who recorded the outcome, if not the call itself
    is_call: bool = False  # a durable call: it may be repeated, and is stored only when it is done

    @property
    def outcome_unknown(self) -> bool:
        """Return whether it has no receipt: it may have happened or not, or may still be running."""
        return self.status is EffectStatus.INTENDED

    def __str__(self) -> str:
        # Never show the result: it may be huge, and it may be secret.
        state = "outcome unknown" if self.outcome_unknown else self.status.value
        settled = "" if self.settled_by is None else f", says {self.settled_by!r}"
        what = "call" if self.is_call else "effect"
        return f"{what} {self.key!r} of thread {self.thread_id!r}: {state}{settled} (attempt {self.attempt})"

    def __repr__(self) -> str:
        return f"<EffectRecord {self}>"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an effect, as found by a hook or a person. Use one of the three class methods."""

    status: EffectStatus
    result: Any = field(default=None, hash=False, repr=False)

    @classmethod
    def done(cls, result: Any = None) -> Outcome:
        """Report that it was done; ``result`` is what the call would have returned."""
        return cls(EffectStatus.DONE, result)

    @classmethod
    def not_done(cls) -> Outcome:
        """Report that it was not done and will not be done later, so it may be retried."""
        return cls(EffectStatus.FAILED)

    @classmethod
    def unknown(cls) -> Outcome:
        """Report that the outcome is unknown, or not known yet."""
        return cls(EffectStatus.INTENDED)
