"""Answers that send a run elsewhere: the node it was sent away from is entered anew the next time, and asks anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypedDict

import pytest

import backstay
from backstay import Graph
from backstay.engine import Context, Status
from backstay.engine.reducers import add
from backstay.model.decision import Approve, Reroute


class State(TypedDict, total=False):
    rounds: Annotated[int, add]


@pytest.fixture
def memory_thread() -> backstay.Thread:
    return backstay.open("memory:").thread("t")


@pytest.fixture
def ran() -> list[str]:
    return []


Body = Callable[[State, Context], None]


def told(ran: list[str]) -> Body:
    def body(state: State, ctx: Context) -> None:
        ran.append(ctx.position)

    return body


def test_a_node_that_was_rerouted_back_from_asks_again(memory_thread: backstay.Thread, ran: list[str]) -> None:
    graph = Graph("g", state=State, before=["pay"], limit=20)
    graph.node("plan", told(ran))
    graph.node("pay", told(ran))
    graph.edge("plan", "pay")
    graph.start("plan")
    graph.end("pay")
    graph.run_sync(memory_thread)

    result = graph.resume_sync(memory_thread, Reroute("plan"))
    assert (result.status, result.path) == (Status.INTERRUPTED, ("plan", "plan"))
    result = graph.resume_sync(memory_thread, Approve())
    assert (result.status, result.path) == (Status.COMPLETED, ("plan", "plan", "pay"))
    assert ran == ["g/plan#1", "g/plan#2", "g/pay#2"]


def test_a_node_that_asked_inside_and_was_left_acts_and_asks_anew(
    memory_thread: backstay.Thread, ran: list[str]
) -> None:
    graph = Graph("g", state=State, limit=20)
    graph.node("plan", told(ran))

    @graph.node
    def pay(state: State, ctx: Context) -> None:
        ctx.effect("quote", ran.append, "quote")
        ctx.approve("pay")
        ran.append("paid")

    graph.edge("plan", "pay")
    graph.start("plan")
    graph.end("pay")
    graph.run_sync(memory_thread)
    graph.resume_sync(memory_thread, Reroute("plan"))

    assert graph.resume_sync(memory_thread, Approve()).status is Status.COMPLETED
    assert ran == ["g/plan#1", "quote", "g/plan#2", "quote", "paid"]


def test_in_the_next_round_a_branch_is_not_rerouted_by_the_old_answer(
    memory_thread: backstay.Thread, ran: list[str]
) -> None:
    graph = Graph("g", state=State, before=["left"], limit=20)
    graph.node("fork", lambda state: {"rounds": 1})
    for name in ("left", "right", "other"):
        graph.node(name, told(ran))
    graph.node("join", lambda state: None)
    graph.parallel("fork", ["left", "right"], join="join")
    graph.edge("join", "fork", when=lambda state: state["rounds"] < 2, name="again")
    graph.edge("join", "other", fallback=True)
    graph.start("fork")
    graph.end("other")
    graph.run_sync(memory_thread)

    first = graph.resume_sync(memory_thread, Reroute("other"))
    assert first.status is Status.INTERRUPTED
    second = graph.resume_sync(memory_thread, Approve())
    assert second.path == ("fork", "other[left]", "right", "join", "fork", "left", "right", "join", "other")
    assert sorted(ran) == ["g/left#2[left]", "g/other#1[left]", "g/other#2", "g/right#1[right]", "g/right#2[right]"]


def test_a_branch_that_is_sent_back_and_forth_goes_where_the_last_answer_says(
    memory_thread: backstay.Thread, ran: list[str]
) -> None:
    graph = Graph("g", state=State, before=["left", "other"], limit=20)
    graph.node("fork", lambda state: {"rounds": 1})
    for name in ("left", "right", "other"):
        graph.node(name, told(ran))
    graph.parallel("fork", ["left", "right"], join="other")
    graph.start("fork")
    graph.end("other")
    graph.run_sync(memory_thread)

    graph.resume_sync(memory_thread, Reroute("other"))
    back = graph.resume_sync(memory_thread, Reroute("left"))
    assert [record.interrupt.node for record in back.interrupts] == ["left"]
    graph.resume_sync(memory_thread, Approve())

    done = graph.resume_sync(memory_thread, Approve())
    assert (done.status, done.path) == (Status.COMPLETED, ("fork", "left", "right", "other"))
    assert sorted(ran) == ["g/left#2[left]", "g/other#2", "g/right#1[right]"]
