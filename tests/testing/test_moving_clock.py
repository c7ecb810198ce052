"""A clock that tests move: timeouts of questions, in graphs and loops, without waiting for them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import backstay
from backstay.engine import Context, Status
from backstay.errors import InvalidInput, Rejected
from backstay.testing import Clock

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_it_stands_still_until_it_is_moved() -> None:
    clock = Clock(START)

    assert [clock(), clock()] == [START, START]
    assert clock.advance(1.5) == clock() == START + timedelta(seconds=1.5)
    assert clock.advance(timedelta(days=2)) == START + timedelta(days=2, seconds=1.5)
    clock.set(datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(hours=2))))
    assert (clock(), clock().tzinfo) == (START - timedelta(hours=2), UTC)
    assert abs(Clock()() - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.parametrize("by", [-1, timedelta(seconds=-1), float("nan"), float("inf"), 1e30, True, "1", None])
def test_it_advances_forward_only_and_by_a_length_of_time(by: Any) -> None:
    clock = Clock(START)
    with pytest.raises(InvalidInput):
        clock.advance(by)

    assert clock() == START


@pytest.mark.parametrize("moment", [datetime(2026, 3, 1), "2026-03-01", None, 0])
def test_it_is_set_to_a_moment_with_a_time_zone_only(moment: Any) -> None:
    with pytest.raises(InvalidInput):
        Clock(START).set(moment)


def test_several_threads_move_it_together() -> None:
    clock = Clock(START)
    threads = [threading.Thread(target=lambda: [clock.advance(1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert clock() == START + timedelta(seconds=2000)


def guarded() -> backstay.Graph:
    graph = backstay.Graph("g")

    @graph.node
    def pay(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
        try:
            ctx.approve("pay", {"cents": 1}, timeout=3600)
        except Rejected as refused:
            return {"answer": refused.reason}
        return {"answer": "paid"}

    graph.start("pay")
    graph.end("pay")
    return graph


def test_a_nodes_question_times_out_when_the_clock_says_so() -> None:
    clock, graph = Clock(START), guarded()
    thread = backstay.open("memory:", clock=clock).thread("t")
    record = graph.run_sync(thread, {}).interrupts[0]
    clock.advance(3599)

    assert record.created_at == START
    assert graph.resume_sync(thread).status is Status.INTERRUPTED
    clock.advance(1)
    assert graph.resume_sync(thread).values == {"answer": "no one decided in time"}


async def wait_in_a_loop(clock: Clock) -> list[object]:
    store = await backstay.aopen("memory:", clock=clock)
    thread = store.thread("t")
    found: list[object] = []
    for _ in range(3):
        async with thread.loop({}) as loop:
            async for turn in loop:
                try:
                    await turn.ask({"when": "tomorrow?"}, timeout=86_400)
                except Rejected:
                    loop.finish(late=True)
        found.append((loop.status.value, dict(loop.state)))
        clock.advance(timedelta(hours=12))
    await store.close()
    return found


def test_a_turns_question_times_out_when_the_clock_says_so() -> None:
    assert asyncio.run(wait_in_a_loop(Clock(START))) == [
        ("interrupted", {}),
        ("interrupted", {}),
        ("completed", {"late": True}),
    ]


def test_a_barrier_times_out_when_the_clock_says_so() -> None:
    graph = backstay.Graph("g")
    graph.barrier("gate", "Ship it?", timeout=60)
    graph.start("gate")
    graph.end("gate")
    clock = Clock(START)
    stores = [backstay.open("memory:", clock=clock) for _ in range(2)]
    threads = [store.thread("t") for store in stores]
    for thread in threads:
        graph.run_sync(thread, {})
    assert [graph.resume_sync(thread).status for thread in threads] == [Status.INTERRUPTED] * 2
    clock.advance(60)

    assert [graph.resume_sync(thread).status for thread in threads] == [Status.REJECTED] * 2


def test_importing_the_kit_does_not_import_pytest() -> None:
    code = "import sys, backstay.testing; print('pytest' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed == "False\n"
