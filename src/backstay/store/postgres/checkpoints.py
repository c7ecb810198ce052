"""Adding checkpoints. A commit is one statement: a call of a function of the schema that checks and writes everything.

Many checkpoints at once, for imports, are one transaction. The first is added like any other, which checks the writer
and locks the branch and its thread until the end. The rest follow in bulk: rows, bytes (merged into large rows at once)
and tags by one COPY each.

Pending writes are one row per task, which is changed only if it still has the content that the writer expects. The
first writes of tasks are one statement. If a task has writes already, the statement stores nothing and returns them;
they are merged here and stored by a second statement, which also stores nothing if another writer was faster. Each
statement is a transaction of its own, so no lock is held in between, and a caller that repeats it after a lost answer
finds its writes.

New bytes of a save, if they are few, go into a small row of ``fresh``. When a save crosses a 64 KiB boundary of its
stream, the rows of the window that it leaves become compressed rows in ``chunk``, usually a single one, at the same
addresses and in the same transaction. Manifests do not change, every byte is written twice, and no background work is
needed. The small rows stay until the next window overwrites them: the bytes at an address never change, so a reader may
use either copy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from backstay.model.fields import TAGS_MAX
from backstay.store.base import (
    BranchKey,
    Commit,
    Committed,
    WriteRow,
    branch_moved,
    check_batch,
    first_results,
    id_is_taken,
    no_checkpoint,
    required_is_gone,
    tags_after,
)
from backstay.store.layout import (
    COMPRESS_AT_ONCE_BYTES,
    SEQ_BITS,
    SEQ_MAX,
    address_of,
    checksum_of,
    joined,
    key_of,
    pack_body,
)
from backstay.store.leases import fenced
from backstay.store.postgres import queries
from backstay.store.postgres.collect import delete_rows, lock_threads
from backstay.store.postgres.connection import CHECKPOINT_IS_GONE, ID_EXISTS, NOT_AS_THOUGHT, DeadlineConnection
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.rows import pack_id, pack_task, reference_columns, split_fresh, unpack_id, unpack_task
from backstay.store.writes import Packed, by_task, merge, merged, pack

WINDOW_BYTES = 65_536
_INT8 = struct.Struct("!q").pack
STORED, SAME, TAKEN, MOVED, FENCED = range(5)
"""Answers of ``commit_checkpoint``."""


class PostgresCheckpoints:
    """The verbs that add checkpoints, pending writes and tags."""

    _pool: RetryingPool
    _shared: set[int]

    def reserve(self, count: int) -> int:
        return self._pool.write(lambda connection: int(connection.scalar(queries.RESERVE, (count,))) - count)

    def commit(self, commit: Commit) -> Committed:
        if commit.replaces_head:
            return self._pool.change(lambda connection: _replace_head(connection, commit), commit.id, again=True)
        if is_plain(commit):
            return self._pool.write(lambda connection: _append(connection, commit, self._shared), commit.id)
        return self._pool.write(lambda connection: _add(connection, commit), commit.id)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        if not commits:
            return []
        return self._pool.change(lambda connection: _add_all(connection, commits), commits[0].id, again=True)

    def write(self, branch: BranchKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        tasks = by_task(writes)

        def work(connection: DeadlineConnection) -> None:
            stored: dict[str, Packed | None] = dict.fromkeys(tasks)  # as far as known
            changed = {task: pack(merge((), new, replace), checkpoint) for task, new in tasks.items()}
            while others := swap(connection, branch, checkpoint, stored, changed):
                stored.update(others)
                changed = {}
                for task, new in tasks.items():
                    found = stored[task]
                    if found is None:
                        changed[task] = pack(merge((), new, replace), checkpoint)
                    elif (packed := merged(task, found, new, replace, branch.thread, checkpoint)) is not None:
                        changed[task] = packed
                if not changed:
                    return

        self._pool.write(work, checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        bound = {"id": pack_id(namespace, checkpoint), "add": list(add), "remove": list(remove), "most": TAGS_MAX}
        found = self._pool.write(lambda connection: connection.one(queries.TAG, bound), checkpoint)
        if found is None:
            raise no_checkpoint(checkpoint)
        return tags_after(found[0], (), ())


def is_plain(commit: Commit) -> bool:
    """Return whether a save adds at most one small chunk to an existing branch, as nearly every save does."""
    if not commit.number or commit.blobs or commit.sources or commit.tags or len(commit.chunks) > 1:
        return False
    if commit.requires or commit.keeps_parent_digest:
        return False
    if not commit.chunks:
        return True
    _, offset, data = commit.chunks[0]
    return len(data) < COMPRESS_AT_ONCE_BYTES and not leaves_window(offset, data)


def _append(connection: DeadlineConnection, commit: Commit, shared: set[int]) -> Committed:
    """Add a plain checkpoint by one fast statement; if anything is unusual, by the function, which reports it.

    ``shared`` has the branches that are not alone in their thread, as far as known.
    """
    if connection.prepare_threshold is None:  # the server would have to plan the statement each time
        return _add(connection, commit)
    namespace, claim, is_alone = commit.branch.namespace, commit.claim, commit.number not in shared
    stream, offset, data = commit.chunks[0] if commit.chunks else (0, 0, None)
    numbers = (
        commit.number,
        commit.last_seq,
        commit.head_seq,
        commit.epoch,
        commit.step,
        commit.created_us,
        commit.size,
        slot_of(stream, offset),
        address_of(stream, offset),
        claim.ttl_us if claim else 0,
    )
    bound = (
        *map(_INT8, numbers),
        pack_id(namespace, commit.id),
        None if commit.parent_id is None else pack_id(namespace, commit.parent_id),
        commit.digest,
        commit.notes,
        commit.base,
        commit.manifest,
        data,
        claim.token.encode() if claim else None,
        None if data is None else len(data).to_bytes(4) + checksum_of(data),
    )
    statement = queries.APPEND[claim is not None, is_alone, data is not None]
    try:
        seq = connection.fast(statement, queries.APPEND_TYPES, bound)
        return Committed(commit.number, int.from_bytes(seq), True)
    except psycopg.Error as error:
        if error.sqlstate not in (NOT_AS_THOUGHT, ID_EXISTS):
            raise
    committed = _add(connection, commit)
    if committed.fresh:
        (shared.add if is_alone else shared.discard)(commit.number)
    return committed


def _add(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Add a checkpoint at the end of its branch."""

    def read(start: int, end: int) -> list[tuple[int, bytes]]:
        rows: list[tuple[int, bytes]] = []
        for address, body, checks, known in connection.every(queries.FRESH_ROWS, {"start": start, "end": end}):
            data = joined(split_fresh(address, body, checks))
            if data is not None:  # a damaged row stays as it is, to be found when it is read
                rows.append((address + known, data[known:]))
        return rows

    added = additions(commit, read)
    key = commit.branch
    bound = (
        *key,
        *_head_arguments(commit),
        added.small,
        added.small_bodies,
        added.addresses,
        added.sizes,
        added.bodies,
        list(commit.blobs),
        [len(data) for data in commit.blobs.values()],
        [pack_body(data) for data in commit.blobs.values()],
        *reference_columns(commit.sources, commit.owned),
        list(commit.tags),
        None if commit.requires is None else pack_id(key.namespace, commit.requires),
        None if commit.forked_from is None else pack_id(key.namespace, commit.forked_from),
        commit.parent_digest,
        commit.replaces_head,
    )
    try:
        answer = connection.one(queries.COMMIT, bound)
    except psycopg.Error as error:
        if error.sqlstate != CHECKPOINT_IS_GONE:
            raise
        raise required_is_gone(commit) from None
    assert answer is not None
    outcome, number, seq, epoch, owner, left_us = answer
    if outcome in (STORED, SAME):
        return Committed(number, seq, outcome == STORED)
    if outcome == TAKEN:
        raise id_is_taken(commit)
    if outcome == FENCED:
        raise fenced(commit.branch, commit.epoch, epoch, owner, left_us)
    raise branch_moved(commit)


def _replace_head(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Replace the newest checkpoint under its id, inside a transaction.

    If the row with this id has the commit's digest, and is not the head that the writer saw, this very commit is stored
    already: its first result is returned again.
    """
    key = commit.branch
    threads = [thread for (thread,) in connection.every(queries.THREAD, key[:2])]
    lock_threads(connection, threads)
    name = pack_id(key.namespace, commit.id)
    found = connection.one(queries.IDENTITY, (name,))
    if found is not None and found[1] == commit.digest and found[0] >> SEQ_BITS == commit.number:
        seq = found[0] & SEQ_MAX
        if seq != commit.head_seq:
            return Committed(commit.number, seq, False)
    committed = _add(connection, commit)
    if found is not None and committed.fresh:
        new = key_of(committed.number, committed.seq)
        if commit.parent_digest is not None:
            connection.run(queries.KEEP_PARENT_DIGEST, (commit.parent_digest, new))
        delete_rows(connection, [found[0]], threads, name, new)
    return committed


def _head_arguments(commit: Commit) -> tuple[Any, ...]:
    """Return the arguments about the writer and the checkpoint."""
    namespace, claim = commit.branch.namespace, commit.claim
    return (
        commit.number,
        commit.last_seq,
        commit.head_seq,
        commit.epoch,
        claim.token if claim else None,
        claim.ttl_us if claim else None,
        pack_id(namespace, commit.id),
        None if commit.parent_id is None else pack_id(namespace, commit.parent_id),
        commit.step,
        commit.created_us,
        commit.digest,
        commit.size,
        commit.notes,
        commit.base,
        commit.manifest,
    )


# Many at once -----------------------------------------------------------------------------------------------------


def _add_all(connection: DeadlineConnection, commits: Sequence[Commit]) -> list[Committed]:
    """Add many checkpoints at the end of one branch, inside a transaction."""
    key = commits[0].branch
    names = [pack_id(key.namespace, commit.id) for commit in commits]
    stored = {
        unpack_id(name): (place >> SEQ_BITS, place & SEQ_MAX, digest)
        for name, place, digest in connection.every(queries.IDENTITIES, (names,))
    }
    done = first_results(commits, stored, connection.scalar(queries.BRANCH_NUMBER, key) or 0)
    if done is not None:
        return done
    first = _add(connection, commits[0])
    rest = commits[1:]
    done = [Committed(first.number, first.seq + position, True) for position in range(len(commits))]
    if rest:
        blobs = {name: data for commit in rest for name, data in commit.blobs.items()}
        if blobs:
            sizes = [len(data) for data in blobs.values()]
            connection.one(queries.PUT_BLOBS, (list(blobs), sizes, [pack_body(data) for data in blobs.values()]))
        _copy(connection, queries.COPY_CHUNKS, ("int8", "int4", "bytea"), _merge_chunks(rest))
        sources = dict.fromkeys(source for commit in rest for source in commit.sources)
        owned = {stream for commit in rest for stream in commit.owned}
        connection.run(queries.ADD_REFS, (first.number, *reference_columns(sources, owned)))
        _add_rows(connection, commits[0], rest, done[1:], names[1:])
        connection.run(queries.MOVE_BRANCH, {"branch": first.number, "seq": done[-1].seq})
    return done


def _add_rows(
    connection: DeadlineConnection,
    first: Commit,
    commits: Sequence[Commit],
    done: Sequence[Committed],
    names: Sequence[bytes],
) -> None:
    keys = [key_of(place.number, place.seq) for place in done]
    types = ("int8", "bool", "bytea", "bytea", "bytea", "int8", "int8", "bytea", "int8", "bytea", "bytea", "bytea")
    # Parents, with their digests, that are neither stored nor among these commits: their children keep the digest.
    missing = {(commit.parent_id, commit.parent_digest) for commit in commits if commit.parent_digest is not None}
    missing -= {(commit.id, commit.digest) for commit in commits}
    if missing:
        parents = [pack_id(commits[0].branch.namespace, parent) for parent, _ in missing if parent is not None]
        missing -= {(unpack_id(name), digest) for name, _, digest in connection.every(queries.IDENTITIES, (parents,))}
    rows = (
        (
            key,
            commit.parent_id != before.id,
            name,
            None if commit.parent_id is None else pack_id(commit.branch.namespace, commit.parent_id),
            commit.parent_digest if (commit.parent_id, commit.parent_digest) in missing else b"",
            commit.step,
            commit.created_us,
            commit.digest,
            commit.size,
            commit.notes,
            commit.base,
            commit.manifest,
        )
        for key, name, before, commit in zip(keys, names, [first, *commits], commits, strict=False)
    )
    _copy(connection, queries.COPY_CHECKPOINTS, types, rows)
    tags = [(key, tag) for key, commit in zip(keys, commits, strict=True) for tag in commit.tags]
    _copy(connection, queries.COPY_TAGS, ("int8", "text"), tags)


def _merge_chunks(commits: Sequence[Commit]) -> Iterable[tuple[int, int, bytes]]:
    """Yield the rows of all streams, adjacent ones joined up to the size of a window."""
    open_rows: dict[int, tuple[int, bytearray]] = {}
    for commit in commits:
        for stream, offset, data in commit.chunks:
            start, joined = open_rows.get(stream, (offset, bytearray()))
            if start + len(joined) != offset or len(joined) >= WINDOW_BYTES:
                yield _chunk_row(stream, start, joined)
                start, joined = offset, bytearray()
            joined += data
            open_rows[stream] = (start, joined)
    for stream, (start, joined) in open_rows.items():
        yield _chunk_row(stream, start, joined)


def _chunk_row(stream: int, start: int, data: bytearray) -> tuple[int, int, bytes]:
    return address_of(stream, start), len(data), pack_body(bytes(data))


def _copy(
    connection: DeadlineConnection, statement: str, types: Sequence[str], rows: Iterable[tuple[Any, ...]]
) -> None:
    with connection.cursor().copy(connection.statements[statement].encode()) as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


# Pending writes ---------------------------------------------------------------------------------------------------


def swap(
    connection: DeadlineConnection,
    branch: BranchKey,
    checkpoint: str,
    stored: Mapping[str, Packed | None],
    changed: Mapping[str, Packed],
) -> dict[str, Packed | None]:
    """Replace stored rows; if any has changed meanwhile, store nothing and return the changed ones."""
    bound: list[object] = [
        *branch[:3],
        pack_id(branch.namespace, checkpoint),
        [pack_task(task) for task in changed],
        [packed.size for packed in changed.values()],
        [packed.body for packed in changed.values()],
    ]
    was = [None if (found := stored[task]) is None else hashlib.sha256(found.body).digest() for task in changed]
    if any(was):
        answer = connection.every(queries.SWAP_WRITES, [*bound, was])
    else:
        answer = connection.every(queries.ADD_WRITES, bound)
    return {unpack_task(task): None if body is None else Packed(size, body) for task, size, body in answer}


# New bytes --------------------------------------------------------------------------------------------------------

ReadRows = Callable[[int, int], list[tuple[int, bytes]]]
"""Returns the fresh rows that start between two addresses, in order, without the bytes that ``chunk`` has too.

``chunk`` has some of them if the save that left the window was deleted, because then the window is left a second time.
If a row has grown since, ``chunk`` has only its older part, and the newer part is returned.
"""


@dataclass(slots=True)
class Additions:
    """The rows that a commit adds: small ones to ``fresh``, uncompressed, and others to ``chunk``, compressed."""

    small: list[int] = field(default_factory=list)
    small_bodies: list[bytes] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def add_small(self, address: int, data: bytes) -> None:
        """Add a row to ``fresh``."""
        self.small.append(address)
        self.small_bodies.append(pack_body(data, COMPRESS_AT_ONCE_BYTES))

    def add(self, address: int, data: bytes) -> None:
        """Add a row to ``chunk``."""
        self.addresses.append(address)
        self.sizes.append(len(data))
        self.bodies.append(pack_body(data))


def slot_of(stream: int, offset: int) -> int:
    """Return the slot of ``fresh`` for bytes that start here."""
    return stream << 6 | (offset >> 10 & 63)


def leaves_window(offset: int, data: bytes) -> bool:
    """Return whether a stream continues in another window after these bytes.

    The byte that fills a window leaves it; the next one does not leave it again.
    """
    return (offset + len(data)) // WINDOW_BYTES > offset // WINDOW_BYTES


def additions(commit: Commit, read: ReadRows) -> Additions:
    """Return the rows of a commit, including the fresh rows of windows that it leaves."""
    added = Additions()
    for stream, offset, data in commit.chunks:
        address = address_of(stream, offset)
        rest = (address, data)
        if leaves_window(offset, data):
            start = offset // WINDOW_BYTES * WINDOW_BYTES
            runs = _runs(read(address_of(stream, start), address))
            if runs and runs[-1][0] + len(runs[-1][1]) == address:
                rest = (runs[-1][0], runs.pop()[1] + data)
            for first, whole in runs:
                added.add(first, whole)
            added.add(*rest)
        elif len(data) < COMPRESS_AT_ONCE_BYTES:
            added.add_small(*rest)
        else:
            added.add(*rest)
    return added


def _runs(rows: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return adjacent rows joined into one."""
    runs: list[tuple[int, list[bytes]]] = []
    end = -1
    for address, body in rows:
        if address == end:
            runs[-1][1].append(body)
        else:
            runs.append((address, [body]))
        end = address + len(body)
    return [(first, b"".join(parts)) for first, parts in runs]
