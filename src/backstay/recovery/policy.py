"""When what failed is tried again: how often, how long to wait, and after which errors.

The same for an operation (``ErrorRecovery``) and for a graph's node (``retry=``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from backstay.errors import (
    Conflict,
    Corrupted,
    EffectUnknown,
    Fenced,
    InvalidInput,
    OutcomeUnknown,
    Rejected,
)
from backstay.recovery.category import RETRYABLE, ErrorCategory
from backstay.recovery.rules import DEFAULT, Rules

RETRIES_MAX = 999

UNSAFE = (Conflict, Fenced, OutcomeUnknown, EffectUnknown, Corrupted, Rejected)
"""Errors after which doing the same once more, or doing it elsewhere, may do harm: somebody has to look first."""

Cause = type[Exception] | ErrorCategory


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Up to ``retries`` attempts after the first; the wait grows by ``factor`` from ``first_s`` up to ``cap_s``.

    ``on`` names classes of errors, categories, or both: what is tried again. By default that are the categories in
    which it may help, transient and resource. Errors in ``UNSAFE`` are tried again only if named by their own class.
    """

    retries: int = 3
    first_s: float = 1.0
    cap_s: float = 30.0
    factor: float = 2.0
    jitter: float = 0.1  # the share of a wait that is left to chance, so that many workers do not come back at once
    on: tuple[Cause, ...] = RETRYABLE
    rules: Rules = DEFAULT

    def __post_init__(self) -> None:
        if type(self.retries) is not int or not 0 <= self.retries <= RETRIES_MAX:
            raise InvalidInput(f"retries must be a whole number from 0 to {RETRIES_MAX}, not {self.retries!r:.40}")
        for name in ("first_s", "cap_s", "factor", "jitter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidInput(f"{name} must be a number of at least 0, not {value!r:.40}")
        object.__setattr__(self, "on", _causes(self.on))
        if not isinstance(self.rules, Rules):
            raise InvalidInput(f"rules must be Rules, not {type(self.rules).__name__}")

    @property
    def attempts(self) -> int:
        """How many attempts there are in all."""
        return self.retries + 1

    def wants(self, attempt: int, error: Exception) -> bool:
        """Tell whether there is to be another attempt after number ``attempt`` (from 1) ended with this error."""
        if attempt > self.retries:
            return False
        named = [each for each in self.on if isinstance(each, type) and isinstance(error, each)]
        if isinstance(error, UNSAFE):
            return any(issubclass(each, UNSAFE) for each in named)
        return bool(named) or self.rules.classify(error) in self.on

    def wait_s(self, attempt: int, chance: random.Random) -> float:
        """Return how long to wait after attempt number ``attempt`` (from 1)."""
        try:
            wait = min(self.cap_s, self.first_s * float(self.factor) ** (attempt - 1))
        except OverflowError:  # far beyond any cap
            wait = self.cap_s if self.first_s else 0.0
        return max(0.0, wait * (1 + self.jitter * (2 * chance.random() - 1)))


def _causes(on: object) -> tuple[Cause, ...]:
    causes = (
        (on,) if isinstance(on, type | str) else tuple(on) if isinstance(on, list | tuple | set | frozenset) else ()
    )
    found = [_cause(each) for each in causes]
    if None in found or not found:
        raise InvalidInput(
            "on must name classes of exceptions or error categories",
            hint='For example on=(TimeoutError,), on=("transient", ProviderError) or on=Exception',
        )
    return tuple(each for each in found if each is not None)


def _cause(each: object) -> Cause | None:
    if isinstance(each, type):
        return each if issubclass(each, Exception) else None
    return next((category for category in ErrorCategory if category == each), None)


ONCE = RetryPolicy(retries=0)
