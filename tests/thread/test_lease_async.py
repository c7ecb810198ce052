"""Leases with an event loop: the same, and a body whose lease is lost is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

import backstay
from backstay.thread.access import access_of
from backstay.thread.lease import AsyncLease
from support.thread.stored_runs import WORK, put_run
from support.waiting import eventually

FOREVER_S = 60.0


def run(url: str, main: Callable[[backstay.AsyncStore], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with await backstay.aopen(url) as store:
            await main(store)
            assert await store.check()

    asyncio.run(whole())
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "backstay-heartbeat"])


async def end_in_the_store(lease: AsyncLease) -> None:
    """Give a lease to somebody else behind its holder's back."""
    hold = lease._taken()
    await asyncio.to_thread(access_of(lease.thread).store.release, hold.branch, hold.epoch, hold.request.token)


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition)


def test_a_lease_works_the_same_with_await(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        thread, other = store.thread("t"), store.thread("t")
        async with thread.lease(owner="worker-1") as lease:
            await thread.save({"n": 1})
            with pytest.raises(backstay.Fenced, match="worker-1"):
                await other.save({"n": 2})
            with pytest.raises(backstay.Fenced, match="worker-1"):
                await other.lease().__aenter__()
            await lease.renew()
            lease.raise_if_lost()
            assert (lease.thread, lease.epoch, lease.lost) == (thread, 1, False)
        await other.latest()
        await other.save({"n": 2})

    run(url, main)


async def enter(lease: AsyncLease) -> None:
    await lease.__aenter__()


def test_a_lease_that_nobody_renews_is_waited_for(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        lost = store.thread("t").lease(ttl=0.3, heartbeat=False)
        await asyncio.create_task(enter(lost))  # in this task, waiting for it would be waiting for oneself
        other = store.thread("t")
        with pytest.raises(backstay.Fenced):
            await other.lease(wait=0.01).__aenter__()
        async with other.lease(wait=30) as lease:
            assert lease.epoch == 2
            await other.save({"n": 1})

    run(url, main)


def test_a_body_whose_lease_is_lost_is_cancelled_and_the_block_raises_fenced(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        told: list[AsyncLease] = []
        reached: list[str] = []

        async def body() -> None:
            async with thread.lease(ttl=0.2, on_lost=told.append) as lease:
                await end_in_the_store(lease)
                try:
                    await asyncio.sleep(FOREVER_S)
                finally:
                    reached.append("clean-up")
                reached.append("end")

        task = asyncio.ensure_future(body())
        with pytest.raises(backstay.Fenced) as caught:
            await task

        assert reached == ["clean-up"]
        assert [lease.lost for lease in told] == [True]
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert not task.cancelled()

    run(url, main)


def test_the_task_of_a_lost_lease_goes_on_undisturbed_after_the_block(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        with pytest.raises(backstay.Fenced):
            await lose(thread)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await thread.save({"n": 1})

    async def lose(thread: backstay.AsyncThread) -> None:
        async with thread.lease(ttl=0.2) as lease:
            await end_in_the_store(lease)
            await asyncio.sleep(FOREVER_S)

    run(url, main)


@pytest.mark.parametrize("lost", [False, True])
def test_a_cancellation_from_elsewhere_stays_one(url: str, lost: bool) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        thread, inside, told = store.thread("t"), asyncio.Event(), threading.Event()

        async def body() -> None:
            async with thread.lease(ttl=3, on_lost=lambda _: told.set()) as lease:
                if lost:
                    await end_in_the_store(lease)
                inside.set()
                await asyncio.sleep(FOREVER_S)

        task = asyncio.ensure_future(body())
        await inside.wait()
        if lost:
            told.wait(20)  # holds up the loop, so that both cancellations come in the same turn of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with thread.lease():
            await thread.save({"given back": True})

    run(url, main)


def test_a_save_that_meets_the_loss_raises_it_instead_of_being_cancelled(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        met: list[str] = []

        async def body() -> None:
            async with thread.lease(heartbeat=False) as lease:
                await end_in_the_store(lease)
                with pytest.raises(backstay.Fenced):
                    await thread.save({"n": 1})
                met.append("in the body")
                assert lease.lost
                await asyncio.sleep(0)

        with pytest.raises(backstay.Fenced):
            await body()

        assert met == ["in the body"]

    run(url, main)


def test_the_bodys_own_error_is_kept(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        async def body() -> None:
            async with store.thread("t").lease(ttl=0.2) as lease:
                try:
                    await end_in_the_store(lease)
                    await asyncio.sleep(FOREVER_S)
                finally:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await body()

    run(url, main)


def test_a_cancelled_acquisition_is_given_back(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        cancelled = 0
        for turns in range(12):
            thread = store.thread(f"t{turns}")
            task = asyncio.ensure_future(thread.lease(ttl=FOREVER_S).__aenter__())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await (await task).release()
            except asyncio.CancelledError:
                cancelled += 1
            async with thread.lease():  # at once, through the same handle
                await thread.save({"n": turns})
        assert cancelled > 0, "no cancellation fired"

    run(url, main)


def test_claimed_leases_are_used_like_others(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        for name in "abc":
            thread = store.thread(name)
            await thread.save({"name": name})
            await asyncio.to_thread(put_run, store, name)
        first, second, third = await store.claim([WORK], 5, owner="rescuer", ttl=0.3)
        assert {lease.run.thread_id for lease in (first, second, third)} == {"a", "b", "c"}
        assert {run.status for run in await store.runs(holder="rescuer")} == {"running"}
        async with first:
            newest = await first.thread.latest()
            assert newest is not None
            assert newest.state == {"name": first.thread.id}
            await first.thread.append(set={"rescued": True})
        await second.release()
        await end_in_the_store(third)
        await until(lambda: third._taken().loss)
        with pytest.raises(backstay.Fenced):
            await third.__aenter__()
        assert [run.status for run in await store.runs()] == ["queued"] * 3

    run(url, main)


def test_a_lost_claim_cancels_the_body_that_uses_it(url: str) -> None:
    async def main(store: backstay.AsyncStore) -> None:
        thread = store.thread("t")
        await thread.save({"n": 1})
        await asyncio.to_thread(put_run, store, "t")
        (lease,) = await store.claim([WORK], ttl=0.2)

        async def body() -> None:
            async with lease:
                await end_in_the_store(lease)
                await asyncio.sleep(FOREVER_S)

        with pytest.raises(backstay.Fenced):
            await body()

    run(url, main)
