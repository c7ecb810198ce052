"""Damage below the level of checkpoints: pages and indexes, and everything that ``mend`` can work out anew."""

from __future__ import annotations

from collections.abc import Iterator

import apsw

from holdfast.store.base import Finding
from holdfast.store.finding import DAMAGED
from holdfast.store.sqlite.mend import plan_rebuild
from holdfast.store.sqlite.select import every


def check_database(connection: apsw.Connection) -> list[Finding]:
    """Return everything that is wrong; goes on after each finding as far as SQLite lets it."""
    findings: list[Finding] = []
    for part in (_structure, _contents):
        try:
            findings.extend(part(connection))
        except (apsw.CorruptError, apsw.IOError) as error:
            findings.append(Finding(DAMAGED, "database", f"a page cannot be read: {error}"))
    return findings


def _structure(connection: apsw.Connection) -> Iterator[Finding]:
    for (text,) in every(connection, "PRAGMA integrity_check(100)"):
        if text != "ok":
            yield Finding(DAMAGED, "database", text)


def _contents(connection: apsw.Connection) -> list[Finding]:
    plan = plan_rebuild(connection, drop=True)
    return [*plan.findings, *plan.hopeless]
