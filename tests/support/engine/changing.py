"""Graphs that can be declared a little differently, and runs of them that wait somewhere: what a deployment meets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypedDict

import backstay
from backstay.engine.compatibility import Judgement
from backstay.engine.events import Status
from backstay.engine.graph import Graph
from backstay.engine.reducers import append
from backstay.model.checkpoint import Checkpoint

Declare = Callable[[Graph], object]


class State(TypedDict, total=False):
    question: str
    notes: Annotated[list[str], append]
    score: int


def noting(name: str) -> Declare:
    """Return the declaration of a node that writes down that it ran."""
    return lambda graph: graph.node(name, lambda state: {"notes": [name]})


def is_good(state: Any) -> bool:
    return True


CHAT: dict[str, Declare | None] = {
    "plan": noting("plan"),
    "search": noting("search"),
    "write": noting("write"),
    "plan to": lambda graph: graph.edge("plan", "search"),
    "search to": lambda graph: graph.edge("search", "write", when=is_good),
    "search else": lambda graph: graph.edge("search", "plan", fallback=True),
    "write to": lambda graph: graph.end("write"),
    "start": lambda graph: graph.start("plan"),
}

TEAM: dict[str, Declare | None] = {
    "plan": noting("plan"),
    "left": noting("left"),
    "ask": lambda graph: graph.barrier("ask"),
    "join": noting("join"),
    "plan to": lambda graph: graph.parallel("plan", ["left", "ask"], join="join"),
    "left to": lambda graph: graph.end("left"),
    "ask to": lambda graph: graph.end("ask"),
    "join to": lambda graph: graph.end("join"),
    "start": lambda graph: graph.start("plan"),
}


def made(steps: Mapping[str, Declare | None], name: str = "g", state: Any = State, **changed: Any) -> Graph:
    graph = Graph(name, state=state)
    for step in {**steps, **{key.replace("_", " "): step for key, step in changed.items()}}.values():
        if step is not None:
            step(graph)
    return graph


def chat(name: str = "g", state: Any = State, **changed: Any) -> Graph:
    return made(CHAT, name, state, **changed)


def parked(graph: Graph, **pauses: Any) -> Checkpoint:
    """Return the checkpoint at which a real run of this graph waits."""
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = graph.run_sync(thread, {"question": "why"}, **pauses)
        assert result.status is Status.INTERRUPTED
        found = thread.latest()
        assert found is not None
        return found


def reasons(judgement: Judgement) -> str:
    return "\n".join(reason for frame in judgement.frames for reason in frame.reasons)


def state_with(**changed: Any) -> Any:
    fields = {"question": str, "notes": Annotated[list[str], append], "score": int, **changed}
    return TypedDict("Changed", {name: kind for name, kind in fields.items() if kind is not None}, total=False)  # type: ignore[operator]  # made of a table


def inner(before: str = "look", **changed: Any) -> Graph:
    steps = {
        "look": noting("look"),
        "look to": lambda graph: graph.edge("look", "keep"),
        "keep": noting("keep"),
        "keep to": lambda graph: graph.end("keep"),
        "start": lambda graph: graph.start("look"),
    }
    graph = made(steps, "inner", **changed)
    graph.before = frozenset((before,)) if before else frozenset()
    return graph


def outer(within: Graph, **changed: Any) -> Graph:
    return chat("outer", search=lambda graph: graph.subgraph("search", within), **changed)


def deep_team(within: Graph, **changed: Any) -> Graph:
    return made(TEAM, ask=lambda graph: graph.subgraph("ask", within), **changed)
