"""Running a SELECT (or a statement that returns something) and taking its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import apsw

Bound = Sequence[Any] | Mapping[str, Any]


def every(connection: apsw.Connection, statement: str, bound: Bound = ()) -> list[tuple[Any, ...]]:
    """Return all rows."""
    return connection.execute(statement, bound).fetchall()


def one(connection: apsw.Connection, statement: str, bound: Bound = ()) -> tuple[Any, ...] | None:
    """Return the first row, or None."""
    return connection.execute(statement, bound).fetchone()


def scalar(connection: apsw.Connection, statement: str, bound: Bound = ()) -> Any:
    """Return the first column of the first row, or None."""
    row = connection.execute(statement, bound).fetchone()
    return None if row is None else row[0]
