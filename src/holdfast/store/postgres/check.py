"""Damage below the level of checkpoints: everything that ``mend`` can work out anew, all seen at one moment."""

from __future__ import annotations

from holdfast.store.base import Finding
from holdfast.store.postgres.connection import DeadlineConnection
from holdfast.store.postgres.mend import find_rebuild


def check_tables(connection: DeadlineConnection) -> list[Finding]:
    """Return everything that is wrong."""
    plan = find_rebuild(connection, drop=True)
    return [*plan.findings, *plan.hopeless]
