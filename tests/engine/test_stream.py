"""Streams: of events, of states and of updates; a slow reader is waited for, or is told how much it missed."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

import backstay
from backstay import Graph
from backstay.engine import Status, reducers
from backstay.engine.events import Event, Missed, NodeFinished, NodeStarted, RunEnded, Stream, Token
from backstay.errors import InvalidInput
from backstay.model.decision import Approve, Modify


def run(main: Callable[[backstay.AsyncStore], Coroutine[Any, Any, None]]) -> None:
    async def opened() -> None:
        async with await backstay.aopen("memory:") as store:
            await main(store)

    asyncio.run(opened())


async def everything(stream: Stream[Any]) -> list[Any]:
    return [item async for item in stream]


def chain(**nodes: Callable[..., Any]) -> Graph:
    graph = Graph("chain", reducers={"log": reducers.append})
    names = list(nodes)
    for name, node in nodes.items():
        graph.node(name, node)
    for one, other in itertools.pairwise(names):
        graph.edge(one, other)
    graph.start(names[0])
    graph.end(names[-1])
    return graph


# Modes ------------------------------------------------------------------------------------------------------------


def test_values_are_the_state_at_the_start_and_after_each_commit_and_never_change_afterwards() -> None:
    graph = chain(a=lambda state: {"log": ["a"]}, b=lambda state: None, c=lambda state: {"log": ["c"], "n": 1})

    async def main(store: backstay.AsyncStore) -> None:
        stream = graph.stream(store.thread("t"), {"log": []}, mode="values")
        states = await everything(stream)

        assert states == [{"log": []}, {"log": ["a"]}, {"log": ["a"]}, {"log": ["a", "c"], "n": 1}]
        assert stream.result.state == states[-1]
        assert stream.result.status is Status.COMPLETED

    run(main)


def test_a_reader_may_change_the_top_level_of_a_state_and_an_update() -> None:
    graph = chain(a=lambda state: {"n": 1}, b=lambda state: {"m": state["n"] + 1})

    async def main(store: backstay.AsyncStore) -> None:
        for mode in ("values", "updates"):
            stream: Stream[Any] = graph.stream(store.thread(mode), {}, mode=mode, buffer=1)
            async for item in stream:
                for each in [item, *item.values()]:
                    if isinstance(each, dict):
                        each["n"] = "changed"
            assert stream.result.values == {"n": 1, "m": 2}

    run(main)


@dataclass
class Basket:
    items: Annotated[list[str], reducers.append] = field(default_factory=list)


def test_values_have_the_declared_class() -> None:
    graph = Graph("g", state=Basket)
    graph.node("a", lambda state: {"items": [f"after {len(state.items)}"]})
    graph.start("a")
    graph.end("a")

    async def main(store: backstay.AsyncStore) -> None:
        states = await everything(graph.stream(store.thread("t"), {}, mode="values"))
        assert states == [Basket([]), Basket(["after 0"])]

    run(main)


def test_updates_name_the_node_and_in_a_subgraph_its_path() -> None:
    inner = chain(x=lambda state: {"log": ["x"]}, y=lambda state: None)
    graph = Graph("outer", reducers={"log": reducers.append})
    graph.node("first", lambda state: {"log": ["first"]})
    graph.subgraph("sub", inner)
    graph.edge("first", "sub")
    graph.start("first")
    graph.end("sub")

    async def main(store: backstay.AsyncStore) -> None:
        updates = await everything(graph.stream(store.thread("t"), {"log": []}, mode="updates"))
        assert updates == [
            {"first": {"log": ["first"]}},
            {"sub/x": {"log": ["x"]}},
            {"sub/y": {}},
            {"sub": {"log": ["x"]}},
        ]
        states = await everything(graph.stream(store.thread("u"), {"log": []}, mode="values"))
        assert [state["log"] for state in states] == [[], ["first"], ["first", "x"]]

    run(main)


def test_parallel_branches_give_one_update_each_in_the_order_of_their_declaration() -> None:
    graph = Graph("g")
    graph.node("split", lambda state: {"items": ["p", "q"]})
    done = {"p": asyncio.Event(), "q": asyncio.Event()}

    @graph.node
    async def work(state: dict[str, Any], ctx: Any) -> dict[str, Any]:
        if ctx.item == "p":
            await done["q"].wait()  # the first branch ends last
        done[ctx.item].set()
        return {ctx.item: True}

    graph.map("split", "work", over="items")
    graph.start("split")

    async def main(store: backstay.AsyncStore) -> None:
        updates = await everything(graph.stream(store.thread("t"), {}, mode="updates"))
        assert updates == [{"split": {"items": ["p", "q"]}}, {"work[0]": {"p": True}}, {"work[1]": {"q": True}}]

    run(main)


def test_an_answer_that_changes_the_state_is_an_update_of_its_node() -> None:
    graph = chain(a=lambda state: {"n": 1}, b=lambda state: {"m": 1})

    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        stream = graph.stream(thread, {}, mode="updates", after=["a"], before=["b"])
        assert await everything(stream) == [{"a": {"n": 1}}]
        assert stream.result.status is Status.INTERRUPTED
        (asked,) = stream.result.interrupts
        stream = graph.stream_resume(thread, {asked.id: Modify({"n": 2})}, mode="updates")
        assert await everything(stream) == [{"a": {"n": 2}}]
        stream = graph.stream_resume(thread, Modify({"n": 3}), mode="updates")
        assert await everything(stream) == [{"b": {"n": 3}}, {"b": {"m": 1}}]
        assert stream.result.values == {"n": 3, "m": 1}

    run(main)


def test_a_resumed_run_starts_with_the_state_it_resumes_from() -> None:
    graph = chain(a=lambda state: {"n": 1}, b=lambda state: {"m": 1})

    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        assert await everything(graph.stream(thread, {}, mode="values", before=["b"])) == [{}, {"n": 1}]
        assert await everything(graph.stream_resume(thread, Approve(), mode="values")) == [{"n": 1}, {"n": 1, "m": 1}]

    run(main)


def test_a_finished_node_carries_its_update_and_its_text_does_not_show_it() -> None:
    seen: list[Event] = []
    graph = chain(a=lambda state: {"password": "hunter2"})
    graph.run_sync(backstay.open("memory:").thread("t"), {}, on_event=seen.append)
    (finished,) = [event for event in seen if isinstance(event, NodeFinished)]

    assert finished.update == {"password": "hunter2"}
    assert "hunter2" not in repr(seen)
    assert hash(finished) == hash(NodeFinished(finished.position, "a", ("password",), finished.seconds))


# The object -------------------------------------------------------------------------------------------------------


def test_the_result_is_known_after_the_loop_and_not_before() -> None:
    graph = chain(a=lambda state: {"n": 1})

    async def main(store: backstay.AsyncStore) -> None:
        async with graph.stream(store.thread("t"), {}) as stream:
            events = []
            async for event in stream:
                events.append(event)
                with pytest.raises(InvalidInput, match="not read to its end"):
                    _ = stream.result
            assert isinstance(events[-1], RunEnded)
            assert stream.result.values == {"n": 1}
            assert await everything(stream) == []
        async with graph.stream(store.thread("u"), {}) as left:
            pass
        with pytest.raises(InvalidInput, match="not read to its end"):
            _ = left.result

    run(main)


def test_an_error_of_the_run_is_raised_by_the_loop() -> None:
    async def main(store: backstay.AsyncStore) -> None:
        stream = chain(a=lambda state: None).stream(store.thread("t"), {}, limit=0)
        with pytest.raises(InvalidInput):
            await everything(stream)

    run(main)


async def leave_with_aclose(stream: Stream[Event]) -> None:
    await until_a_node_runs(stream)
    await stream.aclose()


async def leave_with_a_block(stream: Stream[Event]) -> None:
    async with stream:
        await until_a_node_runs(stream)


async def leave_by_dropping_it(stream: Stream[Event]) -> None:
    await until_a_node_runs(stream)


async def until_a_node_runs(stream: Stream[Event]) -> None:
    async for event in stream:
        if isinstance(event, NodeStarted):
            return


@pytest.mark.parametrize("leave", [leave_with_aclose, leave_with_a_block, leave_by_dropping_it])
def test_leaving_early_ends_the_run(leave: Callable[[Stream[Event]], Coroutine[Any, Any, None]]) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        running, cancelled = asyncio.Event(), asyncio.Event()

        async def endless(state: dict[str, Any]) -> None:
            running.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        stream = chain(a=endless).stream(store.thread("t"), {})
        leaving = asyncio.ensure_future(leave(stream))
        del stream
        await leaving
        del leaving
        gc.collect()
        await cancelled.wait()

    run(main)


@pytest.mark.parametrize("options", [{"mode": "everything"}, {"buffer": 0}, {"buffer": True}, {"buffer": 1.5}])
def test_wrong_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"mode|buffer"):
        chain(a=lambda state: None).stream(None, {}, **options)


# Slow readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [True, False])
def test_tokens_that_do_not_fit_are_counted_in_their_place(is_async: bool) -> None:
    def plain(state: dict[str, Any], ctx: Any) -> None:
        for number in range(100_000):
            ctx.emit(number)
        loops[0].call_soon_threadsafe(talked[0].set)

    async def awaited(state: dict[str, Any], ctx: Any) -> None:
        plain(state, ctx)

    graph = chain(talk=awaited if is_async else plain, last=lambda state, ctx: ctx.emit("last"))

    loops: list[asyncio.AbstractEventLoop] = []
    talked: list[asyncio.Event] = []

    async def main(store: backstay.AsyncStore) -> None:
        loops.append(asyncio.get_running_loop())
        talked.append(asyncio.Event())
        stream = graph.stream(store.thread("t"), {}, buffer=10)
        events = []
        async for event in stream:
            events.append(event)
            await talked[0].wait()  # the reader takes one event, and then none until the node is done
            assert len(stream._feed._items) <= 14
        tokens = [event for event in events if isinstance(event, Token)]
        missed = [event for event in events if isinstance(event, Missed)]

        assert len(missed) == 1
        assert len(tokens) - 1 + missed[0].count == 100_000
        assert [event.data for event in tokens[:-1]] == list(range(len(tokens) - 1))
        assert tokens[-1].data == "last"  # by then the reader had caught up
        assert events.index(missed[0]) == events.index(tokens[-2]) + 1

    run(main)


def test_a_run_waits_for_its_reader_before_it_starts_another_node() -> None:
    ran: list[int] = []

    async def step(state: dict[str, Any]) -> dict[str, Any]:
        ran.append(state["n"])
        return {"n": state["n"] + 1}

    graph = Graph("count")
    graph.node("step", step)
    graph.edge("step", "step", when=lambda state: state["n"] < 50, name="more")
    graph.start("step")
    graph.end("step")

    async def main(store: backstay.AsyncStore) -> None:
        for mode in ("values", "updates", "events"):
            ran.clear()
            stream: Stream[Any] = graph.stream(
                store.thread(mode), {"n": 0}, mode=mode, buffer=4, limit=100, lease_s=None
            )
            longest = 0
            async for _ in stream:
                for _ in range(20):  # give the run every chance to get ahead
                    await asyncio.sleep(0)
                longest = max(longest, len(stream._feed._items))
            assert stream.result.values == {"n": 50}
            assert len(ran) == 50
            assert longest <= 8  # one node gives at most four events

    run(main)


def test_a_run_of_many_branches_waits_too() -> None:
    graph = Graph("wide")
    graph.node("split", lambda state: {"items": list(range(200))})

    @graph.node
    async def work(state: dict[str, Any], ctx: Any) -> None:
        running.append(ctx.item)

    graph.map("split", "work", over="items")
    graph.start("split")
    running: list[int] = []

    async def main(store: backstay.AsyncStore) -> None:
        stream = graph.stream(store.thread("t"), {}, buffer=5)
        longest = 0
        async for _ in stream:
            longest = max(longest, len(stream._feed._items))
        assert len(running) == 200
        assert longest < 20

    run(main)
