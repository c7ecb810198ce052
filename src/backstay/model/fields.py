"""What each field of a checkpoint's record must be: one table, used whole by the constructor and in part by a save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from backstay.errors import InvalidInput
from backstay.model.continuation import End, FanOut, NextNode
from backstay.model.ids import check_id, check_label
from backstay.model.interrupt import Interrupt
from backstay.model.usage import check_cost, check_count

STEP_MAX = 2**53 - 1
TEXT_LENGTH_MAX = 65536
TAGS_MAX = 64
DESCRIPTION_BYTES_MAX = 256 * 1024
"""Encoded bytes of all that describes a checkpoint, metadata included: every list reads them again."""

Check = Callable[[Any, str], Any]


def check_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in their stored form; raise InvalidInput that names the first one that cannot be."""
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


def _moment(value: object, what: str) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidInput(f"{what} must be a datetime with a time zone", hint="Use datetime.now(timezone.utc)")
    return value.astimezone(UTC)


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
    "created_at": _moment,
    "metadata": _metadata,
}
