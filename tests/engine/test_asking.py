"""Questions of nodes: whatever a node does with the signal, nothing guarded runs before the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

import backstay
from backstay import Answer, Approve, Graph, Modify, Reject, Reroute, durable
from backstay.engine import AsyncContext, Context, Status
from backstay.errors import BadUpdate, Conflict, InvalidInput, NodeFailed, NotFound, Rejected
from backstay.thread import Loop, Turn
from support.engine.walk import head


def one(function: Callable[..., Any], **options: Any) -> Graph:
    """Return a graph of one node."""
    graph = Graph("g")
    graph.node("a", function, **options)
    graph.start("a")
    graph.end("a")
    return graph


class Dispatch:
    """Sends, and remembers what was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def __call__(self, what: Any) -> str:
        self.sent.append(what)
        return f"sent {what}"


class Died(BaseException):
    """Stands for a kill inside a tool."""


# Swallowed signals ------------------------------------------------------------------------------------------------


def bare(ctx: Context) -> Any:
    try:
        return ctx.approve("send", "x")
    except:  # noqa: E722
        return "x"


def suppressed(ctx: Context) -> Any:
    with contextlib.suppress(BaseException):
        return ctx.approve("send", "x")
    return "x"


def raised_as_another(ctx: Context) -> Any:
    try:
        return ctx.approve("send", "x")
    except BaseException as error:
        raise ValueError("not what it was") from error


@pytest.mark.parametrize("ask", [bare, suppressed, raised_as_another])
def test_a_swallowed_question_is_asked_all_the_same(thread: backstay.Thread, ask: Callable[[Context], Any]) -> None:
    send = Dispatch()

    def node(state: Any, ctx: Context) -> Any:
        what = ask(ctx)
        with contextlib.suppress(BaseException):
            ctx.effect("send", send, what)
        with contextlib.suppress(BaseException):
            ctx.call("send", send, what)
        with contextlib.suppress(BaseException):
            ctx.ask("another")
        return {"done": True}

    graph = one(node)
    paused = graph.run_sync(thread, {})

    assert (paused.status, send.sent, paused.values) == (Status.INTERRUPTED, [], {})
    assert [record.interrupt.payload for record in paused.interrupts] == [{"tool": "send", "args": "x"}]


def test_a_swallowed_reroute_leads_elsewhere_all_the_same(thread: backstay.Thread) -> None:
    send = Dispatch()

    def node(state: Any, ctx: Context) -> Any:
        with contextlib.suppress(BaseException):
            ctx.approve("send", "x")
        ctx.effect("send", send, "x")

    graph = one(node)
    graph.node("b", lambda state: {"b": True})
    graph.end("b")
    graph.edge("a", "b", when=lambda state: False)
    graph.run_sync(thread, {})

    assert graph.resume_sync(thread, Reroute("b")).values == {"b": True}
    assert send.sent == []


@pytest.mark.parametrize("way", ["group", "gather", "return_exceptions"])
def test_an_unknown_effect_among_tasks_becomes_a_question(thread: backstay.Thread, way: str) -> None:
    calls: list[str] = []

    def tool(name: str) -> str:
        calls.append(name)
        if name == "b" and calls.count("b") == 1:
            raise Died
        return name

    async def node(state: Any, ctx: AsyncContext) -> Any:
        if not calls:
            await ctx.effect("b", tool, "b")
        if way == "group":
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ctx.effect(name, tool, name)) for name in "abc"]
            return {"results": [task.result() for task in tasks]}
        made = (ctx.effect(name, tool, name) for name in "abc")
        found = await asyncio.gather(*made, return_exceptions=way == "return_exceptions")
        return {"results": [each if isinstance(each, str) else type(each).__name__ for each in found]}

    graph = one(node)
    with pytest.raises(Died):
        graph.run_sync(thread, {})
    assert graph.resume_sync(thread).status is Status.INTERRUPTED
    assert graph.resume_sync(thread).status is Status.INTERRUPTED  # and again, as often as it is resumed
    assert calls.count("b") == 1
    assert [record.interrupt.payload["attempt"] for record in thread.interrupts()] == [1]

    assert graph.resume_sync(thread, Modify("found")).values == {"results": ["a", "found", "c"]}
    assert calls.count("b") == 1


def test_two_questions_side_by_side_are_asked_one_after_the_other(thread: backstay.Thread) -> None:
    async def node(state: Any, ctx: AsyncContext) -> Any:
        async def ask(tool: str) -> Any:
            return ctx.approve(tool, tool)

        return {"found": await asyncio.gather(ask("a"), ask("b"))}

    graph = one(node)
    graph.run_sync(thread, {})
    assert graph.resume_sync(thread, Modify("x")).status is Status.INTERRUPTED
    assert graph.resume_sync(thread, Modify("y")).values == {"found": ["x", "y"]}


# Questions that cannot be stored ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "path"),
    [
        (lambda ctx: ctx.approve("tool", {"client": object()}), "interrupt.payload.args.client"),
        (lambda ctx: ctx.ask("\udc80"), "interrupt.payload"),
        (lambda ctx: ctx.ask("x", prompt="p" * 70_000), "prompt"),
    ],
)
def test_a_question_that_cannot_be_stored_is_refused_with_its_path(
    thread: backstay.Thread, ask: Callable[[Context], Any], path: str
) -> None:
    failed = one(lambda state, ctx: ask(ctx)).run_sync(thread, {})

    assert isinstance(failed.error, NodeFailed)
    assert path in str(failed.error.error)
    assert list(thread.interrupts()) == []


def test_a_barrier_whose_question_cannot_be_stored_fails_the_run(thread: backstay.Thread) -> None:
    graph = Graph("g")
    graph.barrier("wait", payload=lambda state: {"client": object()})
    graph.start("wait")
    graph.end("wait")

    failed = graph.run_sync(thread, {})

    assert isinstance(failed.error, BadUpdate)
    assert "payload.client" in str(failed.error)


# Awaited or not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("awaits", [False, True])
def test_a_question_of_an_async_node_may_be_awaited_or_not(thread: backstay.Thread, awaits: bool) -> None:
    async def awaited(state: Any, ctx: AsyncContext) -> Any:
        args = await ctx.approve("send", {"to": "bob"})
        name = await ctx.ask("name?")
        return {"sent": await ctx.effect("send", dict, await ctx.approve("again", args)), "name": name}

    async def plain(state: Any, ctx: AsyncContext) -> Any:
        args = ctx.approve("send", {"to": "bob"})
        name = ctx.ask("name?")
        return {"sent": await ctx.effect("send", dict, ctx.approve("again", args)), "name": name}

    graph = one(awaited if awaits else plain)
    graph.run_sync(thread, {})
    graph.resume_sync(thread, Approve())
    graph.resume_sync(thread, Answer("ann"))

    assert graph.resume_sync(thread, Approve()).values == {"sent": {"to": "bob"}, "name": "ann"}


def test_a_refusal_is_raised_where_it_is_awaited(thread: backstay.Thread) -> None:
    async def node(state: Any, ctx: AsyncContext) -> Any:
        try:
            await ctx.approve("send", {})
        except Rejected as refusal:
            return {"no": refusal.reason}

    graph = one(node)
    graph.run_sync(thread, {})
    assert graph.resume_sync(thread, Reject("too late")).values == {"no": "too late"}


# What a person sees -----------------------------------------------------------------------------------------------


def test_a_yes_after_the_deadline_does_not_count(url: str, clock: Any) -> None:
    ran = []

    def node(state: Any, ctx: Context) -> None:
        ctx.approve("pay", {"cents": 1}, timeout=60)
        ran.append(1)

    with backstay.open(url, clock=clock) as store:
        thread, graph = store.thread("t"), one(node)
        [record] = graph.run_sync(thread, {}).interrupts
        assert record.deadline is not None
        clock.step(seconds=61)
        with pytest.raises(Conflict, match="too late"):
            thread.decide(record, "approve", by="late")

        assert graph.resume_sync(thread).status is Status.REJECTED
        assert ran == []


def test_how_a_run_fails_is_stored_without_the_text_of_the_error(thread: backstay.Thread) -> None:
    def fails(state: Any) -> None:
        raise ValueError("the password is 1234")

    graph = one(fails)
    for _ in range(2):
        result = graph.run_sync(thread, {}) if thread.latest() is None else graph.resume_sync(thread)
        assert "1234" in str(result.error)
    assert [meta.trigger for meta in thread.history()] == ["failed", "failed", "input"]
    assert head(thread).resume_hint == "node 'a' raised ValueError. Fix the cause, then call graph.resume(thread)"


def test_a_value_that_cannot_be_stored_is_handled_as_any_failure(thread: backstay.Thread) -> None:
    graph = one(lambda state: {"x": object()}, fallback=lambda state, ctx: {"x": type(ctx.error).__name__})
    assert graph.run_sync(thread, {}).values == {"x": "EncodeError"}

    graph = Graph("g")
    graph.node("s", lambda state: None)
    graph.node("bad", lambda state: {"x": object()}, on_failure="pause")
    graph.node("good", lambda state: {"y": 1})
    graph.parallel("s", ["bad", "good"], on_error="collect_all")
    graph.start("s")
    other = thread.fork(head(thread), branch="b", to="other")
    paused = graph.run_sync(other, {})
    assert paused.status is Status.INTERRUPTED
    assert graph.resume_sync(other, Modify({"x": 2})).values["y"] == 1


def test_a_value_that_only_the_reducer_makes_unstorable_fails_its_node(thread: backstay.Thread) -> None:
    graph = Graph("g", reducers={"x": lambda old, new: object()})
    graph.node("a", lambda state: {"x": 1})
    graph.start("a")
    graph.end("a")

    failed = graph.run_sync(thread, {})

    assert isinstance(failed.error, NodeFailed)
    assert (failed.error.node, "state.x" in str(failed.error)) == ("a", True)
    assert head(thread).state == {}


@pytest.mark.parametrize("ends", ["asks", "fails"])
def test_usage_of_finished_branches_adds_up(thread: backstay.Thread, ends: str) -> None:
    stops = [True]

    def work(state: Any, ctx: Context) -> None:
        ctx.usage(tokens=10, cost=0.5)
        if ctx.item == 1 and ends == "asks":
            ctx.approve("x", {})
        if ctx.item == 1 and ends == "fails" and stops.pop():
            raise ValueError

    graph = Graph("g")
    graph.node("s", lambda state: {"items": [0, 1, 2]})
    graph.node("work", work)
    graph.map("s", "work", over="items", on_error="collect_all")
    graph.start("s")
    graph.run_sync(thread, {})
    stops.append(False)
    done = graph.resume_sync(thread, Approve() if ends == "asks" else None)

    assert done.status is Status.COMPLETED
    assert done.checkpoint is not None
    assert (done.checkpoint.tokens_used, done.checkpoint.cost_estimate) == (30, 1.5)


def test_the_cause_of_a_failed_branch_stays_in_the_traceback() -> None:
    import traceback

    def broken(state: Any) -> None:
        raise ValueError("look here")

    graph = Graph("g")
    graph.node("s", lambda state: None)
    graph.node("broken", broken)
    graph.parallel("s", ["broken"])
    graph.start("s")
    error = graph.run_sync(None, {}).error

    assert error is not None
    assert "look here" in "".join(traceback.format_exception(error))


# Calls in nodes ---------------------------------------------------------------------------------------------------


@durable.call
def decorated(what: str) -> str:
    return f"{what} {time.time()}"


@durable.call
async def decorated_async(what: str) -> str:
    return f"{what} {time.time()}"


def test_calls_of_a_node_are_replayed_after_a_question(thread: backstay.Thread) -> None:
    send, found = Dispatch(), []

    def node(state: Any, ctx: Context) -> Any:
        found.append([ctx.call("x", send, 1), ctx.effect("x2", send, 2), decorated("a"), decorated("a")])
        found[-1] += [ctx.wrap(send, name="w")(3), ctx.call("x", send, 4)]
        ctx.approve("go", {})
        return {"found": found[-1]}

    graph = one(node)
    graph.run_sync(thread, {})
    graph.resume_sync(thread, Approve())

    assert found[0] == found[1]
    assert send.sent == [1, 2, 3, 4]
    assert len({*found[0]}) == 6


def test_a_decorated_function_fits_only_its_own_kind_of_node() -> None:
    async def node(state: Any, ctx: AsyncContext) -> Any:
        with pytest.raises(InvalidInput, match="plain function"):
            decorated("a")
        return {"a": await decorated_async("a"), "b": await ctx.call("d", decorated, "b")}

    def plain(state: Any, ctx: Context) -> Any:
        with pytest.raises(InvalidInput, match="coroutine function"):
            decorated_async("a")  # type: ignore[unused-coroutine]
        return {"a": decorated("a")}

    assert one(node).run_sync(None, {}).raise_for_status()
    assert one(plain).run_sync(None, {}).raise_for_status()
    assert decorated("outside").startswith("outside")


# Replays and rewinds ----------------------------------------------------------------------------------------------


def two_steps(send: Dispatch, broken: list[bool]) -> Graph:
    def first(state: Any, ctx: Context) -> Any:
        found = ctx.effect("pay", send, "one")
        if broken[0]:
            raise ConnectionError
        return {"one": found}

    graph = Graph("g")
    graph.node("first", first)
    graph.node("second", lambda state, ctx: {"two": ctx.effect("pay", send, "two")})
    graph.edge("first", "second")
    graph.start("first")
    graph.end("second")
    return graph


@pytest.mark.parametrize("effects", ["replay", "again"])
def test_a_replay_that_fails_at_once_still_knows_what_it_takes_over(
    store: backstay.Store, thread: backstay.Thread, effects: str
) -> None:
    send, broken = Dispatch(), [False]
    graph = two_steps(send, broken)
    graph.run_sync(thread, {})
    broken[0] = True
    graph.replay_sync(thread, thread.at(step=0) or "", branch="b", effects=effects)
    broken[0] = False
    other = store.thread(thread.id, branch="b")
    assert graph.resume_sync(other).status is Status.COMPLETED

    assert send.sent == (["one", "two"] if effects == "replay" else ["one", "two"] * 2)
    after_first = next(meta for meta in other.history() if meta.last_node == "first")
    graph.replay_sync(other, after_first, branch="c", effects=effects)  # and so does a replay of a replay
    assert send.sent[-1] == "two"
    assert len(send.sent) == (2 if effects == "replay" else 5)


def test_a_replay_that_fails_at_once_keeps_the_finished_branches(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    ran, fails = [], [True]

    def work(state: Any, ctx: Context) -> Any:
        ran.append(ctx.item)
        if ctx.item == 1 and fails[0]:
            raise ValueError
        return {f"done {ctx.item}": True}

    graph = Graph("g")
    graph.node("s", lambda state: {"items": [0, 1, 2]})
    graph.node("work", work)
    graph.map("s", "work", over="items", on_error="collect_all")
    graph.start("s")
    graph.run_sync(thread, {})
    at = next(meta for meta in thread.history() if meta.trigger == "node")
    ran.clear()
    for _ in range(2):  # it fails, and a resume of it fails
        graph.replay_sync(thread, at, branch="b") if not ran else graph.resume_sync(store.thread(thread.id, branch="b"))
    fails[0] = False
    done = graph.resume_sync(store.thread(thread.id, branch="b"))

    assert done.status is Status.COMPLETED
    assert ran == [1, 1, 1]


def test_a_rewound_graph_starts_new_effects(thread: backstay.Thread) -> None:
    send = Dispatch()

    def node(state: Any, ctx: Context) -> Any:
        return {"sent": ctx.effect("send", send, ctx.approve("send", "bob"))}

    graph = one(node)
    graph.run_sync(thread, {})
    graph.resume_sync(thread, Approve())
    thread.rewind(thread.at(step=0) or "")
    assert graph.resume_sync(thread).status is Status.INTERRUPTED

    assert graph.resume_sync(thread, Modify("eve")).values == {"sent": "sent eve"}
    assert send.sent == ["bob", "eve"]


# Values from outside ----------------------------------------------------------------------------------------------


def test_a_value_is_sent_into_a_waiting_run(thread: backstay.Thread) -> None:
    graph = one(lambda state, ctx: {"got": [ctx.wait_for("paid"), ctx.wait_for("paid"), ctx.wait_for("other")]})
    assert graph.run_sync(thread, {}).status is Status.INTERRUPTED
    assert [record.interrupt.prompt for record in thread.interrupts()] == ["Waiting for 'paid'"]
    thread.send("paid", {"cents": 5}, by="webhook")
    thread.send("other")  # before the run waits for it
    thread.send("paid", 7)

    assert graph.resume_sync(thread).values == {"got": [{"cents": 5}, 7, None]}
    with pytest.raises(NotFound, match="no unfinished run"):
        thread.send("paid", 1)


def test_values_are_received_once_and_in_order_over_many_nodes(thread: backstay.Thread) -> None:
    def step(state: Any, ctx: Context) -> Any:
        return {"n": state["n"] + 1, f"got {state['n']}": ctx.wait_for("x")}

    graph = Graph("g")
    graph.node("step", step)
    graph.edge("step", "step", when=lambda state: state["n"] < 4, name="more")
    graph.start("step")
    graph.end("step")
    graph.run_sync(thread, {"n": 0})
    for value in "ab":
        thread.send("x", value)
    graph.resume_sync(thread)
    for value in "cd":
        thread.send("x", value)
    done = graph.resume_sync(thread)

    assert [done.values[f"got {n}"] for n in range(4)] == ["a", "b", "c", "d"]


def test_a_wait_ends_with_its_time(url: str, clock: Any) -> None:
    def node(state: Any, ctx: Context) -> Any:
        try:
            return {"got": ctx.wait_for("paid", timeout=60)}
        except TimeoutError:
            return {"got": "nothing"}

    with backstay.open(url, clock=clock) as store:
        thread, graph = store.thread("t"), one(node)
        graph.run_sync(thread, {})
        clock.step(seconds=61)
        with pytest.raises(Conflict, match="too late"):
            thread.send("paid", 1)
        assert graph.resume_sync(thread).values == {"got": "nothing"}


def test_each_parallel_branch_waits_for_its_own_name(store: backstay.Store, thread: backstay.Thread) -> None:
    def build(name: Callable[[Context], str]) -> Graph:
        graph = Graph("g")
        graph.node("s", lambda state: {"items": ["a", "b"]})
        graph.node("work", lambda state, ctx: {f"got {ctx.item}": ctx.wait_for(name(ctx))})
        graph.map("s", "work", over="items", on_error="collect_all")
        graph.start("s")
        return graph

    graph = build(lambda ctx: f"paid-{ctx.item}")
    graph.run_sync(thread, {})
    thread.send("paid-b", 2)
    assert graph.resume_sync(thread).status is Status.INTERRUPTED
    thread.send("paid-a", 1)
    done = graph.resume_sync(thread)
    assert (done.values["got a"], done.values["got b"]) == (1, 2)

    failed = build(lambda ctx: "paid").run_sync(store.thread("u"), {})
    assert failed.status is Status.FAILED
    assert "parallel branches" in str(failed.error)


def test_a_loop_waits_for_values_too(thread: backstay.Thread) -> None:
    def run() -> Loop:
        with thread.loop({"got": []}) as loop:
            for turn in loop:
                turn.append(got=[turn.wait_for("x")])
                if turn.iteration == 3:
                    loop.finish()
        return loop

    assert run().status == "interrupted"
    for value in "abc":
        thread.send("x", value)
    assert run().state["got"] == ["a", "b", "c"]


def test_an_async_loop_waits_for_values_too(tmp_path: Any) -> None:
    async def whole() -> Any:
        async with await backstay.aopen(tmp_path / "a.db") as store:
            thread = store.thread("t")
            for _ in range(2):
                async with thread.loop({"got": []}) as loop:
                    async for turn in loop:
                        turn.append(got=[await turn.wait_for("x")])
                        loop.finish()
                if loop.status == "interrupted":
                    await thread.send("x", 5)
            return loop.state["got"]

    assert asyncio.run(whole()) == [5]


def test_the_state_of_a_waiting_run_can_be_edited(thread: backstay.Thread) -> None:
    def node(state: Any, ctx: Context) -> Any:
        return {"sent": (ctx.approve("send", "x"), state["plan"])}

    graph = one(node)
    [record] = graph.run_sync(thread, {"plan": "old"}).interrupts
    seen = head(thread)
    edited = graph.edit_sync(thread, {"plan": "new"}, on=seen)
    assert (edited.state, edited.trigger, edited.interrupt) == ({"plan": "new"}, "manual", seen.interrupt)
    with pytest.raises(Conflict, match="moved on"):
        graph.edit_sync(thread, {"plan": "newer"}, on=seen)

    thread.decide(record, "approve", by="ann")
    assert graph.resume_sync(thread).values == {"plan": "new", "sent": ("x", "new")}
    with pytest.raises(InvalidInput, match="is over"):
        graph.edit_sync(thread, {"plan": "late"})


def test_a_turn_may_be_typed(thread: backstay.Thread) -> None:
    """The types of results pass through; mypy checks this file."""
    with thread.loop({"log": []}) as loop:
        for turn in loop:
            assert isinstance(turn, Turn)
            text: str = turn.call("upper", str.upper, "a")
            number: int = turn.effect("len", len, text)
            loop.finish(number=number)
    assert loop.state["number"] == 1
