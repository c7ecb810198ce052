"""Runs: one answer to what runs, what waits, what died and what ended; cancelled and paused from any process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import Corrupted, Fenced, InvalidInput, NotFound, StepsExceeded
from backstay.model.runs import RunStatus
from backstay.operations.leases import is_alive, this_process
from backstay.operations.rows import Damaged
from backstay.operations.run_records import LOOP, SESSION, digest_of_input, row_of
from backstay.store.leases import UNKNOWN, BranchKey, Holder, LeaseRequest
from backstay.store.records import Record
from backstay.thread.access import access_of
from backstay.thread.runs import Run
from support.damage import flip_column
from support.postgres import PostgresServer
from support.thread.stored_runs import GONE, HERE, WORK, Claims, put_run
from support.waiting import eventually, expire

SHARED = ["sqlite", "dir", "postgres"]
"""The stores that several processes can open."""

HOUR_US = 3_600_000_000

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def only(store: backstay.Store) -> Run:
    (run,) = store.runs()
    return run


def turns(thread: backstay.Thread, count: int, **options: Any) -> None:
    """Take so many turns of a loop and leave it, unfinished."""
    with thread.loop({"n": 0}, **options) as loop:
        for turn in loop:
            if turn.iteration > count:
                break
            turn.set(n=turn.iteration)


def finish(thread: backstay.Thread, **options: Any) -> None:
    """Run a loop to its end in one turn."""
    with thread.loop({"n": 0}, **options) as loop:
        for turn in loop:
            turn.set(n=turn.state["n"] + 1)
            loop.finish()


def fail(thread: backstay.Thread, error: BaseException) -> None:
    """Leave the first turn of a loop with an error."""
    with thread.loop({"n": 0}) as loop:
        for _ in loop:
            raise error


def ask(thread: backstay.Thread, **options: Any) -> None:
    with thread.loop({"n": 0}, **options) as loop:
        for turn in loop:
            turn.set(answer=turn.ask("how many?"))
            loop.finish()


PROGRAM = """
import sys, threading, time, backstay
url, ttl, what = sys.argv[1], float(sys.argv[2]), sys.argv[3]
store = backstay.open(url)
thread = store.thread("nightly")

def report():
    while not list(store.thread("nightly").effects()):
        time.sleep(0.01)
    print("ready", flush=True)

with thread.loop({"n": 0}, ttl=ttl, owner="worker-7", name="import", pause_check_s=0) as loop:
    for turn in loop:
        if what == "sleep":
            threading.Thread(target=report).start()
            turn.sleep(3600)
        elif what == "turns":
            print("ready", flush=True)
            time.sleep(0.02)
        elif turn.iteration == 2:
            print("ready", flush=True)
            sys.stdin.readline()
            loop.finish()
        turn.set(n=turn.iteration)
print(loop.status.value, flush=True)
"""


@contextmanager
def process(url: str, ttl: float = 3600.0, what: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run a loop in a process of its own until it is killed or its standard input ends."""
    command = [sys.executable, "-c", PROGRAM, url, str(ttl), what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def killed(url: str, **options: Any) -> Iterator[None]:
    """Run the block after a process was killed in the middle of a loop."""
    with process(url, **options) as child:
        child.kill()
        assert child.wait() == -signal.SIGKILL
    yield


def put_lease(store: backstay.Store, holder: Holder | str, thread: str = "customer-42", ttl_us: int = HOUR_US) -> None:
    """Store a lease as another process would."""
    request = LeaseRequest(str(holder), f"token of {thread}", ttl_us)
    access_of(store).store.acquire(BranchKey("", thread, "", "main"), request)


# Every status -----------------------------------------------------------------------------------------------------


def test_a_loop_is_listed_while_it_runs_and_after_it_has_ended(
    store: backstay.Store, thread: backstay.Thread, clock: Any
) -> None:
    began = clock()
    with thread.loop({"n": 0}, owner="me", name="chat") as loop:
        run = only(store)
        assert (run.status, run.kind, run.graph, run.thread_id) == (RunStatus.RUNNING, "loop", "chat", thread.id)
        assert (run.branch, run.scope, run.attempts, run.step, run.epoch) == ("main", "", 1, 0, 1)
        assert (run.created_at, run.started_at, run.ended_at) == (began, began, None)
        assert run.holder is not None
        assert (run.holder.name, int(run.holder.pid)) == ("me", os.getpid())
        assert 0 < run.lease_left <= 30
        clock.step(seconds=5)
        for turn in loop:
            turn.set(n=1)
            loop.finish()
    ended = only(store)

    assert (ended.id, ended.status, ended.error, ended.step) == (run.id, RunStatus.COMPLETED, None, 1)
    assert (ended.ended_at, ended.updated_at, ended.epoch, ended.lease_left) == (clock(), clock(), 0, 0.0)
    assert {meta.run_id for meta in thread.history()} == {run.id}


def test_a_run_of_a_branch_and_scope_is_found_by_its_handle(store: backstay.Store) -> None:
    finish(store.thread("t", branch="side", scope="inner"))
    run = only(store)

    assert (run.branch, run.scope) == ("side", "inner")
    head = run.thread.latest()
    assert head is not None
    assert head.state == {"n": 1}
    assert "t@side" in str(run)


def test_a_loop_that_waits_for_a_person_is_interrupted(store: backstay.Store, thread: backstay.Thread) -> None:
    ask(thread)
    (asked,) = store.interrupts()
    run = only(store)

    assert (run.status, run.interrupts, run.wake_at) == (RunStatus.INTERRUPTED, (asked.id,), None)
    thread.decide(asked, "answer", value=7, by="ann")
    ask(thread)
    assert (only(store).id, only(store).status, only(store).attempts) == (run.id, RunStatus.COMPLETED, 2)


def test_a_question_with_a_timeout_shows_when_the_run_wakes(
    store: backstay.Store, thread: backstay.Thread, clock: Any
) -> None:
    with thread.loop({}) as loop:
        for turn in loop:
            turn.approve("pay", 1, timeout=60)

    assert only(store).wake_at == clock() + timedelta(seconds=60)
    assert "wakes at 2026-01-01 00:01:00" in str(store.runs())


def test_queued_and_sleeping_runs_are_listed(store: backstay.Store, clock: Any) -> None:
    put_run(store, "q", RunStatus.QUEUED, now_us=round(clock().timestamp() * 1e6))
    put_run(store, "s", RunStatus.SLEEPING, wake_us=90_000_000, due_us=90_000_000)
    sleeping, queued = store.runs()

    assert (queued.status, queued.started_at, queued.holder, queued.created_at) == ("queued", None, None, clock())
    assert (sleeping.status, sleeping.wake_at and sleeping.wake_at.timestamp()) == ("sleeping", 90.0)


class Left(BaseException):
    """Leaves a block as Ctrl-C and the end of a program do."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit, Left])
def test_a_loop_that_was_stopped_from_outside_is_abandoned(
    store: backstay.Store, thread: backstay.Thread, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        fail(thread, error())
    run = only(store)

    assert (run.status, run.error, run.ended_at) == (RunStatus.ABANDONED, error.__name__, None)
    finish(thread)
    assert (only(store).id, only(store).status, only(store).error) == (run.id, RunStatus.COMPLETED, None)


def test_a_loop_whose_body_was_left_early_is_abandoned(store: backstay.Store, thread: backstay.Thread) -> None:
    turns(thread, 2)
    run = only(store)

    assert (run.status, run.error, run.step, run.holder and run.holder.name) == ("abandoned", None, 2, HERE_NAME)
    turns(thread, 3)
    assert (only(store).id, only(store).attempts, only(store).step) == (run.id, 2, 3)


HERE_NAME = this_process().name


def test_a_loop_that_fails_names_the_type_of_the_error_and_never_its_message(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with pytest.raises(ValueError, match="secret"):
        fail(thread, ValueError("the secret password"))
    run = only(store)

    assert (run.status, run.error, run.ended_at is not None) == (RunStatus.FAILED, "ValueError", True)
    assert "secret" not in f"{run!r}{store.runs()}"
    finish(thread)
    assert (only(store).id, only(store).status, only(store).error) == (run.id, RunStatus.COMPLETED, None)


def test_a_loop_that_takes_too_many_turns_has_failed_and_goes_on_with_a_higher_limit(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with pytest.raises(StepsExceeded):
        turns(thread, 5, limit=2)
    assert (only(store).status, only(store).error, only(store).step) == ("failed", "StepsExceeded", 2)
    turns(thread, 5, limit=9)

    assert (only(store).status, only(store).error, only(store).step) == ("abandoned", None, 5)


def test_a_second_input_is_a_second_run(store: backstay.Store, thread: backstay.Thread) -> None:
    finish(thread)
    finish(thread, input={"n": 5})
    finish(thread)  # there is nothing left to do, so this is no run
    second, first = store.runs()

    assert (first.status, second.status, first.id != second.id) == ("completed", "completed", True)
    assert [meta.run_id for meta in thread.history()] == [second.id] * 2 + [first.id] * 2


@pytest.mark.parametrize("is_first", [True, False])
def test_the_input_of_the_unfinished_run_continues_it_and_another_one_is_refused(
    store: backstay.Store, thread: backstay.Thread, is_first: bool
) -> None:
    if not is_first:
        finish(thread)
    turns(thread, 2, input={"question": "a"})
    before = store.runs()
    for other in ({"question": "b"}, {"question": "a", "more": 1}):
        with pytest.raises(InvalidInput, match="unfinished run of loop 'loop' with another input"):
            turns(thread, 3, input=other)
    assert store.runs() == before
    turns(thread, 3, input={"question": "a"})
    newest = thread.latest()

    assert newest is not None
    assert (newest.state["n"], newest.iteration, len(store.runs())) == (3, 3, len(before))


# Processes that die -----------------------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_run_whose_process_was_killed_is_abandoned_at_once_and_continued_by_the_next(url: str) -> None:
    with backstay.open(url) as store:
        with process(url) as child:
            run = only(store)
            assert (run.status, run.graph, run.step) == (RunStatus.RUNNING, "import", 1)
            assert run.holder is not None
            assert (run.holder.name, int(run.holder.pid)) == ("worker-7", child.pid)
            assert store.runs(status="abandoned") == []
            child.kill()
            assert child.wait() == -signal.SIGKILL
        run = run.refresh()
        assert run.status is RunStatus.ABANDONED
        assert store.runs(status="abandoned") == [run]
        assert store.runs(status="running") == []
        began = time.monotonic()
        with store.thread("nightly").loop({}, wait=0) as loop:  # its lease would last for an hour
            assert (loop.state, loop.iteration) == ({"n": 1}, 1)
            assert only(store).attempts == 2
            for _ in loop:
                loop.finish()
        assert time.monotonic() - began < 30

        assert (only(store).id, only(store).status) == (run.id, RunStatus.COMPLETED)


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_process_that_lives_is_waited_for_even_if_it_does_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with backstay.open(url) as store, process(url, ttl=60) as child:
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(Fenced, match=r"'worker-7' holds the lease on branch 'main' for another \d+\.\d s"):
            store.thread("nightly").loop({}, wait=0).__enter__()
        with pytest.raises(Fenced):
            store.thread("nightly").loop({}, wait=0.2).__enter__()
        assert only(store).status is RunStatus.RUNNING
        child.send_signal(signal.SIGCONT)
        with caplog.at_level(logging.WARNING, "backstay.run"):
            caplog.clear()
            threading.Timer(0.3, child.kill).start()
            with store.thread("nightly").loop({}) as loop:
                assert loop.iteration == 1
        messages = [record.getMessage() for record in caplog.records if record.name == "backstay.run"]

        assert len(messages) == 1, "waiting is logged once"
        assert messages[0].startswith("thread 'nightly': waiting for worker-7, whose lease lasts another ")


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_sleep_goes_on_where_a_killed_process_left_it(url: str) -> None:
    with backstay.open(url) as store, killed(url, what="sleep"):
        end = next(store.thread("nightly").effects()).result
        later = end - timedelta(seconds=0.2)
    start = time.monotonic()

    def clock() -> Any:
        return later + timedelta(seconds=time.monotonic() - start)

    with backstay.open(url, clock=clock) as store, store.thread("nightly").loop({}) as loop:
        for turn in loop:
            turn.sleep(3600)  # all but the last moment of it is over
            assert (end, clock() >= end) == (next(store.thread("nightly").effects()).result, True)
            loop.finish()


def test_a_run_whose_lease_has_expired_is_abandoned_although_its_process_lives(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    loop = thread.loop({"n": 0}).__enter__()
    lease = loop._use.lease
    assert lease is not None
    lease._taken().renewal.stopped = True  # no heartbeat renews it
    expire(lease)
    eventually(lambda: only(store).status is RunStatus.ABANDONED)
    finish(store.thread(thread.id))
    next(loop).set(n="late")
    with pytest.raises(Fenced) as refused:
        next(loop)
    with suppress(Fenced):
        loop.__exit__(Fenced, refused.value, None)

    assert (only(store).status, only(store).attempts) == (RunStatus.COMPLETED, 2), "it belongs to the other one"
    newest = store.thread(thread.id).latest()
    assert newest is not None
    assert newest.state == {"n": 1}


OTHER = {"pid namespace": {"namespaces": "other"}, "host": {"host": "elsewhere"}, "label only": None}
BOOTS = {"machine": {"machine": "other"}, "host of the machine": {"host": "elsewhere"}, "no id": {"machine": UNKNOWN}}


def test_a_holder_that_is_dead_is_told_from_one_that_cannot_be_seen() -> None:
    assert is_alive(HERE) is True
    assert is_alive(GONE) is False, "its process id belongs to another process now"
    assert is_alive(HERE._replace(pid="99999999")) is False
    if HERE.machine != UNKNOWN:
        assert is_alive(HERE._replace(boot="earlier")) is False
    for change in BOOTS.values():
        assert is_alive(HERE._replace(boot="earlier", **change)) is None
    for changes in OTHER.values():
        assert is_alive(GONE._replace(**changes) if changes else Holder.parse("worker-7")) is None


@pytest.mark.parametrize("holder", ["gone", "booted again"])
def test_the_lease_of_a_dead_process_is_taken_over_at_once(
    store: backstay.Store, thread: backstay.Thread, holder: str
) -> None:
    if holder == "booted again" and HERE.machine == UNKNOWN:
        pytest.skip("this machine has no id")
    put_lease(store, GONE if holder == "gone" else HERE._replace(boot="earlier"))

    with thread.lease() as lease:
        assert lease.epoch == 2
        thread.save({"n": 1})


@pytest.mark.parametrize("change", [*OTHER, *BOOTS])
def test_the_lease_of_a_process_that_cannot_be_seen_is_respected(
    store: backstay.Store, thread: backstay.Thread, change: str
) -> None:
    if change in BOOTS:
        put_lease(store, HERE._replace(boot="earlier", **BOOTS[change]))
    else:
        changes = OTHER[change]
        put_lease(store, GONE._replace(**changes) if changes else "worker-7")
    for attempt in (thread.lease(), thread.loop({}, wait=0), thread.loop({}, wait=0.15)):
        with pytest.raises(Fenced, match="'worker-7' holds the lease"):
            attempt.__enter__()

    assert store.runs() == [], "a refused start leaves no run behind"
    assert thread.latest() is None


def test_a_lease_that_another_process_gets_first_is_not_taken_over_twice(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    put_lease(store, GONE)
    with thread.lease(owner="first"), pytest.raises(Fenced, match="'first' holds"):
        store.thread(thread.id).lease().__enter__()


@pytest.mark.parametrize(
    "text", ["", "x", "a b c d e f g", "- - - 12 - host", f"{'9 ' * 6}", "- - - -1 - host label", "\ud800 " * 7]
)
def test_the_text_of_any_holder_can_be_read(text: str) -> None:
    holder = Holder.parse(text)

    assert isinstance(holder.name, str)
    assert is_alive(holder) in (None, False)


def test_the_label_of_a_holder_may_have_spaces_and_imitate_others(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    label = f"my worker {GONE}"
    with thread.lease(owner=label), pytest.raises(Fenced) as refusal:
        store.thread(thread.id).lease().__enter__()

    assert refusal.value.owner == label
    assert Holder.parse(str(this_process(label))).label == label


def test_a_nested_loop_on_the_same_thread_is_refused_instead_of_waiting_for_itself(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with thread.loop({"n": 0}) as loop:
        for handle in (thread, store.thread(thread.id)):
            with pytest.raises(Fenced):
                handle.loop({}).__enter__()
        with store.thread("another").loop({}) as inner:
            assert inner.status == "running"
        assert only_of(store, thread.id).attempts == 1
        for _ in loop:
            loop.finish()

    assert only_of(store, thread.id).status is RunStatus.COMPLETED


def only_of(store: backstay.Store, thread: str) -> Run:
    (run,) = store.runs(thread=thread)
    return run


def test_a_nested_loop_with_await_is_refused_too(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store, store.thread("t").loop({"n": 0}) as loop:
            for handle in (loop.thread, store.thread("t")):
                with pytest.raises(Fenced):
                    await asyncio.create_task(enter(handle))
            async for _ in loop:
                loop.finish()

    async def enter(handle: backstay.AsyncThread) -> None:
        await handle.loop({}).__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["memory", "sqlite", "dir"], indirect=True)  # no child may use its parent's connection
def test_a_forked_child_does_not_own_its_parents_run(store: backstay.Store, thread: backstay.Thread) -> None:
    with thread.loop({"n": 0}) as loop:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with suppress(Fenced):
                    loop.__exit__(None, None, None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert only(store).status is RunStatus.RUNNING
        for turn in loop:
            turn.set(n=1)
            loop.finish()

    assert only(store).status is RunStatus.COMPLETED


# Refused starts ---------------------------------------------------------------------------------------------------


def test_a_loop_that_is_refused_leaves_no_run_behind(store: backstay.Store, thread: backstay.Thread) -> None:
    with thread.lease(owner="other"), pytest.raises(Fenced):
        store.thread(thread.id).loop({"n": 0}, wait=0).__enter__()
    with pytest.raises(backstay.EncodeError):
        thread.loop({"n": object()}).__enter__()

    assert store.runs() == []
    assert store.count_runs() == {}
    assert thread.latest() is None
    assert access_of(store).store.leases("", None, False) == []


def test_a_loop_whose_input_was_not_stored_needs_it_again(store: backstay.Store, thread: backstay.Thread) -> None:
    finish(thread)
    digest = digest_of_input({"n": 7})
    died = put_run(
        store, thread.id, RunStatus.RUNNING, kind=LOOP, name="loop", holder=GONE, token="gone", input_digest=digest
    )
    with pytest.raises(InvalidInput, match="loop 'loop' whose process died before its input was stored"):
        thread.loop({"n": 0}).__enter__()
    finish(thread, input={"n": 7})
    newest = thread.latest()

    assert newest is not None
    assert (newest.state, newest.run_id) == ({"n": 8}, died.id)


@pytest.mark.parametrize("given", [None, {"log": ["hi"]}], ids=["no input", "same input"])
def test_an_input_is_taken_once_whatever_other_code_saves_on_top(
    store: backstay.Store, thread: backstay.Thread, given: dict[str, Any] | None
) -> None:
    loop = thread.loop({"log": []}, input={"log": ["hi"]}).__enter__()
    next(loop).append(log=["one"])
    next(loop)
    loop.__exit__(None, None, None)
    other = store.thread(thread.id)
    for number in range(2):
        other.append({"log": [f"other {number}"]})
    with store.thread(thread.id).loop({"log": []}, input=given) as again:
        for turn in again:
            turn.append(log=["two"])
            again.finish()

    assert again.state["log"] == ["hi", "one", "other 0", "other 1", "two"]
    assert [run.status for run in store.runs()] == ["completed"]


@pytest.mark.parametrize("status", [RunStatus.QUEUED, RunStatus.INTERRUPTED, RunStatus.FAILED, RunStatus.ABANDONED])
def test_a_loop_that_is_refused_does_not_change_the_unfinished_run_of_a_graph(
    store: backstay.Store, thread: backstay.Thread, status: RunStatus
) -> None:
    before = put_run(store, thread.id, status)
    with pytest.raises(InvalidInput, match=f"unfinished run of graph 'work' \\({status.value}\\)"):
        thread.loop({"n": 0}).__enter__()

    assert row_of(found(store, before.stored)) == before
    assert access_of(store).store.leases("", None, False) == []


def found(store: backstay.Store, record: Record) -> Record:
    stored = access_of(store).store.record("run", record.branch, record.key)
    assert stored is not None
    return stored


# Lists ------------------------------------------------------------------------------------------------------------


def fill(store: backstay.Store) -> None:
    for number, status in enumerate(RunStatus):
        put_run(store, f"t{number}", status, name="work" if number % 2 else "play", holder=HERE)
        put_run(store, f"u{number}", status, kind=LOOP, name="loop", branch="side", scope="inner")


def test_runs_are_listed_newest_first_by_status_graph_and_thread(store: backstay.Store) -> None:
    fill(store)
    every = store.runs()

    assert [run.thread_id for run in every] == [f"{name}{number}" for number in reversed(range(8)) for name in "ut"]
    for status in RunStatus:
        if status not in (RunStatus.RUNNING, RunStatus.ABANDONED):
            listed = store.runs(status=status)
            assert listed == store.runs(status=status.value) == [run for run in every if run.status is status]
            assert len(listed) == 2
    assert store.runs(graph="work") == [run for run in every if run.graph == "work"]
    assert store.runs(graph="loop", status="failed") == [run for run in every if run.thread_id == "u6"]
    assert [run.thread_id for run in store.runs(thread="t3")] == ["t3"]
    assert store.runs(thread="none") == store.runs(graph="none") == store.runs(thread="t3", graph="loop") == []


def test_a_run_without_a_lease_runs_as_long_as_its_process(store: backstay.Store) -> None:
    for name, holder in (("here", str(HERE)), ("gone", str(GONE)), ("far", str(GONE._replace(host="elsewhere")))):
        put_run(store, name, RunStatus.RUNNING, holder=holder)
    put_run(store, "left", RunStatus.ABANDONED)

    assert [run.thread_id for run in store.runs(status="running")] == ["far", "here"]
    assert [run.thread_id for run in store.runs(status="abandoned")] == ["left", "gone"]
    for wanted in ("worker-7", HERE.host, f"{HERE.host}:{HERE.pid}"):
        assert "here" in [run.thread_id for run in store.runs(holder=wanted)]
        assert "gone" not in [run.thread_id for run in store.runs(holder=wanted)]
    assert [run.thread_id for run in store.runs(holder="elsewhere")] == ["far"]
    assert [run.thread_id for run in store.runs(holder="worker-7", status="running")] == ["far", "here"]
    assert store.runs(holder="worker-7", status="completed") == store.runs(holder="nobody") == []


@pytest.mark.parametrize("wanted", [{}, {"status": "abandoned"}, {"graph": "work"}, {"thread": "t"}, {"holder": "w"}])
def test_pages_follow_each_other_without_a_gap(store: backstay.Store, wanted: dict[str, Any]) -> None:
    for number in range(12):  # of each three, one died, one lives and one was left
        statuses = (RunStatus.RUNNING, RunStatus.RUNNING, RunStatus.ABANDONED)
        holder = (GONE if number % 3 == 0 else HERE)._replace(label="w")
        put_run(store, "t", statuses[number % 3], id=f"r{number:02}", holder=holder)
    every = store.runs(**wanted)
    paged: list[Run] = []
    while page := store.runs(limit=2, after=paged[-1] if paged else None, **wanted):
        assert len(page) <= 2
        paged += page

    assert paged == every
    assert len(every) == {"status": 8, "holder": 4}.get(next(iter(wanted), ""), 12)


def test_runs_are_printed_as_a_table(store: backstay.Store, thread: backstay.Thread, clock: Any) -> None:
    ask(thread, name="chat")
    clock.step(minutes=1)
    put_run(store, "order-7", RunStatus.FAILED, error="ValueError", attempts=3, branch="side")
    put_run(store, "s", RunStatus.COMPLETED, kind=SESSION, name=SESSION, note="nightly", ended_us=1)

    assert str(store.runs()) == repr(store.runs()) == TABLE
    assert repr(store.runs()[2]) == (
        "<Run of loop chat on thread customer-42: interrupted at step 0 since 2026-01-01 00:00:00, attempt 1; "
        "waits for 1 answer>"
    )
    assert str(store.runs(thread="none")) == "STATUS  GRAPH  THREAD  STEP  HOLDER  TRY  SINCE  NOTE"


TABLE = """\
STATUS       GRAPH  THREAD        STEP  HOLDER  TRY  SINCE                NOTE
completed    -      s             -     -       0    1970-01-01 00:00:00  nightly
failed       work   order-7@side  -     -       3    1970-01-01 00:00:00  ValueError
interrupted  chat   customer-42   0     -       1    2026-01-01 00:00:00  waits for 1 answer"""


def test_text_of_other_programs_cannot_break_the_table(store: backstay.Store) -> None:
    put_run(store, "t", RunStatus.FAILED, name="a\nb\x1b[31m", note="one\r\ntwo", error="E\x07", reason="x\u202ey")
    table = str(store.runs())

    assert len(table.splitlines()) == 2
    assert not [char for char in table if not char.isprintable() and char != "\n"]


def test_runs_are_counted_by_status(store: backstay.Store) -> None:
    fill(store)
    finish(store.thread("over"))

    assert store.count_runs() == dict.fromkeys(("queued", "running", "interrupted", "sleeping", "abandoned"), 2)


def test_what_cannot_be_asked_is_refused(store: backstay.Store) -> None:
    wrong: list[dict[str, Any]] = [
        {"status": "begun"},
        {"status": 5},
        {"graph": 5},
        {"thread": b"t"},
        {"holder": 1},
        {"limit": 0},
        {"limit": True},
        {"limit": 10**6},
        {"after": "r1"},
        {"on_damage": "skip"},
    ]
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            store.runs(**arguments)


def test_runs_of_other_namespaces_are_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with backstay.open(path, namespace="a") as one, backstay.open(path) as two:
        put_run(one, "t")
        with one.thread("u").loop({}):
            assert len(one.runs()) == 2
            assert (two.runs(), two.count_runs(), two.claim([WORK])) == ([], {}, [])


def test_runs_are_deleted_with_their_thread(store: backstay.Store) -> None:
    for name in ("a", "b"):
        finish(store.thread(name))
        put_run(store, name)
    run = store.runs(thread="a")[0]
    store.thread("a").delete()

    assert [each.thread_id for each in store.runs()] == ["b", "b"]
    with pytest.raises(NotFound, match="deleted"):
        run.refresh()
    store.delete_all()
    assert store.runs() == []


# Damage -----------------------------------------------------------------------------------------------------------


def damage(store: backstay.Store, thread: str) -> None:
    """Change a bit of the newest run of a thread, behind the store's back."""
    backend = access_of(store).store
    stored = backend.run(BranchKey("", thread, "", "main"))
    assert stored is not None
    body = stored.record.body
    backend.put_record(replace(stored.record, body=body[:-1] + bytes([body[-1] ^ 1])))


@pytest.fixture
def damaged(url: str) -> Iterator[backstay.Store]:
    with backstay.open(url) as store:
        for name in ("a", "b", "c"):
            put_run(store, name)
        damage(store, "b")
        yield store


def test_a_damaged_run_is_marked_in_lists_and_the_others_are_listed(damaged: backstay.Store) -> None:
    questions: list[dict[str, Any]] = [{}, {"status": "queued"}, {"graph": "work"}]
    for wanted in questions:
        with pytest.raises(Corrupted):
            damaged.runs(**wanted)
        marked = damaged.runs(on_damage="mark", **wanted)
        assert [isinstance(run, Damaged) for run in marked] == [False, True, False]
        assert len(str(marked).splitlines()) == 4

    assert [run.thread_id for run in damaged.runs(thread="a")] == ["a"]
    assert damaged.count_runs() == {"queued": 3}
    assert not damaged.check()


def test_a_damaged_run_is_not_claimed_and_the_others_are(damaged: backstay.Store) -> None:
    claimed = damaged.claim([WORK], 5)

    assert {lease.thread.id for lease in claimed} == {"a", "c"}
    for lease in claimed:
        lease.release()


def test_a_damaged_run_is_not_run_over(damaged: backstay.Store) -> None:
    with pytest.raises(Corrupted, match="run "):
        damaged.thread("b").loop({}).__enter__()

    assert access_of(damaged).store.leases("", None, False) == []
    finish(damaged.thread("other"))
    damaged.thread("b").save({"n": 1})


def test_a_run_that_is_damaged_while_it_runs_ends_with_its_lease_released(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        loop = thread.loop({"n": 0}).__enter__()
        next(loop).set(n=1)
        damage(store, "t")
        loop.finish()
        with pytest.raises(Corrupted):
            loop.__exit__(None, None, None)
        newest = thread.latest()

        assert newest is not None
        assert newest.state == {"n": 1}, "what was saved stays"
        assert access_of(store).store.leases("", None, False) == [], "nobody must wait for it"


@pytest.mark.timeout(30)
def test_a_run_that_its_id_does_not_find_is_damage_and_nobody_tries_for_ever(
    postgres: PostgresServer, postgres_url: str
) -> None:
    graph = backstay.Graph("job")
    graph.node("work", lambda state: {"n": 1})
    graph.start("work")
    graph.end("work")
    with backstay.open(postgres_url) as store, postgres.connect() as connection:
        for name in "ab":
            graph.submit(store.thread(name), {"n": 0})
        connection.execute(f"SET search_path = {postgres_url.rpartition('schema=')[2].partition('&')[0]}")
        (run,) = store.runs(thread="a")
        connection.execute("UPDATE record SET id = '\\x01' WHERE key = %s", (run.id,))

        with pytest.raises(NotFound):
            run.cancel()
        with pytest.raises(Corrupted, match="does not match its digest"):
            graph.run_sync(store.thread("a"), {"n": 0})
        assert [isinstance(entry, Damaged) for entry in store.runs(thread="a", on_damage="mark")] == [True]
        assert [lease.thread.id for lease in store.claim([graph], 9)] == ["b"]
        assert [finding.kind for finding in store.check().findings] == ["damaged"]


def test_a_damaged_checkpoint_fails_its_run_and_the_others_are_claimed(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with backstay.open(path) as store:
        for name in ("a", "b", "c"):
            store.thread(name).save({"n": 1}, id=name)
            put_run(store, name)
    flip_column(path, "checkpoint", "notes", "id = 'a'")
    with backstay.open(path) as store:
        leases = store.claim([WORK], 1) + store.claim([WORK], 5)

        assert sorted(lease.thread.id for lease in leases) == ["b", "c"]
        assert (only_of(store, "a").status, only_of(store, "a").error) == ("failed", "Corrupted")
        for lease in leases:
            lease.release()


# Cancelling, pausing, reading again -------------------------------------------------------------------------------


def cancelled_head(store: backstay.Store, thread: str) -> tuple[Any, ...]:
    head = store.thread(thread).latest()
    assert head is not None
    return head.state, head.trigger, head.is_over


@pytest.mark.parametrize("by", [{}, {"by": "ann"}])
def test_a_queued_run_is_cancelled_at_once(store: backstay.Store, clock: Any, by: dict[str, str]) -> None:
    put_run(store, "t")
    clock.step(seconds=3)
    run = only(store).cancel("not needed", **by)

    assert (run.status, run.reason, run.ended_at, run.attempts) == ("cancelled", "not needed", clock(), 0)
    assert (store.claim([WORK]), store.count_runs(), store.thread("t").latest()) == ([], {}, None)
    assert access_of(store).store.leases("", None, False) == []


@pytest.mark.parametrize("left", ["abandoned", "interrupted", "failed"])
def test_a_run_that_no_process_executes_is_cancelled_at_once(
    store: backstay.Store, thread: backstay.Thread, left: str
) -> None:
    if left == "interrupted":
        ask(thread)
    else:
        turns(thread, 0)
    if left == "failed":
        with pytest.raises(ZeroDivisionError):
            fail(thread, ZeroDivisionError())
    assert only(store).status == left
    run = only(store).cancel("enough")

    assert (run.status, run.reason, run.interrupts) == ("cancelled", "enough", ())
    assert cancelled_head(store, thread.id) == ({"n": 0}, "cancelled", True)
    assert list(store.interrupts()) == [], "its questions are closed"
    with pytest.raises(InvalidInput, match="is over"):
        run.cancel()
    finish(store.thread(thread.id), input={"n": 4})
    assert [each.status for each in store.runs()] == ["completed", "cancelled"]
    newest = thread.latest()
    assert newest is not None
    assert newest.state == {"n": 5}


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_run_whose_process_was_killed_is_cancelled_at_once(url: str) -> None:
    with backstay.open(url) as store, killed(url):
        run = only(store).cancel("enough")

        assert (run.status, cancelled_head(store, "nightly")) == ("cancelled", ({"n": 1}, "cancelled", True))


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_running_loop_of_another_process_is_cancelled_between_two_turns(url: str) -> None:
    with backstay.open(url) as store, process(url, what="turns") as child:
        asked = only(store).cancel("enough", by="ann")
        assert asked.status in (RunStatus.RUNNING, RunStatus.CANCELLED)
        assert child.stdout is not None
        assert child.stdout.read().splitlines()[-1] == "cancelled"
        assert child.wait() == 0

        run = only(store)
        assert (run.status, run.reason, run.error) == (RunStatus.CANCELLED, "enough", None)
        assert cancelled_head(store, "nightly")[1:] == ("cancelled", True)


def test_a_turn_that_runs_while_its_loop_is_cancelled_is_stored_first(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with thread.loop({"n": 0}, pause_check_s=0) as loop:
        for turn in loop:
            turn.set(n=turn.iteration)
            if turn.iteration == 2:
                worker = threading.Thread(target=lambda: only(store).cancel("enough"))
                worker.start()
                worker.join()
                assert only(store).status is RunStatus.RUNNING

    assert (loop.status, cancelled_head(store, thread.id)) == ("cancelled", ({"n": 2}, "cancelled", True))
    assert (only(store).status, only(store).reason) == ("cancelled", "enough")
    with thread.loop({"n": 0}) as loop:  # there is nothing left to do
        assert list(loop) == []


def test_a_loop_that_finishes_before_it_sees_the_request_has_completed(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with thread.loop({"n": 0}, pause_check_s=60) as loop:
        for turn in loop:
            turn.set(n=1)
            only(store).cancel("too late")
            loop.finish()

    assert (only(store).status, only(store).reason) == ("completed", "")


def test_a_request_to_cancel_outlives_the_process_that_did_not_see_it(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    with thread.loop({"n": 0}, pause_check_s=60) as loop:
        for _ in loop:
            only(store).cancel("enough")
            break
    assert only(store).status is RunStatus.ABANDONED
    with thread.loop({"n": 0}) as loop:
        assert list(loop) == []

    assert (only(store).status, only(store).reason) == ("cancelled", "enough")


def test_an_older_run_that_never_ended_is_cancelled_too(store: backstay.Store, thread: backstay.Thread) -> None:
    """Two programs may have queued a run each before one of them could see the other's."""
    put_run(store, thread.id, id="old")
    put_run(store, thread.id, id="new")
    new, old = store.runs()
    assert old.cancel("double").status is RunStatus.CANCELLED

    assert new.refresh().status is RunStatus.QUEUED
    assert store.count_runs() == {"queued": 1}


def test_a_run_whose_branch_another_writer_holds_is_not_cancelled_under_its_hands(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    turns(thread, 1)
    run = only(store)
    with thread.lease(owner="writer"):
        with pytest.raises(Fenced, match="'writer' holds"):
            run.cancel()
        assert run.refresh().status is RunStatus.ABANDONED
    assert run.cancel().status is RunStatus.CANCELLED


def test_a_cancelled_run_that_is_claimed_meanwhile_is_ended_by_the_claim(store: backstay.Store) -> None:
    put_run(store, "t")
    (lease,) = store.claim([WORK], ttl=0.05, heartbeat=False)
    lease.run.cancel("enough")
    eventually(lambda: only(store).status is RunStatus.ABANDONED)

    assert store.claim([WORK]) == []
    assert (only(store).status, only(store).reason) == ("cancelled", "enough")


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_a_run_that_is_over_cannot_be_cancelled(store: backstay.Store, status: str) -> None:
    put_run(store, "t", RunStatus(status), ended_us=1)
    with pytest.raises(InvalidInput, match=f"is over \\({status}\\)"):
        only(store).cancel()
    for wrong in ({"by": ""}, {"by": 5}, {"reason": 5}, {"reason": "x" * 2000}):
        arguments: dict[str, Any] = dict(wrong)
        with pytest.raises(InvalidInput):
            only(store).cancel(**arguments)


def test_a_run_is_paused_until_a_person_decides(store: backstay.Store, thread: backstay.Thread) -> None:
    with thread.loop({"n": 0}, pause_check_s=0) as loop:
        for turn in loop:
            turn.set(n=turn.iteration)
            asked = only(store).pause("let me look", by="ann")
    run = only(store)
    assert (loop.status, run.status, run.interrupts, run.step) == ("interrupted", "interrupted", (asked.id,), 1)
    thread.decide(asked, "approve", by="ann")
    finish(thread, pause_check_s=0)

    assert (only(store).id, only(store).status) == (run.id, "completed")


def test_a_run_is_read_again(store: backstay.Store, thread: backstay.Thread) -> None:
    with thread.loop({"n": 0}) as loop:
        run = only(store)
        for turn in loop:
            turn.set(n=1)
            loop.finish()
    assert run.status is RunStatus.RUNNING
    assert run.refresh() == only(store)
    finish(thread, input={"n": 5})

    assert (run.refresh().status, run.refresh().id) == ("completed", run.id)


def test_runs_work_the_same_with_await(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            async with store.thread("t").loop({"n": 0}, pause_check_s=0) as loop:
                (run,) = await store.runs(status="running")
                async for _ in loop:
                    assert (await run.cancel("enough", by="ann")).status is RunStatus.RUNNING
            assert ((await run.refresh()).status, loop.status) == ("cancelled", "cancelled")
            head = await run.thread.latest()
            assert head is not None
            assert head.trigger == "cancelled"
            async with store.thread("u").loop({"n": 0}, pause_check_s=0) as loop:
                async for _ in loop:
                    (run,) = await store.runs(thread="u")
                    asked = await run.pause()
            assert (await run.refresh()).interrupts == (asked.id,)
            assert await store.count_runs() == {"interrupted": 1}
            assert len(str(await store.runs()).splitlines()) == 3
            with pytest.raises(InvalidInput, match="over"):
                await (await store.runs(thread="t"))[0].cancel()

    asyncio.run(main())


def test_a_loop_whose_start_was_cancelled_leaves_no_run_that_runs(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            cancelled = 0
            for count in range(12):
                task = asyncio.ensure_future(store.thread("t").loop({"n": 0}).__aenter__())
                for _ in range(count):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await (await task).__aexit__(None, None, None)
                except asyncio.CancelledError:
                    cancelled += 1
                assert await store.runs(status="running") == []
                assert len(await store.runs()) <= 1
            assert cancelled > 0, "no cancellation fired"

    asyncio.run(main())


# Claims -----------------------------------------------------------------------------------------------------------


def test_a_run_that_kills_its_workers_again_and_again_has_failed(store: backstay.Store) -> None:
    put_run(store, "t")
    for attempt in range(3):
        (lease,) = store.claim([WORK], attempts=3, heartbeat=False)
        assert lease.run.attempts == attempt + 1
        expire(lease)
        eventually(lambda: only(store).status is RunStatus.ABANDONED)
    assert store.claim([WORK], attempts=3) == []

    assert (only(store).status, only(store).error, only(store).attempts) == ("failed", "Killed", 4)


def test_a_queued_run_without_an_input_has_failed(store: backstay.Store) -> None:
    put_run(store, "t", input=None)
    assert store.claim([WORK]) == []

    assert (only(store).status, only(store).error) == ("failed", "NoInput")


def test_loops_and_other_graphs_are_not_claimed(store: backstay.Store, thread: backstay.Thread) -> None:
    turns(thread, 1)
    put_run(store, "t", fingerprint="2")

    assert store.claim([WORK, Claims(("loop", ""))], 5) == []
    (lease,) = store.claim([Claims(("work", "2"), ("work", "3"))], 5)
    lease.release()


@pytest.mark.crash
@pytest.mark.parametrize("url", SHARED, indirect=True)
def test_a_claim_takes_the_runs_of_a_killed_worker_at_once(url: str) -> None:
    program = (
        "import sys, backstay; sys.path.insert(0, sys.argv[2])\n"
        "from support.thread.stored_runs import WORK\n"
        "leases = backstay.open(sys.argv[1]).claim([WORK], 5, ttl=3600)\n"
        "print(len(leases), flush=True); sys.stdin.readline()"
    )
    with backstay.open(url) as store:
        for name in ("a", "b"):
            put_run(store, name)
        tests = str(Path(__file__).parents[1])
        with subprocess.Popen(
            [sys.executable, "-c", program, url, tests], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "2\n"
            assert store.claim([WORK], 5) == []
            child.kill()
        leases = eventually(lambda: store.claim([WORK], 5))

        assert sorted(lease.thread.id for lease in leases) == ["a", "b"]
        assert {(lease.run.attempts, lease.epoch) for lease in leases} == {(2, 2)}
        for lease in leases:
            lease.release()
