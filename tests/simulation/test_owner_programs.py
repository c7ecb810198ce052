"""Random programs of leases and records, on every store whose clock a test can set."""

from __future__ import annotations

import functools
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from backstay.store.directory.store import DirectoryStore
from backstay.store.memory import MemoryStore
from backstay.store.sqlite.store import SqliteStore
from backstay.store.sqlite.transactions import TIMEOUT_S
from support.running import RAM_FOLDER, effort
from support.simulation.owner_programs import OwnerProgram, owner_program

MUST_HAPPEN = {
    *(f"acquire: {answer}" for answer in ("done", "Fenced", "Conflict")),
    *(f"{verb}: done" for verb in ("claim", "drop")),
    *(f"renew: {answer}" for answer in ("done", "Fenced")),
    *(f"release: {answer}" for answer in ("done", "Fenced", "Conflict")),
    *(f"commit: {answer}" for answer in ("done", "Fenced", "Conflict", "IdTaken")),
    *(f"delete: {answer}" for answer in ("done", "Fenced")),
    *(f"delete_thread: {answer}" for answer in ("done", "Fenced")),
    *(f"put: {answer}" for answer in ("done", "NotFound")),
    *(f"put_fenced: {answer}" for answer in ("done", "Fenced", "NotFound", "Conflict")),
    *(f"put_again: {answer}" for answer in ("done", "Fenced", "NotFound")),
}
"""Programs in which these do not come up prove nothing about them."""


FIXED, FRESH = max(60, 20 * effort()), 5 * effort()


@pytest.mark.effort
def test_stores_agree_on_who_may_write_whatever_the_clock_does(show: Callable[[str, object], None]) -> None:
    fresh = random.SystemRandom().randrange(FIXED, 2**32)
    answers: Counter[str] = Counter()
    for seed in (*range(FIXED), *range(fresh, fresh + FRESH)):
        with tempfile.TemporaryDirectory(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None) as folder:
            sqlite = functools.partial(SqliteStore, str(Path(folder) / "agent.db"), TIMEOUT_S)
            logs = functools.partial(DirectoryStore, f"dir:{folder}/logs")
            run = OwnerProgram([functools.partial(MemoryStore, "memory:"), sqlite, logs])
            try:
                answers.update(run.run(owner_program(seed)))
            except AssertionError as error:
                error.add_note(f"in owner_program({seed})")
                raise
    show("steps of random programs of owners", f"{answers.total()}, fresh seeds from {fresh}")

    assert answers.keys() >= MUST_HAPPEN
