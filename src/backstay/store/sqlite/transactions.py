"""Run the verbs of the SQLite store on its file: reads on connections of their own, writes by group commit.

Group commit: the first writer commits for all that arrive while it works, so that they share one fsync. A job is a
function of the connection. It runs inside the leader's transaction, in a savepoint of its own when there are several
jobs, so one refused job does not undo the others. A single writer leads at once, in its own thread.

The meaning of an error:
- raised by a job (a Conflict, say): only that job is undone, and its caller gets the error;
- raised by SQLite before COMMIT: everything is rolled back, and each job of the group is tried alone;
- raised by COMMIT itself: the outcome is unknown, so every caller of the group gets OutcomeUnknown. The connection is
  not used again, because its file descriptor may hide a failed fsync.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from backstay.errors import BackstayError, Corrupted, OutcomeUnknown, StoreRefused
from backstay.store.atomic import failure
from backstay.store.layout import ODD_VALUE_ERRORS, odd_value
from backstay.store.leases import Clock, boot_clock
from backstay.store.lock import CallGuard, forget, is_mine, reentered, register
from backstay.store.sqlite import queries
from backstay.store.sqlite.database import Database, code_of, resolve_path, translate, translated
from backstay.store.sqlite.files import Connection

TIMEOUT_S = 30.0
"""How long a call waits for other processes before it raises StoreBusy."""

FOLD_WAIT_S = 1.0
GROUP_JOBS_MAX = 256
LOOK_UP_S = 0.1
"""How long a follower waits for the leader before it looks itself, in case the leader was interrupted."""

T = TypeVar("T")
P = ParamSpec("P")
Job = Callable[[Connection], Any]
_MARK_BYTES = 16


class _Ticket:
    __slots__ = ("error", "is_durable", "is_settled", "job", "name", "result", "wake")

    def __init__(self, job: Job, name: str | None) -> None:
        self.job = job
        self.name = name
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_durable = False  # its transaction was committed
        self.is_settled = False  # no leader will run it any more
        self.wake = threading.Lock()  # released when the caller should look at the ticket
        self.wake.acquire()

    def settle(self) -> None:
        self.is_settled = True
        if self.wake.locked():  # only the leader releases it
            self.wake.release()


class Writer:
    """The one write connection of this process, and the queue in front of it.

    The thread that holds ``_turn`` leads. Nothing else records who leads, so an exception between any two instructions
    leaves no leader behind. It may leave a follower whose wake-up never comes, so followers look for themselves now and
    then.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None
        self._turn = threading.RLock()
        self._queue: deque[_Ticket] = deque()
        self._is_led = False  # a hint: another thread leads, so wait for it instead of for the turn
        self._mark = b""  # what this writer leaves in the lock file, to see whether another has written meanwhile

    def submit(self, job: Callable[[Connection], T], name: str | None = None) -> T:
        """Run a job in a transaction, alone or with others, and return its result once it is durable.

        ``name`` is the checkpoint's id, for the error that reports an unknown outcome.
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
            with contextlib.suppress(ValueError):  # a leader took it; its outcome no longer matters
                self._queue.remove(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error
        if not ticket.is_durable:  # the leader was interrupted again before it could report
            raise _unknown(ticket, None)
        return ticket.result  # type: ignore[no-any-return]  # the result of the caller's own job

    def alone(self, work: Callable[[Connection], T]) -> T:
        """Run work outside a transaction, on a connection of its own, while no other thread or process writes."""
        if is_mine(self._turn):
            raise reentered(self._database.path)
        database = self._database
        with self._turn:
            self._end_transaction()
            with database.take() as held, translated(database.path):
                self._leave_mark(held)
                with contextlib.closing(database.connect()) as own:
                    done = work(own)
                    database.confirm(own)
                    return done

    def fold(self) -> bool:
        """Fold the log into the database unless it is being written; return False if this thread writes it."""
        if is_mine(self._turn):
            return False
        if self._turn.acquire(timeout=FOLD_WAIT_S):
            try:
                self._end_transaction()
                held = None if self._connection is None else self._database.lock.take_now()
                if held is not None and self._connection is not None:  # else another process writes, and folds it
                    with held:
                        self._database.fold(self._connection)
            finally:
                self._turn.release()
        return True

    def close(self) -> None:
        """Close the connection; the next job opens another.

        It is forgotten only then. An interrupt on the way could otherwise leave it in its transaction, in which no
        other process can write, until Python's garbage collector finds it.
        """
        self._mark = b""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _leave_mark(self, held: object) -> None:
        """Forget what the connection remembers, if another writer had the lock since this one."""
        if not hasattr(held, "fileno"):  # Windows has no such file, so another process may always have written
            self._mark = b""
            if self._connection is not None:
                self._connection.forget()
            return
        try:
            if self._mark and os.pread(held.fileno(), _MARK_BYTES, 0) == self._mark:
                return
            self._mark = b""
            mark = os.urandom(_MARK_BYTES)
            os.pwrite(held.fileno(), mark, 0)
        except OSError as error:  # without a mark the others would not see that this one has written
            raise failure(error, "write", Path(self._database.lock.path)) from error
        if self._connection is not None:
            self._connection.forget()
        self._mark = mark

    def _lead(self, mine: _Ticket) -> None:
        """Commit for all waiting callers, until this caller's own job is done."""
        self._is_led = True
        try:
            while not mine.is_settled:
                group: list[_Ticket] = []
                while self._queue and len(group) < GROUP_JOBS_MAX:
                    group.append(self._queue.popleft())
                if not group:  # an earlier leader took it and was interrupted
                    mine.settle()
                    break
                self._settle(group, mine)
        finally:
            self._is_led = False
            if self._queue and (first := self._queue[0].wake).locked():
                first.release()

    def _settle(self, group: list[_Ticket], mine: _Ticket) -> None:
        try:
            self._end_transaction()
            with self._database.take() as held:
                self._leave_mark(held)
                if not self._attempt(group):
                    for ticket in group:
                        self._attempt([ticket])
        except BackstayError as error:
            self._fail(group, error)  # the lock was not available, so nothing was started
        except BaseException:
            # A result only means that a job ran. Whether its transaction was committed is unknown here, so no job is
            # reported as stored, and an open transaction ends with its connection. The other callers do not get the
            # interrupt as a cause: it belongs to this thread and would keep this frame alive.
            self.close()
            for ticket in group:
                if ticket is not mine and ticket.error is None and not ticket.is_durable:
                    ticket.error = _unknown(ticket, None)
            raise
        finally:
            for ticket in group:
                ticket.settle()

    def _end_transaction(self) -> None:
        """End the transaction that a leader may have left open if it was interrupted repeatedly.

        It must end before this waits for the lock, because the process that holds the lock may wait for it.
        """
        try:
            if self._connection is not None and self._connection.in_transaction:
                self.close()
        except sqlite3.ProgrammingError:  # closed, but an interrupt came before it was forgotten
            self.close()

    def _attempt(self, group: list[_Ticket]) -> bool:
        """Run the jobs in one transaction; return False if the group was rolled back and must be tried one by one."""
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = self._database.connect()
            self._database.begin(connection)
        except (BackstayError, sqlite3.Error) as error:
            self._fail(group, error)
            return True
        try:
            for ticket in group:
                self._run_job(connection, ticket, alone=len(group) == 1)
        except sqlite3.Error as error:
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
        """Run one job; if the job raises an error of ours, undo it and store the error as its result."""
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
                connection.forget()
                connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")

    def _commit(self, connection: Connection, group: list[_Ticket]) -> bool:
        """Commit and return whether it is certain; otherwise each ticket gets its error."""
        try:
            connection.execute("COMMIT")
            self._database.confirm(connection)
            return True
        except (sqlite3.Error, StoreRefused) as error:
            if isinstance(error, sqlite3.Error) and code_of(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL):
                # Neither leaves a commit in the log: a full disk fails before the last frame is written.
                self._roll_back(connection)
                self._fail(group, error)
                return False
            # A rollback or retry on this descriptor could hide a failed fsync, so the next job opens another.
            self.close()
            for ticket in group:
                if ticket.error is None:
                    ticket.error = _unknown(ticket, error)
            return False

    def _roll_back(self, connection: Connection) -> None:
        connection.forget()
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            self.close()

    def _fail(self, group: list[_Ticket], error: Exception) -> None:
        ours = translate(error, self._database.path) if isinstance(error, sqlite3.Error) else error
        if isinstance(error, sqlite3.Error) and code_of(error) == sqlite3.SQLITE_IOERR:
            self.close()
        for ticket in group:
            if ticket.error is None:
                ticket.error = ours


def _unknown(ticket: _Ticket, error: BaseException | None) -> OutcomeUnknown:
    unknown = OutcomeUnknown(
        "the store failed during the commit, so the data may or may not be stored",
        checkpoint=ticket.name,
        hint="Repeat the call with the same id or token: it returns the first result, or stores the data now",
    )
    unknown.__cause__ = error
    return unknown


class SqliteTransactions:
    """The open file. The verbs are in subclasses, one for each topic."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, clock: Clock = boot_clock) -> None:
        self.url = url
        self._clock = clock
        self.guard = CallGuard()
        self._database = Database(resolve_path(url), timeout_s)
        self._writer = Writer(self._database)
        self._readers: list[Connection] = []
        self._are_references_sound = False  # until they were compared
        register(self)
        _open.add(self)
        _watch_for_sigterm()

    def close(self) -> None:
        if self.guard.close():
            forget(self)
            _open.discard(self)
            self.disconnect()

    def disconnect(self) -> None:
        """Close all connections; they are opened again when needed."""
        self._writer.close()
        while self._readers:
            self._readers.pop().close()

    def _read(self, look: Callable[[Connection], T], snapshot: bool = True) -> T:
        """Run a function that only reads, on a connection of its own, with one snapshot for all its statements."""
        with self.guard.mine():
            self.guard.check()
            try:
                try:
                    connection = self._readers.pop()
                except IndexError:
                    connection = self._database.connect()
                try:
                    self._database.check_in_place(connection)
                    if snapshot:
                        connection.execute("BEGIN")
                    shown = look(connection)
                    if snapshot and connection.in_transaction:  # a check that met a damaged page lost its transaction
                        connection.execute("COMMIT")
                except BaseException:
                    connection.close()  # after an error the connection's state is unknown
                    raise
            except sqlite3.Error as error:
                raise translate(error, self._database.path) from error
            except BackstayError:
                raise
            except ODD_VALUE_ERRORS as error:
                raise odd_value(error, self._database.path) from error
            self._readers.append(connection)
            return shown

    def _write(self, job: Callable[[Connection], T], name: str | None = None) -> T:
        """Run a job and return its result once it is durable; ``name`` is the id of its checkpoint."""
        try:
            with self.guard.mine():
                self.guard.check()
                return self._writer.submit(job, name)
        finally:
            if _terminated:
                _terminate()

    def _check_references(self) -> None:
        """Raise Corrupted if the references are damaged: then it is not known which bytes may be deleted.

        The table and its index hold the same values, so comparing them finds any damage. Once is enough: our own
        processes wrote the rest. It takes time in proportion to the store, so it must not be done with the lock held.
        """
        if not self._are_references_sound:
            (answer,) = self._read(lambda connection: connection.execute(queries.CHECK_REFS).fetchone())
            if answer != "ok":
                raise Corrupted(
                    f"the table of references is damaged ({answer}), so nothing can be deleted safely",
                    path=self._database.path,
                    hint="Repair the store with store.repair(): see docs/repair.md",
                )
            self._are_references_sound = True

    def _alone(self, work: Callable[[Connection], T]) -> T:
        """Run work outside a transaction, while no other thread or process writes."""
        try:
            with self.guard.mine():
                self.guard.check()
                return self._writer.alone(work)
        finally:
            if _terminated:
                _terminate()


_open: weakref.WeakSet[SqliteTransactions] = weakref.WeakSet()


def _close_all() -> None:
    """Close the stores that a program leaves open, so that their logs are folded into their databases."""
    for store in list(_open):
        store.close()


atexit.register(_close_all)
_terminated: list[int] = []  # SIGTERM, once it has come


def _watch_for_sigterm() -> None:
    """Fold the logs before SIGTERM ends the process, if the program itself does nothing about SIGTERM."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: _terminate(number))


def _terminate(number: int = signal.SIGTERM) -> None:
    """Fold the logs and end the process as if the signal had not been handled."""
    if threading.current_thread() is not threading.main_thread():
        return  # the main thread is inside a write, and ends the process after it
    _terminated[:] = [number]
    # If the signal interrupted a write of this thread, the write calls this again when it is done.
    busy = [store for store in list(_open) if not store._writer.fold()]
    if not busy:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


S = TypeVar("S", bound=SqliteTransactions)


def reading(verb: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a verb that only reads. It gets the connection as its first argument."""

    @wraps(verb)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        return self._read(lambda connection: verb(self, connection, *given, **named))

    return call


def looking(verb: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a verb that only reads and needs no snapshot for all its statements."""

    @wraps(verb)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        return self._read(lambda connection: verb(self, connection, *given, **named), snapshot=False)

    return call


def writing(verb: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a verb that writes. It gets the connection as its first argument."""

    @wraps(verb)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        return self._write(lambda connection: verb(self, connection, *given, **named))

    return call
