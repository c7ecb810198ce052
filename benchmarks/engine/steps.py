"""What the engines cost a step of W1, ours and LangGraph's, with and without stores, in turn.

Up to 1,000 steps every run is done from its beginning. For 3,000 all begin with the state of a late step: what a saver
of whole copies would need for the steps before is gigabytes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks import postgres
from benchmarks.bench import Bench
from benchmarks.engine import agent
from benchmarks.engine.relay import Pause, relay
from benchmarks.table import Row, Target
from benchmarks.timing import Times
from benchmarks.workload import Conversation, State, Step

OURS, OURS_MEMORY, OURS_SQLITE, OURS_POSTGRES = "ours", "ours, memory", "ours, SQLite", "ours, PostgreSQL"
BARE, BARE_MEMORY = "LangGraph", "InMemorySaver"
SQLITE, SQLITE_DELTA = "SqliteSaver", "SqliteSaver + DeltaChannel"
POSTGRES, POSTGRES_DELTA = "PostgresSaver", "PostgresSaver + DeltaChannel"

NOT_SLOWER, DEFAULT, DELTA = Target(1.0), Target(1 / 8), Target(1 / 2.5)
COMPARED: tuple[tuple[str, str, Target | None], ...] = (
    (OURS, BARE, NOT_SLOWER),
    (OURS_MEMORY, BARE_MEMORY, None),
    (OURS_SQLITE, SQLITE, DEFAULT),
    (OURS_SQLITE, SQLITE_DELTA, DELTA),
    (OURS_POSTGRES, POSTGRES, DEFAULT),
    (OURS_POSTGRES, POSTGRES_DELTA, DELTA),
)
"""Who is measured against whom; the targets are ours / theirs, so 8 times faster is 0.125."""

MAIN, LATE, LATE_STEPS = 1000, 3000, 60

Start = Callable[[State, list[Step], Pause], None]


def run(bench: Bench) -> None:
    """Measure short, usual and late runs."""
    bench.table.begin(
        "engine: W1 as a graph of one node in a loop, the time of a step outside the node",
        "stores: ours with a lease and a checkpoint a node, LangGraph's with durability='sync'; all take turns",
        f"median of a run's steps, median of the runs; N={LATE:,} is the last {LATE_STEPS} of so many steps",
        "0.125 = 8 times faster than its default saver, 0.4 = 2.5 times faster than with its DeltaChannel",
    )
    with ExitStack() as stack:
        place = _place(bench, stack)
        measured: dict[int, dict[str, Times]] = {}
        for count, repeats in ((100, bench.pick(5, 2)), (MAIN, bench.pick(3, 1)), (LATE, bench.pick(3, 1))):
            if bench.quick and count == LATE:
                continue
            measured[count] = _repeat(bench, place, count, repeats)
            _report(bench, measured[count], count)
    _growth(bench, measured)


def _place(bench: Bench, stack: ExitStack) -> Any:
    """Start PostgreSQL if it is here."""
    missing = [name for name in postgres.NEEDED if importlib.util.find_spec(name) is None]
    if missing or bench.quick:
        return None
    testing = importlib.import_module("holdfast.testing.postgres")
    try:
        return stack.enter_context(importlib.import_module("benchmarks.postgres.place").serve(bench))
    except (testing.PostgresUnavailable, testing.PostgresFailed) as error:
        bench.table.note(f"PostgreSQL is left out: {error}")
        return None


def _repeat(bench: Bench, place: Any, count: int, repeats: int) -> dict[str, Times]:
    """Return the usual time of a step in each run, by contestant."""
    conversation = Conversation()
    steps = list(conversation.steps(count))
    before = steps[: count - LATE_STEPS] if count > MAIN else []
    first: State = {
        "document": conversation.document,
        "messages": [message for step in before for message in step.messages],
        "scratch": before[-1].scratch if before else {"turn": 0},
    }
    medians: dict[str, list[float]] = {}
    for _ in range(repeats):
        races = {
            name: partial(_race, start, first, steps[len(before) :]) for name, start in _starts(bench, place).items()
        }
        for name, times in relay(races).items():
            medians.setdefault(name, []).append(times.p50)
        _sweep(bench)
    return {name: Times(each) for name, each in medians.items()}


def _race(start: Start, first: State, steps: list[Step], pause: Pause) -> None:
    start(dict(first), steps, pause)


def _sweep(bench: Bench) -> None:
    """Remove what a round has left: gigabytes."""
    for path in bench.root.glob("engine-*"):
        path.unlink()


def _starts(bench: Bench, place: Any) -> dict[str, Start]:
    """Return the contestants, each with a place of its own."""
    starts: dict[str, Start] = {
        OURS: partial(agent.run, url=None),
        OURS_MEMORY: partial(agent.run, url="memory:"),
        OURS_SQLITE: partial(agent.run, url=str(_file(bench))),
    }
    if place is not None:
        starts[OURS_POSTGRES] = partial(agent.run, url=place.url(place.new_schema()))
    if bench.peers is not None:
        peers = importlib.import_module("benchmarks.engine.peers")
        starts[BARE] = partial(peers.run, saver=None)
        starts[BARE_MEMORY] = peers.run_memory
        starts[SQLITE] = partial(peers.run_sqlite, path=_file(bench))
        starts[SQLITE_DELTA] = partial(peers.run_sqlite, path=_file(bench), delta=True)
    if place is not None and place.has_peers:
        run_postgres = importlib.import_module("benchmarks.engine.postgres").run_postgres
        starts[POSTGRES] = partial(run_postgres, url=place.plain_url(place.new_schema()))
        starts[POSTGRES_DELTA] = partial(run_postgres, url=place.plain_url(place.new_schema()), delta=True)
    return starts


def _file(bench: Bench) -> Any:
    path = bench.new_path()
    return path.with_name(f"engine-{path.name}")


def _report(bench: Bench, measured: dict[str, Times], count: int) -> None:
    shown: set[str] = set()
    for ours, theirs, target in COMPARED:
        if ours not in measured or (theirs not in measured and ours in shown):
            continue
        shown.add(ours)
        other = measured.get(theirs)
        bench.table.add(
            Row(
                f"{ours}, N={count:,}",
                measured[ours].p50,
                other=None if other is None else other.p50,
                other_name=theirs if other is not None else "",
                target=target if count == MAIN and other is not None else None,
            )
        )


def _growth(bench: Bench, measured: dict[int, dict[str, Times]]) -> None:
    """Show whether a step costs more the longer the run is."""
    first, last = measured[100], measured[max(measured)]
    for name in first:
        label = f"for context: {name}" if name not in (OURS, OURS_MEMORY, OURS_SQLITE, OURS_POSTGRES) else name
        bench.table.add(
            Row(
                f"{label}, N={max(measured):,} against N=100",
                last[name].p50,
                other=first[name].p50,
                other_name="at N=100",
            )
        )
