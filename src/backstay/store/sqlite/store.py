"""The SQLite store: one file, many threads and processes.

Writes go through group commit (``transactions``); reads have connections of their own, so neither waits for the other.
Forking is safe: connections are closed before the fork and opened again, in both processes, when needed.
"""

from __future__ import annotations

from backstay.store.sqlite.checkpoints import SqliteCheckpoints
from backstay.store.sqlite.collect import SqliteDeletes
from backstay.store.sqlite.find import SqliteReads
from backstay.store.sqlite.leases import SqliteLeases
from backstay.store.sqlite.records import SqliteRecords
from backstay.store.sqlite.repair import SqliteRepair


class SqliteStore(SqliteCheckpoints, SqliteReads, SqliteDeletes, SqliteLeases, SqliteRecords, SqliteRepair):
    """Stores checkpoints in one SQLite file."""
