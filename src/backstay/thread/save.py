"""Writing: save, append, fork, rewind, all through one commit.

A save is: encode (may refuse), look at the head (once; later saves know it), plan (pure), commit (one store verb). The
commit names the head it builds on; if that moved, nothing is stored and the caller gets Conflict with the winner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from backstay.errors import Conflict, Corrupted, Fenced, IdTaken, InvalidInput, NotFound
from backstay.model.checkpoint import EPOCH, NOTE_FIELDS, Notes, SavedCheckpoint, bare
from backstay.model.ids import check_id
from backstay.pieces.manifest import Key
from backstay.pieces.tip import Change, Tip
from backstay.store.base import Backend, Commit, Committed, LaneKey, Row
from backstay.store.leases import fenced
from backstay.thread.arguments import Which, check_mapping, check_notes, name_of, names_of
from backstay.thread.change import append_change, check_state, state_change
from backstay.thread.cursor import Context, Cursor, Seen
from backstay.thread.load import deleted_meanwhile, fill, find_row, is_there, open_tip, winner_of
from backstay.thread.record import (
    MICROSECOND,
    NO_PARENT,
    checkpoint_digest,
    encode_notes,
    from_microseconds,
    meta_of,
    new_meta,
    parent_digest,
    values_of,
)

MakeChange = Callable[[Tip], Change]


@dataclass(slots=True)
class Request:
    """What a caller asked to be saved, besides the change itself."""

    notes: Notes
    name: str | None = None  # the checkpoint's id, if the caller gave one
    on: str | None = None  # the id of the head it must build on, if the caller gave one
    replaces_head: bool = False
    keep: Mapping[str, Any] = field(default_factory=dict)  # notes taken over from another checkpoint
    copies: str | None = None  # the checkpoint whose content is taken over by a fork or rewind: the parent, then
    items: dict[str, list[Any]] = field(default_factory=dict)  # the state's lists, if the next save may trust identity


def request_of(notes: Notes, name: str | None, on: Which | None = None, replaces_head: bool = False) -> Request:
    """Return what a caller asked for, checked."""
    return Request(check_notes(notes) if notes else notes, name, None if on is None else name_of(on), replaces_head)


def save_state(
    store: Backend, context: Context, cursor: Cursor, state: Mapping[str, Any], frozen: bool, request: Request
) -> SavedCheckpoint:
    """Save a whole state; only what changed is written."""
    check_state(state)
    if request.replaces_head and request.name is None:
        raise InvalidInput(
            "replace=True needs the id of the newest checkpoint", hint="Write save(…, id=cp.id, replace=True)"
        )
    if frozen:
        request.items = {key: list(value) for key, value in state.items() if type(value) is list}

        def make(tip: Tip) -> Change:
            return state_change(state, request.notes, tip, tip.items)

    else:
        # Encode before anything is read or written: a state that cannot be stored leaves no trace.
        change = state_change(state, request.notes, None, None)

        def make(tip: Tip) -> Change:
            change.delete = {key for key in tip.lives if key not in change.put}
            return change

    return save_change(store, context, cursor, make, request)


def save_append(
    store: Backend,
    context: Context,
    cursor: Cursor,
    append: Mapping[str, Any] | None,
    put: Mapping[str, Any] | None,
    delete: Iterable[str],
    request: Request,
) -> SavedCheckpoint:
    """Save a known change: extend lists, replace keys, remove keys."""
    extend = append if type(append) is dict else check_mapping(append, "append")
    put = {} if put is None else check_mapping(put, "set")
    doomed = () if type(delete) is tuple and not delete else names_of(delete, "delete")
    return save_change(store, context, cursor, partial(append_change, extend, put, doomed, request.notes), request)


def save_change(
    store: Backend, context: Context, cursor: Cursor, make: MakeChange, request: Request
) -> SavedCheckpoint:
    """Save a change that is made of the branch's tip; it may be made again, on another tip."""
    if request.name is not None and (same := _find_same(store, context, cursor, make, request)) is not None:
        return same
    seen, tip, cursor.tip = cursor.seen, cursor.tip, None  # take it out: see Cursor.take
    if tip is None or seen is None or request.on is not None:
        seen, tip = _look(store, cursor, seen, tip, request.on)
    parent = _parent_of_replaced(store, cursor, seen.head, request) if request.replaces_head else seen.head
    head = seen.head
    plain = head is not None and not request.replaces_head and "step" not in request.notes
    step = head.step + 1 if head is not None and plain else _next_step(request, seen)
    if request.name is None:  # then nobody else can have its id
        return commit_on(store, context, cursor, seen, tip, make(tip), request, parent, step)
    return _commit_once(store, context, cursor, seen, tip, make, request, parent, step)


def fork(
    store: Backend,
    context: Context,
    source: str,
    target: LaneKey,
    put: Mapping[str, Any] | None,
    delete: Iterable[str],
    request: Request,
) -> Cursor:
    """Begin a branch (or a thread) with the state of a checkpoint; return a cursor on it."""
    put, doomed = check_mapping(put, "set"), names_of(delete, "delete")
    row = _must_find(store, context, source)
    seen = Seen()
    cursor = Cursor(target, seen)
    request.keep, request.copies = _kept_notes(row, "fork"), row.id

    def make(tip: Tip) -> Change:
        return append_change({}, put, doomed, request.notes, tip, carry=True)

    if _find_same(store, context, cursor, make, request) is not None:
        return Cursor(target)
    if store.head(target) is not None:
        raise Conflict(
            f"branch {target.branch!r} of thread {target.thread!r} exists already",
            thread=target.thread,
            hint="Choose another branch name, or delete that one first",
        )
    tip = _open_source(store, row, {})
    step = request.notes.get("step", row.step)
    _commit_once(store, context, cursor, seen, tip, make, request, row, step, takes_over=True)
    return cursor


def rewind(store: Backend, context: Context, cursor: Cursor, source: str, request: Request) -> SavedCheckpoint:
    """Append a checkpoint with the content of an earlier one; nothing is destroyed."""
    row = _must_find(store, context, source)
    if row.lane[:3] != cursor.lane[:3]:
        raise InvalidInput(
            f"checkpoint {source} belongs to thread {row.lane.thread!r}",
            thread=cursor.lane.thread,
            checkpoint=source,
            hint="Use fork(…, to=…) to take a state over from another thread",
        )
    request.keep, request.copies = _kept_notes(row, "rewind"), row.id

    def make(tip: Tip) -> Change:
        return append_change({}, {}, (), request.notes, tip, carry=True)

    same = _find_same(store, context, cursor, make, request)
    if same is not None:
        return same
    before, _ = cursor.take()
    head = store.head(cursor.lane)
    seen = Seen.of(head)
    _expect(store, cursor, before, seen, request.on)
    cursor.move(before, seen, None)
    tip = _open_source(store, row, head.owned if head is not None and row.lane == cursor.lane else {})
    step = _next_step(request, seen)
    return _commit_once(store, context, cursor, seen, tip, make, request, row, step, takes_over=True)


def _open_source(store: Backend, row: Row, owned: Mapping[int, int]) -> Tip:
    """Return the pieces of a checkpoint whose content is taken over."""
    try:
        return open_tip(store, row, owned)
    except Corrupted:
        if is_there(store, row):
            raise
        raise deleted_meanwhile(row) from None


def _commit_once(
    store: Backend,
    context: Context,
    cursor: Cursor,
    seen: Seen,
    tip: Tip,
    make: MakeChange,
    request: Request,
    parent: Row | None,
    step: int,
    takes_over: bool = False,
) -> SavedCheckpoint:
    """Commit; if the id was taken meanwhile, look whether by the very same checkpoint."""
    try:
        return commit_on(store, context, cursor, seen, tip, make(tip), request, parent, step, takes_over)
    except IdTaken:
        same = _find_same(store, context, cursor, make, request)
        if same is None:
            raise
        return same


def _look(store: Backend, cursor: Cursor, before: Seen | None, tip: Tip | None, on: str | None) -> tuple[Seen, Tip]:
    """Return what to build on: the tip in memory if the store's head is still its own, else the head's."""
    head = store.head(cursor.lane)
    seen = Seen.of(head)
    _expect(store, cursor, before, seen, on)
    cursor.move(before, seen, None)
    if tip is not None and before is not None and before.same_place(seen):
        return seen, tip
    if head is None or head.row is None:
        return seen, Tip()
    try:
        return seen, open_tip(store, head.row, head.owned)
    except Corrupted:
        _conflict_unless_there(store, cursor, head.row)
        raise


def _conflict_unless_there(store: Backend, cursor: Cursor, row: Row) -> None:
    """Raise Conflict if the checkpoint that a save builds on was deleted or replaced, and its bytes with it."""
    if not (is_there(store, row)):
        raise (_conflict(store, cursor, f"checkpoint {row.id} is no longer there", None)) from None


def _expect(store: Backend, cursor: Cursor, before: Seen | None, seen: Seen, on: str | None) -> None:
    """Raise Conflict unless the store's head is the one this save builds on, Fenced if the lease is no longer ours."""
    hold = cursor.hold
    if hold is not None and hold.epoch != seen.epoch:
        error = fenced(cursor.lane, hold.epoch, seen.epoch, None, 0)
        hold.fenced(error)
        raise error
    if on is not None:
        if seen.head is None or seen.head.id != on:
            raise (_conflict(store, cursor, f"{on} is not the newest checkpoint of the branch", None))
    elif before is not None and not before.same_place(seen):
        raise (_conflict(store, cursor, "the branch has moved on since it was last loaded", None))


def _next_step(request: Request, seen: Seen) -> int:
    head = seen.head
    if head is None:
        step, least = request.notes.get("step", 1), 0
    else:
        following = head.step + (0 if request.replaces_head else 1)
        step, least = request.notes.get("step", following), following
    if type(step) is not int or step < least:
        raise InvalidInput(
            f"step {step!r:.40} is not higher than the newest checkpoint's, {head.step}"
            if head is not None
            else f"step {step!r:.40} is no whole number from 0 on",
            checkpoint=head.id if head is not None else None,
            hint="Leave step out: steps are counted for you",
        )
    return step


def commit_on(
    store: Backend,
    context: Context,
    cursor: Cursor,
    seen: Seen,
    tip: Tip,
    change: Change,
    request: Request,
    parent: Row | None,
    step: int,
    takes_over: bool = False,
) -> SavedCheckpoint:
    """Plan the change on a tip, which nobody else has, and commit it at the end of the branch as it was seen."""
    hold, lane = cursor.hold, cursor.lane
    given: Notes = {**request.keep, **request.notes}  # type: ignore[typeddict-item]  # `keep` holds fields of a record
    name, parent_id = request.name or context.new_id(), parent.id if parent else None
    meta = new_meta(lane, name, parent_id, step, context.now(), given)
    created_us = (meta.created_at - EPOCH) // MICROSECOND
    notes = encode_notes(meta, created_us, described=bool(given))
    if unloaded := tip.unloaded(change):
        _load_for(store, cursor, tip, unloaded, parent if takes_over else seen.head)
    draft = tip.plan(change, partial(context.new_stream, store))
    digest = checkpoint_digest(parent.digest if parent else NO_PARENT, draft.root, draft.keys, meta, created_us, notes)
    commit = Commit(
        lane=lane,
        number=seen.number,
        last_seq=seen.last_seq,
        head_seq=seen.head.seq if seen.head is not None else 0,
        epoch=seen.epoch if hold is None else hold.epoch,
        id=name,
        parent_id=parent_id,
        step=step,
        created_us=created_us,
        digest=digest,
        notes=notes,
        size=draft.size,
        manifest=draft.manifest,
        base=draft.base,
        tags=meta.tags,
        blobs=draft.blobs,
        chunks=draft.chunks,
        sources=tip.sources if takes_over else draft.sources,
        owned=draft.owned,
        claim=None if hold is None else hold.claim,
        replaces_head=request.replaces_head,
        requires=parent_id if takes_over else None,
        parent_digest=parent.digest if parent and (takes_over or request.replaces_head) else None,
    )
    committed = _stored(store, cursor, commit)
    row = commit.row(0, committed.seq)
    tip.items = request.items
    cursor.move(seen, Seen(committed.number, committed.seq, commit.epoch, row), tip)
    return bare(
        SavedCheckpoint, {**meta.__dict__, "seq": row.seq, "digest": digest, "size": row.size, "tags": row.tags}
    )


def _stored(store: Backend, cursor: Cursor, commit: Commit) -> Committed:
    """Store a commit. A save under a lease extends it, or finds out that it is lost."""
    hold, began = cursor.hold, time.monotonic()
    try:
        committed = store.commit(commit)
    except Fenced as error:
        if hold is not None:
            hold.fenced(error)
        raise
    except IdTaken:
        raise
    except Conflict as lost:
        raise _conflict(store, cursor, lost.what, lost) from lost
    if hold is not None and committed.fresh:
        hold.pulse.extended(began)
    return committed


def _load_for(store: Backend, cursor: Cursor, tip: Tip, unloaded: list[Key], row: Row | None) -> None:
    """Bring the bytes that a change is compared with into memory."""
    if row is None:
        return
    try:
        fill(store, tip, unloaded, row)
    except Corrupted:
        _conflict_unless_there(store, cursor, row)
        raise


def _kept_notes(row: Row, trigger: str) -> dict[str, Any]:
    """Return what a copy of a checkpoint takes over: its position and description, not its tags."""
    values = values_of(row)
    kept = {name: values[name] for name in NOTE_FIELDS if name in values}
    kept["trigger"] = trigger
    return kept


def _must_find(store: Backend, context: Context, name: str) -> Row:
    row = find_row(store, context.namespace, name)
    if row is None:
        raise NotFound(name, checkpoint=name, hint="It may have been deleted; see thread.history()")
    return row


def _conflict(store: Backend, cursor: Cursor, what: str, cause: Exception | None) -> Conflict:
    winner = winner_of(store, cursor.lane)
    place = f"the newest is now {winner.id} (step {winner.step})" if winner else "the branch has no checkpoint now"
    conflict = Conflict(
        f"{what}; {place}",
        winner=winner,
        thread=cursor.lane.thread,
        hint="Nothing was stored. Call latest() to go on from there, or fork from the checkpoint you have",
    )
    conflict.__cause__ = cause
    return conflict


def _parent_of_replaced(store: Backend, cursor: Cursor, head: Row | None, request: Request) -> Row | None:
    """Return the parent of the head that is about to be replaced under its own id."""
    if head is None or head.id != request.name:
        raise (_conflict(store, cursor, f"{request.name} is not the newest checkpoint, so it cannot be replaced", None))
    if head.parent_id is None:
        return None
    return find_row(store, cursor.lane.namespace, head.parent_id)


def _find_same(
    store: Backend, context: Context, cursor: Cursor, make: MakeChange, request: Request
) -> SavedCheckpoint | None:
    """Return the checkpoint that already has the given id, if it is the very same; raise IdTaken if it is another."""
    if request.name is None:
        return None
    check_id(request.name, "checkpoint id")
    stored = find_row(store, context.namespace, request.name)
    if stored is None or request.replaces_head:
        return None
    try:
        same = stored.lane == cursor.lane and (_same(store, stored, make, request))
    except Corrupted:
        if is_there(store, stored):
            raise
        return _find_same(store, context, cursor, make, request)  # it was deleted meanwhile
    if not same:
        raise IdTaken(
            f"checkpoint {stored.id} exists with other content",
            winner=meta_of(stored),
            thread=stored.lane.thread,
            checkpoint=stored.id,
            hint="Give each checkpoint its own id, or none",
        )
    try:  # a write of nothing: the answer must be as durable as the first save's would have been, on a standby too
        store.tag(stored.lane.namespace, stored.id, (), ())
    except NotFound:
        return _find_same(store, context, cursor, make, request)  # it was deleted meanwhile
    head = store.head(cursor.lane)
    if head is not None and head.row is not None and head.row.id == stored.id:
        cursor.seen, cursor.tip = Seen.of(head), None
    return bare(SavedCheckpoint, values_of(stored))


def _same(store: Backend, stored: Row, make: MakeChange, request: Request) -> bool:
    """Tell whether saving now would give the stored checkpoint. What the caller left open is taken from it."""
    if request.copies is not None and request.copies != stored.parent_id:
        return False
    parent = None if stored.parent_id is None else (find_row(store, stored.lane.namespace, stored.parent_id))
    digest = parent_digest(stored)
    tip = Tip() if parent is None else (open_tip(store, parent, {}))
    change = make(tip)
    fill(store, tip, tip.unloaded(change), stored)
    draft = tip.plan(change, count(1).__next__)  # only to know the root; nothing of it is written
    notes: Notes = {**request.keep, **request.notes}  # type: ignore[typeddict-item]  # see _meta
    step = request.notes.get("step", stored.step)
    meta = new_meta(stored.lane, stored.id, stored.parent_id, step, from_microseconds(stored.created_us), notes)
    return (
        checkpoint_digest(
            digest or NO_PARENT, draft.root, draft.keys, meta, stored.created_us, encode_notes(meta, stored.created_us)
        )
        == stored.digest
    )
