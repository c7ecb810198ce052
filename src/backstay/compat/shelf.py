"""The shelf: checkpoints put by id and replaced by id, as the faces promise, on a store that only ever appends.

A put is an ordinary save on the thread's newest checkpoint, or a fork if it names an older one as its parent. Another
process may put at the same moment; then the place is looked at again, and the order of puts is the one the store gave.

What the store's own record has no room for is kept in its metadata: ``TOLD`` holds the step or parent that the caller
told, if the store's is another, and what else only the face understands.

The newest checkpoint is replaced in place. On an older one others stand, whose digests cover its own: it stays as it
is, and the new version is written beside it (in one step, with a digest). It is marked by a tag, so that lists, which
read no payload, know where to look. Either way a checkpoint keeps its place in the order, and its thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from backstay.codec import decode_stored, encode
from backstay.errors import Conflict, Corrupted, IdTaken, InvalidInput, NotFound
from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointMeta, Notes, Write
from backstay.model.damaged import Damaged
from backstay.model.ids import check_id
from backstay.store.base import Backend, LaneKey, Query, Removed
from backstay.thread import load, record, save
from backstay.thread.arguments import lane_key
from backstay.thread.cursor import Context, Cursor, Seen
from backstay.thread.damage import told
from backstay.thread.history import EVERY_BRANCH, Listing, listing_of_thread

RESERVED = "backstay."
"""Metadata keys and tags that begin so are ours; callers cannot set them."""

FACE = "backstay.face"
TOLD = "backstay.told"
REPLACED = "backstay.replaced"
ATTEMPTS_MAX = 100  # each lost one means that somebody else's put was stored

_BLANK: Notes = {  # what a fork would take over from its parent, and a put does not say
    "run_id": None,
    "graph": None,
    "last_node": None,
    "next_node": None,
    "continuation": None,
    "interrupt": None,
    "resume_hint": None,
    "tokens_used": 0,
    "cost_estimate": 0.0,
    "iteration": 0,
    "label": None,
    "summary": "",
}


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that a face wants to put."""

    thread: str
    id: str
    step: int
    parent: str | None  # None: the thread's newest, whichever that is when it is stored
    state: dict[str, Any]
    notes: Notes  # all else, but step and what is ours in the metadata
    told: dict[str, Any]  # what only the face understands
    wire: dict[str, Any]  # the whole record but its parent, in the face's own form; two are the same if these are equal


@dataclass(frozen=True, slots=True)
class Found:
    """A stored checkpoint; ``wire`` is the version that took its place, if it was replaced while others stood on it."""

    meta: CheckpointMeta
    wire: dict[str, Any] | None = None
    replaced_parent: str | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """Return it with its payload; only if it was got, not listed."""
        assert isinstance(self.meta, Checkpoint)
        return self.meta

    @property
    def told(self) -> dict[str, Any]:
        """Return what the face kept of it."""
        told: dict[str, Any] = self.meta.metadata.get(TOLD, {})
        return told

    @property
    def step(self) -> int:
        """Return the step that the caller told."""
        step: int = self.told.get("step", self.meta.step)
        return step

    @property
    def parent(self) -> str | None:
        """Return the parent that the caller told, or the one it was stored on."""
        if self.wire is not None:
            return self.replaced_parent
        parent: str | None = self.told.get("parent", self.meta.parent_id)
        return parent

    @property
    def tags(self) -> list[str]:
        """Return the tags but ours, in the order they were given in, if they are still those."""
        tags = [tag for tag in self.meta.tags if tag != REPLACED]
        given: list[str] = self.told.get("tags", tags)
        return list(given) if sorted(set(given)) == tags else tags

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the metadata but what is ours."""
        return {key: value for key, value in self.meta.metadata.items() if not key.startswith(RESERVED)}


Wire = Callable[[Found], dict[str, Any]]
"""How a face writes down a stored checkpoint, to see whether it is the one that is put."""


def check_names(names: Iterable[str], what: str) -> None:
    """Raise InvalidInput if a caller's tag or metadata key is one of ours."""
    for name in names:
        if name.startswith(RESERVED):
            raise InvalidInput(f"{what} {name!r} begins like one of Backstay's own", hint="Choose another name")


# Reading ----------------------------------------------------------------------------------------------------------


def get(store: Backend, context: Context, name: str) -> Found | None:
    """Return a checkpoint by its id, with its payload and every byte verified."""
    checkpoint = load.get(store, context.namespace, check_id(name, "checkpoint id"))
    return None if checkpoint is None else _found(checkpoint)


def look(store: Backend, context: Context, name: str) -> CheckpointMeta | None:
    """Return a checkpoint's metadata by its id; nothing else of it is read, so it may be damaged."""
    check_id(name, "checkpoint id")
    rows = store.find(Query(context.namespace, ids=(name,)))
    return record.meta_of(rows[0]) if rows else None


def newest(store: Backend, context: Context, thread: str) -> CheckpointMeta | None:
    """Return the checkpoint of a thread that was put last, of all its branches."""
    listing = listing_of_thread(_lane(context, thread, MAIN), 1, None, EVERY_BRANCH)
    return next(told(listing.next_page(store), "raise"), None)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Some entries of a list, and those that cannot be shown because they are damaged."""

    items: list[Found]
    damaged: list[Damaged]


def next_page(store: Backend, context: Context, listing: Listing) -> FoundPage:
    """Return the next page of a list of the store's; payloads are read only of what was replaced."""
    items, damaged = [], []
    for meta in listing.next_page(store):
        if isinstance(meta, Damaged):
            damaged.append(meta)
            continue
        found: Found | None = Found(meta)
        if REPLACED in meta.tags:
            try:
                found = get(store, context, meta.id)
            except Corrupted as error:
                damaged.append(Damaged(thread_id=meta.thread_id, id=meta.id, seq=meta.seq, error=error))
                continue
        if found is not None:  # else it was deleted while the page was read
            items.append(found)
    return FoundPage(items, damaged)


def _found(checkpoint: Checkpoint) -> Found:
    for write in checkpoint.writes:
        if write.task_id == REPLACED:
            parent, wire = _unpacked(write.value, checkpoint)
            return Found(checkpoint, wire, parent)
    return Found(checkpoint)


# Putting ----------------------------------------------------------------------------------------------------------


def put(store: Backend, context: Context, face: str, draft: Draft, wire: Wire) -> None:
    """Store a checkpoint, or let it take the place of the one with its id; the same again changes nothing."""
    attempt = 0
    while True:
        there = get(store, context, draft.id)
        if there is not None:
            _check_same_place(face, draft, there)
            if there.parent == (draft.parent or there.parent) and wire(there) == draft.wire:
                return
        try:
            if there is None:
                _add(store, context, face, draft, attempt)
            else:
                _replace(store, context, face, draft, there)
            return
        except (Conflict, NotFound):
            attempt += 1
            if attempt == ATTEMPTS_MAX:
                raise


def _check_same_place(face: str, draft: Draft, there: Found) -> None:
    """Raise IdTaken if the id belongs to another thread, or to a checkpoint that was not made through this face."""
    meta = there.meta
    if meta.thread_id != draft.thread:
        what = f"checkpoint {draft.id} belongs to thread {meta.thread_id!r}, so it cannot be put into {draft.thread!r}"
    elif meta.metadata.get(FACE) != face:
        what = f"checkpoint {draft.id} was not put here but saved by other means, so it is not replaced"
    else:
        return
    raise IdTaken(
        what, winner=meta, thread=meta.thread_id, checkpoint=draft.id, hint="Give each checkpoint an id of its own"
    )


def _add(store: Backend, context: Context, face: str, draft: Draft, attempt: int) -> None:
    last = newest(store, context, draft.thread)
    if draft.parent is not None and (last is None or draft.parent != last.id):
        source = load.get(store, context.namespace, check_id(draft.parent, "checkpoint id"))
        if source is not None:
            branch = MAIN if last is None else draft.id if attempt == 0 else context.new_id()
            _branch_off(store, context, face, draft, source, branch)
            return
    cursor = Cursor(_lane(context, draft.thread, MAIN if last is None else last.branch))
    _stand_on(store, cursor, last)
    step = draft.step if last is None else max(draft.step, last.step + 1)
    notes = _notes(face, draft, step, None if last is None else last.id)
    save.save_state(store, context, cursor, draft.state, False, save.request_of(notes, draft.id))


def _branch_off(store: Backend, context: Context, face: str, draft: Draft, source: Checkpoint, branch: str) -> None:
    """Begin a branch of the thread with a checkpoint whose parent is not the newest one, or is in another thread."""
    gone = [key for key in source.state if key not in draft.state]
    notes: Notes = {**_BLANK, **_notes(face, draft, draft.step, source.id)}
    target, request = _lane(context, draft.thread, branch), save.request_of(notes, draft.id)
    save.fork(store, context, source.id, target, draft.state, gone, request)


def _replace(store: Backend, context: Context, face: str, draft: Draft, there: Found) -> None:
    last = newest(store, context, draft.thread)
    cursor = Cursor(_lane(context, draft.thread, there.meta.branch))
    parent = draft.parent or there.parent
    if last is not None and last.id == draft.id and there.wire is None:
        _stand_on(store, cursor, there.meta)
        notes = _notes(face, draft, max(draft.step, there.meta.step), None)
        notes["metadata"][TOLD]["parent"] = parent
        request = save.request_of(notes, draft.id, replaces_head=True)
        save.save_state(store, context, cursor, draft.state, False, request)
        return
    # First the mark, then the version, which is what counts: a mark with nothing beside it is harmless.
    record.tag(store, context.namespace, draft.id, (REPLACED,), ())
    beside = Write(REPLACED, 0, REPLACED, _packed(parent, draft.wire))
    record.write(store, cursor.lane, draft.id, (beside,), True)


def _notes(face: str, draft: Draft, step: int, parent: str | None) -> Notes:
    told = dict(draft.told)
    if step != draft.step:
        told["step"] = draft.step
    if draft.parent is not None and draft.parent != parent:
        told["parent"] = draft.parent
    metadata = {**draft.notes.get("metadata", {}), FACE: face, TOLD: told}
    return {**draft.notes, "step": step, "metadata": metadata}


def _stand_on(store: Backend, cursor: Cursor, last: CheckpointMeta | None) -> None:
    """Let the next save build on this very version of this very checkpoint, or on nothing; else Conflict."""
    if last is None:
        cursor.seen, cursor.tip = Seen(), None
        return
    head = store.head(cursor.lane)
    if head is None or head.row is None or (head.row.id, head.row.seq) != (last.id, last.seq):
        raise Conflict("the branch has moved on since it was looked at", thread=last.thread_id)
    cursor.seen, cursor.tip = Seen.of(head), None


def _lane(context: Context, thread: str, branch: str) -> LaneKey:
    return lane_key(context.namespace, thread, branch, "")


def _packed(parent: str | None, wire: dict[str, Any]) -> bytes:
    body = encode([parent, wire], "checkpoint")
    return hashlib.sha256(body).digest() + body


def _unpacked(data: Any, checkpoint: Checkpoint) -> tuple[str | None, dict[str, Any]]:
    if type(data) is not bytes or hashlib.sha256(data[32:]).digest() != data[:32]:
        raise Corrupted(
            f"checkpoint {checkpoint.id}: the version that took its place does not match its digest",
            thread=checkpoint.thread_id,
            checkpoint=checkpoint.id,
            hint="Put it again; what it was before is intact and can be read with backstay.open",
        )
    parent, wire = decode_stored(data[32:])
    return parent, wire


# Deleting ---------------------------------------------------------------------------------------------------------


def delete(store: Backend, context: Context, names: Collection[str], protect: bool) -> Removed:
    """Delete checkpoints, all in one step; with ``protect`` no branch's newest and none that waits for a decision."""
    return store.delete(context.namespace, names, protect)
