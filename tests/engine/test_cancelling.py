"""Cancelling a run: at any moment, any number of times. Its lease is free afterwards, and it can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

import backstay
from backstay.engine import Status
from backstay.engine.control import Cancellation
from backstay.engine.events import Event, RunEnded, RunStarted
from backstay.engine.triggers import manual
from backstay.operations.drivers import WORKERS_MAX, Offload, finish, in_event_loop
from backstay.store.open import open_backend
from backstay.thread.access import access_of
from backstay.thread.runs import AsyncRun
from backstay.thread.store import AsyncStore, make_services
from support.engine.walk import Walk
from support.running import effort

FOREVER_S = 60.0
CALLS_MAX = 60  # more than a run of these tests makes


class Striking:
    """A store that does something in the thread of the event loop when it is called for the n-th time."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._left = 0
        self._strike: Callable[[], object] | None = None
        self.verb = ""  # the one that was called

    def arm(self, number: int, strike: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()

        def in_loop() -> None:
            done = threading.Event()
            loop.call_soon_threadsafe(strike)
            loop.call_soon_threadsafe(done.set)
            assert done.wait(FOREVER_S)

        self._left, self._strike, self.verb = number, in_loop, ""

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._backend, verb)
        if self._strike is None or not callable(found) or in_event_loop():
            return found
        self._left -= 1
        if self._left:
            return found
        strike, self._strike, self.verb = self._strike, None, verb
        strike()
        return found


@contextlib.asynccontextmanager
async def striking(url: str) -> AsyncIterator[tuple[Striking, AsyncStore]]:
    """Open a store that strikes. Errors that nobody retrieved fail the test."""
    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    backend = Striking(await asyncio.to_thread(open_backend, url))
    async with AsyncStore(backend, make_services("", None)) as store:
        yield backend, store
        assert await store.check()
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


async def cancel_again_and_again(task: asyncio.Task[Any]) -> None:
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def is_free(store: AsyncStore, thread: backstay.AsyncThread) -> None:
    """Take the lease of a thread with another handle, at once, and use the handle of the run again."""
    async with store.thread(thread.id).lease():
        pass
    assert thread._handle.cursor.lease is None
    async with thread.lease():
        pass


async def complete(store: AsyncStore, graph: backstay.Graph, name: str) -> Any:
    """Run a thread to its end in another handle, from wherever it is; return its state."""
    thread = store.thread(name)
    newest = await thread.latest()
    if newest is None:
        await graph.run(thread, {})
    elif not newest.is_over:
        await graph.resume(thread)
    newest = await thread.latest()
    assert newest is not None
    return newest.state


@pytest.mark.parametrize("shape", ["chain", "fan"])
@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_is_cancelled_in_any_call_to_the_store_releases_its_lease(url: str, shape: str, again: bool) -> None:
    async def main() -> None:
        verbs = []
        async with striking(url) as (backend, store):
            for number in range(1, CALLS_MAX):
                walk = Walk()
                graph = walk.chain("a", "b") if shape == "chain" else walk.fan("a", "b")
                thread = store.thread(f"t{number}")
                task = asyncio.create_task(graph.run(thread, {}, lease_s=FOREVER_S))
                others: list[asyncio.Task[None]] = []

                def strike(task: asyncio.Task[Any] = task, others: list[asyncio.Task[None]] = others) -> None:
                    task.cancel()
                    if again:
                        others.append(asyncio.create_task(cancel_again_and_again(task)))

                backend.arm(number, strike)
                await asyncio.wait([task])
                if not backend.verb:
                    break
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.gather(*others)
                verbs.append(backend.verb)
                await is_free(store, thread)
                state = await complete(store, graph, thread.id)
                assert sorted(state["seen"]) == (["a", "b"] if shape == "chain" else ["a", "b", "join", "split"])
        assert {"acquire", "commit", "release"} <= set(verbs)

    asyncio.run(main())


@pytest.mark.parametrize("by_object", [False, True])
@pytest.mark.parametrize("runs_before", [0, 1])
def test_the_record_of_a_run_that_is_cancelled_in_any_call_to_the_store_says_what_is_stored(
    url: str, by_object: bool, runs_before: int
) -> None:
    """A worker that stops while the end of a run is being stored must not leave it as cancelled for good."""

    async def main() -> None:
        statuses = set()
        async with striking(url) as (backend, store):
            for number in range(1, CALLS_MAX):
                graph, thread, cancel = Walk().chain("a", "b"), store.thread(f"t{number}"), Cancellation()
                for _ in range(runs_before):
                    await graph.run(thread, {})
                task = asyncio.create_task(graph.run(thread, {}, cancel=cancel if by_object else None))
                backend.arm(number, cancel.cancel if by_object else task.cancel)
                await asyncio.wait([task])
                if not backend.verb:
                    break
                found = [run for run in await store.runs(thread=thread.id) if isinstance(run, AsyncRun)]
                newest = await thread.latest()
                if len(found) == runs_before:
                    continue  # it was cancelled before anything was stored
                is_over = newest is not None and newest.run_id == found[0].id and newest.is_over
                assert found[0].status == ("completed" if is_over else "abandoned"), (number, backend.verb)
                if by_object and is_over:
                    assert task.result().status is Status.COMPLETED
                statuses.add(str(found[0].status))
                await complete(store, graph, thread.id)
        assert statuses == {"completed", "abandoned"}

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["run", "loop"])
def test_a_cancel_scope_that_cancels_until_the_task_is_gone_leaves_no_lease(url: str, kind: str) -> None:
    """Web frameworks that use anyio end a request this way."""

    async def work(thread: backstay.AsyncThread) -> None:
        if kind == "run":
            await Walk().chain("a", "b").run(thread, {}, lease_s=FOREVER_S)
            return
        async with thread.loop({"log": []}, ttl=FOREVER_S) as loop:
            async for turn in loop:
                turn.append(log=[turn.iteration])
                if turn.iteration == 2:
                    loop.finish()

    async def main() -> None:
        verbs = []
        async with striking(url) as (backend, store):
            for number in range(1, CALLS_MAX):
                thread = store.thread(f"t{number}")
                with anyio.CancelScope() as scope:
                    backend.arm(number, scope.cancel)
                    await work(thread)
                if not backend.verb:
                    break
                assert scope.cancelled_caught
                verbs.append(backend.verb)
                await is_free(store, thread)
        assert {"acquire", "commit", "release"} <= set(verbs)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
def test_a_run_that_is_cancelled_after_any_number_of_turns_of_the_event_loop_leaves_no_lease(
    url: str, kind: str
) -> None:
    async def cancelled_after(turns: int, graph: backstay.Graph, thread: backstay.AsyncThread) -> None:
        async def scoped() -> None:
            if kind == "asyncio":
                await graph.run(thread, {}, lease_s=FOREVER_S)
                return
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await graph.run(thread, {}, lease_s=FOREVER_S)

        scopes: list[Any] = []
        task = asyncio.create_task(scoped())
        for _ in range(turns):
            await asyncio.sleep(0)
        if scopes:
            scopes[0].cancel()
        else:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def main() -> None:
        async with striking(url) as (_, store):
            for turns in range(40 * effort()):
                thread = store.thread(f"t{turns}")
                await cancelled_after(turns * 3, Walk().chain("a", "b"), thread)
                await is_free(store, thread)

    asyncio.run(main())


def test_a_reader_that_stops_at_any_event_leaves_no_lease(url: str) -> None:
    walk = Walk()
    graph = walk.chain("a", "b")

    async def main() -> None:
        kinds: list[type[Event]] = []
        async with striking(url) as (_, store):
            for stop in range(20):
                thread = store.thread(f"t{stop}")
                async with contextlib.aclosing(graph.stream(thread, {}, lease_s=FOREVER_S)) as events:
                    index = 0
                    async for event in events:
                        if index == stop:
                            kinds.append(type(event))
                            break
                        index += 1
                    else:
                        break
                await is_free(store, thread)
                assert (await complete(store, graph, thread.id))["seen"] == ["a", "b"]
        assert (kinds[0], kinds[-1]) == (RunStarted, RunEnded)

    asyncio.run(main())


def test_a_reader_that_is_cancelled_again_waits_until_the_run_has_released_its_lease(url: str) -> None:
    async def main() -> None:
        entered = asyncio.Event()
        graph = backstay.Graph("g")

        async def waits(state: Any) -> None:
            entered.set()
            await asyncio.sleep(FOREVER_S)

        graph.node("waits", waits)
        graph.start("waits")
        graph.end("waits")

        async def read(thread: backstay.AsyncThread) -> None:
            async for _ in graph.stream(thread, {}, lease_s=FOREVER_S):
                pass

        async with striking(url) as (_, store):
            thread = store.thread("t")
            reader = asyncio.create_task(read(thread))
            await entered.wait()
            await cancel_again_and_again(reader)
            assert reader.cancelled()
            await is_free(store, thread)

    asyncio.run(main())


def test_a_timeout_that_fires_while_the_run_ends_is_a_timeout_and_leaves_no_lease(url: str) -> None:
    graph = Walk().chain("a")

    async def timed_out_at(kind: type[Event], thread: backstay.AsyncThread) -> None:
        async with asyncio.timeout(None) as limit:

            def note(event: Event) -> None:
                if isinstance(event, kind):
                    limit.reschedule(asyncio.get_running_loop().time())

            await graph.run(thread, {}, lease_s=FOREVER_S, on_event=note)

    async def main() -> None:
        async with striking(url) as (_, store):
            for kind in (RunStarted, RunEnded):
                thread = store.thread(kind.__name__)
                with pytest.raises(TimeoutError):
                    await timed_out_at(kind, thread)
                await is_free(store, thread)
                assert (await complete(store, graph, thread.id))["seen"] == ["a"]

    asyncio.run(main())


def test_a_run_that_is_cancelled_in_its_first_save_knows_what_is_stored(url: str) -> None:
    graph = Walk().chain("a", "b")

    async def main() -> None:
        events: list[Event] = []
        async with striking(url) as (backend, store):
            thread = store.thread("t")

            def note(event: Event) -> None:
                events.append(event)
                if isinstance(event, RunStarted):
                    backend.arm(1, task.cancel)

            task = asyncio.create_task(graph.run(thread, {}, on_event=note))
            with pytest.raises(asyncio.CancelledError):
                await task
            newest = await store.thread("t").latest()
            assert newest is not None
            assert (newest.step, newest.trigger) == (0, "input")
            assert isinstance(events[-1], RunEnded)
            assert (events[-1].status, events[-1].checkpoint_id) == ("cancelled", newest.id)
            assert (await graph.resume(thread)).path == ("a", "b")

    asyncio.run(main())


@pytest.mark.parametrize("by_object", [False, True])
def test_a_cancelled_run_that_cannot_be_stored_says_why(url: str, by_object: bool) -> None:
    """A cancelled caller sees its cancellation, and the error as its cause. Another caller gets the error itself."""

    async def main() -> None:
        async with striking(url) as (_, store):
            thread, entered, cancel = store.thread("t"), asyncio.Event(), Cancellation()
            backend = access_of(store).store

            async def loses_the_lease(state: Any) -> None:
                held = thread._handle.cursor.lease
                assert held is not None
                await asyncio.to_thread(backend.release, held.branch, held.epoch, held.request.token)
                await asyncio.to_thread(backend.acquire, held.branch, held.request._replace(token="another"))
                entered.set()
                await asyncio.sleep(FOREVER_S)

            graph = backstay.Graph("g")
            graph.node("a", lambda state: {"n": 1})
            graph.node("b", loses_the_lease)
            graph.edge("a", "b")
            graph.start("a")
            graph.end("b")
            run = graph.run(thread, {}, lease_s=FOREVER_S, trigger=manual(), cancel=cancel)
            task = asyncio.create_task(run)
            await entered.wait()
            if by_object:
                cancel.cancel()
                with pytest.raises(backstay.Fenced):
                    await task
                return
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            assert isinstance(caught.value.__cause__, backstay.Fenced)

    asyncio.run(main())


def test_claimed_leases_of_a_cancelled_caller_can_be_claimed_again(url: str) -> None:
    async def main() -> None:
        async with striking(url) as (backend, store):
            graph = backstay.Graph("g")
            graph.node("a", lambda state: None)
            graph.start("a")
            graph.end("a")
            for name in "ab":
                await graph.submit(store.thread(name), {})
            task = asyncio.create_task(store.claim(graph, 5))
            backend.arm(1, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert {lease.run.thread_id for lease in await store.claim(graph, 5)} == {"a", "b"}

    asyncio.run(main())


def test_waiting_for_a_lease_does_not_stop_the_event_loop_of_a_plain_store(url: str) -> None:
    """If it did, the run that is waited for could not end."""

    async def main(store: backstay.Store) -> None:
        entered, may_end = asyncio.Event(), asyncio.Event()

        async def waits(state: Any) -> None:
            entered.set()
            await may_end.wait()

        graph = backstay.Graph("g")
        graph.node("waits", waits)
        graph.start("waits")
        graph.end("waits")
        first = asyncio.create_task(graph.run(store.thread("t"), {}))
        await entered.wait()
        second = asyncio.create_task(graph.run(store.thread("t"), {}, wait=FOREVER_S))
        await asyncio.sleep(0)  # the second one asks for the lease
        may_end.set()
        assert (await first).status is (await second).status is Status.COMPLETED

    with backstay.open(url) as store:
        asyncio.run(main(store))


class Interrupting:
    """A store that sends Ctrl-C to the program when a lease is asked for the second time."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._asked = 0

    def __getattr__(self, verb: str) -> Any:
        if verb == "acquire":
            self._asked += 1
            if self._asked == 2:
                signal.raise_signal(signal.SIGINT)
        return getattr(self._backend, verb)


def test_ctrl_c_ends_the_wait_for_a_lease(url: str) -> None:
    backend = open_backend(url)
    with backstay.Store(backend, make_services("", None)) as holder:
        waiter = backstay.Store(Interrupting(backend), make_services("", None)).thread("t")
        graph = Walk().chain("a")
        lease = holder.thread("t").lease(ttl=FOREVER_S)
        another = threading.Thread(target=lease.__enter__)  # a wait for a lease of the same thread would be refused
        another.start()
        another.join()
        with pytest.raises(KeyboardInterrupt):
            graph.run_sync(waiter, {}, wait=FOREVER_S)
        lease.release()
        assert graph.run_sync(waiter, {}).status is Status.COMPLETED


# Worker threads -----------------------------------------------------------------------------------------------------


def test_a_call_that_was_started_runs_even_if_its_caller_leaves_before_a_worker_is_free() -> None:
    async def main() -> None:
        offload, gate = Offload(), threading.Event()
        ran: list[int] = []
        for _ in range(WORKERS_MAX):
            offload.submit(gate.wait)
        waiters = [asyncio.create_task(offload.run(ran.append, number)) for number in range(3)]
        held = asyncio.create_task(finish(offload.start(ran.append, 3)))
        await asyncio.sleep(0)
        for task in (*waiters, held):
            task.cancel()
        await asyncio.wait(waiters)
        assert ran == []
        assert not held.done()
        gate.set()
        await asyncio.wait([held])
        assert held.cancelled()
        await asyncio.to_thread(offload.close)
        assert sorted(ran) == [0, 1, 2, 3]

    asyncio.run(main())


def test_a_call_may_end_after_its_event_loop() -> None:
    offload, gate, ran = Offload(), threading.Event(), []

    def call() -> None:
        gate.wait()
        ran.append(1)

    async def main() -> None:
        offload.start(call).cancel()

    asyncio.run(main())
    gate.set()
    offload.close()
    assert ran == [1]


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration()])
def test_an_error_of_a_call_reaches_its_waiter(error: Exception) -> None:
    gate = threading.Event()
    gate.set()

    def fail() -> None:
        gate.wait()
        raise error

    async def main() -> None:
        offload = Offload()
        with pytest.raises((ValueError, RuntimeError)):
            await offload.run(fail)
        with pytest.raises((ValueError, RuntimeError)):
            await finish(offload.start(fail))
        gate.clear()
        task = asyncio.create_task(finish(offload.start(fail)))
        await asyncio.sleep(0)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, ValueError | RuntimeError)
        await asyncio.to_thread(offload.close)

    asyncio.run(main())
