"""An asynchronous save, cancelled after every number of turns of the event loop, until one is too quick for that.

The save itself runs in a worker and is never torn: it is stored once or not at all, and saving again with the same id
tells. The handle, the pool and the loop are as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

import backstay
from backstay.testing.drafts import wait_until
from support.postgres import PostgresServer, Watch
from support.running import Show

POOL = 3
WAIT_S = 60
TOO_QUICK = 3
"""So many saves must end before their cancellation: the time that one takes differs."""


class Sweep:
    """One thread on which a save is cancelled again and again, each time one turn later."""

    def __init__(self, store: backstay.AsyncStore) -> None:
        self.store = store
        self.handle = store.thread("t")
        self.log: list[str] = []  # what the state must hold
        self.outcomes: Counter[str] = Counter()

    async def run(self, after_each: Callable[[], object]) -> None:
        await self.handle.save({"log": []})
        for turns in count():
            await self._cancel_after(turns)
            after_each()
            if self.outcomes["completed"] == TOO_QUICK:
                return

    async def _cancel_after(self, turns: int) -> None:
        name = f"c-{turns}"
        task = asyncio.ensure_future(self._save(name))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            cancelled = True
        else:
            cancelled = False
        await self.handle.latest()
        found = await self.store.get(name)
        assert found is not None or cancelled, "acknowledged, and not there"
        settled = await self._save(name)
        assert found is None or (settled.seq, settled.digest) == (found.seq, found.digest)
        self.log.append(name)
        more = await self.handle.append({"log": [f"after {name}"]})
        self.log.append(f"after {name}")
        assert (more.parent_id, more.state["log"]) == (name, self.log)
        self.outcomes["completed" if not cancelled else "applied" if found else "not applied"] += 1

    async def _save(self, name: str) -> backstay.Checkpoint:
        if len(self.log) % 4:
            return await self.handle.append({"log": [name]}, id=name)
        return await self.handle.save({"log": [*self.log, name]}, id=name)


def judge(show: Show, sweep: Sweep, name: str) -> None:
    outcomes = sweep.outcomes
    show(f"cancelled at every turn, {name}", f"{outcomes.total()} points, {dict(outcomes)}")
    assert outcomes["applied"], "no cancellation came after the commit"
    assert outcomes["not applied"], "no cancellation came before it"
    assert sweep.log == list(dict.fromkeys(sweep.log))


@pytest.mark.crash
def test_a_save_to_postgres_cancelled_at_every_turn_is_stored_once_or_not_at_all(
    postgres: PostgresServer, postgres_url: str, show: Show
) -> None:
    watch = Watch(postgres, postgres_url)

    async def main() -> Sweep:
        async with await backstay.aopen(f"{watch.url}&pool={POOL}") as store:
            sweep = Sweep(store)
            await sweep.run(lambda: wait_until(lambda: not watch.transactions))
            assert await store.check()
            with watch.locked():
                reading = [asyncio.ensure_future(store.thread("t").latest()) for _ in range(POOL + 2)]
                await turns_until(lambda: watch.blocked == POOL)  # the pool has lost none
            assert all(await asyncio.gather(*reading))
        return sweep

    judge(show, asyncio.run(main()), "PostgreSQL")
    wait_until(lambda: not watch.connections)


@pytest.mark.crash
def test_a_save_to_sqlite_cancelled_at_every_turn_is_stored_once_or_not_at_all(tmp_path: Path, show: Show) -> None:
    async def main() -> Sweep:
        async with await backstay.aopen(tmp_path / "agent.db") as store:
            sweep = Sweep(store)
            await sweep.run(lambda: None)
            assert await store.check()
        return sweep

    judge(show, asyncio.run(main()), "SQLite")


@pytest.mark.crash
def test_a_cancelled_save_lets_its_caller_go_while_the_database_still_keeps_it_waiting(
    postgres: PostgresServer, postgres_url: str
) -> None:
    """Only the event loop's own thread can end the wait here: were it blocked, this test would never end."""
    watch = Watch(postgres, postgres_url)

    async def main() -> None:
        async with await backstay.aopen(f"{watch.url}&pool={POOL}") as store:
            handle = store.thread("t")
            await handle.save({"log": []})
            with watch.locked():
                saving = asyncio.ensure_future(handle.append({"log": ["kept waiting"]}))
                await turns_until(lambda: watch.blocked == 1)
                saving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await saving
                assert watch.blocked == 1
            found = await handle.latest()
            assert found is not None
            assert found.state["log"] == ["kept waiting"]
            assert (await handle.append({"log": ["after"]})).state["log"] == ["kept waiting", "after"]

    asyncio.run(main())


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until that is so."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # it is the database that changes, and tells nobody
            await asyncio.sleep(0)
