"""The rows of threads and lanes: found by name, made when they are first needed."""

from __future__ import annotations

from typing import NamedTuple

import apsw

from backstay.errors import Corrupted
from backstay.store.lane import LaneKey
from backstay.store.layout import SEQ_BITS
from backstay.store.sqlite import queries
from backstay.store.sqlite.rows import Shape, StoredId, one, scalar
from backstay.store.tenure import FREE, Tenure


class StoredLane(NamedTuple):
    """A lane's row, with the next sequence number of its thread."""

    number: int = 0
    thread: int = 0
    head: int = 0
    last_seq: int = 0
    next_seq: int = 0
    tenure: Tenure = FREE


NO_LANE = StoredLane()
_LANE = Shape("lane or thread", "int int int int int int text? text? int? text?")
_TENURE = Shape("lane", "int text? text? int? text?")


def find_lane(connection: apsw.Connection, key: LaneKey) -> StoredLane | None:
    """Return the lane of that name, or None."""
    found = connection.execute(queries.LANE, key).fetchone()
    if found is None:
        return None
    _LANE.check(found)
    number, thread, head, last_seq, next_seq, epoch, owner, token, expires, boot = found
    return StoredLane(number, thread, head, last_seq, next_seq, Tenure(epoch, owner, token, expires or 0, boot or ""))


def add_lane(connection: apsw.Connection, key: LaneKey, origin: StoredId | None = None) -> StoredLane:
    """Make the lane, without a checkpoint, and the thread if need be."""
    thread, next_seq = thread_of(connection, key)
    number = scalar(connection, queries.ADD_LANE, (thread, key.scope, key.branch, origin))
    return StoredLane(number, thread, next_seq=next_seq)


def thread_of(connection: apsw.Connection, lane: LaneKey) -> tuple[int, int]:
    """Return the thread's number and next sequence number; make the thread if there is none."""
    found = one(connection, queries.THREAD, lane[:2])
    if found is not None:
        return int(found[0]), int(found[1])
    return int(scalar(connection, queries.ADD_THREAD, lane[:2])), 1


def read_tenure(epoch: int, owner: str | None, token: str | None, expires: int | None, boot: str | None) -> Tenure:
    """Return a lane's lease from its columns."""
    _TENURE.check((epoch, owner, token, expires, boot))
    return Tenure(epoch, owner, token, expires or 0, boot or "")


def lane_of(connection: apsw.Connection, key: int) -> tuple[int, str, str, str, str]:
    """Return the thread's number, then namespace, thread, scope and branch of a checkpoint's lane."""
    found = one(connection, queries.LANE_BY_ID, (key >> SEQ_BITS,))
    if found is None:
        raise Corrupted("a checkpoint belongs to a branch that is not there")
    thread, namespace, name, scope, branch = found
    return thread, namespace, name, scope, branch
