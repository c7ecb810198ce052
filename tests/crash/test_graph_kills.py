"""Random graphs, killed for real at any write and inside any function, and resumed until they are done.

Whatever the moments, the end is that of a run nobody killed: the same state, the same path, every effect exactly once.
What was stored is not run again. The rig, the moments and most rules are those of ``backstay.testing.crash``, which
users have; here they meet graphs of every shape, and rules that know what the random graphs promise. An engine that is
wrong on purpose must be caught.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from backstay.testing.judge import CrashRun, judge, parse_position, unstable
from backstay.testing.kills import CrashRig, GraphPlace
from backstay.testing.victim import Point
from support.crash.graph_mutants import MUTANTS
from support.crash.graph_victims import Person
from support.running import Show, effort
from support.simulation.graphs import FEATURES, Scenario, make

CHUNKS = max(1, effort() // 2)
SEEDS = 17 * effort()
KILLS_PER_GRAPH = 6
KILLS_PER_RUN = (1, 1, 4, 4, *[1] * 20)
"""How often each run of a graph is killed; later runs make up for points that were not reached."""

MUTANT_KILLS_PER_GRAPH = 8
DEADLY = {
    *("taking the lease", "releasing the lease", "checkpoint", "pending write", "question", "decision"),
    *("use of a decision", "intent", "receipt", "start of node", "end of node", "start of effect", "end of effect"),
}
"""Where processes of each chunk died."""

FEATURE_SEEDS = 128
FEATURE_COUNT_MIN = 8
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))


class Arena:
    """Runs of random graphs, in processes that die."""

    def __init__(self, inputs: list[dict[str, Any]]) -> None:
        self._person = Person()
        place = GraphPlace("support.crash.graph_victims", "", "run_scenario", is_program=True)
        self._rig = CrashRig(place, inputs, answers=self._person)
        self._inputs = inputs

    def __enter__(self) -> Arena:
        self._rig.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._rig.close()

    def run(self, number: int, points: list[Point] | None = None) -> CrashRun:
        """Run an input, killed at these moments, until it is over."""
        self._person.meet(make(self._inputs[number]["seed"]))
        return self._rig.run(number, points or ())


def group_of(label: str) -> str:
    """Return what happens at a moment, in any node."""
    return re.sub(r"^(before|after) (?!effect)|(?<=node) .*|(?<=effect) .*", "", label)


def points_of(run: CrashRun) -> dict[str, list[Point]]:
    """Return every moment to die at that a run had, sorted by what happens there, so that what is rare has its turn."""
    found: dict[str, list[Point]] = {}
    for label, count in sorted(run.labels().items()):
        found.setdefault(group_of(label), []).extend((label, number) for number in range(1, count + 1))
    return found


# The judge --------------------------------------------------------------------------------------------------------


def lines_of(lines: list[list[Any]], kind: str) -> list[list[Any]]:
    return [words for words in lines if words[0] == kind]


def effects_of(run: CrashRun) -> Counter[str]:
    """Return how often each effect can be seen in the world."""
    return Counter(" ".join(words[1:3]) for words in lines_of(run.lines, "effect"))


def wrongs(scenario: Scenario, reference: CrashRun, run: CrashRun) -> list[str]:
    """Return everything that is wrong with a run, by the log and by the run that was not killed."""
    wrong = [f"{kind}: {what}" for kind, what in judge(reference, run, unstable(reference, reference))]
    if run.problem is None:
        here, there = effects_of(run), effects_of(reference)
        if here != there or any(count != 1 for count in here.values()):
            wrong.append(f"effects: {here - there} more, {there - here} fewer")
        ends = [lines_of(each.lines, "over")[-1:] for each in (reference, run)]
        if ends[0] != ends[1] or "False" in ends[1][0]:
            wrong.append(f"the history or the ledger ended as {ends[1]}, and not as {ends[0]}")
    checks = (
        _ran_again(scenario, run.lines),
        _forgot(run.lines),
        _miscounted(run.lines),
        _unasked(scenario, run.lines),
    )
    return [*wrong, *(each for check in checks for each in check)]


def _ran_again(scenario: Scenario, lines: list[list[Any]]) -> Iterator[str]:
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
            return parse_position(left)[3] is not None and parse_position(right)[3] is not None
    return False


def _forgot(lines: list[list[Any]]) -> Iterator[str]:
    """Find effects whose result a node was given, and which somebody had to look up later."""
    given: set[str] = set()
    for words in lines:
        if words[0] == "got":
            given.add(words[2])
        elif words[0] == "looked" and f"{words[1]}:{words[2]}" in given:
            yield f"effect {words[1]} {words[2]} was done and known, and then looked up"


def _miscounted(lines: list[list[Any]]) -> Iterator[str]:
    """Find failed attempts that were stored beside the newest checkpoint, and not counted."""
    counted: dict[str, int] = {}
    for words in lines:
        if words[:2] == ["moment", "after checkpoint"] or words[0] == "returned":
            counted.clear()
        elif words[0] == "written":
            counted.update({place: index for channel, place, index in words[1] if channel == "attempt"})
        elif words[0] == "run" and int(words[2]) <= counted.get(words[1], 0):
            yield f"{words[1]} was tried {counted[words[1]]} times, and then as attempt {words[2]}"


def _unasked(scenario: Scenario, lines: list[list[Any]]) -> Iterator[str]:
    """Find what is guarded and ran before somebody let it pass."""
    passed: set[tuple[str, ...]] = set()
    for words in lines:
        if words[:2] == ["answer", "beforenode"] and words[2] in ("approve", "modify"):
            passed.add(tuple(words[3:5]))
        elif words[0] == "run":
            graph, node = parse_position(words[1].rpartition(">")[2])[:2]
            if scenario.guards(graph, node) and (graph, node) not in passed:
                yield f"{words[1]} is guarded, and ran though nobody let it"


# The tests --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What all runs of a chunk come to."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, run: CrashRun) -> None:
        self.counts["runs"] += 1
        self.counts["kills"] += len(run.deaths)
        self.counts["kills after the end"] += len(run.points) - len(run.deaths)
        self.counts["effects"] += sum(effects_of(run).values())
        for words in run.lines:
            match words[0]:
                case "doubted" | "looked":
                    self.counts[f"effects in doubt, {'asked' if words[0] == 'doubted' else 'looked up'}"] += 1
                case "dies":
                    self.counts["deaths told"] += 1
                    self.counts[f"died at: {group_of(words[1])}"] += 1
                case "answer":
                    self.counts[f"answered {words[2]}"] += 1
                case "returned":
                    self.counts[f"returned {words[1]}"] += 1

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))


def kill_points(rng: random.Random, reference: CrashRun, kills: int) -> list[Point]:
    """Return where to die: the first anywhere, each later one in what is left of the run, or near to it."""
    groups = points_of(reference)
    points = [rng.choice(groups[rng.choice(sorted(groups))])]
    for _ in range(kills - 1):
        label, number = rng.choice(groups[rng.choice(sorted(groups))])
        points.append((label, rng.randint(1, max(1, number // 2))))
    return points


def kill_graph(arena: Arena, number: int, seed: int, tally: Tally) -> None:
    """Run a graph without a kill, then kill it again and again; take note of what was wrong."""
    scenario, reference = make(seed), arena.run(number)
    tally.add(reference)
    found = wrongs(scenario, reference, reference)
    rng = random.Random(f"{SEED} {seed}")
    killed = 0
    for kills in KILLS_PER_RUN:
        if killed >= KILLS_PER_GRAPH or found:
            break
        points = kill_points(rng, reference, kills)
        run = arena.run(number, points)
        killed += len(run.deaths)
        tally.add(run)
        found += [f"killed at {run.deaths}: {each}" for each in wrongs(scenario, reference, run)]
    tally.counts["graphs"] += 1
    if found:
        tally.wrong.append("\n".join([str(scenario), *found[:10]]))


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_graph_killed_anywhere_ends_like_one_that_was_not(chunk: int, show: Show) -> None:
    tally, seeds = Tally(), range(chunk, SEEDS, CHUNKS)
    with Arena([{"seed": seed, "mutant": ""} for seed in seeds]) as arena:
        for number, seed in enumerate(seeds):
            kill_graph(arena, number, seed, tally)

    show(f"graphs killed, part {chunk}", f"seed {SEED}: {tally}")
    assert not tally.wrong, f"{len(tally.wrong)} graphs\n\n" + "\n\n".join(tally.wrong[:3])
    assert tally.counts["graphs"] == len(seeds)
    assert tally.counts["kills"] >= tally.counts["graphs"] * KILLS_PER_GRAPH
    assert tally.counts["deaths told"] == tally.counts["kills"]
    assert {name.removeprefix("died at: ") for name in tally.counts if name.startswith("died")} >= DEADLY
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


CAUGHT: dict[str, tuple[str, tuple[int, ...]]] = {
    "drops finished branches": ("was stored and ran again", (1, 3, 6)),
    "saves before the commit": ("was stored and ran again", (1, 5, 8)),
    "writes no receipts": ("later it was unknown", (1, 4, 5)),
    "resumes at the last node": ("ran again", (5, 6, 9)),
    "forgets visits": ("state key", (3, 4, 10)),
    "forgets inner graphs": ("ran again", (1, 4, 7)),
    "forgets what branches returned": ("ran again", (1, 3, 6)),
    "forgets what answers changed": ("state key", (9, 22, 41)),
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
def test_an_engine_that_is_wrong_is_caught(mutant: str, show: Show) -> None:
    """A harness that cannot fail shows nothing."""
    sentence, seeds = CAUGHT[mutant]
    runs = 0
    with Arena([{"seed": seed, "mutant": name} for seed in seeds for name in ("", mutant)]) as arena:
        for number, seed in enumerate(seeds):
            reference = arena.run(2 * number)
            points = [point for group in points_of(reference).values() for point in group]
            for point in random.Random(seed).sample(points, MUTANT_KILLS_PER_GRAPH):
                runs += 1
                found = wrongs(make(seed), reference, arena.run(2 * number + 1, [point]))
                caught = [each for each in found if sentence in each]
                if caught:
                    show(f"{mutant}, caught", f"in run {runs}, seed {seed}, killed at {point}: {caught[0]}")
                    return
    pytest.fail(f"not caught in {runs} runs")
