"""What PostgreSQL itself says of one store's connections, told from others by their name."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from psycopg import sql

from backstay.testing.postgres import PostgresServer


class Watch:
    """Looks at the connections that come with ``url``; it ends with the schema's name."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self._server = server
        self._name = f"watched-{uuid.uuid4().hex}"
        self._schema = sql.Identifier(url.rpartition("schema=")[2])
        self.url = f"{url}&application_name={self._name}"

    @property
    def connections(self) -> int:
        """Return how many there are."""
        return self._count(sql.SQL("true"))

    @property
    def transactions(self) -> int:
        """Return how many are inside a transaction, busy or idle."""
        return self._count(sql.SQL("xact_start is not null"))

    @property
    def blocked(self) -> int:
        """Return how many wait for a lock."""
        return self._count(sql.SQL("wait_event_type = 'Lock'"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep everybody from everything until the block ends."""
        with self._server.connect() as lock, lock.transaction():
            lock.execute(sql.SQL("lock table {}.lane").format(self._schema))
            yield

    def _count(self, condition: sql.SQL) -> int:
        query = sql.SQL("select count(*) from pg_stat_activity where application_name = %s and {}").format(condition)
        with self._server.connect() as connection:
            row = connection.execute(query, (self._name,)).fetchone()
        return 0 if row is None else int(row[0])
