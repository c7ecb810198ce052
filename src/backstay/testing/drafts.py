"""Checkpoints made by hand, one layer below ``Thread``: what the contract of a store is tested with.

Nothing here remembers anything: a draft is built on the lane as it is at that moment, so a test makes a late writer by
keeping a draft while something else happens.
"""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

from backstay.model.checkpoint import EPOCH
from backstay.pieces.tip import Tip
from backstay.store.base import Backend, Commit, Finding, LaneKey, Query, Row, WriteRow
from backstay.thread.change import state_change
from backstay.thread.cursor import Context, Seen
from backstay.thread.load import fill, find_row, get, open_tip
from backstay.thread.record import NO_PARENT, checkpoint_digest, encode_notes, new_meta, parent_digest, to_microseconds
from backstay.thread.verify import verify_lanes

SPACES = ("", "other")
"""Every namespace the tests write to; all are verified after each test."""

_numbers = itertools.count(1)


def lane(thread: str = "t", branch: str = "main", scope: str = "", namespace: str = "") -> LaneKey:
    """Return the name of a lane."""
    return LaneKey(namespace, thread, scope, branch)


def draft(
    backend: Backend,
    key: LaneKey,
    state: dict[str, Any],
    name: str | None = None,
    *,
    origin: str | None = None,
    replaces: bool = False,
    **notes: Any,
) -> Commit:
    """Return the commit that adds a state to a lane as it is now, or that takes ``origin`` over and changes it."""
    head = backend.head(key)
    seen = Seen.of(head)
    base = seen.head if origin is None else find_row(backend, key.namespace, origin)
    owned = head.owned if head is not None and origin is None else {}
    tip = Tip() if base is None else open_tip(backend, base, owned)
    change = state_change(state, {}, None, None)
    change.delete = {name for name in tip.lives if name not in change.put}
    if base is not None:
        fill(backend, tip, tip.unloaded(change), base)
    plan = tip.plan(change, lambda: backend.reserve(1))
    parent, above = (None if base is None else base.id), (NO_PARENT if base is None else base.digest)
    if replaces and base is not None:
        parent, above = base.parent_id, parent_digest(base) or NO_PARENT
    step = notes.pop("step", seen.head.step + 1 if seen.head else 1)
    created: datetime = notes.pop("created_at", EPOCH)
    meta = new_meta(key, name or f"cp-{next(_numbers)}", parent, step, created, notes)  # type: ignore[arg-type]  # Notes
    encoded = encode_notes(meta, to_microseconds(created))
    return Commit(
        lane=key,
        number=seen.number,
        last_seq=seen.last_seq,
        head_seq=seen.head.seq if seen.head else 0,
        epoch=seen.epoch,
        id=meta.id,
        parent_id=parent,
        step=step,
        created_us=to_microseconds(created),
        digest=checkpoint_digest(above, plan.root, plan.keys, meta, to_microseconds(created), encoded),
        notes=encoded,
        size=plan.size,
        manifest=plan.manifest,
        base=plan.base,
        tags=meta.tags,
        blobs=plan.blobs,
        chunks=plan.chunks,
        sources=plan.sources if origin is None else tip.sources,
        owned=plan.owned,
        requires=origin,
        parent_digest=above if parent is not None and (origin is not None or replaces) else None,
        replaces_head=replaces,
    )


def put(backend: Backend, key: LaneKey, state: dict[str, Any], name: str | None = None, **options: Any) -> str:
    """Add a state at the end of a lane and return the checkpoint's id."""
    commit = draft(backend, key, state, name, **options)
    assert backend.commit(commit).fresh
    return commit.id


def seq_of(backend: Backend, key: LaneKey, name: str) -> int:
    """Return the sequence number of a checkpoint."""
    (row,) = backend.find(Query(key.namespace, ids=(name,)))
    return row.seq


def names(rows: list[Row]) -> list[str]:
    """Return the ids of rows, in their order."""
    return [row.id for row in rows]


def state_of(backend: Backend, name: str, namespace: str = "") -> dict[str, Any] | None:
    """Return a checkpoint's state, every byte verified; None if there is no such checkpoint."""
    found = get(backend, namespace, name)
    return None if found is None else found.state


def bytes_of(backend: Backend) -> int:
    """Return how many bytes blobs and streams take."""
    return sum(backend.sizes().sources.values())


def contents(backend: Backend) -> list[object]:
    """Return everything a store holds, to be compared with later."""
    lanes = [lane for space in SPACES for lane in backend.lanes(space, None, None)]
    rows = [row for lane in lanes for row in backend.find(Query(*lane.key, payload=True, writes=True))]
    return [*lanes, *rows, dict(backend.sizes().sources)]


def damage(backend: Backend) -> list[Finding]:
    """Return what a check of the whole store finds: references, orphans, and every byte of every checkpoint."""
    found: list[Finding] = []
    for space in SPACES:
        context = Context(space, lambda: EPOCH, lambda: "")
        found += verify_lanes(backend, context, None, whole_store=True).findings
    return found


def long_list(count: int, first: int = 0) -> list[str]:
    """Return a list that is too large to be kept inline; a longer one begins with the shorter one."""
    return [f"item {number} {'x' * 90}" for number in range(first, first + count)]


def pending(task: str, index: int, body: bytes = b"v", path: str = "") -> WriteRow:
    """Return one pending write."""
    return WriteRow(task, index, "channel", "b", 0, body, path)
