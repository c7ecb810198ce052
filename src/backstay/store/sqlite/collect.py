"""Deleting: rows first, then every byte that no remaining manifest needs. All inside one transaction.

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
from backstay.store.sqlite.chunks import read_blob
from backstay.store.sqlite.pending import drop_writes
from backstay.store.sqlite.rows import StoredId, span_of_kind
from backstay.store.sqlite.select import every, one, scalar


def lane_of(connection: apsw.Connection, key: int) -> tuple[int, str, str, str, str]:
    """Return the thread's number, then namespace, thread, scope and branch of a checkpoint's lane."""
    found = one(connection, queries.LANE_BY_ID, (key >> SEQ_BITS,))
    if found is None:
        raise Corrupted("a checkpoint belongs to a branch that is not there")
    thread, namespace, name, scope, branch = found
    return thread, namespace, name, scope, branch


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
