"""The files of a database: whether they are still in place, and whether the write-ahead log stays short.

SQLite writes through descriptors. If another program deletes, moves or replaces the database, its log (``-wal``) or its
index (``-shm``) while the store is open, later writes are lost or damage the other file, and no call fails. So each
connection remembers its files and compares them with those at the path around every write.

The files are only looked up by name, because closing a descriptor of the database would drop the locks of the whole
process. A lookup costs a few microseconds. A folder's change time moves whenever a name in it is created, removed or
renamed, so as long as it does not move, one look at the folder covers all three files.

SQLite folds the log into the database after every 1,000 pages and restarts it, but not while a reader is using it: as
long as any program keeps a read transaction open, the log only grows. The store cannot prevent that, so it warns once
and ``store.check()`` reports it while it lasts. Saves continue.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings

import apsw

from backstay.errors import StoreWarning
from backstay.store.finding import LEFTOVER, Finding

COMPANIONS = ("-wal", "-shm")
FOLDER_SETTLED_NS = 1_000_000_000
"""A folder's change time is trusted once it is this old: two changes within one tick of the kernel share their time."""

WAL_BYTES = 16 * 1024 * 1024
"""A longer log is cut to this when it restarts, and earlier if no reader is using it."""

REPORTED_BYTES = 4 * WAL_BYTES
PATIENCE_MS = 20
_PAGES_BETWEEN_LOOKS = 1024  # 4 MiB

Identity = tuple[int, int]  # device and inode


def identity_of(path: str) -> Identity | None:
    """Return which file is at the path; None if none is, or if it cannot be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def database_problem(path: str, mine: Identity | None) -> str | None:
    """Return what happened to the database file, None if it is in place."""
    if sys.platform == "win32":
        return None
    try:
        found = os.stat(path)
    except OSError:
        return _happened(path, "was deleted or moved")
    if (found.st_dev, found.st_ino) != mine:
        return _happened(path, "was replaced by another file")
    return None if found.st_size else _happened(path, "was emptied")


def _happened(path: str, what: str) -> str:
    return f"{os.path.basename(path)} {what} while the store was open"


def companions_of(path: str) -> list[str]:
    """Return the paths of the log and the index, which SQLite puts next to the real file if the path is a link."""
    return [os.path.realpath(path) + each for each in COMPANIONS]


class OpenFiles:
    """The files that one connection has open.

    On Windows no program can delete, move or replace a file that SQLite has open, so nothing is checked there.
    """

    def __init__(self, path: str, database: Identity | None) -> None:
        self._path = path
        self._paths = (path, *companions_of(path))
        self._folder_path = os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path)
        self._identities = (database, *(identity_of(each) for each in self._paths[1:]))
        self._folder: tuple[int, int, int] | None = None  # change time and identity of the folder at the last check

    def problem(self) -> str | None:
        """Return what happened to the files, None if all are in place."""
        if sys.platform == "win32":
            return None
        try:
            found = os.stat(self._folder_path)
            folder = (found.st_ctime_ns, found.st_ino, found.st_dev)
            if folder == self._folder:
                return None
            is_settled = time.time_ns() - found.st_ctime_ns > FOLDER_SETTLED_NS
        except OSError:
            folder, is_settled = None, False
        self._folder = None
        for path, mine in zip(self._paths, self._identities, strict=True):
            try:
                found = os.stat(path)
            except OSError:
                return _happened(path, "was deleted or moved")
            if mine != (found.st_dev, found.st_ino):
                return _happened(path, "was replaced by another file")
        self._folder = folder if is_settled else None
        return None

    def problem_after_write(self) -> str | None:
        """Return what happened to the files, and to the database's length, which a look at the folder does not show."""
        return database_problem(self._path, self._identities[0]) or self.problem()

    def log_bytes(self) -> int:
        """Return the size of the write-ahead log."""
        try:
            return os.stat(self._paths[1]).st_size
        except OSError:
            return 0


class Connection(apsw.Connection):
    """A connection that knows its open files, and what it last saw of changes by others."""

    files: OpenFiles | None = None
    others = 0  # SQLite's data_version: changes when another connection changes the database
    tables = 0  # SQLite's schema_version: changes when any connection changes the schema
    look_at = 0  # how many pages are written before the log's size is checked

    def close(self, force: bool = False) -> None:
        """Close it. The last connection deletes the log, by name; not if that name is another program's file now."""
        if self.files is not None and self.files.problem() is not None:
            with contextlib.suppress(apsw.ConnectionClosedError):
                self.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        super().close(force)


class WalLimit:
    """Checks the log's size now and then, cuts it, and warns once if it cannot be cut."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_ms = int(timeout_s * 1000)
        self._try_at = WAL_BYTES
        self._warned = False

    def apply(self, connection: Connection) -> None:
        """Cut the log if it is too long and no reader is using it. Called after a commit, under the lock."""
        written, _ = connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE)
        if connection.files is None or written < connection.look_at:
            return
        connection.look_at = written + _PAGES_BETWEEN_LOOKS
        size = connection.files.log_bytes()
        if size <= WAL_BYTES:
            self._try_at = WAL_BYTES
        elif size > self._try_at:
            connection.set_busy_timeout(PATIENCE_MS)
            try:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.Error:
                pass  # committed data is in the log; the next transaction reports any problem with the database
            finally:
                connection.set_busy_timeout(self._timeout_ms)
            size = connection.files.log_bytes()
            self._try_at = max(WAL_BYTES, 2 * size)  # so that a long-running reader does not slow down every save
        if size > REPORTED_BYTES and not self._warned:
            self._warned = True
            # A program that turns warnings into errors must not lose a save; check() reports the problem too.
            with contextlib.suppress(StoreWarning):
                warnings.warn(_grown(self._path, size), StoreWarning, stacklevel=2)


def wal_findings(connection: Connection, path: str) -> list[Finding]:
    """Return a finding if the log is longer than it should be."""
    size = 0 if connection.files is None else connection.files.log_bytes()
    return [Finding(LEFTOVER, "write-ahead log", _grown(path, size))] if size > REPORTED_BYTES else []


def _grown(path: str, size: int) -> str:
    return (
        f"the write-ahead log of {path} has grown to {size // 1_000_000} MB: a program keeps a read transaction open. "
        "It shrinks when that program ends its transaction"
    )
