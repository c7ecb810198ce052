"""One directory store, many processes: writers that are killed again and again; deleting and compacting meanwhile."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "simulation"))

from chains import compare
from nursery import Nursery
from test_kill import LINES_BEFORE_KILL_MAX, WRITERS, Arena
from test_prune_and_save import EVERYTHING, run_load

KILLS = 40
LOAD_SECONDS = 6.0
SEED = int(os.environ.get("HOLDFAST_SEED", "20261116"))

Show = Callable[[str, object], None]


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.row("G5", "C11")
def test_four_writers_killed_again_and_again_lose_nothing_and_never_fork(tmp_path: Path, show: Show) -> None:
    rng = random.Random(SEED)
    with Nursery() as nursery:
        arena = Arena(nursery, tmp_path)
        arena.path = f"dir:{tmp_path}/store"
        victims = [arena.start(f"w{number}", 0) for number in range(WRITERS)]
        for _ in range(KILLS - WRITERS):
            place = rng.randrange(WRITERS)
            victim = victims[place]
            arena.read_until(victim, victim.lines + rng.randint(1, LINES_BEFORE_KILL_MAX))
            arena.kill(victim)
            victims[place] = arena.start(victim.name, victim.generation + 1)
        for victim in victims:
            arena.read_until(victim, victim.lines + 1)
            arena.kill(victim)

    told = arena.told
    found = compare(arena.path, told)
    damage = [finding for finding in found.findings if not finding.startswith("leftover")]
    show(
        "kill loop on a directory",
        f"seed {SEED}, {arena.killed} kills, {len(told.acks)} acks, {len(told.conflicts)} conflicts, "
        f"{len(told.unknown)} unknown ({found.unknown_applied} applied), {found.stored} stored, {len(found.lost)} lost",
    )
    assert arena.killed == KILLS
    assert told.unknown, "no kill came in the middle of a save: the fault did not fire"
    assert len(told.acks) >= KILLS
    assert told.conflicts, "the writers never raced for the shared thread"
    assert (found.lost, found.wrong, found.broken, found.undead, damage) == ([], [], [], [], [])


@pytest.mark.slow
@pytest.mark.row("C8", "C11")
def test_what_is_deleted_and_written_anew_meanwhile_never_breaks_what_is_saved_or_read(
    tmp_path: Path, show: Show
) -> None:
    """Five processes save, load, delete, prune and compact: whoever holds places in a log sees it move all the time."""
    load = run_load(f"dir:{tmp_path}/store", tmp_path, EVERYTHING, LOAD_SECONDS)

    show("prune and save on a directory", f"seed {SEED}, {load}")
    assert load.told.wrong == [], load.told.wrong[0]
    assert [finding for finding in load.found if not finding.startswith("leftover")] == []
    assert load.counts["deleted"] > 20
    assert load.counts["compact ok"] > 0
    assert load.told.loads
