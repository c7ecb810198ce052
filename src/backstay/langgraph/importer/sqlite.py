"""A file of LangGraph's SqliteSaver, read in one transaction and left unchanged."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial

from langgraph.checkpoint.serde.base import CipherProtocol

from backstay.errors import DecodeError, StoreRefused
from backstay.langgraph.importer.tables import (
    Source,
    SourceCheckpoint,
    SourceRef,
    SourceThread,
    decrypted_value,
    metadata_of,
    ordered,
    split,
    writes_of,
)
from backstay.store.sqlite.database import code_of
from backstay.store.sqlite.foreign import columns_of, open_foreign, reading

_CHECKPOINTS = {"thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "type", "checkpoint", "metadata"}
_WRITES = {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel", "type", "value"}

_THREADS = "SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM writes ORDER BY 1"
_REFS = "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id FROM checkpoints WHERE thread_id = ?"
_ORPHAN_WRITES = """
SELECT count(*) FROM writes w WHERE w.thread_id = ? AND NOT EXISTS (
  SELECT 1 FROM checkpoints c WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = w.checkpoint_ns
  AND c.checkpoint_id = w.checkpoint_id)"""
_ROW = """
SELECT type, checkpoint, metadata FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"""
_WRITES_OF = """
SELECT task_id, {path}, idx, channel, type, value FROM writes
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"""


class SqliteSource(Source):
    """The two tables of a file."""

    def __init__(self, path: str, cipher: CipherProtocol | None = None) -> None:
        self.shown = path
        self._cipher = cipher
        with reading(path):
            self._connection = open_foreign(path)
            try:
                columns = columns_of(self._connection, "writes")
                if not (columns_of(self._connection, "checkpoints") >= _CHECKPOINTS and columns >= _WRITES):
                    raise StoreRefused(
                        f"{path} has no tables of LangGraph's SqliteSaver",
                        path=path,
                        hint="It must have the tables checkpoints and writes, with the columns of version 2 or later",
                    )
            except BaseException:
                self._connection.close()
                raise
        self._writes = _WRITES_OF.format(path="task_path" if "task_path" in columns else "''")

    def threads(self) -> Iterator[str]:
        """Yield the names of all threads."""
        with reading(self.shown):
            for (name,) in self._connection.execute(_THREADS):
                yield str(name)

    def thread(self, name: str) -> SourceThread:
        """Return a thread."""
        with reading(self.shown):
            refs = ordered(SourceRef(*row) for row in self._connection.execute(_REFS, (name,)))
            ((orphan_writes,),) = self._connection.execute(_ORPHAN_WRITES, (name,))
        return SourceThread(refs, orphan_writes, partial(self._read, name))

    def _read(self, thread: str, ref: SourceRef) -> SourceCheckpoint:
        try:
            key = (thread, ref.ns, ref.id)
            ((tag, data, metadata),) = self._connection.execute(_ROW, key)
            writes, lost = writes_of(self._connection.execute(self._writes, key))
        except (sqlite3.DatabaseError, ValueError) as error:
            if isinstance(error, sqlite3.DatabaseError) and code_of(error) != sqlite3.SQLITE_CORRUPT:
                raise
            raise DecodeError("its row is damaged") from error
        checkpoint = split(*decrypted_value(tag, data, self._cipher), ref)
        return SourceCheckpoint(ref, checkpoint, metadata_of(metadata), writes, lost)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
