"""Sessions: a record that a run is under way, so that one that died can be told from one that ended.

A session gives no right to write; take a lease for that. It is begun, kept alive by the store's heartbeat, and ended
with a reason. Whether the owner of one that did not end is gone is asked of the kernel where it can know, and else told
by its heartbeats; see ``process``.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from backstay.errors import BackstayError, Corrupted, DecodeError, InvalidInput, NotFound
from backstay.model.damaged import Damaged
from backstay.model.ids import check_label
from backstay.model.session import InterruptedRun, Session
from backstay.store.base import Backend, Query
from backstay.store.records import Record
from backstay.thread.access import Handle, handle_of
from backstay.thread.damage import read_each, unread
from backstay.thread.heartbeat import Pulse
from backstay.thread.lease import check_owner, check_ttl, note_beside, to_us
from backstay.thread.process import is_alive, this_process
from backstay.thread.record import from_microseconds, meta_of, to_microseconds
from backstay.thread.records import all_records, damaged, find_by_id, seal, unseal

if TYPE_CHECKING:
    from types import TracebackType

    from backstay.thread.thread import Thread
    from backstay.thread.thread_async import AsyncThread

COMPLETED = "completed"
TAKEN_OVER = "taken over"
_NAME_LENGTH_MAX = 200

_here: dict[str, weakref.ref[SessionBase]] = {}
"""The sessions of this process. One whose object is gone was left by an interrupt before its end could be recorded."""


_TYPES = (str, str, str, int, int, (int, type(None)), (str, type(None)))


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as it is stored, every byte checked. Moments are the caller's clock, for people."""

    stored: Record
    owner: str
    process: str  # names the process exactly; see ``process``
    note: str
    started_us: int
    seen_us: int  # of the last beat
    ended_us: int | None = None
    reason: str | None = None  # why it ended; None while it has not

    def sealed(self) -> Record:
        """Return the record to be stored."""
        fields = [self.owner, self.process, self.note, self.started_us, self.seen_us, self.ended_us, self.reason]
        return seal(self.stored, self.reason is None, fields)


def row_of(stored: Record) -> SessionRow:
    """Return what a stored session says, every byte of it checked."""
    row = SessionRow(stored, *unseal(stored, _TYPES))
    if stored.open != (row.reason is None):
        raise damaged(stored, "it is not of the known form")
    return row


def end(store: Backend, row: SessionRow, now_us: int, reason: str) -> None:
    """Record why a session ended; the first reason stays. It may beat meanwhile, or be deleted."""
    with contextlib.suppress(NotFound):
        while row.reason is None:
            row = row_of(store.put_record(replace(row, ended_us=now_us, reason=reason).sealed()))


def end_by_id(store: Backend, namespace: str, name: str, now_us: int, reason: str) -> bool:
    """Record why a session ended; return False if it is not there or had ended before."""
    stored = find_by_id(store, "session", namespace, name)
    if stored is None or not stored.open:
        return False
    end(store, row_of(stored), now_us, reason)
    return True


class SessionBase:
    """One run of one branch, from its begin to its end. It is used once."""

    def __init__(self, handle: Handle, owner: str | None, note: str, ttl: float) -> None:
        self.id = handle.context.new_id()
        self.owner = check_owner(owner)
        self.note = check_label(note, "note")
        self.ttl = check_ttl(ttl)
        self._handle = handle
        self._lane = handle.cursor.lane
        self._pulse: Pulse | None = None
        self._row: SessionRow | None = None  # as it was when this process last wrote it
        self._entered = False
        self._ended = False
        self._process = os.getpid()

    def _enter(self) -> None:
        if self._entered:
            raise InvalidInput("a session is entered once", hint="Begin another: thread.session()")
        self._entered = True
        self._process = os.getpid()

    def _beginning(self, store: Backend) -> None:
        """Begin it, and end those before it on this branch whose owner is gone; to be run with the handle's lock."""
        if self._ended:  # nobody waited for it
            return
        began, now_us = time.monotonic(), self._now_us()
        fresh = Record("session", self._lane, self.id, b"", True)
        row = SessionRow(fresh, self.owner, str(this_process()), self.note, now_us, now_us)
        me = _here[self.id] = weakref.ref(self)  # whom nobody can end any more must not be kept alive for ever
        self._pulse = Pulse(self.ttl, began, lambda: (run := me()) is not None and run._beat())
        self._row = row_of(store.put_record(row.sealed(), to_us(self.ttl)))
        self._handle.context.heartbeat.add(self._pulse)
        try:
            self._taking_over(store)
        except BackstayError:
            with contextlib.suppress(BackstayError):
                self._ending(store, "failed to begin")
            raise

    def _taking_over(self, store: Backend) -> None:
        for stored in all_records(store, "session", self._lane.namespace, self._lane.thread, open_only=True):
            if stored.lane == self._lane and stored.key != self.id:
                with contextlib.suppress(Corrupted):  # whoever lists sessions, or checks the store, sees it
                    row = row_of(stored)
                    if is_gone(row):
                        end(store, row, self._now_us(), TAKEN_OVER)

    def _ending(self, store: Backend, reason: str) -> None:
        """Record the end, once; to be run with the handle's lock.

        A session that a forked child inherited is not the child's to end.
        """
        if self._ended or self._process != os.getpid():
            return
        if self._pulse is not None:
            self._pulse.stopped = True
            self._handle.context.heartbeat.remove(self._pulse)
            if self._row is not None:
                end(store, self._row, self._now_us(), reason)
            else:  # interrupted before it was known whether it was stored
                end_by_id(store, self._lane.namespace, self.id, self._now_us(), reason)
            _here.pop(self.id, None)
        self._ended = True

    def _checked(self, reason: str) -> str:
        if not self._entered:
            raise InvalidInput("the session has not begun", hint="Write: with thread.session() as session: …")
        if not check_label(reason, "reason"):
            raise InvalidInput("a session ends for a reason", hint='Write for example session.end("out of budget")')
        return reason

    def _beat(self) -> bool:
        """Say that it lives; return False if it is gone or has ended."""
        row, now_us = self._row, self._now_us()
        with contextlib.suppress(NotFound):
            while row is not None and row.reason is None:
                beaten = replace(row, seen_us=now_us)
                self._row = row = row_of(self._handle.access.store.put_record(beaten.sealed(), to_us(self.ttl)))
                if row.seen_us == now_us:
                    return True
        return False

    def _now_us(self) -> int:
        return to_microseconds(self._handle.context.now())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._lane.thread!r} by {self.owner!r}>"


class RunSession(SessionBase):
    """A run of a branch, for as long as a ``with`` block runs. Attributes: ``id``, ``thread``, ``owner``, ``note``."""

    def __init__(self, thread: Thread, owner: str | None, note: str, ttl: float) -> None:
        super().__init__(handle_of(thread), owner, note, ttl)
        self.thread = thread

    def end(self, reason: str) -> None:
        """End it for a reason of your own; what comes after that changes nothing."""
        self._handle.run(self._ending, self._checked(reason))

    def __enter__(self) -> RunSession:
        self._enter()
        try:
            self._handle.run(self._beginning)
        except BackstayError:
            raise
        except BaseException as interrupt:
            self._handle.run(self._ending, _reason(interrupt))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self._handle.run(self._ending, _reason(error))
        except Exception as failure:
            if error is None:
                raise
            note_beside(error, failure)
        except BaseException as interrupt:  # once more: else it would seem to go on for as long as the process lives
            self._handle.run(self._ending, _reason(interrupt))
            raise


class AsyncRunSession(SessionBase):
    """A run of a branch, for as long as an ``async with`` block runs.

    Attributes: ``id``, ``thread``, ``owner``, ``note``.
    """

    def __init__(self, thread: AsyncThread, owner: str | None, note: str, ttl: float) -> None:
        super().__init__(handle_of(thread), owner, note, ttl)
        self.thread = thread

    async def end(self, reason: str) -> None:
        """End it for a reason of your own; what comes after that changes nothing."""
        await self._handle.arun(self._ending, self._checked(reason))

    async def __aenter__(self) -> AsyncRunSession:
        self._enter()
        await self._handle.arun_undoable(self._beginning, lambda store: self._ending(store, "abandoned"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            await self._handle.arun(self._ending, _reason(error))
        except Exception as failure:
            if error is None:
                raise
            note_beside(error, failure)


def _reason(error: BaseException | None) -> str:
    """Return why a block ended: of an error its type only, since its message may hold anything."""
    if error is None:
        return COMPLETED
    return f"failed: {type(error).__name__[:_NAME_LENGTH_MAX].encode(errors='replace').decode()}"


# Lists of sessions ------------------------------------------------------------------------------------------------


def sessions(store: Backend, namespace: str, active: bool) -> list[Session | Damaged]:
    """Return sessions, the one begun first first."""
    if not isinstance(active, bool):
        raise InvalidInput(f"active must be True or False, not {type(active).__name__}")
    lost = unread(store, namespace, None)
    return [*lost, *read_each(all_records(store, "session", namespace, None, active), session_of, _place)]


def interrupted(store: Backend, namespace: str) -> list[InterruptedRun | Damaged]:
    """Return the runs that did not end and whose owner is gone, the one seen last first."""
    lost = unread(store, namespace, None)
    rows = read_each(all_records(store, "session", namespace, None, open_only=True), row_of, _place)
    broken = [row for row in rows if isinstance(row, Damaged)]
    gone = [row for row in rows if not isinstance(row, Damaged) and is_gone(row)]
    gone.sort(key=lambda row: row.seen_us, reverse=True)
    newest = {row.stored.key: store.find(Query(*row.stored.lane, limit=1)) for row in gone}

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


def session_of(stored: Record) -> Session:
    """Return a stored session; Corrupted if it cannot be read."""
    return _shown(row_of(stored))


def _shown(row: SessionRow) -> Session:
    lane = row.stored.lane
    try:
        return Session(
            id=row.stored.key,
            thread_id=lane.thread,
            branch=lane.branch,
            scope=lane.scope,
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
    return stored.lane.thread, stored.key, 0


def is_gone(row: SessionRow) -> bool:
    """Tell whether the owner of a session that did not end is gone: by the kernel if it can know, else by the beats."""
    alive = is_alive(row.process)
    here = _here.get(row.stored.key)
    if here is not None and here() is None and row.process == str(this_process()):
        return True
    return row.stored.left_us <= 0 if alive is None else not alive
