"""Leases, in the branch's own row. A verb reads it, decides and writes it in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import apsw

from backstay.store.layout import SEQ_BITS, SEQ_MAX
from backstay.store.leases import NO_LEASE, BranchKey, ClockReading, LeaseGrant, LeaseRequest, LeaseRow, LeaseStatus
from backstay.store.sqlite import queries
from backstay.store.sqlite.rows import add_branch, fetch_all, fetch_one, find_branch, read_branch, read_lease
from backstay.store.sqlite.transactions import SqliteTransactions, reading, writing

NO_LIMIT = -1
"""For LIMIT in SQL."""


class SqliteLeases(SqliteTransactions):
    """The verbs on leases."""

    @writing
    def acquire(self, connection: apsw.Connection, branch: BranchKey, request: LeaseRequest) -> LeaseGrant:
        found = find_branch(connection, branch)
        lease = (found.lease if found else NO_LEASE).acquired(branch, request, self._clock())
        found = found or add_branch(connection, branch)
        connection.execute(queries.SET_LEASE, (*lease, found.number))
        return LeaseGrant(branch, found.number, lease.epoch)

    @writing
    def renew(self, connection: apsw.Connection, branch: BranchKey, epoch: int, request: LeaseRequest) -> None:
        found = find_branch(connection, branch)
        lease = (found.lease if found else NO_LEASE).renewed(branch, epoch, request, self._clock())
        if found:
            connection.execute(queries.SET_LEASE, (*lease, found.number))

    @writing
    def release(self, connection: apsw.Connection, branch: BranchKey, epoch: int, token: str) -> None:
        found = find_branch(connection, branch)
        if found is None:
            return
        found.lease.released(branch, epoch, token, self._clock())
        if found.last_seq:
            connection.execute(queries.END_LEASE, (found.number,))
        else:
            connection.execute(queries.DROP_BRANCH, (found.number,))
            connection.execute(queries.DROP_UNUSED_THREAD, {"thread": found.thread})

    @reading
    def leases(
        self, connection: apsw.Connection, namespace: str, thread: str | None, expired_only: bool
    ) -> list[LeaseStatus]:
        now = self._clock()
        conditions = queries.AND_LEASED_IN_THREAD if thread is not None else ""
        conditions += queries.AND_EXPIRED if expired_only else ""
        found = _leased(connection, conditions, now, {"namespace": namespace, "thread": thread})
        return [
            LeaseStatus(key, number, lease.owner or "", lease.epoch, lease.left_us(now)) for key, number, lease in found
        ]

    @writing
    def claim(self, connection: apsw.Connection, namespace: str, count: int, request: LeaseRequest) -> list[LeaseGrant]:
        now = self._clock()
        wanted: dict[str, str | int] = {"namespace": namespace, "token": request.token}
        mine = _leased(connection, queries.AND_HELD, now, wanted)
        wanted["limit"] = max(0, count - len(mine))
        expired = _leased(connection, queries.AND_NOT_HELD + queries.AND_EXPIRED, now, wanted)
        taken = []
        for key, number, before in [*mine, *expired]:
            lease = before.acquired(key, request, now)
            connection.execute(queries.SET_LEASE, (*lease, number))
            taken.append(LeaseGrant(key, number, lease.epoch))
        return taken


def check_head(connection: apsw.Connection, key: int, token: str | None, now: ClockReading) -> None:
    """Raise Fenced if the checkpoint with this key is a head under a running lease with another token."""
    found = fetch_one(connection, queries.LEASE_OF_HEAD, (key >> SEQ_BITS, key & SEQ_MAX))
    if found is not None:
        branch, _, lease = _read(found)
        lease.check_delete(branch, token, now)


def check_thread(
    connection: apsw.Connection, namespace: str, thread: str, token: str | None, now: ClockReading
) -> None:
    """Raise Fenced if a lease with another token runs on any branch of the thread."""
    wanted = {"namespace": namespace, "thread": thread}
    for branch, _, lease in _leased(connection, queries.AND_LEASED_IN_THREAD, now, wanted):
        lease.check_delete(branch, token, now)


_Leased = tuple[BranchKey, int, LeaseRow]  # the branch, its number and its lease


def _leased(
    connection: apsw.Connection, conditions: str, now: ClockReading, wanted: Mapping[str, str | int | None]
) -> list[_Leased]:
    """Return unreleased leases, earliest expiry first."""
    statement = queries.LEASED + conditions + queries.EXPIRED_FIRST
    bound = {"limit": NO_LIMIT, **wanted, "boot": now.boot, "now": now.us}
    return [_read(fields) for fields in fetch_all(connection, statement, bound)]


def _read(fields: tuple[Any, ...]) -> _Leased:
    return read_branch(fields[1:5]), fields[0], read_lease(*fields[5:])
