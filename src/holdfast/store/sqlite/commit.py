"""One commit: check that the writer is up to date, then add the checkpoint and its new bytes."""

from __future__ import annotations

import apsw

from holdfast.errors import Conflict, Fenced, IdTaken, NotFound
from holdfast.store.base import Commit, Committed, LaneKey
from holdfast.store.sqlite import queries
from holdfast.store.sqlite.chunks import add_blob, add_chunk
from holdfast.store.sqlite.collect import delete_rows, set_aside
from holdfast.store.sqlite.rows import SEQ_BITS, SEQ_MAX, StoredId, key_of, pack_id
from holdfast.store.sqlite.select import one, scalar


def add_checkpoint(connection: apsw.Connection, commit: Commit) -> Committed:
    """Add a checkpoint at the end of its lane; see ``Backend.commit``."""
    key = commit.lane
    name = pack_id(key.namespace, commit.id)
    found = one(connection, queries.LANE, key)
    number, thread, head, last_seq, epoch, seq = found or (0, 0, 0, 0, 0, 0)
    existing = one(connection, queries.IDENTITY, (name,))
    if existing is not None and not (commit.replaces_head and existing[0] == key_of(number, head)):
        return _first_result(commit, number, *existing)
    if epoch != commit.epoch:
        raise Fenced("a newer owner holds this branch", epoch=commit.epoch, current=epoch, thread=key.thread)
    if (number, last_seq, head) != (commit.number, commit.last_seq, commit.head_seq):
        raise Conflict("the branch has moved on", thread=key.thread, checkpoint=commit.id)
    _require(connection, commit)
    if not found:
        thread, number, seq = _add_lane(connection, commit)
    if existing is not None:
        set_aside(connection, existing[0], name, existing[1])
    _insert_bytes(connection, commit, number)
    _insert(connection, commit, key_of(number, seq), name)
    connection.execute(queries.NUMBER_THREAD, (seq + 1, thread))
    connection.execute(queries.MOVE_LANE, (seq, seq, number))
    if existing is not None:
        delete_rows(connection, [existing[0]])
    return Committed(number, seq, True)


def _add_lane(connection: apsw.Connection, commit: Commit) -> tuple[int, int, int]:
    """Make the lane, and the thread if need be; return thread, lane and the next sequence number."""
    key = commit.lane
    thread, seq = thread_of(connection, key)
    origin = None if commit.requires is None else pack_id(key.namespace, commit.requires)
    return thread, scalar(connection, queries.ADD_LANE, (thread, key.scope, key.branch, origin)), seq


def _insert(connection: apsw.Connection, commit: Commit, key: int, name: StoredId) -> None:
    parent = None if commit.parent_id is None else pack_id(commit.lane.namespace, commit.parent_id)
    connection.execute(
        queries.ADD_CHECKPOINT,
        (
            key,
            name,
            parent,
            commit.step,
            commit.created_us,
            commit.digest,
            commit.size,
            commit.notes,
            commit.base,
            commit.manifest,
        ),
    )
    for tag in commit.tags:
        connection.execute(queries.ADD_TAG, (key, tag))


def _insert_bytes(connection: apsw.Connection, commit: Commit, lane: int) -> None:
    for name, data in commit.blobs.items():
        add_blob(connection, name, data)
    for stream, offset, data in commit.chunks:
        add_chunk(connection, stream, offset, data)
    for source in commit.sources:
        connection.execute(queries.ADD_REF, (lane, source, source in commit.owned))


def _first_result(commit: Commit, lane: int, key: int, digest: bytes) -> Committed:
    if digest == commit.digest and key >> SEQ_BITS == lane:
        return Committed(lane, key & SEQ_MAX, False)
    raise IdTaken(
        f"checkpoint {commit.id} exists with other content",
        thread=commit.lane.thread,
        checkpoint=commit.id,
        hint="Give each checkpoint its own id, or none",
    )


def _require(connection: apsw.Connection, commit: Commit) -> None:
    if commit.requires is None:
        return
    name = pack_id(commit.lane.namespace, commit.requires)
    if one(connection, queries.IDENTITY, (name,)) is None:
        raise NotFound(commit.requires, checkpoint=commit.requires, hint="It was deleted in the meantime")


def thread_of(connection: apsw.Connection, lane: LaneKey) -> tuple[int, int]:
    """Return the thread's number and next sequence number; make the thread if there is none."""
    found = one(connection, queries.THREAD, lane[:2])
    if found is not None:
        return int(found[0]), int(found[1])
    return int(scalar(connection, queries.ADD_THREAD, lane[:2])), 1
