"""The four stores as the programs about sizes use them: made empty, opened again, and looked into row by row."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg import sql

from backstay.pieces.manifest import OFFSET_BITS, Range, decode_base, decode_manifest, decode_table
from backstay.store.base import Backend
from backstay.store.directory.store import DirectoryStore
from backstay.store.layout import unpack_body
from backstay.store.memory import MemoryStore
from backstay.store.postgres.store import PostgresStore
from backstay.store.postgres.target import parse_url
from backstay.store.sqlite.store import SqliteStore
from support.postgres import PostgresServer
from support.running import RAM_FOLDER

Manifest = tuple[bytes | None, bytes]  # the name of its base, and its bytes


@dataclass
class Inside:
    """What a store holds below its checkpoints."""

    rows: list[tuple[str, int, int, int]] = field(default_factory=list)  # where, stream, first byte, one past the last
    blobs: dict[bytes, Callable[[], bytes]] = field(default_factory=dict)
    manifests: list[Manifest] = field(default_factory=list)
    more: dict[str, int] = field(default_factory=dict)  # how many there are of everything else that a delete must take

    def spare(self) -> list[object]:
        """Return the rows and blobs of which no manifest needs a single byte, each looked at by itself."""
        ranges: dict[int, set[tuple[int, int]]] = {}
        blobs: set[bytes] = set()
        for base, manifest in set(self.manifests):
            entries = decode_manifest(manifest, decode_base(self.blobs[base]()) if base is not None else {})
            blobs.update([base] if base is not None else [])
            for entry in entries.values():
                if entry.body is None and entry.pieces is None:
                    blobs.add(entry.digest)
                pieces = [*(entry.pieces or ())]
                if entry.table is not None:
                    blobs.add(entry.table)
                    pieces += decode_table(self.blobs[entry.table]())
                for piece in pieces:
                    if isinstance(piece, Range) and isinstance(piece.source, int):
                        ranges.setdefault(piece.source, set()).add((piece.start, piece.start + piece.length))
                    elif isinstance(piece, Range) and isinstance(piece.source, bytes):
                        blobs.add(piece.source)
        rows = [row for row in self.rows if not any(s < row[3] and row[2] < e for s, e in ranges.get(row[1], ()))]
        return [*rows, *(name.hex()[:16] for name in self.blobs if name not in blobs)]

    def left(self) -> dict[str, int]:
        """Return how many there are of what must not be there in a store without checkpoints."""
        counts = {"rows": len(self.rows), "blobs": len(self.blobs), "manifests": len(self.manifests), **self.more}
        return {name: count for name, count in counts.items() if count}


class Place(Protocol):
    """Somewhere a store can be: made empty for each program, and opened any number of times."""

    name: str

    def empty(self) -> None:
        """Make the store that is opened next a new one."""

    def open(self) -> Backend:
        """Open the store, again if it is open."""

    def look(self, backend: Backend, at_end: bool = False) -> Inside:
        """Return what is inside; at the end also what only a store without anything must not have."""

    def close(self) -> None:
        """Leave nothing behind."""


class MemoryPlace:
    """The memory store: opening it again gives the same one."""

    name = "memory"

    def __init__(self, kind: type[MemoryStore] = MemoryStore) -> None:
        self._kind = kind
        self.empty()

    def empty(self) -> None:
        self.backend = self._kind()

    def open(self) -> Backend:
        return self.backend

    def look(self, backend: Backend, at_end: bool = False) -> Inside:
        return inside_tables(self.backend)

    def close(self) -> None:
        pass


def inside_tables(backend: MemoryStore) -> Inside:
    """Look into the memory store, or one made of it."""
    tables = backend._tables
    return Inside(
        [
            ("stream", stream, at, at + body.size)
            for stream, chunks in tables.bytes.streams.items()
            for at, body in chunks
        ],
        {name: body.read for name, body in tables.bytes.blobs.items()},
        [(row.base, row.manifest) for row in tables.rows.values()],
        {
            "branches": len(tables.branches),
            "references": sum(len(branch.sources) for branch in tables.branches.values()),
            "tags": sum(map(bool, tables.tags.values())),
            "writes": sum(len(thread.writes) for thread in tables.threads.values()),
            "empty streams": sum(not chunks for chunks in tables.bytes.streams.values()),
        },
    )


class FilePlace:
    """A folder in memory, in which each program has a name of its own."""

    name = ""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="backstay-sizes-", dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None))
        self._programs = 0
        self.path = self.folder / "0"

    def empty(self) -> None:
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        self._programs += 1
        self.path = self.folder / str(self._programs)

    def close(self) -> None:
        shutil.rmtree(self.folder)


class SqlitePlace(FilePlace):
    name = "sqlite"

    def open(self) -> Backend:
        return SqliteStore(str(self.path))

    def look(self, backend: Backend, at_end: bool = False) -> Inside:
        connection = sqlite3.connect(self.path, isolation_level=None)
        connection.execute("BEGIN")  # one moment for all statements
        with connection:

            def every(statement: str) -> list[Any]:
                return list(connection.execute(statement))

            bodies = {bytes(name): number for number, name in every("SELECT id, digest FROM blob")}
            found = Inside(
                [_row("chunk", address, size) for address, size in every("SELECT address, size FROM chunk")],
                {name: _sqlite_blob(str(self.path), number) for name, number in bodies.items()},
                every("SELECT b.digest, c.manifest FROM checkpoint c LEFT JOIN blob b ON b.id = c.base"),
                {
                    table: every(f"SELECT count(*) FROM {table}")[0][0]
                    for table in ("branch", "ref", "write", "write_piece")
                },
            )
        connection.close()
        return found


def _sqlite_blob(path: str, number: int) -> Callable[[], bytes]:
    def read() -> bytes:
        connection = sqlite3.connect(path, isolation_level=None)
        size, body = next(iter(connection.execute("SELECT size, body FROM blob WHERE id = ?", (number,))))
        connection.close()
        return unpack_body(size, body)

    return read


class DirectoryPlace(FilePlace):
    name = "dir"

    def open(self) -> Backend:
        return DirectoryStore(f"dir:{self.path}")

    def look(self, backend: Backend, at_end: bool = False) -> Inside:
        assert isinstance(backend, DirectoryStore)
        found = inside_tables(backend)
        if at_end:
            backend.compact()
            found.more["logs"] = len(list((self.path / "branches").iterdir()))
            found.more["bytes of logs"] = max(0, (self.path / "store.log").stat().st_size - STORE_LOG_BYTES)
        return found


STORE_LOG_BYTES = 2_000
"""What the store's own log may take when nothing is stored: the numbers given out."""


def fast_url(server: PostgresServer, schema: str) -> str:
    """Return the URL of a schema where commits do not wait for the disk: the programs are about bytes, not crashes."""
    return server.url(schema=schema, options="-csynchronous_commit=off", accept_data_loss="yes")


class PostgresPlace:
    """One schema, emptied for each program: much faster than making its tables anew."""

    name = "postgres"

    def __init__(self, url: str) -> None:
        self.url = url
        self._target = parse_url(url)
        PostgresStore(url).close()
        self._connection = psycopg.connect(self._target.conninfo, autocommit=True)
        found = self._every("SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = %s::regnamespace")
        self._tables = sorted(name for (name,) in found if name not in ("meta", "counter"))

    def _every(self, statement: str, bound: tuple[object, ...] | None = None) -> list[Any]:
        named = statement.replace("{schema}", self._target.schema)
        return self._connection.execute(
            named.encode(), bound or ((self._target.schema,) if "%s" in named else ())
        ).fetchall()

    def empty(self) -> None:
        names = sql.SQL(", ").join(sql.Identifier(self._target.schema, name) for name in self._tables)
        self._connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(names))
        counter = sql.Identifier(self._target.schema, "counter")
        self._connection.execute(sql.SQL("UPDATE {} SET value = 1").format(counter))

    def open(self) -> Backend:
        return PostgresStore(self.url)

    def look(self, backend: Backend, at_end: bool = False) -> Inside:
        every = self._every
        return Inside(
            [
                *(_row("chunk", address, size) for address, size in every("SELECT address, size FROM {schema}.chunk")),
                *(_row("fresh", *row) for row in every("SELECT address, length(body) FROM {schema}.fresh")),
            ],
            {name: self._blob(name) for (name,) in every("SELECT digest FROM {schema}.blob")},
            every("SELECT base, manifest FROM {schema}.checkpoint"),
            {
                table: every(f"SELECT count(*) FROM {{schema}}.{table}")[0][0]
                for table in ("branch", "ref", "tag", "write")
            },
        )

    def _blob(self, name: bytes) -> Callable[[], bytes]:
        def read() -> bytes:
            return unpack_body(*self._every("SELECT size, body FROM {schema}.blob WHERE digest = %s", (name,))[0])

        return read

    def close(self) -> None:
        self._connection.close()


def _row(where: str, address: int, size: int) -> tuple[str, int, int, int]:
    start = address & ((1 << OFFSET_BITS) - 1)
    return where, address >> OFFSET_BITS, start, start + size
