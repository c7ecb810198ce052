"""Leases, in the branch's own row. A verb reads it, decides and writes it in one transaction."""

from __future__ import annotations

from collections.abc import Mapping

from backstay.errors import Corrupted
from backstay.store.layout import SEQ_BITS, SEQ_MAX, UNREADABLE
from backstay.store.leases import NO_LEASE, BranchKey, ClockReading, LeaseGrant, LeaseRequest, LeaseRow, LeaseStatus
from backstay.store.sqlite import queries
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import (
    BranchRow,
    add_branch,
    branch_of,
    fetch_all,
    find_branch,
    put_branch,
    read_branch,
    readable_names,
)
from backstay.store.sqlite.transactions import SqliteTransactions, reading, writing

NO_LIMIT = -1
"""For LIMIT in SQL."""


class SqliteLeases(SqliteTransactions):
    """The verbs on leases."""

    @writing
    def acquire(self, connection: Connection, branch: BranchKey, request: LeaseRequest) -> LeaseGrant:
        found = find_branch(connection, branch)
        lease = (found.lease if found else NO_LEASE).acquired(branch, request, self._clock())
        found = found or add_branch(connection, branch)
        put_branch(connection, found._replace(lease=lease))
        return LeaseGrant(branch, found.number, lease.epoch)

    @writing
    def renew(self, connection: Connection, branch: BranchKey, epoch: int, request: LeaseRequest) -> None:
        found = find_branch(connection, branch)
        lease = (found.lease if found else NO_LEASE).renewed(branch, epoch, request, self._clock())
        if found:
            put_branch(connection, found._replace(lease=lease))

    @writing
    def release(self, connection: Connection, branch: BranchKey, epoch: int, token: str) -> None:
        found = find_branch(connection, branch)
        if found is None:
            return
        found.lease.released(branch, epoch, token, self._clock())
        if found.last_seq:
            put_branch(connection, found._replace(lease=LeaseRow(found.lease.epoch)))
        else:
            connection.execute(queries.DROP_BRANCH, (found.number,))
            connection.execute(queries.DROP_UNUSED_THREAD, {"thread": found.thread})

    @reading
    def leases(
        self, connection: Connection, namespace: str, thread: str | None, expired_only: bool
    ) -> list[LeaseStatus]:
        now = self._clock()
        conditions = queries.AND_LEASED_IN_THREAD if thread is not None else ""
        found = _leased(connection, conditions, now, {"namespace": namespace, "thread": thread})
        statuses = [
            LeaseStatus(each.key, each.number, each.lease.owner or "", each.lease.epoch, each.lease.left_us(now))
            if isinstance(each, BranchRow)
            else LeaseStatus(each, 0, UNREADABLE, 0, 0)
            for each in found
        ]
        return [each for each in statuses if not expired_only or each.left_us <= 0]

    @writing
    def claim(self, connection: Connection, namespace: str, count: int, request: LeaseRequest) -> list[LeaseGrant]:
        now = self._clock()
        wanted: dict[str, str | int] = {"namespace": namespace, "token": request.token}
        mine = _leased(connection, queries.AND_HELD, now, wanted)
        wanted["limit"] = max(0, count - len(mine))
        expired = _leased(connection, queries.AND_NOT_HELD + queries.AND_EXPIRED, now, wanted)
        taken = []
        for found in [*mine, *expired]:
            if not isinstance(found, BranchRow):
                continue
            lease = found.lease.acquired(found.key, request, now)
            put_branch(connection, found._replace(lease=lease))
            taken.append(LeaseGrant(found.key, found.number, lease.epoch))
        return taken


def check_head(connection: Connection, key: int, token: str | None, now: ClockReading) -> None:
    """Raise Fenced if the checkpoint with this key is a head under a running lease with another token."""
    branch = branch_of(connection, key)
    if branch.number == key >> SEQ_BITS and branch.head == key & SEQ_MAX:
        branch.lease.check_delete(branch.key, token, now)


def check_thread(connection: Connection, namespace: str, thread: str, token: str | None, now: ClockReading) -> None:
    """Raise Fenced if a lease with another token runs on any branch of the thread."""
    wanted = {"namespace": namespace, "thread": thread}
    for branch in _leased(connection, queries.AND_LEASED_IN_THREAD, now, wanted):
        if isinstance(branch, BranchRow):
            branch.lease.check_delete(branch.key, token, now)


def _leased(
    connection: Connection, conditions: str, now: ClockReading, wanted: Mapping[str, str | int | None]
) -> list[BranchRow | BranchKey]:
    """Return branches with unreleased leases, earliest expiry first; of a branch with a damaged row only its name."""
    statement = queries.LEASED + conditions + queries.EXPIRED_FIRST
    bound = {"limit": NO_LIMIT, **wanted, "boot": now.boot, "now": now.us}
    found: list[BranchRow | BranchKey] = []
    for fields in fetch_all(connection, statement, bound):
        key = BranchKey(*fields[:4])
        try:
            found.append(read_branch(fields[4:], key))
        except Corrupted:
            found.append(readable_names(key))
    return found
