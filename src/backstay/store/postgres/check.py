"""Damage below the level of checkpoints: everything that ``mend`` can work out anew, all seen at one moment."""

from __future__ import annotations

from backstay.store.base import Finding
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.mend import find_rebuild


def check_tables(connection: DeadlineConnection) -> list[Finding]:
    """Return everything that is wrong."""
    plan = find_rebuild(connection, drop=True)
    return [*plan.findings, *plan.hopeless]
