"""A newer version migrates while an older one has the store open: the older one stores nothing more."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

import backstay
from backstay.bundle import export_bundle, import_bundle
from backstay.errors import StoreRefused
from backstay.model.checkpoint import Write
from backstay.model.decision import Decision, DecisionKind
from backstay.store.base import BranchKey, Query, WriteRow
from backstay.store.leases import LeaseRequest
from backstay.store.postgres import schema as making
from backstay.store.postgres.database import NO_WRITERS
from backstay.store.postgres.store import PostgresStore
from backstay.store.records import Fence, Record, RunFacts
from backstay.testing._contract_runs import started
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of
from support.postgres import PostgresServer

Connection = psycopg.Connection[tuple[Any, ...]]

BRANCH = BranchKey("", "agent", "", "main")
REFUSED = r"another version of Backstay migrated the schema.*version 2 now, 1 when opened.*Restart this program"
TABLES = re.findall(r"CREATE TABLE \{schema\}\.(\w+)", making.schema_script())


@pytest.fixture
def schema(postgres_url: str) -> str:
    return postgres_url.rpartition("schema=")[2]


@pytest.fixture
def admin(postgres: PostgresServer) -> Iterator[Connection]:
    with postgres.connect() as connection:
        yield connection


@pytest.fixture
def store(postgres_url: str) -> Iterator[backstay.Store]:
    """Return a store in which every kind of write finds something to change."""
    with backstay.open(postgres_url) as opened:
        thread = opened.thread("agent")
        for number in range(4):
            thread.append({"log": [f"{number}" * 3000]}, id=f"c{number}")
            opened.thread("large").append({"log": [f"{number}" * 20_000]})
        thread.tag("c1", "good")
        thread.write("c3", [Write("task", 0, "channel", 1)])
        thread.interrupt("c3", payload={"q": 1}, id="open")
        decided = thread.interrupt("c3", payload={"q": 2}, id="decided")
        thread.decide(decided, Decision(kind=DecisionKind.APPROVE), by="bob")
        with pytest.raises(TimeoutError):
            thread.effect("mail", fail)
        backend = access_of(opened).store
        backend.acquire(BranchKey("", "expired", "", "main"), LeaseRequest("ann", "old", 1))
        backend.acquire(BranchKey("", "leased", "", "main"), LeaseRequest("ann", "token", 60_000_000))
        for name in ("queued", "dropped"):
            backend.put_record(queued_run(name))
        yield opened


def queued_run(thread: str) -> Record:
    branch = BranchKey("", thread, "", "main")
    return Record("run", branch, "run", b"", True, run=RunFacts("queued", "g", thread, 1))


def fail() -> None:
    raise TimeoutError


def put_within(store: backstay.Store, admin: Connection) -> None:
    backend = access_of(store).store
    assert isinstance(backend, PostgresStore)
    with admin.transaction():
        backend.put_record_within(admin, queued_run("within"))


def writes(store: backstay.Store, bundle: Path, admin: Connection) -> dict[str, Callable[[], object]]:
    """Return calls of every method that writes, by its name. Made in this order, each changes something."""
    thread, backend = store.thread("agent"), access_of(store).store
    leased, claim = BranchKey("", "leased", "", "main"), LeaseRequest("ann", "token", 60_000_000)
    (effect,) = backend.records("effect", "", None, True, 0, 9)
    (row,) = backend.find(Query("", ids=("c1",), payload=True))
    drop = backend.record("run", BranchKey("", "dropped", "", "main"), "run")
    assert drop is not None
    written = [WriteRow("task", 1, "channel", "none", 1, b"x")]
    return {
        "commit: replaces the head": lambda: store.thread("agent").save({"n": 1}, id="c3", replace=True),
        "commit: appends": lambda: store.thread("agent").append({"log": ["more"]}),
        "commit: makes a thread": lambda: store.thread("new").save({"n": 1}),
        "commit: forks": lambda: store.thread("agent").fork("c1", branch="late"),
        "commit_all": lambda: import_bundle(bundle, store),
        "reserve": lambda: backend.reserve(3),
        "write": lambda: backend.write(BRANCH, "c3", written, False),
        "write: to more of the task": lambda: backend.write(BRANCH, "c2", written, False),
        "tag": lambda: backend.tag("", "c2", ["late"], []),
        "tag: off": lambda: backend.tag("", "c1", [], ["good"]),
        "delete": lambda: backend.delete("", ["c0"], True),
        "acquire": lambda: backend.acquire(BranchKey("", "other", "", "main"), claim),
        "renew": lambda: backend.renew(leased, 1, claim),
        "release": lambda: backend.release(leased, 1, "token"),
        "claim": lambda: backend.claim(
            "", [("g", "queued")], 5, LeaseRequest("bob", "new", 60_000_000), 9, (), started
        ),
        "put_record": lambda: backend.put_record(queued_run("new run")),
        "drop_records": lambda: backend.drop_records([drop]),
        "put_record_within": lambda: put_within(store, admin),
        "put_record: of a checkpoint": lambda: thread.interrupt("c2", payload={"q": 3}, id="third"),
        "put_record: over another": lambda: backend.put_record(replace(effect, body=b"x", open=False), fence=Fence()),
        "restore": lambda: backend.restore({row.digest: b"blob"}, [], [row]),
        "rebuild": lambda: backend.rebuild(False, True),
        "compact": backend.compact,
        "quarantine": lambda: backend.quarantine("", "c1"),
        "delete_thread": lambda: backend.delete_thread("", "agent"),
    }


READS = {
    *("head", "find", "unread", "branches", "forked", "fetch", "sizes", "totals", "leases", "record", "records"),
    *("run", "runs", "count_runs", "check", "backup", "close"),
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    with backstay.open(tmp_path / "origin.db") as origin:
        for number in range(3):
            origin.thread("imported").append({"log": [f"{number}"]})
        export_bundle(origin, tmp_path / "a.bundle")
    return tmp_path / "a.bundle"


def rows(admin: Connection, schema: str) -> dict[str, list[Any]]:
    """Return all rows of all tables, with where each is: also one that is written anew unchanged differs."""
    return {
        table: admin.execute(f"select t::text, t.ctid::text from {schema}.{table} t order by ctid".encode()).fetchall()
        for table in TABLES
        if table != "meta"
    }


def set_version(admin: Connection, schema: str, version: int) -> None:
    admin.execute(f"update {schema}.meta set version = {version}".encode())


def test_every_write_after_a_migration_is_refused_and_stores_nothing(
    store: backstay.Store, admin: Connection, schema: str, bundle: Path
) -> None:
    calls = writes(store, bundle, admin)
    before = rows(admin, schema)
    set_version(admin, schema, 2)
    for name, call in calls.items():
        with pytest.raises(StoreRefused, match=REFUSED):
            call()
        assert rows(admin, schema) == before, name

    assert {name.partition(":")[0] for name in calls} | READS == {
        name for name in dir(PostgresStore) if not name.startswith("_")
    }
    set_version(admin, schema, 1)  # each would have done something
    for name, call in calls.items():
        before = rows(admin, schema)
        call()
        assert rows(admin, schema) != before, name


@pytest.mark.parametrize("name", ["commit: appends", "commit_all", "tag", "renew", "delete", "put_record"])
def test_a_write_that_waits_for_a_migration_is_refused(
    store: backstay.Store, admin: Connection, schema: str, bundle: Path, name: str
) -> None:
    call = writes(store, bundle, admin)[name]
    before = rows(admin, schema)
    with ThreadPoolExecutor(1) as pool:
        with admin.transaction():
            admin.execute(NO_WRITERS.replace("{schema}", schema).encode())
            late = pool.submit(call)
            wait_until(lambda: waiters(admin) == 1)
            set_version(admin, schema, 2)
        with pytest.raises(StoreRefused, match=REFUSED):
            late.result(20)

    assert rows(admin, schema) == before


def test_a_migration_waits_for_writes_under_way_and_goes_on_after_a_deadlock(
    store: backstay.Store, postgres_url: str, admin: Connection, schema: str, next_version: None
) -> None:
    """The writer has a row that the migration wants when it gets to the lock that the migration has."""
    with ThreadPoolExecutor(1) as pool:
        with admin.transaction():
            admin.execute(f"select {schema}.check_version(1)".encode())
            opened = pool.submit(backstay.open, postgres_url)
            wait_until(lambda: waiters(admin) == 1)
            admin.execute(f"lock table {schema}.checkpoint in row exclusive mode".encode())
        opened.result(20).close()
        set_version(admin, schema, 1)
        admin.execute(f"alter table {schema}.branch drop note".encode())
        admin.execute("set deadlock_timeout = '20s'")
        with admin.transaction():
            admin.execute(f"lock table {schema}.branch in row share mode".encode())
            opened = pool.submit(backstay.open, postgres_url)
            wait_until(lambda: waiters(admin) == 1)
            admin.execute(f"select {schema}.check_version(1)".encode())  # the migration is chosen to give way
        opened.result(20).close()

    assert admin.execute(f"select version from {schema}.meta".encode()).fetchall() == [(2,)]


@pytest.fixture
def next_version(tmp_path: Path, store: backstay.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Backstay, as it opens stores from now on, one more migration."""
    (tmp_path / "migrations").mkdir()
    script = "ALTER TABLE {schema}.branch ADD note text"
    (tmp_path / "migrations" / "0002_note.sql").write_text(script, encoding="utf-8")
    monkeypatch.setattr(making, "_MIGRATIONS", tmp_path / "migrations")
    newest = making.schema_script().replace("  origin   bytea,\n", "  origin   bytea,\n  note text,\n")
    (tmp_path / "schema.sql").write_text(newest, encoding="utf-8")
    monkeypatch.setattr(making, "_SCHEMA", tmp_path / "schema.sql")


def waiters(admin: Connection) -> int:
    found = admin.execute("select count(*) from pg_locks where not granted").fetchone()
    assert found is not None
    return int(found[0])
