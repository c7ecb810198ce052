"""Save, append, fork and rewind: all end in one commit.

A save encodes the change (and may refuse it), reads the head (once; later saves know it), plans what is new, and calls
one method of the store. The commit names the head it builds on; if that head has moved, nothing is stored and the
caller gets Conflict with the winner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from backstay.errors import Conflict, Corrupted, Fenced, IdTaken, InvalidInput, NotFound
from backstay.model.checkpoint import ENCODED_FIELDS, EPOCH, CheckpointFields, SavedCheckpoint, unchecked
from backstay.model.ids import check_id
from backstay.operations.arguments import (
    CheckpointRef,
    append_change,
    check_field_names,
    check_mapping,
    check_state,
    id_of,
    names_of,
    state_change,
)
from backstay.operations.cursor import Base, Cursor, Services
from backstay.operations.load import (
    current_head,
    deleted_while_reading,
    find_row,
    is_stored,
    load_values,
    open_head_state,
)
from backstay.operations.rows import (
    MICROSECOND,
    NO_PARENT,
    checkpoint_digest,
    checksum,
    encode_fields,
    from_microseconds,
    meta_of,
    new_checkpoint,
    parent_digest,
    values_of,
)
from backstay.pieces.body import to_body
from backstay.pieces.head_state import Change, HeadState
from backstay.pieces.manifest import RUN, Key
from backstay.store.base import Backend, BranchKey, Commit, Committed, Row, no_checkpoint
from backstay.store.leases import fenced

MakeChange = Callable[[HeadState], Change]


@dataclass(slots=True)
class SaveRequest:
    """A request to save, without the change itself."""

    fields: CheckpointFields
    name: str | None = None  # the checkpoint's id, if the caller gave one
    on: str | None = None  # the id of the head it must build on, if the caller gave one
    replaces_head: bool = False
    inherited: Mapping[str, Any] = field(default_factory=dict)  # fields copied from another checkpoint
    copies: str | None = None  # the checkpoint that a fork or rewind copies; it becomes the parent
    run: Mapping[str, Any] | None = None  # the options of a graph's run that a fork replaces
    items: dict[str, list[Any]] = field(default_factory=dict)  # the state's lists, if the next save may trust identity


def save_request(
    fields: CheckpointFields, name: str | None, on: CheckpointRef | None = None, replaces_head: bool = False
) -> SaveRequest:
    """Return the request of a caller, checked."""
    if fields:
        check_field_names(fields)
    return SaveRequest(fields, name, None if on is None else id_of(on), replaces_head)


def save_state(
    store: Backend, services: Services, cursor: Cursor, state: Mapping[str, Any], frozen: bool, request: SaveRequest
) -> SavedCheckpoint:
    """Save a whole state; only what changed is written."""
    check_state(state)
    if request.replaces_head and request.name is None:
        raise InvalidInput(
            "replace=True needs the id of the newest checkpoint", hint="Write save(…, id=cp.id, replace=True)"
        )
    if frozen:
        request.items = {key: list(value) for key, value in state.items() if type(value) is list}

        def make(head_state: HeadState) -> Change:
            return state_change(state, request.fields, head_state, head_state.items)

    else:
        # Encode before anything is read or written: a state that cannot be stored leaves no trace.
        change = state_change(state, request.fields, None, None)

        def make(head_state: HeadState) -> Change:
            change.delete = {key for key in head_state.values if key not in change.put}
            return change

    return save_change(store, services, cursor, make, request)


def save_append(
    store: Backend,
    services: Services,
    cursor: Cursor,
    append: Mapping[str, Any] | None,
    put: Mapping[str, Any] | None,
    delete: Iterable[str],
    request: SaveRequest,
) -> SavedCheckpoint:
    """Save a known change: extend lists, replace keys, remove keys."""
    extend = append if type(append) is dict else check_mapping(append, "append")
    put = {} if put is None else check_mapping(put, "set")
    to_delete = () if type(delete) is tuple and not delete else names_of(delete, "delete")
    return save_change(store, services, cursor, partial(append_change, extend, put, to_delete, request.fields), request)


def save_change(
    store: Backend, services: Services, cursor: Cursor, make: MakeChange, request: SaveRequest
) -> SavedCheckpoint:
    """Save the change that ``make`` returns for the branch's head state; it may be called again for another one."""
    if request.name is not None and (same := _find_same(store, services, cursor, make, request)) is not None:
        return same
    base, head_state, cursor.head_state = cursor.base, cursor.head_state, None  # take it out: see Cursor.take
    if head_state is None or base is None or request.on is not None:
        base, head_state = _read_base(store, cursor, base, head_state, request.on)
    parent = head = base.head
    if request.replaces_head:
        if head is None or head.id != request.name:
            what = f"{request.name} is not the newest checkpoint, so it cannot be replaced"
            raise _conflict(store, cursor, what, None)
        parent = None if head.parent_id is None else find_row(store, cursor.branch.namespace, head.parent_id)
    plain = head is not None and not request.replaces_head and "step" not in request.fields
    step = head.step + 1 if head is not None and plain else _next_step(request, base)
    if request.name is None:  # the new id cannot exist yet
        return commit_change(store, services, cursor, base, head_state, make(head_state), request, parent, step)
    return _commit_once(store, services, cursor, base, head_state, make, request, parent, step)


def fork(
    store: Backend,
    services: Services,
    source: str,
    target: BranchKey,
    put: Mapping[str, Any] | None,
    delete: Iterable[str],
    request: SaveRequest,
) -> Cursor:
    """Start a branch (or a thread) with the state of a checkpoint; return a cursor on it."""
    put, to_delete = check_mapping(put, "set"), names_of(delete, "delete")
    row = find_or_raise(store, services, source)
    base = Base()
    cursor = Cursor(target, base)
    request.inherited, request.copies = copied_fields(row, "fork"), row.id

    def make(head_state: HeadState) -> Change:
        change = append_change({}, put, to_delete, request.fields, head_state, carry=True)
        if request.run is not None:
            change.put[RUN] = to_body(request.run, "run")
        return change

    if _find_same(store, services, cursor, make, request) is not None:
        return Cursor(target)
    if store.head(target) is not None:
        raise Conflict(
            f"branch {target.name!r} of thread {target.thread!r} already exists",
            thread=target.thread,
            hint="Choose another branch name, or delete that one first",
        )
    head_state = _open_source(store, row, {})
    step = request.fields.get("step", row.step)
    _commit_once(store, services, cursor, base, head_state, make, request, row, step, takes_over=True)
    return cursor


def rewind(store: Backend, services: Services, cursor: Cursor, source: str, request: SaveRequest) -> SavedCheckpoint:
    """Append a checkpoint with the content of an earlier one; nothing is deleted."""
    row = find_or_raise(store, services, source)
    if row.branch[:3] != cursor.branch[:3]:
        raise InvalidInput(
            f"checkpoint {source} belongs to thread {row.branch.thread!r}, so this thread cannot rewind to it",
            thread=cursor.branch.thread,
            checkpoint=source,
            hint="Use fork(…, to=…) to copy a state from another thread",
        )
    request.inherited, request.copies = copied_fields(row, "rewind"), row.id

    def make(head_state: HeadState) -> Change:
        return append_change({}, {}, (), request.fields, head_state, carry=True)

    same = _find_same(store, services, cursor, make, request)
    if same is not None:
        return same
    before, _ = cursor.take()
    head = store.head(cursor.branch)
    base = Base.of(head)
    check_base(store, cursor, before, base, request.on)
    cursor.move(before, base, None)
    head_state = _open_source(store, row, head.owned if head is not None and row.branch == cursor.branch else {})
    step = _next_step(request, base)
    return _commit_once(store, services, cursor, base, head_state, make, request, row, step, takes_over=True)


def _open_source(store: Backend, row: Row, owned: Mapping[int, int]) -> HeadState:
    """Return the pieces of a checkpoint that is copied."""
    try:
        return open_head_state(store, row, owned)
    except Corrupted:
        if is_stored(store, row):
            raise
        raise deleted_while_reading(row) from None


def _commit_once(
    store: Backend,
    services: Services,
    cursor: Cursor,
    base: Base,
    head_state: HeadState,
    make: MakeChange,
    request: SaveRequest,
    parent: Row | None,
    step: int,
    takes_over: bool = False,
) -> SavedCheckpoint:
    """Commit; if the id was taken meanwhile, return that checkpoint if it is the same."""
    try:
        return commit_change(
            store, services, cursor, base, head_state, make(head_state), request, parent, step, takes_over
        )
    except IdTaken:
        same = _find_same(store, services, cursor, make, request)
        if same is None:
            raise
        return same


def _read_base(
    store: Backend, cursor: Cursor, before: Base | None, head_state: HeadState | None, on: str | None
) -> tuple[Base, HeadState]:
    """Return what to build on: the head state in memory if the store's head has not moved, else the stored one."""
    head = store.head(cursor.branch)
    base = Base.of(head)
    check_base(store, cursor, before, base, on)
    cursor.move(before, base, None)
    if head_state is not None and before is not None and before.same_place(base):
        return base, head_state
    if head is None or head.row is None:
        return base, HeadState()
    try:
        return base, cursor.inherit(base) or open_head_state(store, head.row, head.owned)
    except Corrupted:
        _conflict_unless_there(store, cursor, head.row)
        raise


def _conflict_unless_there(store: Backend, cursor: Cursor, row: Row) -> None:
    """Raise Conflict if the checkpoint that a save builds on was deleted or replaced, together with its bytes."""
    if not is_stored(store, row):
        raise _conflict(store, cursor, f"checkpoint {row.id} no longer exists", None) from None


def check_base(store: Backend, cursor: Cursor, before: Base | None, base: Base, on: str | None) -> None:
    """Raise Conflict unless this save builds on the store's head, Fenced if another worker has the lease."""
    lease = cursor.lease
    if lease is not None and lease.epoch != base.epoch:
        error = fenced(cursor.branch, lease.epoch, base.epoch, None, 0)
        lease.fenced(error)
        raise error
    if on is not None:
        if base.head is None or base.head.id != on:
            raise _conflict(store, cursor, f"{on} is not the newest checkpoint of the branch", None)
    elif before is not None and not before.same_place(base):
        raise _conflict(store, cursor, "the branch has changed since it was last loaded", None)


def _next_step(request: SaveRequest, base: Base) -> int:
    head = base.head
    if head is None:
        step, least = request.fields.get("step", 1), 0
    else:
        following = head.step + (0 if request.replaces_head else 1)
        step, least = request.fields.get("step", following), following
    if type(step) is not int or step < least:
        raise InvalidInput(
            f"step {step!r:.40} is not higher than step {head.step} of the newest checkpoint"
            if head is not None
            else f"step {step!r:.40} is not a whole number, 0 or more",
            checkpoint=head.id if head is not None else None,
            hint="Leave step out: steps are counted for you",
        )
    return step


def commit_change(
    store: Backend,
    services: Services,
    cursor: Cursor,
    base: Base,
    head_state: HeadState,
    change: Change,
    request: SaveRequest,
    parent: Row | None,
    step: int,
    takes_over: bool = False,
) -> SavedCheckpoint:
    """Plan a change on a head state that no other code uses, and commit it on top of the base."""
    lease, branch = cursor.lease, cursor.branch
    given: CheckpointFields = {**request.inherited, **request.fields}  # type: ignore[typeddict-item]  # they are fields of a record
    name, parent_id = request.name or services.new_id(), parent.id if parent else None
    saved = new_checkpoint(branch, name, parent_id, step, services.now(), given)
    created_us = (saved.created_at - EPOCH) // MICROSECOND
    body = encode_fields(saved, described=bool(given))
    if unloaded := head_state.unloaded(change):
        _load_compared(store, cursor, head_state, unloaded, parent if takes_over else base.head)
    draft = head_state.plan(change, partial(services.new_stream, store))
    digest = checkpoint_digest(parent.digest if parent else NO_PARENT, draft.root, draft.keys, saved, created_us, body)
    commit = Commit(
        branch=branch,
        number=base.number,
        last_seq=base.last_seq,
        head_seq=base.head.seq if base.head is not None else 0,
        epoch=base.epoch if lease is None else lease.epoch,
        id=name,
        parent_id=parent_id,
        step=step,
        created_us=created_us,
        digest=digest,
        notes=body + checksum(body, name, parent_id, step, created_us, digest, draft.size),
        size=draft.size,
        manifest=draft.manifest,
        base=draft.base,
        tags=saved.tags,
        blobs=draft.blobs,
        chunks=draft.chunks,
        sources=head_state.sources if takes_over else draft.sources,
        owned=draft.owned,
        claim=None if lease is None else lease.request,
        replaces_head=request.replaces_head,
        requires=parent_id if takes_over else None,
        parent_digest=parent.digest if parent and (takes_over or request.replaces_head) else None,
    )
    committed = _store_commit(store, cursor, commit)
    row = commit.row(0, committed.seq)
    head_state.items = request.items
    # If it was stored before, its bytes are where that save put them, and not where this head state thinks.
    new = Base(committed.number, committed.seq, commit.epoch, row)
    cursor.move(base, new, head_state if committed.fresh else None)
    saved.__dict__.update(seq=row.seq, digest=digest, size=row.size, tags=row.tags)
    return saved


def _store_commit(store: Backend, cursor: Cursor, commit: Commit) -> Committed:
    """Store a commit. A save under a lease extends the lease, or finds out that it is lost."""
    lease, started = cursor.lease, time.monotonic()
    try:
        committed = store.commit(commit)
    except Fenced as error:
        if lease is not None:
            lease.fenced(error)
        raise
    except IdTaken:
        raise
    except Conflict as lost:
        raise _conflict(store, cursor, lost.what, lost) from lost
    if lease is not None and committed.fresh:
        lease.renewal.extended(started)
    return committed


def _load_compared(store: Backend, cursor: Cursor, head_state: HeadState, unloaded: list[Key], row: Row | None) -> None:
    """Load the bytes that a change is compared with."""
    if row is None:
        return
    try:
        load_values(store, head_state, unloaded, row)
    except Corrupted:
        _conflict_unless_there(store, cursor, row)
        raise


def copied_fields(row: Row, trigger: str) -> dict[str, Any]:
    """Return the fields that a copy of a checkpoint inherits: its position and description, not its tags."""
    values = values_of(row)
    kept = {name: values[name] for name in ENCODED_FIELDS if name in values}
    kept["trigger"] = trigger
    return kept


def find_or_raise(store: Backend, services: Services, name: str) -> Row:
    """Return a checkpoint with its payload; raise NotFound if it does not exist."""
    row = find_row(store, services.namespace, name, surely=True)
    if row is None:
        raise no_checkpoint(name)
    return row


def _conflict(store: Backend, cursor: Cursor, what: str, cause: Exception | None) -> Conflict:
    winner = current_head(store, cursor.branch)
    place = f"the newest is now {winner.id} (step {winner.step})" if winner else "the branch now has no checkpoint"
    conflict = Conflict(
        f"{what}; {place}",
        winner=winner,
        thread=cursor.branch.thread,
        hint="Nothing was stored. Call latest() to continue from the newest, or fork from the checkpoint you have",
    )
    conflict.__cause__ = cause
    return conflict


def _find_same(
    store: Backend, services: Services, cursor: Cursor, make: MakeChange, request: SaveRequest
) -> SavedCheckpoint | None:
    """Return the checkpoint with the given id if it is the same one; raise IdTaken if it has other content."""
    if request.name is None:
        return None
    check_id(request.name, "checkpoint id")
    stored = find_row(store, services.namespace, request.name)
    seen = None if cursor.base is None else cursor.base.head
    # A row may have replaced the head that the handle has seen: its own earlier attempt may have done it.
    is_newer = stored is not None and seen is not None and seen.id == stored.id and seen.seq != stored.seq
    if stored is None or (request.replaces_head and not is_newer):
        return None
    try:
        same = stored.branch == cursor.branch and (_same(store, stored, make, request))
    except Corrupted:
        if is_stored(store, stored):
            raise
        return _find_same(store, services, cursor, make, request)  # it was deleted meanwhile
    if not same:
        if request.replaces_head:
            return None  # another writer replaced it, so the head has moved
        raise IdTaken(
            f"checkpoint {stored.id} exists with other content",
            winner=meta_of(stored),
            thread=stored.branch.thread,
            checkpoint=stored.id,
            hint="Give each checkpoint its own id, or none",
        )
    try:  # write nothing: the answer must be as durable as the first save was, on a standby too
        store.tag(stored.branch.namespace, stored.id, (), ())
    except NotFound:
        return _find_same(store, services, cursor, make, request)  # it was deleted meanwhile
    head = store.head(cursor.branch)
    if head is not None and head.row is not None and head.row.id == stored.id:
        cursor.base, cursor.head_state = Base.of(head), None
    return unchecked(SavedCheckpoint, values_of(stored))


def _same(store: Backend, stored: Row, make: MakeChange, request: SaveRequest) -> bool:
    """Return whether this save would make the stored checkpoint; fields that the caller left out are taken from it."""
    if request.copies is not None and request.copies != stored.parent_id:
        return False
    digest, before = parent_digest(stored), None
    if stored.parent_id is not None and not request.replaces_head:
        before = find_row(store, stored.branch.namespace, stored.parent_id)
    is_after = before is None and (stored.parent_id is not None or request.replaces_head)
    if is_after:  # the checkpoint before it is gone; but its own state has what the save would add
        before = stored
    head_state = HeadState() if before is None else open_head_state(store, before, {})
    change = make(head_state)
    load_values(store, head_state, head_state.unloaded(change), before or stored)
    if is_after:
        for key, body in change.append.items():
            value = head_state.values.get(key)
            if value is None or value.entry.kind != body.kind or not value.data().endswith(body.data):
                return False
        change.append = {}
    draft = head_state.plan(change, count(1).__next__)  # only to get the root digest; nothing is written
    notes: CheckpointFields = {**request.inherited, **request.fields}  # type: ignore[typeddict-item]  # see commit_change
    step = request.fields.get("step", stored.step)
    meta = new_checkpoint(stored.branch, stored.id, stored.parent_id, step, from_microseconds(stored.created_us), notes)
    return (
        checkpoint_digest(digest or NO_PARENT, draft.root, draft.keys, meta, stored.created_us, encode_fields(meta))
        == stored.digest
    )
