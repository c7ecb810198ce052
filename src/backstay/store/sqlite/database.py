"""Opening a database file: only ours, only of a version we know, only with settings that keep acknowledged data.

Every connection comes from ``Database.connect``. The file is an ordinary SQLite database, opened with Python's own
SQLite library, because two libraries in one process would drop each other's locks. Pages have no checksums: damage is
found by the digests and seals of rows.

Only SQLite opens the file: closing any other descriptor of it would drop the locks of the process.

A writer puts each transaction between ``begin`` and ``confirm``. Files and tables must be unchanged since the store was
opened, both before anything is written and before anything is acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NoReturn

from backstay.errors import BackstayError, Corrupted, InvalidInput, StoreBusy, StoreError, StoreFull, StoreRefused
from backstay.store.atomic import FILE_MODE, check_parent, sync_directory
from backstay.store.layout import ODD_VALUE_ERRORS, odd_value
from backstay.store.lock import ProcessLock
from backstay.store.sqlite.files import (
    FOLD_ALL,
    WAL_BYTES,
    Connection,
    Identity,
    OpenFiles,
    WalLimit,
    companions_of,
    database_problem,
    fold,
    identity_of,
)
from backstay.store.sqlite.schema import APPLICATION_ID, check_schema, migrate, newest_version
from backstay.version import install_hint

SQLITE_VERSION_MIN = (3, 35, 0)
"""The first with RETURNING."""

PAGE_BYTES = 4096
SMALLEST_DATABASE_BYTES = 512
CACHE_KIB = 8192
LOOK_AT_TABLES_S = 1.0
"""How often a writer looks whether another program changed the tables."""

_SETTINGS = (
    "PRAGMA synchronous=FULL",
    f"PRAGMA cache_size=-{CACHE_KIB}",
    "PRAGMA temp_store=MEMORY",
    f"PRAGMA journal_size_limit={WAL_BYTES}",
    "PRAGMA trusted_schema=OFF",
    "PRAGMA cell_size_check=ON",
)


class Database:
    """The file and how to connect to it.

    Once its files were taken away or its tables were changed, it refuses every call, because its data is no longer what
    other processes see. To continue, open the store again.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = os.path.abspath(path)
        self.timeout_s = timeout_s
        self._identity: Identity | None = None
        self._refusal: tuple[str, str | None] | None = None  # what is wrong, and the hint
        self._log = WalLimit(self.path, timeout_s)
        _check_library()
        _check_path(self.path)
        # Next to the real file, as the log is: a link to it must lead to the same lock.
        self.lock = ProcessLock(os.path.realpath(self.path) + "-lock", timeout_s)
        self._prepare()

    def connect(self) -> Connection:
        """Return a new connection, with our settings, to the file that this store opened."""
        with translated(self.path):
            connection = self._open()
            try:
                _use_log(connection, self.path)  # another program may have switched it off while nothing was open
                connection.execute("BEGIN")
                self._check_tables(connection)
                connection.execute("COMMIT")
                # The transaction has opened the log and its index.
                connection.files = OpenFiles(self.path, self._identity)
                self.check_in_place(connection)
                return connection
            except BaseException:
                connection.close()
                raise

    def take(self) -> AbstractContextManager[object]:
        """Take the lock against all other writers. It cannot be taken if the whole folder was moved or deleted."""
        try:
            return self.lock.take()
        except StoreRefused:
            problem = database_problem(self.path, self._identity)
            if problem is not None:
                self._refuse(problem)
            raise

    def check_in_place(self, connection: Connection) -> None:
        """Raise StoreRefused if other files are at the path than the connection's. Called before every read."""
        problem = None if connection.files is None else connection.files.problem()
        if problem is not None or self._refusal is not None:
            self._refuse(problem)

    def begin(self, connection: Connection) -> None:
        """Start a write transaction, with the lock held; raise StoreRefused if files or tables have changed."""
        problem = None if connection.files is None else connection.files.problem()
        if problem is not None or self._refusal is not None:
            self._refuse(problem)
        connection.execute("BEGIN IMMEDIATE")
        if time.monotonic() - connection.looked_at > LOOK_AT_TABLES_S:
            try:
                if connection.pragma("data_version") != connection.others:
                    self._check_tables(connection)
                connection.looked_at = time.monotonic()
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    def confirm(self, connection: Connection) -> None:
        """Raise StoreRefused if the committed transaction is not in the file at the path. The lock is still held.

        Nothing may be acknowledged before this returns.
        """
        problem = None if connection.files is None else connection.files.problem_after_write()
        if problem is not None or self._refusal is not None:
            self._refuse(problem)
        self._log.apply(connection)

    def fold(self, connection: Connection) -> None:
        """Fold the whole log into the database and empty it, unless a reader needs it. The lock is held."""
        self._log.cut(connection)

    def _refuse(self, problem: str | None) -> NoReturn:
        """Refuse every call from now on, because of this problem, or the first one if there was one before."""
        if self._refusal is None:
            self._refusal = (
                f"{problem}; the store reads and writes nothing more",
                "Put the file back or restore a copy, then open the store again",
            )
        what, hint = self._refusal
        raise StoreRefused(what, path=self.path, hint=hint)

    def _check_tables(self, connection: Connection) -> None:
        """Raise StoreRefused if another version or program changed the tables since the store was opened."""
        connection.others = int(connection.pragma("data_version"))
        version, tables = connection.pragma("user_version"), int(connection.pragma("schema_version"))
        try:
            if version != newest_version():
                raise StoreRefused(
                    f"the database now has schema version {version}; it had {newest_version()} when it was opened",
                    path=self.path,
                    hint="Restart this program with the version of Backstay that migrated the database",
                )
            if tables != connection.tables:
                check_schema(connection, self.path)
        except StoreRefused as error:
            self._refusal = error.what, error.hint
            raise
        connection.tables = tables

    def _open(self) -> Connection:
        """Return a new connection with our settings, to the file that is at the path before and after."""
        if self._identity is None:
            self._identity = identity_of(self.path)
        else:
            problem = database_problem(self.path, self._identity)
            if problem is not None or self._refusal is not None:
                self._refuse(problem)
        connection = connect(self.path, self.timeout_s)
        try:
            if identity_of(self.path) != self._identity:
                self._refuse("the database was deleted, moved or replaced while it was being opened")
            for setting in _SETTINGS:
                connection.execute(setting)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self) -> None:
        """Create the database or migrate an older one; raise StoreRefused if it is another program's."""
        with self.lock.take(), translated(self.path):
            create_private(self.path)
            _check_empty(self.path)
            with contextlib.closing(self._open()) as connection:
                is_new = _identify(connection, self.path)
                _use_log(connection, self.path)
                if is_new:  # SQLite deleted its journal: after a power failure it must not be back, next to the log
                    sync_directory(Path(self.path).parent)
                migrate(connection)
                if is_new:
                    fold(connection, FOLD_ALL)  # so that a bare copy of the file is a store


def connect(path: str, timeout_s: float) -> Connection:
    """Return a connection to an existing file, outside a transaction."""
    connection = sqlite3.connect(
        f"{Path(path).as_uri()}?mode=rw",
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
        factory=Connection,
        cached_statements=256,
        uri=True,
    )
    connection.seqs, connection.lost = {}, {}
    # Damaged text is read too, and then refused by the seal of its row.
    connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    return connection


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn the driver's errors, and errors caused by unexpected values in rows, into ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error
    except BackstayError:
        raise
    except ODD_VALUE_ERRORS as error:
        raise odd_value(error, path) from error


_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REFUSED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)


def code_of(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code; 0 if the error is the driver's own."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether SQLite found a damaged page, or could not read one."""
    return code_of(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)


def translate(error: sqlite3.Error, path: str) -> BackstayError:
    """Return our error for one of the driver's."""
    code = code_of(error)
    if code in _BUSY:
        return StoreBusy(
            "another program held a lock on the database for too long", path=path, hint="Try again when it has finished"
        )
    if code == sqlite3.SQLITE_FULL:
        return StoreFull("no space left for the database", path=path, hint="Free some space, then try again")
    if code == sqlite3.SQLITE_NOTADB:
        return StoreRefused(
            "the file is not a SQLite database",
            path=path,
            hint="Choose another path. If it was a store, its first page is damaged: see docs/repair.md",
        )
    if code == sqlite3.SQLITE_CORRUPT:
        return Corrupted(
            f"the database is damaged ({error})",
            path=path,
            hint="If the store opens, store.check() lists the damage; otherwise see docs/repair.md",
        )
    if code in _REFUSED:
        return StoreRefused(
            f"the database cannot be opened for writing ({error})", path=path, hint="Check the folder's permissions"
        )
    return StoreError(f"SQLite reports: {error}", path=path)


def _check_library() -> None:
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        needed = ".".join(map(str, SQLITE_VERSION_MIN[:2]))
        raise StoreRefused(
            f"this Python has SQLite {sqlite3.sqlite_version}, and Backstay needs {needed} or newer",
            hint="Use a newer Python, or one that was built with a newer SQLite",
        )


def _check_path(path: str) -> None:
    try:
        if 0 < os.stat(path).st_size < SMALLEST_DATABASE_BYTES:  # SQLite would treat it as empty
            raise StoreRefused("the file is not a SQLite database", path=path, hint="Choose another path")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise StoreRefused(
            f"the path cannot be used: {error.strerror}", path=path, hint="Choose another path"
        ) from error
    if os.path.isdir(path):
        raise StoreRefused(
            "the path is a folder, not a database file", path=path, hint="Name a file in it, such as agent.db"
        )
    check_parent(Path(path))


def create_private(path: str) -> None:
    """Create an empty file that only its owner may read; SQLite gives the log and index the same mode."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), FILE_MODE)
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, FILE_MODE)  # despite the umask
        finally:
            os.close(descriptor)
        sync_directory(Path(path).parent)
    except FileExistsError:
        return
    except OSError as error:
        raise StoreRefused(
            f"cannot create the database: {error.strerror}", path=path, hint="Check the folder's permissions"
        ) from error


def _check_empty(path: str) -> None:
    """Raise StoreRefused if the log or index of a lost database exists: SQLite would use them for the new one."""
    left = [each for each in companions_of(path) if os.path.exists(each)]
    if left and not os.stat(path).st_size:
        names = " and ".join(map(os.path.basename, left))
        raise StoreRefused(
            f"the database was deleted, moved or emptied, but its {names} still exists",
            path=path,
            hint="Close every program that has it open and put the database back, or move these files away",
        )


def _identify(connection: Connection, path: str) -> bool:
    """Return whether the database is empty; raise StoreRefused if it is not empty and not ours."""
    application, version = connection.pragma("application_id"), int(connection.pragma("user_version"))
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application == 0 and version == 0 and tables == 0:
        # SQLite accepts these options only before the first table exists.
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        return True
    if application != APPLICATION_ID:
        hint = "Choose another path"
        columns = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('checkpoints')")}
        if columns >= {"checkpoint_id", "messages_blob", "state_blob", "tools_blob"}:
            call = f"backstay.compat.backend.import_agentos({path!r}, store)"
            hint = f"It is a database of agentos. Open a store at another path and import it: {call}"
        raise StoreRefused("the database belongs to another program", path=path, hint=hint)
    if version > newest_version():
        raise StoreRefused(
            f"the database has schema version {version}; this Backstay supports up to {newest_version()}",
            path=path,
            hint=f"Upgrade Backstay. {install_hint()}",
        )
    if version == newest_version():
        check_schema(connection, path)
    return False


def _use_log(connection: Connection, path: str) -> None:
    """Make SQLite use a write-ahead log; raise StoreRefused if it cannot."""
    if connection.pragma("journal_mode") == "wal":
        return
    (mode,) = connection.execute("PRAGMA journal_mode=wal").fetchone()
    if mode != "wal":
        raise StoreRefused(
            f"SQLite cannot use a write-ahead log here (journal mode {mode})",
            path=path,
            hint="Move the database to a local file system",
        )


def resolve_path(url: str) -> str:
    """Return the file path of ``sqlite:///relative``, ``sqlite:////absolute``, ``sqlite:path`` or a plain path."""
    path = url.removeprefix("sqlite:").removeprefix("///") if url.startswith("sqlite:") else url
    if path != url and (not path or path.startswith("//")):
        raise InvalidInput(
            f"{url} does not name a file", hint="Write sqlite:///agent.db for a relative path, sqlite:////tmp/agent.db"
        )
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise StoreRefused(f"{error}", path=path, hint="Write the whole path") from error
