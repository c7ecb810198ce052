"""Random programs on several kinds of stores: the same bundle comes out of each, and goes into each unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from psycopg import sql

import backstay
from backstay.bundle import export_bundle, import_bundle, read_bundle
from backstay.codec import encode
from backstay.model.checkpoint import Checkpoint, Write
from backstay.operations.ledger import DONE, RESULT, ended, intent_of, row_of
from backstay.store.base import Backend, BranchKey
from backstay.store.memory import MemoryStore
from backstay.store.postgres.store import PostgresStore
from backstay.store.postgres.target import parse_url
from backstay.store.records import Fence
from support.running import effort
from support.simulation.machine import BRANCHES, THREADS, StoreMachine, agree
from support.simulation.model import Point
from support.simulation.programs import PICK, VALUES
from support.strategies import same


class MovingMachine(StoreMachine):
    """The program of every store test, with all else that belongs to threads; at its end everything is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.effects = 0
        self.moved = 0

    @rule(pick=PICK, which=PICK, value=VALUES)
    def write_beside(self, pick: int, which: int, value: Any) -> None:
        """Keep results of tasks beside a checkpoint."""
        thread = THREADS[pick % 2]
        name = self.point_id(which, thread)
        writes = [Write(f"task {pick % 3}", index, "channel", value) for index in range(1 + pick % 2)]
        if name in self.model.points and self.model.points[name].branch[0] == thread:
            self.each(lambda n: self.stores[n].thread(thread).write(name, writes))

    def ask(self) -> None:
        """Record interrupts, decide on some and consume some. At the end: what waits for a decision is not deleted."""
        for number, point in enumerate(list(self.model.points.values())[::2]):
            self.each(lambda n, number=number, point=point: self.asked(n, point, number))  # type: ignore[misc]

    def asked(self, n: int, point: Point, number: int) -> str:
        """Ask in one of the stores, as far as ``number`` says."""
        handle = self.stores[n].thread(point.branch[0])
        record = handle.interrupt(point.id, payload={"n": number}, prompt="?")
        if number % 3:
            record = handle.decide(record, "approve", by="somebody")
        if number % 3 == 2:
            handle.consume(record, by="worker")
        return record.id

    @rule(pick=PICK, result=VALUES)
    def do_effect(self, pick: int, result: Any) -> None:
        """Begin an effect of some branch, and end it, or not."""
        self.effects += 1
        branch = BranchKey("", THREADS[pick % 2], "", BRANCHES[pick // 2 % 2])
        row = intent_of(branch, f"effect {self.effects}", f"owner {pick}", b"request", self.effects)
        for backend in self.backends:
            begun = row_of(backend.put_record(row.sealed(), fence=Fence()))
            if pick % 3:
                backend.put_record(ended(begun, DONE, RESULT + encode(result), 7).sealed())

    def targets(self) -> list[str]:
        """Return where everything is moved to."""
        return [str(self.folder / "moved.db"), f"dir:{self.folder / 'moved'}", "memory:"]

    def teardown(self) -> None:
        """Move everything to other stores and compare."""
        try:
            self.move()
        finally:
            super().teardown()

    def move(self) -> None:
        """Export each store; import the bundle elsewhere; export again."""
        self.ask()
        bundles = [self.folder / f"{n}.bundle" for n in range(len(self.stores))]
        for store, path in zip(self.stores, bundles, strict=True):
            assert export_bundle(store, path)
        assert all(path.read_bytes() == bundles[0].read_bytes() for path in bundles), "the kind of store can be told"
        assert all(agree(mine, self.stores[0].get(mine.id)) for mine in unnumbered(read_bundle(bundles[0]), self))
        for number, url in enumerate(self.targets()):
            with backstay.open(url) as target:
                again = self.folder / f"again{number}.bundle"
                report = import_bundle(bundles[0], target)
                assert report, str(report)
                assert (report.stored, report.present, report.notes) == (len(self.model.points), 0, ())
                self.compare(target)
                assert export_bundle(target, again)
                assert again.read_bytes() == bundles[0].read_bytes()
                assert import_bundle(bundles[0], target).present == len(self.model.points)
                self.moved += 1

    def compare(self, target: backstay.Store) -> None:
        """Demand that a store holds what the program made."""
        source = self.stores[0]
        for name in self.model.points:
            mine, theirs = source.get(name), target.get(name)
            assert mine is not None
            assert theirs is not None
            assert (mine.digest, mine.tags, mine.parent_id) == (theirs.digest, theirs.tags, theirs.parent_id)
            assert (mine.branch, mine.step, mine.created_at) == (theirs.branch, theirs.step, theirs.created_at)
            assert same(mine.state, theirs.state)
            assert same([w.value for w in mine.writes], [w.value for w in theirs.writes])
        for thread in THREADS:
            here, there = source.thread(thread), target.thread(thread)
            assert [m.id for m in here.history(branch="*")] == [m.id for m in there.history(branch="*")]
            assert {b.key: (b.head, b.origin) for b in here.branches()} == {
                b.key: (b.head, b.origin) for b in there.branches()
            }
            assert [str(i) for i in here.interrupts(pending=False)] == [str(i) for i in there.interrupts(pending=False)]
            assert [str(e) for e in here.effects()] == [str(e) for e in there.effects()]
        report = target.check()
        assert report, str(report)


def unnumbered(found: Any, machine: StoreMachine) -> list[Checkpoint]:
    """Return what was read from a bundle with the numbers that the store gave: those are not in a bundle."""
    read = list(found)
    for checkpoint in read:
        stored = machine.stores[0].get(checkpoint.id)
        assert stored is not None
        checkpoint.__dict__["seq"] = stored.seq
    return read


def programs(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=25,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.mark.effort
def test_a_bundle_is_the_same_from_every_store_and_goes_into_every_store() -> None:
    run_state_machine_as_test(MovingMachine, settings=programs(max(2, effort() // 2)))


@pytest.mark.effort
def test_postgresql_gives_and_takes_the_same_bundle(postgres_url: str, tmp_path: Path) -> None:
    elsewhere = postgres_url.replace("t_", "u_")

    class PostgresMachine(MovingMachine):
        def open_backends(self) -> list[Backend]:
            if hasattr(self, "backends"):
                return [self.backends[0], PostgresStore(postgres_url)]
            empty(postgres_url)
            return [MemoryStore(), PostgresStore(postgres_url)]

        def targets(self) -> list[str]:
            empty(elsewhere)
            return [elsewhere]

    for url in (postgres_url, elsewhere):
        PostgresStore(url).close()
    try:
        run_state_machine_as_test(PostgresMachine, settings=programs(max(2, effort() // 2)))
    finally:
        drop(elsewhere)


def empty(url: str) -> None:
    """Take everything out of a PostgreSQL store: much faster than making its tables anew."""
    target = parse_url(url)
    with psycopg.connect(target.conninfo) as connection:
        found = connection.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = %s::regnamespace", (target.schema,)
        )
        names = [sql.Identifier(target.schema, name) for (name,) in found if name not in {"meta", "counter"}]
        connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(sql.SQL(", ").join(names)))


def drop(url: str) -> None:
    target = parse_url(url)
    with psycopg.connect(target.conninfo) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(target.schema)))
