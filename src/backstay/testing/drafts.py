"""Checkpoints made one layer below ``Thread``, to test the contract of a store.

A draft is built on the branch as it is at that moment. So a test makes a late writer by keeping a draft while something
else happens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from backstay.maintenance.check import check
from backstay.model.checkpoint import EPOCH
from backstay.operations.arguments import state_change
from backstay.operations.cursor import Base, Services
from backstay.operations.load import find_row, get, load_values, open_head_state
from backstay.operations.rows import (
    NO_PARENT,
    checkpoint_digest,
    checksum,
    encode_fields,
    new_checkpoint,
    parent_digest,
    to_microseconds,
)
from backstay.pieces.head_state import HeadState
from backstay.store.base import Backend, BranchKey, Commit, Finding, Query, Row, WriteRow
from backstay.store.records import KINDS

SPACES = ("", "other")
"""Every namespace the tests write to; all are verified after each test."""

PATIENCE_S = 30.0
POLL_S = 0.001

_numbers = itertools.count(1)


def branch_key(thread: str = "t", name: str = "main", scope: str = "", namespace: str = "") -> BranchKey:
    """Return the name of a branch."""
    return BranchKey(namespace, thread, scope, name)


def draft(
    backend: Backend,
    key: BranchKey,
    state: dict[str, Any],
    name: str | None = None,
    *,
    origin: str | None = None,
    replaces: bool = False,
    **notes: Any,
) -> Commit:
    """Return the commit that adds a state to a branch as it is now, or that forks ``origin`` and changes it."""
    head = backend.head(key)
    seen = Base.of(head)
    base = seen.head if origin is None else find_row(backend, key.namespace, origin)
    owned = head.owned if head is not None and origin is None else {}
    head_state = HeadState() if base is None else open_head_state(backend, base, owned)
    change = state_change(state, {}, None, None)
    change.delete = {name for name in head_state.values if name not in change.put}
    if base is not None:
        load_values(backend, head_state, head_state.unloaded(change), base)
    plan = head_state.plan(change, lambda: backend.reserve(1))
    parent, above = (None if base is None else base.id), (NO_PARENT if base is None else base.digest)
    if replaces and base is not None:
        parent, above = base.parent_id, parent_digest(base) or NO_PARENT
    step = notes.pop("step", seen.head.step + 1 if seen.head else 1)
    created: datetime = notes.pop("created_at", EPOCH)
    meta = new_checkpoint(key, name or f"cp-{next(_numbers)}", parent, step, created, notes)  # type: ignore[arg-type]  # Notes
    created_us, fields = to_microseconds(created), encode_fields(meta)
    digest = checkpoint_digest(above, plan.root, plan.keys, meta, created_us, fields)
    return Commit(
        branch=key,
        number=seen.number,
        last_seq=seen.last_seq,
        head_seq=seen.head.seq if seen.head else 0,
        epoch=seen.epoch,
        id=meta.id,
        parent_id=parent,
        step=step,
        created_us=created_us,
        digest=digest,
        notes=fields + checksum(fields, meta.id, parent, step, created_us, digest, plan.size),
        size=plan.size,
        manifest=plan.manifest,
        base=plan.base,
        tags=meta.tags,
        blobs=plan.blobs,
        chunks=plan.chunks,
        sources=plan.sources if origin is None else head_state.sources,
        owned=plan.owned,
        requires=origin,
        parent_digest=above if parent is not None and (origin is not None or replaces) else None,
        replaces_head=replaces,
    )


def put(backend: Backend, key: BranchKey, state: dict[str, Any], name: str | None = None, **options: Any) -> str:
    """Add a state at the end of a branch and return the checkpoint's id."""
    commit = draft(backend, key, state, name, **options)
    assert backend.commit(commit).fresh
    return commit.id


def seq_of(backend: Backend, key: BranchKey, name: str) -> int:
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
    """Return everything a store holds, to compare with later."""
    branches = [branch for space in SPACES for branch in backend.branches(space, None, None)]
    rows = [row for branch in branches for row in backend.find(Query(*branch.key, payload=True, writes=True))]
    return [*branches, *rows, dict(backend.sizes().sources)]


def damage(backend: Backend) -> list[Finding]:
    """Return the findings of a full check: references, orphans, and every byte of every checkpoint.

    The bodies of records are not checked: to a store they are plain bytes, and the contract's tests write any.
    """
    found: list[Finding] = []
    for space in SPACES:
        findings = check(backend, Services(space, lambda: EPOCH, lambda: "")).findings
        found += [finding for finding in findings if finding.where.partition(" ")[0] not in KINDS]
    return found


def long_list(count: int, first: int = 0) -> list[str]:
    """Return a list that is too large to be stored inline; a longer one starts with the shorter one."""
    return [f"item {number} {'x' * 90}" for number in range(first, first + count)]


def pending(task: str, index: int, body: bytes = b"v", path: str = "") -> WriteRow:
    """Return one pending write."""
    return WriteRow(task, index, "channel", "b", 0, body, path)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return as soon as the condition holds; fail if it does not hold within this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds:g} s"
        time.sleep(POLL_S)
