"""Runs of LangGraph graphs: who executes which thread, and since when.

A saver does not learn from LangGraph when a run starts or ends, so the program says it with ``saver.run(…)``. Meanwhile
the run has the lease of its thread, and ``store.runs()`` lists it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from backstay.errors import InvalidInput, Rejected
from backstay.langgraph.names import thread_name
from backstay.model.checkpoint import MAIN
from backstay.model.ids import check_id
from backstay.model.runs import RunStatus
from backstay.operations.cursor import Access, Cursor
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.leases import HeldLease
from backstay.operations.rows import to_microseconds
from backstay.operations.run_keeper import RunKeeper, check_same
from backstay.operations.run_records import ABANDONED, LANGGRAPH, RunOutcome, RunRow, new_row
from backstay.store.base import Backend, BranchKey
from backstay.thread.lease import AsyncLease, Lease, LeaseOptions
from backstay.thread.thread import AsyncThread, Thread

CANCEL_CHECK_S = 0.2
"""How often a run checks for a request to cancel it."""


class SaverRun:
    """One execution of a LangGraph graph on a thread, while a ``with`` or ``async with`` block runs.

    ``runs`` has the runs that a saver executes, by their branches; ``interrupts`` lists the open ones of a thread.
    """

    def __init__(
        self,
        access: Access,
        runs: dict[BranchKey, SaverRun],
        interrupts: Callable[[str], Sequence[InterruptRecord]],
        thread_id: object,
        graph: str,
        options: LeaseOptions,
    ) -> None:
        self._access = access
        self._runs = runs
        self._interrupts = interrupts
        self._graph = check_id(graph, "graph")
        self._options = options
        self._branch = BranchKey(access.services.namespace, thread_name(thread_id), "", MAIN)
        self._keeper = RunKeeper(self._branch, self._now_us, self._plan)
        self._lease: Lease | AsyncLease | None = None
        self._checked = 0.0
        self._cancelled: RunRow | None = None

    @property
    def id(self) -> str:
        """Return the id of the run."""
        return self._keeper.id

    def raise_if_cancelled(self, store: Backend) -> None:
        """Raise Rejected if a person has cancelled the run. Reads the store only now and then."""
        now = time.monotonic()
        if self._cancelled is None and now - self._checked >= CANCEL_CHECK_S:
            self._checked = now
            self._cancelled = self._keeper.stop_request(store)
        if self._cancelled is not None:
            by, reason = self._cancelled.cancelled_by, self._cancelled.reason
            raise Rejected(
                f"{by!r} cancelled the run of {self._graph!r}",
                reason,
                by=by,
                thread=self._branch.thread,
                hint="The finished steps stay: invoke the graph with None to continue from there",
            )

    @property
    def held(self) -> HeldLease | None:
        """Return the lease that the saver's puts carry."""
        return None if self._lease is None else self._lease._held

    def __enter__(self) -> SaverRun:
        lease = Lease(Thread(self._access, Cursor(self._branch)), self._options, self._keeper)
        self._start(lease)
        lease.__enter__()
        self._runs[self._branch] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert isinstance(self._lease, Lease)
        self._runs.pop(self._branch, None)
        self._keeper.outcome = self._outcome(error)
        self._lease.__exit__(kind, error, where)

    async def __aenter__(self) -> SaverRun:
        lease = AsyncLease(AsyncThread(self._access, Cursor(self._branch)), self._options, self._keeper)
        self._start(lease)
        await lease.__aenter__()
        self._runs[self._branch] = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert isinstance(self._lease, AsyncLease)
        self._runs.pop(self._branch, None)
        self._keeper.outcome = ABANDONED  # if this task is cancelled here
        try:
            self._keeper.outcome = await self._access.offload.run(self._outcome, error)
        finally:
            await self._lease.__aexit__(kind, error, where)

    def _start(self, lease: Lease | AsyncLease) -> None:
        if self._lease is not None:
            raise InvalidInput("a run can be entered only once", hint="Write: with saver.run(…): …")
        self._lease = lease

    def _now_us(self) -> int:
        return to_microseconds(self._access.services.now())

    def _plan(self, store: Backend, newest: RunRow | None, waited_for: RunRow | None) -> RunRow:
        """Return the run to execute: the unfinished one, or a new one."""
        if newest is not None and not newest.is_over:
            check_same(store, newest, LANGGRAPH, self._graph)
            return newest
        return new_row(self._branch, self._access.services.new_id(), LANGGRAPH, self._graph, self._now_us())

    def _outcome(self, error: BaseException | None) -> RunOutcome:
        """Return how this execution ended."""
        if self._cancelled is not None:
            return RunOutcome(
                RunStatus.CANCELLED, reason=self._cancelled.reason or f"by {self._cancelled.cancelled_by}"
            )
        if isinstance(error, Exception):
            return RunOutcome(RunStatus.FAILED, error=type(error).__name__)
        if error is not None:  # Ctrl-C, a cancelled task
            return RunOutcome(RunStatus.ABANDONED, error=type(error).__name__)
        waits = tuple(record.id for record in self._interrupts(self._branch.thread))
        return RunOutcome(RunStatus.INTERRUPTED if waits else RunStatus.COMPLETED, waits=waits)
