"""Parked runs: what a deployment would meet. ``check`` judges every unfinished run of a graph in a store.

Run it before a deployment, with the new graph: it writes nothing, and holds one checkpoint in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backstay.engine.build import Built
from backstay.engine.compat import migrate
from backstay.engine.fingerprint import fingerprint_of
from backstay.engine.verdict import FrameVerdict, Judgement, Verdict
from backstay.errors import Corrupted, DecodeError, MigrationFailed, NotFound
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.store.base import PAGE_ROWS_MAX, Backend, Lane, Query, Row
from backstay.thread.access import access_of
from backstay.thread.cursor import Context, Cursor
from backstay.thread.load import latest
from backstay.thread.record import meta_of

if TYPE_CHECKING:
    from backstay.engine.graph import Graph
    from backstay.thread.store import Store
    from backstay.thread.store_async import AsyncStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedRun:
    """A run that has not ended, by its newest checkpoint, and how the graph fits it once it was migrated."""

    thread_id: str
    branch: str
    scope: str = ""
    checkpoint_id: str
    step: int
    judgement: Judgement


def check(graph: Graph, store: Store) -> list[ParkedRun]:
    """Judge every unfinished run of this graph in a store, in all threads and branches."""
    access = access_of(store)
    return parked_runs(access.store, graph.build(), access.context)


async def acheck(graph: Graph, store: AsyncStore) -> list[ParkedRun]:
    """Judge every unfinished run of this graph in a store, in all threads and branches."""
    access = access_of(store)
    return await access.arun(parked_runs, graph.build(), access.context)


def parked_runs(store: Backend, built: Built, context: Context) -> list[ParkedRun]:
    """Return the unfinished runs of a graph, the branch made first first."""
    lanes = store.lanes(context.namespace, None, None)
    found: list[ParkedRun] = []
    for start in range(0, len(lanes), PAGE_ROWS_MAX):
        page = lanes[start : start + PAGE_ROWS_MAX]
        names = _candidates(store, built, context, page)
        for lane in page:
            if lane.head is None or lane.head in names:
                found += _judged(store, built, lane)
    return found


def _candidates(store: Backend, built: Built, context: Context, lanes: list[Lane]) -> set[str]:
    """Return the ids of the heads that may be unfinished runs of the graph, by their metadata alone."""
    ids = tuple(lane.head for lane in lanes if lane.head is not None)
    rows = store.find(Query(context.namespace, ids=ids))
    return {row.id for row in rows if _may_be_parked(built, row)}


def _may_be_parked(built: Built, row: Row) -> bool:
    try:
        return _is_parked(built, meta_of(row))
    except Corrupted:
        return True  # it is damaged: that comes out when it is loaded


def _is_parked(built: Built, meta: CheckpointMeta) -> bool:
    return meta.graph == built.name and not meta.is_over


def _judged(store: Backend, built: Built, lane: Lane) -> list[ParkedRun]:
    """Load a branch's newest checkpoint, which may be another one by now, and judge it."""
    try:
        checkpoint = latest(store, Cursor(lane.key))
    except NotFound:
        return []  # it was deleted meanwhile
    except (Corrupted, DecodeError) as error:
        return [_unreadable(built, lane, error.what)]
    if checkpoint is None or not _is_parked(built, checkpoint):
        return []
    return [
        ParkedRun(
            thread_id=checkpoint.thread_id,
            branch=checkpoint.branch,
            scope=checkpoint.scope,
            checkpoint_id=checkpoint.id,
            step=checkpoint.step,
            judgement=_judgement(built, checkpoint),
        )
    ]


def _judgement(built: Built, checkpoint: Checkpoint) -> Judgement:
    try:
        return migrate(built, checkpoint)[2]
    except MigrationFailed as error:
        judgement: Judgement = error.judgement
        return judgement


def _unreadable(built: Built, lane: Lane, what: str) -> ParkedRun:
    verdict = FrameVerdict(
        position="?",
        graph=built.name,
        verdict=Verdict.REFUSE,
        reasons=(f"the checkpoint cannot be read: {what}",),
        present_hash=fingerprint_of(built),
    )
    head = lane.head or "?"
    return ParkedRun(
        thread_id=lane.key.thread,
        branch=lane.key.branch,
        scope=lane.key.scope,
        checkpoint_id=head,
        step=0,
        judgement=Judgement(thread_id=lane.key.thread, checkpoint_id=head, frames=(verdict,)),
    )
