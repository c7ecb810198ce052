"""Keep the record of a run while a process executes it.

The record changes with the lease of its branch: see ``run_records``. The loop or engine that executes the run sets the
outcome. Without one, nothing was executed, because the caller was refused, and the run stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from backstay.errors import Conflict, InvalidInput
from backstay.model.checkpoint import CheckpointFields, CheckpointMeta
from backstay.model.frame import End
from backstay.model.runs import RunStatus
from backstay.operations import load
from backstay.operations.cursor import Cursor, Services
from backstay.operations.leases import is_alive
from backstay.operations.question import close_ended
from backstay.operations.run_records import (
    ABANDONED,
    WAITING,
    RunOutcome,
    RunRow,
    change_run,
    ended,
    is_begun,
    is_executed,
    newest_run,
    outcome_of_head,
    progress_of,
    row_of,
    started,
    with_step,
)
from backstay.operations.save import SaveRequest, save_append
from backstay.store.base import Backend, BranchKey
from backstay.store.leases import Holder, fenced
from backstay.store.records import Record

T = TypeVar("T")

Plan = Callable[[Backend, RunRow | None, RunRow | None], RunRow | None]
"""Takes the newest run of a branch, and the run that this process has waited for. Returns the run to execute: the
newest, or a new one, or None."""


class RunKeeper:
    """The record of the run that a process executes. Its methods are called with the handle's lock."""

    def __init__(self, branch: BranchKey, now_us: Callable[[], int], plan: Plan, retries: int | None = None) -> None:
        self.row: RunRow | None = None  # as it was last stored
        self.is_new = False  # it did not exist before
        self.outcome: RunOutcome | None = None  # None: nothing was executed, and the run stays as it was
        self.executes = True  # False: the lease is taken only to end the run
        self._before: RunRow | None = None
        self._waited_for: RunRow | None = None  # the run of another process
        self._token: str | None = None  # of the lease that it runs under
        self._branch = branch
        self._now_us = now_us
        self._plan = plan
        self.retries = retries

    @property
    def id(self) -> str:
        """Return the id of the run."""
        assert self.row is not None
        return self.row.id

    def begin(self, store: Backend, token: str, holder: str) -> Record | None:
        """Return the record to store with the lease that has this token; None if there is no run to execute.

        Raises Fenced while another process executes a run of the branch: only its end shows what is to be done.
        """
        found = newest_run(store, self._branch)
        newest = None if found is None else row_of(found.record)
        if found is not None and newest is not None and is_executed(found, newest, token):
            assert found.lease is not None
            self._waited_for = self._waited_for or newest
            raise fenced(self._branch, 0, found.lease.epoch, found.lease.owner, found.lease.left_us)
        row = self._plan(store, newest, self._waited_for)
        self._before, self.row, self._token = row, row, token
        if row is None:
            return None
        self.is_new = not row.stored.version
        begun = started(row, token, holder, self._now_us())
        if begun.failures:
            begun = with_step(begun, row, progress_of(store, self._branch))
        return begun.sealed()

    def began(self, stored: Record | None) -> None:
        """Note that the record is stored."""
        self.row = None if stored is None else row_of(stored)

    def taken(self, store: Backend, before: RunRow, stored: Record) -> RunRow:
        """Note that a claim has taken this run."""
        self._before, self.row = before, row_of(stored)
        self._token = self.row.token
        if self.row.failures:
            step = progress_of(store, self._branch)
            self.row = change_run(
                store, self.row, lambda row: None if (new := with_step(row, before, step)) == row else new
            )
        return self.row

    def attach(self, store: Backend, token: str, holder: str) -> None:
        """Store the record under a lease that the caller took itself, or without one."""
        while True:
            record = self.begin(store, token, holder)
            stored = None if record is None else store.put_record(record)
            if record is None or stored is None or stored.body == record.body:
                self.began(stored)
                return

    def finish(self, store: Backend) -> Record | None:
        """Return the record to store when the lease is released; None if there is none."""
        row, before = self.row, self._before
        if row is None or before is None:
            return None
        stored = store.record("run", row.stored.branch, row.id)
        if stored is None or (row := row_of(stored)).status is not RunStatus.RUNNING or row.token != self._token:
            return None  # it was deleted, or another process has taken it over
        if not self.executes:
            row = replace(row, attempts=before.attempts, holder=before.holder, started_us=before.started_us)
        if self.outcome is not None:
            step = progress_of(store, self._branch) if self.outcome.status is RunStatus.FAILED else None
            return ended(row, self.outcome, self._now_us(), before.news, self.retries, step).sealed()
        if before.status is RunStatus.RUNNING or self.is_new:
            return ended(row, ABANDONED, self._now_us(), before.news, None).sealed()
        due = self._now_us() if row.news > before.news and before.status in WAITING else before.due_us
        return replace(before, stored=row.stored, news=row.news, due_us=due, updated_us=self._now_us()).sealed()

    def detach(self, store: Backend) -> None:
        """Store the outcome under a lease that the caller keeps, or without one."""
        while (record := self.finish(store)) is not None:
            if store.put_record(record).body == record.body:
                self.drop_unused(store, record)
                return

    def drop_unused(self, store: Backend, record: Record | None = None) -> None:
        """Delete the record of a run that was refused before anything of it was stored."""
        if self.is_new and self.outcome is None and self.row is not None:
            stored = store.record("run", self.row.stored.branch, self.row.id)
            if stored is not None and stored.run is not None and stored.run.status == RunStatus.ABANDONED:
                store.drop_records([stored])

    def see_news(self, store: Backend) -> None:
        """Note that the caller knows all answers that are stored now."""
        if self.row is not None and self._before is not None:
            stored = store.record("run", self.row.stored.branch, self.row.id)
            if stored is not None:
                self._before = replace(self._before, news=row_of(stored).news)

    def stop_request(self, store: Backend) -> RunRow | None:
        """Return the run as it is stored now if a person asked to cancel it."""
        if self.row is None:
            return None
        stored = store.record("run", self.row.stored.branch, self.row.id)
        found = None if stored is None else row_of(stored)
        return found if found is not None and found.cancelled_by is not None else None


def was_joined(store: Backend, waited_for: RunRow | None, digest: bytes) -> bool:
    """Return whether the run that the caller wanted to continue ended while the caller waited for it."""
    if waited_for is None or (digest and waited_for.input_digest != digest):
        return False
    stored = store.record("run", waited_for.stored.branch, waited_for.id)
    return stored is not None and row_of(stored).is_over


def settle_over(store: Backend, row: RunRow, head: CheckpointMeta | None, now_us: int) -> RunRow:
    """Return a run; if its process died after its last checkpoint, record its end first."""
    if row.is_over or head is None or head.run_id != row.id or not head.is_over:
        return row
    return change_run(
        store, row, lambda row: None if row.is_over else ended(row, outcome_of_head(head), now_us, row.news, None)
    )


def end_for_good(store: Backend, services: Services, cursor: Cursor, run_id: str | None) -> None:
    """Store a checkpoint that ends the unfinished run of a branch, and close its questions."""
    head = load.latest(store, cursor)
    if head is None or head.is_over or head.run_id not in (run_id, None):
        return
    fields: CheckpointFields = {
        "run_id": run_id,
        "graph": head.graph,
        "graph_hash": head.graph_hash,
        "last_node": head.last_node,
        "iteration": head.iteration,
        "metadata": head.metadata,
        "tokens_used": head.tokens_used,
        "cost_estimate": head.cost_estimate,
        "trigger": "cancelled",
        "continuation": End(),
    }
    save_append(store, services, cursor, {}, {}, (), SaveRequest(fields))
    close_ended(store, services, cursor)


def check_same(
    store: Backend,
    row: RunRow,
    kind: str,
    name: str,
    digest: bytes | None = None,
    key: str | None = None,
    head: CheckpointMeta | None = None,
) -> None:
    """Raise InvalidInput unless an unfinished run is of this graph or loop, with this input and this key.

    Without an input, any is fine if it is stored (``head`` is the newest checkpoint of the branch); without a key, any.
    """
    thread, status = row.stored.branch.thread, row.status
    if status is RunStatus.RUNNING and is_alive(Holder.parse(row.holder)) is False:
        status = RunStatus.ABANDONED
    if (row.kind, row.name) != (kind, name):
        raise InvalidInput(
            f"thread {thread!r} has an unfinished run of {row.kind} {row.name!r} ({status.value})",
            thread=thread,
            hint=f"Continue it with that {row.kind}, end it with run.cancel(), or use another thread",
        )
    other = "key" if key not in (None, row.key) else "input" if digest not in (None, row.input_digest) else ""
    if other:
        raise InvalidInput(
            f"thread {thread!r} has an unfinished run of {kind} {name!r} with another {other} ({status.value})",
            thread=thread,
            hint=f"Leave the {other} out of run() to continue it, end it with run.cancel(), or use another thread",
        )
    if digest is None and row.input_digest and row.input is None and not is_begun(store, row, head):
        raise InvalidInput(
            f"thread {thread!r} has a run of {kind} {name!r} whose process died before its input was stored",
            thread=thread,
            hint="Pass the input again, or end the run with run.cancel()",
        )


def retried(change: Callable[[], T]) -> T:
    """Call a function again while another writer is faster."""
    while True:
        try:
            return change()
        except Conflict as conflict:
            if not isinstance(conflict.winner, Record | None):
                raise
