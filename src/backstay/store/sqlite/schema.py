"""The tables: made, brought up to date, and compared with what they must be.

A file in which anything of ours differs is refused: a trigger, an index or a constraint that somebody added can drop,
change or copy what is saved, and no call would fail. Tables of other programs may be in the same file, with their
indexes, as long as nothing of them touches ours. Triggers and views are refused wherever they are.
"""

from __future__ import annotations

import importlib.resources
import re
from functools import cache
from importlib.resources.abc import Traversable

import apsw

from backstay.errors import StoreRefused

APPLICATION_ID = 0x42535459  # "BSTY"
_MIGRATIONS = importlib.resources.files(__package__) / "migrations"
_SCHEMA = importlib.resources.files(__package__) / "schema.sql"
_CREATE = re.compile(r"^CREATE (TABLE|(?:UNIQUE )?INDEX) (\w+)[^;]*", re.MULTILINE)
_NAMED_MAX = 10


def migrate(connection: apsw.Connection) -> None:
    """Bring the schema to the newest version; each migration and its number are one transaction."""
    current = int(connection.pragma("user_version"))
    scripts = migration_scripts()
    if current == 0:
        _in_one_transaction(connection, _script(_SCHEMA), len(scripts))
        return
    for number in range(current, len(scripts)):
        _in_one_transaction(connection, scripts[number], number + 1)


@cache
def migration_scripts() -> tuple[str, ...]:
    """Return all migrations in order; the first makes the tables."""
    files = sorted(entry.name for entry in _MIGRATIONS.iterdir() if entry.name.endswith(".sql"))
    return tuple(_script(_MIGRATIONS / name) for name in files)


@cache
def our_objects() -> dict[str, str]:
    """Return the tables and indexes that must be there, by name, as SQLite keeps their text."""
    return {found[2]: _normal(found[0]) for found in _CREATE.finditer(_script(_SCHEMA))}


def check_schema(connection: apsw.Connection, path: str) -> None:
    """Refuse a database whose tables are not exactly ours, or that has a trigger or a view; name what is wrong."""
    ours = our_objects()
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
    names = {name for _, name, _, _ in found}
    wrong = [f"{name} is missing" for name in ours if name not in names]
    for kind, name, table, sql in found:
        if name in ours:
            if not isinstance(sql, str) or _normal(sql) != ours[name]:
                wrong.append(f"{name} is not as Backstay makes it")
        # An index without a text belongs to a constraint of its table, whose text was compared.
        elif kind not in ("table", "index") or (sql is not None and str(table).lower() in ours):
            wrong.append(f"{kind} {name} does not belong there")
    if wrong:
        more = f" and {len(wrong) - _NAMED_MAX} more" if len(wrong) > _NAMED_MAX else ""
        raise StoreRefused(
            f"the tables of the database were changed by another program: {'; '.join(wrong[:_NAMED_MAX])}{more}",
            path=path,
            hint="Find out who changed them. Drop what was added, or restore a copy of the file",
        )


def _script(file: Traversable) -> str:
    """Return a script without the spaces that align it: SQLite keeps this text, and so it fits in the first page."""
    return "\n".join(" ".join(line.split()) for line in file.read_text(encoding="utf-8").splitlines())


def _normal(sql: str) -> str:
    return " ".join(sql.split())


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
