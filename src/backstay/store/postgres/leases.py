"""Leases, in the branch's own row, by PostgreSQL's clock."""

from __future__ import annotations

from backstay.store.base import BranchKey
from backstay.store.layout import UNREADABLE
from backstay.store.leases import LeaseGrant, LeaseRequest, LeaseStatus, fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.pool import RetryingPool


class PostgresLeases:
    """The verbs on leases. Each is one statement, except ``release``."""

    _pool: RetryingPool

    def acquire(self, branch: BranchKey, request: LeaseRequest) -> LeaseGrant:
        bound = (*branch, request.owner, request.token, request.ttl_us)
        answer = self._pool.write(lambda connection: connection.one(queries.ACQUIRE, bound))
        assert answer is not None
        outcome, number, epoch, owner, left_us = answer
        if outcome:
            raise fenced(branch, 0, epoch, owner, left_us)
        return LeaseGrant(branch, number, epoch)

    def renew(self, branch: BranchKey, epoch: int, request: LeaseRequest) -> None:
        bound = {**branch._asdict(), "epoch": epoch, **request._asdict()}

        def work(connection: DeadlineConnection) -> None:
            if connection.one(queries.RENEW, bound) is None:
                current, owner, left_us = connection.one(queries.LEASE, bound) or (0, None, 0)
                raise fenced(branch, epoch, current, owner, left_us)

        self._pool.write(work)

    def release(self, branch: BranchKey, epoch: int, token: str) -> None:
        bound = {**branch._asdict(), "epoch": epoch, "token": token}

        def work(connection: DeadlineConnection) -> None:
            found = connection.one(queries.RELEASE, bound)
            if found is None:
                current, owner, left_us = connection.one(queries.LEASE, bound) or (epoch, None, 0)
                if current != epoch or owner is not None:
                    raise fenced(branch, epoch, current, owner, left_us)
                return
            number, thread, last_seq = found
            if last_seq == 0:
                connection.run(queries.DROP_UNUSED_BRANCH, (number,))
                connection.every(queries.LOCK_THREADS, ([thread],))
                connection.run(queries.DROP_UNUSED_THREAD, (thread,))

        self._pool.change(work, again=True)

    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseStatus]:
        bound = {"namespace": namespace, "thread": thread, "expired": expired_only}
        found = self._pool.read(lambda connection: connection.every(queries.LEASES, bound))
        return [
            LeaseStatus(BranchKey(*key), number, UNREADABLE if owner is None else owner, epoch, left_us)
            for *key, number, owner, epoch, left_us in found
        ]

    def claim(self, namespace: str, count: int, request: LeaseRequest) -> list[LeaseGrant]:
        bound = {"namespace": namespace, "count": count, **request._asdict()}
        found = self._pool.write(lambda connection: connection.every(queries.CLAIM, bound))
        return [LeaseGrant(BranchKey(*fields[:4]), *fields[4:]) for fields in found]
