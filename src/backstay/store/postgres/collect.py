"""Deleting: rows first, then every byte that no remaining manifest needs, in one transaction. And compacting.

Rules: a branch's references are computed again from its remaining manifests, so its head's sources always stay. A
source without a reference is deleted. Of a stream with references, the rows outside all ranges that a referring branch
needs are deleted. Children of a deleted checkpoint keep its digest, so their own digests can still be checked.

A delete locks the rows of all threads that share a stream with a touched branch, so none of them changes meanwhile.
Blobs are shared by everyone: a delete locks a blob before it looks for references to it, and a save that uses a blob
holds it locked until its reference is committed. Saves in other threads never wait for more than that. Only one delete
runs at a time.

Compacting merges small rows, then lets PostgreSQL reuse the space, or with ``full`` rewrites the tables. Merged rows
have the same addresses, so manifests do not change. Each stream is one short transaction that locks its owner's thread,
so a save waits for one stream at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from backstay.errors import Corrupted, DecodeError, StoreRefused
from backstay.pieces.manifest import OFFSET_BITS, STREAM_BYTES_MAX, Coverage, Range, Source, is_needed, merge_ranges
from backstay.store.base import BranchKey, NamespaceTotals, Removed, Sizes
from backstay.store.layout import SEQ_BITS, Chunk, address_of, joined, pack_body, touching, unpack_stored
from backstay.store.leases import fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.find import CHECK_HINT, read_ranges
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.rows import pack_id, reference_columns
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
            threads = {thread for (thread,) in connection.every(queries.THREADS_OF, (wanted,))}
            lock_threads(connection, threads)
            connection.every(queries.LOCK_CHECKPOINTS, (wanted,))  # a concurrent tag either waits or counts
            keys = []
            for fields in connection.every(queries.TO_DELETE, (wanted,)):
                key, is_head, epoch, owner, held, left_us, *branch, is_awaited, has_tag, was_forked = fields
                if (protect and (is_head or is_awaited)) or (tagged and has_tag) or (forked and was_forked):
                    continue
                if is_head and held is not None and held != token and left_us > 0:
                    raise fenced(BranchKey(*branch), 0, epoch, owner, left_us)
                keys.append(key)
            return delete_rows(connection, keys, threads)

        return self._pool.change(work, begin=queries.BEGIN_DELETE)

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        def work(connection: DeadlineConnection) -> Removed:
            found = connection.one(queries.THREAD, (namespace, thread))
            if found is None:
                return Removed()
            lock_threads(connection, found)
            keys: list[int] = []
            for _, epoch, owner, held, rows, left_us, *branch in connection.every(
                queries.BRANCHES_OF_THREAD, (namespace, thread)
            ):
                if held is not None and held != token and left_us > 0:
                    raise fenced(BranchKey(*branch), 0, epoch, owner, left_us)
                keys += rows
            removed = delete_rows(connection, keys, found)
            connection.run(queries.DROP_THREAD, {"thread": found[0]})
            return removed

        return self._pool.change(work, begin=queries.BEGIN_DELETE)


def delete_rows(
    connection: DeadlineConnection,
    keys: Collection[int],
    threads: Collection[int],
    replaced: bytes | None = None,
    but_not: int = 0,
) -> Removed:
    """Delete checkpoints by key, then everything that only they needed. Their threads are locked already.

    ``replaced`` is the id of the checkpoint if another row, ``but_not``, has taken it over: children keep the digest.
    """
    if not keys:
        return Removed()
    branches = sorted({key >> SEQ_BITS for key in keys})
    sharing = {thread for (thread,) in connection.every(queries.THREADS_SHARING, (branches,))}
    lock_threads(connection, sharing.difference(threads))
    doomed = drop_checkpoints(connection, keys, replaced, but_not)
    headless = {key >> SEQ_BITS for key, is_head, *_ in doomed if is_head}
    before: dict[int, set[Source]] = {}
    for branch, stream, digest in (
        connection.every(queries.SETTLE_BRANCHES_AND_EFFECTS, {"branches": list(headless)}) if headless else ()
    ):
        before.setdefault(branch, set()).update(() if stream is None else (stream or digest,))
    emptied = set(before)
    before |= _suspects(connection, [row for row in doomed if row[0] >> SEQ_BITS not in before])
    return Removed(len(doomed), len(emptied), _collect(connection, before, emptied) if any(before.values()) else 0)


def drop_checkpoints(
    connection: DeadlineConnection, keys: Collection[int], replaced: bytes | None = None, but_not: int = 0
) -> list[tuple[Any, ...]]:
    """Delete checkpoints with their tags, writes and records; return the rows with the keys of their neighbours."""
    bound = {"keys": sorted(keys), "replaced": replaced, "but_not": but_not}
    return connection.every(queries.DROP_CHECKPOINTS, bound)


def _suspects(connection: DeadlineConnection, doomed: Sequence[tuple[Any, ...]]) -> dict[int, set[Source]]:
    """Return the sources, by branch, with a part that only the deleted rows needed, and none of their neighbours.

    All other bytes stay needed, and no reference ends, so nothing else has to be read. In a thread that only grows,
    there is no such source unless its newest checkpoint was deleted.
    """
    gone = {row[0] for row in doomed}
    beside = {key for row in doomed for key in row[2:4] if key is not None} - gone
    stored = connection.every(queries.MANIFESTS, (list(beside),)) if beside else ()
    rows = [(key, base, manifest, True) for key, base, manifest in stored]
    rows += [(key, base, manifest, False) for key, _, _, _, base, manifest in doomed]
    bases = list({base for _, base, _, _ in rows if base is not None})
    found = connection.every(queries.BLOBS, (bases,)) if bases else ()
    blobs = {digest: (size, body) for digest, size, body in found}

    def read(name: bytes) -> bytes:
        return unpack_stored(*blobs[name], "a base") if name in blobs else read_blob(connection, name)

    needs = {key >> SEQ_BITS: (Coverage(read), Coverage(read)) for key in gone}
    sources: dict[int, tuple[set[Source], set[Source]]] = {branch: (set(), set()) for branch in needs}
    unclear = set()
    for key, base, manifest, stays in rows:
        branch = key >> SEQ_BITS
        try:
            sources[branch][stays].update(needs[branch][stays].add(manifest, base))
        except (Corrupted, DecodeError):
            unclear.add(branch)
    suspects: dict[int, set[Source]] = {}
    for branch, (lost, kept) in sources.items():
        going, staying = needs[branch]
        suspects[branch] = lost - kept
        for source in lost & kept:
            ranges = staying.ranges(source)
            if isinstance(source, int) and merge_ranges([*ranges, *going.ranges(source)]) != ranges:
                suspects[branch].add(source)
    for branch, stream, digest in connection.every(queries.REFS_OF_BRANCHES, (list(unclear),)) if unclear else ():
        suspects[branch].add(stream or digest)
    return {branch: found for branch, found in suspects.items() if found}


def lock_threads(connection: DeadlineConnection, threads: Collection[int]) -> None:
    """Lock these threads against all other changes until the transaction ends."""
    if threads:
        connection.every(queries.LOCK_BRANCHES_AND_THREADS, {"threads": list(threads)})


def _collect(connection: DeadlineConnection, before: dict[int, set[Source]], emptied: Collection[int]) -> int:
    """Drop what is no longer needed of these sources, by branch; return how many bytes that freed.

    Branches that are ``emptied`` have no references any more.
    """
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
    drop_references(connection, [(branch, source) for branch, source in dropped if branch not in emptied])
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
    if dropped:
        streams, _, digests = reference_columns([source for _, source in dropped])
        connection.run(queries.DROP_REFS, ([branch for branch, _ in dropped], streams, digests))


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
TABLES = ("fresh", "chunk", "blob", "record", "checkpoint", "write", "ref", "tag", "branch", "thread")


class PostgresSpace:
    """The verbs about the space that the tables take."""

    _pool: RetryingPool
    _target: Target

    def sizes(self, sources: Collection[Source] | None = None) -> Sizes:
        def work(connection: DeadlineConnection) -> Sizes:
            taken: dict[Source, int] = {}
            if sources is None:
                taken.update(connection.every(queries.BLOB_SIZES))
                taken.update(connection.every(queries.STREAM_SIZES))
            elif sources:
                blobs = [source for source in sources if isinstance(source, bytes)]
                streams = [source for source in sources if isinstance(source, int)]
                taken.update(connection.every(queries.BLOB_SIZES + queries.OF_BLOBS, (blobs,)))
                taken.update(connection.every(queries.SIZES_OF_STREAMS, {"streams": streams}))
            return Sizes(connection.scalar(queries.TABLE_BYTES, (self._target.schema,)), taken)

        return self._pool.read(work)

    def totals(self, namespace: str) -> NamespaceTotals:
        return NamespaceTotals(*self._pool.read(lambda connection: connection.every(queries.TOTALS, (namespace,)))[0])

    def backup(self, path: Path) -> None:
        raise StoreRefused(
            "a PostgreSQL store is copied with the server's own tools",
            hint="pg_dump --schema=NAME writes a copy that psql or pg_restore puts back: see docs/repair.md",
        )

    def compact(self, full: bool = False) -> int:
        def table_bytes(connection: DeadlineConnection) -> int:
            return int(connection.scalar(queries.TABLE_BYTES, (self._target.schema,)))

        def tables_of_others(connection: DeadlineConnection) -> list[str]:
            named = [str(name) for (name,) in connection.every(queries.TABLES_OF_OTHERS, (self._target.schema,))]
            if connection.info.server_version < 170_000:
                return named
            schema = self._target.schema
            return [name for name in named if not connection.scalar(queries.MAY_MAINTAIN, (f'"{schema}"."{name}"',))]

        # The server would only warn, and leave these tables as they are.
        if full and (others := self._pool.read(tables_of_others)):
            raise StoreRefused(
                f"this user may not vacuum table {others[0]!r}: it belongs to another user",
                path=self._target.shown,
                hint="Call compact(full=True) as the owner of the tables; compact() needs no such right",
            )
        vacuum = "VACUUM FULL" if full else "VACUUM"
        before = self._pool.read(table_bytes)
        for (stream,) in self._pool.read(lambda connection: connection.every(queries.STREAMS)):
            self._pool.change(partial(_compact_stream, stream=stream), begin=queries.BEGIN_DELETE)
        for table in TABLES:
            self._pool.read(partial(DeadlineConnection.run, statement=f"{vacuum} {{schema}}.{table}"))
        return max(0, before - self._pool.read(table_bytes))


def _compact_stream(connection: DeadlineConnection, stream: int) -> None:
    thread = connection.scalar(queries.OWNER_THREAD, (stream,))
    if thread is not None:
        lock_threads(connection, [thread])
    first = address_of(stream, 0)
    rows = connection.every(queries.CHUNKS_OF_STREAM, (first, first + STREAM_BYTES_MAX))
    for _, window in itertools.groupby(rows, key=lambda row: (row[0] - first) // WINDOW_BYTES):
        for run_of_rows in touching(list(window)):
            _merge(connection, run_of_rows)


def _merge(connection: DeadlineConnection, rows: list[Chunk]) -> None:
    data = joined(rows) if len(rows) > 1 else None  # a single row was compressed when it was saved
    if data is None:
        return
    connection.every(queries.DROP_CHUNKS, ([address for address, _, _ in rows],))
    connection.run(queries.ADD_CHUNK, (rows[0][0], len(data), pack_body(data)))
