"""Any value as JSON that a person or ``jq`` can read. It is for reading only: nothing is built from it again."""

from __future__ import annotations

import base64
import json
import math
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, time
from enum import Enum
from typing import Any

DEPTH_MAX = 200
_TEXT_MAX = 2000
_SEQUENCES = (list, tuple, deque, Set)


def to_json(value: Any, indent: int | None = 2) -> str:
    """Return a value as JSON text. Values that JSON does not have are tagged with their type."""
    return json.dumps(readable(value), indent=indent, ensure_ascii=False, allow_nan=False)


def readable(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON has it. Objects become ``{"type": name, …fields}``; it never fails."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    try:
        if depth < DEPTH_MAX:
            return _readable(value, depth + 1)
    except Exception:  # code of the user's class: a property, or a repr
        return {"type": _name(value), "text": "it cannot be shown"}
    return {"type": _name(value), "text": "nested too deep to be shown"}


def _readable(value: Any, depth: int) -> Any:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return {"type": _name(value), "base64": base64.b64encode(value).decode()}
    if isinstance(value, Enum):
        return {"type": _name(value), "name": value.name, "value": readable(value.value, depth)}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: readable(each, depth) for key, each in value.items()}
        items = [[readable(key, depth), readable(each, depth)] for key, each in value.items()]
        return {"type": _name(value), "items": items}
    if isinstance(value, _SEQUENCES) and not hasattr(value, "_fields"):
        return [readable(each, depth) for each in value]
    if callable(convert := getattr(value, "tolist", None)):  # an array of numpy
        return {"type": _name(value), "items": readable(convert(), depth)}
    content = _content(value)
    if content is None:
        return {"type": _name(value), "text": str(value)[:_TEXT_MAX]}
    shown = readable(content, depth)
    return {"type": _name(value), **({"value": shown} if not isinstance(content, dict) or "type" in shown else shown)}


def _content(value: Any) -> Any:
    """Return the fields of an object; the content of an ``Opaque``; None if it has neither."""
    cls = type(value)
    if hasattr(cls, "raw") and hasattr(cls, "ext") and hasattr(cls, "value"):  # an Opaque, of the layer below
        return {"version": value.version, "value": value.value}
    names = [field.name for field in fields(value)] if is_dataclass(value) else None
    for listed in ("_fields", "__struct_fields__"):  # NamedTuple, msgspec
        names = list(getattr(cls, listed, ())) if names is None and hasattr(cls, listed) else names
    if names is None and hasattr(cls, "__attrs_attrs__"):
        names = [field.name for field in cls.__attrs_attrs__]
    if names is not None:
        return {name: getattr(value, name) for name in names}
    return dict(found) if (found := getattr(value, "__dict__", None)) else None


def _name(value: Any) -> str:
    cls = type(value)
    if hasattr(cls, "raw") and hasattr(cls, "ext"):
        return str(value.name)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
