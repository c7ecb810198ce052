"""Sessions: every run that died is found, and none that lives is taken for dead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import InvalidInput
from backstay.operations.leases import Process, this_process
from backstay.operations.records import all_records
from backstay.operations.sessions import SessionRow, end_session_by_id, row_of
from backstay.store.leases import BranchKey
from backstay.store.records import Record
from backstay.thread.access import access_of
from backstay.thread.store import AsyncStore
from support.waiting import eventually

SHARED = ["sqlite", "postgres"]
"""The stores that several processes can open."""

RUN = """
import sys, backstay
url, ttl, save = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "save"
store = backstay.open(url)
thread = store.thread("nightly")
with thread.session(note="import orders", owner="worker-7", ttl=ttl):
    if save:
        thread.save({"done": 3}, next_node="load")
    print("ready", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def running(url: str, ttl: float = 3600.0, save: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Run a session in a process of its own until it is killed or its standard input ends."""
    command = [sys.executable, "-c", RUN, url, str(ttl), "save" if save else ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def rows(store: backstay.Store | AsyncStore) -> list[SessionRow]:
    return [row_of(record) for record in all_records(access_of(store).store, "session", "", None, open_only=True)]


# Beginning and ending ---------------------------------------------------------------------------------------------


def test_a_session_is_listed_while_it_runs_and_ends_as_completed(store: backstay.Store, clock: Any) -> None:
    begin = clock()
    with store.thread("t", branch="side", scope="inner").session(note="a note", owner="me") as session:
        (listed,) = store.sessions()
        clock.step(seconds=5)

    assert (listed.id, listed.thread_id, listed.branch, listed.scope) == (session.id, "t", "side", "inner")
    assert (listed.owner, listed.note, listed.started_at, listed.last_seen) == ("me", "a note", begin, begin)
    assert (listed.ended_at, listed.reason) == (None, None)
    assert store.sessions() == []
    (ended,) = store.sessions(active=False)
    assert (ended.reason, ended.ended_at) == ("completed", clock())


def test_a_session_that_fails_names_the_type_of_the_error_and_never_its_message(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with pytest.raises(ValueError, match="secret"), thread.session():
        raise ValueError("the secret password")

    assert [row.reason for row in store.sessions(active=False)] == ["failed: ValueError"]


def test_a_session_may_say_itself_why_it_ends_and_the_first_reason_stays(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with thread.session() as session:
        session.end("out of budget")
        assert store.sessions() == []
        session.end("again")

    assert [row.reason for row in store.sessions(active=False)] == ["out of budget"]


def test_the_beats_of_a_session_are_seen(store: backstay.Store, thread: backstay.Thread, clock: Any) -> None:
    with thread.session(ttl=0.1):
        clock.step(seconds=7)
        eventually(lambda: store.sessions()[0].last_seen == clock())

    assert store.interrupted() == []


def test_what_a_session_cannot_be_is_refused(store: backstay.Store, thread: backstay.Thread) -> None:
    session = thread.session()
    with pytest.raises(InvalidInput, match="has not started"):
        session.end("too early")
    with session:
        with pytest.raises(InvalidInput, match="once"), session:
            raise AssertionError("entered")
        bad: list[Any] = ["", 5, None, "x" * 1025, "nul\0"]
        for reason in bad:
            with pytest.raises(InvalidInput):
                session.end(reason)
    yes: Any = 1
    with pytest.raises(InvalidInput, match="active"):
        store.sessions(active=yes)
    wrong: list[dict[str, Any]] = [{"note": 5}, {"note": "x" * 1025}, {"owner": b"me"}]
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            thread.session(**arguments)


def test_a_session_works_the_same_with_await(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            async with thread.session(note="a note") as session:
                assert [row.id for row in await store.sessions()] == [session.id]
                assert await store.interrupted() == []
            async with thread.session() as session:
                await session.end("enough")
            with pytest.raises(ZeroDivisionError):
                await failing(thread)
            reasons = [row.reason for row in await store.sessions(active=False)]
            assert reasons == ["completed", "enough", "failed: ZeroDivisionError"]

    async def failing(thread: backstay.AsyncThread) -> None:
        async with thread.session():
            raise ZeroDivisionError

    asyncio.run(main())


def test_a_session_whose_begin_was_cancelled_has_ended(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            cancelled = 0
            for turns in range(12):
                task = asyncio.ensure_future(store.thread("t").session().__aenter__())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await (await task).end("not cancelled")
                except asyncio.CancelledError:
                    cancelled += 1
                await asyncio.to_thread(eventually, lambda: not rows(store))
            assert cancelled > 0, "no cancellation fired"

    asyncio.run(main())


# Runs that died ---------------------------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_run_that_was_killed_is_found_at_once_with_where_to_go_on(url: str) -> None:
    with backstay.open(url) as store:
        with running(url, ttl=3600) as process:
            assert store.interrupted() == []
            process.kill()
            assert process.wait() == -signal.SIGKILL
        assert rows(store)[0].stored.left_us > 0  # long before its beats are overdue
        (run,) = store.interrupted()
        newest = store.thread("nightly").latest()

        assert newest is not None
        assert (run.thread_id, run.branch, run.scope) == ("nightly", "main", "")
        assert (run.owner, run.note, run.checkpoint) == ("worker-7", "import orders", newest.meta)
        assert run.started_at <= run.last_seen
        assert str(run).startswith("thread 'nightly' ('import orders') was interrupted after step 1, before 'load'")
        assert str(run).endswith("Resume it from store.thread('nightly').latest()")


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_run_that_died_before_its_first_checkpoint_is_found_too(url: str) -> None:
    with backstay.open(url) as store:
        with running(url, save=False) as process:
            process.kill()
        (run,) = store.interrupted()

        assert run.checkpoint is None
        assert "before its first checkpoint" in str(run)
        assert str(run).endswith("Start it again: it saved nothing")
        assert store.delete_all().checkpoints == 0
        assert store.interrupted() == []


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_run_that_is_merely_stopped_is_not_interrupted_although_its_beats_are_overdue(url: str) -> None:
    with backstay.open(url) as store, running(url, ttl=0.2) as process:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: rows(store)[0].stored.left_us < 0)
        assert store.interrupted() == []
        process.send_signal(signal.SIGCONT)
        eventually(lambda: rows(store)[0].stored.left_us > 0)
        process.kill()

        assert eventually(store.interrupted)[0].thread_id == "nightly"


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_run_that_ends_in_peace_is_not_listed(url: str) -> None:
    with backstay.open(url) as store, running(url) as process:
        process.communicate("go\n")

        assert process.returncode == 0
        assert store.interrupted() == []
        assert [row.reason for row in store.sessions(active=False)] == ["completed"]


HERE = this_process()
GONE = HERE._replace(started="0")
"""A process that had this one's number before."""


def begin(
    store: backstay.Store,
    thread: str,
    process: Process | str,
    *,
    branch: str = "main",
    scope: str = "",
    seen_us: int = 0,
    ttl_us: int = 3_600_000_000,
) -> None:
    """Store a session as another process would."""
    key = BranchKey("", thread, scope, branch)
    name = f"{thread}/{branch}/{process}"
    row = SessionRow(Record("session", key, name, b"", True), "worker-7", str(process), "", 0, seen_us)
    access_of(store).store.put_record(row.sealed(), ttl_us)


def test_a_process_number_that_was_used_again_is_told_from_the_run(store: backstay.Store) -> None:
    begin(store, "lives", HERE)
    begin(store, "died", GONE)

    assert [run.thread_id for run in store.interrupted()] == ["died"]


@pytest.mark.parametrize("process", ["- - 1 - elsewhere", GONE._replace(boot="another boot"), "?"])
def test_of_a_run_on_another_machine_the_beats_decide(store: backstay.Store, process: Process | str) -> None:
    begin(store, "far away", process)
    begin(store, "silent", process, ttl_us=50_000)

    assert [run.thread_id for run in eventually(store.interrupted)] == ["silent"]


def test_all_interrupted_runs_are_listed_the_one_seen_last_first(store: backstay.Store) -> None:
    for thread, seen_us in (("a", 50), ("b", 90), ("c", 1)):
        begin(store, thread, GONE, seen_us=seen_us)

    assert [run.thread_id for run in store.interrupted()] == ["b", "a", "c"]


def test_a_new_run_of_the_branch_takes_over_what_died_there_and_nothing_else(store: backstay.Store) -> None:
    begin(store, "t", GONE)
    begin(store, "t", GONE, branch="side")
    begin(store, "u", GONE)
    begin(store, "t", HERE)
    with store.thread("t").session() as session:
        ended = [(row.thread_id, row.branch, row.reason) for row in store.sessions(active=False) if row.reason]

        assert ended == [("t", "main", "taken over")]
        assert sorted((run.thread_id, run.branch) for run in store.interrupted()) == [("t", "side"), ("u", "main")]
        assert session.id in [row.id for row in store.sessions()]


def test_a_session_that_somebody_took_over_stops_beating_and_keeps_their_reason(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with thread.session(ttl=0.05) as session:
        assert end_session_by_id(access_of(store).store, "", session.id, 0, "taken over")
        eventually(lambda: access_of(store).services.heartbeat._thread is None)

    assert [row.reason for row in store.sessions(active=False)] == ["taken over"]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_does_not_end_its_parents_session(store: backstay.Store, thread: backstay.Thread) -> None:
    with thread.session() as session:
        pid = os.fork()
        if not pid:
            try:
                session.__exit__(None, None, None)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

        assert [row.id for row in store.sessions()] == [session.id]


def test_sessions_of_other_namespaces_are_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with (
        backstay.open(path, namespace="a") as one,
        backstay.open(path) as two,
        one.thread("t").session(),
    ):
        assert len(one.sessions()) == 1
        assert two.sessions() == []


def test_the_text_of_a_run_names_branch_and_scope(store: backstay.Store) -> None:
    store.thread("t", branch="side", scope="inner").save({"n": 1})
    begin(store, "t", GONE, branch="side", scope="inner")
    (run,) = store.interrupted()

    assert run.hint == "Resume it from store.thread('t', branch='side', scope='inner').latest()"
    assert "branch 'side'" in str(run)
