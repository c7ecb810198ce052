"""Damage below the level of checkpoints: pages, and everything that ``mend`` can work out anew."""

from __future__ import annotations

import apsw

from backstay.store.base import Finding
from backstay.store.finding import DAMAGED
from backstay.store.sqlite.mend import plan_rebuild
from backstay.store.sqlite.pages import damaged_pages


def check_database(connection: apsw.Connection) -> list[Finding]:
    """Return everything that is wrong; goes on after each finding as far as SQLite lets it."""
    findings = damaged_pages(connection)
    try:
        plan = plan_rebuild(connection, drop=True)
    except (apsw.CorruptError, apsw.IOError) as error:
        if not findings:  # else it is told already
            findings.append(Finding(DAMAGED, "database", f"a page cannot be read: {error}"))
        return findings
    return [*findings, *plan.findings, *plan.hopeless]
