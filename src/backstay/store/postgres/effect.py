"""Effect rows. Beginning and ending are each one statement, a call of a function of the schema."""

from __future__ import annotations

from typing import Any

from backstay.store.base import PAGE_ROWS_MAX, LaneKey
from backstay.store.effects import EffectRow, effect_id, effect_missing
from backstay.store.leases import fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection


def begin(
    connection: DeadlineConnection, row: EffectRow, epoch: int | None, token: str | None, retry_of: int | None
) -> EffectRow:
    """Store an intent; see ``Effects.begin_effect``."""
    bound = {
        **row.lane._asdict(),
        "epoch": epoch,
        "token": token,
        "retry_of": retry_of,
        "id": effect_id(row.lane, row.key),
        "key": row.key,
        "attempt": row.attempt,
        "owner": row.owner,
        "request": row.request,
        "created": row.created_us,
        "digest": row.digest,
    }
    answer = connection.one(queries.BEGIN_EFFECT, bound)
    assert answer is not None
    is_fenced, current, holder, left_us, *fields = answer
    if is_fenced:
        raise fenced(row.lane, epoch or 0, current, holder, left_us)
    return _read((*row.lane[:2], *fields))


def end(
    connection: DeadlineConnection,
    lane: LaneKey,
    key: str,
    attempt: int,
    owner: str,
    status: str,
    body: bytes,
    ended_us: int,
    by: str | None = None,
) -> EffectRow:
    """Set the receipt if there is none; return the row as it is now."""
    found = connection.one(queries.END_EFFECT, (effect_id(lane, key), attempt, owner, status, body, ended_us, by))
    if found is None:
        raise effect_missing(lane, key)
    return _read(found)


def effects(
    connection: DeadlineConnection, namespace: str, thread: str | None, after: int, limit: int
) -> list[EffectRow]:
    """Return effects in the order in which they were first begun."""
    most = max(0, min(limit, PAGE_ROWS_MAX))
    bound = {"namespace": namespace, "thread": thread, "after": after, "limit": most}
    return [_read(fields) for fields in connection.every(queries.EFFECTS, bound)]


def find_effect(connection: DeadlineConnection, lane: LaneKey, key: str) -> EffectRow | None:
    """Return one effect, or None."""
    found = connection.one(queries.EFFECT, (effect_id(lane, key),))
    return None if found is None else _read(found)


def _read(fields: tuple[Any, ...]) -> EffectRow:
    return EffectRow(LaneKey(*fields[:4]), *fields[4:])
