"""Retry policies: how many retries, how long to wait, and after which errors.

An operation (``ErrorRecovery``) and a node of a graph (``retry=``) use the same policy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from backstay.errors import Conflict, Corrupted, EffectUnknown, Fenced, InvalidInput, OutcomeUnknown, Rejected
from backstay.model.category import DEFAULT, RETRYABLE, ErrorCategory, Rules

RETRIES_MAX = 999

UNSAFE = (Conflict, Fenced, OutcomeUnknown, EffectUnknown, Corrupted, Rejected)
"""Errors after which a retry or a fallback may do harm: a person has to look first."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Up to ``retries`` attempts after the first; the wait grows by ``factor`` from ``first_s`` up to ``cap_s``.

    ``on`` lists the exception classes and error categories to retry, by default the categories transient and resource.
    An error in ``UNSAFE`` is retried only if ``on`` names its own class.
    """

    retries: int = 3
    first_s: float = 1.0
    cap_s: float = 30.0
    factor: float = 2.0
    jitter: float = 0.1  # the random share of a wait, so that many workers do not come back at the same moment
    on: tuple[type[Exception] | ErrorCategory, ...] = RETRYABLE
    rules: Rules = DEFAULT

    def __post_init__(self) -> None:
        if type(self.retries) is not int or not 0 <= self.retries <= RETRIES_MAX:
            raise InvalidInput(f"retries must be a whole number from 0 to {RETRIES_MAX}, not {self.retries!r:.40}")
        for name in ("first_s", "cap_s", "factor", "jitter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidInput(f"{name} must be a number of at least 0, not {value!r:.40}")
        given = self.on if isinstance(self.on, list | tuple | set | frozenset) else (self.on,)
        causes = [
            each
            if isinstance(each, type) and issubclass(each, Exception)
            else next((category for category in ErrorCategory if category == each), None)
            for each in given
        ]
        if None in causes or not causes:
            raise InvalidInput(
                "on must list exception classes or error categories",
                hint='For example on=(TimeoutError,), on=("transient", ProviderError) or on=Exception',
            )
        object.__setattr__(self, "on", tuple(causes))
        if not isinstance(self.rules, Rules):
            raise InvalidInput(f"rules must be Rules, not {type(self.rules).__name__}")

    @property
    def attempts(self) -> int:
        """The total number of attempts."""
        return self.retries + 1

    def wants(self, attempt: int, error: Exception) -> bool:
        """Return whether to retry after attempt number ``attempt`` (from 1) raised this error."""
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


ONCE = RetryPolicy(retries=0)
