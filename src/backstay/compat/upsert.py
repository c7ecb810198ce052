"""Store checkpoints by id and replace them by id, as the adapters promise, on a store that only appends.

A put is an ordinary save after the thread's newest checkpoint, or after the newest of the branch that its parent is on;
if it names an older parent, it is a fork. If another process puts at the same time, the put tries again; the order of
puts is the order in which the store took them.

Values that the store's own record cannot hold go into its metadata: ``ORIGINAL`` holds the caller's step or parent, if
the store needed another, and values that only the adapter understands.

The newest checkpoint is replaced in place. An older one has children, whose digests cover its own: it stays, and the
new version is stored as a pending write of it, with a digest of its own. A tag marks such checkpoints, so that lists,
which read no payload, find the new version. Either way a checkpoint keeps its place in the order, and its thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backstay.codec import decode_stored, encode
from backstay.compat.adapter import is_same_json
from backstay.errors import Conflict, Corrupted, IdTaken, InvalidInput, NotFound
from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointFields, CheckpointMeta, Write
from backstay.model.ids import check_id
from backstay.operations import load, rows, save
from backstay.operations.arguments import branch_key
from backstay.operations.cursor import Base, Cursor, Services
from backstay.operations.listing import EVERY_BRANCH, Listing, listing_of_thread, raise_or_mark
from backstay.operations.rows import Damaged
from backstay.store.base import Backend, BranchKey, Query

RESERVED = "backstay."
"""Metadata keys and tags with this prefix belong to Backstay; callers cannot set them."""

ADAPTER = "backstay.adapter"
ORIGINAL = "backstay.original"
REPLACED = "backstay.replaced"
ATTEMPTS_MAX = 100  # each failed attempt means that another process stored a checkpoint
STATE_PREFIX = "state."

_NOT_INHERITED: CheckpointFields = {  # a fork takes these over from its parent, but a put does not
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
    """A checkpoint that an adapter wants to store."""

    adapter: str
    thread: str
    id: str
    step: int
    parent: str | None  # None: the thread's newest at the time of the put
    state: dict[str, Any]
    fields: CheckpointFields  # all other fields, without step and without Backstay's own metadata
    original: dict[str, Any]  # values that only the adapter understands
    as_dict: dict[str, Any]  # the whole record except its parent, in the adapter's form; used to compare two records


@dataclass(frozen=True, slots=True)
class Found:
    """A stored checkpoint. ``as_dict`` is its new version if it was replaced when it already had children."""

    meta: CheckpointMeta
    as_dict: dict[str, Any] | None = None
    replaced_parent: str | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """Return it with its payload. Only ``get`` reads that, lists do not."""
        assert isinstance(self.meta, Checkpoint)
        return self.meta

    @property
    def original(self) -> dict[str, Any]:
        """Return the caller's values that the store's record cannot hold."""
        original: dict[str, Any] = self.meta.metadata.get(ORIGINAL, {})
        return original

    @property
    def step(self) -> int:
        """Return the caller's step."""
        step: int = self.original.get("step", self.meta.step)
        return step

    @property
    def parent(self) -> str | None:
        """Return the caller's parent, or else the parent in the store."""
        if self.as_dict is not None:
            return self.replaced_parent
        parent: str | None = self.original.get("parent", self.meta.parent_id)
        return parent

    @property
    def tags(self) -> list[str]:
        """Return the caller's tags, in their original order unless they were changed since."""
        tags = [tag for tag in self.meta.tags if tag != REPLACED]
        given: list[str] = self.original.get("tags", tags)
        return list(given) if sorted(set(given)) == tags else tags

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the caller's metadata."""
        return {key: value for key, value in self.meta.metadata.items() if not key.startswith(RESERVED)}


AsDict = Callable[[Found], dict[str, Any]]
"""Returns a stored checkpoint in an adapter's form, to compare it with the draft of a put."""


def check_names(names: Iterable[str], what: str) -> None:
    """Raise InvalidInput if a caller's tag or metadata key has the reserved prefix."""
    for name in names:
        if name.startswith(RESERVED):
            raise InvalidInput(
                f"{what} {name!r} starts with {RESERVED!r}, which is reserved", hint="Choose another name"
            )


# Reading ----------------------------------------------------------------------------------------------------------


def get(store: Backend, services: Services, name: str) -> Found | None:
    """Return a checkpoint by its id, with its payload and every byte verified."""
    checkpoint = load.get(store, services.namespace, check_id(name, "checkpoint id"))
    if checkpoint is None:
        return None
    for write in checkpoint.writes:
        if write.task_id == REPLACED:
            data = write.value
            if type(data) is not bytes or hashlib.sha256(data[32:]).digest() != data[:32]:
                raise Corrupted(
                    f"checkpoint {checkpoint.id}: its replaced version does not match its digest",
                    thread=checkpoint.thread_id,
                    checkpoint=checkpoint.id,
                    hint="Put it again. Its first version is intact: read it with backstay.open",
                )
            parent, as_dict = decode_stored(data[32:])
            return Found(checkpoint, as_dict, parent)
    return Found(checkpoint)


def get_meta(store: Backend, services: Services, name: str) -> CheckpointMeta | None:
    """Return a checkpoint's metadata by its id. Nothing else is read, so this also works for a damaged checkpoint."""
    found = store.find(Query(services.namespace, ids=(check_id(name, "checkpoint id"),)))
    return rows.meta_of(found[0]) if found else None


def newest(store: Backend, services: Services, thread: str) -> CheckpointMeta | None:
    """Return the checkpoint of a thread that was put last, of all its branches."""
    listing = listing_of_thread(_branch(services, thread, MAIN), 1, None, EVERY_BRANCH)
    return next(raise_or_mark(listing.next_page(store), "raise"), None)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Some entries of a list, and those that are damaged."""

    items: list[Found]
    damaged: list[Damaged]


def next_page(store: Backend, services: Services, listing: Listing) -> FoundPage:
    """Return the next page of a list. Payloads are read only of replaced checkpoints."""
    items, damaged = [], []
    for meta in listing.next_page(store):
        if isinstance(meta, Damaged):
            damaged.append(meta)
            continue
        found: Found | None = Found(meta)
        if REPLACED in meta.tags:
            try:
                found = get(store, services, meta.id)
            except Corrupted as error:
                damaged.append(Damaged(thread_id=meta.thread_id, id=meta.id, seq=meta.seq, error=error))
                continue
        if found is not None:  # else it was deleted while the page was read
            items.append(found)
    return FoundPage(items, damaged)


# Writing ----------------------------------------------------------------------------------------------------------


def put(store: Backend, services: Services, draft: Draft, as_dict: AsDict) -> None:
    """Store a checkpoint, or replace the one with its id. Putting the same again changes nothing."""
    attempt = 0
    while True:
        stored = get(store, services, draft.id)
        if stored is not None:
            _check_may_replace(draft, stored.meta)
            if stored.parent == (draft.parent or stored.parent) and is_same_json(as_dict(stored), draft.as_dict):
                return
        try:
            if stored is None:
                _add(store, services, draft, attempt)
            else:
                _replace(store, services, draft, stored)
            return
        except (Conflict, NotFound):
            attempt += 1
            if attempt == ATTEMPTS_MAX:
                raise


def _check_may_replace(draft: Draft, stored: CheckpointMeta) -> None:
    """Raise IdTaken if the id belongs to another thread, or to a checkpoint that this adapter did not store."""
    if stored.thread_id != draft.thread:
        what = f"checkpoint {draft.id} belongs to thread {stored.thread_id!r}, not to {draft.thread!r}"
    elif stored.metadata.get(ADAPTER) != draft.adapter:
        what = f"checkpoint {draft.id} was not saved through this interface, so it cannot be replaced here"
    else:
        return
    raise IdTaken(
        what, winner=stored, thread=stored.thread_id, checkpoint=draft.id, hint="Choose another id for this checkpoint"
    )


def _add(store: Backend, services: Services, draft: Draft, attempt: int) -> None:
    last = newest(store, services, draft.thread)
    if draft.parent is not None and (last is None or draft.parent != last.id):
        source = load.get(store, services.namespace, check_id(draft.parent, "checkpoint id"))
        head = None if source is None else store.head(_branch(services, draft.thread, source.branch))
        if head is not None and head.row is not None and head.row.id == draft.parent:
            last = source  # the newest of another branch, which continues
        elif source is not None:  # the parent has a child already, or is in another thread: start a branch
            name = MAIN if last is None else draft.id if attempt == 0 else services.new_id()
            removed = [key for key in source.state if key not in draft.state]
            fields: CheckpointFields = {**_NOT_INHERITED, **_fields(draft, draft.step, source.id)}
            target, request = _branch(services, draft.thread, name), save.save_request(fields, draft.id)
            save.fork(store, services, source.id, target, draft.state, removed, request)
            return
    cursor = Cursor(_branch(services, draft.thread, MAIN if last is None else last.branch))
    _build_on(store, cursor, last)
    step = draft.step if last is None else max(draft.step, last.step + 1)
    fields = _fields(draft, step, None if last is None else last.id)
    save.save_state(store, services, cursor, draft.state, False, save.save_request(fields, draft.id))


def _replace(store: Backend, services: Services, draft: Draft, stored: Found) -> None:
    last = newest(store, services, draft.thread)
    cursor = Cursor(_branch(services, draft.thread, stored.meta.branch))
    parent = draft.parent or stored.parent
    if last is not None and last.id == draft.id and stored.as_dict is None:
        _build_on(store, cursor, stored.meta)
        fields = _fields(draft, max(draft.step, stored.meta.step), None)
        fields["metadata"][ORIGINAL]["parent"] = parent
        request = save.save_request(fields, draft.id, replaces_head=True)
        save.save_state(store, services, cursor, draft.state, False, request)
        return
    # First the tag, then the version, which is what counts: a tag without a version is harmless.
    rows.tag(store, services.namespace, draft.id, (REPLACED,), ())
    body = encode([parent, draft.as_dict], "checkpoint")
    version = Write(REPLACED, 0, REPLACED, hashlib.sha256(body).digest() + body)
    rows.write(store, cursor.branch, draft.id, (version,), True)


def _fields(draft: Draft, step: int, parent: str | None) -> CheckpointFields:
    original = dict(draft.original)
    if step != draft.step:
        original["step"] = draft.step
    if draft.parent is not None and draft.parent != parent:
        original["parent"] = draft.parent
    metadata = {**draft.fields.get("metadata", {}), ADAPTER: draft.adapter, ORIGINAL: original}
    return {**draft.fields, "step": step, "metadata": metadata}


def _build_on(store: Backend, cursor: Cursor, last: CheckpointMeta | None) -> None:
    """Make the next save build on exactly this version of this checkpoint, or on an empty branch; else Conflict."""
    cursor.head_state = None
    if last is None:
        cursor.base = Base()
        return
    head = store.head(cursor.branch)
    if head is None or head.row is None or (head.row.id, head.row.seq) != (last.id, last.seq):
        raise Conflict("another writer saved to the branch after it was read", thread=last.thread_id)
    cursor.base = Base.of(head)


def _branch(services: Services, thread: str, name: str) -> BranchKey:
    return branch_key(services.namespace, thread, name, "")


# Other fields in the state ----------------------------------------------------------------------------------------
#
# Backstay keeps messages, tool results and the like as keys of the state, under the same names, so that both sides can
# read them. A key of the caller's state with one of these names is renamed, and the record says so.


def join_state(state: Mapping[str, Any], others: Mapping[str, Any], original: dict[str, Any]) -> dict[str, Any]:
    """Return the state and the other fields as one mapping; ``original`` records whether keys were renamed."""
    if not any(key in others for key in state):
        return {**others, **state}
    original["renamed"] = True
    # Keys that already look renamed must be renamed too, or ``split_state`` could not undo it.
    renamed = {
        STATE_PREFIX + key if key in others or key.startswith(STATE_PREFIX) else key: state[key] for key in state
    }
    return {**others, **renamed}


def split_state(found: Found, names: Collection[str]) -> dict[str, Any]:
    """Return the state of a checkpoint without the fields of these names: the reverse of ``join_state``."""
    prefix = STATE_PREFIX if found.original.get("renamed") else ""
    return {key.removeprefix(prefix): value for key, value in found.checkpoint.state.items() if key not in names}
