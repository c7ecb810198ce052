"""One handle, one run: a second run or loop through the same handle waits, or is refused before anything of it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.engine import Result, Status
from backstay.engine.events import NodeStarted
from backstay.engine.reducers import append
from backstay.errors import InvalidInput
from backstay.thread.lease import Lease

WAIT_S = 60.0


class Gated:
    """A graph of three nodes, whose first one waits in an event loop until it may go on."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.entered = asyncio.Event()
        self.may_end = asyncio.Event()
        self.graph = Graph("g", reducers={"log": append})
        for name in "abc":
            self.graph.node(name, self._node)
        self.graph.edge("a", "b")
        self.graph.edge("b", "c")
        self.graph.start("a")
        self.graph.end("c")

    async def _node(self, state: Any, ctx: Any) -> dict[str, Any]:
        self.ran.append(ctx.node)
        if ctx.node == "a":
            self.entered.set()
            await self.may_end.wait()
        return {"log": [ctx.node]}


def chain(ran: list[str], inside: Callable[[], None] | None = None) -> Graph:
    """Return a graph of two plain nodes; the first one calls a function."""
    graph = Graph("g", reducers={"log": append})

    def node(state: Any, ctx: Any) -> dict[str, Any]:
        ran.append(ctx.node)
        if ctx.node == "a" and inside is not None:
            inside()
        return {"log": [ctx.node]}

    graph.node("a", node)
    graph.node("b", node)
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    return graph


async def loops(thread: backstay.AsyncThread, **options: Any) -> None:
    async with thread.loop({"log": []}, **options) as loop:
        async for _ in loop:
            raise AssertionError("a turn ran")


Second = Callable[[Graph, backstay.AsyncThread], Any]


@pytest.mark.parametrize("lease_s", [30.0, None])
@pytest.mark.parametrize(
    "second",
    [
        lambda graph, thread: graph.run(thread, {}),
        lambda graph, thread: graph.resume(thread),
        lambda graph, thread: graph.run(thread, {}, lease_s=None),
        lambda graph, thread: loops(thread),
    ],
    ids=["run", "resume", "run without a lease", "loop"],
)
def test_a_second_run_on_a_handle_is_refused_before_anything_of_it_runs(
    url: str, second: Second, lease_s: float | None
) -> None:
    async def main() -> None:
        gated = Gated()
        async with await backstay.aopen(url) as store:
            thread = store.thread("customer-42")
            first = asyncio.create_task(gated.graph.run(thread, {}, lease_s=lease_s))
            await gated.entered.wait()
            with pytest.raises(backstay.Fenced, match=r"customer-42.*wait=") as caught:
                await second(gated.graph, thread)
            assert caught.value.thread == "customer-42"
            gated.may_end.set()
            result = await first
            assert (result.status, result.values) == (Status.COMPLETED, {"log": ["a", "b", "c"]})
            assert gated.ran == ["a", "b", "c"]

    asyncio.run(main())


@pytest.mark.parametrize("lease_s", [30.0, None])
def test_two_runs_that_start_at_the_same_moment_on_a_handle_run_one_after_the_other(
    url: str, lease_s: float | None
) -> None:
    async def main() -> None:
        gated = Gated()
        gated.may_end.set()
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            runs = [gated.graph.run(thread, {}, wait=WAIT_S, lease_s=lease_s) for _ in range(4)]
            results = await asyncio.gather(*runs)
        assert [result.status for result in results] == [Status.COMPLETED] * 4
        assert gated.ran == ["a", "b", "c"] * 4
        assert sorted(len(result.values["log"]) for result in results) == [3, 6, 9, 12]

    asyncio.run(main())


@pytest.mark.parametrize("lease_s", [30.0, None])
def test_runs_on_a_handle_in_several_threads_run_one_after_the_other(url: str, lease_s: float | None) -> None:
    ran: list[str] = []
    graph = chain(ran)
    results: list[Result] = []
    with backstay.open(url) as store:
        thread = store.thread("t")

        def run() -> None:
            results.append(graph.run_sync(thread, {}, wait=WAIT_S, lease_s=lease_s))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    assert ran == ["a", "b"] * 4
    assert sorted(len(result.values["log"]) for result in results) == [2, 4, 6, 8]


def test_a_second_run_in_another_thread_is_refused(url: str) -> None:
    entered, may_end = threading.Event(), threading.Event()
    ran: list[str] = []

    def wait() -> None:
        entered.set()
        assert may_end.wait(WAIT_S)

    graph = chain(ran, wait)
    with backstay.open(url) as store:
        thread = store.thread("t")
        results: list[Result] = []
        first = threading.Thread(target=lambda: results.append(graph.run_sync(thread, {})))
        first.start()
        assert entered.wait(WAIT_S)
        with pytest.raises(backstay.Fenced, match="another run or loop uses this handle of thread 't'"):
            graph.resume_sync(thread)
        with pytest.raises(backstay.Fenced, match="another run or loop"), thread.loop({"log": []}):
            raise AssertionError("entered")
        may_end.set()
        first.join()
        assert (results[0].status, ran) == (Status.COMPLETED, ["a", "b"])


def test_a_reader_that_breaks_can_resume_in_the_next_line(url: str) -> None:
    """The run that it left is being cancelled at that moment."""

    async def main() -> None:
        gated = Gated()
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            async for event in gated.graph.stream(thread, {}):
                if isinstance(event, NodeStarted):
                    break
            gated.entered.clear()
            resumed = asyncio.create_task(gated.graph.resume(thread))
            await gated.entered.wait()
            gated.may_end.set()
            assert (await resumed).values == {"log": ["a", "b", "c"]}
            assert gated.ran == ["a", "a", "b", "c"]

    asyncio.run(main())


def test_a_handle_is_free_after_a_run_that_failed_was_cancelled_or_refused(url: str) -> None:
    async def main() -> None:
        gated = Gated()
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            with pytest.raises(backstay.NotFound):
                await gated.graph.resume(thread)
            first = asyncio.create_task(gated.graph.run(thread, {}))
            await gated.entered.wait()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            async with store.thread("t").lease():
                with pytest.raises(backstay.Fenced):
                    await gated.graph.resume(thread)
            gated.may_end.set()
            assert (await gated.graph.resume(thread)).status is Status.COMPLETED

    asyncio.run(main())


def test_a_node_that_runs_its_own_thread_is_refused(url: str) -> None:
    async def main() -> None:
        graph = Graph("g")
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")

            async def again(state: Any) -> dict[str, Any]:
                with pytest.raises(backstay.Fenced, match="another run or loop"):
                    await graph.run(thread, {})
                return {"refused": True}

            graph.node("again", again)
            graph.start("again")
            graph.end("again")
            result = await graph.run(thread, {})
            assert (result.status, result.values) == (Status.COMPLETED, {"refused": True})

    asyncio.run(main())


def test_a_run_uses_the_lease_that_the_caller_passes_and_keeps_it(url: str) -> None:
    ran: list[str] = []
    graph = chain(ran)
    with backstay.open(url) as store:
        thread, other = store.thread("t"), store.thread("t")
        with thread.lease() as lease:
            with pytest.raises(backstay.Fenced, match=r"already holds the lease .* 't'.*lease=lease"):
                graph.run_sync(thread, {})
            with pytest.raises(backstay.Fenced, match="lease=lease"):
                graph.run_sync(thread, {}, lease_s=None)
            with pytest.raises(backstay.Fenced, match="lease=lease"), thread.loop({"log": []}):
                raise AssertionError("entered")
            assert ran == []
            graph.run_sync(thread, {}, lease=lease)
            graph.run_sync(thread, {}, lease=lease)
            lease.raise_if_lost()
            assert (ran, lease.epoch) == (["a", "b", "a", "b"], 1)
            with pytest.raises(InvalidInput, match="did not take the lease"):
                graph.run_sync(other, {}, lease=lease)
            with pytest.raises(InvalidInput, match="lease must be a lease"):
                graph.run_sync(thread, {}, lease="mine")  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match="a replay runs on a new branch"):
                graph.replay_sync(thread, next(iter(thread.history())), branch="b", lease=lease)
        with pytest.raises(InvalidInput, match="was released"):
            graph.run_sync(thread, {}, lease=lease)
        with pytest.raises(InvalidInput, match="not taken yet"):
            graph.run_sync(thread, {}, lease=thread.lease())
        assert len(ran) == 4
        graph.run_sync(thread, {})


def test_only_one_run_or_loop_at_a_time_uses_a_lease_that_was_passed(url: str) -> None:
    async def main() -> None:
        gated = Gated()
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            async with thread.lease() as lease:
                first = asyncio.create_task(gated.graph.run(thread, {}, lease=lease))
                await gated.entered.wait()
                for second in (gated.graph.resume(thread, lease=lease), loops(thread, lease=lease)):
                    with pytest.raises(backstay.Fenced, match="another run or loop"):
                        await second
                gated.may_end.set()
                assert (await first).status is Status.COMPLETED
                assert gated.ran == ["a", "b", "c"]

    asyncio.run(main())


def test_a_run_waits_for_the_lease_that_its_handle_holds(url: str) -> None:
    async def main() -> None:
        gated = Gated()
        gated.may_end.set()
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            async with thread.lease():
                runs = [
                    asyncio.create_task(gated.graph.run(thread, {}, wait=WAIT_S, lease_s=lease_s))
                    for lease_s in (30.0, None)
                ]
                await thread.save({"log": []})
                assert gated.ran == []
            for run in runs:
                assert (await run).status is Status.COMPLETED

    asyncio.run(main())


def test_a_claimed_lease_is_passed_to_the_run_that_it_is_for(url: str) -> None:
    graph = chain([])
    with backstay.open(url) as store:
        graph.run_sync(store.thread("t"), {}, before=["b"])
        (question,) = store.interrupts()
        assert store.claim(graph) == []
        store.thread("t").decide(question, "approve", by="ann")
        leases: list[Lease] = store.claim(graph)
        with pytest.raises(backstay.Fenced, match="lease=lease"):
            graph.resume_sync(leases[0].thread)
        with leases[0] as lease:
            result = graph.resume_sync(lease.thread, lease=lease)
        assert result.values == {"log": ["a", "b"]}


def test_a_replay_runs_beside_the_run_of_its_handle(url: str) -> None:
    """It has a branch and a handle of its own."""

    async def main() -> None:
        gated = Gated()
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            first = asyncio.create_task(gated.graph.run(thread, {}))
            await gated.entered.wait()
            newest = await store.thread("t").latest()
            assert newest is not None
            again = asyncio.create_task(gated.graph.replay(thread, newest, branch="again"))
            gated.may_end.set()
            assert (await first).values == (await again).values == {"log": ["a", "b", "c"]}

    asyncio.run(main())
