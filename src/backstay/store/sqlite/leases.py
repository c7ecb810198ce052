"""Leases in the lane's own row. A verb reads it, lets ``tenure`` decide, and writes it: all in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import apsw

from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.layout import SEQ_BITS, SEQ_MAX
from backstay.store.leases import Claim, Held, LeaseRow
from backstay.store.sqlite import queries
from backstay.store.sqlite.lane import add_lane, find_lane, read_tenure
from backstay.store.sqlite.rows import every, one, read_lane
from backstay.store.sqlite.transactions import Transactions, reading, writing
from backstay.store.tenure import FREE, Tenure

NO_LIMIT = -1
"""SQLite's word for it."""


class Leases(Transactions):
    """The verbs on leases."""

    @writing
    def acquire(self, connection: apsw.Connection, lane: LaneKey, claim: Claim) -> Held:
        found = find_lane(connection, lane)
        tenure = (found.tenure if found else FREE).acquired(lane, claim, self._clock())
        found = found or add_lane(connection, lane)
        connection.execute(queries.SET_LEASE, (*tenure, found.number))
        return Held(lane, found.number, tenure.epoch)

    @writing
    def renew(self, connection: apsw.Connection, lane: LaneKey, epoch: int, claim: Claim) -> None:
        found = find_lane(connection, lane)
        tenure = (found.tenure if found else FREE).renewed(lane, epoch, claim, self._clock())
        if found:
            connection.execute(queries.SET_LEASE, (*tenure, found.number))

    @writing
    def release(self, connection: apsw.Connection, lane: LaneKey, epoch: int, token: str) -> None:
        found = find_lane(connection, lane)
        if found is None:
            return
        found.tenure.released(lane, epoch, token, self._clock())
        if found.last_seq:
            connection.execute(queries.END_LEASE, (found.number,))
        else:
            connection.execute(queries.DROP_LANE, (found.number,))
            connection.execute(queries.DROP_UNUSED_THREAD, {"thread": found.thread})

    @reading
    def leases(
        self, connection: apsw.Connection, namespace: str, thread: str | None, expired_only: bool
    ) -> list[LeaseRow]:
        now = self._clock()
        conditions = queries.AND_LEASED_IN_THREAD if thread is not None else ""
        conditions += queries.AND_EXPIRED if expired_only else ""
        found = _leased(connection, conditions, now, {"namespace": namespace, "thread": thread})
        return [
            LeaseRow(key, number, tenure.owner or "", tenure.epoch, tenure.left_us(now))
            for key, number, tenure in found
        ]

    @writing
    def claim(self, connection: apsw.Connection, namespace: str, count: int, claim: Claim) -> list[Held]:
        now = self._clock()
        wanted: dict[str, str | int] = {"namespace": namespace, "token": claim.token}
        mine = _leased(connection, queries.AND_HELD, now, wanted)
        wanted["limit"] = max(0, count - len(mine))
        expired = _leased(connection, queries.AND_NOT_HELD + queries.AND_EXPIRED, now, wanted)
        taken = []
        for key, number, before in [*mine, *expired]:
            tenure = before.acquired(key, claim, now)
            connection.execute(queries.SET_LEASE, (*tenure, number))
            taken.append(Held(key, number, tenure.epoch))
        return taken


def check_head(connection: apsw.Connection, key: int, token: str | None, now: Moment) -> None:
    """Raise Fenced if the checkpoint with this key is a head that a lease other than the token's protects."""
    found = one(connection, queries.LEASE_OF_HEAD, (key >> SEQ_BITS, key & SEQ_MAX))
    if found is not None:
        lane, _, tenure = _read(found)
        tenure.check_delete(lane, token, now)


def check_thread(connection: apsw.Connection, namespace: str, thread: str, token: str | None, now: Moment) -> None:
    """Raise Fenced if a lease other than the token's runs on any lane of the thread."""
    wanted = {"namespace": namespace, "thread": thread}
    for lane, _, tenure in _leased(connection, queries.AND_LEASED_IN_THREAD, now, wanted):
        tenure.check_delete(lane, token, now)


_Leased = tuple[LaneKey, int, Tenure]  # the lane, its number and its lease


def _leased(
    connection: apsw.Connection, conditions: str, now: Moment, wanted: Mapping[str, str | int | None]
) -> list[_Leased]:
    """Return leases that were not released, the one that expired first first."""
    statement = queries.LEASED + conditions + queries.EXPIRED_FIRST
    bound = {"limit": NO_LIMIT, **wanted, "boot": now.boot, "now": now.us}
    return [_read(fields) for fields in every(connection, statement, bound)]


def _read(fields: tuple[Any, ...]) -> _Leased:
    return read_lane(fields[1:5]), fields[0], read_tenure(*fields[5:])
