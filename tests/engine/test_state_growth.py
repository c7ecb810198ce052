"""What a step costs does not grow with the steps before it: neither in the store nor in memory."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest

import backstay
from backstay import Graph
from backstay.engine import Status
from backstay.engine.reducers import append
from backstay.engine.triggers import every
from support.running import Show, effort

TEXT = "x" * 300
FIRST, LAST = 1_000, min(10_000, 3_000 * effort())


class Chat(TypedDict, total=False):
    messages: Annotated[list[str], append]
    instructions: str
    count: int
    target: int


def looping(name: str = "chat", text: str = TEXT) -> Graph:
    """Return a graph whose one node appends a message until there are enough."""
    graph = Graph(name, state=Chat, limit=1_000_000)

    def speak(state: Chat) -> dict[str, Any]:
        number = state.get("count", 0) + 1
        return {"messages": [f"{number:06d}{text}"] if text else [], "count": number}

    graph.node("speak", speak)
    graph.edge("speak", "speak", when=lambda state: state["count"] < state["target"], name="more")
    graph.start("speak")
    graph.end("speak")
    return graph


def nested(levels: int) -> Graph:
    """Return a graph that has another inside, and so on; the innermost does the work."""
    graph = looping()
    for level in range(levels):
        outer = Graph(f"level{level}", state=Chat)
        outer.subgraph("in", graph)
        outer.start("in")
        outer.end("in")
        graph = outer
    return graph


def stored_bytes(graph: Graph, steps: int) -> int:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = graph.run_sync(thread, {"target": steps, "instructions": TEXT * 100})
        assert (result.status, len(result.values["messages"])) == (Status.COMPLETED, steps)
        found = thread.stats()
        assert found.checkpoints > steps
        return found.stored_bytes


@pytest.mark.parametrize("levels", [0, 2])
def test_bytes_for_each_step_do_not_grow_with_the_steps(show: Show, levels: int) -> None:
    """A copy of the state, or of the path, in each step would double them whenever the steps are doubled."""
    graph = nested(levels)
    sizes = {steps: stored_bytes(graph, steps) for steps in (200, 400, 800)}

    early = (sizes[400] - sizes[200]) / 200
    late = (sizes[800] - sizes[400]) / 400
    show(
        f"bytes for a step of 306 new bytes, {levels} levels deep, steps 200-400 and 400-800",
        f"{early:.0f}, {late:.0f}",
    )
    assert late < 1.1 * early
    assert late < 3_000


def grown(graph: Graph, early: int, late: int, **options: Any) -> tuple[int, int]:
    """Return the bytes that the program held at an early and at a late step of one run."""
    held: dict[int, int] = {}

    def measure(state: Chat) -> bool:
        if state["count"] in (early, late):
            gc.collect()
            held[state["count"]] = tracemalloc.get_traced_memory()[0]
        return state["count"] < state["target"]

    graph._edges.clear()
    graph.edge("speak", "speak", when=measure)
    graph.end("speak")
    tracemalloc.start()
    try:
        result = graph.run_sync(options.pop("thread", None), {"target": late + 1}, **options)
    finally:
        tracemalloc.stop()
    assert (result.status, result.steps) == (Status.COMPLETED, late + 1)
    return held[early], held[late]


PATH_BYTES_PER_STEP = 9
"""A run remembers its path: a pointer for each step, and some room to grow."""


@pytest.mark.effort
def test_memory_is_flat_over_thousands_of_steps_without_a_store(show: Show) -> None:
    early, late = grown(looping(text=""), FIRST, LAST)

    show(f"memory after {FIRST:,} and {LAST:,} steps without a store", f"{early:,} {late:,} bytes")
    assert late - early < (LAST - FIRST) * PATH_BYTES_PER_STEP + 64_000


@pytest.mark.effort
def test_memory_is_flat_over_thousands_of_steps_on_sqlite(show: Show, tmp_path: Path) -> None:
    with backstay.open(tmp_path / "store.db") as store:
        graph = looping(text="")
        early, late = grown(graph, FIRST, LAST, thread=store.thread("t"), trigger=every(n=100))

    show(f"memory after {FIRST:,} and {LAST:,} steps on SQLite, stored every 100", f"{early:,} {late:,} bytes")
    assert late - early < (LAST - FIRST) * PATH_BYTES_PER_STEP + 256_000


def test_memory_is_flat_in_a_nested_graph(show: Show) -> None:
    inner = looping("inner", text="")
    outer = Graph("outer", state=Chat)
    outer.subgraph("in", inner)
    outer.start("in")
    outer.end("in")
    held: dict[int, int] = {}

    def measure(state: Chat) -> bool:
        if state["count"] in (500, 3_000):
            gc.collect()
            held[state["count"]] = tracemalloc.get_traced_memory()[0]
        return state["count"] < state["target"]

    inner._edges.clear()
    inner.edge("speak", "speak", when=measure)
    inner.end("speak")
    tracemalloc.start()
    try:
        outer.run_sync(None, {"target": 3_001}).raise_for_status()
    finally:
        tracemalloc.stop()

    show("memory after 500 and 3,000 steps inside another graph", f"{held[500]:,} {held[3_000]:,} bytes")
    assert held[3_000] - held[500] < 2_500 * PATH_BYTES_PER_STEP + 64_000
