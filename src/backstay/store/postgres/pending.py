"""Pending writes: one row for each task, changed only if it is still what the writer thinks it is.

The first writes of tasks are one statement. If there are some already, its answer shows them and nothing is stored;
they are merged here and put back by a second one, which stores nothing either if others came in between. Each is a
transaction of its own, so nothing is held meanwhile, and who repeats it after a lost answer finds its writes there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from backstay.store.base import LaneKey, WriteRow
from backstay.store.postgres import queries
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.rows import pack_id, pack_task, unpack_task
from backstay.store.postgres.select import every
from backstay.store.writes import Packed, by_task, merge, merged, pack


def put_writes(
    connection: DeadlineConnection, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool
) -> None:
    """Keep the results of finished tasks; see ``Backend.write``."""
    tasks = by_task(writes)
    stored: dict[str, Packed | None] = dict.fromkeys(tasks)  # as far as it is known
    changed = {task: pack(merge((), new, replace)) for task, new in tasks.items()}
    while others := swap(connection, lane, checkpoint, stored, changed):
        stored.update(others)
        changed = {}
        for task, new in tasks.items():
            found = stored[task]
            if found is None:
                changed[task] = pack(merge((), new, replace))
            elif (packed := merged(task, found, new, replace, lane.thread, checkpoint)) is not None:
                changed[task] = packed
        if not changed:
            return


def swap(
    connection: DeadlineConnection,
    lane: LaneKey,
    checkpoint: str,
    stored: Mapping[str, Packed | None],
    changed: Mapping[str, Packed],
) -> dict[str, Packed | None]:
    """Put rows in the place of those that are stored; if any is another by now, do nothing and return which it is."""
    bound: list[object] = [
        *lane[:3],
        pack_id(lane.namespace, checkpoint),
        [pack_task(task) for task in changed],
        [packed.size for packed in changed.values()],
        [packed.body for packed in changed.values()],
    ]
    was = [None if (found := stored[task]) is None else hashlib.sha256(found.body).digest() for task in changed]
    if any(was):
        answer = every(connection, queries.SWAP_WRITES, [*bound, was])
    else:
        answer = every(connection, queries.ADD_WRITES, bound)
    return {unpack_task(task): None if body is None else Packed(size, body) for task, size, body in answer}
