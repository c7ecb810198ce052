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
from typing import TYPE_CHECKING

from backstay.errors import BackstayError, Corrupted, DecodeError, InvalidInput
from backstay.model.damaged import Damaged
from backstay.model.ids import check_label
from backstay.model.session import InterruptedRun, Session
from backstay.store.base import Backend, Query
from backstay.store.layout import UNREADABLE
from backstay.store.sessions import SessionRow
from backstay.thread.access import Handle, handle_of
from backstay.thread.damage import read_each, unread
from backstay.thread.heartbeat import Pulse
from backstay.thread.lease import check_owner, check_ttl, note_beside, to_us
from backstay.thread.process import is_alive, this_process
from backstay.thread.record import from_microseconds, meta_of, to_microseconds

if TYPE_CHECKING:
    from types import TracebackType

    from backstay.thread.thread import Thread
    from backstay.thread.thread_async import AsyncThread

COMPLETED = "completed"
TAKEN_OVER = "taken over"
_NAME_LENGTH_MAX = 200

_here: dict[str, weakref.ref[SessionBase]] = {}
"""The sessions of this process. One whose object is gone was left by an interrupt before its end could be recorded."""


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
        row = SessionRow(self.id, self._lane, self.owner, str(this_process()), self.note, now_us, now_us)
        me = _here[self.id] = weakref.ref(self)  # whom nobody can end any more must not be kept alive for ever
        self._pulse = Pulse(self.ttl, began, lambda: (run := me()) is not None and run._beat())
        store.begin(row, to_us(self.ttl))
        self._handle.context.heartbeat.add(self._pulse)
        try:
            self._taking_over(store)
        except BackstayError:
            with contextlib.suppress(BackstayError):
                self._ending(store, "failed to begin")
            raise

    def _taking_over(self, store: Backend) -> None:
        rows = store.sessions(self._lane.namespace, self._lane.thread, True)
        for row in rows:
            if row.lane == self._lane and row.id != self.id and is_gone(row):
                self._recording(store, row.id, TAKEN_OVER)

    def _ending(self, store: Backend, reason: str) -> None:
        """Record the end, once; to be run with the handle's lock.

        A session that a forked child inherited is not the child's to end.
        """
        if self._ended or self._process != os.getpid():
            return
        if self._pulse is not None:
            self._pulse.stopped = True
            self._handle.context.heartbeat.remove(self._pulse)
            self._recording(store, self.id, reason)
            _here.pop(self.id, None)
        self._ended = True

    def _recording(self, store: Backend, name: str, reason: str) -> None:
        namespace, now_us = self._lane.namespace, self._now_us()
        store.end(namespace, name, now_us, reason)

    def _checked(self, reason: str) -> str:
        if not self._entered:
            raise InvalidInput("the session has not begun", hint="Write: with thread.session() as session: …")
        if not check_label(reason, "reason"):
            raise InvalidInput("a session ends for a reason", hint='Write for example session.end("out of budget")')
        return reason

    def _beat(self) -> bool:
        return self._handle.access.store.beat(self._lane.namespace, self.id, self._now_us(), to_us(self.ttl))

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
    rows = store.sessions(namespace, None, active)
    return [*lost, *read_each(rows, session_of, _place)]


def interrupted(store: Backend, namespace: str) -> list[InterruptedRun | Damaged]:
    """Return the runs that did not end and whose owner is gone, the one seen last first."""
    lost = unread(store, namespace, None)
    rows = store.sessions(namespace, None, True)
    gone = sorted(filter(is_gone, rows), key=lambda row: row.seen_us, reverse=True)
    newest = {}
    for row in gone:
        newest[row.id] = store.find(Query(*row.lane, limit=1))

    def read(row: SessionRow) -> InterruptedRun:
        run, found = session_of(row), newest[row.id]
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

    return [*lost, *read_each(gone, read, _place)]


def session_of(row: SessionRow) -> Session:
    """Return a stored session; Corrupted if it cannot be read."""
    try:
        if UNREADABLE in row.id:
            raise DecodeError("its id cannot be read")
        return Session(
            id=row.id,
            thread_id=row.lane.thread,
            branch=row.lane.branch,
            scope=row.lane.scope,
            owner=row.owner,
            note=row.note,
            started_at=from_microseconds(row.started_us),
            last_seen=from_microseconds(row.seen_us),
            ended_at=None if row.ended_us is None else from_microseconds(row.ended_us),
            reason=row.reason,
        )
    except DecodeError as error:
        name = row.id.rstrip(UNREADABLE)
        hint = "Nothing else is affected. Look at the thread itself to see how far it came"
        raise Corrupted(f"session {name}: {error.what}", thread=row.lane.thread, hint=hint) from error


def _place(row: SessionRow) -> tuple[str, str | None, int]:
    return row.lane.thread, None if UNREADABLE in row.id else row.id, 0


def is_gone(row: SessionRow) -> bool:
    """Tell whether the owner of a session that did not end is gone: by the kernel if it can know, else by the beats."""
    alive = is_alive(row.process)
    here = _here.get(row.id)
    if here is not None and here() is None and row.process == str(this_process()):
        return True
    return row.left_us <= 0 if alive is None else not alive
