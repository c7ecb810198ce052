"""Adding checkpoints: check that the writer is up to date, then add the row and its new bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import apsw

from backstay.store.base import (
    BranchKey,
    Commit,
    Committed,
    WriteRow,
    branch_moved,
    check_batch,
    commit_one_by_one,
    id_is_taken,
    no_checkpoint,
    required_is_gone,
)
from backstay.store.layout import SEQ_BITS, SEQ_MAX
from backstay.store.leases import ClockReading
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import add_blob, add_chunk
from backstay.store.sqlite.collect import delete_rows, keep_parents
from backstay.store.sqlite.find import tags
from backstay.store.sqlite.rows import (
    NO_BRANCH,
    StoredId,
    add_branch,
    fetch_one,
    fetch_value,
    find_branch,
    pack_id,
    put_writes,
)
from backstay.store.sqlite.transactions import SqliteTransactions, writing


class SqliteCheckpoints(SqliteTransactions):
    """The verbs that add checkpoints, pending writes and tags."""

    @writing
    def reserve(self, connection: apsw.Connection, count: int) -> int:
        return int(fetch_value(connection, queries.RESERVE, (count,))) - count

    def commit(self, commit: Commit) -> Committed:
        return self._write(lambda connection: add_checkpoint(connection, commit, self._clock()), commit.id)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        if not commits:
            return []
        return self._write(lambda connection: add_checkpoints(connection, commits, self._clock()), commits[0].id)

    def write(self, branch: BranchKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        self._write(lambda connection: put_writes(connection, branch, checkpoint, writes, replace), checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        def job(connection: apsw.Connection) -> tuple[str, ...]:
            found = fetch_one(connection, queries.IDENTITY, (pack_id(namespace, checkpoint),))
            if found is None:
                raise no_checkpoint(checkpoint)
            connection.executemany(queries.ADD_TAG, [(found[0], name) for name in add])
            connection.executemany(queries.DROP_TAG, [(found[0], name) for name in remove])
            return tags(connection, found[0])

        return self._write(job, checkpoint)


def add_checkpoint(connection: apsw.Connection, commit: Commit, now: ClockReading) -> Committed:
    """Add a checkpoint at the end of its branch; see ``Backend.commit``."""
    key = commit.branch
    name = pack_id(key.namespace, commit.id)
    branch = find_branch(connection, key) or NO_BRANCH
    existing = connection.execute(queries.IDENTITY, (name,)).fetchone()
    if existing is not None and not (commit.replaces_head and existing[0] == branch.number << SEQ_BITS | branch.head):
        if existing[1] != commit.digest or existing[0] >> SEQ_BITS != branch.number:
            raise id_is_taken(commit)
        return Committed(branch.number, existing[0] & SEQ_MAX, False)
    branch.lease.check_writer(key, commit.epoch, None if commit.claim is None else commit.claim.token, now)
    if (branch.number, branch.last_seq, branch.head) != (commit.number, commit.last_seq, commit.head_seq):
        raise branch_moved(commit)
    if commit.requires is not None:
        _check_required(connection, commit)
    if not branch.last_seq:
        branch = branch if branch.number else add_branch(connection, key)  # a leased branch exists already
        origin = None if commit.forked_from is None else pack_id(key.namespace, commit.forked_from)
        connection.execute(queries.SET_ORIGIN, (origin, branch.number))
    if existing is not None:
        # Free the id for the new row; the old row is deleted at the end.
        keep_parents(connection, {name: existing[1]}, [existing[0] >> SEQ_BITS])
        connection.execute(queries.RENAME_CHECKPOINT, (existing[0], existing[0]))
    seq = branch.next_seq
    new = branch.number << SEQ_BITS | seq
    _insert(connection, commit, branch.number, new, name)
    connection.execute(queries.NUMBER_THREAD, (seq + 1, branch.thread))
    if commit.claim is None:
        connection.execute(queries.MOVE_BRANCH, (seq, seq, branch.number))
    else:
        *_, expires, boot = branch.lease.extended(commit.claim, now)
        connection.execute(queries.MOVE_BRANCH_UNDER_LEASE, (seq, seq, expires, boot, branch.number))
    if existing is not None:
        if commit.parent_digest is not None:
            connection.execute(queries.KEEP_PARENT_DIGEST, (commit.parent_digest, new))
        delete_rows(connection, [existing[0]])
    return Committed(branch.number, seq, True)


def _check_required(connection: apsw.Connection, commit: Commit) -> None:
    source = fetch_one(connection, queries.IDENTITY, (pack_id(commit.branch.namespace, str(commit.requires)),))
    if source is None or commit.parent_digest not in (None, source[1]):
        raise required_is_gone(commit)


def _insert(connection: apsw.Connection, commit: Commit, branch: int, key: int, name: StoredId) -> None:
    """Add the new bytes, then the row that needs them."""
    for blob, data in commit.blobs.items():
        add_blob(connection, blob, data)
    for stream, offset, data in commit.chunks:
        add_chunk(connection, stream, offset, data)
    for source in commit.sources:
        connection.execute(queries.ADD_REF, (branch, source, source in commit.owned))
    parent = None if commit.parent_id is None else pack_id(commit.branch.namespace, commit.parent_id)
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
    if commit.parent_digest is not None and parent is not None and commit.keeps_parent_digest:
        # The child keeps the digest of a parent that does not exist, so that its own digest can be checked.
        found = fetch_one(connection, queries.IDENTITY, (parent,))
        if found is None or found[1] != commit.parent_digest:
            connection.execute(queries.KEEP_PARENT_DIGEST, (commit.parent_digest, key))


def add_checkpoints(connection: apsw.Connection, commits: Sequence[Commit], now: ClockReading) -> list[Committed]:
    """Add many checkpoints at the end of one branch; see ``Backend.commit_all``."""
    key = commits[0].branch
    stored = {}
    for commit in commits:
        found = fetch_one(connection, queries.IDENTITY, (pack_id(key.namespace, commit.id),))
        if found is not None:
            stored[commit.id] = (found[0] >> SEQ_BITS, found[0] & SEQ_MAX, found[1])
    branch = find_branch(connection, key) or NO_BRANCH
    return commit_one_by_one(commits, stored, branch.number, lambda commit: add_checkpoint(connection, commit, now))
