"""Workers: runs that are queued, abandoned, due or answered are claimed and executed until the worker is stopped.

A worker polls the store: at once after it found something, then after a pause that grows. SIGTERM and SIGINT stop it
cleanly: it claims nothing more, its runs end between two nodes and are left as abandoned, so that another worker
continues them at once. If a worker ends in any other way, its runs are found by their leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from backstay.codec import encode
from backstay.engine.build import BuiltGraph
from backstay.engine.control import Cancellation
from backstay.engine.fingerprint import fingerprint_of, hex_of
from backstay.engine.migration import migration_chain
from backstay.errors import BackstayError, Fenced, InvalidInput, OutcomeUnknown, StoreBusy
from backstay.model.checkpoint import CheckpointMeta
from backstay.model.runs import RunStatus
from backstay.operations.rows import to_microseconds
from backstay.operations.run_keeper import check_same, settle_over
from backstay.operations.run_records import (
    GRAPH,
    RunOutcome,
    RunRow,
    digest_of_input,
    head_of,
    id_for_key,
    is_begun,
    new_row,
    newest_run,
    row_of,
)
from backstay.store.base import Backend, BranchKey
from backstay.store.records import Record
from backstay.thread.access import access_of, handle_of
from backstay.thread.lease import AsyncLease
from backstay.thread.runs import AsyncRun, Run, show_record
from backstay.thread.store import AsyncStore
from backstay.thread.thread import AsyncThread, Thread

if TYPE_CHECKING:
    from backstay.engine.graph import Graph

PAUSE_S = 0.05
PAUSE_S_MAX = 2.0
"""How long a worker that found nothing waits before it asks again: first, and at most."""

CONCURRENCY_MAX = 1000
_log = logging.getLogger("backstay.work")


# Submitting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submission:
    """A run to be stored as queued."""

    given: Mapping[str, Any]
    options: Mapping[str, Any]
    run_id: str
    key: str | None
    due_us: int

    def row(self, built: BuiltGraph, branch: BranchKey, now_us: int) -> RunRow:
        """Return the run that is stored."""
        name = self.run_id if self.key is None else id_for_key(branch, self.key)
        row = new_row(
            branch,
            name,
            GRAPH,
            built.name,
            now_us,
            hex_of(fingerprint_of(built)),
            self.key,
            digest_of_input(self.given),
        )
        payload = encode({**self.options, "input": dict(self.given)}, "input")
        wake_us = self.due_us if self.due_us > now_us else None
        return replace(row, status=RunStatus.QUEUED, input=payload, due_us=self.due_us, wake_us=wake_us)


def _plan_submit(
    store: Backend, built: BuiltGraph, branch: BranchKey, asked: Submission, now_us: int
) -> tuple[Record, bool]:
    """Return the run as it has to be stored, and whether it is: with the same key or input, it is not a new one."""
    row, head = asked.row(built, branch, now_us), head_of(store, branch)
    known = None if asked.key is None else store.record("run", branch, row.id)
    if known is not None:
        found = row_of(known)
        if found.input_digest != row.input_digest or found.name != row.name:
            raise InvalidInput(
                f"a run with the key {asked.key!r} was submitted with another input",
                thread=branch.thread,
                hint="Use another key for another run",
            )
        return _again(store, found, row, head, is_repeated=False)
    newest = newest_run(store, branch)
    if newest is not None:
        found = settle_over(store, row_of(newest.record), head, now_us)
        if not found.is_over:
            check_same(store, found, GRAPH, built.name, row.input_digest, asked.key)
            return _again(store, found, row, head, is_repeated=True)
    if head is not None and head.graph is not None and not head.is_over:
        raise InvalidInput(
            f"thread {branch.thread!r} has an unfinished run of graph {head.graph!r}, at step {head.step}",
            thread=branch.thread,
            checkpoint=head.id,
            hint="Call resume(thread) to continue it, or use another thread",
        )
    return row.sealed(), False


def _again(
    store: Backend, found: RunRow, row: RunRow, head: CheckpointMeta | None, is_repeated: bool
) -> tuple[Record, bool]:
    """Return a run that is submitted again, and whether there is nothing to change in it.

    A run whose process died before its input was stored gets its input; one that has failed may be repeated.
    """
    changed = found
    if found.input is None and not found.is_over and not is_begun(store, found, head):
        changed = replace(changed, input=row.input)
    if found.status is RunStatus.FAILED and (is_repeated or changed is not found):
        changed = replace(
            changed, status=RunStatus.ABANDONED, due_us=row.due_us, wake_us=row.wake_us, failures=0, ended_us=None
        )
    return (found.stored, True) if changed is found else (changed.sealed(), False)


def _submit(
    store: Backend, built: BuiltGraph, branch: BranchKey, asked: Submission, now_us: int, transaction: Any = None
) -> Record:
    """Store a run as queued, once, and return it; with a transaction, in that of the caller's own connection."""
    put: Callable[[Record], Record] = store.put_record
    if transaction is not None:
        put_within = getattr(store, "put_record_within", None)
        if put_within is None:
            raise InvalidInput(
                "transaction= needs a store in PostgreSQL",
                thread=branch.thread,
                hint="Leave it out: the run is stored at once",
            )
        put = partial(put_within, transaction)
    while True:
        record, is_stored = _plan_submit(store, built, branch, asked, now_us)
        stored = record if is_stored else put(record)
        if stored.body == record.body:
            return stored


def submit(thread: Thread, built: BuiltGraph, asked: Submission, transaction: Any) -> Run:
    """Store a run as queued, and return it."""
    access, branch = access_of(thread), handle_of(thread).cursor.branch
    now_us = to_microseconds(access.services.now())
    return show_record(access, _submit(access.store, built, branch, asked, now_us, transaction), Run)


async def asubmit(thread: AsyncThread, built: BuiltGraph, asked: Submission) -> AsyncRun:
    """Store a run as queued, and return it."""
    access, branch = access_of(thread), handle_of(thread).cursor.branch
    now_us = to_microseconds(access.services.now())

    def store_it(store: Backend) -> AsyncRun:
        return show_record(access, _submit(store, built, branch, asked, now_us), AsyncRun)

    return await access.arun(store_it)


# Working ----------------------------------------------------------------------------------------------------------


def claims_of(built: BuiltGraph) -> list[tuple[str, str]]:
    """Return the name and fingerprint of each version of a graph whose runs it can execute."""
    known = [fingerprint_of(built), *(hash for hash in built.migrations if migration_chain(built, hash) is not None)]
    return [(built.name, hex_of(hash)) for hash in known]


class Worker:
    """Claims and executes the runs of one graph, several at a time, until it is stopped."""

    def __init__(
        self,
        graph: Graph,
        store: AsyncStore,
        concurrency: int,
        ttl: float,
        attempts: int,
        until_idle: bool,
        how: Mapping[str, Any],
    ) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(
                f"concurrency must be a whole number from 1 to {CONCURRENCY_MAX}, not {concurrency!r:.40}"
            )
        self._graph = graph
        self._store = store
        self._concurrency = concurrency
        self._ttl = ttl
        self._attempts = attempts
        self._until_idle = until_idle
        self._how = how
        self._cancel = Cancellation()
        self._running: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._ended = 0

    def stop(self) -> None:
        """Stop: end the runs between two nodes, and claim nothing more."""
        self._cancel.cancel("the worker stops")
        self._wake.set()

    def forget(self, task: asyncio.Task[None]) -> None:
        """Note that the execution of a run has ended."""
        self._running.discard(task)
        self._ended += 1
        self._wake.set()

    async def run(self) -> int:
        """Work until the worker is stopped; return how many executions of runs ended."""
        pause_s = PAUSE_S
        try:
            while not self._cancel.cancelled:
                free = self._concurrency - len(self._running)
                found: list[AsyncLease] = []
                try:
                    if free:
                        found = await self._store.claim(self._graph, free, ttl=self._ttl, attempts=self._attempts)
                except (StoreBusy, OutcomeUnknown) as error:  # it is away for a while; leases that it gave expire
                    _log.warning("graph %r: cannot ask for runs, trying again: %s", self._graph.name, error.what)
                for lease in found:
                    task = asyncio.create_task(self._execute(lease))
                    self._running.add(task)
                    task.add_done_callback(self.forget)
                if self._until_idle and not found and not self._running:
                    break
                pause_s = PAUSE_S if found else min(pause_s * 1.5, PAUSE_S_MAX)
                self._wake.clear()
                if len(found) >= free > 0 or self._cancel.cancelled:
                    continue
                with contextlib.suppress(TimeoutError):  # until a run ends, the worker is stopped, or the pause is over
                    async with asyncio.timeout(pause_s if free else None):
                        await self._wake.wait()
        except BaseException:
            self.stop()
            raise
        finally:
            while self._running:
                await asyncio.wait(self._running)
        return self._ended

    async def _execute(self, lease: AsyncLease) -> None:
        """Execute a claimed run to its end or next pause."""
        run, keeper = lease.run, lease._keeper
        assert keeper is not None
        _log.info("thread %r run %s: attempt %d from step %s", run.thread_id, run.id, run.attempts, run.step)
        try:
            async with lease:
                try:
                    result = await self._graph.resume(lease.thread, lease=lease, cancel=self._cancel, **self._how)
                    _log.info("thread %r run %s: %s at step %d", run.thread_id, run.id, result.status, result.steps)
                except (Fenced, asyncio.CancelledError):
                    raise
                except Exception as error:
                    # It counts as a failed attempt, so that another try comes later, and not for ever.
                    keeper.outcome = RunOutcome(RunStatus.FAILED, error=type(error).__name__)
                    _log.warning("thread %r run %s: %s", run.thread_id, run.id, type(error).__name__)
        except BackstayError as error:  # the lease was lost, or the store is away: another worker continues the run
            _log.warning("thread %r run %s: left to another worker: %s", run.thread_id, run.id, error.summary)


_stoppable: list[tuple[asyncio.AbstractEventLoop, Worker]] = []
_handlers_before: dict[int, Any] = {}


@contextlib.contextmanager
def stopped_by_signals(worker: Worker) -> Iterator[None]:
    """Stop a worker on SIGTERM and SIGINT, if this is the main thread; a second signal acts as without a worker.

    Several workers of a program share the handlers: they end in any order, and none may leave its own behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    entry = (asyncio.get_running_loop(), worker)
    if not _stoppable:
        for number in (int(signal.SIGTERM), int(signal.SIGINT)):
            _handlers_before[number] = signal.getsignal(number)
            signal.signal(number, _stop_workers)
    _stoppable.append(entry)
    try:
        yield
    finally:
        _stoppable.remove(entry)
        if not _stoppable:
            for number, handler in _handlers_before.items():
                signal.signal(number, handler)


def _stop_workers(number: int, frame: object) -> None:
    signal.signal(number, _handlers_before[number])
    for loop, worker in list(_stoppable):
        loop.call_soon_threadsafe(worker.stop)
