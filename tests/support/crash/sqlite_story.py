"""Stories on a SQLite store, for power cuts: everything that writes, and all that a store contains.

``run`` tells a story to standard output, one line before each step and one after it, so that a log of its system calls
shows what was acknowledged when. A step may be done by a thread or a process next to others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

import backstay
from backstay.model.checkpoint import Write
from backstay.model.runs import Outcome, RunStatus
from backstay.operations.run_records import GRAPH, new_row, row_of
from backstay.store.base import Backend
from backstay.store.leases import BranchKey, Holder, LeaseRequest
from backstay.store.records import Record, RunQuery
from backstay.thread.access import access_of
from support.crash.directory_story import Story, text
from support.processes import ended_well, forked

THREADS = 4
SAVES_A_THREAD = 4
LARGE = hashlib.shake_128(b"large").digest(4_300_000)
"""More than SQLite's log takes before it is folded into the database: 1,000 pages. It cannot be compressed."""

COPY = "copy.db"
DAY_US = 86_400_000_000
SHOWN_BYTES_MAX = 100_000

Content = dict[tuple[str, ...], str]
Steps = Iterator[tuple[str, Callable[[], object]]]


def fixed_clock() -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC)


class Teller(Story):
    """The store that a story is about. One in memory is never closed, since it would forget everything."""

    def told(self, step: str, function: Callable[[], object]) -> None:
        """Do a step and say so, as its caller sees it."""
        self._tell(f"begin {step}\n")
        function()
        self._tell(f"done {step}\n")

    def backup(self) -> None:
        """Make a copy next to the store."""
        if self.url != "memory:":
            self.store.backup(os.path.join(os.path.dirname(self.url), COPY))

    def _tell(self, line: str) -> None:
        if self.url != "memory:":
            os.write(1, line.encode())

    def open(self) -> str:
        if self.url != "memory:" or not hasattr(self, "store"):
            self.store = backstay.open(self.url, clock=fixed_clock)
        self.thread = self.store.thread("story")
        self.side = self.store.thread("story", branch="what-if")
        return ""

    def close(self) -> str:
        if self.url != "memory:":
            self.store.close()
        return ""


# Stories ------------------------------------------------------------------------------------------------------------


def _story(teller: Teller) -> Steps:
    """Do a little of everything: see ``Story``, which is told about a directory store too."""
    yield from teller.steps()


def _records(teller: Teller) -> Steps:
    """Pending writes, interrupts, decisions, effects, leases and their epochs, and runs that change with them."""

    def fail(error: Exception) -> None:
        with contextlib.suppress(type(error)):
            teller.thread.effect(type(error).__name__, _raising, error)

    def ask(name: str) -> None:
        teller.thread.interrupt(f"r{name}", payload={"amount": text(name, 200)}, id=f"question-{name}")

    def decide(decision: str) -> None:
        teller.thread.decide(next(iter(teller.thread.interrupts())), decision, by="ann")

    def consume() -> None:
        teller.thread.consume(next(iter(teller.thread.interrupts())), by="worker")

    def settle() -> None:
        unknown = next(each for each in teller.thread.effects() if each.key == "TimeoutError")
        teller.thread.settle(unknown, Outcome.done("sent"), by="ann")

    def lease() -> None:
        with teller.thread.lease(owner="first", ttl=60.0, heartbeat=False):
            teller.thread.append({"log": ["under a lease"]}, id="r4")

    def hold() -> None:
        teller.store.thread("held").lease(owner="holder", ttl=86_400.0, heartbeat=False).__enter__()

    def write(value: str, replace: bool) -> None:
        teller.thread.write("r1", [Write(f"task-{n}", n, "out", text(value, 300)) for n in range(3)], replace=replace)

    runs = RunVerbs(teller)
    yield "open", teller.open
    yield "r1", lambda: teller.thread.save({"log": [text("r", 400)]}, id="r1")
    yield "writes", lambda: write("early", replace=False)
    yield "writes again", lambda: write("late", replace=True)
    yield "ask", lambda: ask("1")
    yield "decide", lambda: decide("approve")
    yield "consume", consume
    yield "effect", lambda: teller.thread.effect("mail", _sent, "ann")
    yield "effect fails", lambda: fail(ValueError("no such address"))
    yield "effect is unknown", lambda: fail(TimeoutError("no answer"))
    yield "settle", settle
    yield "r2", lambda: teller.thread.append({"log": ["x"]}, id="r2")
    yield "ask again", lambda: ask("2")
    yield from runs.steps()
    yield "lease", lease
    yield "lease again", lambda: teller.thread.lease(owner="second", ttl=60.0, heartbeat=False).__enter__()
    yield "hold", hold
    yield "reject", lambda: decide("reject")
    yield "close", teller.close


def _claimed(run: Record) -> Record:
    return replace(row_of(run), status=RunStatus.RUNNING, due_us=None, note="claimed").sealed()


class RunVerbs:
    """Each verb that stores a run with something else: a kill must leave both as before, or both as after."""

    def __init__(self, teller: Teller) -> None:
        self.teller = teller

    @property
    def backend(self) -> Backend:
        return access_of(self.teller.store).store

    def run(self, name: str, status: RunStatus, due_us: int | None = None) -> Record:
        """Return the run of a thread as it is next."""
        branch = BranchKey("", name, "", "main")
        stored = self.backend.record("run", branch, f"run-{name}")
        row = new_row(branch, f"run-{name}", GRAPH, "job", 0, "1") if stored is None else row_of(stored)
        return replace(row, status=status, due_us=due_us, note=f"{status} {text(name, 200)}").sealed()

    def queue(self) -> None:
        self.backend.put_record(self.run("queue", RunStatus.QUEUED, 5))

    def start(self) -> None:
        run = self.run("start", RunStatus.RUNNING)
        self.backend.acquire(run.branch, LeaseRequest("starter", "token-start", DAY_US), run)

    def end(self) -> None:
        run = self.run("start", RunStatus.COMPLETED)
        self.backend.release(run.branch, 1, "token-start", run)

    def wake(self) -> None:
        self.backend.put_record(self.run("other", RunStatus.FAILED), None, self.run("queue", RunStatus.QUEUED, 3))

    def claim(self) -> None:
        request = LeaseRequest("claimer", "token-claim", DAY_US)
        self.backend.claim("", [("job", "1")], 5, request, 9, (), _claimed)

    def drop(self) -> None:
        self.backend.drop_records([self.run("start", RunStatus.COMPLETED)])

    def steps(self) -> Steps:
        yield "queue a run", self.queue
        yield "start a run", self.start
        yield "end a run", self.end
        yield "wake a run", self.wake
        yield "claim a run", self.claim
        yield "drop a run", self.drop


def _raising(error: Exception) -> None:
    raise error


def _sent(to: str) -> str:
    return f"sent to {to}"


def _retention(teller: Teller) -> Steps:
    """Prune, delete and compact, and what was deleted stays deleted."""
    yield "open", teller.open
    for number in range(1, 9):
        state = {"log": [text(f"{n}", 500) for n in range(number)], "doc": text(f"doc {number // 3}", 6000)}
        yield f"p{number}", lambda state=state, number=number: teller.thread.save(state, id=f"p{number}")  # type: ignore[misc]
    yield "fork", lambda: teller.thread.fork("p4", branch="what-if", set={"n": 1}, id="pf")
    yield "tag", lambda: teller.thread.tag("p2", "good")
    yield "untagged", lambda: teller.thread.untag("p2", "good")
    yield "other", lambda: teller.store.thread("other").save({"doc": text("other", 20_000)}, id="po")
    yield "prune", lambda: teller.thread.prune(backstay.Keep(last=2))
    yield "p9", lambda: teller.thread.append({"log": ["after prune"]}, id="p9")
    yield "delete other", lambda: teller.store.thread("other").delete()
    yield "compact", lambda: teller.store.compact()
    yield "delete head", lambda: teller.thread.delete_checkpoint("p9")
    yield "close", teller.close
    yield "reopen", teller.open
    yield "p10", lambda: teller.thread.append({"log": ["after all"]}, id="p10")
    yield "delete all", lambda: teller.store.delete_all()
    yield "anew", lambda: teller.store.thread("story").save({"n": 1}, id="p11")
    yield "end", teller.close


def _group(teller: Teller) -> Steps:
    """Several threads save at the same moment, and share syncs."""

    def save_many(name: str, start: threading.Barrier) -> None:
        thread = teller.store.thread(name)
        start.wait()
        for number in range(SAVES_A_THREAD):
            teller.told(f"{name}.{number}", lambda: thread.append({"log": [text(name, 700)]}, id=f"{name}.{number}"))  # noqa: B023

    def all_at_once() -> None:
        start = threading.Barrier(THREADS)
        savers = [threading.Thread(target=save_many, args=(f"g{n}", start)) for n in range(THREADS)]
        for saver in savers:
            saver.start()
        for saver in savers:
            saver.join()

    yield "open", teller.open
    yield "all", all_at_once
    yield "close", teller.close


def _processes(teller: Teller) -> Steps:
    """Two processes save; one opens the store that the other has open, and closes it last."""

    def save_many(name: str) -> None:
        thread = teller.store.thread(name)
        for number in range(2 * SAVES_A_THREAD):
            teller.told(f"{name}.{number}", lambda: thread.append({"log": [text(name, 700)]}, id=f"{name}.{number}"))  # noqa: B023

    def other_process() -> None:
        teller.told("open in the other", teller.open)
        save_many("other")
        teller.told("close in the other", teller.close)

    def both() -> None:
        if teller.url == "memory:":
            save_many("other")
            save_many("mine")
            return
        other = forked(other_process)
        save_many("mine")
        teller.close()
        assert ended_well(other)

    yield "open", teller.open
    yield "both", both
    yield "reopen", teller.open
    yield "end", teller.close


def _large(teller: Teller) -> Steps:
    """Fill the log, so that it is folded into the database and written from its start again."""
    yield "open", teller.open
    yield "l1", lambda: teller.thread.save({"log": ["a"], "n": 1}, id="l1")
    yield "l2", lambda: teller.thread.append({"log": ["b"]}, set={"doc": LARGE}, id="l2")
    for number in range(3, 8):
        yield f"l{number}", lambda number=number: teller.thread.append({"log": [f"{number}"]}, id=f"l{number}")  # type: ignore[misc]
    yield "close", teller.close


def _backup(teller: Teller) -> Steps:
    """Make a copy of the store while it is open."""
    yield "open", teller.open
    yield "b1", lambda: teller.thread.save({"log": [text("b", 5000)]}, id="b1")
    yield "backup", teller.backup
    yield "b2", lambda: teller.thread.append({"log": ["after the backup"]}, id="b2")
    yield "close", teller.close


def _again(teller: Teller) -> Steps:
    """Open a store that a power cut left, save, and close it."""
    yield "open", teller.open
    yield "save", lambda: save_after(teller.store)
    yield "close", teller.close


def _mapped(teller: Teller) -> Steps:
    """Read the database through mapped memory, as no store of ours does."""

    def read() -> None:
        with contextlib.closing(sqlite3.connect(teller.url)) as connection:
            connection.execute(f"PRAGMA mmap_size={1 << 20}").fetchall()
            connection.execute("PRAGMA integrity_check").fetchall()

    yield "open", teller.open
    yield "close", teller.close
    yield "read", read


STORIES: dict[str, Callable[[Teller], Steps]] = {
    "story": _story,
    "records": _records,
    "retention": _retention,
    "group": _group,
    "processes": _processes,
    "large": _large,
    "backup": _backup,
    "again": _again,
    "mapped": _mapped,
}
CONCURRENT = {"group", "processes"}
"""In these the order of steps differs each time."""


def run(url: str, name: str) -> None:
    """Tell a story."""
    teller = Teller(url)
    for step, function in STORIES[name](teller):
        teller.told(step, function)


# What a store contains ----------------------------------------------------------------------------------------------


def contents_in_memory(name: str) -> list[Content]:
    """Return what a store contains after each step of a story: a store in memory, so that no disk is involved."""
    teller, found = Teller("memory:"), []
    for _, function in STORIES[name](teller):
        function()
        found.append(content_of(teller.store))
    return found


def content_of(store: backstay.Store) -> Content:
    """Return everything in a store that a caller can see, but for random ids, process ids and remaining times."""
    found: Content = {}
    for head in store.threads():
        thread = store.thread(head.thread_id)
        for meta in thread.history(branch="*"):
            checkpoint = store.get(meta.id)
            assert checkpoint is not None
            shown = {key: value for key, value in vars(checkpoint).items() if not key.startswith("_")}
            # The digest, which was compared with the state just now, covers it; so a large one need not be shown.
            state = checkpoint.state if meta.size < SHOWN_BYTES_MAX else None
            found["checkpoint", meta.id] = repr(sorted((shown | {"state": state}).items()))
        for branch in thread.branches():
            # Stores number branches differently: some count threads too.
            found["branch", thread.id, branch.key.name] = repr(replace(branch, number=0))
        for interrupt in thread.interrupts(pending=False):
            found["interrupt", thread.id, interrupt.id] = repr(dataclasses.asdict(interrupt))
        for effect in thread.effects():
            found["effect", thread.id, effect.key] = repr(dataclasses.asdict(effect) | {"owner": ""})
    for run in access_of(store).store.runs(RunQuery("")):
        record, lease = run.record, run.lease
        held = None if lease is None else (lease.owner, lease.epoch)
        found["run", record.branch.thread, record.key] = repr((record.run, record.body, record.version, held, run.step))
    for lease in access_of(store).store.leases("", None, False):
        found["lease", *lease.branch] = f"{Holder.parse(lease.owner).name} {lease.epoch}"
    return found


def tell_runs(url: str) -> None:
    """Tell the steps of runs alone, to standard output."""
    teller = Teller(url)
    teller.told("open", teller.open)
    for step, function in RunVerbs(teller).steps():
        teller.told(step, function)
    teller.told("close", teller.close)


def contents_of_runs() -> dict[str, Content]:
    """Return what a store holds after each step of ``tell_runs``."""
    teller = Teller("memory:")
    teller.open()
    found = {"open": content_of(teller.store)}
    for step, function in RunVerbs(teller).steps():
        function()
        found[step] = content_of(teller.store)
    return {**found, "close": found[step]}


def save_after(store: backstay.Store) -> None:
    """Save on a new thread, and on one that was there."""
    for name in ("after", "story"):
        with contextlib.suppress(backstay.Fenced):  # a story may end while it holds the lease
            store.thread(name).append({"log": ["after"]}, id=f"after-{name}")
