"""Reading tables of another program in PostgreSQL: in one read-only transaction with one snapshot.

The owner of the tables need not be trusted. Only tables are read, not views, and no row-level policy is applied, since
both could call functions with the reader's rights. After the tables are found, the search path is not used any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

from backstay.errors import StoreRefused
from backstay.store.postgres.connection import translate
from backstay.store.postgres.target import parse_url

_OWN_SCHEMA = "backstay"  # the default schema of our own URLs
_TABLE_KINDS = {"r", "p"}
_TABLE: LiteralString = """
SELECT n.nspname::text, c.relkind::text, ARRAY(
  SELECT a.attname::text FROM pg_catalog.pg_attribute a
  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = pg_catalog.to_regclass(%s)::oid"""


class ForeignTables:
    """Tables in the schema that the URL's search path names. Each must have the columns that are ``needed``."""

    def __init__(self, url: str, needed: Mapping[str, Set[str]], owner: str, hint: str) -> None:
        self._target = parse_url(url)
        self.shown = self._target.shown
        with self.reading():
            self.connection = psycopg.connect(
                self._target.conninfo,
                connect_timeout=self._target.connect_timeout_s,
                prepare_threshold=None,  # there may be a pooler in between
                application_name="backstay import",
            )
            try:
                self.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                self.connection.read_only = True
                where = "" if self._target.schema == _OWN_SCHEMA else f'"{self._target.schema}".'
                found = {table: self.connection.execute(_TABLE, (where + table,)).fetchone() for table in needed}
                self.columns = {table: set() if row is None else set(row[2]) for table, row in found.items()}
                kinds = {row[1] for row in found.values() if row is not None}
                if not (kinds <= _TABLE_KINDS and all(self.columns[table] >= names for table, names in needed.items())):
                    raise StoreRefused(
                        f"{self.shown} has no tables of {owner}",
                        path=self.shown,
                        hint=f"For another schema add options=-csearch_path%3Dname to the URL. {hint}",
                    )
                self.tables = {table: sql.Identifier(row[0], table) for table, row in found.items() if row is not None}
                self.connection.execute("SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL row_security = off")
            except BaseException:
                self.connection.close()
                raise

    def rows(self, query: LiteralString, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query, in which ``{name}`` is a table."""
        with self.reading(), self.connection.cursor(binary=True) as cursor:
            return cursor.execute(sql.SQL(query).format(**self.tables), values).fetchall()

    def select(self, table: str, columns: Sequence[str], order: str) -> list[tuple[Any, ...]]:
        """Return these columns of all rows of a table, without casts: those of its owner's types could run code."""
        query = sql.SQL("SELECT {} FROM {} ORDER BY {}").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)), self.tables[table], sql.Identifier(order)
        )
        with self.reading():
            return self.connection.execute(query).fetchall()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn the driver's errors into ours."""
        try:
            yield
        except psycopg.Error as error:
            raise translate(error, self._target) from None  # libpq's own text may contain the password

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
