"""The PostgreSQL store: one schema, many threads, processes and machines.

A save is one statement. No session state is kept between statements, so a pooler in transaction mode may stand in
between. See ``link`` for deadlines and lost connections, ``schema.sql`` for what keeps writers and deletes apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

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
)
from backstay.store.effects import EffectRow
from backstay.store.interrupts import InterruptRow
from backstay.store.leases import Claim, Held, LeaseRow
from backstay.store.postgres import effect as effecting
from backstay.store.postgres import interrupt as interrupting
from backstay.store.postgres import lease as leasing
from backstay.store.postgres import mend as mending
from backstay.store.postgres import queries
from backstay.store.postgres import session as sessioning
from backstay.store.postgres.check import check_tables
from backstay.store.postgres.chunks import read_ranges
from backstay.store.postgres.collect import Spared, delete_checkpoints, delete_thread
from backstay.store.postgres.commit import add_checkpoint, append_checkpoint, is_plain, replace_head
from backstay.store.postgres.compact import compact_tables
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.database import prepare
from backstay.store.postgres.find import find_head, find_rows
from backstay.store.postgres.link import Link
from backstay.store.postgres.load import add_checkpoints
from backstay.store.postgres.pending import put_writes
from backstay.store.postgres.rows import pack_id, unpack_id
from backstay.store.postgres.select import every, one, scalar
from backstay.store.postgres.target import parse_url
from backstay.store.sessions import SessionRow


class PostgresStore:
    """Keeps checkpoints in one schema of a PostgreSQL database."""

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)
        self.url = self._target.shown
        self._link = Link(self._target)
        prepare(self._link, self._target)

    # Reading ------------------------------------------------------------------------------------------------------

    def head(self, lane: LaneKey) -> Head | None:
        return self._link.read(lambda connection: find_head(connection, lane))

    def find(self, query: Query) -> list[Row]:
        return self._link.read(lambda connection: find_rows(connection, query))

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []  # a page that cannot be read is an error of the call that needs it

    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        def work(connection: DeadlineConnection) -> list[Lane]:
            wanted = {"namespace": namespace, "thread": thread, "scope": scope}
            return [
                Lane(
                    LaneKey(*fields[2:6]),
                    None if head is None else unpack_id(head),
                    head_seq,
                    last_seq,
                    epoch,
                    None if origin is None else unpack_id(origin),
                )
                for *fields, head, head_seq, last_seq, epoch, origin in every(connection, queries.LANES, wanted)
            ]

        return self._link.read(work)

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        wanted = list(ranges)
        return self._link.read(lambda connection: read_ranges(connection, wanted))

    def sizes(self) -> Sizes:
        def work(connection: DeadlineConnection) -> Sizes:
            sources: dict[Source, int] = dict(every(connection, queries.BLOB_SIZES))
            sources.update(every(connection, queries.STREAM_SIZES))
            total = scalar(connection, queries.TABLE_BYTES, (self._target.schema,))
            return Sizes(total, sources, scalar(connection, queries.ROW_BYTES))

        return self._link.read(work)

    # Writing ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> int:
        return self._link.write(lambda connection: int(scalar(connection, queries.RESERVE, (count,))) - count)

    def commit(self, commit: Commit) -> Committed:
        if commit.replaces_head:
            return self._link.change(lambda connection: replace_head(connection, commit), commit.id)
        add = append_checkpoint if is_plain(commit) else add_checkpoint
        return self._link.write(lambda connection: add(connection, commit), commit.id)

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        check_batch(commits)
        if not commits:
            return []
        return self._link.change(lambda connection: add_checkpoints(connection, commits), commits[0].id, again=True)

    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        given = (lane, checkpoint, writes, replace)
        self._link.write(lambda connection: put_writes(connection, *given), checkpoint)

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        bound = {"id": pack_id(namespace, checkpoint), "add": list(add), "remove": list(remove)}
        found = self._link.write(lambda connection: one(connection, queries.TAG, bound), checkpoint)
        if found is None:
            raise NotFound(checkpoint, checkpoint=checkpoint)
        return tuple(sorted(found[0]))

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
        names = list(checkpoints)
        spared = Spared(protect, tagged, forked)
        return self._link.change(lambda connection: delete_checkpoints(connection, namespace, names, spared, token))

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        return self._link.change(lambda connection: delete_thread(connection, namespace, thread, token))

    # Leases -------------------------------------------------------------------------------------------------------

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        return self._link.write(lambda connection: leasing.acquire(connection, lane, claim))

    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        self._link.write(lambda connection: leasing.renew(connection, lane, epoch, claim))

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        self._link.change(lambda connection: leasing.release(connection, lane, epoch, token), again=True)

    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseRow]:
        return self._link.read(lambda connection: leasing.leases(connection, namespace, thread, expired_only))

    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        return self._link.write(lambda connection: leasing.claim_expired(connection, namespace, count, claim))

    # Sessions -----------------------------------------------------------------------------------------------------

    def begin(self, session: SessionRow, ttl_us: int) -> None:
        self._link.write(lambda connection: sessioning.begin(connection, session, ttl_us))

    def beat(self, namespace: str, session: str, seen_us: int, ttl_us: int) -> bool:
        return self._link.write(lambda connection: sessioning.beat(connection, namespace, session, seen_us, ttl_us))

    def end(self, namespace: str, session: str, ended_us: int, reason: str) -> bool:
        return self._link.write(lambda connection: sessioning.end(connection, namespace, session, ended_us, reason))

    def sessions(self, namespace: str, thread: str | None, active_only: bool) -> list[SessionRow]:
        return self._link.read(lambda connection: sessioning.sessions(connection, namespace, thread, active_only))

    # Interrupts ---------------------------------------------------------------------------------------------------

    def interrupt(self, row: InterruptRow) -> InterruptRow:
        return self._link.write(lambda connection: interrupting.add_interrupt(connection, row))

    def decide(
        self, namespace: str, interrupt: str, digest: bytes, decision: bytes, by: str, decided_us: int
    ) -> InterruptRow:
        return self._link.write(
            lambda connection: interrupting.decide(connection, namespace, interrupt, digest, decision, by, decided_us)
        )

    def consume(self, namespace: str, interrupt: str, by: str, epoch: int, consumed_us: int) -> InterruptRow:
        return self._link.write(
            lambda connection: interrupting.consume(connection, namespace, interrupt, by, epoch, consumed_us)
        )

    def interrupts(
        self, namespace: str, thread: str | None, pending_only: bool, after: int, limit: int
    ) -> list[InterruptRow]:
        return self._link.read(
            lambda connection: interrupting.interrupts(connection, namespace, thread, pending_only, after, limit)
        )

    def find_interrupt(self, namespace: str, interrupt: str) -> InterruptRow | None:
        return self._link.read(lambda connection: interrupting.find_interrupt(connection, namespace, interrupt))

    # Effects ------------------------------------------------------------------------------------------------------

    def begin_effect(
        self, row: EffectRow, epoch: int | None, token: str | None, retry_of: int | None = None
    ) -> EffectRow:
        return self._link.write(lambda connection: effecting.begin(connection, row, epoch, token, retry_of))

    def end_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int
    ) -> EffectRow:
        given = (lane, key, attempt, owner, status, body, ended_us)
        return self._link.write(lambda connection: effecting.end(connection, *given))

    def settle_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int, by: str
    ) -> EffectRow:
        given = (lane, key, attempt, owner, status, body, ended_us, by)
        return self._link.write(lambda connection: effecting.end(connection, *given))

    def find_effect(self, lane: LaneKey, key: str) -> EffectRow | None:
        return self._link.read(lambda connection: effecting.find_effect(connection, lane, key))

    def effects(self, namespace: str, thread: str | None, after: int, limit: int) -> list[EffectRow]:
        return self._link.read(lambda connection: effecting.effects(connection, namespace, thread, after, limit))

    # Upkeep -------------------------------------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        return self._link.look(check_tables)

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        if dry_run:
            return self._link.look(lambda connection: mending.find_rebuild(connection, drop).findings)
        return self._link.change(lambda connection: mending.rebuild(connection, drop), again=True)

    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        self._link.change(lambda connection: mending.restore(connection, blobs, chunks, rows), again=True)

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        self._link.change(lambda connection: mending.quarantine(connection, namespace, checkpoint, force), checkpoint)

    def compact(self) -> int:
        return compact_tables(self._link, self._target.schema)

    def close(self) -> None:
        self._link.close()
