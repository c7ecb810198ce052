"""Stored sessions: their rows and lists, and whether the process of a session is gone.

A session records that a run is under way. It gives no right to write; a lease does. ``thread.session`` starts it, keeps
it alive and ends it.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, replace
from typing import Any

from backstay.errors import Corrupted, DecodeError, InvalidInput, NotFound
from backstay.model.runs import ExpiredLease, InterruptedRun, Session
from backstay.operations.leases import is_alive, this_process
from backstay.operations.listing import read_each, unreadable
from backstay.operations.records import all_records, damaged, find_by_id, seal, unseal
from backstay.operations.rows import Damaged, from_microseconds, meta_of
from backstay.store.base import Backend, Query
from backstay.store.layout import UNREADABLE
from backstay.store.leases import LeaseStatus
from backstay.store.records import Record

local_sessions: dict[str, weakref.ref[Any]] = {}
"""The sessions of this process. If the object of one is gone, an interrupt kept its end from being recorded."""

_TYPES = (str, str, str, int, int, (int, type(None)), (str, type(None)))


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A stored session, every byte checked. Times are by the caller's clock, for people."""

    stored: Record
    owner: str
    process: str  # identifies the process; see ``operations.leases``
    note: str
    started_us: int
    seen_us: int  # time of the last renewal
    ended_us: int | None = None
    reason: str | None = None  # why it ended; None = still open

    def sealed(self) -> Record:
        """Return the record to be stored."""
        fields = [self.owner, self.process, self.note, self.started_us, self.seen_us, self.ended_us, self.reason]
        return seal(self.stored, self.reason is None, fields)


def row_of(stored: Record) -> SessionRow:
    """Return a stored session as a row, every byte checked."""
    row = SessionRow(stored, *unseal(stored, _TYPES))
    if stored.open != (row.reason is None):
        raise damaged(stored, "it does not have the expected form")
    return row


def end_session(store: Backend, row: SessionRow, now_us: int, reason: str) -> None:
    """Record why a session ended; the first reason stays. It may be renewed or deleted meanwhile."""
    with contextlib.suppress(NotFound):
        while row.reason is None:
            row = row_of(store.put_record(replace(row, ended_us=now_us, reason=reason).sealed()))


def end_session_by_id(store: Backend, namespace: str, name: str, now_us: int, reason: str) -> bool:
    """Record why a session ended; return False if it does not exist or has ended before."""
    stored = find_by_id(store, "session", namespace, name)
    if stored is None or not stored.open:
        return False
    end_session(store, row_of(stored), now_us, reason)
    return True


def sessions(store: Backend, namespace: str, active: bool) -> list[Session | Damaged]:
    """Return sessions, oldest first."""
    if not isinstance(active, bool):
        raise InvalidInput(f"active must be True or False, not {type(active).__name__}")
    lost = unreadable(store, namespace, None)
    return [*lost, *read_each(all_records(store, "session", namespace, None, active), session_of, _place)]


def interrupted(store: Backend, namespace: str) -> list[InterruptedRun | Damaged]:
    """Return the runs that did not end and whose process is gone, most recently seen first."""
    lost = unreadable(store, namespace, None)
    rows = read_each(all_records(store, "session", namespace, None, open_only=True), row_of, _place)
    broken = [row for row in rows if isinstance(row, Damaged)]
    gone = [row for row in rows if not isinstance(row, Damaged) and is_gone(row)]
    gone.sort(key=lambda row: row.seen_us, reverse=True)
    newest = {row.stored.key: store.find(Query(*row.stored.branch, limit=1)) for row in gone}

    def read(row: SessionRow) -> InterruptedRun:
        run, found = _shown(row), newest[row.stored.key]
        return InterruptedRun(
            session_id=run.id,
            thread_id=run.thread_id,
            branch=run.branch,
            scope=run.scope,
            owner=run.owner,
            note=run.note,
            started_at=run.started_at,
            last_seen=run.last_seen,
            checkpoint=meta_of(found[0]) if found else None,
        )

    return [*lost, *broken, *read_each(gone, read, lambda row: _place(row.stored))]


def expired_leases(store: Backend, namespace: str) -> list[ExpiredLease | Damaged]:
    """Return leases that were not renewed or released in time, oldest first."""
    lost = unreadable(store, namespace, None)
    rows = store.leases(namespace, None, True)

    def read(row: LeaseStatus) -> ExpiredLease:
        if UNREADABLE in row.owner:
            what = f"the lease of branch {row.branch.name!r} cannot be read"
            raise Corrupted(what, thread=row.branch.thread, hint="Repair the store with store.repair()")
        return ExpiredLease(
            thread_id=row.branch.thread,
            branch=row.branch.name,
            scope=row.branch.scope,
            owner=row.owner,
            epoch=row.epoch,
            overdue=-row.left_us / 1e6,
        )

    return [*lost, *read_each(rows, read, lambda row: (row.branch.thread, None, 0))]


def session_of(stored: Record) -> Session:
    """Return a stored session; Corrupted if it cannot be read."""
    return _shown(row_of(stored))


def _shown(row: SessionRow) -> Session:
    branch = row.stored.branch
    try:
        return Session(
            id=row.stored.key,
            thread_id=branch.thread,
            branch=branch.name,
            scope=branch.scope,
            owner=row.owner,
            note=row.note,
            started_at=from_microseconds(row.started_us),
            last_seen=from_microseconds(row.seen_us),
            ended_at=None if row.ended_us is None else from_microseconds(row.ended_us),
            reason=row.reason,
        )
    except DecodeError as error:
        raise damaged(row.stored, error.what) from error


def _place(stored: Record) -> tuple[str, str | None, int]:
    return stored.branch.thread, stored.key, 0


def is_gone(row: SessionRow) -> bool:
    """Return whether the process of an open session is gone: the kernel says so, or its renewals are overdue."""
    alive = is_alive(row.process)
    here = local_sessions.get(row.stored.key)
    if here is not None and here() is None and row.process == str(this_process()):
        return True
    return row.stored.left_us <= 0 if alive is None else not alive
