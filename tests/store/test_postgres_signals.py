"""Ctrl-C between any two lines of a save, and signal handlers that save: nothing is lost, locked or leaked."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from psycopg.pq import TransactionStatus

import backstay
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.target import parse_url
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of
from support.postgres import PostgresServer
from support.running import Show, effort

OURS = str(Path(backstay.__file__).parent / "store" / "postgres")
HANDLER_SAVES = 60
SECONDS_MAX = 20.0
STRIDE = max(1, 5 // effort())
"""Of so many lines one is tried."""


def is_place(frame: FrameType, event: str) -> bool:
    """Tell whether an exception may arrive here: at each line of ours."""
    return event == "line" and frame.f_code.co_filename.startswith(OURS)


@contextmanager
def at_place(number: int, act: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Act once, when this thread comes to its nth place; yield what tells whether it did."""
    left = [number]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if is_place(frame, event):
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                act()
        return trace if frame.f_code.co_filename.startswith(OURS) else None

    sys.settrace(trace)
    try:
        yield lambda: left[0] <= 0
    finally:
        sys.settrace(None)


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def in_time(call: Callable[[], object]) -> None:
    """Make a call in another thread, which must not be kept waiting."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive(), "it hangs"
    assert failures == []


def backends(server: PostgresServer, name: str) -> int:
    with server.connect() as admin:
        rows = admin.execute("select count(*) from pg_stat_activity where application_name = %s", (name,)).fetchall()
    return int(rows[0][0])


@pytest.mark.effort
@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")  # and so closed: that is the point
@pytest.mark.parametrize("first", [True, False], ids=["the first save", "any save"])
def test_ctrl_c_at_any_line_of_a_save_leaves_a_store_that_works(
    postgres: PostgresServer, postgres_url: str, first: bool, show: Show
) -> None:
    url = f"{postgres_url}&pool=3&timeout=10&application_name=interrupted"
    store = backstay.open(url)
    thread, log, number, stored = store.thread("agent"), [], 1, 0
    while True:
        if first:  # with a pool that is not made yet
            store.close()
            store = backstay.open(url)
            thread = store.thread("agent")
        text = f"text {number} " + "x" * 30
        with at_place(number, press_ctrl_c) as has_come, suppress(KeyboardInterrupt):
            thread.append({"log": [text]}, id=text)
        done = not has_come()
        stored += store.get(text) is not None
        thread.latest()
        thread.append({"log": [text]}, id=text)  # whatever became of it, now it is there once
        log.append(text)
        in_time(store.thread("other").latest)
        if done:
            break
        number += STRIDE * (3 if first else 1)  # opening takes its time

    newest = store.thread("agent").latest()
    assert newest is not None
    assert newest.state == {"log": log}
    assert store.check()
    assert len(log) > 50 // STRIDE
    assert 0 < stored < len(log)
    wait_until(lambda: backends(postgres, "interrupted") <= 3)  # what was given up is closed
    store.close()
    show("lines of a save at which Ctrl-C came, saves that were stored nevertheless", (len(log) - 1, stored))


def test_ctrl_c_at_any_line_of_preparing_a_statement_leaves_a_connection_that_works(postgres_url: str) -> None:
    with contextlib.closing(RetryingPool(parse_url(postgres_url))) as pool:

        def run(connection: DeadlineConnection) -> bytes:
            return connection.fast("SELECT $1", [17], [b"here"])

        usable, done = 0, False
        for number in itertools.count(1):
            with contextlib.closing(pool.connect()) as connection:
                run(connection)
                with at_place(number, press_ctrl_c) as has_come, suppress(KeyboardInterrupt):
                    run(connection)
                done = not has_come()
                if connection.pgconn.transaction_status == TransactionStatus.IDLE:  # the pool keeps no other
                    usable += 1
                    assert [run(connection) for _ in range(3)] == [b"here"] * 3
            if done:
                break

    assert 5 < usable < number


def test_a_handler_that_saves_in_the_middle_of_a_save_works_at_every_place(
    postgres: PostgresServer, postgres_url: str, show: Show
) -> None:
    """The same store, the same thread of the program: also while it has all connections of the pool."""
    with backstay.open(f"{postgres_url}&pool=2&timeout=10&application_name=handled") as store:
        outer, inner = store.thread("outer"), store.thread("inner")
        outer.append({"n": [0]})
        saved: list[int] = []

        def save() -> None:
            inner.append({"n": [len(saved)]})
            saved.append(len(saved))

        previous = signal.signal(signal.SIGUSR1, lambda *_: save())
        try:
            number, count = 0, 1
            while True:
                number += 1
                with at_place(number, lambda: os.kill(os.getpid(), signal.SIGUSR1)) as has_come:
                    outer.append({"n": [number]})
                count += 1
                if not has_come():
                    break
            with connections_taken(store):
                os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        found = [each.latest() for each in (outer, inner)]

        assert [len(each.state["n"]) for each in found if each is not None] == [count, len(saved)]
        assert len(saved) == number  # one at each place, and one without a free connection
        assert len(saved) > 50
        assert backends(postgres, "handled") <= 2
        assert store.check()
    show("saves of a handler in the middle of a save", len(saved))


@contextmanager
def connections_taken(store: backstay.Store) -> Iterator[None]:
    """Be in the middle of a call, while all connections are in use."""
    retrying = access_of(store).store._pool  # type: ignore[attr-defined]
    (pool,) = retrying._pools.values()
    retrying._local.inside = True
    for _ in range(2):
        pool.permits.get()
    yield
    for _ in range(2):
        pool.permits.put(None)
    retrying._local.inside = False
