"""Running a statement and taking its rows. Rows and parameters travel in PostgreSQL's binary form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from backstay.store.postgres.connection import DeadlineConnection

Bound = Sequence[Any] | Mapping[str, Any]


def run(connection: DeadlineConnection, statement: str, bound: Bound | None = None) -> int:
    """Run a statement that returns nothing; return how many rows it changed."""
    return _cursor(connection, statement, bound).rowcount


def every(connection: DeadlineConnection, statement: str, bound: Bound | None = None) -> list[tuple[Any, ...]]:
    """Return all rows."""
    return _cursor(connection, statement, bound).fetchall()


def one(connection: DeadlineConnection, statement: str, bound: Bound | None = None) -> tuple[Any, ...] | None:
    """Return the first row, or None."""
    return _cursor(connection, statement, bound).fetchone()


def scalar(connection: DeadlineConnection, statement: str, bound: Bound | None = None) -> Any:
    """Return the first column of the first row, or None."""
    row = one(connection, statement, bound)
    return None if row is None else row[0]


def _cursor(connection: DeadlineConnection, statement: str, bound: Bound | None) -> psycopg.Cursor[tuple[Any, ...]]:
    text = connection.statements[statement]
    return connection.execute(text.encode(), bound, binary=True)  # bytes: psycopg takes only literals for text
