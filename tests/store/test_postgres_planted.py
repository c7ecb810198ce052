"""Another user of the database plants look-alikes of all that our SQL calls: none is ever called as the store's user.

Without a search path of our own this lets everybody who may create something in a schema of the path, which up to
PostgreSQL 14 is everybody, run SQL with all rights of the store.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import backstay
from backstay.bundle import export_bundle, import_bundle
from backstay.errors import EncodeError, Fenced, StoreRefused
from backstay.langgraph.importer.postgres import PostgresSource
from backstay.model.checkpoint import Write
from backstay.model.runs import Outcome
from backstay.pieces.manifest import Range
from backstay.store.base import BranchKey, Query
from backstay.store.leases import LeaseRequest
from backstay.store.postgres import database, queries
from backstay.store.postgres import schema as making
from backstay.store.postgres.store import PostgresStore
from backstay.thread.access import access_of
from support.postgres import FOLDERS, PostgresServer
from support.running import Show
from support.store.planted import calls, plant
from support.store.pooler import Pooler
from support.thread.stored_runs import WORK, put_run

pytestmark = pytest.mark.effort(2)


WORKER, CULPRIT = "worker", "culprit"
UNLUCKY = (  # as it was done before: each of them calls what another user planted
    "SELECT unnest(ARRAY['x'::bytea])",
    "SELECT cardinality(ARRAY['x'::bytea])",
    "SELECT hashtextextended('x', 0)",
    "SELECT 7::bigint & 1",
    "SELECT 7::bigint * interval '1 second'",
)
STOCK = """
CREATE TABLE checkpoints (thread_id text, checkpoint_ns text, checkpoint_id text, parent_checkpoint_id text, type text,
  checkpoint jsonb, metadata jsonb);
CREATE TABLE checkpoint_blobs (thread_id text, checkpoint_ns text, channel text, version text, type text, blob bytea);
CREATE TABLE checkpoint_writes (thread_id text, checkpoint_ns text, checkpoint_id text, task_id text, task_path text,
  idx int, channel text, type text, blob bytea);
INSERT INTO checkpoints VALUES ('t', '', 'c', NULL, 'json', '{"v": 4, "id": "c", "ts": "", "channel_values": {},
  "channel_versions": {"n": "1"}, "versions_seen": {}}', '{}');
INSERT INTO checkpoint_blobs VALUES ('t', '', 'n', '1', 'json', '7')"""


@pytest.fixture(scope="module", params=[max(FOLDERS), min(FOLDERS)])
def server(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Start the newest and the oldest server that there is."""
    with PostgresServer(major=request.param) as started:
        with started.connect() as admin:
            for role in (WORKER, CULPRIT):
                admin.execute(f"create role {role} login".encode())
        yield started


@pytest.fixture(scope="module")
def planted(server: PostgresServer) -> tuple[str, tuple[int, int]]:
    """Return a database of the worker in which everything is planted, and of how many functions and operators."""
    name = server.new_database(owner=WORKER)
    backstay.open(server.url(name, user=WORKER)).close()
    with server.connect(name) as admin:
        admin.execute(
            f"create schema stock authorization {WORKER}; set role {WORKER}; set search_path = stock".encode()
        )
        admin.execute(STOCK.encode())
    return name, plant(server, name, "backstay", CULPRIT)


def use(url: str, folder: Path) -> set[str]:
    """Use everything that the store can do; return the statements that were sent."""
    with backstay.open(url) as store, backstay.open(folder / f"{uuid.uuid4().hex}.db") as copy:
        save_and_find(store)
        talk(store)
        remove(store)
        move(store, copy, folder)
        damage_and_repair(store, url)
        store.stats()
        for _ in range(3):
            store.thread("large").append({"log": ["y" * 20_000]})
        store.thread("large").stats()
        store.compact()
        store.compact(full=True)
        report = store.check()
        assert report, str(report)
        backend = access_of(store).store
        assert isinstance(backend, PostgresStore)
        again = PostgresStore(url)
        again.close()
        return {*backend._pool.statements, *again._pool.statements}


def save_and_find(store: backstay.Store) -> None:
    thread = store.thread("agent")
    first = thread.save({"log": ["a" * 700], "text": "x" * 300}, tags=["first"], metadata={"kind": "odd"})
    for length in (600, 700, 20_000, 300, 30_000, 30_000, 200):
        newest = thread.append({"log": ["y" * length]})
    thread.save({"log": ["z"]}, id=newest.id, replace=True)
    thread.tag(first, "good", "bad")
    thread.untag(first, "bad")
    thread.write(newest.id, [Write("task", 0, "channel", [1, "y" * 400])])
    thread.write(newest.id, [Write("task", 1, "channel", 2), Write("other", 0, "channel", 3)])
    fork = thread.fork(first, branch="what-if", set={"text": "z"})
    store.thread("agent").fork(first, to="elsewhere")
    fork.rewind(first)
    wide = store.thread("wide")
    wide.save({f"key {number}": "x" * 300 for number in range(200)})
    for number in range(3):
        wide.append(set={f"key {number}": "y"})
    assert store.get(first.id) is not None
    assert thread.at(step=3) is not None
    assert list(thread.history(tag="good", branch="*", where={"kind": "odd"}))
    assert list(thread.history(limit=3))
    assert list(store.threads())
    assert thread.branches()
    backend = access_of(store).store
    for payload in (False, True):
        for writes in (False, True):
            assert backend.find(Query("", ids=(newest.id,), payload=payload, writes=writes))
            assert backend.find(Query("", thread="agent", branch="main", payload=payload, writes=writes))
        assert backend.find(Query("", heads_of_threads=True, writes=payload))


def talk(store: backstay.Store) -> None:
    """Ask, decide, do effects, hold leases, execute and claim runs."""
    thread = store.thread("talk")
    newest = thread.save({"n": 1})
    asked = thread.interrupt(newest, prompt="May I?")
    assert list(store.interrupts())
    thread.decide(asked, "approve", by="somebody")
    thread.consume(asked)
    assert thread.effect("mail", lambda: "sent") == "sent"
    with pytest.raises(TimeoutError):
        thread.effect("lost", slow)
    unknown = next(record for record in thread.effects() if record.key == "lost")
    thread.settle(unknown, Outcome.done(1), by="somebody")
    with thread.lease(ttl=30, owner="me") as lease:
        thread.append(set={"n": 2})
        lease.renew()
        with pytest.raises(Fenced):
            store.thread("talk").save({"n": 3})
        with pytest.raises(Fenced), store.thread("talk").lease(ttl=30, owner="you"):
            pass
    with store.thread("unused").lease(ttl=30):
        pass
    backend = access_of(store).store
    branch = BranchKey("", "talk", "", "main")
    held = backend.acquire(branch, LeaseRequest("dead", "token", 1))
    with pytest.raises(Fenced):
        backend.renew(branch, held.epoch + 1, LeaseRequest("dead", "token", 1))
    assert backend.leases("", None, True)
    store.thread("queued-1").save({"n": 0})  # one whose branch exists
    for number in range(3):
        put_run(store, f"queued-{number}", due_us=number)
    first, *rest = store.claim([WORK], 5, owner="heir")
    first.thread.save({"n": 1})
    assert {each.thread_id for each in store.runs(holder="heir")} == {"queued-0", "queued-1", "queued-2"}
    for claimed in (first, *rest):
        claimed.release()
    with store.thread("loop").loop({"n": 0}) as loop:
        assert [each.id for each in store.runs(status="running", graph="loop")]
        for turn in loop:
            turn.set(n=1)
            loop.finish()
    with pytest.raises(EncodeError):
        store.thread("refused").loop({"n": object()}).__enter__()  # its run is deleted again
    for status in (None, "queued", "completed"):
        for graph in (None, "work"):
            for name in (None, "queued-1"):
                store.runs(status=status, graph=graph, thread=name)
    assert store.count_runs() == {"queued": 3}
    for run in store.runs(status="queued"):
        assert run.cancel("enough").refresh().status == "cancelled"


def slow() -> None:
    raise TimeoutError


def remove(store: backstay.Store) -> None:
    thread = store.thread("doomed")
    for number in range(90):
        thread.append({"log": [f"{number}" + "x" * 900]})
    thread.save({"log": ["y"]})
    thread.prune(backstay.Keep(last=2))
    newest = thread.latest()
    assert newest is not None
    thread.delete_checkpoint(newest)
    store.prune(backstay.Keep(last=1))
    with pytest.raises(Fenced), store.thread("doomed").lease(ttl=30):
        store.thread("doomed").delete()
    store.thread("doomed").delete()


def move(store: backstay.Store, copy: backstay.Store, folder: Path) -> None:
    thread = copy.thread("imported")
    thread.save({"log": ["a"]}, tags=["t"])
    for number in range(5):
        thread.append({"log": [f"{number}" * 600]})
    bundle = folder / f"{uuid.uuid4().hex}.bundle"
    export_bundle(copy, bundle)
    import_bundle(bundle, store)
    export_bundle(store, folder / f"{uuid.uuid4().hex}.bundle")


def damage_and_repair(store: backstay.Store, url: str) -> None:
    """Break what can be worked out anew, some bytes, and a row; put right what can be, take out the rest."""
    thread = store.thread("damaged")
    for number in range(8):
        newest = thread.append({"log": [f"{number}" * 3000]})
    with psycopg.connect(url.partition("?")[0], autocommit=True) as admin:
        admin.execute("set search_path = backstay")
        admin.execute("delete from ref; update branch set head = head - 1 where name = 'main'")
        admin.execute("update thread set next_seq = 1, alone = null; insert into tag values (5, 'nobody')")
        admin.execute("insert into chunk values (99::bigint << 28, 1, 'x'), ((99::bigint << 28) + 9, 1, 'x')")
        admin.execute("insert into fresh values (98 << 6, 98::bigint << 28, 'x', '')")
        admin.execute("insert into blob (digest, size, body) values ('lost', 1, 'x')")
        admin.execute("insert into ref select branch + 5000, stream, false, digest from ref limit 1")
        admin.execute(
            "insert into branch (thread, head, last_seq, alone, scope, name)"
            " select id, 1, 1, false, '', 'empty' from thread"
        )
        admin.execute(
            "insert into record (id, thread, version, open, kind, scope, branch, key, checkpoint, body)"
            " select 'odd', id, 1, true, 'interrupt', '', 'main', 'odd', 'gone', 'b' from thread limit 1"
        )
    assert not store.check()
    assert store.repair(dry_run=False)
    backend = access_of(store).store
    row = backend.find(Query("", ids=(newest.id,), payload=True))[0]
    stream = next(source for source in backend.sizes().sources if isinstance(source, int))
    data = b"".join(backend.fetch([Range(stream, 0, 10)])[0])
    with psycopg.connect(url.partition("?")[0], autocommit=True) as admin:
        admin.execute(
            "insert into backstay.chunk values (77::bigint << 28, 500, 'x'), ((77::bigint << 28) + 500, 3, 'xyz')"
        )
        admin.execute("insert into backstay.fresh values (77 << 6, (77::bigint << 28) + 503, 'xyz', '')")
    backend.restore({row.digest: b"blob"}, [(stream, 0, data), (77, 0, b"y" * 506)], [row])
    backend.rebuild(False, True)
    backend.quarantine("", newest.id)
    store.thread("damaged").delete()


def channels(url: str) -> list[bytes]:
    """Return what an import from LangGraph's own tables reads."""
    with PostgresSource(url) as source:
        threads = [source.thread(name) for name in source.threads()]
        return [thread.read(spot).checkpoint["channel_values"]["n"].data for thread in threads for spot in thread.refs]


def statements() -> dict[str, str]:
    return {
        name: text
        for module in (queries, database, making)
        for name, text in vars(module).items()
        if isinstance(text, str)
        and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|COPY|LOCK|SET TRANSACTION)\b", text)
    }


@pytest.mark.parametrize("way", ["direct", "pooled"])
def test_nothing_that_another_user_planted_is_called(
    server: PostgresServer, planted: tuple[str, tuple[int, int]], tmp_path: Path, way: str, show: Show
) -> None:
    name, (functions, operators) = planted
    with server.connect(name) as admin:
        admin.execute("drop schema if exists backstay cascade")  # to be made anew, beside what is planted
        (version,) = admin.execute("show server_version").fetchone() or ("",)
    before = calls(server, name, WORKER)
    with Pooler(server, user=WORKER) as pooler:
        place: Any = server if way == "direct" else pooler
        used = use(place.url(name, user=WORKER), tmp_path)
        imported = channels(place.url(name, user=WORKER, schema="stock"))
    called = {key: count for key, count in calls(server, name, WORKER).items() if count != before.get(key)}

    assert called == {}
    assert imported == [b"7"]
    unused = {
        key
        for key, text in statements().items()
        if not any(each.startswith(text.partition("{conditions}")[0]) for each in used)
    }
    # For older schemas and for tables of other users only; the first two call nothing, the last one names its schema.
    assert unused == {"NO_WRITERS", "HAS_VERSION", "MAY_MAINTAIN"}
    show(f"PostgreSQL {version}, {way}: functions and operators planted, called", (functions, operators, len(called)))


def test_the_look_alikes_are_called_by_whoever_relies_on_the_search_path(
    server: PostgresServer, planted: tuple[str, tuple[int, int]]
) -> None:
    name, _ = planted
    before = calls(server, name, WORKER)
    with psycopg.connect(server.url(name, user=WORKER), autocommit=True) as connection:
        for statement in UNLUCKY:
            connection.execute(statement.encode())

    assert len(calls(server, name, WORKER)) == len(before) + len(UNLUCKY)


def test_a_search_path_that_puts_others_before_postgresql_is_refused_behind_a_pooler(server: PostgresServer) -> None:
    """A connection of our own gets another path; a pooler's would keep this one, and every operator would be theirs."""
    name = server.new_database(owner=WORKER)
    with server.connect(name) as admin:
        admin.execute(f"alter role {WORKER} in database {name} set search_path = public, pg_catalog".encode())
    with Pooler(server, user=WORKER) as pooler:
        with pytest.raises(
            StoreRefused, match=r"has schema 'public' before PostgreSQL's own.*Remove pg_catalog from search_path"
        ):
            backstay.open(pooler.url(name, user=WORKER))
        with backstay.open(server.url(name, user=WORKER)) as store:
            assert store.thread("agent").save({"n": 1}).step == 1


@pytest.mark.parametrize("kind", ["view", "policy"])
def test_an_import_runs_nothing_that_belongs_to_the_owner_of_the_tables(server: PostgresServer, kind: str) -> None:
    name = server.new_database(owner=CULPRIT)
    with server.connect(name) as admin:
        admin.execute(f"set role {CULPRIT}; create schema stock; set search_path = stock".encode())
        admin.execute(STOCK.encode())
        admin.execute("create function trap() returns boolean language plpgsql as 'begin raise log ''trap''; end'")
        if kind == "view":
            admin.execute("alter table checkpoints rename to real")
            admin.execute("create view checkpoints as select * from real where stock.trap()")
        else:
            admin.execute("alter table checkpoints enable row level security")
            admin.execute("create policy trap on checkpoints using (stock.trap())")
        admin.execute(
            f"grant usage on schema stock to {WORKER}; grant select on all tables in schema stock to {WORKER}".encode()
        )

    with pytest.raises(StoreRefused):
        channels(server.url(name, user=WORKER, schema="stock"))
    assert "trap" not in [line.rpartition("LOG:")[2].strip() for line in server.log.read_text().splitlines()]


GRAMMAR = {"values", "in", "exists", "any", "all", "array", "coalesce", "greatest", "extract", "position", "lateral"}
GRAMMAR |= {
    "on",
    "conflict",
    "as",
    "and",
    "or",
    "not",
    "interval",
    "where",
    "select",
    "set",
    "from",
    "join",
    "using",
    "stdin",
    "union",
    "materialized",
    "over",
    "then",
}


def test_every_function_is_called_by_its_schema() -> None:
    """Also in statements that no test would reach."""
    called = {
        (name, word)
        for name, text in [*statements().items(), *(("APPEND", text) for text in queries.APPEND.values())]
        for word in re.findall(
            r"(?<![\w.}])([a-zA-Z_]\w*)\s?\(", re.sub(r"'[^']*'|%\(\w+\)s|\w+ \([a-z_, ]+\)", " ", text)
        )
        if word.lower() not in GRAMMAR
    }

    assert {word for _, word in called} <= {"unnest"}, called  # of several arrays: PostgreSQL's own, see queries
