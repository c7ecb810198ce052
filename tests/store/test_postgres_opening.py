"""Opening a PostgreSQL store: what is refused says why and leaves nothing behind, and what is opened keeps its word."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import backstay
from backstay.errors import BackstayError, StoreBusy, StoreError, StoreRefused
from backstay.model.checkpoint import Write
from backstay.store.postgres import database as opening
from backstay.store.postgres import schema as making
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.schema import newest_version, schema_script
from backstay.store.postgres.target import parse_url
from backstay.testing.drafts import wait_until
from support.postgres import PostgresServer
from support.proxy import LOCALHOST, bind_free_port

Connection = psycopg.Connection[tuple[Any, ...]]

PROCESSES = 8
GRACE_S = 1.0

NOWHERE = f"postgresql://user@{LOCALHOST}:1/database"
"""A place where nobody listens: who gets as far as connecting to it gets another error."""

OPEN_AND_SAVE = """
import sys, backstay, backstay.store.postgres.store
print("ready", flush=True)
sys.stdin.readline()
with backstay.open(sys.argv[1]) as store:
    print(store.thread(sys.argv[2]).save({"n": 1}).id)
"""


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))


@pytest.fixture
def schema(postgres_url: str) -> str:
    return postgres_url.rpartition("schema=")[2]


@pytest.fixture
def admin(postgres: PostgresServer) -> Iterator[Connection]:
    with postgres.connect() as connection:
        yield connection


@pytest.fixture
def role(admin: Connection) -> str:
    """Make a role that may log in, without a password, and nothing else."""
    name = f"r_{uuid.uuid4().hex}"
    admin.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    return name


def refused(url: str, kind: type[BackstayError], words: str) -> BackstayError:
    """Open a store that must be refused, with a hint, in words that a person can use."""
    with pytest.raises(BackstayError, match=words) as caught:
        backstay.open(url).close()

    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value


def has_schema(connection: Connection, name: str) -> bool:
    return connection.execute("select 1 from pg_namespace where nspname = %s", (name,)).fetchone() is not None


def works(store: backstay.Store) -> None:
    """Use a store in all the ways that need different rights: add, change, delete, lease, decide, clean up."""
    thread = store.thread("käfer 甲虫")
    first = thread.save({"messages": ["a" * 3000], "n": 1}, tags=["first"])
    for number in range(4):
        thread.append({"messages": ["b" * 3000]}, set={"n": number})
    fork = thread.fork(first, branch="what-if", set={"n": 7})
    with thread.lease(ttl=30):
        last = thread.save({"n": 8})
    thread.write(last, [Write(task_id="Aufgabe 甲", index=0, channel="ch", value="Wert")])
    thread.prune(backstay.Keep(last=2))
    store.compact()

    newest, other = thread.latest(), fork.latest()
    assert newest is not None
    assert newest.state == {"n": 8}
    assert [(write.task_id, write.value) for write in newest.writes] == [("Aufgabe 甲", "Wert")]
    assert other is not None
    assert other.state == {"messages": ["a" * 3000], "n": 7}
    report = store.check()
    assert report, str(report)


# Servers ----------------------------------------------------------------------------------------------------------


def test_a_host_that_refuses_is_named() -> None:
    error = refused(NOWHERE, StoreError, "cannot connect: .*refused")

    assert error.path == NOWHERE


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ({"user": "nobody_at_all"}, "refuses this user .*nobody_at_all"),
        ({"database": "nothing_at_all"}, "database does not exist .*nothing_at_all"),
        ({"user": "app", "password": "wrong"}, "refuses the password"),
        ({"user": "app", "password": ""}, "refuses the password"),
        ({"user": "app"}, "refuses the password"),
    ],
)
def test_who_is_not_let_in_is_told_why(
    postgres: PostgresServer, schema: str, admin: Connection, login: dict[str, Any], words: str
) -> None:
    error = refused(postgres.url(schema=schema, **login), StoreRefused, words)

    assert f"{LOCALHOST}:{postgres.port}" in str(error.path)
    assert not has_schema(admin, schema)


def test_a_database_that_takes_no_connections_is_not_called_missing(
    postgres: PostgresServer, admin: Connection
) -> None:
    name = postgres.new_database()
    admin.execute(sql.SQL("alter database {} allow_connections false").format(sql.Identifier(name)))
    error = refused(postgres.url(name), StoreError, "cannot connect: .*not currently accepting")

    assert "database does not exist" not in str(error)


def test_a_server_without_a_free_connection_is_busy(postgres: PostgresServer, admin: Connection, role: str) -> None:
    admin.execute(sql.SQL("alter role {} connection limit 0").format(sql.Identifier(role)))
    error = refused(postgres.url(user=role), StoreBusy, "accepts no connections at the moment .*too many connections")

    assert error.retry_safe


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_host_that_accepts_and_never_answers_is_given_up(hosts: int, show: Any) -> None:
    timeout = 2 * hosts
    listeners = [bind_free_port() for _ in range(hosts)]
    with contextlib.ExitStack() as closed:
        for listener in listeners:
            closed.enter_context(listener)
            listener.listen()
        places = ",".join(f"{LOCALHOST}:{listener.getsockname()[1]}" for listener in listeners)
        began = time.monotonic()
        refused(f"postgresql://user@{places}/database?timeout={timeout}", StoreBusy, "did not answer in time")
        took = time.monotonic() - began
        show(f"seconds until open gave up, timeout={timeout}, {hosts} silent hosts", round(took, 2))

        assert all(greeting(listener) for listener in listeners), "nobody came"
        assert took <= timeout + GRACE_S


def greeting(listener: socket.socket) -> bytes:
    listener.settimeout(GRACE_S)
    with listener.accept()[0] as client:
        return client.recv(1)


def test_an_open_that_waits_for_another_one_too_long_is_busy_and_leaves_nothing(
    postgres: PostgresServer, schema: str, admin: Connection
) -> None:
    with admin.transaction():
        take_turn(admin, schema)
        began = time.monotonic()
        refused(postgres.url(schema=schema, timeout=1), StoreBusy, "did not answer in time")
        took = time.monotonic() - began

    assert 1.0 <= took <= 1 + GRACE_S
    wait_until(lambda: waiting_for_turn(admin) == 0)
    assert not has_schema(admin, schema)


def take_turn(connection: Connection, schema: str) -> None:
    """Hold the lock under which tables are made."""
    connection.execute(opening.ALONE.replace("{schema}", f'"{schema}"').encode())


def waiting_for_turn(connection: Connection) -> int:
    found = connection.execute("select count(*) from pg_locks where locktype = 'advisory' and not granted").fetchone()
    assert found is not None
    return int(found[0])


# Rights -----------------------------------------------------------------------------------------------------------


def test_a_user_who_may_not_make_a_schema_is_refused(postgres: PostgresServer, role: str) -> None:
    name = postgres.new_database()
    refused(postgres.url(name, user=role), StoreRefused, "misses a permission .*permission denied for database.*GRANT")

    with postgres.connect(name) as connection:
        assert not has_schema(connection, "backstay")


def test_a_user_who_may_not_look_into_the_schema_is_refused(postgres: PostgresServer, role: str) -> None:
    name = postgres.new_database()
    backstay.open(postgres.url(name)).close()

    refused(postgres.url(name, user=role), StoreRefused, "misses a permission .*permission denied for schema.*GRANT")


def test_a_schema_made_for_the_user_is_enough(postgres: PostgresServer, role: str) -> None:
    name = postgres.new_database()
    with postgres.connect(name) as connection:
        connection.execute(sql.SQL("create schema mine authorization {}").format(sql.Identifier(role)))
    with backstay.open(postgres.url(name, user=role, schema="mine")) as store:
        works(store)


@pytest.fixture
def shared_database(postgres: PostgresServer, role: str) -> str:
    """Make a store whose tables a role may use, but not change."""
    name = postgres.new_database()
    backstay.open(postgres.url(name)).close()
    with postgres.connect(name) as connection:
        for grant in (
            "grant usage on schema backstay to {}",
            "grant select, insert, update, delete on all tables in schema backstay to {}",
        ):
            connection.execute(sql.SQL(grant).format(sql.Identifier(role)))
    return name


def test_a_user_who_may_use_the_tables_needs_no_right_to_make_them(
    postgres: PostgresServer, shared_database: str, role: str
) -> None:
    with backstay.open(postgres.url(shared_database, user=role)) as store:
        works(store)


# Schemas ----------------------------------------------------------------------------------------------------------


def test_the_longest_name_of_a_schema_works(postgres: PostgresServer) -> None:
    with backstay.open(postgres.url(postgres.new_database(), schema="x" * 63)) as store:
        works(store)


@pytest.mark.parametrize(
    "script",
    [
        "create table {0}.customer (name text)",
        "create table {0}.meta (name text)",
        "create table {0}.meta (version text); insert into {0}.meta values ('1')",
        "create table {0}.meta (version int)",
        "create table {0}.meta (version int); insert into {0}.meta values (0)",
        "create view {0}.meta as select 1 as one",
        "create sequence {0}.numbers",
    ],
)
def test_a_schema_of_another_program_is_refused_and_left_as_it_is(
    postgres_url: str, schema: str, admin: Connection, script: str
) -> None:
    admin.execute(f"create schema {schema}; {script.format(schema)}".encode())
    before = description(admin, schema)

    refused(postgres_url, StoreRefused, f"'{schema}' holds tables of another program.*schema=")
    assert description(admin, schema) == before


def test_a_schema_with_our_version_but_without_our_tables_is_refused(
    postgres_url: str, schema: str, admin: Connection
) -> None:
    backstay.open(postgres_url).close()
    admin.execute(f"drop table {schema}.blob, {schema}.branch".encode())
    before = description(admin, schema)

    refused(postgres_url, StoreRefused, f"missing in schema '{schema}': blob, branch.*backup")
    assert description(admin, schema) == before


def test_a_schema_of_a_newer_version_is_refused_and_left_as_it_is(
    postgres_url: str, schema: str, admin: Connection
) -> None:
    backstay.open(postgres_url).close()
    newer = newest_version() + 1
    admin.execute(f"update {schema}.meta set version = {newer}".encode())
    before = description(admin, schema)

    refused(postgres_url, StoreRefused, f"version {newer}.* up to {newer - 1}.*pip install")
    assert description(admin, schema) == before


DESCRIPTION = """
select 'relation', relname, concat_ws(' ', relkind, relpersistence, reloptions), pg_get_viewdef(c.oid)
  from pg_class c where relnamespace = '{0}'::regnamespace
union all
select 'column', relname || '.' || attname,
    concat_ws(' ', rank() over (partition by c.oid order by attnum), format_type(atttypid, atttypmod), attstorage,
      attnotnull, attidentity, attcollation::regcollation),
    pg_get_expr(adbin, adrelid)
  from pg_attribute a join pg_class c on c.oid = attrelid left join pg_attrdef on adrelid = c.oid and adnum = attnum
  where relnamespace = '{0}'::regnamespace and attnum > 0 and not attisdropped and relkind <> 'i'
union all
select 'index', relname, '', pg_get_indexdef(c.oid) from pg_class c
  where relnamespace = '{0}'::regnamespace and relkind = 'i'
union all
select 'constraint', conname, conrelid::regclass::text, pg_get_constraintdef(oid) from pg_constraint
  where connamespace = '{0}'::regnamespace
union all
select 'function', proname, pg_get_function_identity_arguments(oid), pg_get_functiondef(oid) from pg_proc
  where pronamespace = '{0}'::regnamespace
order by 1, 2, 3"""


def description(connection: Connection, schema: str) -> list[tuple[str | None, ...]]:
    """Return everything that makes up a schema but its name; of its rows only those that it has from the beginning."""
    rows = connection.execute(DESCRIPTION.format(schema).encode()).fetchall()
    for table in ("meta", "counter"):
        if ("relation", table) in [row[:2] for row in rows]:
            rows += connection.execute(f"select '{table}', t::text from {schema}.{table} t".encode()).fetchall()
    return [tuple(value and str(value).replace(schema, "S") for value in row) for row in rows]


FIRST_SCHEMA = schema_script()


def make_old(connection: Connection, schema: str) -> None:
    """Make a schema as version 1 left it."""
    connection.execute(f"create schema {schema}".encode())
    connection.execute(FIRST_SCHEMA.replace("{schema}", f'"{schema}"').encode())
    connection.execute(f"insert into {schema}.meta values (1)".encode())


def test_a_migrated_schema_is_like_a_new_one(postgres: PostgresServer, next_version: Path) -> None:
    # Without the new column: a column that is added comes last in its table, in a new schema where schema.sql has it.
    next_version.write_text("CREATE TABLE {schema}.extra (n int);", encoding="utf-8")
    newest = FIRST_SCHEMA + "CREATE TABLE {schema}.extra (\n  n int\n);\n"
    (next_version.parent.parent / "schema.sql").write_text(newest, encoding="utf-8")
    name = postgres.new_database()
    with postgres.connect(name) as connection:
        make_old(connection, "schema_1")
        for each in ("schema_1", "schema_2"):
            backstay.open(postgres.url(name, schema=each)).close()
        old, new = description(connection, "schema_1"), description(connection, "schema_2")

    assert old == new
    assert {kind for kind, *_ in new} >= {"relation", "column", "index", "constraint", "function", "counter"}
    assert ("meta", "(2)") in new


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this Backstay one more migration, as the next release will have; return its file."""
    folder = tmp_path / "migrations"
    folder.mkdir()
    added = folder / "0002_new.sql"
    added.write_text(
        "ALTER TABLE {schema}.branch ADD note text; CREATE TABLE {schema}.extra (n int);", encoding="utf-8"
    )
    monkeypatch.setattr(making, "_MIGRATIONS", folder)
    newest = FIRST_SCHEMA.replace("  origin   bytea,\n", "  origin   bytea,\n  note text,\n")
    (tmp_path / "schema.sql").write_text(newest + "CREATE TABLE {schema}.extra (\n  n int\n);\n", encoding="utf-8")
    monkeypatch.setattr(making, "_SCHEMA", tmp_path / "schema.sql")
    return added


def test_an_older_store_is_brought_up_to_date_with_all_that_is_in_it(
    postgres_url: str, schema: str, admin: Connection, next_version: Path
) -> None:
    make_old(admin, schema)
    with backstay.open(postgres_url) as store:
        works(store)

        assert admin.execute(f"select version from {schema}.meta".encode()).fetchall() == [(2,)]
        assert ("relation", "extra", "r p", None) in description(admin, schema)


@pytest.mark.parametrize("step", ["CREATE TABLE {schema}.blob (n int);", "SELECT 1/0;", "nonsense;"])
def test_a_migration_that_fails_changes_nothing(
    postgres_url: str, schema: str, admin: Connection, next_version: Path, step: str
) -> None:
    make_old(admin, schema)
    before = description(admin, schema)
    next_version.write_text(next_version.read_text(encoding="utf-8") + step, encoding="utf-8")

    with pytest.raises(StoreError, match="PostgreSQL reports"):
        backstay.open(postgres_url)
    assert description(admin, schema) == before


def test_a_user_who_may_not_migrate_is_refused(
    postgres: PostgresServer, shared_database: str, role: str, next_version: Path
) -> None:
    with postgres.connect(shared_database) as connection:
        before = description(connection, "backstay")
        refused(postgres.url(shared_database, user=role), StoreRefused, "misses a permission .*must be owner")

        assert description(connection, "backstay") == before


def test_processes_may_open_a_new_store_at_the_same_moment(
    postgres_url: str, schema: str, admin: Connection, show: Any
) -> None:
    """All of them have found nothing there and wait for their turn to make it."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN_AND_SAVE, postgres_url, f"thread {number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    assert [child.stdout.readline() for child in children if child.stdout] == ["ready\n"] * PROCESSES
    with admin.transaction():
        take_turn(admin, schema)
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        wait_until(lambda: waiting_for_turn(admin) == PROCESSES)
        assert not has_schema(admin, schema)
    ids = [child.communicate()[0].strip() for child in children]
    show("processes that opened a new PostgreSQL store at once", PROCESSES)

    assert [child.returncode for child in children] == [0] * PROCESSES
    rows = admin.execute(f"select count(*), (select count(*) from {schema}.counter) from {schema}.meta".encode())
    assert rows.fetchall() == [(1, 1)]
    with backstay.open(postgres_url) as store:
        assert sorted(meta.id for meta in store.threads()) == sorted(ids)
        assert store.check()


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        ("schema {0} cascade", "schema|table"),
        ("table {0}.thread", "table"),
        ("table {0}.branch", "table"),
        ("table {0}.checkpoint", "table"),
        ("table {0}.chunk, {0}.fresh", "table"),
        ("function {0}.refuse_append, {0}.commit_checkpoint", "function"),
    ],
)
def test_what_is_dropped_under_an_open_store_is_missed_by_name(
    postgres_url: str, schema: str, admin: Connection, drop: str, words: str
) -> None:
    with backstay.open(postgres_url) as store:
        thread = store.thread("thread")
        thread.save({"messages": ["a" * 3000]})
        thread.append({"messages": ["b" * 3000]})
        admin.execute(f"drop {drop.format(schema)}".encode())
        thread = store.thread("another") if ".thread" in drop else thread  # a plain save does not need the table

        with pytest.raises(StoreError, match=f"a ({words}) of the store is missing|the {words} does not exist") as save:
            thread.append({"messages": ["c" * 3000]})
        assert type(save.value) is StoreRefused
        assert save.value.hint
        if "function" not in drop:
            with pytest.raises(StoreError, match=r"is missing|does not exist"):
                store.check()


# Settings ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server_setting(admin: Connection, name: str, value: str) -> Iterator[None]:
    """Change a setting of the running server; it is in force when the block begins, and gone after it."""

    def reload(change: str, wanted: str) -> None:
        admin.execute(change.encode())
        admin.execute("select pg_reload_conf()")
        wait_until(lambda: admin.execute("select current_setting(%s)", (name,)).fetchone() == (wanted,))

    reload(f"alter system set {name} = {value}", value)
    try:
        yield
    finally:
        reload(f"alter system reset {name}", "on")


@pytest.mark.parametrize("name", ["fsync", "full_page_writes", "synchronous_commit"])
def test_a_server_that_may_lose_what_is_acknowledged_is_used_only_if_the_url_accepts_that(
    postgres: PostgresServer, schema: str, admin: Connection, name: str
) -> None:
    url = postgres.url(schema=schema)
    with server_setting(admin, name, "off"):
        refused(url, StoreRefused, f"{name}=off, so a crash could lose.*{name}=on.*accept_data_loss=yes")
        refused(f"{url}&accept_data_loss=no", StoreRefused, f"{name}=off")
        assert not has_schema(admin, schema)
        with backstay.open(f"{url}&accept_data_loss=yes") as store:
            works(store)

    backstay.open(url).close()


@pytest.mark.parametrize("how", ["role", "database", "url"])
def test_a_commit_that_does_not_wait_is_found_wherever_it_was_set(
    postgres: PostgresServer, admin: Connection, role: str, how: str
) -> None:
    name = postgres.new_database(owner=role)
    params: dict[str, Any] = {"options": "-c synchronous_commit=off"} if how == "url" else {}
    if how != "url":
        place = sql.Identifier(role if how == "role" else name)
        admin.execute(sql.SQL("alter " + how + " {} set synchronous_commit = off").format(place))
    url = postgres.url(name, user=role, **params)

    refused(url, StoreRefused, "synchronous_commit=off.*accept_data_loss=yes")
    with postgres.connect(name) as connection:
        assert not has_schema(connection, "backstay")
    with backstay.open(postgres.url(name, user=role, accept_data_loss="yes", **params)) as store:
        works(store)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("default_transaction_read_only = on", "database is read-only.*default_transaction_read_only=off"),
        ("default_transaction_isolation = 'repeatable read'", "default_transaction_isolation=repeatable read"),
        (
            "default_transaction_isolation = serializable",
            "default_transaction_isolation=serializable.*'read committed'",
        ),
    ],
)
def test_settings_under_which_no_promise_holds_are_refused(
    postgres: PostgresServer, admin: Connection, role: str, setting: str, words: str
) -> None:
    name = postgres.new_database(owner=role)
    admin.execute(sql.SQL("alter role {} set " + setting).format(sql.Identifier(role)))
    refused(postgres.url(name, user=role, accept_data_loss="yes"), StoreRefused, words)

    with postgres.connect(name) as connection:
        assert not has_schema(connection, "backstay")


def database_in(admin: Connection, encoding: str) -> str:
    name = f"d_{encoding.lower()}_{uuid.uuid4().hex}"
    admin.execute(f"create database {name} encoding '{encoding}' locale 'C' template template0".encode())
    return name


def test_a_database_that_cannot_hold_every_name_is_refused(postgres: PostgresServer, admin: Connection) -> None:
    refused(postgres.url(database_in(admin, "LATIN1")), StoreRefused, "encoding LATIN1.*UTF8")


def test_a_database_without_an_encoding_holds_every_name(postgres: PostgresServer, admin: Connection) -> None:
    with backstay.open(postgres.url(database_in(admin, "SQL_ASCII"))) as store:
        works(store)

        assert [meta.thread_id for meta in store.threads()] == ["käfer 甲虫"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder that another user of this machine can reach."""
    folder = Path("/tmp", f"backstay-{uuid.uuid4().hex}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.usefixtures("postgres")  # it skips where no server can be run
def test_a_standby_is_refused(folder: Path) -> None:
    """Also one that has all the tables: it may show an old newest checkpoint."""
    with PostgresServer() as primary:
        backstay.open(primary.url()).close()
        with primary.standby(folder) as standby:
            with standby.connect() as connection:
                assert connection.execute("select pg_is_in_recovery()").fetchone() == (True,)
                wait_until(lambda: has_schema(connection, "backstay"))

            refused(standby.url(), StoreRefused, "is a standby.*Name the primary")
            refused(standby.url(accept_data_loss="yes", schema="another"), StoreRefused, "is a standby")


def test_deallocated_statements_are_prepared_again_one_by_one(postgres_url: str) -> None:
    """Psycopg deallocates all of them after a rollback; some of ours may have been prepared since."""
    bytea = [17]
    with contextlib.closing(RetryingPool(parse_url(postgres_url))) as pool, pool.connect() as connection:
        for _ in range(3):
            assert connection.fast("SELECT $1", bytea, [b"one"]) == b"one"
        connection.execute("DEALLOCATE ALL")
        for _ in range(3):
            assert connection.fast("SELECT $1 || $1", bytea, [b"two"]) == b"twotwo"
        assert connection.fast("SELECT $1", bytea, [b"one"]) == b"one"
        for _ in range(3):
            assert connection.fast("SELECT $1 || $1", bytea, [b"two"]) == b"twotwo"
