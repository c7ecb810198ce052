"""What the processes of ``test_langgraph_races`` and ``test_langgraph_kills`` run: small real graphs over a saver.

A saver is watched, never replaced: a mixin stands before the saver's own verbs. ``Meets`` lets a run wait, after it
has read its head, until the other run has read the same. ``Deadly`` tells what the saver has acknowledged, and ends
the process at a chosen verb. Both go before our saver and before LangGraph's own, so the two are measured alike.
"""

from __future__ import annotations

import asyncio
import gc
import json
import operator
import os
import select
import signal
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

from backstay.errors import Conflict
from backstay.langgraph import BackstaySaver
from backstay.langgraph.names import location_of

PATIENCE_S = 60.0

for store in ("directory", "postgres", "sqlite"):  # here, once, and not in each forked child
    import_module(f"backstay.store.{store}.store")
gc.freeze()  # all that was imported: a forked child would otherwise copy it page by page when it collects garbage

Saver = BaseCheckpointSaver[Any]
Answer = dict[str, Any]


def told(**words: Any) -> None:
    """Say something to the test, in one write: lines of several threads do not mix."""
    os.write(1, (json.dumps(words) + "\n").encode())


def name_of(config: RunnableConfig) -> str:
    """Return our own id of the checkpoint that a config names."""
    return location_of(config).name(config["configurable"]["checkpoint_id"])


def at(thread: str) -> RunnableConfig:
    """Return the config of a thread."""
    return {"configurable": {"thread_id": thread}}


# Races ------------------------------------------------------------------------------------------------------------


class Once:
    """A meeting that is gone to once; a subgraph reads too, and shall not wait."""

    def __init__(self, meet: Callable[[], None]) -> None:
        self.meet = meet
        self.is_over = False

    def __call__(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.meet()


MEETING: ContextVar[Once | None] = ContextVar("MEETING", default=None)
"""Where the run of this context meets the other one, once it has read its head."""


class Meets(Saver):
    """A saver whose readers wait for each other."""

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        found = super().get_tuple(config)
        if meeting := MEETING.get():
            meeting()
        return found

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        found = await super().aget_tuple(config)
        if meeting := MEETING.get():
            await asyncio.to_thread(meeting)
        return found


class MeetingBackstay(Meets, BackstaySaver):
    pass


class MeetingSqlite(Meets, SqliteSaver):
    pass


class MeetingMemory(Meets, InMemorySaver):
    pass


def open_meeting(kind: str, url: str) -> Saver:
    """Open a saver of a kind: ours, which raises or branches, or one of LangGraph's."""
    if kind == "SqliteSaver":
        saver = MeetingSqlite(sqlite3.connect(url, check_same_thread=False))
        saver.setup()
        return saver
    if kind == "InMemorySaver":
        return MeetingMemory()
    return MeetingBackstay(url, on_conflict="branch" if kind == "branch" else "raise")


def joined(old: list[str], new: list[str]) -> list[str]:
    """Do as ``operator.add``, whose signature Python 3.11 cannot read in several threads at once."""
    return old + new


class Talk(TypedDict):
    messages: Annotated[list[str], joined]


def build_talk(name: str, saver: Saver, shape: str) -> Any:
    """Build a graph of two nodes that add a message each.

    In the shape ``subgraph`` the first runs a graph of its own; in ``kept subgraph`` one whose state outlives the run,
    so that two runs meet inside it too.
    """

    def first(state: Talk) -> dict[str, list[str]]:
        return {"messages": [f"{name}: first"]}

    def second(state: Talk) -> dict[str, list[str]]:
        return {"messages": [f"{name}: second"]}

    inner = StateGraph(Talk).add_node("inside", first).add_edge(START, "inside")
    inside = inner.compile(checkpointer=True if shape == "kept subgraph" else None)

    def first_inside(state: Talk) -> dict[str, list[str]]:
        return {"messages": inside.invoke({"messages": []})["messages"][-1:]}

    graph = StateGraph(Talk)
    graph.add_node("first", first if shape == "plain" else first_inside)
    graph.add_node("second", second)
    return graph.add_edge(START, "first").add_edge("first", "second").compile(checkpointer=saver)


def words_of(name: str, start: str) -> list[str]:
    """Return what a run adds to the messages."""
    asked = [] if start == "resume" else [f"{name}: hello"]
    return [*asked, f"{name}: first", f"{name}: second"]


class Racer:
    """One of two that run a graph on the same thread."""

    def __init__(self, name: str, saver: Saver, meet: Callable[[], None]) -> None:
        self.name = name
        self.saver = saver
        self.meet = meet
        self._graphs: dict[tuple[str, str], Any] = {}

    def graph(self, shape: str = "plain", name: str = "reader") -> Any:
        """Return a graph over this one's saver; compiling one takes longer than running it."""
        if (shape, name) not in self._graphs:
            self._graphs[shape, name] = build_talk(name, self.saver, shape)
        return self._graphs[shape, name]

    def prepare(self, thread: str, start: str) -> list[str]:
        """Bring a thread to where the race begins; return its messages."""
        graph = build_talk("before", self.saver, "plain")
        if start != "fresh":
            graph.invoke(
                {"messages": ["question"]}, at(thread), interrupt_before=["first"] if start == "resume" else []
            )
        return self.messages(thread)

    def run(self, thread: str, start: str, shape: str, durability: str) -> Answer:
        """Run the graph, having met the other after the head was read; say how it ended."""
        graph = self.graph(shape, self.name)
        token = MEETING.set(Once(self.meet))
        try:
            result = graph.invoke(self._given(start), at(thread), durability=durability)
        except Conflict as error:
            return self._lost(error)
        finally:
            MEETING.reset(token)
        return {"name": self.name, "messages": result["messages"]}

    async def arun(self, thread: str, start: str, shape: str, durability: str) -> Answer:
        """Run the graph as a coroutine."""
        graph = self.graph(shape, self.name)
        MEETING.set(Once(self.meet))
        try:
            result = await graph.ainvoke(self._given(start), at(thread), durability=durability)
        except Conflict as error:
            return self._lost(error)
        return {"name": self.name, "messages": result["messages"]}

    def messages(self, thread: str) -> list[str]:
        """Read what the thread's messages are, through this one's saver."""
        found: list[str] = self.graph().get_state(at(thread)).values.get("messages", [])
        return found

    def remembered(self, thread: str) -> list[str]:
        """Read what the kept subgraph of the thread remembers."""
        config: RunnableConfig = {"configurable": {"thread_id": thread, "checkpoint_ns": "first"}}
        found = self.saver.get_tuple(config)
        return [] if found is None else found.checkpoint["channel_values"]["messages"]

    def all_messages(self, thread: str) -> list[list[str]]:
        """Read the messages of every checkpoint of the thread, newest first."""
        return [state.values.get("messages", []) for state in self.graph().get_state_history(at(thread))]

    def branches(self, thread: str) -> dict[str, list[str]]:
        """Read the messages at the head of each branch of the thread, by the branch's name."""
        assert isinstance(self.saver, BackstaySaver)
        history = self.graph().get_state_history(at(thread))
        said = {name_of(state.config): state.values["messages"] for state in history if state.values}
        return {branch.key.name: said[str(branch.head)] for branch in self.saver.store.thread(thread).branches()}

    def _lost(self, error: Conflict) -> Answer:
        return {"name": self.name, "error": type(error).__name__, "text": str(error)}

    def _given(self, start: str) -> Any:
        return None if start == "resume" else {"messages": [f"{self.name}: hello"]}


class ProcessRacer(Racer):
    """A racer in a process of its own, which meets the other through two fifos."""

    def __init__(self, name: str, kind: str, url: str, own: str, others: str) -> None:
        self._own, self._others = os.open(own, os.O_RDWR), os.open(others, os.O_RDWR)
        super().__init__(name, open_meeting(kind, url), self._meet)

    def _meet(self) -> None:
        os.write(self._others, b".")
        assert select.select([self._own], [], [], PATIENCE_S)[0], "the other one did not come"
        os.read(self._own, 1)

    def close(self) -> None:
        if isinstance(self.saver, BackstaySaver):
            self.saver.close()


# Kills ------------------------------------------------------------------------------------------------------------

Point = tuple[str, int, str]  # the verb, the step, and whether it is entered or has returned


class Deadly(Saver):
    """A saver that tells what it acknowledged, and ends its process at a point."""

    point: Point | None = None
    is_written = threading.Event()  # the result of the first step is acknowledged; a process has one saver

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: Any
    ) -> RunnableConfig:
        self._pass("put", metadata["step"], "entry")
        answer = super().put(config, checkpoint, metadata, new_versions)
        told(put=checkpoint["id"], log=checkpoint["channel_values"].get("log", []))
        self._pass("put", metadata["step"], "return")
        return answer

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        step = max([number for channel, value in writes if channel == "log" for number in value], default=0)
        self._pass("put_writes", step, "entry")
        super().put_writes(config, writes, task_id, task_path)
        channels = [channel for channel, _ in writes]
        told(writes=config["configurable"]["checkpoint_id"], step=step, task=task_id, channels=channels)
        if step == 1:
            self.is_written.set()
        self._pass("put_writes", step, "return")

    def _pass(self, *point: Any) -> None:
        if point == self.point:
            told(dies=point)
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyBackstay(Deadly, BackstaySaver):
    pass


class Boastful(DeadlyBackstay):
    """Says that a checkpoint is stored before it is: a mutant, to be caught."""

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: Any
    ) -> RunnableConfig:
        told(put=checkpoint["id"], log=checkpoint["channel_values"].get("log", []))
        return super().put(config, checkpoint, metadata, new_versions)


class DeadlySqlite(Deadly, SqliteSaver):
    pass


def open_deadly(url: str) -> Deadly:
    """Open our saver, or LangGraph's or a mutant if the URL says so."""
    if url.startswith("Boastful:"):
        return Boastful(url.partition(":")[2])
    if url.startswith("SqliteSaver:"):
        saver = DeadlySqlite(sqlite3.connect(url.partition(":")[2], check_same_thread=False))
        saver.setup()
        return saver
    return DeadlyBackstay(url)


class Steps(TypedDict):
    log: Annotated[list[int], operator.add]


def build_steps(saver: Saver, goal: int) -> Any:
    """Build a loop that counts to the goal; each step says that it begins and that it is done."""

    def step(state: Steps) -> dict[str, list[int]]:
        number = len(state["log"]) + 1
        told(begins=number)
        told(done=number)
        return {"log": [number]}

    graph = StateGraph(Steps).add_node("step", step).add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: "step" if len(state["log"]) < goal else END)
    return graph.compile(checkpointer=saver)


def live(url: str, thread: str, goal: int, durability: str, point: list[Any] | None) -> None:
    """Begin the run of a thread, or take it up, and go on to the goal or the point."""
    saver = open_deadly(url)
    saver.point = None if point is None else (point[0], point[1], point[2])
    _run(saver, thread, goal, durability)


def resume(url: str, thread: str, goal: int, durability: str, past: str) -> None:
    """Compare what is stored with what dead processes were told, then take their run up; say what was found."""
    saver = open_deadly(url)
    lines = [json.loads(line) for line in Path(past).read_text().splitlines()]
    missing = [line for line in lines if not _is_there(saver, thread, line)]
    _run(saver, thread, goal, durability)
    report = saver.store.thread(thread).check() if isinstance(saver, BackstaySaver) else True
    told(missing=missing, broken="" if report else str(report))


def live_side_by_side(url: str, thread: str, is_deadly: bool) -> None:
    """Run two steps side by side; the second, if deadly, ends the process once the first one's result is stored."""
    saver = open_deadly(url)

    def first(state: Steps) -> dict[str, list[int]]:
        told(begins=1)
        return {"log": [1]}

    def second(state: Steps) -> dict[str, list[int]]:
        told(begins=2)
        if is_deadly:
            assert saver.is_written.wait(PATIENCE_S)
            told(dies="side by side")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"log": [2]}

    graph = StateGraph(Steps).add_node("first", first).add_node("second", second)
    compiled: Any = graph.add_edge(START, "first").add_edge(START, "second").compile(checkpointer=saver)
    told(result=compiled.invoke({"log": []} if is_deadly else None, at(thread), durability="sync")["log"])


def _run(saver: Saver, thread: str, goal: int, durability: str) -> None:
    graph = build_steps(saver, goal)
    is_begun = saver.get_tuple(at(thread)) is not None  # not ``next``: that is empty if only the last put is missing
    config: RunnableConfig = {**at(thread), "recursion_limit": goal + 10}
    result = graph.invoke(None if is_begun else {"log": []}, config, durability=durability)
    told(result=result["log"], is_begun=is_begun)


def _is_there(saver: Saver, thread: str, line: Answer) -> bool:
    """Tell whether what was acknowledged is stored. Writes of a checkpoint that never came count as nothing."""
    id = line.get("put", line.get("writes"))
    if id is None:
        return True
    found = saver.get_tuple({"configurable": {"thread_id": thread, "checkpoint_ns": "", "checkpoint_id": id}})
    if "put" in line:
        return found is not None and found.checkpoint["channel_values"].get("log", []) == line["log"]
    kept = {(task, channel) for task, channel, _ in (found.pending_writes or [])} if found else set()
    return found is None or all((line["task"], channel) in kept for channel in line["channels"])
