"""The files of a database: whether they are still in place, and whether the write-ahead log stays short.

SQLite writes through descriptors. If another program deletes, moves or replaces the database, its log (``-wal``) or its
index (``-shm``) while the store is open, later writes are lost or damage the other file, and no call fails. So each
connection remembers its files and compares them with those at the path around every write.

The files are only looked up by name, because closing a descriptor of the database would drop the locks of the whole
process. A lookup costs a few microseconds. A folder's change time moves whenever a name in it is created, removed or
renamed, so as long as it does not move, one look at the folder covers all three files.

The log is folded into the database after every 1,000 pages, by SQLite, and after the first save in any second, by
``WalLimit``. So a bare copy of the database file is never empty and at worst a little old. Only a process that holds
our lock folds the log. While any program keeps a read transaction open, the log cannot be restarted and only grows. The
store cannot prevent that, so it warns once and ``store.check()`` reports it while it lasts. Saves continue.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import os
import sqlite3
import sys
import time
import warnings

from backstay.errors import StoreWarning
from backstay.store.finding import LEFTOVER, Finding

COMPANIONS = ("-wal", "-shm")
FOLDER_SETTLED_NS = 1_000_000_000
"""A folder's change time is trusted once it is this old: two changes within one tick of the kernel share their time."""

FOLD_S = 1.0
"""The log is folded by the first save after this time."""

WAL_BYTES = 16 * 1024 * 1024
"""A longer log is cut to this when it restarts, and earlier if no reader is using it."""

REPORTED_BYTES = 4 * WAL_BYTES
PATIENCE_MS = 20
_COMMITS_BETWEEN_LOOKS = 64
_NO_CHECKPOINT_ON_CLOSE = 1006

FOLD = "PRAGMA wal_checkpoint(PASSIVE)"
"""Copies as much of the log into the database as readers allow."""

FOLD_ALL = "PRAGMA wal_checkpoint(TRUNCATE)"
"""Waits for readers, copies the whole log and empties it."""

_PRAGMAS = {
    name: f"PRAGMA {name}"
    for name in (
        *(
            "application_id",
            "user_version",
            "schema_version",
            "data_version",
            "page_count",
            "page_size",
            "freelist_count",
        ),
        *("journal_mode", "synchronous", "auto_vacuum", "trusted_schema", "cell_size_check"),
    )
}
_BUSY_TIMEOUT = "PRAGMA busy_timeout="

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


class Connection(sqlite3.Connection):
    """A connection that knows its open files, and what it last saw of changes by others."""

    files: OpenFiles | None = None
    others = 0  # SQLite's data_version: changes when another connection changes the database
    tables = 0  # SQLite's schema_version: changes when any connection changes the schema
    looked_at = 0.0  # when the tables were last compared
    seqs: dict[int, list[int]]  # a writer's own: by branch, the highest sequence number of its thread
    lost: dict[int, list[tuple[int, int]]]  # a writer's own: see Collectable

    def forget(self) -> None:
        """Forget what a writer remembers of what it wrote, because it was undone or another one wrote."""
        self.seqs.clear()
        self.lost.clear()

    def pragma(self, name: str) -> int | str:
        """Return the value of a setting."""
        found: int | str = self.execute(_PRAGMAS[name]).fetchone()[0]
        return found

    def close(self) -> None:
        """Close it. The last connection folds its log and deletes it, by name; not if that is another file now."""
        if self.files is not None and self.files.problem() is not None:
            if sys.version_info >= (3, 12):
                with contextlib.suppress(sqlite3.ProgrammingError):  # it is closed already
                    self.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE)
            else:
                _do_not_fold_on_close(self)
        super().close()


def _do_not_fold_on_close(connection: Connection) -> None:
    """Do what ``setconfig`` does in Python 3.12.

    SQLite's own handle is the first field of Python's connection. The library that Python loaded is reached through
    Python's own module: no second one is loaded.
    """
    import ctypes

    if handle := ctypes.c_void_p.from_address(id(connection) + object.__basicsize__):
        library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
        library.sqlite3_db_config(handle, _NO_CHECKPOINT_ON_CLOSE, 1, None)


class WalLimit:
    """Folds the log into the database now and then, cuts it if it is long, and warns once if it cannot be cut."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._wait = f"{_BUSY_TIMEOUT}{int(timeout_s * 1000)}"
        self._hardly_wait = f"{_BUSY_TIMEOUT}{PATIENCE_MS}"
        self._try_at = WAL_BYTES
        self._warned = False
        self._commits = 0
        self._folded_at = float("-inf")

    def apply(self, connection: Connection) -> None:
        """Fold the log if it is time, and cut it if it is too long and no reader is using it.

        Called after a commit, under the lock.
        """
        self._commits += 1
        now = time.monotonic()
        if now - self._folded_at >= FOLD_S:
            self._folded_at = now
            fold(connection, FOLD)
        elif self._commits % _COMMITS_BETWEEN_LOOKS:
            return
        size = 0 if connection.files is None else connection.files.log_bytes()
        if size <= WAL_BYTES:
            self._try_at = WAL_BYTES
        elif size > self._try_at:
            self.cut(connection)
            size = 0 if connection.files is None else connection.files.log_bytes()
            self._try_at = max(WAL_BYTES, 2 * size)  # so that a long-running reader does not slow down every save
        if size > REPORTED_BYTES and not self._warned:
            self._warned = True
            # A program that turns warnings into errors must not lose a save; check() reports the problem too.
            with contextlib.suppress(StoreWarning):
                warnings.warn(_grown(self._path, size), StoreWarning, stacklevel=2)

    def cut(self, connection: Connection) -> None:
        """Fold the whole log and empty it; give up soon if a reader needs it."""
        connection.execute(self._hardly_wait)
        try:
            fold(connection, FOLD_ALL)
        finally:
            connection.execute(self._wait)


def fold(connection: Connection, statement: str) -> None:
    """Run ``FOLD`` or ``FOLD_ALL``. Committed data is safe in the log if this fails."""
    with contextlib.suppress(sqlite3.Error):  # the next transaction reports any problem with the database
        connection.execute(statement).fetchall()


def wal_findings(connection: Connection, path: str) -> list[Finding]:
    """Return a finding if the log is longer than it should be."""
    size = 0 if connection.files is None else connection.files.log_bytes()
    return [Finding(LEFTOVER, "write-ahead log", _grown(path, size))] if size > REPORTED_BYTES else []


def _grown(path: str, size: int) -> str:
    return (
        f"the write-ahead log of {path} has grown to {size // 1_000_000} MB: a program keeps a read transaction open. "
        "It shrinks when that program ends its transaction"
    )
