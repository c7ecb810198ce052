"""What the processes of ``test_langgraph_effects`` run: graphs of every shape whose nodes use a tool, and die after it.

The tool notes each use in a file, in one write, so it is known however the process ends. A node that dies does so when
the tool has answered and before it returns: LangGraph cannot have been given anything that it wrote.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from backstay.errors import EffectUnknown
from backstay.langgraph import BackstaySaver
from backstay.langgraph.effects import aeffect, effect
from backstay.model.runs import EffectRecord, Outcome

Graph = Any
CONFIG: Any = {"configurable": {"thread_id": "order-7"}}
DYING = "dying after the tool"


class State(TypedDict):
    """What all graphs collect."""

    found: Annotated[list[str], operator.add]


class Tool:
    """Costs money each time it is used."""

    def __init__(self, folder: str, guarded: bool, dies: bool) -> None:
        self.folder, self.guarded, self.dies = Path(folder), guarded, dies

    def note(self, line: str) -> None:
        with open(self.folder / "uses", "a") as file:
            file.write(line + "\n")

    def use(self, item: str) -> str:
        self.note(item)
        return f"result of {item}"

    async def ause(self, item: str) -> str:
        await asyncio.sleep(0)
        return self.use(item)

    def call(self, item: str, dies_here: bool = True) -> str:
        """Use the tool as a node would."""
        result = effect(f"tool/{item}", self.use, item) if self.guarded else self.use(item)
        self.maybe_die(dies_here)
        return result

    async def acall(self, item: str) -> str:
        result = await (aeffect(f"tool/{item}", self.ause, item) if self.guarded else self.ause(item))
        self.maybe_die(True)
        return result

    def maybe_die(self, here: bool) -> None:
        if self.dies and here:
            self.note(DYING)
            os.kill(os.getpid(), signal.SIGKILL)


def uses(folder: Path) -> list[str]:
    """Return what the tool was used for, and when the process died, in that order."""
    return (folder / "uses").read_text().splitlines()


# Shapes -----------------------------------------------------------------------------------------------------------


def plain(tool: Tool, saver: BackstaySaver) -> Graph:
    """Put two nodes one after the other; the second one dies."""
    graph = StateGraph(State)
    graph.add_node("ask", lambda state: {"found": [tool.call("question", dies_here=False)]})
    graph.add_node("pay", lambda state: {"found": [tool.call("payment")]})
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "pay")
    graph.add_edge("pay", END)
    return graph.compile(checkpointer=saver)


def coroutine(tool: Tool, saver: BackstaySaver) -> Graph:
    """Make a node of a coroutine function."""

    async def pay(state: State) -> State:
        return {"found": [await tool.acall("payment")]}

    graph = StateGraph(State)
    graph.add_node("pay", pay)
    graph.add_edge(START, "pay")
    return graph.compile(checkpointer=saver)


def subgraph(tool: Tool, saver: BackstaySaver) -> Graph:
    """Put a graph into a node of a graph; its second node dies."""
    inner = StateGraph(State)
    inner.add_node("ask", lambda state: {"found": [tool.call("question", dies_here=False)]})
    inner.add_node("pay", lambda state: {"found": [tool.call("payment")]})
    inner.add_edge(START, "ask")
    inner.add_edge("ask", "pay")
    graph = StateGraph(State)
    graph.add_node("before", lambda state: {"found": []})
    graph.add_node("inside", inner.compile())
    graph.add_edge(START, "before")
    graph.add_edge("before", "inside")
    return graph.compile(checkpointer=saver)


def send(tool: Tool, saver: BackstaySaver) -> Graph:
    """Send three items to one node, one after the other because of the limit; the last one dies."""

    def pay(state: Any) -> State:
        return {"found": [tool.call(state["item"], dies_here=state["item"] == "c")]}

    graph = StateGraph(State)
    graph.add_node("pay", pay)
    graph.add_conditional_edges(START, lambda state: [Send("pay", {"item": item}) for item in "abc"], ["pay"])
    return graph.compile(checkpointer=saver)


def parallel(tool: Tool, saver: BackstaySaver) -> Graph:
    """Put two nodes side by side, with the same key each; the second one dies."""
    graph = StateGraph(State)
    graph.add_node("one", lambda state: {"found": [tool.call("payment", dies_here=False)]})
    graph.add_node("two", lambda state: {"found": [tool.call("payment")]})
    graph.add_edge(START, "one")
    graph.add_edge(START, "two")
    return graph.compile(checkpointer=saver)


def functional(tool: Tool, saver: BackstaySaver) -> Graph:
    """Use LangGraph's functional interface."""

    @task
    def pay(item: str) -> str:
        return tool.call(item)

    @entrypoint(checkpointer=saver)
    def workflow(given: Any) -> dict[str, list[str]]:
        return {"found": [pay("payment").result()]}

    return workflow


SHAPES: dict[str, Callable[[Tool, BackstaySaver], Graph]] = {
    "plain": plain,
    "coroutine": coroutine,
    "subgraph": subgraph,
    "send": send,
    "parallel": parallel,
    "functional": functional,
}


def run(shape: str, folder: str, guarded: bool, dies: bool, durability: str) -> None:
    """Run a graph, from its beginning or from where another process left it, and say what it found."""
    with BackstaySaver(str(Path(folder) / "agent.db")) as saver:
        graph = SHAPES[shape](Tool(folder, guarded, dies), saver)
        config = {**CONFIG, "max_concurrency": 1} if shape in ("send", "parallel") else CONFIG
        given: Any = None if saver.get_tuple(CONFIG) is not None else {"found": []}
        if shape == "coroutine":
            result = asyncio.run(graph.ainvoke(given, config, durability=durability))
        else:
            result = graph.invoke(given, config, durability=durability)
    os.write(1, json.dumps(result["found"]).encode())


# In the middle of an effect ---------------------------------------------------------------------------------------


def run_unknown(folder: str, dies: bool, way_on: str) -> None:
    """Run a graph whose tool ends the process before it answers; another process takes it up in one of three ways."""
    tool = Tool(folder, True, dies)

    def charge(idempotency_key: str) -> str:
        tool.note(f"charge {idempotency_key}")
        tool.maybe_die(True)
        return "charged"

    def look(record: EffectRecord) -> Outcome:
        noted = f"charge {record.idempotency_key}" in uses(Path(folder))
        return Outcome.done("looked up") if noted else Outcome.not_done()

    ways: dict[str, dict[str, Any]] = {"ask": {}, "again": {"idempotent": True}, "look": {"reconcile": look}}
    graph = StateGraph(State)
    graph.add_node("pay", lambda state: {"found": [effect("charge", charge, **ways[way_on])]})
    graph.add_edge(START, "pay")
    with BackstaySaver(str(Path(folder) / "agent.db")) as saver:
        compiled: Graph = graph.compile(checkpointer=saver)
        invoke = partial(compiled.invoke, None if saver.get_tuple(CONFIG) is not None else {"found": []}, CONFIG)
        try:
            found = invoke()["found"]
        except EffectUnknown as unknown:
            saver.store.thread("order-7").settle(unknown.record, Outcome.done("a person said so"), by="ann")
            found = ["asked", *invoke()["found"]]
    os.write(1, json.dumps(found).encode())
