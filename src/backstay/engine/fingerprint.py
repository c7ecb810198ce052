"""What a graph is, as plain values, and the number that stands for it.

The **shape** of a graph is everything that decides where a run goes and what its state means: names, kinds, edges in
the order in which they are tried, conditions by name, nested graphs whole, the state's keys. It is stored with a run,
so that a later graph can be compared with it part by part. What a run may choose for itself (pauses, limits, retries,
timeouts) is no part of it, and neither is the order in which a graph was declared.

The **fingerprint** is a hash of the shape: the first 64 bits of a SHA-256 over JSON with sorted keys. Every text in it
is quoted, so no name can look like the border between two others.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from backstay.codec.registry import BY_CLASS
from backstay.engine.build import Built
from backstay.engine.edge import END, Choice, Edge, ForEach, To, Together, name_of
from backstay.engine.node import Inner, Node, Projection
from backstay.engine.schema import Field, Schema

Shape = dict[str, Any]
"""Dicts with text keys, lists, texts, numbers, bool and None: what every store gives back equal."""

FORMAT: Final = 1
"""Of the shape itself: rises if what is written down of a graph ever changes."""

_BITS_BYTES: Final = 8
_UNWRAPPED: Final = (typing.Annotated, typing.Required, typing.NotRequired)


@dataclass(frozen=True, slots=True)
class Identity:
    """A graph's shape and fingerprint, made once for each built graph."""

    shape: Shape
    hash: int


_KNOWN: Final[weakref.WeakKeyDictionary[Built, Identity]] = weakref.WeakKeyDictionary()


def identity(built: Built) -> Identity:
    """Return shape and fingerprint of a graph; after the first time this costs a look-up."""
    known = _KNOWN.get(built)
    if known is None:
        made = _shape(built)
        known = _KNOWN.setdefault(built, Identity(made, fingerprint(made)))
    return known


def shape(built: Built) -> Shape:
    """Return a graph's shape. It is shared: who wants to change it makes a copy."""
    return identity(built).shape


def fingerprint_of(built: Built) -> int:
    """Return a graph's fingerprint."""
    return identity(built).hash


def fingerprint(shape: Mapping[str, Any]) -> int:
    """Return the unsigned 64-bit number that stands for a shape."""
    text = json.dumps(shape, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:_BITS_BYTES], "big")


def hex_of(hash: int) -> str:
    """Return a fingerprint as 16 hexadecimal digits: as text it survives readers that have only doubles."""
    return f"{hash:016x}"


def _shape(built: Built) -> Shape:
    return {
        "format": FORMAT,
        "name": built.name,
        "start": built.start,
        "nodes": {name: _node(node, built) for name, node in sorted(built.nodes.items())},
        "edges": {source: [_edge(edge) for edge in edges] for source, edges in sorted(built.edges.items())},
        "ends": sorted(
            source for source, edges in built.edges.items() if any(END in edge.target.nodes() for edge in edges)
        ),
        "state": _state(built.schema),
    }


def _node(node: Node, built: Built) -> Shape:
    made: Shape = {"kind": node.kind.value}
    if node.wait is not None:
        made |= {"on_reject": node.wait.on_reject, "on_timeout": node.wait.on_timeout.value}
    if node.inner is not None:
        made |= {"graph": shape(built.inner[node.name]), **_projections(node.inner)}
    return made


def _projections(inner: Inner) -> Shape:
    return {"into": _projection(inner.into), "out": _projection(inner.out)}


def _projection(given: Mapping[str, str] | Projection | None) -> Any:
    if given is None:
        return None
    return dict(sorted(given.items())) if isinstance(given, Mapping) else _called(given)


def _called(function: Callable[..., Any]) -> Shape:
    """Return a function by its name: a dict, so that it cannot be taken for a key of that name."""
    return {"function": name_of(function)}


def _edge(edge: Edge) -> Shape:
    made: Shape = {"rank": edge.rank, "when": None if edge.when is None else edge.when.name}
    match edge.target:
        case To(node=node):
            return made | {"kind": "to", "targets": [node]}
        case Together(targets=targets, join=join, on_error=on_error):  # their order is the order of their updates
            return made | {"kind": "together", "targets": list(targets), "join": join, "on_error": on_error}
        case ForEach(node=node, over=over, join=join, on_error=on_error):
            key: Any = over if isinstance(over, str) else _called(over)
            return made | {"kind": "for each", "targets": [node], "over": key, "join": join, "on_error": on_error}
        case Choice(function=function, ways=ways):
            named = {way if isinstance(way, str) else repr(way): target for way, target in ways.items()}
            return made | {"kind": "choice", "by": name_of(function), "ways": dict(sorted(named.items()))}


def _state(schema: Schema) -> Shape:
    return {
        "open": schema.open,
        "snapshots": schema.snapshots,
        "fields": {name: field_shape(field) for name, field in sorted(schema.fields.items())},
    }


def field_shape(field: Field) -> list[Any]:
    """Return what counts of a declared key: its type as text, its reducer's name, whether it is left out of stores."""
    return [type_text(field.annotation), field.reducer.name, field.transient]


def type_text(annotation: Any) -> str:
    """Return a declared type as text, the same for all ways to write it and in every process.

    What ``Annotated`` adds is left out: a reducer is named on its own, and other notes are not about the value.
    """
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin in _UNWRAPPED:
        return type_text(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(sorted({type_text(each) for each in parts}))
    if origin is typing.Literal:
        return f"Literal[{', '.join(sorted(f'{type(each).__qualname__} {each!r}' for each in parts))}]"
    if origin is not None:
        return f"{_name(origin)}[{', '.join(map(type_text, parts))}]" if parts else _name(origin)
    if isinstance(annotation, list):  # the arguments of a Callable
        return f"[{', '.join(map(type_text, annotation))}]"
    return _name(annotation)


def _name(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    if isinstance(annotation, type) and annotation in BY_CLASS:
        return BY_CLASS[annotation].name  # what its values are stored under
    named = getattr(annotation, "__qualname__", None) or getattr(annotation, "__name__", type(annotation).__qualname__)
    module = getattr(annotation, "__module__", "builtins")
    return str(named) if module in ("builtins", "typing") else f"{module}.{named}"
