"""Tables that another program or another version has changed: refused by name, or harmless; nothing saved is lost."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import backstay
from backstay.errors import StoreRefused
from backstay.store.sqlite.database import LOOK_AT_TABLES_S
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.schema import comparable, migrate, newest_version, our_objects

TABLES = sorted(name for name, text in our_objects().items() if text.startswith("CREATE TABLE"))
NEWER = newest_version() + 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        store.thread("thread").save({"n": 1}, id="first")
    return path


def change(path: Path, script: str) -> None:
    """Change the database as another program would."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(script)


def edited(table: str, old: str, new: str) -> str:
    """Return a script that changes the text of a table behind SQLite's back."""
    text = comparable(our_objects()[table])
    assert old in text
    changed = text.replace(old, new).replace("'", "''")
    update = f"UPDATE sqlite_schema SET sql='{changed}' WHERE name='{table}'"
    return f"PRAGMA writable_schema=1; {update}; PRAGMA schema_version=99"


def made_anew(table: str, old: str, new: str) -> str:
    """Return a script that replaces an empty table by one like it."""
    text = comparable(our_objects()[table])
    assert old in text
    return f"DROP TABLE {table}; {text.replace(old, new)}"


CHANGES = {
    "view beside ours": ("CREATE VIEW evil AS SELECT * FROM checkpoint", "view evil"),
    "view instead of a table": (
        "DROP TABLE write_piece; CREATE VIEW write_piece AS SELECT 1 number, x'' body",
        "write_piece is not",
    ),
    "table missing": ("DROP TABLE record", "record is missing"),
    "index missing": ("DROP INDEX checkpoint_id", "checkpoint_id is missing"),
    "generated column": ("ALTER TABLE checkpoint ADD COLUMN evil INTEGER AS (step + 1)", "checkpoint is not"),
    "extra column": ("ALTER TABLE record ADD COLUMN evil TEXT", "record is not"),
    "renamed column": ("ALTER TABLE counter RENAME COLUMN value TO label", "counter is not"),
    "renamed table": ("ALTER TABLE counter RENAME TO label", "counter is missing"),
    "index": ("CREATE INDEX evil ON checkpoint (step)", "index evil"),
    "unique index": ("CREATE UNIQUE INDEX evil ON branch (head)", "index evil"),
    "partial unique index": ("CREATE UNIQUE INDEX evil ON checkpoint (step) WHERE step > 1", "index evil"),
    "index on an expression": ("CREATE INDEX evil ON chunk (abs(size))", "index evil"),
    "check": (edited("checkpoint", "step INTEGER NOT NULL", "step INTEGER NOT NULL CHECK (step < 2)"), "checkpoint is"),
    "conflict clause": (edited("blob", "UNIQUE", "UNIQUE ON CONFLICT IGNORE"), "blob is not"),
    "default": (edited("branch", "head INTEGER NOT NULL", "head INTEGER NOT NULL DEFAULT 7"), "branch is not"),
    "collation": (edited("thread", "name TEXT NOT NULL", "name TEXT COLLATE NOCASE NOT NULL"), "thread is not"),
    "type": (edited("chunk", "body BLOB", "body TEXT"), "chunk is not"),
    "strict": (edited("chunk", "NOT NULL)", "NOT NULL) STRICT"), "chunk is not"),
    "without rowid": (made_anew("write_piece", "NOT NULL)", "NOT NULL)WITHOUT ROWID"), "write_piece is not"),
    "with rowid": (made_anew("write", "WITHOUT ROWID", ""), "write is not"),
    "foreign key": (
        made_anew("record", "REFERENCES thread(id)", "REFERENCES thread(id) ON DELETE CASCADE"),
        "record",
    ),
    **{
        f"trigger {when} {event} on {table}": (
            f"CREATE TRIGGER evil {when} {event} ON {table} BEGIN SELECT RAISE(IGNORE); END",
            "trigger evil",
        )
        for table in TABLES
        for when, event in zip(("BEFORE", "AFTER", "BEFORE"), ("INSERT", "UPDATE", "DELETE"), strict=True)
    },
    "trigger that copies aside": (
        "CREATE TABLE loot (x); CREATE TRIGGER evil AFTER INSERT ON chunk BEGIN INSERT INTO loot SELECT new.body; END",
        "trigger evil",
    ),
    "trigger on a foreign table": (
        "CREATE TABLE other (x); CREATE TRIGGER evil AFTER INSERT ON other BEGIN DELETE FROM counter; END",
        "trigger evil",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_with_other_tables_is_refused_by_name_and_left_as_it_is(path: Path, what: str) -> None:
    script, named = CHANGES[what]
    change(path, script)
    before = path.read_bytes()

    with pytest.raises(StoreRefused, match=re.escape(named)) as caught:
        backstay.open(path)

    assert str(path) in str(caught.value)
    assert caught.value.hint
    assert path.read_bytes() == before
    assert not path.with_name("agent.db-wal").exists()


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each save look at the tables, instead of the first in each second."""
    monkeypatch.setattr("backstay.store.sqlite.database.LOOK_AT_TABLES_S", 0.0)


@pytest.mark.usefixtures("looks_always")
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_tables_stops_a_store_that_is_open(path: Path, what: str) -> None:
    script, named = CHANGES[what]
    with backstay.open(path) as store:
        thread = store.thread("thread")
        thread.save({"n": 2}, id="second")
        change(path, script)
        for _ in range(2):
            with pytest.raises(StoreRefused, match=re.escape(named)):
                thread.save({"n": 3}, id="third")
        with pytest.raises(StoreRefused, match=re.escape(named)):
            store.thread("thread").latest()
    assert ids(path) == {"first", "second"}
    assert loot(path) == 0


def test_a_change_of_the_tables_is_noticed_within_a_second(path: Path) -> None:
    with backstay.open(path) as store:
        thread = store.thread("thread")
        thread.save({"n": 2})
        change(path, CHANGES["index"][0])
        changed = time.monotonic()
        with contextlib.suppress(StoreRefused):
            while time.monotonic() - changed <= LOOK_AT_TABLES_S:
                thread.append({"log": [1]})
        with pytest.raises(StoreRefused, match="index evil"):
            thread.append({"log": [1]})
        with pytest.raises(StoreRefused, match="index evil"):
            thread.latest()


HARMLESS = {
    "foreign table": "CREATE TABLE other (x UNIQUE, y); CREATE INDEX other_y ON other (y)",
    "foreign table that refers to ours": "CREATE TABLE other (x REFERENCES thread (id) ON DELETE CASCADE)",
    "foreign search tables": "CREATE VIRTUAL TABLE other USING fts5(body); INSERT INTO other VALUES ('text')",
    "statistics": "ANALYZE",
    "nothing": "CREATE TRIGGER evil AFTER INSERT ON chunk BEGIN DELETE FROM chunk; END; DROP TRIGGER evil; VACUUM",
}


@pytest.mark.usefixtures("looks_always")
@pytest.mark.parametrize("what", HARMLESS)
@pytest.mark.parametrize("while_open", [True, False])
def test_tables_of_others_are_left_alone(path: Path, what: str, while_open: bool) -> None:
    if not while_open:
        change(path, HARMLESS[what])
    with backstay.open(path) as store:
        thread = store.thread("thread")
        thread.save({"n": 2}, id="second")
        if while_open:
            change(path, HARMLESS[what])
        thread.save({"n": 3}, id="third")
        assert store.check()
        store.compact()
    with backstay.open(path) as store:
        assert [meta.id for meta in store.thread("thread").history()] == ["third", "second", "first"]


def calls(store: backstay.Store) -> list[Callable[[], object]]:
    thread = store.thread("thread")
    return [
        lambda: thread.save({"n": 3}, id="third"),
        lambda: thread.tag("first", "late"),
        lambda: store.prune(backstay.Keep(last=1)),
        lambda: store.compact(),
        lambda: store.thread("thread").delete(),
    ]


@pytest.mark.usefixtures("looks_always")
@pytest.mark.parametrize("number", range(5))
def test_a_store_that_is_open_stops_when_a_newer_version_has_changed_the_database(path: Path, number: int) -> None:
    with backstay.open(path) as store:
        store.thread("thread").save({"n": 2}, id="second")
        before = ids(path)
        change(path, f"PRAGMA user_version={NEWER}")
        for call in (calls(store)[number], *calls(store)):
            with pytest.raises(StoreRefused, match=f"version {NEWER}") as caught:
                call()
            assert "Restart" in str(caught.value)
    assert ids(path) == before == {"first", "second"}
    with pytest.raises(StoreRefused, match="Upgrade"):
        backstay.open(path)


def ids(path: Path) -> set[str]:
    """Return what is stored, read by no code of ours."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return {name for (name,) in connection.execute("SELECT id FROM checkpoint")}


def loot(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
        return int(connection.execute("SELECT count(*) FROM loot").fetchone()[0]) if "loot" in tables else 0


def test_the_text_that_is_compared_is_what_sqlite_keeps() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=Connection)
    migrate(connection)
    kept = connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()

    assert {str(name): str(text) for name, text in kept if name != "sqlite_sequence"} == our_objects()
