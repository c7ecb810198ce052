"""Random graphs, killed for real at any write and inside any effect, and taken up again until they are done.

Whatever the moments, the end is that of a run nobody killed: the same state, the same path, every effect exactly once.
What was stored is not run again. An effect is in doubt only if its process died in the middle of it; there the run
asks, and somebody who looks at the world answers. The world's file tells all of it, and is judged by rules that know
nothing of the engine's own records.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from backstay.store.base import Backend
from support.crash.graph_mutants import MUTANTS
from support.crash.graph_victims import READS, WRITES, Point, parse
from support.processes import Nursery
from support.running import RAM_FOLDER, Show, effort
from support.simulation.graphs import FEATURES, Scenario, make

CHUNKS = max(1, effort() // 2)
SEEDS = 17 * effort()
KILLS_PER_GRAPH = 6
KILLS_PER_RUN = (1, 1, 4, 4, *[1] * 20)
"""How often each run of a graph is killed; later runs make up for points that were not reached."""

MUTANT_KILLS_PER_GRAPH = 4
DEADLY_VERBS = {
    *("acquire", "release", "commit", "write", "new_interrupt", "change_interrupt", "close_interrupt"),
    *("new_effect", "close_effect", "effect"),
}
"""Where processes of each chunk died; "effect" is the world's side of one."""

LIVES_MAX = 60
FEATURE_SEEDS = 128
FEATURE_COUNT_MIN = 8
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))
"""Where the stores are, if it is there: a kill does not lose what was written, wherever that is."""


@dataclass
class End:
    """How a run ended, and what the world saw of it."""

    lives: list[dict[str, Any]]  # what those told that came to their end
    lines: list[list[str]]

    @property
    def outcome(self) -> dict[str, Any]:
        return {name: self.lives[-1][name] for name in ("over", "digest", "state", "path", "straight", "ledger")}

    @property
    def effects(self) -> Counter[str]:
        return Counter(" ".join(words[1:3]) for words in self.lines if words[0] == "effect")

    def points(self) -> list[tuple[int, Point]]:
        """Return every moment to die at that this run had, each with the number of its life."""
        return [
            (life, (kind, number, after))
            for life, told in enumerate(self.lives)
            for kind, count in (("verb", told["writes"]), ("effect", told["effects"]))
            for number in range(1, count + 1)
            for after in (False, True)
        ]

    def points_by_verb(self) -> dict[str, list[tuple[int, Point]]]:
        """Return the moments sorted by what happens there, so that what is rare is not passed over."""
        lives = [list(lines_of(part, "stored")) for part in self._parts()]
        found: dict[str, list[tuple[int, Point]]] = {}
        for life, point in self.points():
            verb = lives[life][point[1] - 1][1] if point[0] == "verb" else "effect"
            found.setdefault(verb, []).append((life, point))
        return found

    def _parts(self) -> list[list[list[str]]]:
        starts = [number for number, words in enumerate(self.lines) if words[0] == "life"]
        return [self.lines[start:end] for start, end in itertools.pairwise([*starts, len(self.lines)])]


class Killed(AssertionError):
    """A life ended in a way that it was not meant to."""


class Arena:
    """Runs of one graph, each in a folder of its own."""

    def __init__(self, nursery: Nursery, folder: Path, seed: int, mutant: str = "") -> None:
        self.nursery = nursery
        self.folder = folder / f"{seed}"
        self.seed = seed
        self.scenario = make(seed)
        self.mutant = mutant
        self.kills = 0
        self.too_late = 0

    def run(self, name: str, points: Iterable[Point | None] = ()) -> End:
        """Live life after life, each to the next point or, where there is none, to its end, until the run is over."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        lives = []
        for life, point in zip(range(LIVES_MAX), itertools.chain(points, itertools.repeat(None)), strict=False):
            told = self.live(folder, life, point)
            if told is not None:
                lives.append(told)
            if told is not None and told["over"] is not None:
                lines = [line.split() for line in (folder / "world").read_text().splitlines()]
                shutil.rmtree(folder)
                return End(lives, lines)
        raise Killed(f"run {name} is not over after {LIVES_MAX} lives")

    def live(self, folder: Path, life: int, point: Point | None) -> dict[str, Any] | None:
        """Live one life; return what it told if it came to its end, None if it was killed where it was to be."""
        out = folder / f"out-{life}"
        arguments = [str(folder), self.seed, life, point, self.mutant]
        code = self.nursery.wait(self.nursery.start("support.crash.graph_victims:live", arguments, str(out)))
        if code == -signal.SIGKILL and point is not None:
            self.kills += 1
            return None
        if code != 0:
            raise Killed(f"life {life} of {folder.name} ended with {code}, to die at {point}: see its error above")
        self.too_late += point is not None
        told: dict[str, Any] = json.loads(out.read_text())
        return told


# The judge --------------------------------------------------------------------------------------------------------


def lines_of(lines: list[list[str]], kind: str) -> list[list[str]]:
    return [words for words in lines if words[0] == kind]


def judge(scenario: Scenario, reference: End, end: End) -> list[str]:
    """Return everything that is wrong with a run, by the world's file and by the run that was not killed."""
    wrong = [f"{name} differs" for name, value in reference.outcome.items() if end.outcome[name] != value]
    if end.effects != reference.effects or any(count != 1 for count in end.effects.values()):
        wrong.append(f"effects: {end.effects - reference.effects} more, {reference.effects - end.effects} fewer")
    return [*wrong, *misdeeds(scenario, end.lines)]


def misdeeds(scenario: Scenario, lines: list[list[str]]) -> list[str]:
    """Return what no run may do, whether or not it ends well."""
    wrong = [
        f"{words[1]} was stored as done when the run was taken up, and ran again" for words in lines_of(lines, "again")
    ]
    return [*wrong, *_ran_again(scenario, lines), *_forgot(lines), *_miscounted(lines), *_unasked(scenario, lines)]


def _ran_again(scenario: Scenario, lines: list[list[str]]) -> Iterator[str]:
    """Find nodes that were stored and ran again.

    Where each commit is stored, the node that comes next proves that this one is stored; a clean pause always does.
    """
    finished: dict[str, None] = {}  # in this life, and perhaps not stored
    stored: set[str] = set()
    for words in lines:
        match words[0]:
            case "life":
                finished.clear()
            case "ran":
                finished[words[1]] = None
            case "run":
                if words[1] in stored:
                    yield f"{words[1]} was stored and ran again"
                if scenario.every is None:
                    proven = [place for place in finished if place != words[1] and not are_beside(place, words[1])]
                    stored.update(proven)
            case "returned" if words[1] in ("interrupted", "deferred"):
                stored.update(finished)


def are_beside(one: str, other: str) -> bool:
    """Tell whether two places are in different branches of a fan-out, so that neither comes after the other."""
    for left, right in zip(one.split(">"), other.split(">"), strict=False):
        if left != right:
            return parse(left)[3] is not None and parse(right)[3] is not None
    return False


def _forgot(lines: list[list[str]]) -> Iterator[str]:
    """Find effects whose result a node was given, and which were not known for ever."""
    given: set[tuple[str, ...]] = set()
    for words in lines:
        if words[0] == "got":
            given.add(tuple(words[1:3]))
        elif words[0] in ("unknown", "looked", "effect") and tuple(words[1:3]) in given:
            yield f"effect {words[1]} {words[2]} was done and known, and then {words[0]}"


def _miscounted(lines: list[list[str]]) -> Iterator[str]:
    """Find failed attempts that were stored beside the newest checkpoint, and not counted."""
    counted: dict[str, int] = {}
    for words in lines:
        if words[:2] == ["stored", "commit"]:
            counted.clear()
        elif words[:3] == ["stored", "write", "attempt"]:
            counted[words[3]] = int(words[4])
        elif words[0] == "returned":
            counted.clear()
        elif words[0] == "run" and int(words[2]) <= counted.get(words[1], 0):
            yield f"{words[1]} was tried {counted[words[1]]} times, and then as attempt {words[2]}"


def _unasked(scenario: Scenario, lines: list[list[str]]) -> Iterator[str]:
    """Find what is guarded and ran before somebody let it pass."""
    passed: set[tuple[str, ...]] = set()
    for words in lines:
        if words[:2] == ["answer", "beforenode"] and words[2] in ("approve", "modify"):
            passed.add(tuple(words[3:5]))
        elif words[0] == "run":
            graph, node = parse(words[1].rpartition(">")[2])[:2]
            if scenario.guards(graph, node) and (graph, node) not in passed:
                yield f"{words[1]} is guarded, and ran though nobody let it"


# The tests --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What all runs of a chunk come to."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, end: End) -> None:
        self.counts["runs"] += 1
        self.counts["effects"] += sum(end.effects.values())
        for words in end.lines:
            match words[0]:
                case "unknown" | "looked":
                    self.counts[f"effects in doubt, {'asked' if words[0] == 'unknown' else 'looked up'}"] += 1
                case "dies":
                    self.counts["deaths told"] += 1
                    self.counts[f"died {words[1]} {words[2]}"] += 1
                case "answer":
                    self.counts[f"answered {words[2]}"] += 1
                case "returned":
                    self.counts[f"returned {words[1]}"] += 1

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if not RAM_FOLDER.is_dir():
        yield tmp_path
        return
    made = RAM_FOLDER / f"backstay-{os.getpid()}-{tmp_path.name}"
    yield made
    shutil.rmtree(made, ignore_errors=True)


def kill_points(rng: random.Random, reference: End, kills: int) -> Iterator[Point | None]:
    """Yield where to die: the first anywhere, each later one in what is left of the run, or near to it."""
    life, point = rng.choice(rng.choice(list(reference.points_by_verb().values())))
    yield from itertools.repeat(None, life)
    yield point
    writes = reference.lives[life]["writes"]
    left = writes - point[1] if point[0] == "verb" else writes // 2
    for _ in range(kills - 1):
        if reference.effects and rng.random() < 0.25:
            yield "effect", 1, rng.random() < 0.5
            continue
        number = rng.randint(2, max(3, left // 2))  # the first is always the lease
        left -= number
        yield "verb", number, rng.random() < 0.5


def kill_graph(nursery: Nursery, folder: Path, seed: int, tally: Tally) -> None:
    """Run a graph without a kill, then kill it again and again; take note of what was wrong."""
    arena = Arena(nursery, folder, seed)
    reference = arena.run("reference")
    tally.add(reference)
    found = judge(arena.scenario, reference, reference)
    rng = random.Random(f"{SEED} {seed}")
    for number, kills in enumerate(KILLS_PER_RUN):
        if arena.kills >= KILLS_PER_GRAPH:
            break
        points = list(kill_points(rng, reference, kills))
        end = arena.run(f"run-{number}", points)
        tally.add(end)
        found += [f"killed at {points}: {each}" for each in judge(arena.scenario, reference, end)]
    tally.counts["graphs"] += 1
    tally.counts["kills"] += arena.kills
    tally.counts["kills after the end"] += arena.too_late
    if found:
        tally.wrong.append("\n".join([str(arena.scenario), *found[:10]]))


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_graph_killed_anywhere_ends_like_one_that_was_not(chunk: int, folder: Path, show: Show) -> None:
    tally = Tally()
    with Nursery() as nursery:
        for seed in range(chunk, SEEDS, CHUNKS):
            try:
                kill_graph(nursery, folder, seed, tally)
            except Killed as error:
                tally.wrong.append(f"{make(seed)}\n{error}")

    show(f"graphs killed, part {chunk}", f"seed {SEED}: {tally}")
    assert not tally.wrong, f"{len(tally.wrong)} graphs\n\n" + "\n\n".join(tally.wrong[:3])
    assert tally.counts["graphs"] == len(range(chunk, SEEDS, CHUNKS))
    assert tally.counts["kills"] >= tally.counts["graphs"] * KILLS_PER_GRAPH
    assert tally.counts["deaths told"] == tally.counts["kills"]
    assert {name.split()[2] for name in tally.counts if name.startswith("died")} >= DEADLY_VERBS
    assert tally.counts["effects in doubt, asked"], "no kill came in the middle of an effect"
    for kind in ("approve", "modify", "defer", "reroute", "reject"):
        assert tally.counts[f"answered {kind}"], f"nothing was answered with {kind}"


def test_every_feature_occurs_among_the_graphs(show: Show) -> None:
    found: Counter[str] = Counter()
    sizes = []
    for seed in range(FEATURE_SEEDS):
        scenario = make(seed)
        found.update(scenario.features())
        sizes.append(sum(len(spec.nodes) for spec in scenario.graph.graphs()))

    show("random graphs", f"{FEATURE_SEEDS}, of {min(sizes)} to {max(sizes)} nodes: {dict(found)}")
    assert {name: found[name] for name in FEATURES if found[name] < FEATURE_COUNT_MIN} == {}
    assert [make(seed) for seed in range(10)] == [make(seed) for seed in range(10)]


def test_every_verb_of_the_store_is_known_to_write_or_not() -> None:
    verbs = {name for name in dir(Backend) if not name.startswith("_") and callable(getattr(Backend, name))}

    assert verbs == WRITES | READS
    assert not WRITES & READS


CAUGHT: dict[str, tuple[str, tuple[int, ...]]] = {
    "drops finished branches": ("was stored and ran again", (1, 3, 6)),
    "saves before the commit": ("was stored and ran again", (1, 5, 8)),
    "writes no receipts": ("was done and known", (1, 4, 5)),
    "resumes at the last node": ("ran again", (5, 6, 9)),
    "forgets visits": ("state differs", (3, 4, 10)),
    "forgets inner graphs": ("ran again", (1, 4, 7)),
    "forgets what branches returned": ("ran again", (1, 3, 6)),
    "forgets what answers changed": ("state differs", (9, 22, 41)),
    "lets everybody pass after a restart": ("nobody let it", (1, 2, 4)),
    "counts attempts anew": ("and then as attempt", (22, 25, 29)),
    "does what is in doubt again": ("effects:", (5, 20, 23)),
}
"""What each wrong engine is caught doing, and in which graphs."""


def test_every_mutant_is_caught_below() -> None:
    assert set(CAUGHT) == set(MUTANTS) - {""}


@pytest.mark.crash
@pytest.mark.effort(2)
@pytest.mark.parametrize("mutant", CAUGHT)
def test_an_engine_that_is_wrong_is_caught(mutant: str, folder: Path, show: Show) -> None:
    """A harness that cannot fail shows nothing."""
    sentence, seeds = CAUGHT[mutant]
    runs = 0
    with Nursery() as nursery:
        for seed in seeds:
            reference = Arena(nursery, folder / "right", seed).run("reference")
            arena = Arena(nursery, folder / "wrong", seed, mutant)
            points = [point for life, point in reference.points() if life == 0]
            for point in random.Random(seed).sample(points, MUTANT_KILLS_PER_GRAPH):
                runs += 1
                try:
                    found = judge(arena.scenario, reference, arena.run(f"run-{runs}", [point]))
                except Killed:  # it broke down, which shows nothing of the rules
                    continue
                caught = [each for each in found if sentence in each]
                if caught:
                    show(f"{mutant}, caught", f"in run {runs}, seed {seed}, killed at {point}: {caught[0]}")
                    return
    pytest.fail(f"not caught in {runs} runs")
