"""Migrations: how a position that an earlier graph stored becomes one of the present graph.

A migration belongs to a graph and names the fingerprint it comes from. It may rename nodes and rewrite the state; one
that does neither says that the position is fine as it is. One that names where it leads (``to``) is followed by the
next: so each deployment adds one step, and older positions take all of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from backstay.engine.build import Built
from backstay.engine.fingerprint import fingerprint_of, hex_of
from backstay.errors import InvalidInput
from backstay.model.continuation import Continuation, FanOut, NextNode
from backstay.model.frame import Frame, Task

if TYPE_CHECKING:
    from backstay.engine.declaration import Declaration

StateFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
Rename = Callable[[str], str]

_HEX: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{16})")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from one fingerprint to another."""

    from_hash: int
    state: StateFunction | None = None  # of a copy of the stored state: returns the new one
    nodes: Mapping[str, str] = field(default_factory=dict)  # old name -> new name
    to_hash: int | None = None  # None = the present graph, whatever it is


class BadStep(Exception):
    """A migration that could not be carried out; whoever knows the place makes a real error of it."""

    def __init__(self, step: Migration, problem: str) -> None:
        super().__init__(problem)
        self.step = step
        self.problem = problem


def add_migration(
    graph: Declaration,
    from_hash: int | str,
    *,
    state: StateFunction | None = None,
    nodes: Mapping[str, str] | None = None,
    to: int | str | None = None,
) -> Migration:
    """Say how positions stored by the graph with this fingerprint (a number, or 16 hex digits) are to be read.

    ``state`` takes a copy of a stored state and returns the new one; ``nodes`` maps old names to new ones. Without
    either, such positions are accepted as they are. ``to`` is the fingerprint it leads to: by default the present
    graph's, else another migration goes on from there.
    """
    step = Migration(
        parse_hash(from_hash, "from_hash"),
        _check_state_function(state, graph.name),
        _check_nodes(nodes or {}, graph.name),
        None if to is None else parse_hash(to, "to"),
    )
    if step.to_hash == step.from_hash:
        raise InvalidInput(f"a migration of graph {graph.name!r} leads from 0x{hex_of(step.from_hash)} to itself")
    if step.from_hash in graph.migrations:
        raise InvalidInput(
            f"graph {graph.name!r} has a migration from 0x{hex_of(step.from_hash)} already",
            hint="Do everything in one: state= and nodes= go together",
        )
    graph.migrations[step.from_hash] = step
    return step


def parse_hash(given: object, what: str) -> int:
    """Return a fingerprint given as a number or as 16 hexadecimal digits."""
    if type(given) is int and 0 <= given < 2**64:
        return given
    found = _HEX.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise InvalidInput(
            f"{what} is {given!r:.40}, which is no fingerprint",
            hint="Pass an unsigned 64-bit number, or 16 hexadecimal digits",
        )
    return int(found[1], 16)


def chain(built: Built, from_hash: int) -> tuple[Migration, ...] | None:
    """Return the steps from a fingerprint to the present graph; None if they do not lead there."""
    present = fingerprint_of(built)
    steps: dict[int, Migration] = {}
    at = from_hash
    while at != present:
        step = built.migrations.get(at)
        if step is None or at in steps:
            return None
        steps[at] = step
        at = present if step.to_hash is None else step.to_hash
    return tuple(steps.values())


def moved(frame: Frame, steps: Sequence[Migration], over_items: bool) -> Frame:
    """Return a frame after these steps; raise BadStep and leave the frame as it is.

    ``over_items``: its fan-out is one node for each item, so its tasks are told apart by numbers, not by nodes. Frames
    inside its tasks belong to other graphs and stay.
    """
    for step in steps:
        if step.nodes:
            try:
                frame = _renamed(frame, _renaming(step.nodes), over_items)
            except InvalidInput as error:
                raise BadStep(step, f"gives no position: {error.what}") from error
        if step.state is not None:
            frame = replace(frame, state=_new_state(step, step.state, frame.state))
    return frame


def _new_state(step: Migration, function: StateFunction, state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        given: Any = function(copy.deepcopy(dict(state)))
    except Exception as error:
        raise BadStep(step, f"raised {type(error).__name__}") from error
    if not isinstance(given, Mapping):
        raise BadStep(step, f"returned {type(given).__name__}, not a mapping of keys to values")
    if not all(isinstance(key, str) for key in given):
        raise BadStep(step, "returned a state with keys that are not text")
    return dict(given)


def _renaming(names: Mapping[str, str]) -> Rename:
    return lambda name: names.get(name, name)


def _renamed(frame: Frame, rename: Rename, over_items: bool) -> Frame:
    visits: dict[str, int] = {}
    for node, count in frame.visits.items():  # of two nodes that become one, no visit may be counted twice
        visits[rename(node)] = visits.get(rename(node), 0) + count
    return replace(
        frame,
        node_id=rename(frame.node_id),
        last_node=None if frame.last_node is None else rename(frame.last_node),
        continuation=_renamed_continuation(frame.continuation, rename),
        visits=visits,
        path=_renamed_path(frame.path, rename),
        tasks=tuple(_renamed_task(task, rename, () if over_items else _targets(frame)) for task in frame.tasks),
    )


def _renamed_continuation(continuation: Continuation | None, rename: Rename) -> Continuation | None:
    match continuation:
        case NextNode(node=node):
            return NextNode(rename(node))
        case FanOut(targets=targets, join=join):
            return FanOut(tuple(map(rename, targets)), None if join is None else rename(join))
        case _:
            return continuation


def _renamed_path(path: Sequence[str], rename: Rename) -> tuple[str, ...]:
    """Rename in ``node`` and ``node[key]``; no name has a bracket in it."""
    split = [entry.partition("[") for entry in path]
    return tuple(rename(node) + bracket + key for node, bracket, key in split)


def _targets(frame: Frame) -> tuple[str, ...]:
    return frame.continuation.targets if isinstance(frame.continuation, FanOut) else ()


def _renamed_task(task: Task, rename: Rename, branches: Sequence[str]) -> Task:
    """Rename a task's node, and its key if that is the name of a branch: another node may run there by now."""
    key = task.key
    task = replace(task, left={rename(node): visit for node, visit in task.left.items()})
    if key is None or key not in branches:
        return replace(task, node=rename(task.node))
    frames = tuple(
        replace(frame, fanout_key=rename(key)) if frame.fanout_key == key else frame for frame in task.frames
    )
    return replace(task, node=rename(task.node), key=rename(key), frames=frames)


def _check_state_function(state: Any, graph: str) -> Any:
    if state is not None and not callable(state):
        raise InvalidInput(f"a migration of graph {graph!r} has a state= that is {type(state).__name__}, no function")
    return state


def _check_nodes(nodes: Mapping[str, str], graph: str) -> dict[str, str]:
    texts = [*nodes, *nodes.values()] if isinstance(nodes, Mapping) else [None]
    if not all(isinstance(name, str) and name for name in texts):
        raise InvalidInput(f"a migration of graph {graph!r} has nodes= that do not map old names to new names")
    return dict(nodes)
