"""Effects: an intent is stored and a receipt set in one transaction each, which changes nothing if it comes late."""

from __future__ import annotations

from typing import Any

import apsw

from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.boot import Moment
from backstay.store.effects import EffectRow, effect_id, effect_missing, is_same_call, may_begin
from backstay.store.lane import LaneKey
from backstay.store.sqlite import queries
from backstay.store.sqlite.lane import NO_LANE, find_lane, thread_of
from backstay.store.sqlite.rows import Shape
from backstay.store.sqlite.select import every, one


def begin(
    connection: apsw.Connection, row: EffectRow, epoch: int | None, token: str | None, retry_of: int | None, now: Moment
) -> EffectRow:
    """See ``Effects.begin_effect``."""
    stored = find_effect(connection, row.lane, row.key)
    if stored is not None and is_same_call(row, stored):
        return stored
    lane = find_lane(connection, row.lane) or NO_LANE
    lane.tenure.check_writer(row.lane, epoch, token, now)
    if stored is not None and not may_begin(row, stored, retry_of):
        return stored
    attempt = (row.attempt, row.owner, row.request, row.created_us, row.digest)
    name = effect_id(row.lane, row.key)
    if stored is None:
        thread, _ = thread_of(connection, row.lane)
        connection.execute(queries.ADD_EFFECT, (name, thread, row.lane.scope, row.lane.branch, row.key, *attempt))
    else:
        connection.execute(queries.BEGIN_EFFECT_AGAIN, (*attempt, name))
    return _get(connection, row.lane, row.key)


def end(
    connection: apsw.Connection,
    lane: LaneKey,
    key: str,
    attempt: int,
    owner: str,
    status: str,
    body: bytes,
    ended_us: int,
    by: str | None = None,
) -> EffectRow:
    """See ``Effects.end_effect``."""
    connection.execute(queries.END_EFFECT, (status, body, ended_us, by, effect_id(lane, key), attempt, owner))
    return _get(connection, lane, key)


def effects(connection: apsw.Connection, namespace: str, thread: str | None, after: int, limit: int) -> list[EffectRow]:
    """See ``Effects.effects``."""
    statement = queries.EFFECTS + ("" if thread is None else queries.AND_DONE_IN_THREAD) + queries.BEGUN_EFFECTS_FIRST
    most = max(0, min(limit, PAGE_ROWS_MAX))
    bound = {"namespace": namespace, "thread": thread, "after": after, "limit": most}
    return [_read(fields) for fields in every(connection, statement, bound)]


def find_effect(connection: apsw.Connection, lane: LaneKey, key: str) -> EffectRow | None:
    """See ``Effects.find_effect``."""
    fields = one(connection, queries.EFFECT, (effect_id(lane, key),))
    return None if fields is None else _read(fields)


def _get(connection: apsw.Connection, lane: LaneKey, key: str) -> EffectRow:
    row = find_effect(connection, lane, key)
    if row is None:
        raise effect_missing(lane, key)
    return row


_EFFECT = Shape("effect", "text text text text text int text bytes int bytes int text bytes? int? text?")


def _read(fields: tuple[Any, ...]) -> EffectRow:
    _EFFECT.check(fields)
    return EffectRow(LaneKey(*fields[:4]), *fields[4:])
