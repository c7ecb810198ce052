"""The tables of LangGraph's PostgresSaver, read in one read-only transaction with one snapshot.

Rows and writes are read a page at a time, the bytes of channels a checkpoint at a time, and bytes that stay the same
from one checkpoint to the next only once: memory use does not grow with the database.

The owner of the tables need not be trusted. Only tables are read, not views, and no row-level policy is applied, since
both could call functions with the reader's rights. After the tables are found, the search path is not used any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from backstay.errors import DecodeError, StoreRefused
from backstay.langgraph.importer import slices
from backstay.langgraph.importer.tables import (
    SENDS,
    SENDS_VERSION,
    Source,
    SourceCheckpoint,
    SourceRef,
    SourceThread,
    add_sends,
    joined,
    metadata_of,
    ordered,
    value_of,
    writes_of,
)
from backstay.store.postgres.connection import translate
from backstay.store.postgres.target import Target, parse_url

PAGE_CHECKPOINTS = 64
PAGE_THREADS = 1000

_EMPTY = "empty"  # the type of a channel without a value
_OWN_SCHEMA = "backstay"  # the default schema of our own URLs

_TABLE: LiteralString = """
SELECT n.nspname::text, c.relkind::text, ARRAY(
  SELECT a.attname::text FROM pg_catalog.pg_attribute a
  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = pg_catalog.to_regclass(%s)::oid"""
_TABLE_KINDS = {"r", "p"}
_NEEDED = {
    "checkpoints": {"thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "checkpoint", "metadata"},
    "checkpoint_blobs": {"thread_id", "checkpoint_ns", "channel", "version", "type", "blob"},
    "checkpoint_writes": {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel", "type", "blob"},
}

_THREADS: LiteralString = (
    "SELECT thread_id FROM {checkpoints} UNION SELECT thread_id FROM {checkpoint_writes} ORDER BY 1"
)
_REFS: LiteralString = (
    "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id FROM {checkpoints} WHERE thread_id = %s"
)
_ORPHAN_WRITES: LiteralString = """
SELECT count(*) FROM {checkpoint_writes} w WHERE w.thread_id = %s AND NOT EXISTS (
  SELECT 1 FROM {checkpoints} c WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = w.checkpoint_ns
  AND c.checkpoint_id = w.checkpoint_id)"""
_WANTED: LiteralString = """
JOIN unnest(%s::text[], %s::text[]) wanted (ns, id) ON r.checkpoint_ns = wanted.ns AND r.checkpoint_id = wanted.id
WHERE r.thread_id = %s"""
_ROWS: LiteralString = (
    "SELECT r.checkpoint_ns, r.checkpoint_id, r.checkpoint::text, r.metadata::text FROM {checkpoints} r" + _WANTED
)
_WRITES: LiteralString = (
    "SELECT r.checkpoint_ns, r.checkpoint_id, r.task_id, r.task_path, r.idx, r.channel, r.type, r.blob"
    " FROM {checkpoint_writes} r" + _WANTED
)
_WRITES_BEFORE_PATHS: LiteralString = (
    "SELECT r.checkpoint_ns, r.checkpoint_id, r.task_id, '', r.idx, r.channel, r.type, r.blob"
    " FROM {checkpoint_writes} r" + _WANTED
)
_BLOBS: LiteralString = """
SELECT b.channel, b.version, b.type, b.blob FROM {checkpoint_blobs} b
JOIN unnest(%s::text[], %s::text[]) wanted (channel, version) USING (channel, version)
WHERE b.thread_id = %s AND b.checkpoint_ns = %s"""

Key = tuple[str, str]


class PostgresSource(Source):
    """The three tables in the schema that the URL's search path names."""

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)
        self.shown = self._target.shown
        with _translated(self._target):
            self._connection = psycopg.connect(
                self._target.conninfo,
                connect_timeout=self._target.connect_timeout_s,
                prepare_threshold=None,  # there may be a pooler in between
                application_name="backstay import",
            )
            try:
                self._find_tables()
            except BaseException:
                self._connection.close()
                raise

    def _find_tables(self) -> None:
        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        self._connection.read_only = True
        where = "" if self._target.schema == _OWN_SCHEMA else f'"{self._target.schema}".'
        found = {table: self._connection.execute(_TABLE, (where + table,)).fetchone() for table in _NEEDED}
        columns = {table: set() if row is None else set(row[2]) for table, row in found.items()}
        kinds = {row[1] for row in found.values() if row is not None}
        if not (kinds <= _TABLE_KINDS and all(columns[table] >= needed for table, needed in _NEEDED.items())):
            raise StoreRefused(
                f"{self.shown} has no tables of LangGraph's PostgresSaver",
                path=self.shown,
                hint="For another schema add options=-csearch_path%3Dname to the URL."
                " Views, and the tables of a shallow saver, cannot be imported",
            )
        self._tables = {table: sql.Identifier(row[0], table) for table, row in found.items() if row is not None}
        self._connection.execute("SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL row_security = off")
        self._writes = _WRITES if "task_path" in columns["checkpoint_writes"] else _WRITES_BEFORE_PATHS

    def threads(self) -> Iterator[str]:
        """Yield the names of all threads."""
        with _translated(self._target), self._connection.cursor("threads") as cursor:
            cursor.itersize = PAGE_THREADS
            cursor.execute(sql.SQL(_THREADS).format(**self._tables))
            for (name,) in cursor:
                yield name

    def thread(self, name: str) -> SourceThread:
        """Return a thread."""
        refs = ordered(SourceRef(*row) for row in self.rows(_REFS, name))
        return SourceThread(refs, self.rows(_ORPHAN_WRITES, name)[0][0], _ThreadReader(self, name, refs).read)

    def rows(self, query: LiteralString, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with _translated(self._target), self._connection.cursor(binary=True) as cursor:
            return cursor.execute(sql.SQL(query).format(**self._tables), values).fetchall()

    def writes(self, thread: str, keys: Sequence[Key]) -> dict[Key, list[tuple[Any, ...]]]:
        """Return the rows of writes of some checkpoints."""
        found: dict[Key, list[tuple[Any, ...]]] = {key: [] for key in keys}
        for ns, name, *row in self.rows(self._writes, [key[0] for key in keys], [key[1] for key in keys], thread):
            found[ns, name].append(tuple(row))
        return found

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class _ThreadReader:
    """Reads one thread, with a page of its rows and the bytes of the checkpoint that was read last."""

    def __init__(self, source: PostgresSource, name: str, refs: Sequence[SourceRef]) -> None:
        self._source = source
        self._name = name
        self._refs = refs
        self._numbers = {ref: number for number, ref in enumerate(refs)}
        self._rows: dict[Key, tuple[str, str]] = {}
        self._writes: dict[Key, list[tuple[Any, ...]]] = {}
        self._blobs: dict[tuple[str, str, str], tuple[str, bytes | None]] = {}

    def read(self, ref: SourceRef) -> SourceCheckpoint:
        """Return a checkpoint, or raise DecodeError if it is damaged."""
        key = (ref.ns, ref.id)
        if key not in self._rows:
            number = self._numbers[ref]
            keys = [(each.ns, each.id) for each in self._refs[number : number + PAGE_CHECKPOINTS]]
            found = self._source.rows(_ROWS, [ns for ns, _ in keys], [name for _, name in keys], self._name)
            self._rows = {(ns, name): (row, metadata) for ns, name, row, metadata in found}
            self._writes = self._source.writes(self._name, keys)
        row, metadata = self._rows[key]
        plain = slices.plain_json(row)
        checkpoint, lost = joined(plain, self._blobs_of(ref.ns, plain), ref)
        if ref.parent and checkpoint["v"] < SENDS_VERSION:
            try:
                parent = (ref.ns, ref.parent)
                rows = self._source.writes(self._name, [parent])[parent]
                rows.sort(key=lambda row: (row[1], row[0], row[2]))
                sends = [value_of(tag, data) for _, _, _, channel, tag, data in rows if channel == SENDS]
                add_sends(checkpoint, sends)
            except DecodeError as error:
                lost.append(f"the messages that its parent's tasks sent: {error.what}")
        writes, lost_writes = writes_of(self._writes[key])
        return SourceCheckpoint(ref, checkpoint, metadata_of(metadata), writes, (*lost, *lost_writes))

    def _blobs_of(self, ns: str, checkpoint: Any) -> dict[str, tuple[str, bytes | None]]:
        """Return type and bytes of each channel that is not in the JSON."""
        versions = checkpoint.get("channel_versions") if isinstance(checkpoint, dict) else None
        if not isinstance(versions, dict):
            return {}
        wanted = {channel: str(version) for channel, version in versions.items()}
        known = {(ns, *each): self._blobs[ns, *each] for each in wanted.items() if (ns, *each) in self._blobs}
        missing = {channel: version for channel, version in wanted.items() if (ns, channel, version) not in known}
        if missing:
            for channel, version, tag, data in self._source.rows(
                _BLOBS, list(missing), list(missing.values()), self._name, ns
            ):
                known[ns, channel, version] = (tag, data)
        self._blobs = known
        return {channel: blob for (_, channel, _), blob in known.items() if blob[0] != _EMPTY}


@contextmanager
def _translated(target: Target) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, target) from None  # libpq's own text may contain the password
