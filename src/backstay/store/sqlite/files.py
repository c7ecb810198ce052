"""Whether the files at a database's path are still the ones that SQLite has open.

SQLite writes through descriptors. When somebody deletes, moves or replaces the database, its log (``-wal``) or its
index (``-shm``) meanwhile, everything it writes from then on is lost or damages what others write, and no call fails.
So each connection remembers which files it has, and they are compared with those at the path around every write.

The files are only looked at by name: closing a descriptor of the database would drop the locks of the whole process.
Looking costs some microseconds a file. A folder's change time moves whenever a name in it is made, removed or renamed,
so as long as that stands still one look at the folder tells of all three.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import apsw

COMPANIONS = ("-wal", "-shm")
SETTLED_NS = 1_000_000_000
"""A folder that changed less than this ago may change again without its time moving: clocks of kernels tick slowly."""

Identity = tuple[int, int]  # device and inode


def identity_of(path: str) -> Identity | None:
    """Return which file is at the path, None if there is none or it cannot be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def database_problem(path: str, mine: Identity | None) -> str | None:
    """Return what happened to the database itself, None if it is in place."""
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
    """Return where SQLite keeps the log and the index: beside the file that a link leads to."""
    return [os.path.realpath(path) + each for each in COMPANIONS]


class OpenFiles:
    """The files one connection has open, and a look at whether they are in place.

    On Windows nobody can delete, move or replace a file that SQLite has open, so there is nothing to look for.
    """

    def __init__(self, path: str, database: Identity | None) -> None:
        self._path = path
        self._paths = (path, *companions_of(path))
        self._folder_path = os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path)
        self._identities = (database, *(identity_of(each) for each in self._paths[1:]))
        self._folder: tuple[int, int, int] | None = None  # when it had last changed, and which it is

    def problem(self) -> str | None:
        """Return what happened to the files, None if all are in place."""
        if sys.platform == "win32":
            return None
        try:
            found = os.stat(self._folder_path)
        except OSError:
            return self._first_problem()
        folder = (found.st_ctime_ns, found.st_ino, found.st_dev)
        if folder == self._folder:
            return None
        problem = self._first_problem()
        is_settled = time.time_ns() - found.st_ctime_ns > SETTLED_NS
        self._folder = folder if is_settled and problem is None else None
        return problem

    def problem_after_write(self) -> str | None:
        """Return what happened to the files, and to the database's length, which no look at the folder tells."""
        return database_problem(self._path, self._identities[0]) or self.problem()

    def log_bytes(self) -> int:
        """Return how long the write-ahead log is."""
        try:
            return os.stat(self._paths[1]).st_size
        except OSError:
            return 0

    def _first_problem(self) -> str | None:
        for path, mine in zip(self._paths, self._identities, strict=True):
            try:
                found = os.stat(path)
            except OSError:
                return _happened(path, "was deleted or moved")
            if mine != (found.st_dev, found.st_ino):
                return _happened(path, "was replaced by another file")
        return None


class Connection(apsw.Connection):
    """A connection that knows which files it has open, and what it last saw of what others do to the database."""

    files: OpenFiles | None = None
    others = 0  # changes whenever another connection has changed the database
    tables = 0  # changes whenever anybody has changed the schema
    look_at = 0  # how many pages it writes before the log's length is looked at

    def close(self, force: bool = False) -> None:
        """Close it. The last one to close folds the log in and deletes it, by name: not if that is another's by now."""
        if self.files is not None and self.files.problem() is not None:
            with contextlib.suppress(apsw.ConnectionClosedError):
                self.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        super().close(force)
