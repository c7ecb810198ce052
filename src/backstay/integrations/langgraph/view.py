"""Values of a graph's state as plain data for people: what a comparison of two checkpoints is made of.

A message or another object becomes a dictionary of its fields with the name of its class, so that a diff shows which
field of which message has changed, and matches messages by their ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from langgraph.checkpoint.base import CheckpointTuple

from backstay.thread.diff import Diff, diff

CLASS = "class"
"""The key under which an object's class is named; its fields follow."""

_PLAIN = (str, int, float, bool, bytes, type(None))
_DEPTH_MAX = 32


def readable(value: Any, depth: int = 0) -> Any:
    """Return a value as plain data. What has no fields is shown by its ``repr``."""
    if isinstance(value, _PLAIN) or depth > _DEPTH_MAX:
        return value if isinstance(value, _PLAIN) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): readable(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [readable(each, depth + 1) for each in value]
    fields = _fields(value)
    if fields is None:
        return repr(value)
    return {CLASS: type(value).__name__, **{name: readable(each, depth + 1) for name, each in fields.items()}}


def compare(before: CheckpointTuple, after: CheckpointTuple) -> Diff:
    """Return what has changed in the channels' values between two checkpoints."""
    one, two = (readable(each.checkpoint["channel_values"]) for each in (before, after))
    return dataclasses.replace(diff(one, two), before=before.checkpoint["id"], after=after.checkpoint["id"])


def _fields(value: Any) -> dict[str, Any] | None:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dict(dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None
