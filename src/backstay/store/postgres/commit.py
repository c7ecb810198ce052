"""One commit: one statement, a call of a function of the schema that checks and writes everything."""

from __future__ import annotations

from typing import Any

import psycopg

from backstay.errors import Conflict
from backstay.store.base import Commit, Committed, id_is_taken, required_is_gone
from backstay.store.layout import COMPRESS_AT_ONCE_BYTES, address_of, key_of, pack_body
from backstay.store.leases import fenced
from backstay.store.postgres import queries
from backstay.store.postgres.collect import delete_rows, keep_parents, lock_threads
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.merge import additions, leaves_window
from backstay.store.postgres.rows import pack_id
from backstay.store.postgres.select import every, one, run, scalar

STORED, SAME, TAKEN, MOVED, FENCED = range(5)
"""What ``commit_checkpoint`` answers."""

NOT_AS_THOUGHT, REQUIRED_IS_GONE, ID_EXISTS = "ZB001", "ZB005", "23505"
"""What the functions raise."""


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


def append_checkpoint(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Add a plain checkpoint in the quick way; if anything is unusual, in the thorough one, which says what it is."""
    stream, offset, data = commit.chunks[0] if commit.chunks else (0, 0, b"")
    bound = (*_head_arguments(commit), address_of(stream, offset) if commit.chunks else None, data)
    try:
        return Committed(commit.number, int(scalar(connection, queries.APPEND, bound)), True)
    except psycopg.Error as error:
        if error.sqlstate not in (NOT_AS_THOUGHT, ID_EXISTS):
            raise
    return add_checkpoint(connection, commit)


def add_checkpoint(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Add a checkpoint at the end of its lane; see ``Backend.commit``."""

    def read(start: int, end: int) -> list[tuple[int, bytes]]:
        return [
            (address, body) for address, body in every(connection, queries.FRESH_ROWS, {"start": start, "end": end})
        ]

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
        answer = one(connection, queries.COMMIT, bound)
    except psycopg.Error as error:
        if error.sqlstate != REQUIRED_IS_GONE:
            raise
        raise required_is_gone(commit) from None
    assert answer is not None
    return _judged(commit, *answer)


def replace_head(connection: DeadlineConnection, commit: Commit) -> Committed:
    """Store the newest checkpoint anew under its id, inside a transaction."""
    key = commit.lane
    lock_threads(connection, [thread for (thread,) in every(connection, queries.THREAD, key[:2])])
    name = pack_id(key.namespace, commit.id)
    found = one(connection, queries.IDENTITY, (name,))
    committed = add_checkpoint(connection, commit)
    if found is not None and committed.fresh:
        replaced, digest = found
        keep_parents(connection, {name: digest}, [committed.number], but_not=key_of(committed.number, committed.seq))
        if commit.parent_digest is not None:
            place = key_of(committed.number, committed.seq)
            run(connection, queries.KEEP_PARENT_DIGEST, (commit.parent_digest, place))
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
