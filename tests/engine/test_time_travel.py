"""Running again from any point of the past: on a branch of its own, with another state, after a look at the plan."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.engine import Status
from backstay.engine.compatibility import Verdict
from backstay.engine.events import EffectReplayed
from backstay.errors import NotFound
from backstay.model.decision import Approve
from support.engine.event_log import EventLog
from support.engine.walk import State, Walk, asked, head


class World:
    """What effects did to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def charge(self, what: str) -> str:
        self.done.append(what)
        return f"receipt {len(self.done)} for {what}"


def shop(world: World, walk: Walk, is_async: bool = False) -> Graph:
    """Return a graph that chooses, pays for what is chosen, and sends it off."""
    graph = Graph("shop", state=State)

    def pay(state: State, ctx: Any) -> dict[str, Any]:
        return {"items": [ctx.effect("charge", world.charge, state["note"])]}

    async def apay(state: State, ctx: Any) -> dict[str, Any]:
        walk.ran.append("pay")
        return {"seen": ["pay"], "items": [await ctx.effect("charge", world.charge, state["note"])]}

    graph.node("choose", walk.node("choose"))
    graph.node("pay", apay if is_async else walk.node("pay", pay))
    graph.node("send", walk.node("send", lambda state, ctx: {"other": ctx.effect("send", world.charge, "parcel")}))
    graph.edge("choose", "pay")
    graph.edge("pay", "send")
    graph.start("choose")
    graph.end("send")
    return graph


def at(thread: backstay.Thread, step: int) -> backstay.Checkpoint:
    found = thread.at(step)
    assert found is not None
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_effects_that_were_done_are_replayed_where_they_are_asked_for_with_equal_arguments(
    thread: backstay.Thread, is_async: bool
) -> None:
    world, walk, log = World(), Walk(), EventLog()
    graph = shop(world, walk, is_async)
    first = graph.run_sync(thread, {"note": "book"})
    assert world.done == ["book", "parcel"]
    before = head(thread)

    result = graph.replay_sync(thread, at(thread, 1), branch="again", on_event=log)

    assert result.status is Status.COMPLETED
    assert result.values == first.values
    assert world.done == ["book", "parcel"]
    assert walk.ran == ["choose", "pay", "send", "pay", "send"]
    assert len(log.of(EffectReplayed)) == 2
    assert head(thread) == before  # nothing of the old branch changed
    assert [branch.key.name for branch in thread.branches()] == ["main", "again"]


def test_with_another_state_effects_with_other_arguments_are_done_anew_and_the_others_are_not(
    thread: backstay.Thread,
) -> None:
    world, walk = World(), Walk()
    graph = shop(world, walk)
    graph.run_sync(thread, {"note": "book"})

    result = graph.replay_sync(thread, at(thread, 1), branch="what-if", set={"note": "film"})

    assert result.values["note"] == "film"
    assert result.values["items"] == ["receipt 3 for film"]
    assert world.done == ["book", "parcel", "film"]  # the parcel is the same one
    assert at(thread, 3).state["note"] == "book"


def test_effects_are_done_again_if_that_is_wanted(thread: backstay.Thread) -> None:
    world, walk = World(), Walk()
    graph = shop(world, walk)
    graph.run_sync(thread, {"note": "book"})

    graph.replay_sync(thread, at(thread, 1), branch="again", effects="again").raise_for_status()

    assert world.done == ["book", "parcel", "book", "parcel"]


def test_a_replay_of_a_replay_takes_over_what_that_one_had(thread: backstay.Thread) -> None:
    world, walk = World(), Walk()
    graph = shop(world, walk)
    graph.run_sync(thread, {"note": "book"})
    graph.replay_sync(thread, at(thread, 1), branch="two", set={"note": "film"}).raise_for_status()
    assert world.done == ["book", "parcel", "film"]
    second = next(meta for meta in thread.history(branch="two") if meta.next_node == "pay")

    graph.replay_sync(thread, second, branch="three").raise_for_status()

    assert world.done == ["book", "parcel", "film"]


def test_the_plan_says_before_what_a_replay_would_do_and_does_nothing(store: backstay.Store) -> None:
    world, walk = World(), Walk()
    thread = store.thread("t")
    graph = shop(world, walk)
    graph.run_sync(thread, {"note": "book"})
    stored = [meta.digest for meta in thread.history(branch="*")]

    plan = graph.replay_sync(thread, at(thread, 1), plan=True)

    assert plan.judgement.overall is Verdict.SAME
    assert (plan.next_nodes, plan.ran_before, plan.ran_after) == (("pay",), ("choose",), ("pay", "send"))
    assert [record.key.rpartition(":")[2] for record in plan.replayed] == ["charge", "send"]
    assert plan.unknown == ()
    assert "pay first; 2 nodes ran after it, 2 effects would be replayed" in str(plan)
    assert [meta.digest for meta in thread.history(branch="*")] == stored
    assert (walk.ran, world.done) == (["choose", "pay", "send"], ["book", "parcel"])
    later = graph.replay_sync(thread, at(thread, 2), plan=True)
    assert [record.key.rpartition(":")[2] for record in later.replayed] == ["send"]


def test_a_plan_and_a_replay_can_be_awaited() -> None:
    world, walk = World(), Walk()
    graph = shop(world, walk)

    async def story() -> tuple[Any, Status]:
        async with await backstay.aopen("memory:") as store:
            thread = store.thread("t")
            await graph.run(thread, {"note": "book"})
            found = await thread.at(1)
            assert found is not None
            plan = await graph.replay(thread, found, plan=True)
            return plan.next_nodes, (await graph.replay(thread, found, branch="again")).status

    assert asyncio.run(story()) == (("pay",), Status.COMPLETED)
    assert world.done == ["book", "parcel"]


def test_a_replay_stops_at_the_same_gates_and_none_is_open(store: backstay.Store, thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", "c", before=["b", "c"])
    graph.run_sync(thread)
    graph.resume_sync(thread, Approve("c"))
    assert walk.ran == ["a", "b", "c"]

    result = graph.replay_sync(thread, at(thread, 1), branch="again")
    assert result.status is Status.INTERRUPTED
    fork = store.thread("customer-42", branch="again")
    result = graph.resume_sync(fork, Approve())

    assert result.status is Status.INTERRUPTED  # what was allowed for the rest of the old run is not allowed here
    assert walk.ran == ["a", "b", "c", "b"]


def test_a_replay_from_where_a_branch_waited_asks_again_and_takes_nothing_that_rests_on_the_old_answer(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    walk = Walk()
    graph = walk.fan("l", "r", before=["r"])
    stood = graph.run_sync(thread).checkpoint
    assert stood is not None
    graph.resume_sync(thread, Approve()).raise_for_status()
    walk.ran.clear()

    again = graph.replay_sync(thread, stood, branch="again")

    assert (again.status, asked(again)) == (Status.INTERRUPTED, ["r"])
    assert "r" not in walk.ran
    result = graph.resume_sync(store.thread("customer-42", branch="again"), Approve())
    assert result.values["seen"] == ["split", "l", "r", "join"]
    assert (walk.ran.count("split"), walk.ran.count("r")) == (0, 1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"set": {"unknown": 1}}, backstay.InvalidInput),
        ({"effects": "maybe"}, backstay.InvalidInput),
        ({"branch": "main"}, backstay.Conflict),
        ({"checkpoint": "made-up"}, NotFound),
    ],
)
def test_a_replay_that_cannot_work_is_refused_and_makes_no_branch(
    thread: backstay.Thread, change: dict[str, Any], error: type[Exception]
) -> None:
    world, walk = World(), Walk()
    graph = shop(world, walk)
    graph.run_sync(thread, {"note": "book"})
    call = {"checkpoint": at(thread, 1), "branch": "again", **change}

    with pytest.raises((error, backstay.InvalidInput)):
        graph.replay_sync(thread, **call)

    assert [branch.key.name for branch in thread.branches()] == ["main"]
    assert walk.ran == ["choose", "pay", "send"]


def test_the_end_of_a_run_and_another_graphs_run_cannot_be_replayed(thread: backstay.Thread) -> None:
    world, walk = World(), Walk()
    graph = shop(world, walk)
    graph.run_sync(thread, {"note": "book"})
    with pytest.raises(backstay.InvalidInput, match="nothing can run from it"):
        graph.replay_sync(thread, head(thread), branch="again")
    with pytest.raises(backstay.GraphMismatch):
        walk.chain("a").replay_sync(thread, at(thread, 1), branch="again")

    assert [branch.key.name for branch in thread.branches()] == ["main"]
