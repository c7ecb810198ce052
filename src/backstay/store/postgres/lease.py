"""Leases in the lane's row, by PostgreSQL's clock."""

from __future__ import annotations

from backstay.store.base import LaneKey
from backstay.store.leases import Claim, Held, LeaseRow, fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.link import Link


class Leases:
    """The verbs on leases. Each is one statement, but for ``release``."""

    _link: Link

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        bound = (*lane, claim.owner, claim.token, claim.ttl_us)
        answer = self._link.write(lambda connection: connection.one(queries.ACQUIRE, bound))
        assert answer is not None
        outcome, number, epoch, owner, left_us = answer
        if outcome:
            raise fenced(lane, 0, epoch, owner, left_us)
        return Held(lane, number, epoch)

    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        bound = {**lane._asdict(), "epoch": epoch, **claim._asdict()}

        def work(connection: DeadlineConnection) -> None:
            if connection.one(queries.RENEW, bound) is None:
                current, owner, left_us = connection.one(queries.LEASE, bound) or (0, None, 0)
                raise fenced(lane, epoch, current, owner, left_us)

        self._link.write(work)

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        bound = {**lane._asdict(), "epoch": epoch, "token": token}

        def work(connection: DeadlineConnection) -> None:
            found = connection.one(queries.RELEASE, bound)
            if found is None:
                current, owner, left_us = connection.one(queries.LEASE, bound) or (epoch, None, 0)
                if current != epoch or owner is not None:
                    raise fenced(lane, epoch, current, owner, left_us)
                return
            number, thread, last_seq = found
            if last_seq == 0:
                connection.run(queries.DROP_UNUSED_LANE, (number,))
                connection.every(queries.LOCK_THREADS, ([thread],))
                connection.run(queries.DROP_UNUSED_THREAD, (thread,))

        self._link.change(work, again=True)

    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseRow]:
        bound = {"namespace": namespace, "thread": thread, "expired": expired_only}
        found = self._link.read(lambda connection: connection.every(queries.LEASES, bound))
        return [LeaseRow(LaneKey(*fields[:4]), *fields[4:]) for fields in found]

    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        bound = {"namespace": namespace, "count": count, **claim._asdict()}
        found = self._link.write(lambda connection: connection.every(queries.CLAIM, bound))
        return [Held(LaneKey(*fields[:4]), *fields[4:]) for fields in found]
