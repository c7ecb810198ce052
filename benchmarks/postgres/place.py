"""Where it happens: a server in the folder of the run, and a schema for each thing that is measured.

Nothing is switched off that a commit waits for. Autovacuum is: bytes are shown as a run leaves them, and no time is
disturbed. All contestants connect alike, over TCP.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
from psycopg import sql

import backstay
from benchmarks.bench import THREAD, Bench, fill
from benchmarks.timing import clock
from support.postgres import PostgresServer

SETTINGS = {"autovacuum": "off", "max_connections": "300", "shared_buffers": "256MB"}
BYTES = """
SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r'"""


@dataclass(frozen=True, slots=True)
class Built:
    """A closed W1 store."""

    schema: str
    new_bytes: int
    empty_bytes: int  # of the tables before the first save
    full_bytes: int  # of the tables right after the last one


@dataclass(slots=True)
class Place:
    """A server that runs."""

    bench: Bench
    server: PostgresServer
    _built: dict[int, Built] = field(default_factory=dict)
    _schemas: int = 0

    @property
    def has_peers(self) -> bool:
        """Whether LangGraph's savers are wanted and installed."""
        return self.bench.peers is not None and importlib.util.find_spec("langgraph.checkpoint.postgres") is not None

    def new_schema(self) -> str:
        """Return a name nobody has used."""
        self._schemas += 1
        return f"s{self._schemas}"

    def url(self, schema: str, pool: int = 10) -> str:
        """Return the URL of a store of ours."""
        return self.server.url(schema=schema, pool=pool)

    def plain_url(self, schema: str) -> str:
        """Return a URL for other programs; the schema is made if need be, and their tables go there."""
        self.execute("CREATE SCHEMA IF NOT EXISTS {}", schema)
        return self.server.url(options=f"-c search_path={schema}")

    def execute(self, statement: LiteralString, *names: str) -> None:
        """Run a statement on a connection of its own."""
        with self.server.connect() as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def scalar(self, statement: LiteralString, *bound: object) -> Any:
        """Return one value."""
        with self.server.connect() as connection:
            row = connection.execute(statement, bound).fetchone()
        assert row is not None
        return row[0]

    def bytes_of(self, schema: str) -> int:
        """Return what all tables of a schema take on disk, with their indexes."""
        return int(self.scalar(BYTES, schema))

    def vacuum(self, schema: str) -> None:
        """Vacuum all tables of a schema, as autovacuum would."""
        tables = self.scalar("SELECT array_agg(tablename::text) FROM pg_tables WHERE schemaname = %s", schema)
        for table in tables:
            self.execute("VACUUM {}.{}", schema, table)

    def w1(self, count: int) -> Built:
        """Return a store with ``count`` steps of W1, built at the first call. Not to be written to."""
        if count not in self._built:
            schema = self.new_schema()
            with backstay.open(self.url(schema)) as store:
                empty = self.bytes_of(schema)
                new = fill(store.thread(THREAD), count)
            self._built[count] = Built(schema, new, empty, self.bytes_of(schema))
        return self._built[count]


class RawTable:
    """A table with one column; each insert is a transaction of its own, prepared, its parameter in binary."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute("CREATE TABLE row (data bytea)")

    def insert(self, data: bytes) -> float:
        """Insert one row and return the seconds."""
        return clock(lambda: insert(self._connection, data))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def insert(connection: psycopg.Connection[Any], data: bytes) -> None:
    """Insert one row in the cheapest way there is."""
    connection.execute("INSERT INTO row VALUES (%b)", (data,), prepare=True)


@contextmanager
def serve(bench: Bench) -> Iterator[Place]:
    """Start a server on the disk that everything else is measured on."""
    bench.root.chmod(0o711)  # if we are root it runs as another user, who must get to its folder
    with PostgresServer(bench.root / "postgres", settings=SETTINGS) as server:
        yield Place(bench, server)
