"""Effects with await: the same answers; and a caller that is cancelled leaves the ledger true."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import backstay
from backstay.errors import EffectUnknown
from backstay.model.runs import EffectRecord, Outcome
from backstay.operations.drivers import WORKERS_MAX
from backstay.operations.ledger import find
from backstay.store.memory import MemoryStore
from backstay.store.records import Fence, Record
from backstay.thread.access import access_of, handle_of
from backstay.thread.effects import idempotency_key_of
from backstay.thread.store import AsyncStore, make_services

RESULT = {"id": 7}


class World:
    """What effects are done to: it counts them."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.error: BaseException | None = None

    def charge(self, amount: int = 1) -> dict[str, int]:
        """Do it, then fail if told so."""
        self.done.append(amount)
        if self.error is not None:
            raise self.error
        return RESULT


@pytest.fixture
def world() -> World:
    return World()


def test_it_all_works_the_same_with_await(url: str, world: World) -> None:
    async def charge(amount: int, *, idempotency_key: str) -> str:
        await asyncio.sleep(0)
        return f"{world.charge(amount)['id']} {idempotency_key}"

    async def look(record: EffectRecord) -> Outcome:
        await asyncio.sleep(0)
        return Outcome.done(record.attempt)

    async def main() -> None:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            expected = f"7 {idempotency_key_of(handle_of(thread).cursor, 'charge')}"
            for _ in range(2):
                assert await thread.effect("charge", charge, 5) == expected
                assert await thread.effect("plain", world.charge, 6) == RESULT
            assert world.done == [5, 6]
            world.error = TimeoutError()
            for key in ("lost", "settled", "again"):
                with pytest.raises(TimeoutError):
                    await thread.effect(key, charge, 7)
            with pytest.raises(EffectUnknown) as caught:
                await thread.effect("settled", charge, 7)
            world.error = None
            assert await thread.effect("lost", charge, 7, reconcile=look) == 1
            settled = await thread.settle(caught.value.record, Outcome.done("paid"), by="ann")
            assert await thread.effect("settled", charge, 7) == settled.result == "paid"
            assert (await thread.effect("again", charge, 7, idempotent=True)).startswith("7 bs-")
            records = [record async for record in thread.effects()]
            assert [(record.key, record.attempt) for record in records] == [
                ("charge", 1),
                ("plain", 1),
                ("lost", 1),
                ("settled", 1),
                ("again", 2),
            ]
            assert await store.check()

    asyncio.run(main())


def test_a_cancelled_effect_is_unknown(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            thread, inside = store.thread("t"), asyncio.Event()

            async def charge() -> None:
                inside.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(thread.effect("charge", charge))
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(EffectUnknown):
                await thread.effect("charge", charge)

    asyncio.run(main())


class Slow(MemoryStore):
    """Waits before a verb on effects, until it is let go."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb
        self.inside, self.let_go = threading.Event(), threading.Event()

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        if self.verb == ("begin" if record.open else "end"):
            self.inside.set()
            assert self.let_go.wait(60)
        return super().put_record(record, fence, run)


async def cancelled_in(backend: Slow, store: AsyncStore, world: World) -> None:
    """Cancel the caller of an effect while the store is busy with it."""
    task = asyncio.create_task(store.thread("t").effect("charge", world.charge))
    assert await asyncio.to_thread(backend.inside.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    backend.let_go.set()


def test_a_cancelled_caller_never_tears_the_receipt(world: World) -> None:
    async def main() -> None:
        backend = Slow("end")
        store = AsyncStore(backend, make_services("", None))
        await cancelled_in(backend, store, world)
        await asyncio.to_thread(access_of(store).offload.close)

        assert await store.thread("t").effect("charge", world.charge) == RESULT
        assert len(world.done) == 1
        await store.close()

    asyncio.run(main())


def test_a_receipt_that_waits_for_a_worker_is_written_although_its_caller_was_cancelled(world: World) -> None:
    """All workers are busy, so the receipt is still in the queue when the caller leaves: it must not go with it."""

    async def main() -> None:
        backend = Slow("none")
        store = AsyncStore(backend, make_services("", None))
        free, busy = threading.Event(), threading.Semaphore(0)

        def block() -> None:
            busy.release()
            assert free.wait(60)

        async def charge() -> Any:
            for _ in range(WORKERS_MAX):
                access_of(store).offload._workers().submit(block)
            for _ in range(WORKERS_MAX):
                assert await asyncio.to_thread(busy.acquire, True, 60)
            asyncio.get_running_loop().call_soon(task.cancel)
            return world.charge()

        task = asyncio.create_task(store.thread("t").effect("charge", charge))
        with pytest.raises(asyncio.CancelledError):
            await task
        free.set()
        await asyncio.to_thread(access_of(store).offload.close)
        row = find(backend, handle_of(store.thread("t")).cursor.branch, "charge")

        assert row is not None
        assert (row.status, len(world.done)) == ("done", 1)
        await store.close()

    asyncio.run(main())


def test_a_caller_cancelled_before_it_was_done_leaves_it_to_be_done(world: World) -> None:
    async def main() -> None:
        backend = Slow("begin")
        store = AsyncStore(backend, make_services("", None))
        await cancelled_in(backend, store, world)
        await asyncio.to_thread(access_of(store).offload.close)
        assert world.done == []

        assert await store.thread("t").effect("charge", world.charge) == RESULT
        await store.close()

    asyncio.run(main())
