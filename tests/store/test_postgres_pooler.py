"""PostgreSQL connections that others have a hand in: a pooler in between, or a fork that copies them.

PgBouncer in transaction mode gives every transaction to whichever backend is free, so nothing that lives in a session
may be relied on or left behind: no prepared statement, no lock, no setting, no open transaction.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

import backstay
from backstay.errors import Conflict, StoreRefused
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.target import parse_url
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of
from support.postgres import PostgresServer
from support.store.pooler import BACKENDS, PREPARES_SINCE, Pooler

SAVERS = 8
SAVES = 15
CHILD_SECONDS_MAX = 20

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork.*:DeprecationWarning"  # from 3.12 on Python warns of what half of this file is about
)


@pytest.fixture(scope="module")
def pooler(postgres: PostgresServer) -> Iterator[Pooler]:
    with Pooler(postgres) as started:
        yield started


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


# A pooler ---------------------------------------------------------------------------------------------------------


def work(store: backstay.Store, name: str) -> None:
    """Save, load, fork, prune and lease on a thread of one's own; save, racing with all others, on a shared one."""
    own, shared = store.thread(name), store.thread("shared")
    first = own.save({"messages": [name], "text": "x" * 5000}, tags=["first"])
    for number in range(SAVES):
        own.append({"messages": [number, "y" * 700]})
        race(shared, f"{name}-{number}")
    fork = own.fork(first, branch="what-if", set={"text": name})
    with own.lease(ttl=30, owner=name):
        own.append(set={"text": "leased"})
    own.prune(backstay.Keep(last=3))
    doomed = store.thread(f"{name} again")
    doomed.save({"n": 1})
    store.thread(doomed.id).delete()

    newest, other = own.latest(), fork.latest()
    assert newest is not None
    assert newest.state == {
        "messages": [name, *(part for number in range(SAVES) for part in (number, "y" * 700))],
        "text": "leased",
    }
    assert other is not None
    assert other.state == {"messages": [name], "text": name}


def race(shared: backstay.Thread, name: str) -> None:
    while True:
        shared.latest()
        try:
            shared.save({"by": name}, id=name)
            return
        except Conflict:
            continue


def run_savers(store: backstay.Store) -> list[BaseException]:
    """Run all savers at once and return what went wrong."""
    failures: list[BaseException] = []

    def saver(name: str) -> None:
        try:
            work(store, name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=saver, args=(f"saver {number}",)) for number in range(SAVERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def sessions_of(server: PostgresServer, database: str) -> list[tuple[Any, ...]]:
    """Return process, state and number of advisory locks of every backend of a database."""
    with server.connect() as connection:
        return connection.execute(
            "select pid, state, (select count(*) from pg_locks l where l.pid = a.pid and locktype = 'advisory')"
            " from pg_stat_activity a where datname = %s and backend_type = 'client backend'",
            (database,),
        ).fetchall()


@pytest.mark.parametrize("prepare", ["no", None])
def test_everything_works_through_a_pooler_in_transaction_mode(
    postgres: PostgresServer, pooler: Pooler, database: str, prepare: str | None, show: Any
) -> None:
    params = {"prepare": prepare} if prepare else {}
    with backstay.open(pooler.url(database, **params)) as store:
        failures = run_savers(store)
        history = list(store.thread("shared").history())
        report = store.check()
        store.compact()

    assert failures == []
    assert sorted(meta.id for meta in history) == sorted(f"saver {n}-{k}" for n in range(SAVERS) for k in range(SAVES))
    assert [meta.parent_id for meta in history[:-1]] == [meta.id for meta in history[1:]]
    assert report, str(report)
    sessions = sessions_of(postgres, database)
    assert 1 <= len(sessions) <= BACKENDS
    assert {(state, locks) for _, state, locks in sessions} == {("idle", 0)}
    assert left_behind(pooler, database) == 0
    version = ".".join(map(str, pooler.version))
    show(
        f"checkpoints verified after {SAVERS} savers on {BACKENDS} backends, PgBouncer {version}",
        report.good["checkpoints"],
    )


def left_behind(pooler: Pooler, database: str) -> int:
    """Return how many prepared statements are left in the sessions of the backends."""
    connections = [psycopg.connect(pooler.url(database), prepare_threshold=None) for _ in range(BACKENDS)]
    try:  # each holds a transaction, and so a backend of its own
        counts = [
            connection.execute("select pg_backend_pid(), count(*) from pg_prepared_statements").fetchone()
            for connection in connections
        ]
    finally:
        for connection in connections:
            connection.close()
    found = {row[0]: row[1] for row in counts if row is not None}
    assert len(found) == BACKENDS
    return sum(found.values())


def prepares(url: str) -> bool:
    """Tell whether a statement that is run again and again is prepared."""
    link = RetryingPool(parse_url(url))

    def work(connection: DeadlineConnection) -> bool:
        for _ in range(5):
            connection.execute("select %s::int", (1,))
        return connection.execute("select count(*) from pg_prepared_statements", prepare=False).fetchone() != (0,)

    try:
        return link.read(work)
    finally:
        link.close()


def test_statements_are_prepared_unless_a_pooler_is_found_in_between(
    postgres: PostgresServer, pooler: Pooler, database: str
) -> None:
    found = {
        (place, params): prepares(url + params)
        for place, url in (("direct", postgres.url(database)), ("pooler", pooler.url(database)))
        for params in ("", "?prepare=no")
    }

    assert found == {
        ("direct", ""): True,
        ("direct", "?prepare=no"): False,
        ("pooler", ""): False,
        ("pooler", "?prepare=no"): False,
    }
    assert prepares(postgres.url(database, prepare="yes"))


def add(thread: backstay.Thread) -> None:
    for number in range(5):
        thread.append(set={"n": number})


def test_who_insists_on_prepared_statements_needs_a_pooler_that_carries_them(
    pooler: Pooler, database: str, show: Any
) -> None:
    """Two stores, one after the other, so that they get the same backend: it knows the first one's statements."""
    with backstay.open(pooler.url(database, prepare="yes", pool=1)) as store:
        add(store.thread("first"))
    with backstay.open(pooler.url(database, prepare="yes", pool=1)) as store:
        thread = store.thread("second")
        show("PgBouncer carries prepared statements", f"{pooler.version >= PREPARES_SINCE}, version {pooler.version}")
        if pooler.version >= PREPARES_SINCE:
            add(thread)
        else:
            with pytest.raises(StoreRefused, match=r"mixes up prepared statements.*Remove prepare=yes from the URL"):
                add(thread)

    with backstay.open(pooler.url(database)) as store:
        assert store.check()


# A fork -----------------------------------------------------------------------------------------------------------

FORKING = """
import os, signal, sys, backstay

url, end, seconds = sys.argv[1:]
signal.alarm(int(seconds))  # whatever hangs is ended
store = backstay.open(url)
thread = store.thread("shared")
thread.save({"by": ["parent"]})

def step(name):
    print(name, flush=True)
    sys.stdin.readline()

step("alone")
heard, tell = os.pipe()
held, release = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(int(seconds))
    thread.append({"by": ["child"]})
    os.write(tell, b".")
    os.read(held, 1)
    if end == "closes it":
        store.close()
    elif end == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "leaves at once":
        os._exit(0)
    sys.exit(0)
os.read(heard, 1)
thread.latest()
thread.append({"by": ["parent"]})
step("both")
os.write(release, b".")
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread.append({"by": ["parent"]})
step(f"child ended with {code}")
with store:
    print(thread.latest().state["by"], bool(store.check()))
"""


def backends(server: PostgresServer, name: str) -> set[int]:
    with server.connect() as connection:
        rows = connection.execute("select pid from pg_stat_activity where application_name = %s", (name,))
        return {pid for (pid,) in rows}


@pytest.mark.parametrize("end", ["closes it", "just ends", "leaves at once", "is killed"])
def test_parent_and_child_of_a_fork_go_on_with_connections_of_their_own(
    postgres: PostgresServer, postgres_url: str, end: str
) -> None:
    name = f"fork_{uuid.uuid4().hex}"
    script = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORKING]
    with subprocess.Popen(
        [*script, f"{postgres_url}&application_name={name}", end, str(CHILD_SECONDS_MAX)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        found: list[tuple[str, set[int]]] = []
        for _ in range(3):
            line = parent.stdout.readline().strip()
            assert line, parent.communicate()[1]
            found.append((line, backends(postgres, name)))
            parent.stdin.write("\n")
            parent.stdin.flush()
        said, errors = parent.communicate()

    assert (parent.returncode, errors) == (0, "")
    (alone, first), (both, second), (ended, third) = found
    code = -signal.SIGKILL if end == "is killed" else 0
    assert (alone, both, ended) == ("alone", "both", f"child ended with {code}")
    assert len(first) == 1, "the parent has one connection"
    assert len(second) == 2, "the child has made one of its own"
    assert first < second
    assert first <= third, "the child's end has not ended the parent's connection"
    assert said == "['parent', 'child', 'parent', 'parent'] True\n"


def test_a_child_is_not_stopped_by_connections_that_threads_of_its_parent_have(postgres_url: str) -> None:
    with backstay.open(f"{postgres_url}&pool=1") as store:
        store.thread("parent").save({"n": 1})
        pools = access_of(store).store._pool._pools  # type: ignore[attr-defined]
        (permits,) = [pool.permits for pool in pools.values()]
        permits.get()  # as every call does
        child = forked(lambda: store.thread("child").save({"n": 2}))
        permits.put(None)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.thread("parent").save({"n": 3}).step == 2
        assert store.check().good["checkpoints"] == 3


def test_forks_while_other_threads_save_leave_every_process_working(postgres_url: str, show: Any) -> None:
    stop = threading.Event()
    saved: list[int] = [0] * 4

    def saver(number: int) -> None:
        thread = store.thread(f"busy {number}")
        while not stop.is_set():
            thread.append(set={"n": saved[number]})
            saved[number] += 1

    with backstay.open(postgres_url) as store:
        threads = [threading.Thread(target=saver, args=(number,)) for number in range(len(saved))]
        for thread in threads:
            thread.start()
        children = []
        for number in range(10):
            before = sum(saved)
            wait_until(partial(has_grown, saved, before))
            children.append(forked(partial(store.thread(f"child {number}").save, {"n": number})))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        stop.set()
        for thread in threads:
            thread.join()
        show("forks of a process whose threads were saving", len(children))

        assert codes == [0] * len(children)
        assert store.check().good["checkpoints"] == sum(saved) + len(children)


def has_grown(counts: list[int], before: int) -> bool:
    return sum(counts) > before


def forked(function: Callable[[], object]) -> int:
    """Run a function in a forked child, which is ended if it hangs, and return the child's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(CHILD_SECONDS_MAX)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
