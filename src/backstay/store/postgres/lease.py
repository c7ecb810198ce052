"""Leases in the lane's row, by PostgreSQL's clock. Each verb is one statement."""

from __future__ import annotations

from typing import Any

from backstay.store.base import LaneKey
from backstay.store.leases import Claim, Held, LeaseRow, fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.select import every, one, run


def acquire(connection: DeadlineConnection, lane: LaneKey, claim: Claim) -> Held:
    """Take a lane's lease; see ``Leases.acquire``."""
    answer = one(connection, queries.ACQUIRE, (*lane, claim.owner, claim.token, claim.ttl_us))
    assert answer is not None
    outcome, number, epoch, owner, left_us = answer
    if outcome:
        raise fenced(lane, 0, epoch, owner, left_us)
    return Held(lane, number, epoch)


def renew(connection: DeadlineConnection, lane: LaneKey, epoch: int, claim: Claim) -> None:
    """Let a lease run on; see ``Leases.renew``."""
    bound = _bound(lane, epoch=epoch, token=claim.token, ttl=claim.ttl_us)
    if one(connection, queries.RENEW, bound) is None:
        current, owner, left_us = one(connection, queries.LEASE, bound) or (0, None, 0)
        raise fenced(lane, epoch, current, owner, left_us)


def release(connection: DeadlineConnection, lane: LaneKey, epoch: int, token: str) -> None:
    """Give a lease back, inside a transaction; see ``Leases.release``."""
    bound = _bound(lane, epoch=epoch, token=token)
    found = one(connection, queries.RELEASE, bound)
    if found is None:
        current, owner, left_us = one(connection, queries.LEASE, bound) or (epoch, None, 0)
        if current != epoch or owner is not None:
            raise fenced(lane, epoch, current, owner, left_us)
    elif found[2] == 0:
        run(connection, queries.DROP_UNUSED_LANE, (found[0],))
        every(connection, queries.LOCK_THREADS, ([found[1]],))
        run(connection, queries.DROP_UNUSED_THREAD, (found[1],))


def leases(connection: DeadlineConnection, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseRow]:
    """Return leases that were not released."""
    found = every(connection, queries.LEASES, {"namespace": namespace, "thread": thread, "expired": expired_only})
    return [LeaseRow(LaneKey(*fields[:4]), *fields[4:]) for fields in found]


def claim_expired(connection: DeadlineConnection, namespace: str, count: int, claim: Claim) -> list[Held]:
    """Take expired leases; rows that another claimer has in hand are passed over, not waited for."""
    bound = {
        "namespace": namespace,
        "count": count,
        "owner": claim.owner,
        "token": claim.token,
        "ttl": claim.ttl_us,
    }
    found = every(connection, queries.CLAIM, bound)
    return [Held(LaneKey(*fields[:4]), *fields[4:]) for fields in found]


def _bound(lane: LaneKey, **more: Any) -> dict[str, Any]:
    return {**lane._asdict(), **more}
