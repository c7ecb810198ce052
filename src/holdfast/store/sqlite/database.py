"""Opening a database file: only ours, only of a version we know, only with settings that keep what is acknowledged.

Every connection goes through ``Database.connect``. Pages carry checksums (SQLite's own checksum VFS, which apsw ships),
so a flipped bit anywhere in the file is an error when its page is read and never a wrong answer. (The write-ahead log
beside it has SQLite's own checksums; damage there ends the log, as a power cut would.)

The file is never opened by anything but SQLite: closing any other descriptor of it would drop the process's locks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.resources
import os
import threading
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

import apsw
import apsw.sqlite_extra

from holdfast.errors import Corrupted, HoldfastError, StoreBusy, StoreError, StoreFull, StoreRefused
from holdfast.store.lock import ProcessLock

APPLICATION_ID = 0x484F4C44  # "HOLD"
SQLITE_VERSION_MIN = (3, 51, 3)
"""Older ones can corrupt a write-ahead log that several processes use (fixed in 3.51.3)."""

PAGE_BYTES = 4096
CHECKSUM_BYTES = 8
SMALLEST_DATABASE_BYTES = 512
CACHE_KIB = 8192
CHECKSUM_VFS = "cksmvfs"
_MIGRATIONS = importlib.resources.files(__package__) / "migrations"
_SCHEMA = importlib.resources.files(__package__) / "schema.sql"
_vfs_lock = threading.Lock()


class Database:
    """The file and how to connect to it."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = os.path.abspath(path)
        self.timeout_s = timeout_s
        _check_library()
        _check_path(self.path)
        self.lock = ProcessLock(self.path + "-lock", timeout_s)
        try:
            self._prepare()
        except BaseException:
            self.lock.close()
            raise

    def connect(self) -> apsw.Connection:
        """Return a new connection with our settings."""
        with translated(self.path):
            connection = apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READWRITE, vfs=CHECKSUM_VFS)
            try:
                connection.set_busy_timeout(int(self.timeout_s * 1000))
                connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
                connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
                # Without this a statement is prepared anew whenever a bound value might change its plan: 8 us a save.
                connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
                connection.execute(f"PRAGMA synchronous=FULL; PRAGMA cache_size=-{CACHE_KIB}; PRAGMA temp_store=MEMORY")
                return connection
            except BaseException:
                connection.close()
                raise

    def _prepare(self) -> None:
        """Make the database if there is none, bring an older one up to date, and refuse what is not ours."""
        _create_private(self.path)
        self.lock.acquire()
        try:
            connection = self.connect()
            try:
                with translated(self.path):
                    _identify(connection, self.path)
                    _switch_to_wal(connection, self.path)
                    migrate(connection)
                    _check_length(connection, self.path)
            finally:
                connection.close()
        except Corrupted as error:
            raise (_cut(self.path) if is_cut(self.path) else error) from error.__cause__
        finally:
            self.lock.release()


def migrate(connection: apsw.Connection) -> None:
    """Bring the schema to the newest version; each migration and its number are one transaction."""
    current = int(connection.pragma("user_version"))
    scripts = migration_scripts()
    if current == 0:
        _in_one_transaction(connection, _script(_SCHEMA), len(scripts))
        return
    for number in range(current, len(scripts)):
        _in_one_transaction(connection, scripts[number], number + 1)


def migration_scripts() -> list[str]:
    """Return all migrations in order; the first makes the tables."""
    files = sorted(entry.name for entry in _MIGRATIONS.iterdir() if entry.name.endswith(".sql"))
    return [_script(_MIGRATIONS / name) for name in files]


def _script(file: Traversable) -> str:
    """Return a script without the spaces that align it: SQLite keeps this text, and so it fits in the first page."""
    return "\n".join(" ".join(line.split()) for line in file.read_text(encoding="utf-8").splitlines())


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn the driver's errors into ours: the one border they cross."""
    try:
        yield
    except apsw.Error as error:
        raise translate(error, path) from error
    except UnicodeDecodeError as error:
        raise Corrupted(
            "a text in the database is damaged", path=path, hint="Restore a copy of it, or repair it with SQLite"
        ) from error


def translate(error: apsw.Error, path: str) -> HoldfastError:
    """Return our error for one of the driver's."""
    text = str(error)
    extended = getattr(error, "extendedresult", 0)
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy("another program keeps the database locked", path=path, hint="Try again")
    if isinstance(error, apsw.FullError):
        return StoreFull("no space left for the database", path=path, hint="Free some space, then try again")
    if isinstance(error, apsw.NotADBError):
        return StoreRefused("the file is not a SQLite database", path=path, hint="Choose another path")
    if isinstance(error, apsw.CorruptError) or extended == apsw.SQLITE_IOERR_DATA:
        return Corrupted(
            "a page of the database is damaged, or was changed by another program than Holdfast",
            path=path,
            hint="If the store opens, store.verify() shows what is affected; else restore a copy",
        )
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.PermissionsError | apsw.AuthError):
        return StoreRefused(
            f"the database cannot be opened for writing ({text})", path=path, hint="Check its folder and rights"
        )
    return StoreError(f"SQLite says: {text}", path=path)


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
                "this build of apsw has no page checksums", hint="Install apsw from PyPI: pip install -U apsw"
            ) from error
        finally:
            loader.close()
        apsw.set_default_vfs(usual)  # loading makes it everybody's default; it is to be ours alone


def _check_path(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if 0 < os.stat(path).st_size < SMALLEST_DATABASE_BYTES:  # SQLite would take it for an empty one
            raise StoreRefused("the file is not a SQLite database", path=path, hint="Choose another path")
    if os.path.isdir(path):
        raise StoreRefused(
            "the path is a folder, not a database file", path=path, hint="Name a file in it, such as agent.db"
        )
    parent = os.path.dirname(path)
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreRefused(f"cannot make the folder {parent}: {error.strerror}", path=path) from error


def _create_private(path: str) -> None:
    """Make an empty file that only its owner may read; SQLite gives its companions the same mode."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        _sync_folder(os.path.dirname(path))
    except FileExistsError:
        return
    except OSError as error:
        raise StoreRefused(
            f"cannot create the database: {error.strerror}", path=path, hint="Check the folder's rights"
        ) from error


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identify(connection: apsw.Connection, path: str) -> None:
    application, version = connection.pragma("application_id"), connection.pragma("user_version")
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    if application == 0 and version == 0 and tables == 0:
        _lay_out(connection)
        return
    if application != APPLICATION_ID:
        raise StoreRefused("the database belongs to another program", path=path, hint="Choose another path")
    if version > len(migration_scripts()):
        raise StoreRefused(
            f"the database has schema version {version}; this Holdfast knows up to {len(migration_scripts())}",
            path=path,
            hint="Upgrade Holdfast: pip install -U holdfast",
        )
    if _reserved_bytes(connection) != CHECKSUM_BYTES:
        raise StoreRefused(
            "the database was rewritten without page checksums",
            path=path,
            hint="Restore the original file, or import it",
        )


def _lay_out(connection: apsw.Connection) -> None:
    """Set what can only be set before the first table."""
    reserve = ctypes.c_int(CHECKSUM_BYTES)
    connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserve))
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}; PRAGMA auto_vacuum=INCREMENTAL")


def _reserved_bytes(connection: apsw.Connection) -> int:
    reserve = ctypes.c_int(-1)
    connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserve))
    return reserve.value


def _check_length(connection: apsw.Connection, path: str) -> None:
    """Refuse a file that ends inside a page: SQLite fills the rest with zeros, which no checksum sees."""
    if is_cut(path):
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # a crash may have cut what the log still has
        if is_cut(path):
            raise _cut(path)


def _cut(path: str) -> Corrupted:
    return Corrupted("the database ends in the middle of a page", path=path, hint="Restore a copy of it")


def is_cut(path: str) -> bool:
    """Tell whether the file is not made of whole pages. Looks at its size only."""
    return os.stat(path).st_size % PAGE_BYTES != 0


def _switch_to_wal(connection: apsw.Connection, path: str) -> None:
    mode = connection.pragma("journal_mode", "wal")
    if mode != "wal":
        raise StoreRefused(
            f"the database cannot use a write-ahead log here (journal mode {mode})",
            path=path,
            hint="Put it on a local file system",
        )


def _in_one_transaction(connection: apsw.Connection, script: str, version: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(script)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={version}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    else:
        connection.execute("COMMIT")


def resolve_path(url: str) -> str:
    """Return the file path of ``sqlite:///path`` or of a plain path."""
    return str(Path(url.removeprefix("sqlite://")).expanduser())
