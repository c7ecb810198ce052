"""The tables as they must be: the script that makes them, and the migrations that lead to it."""

from __future__ import annotations

import importlib.resources

_MIGRATIONS = importlib.resources.files(__package__) / "migrations"
_SCHEMA = importlib.resources.files(__package__) / "schema.sql"


def migration_scripts() -> list[str]:
    """Return all migrations in order; the first makes the tables."""
    files = sorted(entry.name for entry in _MIGRATIONS.iterdir() if entry.name.endswith(".sql"))
    return [(_MIGRATIONS / name).read_text(encoding="utf-8") for name in files]


def schema_script() -> str:
    """Return what makes the newest version at once."""
    return _SCHEMA.read_text(encoding="utf-8")
