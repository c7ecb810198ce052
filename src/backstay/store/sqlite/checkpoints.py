"""Adding checkpoints: check that the writer is up to date, then add the row and its new bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import apsw

from backstay.errors import Conflict, NotFound
from backstay.store.base import (
    Commit,
    Committed,
    LaneKey,
    WriteRow,
    check_batch,
    id_is_taken,
    one_by_one,
    required_is_gone,
)
from backstay.store.boot import Moment
from backstay.store.layout import SEQ_BITS, SEQ_MAX, key_of
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import add_blob, add_chunk
from backstay.store.sqlite.collect import delete_rows, set_aside
from backstay.store.sqlite.find import tags
from backstay.store.sqlite.lane import NO_LANE, StoredLane, add_lane, find_lane
from backstay.store.sqlite.pending import put_writes
from backstay.store.sqlite.rows import StoredId, one, pack_id, scalar
from backstay.store.sqlite.transactions import Transactions, writing


class Checkpoints(Transactions):
    """The verbs that add checkpoints, and what is kept beside them."""

    @writing
    def reserve(self, connection: apsw.Connection, count: int) -> int:
        return int(scalar(connection, queries.RESERVE, (count,))) - count

    def commit(self, commit: Commit) -> Committed:
        return self._write(lambda connection: add_checkpoint(connection, commit, self._clock()), commit.id)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        if not commits:
            return []
        return self._write(lambda connection: add_checkpoints(connection, commits, self._clock()), commits[0].id)

    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        self._write(lambda connection: put_writes(connection, lane, checkpoint, writes, replace), checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        def job(connection: apsw.Connection) -> tuple[str, ...]:
            found = one(connection, queries.IDENTITY, (pack_id(namespace, checkpoint),))
            if found is None:
                raise NotFound(checkpoint, checkpoint=checkpoint)
            connection.executemany(queries.ADD_TAG, [(found[0], name) for name in add])
            connection.executemany(queries.DROP_TAG, [(found[0], name) for name in remove])
            return tags(connection, found[0])

        return self._write(job, checkpoint)


def add_checkpoint(connection: apsw.Connection, commit: Commit, now: Moment) -> Committed:
    """Add a checkpoint at the end of its lane; see ``Backend.commit``."""
    key = commit.lane
    name = pack_id(key.namespace, commit.id)
    lane = find_lane(connection, key) or NO_LANE
    existing = connection.execute(queries.IDENTITY, (name,)).fetchone()
    if existing is not None and not (commit.replaces_head and existing[0] == key_of(lane.number, lane.head)):
        return _first_result(commit, lane.number, *existing)
    lane.tenure.check_writer(key, commit.epoch, None if commit.claim is None else commit.claim.token, now)
    if (lane.number, lane.last_seq, lane.head) != (commit.number, commit.last_seq, commit.head_seq):
        raise Conflict("the branch has moved on", thread=key.thread, checkpoint=commit.id)
    if commit.requires is not None:
        _require(connection, commit)
    if not lane.last_seq:
        lane = _begin(connection, commit, lane)
    if existing is not None:
        set_aside(connection, existing[0], name, existing[1])
    seq, new = lane.next_seq, key_of(lane.number, lane.next_seq)
    _insert(connection, commit, lane.number, new, name)
    connection.execute(queries.NUMBER_THREAD, (seq + 1, lane.thread))
    if commit.claim is None:
        connection.execute(queries.MOVE_LANE, (seq, seq, lane.number))
    else:
        *_, expires, boot = lane.tenure.extended(commit.claim, now)
        connection.execute(queries.MOVE_LANE_UNDER_LEASE, (seq, seq, expires, boot, lane.number))
    if existing is not None:
        if commit.parent_digest is not None:
            connection.execute(queries.KEEP_PARENT_DIGEST, (commit.parent_digest, new))
        delete_rows(connection, [existing[0]])
    return Committed(lane.number, seq, True)


def _begin(connection: apsw.Connection, commit: Commit, lane: StoredLane) -> StoredLane:
    """Make the lane if there is none; note where it was forked from."""
    origin = None if commit.forked_from is None else pack_id(commit.lane.namespace, commit.forked_from)
    if not lane.number:
        return add_lane(connection, commit.lane, origin)
    connection.execute(queries.SET_ORIGIN, (origin, lane.number))
    return lane


def _insert(connection: apsw.Connection, commit: Commit, lane: int, key: int, name: StoredId) -> None:
    """Add the bytes that are new, then the row that needs them."""
    for blob, data in commit.blobs.items():
        add_blob(connection, blob, data)
    for stream, offset, data in commit.chunks:
        add_chunk(connection, stream, offset, data)
    for source in commit.sources:
        connection.execute(queries.ADD_REF, (lane, source, source in commit.owned))
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
    if commit.keeps_parent_digest and parent is not None:
        # The digest of a parent that is not there stays with the child, so that the child's own can be checked.
        found = one(connection, queries.IDENTITY, (parent,))
        if found is None or found[1] != commit.parent_digest:
            connection.execute(queries.KEEP_PARENT_DIGEST, (commit.parent_digest, key))


def add_checkpoints(connection: apsw.Connection, commits: Sequence[Commit], now: Moment) -> list[Committed]:
    """Add many checkpoints at the end of one lane; see ``Backend.commit_all``."""
    key = commits[0].lane
    stored = {}
    for commit in commits:
        found = one(connection, queries.IDENTITY, (pack_id(key.namespace, commit.id),))
        if found is not None:
            stored[commit.id] = (found[0] >> SEQ_BITS, found[0] & SEQ_MAX, found[1])
    lane = find_lane(connection, key) or NO_LANE
    return one_by_one(commits, stored, lane.number, lambda commit: add_checkpoint(connection, commit, now))


def _first_result(commit: Commit, lane: int, key: int, digest: bytes) -> Committed:
    if digest == commit.digest and key >> SEQ_BITS == lane:
        return Committed(lane, key & SEQ_MAX, False)
    raise id_is_taken(commit)


def _require(connection: apsw.Connection, commit: Commit) -> None:
    source = one(connection, queries.IDENTITY, (pack_id(commit.lane.namespace, str(commit.requires)),))
    if source is None or commit.parent_digest not in (None, source[1]):
        raise required_is_gone(commit)
