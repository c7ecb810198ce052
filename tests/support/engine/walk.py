"""Graphs whose nodes write down that they ran: in the state, and in the program's memory, which a resume shares."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import backstay
from backstay import Graph
from backstay.engine import Result
from backstay.engine.reducers import add, append

Node = Callable[..., Any]


class State(TypedDict, total=False):
    seen: Annotated[list[str], append]
    count: Annotated[int, add]
    note: str
    other: str
    items: list[Any]


class Walk:
    """What ran, in order, over all runs and resumes of a test."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def node(self, name: str, function: Node | None = None) -> Node:
        """Return a node that takes note of itself and then does what it is given, if anything."""

        def run(state: Any, ctx: Any) -> Any:
            self.ran.append(name if ctx.key is None or ctx.key == name else f"{name}[{ctx.key}]")
            more = {} if function is None else function(state, ctx)
            return {"seen": [name], **(more or {})}

        return run

    def chain(self, *names: str, graph: str = "g", **options: Any) -> Graph:
        """Return a graph of nodes one after the other."""
        made = Graph(graph, state=State, **options)
        for name in names:
            made.node(name, self.node(name))
        for source, target in pairwise(names):
            made.edge(source, target)
        made.start(names[0])
        made.end(names[-1])
        return made

    def fan(self, *branches: str, graph: str = "g", on_error: str = "fail_fast", **options: Any) -> Graph:
        """Return a graph that goes from ``split`` to these branches side by side, and then to ``join``."""
        made = Graph(graph, state=State, **options)
        for name in ("split", *branches, "join"):
            made.node(name, self.node(name))
        made.parallel("split", branches, join="join", on_error=on_error)
        made.start("split")
        made.end("join")
        return made


def replace_node(graph: Graph, name: str, function: Node, **options: Any) -> None:
    """Put another function in a node's place: mended code, or broken."""
    graph._nodes[:] = [node for node in graph._nodes if node.name != name]
    graph.node(name, function, **options)


def head(thread: backstay.Thread) -> backstay.Checkpoint:
    found = thread.latest()
    assert found is not None
    return found


def asked(result: Result) -> list[str]:
    """Return the nodes that a result's interrupts are about."""
    return [str(record.interrupt.node) for record in result.interrupts]
