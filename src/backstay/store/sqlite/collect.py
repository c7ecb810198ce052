"""Deleting: rows first, then every byte that no remaining manifest needs, in one transaction. And compacting.

Rules: only what the deleted rows needed, and the rows near them do not, can be unneeded now (see ``losses``). If there
is any, the references of the branches that may need it are computed again from their remaining manifests. A source
without a reference is deleted. Of a stream with references, the rows outside all ranges that a referring branch needs
are deleted. Children of a deleted checkpoint keep its digest, so their own digests can still be checked.

A thread with many checkpoints is deleted in several transactions, its newest branches first. Between them it is a
smaller thread, and whole.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from backstay.errors import Corrupted, DecodeError
from backstay.pieces.manifest import STREAM_BYTES_MAX, Source, merge_ranges, subtract_ranges
from backstay.store.base import Removed
from backstay.store.layout import SEQ_BITS, SEQ_MAX, address_of, span_of
from backstay.store.reachability import Losses, collect, losses
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import WINDOWS_BYTES, merge_window, read_blob
from backstay.store.sqlite.database import create_private
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.find import is_head, tags
from backstay.store.sqlite.leases import check_head, check_thread
from backstay.store.sqlite.records import has_open_record
from backstay.store.sqlite.rows import (
    BranchRow,
    StoredId,
    branch_of,
    drop_writes,
    fetch_all,
    fetch_one,
    fetch_value,
    find_thread,
    pack_id,
    put_branch,
    put_floor,
    span_of_kind,
)
from backstay.store.sqlite.transactions import SqliteTransactions

BACKUP_PAGES = 4096
"""How many pages a backup copies before it lets go of Python's lock."""

DELETE_ROWS = 250
"""How many checkpoints of a thread are deleted in one transaction, so that other writers wait only for a moment."""

PAUSE_S = 0.001
"""How long a delete waits between two transactions. The first that asks gets a lock that was released, and that would
be the delete again, because another process that waits for it must wake up first."""

LOST_MAX = 1000
"""Of how many streams a writer remembers lost ranges."""

Dropped = tuple[StoredId, bytes, bytes | None, bytes]  # id, digest, base, manifest


class SqliteDeletes(SqliteTransactions):
    """The verbs that delete checkpoints and free space."""

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
        def is_protected(connection: Connection, key: int, name: StoredId) -> bool:
            return (
                (protect and (is_head(connection, key) or has_open_record(connection, key, name)))
                or (tagged and bool(tags(connection, key)))
                or (forked and fetch_one(connection, queries.BRANCHES_FORKED_FROM, (name,)) is not None)
            )

        def job(connection: Connection) -> Removed:
            keys, now = [], self._clock()
            for name in [pack_id(namespace, each) for each in checkpoints]:
                key = fetch_value(connection, queries.IDENTITY, (name,))
                if key is not None and not is_protected(connection, key, name):
                    check_head(connection, key, token, now)
                    keys.append(key)
            return delete_rows(connection, keys)

        self._check_references()
        return self._shrunk(self._write(job))

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        def job(connection: Connection) -> tuple[Removed, bool]:
            check_thread(connection, namespace, thread, token, self._clock())
            found = find_thread(connection, namespace, thread)
            return (Removed(), True) if found is None else delete_thread(connection, found[0])

        self._check_references()
        removed = Removed()
        while True:
            done, is_over = self._write(job)
            removed += self._shrunk(done)
            if is_over:
                return removed
            time.sleep(PAUSE_S)

    def backup(self, path: Path) -> None:
        create_private(str(path))

        def copy(connection: Connection) -> None:
            fetch_value(connection, queries.TABLES)  # the snapshot starts with the first read
            with contextlib.closing(sqlite3.connect(path)) as target:
                connection.backup(target, pages=BACKUP_PAGES)

        self._read(copy)

    def compact(self, full: bool = False) -> int:
        return self._alone(compact_database)

    def _shrunk(self, removed: Removed) -> Removed:
        """Release the pages that a delete emptied."""
        if removed.bytes or removed.checkpoints:
            while self._alone(_give_pages_back):
                pass
        return removed


def delete_rows(connection: Connection, keys: Iterable[int]) -> Removed:
    """Delete checkpoints by key, then everything that only they needed."""
    dropped: dict[int, Dropped] = {}
    branches: dict[int, BranchRow] = {}
    recorded: dict[int, set[StoredId]] = {}  # by thread, the checkpoints that have records
    connection.seqs.clear()
    for key in keys:
        row = fetch_one(connection, queries.TO_DROP, (key,))
        if row is None:
            continue
        connection.execute(queries.DROP_CHECKPOINT, (key,))
        dropped[key] = name, *_ = row
        branch = branches.get(key >> SEQ_BITS) or branch_of(connection, key)
        branches[branch.number] = branch
        if branch.thread not in recorded:
            found = fetch_all(connection, queries.CHECKPOINTS_WITH_RECORDS, (branch.thread,))
            recorded[branch.thread] = {checkpoint for (checkpoint,) in found}
        drop_writes(connection, queries.DROP_WRITES, (branch.thread, branch.key.scope, name))
        if name in recorded[branch.thread]:
            connection.execute(queries.DROP_RECORDS_OF_CHECKPOINT, (branch.thread, name))
    near = update_links(connection, dropped) | _across_forks(connection, dropped, branches)
    keep_parents(connection, {name: digest for name, digest, _, _ in dropped.values()}, dropped)
    lost = _losses(connection, dropped, near)
    emptied = 0
    for branch in branches.values():
        if not move_head(connection, branch):
            connection.execute(queries.DROP_RECORDS_OF_BRANCH, (*span_of_kind("effect"), branch.number))
            # Sources that the branch refers to, although none of its rows needed them, are lost too.
            referred = {source for (source,) in fetch_all(connection, queries.REFS, (branch.number,))}
            lost.sources.update(referred - lost.needed)
            lost.of_branch.pop(branch.number, None)
            drop_branch(connection, branch)
            emptied += 1
    return Removed(len(dropped), emptied, collect(SqliteBytes(connection), lost))


def move_head(connection: Connection, branch: BranchRow) -> bool:
    """Point a branch at its newest remaining row; return False if it has none."""
    newest = fetch_value(connection, queries.NEWEST_KEY, span_of(branch.number))
    if newest is not None and newest & SEQ_MAX != branch.head:
        put_branch(connection, branch._replace(head=newest & SEQ_MAX))
    return newest is not None


def drop_branch(connection: Connection, branch: BranchRow) -> None:
    """Delete a branch's row and references. Its thread never uses its sequence numbers again."""
    connection.execute(queries.DROP_REFS, (branch.number,))
    connection.execute(queries.DROP_BRANCH, (branch.number,))
    thread = find_thread(connection, branch.key.namespace, branch.key.thread)
    if thread is not None and thread[1] < branch.last_seq:
        put_floor(connection, thread[0], branch.key.namespace, branch.key.thread, branch.last_seq)


def update_links(connection: Connection, dropped: Iterable[int]) -> set[int]:
    """Update the link of each row that follows a deleted one; return its key and the key of the row before it."""
    links: dict[int, int | None] = {}
    ends: set[int | None] = set()
    for key in dropped:
        low, high = span_of(key >> SEQ_BITS)
        previous = fetch_value(connection, queries.PREVIOUS_KEY, (low, key))
        following = fetch_value(connection, queries.FOLLOWING_KEY, (key, high))
        ends.update((previous, following))
        if following is not None:
            links[following] = previous
    for key, before in links.items():
        connection.execute(queries.SET_BACK, (0 if before is None else key - before, key))
    return {key for key in ends if key is not None}


def _across_forks(
    connection: Connection, dropped: Mapping[int, Dropped], branches: Mapping[int, BranchRow]
) -> set[int]:
    """Return the keys of the first rows of forks of deleted checkpoints, and of the origins of their branches."""
    near = {first for name, *_ in dropped.values() for first in _first_of_forks(connection, name)}
    for branch in branches.values():
        if branch.origin is not None:
            near.add(fetch_value(connection, queries.KEY_BY_ID, (branch.origin,)))
    return near - {None}


def _first_of_forks(connection: Connection, name: StoredId) -> list[int]:
    """Return the keys of the oldest rows of the branches that were forked from a checkpoint."""
    forks = fetch_all(connection, queries.BRANCHES_FORKED_FROM, (name,))
    first = (fetch_value(connection, queries.FOLLOWING_KEY, span_of(branch)) for (branch,) in forks)
    return [key for key in first if key is not None]


def delete_thread(connection: Connection, thread: int) -> tuple[Removed, bool]:
    """Delete a thread with everything in it, or only its newest checkpoints if it has many; return whether it is gone.

    Newest branches first: a fork needs bytes of its origin, so nothing has to be looked up in the branches that stay.
    """
    keys: list[int] = []
    for (branch,) in fetch_all(connection, queries.NEWEST_BRANCHES, (thread,)):
        keys += [key for (key,) in fetch_all(connection, queries.KEYS_OF_BRANCH, (*span_of(branch), DELETE_ROWS))]
        if len(keys) >= DELETE_ROWS:
            return delete_rows(connection, keys), False
    removed = delete_rows(connection, keys)
    drop_writes(connection, queries.DROP_WRITES_OF_THREAD, (thread,))
    for statement in (
        queries.DROP_BRANCHES_OF_THREAD,  # branches that were only leased
        queries.DROP_RECORDS_OF_THREAD,
        queries.DROP_THREAD,
    ):
        connection.execute(statement, (thread,))
    return removed, True


def keep_parents(connection: Connection, digests: Mapping[StoredId, bytes], dropped: Iterable[int]) -> None:
    """Give the children of deleted checkpoints their parent's digest.

    A child is the next row of the branch, or the first of a fork; any other has the digest already.
    """
    for key in dropped:
        following = fetch_one(connection, queries.FOLLOWING_PARENT, (key, span_of(key >> SEQ_BITS)[1]))
        if following is not None and following[1] in digests:
            bound = (digests[following[1]], following[0], following[1])
            connection.execute(queries.KEEP_PARENT_DIGEST_IF, bound)
    for name, digest in digests.items():
        for first in _first_of_forks(connection, name):
            connection.execute(queries.KEEP_PARENT_DIGEST_IF, (digest, first, name))


def _losses(connection: Connection, dropped: Mapping[int, Dropped], near: Iterable[int]) -> Losses[int]:
    """Return what may be unneeded now: all that the branches refer to, if it is not known what the rows needed."""
    deleted = [(key >> SEQ_BITS, base, manifest) for key, (_, _, base, manifest) in dropped.items()]
    kept = []
    for key in near:
        row = fetch_one(connection, queries.TO_DROP, (key,))
        if row is not None:
            kept.append((key >> SEQ_BITS, row[2], row[3]))
    try:
        return losses(deleted, kept, lambda name: read_blob(connection, name))
    except (Corrupted, DecodeError):
        branches = {branch for branch, _, _ in deleted}
        every: dict[int, set[Source]] = {
            branch: {source for (source,) in fetch_all(connection, queries.REFS, (branch,))} for branch in branches
        }
        return Losses(set().union(*every.values()), every, set(), {}, False)


class SqliteBytes:
    """References and bytes, as ``reachability.collect`` needs them; branches are numbers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.lost = connection.lost
        if len(self.lost) > LOST_MAX:
            self.lost.clear()

    def read_blob(self, name: bytes) -> bytes:
        return read_blob(self._connection, name)

    def manifests(self, branch: int) -> Iterable[tuple[bytes | None, bytes]]:
        return self._connection.execute(queries.MANIFESTS_OF_BRANCH, span_of(branch))

    def is_scattered(self, branch: int, source: Source) -> bool:
        return bool(fetch_value(self._connection, queries.IS_SCATTERED, (branch, source)))

    def referring(self, source: Source) -> list[int]:
        return [branch for (branch,) in fetch_all(self._connection, queries.BRANCHES_REFERRING, (source,))]

    def unrefer(self, branch: int, sources: Collection[Source]) -> None:
        self._connection.executemany(queries.DROP_REF, [(branch, source) for source in sources])

    def chunks(self, stream: int, start: int, end: int) -> list[tuple[int, int]]:
        first = address_of(stream, 0)
        bound = {"stream": first, "start": first + start, "end": first + end}
        found = fetch_all(self._connection, queries.CHUNK_SIZES_OVER, bound)
        return [(at - first, at - first + size) for at, size in found if at - first + size > start]

    def drop_chunks(self, stream: int, chunks: Collection[tuple[int, int]]) -> int:
        first, freed = address_of(stream, 0), 0
        for start, _ in chunks:
            freed += fetch_value(self._connection, queries.CHUNK_SIZE, (first + start,)) or 0
            self._connection.execute(queries.DROP_CHUNK, (first + start,))
        if stream in self.lost:
            self.lost[stream] = subtract_ranges(self.lost[stream], merge_ranges(chunks))
        return freed

    def drop_blob(self, name: bytes) -> int:
        freed: int = fetch_value(self._connection, queries.BLOB_SIZE, (name,)) or 0
        self._connection.execute(queries.DROP_BLOB, (name,))
        return freed


def compact_database(connection: Connection) -> int:
    """Merge and compress all streams, release free pages and empty the log; return how many bytes the file shrank."""
    before = _file_bytes(connection)
    for stream, _ in fetch_all(connection, queries.STREAM_SIZES):
        connection.execute("BEGIN IMMEDIATE")
        try:
            first, length = address_of(stream, 0), WINDOWS_BYTES[-1]
            rows = fetch_all(connection, queries.CHUNK_SIZES, (first, first + STREAM_BYTES_MAX))
            for window in sorted({(address - first) // length for address, _, _ in rows}):
                merge_window(connection, first + window * length, length)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        else:
            connection.execute("COMMIT")
    while _give_pages_back(connection):
        pass
    fetch_all(connection, "PRAGMA wal_checkpoint(TRUNCATE)")
    return max(0, before - _file_bytes(connection))


def _give_pages_back(connection: Connection) -> bool:
    """Release some free pages; return whether there are more. This does not wait for readers.

    The file shrinks when the log is next folded in. A file that another program made may not release any.
    """
    before = int(connection.pragma("freelist_count"))
    if before:
        connection.executescript(queries.RELEASE_PAGES)  # execute() would stop after one page
    return 0 < int(connection.pragma("freelist_count")) < before


def _file_bytes(connection: Connection) -> int:
    return int(connection.pragma("page_count")) * int(connection.pragma("page_size"))
