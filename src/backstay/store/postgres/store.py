"""The PostgreSQL store: one schema, many threads, processes and machines.

A save is one statement. No session state is kept between statements, so a pooler in transaction mode may stand in
between. See ``link`` for deadlines and lost connections, ``schema.sql`` for what keeps writers and deletes apart.
"""

from __future__ import annotations

from backstay.store.base import LaneKey
from backstay.store.effects import EffectRow
from backstay.store.interrupts import InterruptRow
from backstay.store.postgres import effect as effecting
from backstay.store.postgres import interrupt as interrupting
from backstay.store.postgres import session as sessioning
from backstay.store.postgres.collect import Deleting
from backstay.store.postgres.commit import Writing
from backstay.store.postgres.compact import Space
from backstay.store.postgres.database import prepare
from backstay.store.postgres.find import Reading
from backstay.store.postgres.lease import Leases
from backstay.store.postgres.link import Link
from backstay.store.postgres.mend import Repair
from backstay.store.postgres.target import parse_url
from backstay.store.sessions import SessionRow


class PostgresStore(Reading, Writing, Deleting, Leases, Repair, Space):
    """Keeps checkpoints in one schema of a PostgreSQL database."""

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)
        self.url = self._target.shown
        self._link = Link(self._target)
        prepare(self._link, self._target)

    def close(self) -> None:
        self._link.close()

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
