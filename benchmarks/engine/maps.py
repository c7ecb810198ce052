"""A map over subgraphs: what one branch costs, whether there are few or many of them."""

from __future__ import annotations

import statistics
import time
from typing import Annotated, TypedDict

import backstay
from backstay.engine.reducers import append
from benchmarks.bench import Bench
from benchmarks.table import Row, Target

FEW, MANY = 50, 1600
GROWTH = Target(1.5)


class Outer(TypedDict, total=False):
    """The state around the branches."""

    items: list[int]
    found: Annotated[list[int], append]


class Inner(TypedDict, total=False):
    """The state of one branch."""

    item: int
    found: Annotated[list[int], append]


def run(bench: Bench) -> None:
    """Measure few branches and many; each has three nodes, and each commit is stored."""
    bench.table.begin("engine: map over subgraphs of three nodes, in memory, the time of one branch")
    count = bench.pick(MANY, 400)
    few = statistics.median(_branch_s(FEW) for _ in range(5))
    many = statistics.median(_branch_s(count) for _ in range(bench.pick(3, 1)))
    bench.table.add(Row(f"{FEW} branches", few))
    name = f"{FEW} branches"
    bench.table.add(Row(f"{count:,} branches", many, other=few, other_name=name, target=GROWTH))


def _branch_s(count: int) -> float:
    inner = backstay.Graph("inner", state=Inner)
    inner.node("one", lambda state: {"item": state["item"] + 1})
    inner.node("two", lambda state: {"item": state["item"] + 1})
    inner.node("three", lambda state: {"found": [state["item"]]})
    inner.edge("one", "two")
    inner.edge("two", "three")
    inner.start("one")
    inner.end("three")
    graph = backstay.Graph("outer", state=Outer)
    graph.node("split", lambda state: None)
    graph.subgraph("each", inner, into=lambda state, item: {"item": item}, out={"found": "found"})
    graph.map("split", "each", over="items")
    graph.start("split")
    with backstay.open("memory:") as store:
        began = time.perf_counter()
        result = graph.run_sync(store.thread("t"), {"items": list(range(count))})
        assert result.values["found"] == [item + 2 for item in range(count)]
        return (time.perf_counter() - began) / count
