"""Deleting: rows first, then every byte that no remaining manifest needs, in one transaction. And compacting.

Rules: a branch's references are computed again from its remaining manifests, so its head's sources always stay. A
source without a reference is deleted. Of a stream with references, the rows outside all ranges that a referring branch
needs are deleted. Children of a deleted checkpoint keep its digest, so their own digests can still be checked.

A delete locks the rows of all threads that share a stream with a touched branch, so none of them changes meanwhile.
Blobs are shared by everyone: a delete locks a blob before it looks for references to it, and a save that uses a blob
holds it locked until its reference is committed. Saves in other threads never wait for more than that. Only one delete
runs at a time.

Compacting merges small rows, then lets PostgreSQL reuse the space. Merged rows have the same addresses, so manifests do
not change. Each stream is one short transaction that locks its owner's thread, so a save waits for one stream at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.manifest import OFFSET_BITS, STREAM_BYTES_MAX, Coverage, Range, Source, is_needed
from backstay.store.base import BranchKey, Removed, Sizes
from backstay.store.layout import SEQ_BITS, Chunk, address_of, pack_body, touching, unpack_body
from backstay.store.leases import fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.find import CHECK_HINT, read_ranges
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.rows import pack_id
from backstay.store.postgres.target import Target


@dataclass(slots=True)
class UnneededRows:
    """Rows of streams that no checkpoint needs, by address. A row in both tables is judged in each table separately."""

    chunks: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)

    def add(self, is_fresh: bool, address: int) -> None:
        """Add a row of ``fresh`` or of ``chunk``."""
        (self.fresh if is_fresh else self.chunks).append(address)

    def drop(self, connection: DeadlineConnection) -> int:
        """Delete them; return how many bytes that freed."""
        dropped = 0
        for statement, addresses in ((queries.DROP_CHUNKS, self.chunks), (queries.DROP_FRESH, self.fresh)):
            if addresses:
                dropped += sum(length for (length,) in connection.every(statement, (addresses,)))
        return dropped


class PostgresDeletes:
    """The verbs that delete checkpoints and threads."""

    _pool: RetryingPool

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
        wanted = [pack_id(namespace, name) for name in checkpoints]

        def work(connection: DeadlineConnection) -> Removed:
            begin_delete(connection)
            lock_threads(connection, {thread for (thread,) in connection.every(queries.THREADS_OF, (wanted,))})
            connection.every(queries.LOCK_CHECKPOINTS, (wanted,))  # a concurrent tag either waits or counts
            keys = []
            for fields in connection.every(queries.TO_DELETE, (wanted,)):
                key, is_head, epoch, owner, held, left_us, *branch, is_awaited, has_tag, was_forked = fields
                if (protect and (is_head or is_awaited)) or (tagged and has_tag) or (forked and was_forked):
                    continue
                if is_head and held is not None and held != token and left_us > 0:
                    raise fenced(BranchKey(*branch), 0, epoch, owner, left_us)
                keys.append(key)
            return delete_rows(connection, keys)

        return self._pool.change(work)

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        def work(connection: DeadlineConnection) -> Removed:
            begin_delete(connection)
            found = connection.one(queries.THREAD, (namespace, thread))
            if found is None:
                return Removed()
            lock_threads(connection, found)
            branches = connection.every(queries.BRANCHES_OF_THREAD, (namespace, thread))
            for _, epoch, owner, held, left_us, *branch in branches:
                if held is not None and held != token and left_us > 0:
                    raise fenced(BranchKey(*branch), 0, epoch, owner, left_us)
            keys = [key for (key,) in connection.every(queries.KEYS_OF_BRANCHES, ([branch[0] for branch in branches],))]
            removed = delete_rows(connection, keys)
            for statement in (
                queries.DROP_WRITES_OF_THREAD,
                queries.DROP_RECORDS_OF_THREAD,
                queries.DROP_BRANCHES_OF_THREAD,
                queries.DROP_THREAD,
            ):
                connection.run(statement, found)
            return removed

        return self._pool.change(work)


def delete_rows(connection: DeadlineConnection, keys: Collection[int]) -> Removed:
    """Delete checkpoints by key, then everything that only they needed. Their threads are locked already."""
    branches = sorted({key >> SEQ_BITS for key in keys})
    if not branches:
        return Removed()
    lock_threads(connection, {thread for (thread,) in connection.every(queries.THREADS_SHARING, (branches,))})
    to_delete = sorted(keys)
    digests = dict(connection.every(queries.DROP_CHECKPOINTS, (to_delete,)))
    names = list(digests)
    connection.run(queries.DROP_TAGS, (to_delete,))
    connection.run(queries.DROP_WRITES, (branches, names))
    connection.run(queries.DROP_RECORDS, (names,))
    before: dict[int, set[Source]] = {branch: set() for branch in branches}
    for branch, stream, digest in connection.every(queries.REFS_OF_BRANCHES, {"branches": branches}):
        before[branch].add(digest if stream is None else stream)
    keep_parents(connection, digests, branches)
    connection.run(queries.SETTLE_HEADS, (branches,))
    emptied = [branch for (branch,) in connection.every(queries.DROP_EMPTY_BRANCHES, (branches,))]
    if emptied:
        connection.run(queries.DROP_STREAM_REFS_OF_BRANCHES, (emptied,))
        connection.run(queries.DROP_BLOB_REFS_OF_BRANCHES, (emptied,))
    return Removed(len(digests), len(emptied), _collect(connection, before))


def keep_parents(
    connection: DeadlineConnection, digests: dict[bytes, bytes], branches: Collection[int], but_not: int = 0
) -> None:
    """Give the children of deleted checkpoints their parent's digest.

    The children are in the same scope of the thread, or are the first checkpoints of forks.
    """
    connection.run(
        queries.KEEP_PARENT_DIGESTS,
        {"ids": list(digests), "digests": list(digests.values()), "branches": list(branches), "but_not": but_not},
    )


def begin_delete(connection: DeadlineConnection) -> None:
    """Block all other deletes until the transaction ends."""
    connection.run(queries.IDLE_LIMIT)
    connection.run(queries.ONE_DELETER)


def lock_threads(connection: DeadlineConnection, threads: Collection[int]) -> None:
    """Lock these threads against all other changes until the transaction ends."""
    if threads:
        connection.every(queries.LOCK_BRANCHES, (list(threads),))
        connection.every(queries.LOCK_THREADS, (list(threads),))


def _collect(connection: DeadlineConnection, before: dict[int, set[Source]]) -> int:
    candidates = {source for sources in before.values() for source in sources}
    streams = [source for source in candidates if isinstance(source, int)]
    referring: dict[int, set[int]] = {stream: set() for stream in streams}
    for stream, branch in connection.every(queries.BRANCHES_REFERRING, (streams,)):
        referring[stream].add(branch)
    coverage = Coverage(lambda name: read_blob(connection, name))
    others = {branch for branches in referring.values() for branch in branches}
    needed: dict[int, set[Source]] = {branch: set() for branch in {*before, *others}}
    blind: set[int] = set()  # branches with an unreadable manifest: all their sources stay
    for branch, base, manifest in connection.every(queries.MANIFESTS_OF_BRANCHES, (list(needed),)):
        try:
            needed[branch].update(coverage.add(manifest, base))
        except (Corrupted, DecodeError):
            blind.add(branch)
            needed[branch].update(before.get(branch, ()))
    dropped = [(branch, source) for branch, sources in before.items() for source in sources - needed[branch]]
    drop_references(connection, dropped)
    for branch, source in dropped:
        if isinstance(source, int):
            referring[source].discard(branch)
    kept = {
        stream: coverage.ranges(stream) if referring[stream] else []
        for stream in streams
        if blind.isdisjoint(referring[stream])
    }
    # Only sources that lost a reference here: locking the others too would make saves wait for nothing.
    return _trim(connection, kept) + drop_blobs(connection, {name for _, name in dropped if isinstance(name, bytes)})


def _trim(connection: DeadlineConnection, kept: dict[int, list[tuple[int, int]]]) -> int:
    """Drop the rows of streams outside these ranges; return how many bytes that freed."""
    unneeded = UnneededRows()
    for is_fresh, address, size in connection.every(queries.ROW_SIZES, {"streams": list(kept)}):
        stream = address >> OFFSET_BITS
        start = address - (stream << OFFSET_BITS)
        if not is_needed(start, start + size, kept[stream]):
            unneeded.add(is_fresh, address)
    return unneeded.drop(connection)


def drop_references(connection: DeadlineConnection, dropped: Collection[tuple[int, Source]]) -> None:
    """Drop references, given as branch and source."""
    streams = [(branch, source) for branch, source in dropped if isinstance(source, int)]
    blobs = [(branch, source) for branch, source in dropped if isinstance(source, bytes)]
    for statement, pairs in ((queries.DROP_STREAM_REFS, streams), (queries.DROP_BLOB_REFS, blobs)):
        if pairs:
            connection.run(statement, ([branch for branch, _ in pairs], [source for _, source in pairs]))


def drop_blobs(connection: DeadlineConnection, names: Collection[bytes]) -> int:
    """Drop the blobs that no branch refers to; return how many bytes that freed."""
    if not names:
        return 0
    connection.every(queries.LOCK_BLOBS, (list(names),))
    return sum(length for (length,) in connection.every(queries.DROP_BLOBS, (list(names),)))


def read_blob(connection: DeadlineConnection, name: bytes) -> bytes:
    """Return a blob's bytes."""
    size = connection.one(queries.BLOB_SIZE, (name,))
    if size is None:
        raise Corrupted(f"blob {name.hex()[:16]} is missing", hint=CHECK_HINT)
    return b"".join(read_ranges(connection, [Range(name, 0, size[0])])[0])


WINDOW_BYTES = 262_144
TABLES = ("fresh", "chunk", "blob", "checkpoint", "write", "branch", "thread")


class PostgresSpace:
    """The verbs about the space that the tables take."""

    _pool: RetryingPool
    _target: Target

    def sizes(self) -> Sizes:
        def work(connection: DeadlineConnection) -> Sizes:
            sources: dict[Source, int] = dict(connection.every(queries.BLOB_SIZES))
            sources.update(connection.every(queries.STREAM_SIZES))
            total = connection.scalar(queries.TABLE_BYTES, (self._target.schema,))
            return Sizes(total, sources, connection.scalar(queries.ROW_BYTES))

        return self._pool.read(work)

    def compact(self) -> int:
        def table_bytes(connection: DeadlineConnection) -> int:
            return int(connection.scalar(queries.TABLE_BYTES, (self._target.schema,)))

        before = self._pool.read(table_bytes)
        for (stream,) in self._pool.read(lambda connection: connection.every(queries.STREAMS)):
            self._pool.change(partial(_compact_stream, stream=stream))
        for table in TABLES:
            self._pool.read(partial(DeadlineConnection.run, statement=f"VACUUM {{schema}}.{table}"))
        return max(0, before - self._pool.read(table_bytes))


def _compact_stream(connection: DeadlineConnection, stream: int) -> None:
    connection.run(queries.ONE_DELETER)
    thread = connection.scalar(queries.OWNER_THREAD, (stream,))
    if thread is not None:
        lock_threads(connection, [thread])
    first = address_of(stream, 0)
    rows = connection.every(queries.CHUNKS_OF_STREAM, (first, first + STREAM_BYTES_MAX))
    for _, window in itertools.groupby(rows, key=lambda row: (row[0] - first) // WINDOW_BYTES):
        for run_of_rows in touching(list(window)):
            _merge(connection, run_of_rows)


def _merge(connection: DeadlineConnection, rows: list[Chunk]) -> None:
    if len(rows) == 1:
        return  # a single row was compressed when it was saved
    data = b"".join(unpack_body(size, body) for _, size, body in rows)
    connection.every(queries.DROP_CHUNKS, ([address for address, _, _ in rows],))
    connection.run(queries.ADD_CHUNK, (rows[0][0], len(data), pack_body(data)))
