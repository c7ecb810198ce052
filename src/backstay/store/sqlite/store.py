"""The SQLite store: one file, many threads and processes.

Writes go through the group commit of ``writer``; reads have connections of their own, so neither waits for the other.
A process that forks is safe: connections are closed before the fork and opened again, on both sides, when needed.
"""

from __future__ import annotations

from backstay.store.sqlite.checkpoints import Checkpoints
from backstay.store.sqlite.collect import Deletes
from backstay.store.sqlite.find import Reads
from backstay.store.sqlite.leases import Leases
from backstay.store.sqlite.records import Records
from backstay.store.sqlite.repair import Repair


class SqliteStore(Checkpoints, Reads, Deletes, Leases, Records, Repair):
    """Keeps checkpoints in one SQLite file."""
