"""The SQLite store: one file, many threads and processes.

Writes go through the group commit of ``writer``; reads have connections of their own, so neither waits for the other.
A process that forks is safe: connections are closed before the fork and opened again, on both sides, when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import apsw

from backstay.errors import BackstayError, Corrupted, NotFound
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
from backstay.store.boot import Clock, boot_clock
from backstay.store.effects import EffectRow
from backstay.store.gate import Gate, forget, register
from backstay.store.interrupts import InterruptRow
from backstay.store.layout import ODD_VALUE_ERRORS, key_of, odd_value
from backstay.store.leases import Claim, Held, LeaseRow
from backstay.store.sessions import SessionRow
from backstay.store.sqlite import effect as effect_rows
from backstay.store.sqlite import interrupt as interrupt_rows
from backstay.store.sqlite import lease as lease_rows
from backstay.store.sqlite import mend as mending
from backstay.store.sqlite import queries
from backstay.store.sqlite import session as session_rows
from backstay.store.sqlite.check import check_database
from backstay.store.sqlite.chunks import read_ranges, stream_end
from backstay.store.sqlite.collect import delete_rows, delete_thread
from backstay.store.sqlite.commit import add_checkpoint, add_checkpoints
from backstay.store.sqlite.compact import compact_database, give_pages_back
from backstay.store.sqlite.database import Database, resolve_path, translated
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.find import heads_of_threads, id_of, is_head, rows_by_id, rows_of_lanes, tags
from backstay.store.sqlite.lane import find_lane
from backstay.store.sqlite.log import log_findings
from backstay.store.sqlite.pages import adopt_pages, damaged_pages
from backstay.store.sqlite.pending import put_writes, with_writes
from backstay.store.sqlite.rows import StoredId, pack_id, read_lane, read_row, unpack_id
from backstay.store.sqlite.select import every, one, scalar
from backstay.store.sqlite.writer import Writer

TIMEOUT_S = 30.0
"""How long a call waits for other processes before it raises StoreBusy."""

T = TypeVar("T")


class SqliteStore:
    """Keeps checkpoints in one SQLite file."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, clock: Clock = boot_clock) -> None:
        self.url = url
        self._clock = clock
        self.gate = Gate()
        self._database = Database(resolve_path(url), timeout_s)
        self._writer = Writer(self._database)
        self._readers: list[Connection] = []
        register(self)

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
        def is_spared(connection: apsw.Connection, key: int, name: StoredId) -> bool:
            return (
                (protect and (is_head(connection, key) or interrupt_rows.is_awaited(connection, key, name)))
                or (tagged and bool(tags(connection, key)))
                or (forked and one(connection, queries.LANES_FORKED_FROM, (name,)) is not None)
            )

        def job(connection: apsw.Connection) -> Removed:
            keys, now = [], self._clock()
            for name in [pack_id(namespace, each) for each in checkpoints]:
                key = scalar(connection, queries.IDENTITY, (name,))
                if key is not None and not is_spared(connection, key, name):
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

    # Sessions -----------------------------------------------------------------------------------------------------

    def begin(self, session: SessionRow, ttl_us: int) -> None:
        self._write(lambda connection: session_rows.begin(connection, session, ttl_us, self._clock()))

    def beat(self, namespace: str, session: str, seen_us: int, ttl_us: int) -> bool:
        name = pack_id(namespace, session)
        return self._write(lambda connection: session_rows.beat(connection, name, seen_us, ttl_us, self._clock()))

    def end(self, namespace: str, session: str, ended_us: int, reason: str) -> bool:
        name = pack_id(namespace, session)
        return self._write(lambda connection: session_rows.end(connection, name, ended_us, reason))

    def sessions(self, namespace: str, thread: str | None, active_only: bool) -> list[SessionRow]:
        return self._read(
            lambda connection: session_rows.sessions(connection, namespace, thread, active_only, self._clock())
        )

    # Interrupts ---------------------------------------------------------------------------------------------------

    def interrupt(self, row: InterruptRow) -> InterruptRow:
        return self._write(lambda connection: interrupt_rows.record(connection, row), row.checkpoint)

    def decide(
        self, namespace: str, interrupt: str, digest: bytes, decision: bytes, by: str, decided_us: int
    ) -> InterruptRow:
        given = (namespace, interrupt, digest, decision, by, decided_us)
        return self._write(lambda connection: interrupt_rows.decide(connection, *given))

    def consume(self, namespace: str, interrupt: str, by: str, epoch: int, consumed_us: int) -> InterruptRow:
        given = (namespace, interrupt, by, epoch, consumed_us)
        return self._write(lambda connection: interrupt_rows.consume(connection, *given))

    def interrupts(
        self, namespace: str, thread: str | None, pending_only: bool, after: int, limit: int
    ) -> list[InterruptRow]:
        return self._read(
            lambda connection: interrupt_rows.interrupts(connection, namespace, thread, pending_only, after, limit)
        )

    def find_interrupt(self, namespace: str, interrupt: str) -> InterruptRow | None:
        return self._read(lambda connection: interrupt_rows.find_interrupt(connection, namespace, interrupt))

    # Effects ------------------------------------------------------------------------------------------------------

    def begin_effect(
        self, row: EffectRow, epoch: int | None, token: str | None, retry_of: int | None = None
    ) -> EffectRow:
        return self._write(lambda connection: effect_rows.begin(connection, row, epoch, token, retry_of, self._clock()))

    def end_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int
    ) -> EffectRow:
        given = (lane, key, attempt, owner, status, body, ended_us)
        return self._write(lambda connection: effect_rows.end(connection, *given))

    def settle_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int, by: str
    ) -> EffectRow:
        given = (lane, key, attempt, owner, status, body, ended_us, by)
        return self._write(lambda connection: effect_rows.end(connection, *given))

    def find_effect(self, lane: LaneKey, key: str) -> EffectRow | None:
        return self._read(lambda connection: effect_rows.find_effect(connection, lane, key))

    def effects(self, namespace: str, thread: str | None, after: int, limit: int) -> list[EffectRow]:
        return self._read(lambda connection: effect_rows.effects(connection, namespace, thread, after, limit))

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

    def close(self) -> None:
        if self.gate.close():
            forget(self)
            self.disconnect()

    # Inside -------------------------------------------------------------------------------------------------------

    def _read(self, look: Callable[[Connection], T]) -> T:
        """Return what a look shows, which has a connection of its own and one snapshot for all its statements."""
        with self.gate.mine():
            self.gate.check()
            with translated(self._database.path):
                try:
                    connection = self._readers.pop()
                except IndexError:
                    connection = self._database.connect()
                try:
                    self._database.check_in_place(connection)
                    connection.execute("BEGIN")
                    shown = look(connection)
                    if connection.in_transaction:  # a check that met a damaged page has lost its transaction
                        connection.execute("COMMIT")
                except BaseException:
                    connection.close()  # whatever went wrong, this connection's state is not to be relied on
                    raise
                self._readers.append(connection)
                return shown

    def _write(self, job: Callable[[apsw.Connection], T], name: str | None = None) -> T:
        def guarded(connection: apsw.Connection) -> T:
            try:
                return job(connection)
            except BackstayError:
                raise
            except ODD_VALUE_ERRORS as error:
                raise odd_value(error, self._database.path) from error

        with self.gate.mine():
            self.gate.check()
            return self._writer.submit(guarded, name)

    def _alone(self, work: Callable[[apsw.Connection], T]) -> T:
        """Do work that is no transaction; nobody else writes meanwhile, in whichever process."""
        with self.gate.mine():
            self.gate.check()
            return self._writer.alone(work)

    def _shrink(self, removed: Removed) -> None:
        if removed.bytes or removed.checkpoints:
            self._alone(give_pages_back)

    def disconnect(self) -> None:
        self._writer.close()
        while self._readers:
            self._readers.pop().close()
