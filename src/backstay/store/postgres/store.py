"""The PostgreSQL store: one schema, many threads, processes and machines.

A save is one statement. No session state is kept between statements, so a pooler in transaction mode may be in between.
See ``pool`` for deadlines and lost connections, and ``schema.sql`` for the locks between saves and deletes.
"""

from __future__ import annotations

from backstay.store.postgres.checkpoints import PostgresCheckpoints
from backstay.store.postgres.collect import PostgresDeletes, PostgresSpace
from backstay.store.postgres.database import prepare
from backstay.store.postgres.find import PostgresReads
from backstay.store.postgres.leases import PostgresLeases
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.records import PostgresRecords
from backstay.store.postgres.repair import PostgresRepair
from backstay.store.postgres.target import parse_url


class PostgresStore(
    PostgresReads, PostgresCheckpoints, PostgresDeletes, PostgresLeases, PostgresRecords, PostgresRepair, PostgresSpace
):
    """Stores checkpoints in one schema of a PostgreSQL database."""

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)
        self.url = self._target.shown
        self._pool = RetryingPool(self._target)
        self._shared = set()
        prepare(self._pool, self._target)

    def close(self) -> None:
        self._pool.close()
