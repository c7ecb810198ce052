"""Group commit: savers that come while another commits share its fsync, and none pays for another's refusal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backstay.errors import Conflict, StoreRefused
from backstay.store.sqlite.database import Database
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.transactions import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    database = Database(str(tmp_path / "x.db"), timeout_s=5)
    opened = Writer(database)
    yield opened
    opened.close()


class Blocker:
    """A job that leads a transaction and holds it until told."""

    def __init__(self, writer: Writer) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=writer.submit, args=(self._job,))
        self.thread.start()
        assert self.inside.wait(10)

    def _job(self, connection: Connection) -> bool:
        self.inside.set()
        return self.go.wait(10)

    def finish(self) -> None:
        self.go.set()
        self.thread.join(10)


def wait_for_queue(writer: Writer, length: int) -> None:
    """Block until so many wait; the queue is the only place that tells."""
    while len(writer._queue) < length:
        os.sched_yield()


def insert(name: str) -> str:
    return f"INSERT INTO counter VALUES ('{name}', 1, 0)"


def names(writer: Writer) -> list[str]:
    return writer.submit(
        lambda connection: [row[0] for row in connection.execute("SELECT name FROM counter WHERE name <> 'record'")]
    )


def test_savers_that_wait_share_one_transaction(writer: Writer) -> None:
    transactions: list[int] = []
    blocker = Blocker(writer)

    def job(connection: Connection, number: int) -> bool:
        transactions.append(connection.total_changes)
        connection.execute(insert(f"n{number}"))
        return True

    savers = [
        threading.Thread(target=writer.submit, args=(lambda connection, n=number: job(connection, n),))
        for number in range(8)
    ]
    for saver in savers:
        saver.start()
    wait_for_queue(writer, 8)
    commits: list[int] = []
    assert writer._connection is not None

    writer._connection.set_trace_callback(lambda sql: commits.append(1) if sql == "COMMIT" else None)
    blocker.finish()
    for saver in savers:
        saver.join(10)
    writer._connection.set_trace_callback(None)

    assert len(transactions) == 8
    assert len(commits) == 2, "the blocker's own commit and one for all eight"
    assert len(names(writer)) == 9


def test_a_refused_job_undoes_itself_alone(writer: Writer) -> None:
    blocker = Blocker(writer)
    errors: list[str] = []

    def refused(connection: Connection) -> bool:
        connection.execute(insert("refused"))
        raise Conflict("lost")

    def saver(job: object) -> None:
        try:
            writer.submit(job)  # type: ignore[arg-type]
        except Conflict as error:
            errors.append(error.what)

    jobs = [refused, lambda c: bool(c.execute(insert("a"))), refused, lambda c: bool(c.execute(insert("b")))]
    savers = [threading.Thread(target=saver, args=(job,)) for job in jobs]
    for thread in savers:
        thread.start()
    wait_for_queue(writer, 4)
    blocker.finish()
    for thread in savers:
        thread.join(10)

    assert errors == ["lost", "lost"]
    assert sorted(names(writer)) == ["a", "b", "stream"]


def test_a_broken_statement_of_one_does_not_fail_the_others(writer: Writer) -> None:
    blocker = Blocker(writer)
    results: dict[str, str] = {}

    def saver(name: str, sql: str) -> None:
        try:
            writer.submit(lambda connection: bool(connection.execute(sql)))
            results[name] = "stored"
        except Exception as error:
            results[name] = type(error).__name__

    savers = [
        threading.Thread(target=saver, args=(name, sql))
        for name, sql in (("good", insert("good")), ("bad", "INSERT INTO nowhere VALUES (1)"), ("fine", insert("fine")))
    ]
    for thread in savers:
        thread.start()
    wait_for_queue(writer, 3)
    blocker.finish()
    for thread in savers:
        thread.join(10)

    assert results == {"good": "stored", "bad": "StoreError", "fine": "stored"}


def test_a_waiting_saver_that_is_interrupted_leaves_the_queue_in_order(writer: Writer) -> None:
    """Ctrl-C in the main thread while somebody else leads: nobody may be left waiting for it."""
    blocker = Blocker(writer)

    def interrupt() -> None:
        wait_for_queue(writer, 1)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        writer.submit(lambda connection: bool(connection.execute(insert("interrupted"))))
    interrupter.join(10)
    blocker.finish()

    assert writer.submit(lambda connection: "goes on") == "goes on"
    assert "interrupted" not in names(writer)


class Abrupt(BaseException):
    """Stands for Ctrl-C: nothing that a job may catch."""


def test_no_job_of_an_interrupted_group_is_called_stored(writer: Writer) -> None:
    """Those that ran before the interruption have a result, but their transaction is gone."""
    blocker = Blocker(writer)
    outcomes: dict[str, str] = {}

    def interrupted(connection: Connection) -> bool:
        raise Abrupt

    def saver(name: str, job: Callable[[Connection], bool]) -> None:
        try:
            writer.submit(job, name)
            outcomes[name] = "stored"
        except BaseException as error:
            outcomes[name] = type(error).__name__

    jobs: list[tuple[str, Callable[[Connection], bool]]] = [
        ("first", lambda connection: bool(connection.execute(insert("first")))),
        ("second", lambda connection: bool(connection.execute(insert("second")))),
        ("struck", interrupted),
    ]
    savers = []
    for length, (name, job) in enumerate(jobs, 1):
        savers.append(threading.Thread(target=saver, args=(name, job)))
        savers[-1].start()
        wait_for_queue(writer, length)
    blocker.finish()
    for thread in savers:
        thread.join(10)

    assert outcomes == {"first": "Abrupt", "second": "OutcomeUnknown", "struck": "OutcomeUnknown"}
    assert names(writer) == ["stream"]


def test_an_interruption_at_the_commit_itself_is_no_acknowledgement(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(connection: Connection, group: object) -> None:
        raise Abrupt

    monkeypatch.setattr(writer, "_commit", struck)
    with pytest.raises(Abrupt):
        writer.submit(lambda connection: bool(connection.execute(insert("lost"))))
    monkeypatch.undo()

    assert names(writer) == ["stream"]


def test_no_job_is_begun_in_a_file_that_was_taken_away(writer: Writer, tmp_path: Path) -> None:
    writer.submit(lambda connection: None)
    (tmp_path / "x.db").rename(tmp_path / "elsewhere.db")
    begun: list[bool] = []

    with pytest.raises(StoreRefused, match="deleted or moved"):
        writer.submit(lambda connection: begun.append(True))

    assert begun == []
