"""A rolling deployment: workers are stopped, killed and replaced while runs are submitted, until every run has ended.

Old and new workers run side by side and know different graphs, see ``support.crash.deploy_work``. What the nodes did is
read from a file outside the store.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import backstay
from support.crash.deploy_work import KINDS, STEPS, World, graph_of, wrong_in
from support.processes import Nursery
from support.running import Show, effort

FULL = effort() >= 5
RUNS = 200 * (effort() // 5) if FULL else 40
WORKERS = 6 if FULL else 3
STOPS_MIN = 10 * (effort() // 5) if FULL else 2
"""How many workers at least are stopped, and how many killed."""

BETWEEN_S = (0.02, 0.25)
"""How long it takes until the next worker is stopped or killed."""

POLL_S = 0.005
HANG_S = 60 + RUNS
SEED = int(os.environ.get("BACKSTAY_SEED", "20261119"))
STOPPED = {signal.SIGTERM: (0, -signal.SIGTERM), signal.SIGKILL: (-signal.SIGKILL,)}
"""How a worker may end. SIGTERM may come before the worker listens to it."""

PAGE = 100


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where the runs are: stores that several processes share."""
    return str(request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "agent.db")


class Watcher(threading.Thread):
    """Asks for all runs again and again: no submitted run may be missing, at any moment and with any status."""

    def __init__(self, store: Any) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.submitted: set[str] = set()
        self.polls = 0
        self.wrong: list[str] = []
        self.counts: list[dict[str, int]] = []
        self._enough = threading.Event()

    def run(self) -> None:
        try:
            while not self._enough.wait(POLL_S):
                self._poll()
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _poll(self) -> None:
        expected = frozenset(self.submitted)
        found = {run.thread_id: str(run.status) for run in all_runs(self.store)}
        if missing := expected - found.keys():
            self.wrong.append(f"poll {self.polls}: {sorted(missing)} disappeared")
        counts = dict(Counter(found.values()))
        if not self.counts or self.counts[-1] != counts:
            self.counts.append(counts)
        self.polls += 1

    def close(self) -> None:
        """Ask no more."""
        self._enough.set()
        self.join()


class Crew:
    """The workers that are alive, each with its kind."""

    def __init__(self, nursery: Nursery, folder: Path, url: str) -> None:
        self.nursery = nursery
        self.arguments = [url, str(folder / "world")]
        self.out = str(folder / "out")
        self.alive: dict[int, str] = {}
        self.stopped: Counter[signal.Signals] = Counter()

    def start(self, kind: str) -> None:
        pid = self.nursery.start("support.crash.deploy_work:work", [kind, *self.arguments], self.out)
        self.alive[pid] = kind

    def stop(self, pid: int, how: signal.Signals) -> str:
        """Stop or kill a worker, prove that this ended it, and return its kind."""
        os.kill(pid, how)
        assert self.nursery.wait(pid) in STOPPED[how]
        self.stopped[how] += 1
        return self.alive.pop(pid)


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.timeout(2 * HANG_S)
def test_in_a_rolling_deployment_every_run_completes_and_nothing_is_done_twice(
    url: str, tmp_path: Path, show: Show
) -> None:
    rng = random.Random(SEED)
    world = World(str(tmp_path / "world"))
    graphs = {kind: graph_of(kind, world) for kind in KINDS}
    names = [f"{kind}-{number}" for number, kind in zip(range(RUNS), cycle(KINDS), strict=False)]
    with (
        backstay.open(url) as store,
        backstay.open(url) as watched,
        Nursery() as nursery,
        contextlib.closing(Watcher(watched)) as watcher,
    ):
        crew = Crew(nursery, tmp_path, url)
        watcher.start()
        for _, kind in zip(range(WORKERS), cycle(KINDS), strict=False):
            crew.start(kind)
        waiting = list(names)
        begin = time.monotonic()
        deadline = begin + HANG_S
        signals = cycle([signal.SIGTERM, signal.SIGKILL])
        while waiting or len(ended(store)) < RUNS or min(crew.stopped[each] for each in STOPPED) < STOPS_MIN:
            assert time.monotonic() < deadline, f"seed {SEED}: runs did not end: {watcher.counts[-1]}"
            for name in waiting[: max(1, RUNS // (4 * STOPS_MIN))]:
                graphs[name.split("-")[0]].submit(store.thread(name), {"run": name})
                watcher.submitted.add(name)
                waiting.remove(name)
            time.sleep(rng.uniform(*BETWEEN_S))  # not for synchronization: the moment of the next stop
            crew.start(crew.stop(rng.choice(sorted(crew.alive)), next(signals)))
        took_s = time.monotonic() - begin
        for pid in sorted(crew.alive):
            crew.stop(pid, signal.SIGTERM)
        watcher.close()
        completed = {run.thread_id for run in all_runs(watched, status="completed") if not run.reason}
        statuses = watched.count_runs()
        states = {name: dict(latest.state) for name in names if (latest := store.thread(name).latest()) is not None}
        report = store.check()

    lines = world.lines()
    calls = Counter(line[0] for line in lines)
    stops = {each.name: crew.stopped[each] for each in STOPPED}
    show(
        f"rolling deployment, {url.partition(':')[0][-20:]}",
        f"seed {SEED}, {RUNS} runs, {stops}, {calls['call']} calls for {RUNS * STEPS}, {watcher.polls} polls, "
        f"{statuses}, {took_s:.0f} s",
    )
    show("runs by status", spread_out(watcher.counts))
    assert watcher.wrong == []
    assert watcher.polls > 1
    assert completed == set(names)
    assert states.keys() == set(names)
    assert wrong_in(lines, states) == []
    assert report, str(report)


def all_runs(store: Any, **wanted: Any) -> list[Any]:
    """Return all runs, page by page."""
    found: list[Any] = []
    while page := store.runs(limit=PAGE, after=found[-1] if found else None, **wanted):
        found += page
    return found


def ended(store: Any) -> list[Any]:
    return [run for run in all_runs(store) if run.ended_at is not None]


def spread_out(counts: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return at most ten of the counts, with both ends."""
    return counts[:: max(1, len(counts) // 9)]


# The judge ------------------------------------------------------------------------------------------------------------


def undisturbed(run: str) -> tuple[list[list[str]], dict[str, dict[str, Any]]]:
    """Return what one run of the first version leaves if nothing happens to it."""
    lines = []
    for step in range(1, STEPS + 1):
        lines += [[kind, run, str(step), f"result{step}", "a1-7"] for kind in ("call", "stored")]
    lines.insert(4, ["effect", run, "key", "a1-7"])
    steps = {f"step{step}": f"result{step}" for step in range(1, STEPS + 1)}
    return lines, {run: {"run": run, "mail": f"sent {run}", **steps}}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["call", "a1-0", "1", "other", "a1-8"], "a1-8 repeated the call 1 of a1-0, whose result was stored"),
        (["stored", "a1-0", "1", "other", "a1-8"], "the call 1 of a1-0 has two results"),
        (["effect", "a1-0", "key", "a1-8"], "the effect of a1-0 was done 2 times"),
        (["stored", "a1-0", "4", "result4", "a2-8"], "a2-8 executed a1-0, which it does not know"),
    ],
)
def test_the_judge_of_a_deployment_sees_what_must_not_happen(line: list[str], complaint: str) -> None:
    lines, states = undisturbed("a1-0")

    assert wrong_in(lines, states) == []
    assert wrong_in([*lines, line], states) == [complaint]


def test_the_nodes_of_a_deployment_leave_what_the_judge_expects(tmp_path: Path) -> None:
    with backstay.open(str(tmp_path / "agent.db")) as store:
        world = World(str(tmp_path / "world"), "b-1")
        result = graph_of("b", world).run_sync(store.thread("b-0"), {"run": "b-0"})

    assert wrong_in(world.lines(), {"b-0": dict(result.state)}) == []
    assert graph_of("a1", world).fingerprint != graph_of("a2", world).fingerprint
