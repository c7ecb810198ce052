"""Sessions: records that a run is under way, so that a run that died can be distinguished from one that ended.

A session gives no right to write; take a lease for that. The store's heartbeat keeps it alive until it ends with a
reason. The stored rows and the lists are in ``operations.sessions``.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from backstay.errors import BackstayError, Corrupted, InvalidInput, NotFound
from backstay.model.ids import check_label
from backstay.operations.cursor import Handle
from backstay.operations.leases import Renewal, this_process
from backstay.operations.records import all_records
from backstay.operations.rows import to_microseconds
from backstay.operations.sessions import SessionRow, end_session, end_session_by_id, is_gone, local_sessions, row_of
from backstay.store.base import Backend
from backstay.store.records import Record
from backstay.thread.access import handle_of
from backstay.thread.lease import add_failure_note, check_owner, check_ttl, to_us

if TYPE_CHECKING:
    from types import TracebackType

    from backstay.thread.thread import AsyncThread, Thread

COMPLETED = "completed"
TAKEN_OVER = "taken over"
_NAME_LENGTH_MAX = 200


class SessionBase:
    """One run of one branch, from its start to its end. An object can be used only once."""

    def __init__(self, handle: Handle, owner: str | None, note: str, ttl: float) -> None:
        self.id = handle.services.new_id()
        self.owner = check_owner(owner)
        self.note = check_label(note, "note")
        self.ttl = check_ttl(ttl)
        self._handle = handle
        self._branch = handle.cursor.branch
        self._renewal: Renewal | None = None
        self._row: SessionRow | None = None  # as this process last wrote it
        self._entered = False
        self._ended = False
        self._process = os.getpid()

    def _enter(self) -> None:
        if self._entered:
            raise InvalidInput("a session can be entered only once", hint="Start another: thread.session()")
        self._entered = True
        self._process = os.getpid()

    def _start(self, store: Backend) -> None:
        """Start the session, and end earlier sessions of this branch whose process is gone. Needs the handle's lock."""
        if self._ended:  # the caller was cancelled
            return
        started, now_us = time.monotonic(), self._now_us()
        fresh = Record("session", self._branch, self.id, b"", True)
        row = SessionRow(fresh, self.owner, str(this_process()), self.note, now_us, now_us)
        # A weak reference: once the object is gone, no code can end the session, so it must not be renewed forever.
        me = weakref.ref(self)
        local_sessions[self.id] = me
        self._renewal = Renewal(self.ttl, started, lambda: (run := me()) is not None and run._renew())
        self._row = row_of(store.put_record(row.sealed(), to_us(self.ttl)))
        self._handle.services.heartbeat.add(self._renewal)
        try:
            for stored in all_records(store, "session", self._branch.namespace, self._branch.thread, open_only=True):
                if stored.branch == self._branch and stored.key != self.id:
                    with contextlib.suppress(Corrupted):  # a damaged one is reported by lists and by check()
                        earlier = row_of(stored)
                        if is_gone(earlier):
                            end_session(store, earlier, self._now_us(), TAKEN_OVER)
        except BackstayError:
            with contextlib.suppress(BackstayError):
                self._end(store, "failed to start")
            raise

    def _end(self, store: Backend, reason: str) -> None:
        """Record the end, once. Needs the handle's lock. A forked child does not end its parent's session."""
        if self._ended or self._process != os.getpid():
            return
        if self._renewal is not None:
            self._renewal.stopped = True
            self._handle.services.heartbeat.remove(self._renewal)
            if self._row is not None:
                end_session(store, self._row, self._now_us(), reason)
            else:  # interrupted before it was known whether it was stored
                end_session_by_id(store, self._branch.namespace, self.id, self._now_us(), reason)
            local_sessions.pop(self.id, None)
        self._ended = True

    def _check_reason(self, reason: str) -> str:
        if not self._entered:
            raise InvalidInput("the session has not started", hint="Write: with thread.session() as session: …")
        if not check_label(reason, "reason"):
            raise InvalidInput("a session needs a reason to end", hint='For example session.end("out of budget")')
        return reason

    def _renew(self) -> bool:
        """Record that the run is alive; return False if the session was deleted or has ended."""
        row, now_us = self._row, self._now_us()
        with contextlib.suppress(NotFound):
            while row is not None and row.reason is None:
                renewed = replace(row, seen_us=now_us)
                self._row = row = row_of(self._handle.access.store.put_record(renewed.sealed(), to_us(self.ttl)))
                if row.seen_us == now_us:
                    return True
        return False

    def _now_us(self) -> int:
        return to_microseconds(self._handle.services.now())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._branch.thread!r} by {self.owner!r}>"


class RunSession(SessionBase):
    """A run of a branch, while a ``with`` block runs. Attributes: ``id``, ``thread``, ``owner``, ``note``."""

    def __init__(self, thread: Thread, owner: str | None, note: str, ttl: float) -> None:
        super().__init__(handle_of(thread), owner, note, ttl)
        self.thread = thread

    def end(self, reason: str) -> None:
        """End the session with a reason of your own. The end of the block then changes nothing."""
        self._handle.run(self._end, self._check_reason(reason))

    def __enter__(self) -> RunSession:
        self._enter()
        try:
            self._handle.run(self._start)
        except BackstayError:
            raise
        except BaseException as interrupt:
            self._handle.run(self._end, _reason(interrupt))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self._handle.run(self._end, _reason(error))
        except Exception as failure:
            if error is None:
                raise
            add_failure_note(error, failure)
        except BaseException as interrupt:  # try again, or it would look alive as long as the process lives
            self._handle.run(self._end, _reason(interrupt))
            raise


class AsyncRunSession(SessionBase):
    """A run of a branch, while an ``async with`` block runs. Attributes: ``id``, ``thread``, ``owner``, ``note``."""

    def __init__(self, thread: AsyncThread, owner: str | None, note: str, ttl: float) -> None:
        super().__init__(handle_of(thread), owner, note, ttl)
        self.thread = thread

    async def end(self, reason: str) -> None:
        """End the session with a reason of your own. The end of the block then changes nothing."""
        await self._handle.arun(self._end, self._check_reason(reason))

    async def __aenter__(self) -> AsyncRunSession:
        self._enter()
        await self._handle.arun_undoable(self._start, lambda store: self._end(store, "abandoned"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            await self._handle.arun(self._end, _reason(error))
        except Exception as failure:
            if error is None:
                raise
            add_failure_note(error, failure)


def _reason(error: BaseException | None) -> str:
    """Return why a block ended: the type of an error only, since its message may contain secrets."""
    if error is None:
        return COMPLETED
    return f"failed: {type(error).__name__[:_NAME_LENGTH_MAX].encode(errors='replace').decode()}"
