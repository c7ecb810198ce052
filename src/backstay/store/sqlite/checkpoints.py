"""Adding checkpoints: check that the writer is up to date, then add the row and its new bytes.

The usual save takes three statements: add the row, move the branch if the writer has seen its newest row, and add the
bytes. Anything unusual (a new branch, a fork, a stale writer, an id that exists) shows in the first two, which change
nothing then, and takes the long way: read everything, decide, write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from sqlite3 import IntegrityError

from backstay.errors import Corrupted
from backstay.store.base import (
    BranchKey,
    Commit,
    Committed,
    WriteRow,
    branch_moved,
    check_batch,
    commit_one_by_one,
    id_is_taken,
    required_is_gone,
    tags_after,
)
from backstay.store.layout import SEQ_BITS, SEQ_MAX
from backstay.store.leases import NO_LEASE, ClockReading
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import add_blob, add_chunk
from backstay.store.sqlite.collect import delete_rows, keep_parents
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.find import tags
from backstay.store.sqlite.rows import (
    CHECK_HINT,
    BranchRow,
    StoredId,
    add_branch,
    count_up,
    fetch_one,
    fetch_value,
    find_branch,
    find_checkpoint,
    pack_id,
    pack_tags,
    put_branch,
    put_writes,
    seal,
    seal_place,
)
from backstay.store.sqlite.transactions import SqliteTransactions, writing


class SqliteCheckpoints(SqliteTransactions):
    """The verbs that add checkpoints, pending writes and tags."""

    @writing
    def reserve(self, connection: Connection, count: int) -> int:
        return count_up(connection, "stream", count) - count

    def commit(self, commit: Commit) -> Committed:
        if commit.replaces_head:
            self._check_references()
        return self._write(lambda connection: add_checkpoint(connection, commit, self._clock()), commit.id)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        if not commits:
            return []
        return self._write(lambda connection: add_checkpoints(connection, commits, self._clock()), commits[0].id)

    def write(self, branch: BranchKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        self._write(lambda connection: put_writes(connection, branch, checkpoint, writes, replace), checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        def job(connection: Connection) -> tuple[str, ...]:
            name = pack_id(namespace, checkpoint)
            key, _ = find_checkpoint(connection, namespace, checkpoint)
            before = tags(connection, key)
            after = tags_after(before, add, remove)
            if after != before:
                connection.execute(queries.SET_TAGS, (pack_tags(after, name), key))
            return after

        return self._write(job, checkpoint)


def add_checkpoint(connection: Connection, commit: Commit, now: ClockReading) -> Committed:
    """Add a checkpoint at the end of its branch; see ``Backend.commit``."""
    name = pack_id(commit.branch.namespace, commit.id)
    newest = connection.seqs.get(commit.number)
    is_plain = not commit.replaces_head and commit.requires is None and commit.parent_digest is None
    # A new base is stored before its row, so only after it is known that the id does not exist.
    if newest is not None and is_plain and (commit.base is None or commit.base not in commit.blobs):
        seq = newest[0] + 1
        if _add_quickly(connection, commit, name, seq, now):
            newest[0] = seq
            return Committed(commit.number, seq, True)
    return _add_carefully(connection, commit, name, now)


def _add_quickly(connection: Connection, commit: Commit, name: StoredId, seq: int, now: ClockReading) -> bool:
    """Add a row and move the branch to it; return False, with nothing changed, unless all is as the writer thinks."""
    number, last_seq, head, epoch = commit.number, commit.last_seq, commit.head_seq, commit.epoch
    try:
        _add_row(connection, commit, number << SEQ_BITS | seq, name, seq - head if head else 0)
    except IntegrityError:  # the id exists
        return False
    turned = seal_place(number, head, last_seq, epoch) ^ seal_place(number, seq, seq, epoch)
    to, seen = (seq, seq, turned, turned), (number, last_seq, head, epoch)
    claim = commit.claim
    if claim is None:
        moved = connection.execute(queries.MOVE_BRANCH, (*to, *seen, now.boot, now.us))
    else:
        expires = now.us + claim.ttl_us
        lease = (now.boot, expires, seal(number, epoch, claim.owner, claim.token, expires, now.boot))
        moved = connection.execute(queries.MOVE_BRANCH_UNDER_LEASE, (*to, *lease, *seen, claim.token))
    if moved.rowcount != 1:
        connection.execute(queries.DROP_CHECKPOINT, (number << SEQ_BITS | seq,))
        return False
    _add_bytes(connection, commit, number)
    return True


def _add_carefully(connection: Connection, commit: Commit, name: StoredId, now: ClockReading) -> Committed:
    key = commit.branch
    branch = find_branch(connection, key)
    number, head = (branch.number, branch.head) if branch else (0, 0)
    existing = connection.execute(queries.IDENTITY, (name,)).fetchone()
    is_head = existing is not None and existing[0] == number << SEQ_BITS | head
    if existing is not None and not (is_head and commit.replaces(existing[1], head)):
        if existing[1] != commit.digest or existing[0] >> SEQ_BITS != number:
            raise id_is_taken(commit)
        return Committed(number, existing[0] & SEQ_MAX, False)
    _check_writer(connection, commit, branch, now)
    branch = branch or add_branch(connection, key)
    if not branch.last_seq and commit.forked_from is not None:
        branch = branch._replace(origin=pack_id(key.namespace, commit.forked_from))
    if existing is not None:
        # Free the id for the new row; the old row is deleted at the end.
        keep_parents(connection, {name: existing[1]}, ())
        connection.execute(queries.RENAME_CHECKPOINT, (existing[0], existing[0]))
    newest = connection.seqs.get(branch.number) or _newest_of(connection, branch)
    seq = newest[0] + 1
    new = branch.number << SEQ_BITS | seq
    _add_bytes(connection, commit, branch.number)
    _add_row(connection, commit, new, name, seq - branch.head if branch.head else 0)
    if commit.claim is not None:
        branch = branch._replace(lease=branch.lease.extended(commit.claim, now))
    put_branch(connection, branch._replace(head=seq, last_seq=seq))
    if commit.parent_digest is not None and (commit.replaces_head or not _follows(connection, commit, branch)):
        # The row keeps the digest of a parent that does not exist, or where a delete of the parent does not look.
        connection.execute(queries.KEEP_PARENT_DIGEST, (commit.parent_digest, new))
    if existing is not None:
        delete_rows(connection, [existing[0]])
    newest[0] = seq
    connection.seqs[branch.number] = newest
    return Committed(branch.number, seq, True)


def _follows(connection: Connection, commit: Commit, branch: BranchRow) -> bool:
    """Return whether the parent, with its digest, is the branch's head, or the origin of a new branch."""
    if commit.parent_id is None:
        return False
    found = fetch_one(connection, queries.IDENTITY, (pack_id(commit.branch.namespace, commit.parent_id),))
    if found is None or found[1] != commit.parent_digest:
        return False
    is_fork = not branch.last_seq and commit.forked_from == commit.parent_id
    return is_fork or found[0] == branch.number << SEQ_BITS | branch.head


def _newest_of(connection: Connection, branch: BranchRow) -> list[int]:
    """Return the highest sequence number that the branch's thread has used, in a list that its branches share."""
    for (other,) in connection.execute(queries.BRANCH_IDS, (branch.thread,)):
        if other in connection.seqs:
            return connection.seqs[other]
    return [max(branch.floor, fetch_value(connection, queries.HIGHEST_SEQ, (branch.thread,)) or 0)]


def _check_writer(connection: Connection, commit: Commit, branch: BranchRow | None, now: ClockReading) -> None:
    """Raise Fenced, Conflict or NotFound if the writer has not seen all that is stored, or may not write."""
    lease = NO_LEASE if branch is None else branch.lease
    lease.check_writer(commit.branch, commit.epoch, None if commit.claim is None else commit.claim.token, now)
    stored = (0, 0, 0) if branch is None else (branch.number, branch.last_seq, branch.head)
    if stored != (commit.number, commit.last_seq, commit.head_seq):
        raise branch_moved(commit)
    if commit.requires is None:
        return
    source = fetch_one(connection, queries.IDENTITY, (pack_id(commit.branch.namespace, str(commit.requires)),))
    if source is None or not commit.may_take(source[1]):
        raise required_is_gone(commit)


def _add_row(connection: Connection, commit: Commit, key: int, name: StoredId, back: int) -> None:
    row = (
        key,
        name,
        None if commit.parent_id is None else pack_id(commit.branch.namespace, commit.parent_id),
        back,
        commit.step,
        commit.created_us,
        commit.digest,
        commit.size,
        commit.notes,
        pack_tags(commit.tags, name) if commit.tags else None,
        commit.manifest,
    )
    if commit.base is None:
        connection.execute(queries.ADD_CHECKPOINT, row)
    else:
        if commit.base in commit.blobs:
            add_blob(connection, commit.base, commit.blobs[commit.base])
        added = connection.execute(queries.ADD_CHECKPOINT_WITH_BASE, (*row, commit.base))
        if added.rowcount != 1:
            what = "the base of the branch's manifests is missing, so nothing can be added to it"
            raise Corrupted(what, thread=commit.branch.thread, checkpoint=commit.parent_id, hint=CHECK_HINT)


def _add_bytes(connection: Connection, commit: Commit, branch: int) -> None:
    for blob, data in commit.blobs.items():
        add_blob(connection, blob, data)
    for stream, offset, data in commit.chunks:
        add_chunk(connection, stream, offset, data)
    for source in commit.sources:
        connection.execute(queries.ADD_REF, (branch, source, source in commit.owned))


def add_checkpoints(connection: Connection, commits: Sequence[Commit], now: ClockReading) -> list[Committed]:
    """Add many checkpoints at the end of one branch; see ``Backend.commit_all``."""
    key = commits[0].branch
    stored = {}
    for commit in commits:
        found = fetch_one(connection, queries.IDENTITY, (pack_id(key.namespace, commit.id),))
        if found is not None:
            stored[commit.id] = (found[0] >> SEQ_BITS, found[0] & SEQ_MAX, found[1])
    branch = find_branch(connection, key)
    number = branch.number if branch else 0
    return commit_one_by_one(commits, stored, number, lambda commit: add_checkpoint(connection, commit, now))
