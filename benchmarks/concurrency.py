"""Many savers at once, each on threads of its own, sharing one store: what the group commit is for."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import backstay
from benchmarks.bench import Bench
from benchmarks.floors import sync_times
from benchmarks.table import Row, Target
from benchmarks.timing import quiet
from benchmarks.workload import Conversation, Prose, Step

SAVERS = 8
SAVES_EACH = 10
SLOW_SYNC_SECONDS = 1e-3

SaveAll = Callable[[list[str]], None]


def run(bench: Bench) -> None:
    """Measure small saves in many threads, then long conversations, by threads and by tasks."""
    bench.table.begin(
        f"concurrency: {SAVERS} savers at once against one, saves per second",
        "rounds of one saver and of all alternate; medians of the rounds",
    )
    sync, _ = sync_times(bench.root)
    goal = Target(3.0 if sync.p10 >= SLOW_SYNC_SECONDS else 2.0, at_least=True)
    _many_threads(bench, goal)
    _conversations(bench)


def _many_threads(bench: Bench, goal: Target) -> None:
    total, rounds = bench.pick(2000, 120), bench.pick(10, 3)
    size = total // rounds
    alone, shared = backstay.open(bench.new_path()), backstay.open(bench.new_path())
    states = small_states()
    solo_rates: list[float] = []
    shared_rates: list[float] = []
    with alone, shared, ThreadPoolExecutor(SAVERS) as pool, quiet():
        list(pool.map(time.sleep, [0.01] * SAVERS))
        for number in range(rounds):
            names = [f"t{number}-{index}" for index in range(size)]
            began = time.perf_counter()
            _save_small(alone, names, states)
            solo_rates.append(size * SAVES_EACH / (time.perf_counter() - began))
            parts = [names[index::SAVERS] for index in range(SAVERS)]
            began = time.perf_counter()
            list(pool.map(lambda part: _save_small(shared, part, states), parts))
            shared_rates.append(size * SAVES_EACH / (time.perf_counter() - began))
    ours, one = statistics.median(shared_rates), statistics.median(solo_rates)
    name = f"{total:,} threads x {SAVES_EACH} small saves, {SAVERS} savers"
    bench.table.add(Row(name, ours, "/s", None, one, "one saver", target=goal))


def small_states() -> list[dict[str, object]]:
    """Return the states of a thread whose every save is small."""
    prose = Prose(11)
    return [{"user": prose.text(30), "turn": turn, "note": prose.text(90)} for turn in range(SAVES_EACH)]


def _save_small(store: backstay.Store, names: list[str], states: list[dict[str, object]]) -> None:
    for name in names:
        thread = store.thread(name)
        for state in states:
            thread.save(state)


def _conversations(bench: Bench) -> None:
    steps = list(Conversation(seed=21).steps(bench.pick(60, 20)))
    rates: dict[str, list[float]] = {"one": [], "threads": [], "one task": [], "tasks": []}
    for _ in range(bench.pick(5, 2)):
        rates["one"].append(_by_threads(bench.new_path(), steps, 1))
        rates["threads"].append(_by_threads(bench.new_path(), steps, SAVERS))
        rates["one task"].append(asyncio.run(_by_tasks(bench.new_path(), steps, 1)))
        rates["tasks"].append(asyncio.run(_by_tasks(bench.new_path(), steps, SAVERS)))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    table = bench.table
    table.add(Row(f"W1 appends, {SAVERS} Python threads", middle["threads"], "/s", None, middle["one"], "one saver"))
    table.add(Row(f"W1 appends, {SAVERS} asyncio tasks", middle["tasks"], "/s", None, middle["one task"], "one task"))
    table.add(
        Row("W1 appends, one task against one thread", middle["one task"], "/s", None, middle["one"], "one thread")
    )


def _by_threads(path: Path, steps: list[Step], savers: int) -> float:
    with backstay.open(path) as store, ThreadPoolExecutor(savers) as pool, quiet():
        threads = [store.thread(f"chat{index}") for index in range(savers)]

        def save(thread: backstay.Thread) -> None:
            for step in steps:
                thread.append({"messages": step.messages}, set={"scratch": step.scratch})

        began = time.perf_counter()
        list(pool.map(save, threads))
        return savers * len(steps) / (time.perf_counter() - began)


async def _by_tasks(path: Path, steps: list[Step], savers: int) -> float:
    async with await backstay.aopen(path) as store:
        threads = [store.thread(f"chat{index}") for index in range(savers)]

        async def save(thread: backstay.AsyncThread) -> None:
            for step in steps:
                await thread.append({"messages": step.messages}, set={"scratch": step.scratch})

        began = time.perf_counter()
        await asyncio.gather(*map(save, threads))
        return savers * len(steps) / (time.perf_counter() - began)
