"""What a save costs in PostgreSQL, against one bare row of the same new bytes, and against LangGraph's ``put``."""

from __future__ import annotations

import importlib
from contextlib import ExitStack

import backstay
from benchmarks.bench import THREAD, fill
from benchmarks.postgres.place import Place, RawTable
from benchmarks.saves import add_row, more_steps, saving
from benchmarks.table import Target
from benchmarks.timing import Op, take_turns, timed
from benchmarks.workload import Step

KNOWN, FLAT, NOT_SLOWER = Target(1.5), Target(1.1), Target(1.0)
FLOOR = "insert + commit"
SMALL, MIDDLE, LARGE = 100, 1000, 3000
TURNS_EACH = 50  # saves on one of the small threads, which shall stay small
PEER_N = 1000


def run(place: Place) -> None:
    """Measure known changes at several N, whole states, and the peers."""
    place.bench.table.begin(
        "PostgreSQL saves: W1, one step each",
        "every op is committed and on disk when it returns; ops take turns step by step, each on one connection",
        f"{FLOOR} = a prepared one-row INSERT of the same new bytes, psycopg, autocommit",
    )
    _known_change(place)
    _whole_state(place)
    if place.has_peers:
        _peers(place)


def _known_change(place: Place) -> None:
    bench = place.bench
    large = bench.pick(LARGE, MIDDLE)
    turns = bench.pick(600, 150)
    steps = more_steps(turns + 3)
    new = [step.new for step in steps]
    raw = RawTable(place.plain_url(place.new_schema()))
    with ExitStack() as stack:
        stack.callback(raw.close)
        store = stack.enter_context(backstay.open(place.url(place.new_schema())))
        ops = {SMALL: _at_small(store, steps)}
        for count in sorted({MIDDLE, large}):
            ops[count] = _at(store, count, steps)
        floor, *ours = take_turns([lambda n: raw.insert(new[n]), *ops.values()], turns)
    times = dict(zip(ops, ours, strict=True))
    for count, taken in times.items():
        add_row(bench, f"known change (append), N={count:,}", taken, floor, FLOOR, KNOWN)
    for count in sorted({MIDDLE, large}):
        name = f"known change at N={count:,} against N={SMALL}"
        add_row(bench, name, times[count], times[SMALL], f"at N={SMALL}", FLAT)


def _at(store: backstay.Store, count: int, steps: list[Step]) -> Op:
    thread = store.thread(f"n{count}")
    fill(thread, count)

    def save(number: int) -> None:
        step = steps[number]
        thread.append({"messages": step.messages}, set={"scratch": step.scratch})

    return timed(save)


def _at_small(store: backstay.Store, steps: list[Step]) -> Op:
    """Return an op that goes on to another small thread from time to time."""
    threads = [store.thread(f"n{SMALL}-{number}") for number in range(len(steps) // TURNS_EACH + 1)]
    for thread in threads:
        fill(thread, SMALL)

    def save(number: int) -> None:
        step = steps[number]
        threads[number // TURNS_EACH].append({"messages": step.messages}, set={"scratch": step.scratch})

    return timed(save)


def _whole_state(place: Place) -> None:
    bench = place.bench
    steps = more_steps(bench.pick(200, 40) + 3)
    new = [step.new for step in steps]
    raw = RawTable(place.plain_url(place.new_schema()))
    url = place.url(place.new_schema())
    with backstay.open(url) as store:
        fill(store.thread(THREAD), MIDDLE)
    with ExitStack() as stack:
        stack.callback(raw.close)
        ops = [lambda n: raw.insert(new[n]), saving(stack, url, steps)]
        floor, compared = take_turns(ops, len(steps) - 3)
    add_row(bench, "save(state), compared by content, 1.4 MB", compared, floor, FLOOR)


def _peers(place: Place) -> None:
    """Show the last quarter of N saves of each, in turn."""
    peers = importlib.import_module("benchmarks.postgres.peers")
    bench = place.bench
    run = peers.measured(place, PEER_N)
    for count in (SMALL, PEER_N):
        ours, theirs = run.late(count)
        add_row(bench, f"known change, N={count:,}", ours, theirs, "PostgresSaver.put", NOT_SLOWER)
    ours, theirs = peers.late_async_saves(place, PEER_N)
    add_row(bench, f"known change, awaited, N={PEER_N:,}", ours, theirs, "AsyncPostgresSaver.aput", NOT_SLOWER)
