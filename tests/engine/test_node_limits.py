"""Limits: how many branches or calls run at the same time, and how many start per second."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import backstay
from backstay import Approve, Graph
from backstay.engine import Cancellation
from backstay.engine.events import Event, NodeStarted
from backstay.engine.limits import Limiter
from backstay.engine.reducers import append
from backstay.errors import InvalidInput
from backstay.retry import RetryPolicy
from support.processes import ended_well, forked

LONG_S = 1000.0
"""A wait that no test lives to see the end of."""


class Crowd:
    """Counts how many are inside at the same time, from any thread."""

    def __init__(self) -> None:
        self.order: list[Any] = []
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()

    def enter(self, who: Any = None) -> None:
        with self._lock:
            self.order.append(who)
            self._inside += 1
            self.most = max(self.most, self._inside)

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1

    async def stay(self, who: Any = None) -> None:
        self.enter(who)
        for _ in range(10):
            await asyncio.sleep(0)
        self.leave()


def mapped(count: int, node: Any, at_once: int | None, **options: Any) -> Graph:
    graph = Graph("g", reducers={"done": append})
    graph.node("split", lambda state: {"items": list(range(count))})
    graph.node("work", node)
    graph.map("split", "work", over="items", at_once=at_once, **options)
    graph.start("split")
    return graph


def graph_of(function: Any, **options: Any) -> Graph:
    graph = Graph("g")
    graph.node("a", function, **options)
    graph.start("a")
    graph.end("a")
    return graph


# Fan-outs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_once", "most"), [(None, 20), (1, 1), (3, 3), (50, 20)])
def test_a_map_works_on_so_many_items_at_once_and_starts_them_in_order(at_once: int | None, most: int) -> None:
    crowd = Crowd()

    async def work(state: Any, ctx: Any) -> dict[str, Any]:
        await crowd.stay(ctx.item)
        return {"done": [ctx.item]}

    result = mapped(20, work, at_once).run_sync(None)
    assert result.values["done"] == list(range(20))
    assert crowd.order == list(range(20))
    assert crowd.most == most


def test_plain_branches_are_limited_too() -> None:
    crowd, meeting = Crowd(), threading.Barrier(4, timeout=60)

    def work(state: Any) -> None:
        crowd.enter()
        meeting.wait()  # passes only if four are here at the same time
        crowd.leave()

    assert mapped(20, work, 4).run_sync(None).status == "completed"
    assert crowd.most == 4


def test_parallel_nodes_with_a_limit_of_one_run_one_after_the_other() -> None:
    crowd = Crowd()
    graph = Graph("g")
    graph.node("split", lambda state: None)
    for name in "abc":

        async def node(state: Any, ctx: Any) -> None:
            await crowd.stay(ctx.node)

        graph.node(name, node)
    graph.parallel("split", ["a", "b", "c"], at_once=1)
    graph.start("split")

    assert graph.run_sync(None).path == ("split", "a", "b", "c")
    assert (crowd.order, crowd.most) == (["a", "b", "c"], 1)


def test_a_branch_that_waits_for_a_person_frees_its_place() -> None:
    def work(state: Any, ctx: Any) -> dict[str, Any]:
        if ctx.item == 0:
            ctx.approve("tool")
        return {"done": [ctx.item]}

    graph = mapped(3, work, 1)
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        assert graph.run_sync(thread).status == "interrupted"
        latest = thread.latest()
        assert latest is not None
        assert len(latest.writes) == 2, "the other two are done"
        assert graph.resume_sync(thread, Approve()).values["done"] == [0, 1, 2]


def test_a_failure_keeps_the_waiting_branches_from_starting() -> None:
    ran: list[int] = []

    def work(state: Any, ctx: Any) -> None:
        ran.append(ctx.item)
        raise ValueError

    assert mapped(5, work, 1).run_sync(None).status == "failed"
    assert ran == [0]
    ran.clear()
    assert mapped(5, work, 1, on_error="collect_all").run_sync(None).status == "failed"
    assert ran == [0, 1, 2, 3, 4]


def test_a_subgraph_is_one_branch_however_many_nodes_it_runs() -> None:
    crowd = Crowd()

    async def enter(state: Any) -> None:
        crowd.enter()
        await asyncio.sleep(0)

    async def leave(state: Any) -> None:
        await asyncio.sleep(0)
        crowd.leave()

    inner = Graph("inner")
    for name in ("enter", "x", "y", "leave"):
        inner.node(name, {"enter": enter, "leave": leave}.get(name, lambda state: None))
    inner.parallel("enter", ["x", "y"], join="leave", at_once=1)
    inner.start("enter")
    inner.end("leave")
    graph = Graph("g")
    graph.node("split", lambda state: {"items": [0, 1, 2, 3, 4]})
    graph.subgraph("work", inner, into={}, out={})
    graph.map("split", "work", over="items", at_once=2)
    graph.start("split")

    assert graph.run_sync(None).status == "completed"
    assert crowd.most == 2


# Calls of a node --------------------------------------------------------------------------------------------------


def test_calls_of_a_node_are_limited_over_all_runs_of_a_loop() -> None:
    crowd = Crowd()

    async def node(state: Any) -> None:
        await crowd.stay()

    graph = graph_of(node, at_once=4)

    async def main() -> list[Any]:
        return await asyncio.gather(*(graph.run(None) for _ in range(20)))

    assert {each.status for each in asyncio.run(main())} == {"completed"}
    assert crowd.most == 4


def test_calls_of_a_node_are_limited_over_threads_and_event_loops() -> None:
    crowd, meeting = Crowd(), threading.Barrier(2, timeout=60)
    graph = Graph("g")

    @graph.node("a", at_once=2)
    def node(state: Any) -> None:
        crowd.enter()
        meeting.wait()
        crowd.leave()

    graph.start("a")
    graph.end("a")
    ended: list[str] = []

    def blocking() -> None:
        ended.append(graph.run_sync(None).status.value)

    def in_a_loop() -> None:
        ended.append(asyncio.run(graph.run(None)).status.value)

    threads = [threading.Thread(target=target) for target in (blocking, in_a_loop) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == ["completed"] * 12
    assert crowd.most == 2


def test_a_fallback_is_not_limited() -> None:
    def broken(state: Any) -> None:
        raise ValueError

    graph = graph_of(broken, per_second=1 / LONG_S, fallback=lambda state: {"v": 1})

    assert graph.run_sync(None).values == {"v": 1}


# Starts per second ------------------------------------------------------------------------------------------------


def test_starts_keep_their_distance() -> None:
    starts: list[float] = []
    graph = graph_of(lambda state: starts.append(time.monotonic()), per_second=100)

    async def main() -> None:
        await asyncio.gather(*(graph.run(None) for _ in range(4)))

    asyncio.run(main())
    graph.run_sync(None)
    starts.sort()
    # They are noted in other threads, so their own distances vary; the whole cannot be shorter.
    assert len(starts) == 5
    assert starts[-1] - starts[0] > 3 * 0.01


def waits(graph: Graph, stop: Cancellation, chosen: Callable[[Event], bool]) -> str:
    """Run a graph until it reports a chosen event, and cancel it while it waits."""

    async def main() -> str:
        loop = asyncio.get_running_loop()

        def on_event(event: Event) -> None:
            if chosen(event):
                loop.call_soon_threadsafe(lambda: loop.call_soon(stop.cancel))

        return (await graph.run(None, cancel=stop, on_event=on_event)).status.value

    return asyncio.run(main())


def test_waiting_for_a_start_ends_at_once_when_the_run_is_cancelled() -> None:
    ran: list[int] = []
    graph = graph_of(lambda state: ran.append(1), per_second=1 / LONG_S)

    assert graph.run_sync(None).status == "completed"
    assert waits(graph, Cancellation(), lambda event: isinstance(event, NodeStarted)) == "cancelled"
    assert ran == [1]


def test_a_retry_counts_as_a_start() -> None:
    ran: list[int] = []

    def broken(state: Any) -> None:
        ran.append(1)
        raise ConnectionError

    graph = graph_of(broken, per_second=1 / LONG_S, retry=RetryPolicy(1, first_s=0))
    is_second = lambda event: isinstance(event, NodeStarted) and event.attempt == 2  # noqa: E731

    assert waits(graph, Cancellation(), is_second) == "cancelled"
    assert ran == [1]


def test_the_wait_does_not_count_in_the_timeout() -> None:
    async def node(state: Any) -> None:
        """Return at once, so that no timeout can come in between."""

    graph = graph_of(node, per_second=20, timeout=0.001)

    assert [graph.run_sync(None).status for _ in range(3)] == ["completed"] * 3


def test_other_nodes_run_while_one_waits_for_its_start() -> None:
    graph, other = graph_of(lambda state: None, per_second=1 / LONG_S), graph_of(lambda state: {"v": 1})

    async def main() -> Any:
        await graph.run(None)
        waiting = asyncio.create_task(graph.run(None))
        values = [(await other.run(None)).values for _ in range(5)]
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        return values

    assert asyncio.run(main()) == [{"v": 1}] * 5


# The limiter ------------------------------------------------------------------------------------------------------


def test_places_are_given_in_order_and_a_cancelled_caller_loses_none() -> None:
    async def main() -> list[int]:
        limiter, order, open_ = Limiter(1), list[int](), asyncio.Event()

        async def caller(number: int) -> None:
            async with limiter.turn():
                order.append(number)
                await open_.wait()

        callers = [asyncio.create_task(caller(number)) for number in range(6)]
        await asyncio.sleep(0)
        callers[1].cancel()  # waits
        callers[3].cancel()
        await asyncio.wait([callers[1], callers[3]])
        callers[0].cancel()  # holds the place
        await asyncio.sleep(0)
        callers[2].cancel()  # was given the place, and does not know it yet
        await asyncio.wait([callers[2]])
        open_.set()
        await asyncio.gather(*callers[4:])
        return order

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [0, 4, 5]


def test_a_cancelled_wait_for_a_start_does_not_use_it_up() -> None:
    async def main() -> float:
        limiter = Limiter(per_second=20)
        async with limiter.turn():
            pass
        waiting = [asyncio.create_task(limiter.turn().__aenter__()) for _ in range(1000)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        return limiter._next_start - time.monotonic()

    assert asyncio.run(main()) <= 0.05, "only the first start counts"


def test_a_waiter_whose_loop_is_closed_is_passed_over() -> None:
    limiter = Limiter(1)

    async def hold() -> None:
        async with limiter.turn():
            loop = asyncio.new_event_loop()
            left = loop.create_task(limiter.turn().__aenter__())
            running = asyncio.get_running_loop()
            asyncio._set_running_loop(None)
            loop.call_soon(loop.stop)
            loop.run_forever()
            loop.close()
            asyncio._set_running_loop(running)
            left._log_destroy_pending = False  # type: ignore[attr-defined]
            leftovers.append(left)
        async with limiter.turn():
            pass

    leftovers: list[Any] = []
    asyncio.run(asyncio.wait_for(hold(), 60))


def test_a_forked_process_has_all_places_free() -> None:
    limiter = Limiter(1)

    async def use() -> None:
        async with limiter.turn():
            pass

    async def hold() -> int:
        async with limiter.turn():
            return forked(lambda: threading.Thread(target=lambda: asyncio.run(use())).run())

    pid = asyncio.run(hold())
    assert ended_well(pid)


# Declaring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "4", float("nan")])
def test_a_limit_must_be_a_whole_number_above_0(wrong: Any) -> None:
    graph = Graph("g")
    for declare in (
        lambda: graph.node("a", lambda state: None, at_once=wrong),
        lambda: graph.map("a", "b", over="items", at_once=wrong),
        lambda: graph.parallel("a", ["b"], at_once=wrong),
    ):
        with pytest.raises(InvalidInput, match=r"at_once of .*must be a whole number above 0"):
            declare()


@pytest.mark.parametrize("wrong", [0, -0.5, float("inf"), float("nan"), True, "5"])
def test_a_rate_must_be_a_number_above_0(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="per_second of node 'a' must be a number above 0"):
        Graph("g").node("a", lambda state: None, per_second=wrong)


def test_limits_are_no_part_of_the_fingerprint_and_may_change_between_run_and_resume() -> None:
    def build(asks: bool, **limits: Any) -> Graph:
        graph = Graph("g", reducers={"done": append})
        graph.node("split", lambda state: {"items": [0, 1]}, **limits)

        def work(state: Any, ctx: Any) -> dict[str, Any]:
            if asks:
                ctx.approve("tool")
            return {"done": [ctx.item]}

        graph.node("work", work, **limits)
        graph.map("split", "work", over="items", at_once=limits.get("at_once"))
        graph.start("split")
        return graph

    limited = build(False, at_once=1, per_second=1000.0)
    assert limited.fingerprint == build(False).fingerprint
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        assert build(True).run_sync(thread).status == "interrupted"
        assert limited.resume_sync(thread).values["done"] == [0, 1]
