"""A small store with everything in it, and ways to damage it below its own verbs.

SQLite files are changed through SQLite, so that the pages are sound, and only our own digests, checksums and second
indexes can show what is wrong. A damaged page changes a table without its indexes, or an index without its table:
``behind`` does that.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import backstay
from backstay.errors import BackstayError
from backstay.model.checkpoint import Write
from backstay.model.decision import Decision, DecisionKind

IDS = (
    *(f"a{number}" for number in range(8)),
    "f0",
    *(f"b{number}" for number in range(3)),
    *(f"c{number}" for number in range(7)),
)


def clock() -> datetime:
    """Return always the same moment, so that a second filling gives the same digests."""
    return datetime(2026, 1, 1, tzinfo=UTC)


def text(seed: str, length: int) -> str:
    """Return a text that cannot be compressed much and is the same every time."""
    return hashlib.shake_128(seed.encode()).hexdigest(length // 2)


def fill(store: backstay.Store) -> None:
    """Save three threads: one with a base, a fork and all that stands beside checkpoints; one sharing bytes; edits."""
    thread = store.thread("alpha")
    log = [text(f"log {number}", 300) for number in range(3)]
    facts = {
        f"fact {number}": text(f"fact {number}", 200) for number in range(4)
    }  # inline, unchanged: they make a base
    for number in range(7):
        log = [*log, text(f"entry {number}", 400)]
        thread.save(
            {"log": log, "n": number, "doc": text("doc", 2000), **facts}, id=f"a{number}", label=f"step {number}"
        )
    log[2] = text("edited", 40)
    thread.save({"log": log, "n": 7, "doc": text("doc", 2000), **facts}, id="a7")
    thread.fork("a4", branch="what-if", set={"n": -4}, id="f0")
    thread.tag("a3", "good")
    thread.write("a7", [Write("task", 0, "channel", {"answer": 42})])
    asked = thread.interrupt("a6", payload={"q": 1}, id="ask")
    thread.decide(asked, Decision(kind=DecisionKind.APPROVE), by="ann")
    thread.effect("mail", lambda: {"sent": 1})
    other = store.thread("beta")
    for number in range(3):
        other.save({"log": [text("beta", 400)] * (number + 1), "doc": text("doc", 2000)}, id=f"b{number}")
    items = [text(f"item {number}", 400) for number in range(40)]
    for number in range(7):  # edits everywhere: many pieces, which make a table
        items[3 * number] = text(f"changed {number}", 30)
        store.thread("gamma").save({"items": items}, id=f"c{number}")


def make(path: Path) -> Path:
    """Make the store in a file and close it."""
    with backstay.open(path, clock=clock) as store:
        fill(store)
    return path


def change(path: Path, statement: str, bound: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Run a statement on a store's file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, bound).fetchall()


def behind(path: Path, hidden: Collection[str], statement: str, bound: tuple[Any, ...] = ()) -> int:
    """Run a statement that these indexes do not notice; return how many rows it changed."""
    marks = ", ".join("?" * len(hidden))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema=1")
        kept = connection.execute(f"SELECT * FROM sqlite_schema WHERE name IN ({marks})", tuple(hidden)).fetchall()
        assert len(kept) == len(hidden)
        connection.execute(f"DELETE FROM sqlite_schema WHERE name IN ({marks})", tuple(hidden))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:  # it knows of none of them
        changed = connection.execute(statement, bound).rowcount
        connection.execute("PRAGMA writable_schema=1")
        connection.executemany("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", kept)
        return changed


def indexes(path: Path, table: str) -> list[str]:
    """Return the indexes of a table that have a name of ours."""
    found = change(path, "SELECT name FROM sqlite_schema WHERE type = 'index' AND tbl_name = ? AND sql <> ''", (table,))
    return [name for (name,) in found]


def lose_from_index(path: Path, table: str, index: str, where: str) -> None:
    """Take a row out of one index, and leave it in its table and in the other indexes."""
    every = indexes(path, table)
    (row,) = change(path, f"SELECT * FROM {table} WHERE {where}")
    assert behind(path, set(every) - {index}, f"DELETE FROM {table} WHERE {where}") == 1
    assert behind(path, every, f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row) == 1


def flip(data: bytes, place: int) -> bytes:
    """Return bytes with one bit flipped."""
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def flip_column(path: Path, table: str, column: str, where: str, place: int = 40) -> None:
    """Flip a bit in one column of one row."""
    key = {"blob": "id", "chunk": "address", "checkpoint": "key", "record": "place"}[table]
    ((number, data),) = change(path, f"SELECT {key}, {column} FROM {table} WHERE {where}")
    change(path, f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (flip(data, place), number))


def dump(path: Path) -> list[object]:
    """Return every row of every table."""
    tables = [name for (name,) in change(path, "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
    return [(table, *change(path, f'SELECT * FROM "{table}" ORDER BY 1, 2')) for table in tables]


def loaded(store: backstay.Store) -> dict[str, Any]:
    """Return every checkpoint that can be loaded: its state, its digest and what stands beside it."""
    found = {}
    for name in IDS:
        with contextlib.suppress(BackstayError):
            checkpoint = store.get(name)
            if checkpoint is not None:
                found[name] = (
                    checkpoint.state,
                    checkpoint.digest,
                    checkpoint.tags,
                    checkpoint.label,
                    checkpoint.writes,
                )
    return found
