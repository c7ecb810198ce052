"""Copying every readable row of a damaged database, even one that SQLite refuses to open, into a new one.

The first page of a file, with SQLite's own header and the table of tables, is the same in every store of a version, but
for a few numbers; so is the rest of the table of tables. If it is damaged, it is taken from a new store. Each table is
then read from both ends and, between damaged pages, in halves. Names of threads and branches are also in their indexes.
Rows that follow from others are left to ``rebuild``. The damaged file is only read.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backstay.errors import StoreRefused
from backstay.store.sqlite import queries
from backstay.store.sqlite.database import PAGE_BYTES, Database, connect
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import seal
from backstay.store.sqlite.schema import our_objects

_INTEGER_MAX = (1 << 63) - 1
_RANGES_MAX = 2000
"""How many ranges of a table are tried: each damaged page takes about two for every time the rest is halved."""
_INTERIOR_TABLE = 5
_HEADER_BYTES = 100
_TIMEOUT_S = 5.0


def salvage_file(source: Path, target: Path) -> None:
    """Copy the readable rows of a damaged store into a new file."""
    if not source.is_file():
        raise StoreRefused(f"{source} is not a file", path=str(source), hint="Name the SQLite file of a store")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        copy = Path(folder) / "copy.db"
        shutil.copyfile(source, copy)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{source}-wal", f"{copy}-wal")
        Database(str(target), _TIMEOUT_S)  # makes the tables
        new = connect(str(target), _TIMEOUT_S)
        with contextlib.closing(_opened(copy, Path(folder))) as old, contextlib.closing(new):
            new.execute("PRAGMA foreign_keys=OFF")
            new.execute("BEGIN IMMEDIATE")
            new.execute("DELETE FROM counter")
            for table, sql in our_objects().items():
                if sql.startswith("CREATE TABLE"):
                    _copy_table(old, new, table)
            for read, insert in queries.NAMES_LEFT:
                _copy_names(old, new, read, insert)
            new.execute("COMMIT")


def _opened(copy: Path, folder: Path) -> Connection:
    """Return a connection to a damaged file; if SQLite cannot read its tables, with a new store's that fit best."""
    whole = copy.read_bytes()
    found = [(_fit(copy), whole)]
    if not found[0][0]:
        for companion in ("-wal", "-shm"):
            Path(f"{copy}{companion}").unlink(missing_ok=True)
        for pages in _templates(folder):
            copy.write_bytes(_patched(whole, pages))
            found.append((_fit(copy), copy.read_bytes()))
        fit, best = max(found, key=lambda each: each[0])
        if not fit:
            raise StoreRefused("none of the store's tables can be found in the file", hint="Restore a copy")
        copy.write_bytes(best)
    return connect(str(copy), _TIMEOUT_S)


def _fit(copy: Path) -> int:
    """Return how many tables and indexes can be read; 0 if no row that we stored is in its place."""
    seals = readable = 0
    with contextlib.closing(connect(str(copy), _TIMEOUT_S)) as connection:
        for text in (queries.THREADS, "SELECT name, value, seal FROM counter"):
            with contextlib.suppress(sqlite3.DatabaseError):
                seals += any(own == seal(*row) for *row, own in connection.execute(text))
        for text in (*queries.READ_TABLE.values(), *queries.THREAD_NAMES, *queries.BRANCH_NAMES):
            with contextlib.suppress(sqlite3.DatabaseError):
                connection.execute(text).fetchone()
                readable += 1
    return seals and seals + readable


def _templates(folder: Path) -> Iterator[dict[int, bytes]]:
    """Yield the pages of the table of tables of a new store, by number: as it was made, and after a vacuum."""
    fresh, vacuumed = folder / "fresh.db", folder / "vacuumed.db"
    Database(str(fresh), _TIMEOUT_S)
    with contextlib.closing(connect(str(fresh), _TIMEOUT_S)) as connection:
        connection.execute("VACUUM INTO ?", (str(vacuumed),))
    for path in (fresh, vacuumed):
        data = path.read_bytes()
        found = {number: data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES] for number in _schema_pages(data)}
        yield {len(data) // PAGE_BYTES: bytes(PAGE_BYTES), **found}  # every table has its first page


def _schema_pages(data: bytes) -> list[int]:
    """Return the numbers of the pages that hold the table of tables; it is one page, or one and its children."""
    page = data[:PAGE_BYTES]
    if page[_HEADER_BYTES] != _INTERIOR_TABLE:
        return [1]
    cells = int.from_bytes(page[_HEADER_BYTES + 3 : _HEADER_BYTES + 5])
    starts = [_HEADER_BYTES + 12 + 2 * cell for cell in range(cells)]
    places = [int.from_bytes(page[start : start + 2]) for start in starts]
    children = [int.from_bytes(page[place : place + 4]) for place in places]
    return [1, *children, int.from_bytes(page[_HEADER_BYTES + 8 : _HEADER_BYTES + 12])]


def _patched(whole: bytes, pages: dict[int, bytes]) -> bytes:
    """Return the file with these pages, its length in its header, and no list of free pages."""
    count = max(-(-len(whole) // PAGE_BYTES), max(pages))
    data = bytearray(whole.ljust(count * PAGE_BYTES, b"\0"))
    for number, page in pages.items():
        if any(page) or number * PAGE_BYTES > len(whole):
            data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES] = page
    data[28:40] = count.to_bytes(4) + bytes(8)
    data[92:96] = data[24:28]  # says that the length is right
    return bytes(data)


def _copy_table(old: Connection, new: Connection, table: str) -> None:
    columns = new.execute(queries.COLUMNS, (table,)).fetchall()
    marks = ", ".join("?" * len(columns))
    insert = f"INSERT OR IGNORE INTO {table} VALUES ({marks})"
    key = next(name for name, _, is_key in columns if is_key)
    is_number = "INTEGER PRIMARY KEY" in our_objects()[table]
    found = _by_number(old, table, key) if is_number else _from_both_ends(old, table)
    for row in found:
        with contextlib.suppress(sqlite3.IntegrityError, sqlite3.InterfaceError):
            new.execute(insert, row)


def _by_number(old: Connection, table: str, key: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table with numbered rows, although some pages are damaged."""
    ranges = deque([(-1, _INTEGER_MAX)])
    for _ in range(_RANGES_MAX):
        if not ranges:
            return
        last, first = ranges.popleft()
        for order, is_up in (("ASC", True), ("DESC", False)):
            text = f"SELECT {key}, * FROM {table} NOT INDEXED WHERE {key} > ? AND {key} < ? ORDER BY {key} {order}"
            try:
                for number, *row in old.execute(text, (last, first)):
                    last, first = (number, first) if is_up else (last, number)
                    yield tuple(row)
                break
            except sqlite3.DatabaseError:
                continue
        else:
            if first - last > 2:
                middle = (last + first) // 2
                ranges += [(last, middle), (middle - 1, first)]


def _from_both_ends(old: Connection, table: str) -> Iterator[tuple[Any, ...]]:
    key = "1, 2, 3, 4" if table == "write" else "1, 2"
    for order in (key, ", ".join(f"{part} DESC" for part in key.split(", "))):
        text = f"SELECT * FROM {table} ORDER BY {order}"
        with contextlib.suppress(sqlite3.DatabaseError):
            yield from old.execute(text)


def _copy_names(old: Connection, new: Connection, read: str, insert: str) -> None:
    """Add threads and branches whose rows are lost but whose names an index has."""
    with contextlib.suppress(sqlite3.DatabaseError):
        for row in old.execute(read):
            with contextlib.suppress(sqlite3.IntegrityError):
                new.execute(insert, row)
