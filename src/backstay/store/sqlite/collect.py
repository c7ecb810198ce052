"""Deleting: rows first, then every byte that no remaining manifest needs. All inside one transaction.

Compacting makes the file as small as it can be: it merges what is left of small rows, then gives free pages back.

Rules: a lane's references are recomputed from the manifests it has left, so its head's sources always stay referred
to; a source that no lane refers to goes; of a stream that is still referred to, the rows outside all ranges that any
referring lane still needs go. Children of a deleted checkpoint keep its digest, so their own can still be checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import apsw

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.coverage import Coverage, is_needed
from backstay.pieces.manifest import Source
from backstay.pieces.piece import STREAM_BYTES_MAX
from backstay.store.base import Removed
from backstay.store.layout import SEQ_BITS, SEQ_MAX, address_of, span_of
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import WINDOWS_BYTES, merge_window, read_blob
from backstay.store.sqlite.find import is_head, tags
from backstay.store.sqlite.lane import lane_of
from backstay.store.sqlite.leases import check_head, check_thread
from backstay.store.sqlite.pending import drop_writes
from backstay.store.sqlite.records import has_open_record
from backstay.store.sqlite.rows import StoredId, every, one, pack_id, scalar, span_of_kind
from backstay.store.sqlite.transactions import Transactions


class Deletes(Transactions):
    """The verbs that take checkpoints away and give space back."""

    def delete(
        self,
        namespace: str,
        checkpoints: Collection[str],
        protect: bool,
        token: str | None = None,
        *,
        tagged: bool = False,
        forked: bool = False,
    ) -> Removed:
        def is_protected(connection: apsw.Connection, key: int, name: StoredId) -> bool:
            return (
                (protect and (is_head(connection, key) or has_open_record(connection, key, name)))
                or (tagged and bool(tags(connection, key)))
                or (forked and one(connection, queries.LANES_FORKED_FROM, (name,)) is not None)
            )

        def job(connection: apsw.Connection) -> Removed:
            keys, now = [], self._clock()
            for name in [pack_id(namespace, each) for each in checkpoints]:
                key = scalar(connection, queries.IDENTITY, (name,))
                if key is not None and not is_protected(connection, key, name):
                    check_head(connection, key, token, now)
                    keys.append(key)
            return delete_rows(connection, keys)

        return self._shrunk(self._write(job))

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        def job(connection: apsw.Connection) -> Removed:
            check_thread(connection, namespace, thread, token, self._clock())
            found = one(connection, queries.THREAD, (namespace, thread))
            return Removed() if found is None else delete_thread(connection, found[0])

        return self._shrunk(self._write(job))

    def compact(self) -> int:
        return self._alone(compact_database)

    def _shrunk(self, removed: Removed) -> Removed:
        """Give the pages back that a delete has emptied."""
        if removed.bytes or removed.checkpoints:
            self._alone(_give_pages_back)
        return removed


def delete_rows(connection: apsw.Connection, keys: Iterable[int]) -> Removed:
    """Delete checkpoints by key, then whatever they alone needed."""
    digests: dict[StoredId, bytes] = {}
    lanes: set[int] = set()
    for key in keys:
        row = one(connection, queries.DROP_CHECKPOINT, (key,))
        if row is None:
            continue
        digests[row[0]] = row[1]
        lanes.add(key >> SEQ_BITS)
        connection.execute(queries.DROP_TAGS, (key,))
        thread, _, _, scope, _ = lane_of(connection, key)
        drop_writes(connection, queries.DROP_WRITES, (thread, scope, row[0]))
        connection.execute(queries.DROP_RECORDS_OF_CHECKPOINT, (thread, row[0]))
    before = {lane: _sources(connection, lane) for lane in lanes}
    keep_parents(connection, digests, lanes)
    emptied = sum(_settle_head(connection, lane) for lane in lanes)
    freed = _collect(connection, before)
    return Removed(len(digests), emptied, freed)


def delete_thread(connection: apsw.Connection, thread: int) -> Removed:
    """Delete a thread with everything in it."""
    lanes = [lane for (lane,) in every(connection, queries.LANE_IDS, (thread,))]
    keys = [key for lane in lanes for (key,) in every(connection, queries.KEYS_OF_LANE, span_of(lane))]
    removed = delete_rows(connection, keys)
    drop_writes(connection, queries.DROP_WRITES_OF_THREAD, (thread,))
    for statement in (
        queries.DROP_LANES_OF_THREAD,  # those that were only leased so far
        queries.DROP_RECORDS_OF_THREAD,
        queries.DROP_THREAD,
    ):
        connection.execute(statement, (thread,))
    return removed


def set_aside(connection: apsw.Connection, key: int, name: StoredId, digest: bytes) -> None:
    """Free the id of a row that is about to be replaced under it; the row itself is deleted after that."""
    keep_parents(connection, {name: digest}, [key >> SEQ_BITS])
    connection.execute(queries.RENAME_CHECKPOINT, (key, key))


def _sources(connection: apsw.Connection, lane: int) -> set[Source]:
    return {source for source, _ in every(connection, queries.REFS, (lane,))}


def keep_parents(connection: apsw.Connection, digests: dict[StoredId, bytes], lanes: Collection[int]) -> None:
    """Give the children of deleted checkpoints their parent's digest.

    They are in the same scope of the thread (the next ones, or ones that rewound to it) or begin a fork of it.
    """
    related: set[int] = set()
    for lane in lanes:
        related.update(sister for (sister,) in every(connection, queries.SISTERS, (lane,)))
    for name in digests:
        related.update(lane for (lane,) in every(connection, queries.LANES_FORKED_FROM, (name,)))
    for lane in related:
        for key, parent in every(connection, queries.PARENTS_OF_LANE, span_of(lane)):
            if parent in digests:
                connection.execute(queries.KEEP_PARENT_DIGEST, (digests[parent], key))


def _settle_head(connection: apsw.Connection, lane: int) -> bool:
    """Point a lane at its newest remaining row; delete a lane without any and return True."""
    newest = scalar(connection, queries.NEWEST_KEY, span_of(lane))
    if newest is None:
        connection.execute(queries.DROP_REFS, (lane,))
        connection.execute(queries.DROP_RECORDS_OF_LANE, (*span_of_kind("effect"), lane))
        connection.execute(queries.DROP_LANE, (lane,))
        return True
    connection.execute(queries.SET_HEAD, (newest & SEQ_MAX, lane))
    return False


def _collect(connection: apsw.Connection, before: dict[int, set[Source]]) -> int:
    coverage = Coverage(lambda name: read_blob(connection, name))
    scanned: set[int] = set()
    blind: set[int] = set()  # lanes with a manifest that cannot be read: all that they refer to stays

    def scan(lane: int) -> set[Source]:
        scanned.add(lane)
        needed: set[Source] = set()
        for base, manifest in every(connection, queries.MANIFESTS_OF_LANE, span_of(lane)):
            try:
                needed |= coverage.add(manifest, base)
            except (Corrupted, DecodeError):
                blind.add(lane)
        return needed | (before.get(lane, set()) if lane in blind else set())

    for lane, sources in before.items():
        for source in sources - scan(lane):
            connection.execute(queries.DROP_REF, (lane, source))
    candidates = {source for sources in before.values() for source in sources}
    referring = {
        source: [lane for (lane,) in every(connection, queries.LANES_REFERRING, (source,))]
        for source in candidates
        if isinstance(source, int)
    }
    for lane in {lane for lanes in referring.values() for lane in lanes} - scanned:
        scan(lane)
    freed = 0
    for source in candidates:
        if isinstance(source, bytes):
            freed += _drop_blob(connection, source)
        elif blind.isdisjoint(referring[source]):
            freed += _trim_stream(connection, source, coverage.ranges(source) if referring[source] else [])
    return freed


def _drop_blob(connection: apsw.Connection, name: bytes) -> int:
    if one(connection, queries.IS_REFERRED, (name,)) is not None:
        return 0
    row = one(connection, queries.DROP_BLOB, (name,))
    return row[0] if row else 0


def _trim_stream(connection: apsw.Connection, stream: int, needed: list[tuple[int, int]]) -> int:
    first = address_of(stream, 0)
    freed = 0
    rows = every(connection, queries.CHUNK_SIZES, (first, first + STREAM_BYTES_MAX))
    for address, size, stored in rows:
        if not is_needed(address - first, address - first + size, needed):
            connection.execute(queries.DROP_CHUNK, (address,))
            freed += stored
    return freed


def compact_database(connection: apsw.Connection) -> int:
    """Merge and compress all streams, give free pages back and empty the log; return by how much the file shrank."""
    before = _file_bytes(connection)
    for stream, _ in every(connection, queries.STREAM_SIZES):
        connection.execute("BEGIN IMMEDIATE")
        try:
            _compact_stream(connection, stream)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        else:
            connection.execute("COMMIT")
    _give_pages_back(connection)
    every(connection, "PRAGMA wal_checkpoint(TRUNCATE)")
    return max(0, before - _file_bytes(connection))


def _give_pages_back(connection: apsw.Connection) -> None:
    """Cut free pages off the file; it shrinks when the log is next folded in, without waiting for readers here."""
    every(connection, "PRAGMA incremental_vacuum")


def _compact_stream(connection: apsw.Connection, stream: int) -> None:
    first = address_of(stream, 0)
    rows = every(connection, queries.CHUNK_SIZES, (first, first + STREAM_BYTES_MAX))
    length = WINDOWS_BYTES[-1]
    for window in sorted({(address - first) // length for address, _, _ in rows}):
        merge_window(connection, first + window * length, length)


def _file_bytes(connection: apsw.Connection) -> int:
    return int(connection.pragma("page_count")) * int(connection.pragma("page_size"))
