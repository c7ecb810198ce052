"""Usage: what a run has consumed so far, in tokens and in money.

Both numbers only count up, so neither may be negative, and neither may be a number that some format cannot carry: a
cost of NaN would be saved by one encoder and refused by the next reader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backstay.errors import InvalidInput

COUNT_MAX = 2**63 - 1  # the largest integer that every store's column holds


def check_count(value: object, what: str, *, least: int = 0) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``COUNT_MAX``; True is no number."""
    if type(value) is not int:
        raise InvalidInput(f"{what} is {type(value).__name__}, not int", hint=f"Pass a plain int as {what}")
    if not least <= value <= COUNT_MAX:
        side = f"less than {least}" if value < least else "2**63 or more"
        raise InvalidInput(f"{what} is {side}", hint=f"Pass {least} to 2**63 - 1")
    return value


def check_cost(value: object) -> float:
    """Return the value as a float if it can be a cost."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"cost_estimate is {type(value).__name__}, not a number", hint="Pass an int or a float")
    try:
        cost = float(value)
    except OverflowError:
        cost = math.inf
    if not math.isfinite(cost) or cost < 0:
        raise InvalidInput(f"cost_estimate is {cost}", hint="Pass a finite number, 0 or more; 0.0 if it is not known")
    return cost + 0.0  # -0.0 becomes 0.0: equal values shall have equal bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and estimated cost; two of them add up."""

    tokens_used: int = 0
    cost_estimate: float = 0.0  # in the caller's currency; an int is taken and kept as float

    def __post_init__(self) -> None:
        check_count(self.tokens_used, "tokens_used")
        object.__setattr__(self, "cost_estimate", check_cost(self.cost_estimate))

    def __add__(self, other: Usage) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(self.tokens_used + other.tokens_used, self.cost_estimate + other.cost_estimate)
