"""Threads to import from LangGraph's own savers: half answered, forked, failed, fanned out; and those savers."""

from __future__ import annotations

import operator
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import psycopg
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt
from psycopg import sql
from psycopg.rows import dict_row

from backstay.langgraph.importer.importer import import_langgraph
from backstay.store.open import open_backend
from backstay.thread.store import Store, make_services
from support.crash.import_victims import Mortal
from support.postgres import PostgresServer

Graph = Any  # Pregel's type parameters say nothing here
Saver = BaseCheckpointSaver[Any]


def config_of(thread: str, **more: Any) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, **more}}


# A talk with a person in it -----------------------------------------------------------------------------------------


class Talk(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    turns: int
    share: float
    note: str | None
    scratch: bytes


def answer(state: Talk) -> Talk:
    number = len(state["messages"])
    turns = state.get("turns", 0) + 1
    said = AIMessage(f"answer {number}", id=f"a{number}")
    return {"messages": [said], "turns": turns, "share": turns / 3, "note": None, "scratch": b"\0\xff" * turns}


def approve(state: Talk) -> Talk:
    said = interrupt({"question": "go on?", "turn": state["turns"]})
    return {"messages": [HumanMessage(str(said), id=f"h{len(state['messages'])}")]}


def talk_graph() -> Any:
    return (
        StateGraph(Talk)
        .add_node("answer", answer)
        .add_node("approve", approve)
        .add_edge(START, "answer")
        .add_edge("answer", "approve")
        .add_edge("approve", END)
    )


def tell_talk(graph: Graph, thread: str) -> None:
    """Two rounds, a fork from the middle of the first, and a question that nobody has answered."""
    for word in ("one", "two"):
        graph.invoke({"messages": [HumanMessage(word, id=word)]}, config_of(thread))
        graph.invoke(Command(resume=f"yes to {word}"), config_of(thread))
    early = list(graph.get_state_history(config_of(thread)))[-2]
    forked = graph.update_state(early.config, {"messages": [HumanMessage("instead", id="instead")]})
    graph.invoke(None, forked)


def go_on_talking(graph: Graph, thread: str) -> Any:
    first = graph.invoke(Command(resume="at last"), config_of(thread))
    return first, graph.invoke({"messages": [HumanMessage("more", id="more")]}, config_of(thread))


# A graph in a graph -------------------------------------------------------------------------------------------------


class Words(TypedDict, total=False):
    words: Annotated[list[str], operator.add]


def nested_graph() -> Any:
    def ask(_: Words) -> Words:
        return {"words": [interrupt("a word?")]}

    inner = (
        StateGraph(Words)
        .add_node("begin", lambda _: {"words": ["inner"]})
        .add_node("ask", ask)  # type: ignore[arg-type]  # its node types know no plain function with two types
        .add_edge(START, "begin")
        .add_edge("begin", "ask")
    )
    return (
        StateGraph(Words)
        .add_node("before", lambda _: {"words": ["before"]})
        .add_node("inner", inner.compile())
        .add_edge(START, "before")
        .add_edge("before", "inner")
    )


def tell_nested(graph: Graph, thread: str) -> None:
    graph.invoke({"words": []}, config_of(thread))
    graph.invoke(Command(resume="said"), config_of(thread))
    graph.invoke({"words": ["again"]}, config_of(thread))  # and it waits inside


def go_on_nested(graph: Graph, thread: str) -> Any:
    return graph.invoke(Command(resume="then"), config_of(thread))


# Tasks side by side, some done, one waiting, one failed -------------------------------------------------------------


class Job(TypedDict):
    number: int


def fan_graph(breaks: list[bool]) -> Any:
    def work(job: Job) -> Words:
        if job["number"] == 1:
            return {"words": [interrupt(f"job {job['number']}?")]}
        if job["number"] == 2 and breaks and breaks.pop():
            raise RuntimeError("job 2 broke")
        return {"words": [f"job {job['number']}"]}

    def jobs(_: Words) -> list[Send]:
        return [Send("work", {"number": number}) for number in range(4)]

    return (
        StateGraph(Words)
        .add_node("plan", lambda _: {"words": ["plan"]})
        .add_node("work", work)  # type: ignore[arg-type]
        .add_edge(START, "plan")
        .add_conditional_edges("plan", jobs, ["work"])
    )


def tell_fan(graph: Graph, thread: str) -> None:
    try:
        graph.invoke({"words": []}, config_of(thread))
    except RuntimeError:
        return
    raise AssertionError("job 2 was to break")


def go_on_fanning(graph: Graph, thread: str) -> Any:
    waiting = graph.invoke(None, config_of(thread))
    return waiting["words"], graph.invoke(Command(resume="job 1 answered"), config_of(thread))


# Values that are made of writes -------------------------------------------------------------------------------------


def extend(state: list[str], writes: Sequence[list[str]]) -> list[str]:
    return [*state, *(word for words in writes for word in words)]


class Diary(TypedDict, total=False):
    pages: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=3)]


def diary_graph() -> Any:
    def write(state: Diary) -> Diary:
        return {"pages": [f"page {len(state.get('pages', []))}"]}

    return (
        StateGraph(Diary)
        .add_node("left", write)
        .add_node("right", write)
        .add_edge(START, "left")
        .add_edge(START, "right")
    )


def tell_diary(graph: Graph, thread: str) -> None:
    for _ in range(4):
        graph.invoke({"pages": ["in"]}, config_of(thread))
    early = list(graph.get_state_history(config_of(thread)))[3]
    graph.invoke(None, graph.update_state(early.config, {"pages": ["aside"]}, as_node="left"))


def go_on_writing(graph: Graph, thread: str) -> Any:
    return graph.invoke({"pages": ["on"]}, config_of(thread))


# All of them --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """A graph, what was done with it, and how it goes on."""

    build: Callable[[], Any]
    tell: Callable[[Graph, str], None]
    go_on: Callable[[Graph, str], Any]


STORIES = {
    "talk": Story(talk_graph, tell_talk, go_on_talking),
    "nested": Story(nested_graph, tell_nested, go_on_nested),
    "fan": Story(lambda: fan_graph([]), tell_fan, go_on_fanning),
    "diary": Story(diary_graph, tell_diary, go_on_writing),
}


def tell(saver: Saver, *names: str) -> None:
    """Let the stories happen, each in the thread of its name."""
    for name in names or tuple(STORIES):
        story = STORIES[name]
        graph = fan_graph([True]) if name == "fan" else story.build()
        story.tell(graph.compile(checkpointer=saver), name)


def account(saver: Saver, name: str) -> list[Any]:
    """Return all that can be seen of a thread: every tuple of every namespace, and every state as its graph sees it."""
    graph = STORIES[name].build().compile(checkpointer=saver)
    state = graph.get_state(config_of(name), subgraphs=True)
    history = list(graph.get_state_history(config_of(name)))
    each = [graph.get_state(past.config, subgraphs=True) for past in history]
    return [state, history, each, list(saver.list(config_of(name)))]


def go_on(saver: Saver, name: str) -> Any:
    """Return what comes of it when the thread goes on; questions asked in the meantime have ids of their own."""
    found = STORIES[name].go_on(STORIES[name].build().compile(checkpointer=saver), name)
    for values in found if isinstance(found, tuple) else (found,):
        if isinstance(values, dict) and "__interrupt__" in values:
            values["__interrupt__"] = [asked.value for asked in values["__interrupt__"]]
    return found


# Real files of SqliteSaver and real tables of PostgresSaver ---------------------------------------------------------


TABLES = {"sqlite": ("checkpoints", "writes", "value"), "postgres": ("checkpoints", "checkpoint_writes", "blob")}


@dataclass
class Origin:
    """A saver of LangGraph's own, what names it for an import, and a way to change its rows behind its back."""

    kind: str
    where: str
    saver: BaseCheckpointSaver[Any]
    connection: Any = field(repr=False)

    def execute(self, query: str, *values: Any) -> list[Any]:
        """Run a statement with ``?`` for values; ``{writes}`` and ``{value}`` are the names that the kind has."""
        _, writes, value = TABLES[self.kind]
        text = query.format(writes=writes, value=value)
        if self.kind == "postgres":
            cursor = self.connection.execute(text.replace("?", "%s"), values)
            return [tuple(row.values()) for row in cursor.fetchall()] if cursor.description else []
        with self.connection:
            return list(self.connection.execute(text, values))

    def put(self, thread: str, values: dict[str, Any], parent: Any = None, step: int = 0, **more: Any) -> Any:
        """Store a checkpoint with these values and return its config."""
        checkpoint = {**empty_checkpoint(), "channel_values": values, **more}
        checkpoint.setdefault("channel_versions", {})
        if not checkpoint["channel_versions"]:
            checkpoint["channel_versions"] = dict.fromkeys(values, checkpoint["id"])
        config = parent or {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        metadata: Any = {"source": "loop", "step": step, "parents": {}}
        return self.saver.put(config, checkpoint, metadata, checkpoint["channel_versions"])  # type: ignore[arg-type]


@contextmanager
def sqlite_origin(path: Path, serde: SerializerProtocol | None = None) -> Iterator[Origin]:
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        saver = SqliteSaver(connection, serde=serde)
        saver.setup()
        yield Origin("sqlite", str(path), saver, connection)


@contextmanager
def postgres_origin(server: PostgresServer, serde: SerializerProtocol | None = None) -> Iterator[Origin]:
    schema = f"stock_{uuid.uuid4().hex}"
    name = sql.Identifier(schema)
    url = server.url(options=f"-csearch_path={schema}")
    with server.connect() as admin:
        admin.execute(sql.SQL("create schema {}").format(name))
        with psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row) as connection:
            saver = PostgresSaver(connection, serde=serde)
            saver.setup()
            yield Origin("postgres", url, saver, connection)
        admin.execute(sql.SQL("drop schema {} cascade").format(name))


# A process that imports and is killed at a call of the store --------------------------------------------------------


def import_until(url: str, source: str, deadline: int, after: bool) -> None:
    """Import, and die at the call; print how many calls there were if it was never reached."""
    mortal = Mortal(open_backend(url), deadline, after)
    store = Store(mortal, make_services("", None))
    report = import_langgraph(store, source)
    assert report, str(report)
    os.write(1, f"{mortal.calls}\n".encode())
