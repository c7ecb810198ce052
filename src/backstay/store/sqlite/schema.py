"""The tables: created, migrated, and compared with schema.sql.

schema.sql is always the newest version. Version 1 is schema.sql as first released; a later change edits schema.sql and
adds migrations/0002_what_it_does.sql, 0003 and so on, which bring older databases to the same tables.

A database whose tables differ from ours is refused: an added trigger, index or constraint could drop, change or copy
saved data without any call failing. The file may hold tables of other programs, with their indexes, as long as they do
not touch ours. Triggers and views are refused everywhere.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from backstay.errors import StoreRefused
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import seal

APPLICATION_ID = 0x42535459  # "BSTY"
_MIGRATIONS = Path(__file__).parent / "migrations"
_SCHEMA = Path(__file__).parent / "schema.sql"
_CREATE = re.compile(r"^CREATE (TABLE|(?:UNIQUE )?INDEX) (\w+)[^;]*", re.MULTILINE)
_COUNTERS = {"stream": 1, "record": 0}
_NAMED_MAX = 10
_AROUND = re.compile(r"\s*([(),])\s*")


def migrate(connection: Connection) -> None:
    """Bring the schema to the newest version; each migration and its number are one transaction."""
    current = int(connection.pragma("user_version"))
    if current == 0:
        steps = [(newest_version(), schema_script())]
    else:
        steps = list(enumerate(migration_scripts(), 2))[current - 1 :]
    for version, script in steps:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in script.split(";"):
                connection.execute(statement)
            if current == 0:
                rows = [(name, value, seal(name, value)) for name, value in _COUNTERS.items()]
                connection.executemany("INSERT INTO counter VALUES (?, ?, ?)", rows)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={version}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        else:
            connection.execute("COMMIT")


@cache
def newest_version() -> int:
    """Return the version that schema.sql creates and that the migrations lead to."""
    return 1 + len(migration_scripts())


def migration_scripts() -> list[str]:
    """Return the migrations to versions 2, 3, …, in order."""
    files = _MIGRATIONS.iterdir() if _MIGRATIONS.is_dir() else ()
    return [_script(file) for file in sorted(files, key=lambda file: file.name)]


def schema_script() -> str:
    """Return the script that creates the newest version."""
    return _script(_SCHEMA)


@cache
def our_objects() -> dict[str, str]:
    """Return the statements of the tables and indexes that must exist, by name."""
    return {found[2]: found[0] for found in _CREATE.finditer(schema_script())}


def comparable(sql: str) -> str:
    """Return a statement with the fewest spaces: ALTER TABLE puts them where schema.sql has none."""
    return _AROUND.sub(r"\1", " ".join(sql.split()))


def check_schema(connection: Connection, path: str) -> None:
    """Raise StoreRefused if the tables are not exactly ours, or if the database has a trigger or a view."""
    ours = our_objects()
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
    names = {name for _, name, _, _ in found}
    wrong = [f"{name} is missing" for name in ours if name not in names]
    for kind, name, table, sql in found:
        if name in ours:
            if sql != ours[name] and (not isinstance(sql, str) or comparable(sql) != comparable(ours[name])):
                wrong.append(f"{name} is not as Backstay makes it")
        # An index without a text belongs to a constraint of its table, whose text was compared.
        elif kind not in ("table", "index") or (sql is not None and str(table).lower() in ours):
            wrong.append(f"{kind} {name} does not belong there")
    if wrong:
        more = f" and {len(wrong) - _NAMED_MAX} more" if len(wrong) > _NAMED_MAX else ""
        raise StoreRefused(
            f"another program changed the tables of the database: {'; '.join(wrong[:_NAMED_MAX])}{more}",
            path=path,
            hint="Find the program that changed them, then drop its additions or restore a copy of the file",
        )


def _script(file: Path) -> str:
    """Return a script without comments and the spaces that align it: SQLite keeps this text in the first page."""
    lines = (line.partition("--")[0].split() for line in file.read_text(encoding="utf-8").splitlines())
    return "\n".join(" ".join(words) for words in lines if words)
