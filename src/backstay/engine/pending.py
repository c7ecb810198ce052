"""The unfinished runs of a graph in a store, and whether the current graph can resume them.

``graph.pending(store)`` shows before a deployment what the new graph would do to stored runs. It writes nothing, and
holds one checkpoint in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.engine.build import BuiltGraph
from backstay.engine.compatibility import FrameVerdict, Judgement, Verdict, migrate
from backstay.engine.fingerprint import fingerprint_of
from backstay.errors import Corrupted, DecodeError, MigrationFailed, NotFound
from backstay.model.checkpoint import CheckpointMeta
from backstay.operations.cursor import Cursor, Services
from backstay.operations.load import latest
from backstay.operations.rows import meta_of
from backstay.store.base import Backend, Branch, Query, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRun:
    """An unfinished run, by its newest checkpoint, and how the graph fits it after all migrations."""

    thread_id: str
    branch: str
    scope: str = ""
    checkpoint_id: str
    step: int
    judgement: Judgement


def pending_runs(store: Backend, built: BuiltGraph, services: Services) -> list[PendingRun]:
    """Return the unfinished runs of a graph in all threads and branches, oldest branch first."""
    found: list[PendingRun] = []
    after = 0
    while page := store.branches(services.namespace, None, None, after):
        after = page[-1].number
        heads = tuple(branch.head for branch in page if branch.head is not None)
        rows = store.find(Query(services.namespace, ids=heads))
        candidates = {row.id for row in rows if _may_be_pending(built, row)}
        for branch in page:
            if branch.head is None or branch.head in candidates:
                found += _judged(store, built, branch)
    return found


def _may_be_pending(built: BuiltGraph, row: Row) -> bool:
    """Judge a head by its metadata alone. A damaged head counts: loading it shows the damage."""
    try:
        return _is_pending(built, meta_of(row))
    except Corrupted:
        return True


def _is_pending(built: BuiltGraph, meta: CheckpointMeta) -> bool:
    return meta.graph == built.name and not meta.is_over


def _judged(store: Backend, built: BuiltGraph, branch: Branch) -> list[PendingRun]:
    """Load the newest checkpoint of a branch, which may have moved by now, and judge it."""
    thread_id, checkpoint_id, step = branch.key.thread, branch.head or "?", 0
    try:
        checkpoint = latest(store, Cursor(branch.key))
        if checkpoint is None or not _is_pending(built, checkpoint):
            return []
        checkpoint_id, step = checkpoint.id, checkpoint.step
        judgement = migrate(built, checkpoint)[2]
    except NotFound:
        return []  # it was deleted meanwhile
    except MigrationFailed as error:
        judgement = error.judgement
    except (Corrupted, DecodeError) as error:
        verdict = FrameVerdict(
            position="?",
            graph=built.name,
            verdict=Verdict.REFUSE,
            reasons=(f"the checkpoint cannot be read: {error.what}",),
            present_hash=fingerprint_of(built),
        )
        judgement = Judgement(thread_id=thread_id, checkpoint_id=checkpoint_id, frames=(verdict,))
    return [
        PendingRun(
            thread_id=thread_id,
            branch=branch.key.name,
            scope=branch.key.scope,
            checkpoint_id=checkpoint_id,
            step=step,
            judgement=judgement,
        )
    ]
