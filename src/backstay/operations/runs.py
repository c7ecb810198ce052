"""Which run a checkpoint belongs to, and whether that run is over.

A graph's run has an id, which all its checkpoints have. A ``LoopRun`` is the turns of a loop from one input to
``finish()``. Its name is the step of its first checkpoint. Every save, and every rewind too, has a higher step than the
one before, so names are never reused: an effect or approval of an earlier run, or of a turn that was rewound, is never
used for this one. Approvals belong to the run that people saw: a fork or a rewind starts without them.

A branch has one run at a time. So the questions of a run can no longer be used once its branch has another run, was
rewound, or its newest checkpoint is the end of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from backstay.errors import Corrupted
from backstay.model.checkpoint import COPIES, CheckpointMeta
from backstay.operations.arguments import LOOP_POSITION
from backstay.operations.rows import meta_of
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Query

EVERY_TOOL = "*"
_ROWS_AT_FIRST = 10


@dataclass(frozen=True, slots=True)
class LoopRun:
    """The turns from one input to ``finish()``."""

    number: int  # the step of its first checkpoint
    iteration: int = 0  # saved turns
    grants: frozenset[str] = frozenset()  # tools that are approved until the run finishes
    finished: bool = False
    was_loop: bool = True  # False: no loop has run on this thread
    received: Mapping[str, int] = field(default_factory=dict)  # how many values it has received, by name

    @property
    def line_name(self) -> str:
        """The name of the run in the positions of the values that it waits for."""
        return f"loop {self.number}"

    def metadata(self) -> dict[str, Any]:
        """Return the part of the run that its checkpoints store as metadata; the rest is in their other fields."""
        received = {"received": dict(self.received)} if self.received else {}
        return {LOOP_POSITION: {"round": self.number, "grants": sorted(self.grants), **received}}

    def allows(self, tool: str) -> bool:
        """Return whether a person approved all calls of this tool."""
        return not self.grants.isdisjoint((tool, EVERY_TOOL))


def find_loop_run(store: Backend, branch: BranchKey, head: CheckpointMeta) -> LoopRun:
    """Return the run to continue at a head. Other code may have saved checkpoints since the last turn."""
    found = loop_run_of(head)
    query = Query(*branch, before=head.seq, limit=_ROWS_AT_FIRST)
    while found is None:
        rows = store.find(query)
        found = next(filter(None, (loop_run_of(meta_of(row)) for row in rows)), None)
        if len(rows) < query.limit:
            break
        query = replace(query, before=rows[-1].seq, limit=min(query.limit * 4, PAGE_ROWS_MAX))
    return found or LoopRun(head.step, was_loop=False)


def loop_run_of(meta: CheckpointMeta) -> LoopRun | None:
    """Return the run of a loop that a checkpoint belongs to, None if other code saved it."""
    mark = meta.metadata.get(LOOP_POSITION)
    if mark is None:
        return None
    finished = meta.is_over
    if meta.trigger in COPIES:
        return LoopRun(meta.step, meta.iteration, finished=finished)
    if not isinstance(mark, Mapping) or type(mark.get("round")) is not int or not isinstance(mark.get("grants"), list):
        raise Corrupted(
            f"checkpoint {meta.id}: its metadata {LOOP_POSITION!r} was not written by a loop",
            thread=meta.thread_id,
            checkpoint=meta.id,
            hint="Fork from an older checkpoint to continue",
        )
    received = mark.get("received", {})
    return LoopRun(mark["round"], meta.iteration, frozenset(mark["grants"]), finished, received=received)


def unfinished_loop(branch: Sequence[CheckpointMeta]) -> list[str]:
    """Return the id of the newest checkpoint of an unfinished loop, if other code has saved since then.

    Without it, the loop would start again, and so would the effects of its current turn.
    """
    if not branch or branch[0].graph is not None:
        return []
    newest = next((meta for meta in branch if LOOP_POSITION in meta.metadata), None)
    return [] if newest is None or newest.is_over else [newest.id]


class RunOfCheckpoint(NamedTuple):
    """The run of a checkpoint."""

    name: str  # no other run of the branch has it
    is_over: bool
    is_known: bool  # False: the checkpoint was saved by neither a graph nor a loop


def run_of(store: Backend, branch: BranchKey, meta: CheckpointMeta) -> RunOfCheckpoint:
    """Return the run that a checkpoint of a branch belongs to."""
    if meta.graph is not None:
        return RunOfCheckpoint(f"graph {meta.run_id or meta.id}", meta.is_over, True)
    found = find_loop_run(store, branch, meta)
    return RunOfCheckpoint(f"loop {found.number}", meta.is_over or found.finished, found.was_loop)


def has_ended(store: Backend, branch: BranchKey, checkpoint: str, interrupt: str) -> bool:
    """Return whether the run that asked a question is over, was rewound, or another one has started since.

    The question is an interrupt of that checkpoint. If it cannot be found out, the answer is no: a check of the store
    reports the damage.
    """
    try:
        rows = store.find(Query(*branch, limit=1))
        if not rows:
            return False
        head = meta_of(rows[0])
        if head.id == checkpoint or head.is_over:
            return head.is_over
        if head.trigger == "rewind":
            return True
        if head.interrupt is not None and head.interrupt.id == interrupt:  # the newest checkpoint waits for it
            return False
        newest = run_of(store, branch, head)
        if newest.is_over:
            return True
        asked = store.find(Query(branch.namespace, ids=(checkpoint,)))
        return bool(asked) and run_of(store, branch, meta_of(asked[0])).name != newest.name
    except Corrupted:
        return False
