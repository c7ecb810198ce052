"""Loops with an event loop: the same as without, and a body whose lease is lost is cancelled."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import backstay
from backstay.errors import InvalidInput, Rejected, StepsExceeded
from backstay.store.open import open_backend
from backstay.thread.access import access_of
from backstay.thread.loop import AsyncLoop, Loop
from backstay.thread.store import AsyncStore, make_services
from backstay.thread.turn import AsyncTurn, Turn
from support.waiting import eventually

FOREVER_S = 60.0
Body = Callable[[AsyncLoop, AsyncTurn], Awaitable[None]]


def run(url: str, main: Callable[[backstay.AsyncStore], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with await backstay.aopen(url) as store:
            await main(store)
            assert await store.check()

    asyncio.run(whole())


async def go(loop: AsyncLoop, body: Body) -> AsyncLoop:
    async with loop:
        async for turn in loop:
            await body(loop, turn)
    return loop


def start(thread: backstay.AsyncThread, **arguments: Any) -> AsyncLoop:
    return thread.loop({"log": []}, pause_check_s=0, **arguments)


@pytest.mark.parametrize(("sync", "asynchronous"), [(Loop, AsyncLoop), (Turn, AsyncTurn)])
def test_both_kinds_have_the_same_methods_and_arguments(sync: type, asynchronous: type) -> None:
    names = [name for name in dir(sync) if not name.startswith("_")]

    assert names == [name for name in dir(asynchronous) if not name.startswith("_")]
    for name in names:
        here, there = getattr(sync, name), getattr(asynchronous, name)
        if callable(here):
            assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters), name
            defaults = [each.default for each in inspect.signature(here).parameters.values()]
            assert defaults == [each.default for each in inspect.signature(there).parameters.values()], name


def test_the_whole_life_of_a_loop_with_await(url: str) -> None:
    calls: list[Any] = []

    async def model(what: int) -> str:
        calls.append(what)
        return f"did {what}"

    def plain(what: int) -> int:
        calls.append(-what)
        return -what

    async def body(loop: AsyncLoop, turn: AsyncTurn) -> None:
        turn.append(log=[await turn.effect("model", model, turn.iteration)])
        turn.append(log=[await turn.effect("plain", plain, turn.iteration)])
        turn.usage(tokens=1)
        if turn.iteration == 2:
            turn.set(amount=(await turn.approve("pay", {"amount": 5}))["amount"])
            loop.finish(name=await turn.ask("Who?", answer=str))

    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        waits = await go(start(thread), body)
        assert (waits.status, waits.iteration) == ("interrupted", 1)
        await thread.decide(waits.interrupts[0], "modify", by="ann", value={"amount": 3})
        asks = await go(start(store.thread("t")), body)
        await thread.decide(asks.interrupts[0], "answer", by="ann", value="Ann")
        done = await go(start(thread, limit=2), body)
        assert (done.status, done.usage.tokens_used, calls) == ("completed", 2, [1, -1, 2, -2])
        assert done.state == {"log": ["did 1", -1, "did 2", -2], "amount": 3, "name": "Ann"}
        assert (await go(start(thread), body)).status == "completed"
        with pytest.raises(StepsExceeded):
            await go(start(thread, input={"log": ["next"]}, limit=1), body)
        with pytest.raises(InvalidInput, match="unfinished run of loop 'loop' with another input"):
            await go(start(thread, input={"log": ["another"]}), body)

    run(url, main)


def test_pausing_rejecting_and_failing_with_await(url: str) -> None:
    async def body(loop: AsyncLoop, turn: AsyncTurn) -> None:
        turn.append(log=[turn.iteration])
        if turn.iteration == 2:
            await turn.approve("pay", 5)

    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        async with start(thread):
            await thread.request_pause("look", by="ann")
        paused = await go(start(thread), body)
        assert (paused.status, paused.iteration) == ("interrupted", 0)
        await thread.decide(paused.interrupts[0], "approve", by="ann")
        asks = await go(start(thread), body)
        await thread.decide(asks.interrupts[0], "reject", by="ann", reason="no")
        failed = start(thread)
        with pytest.raises(Rejected) as caught:
            await go(failed, body)
        assert (caught.value.reason, failed.status, failed.iteration) == ("no", "failed", 1)
        async with thread.loop({}) as left:
            async for turn in left:
                left.finish(done=turn.iteration)
                break
        assert left.status == "completed"

    run(url, main)


@pytest.mark.parametrize("together", ["gather", "group"])
def test_several_questions_may_be_asked_at_once(url: str, together: str) -> None:
    async def body(loop: AsyncLoop, turn: AsyncTurn) -> None:
        asking = [turn.approve(tool, {"tool": tool}) for tool in ("pay", "mail", "pay")]
        if together == "gather":
            await asyncio.gather(*asking, return_exceptions=True)
        else:
            async with asyncio.TaskGroup() as group:
                for each in asking:
                    group.create_task(each)
        loop.finish()

    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        rounds = 0
        while (loop := await go(start(thread), body)).status == "interrupted":
            rounds += 1
            assert await thread.latest()
            for asked in [record async for record in thread.interrupts()]:
                await thread.decide(asked, "approve", by="ann")
        assert loop.status == "completed"
        assert 1 <= rounds <= 3
        assert len([record async for record in thread.interrupts(pending=False)]) == 3

    run(url, main)


def test_a_body_whose_lease_is_lost_is_cancelled(url: str) -> None:
    cancelled: list[bool] = []

    async def main(store: backstay.AsyncStore) -> None:
        thread, other = store.thread("t"), store.thread("t")
        loop = start(thread, ttl=0.3)

        async def body(loop: AsyncLoop, turn: AsyncTurn) -> None:
            turn.append(log=[turn.iteration])
            if turn.iteration < 2:
                return
            assert loop._use.lease is not None
            hold = loop._use.lease._taken()
            await asyncio.to_thread(access_of(store).store.release, hold.branch, hold.epoch, hold.request.token)
            async with other.lease():
                try:
                    await asyncio.sleep(FOREVER_S)
                except asyncio.CancelledError:
                    cancelled.append(True)
                    raise

        with pytest.raises(backstay.Fenced):
            await go(loop, body)
        assert (loop.status, cancelled) == ("failed", [True])
        newest = await other.latest()
        assert newest is not None
        assert newest.state == {"log": [1]}

    run(url, main)


def test_who_comes_second_is_told_and_a_cancelled_loop_gives_its_lease_back(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        inside = asyncio.Event()

        async def body(loop: AsyncLoop, turn: AsyncTurn) -> None:
            turn.append(log=["never stored"])
            inside.set()
            await asyncio.sleep(FOREVER_S)

        loop = start(store.thread("t"), owner="worker-1")
        task = asyncio.create_task(go(loop, body))
        await inside.wait()
        with pytest.raises(backstay.Fenced, match="worker-1"):
            await start(store.thread("t"), wait=0).__aenter__()
        with pytest.raises(backstay.Fenced, match="worker-1"):
            await start(store.thread("t"), wait=0.15).__aenter__()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.status == "failed"
        async with start(store.thread("t")) as heir:
            assert (heir.iteration, dict(heir.state)) == (0, {"log": []})

    run(url, main)


class Cancelling:
    """A store that cancels a task when a verb is called for the nth time, before it does it."""

    def __init__(self, backend: Any, verb: str, number: int) -> None:
        self._backend = backend
        self._verb = verb
        self._left = number
        self.task: asyncio.Task[Any] | None = None
        self.fired = False

    def __getattr__(self, verb: str) -> Any:
        task = self.task
        if verb == self._verb and task is not None and not self.fired:
            self._left -= 1
            if not self._left:
                self.fired = True
                task.get_loop().call_soon_threadsafe(task.cancel)
                eventually(task.cancelling)
        return getattr(self._backend, verb)


@pytest.mark.parametrize(
    ("verb", "number", "stored"), [("acquire", 1, []), ("head", 1, []), ("commit", 1, []), ("commit", 2, [1])]
)
def test_a_loop_that_is_cancelled_in_the_middle_of_a_verb_tears_nothing_and_leaves_no_lease(
    url: str, verb: str, number: int, stored: list[int]
) -> None:
    """What was under way is done to its end, and the next run goes on from there."""

    async def body(loop: AsyncLoop, turn: AsyncTurn) -> None:
        turn.append(log=[turn.iteration])
        if turn.iteration == 3:
            loop.finish()

    async def main() -> None:
        backend = Cancelling(await asyncio.to_thread(open_backend, url), verb, number)
        async with AsyncStore(backend, make_services("", None)) as store:
            thread = store.thread("t")
            backend.task = asyncio.create_task(go(start(thread), body))
            with pytest.raises(asyncio.CancelledError):
                await backend.task
            assert backend.fired
            heir = start(thread)
            async with heir:
                assert list(heir.state["log"]) == stored
            assert (await go(start(thread), body)).state["log"] == [1, 2, 3]
            async with store.thread("t").lease():  # through another handle: nothing is held any more
                assert await store.check()

    asyncio.run(main())
