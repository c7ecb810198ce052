"""Reading a SQLite file of another program: in one transaction, and without changing it.

Only SQLite opens the file, never Python: closing a file of our own would release the locks of every other connection in
this process. A file with a write-ahead log is read together with it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from urllib.parse import quote

from backstay.errors import Corrupted, StoreBusy, StoreRefused
from backstay.store.sqlite.database import SMALLEST_DATABASE_BYTES, code_of

BUSY_S = 10.0


def is_database(path: str) -> bool:
    """Return whether a file is a SQLite database: False only if SQLite says that it is something else."""
    if os.stat(path).st_size < SMALLEST_DATABASE_BYTES:  # SQLite would treat it as empty
        return False
    try:
        with closing(open_foreign(path)):
            return True
    except sqlite3.Error as error:
        return code_of(error) != sqlite3.SQLITE_NOTADB


def open_foreign(path: str) -> sqlite3.Connection:
    """Open a file in one read transaction. It raises the driver's errors; see ``reading``."""
    try:
        return _connect(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if code_of(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        # SQLite opens a file in a read-only directory only if we promise that the file never changes.
        if not os.path.exists(path) or any(os.path.exists(path + log) for log in ("-wal", "-journal")):
            raise
        return _connect(path, "mode=ro&immutable=1")


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of a table's columns; none if it does not exist."""
    return {str(name) for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn the errors of reading a file into ours."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise Corrupted(f"{path} is damaged: {error}", path=path, hint="Import an undamaged copy") from error
    except sqlite3.Error as error:
        if code_of(error) == sqlite3.SQLITE_BUSY:
            raise StoreBusy(f"another program has locked {path}", path=path, hint="Try again later") from error
        if code_of(error) == sqlite3.SQLITE_CORRUPT:
            raise Corrupted(f"{path} is damaged: {error}", path=path, hint="Import an undamaged copy") from error
        hint = "Check the path"
        if any(os.path.exists(path + log) for log in ("-wal", "-journal")):
            hint = "Its program stopped in the middle of a write: open it once with that program, then import again"
        raise StoreRefused(f"{path} cannot be read as a SQLite file: {error}", path=path, hint=hint) from error


def _connect(path: str, parameters: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(os.path.abspath(path))}?{parameters}",
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    connection.text_factory = partial(str, encoding="utf-8")
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # takes the snapshot
    except BaseException:
        connection.close()
        raise
    return connection
