"""The tables of LangGraph's PostgresSaver, read in one read-only transaction with one snapshot.

Rows and writes are read a page at a time, the bytes of channels a checkpoint at a time, and bytes that stay the same
from one checkpoint to the next only once: memory use does not grow with the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, LiteralString

from psycopg import sql

from backstay.errors import DecodeError
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
from backstay.store.postgres.foreign import ForeignTables

PAGE_CHECKPOINTS = 64
PAGE_THREADS = 1000

_EMPTY = "empty"  # the type of a channel without a value
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


class PostgresSource(ForeignTables, Source):
    """The three tables of the saver."""

    def __init__(self, url: str) -> None:
        hint = "Views, and the tables of a shallow saver, cannot be imported"
        super().__init__(url, _NEEDED, "LangGraph's PostgresSaver", hint)
        self._writes = _WRITES if "task_path" in self.columns["checkpoint_writes"] else _WRITES_BEFORE_PATHS

    def threads(self) -> Iterator[str]:
        """Yield the names of all threads."""
        with self.reading(), self.connection.cursor("threads") as cursor:
            cursor.itersize = PAGE_THREADS
            cursor.execute(sql.SQL(_THREADS).format(**self.tables))
            for (name,) in cursor:
                yield name

    def thread(self, name: str) -> SourceThread:
        """Return a thread."""
        refs = ordered(SourceRef(*row) for row in self.rows(_REFS, name))
        return SourceThread(refs, self.rows(_ORPHAN_WRITES, name)[0][0], _ThreadReader(self, name, refs).read)

    def writes(self, thread: str, keys: Sequence[Key]) -> dict[Key, list[tuple[Any, ...]]]:
        """Return the rows of writes of some checkpoints."""
        found: dict[Key, list[tuple[Any, ...]]] = {key: [] for key in keys}
        for ns, name, *row in self.rows(self._writes, [key[0] for key in keys], [key[1] for key in keys], thread):
            found[ns, name].append(tuple(row))
        return found


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
