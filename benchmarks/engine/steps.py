"""What the engines cost a step of W1, ours and LangGraph's, with and without stores, in turn.

Up to 1,000 steps every run is done from its beginning. For 3,000 all begin with the state of a late step: what a saver
of whole copies would need for the steps before is gigabytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

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


class Usual(NamedTuple):
    """What a step costs one contestant: medians over its runs."""

    step: float  # median of all steps
    late: float  # median of the last quarter: what a step costs may grow
    calm: float  # the tenth of the last quarter that other programs disturbed the least

    @classmethod
    def of(cls, runs: list[Times]) -> Usual:
        """Sum up the runs."""
        last = [Times(run.seconds[-(len(run.seconds) // 4 + 1) :]) for run in runs]
        return cls(_median(run.p50 for run in runs), _median(run.p50 for run in last), _median(run.p10 for run in last))


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


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
        measured: dict[int, dict[str, Usual]] = {}
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
    testing = importlib.import_module("support.postgres")
    try:
        return stack.enter_context(importlib.import_module("benchmarks.postgres.place").serve(bench))
    except (testing.PostgresUnavailable, testing.PostgresFailed) as error:
        bench.table.note(f"PostgreSQL is left out: {error}")
        return None


def _repeat(bench: Bench, place: Any, count: int, repeats: int) -> dict[str, Usual]:
    """Return what a step costs at ``count`` steps, by contestant."""
    conversation = Conversation()
    steps = list(conversation.steps(count))
    before = steps[: count - LATE_STEPS] if count > MAIN else []
    first: State = {
        "document": conversation.document,
        "messages": [message for step in before for message in step.messages],
        "scratch": before[-1].scratch if before else {"turn": 0},
    }
    runs: dict[str, list[Times]] = {}
    for _ in range(repeats):
        races = {
            name: partial(_race, start, first, steps[len(before) :]) for name, start in _starts(bench, place).items()
        }
        for name, times in relay(races).items():
            runs.setdefault(name, []).append(times)
        _sweep(bench)
    return {name: Usual.of(each) for name, each in runs.items()}


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


def _report(bench: Bench, measured: dict[str, Usual], count: int) -> None:
    shown: set[str] = set()
    for name, against, target in COMPARED:
        if name not in measured or (against not in measured and name in shown):
            continue
        shown.add(name)
        ours, theirs = measured[name], measured.get(against)
        if theirs is None:
            bench.table.add(Row(f"{name}, N={count:,}", ours.step))
            continue
        goal = target if count == MAIN else None
        bench.table.add(Row(f"{name}, N={count:,}", ours.step, other=theirs.step, other_name=against, target=goal))
        if goal is not None:
            bench.table.add(Row("    the last quarter", ours.late, other=theirs.late, other_name=against))
            bench.table.add(Row("    its undisturbed tenth (p10)", ours.calm, other=theirs.calm, other_name=against))


def _growth(bench: Bench, measured: dict[int, dict[str, Usual]]) -> None:
    """Show whether a step costs more the longer the run is."""
    last = max(measured)
    for name, early in measured[100].items():
        label = name if name.startswith(OURS) else f"for context: {name}"
        late = measured[last][name].step
        bench.table.add(Row(f"{label}, N={last:,} against N=100", late, other=early.step, other_name="at N=100"))
