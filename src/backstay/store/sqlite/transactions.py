"""How every verb of the SQLite store reaches the file: reads on connections of their own, writes by group commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import apsw

from backstay.errors import BackstayError
from backstay.store.base import Removed
from backstay.store.boot import Clock, boot_clock
from backstay.store.gate import Gate, forget, register
from backstay.store.layout import ODD_VALUE_ERRORS, odd_value
from backstay.store.sqlite.compact import give_pages_back
from backstay.store.sqlite.database import Database, resolve_path, translated
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.writer import Writer

TIMEOUT_S = 30.0
"""How long a call waits for other processes before it raises StoreBusy."""

T = TypeVar("T")


class Transactions:
    """The open file; the verbs are in classes derived from this one."""

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

    def _read(self, look: Callable[[Connection], T]) -> T:
        """Return what a look shows, which has a connection of its own and one snapshot for all its statements."""
        with self.gate.mine():
            self.gate.check()
            with translated(self._database.path):
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
                self._readers.append(connection)
                return shown

    def _write(self, job: Callable[[apsw.Connection], T], name: str | None = None) -> T:
        def guarded(connection: apsw.Connection) -> T:
            try:
                return job(connection)
            except BackstayError:
                raise
            except ODD_VALUE_ERRORS as error:
                raise odd_value(error, self._database.path) from error

        with self.gate.mine():
            self.gate.check()
            return self._writer.submit(guarded, name)

    def _alone(self, work: Callable[[apsw.Connection], T]) -> T:
        """Do work that is no transaction; nobody else writes meanwhile, in whichever process."""
        with self.gate.mine():
            self.gate.check()
            return self._writer.alone(work)

    def _shrink(self, removed: Removed) -> None:
        if removed.bytes or removed.checkpoints:
            self._alone(give_pages_back)

    def disconnect(self) -> None:
        self._writer.close()
        while self._readers:
            self._readers.pop().close()
