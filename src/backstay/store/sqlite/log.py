"""Keeping the write-ahead log short.

SQLite folds it into the database after every 1,000 pages and begins it anew, but not while a reader is in the middle
of it: as long as any program keeps a read transaction open, the log only grows. That cannot be prevented, so it is
told: once by a warning, and by ``store.verify()`` as long as it lasts. Saves go on.
"""

from __future__ import annotations

import contextlib
import warnings

import apsw

from backstay.errors import StoreWarning
from backstay.store.finding import LEFTOVER, Finding
from backstay.store.sqlite.files import Connection

LOG_BYTES = 16 * 1024 * 1024
"""A longer log is cut to this when it begins anew, and before that if no reader is in the way."""

REPORTED_BYTES = 4 * LOG_BYTES
PATIENCE_MS = 20
_PAGES_BETWEEN_LOOKS = 1024  # 4 MiB: so many are written before the log's length is looked at again


class LogLimit:
    """Looks at the log's length after so many bytes, cuts it, and warns once if it cannot be cut."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_ms = int(timeout_s * 1000)
        self._try_at = LOG_BYTES
        self._warned = False

    def keep(self, connection: Connection) -> None:
        """Cut the log if it is too long and no reader is in the way; to be called after a commit, under the lock."""
        written, _ = connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE)
        if connection.files is None or written < connection.look_at:
            return
        connection.look_at = written + _PAGES_BETWEEN_LOOKS
        size = connection.files.log_bytes()
        if size <= LOG_BYTES:
            self._try_at = LOG_BYTES
        elif size > self._try_at:
            self._cut(connection)
            size = connection.files.log_bytes()
            self._try_at = max(LOG_BYTES, 2 * size)  # a reader that stays is not to slow every save down
        if size > REPORTED_BYTES and not self._warned:
            self._warned = True
            # A program that turns warnings into errors is not to lose a save by it; verify() tells it too.
            with contextlib.suppress(StoreWarning):
                warnings.warn(_grown(self._path, size), StoreWarning, stacklevel=2)

    def _cut(self, connection: Connection) -> None:
        connection.set_busy_timeout(PATIENCE_MS)
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.Error:
            pass  # what was committed is in the log; whatever is wrong with the database, the next transaction tells
        finally:
            connection.set_busy_timeout(self._timeout_ms)


def log_findings(connection: Connection, path: str) -> list[Finding]:
    """Return whether the log is longer than it should be."""
    size = 0 if connection.files is None else connection.files.log_bytes()
    return [Finding(LEFTOVER, "write-ahead log", _grown(path, size))] if size > REPORTED_BYTES else []


def _grown(path: str, size: int) -> str:
    return (
        f"the write-ahead log of {path} has grown to {size // 1_000_000} MB: a program keeps a read transaction open. "
        "It shrinks when that program ends its transaction"
    )
