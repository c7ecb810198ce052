"""Migrations: turn a position that an earlier graph stored into a position of the current graph.

A migration belongs to a graph and names the fingerprint that it starts from. It may rename nodes and rewrite the state;
a migration that does neither accepts the position unchanged. If it names a fingerprint ``to``, the next migration
continues from there. So each deployment adds one step, and older positions take all of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from backstay.engine.build import BuiltGraph
from backstay.engine.fingerprint import fingerprint_of, hex_of
from backstay.errors import InvalidInput
from backstay.model.frame import Continuation, FanOut, Frame, NextNode, Task

if TYPE_CHECKING:
    from backstay.engine.declaration import Declaration

StateFunction = Callable[[dict[str, Any]], Mapping[str, Any]]

_HEX: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{16})")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from one fingerprint to another."""

    from_hash: int
    state: StateFunction | None = None  # takes a copy of the stored state and returns the new state
    nodes: Mapping[str, str] = field(default_factory=dict)  # old name -> new name
    to_hash: int | None = None  # None = the current graph


class MigrationStepFailed(Exception):
    """A migration step failed. The caller, which knows the position, turns this into a MigrationFailed."""

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
    """Register a migration from the graph with this fingerprint (a number, or 16 hex digits).

    ``state`` takes a copy of a stored state and returns the new one; ``nodes`` maps old names to new ones. Without
    either, stored positions are accepted unchanged. ``to`` is the fingerprint that it leads to: by default the current
    graph's, otherwise another migration continues from there.
    """
    if state is not None and not callable(state):
        raise InvalidInput(
            f"state= of a migration of graph {graph.name!r} must be a function, not {type(state).__name__}"
        )
    texts = [None] if not isinstance(nodes or {}, Mapping) else [*(nodes or {}), *(nodes or {}).values()]
    if not all(isinstance(name, str) and name for name in texts):
        raise InvalidInput(f"nodes= of a migration of graph {graph.name!r} must map old names to new names")
    step = Migration(
        parse_hash(from_hash, "from_hash"), state, dict(nodes or {}), None if to is None else parse_hash(to, "to")
    )
    if step.to_hash == step.from_hash:
        raise InvalidInput(f"a migration of graph {graph.name!r} leads from 0x{hex_of(step.from_hash)} to itself")
    if step.from_hash in graph.migrations:
        raise InvalidInput(
            f"graph {graph.name!r} already has a migration from 0x{hex_of(step.from_hash)}",
            hint="Use one migration: it takes both state= and nodes=",
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
            f"{what} is {given!r:.40}, which is not a fingerprint",
            hint="Pass an unsigned 64-bit number, or 16 hexadecimal digits",
        )
    return int(found[1], 16)


def migration_chain(built: BuiltGraph, from_hash: int) -> tuple[Migration, ...] | None:
    """Return the steps from a fingerprint to the current graph; None if they do not lead there."""
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


def migrate_frame(frame: Frame, steps: Sequence[Migration], over_items: bool) -> Frame:
    """Return a frame after these steps. Raises MigrationStepFailed if one fails; the given frame does not change.

    ``over_items``: its fan-out runs one node for each item, so its tasks are identified by numbers, not by nodes.
    Frames inside its tasks belong to other graphs and stay unchanged.
    """
    for step in steps:
        if step.nodes:
            try:
                frame = _renamed(frame, step.nodes, over_items)
            except InvalidInput as error:
                raise MigrationStepFailed(step, f"gives no valid position: {error.what}") from error
        if step.state is not None:
            try:
                state: Any = step.state(copy.deepcopy(dict(frame.state)))
            except Exception as error:
                raise MigrationStepFailed(step, f"raised {type(error).__name__}") from error
            if not isinstance(state, Mapping):
                raise MigrationStepFailed(step, f"returned {type(state).__name__}, not a mapping of keys to values")
            if not all(isinstance(key, str) for key in state):
                raise MigrationStepFailed(step, "returned a state with keys that are not text")
            frame = replace(frame, state=dict(state))
    return frame


def _renamed(frame: Frame, names: Mapping[str, str], over_items: bool) -> Frame:
    def rename(name: str) -> str:
        return names.get(name, name)

    visits: dict[str, int] = {}
    for node, count in frame.visits.items():  # when two nodes become one, their visits add up
        visits[rename(node)] = visits.get(rename(node), 0) + count
    continuation: Continuation | None = frame.continuation
    branches: tuple[str, ...] = ()
    match continuation:
        case NextNode(node=node):
            continuation = NextNode(rename(node))
        case FanOut(targets=targets, join=join):
            continuation = FanOut(tuple(map(rename, targets)), None if join is None else rename(join))
            branches = () if over_items else targets
    path = [entry.partition("[") for entry in frame.path]  # ``node`` or ``node[key]``
    return replace(
        frame,
        node_id=rename(frame.node_id),
        last_node=None if frame.last_node is None else rename(frame.last_node),
        continuation=continuation,
        visits=visits,
        path=tuple(rename(node) + bracket + key for node, bracket, key in path),
        tasks=tuple(_renamed_task(task, rename, branches) for task in frame.tasks),
    )


def _renamed_task(task: Task, rename: Callable[[str], str], branches: Sequence[str]) -> Task:
    """Rename a task's node, and its key if that names a branch; after a reroute, the two may be different nodes."""
    key = task.key
    task = replace(task, node=rename(task.node), left={rename(node): visit for node, visit in task.left.items()})
    if key is None or key not in branches:
        return task
    frames = tuple(
        replace(frame, fanout_key=rename(key)) if frame.fanout_key == key else frame for frame in task.frames
    )
    return replace(task, key=rename(key), frames=frames)
