"""Rows that Holdfast never writes: odd values in every column of every table give errors of ours, and no others."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "upkeep"))

from damage import fill, text

import holdfast
from effort import effort
from holdfast.errors import HoldfastError
from holdfast.model.checkpoint import Write
from holdfast.model.decision import Decision, DecisionKind
from holdfast.store.lane import LaneKey
from holdfast.store.leases import Claim
from holdfast.store.sessions import SessionRow
from holdfast.store.sqlite.database import CHECKSUM_VFS
from holdfast.store.sqlite.schema import our_objects

TABLES = {name: text for name, text in our_objects().items() if text.startswith("CREATE TABLE")}
ODD: tuple[Any, ...] = (None, -1, 0, 2**63 - 1, -(2**63), 1.5, "", "x", "é\0y", b"", b"x", b"\xff" * 16, b"\x93" * 32)
VALUES_A_COLUMN = min(len(ODD), 2 * effort())


def columns_of(table: str) -> list[str]:
    body = TABLES[table].split("(", 1)[1]
    return re.findall(r"(?:^|, )(\w+) (?:INTEGER|TEXT|BLOB|ANY)", body.strip())


def loosened(text: str) -> str:
    """Return the text of a table without types and constraints, but for its keys: it takes any value."""
    text = re.sub(r"\) STRICT, WITHOUT ROWID$", ") WITHOUT ROWID", re.sub(r"\) STRICT$", ")", text))
    text = re.sub(r" REFERENCES \w+ \(\w+\)| NOT NULL| DEFAULT \d+", "", text)
    return re.sub(r" (INTEGER|TEXT|BLOB|ANY)(?! PRIMARY KEY)", "", text)


def put(path: Path, table: str, column: str, value: Any) -> int:
    """Put a value into a column of every row that takes it, and leave the schema as it was; return into how many."""
    with contextlib.closing(apsw.Connection(str(path), vfs=CHECKSUM_VFS)) as connection:
        connection.execute("PRAGMA writable_schema=1")
        swap = "UPDATE sqlite_schema SET sql = ? WHERE name = ?"
        kept = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).get
        connection.execute(swap, (loosened(TABLES[table]), table))
        connection.execute("PRAGMA writable_schema=RESET; PRAGMA writable_schema=1")
        before = connection.total_changes()
        with contextlib.suppress(apsw.MismatchError, apsw.ConstraintError):  # a key of a table takes only integers
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
        changed = connection.total_changes() - before
        connection.execute(swap, (kept, table))
        return changed


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "original.db"
    with holdfast.open(path) as store:
        fill(store)
        thread = store.thread("alpha")
        thread.write("a7", [Write("long", 0, "channel", text("long", 2000))])
        thread.interrupt("a7", payload={"q": 2}, id="open")
        backend = store._backend
        backend.begin(SessionRow("run", LaneKey("", "alpha", "", "main"), "ann", "host 1", "left open", 1, 1), 1)
        backend.acquire(LaneKey("", "leased", "", "main"), Claim("ann", "token", 1))
    return path


CASES = [(table, column) for table in sorted(TABLES) for column in columns_of(table)]


def verbs(store: holdfast.Store) -> Iterator[Callable[[], object]]:
    thread = store.thread("alpha")
    ask = Decision(kind=DecisionKind.APPROVE)
    yield lambda: [store.get(name) for name in ("a0", "a7", "f0", "b2", "c6")]
    yield lambda: [meta.step for meta in store.threads()]
    yield lambda: [meta.created_at for meta in thread.history()]
    yield lambda: thread.latest()
    yield lambda: thread.at(step=3)
    yield lambda: thread.branches()
    yield lambda: store.thread("alpha", branch="what-if").latest()
    yield lambda: store.thread("gamma").latest()
    yield lambda: list(store.interrupts(pending=False))
    yield lambda: list(thread.effects())
    yield lambda: store.sessions(active=False)
    yield lambda: store.interrupted()
    yield lambda: store.expired()
    yield lambda: store.stats()
    yield lambda: store.verify()
    yield lambda: store.prune(holdfast.Keep(last=2), dry_run=True)
    yield lambda: store.thread("alpha").append({"log": ["more"]})
    yield lambda: store.thread("beta").save({"log": ["other"]}, id="new")
    yield lambda: store.thread("alpha").fork("a2", branch="late")
    yield lambda: thread.tag("a1", "late")
    yield lambda: thread.write("a7", [Write("task", 0, "channel", 43), Write("long", 0, "channel", "z")])
    yield lambda: [thread.decide(each, ask, by="bob") for each in store.interrupts()]
    yield lambda: thread.effect("mail", lambda: 1)
    yield lambda: store._backend.claim("", 2, Claim("bob", "third", 1))
    yield lambda: store._backend.acquire(LaneKey("", "leased", "", "main"), Claim("bob", "other", 1))
    yield lambda: store.prune(holdfast.Keep(last=2))
    yield lambda: store.thread("gamma").delete("c1")
    yield lambda: store.compact()
    yield lambda: store.delete_thread("beta")
    yield lambda: store.clear()


@pytest.mark.parametrize(("table", "column"), CASES)
def test_an_odd_value_gives_an_error_of_ours(original: Path, tmp_path: Path, table: str, column: str) -> None:
    changed = 0
    for value in random.Random(f"{table}.{column}").sample(ODD, VALUES_A_COLUMN):
        path = tmp_path / "copy.db"
        shutil.copyfile(original, path)
        changed += put(path, table, column, value)
        with holdfast.open(path) as store:
            for number, verb in enumerate(verbs(store)):
                try:
                    verb()
                except HoldfastError:
                    continue
                except Exception as error:
                    error.add_note(f"{table}.{column} = {value!r}, call {number}")
                    raise
    is_key = f"{column} INTEGER PRIMARY KEY" in TABLES[table]  # which takes nothing but integers, each only once
    assert changed or is_key, "no value was put anywhere"


def test_every_column_is_tried() -> None:
    connection = apsw.Connection(":memory:")
    for definition in TABLES.values():
        connection.execute(definition)
    found = {(table, name) for table in TABLES for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}

    assert found == set(CASES)
