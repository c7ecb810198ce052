"""SIGKILL, again and again, of one of four processes that save into one SQLite file, or one directory.

The expected state lives outside the victims: each writes a line before a save and one after it, and the test, which
reads them, compares the store with the lines at the end. A kill alone does not test fsync, since the page cache
survives it; ``test_syscalls`` and the power-cut tests do.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from support.crash.kill_victims import Arena, Told, compare
from support.processes import Nursery
from support.running import Show, effort

WRITERS = 4
KILLS = 20 * effort()
LINES_BEFORE_KILL_MAX = 24
SEED = int(os.environ.get("BACKSTAY_SEED", "20261115"))


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("place", ["agent.db", "dir:logs"])
def test_four_writers_killed_again_and_again_lose_nothing_and_never_fork(
    tmp_path: Path, show: Show, place: str
) -> None:
    rng = random.Random(SEED)
    with Nursery() as nursery:
        arena = Arena(nursery, tmp_path)
        arena.path = f"dir:{tmp_path / 'logs'}" if place.startswith("dir:") else str(tmp_path / place)
        victims = [arena.start(f"w{number}", 0) for number in range(WRITERS)]
        for _ in range(KILLS - WRITERS):
            number = rng.randrange(WRITERS)
            victim = victims[number]
            arena.read_until(victim, victim.lines + rng.randint(1, LINES_BEFORE_KILL_MAX))
            arena.kill(victim)
            victims[number] = arena.start(victim.name, victim.generation + 1)
        for victim in victims:
            arena.read_until(victim, victim.lines + 1)
            arena.kill(victim)

    told = arena.told
    found = compare(arena.path, told)
    damage = [finding for finding in found.findings if not finding.startswith("leftover")]
    show(
        f"kill loop on {place}",
        f"seed {SEED}, {arena.killed} kills, {len(told.acks)} acks, {len(told.conflicts)} conflicts, "
        f"{len(told.unknown)} unknown ({found.unknown_applied} applied), {found.stored} stored, {len(found.lost)} lost",
    )
    assert arena.killed == KILLS
    assert len(told.unknown) >= KILLS // 20, "hardly any kill came in the middle of a save: the fault did not fire"
    assert len(told.acks) >= KILLS
    assert told.conflicts, "the writers never raced for the shared thread"
    assert (found.lost, found.wrong, found.broken, found.undead, damage) == ([], [], [], [], [])


@pytest.mark.crash
def test_a_writer_that_acknowledges_too_early_is_caught(tmp_path: Path) -> None:
    """A harness that cannot fail shows nothing: this mutant must be reported as a loss."""
    path, out = str(tmp_path / "agent.db"), str(tmp_path / "out")
    told = Told()
    with Nursery() as nursery:
        for generation in range(3):
            os.mkfifo(f"{out}{generation}")
            pid = nursery.start(
                "support.crash.kill_victims:acknowledge_before_saving", [path, "w", generation], f"{out}{generation}"
            )
            with open(f"{out}{generation}") as lines:
                told.take(lines.readline().rstrip())
                told.take(lines.readline().rstrip())
                os.kill(pid, signal.SIGKILL)
                assert nursery.wait(pid) == -signal.SIGKILL

    assert compare(path, told).lost


@pytest.mark.crash
def test_a_writer_that_takes_a_conflict_for_success_is_caught(tmp_path: Path) -> None:
    path, out = str(tmp_path / "agent.db"), str(tmp_path / "out")
    told = Told()
    with Nursery() as nursery:
        assert nursery.wait(nursery.start("support.crash.kill_victims:acknowledge_conflicts", [path, "w", 0], out)) == 0
    for line in Path(out).read_text().splitlines():
        told.take(line)

    assert compare(path, told).lost == ["w.0.loser"]
