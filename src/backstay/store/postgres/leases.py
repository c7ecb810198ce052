"""Leases, in the branch's own row, by PostgreSQL's clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace

from backstay.errors import Fenced
from backstay.store.base import BranchKey
from backstay.store.layout import UNREADABLE
from backstay.store.leases import LeaseGrant, LeaseRequest, LeaseStatus, fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.records import put_run, read_record
from backstay.store.records import Record


class PostgresLeases:
    """The verbs on leases. Without a run, each is one statement, except ``release``."""

    _pool: RetryingPool

    def acquire(self, branch: BranchKey, request: LeaseRequest, run: Record | None = None) -> LeaseGrant:
        if run is None:
            return self._pool.write(lambda connection: _acquire(connection, branch, request))
        return self._pool.change(
            lambda connection: replace(_acquire(connection, branch, request), run=put_run(connection, run)), again=True
        )

    def renew(self, branch: BranchKey, epoch: int, request: LeaseRequest) -> None:
        bound = {**branch._asdict(), "epoch": epoch, **request._asdict()}

        def work(connection: DeadlineConnection) -> None:
            if connection.one(queries.RENEW, bound) is None:
                current, owner, left_us = connection.one(queries.LEASE, bound) or (0, None, 0)
                raise fenced(branch, epoch, current, owner, left_us)

        self._pool.write(work)

    def release(self, branch: BranchKey, epoch: int, token: str, run: Record | None = None) -> None:
        bound = {**branch._asdict(), "epoch": epoch, "token": token}

        def work(connection: DeadlineConnection) -> None:
            found = connection.one(queries.RELEASE, bound)
            if found is None:
                current, owner, left_us = connection.one(queries.LEASE, bound) or (epoch, None, 0)
                if current != epoch or owner is not None:
                    raise fenced(branch, epoch, current, owner, left_us)
                return
            put_run(connection, run)
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
            LeaseStatus(BranchKey(*key), number, UNREADABLE if owner is None else owner, epoch, left_us, token)
            for *key, number, owner, epoch, left_us, token in found
        ]

    def claim(
        self,
        namespace: str,
        graphs: Collection[tuple[str, str]],
        count: int,
        request: LeaseRequest,
        now_us: int,
        dead: Collection[str],
        change: Callable[[Record], Record | None],
    ) -> list[LeaseGrant]:
        bound = {
            "namespace": namespace,
            "graphs": [name for name, _ in graphs],
            "fingerprints": [fingerprint for _, fingerprint in graphs],
            "now": now_us,
            "dead": list(dead),
        }

        def work(connection: DeadlineConnection) -> list[LeaseGrant]:
            taken: dict[BranchKey, LeaseGrant] = {}
            seen: list[int] = []
            while len(taken) < count:
                wanted = count - len(taken) + len(seen)  # more and more, so that runs that are left out cost little
                found = connection.every(queries.LEFT_RUNS, {**bound, "seen": seen, "count": wanted})
                if len(found) < wanted:
                    found += connection.every(queries.DUE_RUNS, {**bound, "seen": seen, "count": wanted - len(found)})
                held = [number for *_, number in found if number is not None]
                free = {number for (number,) in connection.every(queries.LOCK_BRANCHES_NOW, (held,))} if held else set()
                for *columns, epoch, number in found:
                    run = read_record(columns)
                    seen.append(run.number)
                    if len(taken) >= count or run.branch in taken or (number is not None and number not in free):
                        continue  # enough, or another writer is taking the branch
                    changed = change(run)
                    if changed is not None:
                        with contextlib.suppress(Fenced):  # another writer has taken the branch since it was read
                            grant = _acquire(connection, run.branch, request._replace(over=epoch or 0))
                            taken[run.branch] = replace(grant, run=put_run(connection, changed))
                if len(found) < wanted:
                    break
            return list(taken.values())

        return self._pool.change(work, again=True)


def _acquire(connection: DeadlineConnection, branch: BranchKey, request: LeaseRequest) -> LeaseGrant:
    answer = connection.one(queries.ACQUIRE, (*branch, *request))
    assert answer is not None
    outcome, number, epoch, owner, left_us = answer
    if outcome:
        raise fenced(branch, 0, epoch, owner, left_us)
    return LeaseGrant(branch, number, epoch)
