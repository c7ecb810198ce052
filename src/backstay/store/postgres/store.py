"""The PostgreSQL store: one schema, many threads, processes and machines.

A save is one statement. No session state is kept between statements, so a pooler in transaction mode may stand in
between. See ``link`` for deadlines and lost connections, ``schema.sql`` for what keeps writers and deletes apart.
"""

from __future__ import annotations

from backstay.store.postgres.collect import Deleting
from backstay.store.postgres.commit import Writing
from backstay.store.postgres.compact import Space
from backstay.store.postgres.database import prepare
from backstay.store.postgres.find import Reading
from backstay.store.postgres.lease import Leases
from backstay.store.postgres.link import Link
from backstay.store.postgres.mend import Repair
from backstay.store.postgres.records import Records
from backstay.store.postgres.target import parse_url


class PostgresStore(Reading, Writing, Deleting, Leases, Records, Repair, Space):
    """Keeps checkpoints in one schema of a PostgreSQL database."""

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)
        self.url = self._target.shown
        self._link = Link(self._target)
        prepare(self._link, self._target)

    def close(self) -> None:
        self._link.close()
