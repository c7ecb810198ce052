"""Writing: save, append, fork, rewind, all through one commit.

A save is: encode (may refuse), look at the head (once; later saves know it), plan (pure), commit (one store verb). The
commit names the head it builds on; if that moved, nothing is stored and the caller gets Conflict with the winner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from backstay.errors import Conflict, Corrupted, Fenced, IdTaken, InvalidInput, NotFound
from backstay.model.checkpoint import NOTE_FIELDS, CheckpointMeta, Notes, SavedCheckpoint, bare
from backstay.model.ids import check_id
from backstay.pieces.manifest import Source
from backstay.pieces.tip import Change, Draft, Tip
from backstay.store.base import Commit, Committed, LaneKey, Row
from backstay.store.leases import fenced
from backstay.thread.change import append_change, check_state, state_change
from backstay.thread.cursor import STREAMS_AT_ONCE, Context, Cursor, Seen
from backstay.thread.hold import Hold
from backstay.thread.load import deleted_meanwhile, fill, find_row, is_there, open_tip, winner_of
from backstay.thread.perform import Flow, ask
from backstay.thread.record import (
    NO_PARENT,
    checkpoint_digest,
    encode_notes,
    from_microseconds,
    meta_of,
    new_meta,
    parent_digest,
    to_microseconds,
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


def save_state(
    context: Context, cursor: Cursor, state: Mapping[str, Any], frozen: bool, request: Request
) -> Flow[SavedCheckpoint]:
    """Save a whole state; only what changed is written."""
    check_state(state)
    if frozen:
        request.items = {key: list(value) for key, value in state.items() if type(value) is list}
        return (
            yield from _save(context, cursor, lambda tip: state_change(state, request.notes, tip, tip.items), request)
        )
    # Encode before anything is read or written: a state that cannot be stored leaves no trace.
    change = state_change(state, request.notes, None, None)
    return (yield from _save(context, cursor, lambda tip: _completed(change, tip), request))


def save_append(
    context: Context,
    cursor: Cursor,
    append: Mapping[str, Any],
    put: Mapping[str, Any],
    delete: Iterable[str],
    request: Request,
) -> Flow[SavedCheckpoint]:
    """Save a known change."""
    doomed = tuple(delete)
    return (
        yield from _save(context, cursor, lambda tip: append_change(append, put, doomed, request.notes, tip), request)
    )


def save_change(context: Context, cursor: Cursor, make: MakeChange, request: Request) -> Flow[SavedCheckpoint]:
    """Save a change that is made of the branch's tip."""
    return (yield from _save(context, cursor, make, request))


def fork(
    context: Context, source: str, target: LaneKey, put: Mapping[str, Any], delete: Iterable[str], request: Request
) -> Flow[Cursor]:
    """Begin a branch (or a thread) with the state of a checkpoint; return a cursor on it."""
    row = yield from _must_find(context, source)
    seen = Seen()
    cursor = Cursor(target, seen)
    request.keep, request.copies = _kept_notes(row, "fork"), row.id
    doomed = tuple(delete)

    def change(tip: Tip) -> Change:
        return append_change({}, put, doomed, request.notes, tip, carry=True)

    if (yield from _is_settled(context, cursor, change, request)) is not None:
        return Cursor(target)
    if (yield from ask(lambda store: store.head(target))) is not None:
        raise Conflict(
            f"branch {target.branch!r} of thread {target.thread!r} exists already",
            thread=target.thread,
            hint="Choose another branch name, or delete that one first",
        )
    tip = yield from _open_source(row, {})
    step = request.notes.get("step", row.step)
    saving = commit_on(context, cursor, seen, tip, change(tip), request, row, step, takes_over=True)
    yield from _or_settled(context, cursor, change, request, saving)
    return cursor


def rewind(context: Context, cursor: Cursor, source: str, request: Request) -> Flow[SavedCheckpoint]:
    """Append a checkpoint with the content of an earlier one; nothing is destroyed."""
    row = yield from _must_find(context, source)
    if row.lane[:3] != cursor.lane[:3]:
        raise InvalidInput(
            f"checkpoint {source} belongs to thread {row.lane.thread!r}",
            thread=cursor.lane.thread,
            checkpoint=source,
            hint="Use fork(…, to=…) to take a state over from another thread",
        )
    request.keep, request.copies = _kept_notes(row, "rewind"), row.id

    def change(tip: Tip) -> Change:
        return append_change({}, {}, (), request.notes, tip, carry=True)

    settled = yield from _is_settled(context, cursor, change, request)
    if settled is not None:
        return settled
    before, _ = cursor.take()
    head = yield from ask(lambda store: store.head(cursor.lane))
    seen = Seen.of(head)
    yield from _expect(cursor, before, seen, request.on)
    cursor.move(before, seen, None)
    owned = head.owned if head is not None and row.lane == cursor.lane else {}
    tip = yield from _open_source(row, owned)
    step = _next_step(request, seen)
    saving = commit_on(context, cursor, seen, tip, change(tip), request, row, step, takes_over=True)
    return (yield from _or_settled(context, cursor, change, request, saving))


def _open_source(row: Row, owned: Mapping[int, int]) -> Flow[Tip]:
    """Return the pieces of a checkpoint whose content is taken over."""
    try:
        return (yield from open_tip(row, owned))
    except Corrupted:
        if (yield from is_there(row)):
            raise
        raise deleted_meanwhile(row) from None


def _completed(change: Change, tip: Tip) -> Change:
    change.delete = {key for key in tip.lives if key not in change.put}
    return change


def _save(context: Context, cursor: Cursor, make: MakeChange, request: Request) -> Flow[SavedCheckpoint]:
    settled = yield from _is_settled(context, cursor, make, request)
    if settled is not None:
        return settled
    seen, tip = yield from _ready(cursor, request.on)
    head = seen.head
    step = _next_step(request, seen)
    parent = head
    if request.replaces_head:
        parent = yield from _parent_of_replaced(cursor, head, request)
    saving = commit_on(context, cursor, seen, tip, make(tip), request, parent, step)
    return (yield from _or_settled(context, cursor, make, request, saving))


def _or_settled(
    context: Context, cursor: Cursor, make: MakeChange, request: Request, saving: Flow[SavedCheckpoint]
) -> Flow[SavedCheckpoint]:
    """Run a save; if its id was taken meanwhile, look whether by the very same."""
    try:
        return (yield from saving)
    except IdTaken:
        settled = yield from _is_settled(context, cursor, make, request)
        if settled is None:
            raise
        return settled


def _ready(cursor: Cursor, on: str | None) -> Flow[tuple[Seen, Tip]]:
    """Return what to build on: the tip in memory, or the head's if it is still the one the cursor has seen."""
    before, tip = cursor.take()
    if tip is not None and before is not None and on is None:
        return before, tip
    head = yield from ask(lambda store: store.head(cursor.lane))
    seen = Seen.of(head)
    yield from _expect(cursor, before, seen, on)
    cursor.move(before, seen, None)
    if tip is not None and before is not None and before.same_place(seen):
        return seen, tip
    tip = Tip()
    if head is not None and head.row is not None:
        try:
            tip = yield from open_tip(head.row, head.owned)
        except Corrupted:
            yield from _conflict_unless_there(cursor, head.row)
            raise
    return seen, tip


def _conflict_unless_there(cursor: Cursor, row: Row) -> Flow[None]:
    """Raise Conflict if the checkpoint that a save builds on was deleted or replaced, and its bytes with it."""
    if not (yield from is_there(row)):
        raise (yield from _conflict(cursor, f"checkpoint {row.id} is no longer there", None)) from None


def _expect(cursor: Cursor, before: Seen | None, seen: Seen, on: str | None) -> Flow[None]:
    """Raise Conflict unless the store's head is the one this save builds on, Fenced if the lease is no longer ours."""
    hold = cursor.hold
    if hold is not None and hold.epoch != seen.epoch:
        error = fenced(cursor.lane, hold.epoch, seen.epoch, None, 0)
        hold.fenced(error)
        raise error
    if on is not None:
        if seen.head is None or seen.head.id != on:
            raise (yield from _conflict(cursor, f"{on} is not the newest checkpoint of the branch", None))
    elif before is not None and not before.same_place(seen):
        raise (yield from _conflict(cursor, "the branch has moved on since it was last loaded", None))


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
    context: Context,
    cursor: Cursor,
    seen: Seen,
    tip: Tip,
    change: Change,
    request: Request,
    parent: Row | None,
    step: int,
    takes_over: bool = False,
) -> Flow[SavedCheckpoint]:
    """Plan the change on a tip, which nobody else has, and commit it at the end of the branch as it was seen."""
    hold = cursor.hold
    name = request.name or context.new_id()
    meta = _meta(context, cursor.lane, name, parent, step, request)
    notes = encode_notes(meta)
    yield from _load_for(cursor, tip, change, parent if takes_over else seen.head)
    streams = yield from _streams(context, tip.streams_wanted(change))
    draft = tip.plan(change, streams.pop)
    digest = checkpoint_digest(parent.digest if parent else NO_PARENT, draft.root, draft.keys, meta, notes)
    commit = _commit(cursor.lane, hold, seen, meta, notes, draft, digest, tip.sources if takes_over else draft.sources)
    commit.replaces_head = request.replaces_head
    commit.requires = parent.id if takes_over and parent else None
    commit.parent_digest = parent.digest if parent and (takes_over or request.replaces_head) else None
    try:
        committed = yield from _stored(hold, commit)
    except IdTaken:
        raise
    except Conflict as lost:
        raise (yield from _conflict(cursor, lost.what, lost)) from lost
    context.give_streams(streams)
    row = commit.row(0, committed.seq)
    tip.items = request.items
    cursor.move(seen, Seen(committed.number, committed.seq, commit.epoch, row), tip)
    return bare(
        SavedCheckpoint, {**meta.__dict__, "seq": row.seq, "digest": digest, "size": row.size, "tags": row.tags}
    )


def _stored(hold: Hold | None, commit: Commit) -> Flow[Committed]:
    """Store a commit; if it is written under a lease, that is extended by it, or lost."""
    began = time.monotonic()
    try:
        committed = yield from ask(lambda store: store.commit(commit))
    except Fenced as error:
        if hold is not None:
            hold.fenced(error)
        raise
    if hold is not None and committed.fresh:
        hold.extended(began)
    return committed


def _load_for(cursor: Cursor, tip: Tip, change: Change, row: Row | None) -> Flow[None]:
    """Bring the bytes that a change is compared with into memory."""
    unloaded = tip.unloaded(change)
    if not unloaded or row is None:
        return
    try:
        yield from fill(tip, unloaded, row)
    except Corrupted:
        yield from _conflict_unless_there(cursor, row)
        raise


def _commit(
    lane: LaneKey,
    hold: Hold | None,
    seen: Seen,
    meta: CheckpointMeta,
    notes: bytes,
    draft: Draft,
    digest: bytes,
    sources: set[Source],
) -> Commit:
    return Commit(
        lane=lane,
        number=seen.number,
        last_seq=seen.last_seq,
        head_seq=seen.head.seq if seen.head is not None else 0,
        epoch=seen.epoch if hold is None else hold.epoch,
        id=meta.id,
        parent_id=meta.parent_id,
        step=meta.step,
        created_us=to_microseconds(meta.created_at),
        digest=digest,
        notes=notes,
        size=draft.size,
        manifest=draft.manifest,
        base=draft.base,
        tags=meta.tags,
        blobs=draft.blobs,
        chunks=draft.chunks,
        sources=sources,
        owned=draft.owned,
        claim=None if hold is None else hold.claim,
    )


def _streams(context: Context, wanted: int) -> Flow[list[int]]:
    taken = context.take_streams(wanted)
    if taken is not None:
        return taken
    size = wanted + STREAMS_AT_ONCE
    first = yield from ask(lambda store: store.reserve(size))
    context.give_streams(range(first + wanted, first + size))
    return list(range(first, first + wanted))


def _meta(
    context: Context, lane: LaneKey, name: str, parent: Row | None, step: int, request: Request
) -> CheckpointMeta:
    notes: Notes = {**request.keep, **request.notes}  # type: ignore[typeddict-item]  # `keep` holds fields of a record
    return new_meta(lane, name, parent.id if parent else None, step, context.now(), notes)


def _kept_notes(row: Row, trigger: str) -> dict[str, Any]:
    """Return what a copy of a checkpoint takes over: its position and description, not its tags."""
    values = values_of(row)
    kept = {name: values[name] for name in NOTE_FIELDS if name in values}
    kept["trigger"] = trigger
    return kept


def _must_find(context: Context, name: str) -> Flow[Row]:
    row = yield from find_row(context.namespace, name)
    if row is None:
        raise NotFound(name, checkpoint=name, hint="It may have been deleted; see thread.history()")
    return row


def _conflict(cursor: Cursor, what: str, cause: Exception | None) -> Flow[Conflict]:
    winner = yield from winner_of(cursor.lane)
    place = f"the newest is now {winner.id} (step {winner.step})" if winner else "the branch has no checkpoint now"
    conflict = Conflict(
        f"{what}; {place}",
        winner=winner,
        thread=cursor.lane.thread,
        hint="Nothing was stored. Call latest() to go on from there, or fork from the checkpoint you have",
    )
    conflict.__cause__ = cause
    return conflict


def _parent_of_replaced(cursor: Cursor, head: Row | None, request: Request) -> Flow[Row | None]:
    """Return the parent of the head that is about to be replaced under its own id."""
    if head is None or head.id != request.name:
        raise (
            yield from _conflict(cursor, f"{request.name} is not the newest checkpoint, so it cannot be replaced", None)
        )
    if head.parent_id is None:
        return None
    return (yield from find_row(cursor.lane.namespace, head.parent_id))


def _is_settled(context: Context, cursor: Cursor, make: MakeChange, request: Request) -> Flow[SavedCheckpoint | None]:
    """Return the checkpoint that already has the given id, if it is the very same; raise IdTaken if it is another."""
    if request.name is None:
        return None
    check_id(request.name, "checkpoint id")
    stored = yield from find_row(context.namespace, request.name)
    if stored is None or request.replaces_head:
        return None
    try:
        same = stored.lane == cursor.lane and (yield from _same(stored, make, request))
    except Corrupted:
        if (yield from is_there(stored)):
            raise
        return (yield from _is_settled(context, cursor, make, request))  # it was deleted meanwhile
    if not same:
        raise IdTaken(
            f"checkpoint {stored.id} exists with other content",
            winner=meta_of(stored),
            thread=stored.lane.thread,
            checkpoint=stored.id,
            hint="Give each checkpoint its own id, or none",
        )
    try:  # a write of nothing: the answer must be as durable as the first save's would have been, on a standby too
        yield from ask(lambda store: store.tag(stored.lane.namespace, stored.id, (), ()))
    except NotFound:
        return (yield from _is_settled(context, cursor, make, request))  # it was deleted meanwhile
    head = yield from ask(lambda store: store.head(cursor.lane))
    if head is not None and head.row is not None and head.row.id == stored.id:
        cursor.seen, cursor.tip = Seen.of(head), None
    return bare(SavedCheckpoint, values_of(stored))


def _same(stored: Row, make: MakeChange, request: Request) -> Flow[bool]:
    """Tell whether saving now would give the stored checkpoint. What the caller left open is taken from it."""
    if request.copies is not None and request.copies != stored.parent_id:
        return False
    parent = None if stored.parent_id is None else (yield from find_row(stored.lane.namespace, stored.parent_id))
    digest = parent_digest(stored)
    tip = Tip() if parent is None else (yield from open_tip(parent, {}))
    change = make(tip)
    yield from fill(tip, tip.unloaded(change), stored)
    draft = tip.plan(change, count(1).__next__)  # only to know the root; nothing of it is written
    notes: Notes = {**request.keep, **request.notes}  # type: ignore[typeddict-item]  # see _meta
    step = request.notes.get("step", stored.step)
    meta = new_meta(stored.lane, stored.id, stored.parent_id, step, from_microseconds(stored.created_us), notes)
    return checkpoint_digest(digest or NO_PARENT, draft.root, draft.keys, meta, encode_notes(meta)) == stored.digest
