"""Leases, in the branch's own row. A verb reads it, decides and writes it in one transaction."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, islice

from backstay.errors import Corrupted
from backstay.store.layout import SEQ_BITS, SEQ_MAX, UNREADABLE
from backstay.store.leases import NO_LEASE, BranchKey, ClockReading, LeaseGrant, LeaseRequest, LeaseRow, LeaseStatus
from backstay.store.records import Record, once_per_branch
from backstay.store.sqlite import queries
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.records import put_run, runs_of
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
    def acquire(
        self, connection: Connection, branch: BranchKey, request: LeaseRequest, run: Record | None = None
    ) -> LeaseGrant:
        found = find_branch(connection, branch)
        lease = (found.lease if found else NO_LEASE).acquired(branch, request, self._clock())
        found = found or add_branch(connection, branch)
        put_branch(connection, found._replace(lease=lease))
        return LeaseGrant(branch, found.number, lease.epoch, put_run(connection, run))

    @writing
    def renew(self, connection: Connection, branch: BranchKey, epoch: int, request: LeaseRequest) -> None:
        found = find_branch(connection, branch)
        lease = (found.lease if found else NO_LEASE).renewed(branch, epoch, request, self._clock())
        if found:
            put_branch(connection, found._replace(lease=lease))

    @writing
    def release(
        self, connection: Connection, branch: BranchKey, epoch: int, token: str, run: Record | None = None
    ) -> None:
        found = find_branch(connection, branch)
        if found is None:
            return
        found.lease.released(branch, epoch, token, self._clock())
        put_run(connection, run)
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
            LeaseStatus(
                each.key,
                each.number,
                each.lease.owner or "",
                each.lease.epoch,
                each.lease.left_us(now),
                each.lease.token or "",
            )
            if isinstance(each, BranchRow)
            else LeaseStatus(each, 0, UNREADABLE, 0, 0)
            for each in found
        ]
        return [each for each in statuses if not expired_only or each.left_us <= 0]

    @writing
    def claim(
        self,
        connection: Connection,
        namespace: str,
        graphs: Collection[tuple[str, str]],
        count: int,
        request: LeaseRequest,
        now_us: int,
        dead: Collection[str],
        change: Callable[[Record], Record | None],
    ) -> list[LeaseGrant]:
        now = self._clock()

        def is_free(key: BranchKey) -> bool:
            try:
                branch = find_branch(connection, key)
            except Corrupted:  # checks report it; the others must not wait for its repair
                return False
            return branch is None or branch.lease.left_us(now) <= 0 or branch.lease.token in dead

        def of(statement: str) -> Iterator[Record]:
            lists = (runs_of(connection, statement, namespace, graph, now_us) for graph in dict.fromkeys(graphs))
            return heapq.merge(*lists, key=lambda run: ((run.run and run.run.due_us) or 0, run.number))

        every = (
            (run, change(run))
            for run in chain(of(queries.RUNNING_OF_GRAPH), of(queries.DUE_RUNS))
            if is_free(run.branch)
        )
        taken = []
        for run, changed in list(islice(once_per_branch(every), count)):
            branch = find_branch(connection, run.branch) or add_branch(connection, run.branch)
            lease = branch.lease.acquired(run.branch, request._replace(over=branch.lease.epoch), now)
            put_branch(connection, branch._replace(lease=lease))
            taken.append(LeaseGrant(run.branch, branch.number, lease.epoch, put_run(connection, changed)))
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
