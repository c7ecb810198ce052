"""What a save costs, against appending the same new bytes to a file, and against one row in a bare SQLite."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import backstay
from benchmarks.bench import THREAD, Bench
from benchmarks.floors import RawFile, RawSqlite
from benchmarks.table import Row, Target
from benchmarks.timing import Op, Times, take_turns, timed
from benchmarks.workload import Conversation, Step

KNOWN, FLAT, COMPARED = Target(1.6), Target(1.1), Target(4.0)
FLOOR, SQLITE = "append + fdatasync", "SQLite insert"


def run(bench: Bench) -> None:
    """Measure known changes, whole states, and whether the cost depends on N."""
    bench.table.begin("saves: W1, one step each", "every op is durable when it returns; ops take turns step by step")
    _known_change(bench)
    _whole_state(bench)
    _flat(bench)


def _known_change(bench: Bench) -> None:
    steps = more_steps(bench.pick(1000, 300) + 3)
    raw, sqlite = RawFile(bench.new_path(".raw")), RawSqlite(bench.new_path())
    with ExitStack() as stack:
        stack.callback(raw.close)
        stack.callback(sqlite.close)
        ours = appending(stack, bench.copy(bench.w1(1000)), steps)
        new = [step.new for step in steps]
        floor, row, saved = take_turns(
            [lambda n: raw.append(new[n]), lambda n: sqlite.insert(new[n]), ours], len(steps) - 3
        )
    add_row(bench, "known change (append), N=1,000", saved, floor, FLOOR, KNOWN)
    add_row(bench, "... against one row of a bare SQLite", saved, row, SQLITE)
    add_row(bench, "for context: bare SQLite against the file", row, floor, FLOOR)


def _whole_state(bench: Bench) -> None:
    steps = more_steps(bench.pick(300, 60) + 3)
    new = [step.new for step in steps]
    raw = RawFile(bench.new_path(".raw"))
    with ExitStack() as stack:
        stack.callback(raw.close)
        built = bench.w1(1000)
        compared = saving(stack, bench.copy(built), steps)
        frozen = saving(stack, bench.copy(built), steps, frozen=True)
        floor, whole, trusted = take_turns([lambda n: raw.append(new[n]), compared, frozen], len(steps) - 3)
    add_row(bench, "save(state), compared by content, 1.4 MB", whole, floor, FLOOR, COMPARED)
    add_row(bench, "save(state, frozen=True), 1.4 MB", trusted, floor, FLOOR)


def _flat(bench: Bench) -> None:
    """Compare small and large histories; the small one starts anew after 100 steps, so that it stays small."""
    large = bench.pick(10_000, 1000)
    rounds, length = bench.pick(6, 3), 100
    small_times: list[float] = []
    large_times: list[float] = []
    steps = more_steps(rounds * (length + 3))
    with ExitStack() as stack:
        late = appending(stack, bench.copy(bench.w1(large)), steps)
        for number in range(rounds):
            part = steps[number * (length + 3) :][: length + 3]
            early = appending(stack, bench.copy(bench.w1(100)), part)
            offset = number * (length + 3)
            small, big = take_turns([early, lambda n, offset=offset: late(n + offset)], length)  # type: ignore[misc]
            small_times += small.seconds
            large_times += big.seconds
    name = f"known change at N={large:,} against N=100"
    add_row(bench, name, Times(large_times), Times(small_times), "at N=100", FLAT)


def appending(stack: ExitStack, url: str | Path, steps: list[Step]) -> Op:
    """Return an op that saves a step as a known change on a store that stays open."""
    thread = stack.enter_context(backstay.open(url)).thread(THREAD)
    thread.latest()

    def save(number: int) -> None:
        step = steps[number]
        thread.append({"messages": step.messages}, set={"scratch": step.scratch})

    return timed(save)


def saving(stack: ExitStack, url: str | Path, steps: list[Step], **options: Any) -> Op:
    """Return an op that saves a step as a whole state; building the state is not timed."""
    thread = stack.enter_context(backstay.open(url)).thread(THREAD)
    checkpoint = thread.latest()
    assert checkpoint is not None
    state = dict(checkpoint.state)

    def op(number: int) -> float:
        step = steps[number]
        state["messages"] = [*state["messages"], *step.messages]
        state["scratch"] = step.scratch
        began = time.perf_counter()
        thread.save(state, **options)
        return time.perf_counter() - began

    return op


def more_steps(count: int) -> list[Step]:
    """Return steps to add to a W1 store."""
    return list(Conversation(seed=7).steps(count))


def add_row(bench: Bench, name: str, ours: Times, other: Times, against: str, target: Target | None = None) -> None:
    """Show medians, and below them the undisturbed tenth if there is a target."""
    bench.table.add(Row(name, ours.p50, "s", ours.p99, other.p50, against, target=target))
    if target is not None:
        bench.table.add(Row("    its undisturbed tenth (p10)", ours.p10, "s", None, other.p10, against))
