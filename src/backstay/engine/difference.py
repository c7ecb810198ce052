"""What the difference between two graphs means to one frame that stands in them.

``unfit`` finds what would stop the run with certainty, whatever anybody says: a node that is not there, a fan-out that
the graph does not have, a state that the schema cannot take. ``changed`` finds what would go on, but might mean
something else now. ``others`` names the rest, for people to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from backstay.engine.build import Built
from backstay.engine.edge import END
from backstay.engine.fingerprint import Shape, field_shape, shape
from backstay.engine.reducer import replace
from backstay.engine.schema import Field
from backstay.model.continuation import FanOut, NextNode
from backstay.model.frame import Frame

_UNDECLARED: Final = field_shape(Field("", reducer=replace))
"""What holds for a key of an open state that says nothing of it."""


def to_run(frame: Frame) -> list[str]:
    """Return the nodes that a frame needs in order to go on."""
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
    """Return the edge that a frame's fan-out comes from, if the graph has one."""
    if not isinstance(frame.continuation, FanOut):
        return None
    wanted = (list(frame.continuation.targets), frame.continuation.join or END)
    edges: list[Mapping[str, Any]] = graph["edges"].get(frame.last_node or "", [])
    return next((edge for edge in edges if "join" in edge and (edge["targets"], edge["join"]) == wanted), None)


# What stops a run -------------------------------------------------------------------------------------------------


def lost_nodes(frame: Frame, present: Built) -> list[str]:
    """Return the nodes to run that the graph does not have."""
    return [node for node in to_run(frame) if node not in present.nodes]


def unfit(frame: Frame, present: Built) -> Iterator[str]:
    """Yield why a frame cannot go on in the present graph."""
    for node in lost_nodes(frame, present):
        yield f"node {node!r} is to run and is not there any more: name the one in its place with nodes={{{node!r}: …}}"
    yield from _unfit_fan_out(frame, present)
    schema = present.schema
    if schema.snapshots:
        return  # what is stored is made and read by the state's own class
    for key in frame.state:
        if not schema.knows(key):
            yield f"the stored state has {key!r}, which the state does not have any more: rename or drop it with state="
    for task in frame.tasks:
        for key in dict.fromkeys((*task.update, *task.given)):
            if not schema.knows(key):
                yield (
                    f"{task.node!r} has finished beside others and wrote {key!r}, which the state does not have any "
                    "more: let the old graph finish what runs side by side"
                )
    for name, field in schema.fields.items():
        if field.required and name not in frame.state:
            yield f"the state needs {name!r}, which is not stored and has no default: add it with state="


def _unfit_fan_out(frame: Frame, present: Built) -> Iterator[str]:
    if not isinstance(frame.continuation, FanOut):
        return
    edge = fan_edge(shape(present), frame)
    branches = ", ".join(map(repr, frame.continuation.targets))
    if edge is None:
        yield (
            f"{branches} run side by side after {frame.last_node!r}, then {frame.continuation.join or 'the end'!r}: "
            "the graph has no such fan-out any more; let the old graph finish it"
        )
        return
    for task in frame.tasks:
        key = task.key or ""
        if not (key.isdecimal() if edge["kind"] == "for each" else key in edge["targets"]):
            yield f"what {task.node!r} did side by side with others is kept as {key!r}, which the fan-out does not have"


# What may mean something else -------------------------------------------------------------------------------------


def changed(frame: Frame, stored: Shape, present: Built) -> Iterator[str]:
    """Yield what a frame relies on and what is not as it was."""
    now = shape(present)
    for node in to_run(frame):
        was, kind = stored["nodes"].get(node), now["nodes"].get(node, {}).get("kind")
        if was is not None and kind is not None and was["kind"] != kind:
            yield f"node {node!r} is to run; it was a {was['kind']} and is a {kind} now: say that this is right"
    before, after = fan_edge(stored, frame), fan_edge(now, frame)
    if before is not None and after is not None:
        if before["kind"] != after["kind"]:
            yield f"the fan-out after {frame.last_node!r} was {before['kind']!r}, and is {after['kind']!r} now"
        elif before.get("over") != after.get("over"):
            yield f"what {after['targets'][0]!r} is mapped over changed while it runs: say that it is the same list"
    yield from _changed_state(frame.state, stored["state"], now["state"])


def _changed_state(state: Mapping[str, Any], was: Shape, now: Shape) -> Iterator[str]:
    if was["snapshots"] != now["snapshots"]:
        yield "what is stored of the state is made in another way (snapshot): convert it with state="
        return
    for key in sorted({*was["fields"], *state}):
        old, new = _field(was, key), _field(now, key)
        if old is None or new is None:
            continue  # what is stored and not known any more is found by ``unfit``
        if old[0] != new[0] and not (old[2] and new[2]):
            yield f"state key {key!r} was declared {old[0]} and is {new[0]} now: convert it with state="
        if old[1] != new[1]:
            yield f"state key {key!r} was reduced by {old[1]!r} and is by {new[1]!r} now: say that its value still fits"
        if new[2] and not old[2] and key in state:
            yield f"state key {key!r} is stored and would not be kept any more: drop it with state="


def _field(state: Shape, key: str) -> list[Any] | None:
    found: list[Any] | None = state["fields"].get(key)
    return _UNDECLARED if found is None and state["open"] else found


# The rest ---------------------------------------------------------------------------------------------------------


def others(frame: Frame, stored: Shape, now: Shape) -> Iterator[str]:
    """Yield the differences that do not keep a frame from going on, those next to it first."""
    near = to_run(frame)
    for node in near:
        yield from _near(node, node == frame.last_node and frame.continuation is None, stored, now)
    was, nodes = stored["nodes"], now["nodes"]
    yield from _listed("nodes added", nodes.keys() - was.keys())
    yield from _listed("nodes gone", was.keys() - nodes.keys())
    both = was.keys() & nodes.keys() - set(near)
    yield from _listed("nodes changed", (name for name in both if was[name] != nodes[name]))
    yield from _listed(
        "edges changed after", (name for name in both if stored["edges"].get(name) != now["edges"].get(name))
    )
    if stored["start"] != now["start"]:
        yield f"a run begins at {now['start']!r} now, not at {stored['start']!r}"
    fields, kept = now["state"]["fields"], stored["state"]["fields"]
    yield from _listed("state keys added", fields.keys() - kept.keys())
    yield from _listed("state keys gone", kept.keys() - fields.keys())
    yield from _listed("state keys changed", (key for key in fields.keys() & kept.keys() if fields[key] != kept[key]))
    if stored["state"]["open"] != now["state"]["open"]:
        yield f"the state takes {'any key' if now['state']['open'] else 'only declared keys'} now"


def _near(node: str, routed_next: bool, stored: Shape, now: Shape) -> Iterator[str]:
    """Yield what changed at a node that the frame stands at: it is taken as it is now."""
    if node in stored["edges"] and stored["edges"][node] != now["edges"].get(node):
        when = "has finished and is not routed yet" if routed_next else "is to run"
        yield f"the edges after {node!r}, which {when}, changed: the run goes on where the new ones lead"
    was, present = stored["nodes"].get(node, {}), now["nodes"].get(node, {})
    for name, what in (
        ("graph", "the graph inside it"),
        ("into", "what goes into it"),
        ("out", "what comes out of it"),
        ("on_reject", "where a rejection leads"),
        ("on_timeout", "what a timeout means"),
    ):
        if was.get(name) != present.get(name):
            yield f"{node!r} is to run, and {what} changed: it runs as it is now"


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    found = sorted(names)
    if found:
        yield f"{what}: {', '.join(map(repr, found))}"
