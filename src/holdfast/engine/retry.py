"""When a failed node is run again: how often, how long to wait, and after which errors."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.errors import InvalidInput

ATTEMPTS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Retry:
    """Up to ``attempts`` runs in all; the wait doubles (``factor``) from ``first_s`` up to ``cap_s``, give or take.

    The number of attempts made is stored, so that a crash in between does not begin the count anew.
    """

    attempts: int = 3
    first_s: float = 1.0
    factor: float = 2.0
    cap_s: float = 30.0
    jitter: float = 0.1  # the share of a wait that is left to chance, so that many workers do not come back at once
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise InvalidInput(f"attempts must be a whole number from 1 to {ATTEMPTS_MAX}, not {self.attempts!r}")
        for name in ("first_s", "factor", "cap_s", "jitter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidInput(f"{name} must be a number of at least 0, not {value!r:.40}")
        errors = (self.on,) if isinstance(self.on, type) else tuple(self.on)
        if not all(isinstance(each, type) and issubclass(each, Exception) for each in errors):
            raise InvalidInput("on must name classes of exceptions", hint="For example on=(TimeoutError,)")
        object.__setattr__(self, "on", errors)

    def wants(self, attempt: int, error: Exception) -> bool:
        """Tell whether there is to be another run after attempt number ``attempt`` ended with this error."""
        return attempt < self.attempts and isinstance(error, self.on)

    def wait_s(self, attempt: int, chance: random.Random) -> float:
        """Return how long to wait after attempt number ``attempt``."""
        wait = self.cap_s
        if self.factor <= 1 or attempt < 64:  # beyond that any factor has long reached the cap
            wait = min(self.cap_s, self.first_s * self.factor ** (attempt - 1))
        return max(0.0, wait * (1 + self.jitter * (2 * chance.random() - 1)))


ONCE = Retry(attempts=1)
