"""Stored runs: what is running, what died, what waits, and who may continue it. The rules, once for all stores.

A run's record is stored in the same step as the lease of its branch: when the lease is taken, and when it is released.
So it never says that a run is over, or waits, while a process still executes it. If that process dies, the record keeps
the status "running", and the lease shows the truth: once it has expired, or its holder is known to be dead, the run is
abandoned. How far a run came is not in the record but in its checkpoints.

This file has the stored form and the rules; ``run_keeper`` keeps the record while a process executes the run.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from backstay.codec import encode
from backstay.errors import Corrupted
from backstay.model.checkpoint import CheckpointMeta
from backstay.model.ids import check_id
from backstay.model.runs import RunStatus
from backstay.operations.leases import is_alive
from backstay.operations.records import damaged, seal, unseal
from backstay.operations.rows import meta_of
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Query
from backstay.store.leases import Holder
from backstay.store.records import Record, RunFacts, RunQuery, StoredRun, digest_of

GRAPH, LOOP, LANGGRAPH, SESSION = "graph", "loop", "langgraph", "session"
"""Kinds of runs. LangGraph's engine executes its runs itself; a session is a run of another program, which saves by
itself."""

BACKOFF_S = 1.0
BACKOFF_S_MAX = 300.0
ATTEMPTS = 10
"""How often a claimed run may fail, or kill its worker, without a step in between before it counts as failed."""

NO_INPUT = "NoInput"
"""The error of a run whose process died before its input was stored."""

_ENDS = ("failed", "cancelled")
_OVER = (RunStatus.COMPLETED, RunStatus.CANCELLED)
WAITING = (RunStatus.INTERRUPTED, RunStatus.SLEEPING)
_TEXT, _BYTES, _MOMENT = (str, type(None)), (bytes, type(None)), (int, type(None))
_TYPES = (
    *(str, str, str, str, _MOMENT, str, str, int, int, int, _TEXT, list, _MOMENT, _TEXT, bytes, _BYTES, int),
    *(_TEXT, str, str, int, _MOMENT, int, _MOMENT),
)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A stored run, every byte checked. Times are by the caller's clock."""

    stored: Record
    kind: str
    name: str  # of the graph or loop
    fingerprint: str = ""
    status: RunStatus = RunStatus.QUEUED
    due_us: int | None = None  # when it may be claimed
    token: str = ""  # of the lease that it runs under; "" = without a lease, or not running
    holder: str = ""  # who executes it, or did so last
    attempts: int = 0  # how often a process has started or continued it
    failures: int = 0  # failed or killed attempts since it last made a step
    failed_step: int = -1  # the step that it had reached then
    error: str | None = None  # the type of the last error
    waits: tuple[str, ...] = ()  # ids of the interrupts that it waits for
    wake_us: int | None = None
    key: str | None = None  # the caller's, so that it is started only once
    input_digest: bytes = b""
    input: bytes | None = None  # of a queued run: its input and options, encoded
    news: int = 0  # how many answers and values came for it
    cancelled_by: str | None = None  # a person asked to stop it for good
    reason: str = ""  # of a cancellation, or how a session ended
    note: str = ""
    created_us: int = 0
    started_us: int | None = None
    updated_us: int = 0
    ended_us: int | None = None

    @property
    def id(self) -> str:
        """Return the run's id."""
        return self.stored.key

    @property
    def is_over(self) -> bool:
        """Return whether it has ended for good; a failed run can be resumed."""
        return self.status in _OVER

    def sealed(self) -> Record:
        """Return the record to be stored."""
        fields = [getattr(self, name) for name in self.__slots__[1:]]
        fields[_STATUS], fields[_WAITS] = self.status.value, list(self.waits)
        is_open = self.ended_us is None
        facts = RunFacts(self.status.value, self.name, self.fingerprint, self.due_us)
        return seal(self.stored, is_open, fields, facts)


_STATUS = RunRow.__slots__.index("status") - 1
_WAITS = RunRow.__slots__.index("waits") - 1


def row_of(stored: Record) -> RunRow:
    """Return a stored run as a row, every byte checked."""
    fields = unseal(stored, _TYPES)
    facts = (fields[_STATUS], *fields[1:3], fields[_STATUS + 1])
    if (
        fields[_STATUS] not in list(RunStatus)
        or stored.run != facts
        or not all(isinstance(e, str) for e in fields[_WAITS])
    ):
        raise damaged(stored, "it does not have the expected form")
    fields[_STATUS], fields[_WAITS] = RunStatus(fields[_STATUS]), tuple(fields[_WAITS])
    return RunRow(stored, *fields)


def new_row(
    branch: BranchKey,
    run_id: str,
    kind: str,
    name: str,
    now_us: int,
    fingerprint: str = "",
    key: str | None = None,
    input_digest: bytes = b"",
) -> RunRow:
    """Return a run that is not stored yet."""
    return RunRow(
        Record("run", branch, run_id, b"", True),
        kind,
        name,
        fingerprint,
        key=key,
        input_digest=input_digest,
        created_us=now_us,
        updated_us=now_us,
    )


def id_for_key(branch: BranchKey, key: str) -> str:
    """Return the id of the run with a caller's key: the same in every process."""
    check_id(key, "key")
    digest = bytearray(digest_of(*(part.encode() for part in branch), key.encode())[:16])
    digest[6], digest[8] = digest[6] & 0x0F | 0x80, digest[8] & 0x3F | 0x80  # UUIDv8, which older Pythons cannot make
    return str(uuid.UUID(bytes=bytes(digest)))


def digest_of_input(given: Any) -> bytes:
    """Return the digest that shows whether a run was started with the same input; b"" if there is none."""
    return digest_of(encode(given, "input")) if given else b""


# The rules -----------------------------------------------------------------------------------------------------


def started(row: RunRow, token: str, holder: str, now_us: int) -> RunRow:
    """Return a run that a process executes from now on, under the lease with this token."""
    return replace(
        row,
        status=RunStatus.RUNNING,
        due_us=None,
        token=token,
        holder=holder,
        attempts=row.attempts + 1,
        failures=row.failures + (row.status is RunStatus.RUNNING),  # then its last process died
        waits=(),
        wake_us=None,
        cancelled_by=None if row.is_over else row.cancelled_by,  # a run that was rewound is not cancelled any more
        reason="" if row.is_over or row.cancelled_by is None else row.reason,  # why it stopped the last time is past
        started_us=now_us if row.started_us is None else row.started_us,
        updated_us=now_us,
        ended_us=None,
    )


def with_step(row: RunRow, before: RunRow, step: int | None) -> RunRow:
    """Return a started run whose failures count only if it has made no step since the last one."""
    reached = -1 if step is None else step
    if row.failed_step == reached:
        return row
    return replace(row, failures=int(before.status is RunStatus.RUNNING), failed_step=reached)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How one execution of a run ended."""

    status: RunStatus
    error: str | None = None
    waits: tuple[str, ...] = ()
    wake_us: int | None = None  # when a timeout or a sleep ends
    reason: str = ""


ABANDONED = RunOutcome(RunStatus.ABANDONED)


def ended(
    row: RunRow, outcome: RunOutcome, now_us: int, news_before: int, retries: int | None, step: int | None = None
) -> RunRow:
    """Return a run whose process has stopped executing it.

    ``news_before`` is how many answers had come when it started: if more came, it is continued at once. ``retries`` is
    how often a worker tries a failing run; None without a worker. ``step`` is the step that its branch has reached.
    """
    status, due, is_over = outcome.status, None, False
    failures, reached = row.failures, row.failed_step
    match status:
        case RunStatus.INTERRUPTED | RunStatus.SLEEPING:
            due = now_us if row.news > news_before else outcome.wake_us
        case RunStatus.ABANDONED:
            due = now_us
        case RunStatus.FAILED:
            reached = -1 if step is None else step
            failures = failures + 1 if reached == row.failed_step else 1
            if retries is not None and failures < retries:
                status = RunStatus.ABANDONED
                due = now_us + round(min(BACKOFF_S * 2 ** (failures - 1), BACKOFF_S_MAX) * 1e6)
        case _:
            is_over = True
    is_over = is_over or status is RunStatus.FAILED
    if row.cancelled_by is not None and not is_over:
        due = now_us  # the request came too late for this execution; the next one obeys it
    return replace(
        row,
        status=status,
        due_us=due if row.kind == GRAPH else None,
        token="",
        failures=failures,
        failed_step=reached,
        error=outcome.error,
        waits=outcome.waits,
        wake_us=outcome.wake_us,
        input=None if status in _OVER else row.input,  # a failed run may be tried again before its first checkpoint
        reason=outcome.reason or ("" if status is RunStatus.COMPLETED else row.reason),  # a cancel may come too late
        updated_us=now_us,
        ended_us=now_us if is_over else None,
    )


def outcome_of_head(head: CheckpointMeta) -> RunOutcome:
    """Return the outcome of a run from its last checkpoint."""
    if head.trigger in ("rejected", "cancelled"):
        return RunOutcome(RunStatus.CANCELLED, reason="rejected" if head.trigger == "rejected" else "")
    return RunOutcome(RunStatus.COMPLETED)


def answered(row: RunRow, now_us: int) -> RunRow:
    """Return a run for which an answer, or a value, was stored: it may be continued at once."""
    due = now_us if row.status in WAITING and row.kind == GRAPH else row.due_us
    return replace(row, news=row.news + 1, due_us=due, updated_us=now_us)


def to_wake(store: Backend, branch: BranchKey, now_us: int) -> Record | None:
    """Return the run of a branch, to be stored with an answer; None if there is none, or it is over or damaged."""
    with contextlib.suppress(Corrupted):
        found = newest_run(store, branch)
        row = None if found is None else row_of(found.record)
        return None if row is None or row.is_over else answered(row, now_us).sealed()
    return None


def is_executed(found: StoredRun, row: RunRow, token: str) -> bool:
    """Return whether another process executes a run now, under a lease that is not the one with this token."""
    lease = found.lease
    is_held = row.token and row.token != token and lease is not None and lease.token == row.token
    return bool(is_held) and real_status(found, row) is RunStatus.RUNNING


def real_status(found: StoredRun, row: RunRow) -> RunStatus:
    """Return the status of a run, which is abandoned if its process has died."""
    if row.status is not RunStatus.RUNNING:
        return row.status
    lease = found.lease
    if row.token and (lease is None or lease.token != row.token or lease.left_us <= 0):
        return RunStatus.ABANDONED
    return RunStatus.ABANDONED if is_alive(Holder.parse(row.holder)) is False else RunStatus.RUNNING


def head_of(store: Backend, branch: BranchKey) -> CheckpointMeta | None:
    """Return the newest checkpoint of a branch, without its state."""
    rows = store.find(Query(*branch, limit=1))
    return meta_of(rows[0]) if rows else None


def is_begun(store: Backend, row: RunRow, head: CheckpointMeta | None) -> bool:
    """Return whether a checkpoint of a run, and so its input, is stored; ``head`` is the newest of its branch.

    Other code may have saved on top of it, without a run.
    """
    if head is None or head.run_id is not None:
        return head is not None and head.run_id == row.id
    query = Query(*row.stored.branch)
    while rows := store.find(query):
        for meta in map(meta_of, rows):
            if meta.run_id is not None:
                return meta.run_id == row.id
        query = replace(query, before=rows[-1].seq)
    return False


def newest_run(store: Backend, branch: BranchKey) -> StoredRun | None:
    """Return the newest run of a graph or loop on a branch: a session is a program's own, and hides none of them."""
    found = store.run(branch)
    if found is None or found.record.run is None or found.record.run.graph != SESSION:
        return found
    query = RunQuery(branch.namespace, branch.thread)
    while page := store.runs(query):
        for each in page:
            if each.record.branch == branch and row_of(each.record).kind != SESSION:
                return each
        query = replace(query, before=page[-1].record.number)
    return None


def threads_with_runs(store: Backend, namespace: str, statuses: Iterable[RunStatus]) -> list[str]:
    """Return the ids of the threads that have a run with one of these statuses."""
    names: dict[str, None] = {}
    for status in statuses:
        query = RunQuery(namespace, status=status.value, limit=PAGE_ROWS_MAX)
        while page := store.runs(query):
            names.update(dict.fromkeys(found.record.branch.thread for found in page))
            query = replace(query, before=page[-1].record.number)
    return list(names)


def progress_of(store: Backend, branch: BranchKey) -> int | None:
    """Return the last step of a branch that a node or turn has made; a failure is stored as a step too.

    None if there is none, or if it cannot be read.
    """
    with contextlib.suppress(Corrupted):
        for row in store.find(Query(*branch, limit=ATTEMPTS + 1)):
            meta = meta_of(row)
            if meta.trigger not in _ENDS:
                return meta.step
    return None


def change_run(store: Backend, row: RunRow, change: Callable[[RunRow], RunRow | None]) -> RunRow:
    """Change a stored run, again if another writer was faster; ``change`` returns None to leave it as it is."""
    while True:
        changed = change(row)
        if changed is None:
            return row
        record = changed.sealed()
        stored = store.put_record(record)
        row = row_of(stored)
        if stored.body == record.body:
            return row
