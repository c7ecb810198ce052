"""Rows that Backstay never writes: odd values in every column of every table give errors of ours, and no others."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.store.sqlite.schema import our_objects
from support.running import effort
from support.store.odd_rows import call_all, fill_all

TABLES = {name: text for name, text in our_objects().items() if text.startswith("CREATE TABLE")}
ODD: tuple[Any, ...] = (None, -1, 0, 2**63 - 1, -(2**63), 1.5, "", "x", "é\0y", b"", b"x", b"\xff" * 16, b"\x93" * 32)
VALUES_A_COLUMN = min(len(ODD), max(2, effort() // 2))


def columns_of(table: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(TABLES[table])
        return [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]


def loosened(text: str) -> str:
    """Return the text of a table without types and constraints, but for its keys: it takes any value."""
    return re.sub(r" (INTEGER|TEXT|BLOB)(?! PRIMARY KEY)| NOT NULL", "", text)


def put(path: Path, table: str, column: str, value: Any) -> int:
    """Put a value into a column of every row that takes it, and leave the schema as it was; return into how many."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema=1")
        swap = "UPDATE sqlite_schema SET sql = ? WHERE name = ?"
        kept = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()[0]
        connection.execute(swap, (loosened(TABLES[table]), table))
        connection.execute("PRAGMA writable_schema=RESET")
        connection.execute("PRAGMA writable_schema=1")
        before = connection.total_changes
        with contextlib.suppress(sqlite3.IntegrityError):  # a key of a table takes only integers
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
        changed = connection.total_changes - before
        connection.execute(swap, (kept, table))
        return changed


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "original.db"
    with backstay.open(path) as store:
        fill_all(store)
    return path


CASES = [(table, column) for table in sorted(TABLES) for column in columns_of(table)]


@pytest.mark.parametrize("column", ["branch.head", "branch.expires", "thread.seal", "blob.size"])
def test_the_error_names_the_thread(tmp_path: Path, column: str) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        thread = store.thread("customer-42")
        many = {f"key {number}": "a value of some length, so that the state has a base" for number in range(100)}
        saved = [thread.save({**many, "step": step}) for step in (1, 2)]
    table, _, name = column.partition(".")
    assert put(path, table, name, "x")
    with backstay.open(path) as store:
        thread = store.thread("customer-42")
        for call in (thread.latest, lambda: thread.get(saved[0].id), lambda: thread.at(1)):
            with pytest.raises(backstay.Corrupted, match="customer-42"):
                call()


@pytest.mark.effort
@pytest.mark.parametrize(("table", "column"), CASES)
def test_an_odd_value_gives_an_error_of_ours(original: Path, tmp_path: Path, table: str, column: str) -> None:
    changed = 0
    for value in random.Random(f"{table}.{column}").sample(ODD, VALUES_A_COLUMN):
        path = tmp_path / "copy.db"
        shutil.copyfile(original, path)
        changed += put(path, table, column, value)
        with backstay.open(path) as store:
            call_all(store, f"{table}.{column} = {value!r}")
    is_key = f"{column} INTEGER PRIMARY KEY" in TABLES[table]  # which takes nothing but integers, each only once
    assert changed or is_key, "no value was put anywhere"
