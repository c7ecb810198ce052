"""A primary with a synchronous standby: what is acknowledged is on both, and survives the loss of the primary."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import BackstayError, OutcomeUnknown
from backstay.model.runs import Outcome
from backstay.store.base import BranchKey
from backstay.store.leases import LeaseRequest
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of
from support.postgres import PostgresServer
from support.running import Show

pytestmark = pytest.mark.effort(2)


SAVERS = 4
SAVES_BEFORE = 40  # of each saver, before the primary is killed
SAVES_AFTER = 10


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder that another user of this machine can reach."""
    folder = Path("/tmp", f"backstay-{uuid.uuid4().hex}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def pair(postgres: PostgresServer, folder: Path) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """Start a primary that waits for its standby before it answers, and the standby."""
    with PostgresServer() as primary, primary.standby(folder) as standby:
        with primary.connect() as admin:
            admin.execute("alter system set synchronous_standby_names = '*'")
            admin.execute("select pg_reload_conf()")
        wait_until(lambda: query(primary, "select 1 from pg_stat_replication where sync_state = 'sync'") == [(1,)])
        yield primary, standby


def query(server: PostgresServer, statement: str) -> list[tuple[Any, ...]]:
    with server.connect() as connection:
        return connection.execute(statement.encode()).fetchall()


def waiting(server: PostgresServer) -> list[tuple[Any, ...]]:
    return query(server, "select pid from pg_stat_activity where wait_event = 'SyncRep'")


def interrupted(server: PostgresServer, call: Callable[[], object], how: str) -> BaseException | None:
    """Make a call, end each of its waits for the standby, and return what it raised."""
    ended = 0
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call)
        while not answer.done():
            for (pid,) in waiting(server):
                query(server, f"select {how}({pid})")
                ended += 1
    assert ended
    return answer.exception()


def calls(store: backstay.Store) -> dict[str, Callable[[], object]]:
    """Return calls of each kind, all prepared, so that one commit is all that is left; each may be made again."""
    thread, replaced, asking = store.thread("save"), store.thread("replace"), store.thread("ask")
    thread.save({"n": 1})
    first = replaced.save({"n": 1})
    asked = asking.interrupt(asking.save({"n": 1}), prompt="May I?")
    with pytest.raises(TimeoutError):
        asking.effect("mail", slow)
    effect = next(iter(asking.effects()))
    backend = access_of(store).store
    return {
        "save": lambda: thread.append(set={"n": 2}, id="second"),
        "save with tags": lambda: store.thread("tagged").save({"n": 1}, id="tagged", tags=["a"]),
        "replace": lambda: store.thread("replace").save({"n": 2}, id=first.id, replace=True),
        "decide": lambda: asking.decide(asked, "approve", by="me"),
        "settle": lambda: asking.settle(effect, Outcome.done(1), by="me"),
        "lease": lambda: backend.acquire(BranchKey("", "leased", "", "main"), LeaseRequest("me", "token", 60_000_000)),
        "tag": lambda: thread.tag(first.id, "good"),
    }


def slow() -> None:
    raise TimeoutError


def test_what_the_standby_may_not_have_is_not_acknowledged(
    pair: tuple[PostgresServer, PostgresServer], show: Show
) -> None:
    primary, standby = pair
    with backstay.open(primary.url(timeout=3)) as store:
        made = calls(store)
        standby.stop("immediate")
        for name, call in made.items():
            error = interrupted(primary, call, "pg_cancel_backend")
            assert type(error) is OutcomeUnknown, (name, error)
            assert "stopped waiting for its synchronous standby" in str(error)
        made["killed"] = lambda: store.thread("killed").save({"n": 1}, id="killed")
        assert type(interrupted(primary, made["killed"], "pg_terminate_backend")) is OutcomeUnknown
        with ThreadPoolExecutor(len(made)) as pool:  # it is there by now, but on one server: the same call waits again
            again = {name: pool.submit(call).exception for name, call in made.items()}
        assert {name: type(error()) for name, error in again.items()} == dict.fromkeys(made, OutcomeUnknown)
        assert query(primary, "select 1 from pg_stat_replication") == []

        standby.start()
        for call in made.values():
            call()

        count = "select count(*) from backstay.checkpoint"
        wait_until(lambda: query(standby, count) == query(primary, count))
        show("kinds of commits whose wait for a standby was cancelled", len(made))


# Failover ---------------------------------------------------------------------------------------------------------


class Saver:
    """Appends to a thread of its own under a lease, whatever happens, and notes what was acknowledged."""

    def __init__(self, store: backstay.Store, name: str) -> None:
        self.thread = store.thread(name)
        self.saved: list[tuple[str, list[str]]] = []
        self.epochs: list[int] = []
        self.failures: list[BackstayError] = []

    def run(self, enough: threading.Event) -> None:
        number = left = 0
        while left < SAVES_AFTER:
            left += enough.is_set()
            try:
                with self.thread.lease(ttl=2, owner="me", heartbeat=False, wait=10) as lease:
                    self.epochs.append(lease.epoch)
                    for _ in range(5):
                        number += 1
                        self.append(f"{self.thread.id} {number}")
            except BackstayError as error:
                self.failures.append(error)
                self.thread.latest()

    def append(self, text: str) -> None:
        newest = self.thread.latest()
        log = [*(newest.state["log"] if newest is not None else []), text]
        self.thread.append({"log": [text]}, id=text)
        self.saved.append((text, log))


def test_a_failover_loses_nothing_that_was_acknowledged(
    pair: tuple[PostgresServer, PostgresServer], show: Show
) -> None:
    primary, standby = pair
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    url = primary.url(timeout=20, target_session_attrs="read-write").replace(f"127.0.0.1:{primary.port}", hosts)
    enough = threading.Event()
    with backstay.open(url) as store:
        savers = [Saver(store, f"agent {number}") for number in range(SAVERS)]
        with ThreadPoolExecutor(SAVERS) as pool:
            running = [pool.submit(saver.run, enough) for saver in savers]
            wait_until(lambda: all(len(saver.saved) > SAVES_BEFORE for saver in savers))
            for pid in primary._processes():  # all at once, so that none can say another word
                os.kill(pid, signal.SIGKILL)
            primary.kill()
            before = [len(saver.saved) for saver in savers]
            query(standby, "select pg_promote()")
            enough.set()
            for each in running:
                each.result()
        states = {saver.thread.id: check_saver(store, saver) for saver in savers}
        assert store.check()

    assert all(len(saver.saved) > count for saver, count in zip(savers, before, strict=True))
    show("saves acknowledged before and after a failover", (sum(before), sum(map(len, states.values()))))


def check_saver(store: backstay.Store, saver: Saver) -> list[str]:
    """Return the log, after comparing each acknowledged state, the order and the epochs with it."""
    thread = store.thread(saver.thread.id)
    newest = thread.latest()
    assert newest is not None
    log: list[str] = newest.state["log"]
    for name, expected in saver.saved:
        found = store.get(name)
        assert found is not None, name
        assert found.state["log"] == expected
    acknowledged = {name for name, _ in saver.saved}
    assert [name for name in log if name in acknowledged] == [name for name, _ in saver.saved]
    history = list(thread.history())
    assert [meta.id for meta in reversed(history)] == log
    assert [meta.step for meta in reversed(history)] == list(range(1, len(log) + 1))
    assert all(earlier.seq > later.seq for earlier, later in itertools.pairwise(history))
    assert saver.epochs == sorted(set(saver.epochs))
    return log
