"""The checks of a checkpoint's fields, as one table: the constructor uses all of it, a save a part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from backstay.errors import InvalidInput
from backstay.model.decision import Interrupt
from backstay.model.frame import End, FanOut, NextNode
from backstay.model.ids import check_count, check_id, check_label


def check_cost(value: object) -> float:
    """Return the value as a float if it is a valid cost: finite, because not every format can store NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"cost_estimate is {type(value).__name__}, not a number", hint="Pass an int or a float")
    try:
        cost = float(value)
    except OverflowError:
        cost = math.inf
    if not math.isfinite(cost) or cost < 0:
        raise InvalidInput(f"cost_estimate is {cost}", hint="Pass a finite number, 0 or more; 0.0 if it is unknown")
    return cost + 0.0  # -0.0 becomes 0.0, so that equal values have equal bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens and the money that a run has used so far; two of them can be added."""

    tokens_used: int = 0
    cost_estimate: float = 0.0  # in the caller's currency; an int becomes a float

    def __post_init__(self) -> None:
        check_count(self.tokens_used, "tokens_used")
        object.__setattr__(self, "cost_estimate", check_cost(self.cost_estimate))

    def __add__(self, other: Usage) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(self.tokens_used + other.tokens_used, self.cost_estimate + other.cost_estimate)


STEP_MAX = 2**53 - 1
TEXT_LENGTH_MAX = 65536
TAGS_MAX = 64
DESCRIPTION_BYTES_MAX = 256 * 1024
"""Encoded bytes of a checkpoint's description, metadata included: every list reads them."""

Check = Callable[[Any, str], Any]


def check_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in their stored form; raise InvalidInput, which names the first invalid one."""
    return {name: CHECKS[name](value, name) if name in CHECKS else value for name, value in values.items()}


def check_tags(tags: object, what: str = "tags") -> tuple[str, ...]:
    """Return the tags as a tuple without repeats; raise InvalidInput unless each is a valid name."""
    if isinstance(tags, str) or not isinstance(tags, list | tuple | set | frozenset):
        raise InvalidInput(f"{what} must be a list of texts", hint='Write tags=["name"]')
    unique = tuple(dict.fromkeys(check_id(tag, "tag") for tag in tags))
    if len(unique) > TAGS_MAX:
        raise InvalidInput(f"a checkpoint can have at most {TAGS_MAX} tags, not {len(unique)}")
    return unique


def _count(least: int) -> Check:
    def check(value: object, what: str) -> int:
        if type(value) is not int or not least <= value <= STEP_MAX:
            raise InvalidInput(f"{what} must be a whole number from {least} to {STEP_MAX}, not {value!r:.40}")
        return value

    return check


def _optional(check: Check) -> Check:
    return lambda value, what: None if value is None else check(value, what)


def _may_be_empty(value: object, what: str) -> str:
    return "" if value == "" else check_id(value, what)


def _text(value: object, what: str) -> str:
    return check_label(value, what, length_max=TEXT_LENGTH_MAX)


def _graph_hash(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise InvalidInput(f"{what} must be an unsigned 64-bit number")
    return value


def check_moment(value: object, what: str) -> datetime:
    """Return a time in UTC; raise InvalidInput if it has no time zone."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidInput(f"{what} must be a datetime with a time zone", hint="Use datetime.now(timezone.utc)")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(f"{what} is before the year 1 or after 9999 in UTC") from None


def _metadata(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or any(type(key) is not str for key in value):
        raise InvalidInput(f"{what} must be a mapping with text keys")
    return dict(value)


def _kind_of(*kinds: type) -> Check:
    def check(value: object, what: str) -> object:
        if not isinstance(value, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidInput(f"{what} must be {names}, not {type(value).__name__}")
        return value

    return check


CHECKS: dict[str, Check] = {
    "id": check_id,
    "thread_id": check_id,
    "namespace": _may_be_empty,
    "scope": _may_be_empty,
    "branch": check_id,
    "seq": _count(0),
    "parent_id": _optional(check_id),
    "run_id": _optional(check_id),
    "attempt": _count(1),
    "graph": _optional(check_id),
    "graph_hash": _optional(_graph_hash),
    "last_node": _optional(check_id),
    "next_node": _optional(check_id),
    "continuation": _optional(_kind_of(NextNode, FanOut, End)),
    "step": _count(0),
    "iteration": _count(0),
    "interrupt": _optional(_kind_of(Interrupt)),
    "resume_hint": _optional(_text),
    "tokens_used": check_count,
    "cost_estimate": lambda value, what: check_cost(value),
    "trigger": check_id,
    "tags": check_tags,
    "label": _optional(_text),
    "summary": _text,
    "created_at": check_moment,
    "metadata": _metadata,
}
