"""Many checkpoints at once: by COPY, in one transaction, for imports.

The first goes in like any other, which checks the writer and locks the branch and its thread until the end. The rest
follows in bulk: rows, bytes (merged into large rows right away) and tags each by one COPY.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from backstay.store.base import Commit, Committed, first_results
from backstay.store.layout import SEQ_BITS, SEQ_MAX, address_of, key_of, pack_body
from backstay.store.postgres import queries
from backstay.store.postgres.commit import add_checkpoint
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.merge import WINDOW_BYTES
from backstay.store.postgres.rows import pack_id, unpack_id
from backstay.store.postgres.select import every, one, run, scalar


def add_checkpoints(connection: DeadlineConnection, commits: Sequence[Commit]) -> list[Committed]:
    """Add many checkpoints at the end of one lane, inside a transaction; see ``Backend.commit_all``."""
    key = commits[0].lane
    names = [pack_id(key.namespace, commit.id) for commit in commits]
    stored = {
        unpack_id(name): (place >> SEQ_BITS, place & SEQ_MAX, digest)
        for name, place, digest in every(connection, queries.IDENTITIES, (names,))
    }
    done = first_results(commits, stored, scalar(connection, queries.LANE_NUMBER, key) or 0)
    if done is not None:
        return done
    first = add_checkpoint(connection, commits[0])
    rest = commits[1:]
    done = [Committed(first.number, first.seq + position, True) for position in range(len(commits))]
    if rest:
        _add_bytes(connection, first.number, rest)
        _add_rows(connection, rest, done[1:], names[1:])
        run(connection, queries.MOVE_LANE, {"lane": first.number, "seq": done[-1].seq})
    return done


def _add_bytes(connection: DeadlineConnection, lane: int, commits: Sequence[Commit]) -> None:
    blobs = {name: data for commit in commits for name, data in commit.blobs.items()}
    if blobs:
        sizes = [len(data) for data in blobs.values()]
        one(connection, queries.PUT_BLOBS, (list(blobs), sizes, [pack_body(data) for data in blobs.values()]))
    _copy(connection, queries.COPY_CHUNKS, ("int8", "int4", "bytea"), _merged(commits))
    sources = dict.fromkeys(source for commit in commits for source in commit.sources)
    owned = {stream for commit in commits for stream in commit.owned}
    streams = [source for source in sources if isinstance(source, int)]
    run(connection, queries.ADD_STREAM_REFS, (lane, streams, [stream in owned for stream in streams]))
    run(connection, queries.ADD_BLOB_REFS, (lane, [source for source in sources if isinstance(source, bytes)]))


def _add_rows(
    connection: DeadlineConnection, commits: Sequence[Commit], done: Sequence[Committed], names: Sequence[bytes]
) -> None:
    wanted = list({commit.base for commit in commits if commit.base is not None})
    bases = dict(every(connection, queries.BLOB_IDS, (wanted,)))
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
    return named - {(unpack_id(name), digest) for name, _, digest in every(connection, queries.IDENTITIES, (wanted,))}


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
