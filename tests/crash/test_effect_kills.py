"""SIGKILL around and inside effects. What was done is counted outside, in a file that the victims only append to."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from io import FileIO
from pathlib import Path

import pytest

import backstay
from backstay.model.runs import EffectRecord
from support.crash.effect_victims import IDEMPOTENT, NOWHERE, PLAIN, POINTS, RECONCILED, World
from support.processes import Nursery
from support.running import Show, effort

ROUNDS = max(1, effort() // 4)
EFFECTS = 20 * effort()
RANDOM_KILLS_MIN = 2 * effort()
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))

DONE_BEFORE = {point: number >= 3 for number, point in enumerate(POINTS)}
"""Whether the effect was done when the process died there."""

KNOWN_AFTER = {POINTS[0], POINTS[-1]}
"""Where a process may die so that the next one knows what to do."""


class Arena:
    """One store, one world, and the victims that were killed."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.nursery = nursery
        self.path = str(folder / "agent.db")
        self.world = World(str(folder / "world"))
        self.out = folder / "out"
        self.killed = 0

    def kill(self, name: str, mode: str, point: str, victim: str = "do_one") -> None:
        """Start a victim that dies at a point, and prove that it did."""
        pid = self.nursery.start(
            f"support.crash.effect_victims:{victim}", [self.path, self.world.path, name, mode, point], self._out
        )
        assert self.nursery.wait(pid) == -signal.SIGKILL, f"it did not die {point}"
        assert not self.out.exists() or self.out.read_text() == ""
        self.killed += 1

    def restart(self, name: str, mode: str, victim: str = "do_one") -> str:
        """Start it again, let it live, and return what it told."""
        arguments = [self.path, self.world.path, name, mode, NOWHERE]
        assert (
            self.nursery.wait(self.nursery.start(f"support.crash.effect_victims:{victim}", arguments, self._out)) == 0
        )
        told = self.out.read_text().strip()
        self.out.write_text("")
        return told

    def times(self, name: str) -> int:
        """Return how often an effect was done."""
        return sum(line.split()[0] == name for line in self.world.lines())

    def record(self, name: str) -> EffectRecord:
        """Return what the ledger has of an effect."""
        with backstay.open(self.path) as store:
            return next(record for record in store.thread("t").effects() if record.key == name)

    @property
    def _out(self) -> str:
        return str(self.out)


def every_kill() -> list[tuple[str, str]]:
    return [(f"{number}-{point.replace(' ', '-')}", point) for number in range(ROUNDS) for point in POINTS]


@pytest.mark.crash
@pytest.mark.effort
def test_after_a_kill_an_effect_was_done_once_or_nobody_claims_to_know(tmp_path: Path, show: Show) -> None:
    told: Counter[str] = Counter()
    with Nursery() as nursery:
        arena = Arena(nursery, tmp_path)
        for name, point in every_kill():
            arena.kill(name, PLAIN, point)
            assert arena.times(name) == DONE_BEFORE[point]
            answer = arena.restart(name, PLAIN)
            told[answer.split()[0]] += 1
            if point in KNOWN_AFTER:
                assert (answer, arena.times(name)) == (f"did {name}", 1)
            else:
                assert (answer, arena.times(name)) == ("unknown", DONE_BEFORE[point])
                record = arena.record(name)
                with backstay.open(arena.path) as store:
                    store.thread("t").settle(record, arena.world.look(record), by="ann")
                assert arena.restart(name, PLAIN) == f"did {name}"
            assert arena.times(name) == 1

    show("effects, killed without a hook", f"{arena.killed} kills, {told['did']} done, {told['unknown']} unknown")
    assert arena.killed == ROUNDS * len(POINTS)
    assert told == {"did": ROUNDS * 2, "unknown": ROUNDS * 4}


@pytest.mark.crash
@pytest.mark.effort
def test_with_a_hook_that_finds_out_every_effect_is_done_exactly_once(tmp_path: Path, show: Show) -> None:
    with Nursery() as nursery:
        arena = Arena(nursery, tmp_path)
        for name, point in every_kill():
            arena.kill(name, RECONCILED, point)
            assert arena.restart(name, RECONCILED) == f"did {name}"
            assert arena.restart(name, PLAIN) == f"did {name}"
            assert arena.times(name) == 1, point

    show("effects, killed with a hook", f"{arena.killed} kills, {len(arena.world.lines())} done, none twice")
    assert arena.killed == len(arena.world.lines()) == ROUNDS * len(POINTS)


@pytest.mark.crash
@pytest.mark.effort
def test_an_idempotent_effect_is_repeated_under_its_own_key_until_it_is_known(tmp_path: Path, show: Show) -> None:
    with Nursery() as nursery:
        arena = Arena(nursery, tmp_path)
        for name, point in every_kill():
            arena.kill(name, IDEMPOTENT, point)
            assert arena.restart(name, IDEMPOTENT) == f"did {name}"
            assert arena.times(name) == 1 + (DONE_BEFORE[point] and point not in KNOWN_AFTER)

    lines = arena.world.lines()
    show("effects, killed and idempotent", f"{arena.killed} kills, {len(lines)} calls, {len(set(lines))} keys")
    assert len(set(lines)) == arena.killed == ROUNDS * len(POINTS)


@pytest.mark.crash
@pytest.mark.effort
def test_killed_at_any_moment_and_restarted_all_effects_are_done_exactly_once(tmp_path: Path, show: Show) -> None:
    """Kills from outside come wherever they come, also into the middle of a transaction."""
    rng = random.Random(SEED)
    kills = 0
    with Nursery() as nursery:
        arena = Arena(nursery, tmp_path)
        code, told = -signal.SIGKILL, 0
        while code:
            fifo = str(tmp_path / f"fifo-{kills}")
            os.mkfifo(fifo)
            pid = nursery.start("support.crash.effect_victims:do_many", [arena.path, arena.world.path, EFFECTS], fifo)
            with open(fifo, "rb", buffering=0) as said:
                # What was done before is replayed at once, so it dies soon after the first new one.
                if len(_read(said, told + rng.randint(1, EFFECTS // RANDOM_KILLS_MIN))) < EFFECTS:
                    os.kill(pid, signal.SIGKILL)
                said.read()
            code = nursery.wait(pid)
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
            told = len({line.split()[0] for line in arena.world.lines()})

    lines = arena.world.lines()
    show("effects, killed at any moment", f"seed {SEED}, {kills} kills, {EFFECTS} effects, {len(lines)} done")
    assert kills >= RANDOM_KILLS_MIN
    assert sorted(line.split()[0] for line in lines) == sorted(f"effect-{number}" for number in range(EFFECTS))


def _read(said: FileIO, count: int) -> bytes:
    """Return so many bytes, or fewer if no more will come."""
    found = b""
    while len(found) < count and (more := said.read(count - len(found))):
        found += more
    return found


@pytest.mark.crash
def test_an_agent_without_a_ledger_is_caught_doing_it_twice(tmp_path: Path) -> None:
    """A harness that cannot fail shows nothing."""
    with Nursery() as nursery:
        arena = Arena(nursery, tmp_path)
        arena.kill("mail", PLAIN, POINTS[4], victim="do_one_without_a_ledger")
        assert arena.restart("mail", PLAIN, victim="do_one_without_a_ledger") == "did mail"

        assert arena.times("mail") == 2
