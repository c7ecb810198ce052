"""Several workers of one program share the handlers of signals, and leave them as they were."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import backstay

WORKERS = 4


def graph() -> backstay.Graph:
    made = backstay.Graph("g")
    made.node("a", lambda state: {"n": 1})
    made.start("a")
    made.end("a")
    return made


@pytest.mark.parametrize("by_signal", [False, True])
def test_workers_that_end_in_any_order_leave_no_handler_behind(tmp_path: Path, by_signal: bool) -> None:
    async def main() -> list[int]:
        async with await backstay.aopen(str(tmp_path / "agent.db")) as store:
            for number in range(WORKERS):
                await graph().submit(store.thread(f"t{number}"), {"n": 0})
            work: list[Any] = [
                asyncio.create_task(graph().work(store, until_idle=not by_signal)) for _ in range(WORKERS)
            ]
            while by_signal and await store.count_runs():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            return list(await asyncio.gather(*work))

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    ended = asyncio.run(main())

    assert sum(ended) == WORKERS
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
