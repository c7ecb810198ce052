"""The async twins: the same answers, without ever blocking the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

import backstay
from backstay.errors import InvalidInput
from backstay.model.checkpoint import Write
from backstay.store.open import open_backend
from backstay.thread.store import AsyncStore, make_services
from support.meanwhile import Meanwhile


def test_an_agent_loop_works_the_same_with_await(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            assert await thread.latest() is None
            saved = await thread.save({"messages": ["hello" * 100], "plan": "a"}, next_node="b")
            await thread.append({"messages": ["more"]}, set={"plan": "b"})
            latest, first = await thread.latest(), await thread.at(1)
            assert latest is not None
            assert first is not None
            assert latest.state == {"messages": ["hello" * 100, "more"], "plan": "b"}
            assert first == saved
            side = await thread.fork(first, branch="side", set={"plan": "c"})
            await side.append({"messages": ["side"]})
            await thread.tag(first, "good")
            assert [meta.step async for meta in thread.history()] == [2, 1]
            assert [meta.thread_id async for meta in store.threads(where={})] == ["t"]
            assert [meta.step async for meta in thread.history(tag="good")] == [1]
            assert (await thread.rewind(first)).step == 3
            assert (await store.prune(backstay.Keep(last=1))).deleted == 2
            assert (await store.stats()).checkpoints == 3
            assert await store.check()
            assert [meta.step async for meta in thread.history()] == [3, 1]

    asyncio.run(main())


def test_many_coroutines_on_one_handle_save_one_after_the_other(url: str) -> None:
    async def main() -> list[int]:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            await thread.save({"m": []})
            saved = await asyncio.gather(*(thread.append({"m": [number]}) for number in range(30)))
            latest = await thread.latest()
            assert latest is not None
            assert sorted(latest.state["m"]) == list(range(30))
            return sorted(cp.seq for cp in saved)

    assert asyncio.run(main()) == list(range(2, 32))


def test_two_handles_in_one_loop_cannot_both_win(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            one, two = store.thread("t"), store.thread("t")
            await one.save({"n": 0})
            await two.latest()
            results = await asyncio.gather(one.save({"n": 1}), two.save({"n": 2}), return_exceptions=True)
            assert sorted(type(result).__name__ for result in results) == ["Conflict", "SavedCheckpoint"]

    asyncio.run(main())


def test_no_store_call_runs_in_the_event_loops_thread(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched at the driver: every statement must run in a worker."""
    from backstay.store.sqlite.store import SqliteStore

    threads: set[int] = set()
    read = SqliteStore._read

    def watched(self: SqliteStore, look: Any, snapshot: bool = True) -> Any:
        threads.add(threading.get_ident())
        return read(self, look, snapshot)

    monkeypatch.setattr(SqliteStore, "_read", watched)

    async def main() -> None:
        async with await backstay.aopen(tmp_path / "x.db") as store:
            thread = store.thread("t")
            await thread.save({"n": 1})
            await thread.latest()
            assert [meta async for meta in store.threads()]

    asyncio.run(main())

    assert threads
    assert threading.get_ident() not in threads


def test_what_was_just_saved_is_shown_from_memory_and_never_read_by_the_loop(url: str) -> None:
    watched = Meanwhile(open_backend(url))
    write = Write("task", 0, "out", 7)

    async def main() -> None:
        async with AsyncStore(watched, make_services("", None)) as store:
            thread = store.thread("t")
            first = await thread.save({"items": [1]})
            await thread.write(first, [write])
            second = await thread.append({"items": [2]})
            of_no_handle = await store.thread("other").save({"n": 1})
            gc.collect()
            before = watched.calls
            assert second.state == {"items": [1, 2]}
            assert of_no_handle.state == {"n": 1}
            for checkpoint, field in ((first, "state"), (first, "frames"), (first, "writes"), (second, "writes")):
                with pytest.raises(InvalidInput, match=f"checkpoint.{field} is no longer in memory") as refused:
                    getattr(checkpoint, field)
                assert f"(await thread.get(checkpoint.id)).{field}" in str(refused.value)
            assert watched.calls == before

            loaded = await thread.get(first.id)
            assert loaded is not None
            assert (loaded.state, loaded.writes) == ({"items": [1]}, (write,))
            assert await asyncio.to_thread(lambda: first.writes) == (write,)  # a worker may read
            assert first.state == {"items": [1]}

    asyncio.run(main())


def test_a_save_cancelled_at_any_turn_is_stored_wholly_or_not_at_all_and_the_handle_goes_on(url: str) -> None:
    async def cancelled_after(turns: int, thread: backstay.AsyncThread, number: int) -> bool:
        task = asyncio.ensure_future(thread.append({"m": [number]}))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return False
        return True

    async def main() -> None:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            await thread.save({"m": []})
            cancelled = 0
            for number in range(40):
                acknowledged = await cancelled_after(number % 8, thread, number)
                cancelled += not acknowledged
                latest = await thread.latest()
                assert latest is not None
                assert not acknowledged or number in latest.state["m"]
            final = await thread.append({"m": ["end"]})
            assert final.state["m"][-1] == "end"
            assert len(set(map(str, final.state["m"]))) == len(final.state["m"])
            assert cancelled > 0, "no cancellation fired"
            assert await store.check()

    asyncio.run(main())


def test_one_store_serves_several_event_loops_and_threads(tmp_path: Any) -> None:
    store = asyncio.run(backstay.aopen(tmp_path / "x.db"))

    async def work(name: str) -> None:
        thread = store.thread(name)
        for number in range(5):
            await thread.save({"n": number})

    workers = [threading.Thread(target=lambda name=name: asyncio.run(work(name))) for name in "abcd"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    async def count() -> int:
        return sum([1 async for _ in store.threads()])

    assert asyncio.run(count()) == 4
    asyncio.run(store.close())
