"""The shape and the fingerprint of a graph, and what a difference between two shapes means for a stored position.

The **shape** of a graph is everything that decides where a run goes and what its state means: names, kinds, edges in
the order in which they are tried, conditions by name, nested graphs, the keys of the state. It is stored with a run, so
that a later graph can be compared with it part by part. Options of a run (pauses, limits, retries, timeouts) and the
order of declaration are not part of it.

The **fingerprint** is a hash of the shape: the first 64 bits of a SHA-256 over JSON with sorted keys. Every text in it
is quoted, so two adjacent names cannot be confused with one.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from backstay.codec.registry import BY_CLASS
from backstay.engine.build import BuiltGraph
from backstay.engine.nodes import END, Choice, Edge, ForEach, Node, Parallel, Projection, To, name_of
from backstay.engine.reducers import replace
from backstay.engine.state import Field
from backstay.model.frame import FanOut, Frame, NextNode

Shape = dict[str, Any]
"""Plain values that every store returns unchanged: dicts with text keys, lists, texts, numbers, bool and None."""

FORMAT: Final = 1
"""The version of the shape itself; it rises if the fields of a shape ever change."""

_BITS_BYTES: Final = 8
_UNWRAPPED: Final = (typing.Annotated, typing.Required, typing.NotRequired)


@dataclass(frozen=True, slots=True)
class Identity:
    """The shape and the fingerprint of a graph, made once for each built graph."""

    shape: Shape
    hash: int


_KNOWN: Final[weakref.WeakKeyDictionary[BuiltGraph, Identity]] = weakref.WeakKeyDictionary()


def identity(built: BuiltGraph) -> Identity:
    """Return the shape and the fingerprint of a graph. They are cached."""
    known = _KNOWN.get(built)
    if known is None:
        edges = sorted(built.edges.items())
        made = {
            "format": FORMAT,
            "name": built.name,
            "start": built.start,
            "nodes": {name: _node(node, built) for name, node in sorted(built.nodes.items())},
            "edges": {source: [_edge(edge) for edge in each] for source, each in edges},
            "ends": [source for source, each in edges if any(END in edge.target.nodes() for edge in each)],
            "state": {
                "open": built.schema.open,
                "snapshots": built.schema.snapshots,
                "fields": {name: field_shape(each) for name, each in sorted(built.schema.fields.items())},
            },
        }
        known = _KNOWN.setdefault(built, Identity(made, fingerprint(made)))
    return known


def shape(built: BuiltGraph) -> Shape:
    """Return the shape of a graph. It is shared, so copy it before you change it."""
    return identity(built).shape


def fingerprint_of(built: BuiltGraph) -> int:
    """Return the fingerprint of a graph."""
    return identity(built).hash


def fingerprint(shape: Mapping[str, Any]) -> int:
    """Return the fingerprint of a shape, an unsigned 64-bit number."""
    text = json.dumps(shape, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:_BITS_BYTES], "big")


def hex_of(hash: int) -> str:
    """Return a fingerprint as 16 hexadecimal digits, for readers whose numbers are doubles."""
    return f"{hash:016x}"


def _node(node: Node, built: BuiltGraph) -> Shape:
    made: Shape = {"kind": node.kind.value}
    if node.wait is not None:
        made |= {"on_reject": node.wait.on_reject, "on_timeout": node.wait.on_timeout.value}
    if node.inner is not None:
        made |= {"graph": shape(built.inner[node.name])}
        made |= {"into": _projection(node.inner.into), "out": _projection(node.inner.out)}
    return made


def _projection(given: Mapping[str, str] | Projection | None) -> Any:
    if given is None:
        return None
    return dict(sorted(given.items())) if isinstance(given, Mapping) else _called(given)


def _called(function: Callable[..., Any]) -> Shape:
    """Return a function by its name, in a dict, so that it cannot be confused with a key of the same name."""
    return {"function": name_of(function)}


def _edge(edge: Edge) -> Shape:
    made: Shape = {"rank": edge.rank, "when": None if edge.when is None else edge.when.name}
    match edge.target:
        case To(node=node):
            return made | {"kind": "to", "targets": [node]}
        case Parallel(targets=targets, join=join, on_error=on_error):  # their order is the order of their updates
            return made | {"kind": "together", "targets": list(targets), "join": join, "on_error": on_error}
        case ForEach(node=node, over=over, join=join, on_error=on_error):
            key: Any = over if isinstance(over, str) else _called(over)
            return made | {"kind": "for each", "targets": [node], "over": key, "join": join, "on_error": on_error}
        case Choice(function=function, ways=ways):
            named = {way if isinstance(way, str) else repr(way): target for way, target in ways.items()}
            return made | {"kind": "choice", "by": name_of(function), "ways": dict(sorted(named.items()))}


def field_shape(field: Field) -> list[Any]:
    """Return the shape of a declared key: its type as text, the name of its reducer, whether it is not stored."""
    return [type_text(field.annotation), field.reducer.name, field.transient]


def type_text(annotation: Any) -> str:
    """Return a declared type as text, the same for all spellings and in every process.

    The notes of ``Annotated`` are left out: the reducer is named separately, and other notes do not concern the value.
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
        return BY_CLASS[annotation].name  # the name under which its values are stored
    named = getattr(annotation, "__qualname__", None) or getattr(annotation, "__name__", type(annotation).__qualname__)
    module = getattr(annotation, "__module__", "builtins")
    return str(named) if module in ("builtins", "typing") else f"{module}.{named}"


# How a difference affects a frame ---------------------------------------------------------------------------------
#
# ``blockers`` finds parts that certainly stop the run: a missing node or fan-out, a state that the schema cannot take.
# ``changed_meaning`` finds parts that would run, but may mean something else now. ``other_changes`` names the rest.


_UNDECLARED: Final = field_shape(Field("", reducer=replace))
"""The shape of a key of an open state that is not declared."""


def nodes_to_run(frame: Frame) -> list[str]:
    """Return the nodes that a frame needs to continue."""
    match frame.continuation:
        case NextNode(node=node):
            names = [node]
        case FanOut(targets=targets, join=join):
            names = [*targets, join or END]
        case None:
            names = [frame.last_node or frame.node_id]
        case _:
            names = []
    names += [task.node for task in frame.tasks if not task.done]
    return [name for name in dict.fromkeys(names) if name != END]


def fan_edge(graph: Shape, frame: Frame) -> Mapping[str, Any] | None:
    """Return the edge of a frame's fan-out, if the graph has it."""
    if not isinstance(frame.continuation, FanOut):
        return None
    wanted = (list(frame.continuation.targets), frame.continuation.join or END)
    edges: list[Mapping[str, Any]] = graph["edges"].get(frame.last_node or "", [])
    return next((edge for edge in edges if "join" in edge and (edge["targets"], edge["join"]) == wanted), None)


def missing_nodes(frame: Frame, present: BuiltGraph) -> list[str]:
    """Return the nodes to run that the graph does not have."""
    return [node for node in nodes_to_run(frame) if node not in present.nodes]


def blockers(frame: Frame, present: BuiltGraph) -> Iterator[str]:
    """Yield why a frame cannot continue in the present graph."""
    for node in missing_nodes(frame, present):
        yield f"node {node!r} is to run, but it no longer exists: name its replacement with nodes={{{node!r}: …}}"
    yield from _fan_out_blockers(frame, present)
    schema = present.schema
    if schema.snapshots:
        return  # the state's own class writes and reads the stored form
    for key in frame.state:
        if not schema.knows(key):
            yield f"the stored state has the key {key!r}, which no longer exists: rename or drop it with state="
    for task in frame.tasks:
        for key in dict.fromkeys((*task.update, *task.given)):
            if not schema.knows(key):
                yield (
                    f"the parallel node {task.node!r} has finished and wrote the key {key!r}, which no longer exists: "
                    "let the old graph finish the parallel nodes"
                )
    for name, field in schema.fields.items():
        if field.required and name not in frame.state:
            yield f"the state needs the key {name!r}, which is not stored and has no default: add it with state="


def _fan_out_blockers(frame: Frame, present: BuiltGraph) -> Iterator[str]:
    if not isinstance(frame.continuation, FanOut):
        return
    edge = fan_edge(shape(present), frame)
    branches = ", ".join(map(repr, frame.continuation.targets))
    if edge is None:
        yield (
            f"{branches} run in parallel after {frame.last_node!r}, then {frame.continuation.join or 'the end'!r}: "
            "the graph no longer has this fan-out; let the old graph finish it"
        )
        return
    for task in frame.tasks:
        key = task.key or ""
        if not (key.isdecimal() if edge["kind"] == "for each" else key in edge["targets"]):
            yield f"the result of the parallel node {task.node!r} is stored as {key!r}, which the fan-out no longer has"


def changed_meaning(frame: Frame, stored: Shape, present: BuiltGraph) -> Iterator[str]:
    """Yield the changes of parts that a frame depends on."""
    now = shape(present)
    for node in nodes_to_run(frame):
        was, kind = stored["nodes"].get(node), now["nodes"].get(node, {}).get("kind")
        if was is not None and kind is not None and was["kind"] != kind:
            yield f"node {node!r} is to run; it was a {was['kind']} and is now a {kind}: confirm it with a migration"
    before, after = fan_edge(stored, frame), fan_edge(now, frame)
    if before is not None and after is not None:
        if before["kind"] != after["kind"]:
            yield f"the fan-out after {frame.last_node!r} was {before['kind']!r} and is now {after['kind']!r}"
        elif before.get("over") != after.get("over"):
            yield f"the list that {after['targets'][0]!r} is mapped over changed: confirm it with a migration"
    yield from _changed_state(frame.state, stored["state"], now["state"])


def _changed_state(state: Mapping[str, Any], was: Shape, now: Shape) -> Iterator[str]:
    if was["snapshots"] != now["snapshots"]:
        yield "the state is now stored in another form (snapshot): convert it with state="
        return
    for key in sorted({*was["fields"], *state}):
        old, new = _field(was, key), _field(now, key)
        if old is None or new is None:
            continue  # ``blockers`` reports stored keys that no longer exist
        if old[0] != new[0] and not (old[2] and new[2]):
            yield f"state key {key!r} was declared {old[0]} and is now {new[0]}: convert it with state="
        if old[1] != new[1]:
            yield f"the reducer of state key {key!r} was {old[1]!r} and is now {new[1]!r}: confirm that the value fits"
        if new[2] and not old[2] and key in state:
            yield f"state key {key!r} is stored, but would no longer be: drop it with state="


def _field(state: Shape, key: str) -> list[Any] | None:
    found: list[Any] | None = state["fields"].get(key)
    return _UNDECLARED if found is None and state["open"] else found


def other_changes(frame: Frame, stored: Shape, now: Shape) -> Iterator[str]:
    """Yield the differences that do not affect a frame, those next to it first."""
    near = nodes_to_run(frame)
    for node in near:
        yield from _changes_at_node(node, node == frame.last_node and frame.continuation is None, stored, now)
    was, nodes = stored["nodes"], now["nodes"]
    yield from _listed("nodes added", nodes.keys() - was.keys())
    yield from _listed("nodes removed", was.keys() - nodes.keys())
    both = was.keys() & nodes.keys() - set(near)
    yield from _listed("nodes changed", (name for name in both if was[name] != nodes[name]))
    yield from _listed(
        "edges changed after", (name for name in both if stored["edges"].get(name) != now["edges"].get(name))
    )
    if stored["start"] != now["start"]:
        yield f"a run now starts at {now['start']!r}, not at {stored['start']!r}"
    fields, kept = now["state"]["fields"], stored["state"]["fields"]
    yield from _listed("state keys added", fields.keys() - kept.keys())
    yield from _listed("state keys removed", kept.keys() - fields.keys())
    yield from _listed("state keys changed", (key for key in fields.keys() & kept.keys() if fields[key] != kept[key]))
    if stored["state"]["open"] != now["state"]["open"]:
        yield f"the state now takes {'any key' if now['state']['open'] else 'only declared keys'}"


def _changes_at_node(node: str, routed_next: bool, stored: Shape, now: Shape) -> Iterator[str]:
    """Yield the changes at a node of the position. The run uses the node as it is now."""
    if node in stored["edges"] and stored["edges"][node] != now["edges"].get(node):
        when = "has finished but is not routed yet" if routed_next else "is to run"
        yield f"the edges after {node!r}, which {when}, changed: the run will follow the new edges"
    was, present = stored["nodes"].get(node, {}), now["nodes"].get(node, {})
    for name, what in (
        ("graph", "the graph inside it"),
        ("into", "what goes into it"),
        ("out", "what comes out of it"),
        ("on_reject", "where a rejection leads"),
        ("on_timeout", "what a timeout means"),
    ):
        if was.get(name) != present.get(name):
            yield f"{node!r} is to run, and {what} changed: the run will use the new version"


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    found = sorted(names)
    if found:
        yield f"{what}: {', '.join(map(repr, found))}"
