"""With many runs that are over, lists, counts and claims cost what they cost with few: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backstay.store.leases import LeaseRequest
from backstay.store.records import RunFacts, RunQuery
from backstay.store.sqlite.database import Database
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.records import put_run
from backstay.store.sqlite.store import SqliteStore
from backstay.store.sqlite.transactions import writing
from backstay.testing._contract_runs import queued
from support.running import Show, effort

FEW, MANY = 1000, 20_000 * max(1, effort() // 5)
OPEN = 300
"""How many runs are not over, at any size."""

STEPS = 10
"""Every so many steps of SQLite's machine are counted."""

GROWTH_MAX = 1.5
TAKER = LeaseRequest("taker", "token", 3_600_000_000)
QUERIES = {
    "all": RunQuery(""),
    "queued": RunQuery("", status="queued"),
    "completed": RunQuery("", status="completed"),
    "failed": RunQuery("", status="failed"),
    "a graph": RunQuery("", graph="g"),
    "a graph and a status": RunQuery("", graph="g", status="failed"),
    "a small graph": RunQuery("", graph="small"),
    "a thread": RunQuery("", thread="t5"),
    "a later page": RunQuery("", before=500, limit=20),
}


def records(count: int) -> list[Any]:
    """Return so many runs; the newest are not over, and three are of a small graph."""
    found = []
    for number in range(count):
        graph = "small" if number < 3 else "g"
        status = "completed" if number < count - OPEN else ("queued", "failed", "interrupted")[number % 3]
        due = number if status == "queued" else None
        found.append(queued(f"t{number}", run=RunFacts(status, graph, "1", due)))
    return found


@writing
def put_all(self: Any, connection: Connection, runs: list[Any]) -> None:
    for run in runs:
        put_run(connection, run)


class Steps:
    """Counts the steps of SQLite's machine on all connections of stores that are opened from now on, in tens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        connect = Database.connect

        def counting(database: Database, *given: Any, **options: Any) -> Connection:
            connection = connect(database, *given, **options)
            connection.set_progress_handler(self.step, STEPS)
            return connection

        monkeypatch.setattr(Database, "connect", counting)

    def step(self) -> None:
        self.count += 1

    def of(self, call: Callable[[], object]) -> int:
        """Return how many a call takes."""
        before = self.count
        call()
        return self.count - before


def measured(path: Path, count: int, steps: Steps) -> dict[str, int]:
    """Fill a store, and return the steps of each call."""
    with closing(SqliteStore(str(path))) as store:
        put_all(store, records(count))
        store.runs(QUERIES["all"])  # the first call of a connection prepares it
        found = {f"runs: {name}": steps.of(partial(store.runs, query)) for name, query in QUERIES.items()}
        found["count_runs"] = steps.of(lambda: store.count_runs("", ["queued", "running", "failed", "interrupted"]))
        claim = partial(store.claim, "", [("g", "1")], 1, TAKER, count, (), lambda run: replace(run, body=b"2"))
        found["claim"] = steps.of(claim)
    return found


@pytest.mark.effort
def test_the_cost_of_lists_counts_and_claims_does_not_grow_with_the_runs_that_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Show
) -> None:
    steps = Steps(monkeypatch)
    few, many = measured(tmp_path / "few.db", FEW, steps), measured(tmp_path / "many.db", MANY, steps)

    show("steps of SQLite", f"{FEW} and {MANY} runs: { {name: (few[name], many[name]) for name in few} }")
    assert min(few.values()) > 0
    assert [name for name in few if many[name] > GROWTH_MAX * few[name] + 20] == []
