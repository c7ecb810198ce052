"""How every verb of the SQLite store reaches the file: reads on connections of their own, writes by group commit.

A verb takes the connection after itself, and ``reading`` or ``writing`` gives it one, inside a transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import apsw

from backstay.errors import BackstayError
from backstay.store.boot import Clock, boot_clock
from backstay.store.gate import Gate, forget, register
from backstay.store.layout import ODD_VALUE_ERRORS, odd_value
from backstay.store.sqlite.database import Database, resolve_path, translate
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.writer import Writer

TIMEOUT_S = 30.0
"""How long a call waits for other processes before it raises StoreBusy."""

T = TypeVar("T")
P = ParamSpec("P")


class Transactions:
    """The open file. The verbs are in classes derived from this one, by topic."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, clock: Clock = boot_clock) -> None:
        self.url = url
        self._clock = clock
        self.gate = Gate()
        self._database = Database(resolve_path(url), timeout_s)
        self._writer = Writer(self._database)
        self._readers: list[Connection] = []
        register(self)

    def close(self) -> None:
        if self.gate.close():
            forget(self)
            self.disconnect()

    def disconnect(self) -> None:
        """Close all connections; they are opened again when needed."""
        self._writer.close()
        while self._readers:
            self._readers.pop().close()

    def _read(self, look: Callable[[Connection], T]) -> T:
        """Return what a look shows, which has a connection of its own and one snapshot for all its statements."""
        with self.gate.mine():
            self.gate.check()
            try:
                try:
                    connection = self._readers.pop()
                except IndexError:
                    connection = self._database.connect()
                try:
                    self._database.check_in_place(connection)
                    connection.execute("BEGIN")
                    shown = look(connection)
                    if connection.in_transaction:  # a check that met a damaged page has lost its transaction
                        connection.execute("COMMIT")
                except BaseException:
                    connection.close()  # whatever went wrong, this connection's state is not to be relied on
                    raise
            except apsw.Error as error:
                raise translate(error, self._database.path) from error
            except BackstayError:
                raise
            except ODD_VALUE_ERRORS as error:
                raise odd_value(error, self._database.path) from error
            self._readers.append(connection)
            return shown

    def _write(self, job: Callable[[apsw.Connection], T], name: str | None = None) -> T:
        """Return what a job gives once it is durable; ``name`` is the checkpoint's that it is about."""
        with self.gate.mine():
            self.gate.check()
            return self._writer.submit(job, name)

    def _alone(self, work: Callable[[apsw.Connection], T]) -> T:
        """Do work that is no transaction; nobody else writes meanwhile, in whichever process."""
        with self.gate.mine():
            self.gate.check()
            return self._writer.alone(work)


S = TypeVar("S", bound=Transactions)


def reading(verb: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a verb that only looks."""

    @wraps(verb)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        return self._read(lambda connection: verb(self, connection, *given, **named))

    return call


def writing(verb: Callable[Concatenate[S, apsw.Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a verb that changes something."""

    @wraps(verb)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        return self._write(lambda connection: verb(self, connection, *given, **named))

    return call
