"""Group commit: the first writer commits for all that come while it works, so that they share one fsync.

A job is a function of the connection; it runs inside the leader's transaction, in a savepoint of its own when there
are several, so one refused job does not undo the others. A lone writer leads at once, in its own thread.

What an error means:
- raised by a job (a Conflict, say): that job alone is undone, its caller gets the error;
- raised by SQLite before COMMIT: everything is rolled back; each job of a group is then tried alone;
- raised by COMMIT itself: nobody can know, so every caller of the group gets OutcomeUnknown, and the connection, whose
  file descriptor may have lost a failed fsync, is never used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import apsw

from holdfast.errors import HoldfastError, OutcomeUnknown, StoreRefused
from holdfast.store.sqlite.database import Database, translate
from holdfast.store.sqlite.files import Connection

GROUP_JOBS_MAX = 256

T = TypeVar("T")
Job = Callable[[apsw.Connection], Any]


class _Ticket:
    __slots__ = ("error", "job", "leads", "name", "result", "wake")

    def __init__(self, job: Job, name: str | None) -> None:
        self.job = job
        self.name = name
        self.result: Any = None
        self.error: BaseException | None = None
        self.leads = False
        self.wake = threading.Lock()
        self.wake.acquire()

    def settle(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class Writer:
    """The one write connection of this process, and the queue before it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None
        self._mutex = threading.Lock()
        self._queue: list[_Ticket] = []
        self._led = False

    def submit(self, job: Callable[[apsw.Connection], T], name: str | None = None) -> T:
        """Run a job in a transaction, alone or with others, and return its result once it is durable.

        ``name`` is the checkpoint's id, for the error that says its outcome is unknown.
        """
        ticket = _Ticket(job, name)
        with self._mutex:
            self._queue.append(ticket)
            ticket.leads = not self._led
            self._led = True
        if not ticket.leads:
            self._wait(ticket)
        if ticket.leads:
            self._lead()
        return ticket.settle()  # type: ignore[no-any-return]  # the result of the caller's own job

    def _wait(self, ticket: _Ticket) -> None:
        try:
            ticket.wake.acquire()
        except BaseException:
            # Ctrl-C while waiting. A ticket nobody has taken yet must not stay in the queue, and one that was just made
            # leader must lead: either way somebody else would wait for it for ever.
            with self._mutex:
                if ticket in self._queue and not ticket.leads:
                    self._queue.remove(ticket)
            if ticket.leads:
                self._lead()
            raise

    def close(self) -> None:
        """Close the connection; the next job opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _lead(self) -> None:
        with self._mutex:
            group, self._queue = self._queue[:GROUP_JOBS_MAX], self._queue[GROUP_JOBS_MAX:]
        mine = group[0]
        try:
            self._run(group)
        except BaseException as error:
            # A result only says that a job ran. Whether its transaction was committed nobody knows here, so none is
            # called stored, and a transaction still open ends with its connection.
            self.close()
            for ticket in group:
                if ticket.error is None:
                    ticket.error = error if ticket is mine else _unknown(ticket, error)
        finally:
            with self._mutex:
                heir = self._queue[0] if self._queue else None
                self._led = heir is not None
                if heir is not None:
                    heir.leads = True
            for ticket in group[1:]:
                ticket.wake.release()
            if heir is not None:
                heir.wake.release()

    def _run(self, group: list[_Ticket]) -> None:
        self._database.lock.acquire()
        try:
            if self._attempt(group):
                return
            for ticket in group:
                self._attempt([ticket])
        finally:
            self._database.lock.release()

    def _attempt(self, group: list[_Ticket]) -> bool:
        """Run the jobs in one transaction; return False if a group was rolled back and is to be tried one by one."""
        try:
            connection = self._connected()
            self._database.begin(connection)
        except (HoldfastError, apsw.Error) as error:
            self._fail(group, error)
            return True
        try:
            for ticket in group:
                _run_job(connection, ticket, alone=len(group) == 1)
        except apsw.Error as error:
            self._roll_back(connection)
            if len(group) > 1:
                return False
            self._fail(group, error)
            return True
        except BaseException:
            self._roll_back(connection)
            raise
        if all(ticket.error is not None for ticket in group):
            self._roll_back(connection)
            return True
        self._commit(connection, group)
        return True

    def _commit(self, connection: Connection, group: list[_Ticket]) -> None:
        try:
            connection.execute("COMMIT")
            self._database.confirm(connection)
        except (apsw.Error, StoreRefused) as error:
            if isinstance(error, apsw.BusyError | apsw.FullError):
                # Neither leaves a commit in the log: a full disk fails before its last frame is written.
                self._roll_back(connection)
                self._fail(group, error)
                return
            # Rolling back or trying again on this descriptor could hide a failed fsync: leave it, open another.
            self.close()
            for ticket in group:
                if ticket.error is None:
                    ticket.error = _unknown(ticket, error)

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._database.connect()
        return self._connection

    def _roll_back(self, connection: apsw.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            self.close()

    def _fail(self, group: list[_Ticket], error: Exception) -> None:
        ours = translate(error, self._database.path) if isinstance(error, apsw.Error) else error
        if isinstance(error, apsw.IOError):
            self.close()
        for ticket in group:
            if ticket.error is None:
                ticket.error = ours


def _run_job(connection: apsw.Connection, ticket: _Ticket, alone: bool) -> None:
    """Run one job; what the job itself refuses is undone and kept as its result."""
    ticket.error = None
    if alone:
        try:
            ticket.result = ticket.job(connection)
        except HoldfastError as error:
            ticket.error = error
        return
    connection.execute("SAVEPOINT job")
    try:
        ticket.result = ticket.job(connection)
    except HoldfastError as error:
        ticket.error = error
        connection.execute("ROLLBACK TO job")
    connection.execute("RELEASE job")


def _unknown(ticket: _Ticket, error: BaseException) -> OutcomeUnknown:
    unknown = OutcomeUnknown(
        "the store failed while committing, so this may or may not be stored",
        checkpoint=ticket.name,
        hint="Make the same call again, with the same id or token: it tells, and does it if it was not done",
    )
    unknown.__cause__ = error
    return unknown
