"""What cannot be beaten: the bare file system and a bare SQLite, made durable at every step like the library."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from benchmarks.timing import Times


class RawFile:
    """A file that bytes are appended to, each append followed by fdatasync."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def append(self, data: bytes) -> float:
        """Append durably and return the seconds."""
        began = time.perf_counter()
        os.write(self._descriptor, data)
        os.fdatasync(self._descriptor)
        return time.perf_counter() - began

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class RawSqlite:
    """A table with one column; WAL and synchronous=FULL as in the library, but no page checksums."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE row (data BLOB)"):
            self._connection.execute(statement).fetchall()

    def insert(self, data: bytes) -> float:
        """Insert one row in a transaction of its own and return the seconds."""
        began = time.perf_counter()
        self._connection.execute("INSERT INTO row VALUES (?)", (data,))
        return time.perf_counter() - began

    def close(self) -> None:
        """Close the database."""
        self._connection.close()


def sync_times(folder: Path, size: int = 1300, count: int = 200) -> tuple[Times, Times]:
    """Return the times of fdatasync after a write that makes the file longer, and after one in place."""
    path = folder / "sync.raw"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    longer: list[float] = []
    in_place: list[float] = []
    try:
        for number in range(count):
            for taken, offset in ((longer, number * size), (in_place, 0)):
                os.pwrite(descriptor, bytes(size), offset)
                began = time.perf_counter()
                os.fdatasync(descriptor)
                taken.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
        path.unlink()
    return Times(longer), Times(in_place)
