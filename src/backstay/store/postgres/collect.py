"""Deleting: rows first, then every byte that no remaining manifest needs. All inside one transaction.

Rules: a lane's references are recomputed from the manifests it has left, so its head's sources always stay referred
to; a source that no lane refers to goes; of a stream that is still referred to, the rows outside all ranges that any
referring lane still needs go. Children of a deleted checkpoint keep its digest, so their own can still be checked.

Against savers: the rows of all threads that share a stream with a touched lane are locked, so none of them changes
meanwhile. Blobs are shared by everybody: one is locked before it is asked whether anything refers to it, and a saver
that relies on a blob holds it locked until its reference is committed. Other threads' savers are never kept waiting for
more than that. Only one delete runs at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.coverage import Coverage, is_needed
from backstay.pieces.manifest import Source
from backstay.pieces.piece import OFFSET_BITS, Range
from backstay.store.base import LaneKey, Removed
from backstay.store.layout import SEQ_BITS
from backstay.store.leases import fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.find import read_ranges
from backstay.store.postgres.link import Link
from backstay.store.postgres.rows import pack_id


@dataclass(slots=True)
class UnneededRows:
    """Rows of streams that nobody needs, by address. A row in both tables is judged and deleted in each apart."""

    chunks: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)

    def add(self, is_fresh: bool, address: int) -> None:
        """Take in a row of ``fresh`` or of ``chunk``."""
        (self.fresh if is_fresh else self.chunks).append(address)

    def drop(self, connection: DeadlineConnection) -> int:
        """Delete them, and return their bytes."""
        dropped = 0
        for statement, addresses in ((queries.DROP_CHUNKS, self.chunks), (queries.DROP_FRESH, self.fresh)):
            if addresses:
                dropped += sum(length for (length,) in connection.every(statement, (addresses,)))
        return dropped


class Deleting:
    """The verbs that delete checkpoints and threads."""

    _link: Link

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
            connection.every(queries.LOCK_CHECKPOINTS, (wanted,))  # a tag that is being given waits, or counts
            keys = []
            for fields in connection.every(queries.DOOMED, (wanted,)):
                key, is_head, epoch, owner, held, left_us, *lane, is_awaited, has_tag, was_forked = fields
                if (protect and (is_head or is_awaited)) or (tagged and has_tag) or (forked and was_forked):
                    continue
                if is_head and held is not None and held != token and left_us > 0:
                    raise fenced(LaneKey(*lane), 0, epoch, owner, left_us)
                keys.append(key)
            return delete_rows(connection, keys)

        return self._link.change(work)

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        def work(connection: DeadlineConnection) -> Removed:
            begin_delete(connection)
            found = connection.one(queries.THREAD, (namespace, thread))
            if found is None:
                return Removed()
            lock_threads(connection, found)
            lanes = connection.every(queries.LANES_OF_THREAD, (namespace, thread))
            for _, epoch, owner, held, left_us, *lane in lanes:
                if held is not None and held != token and left_us > 0:
                    raise fenced(LaneKey(*lane), 0, epoch, owner, left_us)
            keys = [key for (key,) in connection.every(queries.KEYS_OF_LANES, ([lane[0] for lane in lanes],))]
            removed = delete_rows(connection, keys)
            for statement in (
                queries.DROP_WRITES_OF_THREAD,
                queries.DROP_RECORDS_OF_THREAD,
                queries.DROP_LANES_OF_THREAD,
                queries.DROP_THREAD,
            ):
                connection.run(statement, found)
            return removed

        return self._link.change(work)


def delete_rows(connection: DeadlineConnection, keys: Collection[int]) -> Removed:
    """Delete checkpoints by key, then whatever they alone needed. Their threads are locked already."""
    lanes = sorted({key >> SEQ_BITS for key in keys})
    if not lanes:
        return Removed()
    lock_threads(connection, {thread for (thread,) in connection.every(queries.THREADS_SHARING, (lanes,))})
    doomed = sorted(keys)
    digests = dict(connection.every(queries.DROP_CHECKPOINTS, (doomed,)))
    names = list(digests)
    connection.run(queries.DROP_TAGS, (doomed,))
    connection.run(queries.DROP_WRITES, (lanes, names))
    connection.run(queries.DROP_RECORDS, (names,))
    before = _sources(connection, lanes)
    keep_parents(connection, digests, lanes)
    connection.run(queries.SETTLE_HEADS, (lanes,))
    emptied = [lane for (lane,) in connection.every(queries.DROP_EMPTY_LANES, (lanes,))]
    if emptied:
        connection.run(queries.DROP_STREAM_REFS_OF_LANES, (emptied,))
        connection.run(queries.DROP_BLOB_REFS_OF_LANES, (emptied,))
    return Removed(len(digests), len(emptied), _collect(connection, before))


def keep_parents(
    connection: DeadlineConnection, digests: dict[bytes, bytes], lanes: Collection[int], but_not: int = 0
) -> None:
    """Give the children of deleted checkpoints their parent's digest.

    They are in the same scope of the thread (the next ones, or ones that rewound to it) or begin a fork of it.
    """
    connection.run(
        queries.KEEP_PARENT_DIGESTS,
        {"ids": list(digests), "digests": list(digests.values()), "lanes": list(lanes), "but_not": but_not},
    )


def begin_delete(connection: DeadlineConnection) -> None:
    """Keep all other deletes away until the transaction ends."""
    connection.run(queries.IDLE_LIMIT)
    connection.run(queries.ONE_DELETER)


def lock_threads(connection: DeadlineConnection, threads: Collection[int]) -> None:
    """Keep everybody else from changing these threads until the transaction ends."""
    if threads:
        connection.every(queries.LOCK_LANES, (list(threads),))
        connection.every(queries.LOCK_THREADS, (list(threads),))


def _sources(connection: DeadlineConnection, lanes: Collection[int]) -> dict[int, set[Source]]:
    found: dict[int, set[Source]] = {lane: set() for lane in lanes}
    for lane, stream, digest in connection.every(queries.REFS_OF_LANES, {"lanes": list(lanes)}):
        found[lane].add(digest if stream is None else stream)
    return found


def _collect(connection: DeadlineConnection, before: dict[int, set[Source]]) -> int:
    candidates = {source for sources in before.values() for source in sources}
    streams = [source for source in candidates if isinstance(source, int)]
    referring: dict[int, set[int]] = {stream: set() for stream in streams}
    for stream, lane in connection.every(queries.LANES_REFERRING, (streams,)):
        referring[stream].add(lane)
    coverage = Coverage(lambda name: read_blob(connection, name))
    others = {lane for lanes in referring.values() for lane in lanes}
    needed: dict[int, set[Source]] = {lane: set() for lane in {*before, *others}}
    blind: set[int] = set()  # lanes with a manifest that cannot be read: all that they refer to stays
    for lane, base, manifest in connection.every(queries.MANIFESTS_OF_LANES, (list(needed),)):
        try:
            needed[lane].update(coverage.add(manifest, base))
        except (Corrupted, DecodeError):
            blind.add(lane)
            needed[lane].update(before.get(lane, ()))
    dropped = [(lane, source) for lane, sources in before.items() for source in sources - needed[lane]]
    drop_references(connection, dropped)
    for lane, source in dropped:
        if isinstance(source, int):
            referring[source].discard(lane)
    kept = {
        stream: coverage.ranges(stream) if referring[stream] else []
        for stream in streams
        if blind.isdisjoint(referring[stream])
    }
    # Only what lost a reference here: to lock also what is still needed would make savers wait for nothing.
    return _trim(connection, kept) + drop_blobs(connection, {name for _, name in dropped if isinstance(name, bytes)})


def drop_references(connection: DeadlineConnection, dropped: Collection[tuple[int, Source]]) -> None:
    """Drop references, given as lane and source."""
    streams = [(lane, source) for lane, source in dropped if isinstance(source, int)]
    blobs = [(lane, source) for lane, source in dropped if isinstance(source, bytes)]
    for statement, pairs in ((queries.DROP_STREAM_REFS, streams), (queries.DROP_BLOB_REFS, blobs)):
        if pairs:
            connection.run(statement, ([lane for lane, _ in pairs], [source for _, source in pairs]))


def _trim(connection: DeadlineConnection, kept: dict[int, list[tuple[int, int]]]) -> int:
    unneeded = UnneededRows()
    for is_fresh, address, size in connection.every(queries.ROW_SIZES, {"streams": list(kept)}):
        stream = address >> OFFSET_BITS
        start = address - (stream << OFFSET_BITS)
        if not is_needed(start, start + size, kept[stream]):
            unneeded.add(is_fresh, address)
    return unneeded.drop(connection)


def drop_blobs(connection: DeadlineConnection, names: Collection[bytes]) -> int:
    """Drop those of these blobs that nothing refers to, and return their bytes."""
    if not names:
        return 0
    connection.every(queries.LOCK_BLOBS, (list(names),))
    return sum(length for (length,) in connection.every(queries.DROP_BLOBS, (list(names),)))


def read_blob(connection: DeadlineConnection, name: bytes) -> bytes:
    """Return a blob's bytes."""
    size = connection.one(queries.BLOB_SIZE, (name,))
    if size is None:
        raise Corrupted(f"blob {name.hex()[:16]} is missing")
    return b"".join(read_ranges(connection, [Range(name, 0, size[0])])[0])
