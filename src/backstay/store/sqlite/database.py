"""Opening a database file: only ours, only of a version we know, only with settings that keep acknowledged data.

Every connection comes from ``Database.connect``. Pages have checksums (SQLite's own checksum VFS, which apsw ships), so
a flipped bit anywhere in the file is an error when its page is read and never a wrong answer. (The write-ahead log has
SQLite's own checksums; damage there ends the log, as a power failure would.)

Only SQLite opens the file: closing any other descriptor of it would drop the locks of the process.

A writer puts each transaction between ``begin`` and ``confirm``. Files and tables must be unchanged since the store was
opened, both before anything is written and before anything is acknowledged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import apsw
import apsw.sqlite_extra

from backstay.errors import BackstayError, Corrupted, StoreBusy, StoreError, StoreFull, StoreRefused
from backstay.store.atomic import FILE_MODE, make_directory, sync_directory
from backstay.store.layout import ODD_VALUE_ERRORS, odd_value
from backstay.store.lock import ProcessLock
from backstay.store.sqlite.files import (
    WAL_BYTES,
    Connection,
    Identity,
    OpenFiles,
    WalLimit,
    companions_of,
    database_problem,
    identity_of,
)
from backstay.store.sqlite.schema import APPLICATION_ID, check_schema, migrate, newest_version
from backstay.version import install_hint

SQLITE_VERSION_MIN = (3, 51, 3)
"""Older versions can corrupt a write-ahead log that several processes use (fixed in 3.51.3)."""

PAGE_BYTES = 4096
CHECKSUM_BYTES = 8
SMALLEST_DATABASE_BYTES = 512
CACHE_KIB = 8192
CHECKSUM_VFS = "cksmvfs"
_SETTINGS = {
    apsw.SQLITE_DBCONFIG_DEFENSIVE: 1,
    apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_VIEW: 0,
    apsw.SQLITE_DBCONFIG_ENABLE_FKEY: 0,
    # Without this SQLite prepares a statement again whenever a bound value might change its plan: 8 us per save.
    apsw.SQLITE_DBCONFIG_ENABLE_QPSG: 1,
}
_vfs_lock = threading.Lock()


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
        self.lock = ProcessLock(self.path + "-lock", timeout_s)
        self._prepare()

    def connect(self) -> Connection:
        """Return a new connection, with our settings, to the file that this store opened."""
        with translated(self.path):
            connection = self._open()
            try:
                connection.execute("BEGIN")
                self._check_tables(connection)
                connection.execute("COMMIT")
                connection.files = OpenFiles(
                    self.path, self._identity
                )  # the transaction has opened the log and its index
                self.check_in_place(connection)
                return connection
            except BaseException:
                connection.close()
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
        try:
            if connection.execute("PRAGMA data_version").get != connection.others:
                self._check_tables(connection)
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
        connection.others = connection.execute("PRAGMA data_version").get
        version, tables = connection.execute("PRAGMA user_version").get, connection.execute("PRAGMA schema_version").get
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
        connection = Connection(self.path, flags=apsw.SQLITE_OPEN_READWRITE, vfs=CHECKSUM_VFS)
        try:
            if identity_of(self.path) != self._identity:
                self._refuse("the database was deleted, moved or replaced while it was being opened")
            connection.set_busy_timeout(int(self.timeout_s * 1000))
            for setting, value in _SETTINGS.items():
                connection.config(setting, value)
            connection.execute(
                f"PRAGMA synchronous=FULL; PRAGMA cache_size=-{CACHE_KIB}; PRAGMA temp_store=MEMORY;"
                f"PRAGMA journal_size_limit={WAL_BYTES}"
            )
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self) -> None:
        """Create the database or migrate an older one; raise StoreRefused if it is another program's."""
        try:
            with self.lock.take(), translated(self.path):
                _create_private(self.path)
                _check_empty(self.path)
                with contextlib.closing(self._open()) as connection:
                    _identify(connection, self.path)
                    mode = connection.pragma("journal_mode", "wal")
                    if mode != "wal":
                        raise StoreRefused(
                            f"SQLite cannot use a write-ahead log here (journal mode {mode})",
                            path=self.path,
                            hint="Move the database to a local file system",
                        )
                    migrate(connection)
                    if is_cut(self.path):  # a crash may have cut pages that are still in the log
                        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    # SQLite would fill the rest of the last page with zeros, which no checksum notices.
                    if is_cut(self.path):
                        raise _cut(self.path)
        except Corrupted as error:
            raise (_cut(self.path) if is_cut(self.path) else error) from error.__cause__


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn the driver's errors, and errors caused by unexpected values in rows, into ours."""
    try:
        yield
    except apsw.Error as error:
        raise translate(error, path) from error
    except BackstayError:
        raise
    except ODD_VALUE_ERRORS as error:
        raise odd_value(error, path) from error


def translate(error: apsw.Error, path: str) -> BackstayError:
    """Return our error for one of the driver's."""
    text = str(error)
    extended = getattr(error, "extendedresult", 0)
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy("another program holds a lock on the database", path=path, hint="Try again")
    if isinstance(error, apsw.FullError):
        return StoreFull("no space left for the database", path=path, hint="Free some space, then try again")
    if isinstance(error, apsw.NotADBError):
        return StoreRefused("the file is not a SQLite database", path=path, hint="Choose another path")
    if isinstance(error, apsw.CorruptError) or extended == apsw.SQLITE_IOERR_DATA:
        return Corrupted(
            "a page of the database is damaged, or a program other than Backstay changed it",
            path=path,
            hint="If the store opens, store.check() lists the damage; otherwise restore a copy",
        )
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.PermissionsError | apsw.AuthError):
        return StoreRefused(
            f"the database cannot be opened for writing ({text})", path=path, hint="Check the folder's permissions"
        )
    return StoreError(f"SQLite reports: {text}", path=path)


def _check_library() -> None:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < SQLITE_VERSION_MIN:
        raise StoreRefused(
            f"SQLite {apsw.sqlite_lib_version()} can corrupt a database that several processes use",
            hint="Install a newer apsw: pip install -U apsw",
        )
    with _vfs_lock:
        if CHECKSUM_VFS in apsw.vfs_names():
            return
        usual = apsw.vfs_names()[0]
        loader = apsw.Connection(":memory:")
        try:
            apsw.sqlite_extra.load(loader, "cksumvfs")
        except Exception as error:
            raise StoreRefused(
                "this build of apsw does not support page checksums", hint="Install apsw from PyPI: pip install -U apsw"
            ) from error
        finally:
            loader.close()
        apsw.set_default_vfs(usual)  # loading makes it the default of the whole process; only our connections need it


def _check_path(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if 0 < os.stat(path).st_size < SMALLEST_DATABASE_BYTES:  # SQLite would treat it as empty
            raise StoreRefused("the file is not a SQLite database", path=path, hint="Choose another path")
    if os.path.isdir(path):
        raise StoreRefused(
            "the path is a folder, not a database file", path=path, hint="Name a file in it, such as agent.db"
        )
    try:
        make_directory(Path(path).parent)
    except StoreError as error:
        raise StoreRefused(error.what, path=path, hint=error.hint) from error


def _create_private(path: str) -> None:
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


def _identify(connection: apsw.Connection, path: str) -> None:
    application, version = connection.pragma("application_id"), connection.pragma("user_version")
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    reserved = ctypes.c_int(CHECKSUM_BYTES if tables == 0 else -1)  # -1 asks instead of setting
    if application == 0 and version == 0 and tables == 0:
        # SQLite accepts these options only before the first table exists.
        connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserved))
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}; PRAGMA auto_vacuum=INCREMENTAL")
        return
    if application != APPLICATION_ID:
        raise StoreRefused("the database belongs to another program", path=path, hint="Choose another path")
    if version > newest_version():
        raise StoreRefused(
            f"the database has schema version {version}; this Backstay supports up to {newest_version()}",
            path=path,
            hint=f"Upgrade Backstay. {install_hint()}",
        )
    connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserved))
    if reserved.value != CHECKSUM_BYTES:
        raise StoreRefused(
            "another program rewrote the database without page checksums",
            path=path,
            hint="Restore the original file, or import it",
        )
    if version == newest_version():
        check_schema(connection, path)


def _cut(path: str) -> Corrupted:
    return Corrupted("the database ends in the middle of a page", path=path, hint="Restore a copy of it")


def is_cut(path: str) -> bool:
    """Return whether the file's size is not a multiple of the page size."""
    return os.stat(path).st_size % PAGE_BYTES != 0


def resolve_path(url: str) -> str:
    """Return the file path of ``sqlite:///path`` or of a plain path."""
    return str(Path(url.removeprefix("sqlite://")).expanduser())
