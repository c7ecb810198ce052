"""Effect: something done to the world outside, kept in a ledger so that it is not done twice.

An intent is stored before it is done, a receipt after it. An intent without a receipt means that nobody knows whether
it was done: the process died, or the answer got lost. Somebody must find out, and says what they found as an outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any


class EffectStatus(StrEnum):
    """How far an effect has come; the value is the name on the wire."""

    INTENDED = "intended"  # begun, and no receipt: it may have been done or not
    DONE = "done"
    FAILED = "failed"  # it was not done, so it may be tried again


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EffectRecord:
    """One effect as the ledger has it, after its newest attempt."""

    key: str
    status: EffectStatus
    attempt: int  # from 1
    owner: str  # names the call that made this attempt, and begins with its host and process
    created_at: datetime  # of this attempt
    idempotency_key: str  # to be sent along with the effect: the same in every attempt, process and restart
    thread_id: str
    branch: str
    scope: str
    result: Any = field(default=None, hash=False)  # of one that is done
    error: str | None = None  # the type of what it failed with; or, if it is done, why its result could not be kept
    ended_at: datetime | None = None
    settled_by: str | None = None  # who said how it ended, if that was not the call itself

    @property
    def outcome_unknown(self) -> bool:
        """Tell whether it was begun and has no receipt: it may have been done or not, or is being done just now."""
        return self.status is EffectStatus.INTENDED

    def __str__(self) -> str:
        # Never the result: it may be huge, and it may be secret.
        state = "outcome unknown" if self.outcome_unknown else self.status.value
        settled = "" if self.settled_by is None else f", says {self.settled_by!r}"
        return f"effect {self.key!r} of thread {self.thread_id!r}: {state}{settled} (attempt {self.attempt})"

    def __repr__(self) -> str:
        return f"<EffectRecord {self}>"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What somebody who looked found out about an effect; made by one of the three functions below."""

    status: EffectStatus
    result: Any = field(default=None, hash=False, repr=False)

    @classmethod
    def done(cls, result: Any = None) -> Outcome:
        """Say that it was done, and with which result: what the call would have returned."""
        return cls(EffectStatus.DONE, result)

    @classmethod
    def not_done(cls) -> Outcome:
        """Say that it was not done and will not be any more: it may be tried again."""
        return cls(EffectStatus.FAILED)

    @classmethod
    def unknown(cls) -> Outcome:
        """Say that it cannot be told, or not yet."""
        return cls(EffectStatus.INTENDED)
