"""SIGKILL at every verb of a saver while a graph runs: what was acknowledged is there, and what is done is kept.

A victim runs a small graph and dies at a chosen point; a second process compares what is stored with what the victim
was told, and takes the run up. Each step says in a file when it begins and when it is done, so the file tells which
finished steps ran again. LangGraph hands a step's result to ``put_writes`` and the checkpoint after it to ``put`` at
the same time, in two threads, and waits for one or none of them; so whoever is killed before either is stored must run
the step again, with any saver. The tables count it for ours and for LangGraph's own, in the same harness.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import backstay
from support.processes import Nursery
from support.running import Show, effort

ROUNDS = max(1, effort() // 4)
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))
GOAL = 4
UNDISTURBED = list(range(1, GOAL + 1))
STEPS = (1, 2, 3)
MIDDLE = (2,)
DURABILITIES = ("sync", "async")
PLACES = ("put_writes entry", "put_writes return", "put entry", "put return")
AT_ONCE = 4
"""So many victims live at the same time."""

LONG = 200 * ROUNDS
LINES_MAX = 24
KILLS = {"sqlite": 15 * ROUNDS, "dir": 4 * ROUNDS, "postgres": 3 * ROUNDS, "SqliteSaver": 4 * ROUNDS}
"""How often a run is killed at any moment, by where it is stored."""

Cell = tuple[str, str]  # durability, place


class Told:
    """What processes said: which steps they began and ended, what was acknowledged, how it went."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = [json.loads(line) for line in lines]

    @classmethod
    def at(cls, path: Path) -> Told:
        return cls(path.read_text().splitlines())

    def every(self, word: str) -> list[Any]:
        """Return what was said with this word."""
        return [line[word] for line in self.lines if word in line]

    def stored(self) -> set[int]:
        """Return the steps of which the result was acknowledged: in a checkpoint, or beside one that was."""
        checkpoints = self.every("put")
        beside = {line["step"] for line in self.lines if line.get("writes") in checkpoints}
        return beside.union(*self.every("log"))


@dataclass
class Tally:
    """What became of the kills. A run counts as repeated if a step that was done ran again."""

    kills: Counter[Cell] = field(default_factory=Counter)
    repeated: Counter[Cell] = field(default_factory=Counter)
    steps: Counter[Cell] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(
            f"\n  {cell[0]:5}  {cell[1]:17}  {self.repeated[cell]:3} of {self.kills[cell]:3} kills, "
            f"{self.steps[cell]:3} steps in all"
            for cell in itertools.product(DURABILITIES, PLACES)
        )


@dataclass
class Case:
    """One run that is killed and taken up."""

    folder: Path
    url: str
    durability: str
    place: str
    step: int

    def begin(self, nursery: Nursery) -> int:
        """Start the victim."""
        verb, when = self.place.split()
        given = [self.url, self.folder.name, GOAL, self.durability, [verb, self.step, when]]
        return nursery.start("support.langgraph.children:live", given, str(self.folder / "first"))

    def take_up(self, nursery: Nursery) -> int:
        """Start the process that goes on."""
        given = [self.url, self.folder.name, GOAL, self.durability, str(self.folder / "first")]
        return nursery.start("support.langgraph.children:resume", given, str(self.folder / "second"))

    def count(self, tally: Tally) -> None:
        """Judge what both processes said."""
        first, second = Told.at(self.folder / "first"), Told.at(self.folder / "second")
        verb, when = self.place.split()
        assert first.every("dies") == [[verb, self.step, when]], "the point was not reached"
        cell = self.durability, self.place
        again = set(first.every("done")) & set(second.every("begins"))
        tally.kills[cell] += 1
        tally.repeated[cell] += bool(again)
        tally.steps[cell] += len(again)
        said = [second.every(word) for word in ("result", "missing", "broken")]
        if said != [[UNDISTURBED], [[]], [""]] or again & first.stored():
            tally.wrong.append(f"{self}: {said}, ran again: {again}, of which were stored: {again & first.stored()}")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as opened:
        yield opened


def kill_everywhere(
    nursery: Nursery, folder: Path, url: Callable[[Path], str], rounds: int, steps: tuple[int, ...]
) -> Tally:
    """Kill a run at every place, step and durability, so many times."""
    tally = Tally()
    cells = itertools.product(range(rounds), DURABILITIES, PLACES, steps)
    while batch := list(itertools.islice(cells, AT_ONCE)):
        cases: list[Case] = []
        for _, durability, place, step in batch:
            home = folder / f"case-{sum(tally.kills.values()) + len(cases)}"
            home.mkdir()
            cases.append(Case(home, url(home), durability, place, step))
        victims = [case.begin(nursery) for case in cases]
        assert [nursery.wait(pid) for pid in victims] == [-signal.SIGKILL] * len(cases)
        heirs = [case.take_up(nursery) for case in cases]
        assert [nursery.wait(pid) for pid in heirs] == [0] * len(cases)
        for case in cases:
            case.count(tally)
    return tally


@pytest.mark.crash
@pytest.mark.effort
def test_what_was_acknowledged_is_there_and_what_was_stored_does_not_run_again(
    nursery: Nursery, tmp_path: Path, show: Show
) -> None:
    backstay.open(tmp_path / "empty.db").close()

    def copy_to(home: Path) -> str:  # making a store anew takes longer than the run
        return str(shutil.copy(tmp_path / "empty.db", home / "agent.db"))

    ours = kill_everywhere(nursery, tmp_path, copy_to, ROUNDS, STEPS)

    show("finished steps that ran again after a kill, BackstaySaver", ours)
    assert ours.wrong == []
    assert sum(ours.kills.values()) == ROUNDS * len(DURABILITIES) * len(PLACES) * len(STEPS)


@pytest.mark.crash
@pytest.mark.effort
def test_the_same_kills_of_the_saver_that_comes_with_langgraph(nursery: Nursery, tmp_path: Path, show: Show) -> None:
    """Only counted: what it acknowledged is there too, and nobody can keep what was not handed over yet."""
    theirs = kill_everywhere(nursery, tmp_path, lambda home: f"SqliteSaver:{home / 'agent.db'}", ROUNDS, MIDDLE)

    show("finished steps that ran again after a kill, SqliteSaver", theirs)
    assert theirs.wrong == []


@pytest.mark.crash
@pytest.mark.effort
def test_kills_of_a_run_on_postgresql(nursery: Nursery, tmp_path: Path, postgres_url: str, show: Show) -> None:
    ours = kill_everywhere(nursery, tmp_path, lambda home: postgres_url, -(-ROUNDS // 2), MIDDLE)

    show("finished steps that ran again after a kill, BackstaySaver on PostgreSQL", ours)
    assert ours.wrong == []
    with backstay.open(postgres_url) as store:
        report = store.check()
        assert report, str(report)


@pytest.mark.crash
def test_a_saver_that_acknowledges_too_early_is_caught(nursery: Nursery, tmp_path: Path) -> None:
    """A harness that cannot fail shows nothing."""
    case = Case(tmp_path, f"Boastful:{tmp_path / 'agent.db'}", "sync", "put entry", 2)
    assert nursery.wait(case.begin(nursery)) == -signal.SIGKILL
    assert nursery.wait(case.take_up(nursery)) == 0
    tally = Tally()
    case.count(tally)

    assert len(tally.wrong) == 1
    assert Told.at(tmp_path / "second").every("missing")[0][0]["log"] == [1, 2]


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("url", ["sqlite", "dir", "postgres"], indirect=True)
def test_a_finished_step_does_not_run_again_if_the_one_beside_it_dies(
    url: str, nursery: Nursery, tmp_path: Path
) -> None:
    for number in range(ROUNDS):
        first, second = tmp_path / f"first-{number}", tmp_path / f"second-{number}"
        victim = nursery.start("support.langgraph.children:live_side_by_side", [url, f"t{number}", True], str(first))
        assert nursery.wait(victim) == -signal.SIGKILL
        assert Told.at(first).every("dies") == ["side by side"]
        heir = nursery.start("support.langgraph.children:live_side_by_side", [url, f"t{number}", False], str(second))
        assert nursery.wait(heir) == 0
        assert Told.at(second).every("begins") == [2]
        assert Told.at(second).every("result") == [[1, 2]]


# Kills at any moment ----------------------------------------------------------------------------------------------


class Wanderer:
    """A run that lives many lives: each is killed when it has said so many lines, wherever it is then."""

    def __init__(self, nursery: Nursery, folder: Path, url: str) -> None:
        self.nursery = nursery
        self.folder = folder
        self.url = url
        self.past = folder / "past"
        self.done: set[int] = set()
        self.stored: set[int] = set()
        self.again = 0

    def live(self, life: int, lines: int) -> None:
        """Live one life, and remember what was said."""
        fifo = str(self.folder / f"life-{life}")
        os.mkfifo(fifo)
        given = [self.url, "wanderer", LONG, DURABILITIES[life % 2], None]
        pid = self.nursery.start("support.langgraph.children:live", given, fifo)
        with open(fifo) as pipe:
            said = [pipe.readline() for _ in range(lines)]
            os.kill(pid, signal.SIGKILL)
            assert self.nursery.wait(pid) == -signal.SIGKILL
            said += pipe.readlines()
        assert "result" not in said[-1], "the run was over before it was killed"
        with self.past.open("a") as past:
            past.writelines(said)
        self._count(Told(said))

    def _count(self, told: Told) -> None:
        again = self.done & set(told.every("begins"))
        assert not again & self.stored, "a step ran again whose result was acknowledged"
        self.again += len(again)
        self.done |= set(told.every("done"))
        self.stored |= told.stored()

    def end(self) -> Told:
        """Let it run to its end; return what the last process said."""
        given = [self.url, "wanderer", LONG, "sync", str(self.past)]
        assert (
            self.nursery.wait(self.nursery.start("support.langgraph.children:resume", given, str(self.folder / "end")))
            == 0
        )
        return Told.at(self.folder / "end")


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("place", KILLS)
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(
    place: str, nursery: Nursery, tmp_path: Path, show: Show, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(SEED)
    urls = {"sqlite": f"{tmp_path / 'agent.db'}", "dir": f"dir:{tmp_path / 'logs'}"}
    urls["SqliteSaver"] = f"SqliteSaver:{tmp_path / 'theirs.db'}"
    wanderer = Wanderer(nursery, tmp_path, urls.get(place) or str(request.getfixturevalue("postgres_url")))
    for life in range(KILLS[place]):
        wanderer.live(life, rng.randint(1, LINES_MAX))
    told = wanderer.end()

    show(
        f"killed again and again on {place}",
        f"seed {SEED}, {KILLS[place]} kills, {wanderer.again} finished steps ran again; "
        f"{len(wanderer.done)} steps before the last life",
    )
    assert [told.every(word) for word in ("result", "missing", "broken")] == [[list(range(1, LONG + 1))], [[]], [""]]
    assert len(wanderer.done) > KILLS[place] // 2, "the run hardly came on"
