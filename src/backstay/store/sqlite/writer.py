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

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import apsw

from backstay.errors import BackstayError, OutcomeUnknown, StoreRefused
from backstay.store.layout import ODD_VALUE_ERRORS, odd_value
from backstay.store.lock import is_mine, reentered
from backstay.store.sqlite.database import Database, translate, translated
from backstay.store.sqlite.files import Connection

GROUP_JOBS_MAX = 256
LOOK_UP_S = 0.1
"""How long somebody waits to be told before looking for itself, in case the leader was interrupted."""

T = TypeVar("T")
Job = Callable[[apsw.Connection], Any]


class _Ticket:
    __slots__ = ("error", "is_durable", "is_settled", "job", "name", "result", "wake")

    def __init__(self, job: Job, name: str | None) -> None:
        self.job = job
        self.name = name
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_durable = False  # its transaction was committed, so the result counts
        self.is_settled = False  # nobody will run it any more
        self.wake = threading.Lock()  # free when there is something to look at
        self.wake.acquire()

    def settle(self) -> None:
        self.is_settled = True
        if self.wake.locked():  # only who has the turn frees it
            self.wake.release()


class Writer:
    """The one write connection of this process, and the queue before it.

    Who holds ``_turn`` leads. Nothing else says who leads, so an exception between any two instructions leaves no
    leader behind; what it may leave is somebody who waits for a word that never comes, and who therefore looks up by
    itself now and then.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None
        self._turn = threading.RLock()
        self._queue: deque[_Ticket] = deque()
        self._is_led = False  # a hint: somebody has the turn, so wait to be told instead of queueing for it

    def submit(self, job: Callable[[apsw.Connection], T], name: str | None = None) -> T:
        """Run a job in a transaction, alone or with others, and return its result once it is durable.

        ``name`` is the checkpoint's id, for the error that says its outcome is unknown.
        """
        if is_mine(self._turn):
            raise reentered(self._database.path)
        ticket = _Ticket(job, name)
        self._queue.append(ticket)
        try:
            if self._is_led:
                ticket.wake.acquire(timeout=LOOK_UP_S)
            while not ticket.is_settled:
                with self._turn:
                    self._lead(ticket)
        except BaseException:
            with contextlib.suppress(ValueError):  # somebody has taken it: whether it is stored nobody will ask
                self._queue.remove(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error
        if not ticket.is_durable:  # the leader was interrupted more than once, and could not even say so
            raise _unknown(ticket, None)
        return ticket.result  # type: ignore[no-any-return]  # the result of the caller's own job

    def alone(self, work: Callable[[apsw.Connection], T]) -> T:
        """Do work that is no transaction on a connection of its own, while nobody else writes."""
        if is_mine(self._turn):
            raise reentered(self._database.path)
        database = self._database
        with self._turn, database.lock.take(), translated(database.path), contextlib.closing(database.connect()) as own:
            done = work(own)
            database.confirm(own)
            return done

    def close(self) -> None:
        """Close the connection; the next job opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _lead(self, mine: _Ticket) -> None:
        """Commit for all that wait, until the caller's own job is done."""
        self._is_led = True
        try:
            while not mine.is_settled:
                group: list[_Ticket] = []
                while self._queue and len(group) < GROUP_JOBS_MAX:
                    group.append(self._queue.popleft())
                if not group:  # who led before took it and never came to the end
                    mine.settle()
                    break
                self._settle(group, mine)
        finally:
            self._is_led = False
            if self._queue and (first := self._queue[0].wake).locked():
                first.release()

    def _settle(self, group: list[_Ticket], mine: _Ticket) -> None:
        try:
            # A leader that was interrupted again and again may have left a transaction that it could not roll back. It
            # ends before the lock is waited for: whoever holds that may be waiting for this transaction.
            if self._connection is not None and self._connection.in_transaction:
                self.close()
            with self._database.lock.take():
                if not self._attempt(group):
                    for ticket in group:
                        self._attempt([ticket])
        except BackstayError as error:
            self._fail(group, error)  # the lock could not be had, so nothing was begun
        except BaseException:
            # A result only says that a job ran. Whether its transaction was committed nobody knows here, so none is
            # called stored, and a transaction still open ends with its connection. The others are not told why: the
            # interrupt keeps this frame alive, and is its own thread's.
            self.close()
            for ticket in group:
                if ticket is not mine and ticket.error is None and not ticket.is_durable:
                    ticket.error = _unknown(ticket, None)
            raise
        finally:
            for ticket in group:
                ticket.settle()

    def _attempt(self, group: list[_Ticket]) -> bool:
        """Run the jobs in one transaction; return False if a group was rolled back and is to be tried one by one."""
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = self._database.connect()
            self._database.begin(connection)
        except (BackstayError, apsw.Error) as error:
            self._fail(group, error)
            return True
        try:
            for ticket in group:
                self._run_job(connection, ticket, alone=len(group) == 1)
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
        if self._commit(connection, group):
            for ticket in group:
                ticket.is_durable = True
        return True

    def _run_job(self, connection: Connection, ticket: _Ticket, alone: bool) -> None:
        """Run one job; what the job itself refuses is undone and kept as its result."""
        ticket.error = None
        if not alone:
            connection.execute("SAVEPOINT job")
        try:
            ticket.result = ticket.job(connection)
        except BackstayError as error:
            ticket.error = error
        except ODD_VALUE_ERRORS as error:
            ticket.error = odd_value(error, self._database.path)
            ticket.error.__cause__ = error
        if not alone:
            if ticket.error is not None:
                connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")

    def _commit(self, connection: Connection, group: list[_Ticket]) -> bool:
        """Commit and tell whether that is certain; else each ticket has its error."""
        try:
            connection.execute("COMMIT")
            self._database.confirm(connection)
            return True
        except (apsw.Error, StoreRefused) as error:
            if isinstance(error, apsw.BusyError | apsw.FullError):
                # Neither leaves a commit in the log: a full disk fails before its last frame is written.
                self._roll_back(connection)
                self._fail(group, error)
                return False
            # Rolling back or trying again on this descriptor could hide a failed fsync: leave it, open another.
            self.close()
            for ticket in group:
                if ticket.error is None:
                    ticket.error = _unknown(ticket, error)
            return False

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


def _unknown(ticket: _Ticket, error: BaseException | None) -> OutcomeUnknown:
    unknown = OutcomeUnknown(
        "the store failed while committing, so this may or may not be stored",
        checkpoint=ticket.name,
        hint="Make the same call again, with the same id or token: it tells, and does it if it was not done",
    )
    unknown.__cause__ = error
    return unknown
