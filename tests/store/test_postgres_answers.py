"""Lost, late and odd answers of PostgreSQL: the first result, a true reason, and no doubt without a cause."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import backstay
from backstay.errors import StoreBusy
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.target import parse_url
from backstay.testing.drafts import wait_until
from support.postgres import PostgresServer
from support.proxy import Fault, Proxy

COMMIT = b"COMMIT"
WAIT_S = 20
SETTINGS = ["lock_timeout", "statement_timeout"]


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres.port) as between:
        yield between


# Replacing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["swallow_answer", "cut_before"])
def test_a_replacement_whose_commit_is_lost_is_done_once_and_its_handle_continues(
    postgres_url: str, proxy: Proxy, fault: Fault
) -> None:
    with backstay.open(proxy.url(f"{postgres_url}&prepare=no&timeout={WAIT_S}")) as store:
        thread = store.thread("agent")
        thread.save({"log": ["a"]}, id="one")
        thread.append({"log": ["b"]}, id="two")
        (proxy.swallow_answer if fault == "swallow_answer" else proxy.cut_before)(COMMIT)
        saved = thread.save({"log": ["a", "c"]}, id="two", replace=True)

        assert proxy.fired == {fault: 1}
        stored = store.get("two")
        assert stored is not None
        assert (stored.seq, stored.digest, stored.state) == (saved.seq, saved.digest, {"log": ["a", "c"]})
        thread.append({"log": ["d"]}, id="three")
        newest = store.thread("agent").latest()
        assert newest is not None
        assert newest.state == {"log": ["a", "c", "d"]}
        assert [meta.id for meta in thread.history()] == ["three", "two", "one"]
        assert store.check()


# A server that is stopped -----------------------------------------------------------------------------------------


def test_a_server_that_is_stopped_after_its_answer_leaves_no_doubt(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last warning has a code that a server uses too when it stops waiting for a standby."""
    seen: list[tuple[str | None, str | None]] = []
    wait = DeadlineConnection.wait

    def answered_then_stopped(connection: DeadlineConnection, *given: Any) -> Any:
        answer = wait(connection, *given)
        monkeypatch.undo()
        connection.add_notice_handler(lambda notice: seen.append((notice.sqlstate, notice.source_function)))
        server.stop("immediate")
        assert select.select([connection.pgconn.socket], [], [], WAIT_S)[0]
        with contextlib.suppress(psycopg.OperationalError):
            connection.pgconn.consume_input()
        connection.pgconn.is_busy()  # the warning is read together with the answer
        return answer

    with PostgresServer() as server, backstay.open(server.url(timeout=WAIT_S)) as store:
        thread = store.thread("agent")
        for number in range(4):  # from now on a save is one request
            thread.append({"log": [number]})
        monkeypatch.setattr(DeadlineConnection, "wait", answered_then_stopped)
        saved = thread.append({"log": [4]})

        assert seen == [("57P01", "quickdie")]
        server.start()
        newest = thread.latest()
        assert newest is not None
        assert (newest.id, newest.state) == (saved.id, {"log": [0, 1, 2, 3, 4]})


# A statement that the server ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_statement_that_the_server_ends_is_reported_with_the_setting_that_ended_it(
    postgres: PostgresServer, postgres_url: str, setting: str
) -> None:
    with backstay.open(f"{postgres_url}&options=-c%20{setting}%3D300") as store:
        thread = store.thread("agent")
        thread.append({"log": ["a"]})
        with postgres.connect() as holder:
            holder.execute(f"begin; select 1 from {parse_url(postgres_url).schema}.branch for update".encode())
            with pytest.raises(StoreBusy) as caught:
                thread.append({"log": ["b"]})
            holder.execute("rollback")

        text = f"{caught.value.what} {caught.value.hint}"  # without the URL, which names the setting too
        assert {name for name in SETTINGS if name in text} == {setting}
        assert "Try again" in text
        thread.append({"log": ["b"]})


def test_a_statement_that_an_administrator_cancels_is_not_called_a_lock(
    postgres: PostgresServer, postgres_url: str
) -> None:
    with backstay.open(f"{postgres_url}&application_name=cancelled") as store, postgres.connect() as admin:
        thread = store.thread("agent")
        thread.append({"log": ["a"]})
        running = "from pg_stat_activity where application_name = 'cancelled' and wait_event_type = 'Lock'"
        with postgres.connect() as holder:
            holder.execute(f"begin; select 1 from {parse_url(postgres_url).schema}.branch for update".encode())
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(thread.append, {"log": ["b"]})
                wait_until(lambda: admin.execute(f"select 1 {running}".encode()).fetchall() != [])
                admin.execute(f"select pg_cancel_backend(pid) {running}".encode())
                error = answer.exception(WAIT_S)
            holder.execute("rollback")

        assert isinstance(error, StoreBusy)
        assert "cancelled the statement" in str(error)
        assert "lock" not in str(error)
