"""Runs: what is running, what died, what waits; cancelled and paused from any process, and claimed by workers.

``store.runs()`` answers every question about executions of graphs and loops. ``store.claim()`` hands out the runs that
no process executes. The stored records and their rules are in ``operations.run_records``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from backstay.errors import Corrupted, Fenced, InvalidInput, NotFound
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.model.ids import check_id, check_label
from backstay.model.runs import RunStatus
from backstay.operations import run_records
from backstay.operations.cursor import Access, Cursor
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.leases import dead_tokens
from backstay.operations.listing import read_each, unreadable
from backstay.operations.question import request_pause
from backstay.operations.rows import Damaged, from_microseconds, to_microseconds
from backstay.operations.run_keeper import RunKeeper, end_for_good, retried
from backstay.operations.run_records import RunOutcome, RunRow, change_run, outcome_of_head, real_status, row_of
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey
from backstay.store.leases import Holder, LeaseGrant, LeaseRequest, LeaseStatus
from backstay.store.records import Record, RunQuery, StoredRun
from backstay.thread.lease import Lease, LeaseOptions, check_lease_options
from backstay.thread.thread import AsyncThread, Thread

T = TypeVar("T")
R = TypeVar("R", bound="Run")

LIMIT_MAX = PAGE_ROWS_MAX
CANCEL_TTL_S = 2.0
"""How long others wait if a process dies while it cancels a run."""

CLAIMS_MAX = 1000
"""The most runs that can be claimed at once."""

KILLED = "Killed"
"""The error of a run whose processes died again and again."""

DEAD_CHECK_S = 1.0
"""How often a worker that claims runs asks whether the holders of leases on its own machine are alive."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """One execution of a graph or loop on a branch, from its input to its end, as it was when it was read."""

    id: str
    thread_id: str
    branch: str
    scope: str
    kind: str  # "graph", "loop", or "langgraph" for its engine's; "session" for a program that saves by itself
    graph: str  # the name of the graph or loop
    fingerprint: str  # of the graph, 16 hexadecimal digits
    status: RunStatus
    holder: Holder | None  # the process that executes it, or did so last
    epoch: int  # of the lease under which it runs, 0 if it does not run
    lease_left: float  # seconds until that lease expires, unless it is renewed
    attempts: int  # how often a process has started or continued it
    error: str | None  # the type of its last error, without the text
    step: int | None  # of the branch's newest checkpoint
    interrupts: tuple[str, ...]  # ids of the interrupts that it waits for
    wake_at: datetime | None  # when a sleep or a timeout ends
    key: str | None  # the caller's
    reason: str  # of a cancellation
    note: str
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    ended_at: datetime | None
    number: int = field(repr=False)  # rises with every run of the store
    _access: Access = field(compare=False)

    @property
    def thread(self) -> Thread:
        """Return a handle on the run's branch."""
        return Thread(self._access, Cursor(self._branch))

    @property
    def _branch(self) -> BranchKey:
        return BranchKey(self._access.services.namespace, self.thread_id, self.scope, self.branch)

    def cancel(self, reason: str = "", *, by: str = "cancel") -> Run:
        """Stop the run for good, and return it as it is now.

        A run that a process executes stops at its next boundary, between two nodes or turns; any other stops at once.
        Its state stays, and another run may start on the thread. Raises InvalidInput if the run is over.
        """
        check_id(by, "by")
        check_label(reason, "reason")
        run = self
        while True:
            run = run.refresh()
            if run.status in (RunStatus.COMPLETED, RunStatus.CANCELLED):
                raise InvalidInput(
                    f"the run of {run.kind} {run.graph!r} is over ({run.status.value})",
                    thread=run.thread_id,
                    hint="Nothing was changed: there is nothing to cancel",
                )
            stop = _request_stop if run.status is RunStatus.RUNNING else _stop_now
            if stop(run, by, reason):
                return run.refresh()

    def pause(self, reason: str = "", *, by: str = "pause") -> InterruptRecord:
        """Ask the run to stop at its next boundary until a person decides; see ``Thread.request_pause``."""
        if self.kind not in (run_records.GRAPH, run_records.LOOP):
            raise InvalidInput(
                f"a {self.kind} run cannot be paused from outside",
                thread=self.thread_id,
                hint="Stop it with run.cancel(), or let its own program ask a person",
            )
        thread = self.thread
        return thread._handle.run(request_pause, self._access.services, thread._handle.cursor, reason, by)

    def refresh(self) -> Run:
        """Return the run as it is now. Raises NotFound if it was deleted."""
        store, branch = self._access.store, self._branch
        newest = store.run(branch)
        if newest is None or newest.record.key != self.id:
            record = store.record("run", branch, self.id)
            if record is None:
                hint = "It was deleted: see store.runs()"
                raise NotFound(f"run {self.id} does not exist", thread=self.thread_id, hint=hint)
            newest = StoredRun(record, None, None if newest is None else newest.step)
        return show(self._access, newest, type(self))

    def _as(self, kind: type[R]) -> R:
        """Return the same run for the other kind of callers."""
        return kind(**self.__dict__)

    def __str__(self) -> str:
        status, graph, thread, step, holder, attempts, since, note = _cells(self)
        at = "" if self.step is None else f" at step {step}"
        held = "" if holder == "-" else f" by {holder}"
        more = "" if note == "-" else f"; {note}"
        return f"of {self.kind} {graph} on thread {thread}: {status}{held}{at} since {since}, attempt {attempts}{more}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


class AsyncRun(Run):
    """A run, for callers with an event loop: the same names, awaited."""

    @property
    def thread(self) -> AsyncThread:  # type: ignore[override]  # the twin of the same handle
        """Return a handle on the run's branch."""
        return AsyncThread(self._access, Cursor(self._branch))

    async def cancel(self, reason: str = "", *, by: str = "cancel") -> AsyncRun:  # type: ignore[override]  # awaited
        """Stop the run for good; see ``Run.cancel``."""
        return await self._off(Run.cancel, reason, by=by)

    async def pause(self, reason: str = "", *, by: str = "pause") -> InterruptRecord:  # type: ignore[override]
        """Ask the run to stop at its next boundary; see ``Run.pause``."""
        plain = self._as(Run)
        return await self._access.offload.run(plain.pause, reason, by=by)

    async def refresh(self) -> AsyncRun:  # type: ignore[override]  # awaited
        """Return the run as it is now; see ``Run.refresh``."""
        return await self._off(Run.refresh)

    async def _off(self, method: Callable[..., Run], *args: Any, **kwargs: Any) -> AsyncRun:
        found = await self._access.offload.run(functools.partial(method, self._as(Run), *args, **kwargs))
        return found._as(AsyncRun)


class Runs(list[T]):
    """A page of runs, newest first; printed, a table."""

    def __str__(self) -> str:
        rows = [_HEADER, *(_cells(run) if isinstance(run, Run) else (str(run),) for run in self)]
        widths = [max((len(row[at]) for row in rows if len(row) > 1), default=0) for at in range(len(_HEADER))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip() for row in rows
        )

    __repr__ = __str__


_HEADER = ("STATUS", "GRAPH", "THREAD", "STEP", "HOLDER", "TRY", "SINCE", "NOTE")


def _cells(run: Run) -> tuple[str, ...]:
    """Return the columns of a run in a table."""
    notes = []
    if run.status is RunStatus.INTERRUPTED:
        notes.append(f"waits for {len(run.interrupts)} answer{'s' if len(run.interrupts) != 1 else ''}")
    if run.wake_at is not None and run.ended_at is None:
        notes.append(f"wakes at {_moment(run.wake_at)}")
    notes += [text for text in (run.error, run.reason, run.note) if text]
    is_held = run.status is RunStatus.RUNNING and run.holder is not None
    cells = (
        run.status.value,
        run.graph if run.kind != "session" else "-",
        run.thread_id + ("" if run.branch == MAIN else f"@{run.branch}"),
        "-" if run.step is None else str(run.step),
        run.holder.name if is_held and run.holder is not None else "-",
        str(run.attempts),
        _moment(run.updated_at),
        ", ".join(notes) or "-",
    )
    return tuple(
        "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cell) for cell in cells
    )


def _moment(when: datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M:%S")


# Lists ------------------------------------------------------------------------------------------------------------


def show(access: Access, found: StoredRun, kind: type[R] = Run) -> R:  # type: ignore[assignment]  # the default
    """Return a stored run as users see it; Corrupted if it cannot be read."""
    row, lease = row_of(found.record), found.lease
    status, branch = real_status(found, row), found.record.branch
    is_held = lease is not None and status is RunStatus.RUNNING and lease.token == row.token
    return kind(
        id=row.id,
        thread_id=branch.thread,
        branch=branch.name,
        scope=branch.scope,
        kind=row.kind,
        graph=row.name,
        fingerprint=row.fingerprint,
        status=status,
        holder=Holder.parse(row.holder) if row.holder else None,
        epoch=lease.epoch if is_held and lease is not None else 0,
        lease_left=max(0, lease.left_us) / 1e6 if is_held and lease is not None else 0.0,
        attempts=row.attempts,
        error=row.error,
        step=found.step,
        interrupts=row.waits,
        wake_at=None if row.wake_us is None else from_microseconds(row.wake_us),
        key=row.key,
        reason=row.reason,
        note=row.note,
        created_at=from_microseconds(row.created_us),
        started_at=None if row.started_us is None else from_microseconds(row.started_us),
        updated_at=from_microseconds(row.updated_us),
        ended_at=None if row.ended_us is None else from_microseconds(row.ended_us),
        number=found.record.number,
        _access=access,
    )


def show_record(access: Access, stored: Record, kind: type[R]) -> R:
    """Return a run that was just stored as users see it."""
    return show(access, StoredRun(stored, None, None), kind)


@dataclass(frozen=True, slots=True)
class RunFilter:
    """The arguments of ``Store.runs``, checked."""

    status: RunStatus | None
    graph: str | None
    thread: str | None
    holder: str | None
    limit: int
    before: int | None

    def wants(self, run: Run) -> bool:
        """Return whether a run has the wanted status and holder."""
        if self.status is not None and run.status is not self.status:
            return False
        if self.holder is None:
            return True
        holder = run.holder
        if holder is None or run.status is not RunStatus.RUNNING:
            return False
        return self.holder in (holder.name, holder.host, f"{holder.host}:{holder.pid}")


def check_filter(
    status: RunStatus | str | None,
    graph: str | None,
    thread: str | None,
    holder: str | None,
    limit: int,
    after: Run | None,
) -> RunFilter:
    """Return the arguments of ``Store.runs``, checked."""
    if status is not None and status not in list(RunStatus):
        names = ", ".join(RunStatus)
        raise InvalidInput(f"{status!r:.40} is not a status of a run", hint=f"The statuses are {names}")
    for name, given in (("graph", graph), ("thread", thread), ("holder", holder)):
        if given is not None and not isinstance(given, str):
            raise InvalidInput(f"{name} must be a name, not {type(given).__name__}", hint=f'For example {name}="…"')
    if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
        raise InvalidInput(f"limit must be a whole number from 1 to {LIMIT_MAX}, not {limit!r:.40}")
    if after is not None and not isinstance(after, Run):
        raise InvalidInput(f"after must be a run, not {type(after).__name__}", hint="Pass the last run of a page")
    status = None if status is None else RunStatus(status)
    return RunFilter(status, graph, thread, holder, limit, None if after is None else after.number)


def list_runs(store: Backend, access: Access, wanted: RunFilter, kind: type[R]) -> Runs[R | Damaged]:
    """Return a page of runs, newest first; those that cannot be read as ``Damaged``."""
    status = wanted.status if wanted.holder is None or wanted.status is not None else RunStatus.RUNNING
    kept = [status]
    if status is RunStatus.ABANDONED:  # the record of a run whose process died says that it is running
        kept = [RunStatus.ABANDONED, RunStatus.RUNNING]
    namespace = access.services.namespace
    found: list[R | Damaged] = [*unreadable(store, namespace, wanted.thread)] if wanted.before is None else []
    pages = [_wanted_runs(store, access, namespace, each, wanted, kind) for each in kept]
    rows = sorted((row for page in pages for row in page), key=attrgetter("number"), reverse=True)
    return Runs([*found, *(row.entry for row in rows[: wanted.limit])])


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    entry: Any


def _wanted_runs(
    store: Backend, access: Access, namespace: str, status: RunStatus | None, wanted: RunFilter, kind: type[R]
) -> list[_Entry]:
    """Return up to a page of the runs with a stored status that are wanted."""
    found: list[_Entry] = []
    before = wanted.before
    while len(found) < wanted.limit:
        name = None if status is None else status.value
        page = store.runs(RunQuery(namespace, wanted.thread, name, wanted.graph, before, wanted.limit))
        shown = read_each(
            page, lambda each: show(access, each, kind), lambda each: (each.record.branch.thread, each.record.key, 0)
        )
        for stored, entry in zip(page, shown, strict=True):
            if isinstance(entry, Damaged) or wanted.wants(entry):
                found.append(_Entry(stored.record.number, entry))
        if len(page) < wanted.limit:
            break
        before = page[-1].record.number
    return found[: wanted.limit]


# Cancelling -------------------------------------------------------------------------------------------------------


def _request_stop(run: Run, by: str, reason: str) -> bool:
    """Ask the process that executes a run to stop it; False if no process does by now."""
    store = run._access.store
    stored = store.record("run", run._branch, run.id)

    def request(row: RunRow) -> RunRow | None:
        if row.status is not RunStatus.RUNNING or row.cancelled_by is not None:
            return None
        return replace(row, cancelled_by=by, reason=reason, updated_us=_now_us(run._access))

    return stored is not None and change_run(store, row_of(stored), request).status is RunStatus.RUNNING


def _stop_now(run: Run, by: str, reason: str) -> bool:
    """End a run that no process executes; False if one does by now, or if it is over."""

    def plan(store: Backend, newest: RunRow | None, waited_for: RunRow | None) -> RunRow | None:
        # It need not be the newest run of its branch.
        stored = store.record("run", run._branch, run.id)
        row = None if stored is None else row_of(stored)
        return None if row is None or row.is_over else row

    access, thread = run._access, run.thread
    keeper = RunKeeper(run._branch, functools.partial(_now_us, access), plan)
    keeper.executes = False
    try:
        with Lease(thread, check_lease_options(by, CANCEL_TTL_S), keeper):
            if keeper.row is None:
                return False
            if run.kind in (run_records.GRAPH, run_records.LOOP):  # others write their checkpoints themselves
                thread._handle.run(end_for_good, access.services, thread._handle.cursor, run.id)
            keeper.outcome = RunOutcome(RunStatus.CANCELLED, reason=reason or f"by {by}")
    except Fenced:
        if run.refresh().status is not RunStatus.RUNNING:
            raise  # another writer holds the branch, and not for this run
        return False
    return True


def _now_us(access: Access) -> int:
    return to_microseconds(access.services.now())


# Claiming ---------------------------------------------------------------------------------------------------------


class Claimable(Protocol):
    """A graph, as ``store.claim`` sees it: the names and fingerprints of the runs that it can execute."""

    def claims(self) -> Collection[tuple[str, str]]:
        """Return the name and fingerprint of each version whose runs it can execute."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The arguments of ``Store.claim``, checked."""

    graphs: tuple[tuple[str, str], ...]
    limit: int
    attempts: int
    options: LeaseOptions


def check_claim(
    graphs: Iterable[Claimable] | Claimable, limit: int, attempts: int, options: LeaseOptions
) -> ClaimRequest:
    """Return the arguments of ``Store.claim``, checked."""
    given: Sequence[Any] = [graphs]
    if not hasattr(graphs, "claims"):
        given = list(graphs) if isinstance(graphs, Iterable) else []
    if not given or not all(hasattr(graph, "claims") for graph in given):
        raise InvalidInput("claim needs the graphs whose runs you can execute", hint="For example graphs=[graph]")
    for name, value, most in (("limit", limit, CLAIMS_MAX), ("attempts", attempts, CLAIMS_MAX)):
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidInput(f"{name} must be a whole number from 1 to {most}, not {value!r:.40}")
    pairs = dict.fromkeys(pair for graph in given for pair in graph.claims())
    return ClaimRequest(tuple(pairs), limit, attempts, options)


def show_claimed(access: Access, grant: LeaseGrant, request: LeaseRequest, kind: type[R]) -> R:
    """Return a run that was just claimed."""
    assert grant.run is not None
    lease = LeaseStatus(grant.branch, grant.number, request.owner, grant.epoch, request.ttl_us, request.token)
    head = run_records.head_of(access.store, grant.branch)
    return show(access, StoredRun(grant.run, lease, None if head is None else head.step), kind)


def claim(
    store: Backend, access: Access, asked: ClaimRequest
) -> list[tuple[LeaseGrant, LeaseRequest, float, RunKeeper]]:
    """Take the leases of runs that no process executes; return for each what a lease object needs."""
    now_us = functools.partial(_now_us, access)
    request, started = asked.options.request(), time.monotonic()
    before: dict[tuple[BranchKey, str], RunRow] = {}

    def change(record: Record) -> Record | None:
        try:
            row = row_of(record)
        except Corrupted:  # lists and checks report it; the others must not wait for its repair
            return None
        before[record.branch, record.key] = row
        return run_records.started(row, request.token, request.owner, now_us()).sealed()

    services = access.services
    if started - services.dead_checked >= DEAD_CHECK_S:
        services.dead_checked, services.dead_tokens = started, dead_tokens(store, services.namespace)
    taken = []
    for grant in store.claim(
        services.namespace, asked.graphs, asked.limit, request, now_us(), services.dead_tokens, change
    ):
        assert grant.run is not None
        keeper = RunKeeper(grant.branch, now_us, lambda store, row, waited_for: row, asked.attempts)
        row = keeper.taken(store, before[grant.branch, grant.run.key], grant.run)
        refused: RunOutcome | None
        try:
            refused = _settle_claimed(store, row, run_records.head_of(store, grant.branch), asked.attempts)
        except Corrupted as error:  # of its newest checkpoint: the runs of other threads must not wait for its repair
            refused = RunOutcome(RunStatus.FAILED, error=type(error).__name__)
        if refused is not None:
            keeper.outcome, keeper.retries = refused, None
            retried(
                lambda grant=grant, keeper=keeper: store.release(  # type: ignore[misc]  # mypy: a lambda's defaults
                    grant.branch, grant.epoch, request.token, keeper.finish(store)
                )
            )
        else:
            taken.append((grant, request, started, keeper))
    return taken


def _settle_claimed(store: Backend, row: RunRow, head: CheckpointMeta | None, attempts: int) -> RunOutcome | None:
    """Return how a claimed run ends that need not, or cannot, be executed; None if it can."""
    if row.cancelled_by is not None and head is None:
        return RunOutcome(RunStatus.CANCELLED, reason=row.reason)
    if head is not None and head.run_id == row.id and head.is_over:
        return outcome_of_head(head)
    if row.failures >= attempts:
        return RunOutcome(RunStatus.FAILED, error=row.error or KILLED)
    if row.input is None and not run_records.is_begun(store, row, head):
        return RunOutcome(RunStatus.FAILED, error=run_records.NO_INPUT)
    return None
