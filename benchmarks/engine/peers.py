"""W1 as a graph of LangGraph: the same node in the same loop, with and without its savers, ``durability="sync"``.

Messages are in a channel with ``operator.add``, as in its documentation, or in its DeltaChannel.
"""

from __future__ import annotations

import contextlib
import operator
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

from benchmarks.engine.relay import Pause
from benchmarks.peers import DeltaState
from benchmarks.puts import CONFIG
from benchmarks.workload import Message, State, Step


class PlainState(TypedDict):
    """W1 as most graphs have it."""

    document: str
    messages: Annotated[list[Message], operator.add]
    scratch: dict[str, Any]


def run(first: State, steps: Sequence[Step], pause: Pause, saver: Any, delta: bool = False) -> None:
    """Do the steps with a saver, or with none."""
    left = iter(steps)
    last = steps[-1].scratch["turn"]

    def agent(_: Any) -> dict[str, Any]:
        pause()
        step = next(left)
        return {"messages": step.messages, "scratch": step.scratch}

    def more(state: Any) -> str:
        return END if state["scratch"]["turn"] == last else "agent"

    builder: Any = StateGraph(DeltaState if delta else PlainState)
    builder.add_node("agent", agent)
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", more, {END: END, "agent": "agent"})
    graph = builder.compile(checkpointer=saver)
    how = {} if saver is None else {"durability": "sync"}
    done = graph.invoke(first, {**CONFIG, "recursion_limit": len(steps) + 10}, **how)
    assert len(done["messages"]) == len(first["messages"]) + 2 * len(steps)


def run_memory(first: State, steps: Sequence[Step], pause: Pause) -> None:
    """Do the steps with the saver that keeps everything in memory."""
    run(first, steps, pause, InMemorySaver())


def run_sqlite(first: State, steps: Sequence[Step], pause: Pause, path: Path, delta: bool = False) -> None:
    """Do the steps in a new file."""
    with contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        run(first, steps, pause, SqliteSaver(connection), delta)
