"""Deleting while others save: processes that save in every way and processes that delete in every way, on one store.

Afterwards nothing may be missing and nothing may be left over: every checkpoint that is there holds the very state that
its saver noted, every branch that was only pruned ends with its last acknowledged save, and nobody was told of damage
on the way. The same load on stores without their locks must be noticed.
"""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.running import Show

if TYPE_CHECKING:
    from support.postgres import PostgresServer

from support.running import effort
from support.simulation.prune_load import EVERYTHING, SEED, Load, run_load

ONE_BLOB = ["Swapper", "Swapper", "Swapper"]
SECONDS = max(5.0, 1.5 * effort())
TURN_SECONDS = 3.0
MUTANT_SECONDS_MAX = 30.0


@pytest.fixture(params=["sqlite", "postgres"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "agent.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def deadlocks(server: PostgresServer) -> int:
    with server.connect() as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
        assert row is not None
        return int(row[0])


@pytest.mark.effort
def test_what_is_deleted_meanwhile_never_breaks_what_is_saved(
    shared_url: str, tmp_path: Path, request: pytest.FixtureRequest, show: Show
) -> None:
    server = request.getfixturevalue("postgres") if shared_url.startswith("postgresql:") else None
    before = deadlocks(server) if server else 0
    load = run_load(shared_url, tmp_path, EVERYTHING, SECONDS)

    resolved = f", {deadlocks(server) - before} deadlocks resolved" if server else ""
    show("prune and save", f"seed {SEED}, {load}{resolved}")
    assert load.told.wrong == [], load.told.wrong[0]
    assert load.found == []
    assert load.counts["deleted"] > min(100, 5 * effort())
    assert all(load.counts[f"{what} ok"] for what in ("append", "edit", "rewind", "replace", "prune", "delete_thread"))
    assert load.counts["fork_within ok"] + load.counts["fork_across ok"]


# The load notices a store without its locks ------------------------------------------------------------------------


def load_until_noticed(url: str, folder: Path, crowd: list[str], mutation: str) -> Load:
    """Run the load in short turns until something is found, or the time is over."""
    end = time.monotonic() + MUTANT_SECONDS_MAX
    for turn in count():
        load = run_load(url, folder, crowd, TURN_SECONDS, mutation, turn)
        if load.found or load.told.wrong or time.monotonic() > end:
            return load
    raise AssertionError


@pytest.mark.effort(2)
def test_a_store_that_looks_for_blobs_before_its_transaction_is_noticed(tmp_path: Path, show: Show) -> None:
    load = load_until_noticed(str(tmp_path / "agent.db"), tmp_path, ONE_BLOB, "looks too early")

    show("looking for blobs too early", load)
    assert any("is missing" in text for text in load.told.wrong + load.found)
