"""W1 as a graph of ours: one node in a loop, which returns two messages and a scratch that were made before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import backstay
from backstay import Graph
from backstay.engine import END
from backstay.engine.reducers import append
from benchmarks.bench import THREAD
from benchmarks.engine.relay import Pause
from benchmarks.workload import Message, State, Step


class Chat(TypedDict):
    """The state of W1."""

    document: str
    messages: Annotated[list[Message], append]
    scratch: dict[str, Any]


def chat(steps: Sequence[Step], pause: Pause) -> Graph:
    """Return a graph that does these steps, whatever its state was before."""
    left = iter(steps)
    last = steps[-1].scratch["turn"]
    graph = Graph("chat", state=Chat, limit=len(steps) + 1)

    @graph.node
    def agent(_: Chat) -> dict[str, Any]:
        pause()
        step = next(left)
        return {"messages": step.messages, "scratch": step.scratch}

    def more(state: Chat) -> str:
        return "stop" if state["scratch"]["turn"] == last else "again"

    graph.start("agent")
    graph.choose("agent", more, {"again": "agent", "stop": END})
    return graph


def run(first: State, steps: Sequence[Step], pause: Pause, url: str | None) -> None:
    """Do the steps in a new store, or in none."""
    graph = chat(steps, pause)
    if url is None:
        done = graph.run_sync(None, first).raise_for_status()
    else:
        with backstay.open(url) as store:
            done = graph.run_sync(store.thread(THREAD), first).raise_for_status()
    assert len(done.values["messages"]) == len(first["messages"]) + 2 * len(steps)
