"""Graphs and programs for the tests of ``backstay.testing.crash``: some that survive every kill, and wrong ones."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Annotated, Any, TypedDict

import backstay
from backstay import AsyncThread, Graph, Thread
from backstay.engine import AsyncContext, Context
from backstay.engine.reducers import append
from backstay.errors import Rejected
from backstay.model.runs import EffectRecord, Outcome

OUTBOX = "outbox.txt"


class State(TypedDict, total=False):
    topic: str
    items: list[int]
    log: Annotated[list[Any], append]


def in_a_row(graph: Graph, *names: str) -> Graph:
    graph.start(names[0])
    for one, other in itertools.pairwise(names):
        graph.edge(one, other)
    graph.end(names[-1])
    return graph


def send(text: str) -> None:
    with Path(OUTBOX).open("a", encoding="utf-8") as outbox:
        outbox.write(f"{text}\n")


async def asend(text: str) -> int:
    send(text)
    return len(text)


def has_sent(record: EffectRecord) -> Outcome:
    path = Path(OUTBOX)
    return Outcome.done(None) if path.exists() and "checked" in path.read_text() else Outcome.not_done()


def ask_model(number: int) -> str:
    return f"thought {number}"


def idle(state: State) -> State:
    return {"log": ["idle"]}


# Right ------------------------------------------------------------------------------------------------------------

steady = Graph("steady", state=State)


@steady.node
def plan(state: State) -> State:
    return {"items": [1, 2, 3], "log": [state["topic"]]}


@steady.node
def work(state: State, ctx: Context) -> State:
    return {"log": [ctx.effect("square", pow, ctx.item, 2), ctx.call("model", ask_model, ctx.item)]}


@steady.node
def act(state: State, ctx: Context) -> State:
    args = ctx.approve("send", {"text": "hello"})
    ctx.effect("send", send, args["text"])
    return {"log": ["sent"]}


@steady.node
def look(state: State, ctx: Context) -> State:
    ctx.effect("look", send, "checked", reconcile=has_sent)
    return {"log": [ctx.ask({"which": "color"}, answer=str)]}


steady.node("again", idle)
steady.map("plan", "work", over="items", join="act")
steady.start("plan")
steady.edge("act", "look")
steady.edge("look", "again")
steady.end("again")

STEADY_ANSWERS = {"send": backstay.Modify({"text": "changed"}), "look": backstay.Answer("blue")}

swift = Graph("swift", state=State)


@swift.node
async def first(state: State, ctx: AsyncContext) -> State:
    return {"log": [await ctx.effect("send", asend, "one"), await ctx.effect("plain", len, "four")]}


@swift.node
async def second(state: State, ctx: AsyncContext) -> State:
    return {"log": [await ctx.effect("send", asend, "two")]}


in_a_row(swift, "first", "second")


def make_steady() -> Graph:
    return steady


def chat(thread: Thread, given: dict[str, Any]) -> None:
    """Run a plain loop: two turns, with an effect and a question."""
    with thread.loop(given) as loop:
        for turn in loop:
            turn.effect("send", send, f"turn {turn.iteration}")
            for number in range(2):
                turn.call("model", ask_model, number)
            try:
                turn.append(log=[turn.approve("next", {"n": turn.iteration})["n"]])
            except Rejected:
                turn.append(log=["no"])
            if turn.iteration == 2:
                loop.finish()


async def achat(thread: AsyncThread, given: dict[str, Any]) -> None:
    async with thread.loop(given) as loop:
        async for turn in loop:
            turn.append(log=[await turn.effect("send", asend, f"turn {turn.iteration}")])
            if turn.iteration == 2:
                loop.finish()


# Wrong ------------------------------------------------------------------------------------------------------------


def writes_outside() -> Graph:
    """Append to a file in a node, without an effect."""
    graph = Graph("writes_outside", state=State)

    @graph.node
    def write(state: State) -> State:
        send("hello")
        return {"log": ["written"]}

    graph.node("idle", idle)
    return in_a_row(graph, "write", "idle")


def writes_elsewhere() -> Graph:
    """Do the same in a place that only ``world`` can see."""
    graph = Graph("writes_elsewhere", state=State)

    @graph.node
    def write(state: State) -> State:
        with Path(os.environ["ELSEWHERE"]).open("a") as file:
            file.write("x")
        return {}

    graph.node("idle", idle)
    return in_a_row(graph, "write", "idle")


def draws_arguments() -> Graph:
    """Call an effect with arguments that are different after a restart."""
    graph = Graph("draws_arguments", state=State)

    @graph.node
    def draw(state: State, ctx: Context) -> State:
        ctx.effect("pay", abs, random.getrandbits(60))
        return {"log": ["paid"]}

    graph.node("idle", idle)
    return in_a_row(graph, "draw", "idle")


_numbers = itertools.count(1)


def counts_in_memory() -> Graph:
    """Count its steps by a global variable, which a new process starts again."""
    graph = Graph("counts_in_memory", state=State)
    for name in ("one", "two", "three"):
        graph.node(name, lambda state: {"log": [next(_numbers)]})
    return in_a_row(graph, "one", "two", "three")


def calls_what_costs() -> Graph:
    """Make a durable call of something that must not happen twice."""
    graph = Graph("calls_what_costs", state=State)

    @graph.node
    def mail(state: State, ctx: Context) -> State:
        ctx.call("send", send, "hello")
        return {"log": ["sent"]}

    graph.node("idle", idle)
    return in_a_row(graph, "mail", "idle")


def says_idempotent() -> Graph:
    """Say that repeating is harmless, of something that is not."""
    graph = Graph("says_idempotent", state=State)

    @graph.node
    def mail(state: State, ctx: Context) -> State:
        ctx.effect("send", send, "hello", idempotent=True)
        return {"log": ["sent"]}

    graph.node("idle", idle)
    return in_a_row(graph, "mail", "idle")


def looks_wrongly() -> Graph:
    """Have a hook that always says that nothing was done."""
    graph = Graph("looks_wrongly", state=State)

    @graph.node
    def mail(state: State, ctx: Context) -> State:
        ctx.effect("send", send, "hello", reconcile=lambda record: Outcome.not_done())
        return {"log": ["sent"]}

    graph.node("idle", idle)
    return in_a_row(graph, "mail", "idle")


def follows_a_set() -> Graph:
    """Do effects in the order of a set of texts, which is another one in the next process."""
    graph = Graph("follows_a_set", state=State)

    @graph.node
    def tools(state: State, ctx: Context) -> State:
        for number, word in enumerate({"alpha", "beta", "gamma", "delta", "epsilon"}):
            ctx.effect(f"tool-{number}", str.upper, word)
        return {"log": ["done"]}

    graph.node("idle", idle)
    return in_a_row(graph, "tools", "idle")


def fails_after_a_kill() -> Graph:
    """Refuse to work if a file of an earlier process exists, so that no process can finish the run."""
    graph = Graph("fails_after_a_kill", state=State)

    @graph.node
    def once(state: State) -> State:
        Path("lock").touch(exist_ok=False)
        return {}

    @graph.node
    def last(state: State) -> State:
        Path("lock").unlink()
        return {}

    return in_a_row(graph, "once", "last")


def hangs_after_a_kill() -> Graph:
    """Wait for ever if an earlier process was here."""
    graph = Graph("hangs_after_a_kill", state=State)

    @graph.node
    def once(state: State) -> State:
        if Path("here").exists():
            os.read(os.pipe()[0], 1)
        Path("here").touch()
        return {}

    return in_a_row(graph, "once")


broken = Graph("broken", state=State)


@broken.node
def fail(state: State) -> State:
    raise ValueError("no such topic")


in_a_row(broken, "fail")
