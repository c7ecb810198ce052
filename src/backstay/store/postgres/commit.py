"""Writing: one commit is one statement, a call of a function of the schema that checks and writes everything.

Many checkpoints at once, for imports, are one transaction. The first goes in like any other, which checks the writer
and locks the branch and its thread until the end. The rest follows in bulk: rows, bytes (merged into large rows right
away) and tags each by one COPY.

Pending writes are one row for each task, changed only if it is still what the writer thinks it is. The first writes of
tasks are one statement. If there are some already, its answer shows them and nothing is stored; they are merged here
and put back by a second one, which stores nothing either if others came in between. Each is a transaction of its own,
so nothing is held meanwhile, and a caller that repeats it after a lost answer finds its writes there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import psycopg

from backstay.errors import Conflict, NotFound
from backstay.store.base import (
    Commit,
    Committed,
    LaneKey,
    WriteRow,
    check_batch,
    first_results,
    id_is_taken,
    required_is_gone,
)
from backstay.store.layout import (
    COMPRESS_AT_ONCE_BYTES,
    SEQ_BITS,
    SEQ_MAX,
    address_of,
    key_of,
    pack_body,
)
from backstay.store.leases import fenced
from backstay.store.postgres import queries
from backstay.store.postgres.collect import delete_rows, keep_parents, lock_threads
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.failure import CHECKPOINT_IS_GONE, ID_EXISTS, NOT_AS_THOUGHT
from backstay.store.postgres.link import Link
from backstay.store.postgres.merge import WINDOW_BYTES, additions, leaves_window
from backstay.store.postgres.rows import pack_id, pack_task, unpack_id, unpack_task
from backstay.store.writes import Packed, by_task, merge, merged, pack

STORED, SAME, TAKEN, MOVED, FENCED = range(5)
"""What ``commit_checkpoint`` answers."""


class Writing:
    """The verbs that add checkpoints, pending writes and tags."""

    _link: Link

    def reserve(self, count: int) -> int:
        return self._link.write(lambda connection: int(connection.scalar(queries.RESERVE, (count,))) - count)

    def commit(self, commit: Commit) -> Committed:
        if commit.replaces_head:
            return self._link.change(lambda connection: _replace_head(connection, commit), commit.id)
        add = _append if is_plain(commit) else _add
        return self._link.write(lambda connection: add(connection, commit), commit.id)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        if not commits:
            return []
        return self._link.change(lambda connection: _add_all(connection, commits), commits[0].id, again=True)

    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        tasks = by_task(writes)

        def work(connection: DeadlineConnection) -> None:
            stored: dict[str, Packed | None] = dict.fromkeys(tasks)  # as far as it is known
            changed = {task: pack(merge((), new, replace)) for task, new in tasks.items()}
            while others := swap(connection, lane, checkpoint, stored, changed):
                stored.update(others)
                changed = {}
                for task, new in tasks.items():
                    found = stored[task]
                    if found is None:
                        changed[task] = pack(merge((), new, replace))
                    elif (packed := merged(task, found, new, replace, lane.thread, checkpoint)) is not None:
                        changed[task] = packed
                if not changed:
                    return

        self._link.write(work, checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        bound = {"id": pack_id(namespace, checkpoint), "add": list(add), "remove": list(remove)}
        found = self._link.write(lambda connection: connection.one(queries.TAG, bound), checkpoint)
        if found is None:
            raise NotFound(checkpoint, checkpoint=checkpoint)
        return tuple(sorted(found[0]))


def is_plain(commit: Commit) -> bool:
    """Tell whether a save only adds at most one small chunk to a branch that is there: nearly every one does."""
    if not commit.number or commit.blobs or commit.sources or commit.tags or len(commit.chunks) > 1:
        return False
    if commit.requires or commit.keeps_parent_digest:
        return False
    if not commit.chunks:
        return True
    _, offset, data = commit.chunks[0]
    return len(data) < COMPRESS_AT_ONCE_BYTES and not leaves_window(offset, data)


def _append(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Add a plain checkpoint in the quick way; if anything is unusual, in the thorough one, which says what it is."""
    stream, offset, data = commit.chunks[0] if commit.chunks else (0, 0, b"")
    bound = (*_head_arguments(commit), address_of(stream, offset) if commit.chunks else None, data)
    try:
        return Committed(commit.number, int(connection.scalar(queries.APPEND, bound)), True)
    except psycopg.Error as error:
        if error.sqlstate not in (NOT_AS_THOUGHT, ID_EXISTS):
            raise
    return _add(connection, commit)


def _add(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Add a checkpoint at the end of its lane."""

    def read(start: int, end: int) -> list[tuple[int, bytes]]:
        return [(address, body) for address, body in connection.every(queries.FRESH_ROWS, {"start": start, "end": end})]

    added = additions(commit, read)
    key = commit.lane
    streams = [source for source in commit.sources if isinstance(source, int)]
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
        streams,
        [stream in commit.owned for stream in streams],
        [source for source in commit.sources if isinstance(source, bytes)],
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
    return _judged(commit, *answer)


def _replace_head(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Store the newest checkpoint anew under its id, inside a transaction."""
    key = commit.lane
    lock_threads(connection, [thread for (thread,) in connection.every(queries.THREAD, key[:2])])
    name = pack_id(key.namespace, commit.id)
    found = connection.one(queries.IDENTITY, (name,))
    committed = _add(connection, commit)
    if found is not None and committed.fresh:
        replaced, digest = found
        keep_parents(connection, {name: digest}, [committed.number], but_not=key_of(committed.number, committed.seq))
        if commit.parent_digest is not None:
            place = key_of(committed.number, committed.seq)
            connection.run(queries.KEEP_PARENT_DIGEST, (commit.parent_digest, place))
        delete_rows(connection, [replaced])
    return committed


def _head_arguments(commit: Commit) -> tuple[Any, ...]:
    """Return what both functions are told of the writer and the checkpoint."""
    namespace, claim = commit.lane.namespace, commit.claim
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


def _judged(
    commit: Commit, outcome: int, lane: int, seq: int, epoch: int, owner: str | None, left_us: int
) -> Committed:
    where = {"thread": commit.lane.thread, "checkpoint": commit.id}
    if outcome in (STORED, SAME):
        return Committed(lane, seq, outcome == STORED)
    if outcome == TAKEN:
        raise id_is_taken(commit)
    if outcome == FENCED:
        raise fenced(commit.lane, commit.epoch, epoch, owner, left_us)
    raise Conflict("the branch has moved on", **where)


# Many at once -----------------------------------------------------------------------------------------------------


def _add_all(connection: DeadlineConnection, commits: Sequence[Commit]) -> list[Committed]:
    """Add many checkpoints at the end of one lane, inside a transaction."""
    key = commits[0].lane
    names = [pack_id(key.namespace, commit.id) for commit in commits]
    stored = {
        unpack_id(name): (place >> SEQ_BITS, place & SEQ_MAX, digest)
        for name, place, digest in connection.every(queries.IDENTITIES, (names,))
    }
    done = first_results(commits, stored, connection.scalar(queries.LANE_NUMBER, key) or 0)
    if done is not None:
        return done
    first = _add(connection, commits[0])
    rest = commits[1:]
    done = [Committed(first.number, first.seq + position, True) for position in range(len(commits))]
    if rest:
        _add_bytes(connection, first.number, rest)
        _add_rows(connection, rest, done[1:], names[1:])
        connection.run(queries.MOVE_LANE, {"lane": first.number, "seq": done[-1].seq})
    return done


def _add_bytes(connection: DeadlineConnection, lane: int, commits: Sequence[Commit]) -> None:
    blobs = {name: data for commit in commits for name, data in commit.blobs.items()}
    if blobs:
        sizes = [len(data) for data in blobs.values()]
        connection.one(queries.PUT_BLOBS, (list(blobs), sizes, [pack_body(data) for data in blobs.values()]))
    _copy(connection, queries.COPY_CHUNKS, ("int8", "int4", "bytea"), _merged(commits))
    sources = dict.fromkeys(source for commit in commits for source in commit.sources)
    owned = {stream for commit in commits for stream in commit.owned}
    streams = [source for source in sources if isinstance(source, int)]
    connection.run(queries.ADD_STREAM_REFS, (lane, streams, [stream in owned for stream in streams]))
    connection.run(queries.ADD_BLOB_REFS, (lane, [source for source in sources if isinstance(source, bytes)]))


def _add_rows(
    connection: DeadlineConnection, commits: Sequence[Commit], done: Sequence[Committed], names: Sequence[bytes]
) -> None:
    wanted = list({commit.base for commit in commits if commit.base is not None})
    bases = dict(connection.every(queries.BLOB_IDS, (wanted,)))
    keys = [key_of(place.number, place.seq) for place in done]
    types = ("int8", "bytea", "bytea", "bytea", "int8", "int8", "bytea", "int8", "bytea", "int8", "bytea")
    missing = _missing_parents(connection, commits)
    rows = (
        (
            key,
            name,
            None if commit.parent_id is None else pack_id(commit.lane.namespace, commit.parent_id),
            commit.parent_digest if (commit.parent_id, commit.parent_digest) in missing else None,
            commit.step,
            commit.created_us,
            commit.digest,
            commit.size,
            commit.notes,
            None if commit.base is None else bases[commit.base],
            commit.manifest,
        )
        for key, name, commit in zip(keys, names, commits, strict=True)
    )
    _copy(connection, queries.COPY_CHECKPOINTS, types, rows)
    tags = [(key, tag) for key, commit in zip(keys, commits, strict=True) for tag in commit.tags]
    _copy(connection, queries.COPY_TAGS, ("int8", "text"), tags)


def _missing_parents(connection: DeadlineConnection, commits: Sequence[Commit]) -> set[tuple[str | None, bytes | None]]:
    """Return which parents, named with their digests, are neither stored nor among these commits."""
    named: set[tuple[str | None, bytes | None]] = {
        (commit.parent_id, commit.parent_digest) for commit in commits if commit.parent_digest is not None
    }
    named -= {(commit.id, commit.digest) for commit in commits}
    if not named:
        return set()
    wanted = [pack_id(commits[0].lane.namespace, parent) for parent, _ in named if parent is not None]
    return named - {(unpack_id(name), digest) for name, _, digest in connection.every(queries.IDENTITIES, (wanted,))}


def _merged(commits: Sequence[Commit]) -> Iterable[tuple[int, int, bytes]]:
    """Return the rows of all streams, those that follow each other joined up to the size of a window."""
    open_rows: dict[int, tuple[int, bytearray]] = {}
    for commit in commits:
        for stream, offset, data in commit.chunks:
            start, joined = open_rows.get(stream, (offset, bytearray()))
            if start + len(joined) != offset or len(joined) >= WINDOW_BYTES:
                yield _row(stream, start, joined)
                start, joined = offset, bytearray()
            joined += data
            open_rows[stream] = (start, joined)
    for stream, (start, joined) in open_rows.items():
        yield _row(stream, start, joined)


def _row(stream: int, start: int, data: bytearray) -> tuple[int, int, bytes]:
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
    lane: LaneKey,
    checkpoint: str,
    stored: Mapping[str, Packed | None],
    changed: Mapping[str, Packed],
) -> dict[str, Packed | None]:
    """Put rows in the place of those that are stored; if any is another by now, do nothing and return which it is."""
    bound: list[object] = [
        *lane[:3],
        pack_id(lane.namespace, checkpoint),
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
