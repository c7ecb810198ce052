"""A map over many subgraphs: a commit inside a branch is stored for this branch alone, and none of it is lost."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, TypedDict

import pytest

import backstay
from backstay import Graph
from backstay.engine import Status, position
from backstay.engine.events import CheckpointSaved, Event, NodeStarted
from backstay.engine.reducers import add, append
from backstay.engine.sinks import MemorySink
from backstay.engine.triggers import every
from backstay.errors import GraphMismatch
from backstay.model.decision import Approve
from support.engine.walk import head

ITEMS = list(range(position.WIDE + 4))
DONE = [f"{item}{letter}" for item in ITEMS for letter in "abc"]


class Dies(BaseException):
    """Stands for the end of a process: nothing catches it, and nothing after it runs."""


class Outer(TypedDict, total=False):
    items: list[int]
    seen: Annotated[list[str], append]
    count: Annotated[int, add]


class Inner(TypedDict, total=False):
    item: int
    seen: Annotated[list[str], append]
    count: Annotated[int, add]


class Wide:
    """The graph, and how often each of its nodes ran for each item."""

    def __init__(self, levels: int = 0, asks: bool = False, extra: bool = False) -> None:
        self.ran: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()
        inner = Graph("inner", state=Inner)
        for letter in "abc":
            inner.node(letter, self.node(letter, asks and letter == "b"))
        if extra:
            inner.node("d", lambda state: None)
            inner.edge("b", "d")
            inner.edge("d", "c")
        else:
            inner.edge("b", "c")
        inner.edge("a", "b")
        inner.start("a")
        inner.end("c")
        graph = Graph("g", state=Outer)
        graph.node("split", lambda state: None)
        graph.subgraph("each", inner, into=lambda state, item: {"item": item}, out={"seen": "seen", "count": "count"})
        graph.node("join", lambda state: None)
        graph.map("split", "each", over="items", join="join")
        graph.start("split")
        graph.end("join")
        for level in range(levels):
            around = Graph(f"around{level}", state=Outer)
            around.subgraph("inside", graph)
            around.start("inside")
            around.end("inside")
            graph = around
        self.graph = graph

    def node(self, letter: str, asks: bool) -> Any:
        # A coroutine, because a plain function would run on in its thread after the run has died.
        async def run(state: Any, ctx: Any) -> Any:
            name = f"{state['item']}{letter}"
            self.ran[name] += 1
            await ctx.effect("look", self.effects.update, [name])
            if asks:
                ctx.approve("look", {"item": state["item"]})
            ctx.usage(tokens=1)
            return {"seen": [name], "count": 1}

        return run


def dies_at(count: int) -> Any:
    left = [count]

    def note(event: Event) -> None:
        if isinstance(event, NodeStarted) and event.node in "abc":
            left[0] -= 1
            if left[0] < 0:
                raise Dies

    return note


@pytest.mark.parametrize("levels", [0, 2])
def test_a_run_that_dies_anywhere_resumes_at_the_exact_place_in_each_branch(url: str, levels: int) -> None:
    for moment in range(0, len(DONE), 5):
        wide = Wide(levels)
        name = f"t{moment}"
        with backstay.open(url) as store, pytest.raises((Dies, BaseExceptionGroup)):
            wide.graph.run_sync(store.thread(name), {"items": ITEMS}, on_event=dies_at(moment))
        with backstay.open(url) as store:
            if store.thread(name).latest() is None:  # a store in memory is gone
                return
            thread = store.thread(name)
            result = wide.graph.resume_sync(thread)
            assert result.status is Status.COMPLETED
            assert result.values == {"items": ITEMS, "seen": DONE, "count": len(DONE)}
            assert wide.effects == Counter(DONE)
            assert head(thread).tokens_used == len(DONE)
            assert result.steps == len(DONE) + 3 + levels
            again = [item for item, count in wide.ran.items() if count > 1]
            assert len(again) <= len(ITEMS)  # only what was not committed yet: at most one node of each branch
            assert not thread.check().findings


def test_a_second_death_and_branches_that_finished_before_it_lose_nothing() -> None:
    wide = Wide()
    with backstay.open("memory:") as store:
        with pytest.raises((Dies, BaseExceptionGroup)):
            wide.graph.run_sync(store.thread("t"), {"items": ITEMS}, on_event=dies_at(10))
        for moment in (12, 9):
            with pytest.raises((Dies, BaseExceptionGroup)):
                wide.graph.resume_sync(store.thread("t"), on_event=dies_at(moment))
        result = wide.graph.resume_sync(store.thread("t"))
        assert result.values["seen"] == DONE
        assert wide.effects == Counter(DONE)
        assert head(store.thread("t")).tokens_used == len(DONE)


def test_questions_inside_branches_are_asked_once_each_and_answered_one_by_one(url: str) -> None:
    wide = Wide(asks=True)
    with backstay.open(url) as store:
        thread = store.thread("t")
        result = wide.graph.run_sync(thread, {"items": ITEMS})
        assert len(result.interrupts) == len(ITEMS)
        for record in result.interrupts:
            assert result.status is Status.INTERRUPTED
            result = wide.graph.resume_sync(thread, {record.id: Approve()})
        assert result.status is Status.COMPLETED
        assert result.values["seen"] == DONE
        assert wide.effects == Counter(DONE)
        assert {wide.ran[f"{item}a"] for item in ITEMS} == {1}


def test_a_commit_inside_a_branch_makes_no_checkpoint_and_stores_only_its_own_branch() -> None:
    events: list[Event] = []
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        sink = MemorySink()
        Wide().graph.run_sync(thread, {"items": ITEMS}, on_event=events.append, sink=sink)
        assert [meta.trigger for meta in thread.history()] == ["end", "node", "node", "input"]
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert len(saved) == 1 + len(DONE) + 3  # the sinks still hear of every commit
    assert len([event for event in saved if event.checkpoint_id is None]) == len(DONE)
    assert {frame.graph_id for frame in sink.frames} == {"g", "inner"}


def test_a_trigger_that_skips_commits_stores_all_branches_that_moved_since() -> None:
    wide = Wide()
    with backstay.open("memory:") as store:
        with pytest.raises((Dies, BaseExceptionGroup)):
            wide.graph.run_sync(store.thread("t"), {"items": ITEMS}, trigger=every(n=7), on_event=dies_at(30))
        result = wide.graph.resume_sync(store.thread("t"))
        assert result.values["seen"] == DONE
        assert head(store.thread("t")).tokens_used == len(DONE)
        assert wide.effects == Counter(DONE)


def test_the_positions_inside_branches_are_judged_too_before_a_changed_graph_resumes() -> None:
    with backstay.open("memory:") as store:
        with pytest.raises((Dies, BaseExceptionGroup)):
            Wide().graph.run_sync(store.thread("t"), {"items": ITEMS}, on_event=dies_at(20))
        changed = Wide(extra=True).graph
        (pending,) = changed.pending(store)
        inside = [frame for frame in pending.judgement.frames if frame.graph == "inner"]
        assert inside
        with pytest.raises(GraphMismatch):
            changed.resume_sync(store.thread("t"))
        assert changed.resume_sync(store.thread("t"), compatible=True).values["seen"] == DONE


def test_a_replay_from_the_newest_checkpoint_redoes_no_effect() -> None:
    wide = Wide()
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        with pytest.raises((Dies, BaseExceptionGroup)):
            wide.graph.run_sync(thread, {"items": ITEMS}, on_event=dies_at(20))
        result = wide.graph.replay_sync(thread, head(thread), branch="b")
        assert result.values["seen"] == DONE
        assert wide.effects == Counter(DONE)
