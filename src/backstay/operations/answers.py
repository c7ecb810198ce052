"""The wanted type of an answer, in a form that is stored with the question and checked without importing any class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY = {"type": "any"}

_BUILT_IN: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set, frozenset)
}
_COERCED: dict[str, tuple[type, ...]] = {
    "bool": (bool, int, float, str),
    "int": (int, float, str),
    "float": (int, float, str),
    "str": (str,),
    "list": (list, tuple, set, frozenset),
    "dict": (dict,),
}
"""Pydantic accepts a value for a field of this type only if it is one of these; it looks more closely itself."""


def describe(kind: type | None) -> dict[str, Any] | None:
    """Return the description of a type; None for None, and ``ANY`` for object."""
    if kind is None:
        return None
    if kind is object:
        return dict(ANY)
    if _BUILT_IN.get(kind.__name__) is kind:
        return {"type": kind.__name__}
    described: dict[str, Any] = {"type": f"{kind.__module__}.{kind.__qualname__}"}
    # A model with validators of its own may accept anything: only the worker can check it.
    known, own = getattr(kind, "model_fields", None), getattr(kind, "__pydantic_decorators__", None)
    if isinstance(known, Mapping) and own is not None and not (own.model_validators or own.field_validators):
        plain = {name: field for name, field in known.items() if field.validation_alias is None}
        described["required"] = [name for name, field in plain.items() if field.is_required()]
        kinds = {kind: name for name, kind in _BUILT_IN.items()}
        described["fields"] = {
            name: "any" if field.metadata else kinds.get(field.annotation, "any") for name, field in plain.items()
        }
    return described


def type_name(described: Mapping[str, Any]) -> str:
    """Return the name of a described type, without its module."""
    name: str = described["type"]
    return name.rpartition(".")[2]


def misfit_of(described: Mapping[str, Any], value: Any) -> str | None:
    """Return what a wrong answer is, without showing it; None if it fits, or if only the worker can check it."""
    kind = _BUILT_IN.get(described["type"])
    if kind is not None:
        fits = isinstance(value, kind) and not (isinstance(value, bool) and kind is int)
        return None if fits else type(value).__name__
    if "fields" not in described:
        return None
    if not isinstance(value, Mapping):
        is_plain = value is None or type(value) in _BUILT_IN.values()
        return type(value).__name__ if is_plain else None
    missing = [name for name in described["required"] if name not in value]
    if missing:
        return f"a mapping without {', '.join(missing)}"
    for name, wanted in described["fields"].items():
        if name in value and wanted in _COERCED and not isinstance(value[name], _COERCED[wanted]):
            return f"a mapping whose {name} is {type(value[name]).__name__}, not {wanted}"
    return None
