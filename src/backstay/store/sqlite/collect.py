"""Deleting: rows first, then every byte that no remaining manifest needs, in one transaction. And compacting.

Rules: a branch's references are computed again from its remaining manifests, so its head's sources always stay. A
source without a reference is deleted. Of a stream with references, the rows outside all ranges that a referring branch
needs are deleted. Children of a deleted checkpoint keep its digest, so their own digests can still be checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import apsw

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.manifest import STREAM_BYTES_MAX, Coverage, Source, is_needed
from backstay.store.base import Removed
from backstay.store.layout import SEQ_BITS, SEQ_MAX, address_of, span_of
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import WINDOWS_BYTES, merge_window, read_blob
from backstay.store.sqlite.find import is_head, tags
from backstay.store.sqlite.leases import check_head, check_thread
from backstay.store.sqlite.records import has_open_record
from backstay.store.sqlite.rows import (
    StoredId,
    branch_of,
    drop_writes,
    fetch_all,
    fetch_one,
    fetch_value,
    pack_id,
    span_of_kind,
)
from backstay.store.sqlite.transactions import SqliteTransactions


class SqliteDeletes(SqliteTransactions):
    """The verbs that delete checkpoints and free space."""

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
                or (forked and fetch_one(connection, queries.BRANCHES_FORKED_FROM, (name,)) is not None)
            )

        def job(connection: apsw.Connection) -> Removed:
            keys, now = [], self._clock()
            for name in [pack_id(namespace, each) for each in checkpoints]:
                key = fetch_value(connection, queries.IDENTITY, (name,))
                if key is not None and not is_protected(connection, key, name):
                    check_head(connection, key, token, now)
                    keys.append(key)
            return delete_rows(connection, keys)

        return self._shrunk(self._write(job))

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        def job(connection: apsw.Connection) -> Removed:
            check_thread(connection, namespace, thread, token, self._clock())
            found = fetch_one(connection, queries.THREAD, (namespace, thread))
            return Removed() if found is None else delete_thread(connection, found[0])

        return self._shrunk(self._write(job))

    def compact(self) -> int:
        return self._alone(compact_database)

    def _shrunk(self, removed: Removed) -> Removed:
        """Release the pages that a delete emptied."""
        if removed.bytes or removed.checkpoints:
            self._alone(_give_pages_back)
        return removed


def delete_rows(connection: apsw.Connection, keys: Iterable[int]) -> Removed:
    """Delete checkpoints by key, then everything that only they needed."""
    digests: dict[StoredId, bytes] = {}
    branches: set[int] = set()
    for key in keys:
        row = fetch_one(connection, queries.DROP_CHECKPOINT, (key,))
        if row is None:
            continue
        digests[row[0]] = row[1]
        branches.add(key >> SEQ_BITS)
        connection.execute(queries.DROP_TAGS, (key,))
        thread, branch_key = branch_of(connection, key)
        drop_writes(connection, queries.DROP_WRITES, (thread, branch_key.scope, row[0]))
        connection.execute(queries.DROP_RECORDS_OF_CHECKPOINT, (thread, row[0]))
    before = {branch: {source for source, _ in fetch_all(connection, queries.REFS, (branch,))} for branch in branches}
    keep_parents(connection, digests, branches)
    emptied = 0
    for branch in branches:  # point it at its newest remaining row, or delete it
        newest = fetch_value(connection, queries.NEWEST_KEY, span_of(branch))
        if newest is not None:
            connection.execute(queries.SET_HEAD, (newest & SEQ_MAX, branch))
            continue
        connection.execute(queries.DROP_REFS, (branch,))
        connection.execute(queries.DROP_RECORDS_OF_BRANCH, (*span_of_kind("effect"), branch))
        connection.execute(queries.DROP_BRANCH, (branch,))
        emptied += 1
    return Removed(len(digests), emptied, _collect(connection, before))


def delete_thread(connection: apsw.Connection, thread: int) -> Removed:
    """Delete a thread with everything in it."""
    branches = [branch for (branch,) in fetch_all(connection, queries.BRANCH_IDS, (thread,))]
    keys = [key for branch in branches for (key,) in fetch_all(connection, queries.KEYS_OF_BRANCH, span_of(branch))]
    removed = delete_rows(connection, keys)
    drop_writes(connection, queries.DROP_WRITES_OF_THREAD, (thread,))
    for statement in (
        queries.DROP_BRANCHES_OF_THREAD,  # branches that were only leased
        queries.DROP_RECORDS_OF_THREAD,
        queries.DROP_THREAD,
    ):
        connection.execute(statement, (thread,))
    return removed


def keep_parents(connection: apsw.Connection, digests: dict[StoredId, bytes], branches: Collection[int]) -> None:
    """Give the children of deleted checkpoints their parent's digest.

    The children are in the same scope of the thread, or are the first checkpoints of forks.
    """
    related: set[int] = set()
    for branch in branches:
        related.update(sister for (sister,) in fetch_all(connection, queries.SISTERS, (branch,)))
    for name in digests:
        related.update(branch for (branch,) in fetch_all(connection, queries.BRANCHES_FORKED_FROM, (name,)))
    for branch in related:
        for key, parent in fetch_all(connection, queries.PARENTS_OF_BRANCH, span_of(branch)):
            if parent in digests:
                connection.execute(queries.KEEP_PARENT_DIGEST, (digests[parent], key))


def _collect(connection: apsw.Connection, before: dict[int, set[Source]]) -> int:
    """Drop the references and bytes that these branches needed before and that no branch needs now; return how many."""
    coverage = Coverage(lambda name: read_blob(connection, name))
    scanned: set[int] = set()
    blind: set[int] = set()  # branches with an unreadable manifest: all their sources stay

    def scan(branch: int) -> set[Source]:
        scanned.add(branch)
        needed: set[Source] = set()
        for base, manifest in fetch_all(connection, queries.MANIFESTS_OF_BRANCH, span_of(branch)):
            try:
                needed |= coverage.add(manifest, base)
            except (Corrupted, DecodeError):
                blind.add(branch)
        return needed | (before.get(branch, set()) if branch in blind else set())

    for branch, sources in before.items():
        for source in sources - scan(branch):
            connection.execute(queries.DROP_REF, (branch, source))
    candidates = {source for sources in before.values() for source in sources}
    referring = {
        source: [branch for (branch,) in fetch_all(connection, queries.BRANCHES_REFERRING, (source,))]
        for source in candidates
        if isinstance(source, int)
    }
    for branch in {branch for branches in referring.values() for branch in branches} - scanned:
        scan(branch)
    freed = 0
    for source in candidates:
        if isinstance(source, bytes):
            is_referred = fetch_one(connection, queries.IS_REFERRED, (source,)) is not None
            freed += 0 if is_referred else fetch_value(connection, queries.DROP_BLOB, (source,)) or 0
        elif blind.isdisjoint(referring[source]):
            freed += _trim_stream(connection, source, coverage.ranges(source) if referring[source] else [])
    return freed


def _trim_stream(connection: apsw.Connection, stream: int, needed: list[tuple[int, int]]) -> int:
    first = address_of(stream, 0)
    freed = 0
    rows = fetch_all(connection, queries.CHUNK_SIZES, (first, first + STREAM_BYTES_MAX))
    for address, size, stored in rows:
        if not is_needed(address - first, address - first + size, needed):
            connection.execute(queries.DROP_CHUNK, (address,))
            freed += stored
    return freed


def compact_database(connection: apsw.Connection) -> int:
    """Merge and compress all streams, release free pages and empty the log; return how many bytes the file shrank."""
    before = _file_bytes(connection)
    for stream, _ in fetch_all(connection, queries.STREAM_SIZES):
        connection.execute("BEGIN IMMEDIATE")
        try:
            first, length = address_of(stream, 0), WINDOWS_BYTES[-1]
            rows = fetch_all(connection, queries.CHUNK_SIZES, (first, first + STREAM_BYTES_MAX))
            for window in sorted({(address - first) // length for address, _, _ in rows}):
                merge_window(connection, first + window * length, length)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        else:
            connection.execute("COMMIT")
    _give_pages_back(connection)
    fetch_all(connection, "PRAGMA wal_checkpoint(TRUNCATE)")
    return max(0, before - _file_bytes(connection))


def _give_pages_back(connection: apsw.Connection) -> None:
    """Release free pages. The file shrinks when the log is next folded in; this does not wait for readers."""
    fetch_all(connection, "PRAGMA incremental_vacuum")


def _file_bytes(connection: apsw.Connection) -> int:
    return int(connection.pragma("page_count")) * int(connection.pragma("page_size"))
