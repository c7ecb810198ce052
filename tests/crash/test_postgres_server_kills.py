"""SIGKILL of PostgreSQL, whole and in part, under four processes that save to two threads and get in each other's way.

Three writers are patient: they must never notice more than a pause. One gives up after a fraction of a second, so that
it does meet saves of unknown outcome, and settles each by saving again with the same id. Whatever is left open when the
writers themselves are killed at the end, the test settles in the same way. Then the chains are checked.
"""

from __future__ import annotations

import os
import random
import re
import selectors
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.testing.drafts import wait_until
from support.crash.postgres_victims import THREADS, write
from support.postgres import PostgresServer
from support.processes import Nursery
from support.running import Show, effort
from support.simulation.chain import chains_of, check_chain
from support.simulation.history import CallHistory, CallKind, CallOutcome, CallRecorder, RecordedCall, RecordedThread

PATIENT = ("p1", "p2", "p3")
IMPATIENT = "i1"
PATIENCE_S = {**dict.fromkeys(PATIENT, "20"), IMPATIENT: "0.2"}
KILLS = max(2, effort())
ACKS_BEFORE_KILL_MAX = 60
BACK_S_MAX = 1.0
WAIT_S = 60.0
STALE = 10
WAITING = "select count(distinct pid) from pg_locks where not granted"
SEED = int(os.environ.get("BACKSTAY_SEED", "20261115"))


@pytest.fixture
def server(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Start a server of one's own, to be killed; the one that tests share only shows that this machine can do it."""
    with PostgresServer() as own:
        yield own


class Crowd:
    """Writers in processes of their own, and what they say."""

    def __init__(self, nursery: Nursery, folder: Path, server: PostgresServer, options: str = "") -> None:
        self.history = str(folder / "history")
        self.answers: Counter[str] = Counter()  # by kind
        self.troubled: Counter[str] = Counter()  # writers that were told to wait or to find out
        self.answered: dict[str, int] = {}  # by writer, the time of the last acknowledgement or conflict
        self.acked = 0  # the time of the last acknowledgement
        self._nursery = nursery
        self._unread = b""
        fifo = str(folder / "said")
        os.mkfifo(fifo)
        self._pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self._keeper = os.open(fifo, os.O_WRONLY)  # while no writer has it open
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        backstay.open(server.url(timeout=20) + options).close()  # makes the tables
        self._pids = [
            nursery.start("support.crash.postgres_victims:save_without_end", [url + options, self.history, name], fifo)
            for name, url in ((name, server.url(timeout=patience)) for name, patience in PATIENCE_S.items())
        ]

    def listen_until(self, enough: Callable[[], bool]) -> None:
        """Take in what the writers say until that is so."""
        deadline = time.monotonic() + WAIT_S
        while not enough():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {WAIT_S:g} s: {self.answers}, {self.answered}"
            if self._selector.select(left):
                self._take()

    def kill(self) -> None:
        """Kill all writers, wherever they are."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        assert [self._nursery.wait(pid) for pid in self._pids] == [-signal.SIGKILL] * len(self._pids)
        self._selector.close()
        os.close(self._keeper)
        os.close(self._pipe)

    def _take(self) -> None:
        *lines, self._unread = (self._unread + os.read(self._pipe, 1 << 16)).split(b"\n")
        for line in lines:
            kind, writer, at = line.decode().split()
            self.answers[kind] += 1
            if kind in ("ACK", "CONFLICT"):
                self.answered[writer] = int(at)
            else:
                self.troubled[writer] += 1
            if kind == "ACK":
                self.acked = int(at)


class Recovery:
    """Strikes the server again and again while the crowd saves, and measures how long it takes to go on."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.rng = random.Random(SEED)
        self.first_ack_s: list[float] = []
        self.all_back_s: list[float] = []
        crowd.listen_until(lambda: crowd.answered.keys() == PATIENCE_S.keys())  # all have opened the store
        self.await_acks()

    def await_acks(self) -> None:
        """Wait until some saves were acknowledged from now on, so that the next strike hits a crowd at work."""
        crowd = self.crowd
        goal = crowd.answers["ACK"] + self.rng.randint(1, ACKS_BEFORE_KILL_MAX)
        crowd.listen_until(lambda: crowd.answers["ACK"] >= goal)

    def measure(self, ready: int) -> None:
        """Note how long after the server was ready the first save, and every writer, got its answer."""
        crowd = self.crowd
        crowd.listen_until(lambda: crowd.acked > ready)
        self.first_ack_s.append((crowd.acked - ready) / 1e9)
        crowd.listen_until(lambda: all(crowd.answered.get(writer, 0) > ready for writer in PATIENT))
        self.all_back_s.append((max(crowd.answered[writer] for writer in PATIENT) - ready) / 1e9)
        self.await_acks()

    def __str__(self) -> str:
        return (
            f"first acknowledgement at most {max(self.first_ack_s):.2f} s after the server was ready, "
            f"all patient writers within {max(self.all_back_s):.2f} s"
        )


def appends(history: CallHistory) -> dict[str, RecordedCall]:
    """Return the last attempt of every save."""
    return {str(call.id): call for call in history.calls if call.action is CallKind.APPEND}


def settle(store: backstay.Store, path: str) -> str:
    """Save again, with the same id, whatever has no answer yet; tell how many of those were stored already."""
    recorder = CallRecorder(path)
    left_open = [call for call in appends(recorder.history()).values() if call.outcome is CallOutcome.UNKNOWN]
    applied = 0
    for call in left_open:
        name = str(call.id)
        thread = RecordedThread(store.thread(call.branch.thread), recorder)
        stored = store.get(name)
        thread.latest()
        saved = write(thread, name)
        assert stored is None or (saved.seq, saved.digest) == (stored.seq, stored.digest)
        applied += stored is not None
    recorder.close()
    return f"{len(left_open)} left open ({applied} applied)"


def judge(server: PostgresServer, crowd: Crowd, options: str = "") -> str:
    """Settle what is open, compare what is stored with what the writers were told, and return the figures."""
    with backstay.open(server.url(timeout=20) + options) as store:
        settled = settle(store, crowd.history)
        history = CallHistory.read(crowd.history)
        stored = {meta.id for thread in THREADS for meta in store.thread(thread).history()}
        verdict = check_chain(history, chains_of(store, history.branches))
        report = store.check()
    last = appends(history)
    outcomes = {outcome: {name for name, call in last.items() if call.outcome is outcome} for outcome in CallOutcome}
    assert outcomes[CallOutcome.OK] <= stored, "an acknowledged checkpoint is lost"
    assert not outcomes[CallOutcome.FAIL] & stored, "a refused checkpoint is there"
    assert outcomes[CallOutcome.UNKNOWN] == set(), "an unknown outcome was not resolved"
    assert verdict, str(verdict)
    assert report, str(report)
    unknown = [call for call in history.calls if call.action is CallKind.APPEND and call.outcome is CallOutcome.UNKNOWN]
    return f"{verdict}; {len(unknown)} attempts of unknown outcome, {settled}; told {dict(crowd.answers)}"


def proofs(server: PostgresServer, words: str) -> list[str]:
    """Return what the server's log says of its own deaths."""
    return re.findall(words, server.log.read_text(encoding="utf-8", errors="replace"))


@pytest.mark.crash
@pytest.mark.effort
def test_a_server_killed_again_and_again_loses_nothing_and_its_writers_only_pause(
    server: PostgresServer, tmp_path: Path, show: Show
) -> None:
    with Nursery() as nursery:
        crowd = Crowd(nursery, tmp_path, server)
        recovery = Recovery(crowd)
        for _ in range(KILLS):
            postmaster = Path("/proc", (server.data / "postmaster.pid").read_text().split()[0])
            assert postmaster.exists()
            server.kill()
            assert not postmaster.exists()
            server.start()
            recovery.measure(time.monotonic_ns())
        crowd.kill()
    figures = judge(server, crowd)

    recoveries = proofs(server, "automatic recovery in progress")
    show("server kills", f"seed {SEED}, {KILLS} kills, {len(recoveries)} recoveries; {recovery}")
    show("server kills, outcomes", figures)
    assert len(recoveries) == KILLS
    assert crowd.answers["CONFLICT"], "the writers never raced"
    assert crowd.troubled[IMPATIENT] >= KILLS // 2, "the kills hit nobody"
    assert not [writer for writer in PATIENT if crowd.troubled[writer]]
    assert max(recovery.all_back_s) <= BACK_S_MAX


@pytest.mark.crash
@pytest.mark.effort
def test_backends_killed_and_terminated_lose_nothing_and_their_writers_only_pause(
    server: PostgresServer, tmp_path: Path, show: Show
) -> None:
    with Nursery() as nursery:
        crowd = Crowd(nursery, tmp_path, server)
        recovery = Recovery(crowd)
        killed, terminated = [], []
        for _ in range(KILLS):
            killed.append(recovery.rng.choice(server.backend_pids()))
            server.kill_backend(killed[-1])
            server.wait_ready()
            recovery.measure(time.monotonic_ns())
            terminated.append(recovery.rng.choice(server.backend_pids()))
            with server.connect() as connection:
                answer = connection.execute("select pg_terminate_backend(%s, 10000)", (terminated[-1],)).fetchone()
            assert answer == (True,)
            recovery.await_acks()
        crowd.kill()
    figures = judge(server, crowd)

    show("backend kills", f"seed {SEED}, {KILLS} killed, {KILLS} terminated; {recovery}")
    show("backend kills, outcomes", figures)
    assert proofs(server, r"backend \(PID (\d+)\) was terminated by signal 9") == [str(pid) for pid in killed]
    assert set(map(str, terminated)) <= set(proofs(server, r"\[(\d+)\] .*due to administrator command"))
    assert crowd.answers["CONFLICT"], "the writers never raced"
    assert not [writer for writer in PATIENT if crowd.troubled[writer]]
    assert max(recovery.all_back_s) <= BACK_S_MAX


@pytest.mark.effort(2)
@pytest.mark.crash
def test_a_server_that_acknowledges_too_early_is_caught(postgres: PostgresServer, tmp_path: Path) -> None:
    """A harness that cannot fail shows nothing: with synchronous_commit=off the last saves are lost."""
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    with PostgresServer(settings=settings) as server, Nursery() as nursery:
        crowd = Crowd(nursery, tmp_path, server, "&accept_data_loss=yes")
        Recovery(crowd)
        server.kill()
        crowd.kill()
        server.start()
        with pytest.raises(AssertionError, match="an acknowledged checkpoint is lost"):
            judge(server, crowd, "&accept_data_loss=yes")


@pytest.mark.crash
def test_the_first_call_after_a_restart_is_quick_though_every_pooled_connection_is_dead(
    server: PostgresServer, show: Show
) -> None:
    with backstay.open(server.url(pool=STALE, timeout=20)) as store, server.connect() as other:
        store.thread("t").save({"n": 0})
        readers = [threading.Thread(target=store.thread("t").latest) for _ in range(STALE)]
        with other.transaction():
            other.execute("lock table backstay.branch")
            for reader in readers:
                reader.start()
            wait_until(lambda: other.execute(WAITING).fetchone() == (STALE,))
        for reader in readers:
            reader.join()
        server.kill()
        server.start()
        first = threading.Thread(target=store.thread("t").latest)
        began = time.monotonic()
        first.start()
        first.join()
        took = time.monotonic() - began

        show("first call after a restart", f"{took:.2f} s with {STALE} dead connections in the pool")
        assert took <= BACK_S_MAX
        assert store.check()
