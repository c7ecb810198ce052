"""The SQLite store: one file, many threads and processes.

Writes go through the group commit of ``writer``; reads have connections of their own, so neither waits for the other.
A process that forks is safe: connections are closed before the fork and opened again, on both sides, when needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import apsw

from backstay.errors import Corrupted, NotFound
from backstay.pieces.manifest import Source
from backstay.pieces.piece import Range
from backstay.store.base import (
    Commit,
    Committed,
    Finding,
    Head,
    Lane,
    LaneKey,
    Query,
    Removed,
    Row,
    Sizes,
    WriteRow,
    check_batch,
    head_is_lost,
)
from backstay.store.layout import key_of
from backstay.store.leases import Claim, Held, LeaseRow
from backstay.store.sqlite import lease as lease_rows
from backstay.store.sqlite import mend as mending
from backstay.store.sqlite import queries
from backstay.store.sqlite.check import check_database
from backstay.store.sqlite.chunks import read_ranges, stream_end
from backstay.store.sqlite.collect import delete_rows, delete_thread
from backstay.store.sqlite.commit import add_checkpoint, add_checkpoints
from backstay.store.sqlite.compact import compact_database
from backstay.store.sqlite.find import heads_of_threads, id_of, is_head, rows_by_id, rows_of_lanes, tags
from backstay.store.sqlite.lane import find_lane
from backstay.store.sqlite.log import log_findings
from backstay.store.sqlite.pages import adopt_pages, damaged_pages
from backstay.store.sqlite.pending import put_writes, with_writes
from backstay.store.sqlite.records import Records, has_open_record
from backstay.store.sqlite.rows import StoredId, pack_id, read_lane, read_row, unpack_id
from backstay.store.sqlite.select import every, one, scalar


class SqliteStore(Records):
    """Keeps checkpoints in one SQLite file."""

    # Reading ------------------------------------------------------------------------------------------------------

    def head(self, lane: LaneKey) -> Head | None:
        def look(connection: apsw.Connection) -> Head | None:
            found = find_lane(connection, lane)
            if found is None:
                return None
            key = key_of(found.number, found.head)
            fields = one(connection, queries.ROW_BY_KEY_WITH_PAYLOAD, (key,))
            row = None
            if fields is not None:
                row = with_writes(connection, read_row(lane, found.thread, fields, True, tags(connection, key)))
            elif found.last_seq or found.head:
                raise head_is_lost(lane)
            streams = every(connection, queries.OWNED, (found.number,))
            owned = {stream: stream_end(connection, stream) for (stream,) in streams}
            return Head(row, found.number, found.last_seq, found.tenure.epoch, owned)

        return self._read(look)

    def find(self, query: Query) -> list[Row]:
        def look(connection: apsw.Connection) -> list[Row]:
            if query.ids is not None:
                rows = rows_by_id(connection, query)
            elif query.heads_of_threads:
                rows = heads_of_threads(connection, query)
            else:
                rows = rows_of_lanes(connection, query)
            return [with_writes(connection, row) for row in rows] if query.writes else rows

        return self._read(look)

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []  # a page that cannot be read is an error of the call that needs it

    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        wanted = {"namespace": namespace, "thread": thread, "scope": scope}
        return self._read(
            lambda connection: [
                Lane(
                    read_lane(key),
                    id_of(connection, key_of(number, head)),
                    head,
                    last_seq,
                    epoch,
                    None if origin is None else unpack_id(origin),
                )
                for number, _, *key, head, last_seq, epoch, origin in every(connection, queries.LANES, wanted)
            ]
        )

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        return self._read(lambda connection: read_ranges(connection, ranges))

    def sizes(self) -> Sizes:
        def look(connection: apsw.Connection) -> Sizes:
            sources: dict[Source, int] = dict(every(connection, queries.BLOB_SIZES))
            sources.update(every(connection, queries.STREAM_SIZES))
            pages = connection.pragma("page_count")
            return Sizes(pages * connection.pragma("page_size"), sources, scalar(connection, queries.ROW_BYTES))

        return self._read(look)

    # Writing ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> int:
        def job(connection: apsw.Connection) -> int:
            return int(scalar(connection, queries.RESERVE, (count,))) - count

        return self._write(job)

    def commit(self, commit: Commit) -> Committed:
        return self._write(lambda connection: add_checkpoint(connection, commit, self._clock()), commit.id)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        if not commits:
            return []
        return self._write(lambda connection: add_checkpoints(connection, commits, self._clock()), commits[0].id)

    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        given = (lane, checkpoint, writes, replace)
        self._write(lambda connection: put_writes(connection, *given), checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        def job(connection: apsw.Connection) -> tuple[str, ...]:
            found = one(connection, queries.IDENTITY, (pack_id(namespace, checkpoint),))
            if found is None:
                raise NotFound(checkpoint, checkpoint=checkpoint)
            connection.executemany(queries.ADD_TAG, [(found[0], name) for name in add])
            connection.executemany(queries.DROP_TAG, [(found[0], name) for name in remove])
            return tags(connection, found[0])

        return self._write(job, checkpoint)

    # Deleting -----------------------------------------------------------------------------------------------------

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
        def is_protected(connection: apsw.Connection, key: int, name: StoredId) -> bool:
            return (
                (protect and (is_head(connection, key) or has_open_record(connection, key, name)))
                or (tagged and bool(tags(connection, key)))
                or (forked and one(connection, queries.LANES_FORKED_FROM, (name,)) is not None)
            )

        def job(connection: apsw.Connection) -> Removed:
            keys, now = [], self._clock()
            for name in [pack_id(namespace, each) for each in checkpoints]:
                key = scalar(connection, queries.IDENTITY, (name,))
                if key is not None and not is_protected(connection, key, name):
                    lease_rows.check_head(connection, key, token, now)
                    keys.append(key)
            return delete_rows(connection, keys)

        removed = self._write(job)
        self._shrink(removed)
        return removed

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        def job(connection: apsw.Connection) -> Removed:
            lease_rows.check_thread(connection, namespace, thread, token, self._clock())
            found = one(connection, queries.THREAD, (namespace, thread))
            return Removed() if found is None else delete_thread(connection, found[0])

        removed = self._write(job)
        self._shrink(removed)
        return removed

    # Leases -------------------------------------------------------------------------------------------------------

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        return self._write(lambda connection: lease_rows.acquire(connection, lane, claim, self._clock()))

    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        self._write(lambda connection: lease_rows.renew(connection, lane, epoch, claim, self._clock()))

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        self._write(lambda connection: lease_rows.release(connection, lane, epoch, token, self._clock()))

    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseRow]:
        return self._read(
            lambda connection: lease_rows.leases(connection, namespace, thread, expired_only, self._clock())
        )

    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        return self._write(
            lambda connection: lease_rows.claim_expired(connection, namespace, count, claim, self._clock())
        )

    # Upkeep -------------------------------------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        path = self._database.path
        return self._read(lambda connection: [*check_database(connection), *log_findings(connection, path)])

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        """Put pages right first, if any are damaged: only then can the rest be read, by the next rebuild."""
        pages = self._read(lambda connection: [finding for finding in damaged_pages(connection) if finding.repair])
        if pages and not dry_run:
            self._alone(lambda connection: adopt_pages(connection, [str(finding.key) for finding in pages]))
        if pages:
            return pages
        if dry_run:
            return self._read(lambda connection: mending.plan_rebuild(connection, drop).findings)
        return self._write(lambda connection: mending.rebuild(connection, drop))

    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        self._write(lambda connection: mending.restore(connection, blobs, chunks, rows))

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        given = (namespace, checkpoint, force)
        self._write(lambda connection: mending.quarantine(connection, *given, self._clock()), checkpoint)

    def compact(self) -> int:
        return self._alone(compact_database)
