"""What came of an operation that was run with recovery: its value, or why there is none, and what was done about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from backstay.errors import Unrecovered
from backstay.recovery.action import RecoveryAction
from backstay.recovery.category import ErrorCategory
from backstay.recovery.failure import Failure
from backstay.recovery.incident import Incident
from backstay.thread.interrupts import InterruptRecord

T_co = TypeVar("T_co", covariant=True)


class RecoveryLayer(StrEnum):
    """What helped, or was the last to try."""

    AUTOMATIC = "automatic"  # trying again
    FALLBACK = "fallback"  # doing something else instead
    USER_INTERVENTION = "user_intervention"  # a person


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryResult(Generic[T_co]):
    """How it went. Nothing is raised for a failure; ``unwrap`` does that."""

    success: bool  # there is a value to go on with
    value: T_co | None = field(default=None, repr=False)
    layer: RecoveryLayer | None = None  # None if nothing had to be recovered from
    attempts: int = 0  # calls of the operation that were made; with a thread, also by processes that are gone
    error: Exception | None = field(default=None, repr=False)  # the operation's last, also if it was recovered from
    failure: Failure | None = None  # the same as it may be shown; also of an earlier process
    fallback: str | None = None  # the strategy whose value this is
    fallback_errors: tuple[Exception, ...] = field(default=(), repr=False)  # of strategies that did not help
    cached_age_s: float | None = None  # of a value out of a cache
    cache_error: Exception | None = field(default=None, repr=False)  # the value could not be put into the cache
    action: RecoveryAction | None = None  # what a person chose
    skipped: bool = False  # going on without it
    replayed: bool = False  # it was done earlier: the stored value
    incident: Incident | None = None  # what a person was asked about
    interrupt: InterruptRecord | None = None  # where they answer, if they have not

    @property
    def waiting(self) -> bool:
        """Tell whether it waits for somebody's decision: run it again with the same key when there is one."""
        return self.interrupt is not None

    @property
    def category(self) -> ErrorCategory | None:
        """What kind of trouble it was."""
        return None if self.failure is None else self.failure.category

    @property
    def error_message(self) -> str | None:
        """The text of the error. It may quote values; ``failure`` does not."""
        if self.error is not None:
            return str(self.error) or type(self.error).__name__
        return None if self.failure is None else str(self.failure)

    @property
    def suggested_action(self) -> str | None:
        """What a person can do about it; None if there is nothing to be done."""
        if self.success or self.failure is None:
            return None
        if self.interrupt is not None:
            return f"{self.failure.hint}. Decide on interrupt {self.interrupt.id}, then run it again with the same key"
        return self.failure.hint

    def unwrap(self) -> T_co:
        """Return the value, or raise the operation's error."""
        if self.success:
            return self.value  # type: ignore[return-value]  # of a success, which may be None
        if self.error is not None:
            raise self.error
        raise Unrecovered(
            f"it failed in an earlier process: {self.failure}", hint=self.suggested_action, interrupt=self.interrupt
        )
