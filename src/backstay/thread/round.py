"""Where a plain loop stands: one round, from an input to the turn that finishes it, kept in its checkpoints' metadata.

A round is named by the step of the checkpoint it began with. Saves, rewinds too, only ever go to higher steps, so the
names of what happens in a round do not come again: an effect or approval of an earlier round, or of a turn that was
rewound, is never taken for one of this. What people granted belongs to the round they saw: a fork or a rewind begins
without grants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from backstay.errors import Corrupted
from backstay.model.checkpoint import CheckpointMeta
from backstay.store.base import PAGE_ROWS_MAX, Backend, Query
from backstay.thread.arguments import LOOP_MARK
from backstay.thread.cursor import Cursor
from backstay.thread.record import meta_of

EVERY_TOOL = "*"
_COPIES = ("fork", "rewind")  # triggers of checkpoints that took another one's metadata over
_ROWS_AT_FIRST = 10


@dataclass(frozen=True, slots=True)
class Round:
    """The turns that answer one input."""

    number: int  # the step of the checkpoint it began with
    iteration: int = 0  # turns that are saved
    grants: frozenset[str] = frozenset()  # tools that need not be asked for again in this round
    finished: bool = False
    is_loops: bool = True  # False: the checkpoint was saved by other means, and no loop ever ran

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint of this round keeps of it; the rest are fields of the record."""
        return {LOOP_MARK: {"round": self.number, "grants": sorted(self.grants)}}

    def allows(self, tool: str) -> bool:
        """Tell whether somebody granted all calls of this tool."""
        return not self.grants.isdisjoint((tool, EVERY_TOOL))


def find_round(store: Backend, cursor: Cursor, head: CheckpointMeta) -> Round:
    """Return the round that goes on at a head. Somebody may have edited the state since the last turn."""
    found = _round_of(head)
    query = Query(*cursor.lane, before=head.seq, limit=_ROWS_AT_FIRST)
    while found is None:
        rows = store.find(query)
        found = next(filter(None, (_round_of(meta_of(row)) for row in rows)), None)
        if len(rows) < query.limit:
            break
        query = replace(query, before=rows[-1].seq, limit=min(query.limit * 4, PAGE_ROWS_MAX))
    return found or Round(head.step, is_loops=False)


def _round_of(meta: CheckpointMeta) -> Round | None:
    mark = meta.metadata.get(LOOP_MARK)
    if mark is None:
        return None
    finished = meta.is_over
    if meta.trigger in _COPIES:
        return Round(meta.step, meta.iteration, finished=finished)
    if not isinstance(mark, Mapping) or type(mark.get("round")) is not int or not isinstance(mark.get("grants"), list):
        raise Corrupted(
            f"checkpoint {meta.id}: its metadata {LOOP_MARK!r} was not written by a loop",
            thread=meta.thread_id,
            checkpoint=meta.id,
            hint="Fork from an older checkpoint",
        )
    return Round(mark["round"], meta.iteration, frozenset(mark["grants"]), finished)
