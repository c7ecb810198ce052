"""Load checkpoints. Every byte is checked against its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from backstay.errors import Corrupted, DecodeError, NotFound
from backstay.model.checkpoint import PAYLOAD_FIELDS, Checkpoint, CheckpointMeta, unchecked
from backstay.operations.cursor import Base, Cursor
from backstay.operations.listing import read_each, unreadable
from backstay.operations.rows import (
    NO_FRAMES,
    NO_PARENT,
    Damaged,
    checkpoint_digest,
    damaged,
    meta_of,
    read_frames,
    values_of,
    write_of,
)
from backstay.pieces.body import from_body
from backstay.pieces.head_state import HeadState, StoredValue
from backstay.pieces.manifest import (
    FRAMES,
    PATH,
    RUN,
    SYSTEM_NAMES,
    Entries,
    Key,
    Piece,
    Range,
    decode_base,
    decode_manifest,
    decode_table,
    root_digest,
)
from backstay.store.base import Backend, Branch, BranchKey, Query, Row, head_is_lost
from backstay.store.layout import UNREADABLE


def latest(store: Backend, cursor: Cursor) -> Checkpoint | None:
    """Load the branch's newest checkpoint and build on it from now on."""
    failed: Row | None = None
    while True:
        head = store.head(cursor.branch)
        if head is None or head.row is None:
            cursor.base, cursor.head_state = Base.of(head), (HeadState() if head is None else None)
            return None
        row, base = head.row, Base.of(head)
        # Take the head state out: see Cursor.take.
        before, head_state, cursor.head_state = cursor.base, cursor.head_state, None
        known = head_state is not None and before is not None and before.same_place(base)
        try:
            if head_state is None or not known:
                head_state = open_head_state(store, row, head.owned)
            load_values(store, head_state, list(head_state.values), row)
            checkpoint = _finish(row, head_state, verify=not known)
        except Corrupted:
            if row == failed or is_stored(store, row):
                raise
            failed = row  # another writer replaced and deleted it meanwhile, or it is damaged: read again to find out
        else:
            cursor.base, cursor.head_state = base, head_state
            return checkpoint


def load_row(store: Backend, row: Row) -> Checkpoint:
    """Load the checkpoint of a row that was read with its payload and writes."""
    try:
        head_state = open_head_state(store, row, {})
        load_values(store, head_state, list(head_state.values), row)
        return _finish(row, head_state, verify=True)
    except Corrupted:
        if is_stored(store, row):
            raise
        raise deleted_while_reading(row) from None


def get(store: Backend, namespace: str, name: str) -> Checkpoint | None:
    """Load a checkpoint by its id."""
    row = find_row(store, namespace, name)
    return None if row is None else (load_row(store, row))


def get_of_thread(store: Backend, branch: BranchKey, name: str) -> Checkpoint | None:
    """Load a checkpoint by its id if it belongs to the thread."""
    found = get(store, branch.namespace, name)
    return found if found is not None and found.thread_id == branch.thread else None


def branches(store: Backend, branch: BranchKey) -> list[Branch | Damaged]:
    """Return a thread's branches, oldest first."""
    found = store.branches(branch.namespace, branch.thread, branch.scope)
    shown = read_each(found, checked_branch, lambda each: (each.key.thread, None, each.head_seq))
    return [*unreadable(store, branch.namespace, branch.thread), *shown]


def payload_in_memory(cursor: Cursor, name: str) -> dict[str, Any] | None:
    """Return the payload of a checkpoint that was just saved if the handle still has all of it in memory; read nothing.

    The writes are not included: another process may have stored some. Does not wait for the handle's lock.
    """
    if not cursor.lock.acquire(blocking=False):
        return None
    try:
        base, head_state = cursor.base, cursor.head_state
        if head_state is None or base is None or base.head is None or base.head.id != name:
            return None
        if any(stored.parts is None for stored in head_state.values.values()):
            return None
        found = assemble(base.head, {}, decoders(head_state))
        return {field: getattr(found, field) for field in PAYLOAD_FIELDS if field != "writes"}
    finally:
        cursor.lock.release()


def payload(store: Backend, namespace: str, name: str) -> dict[str, Any]:
    """Load the payload of a checkpoint that was just saved. Called only when the payload is first used."""
    found = get(store, namespace, name)
    if found is None:
        raise NotFound(f"checkpoint {name} does not exist", checkpoint=name, hint="It was deleted after it was saved")
    return {field: getattr(found, field) for field in PAYLOAD_FIELDS}


def is_stored(store: Backend, row: Row) -> bool:
    """Return whether a checkpoint is stored unchanged. If not, missing bytes are not damage: they were deleted too."""
    rows = store.find(Query(row.branch.namespace, ids=(row.id,)))
    return bool(rows) and rows[0].digest == row.digest


def deleted_while_reading(row: Row) -> NotFound:
    """Return the error for a checkpoint that was deleted or replaced while it was being read."""
    return NotFound(
        f"checkpoint {row.id} was deleted while it was being read", thread=row.branch.thread, checkpoint=row.id
    )


def find_row(store: Backend, namespace: str, name: str) -> Row | None:
    """Return a checkpoint's row with payload and writes."""
    rows = store.find(Query(namespace, ids=(name,), payload=True, writes=True))
    return rows[0] if rows else None


def at_step(store: Backend, branch: BranchKey, step: int) -> Checkpoint | None:
    """Load the newest checkpoint at or before a step; before a fork's first step, from its source branch."""
    before: int | None = None
    visited: set[BranchKey] = set()
    while branch not in visited:  # branch names that were deleted and reused can form a cycle
        visited.add(branch)
        query = Query(*branch, step_max=step, before=before, limit=1, payload=True, writes=True)
        rows = store.find(query)
        if rows:
            return load_row(store, rows[0])
        branches = store.branches(branch.namespace, branch.thread, branch.scope)
        name = next((other.origin for other in branches if other.key == branch), None)
        origin = None if name is None else find_row(store, branch.namespace, name)
        if origin is None:
            return None
        branch, before = origin.branch, origin.seq + 1
    return None


def open_head_state(store: Backend, row: Row, owned: Mapping[int, int]) -> HeadState:
    """Return the pieces of a row's state; no value's bytes are read yet, except the inline ones."""
    try:
        base_entries: Entries = {}
        if row.base is not None:
            if row.base_data is None:
                raise _damaged(row, "the base of its manifest is missing")
            base_entries = decode_base(_checked(row.base, row.base_data, row, "the base of its manifest"))
        entries = decode_manifest(row.manifest, base_entries)
        named = [(entry.table, entry.table_size) for entry in entries.values() if entry.table is not None]
        blobs = (store.fetch([Range(name, 0, size) for name, size in named])) if named else []
        tables: dict[bytes, Sequence[Piece]] = {}
        for (name, _), parts in zip(named, blobs, strict=True):
            tables[name] = decode_table(_checked(name, b"".join(parts), row, "a table of pieces"))
        return HeadState.load(entries, tables, row.base, base_entries, owned)
    except DecodeError as error:
        raise _damaged(row, f"its manifest is damaged: {error.what}") from error


def load_values(store: Backend, head_state: HeadState, keys: Iterable[Key], row: Row) -> None:
    """Load the bytes of these values into memory and check them against their digests."""
    wanted = [(key, head_state.values[key]) for key in keys if head_state.values[key].parts is None]
    ranges = [piece for _, stored in wanted for piece in stored.pieces if isinstance(piece, Range)]
    if not wanted:
        return
    found = iter(store.fetch(ranges))
    for key, stored in wanted:
        stored.fill(
            [part for piece in stored.pieces for part in (next(found) if isinstance(piece, Range) else (piece,))]
        )
        if stored.hasher.digest() != stored.entry.digest:
            raise _damaged(row, f"the bytes of {_key_name(key)} do not match their digest", key)


def decoders(head_state: HeadState) -> dict[Key, Callable[[], Any]]:
    """Return for each value the function that decodes it; all bytes are in memory."""
    return {
        key: partial(from_body, stored.entry.kind, stored.entry.count, stored.parts or ())
        for key, stored in head_state.values.items()
    }


def decode_value(stored: StoredValue) -> Any:
    """Return the value of loaded bytes."""
    assert stored.parts is not None
    return from_body(stored.entry.kind, stored.entry.count, stored.parts)


def expected_digest(row: Row, meta: CheckpointMeta, entries: Entries, parent_digest: bytes) -> bytes:
    """Return the digest the row must have."""
    return checkpoint_digest(parent_digest, root_digest(entries), list(entries), meta, row.created_us, row.notes)


def verify_digest(row: Row, values: Mapping[str, Any], entries: Entries) -> None:
    """Raise Corrupted unless the digest of a row matches its fields and entries."""
    parent = NO_PARENT if row.parent_id is None else row.parent_digest
    if parent is None:
        raise _damaged(row, f"its parent {row.parent_id} is missing")
    meta, root = unchecked(CheckpointMeta, dict(values)), root_digest(entries)
    if checkpoint_digest(parent, root, list(entries), meta, row.created_us, row.notes) != row.digest:
        raise _damaged(row, "its fields or content do not match its digest")


def _finish(row: Row, head_state: HeadState, verify: bool) -> Checkpoint:
    values = values_of(row)
    if verify:
        verify_digest(row, values, head_state.entries())
    return assemble(row, values, decoders(head_state))


def assemble(row: Row, values: dict[str, Any], payload: Mapping[Key, Callable[[], Any]]) -> Checkpoint:
    """Return a checkpoint made of its fields, which become its own, and functions that decode its values."""
    state: dict[str, Any] = {}
    system: dict[Key, Any] = {}
    for key, decoded in payload.items():
        try:
            value = decoded()
        except DecodeError as error:
            raise type(error)(
                f"{_key_name(key)} cannot be decoded: {error.what}",
                thread=row.branch.thread,
                checkpoint=row.id,
                hint=error.hint,
            ) from error
        if isinstance(key, str):
            state[key] = value
        else:
            system[key] = value
    values["state"] = state
    values["frames"] = read_frames(system[FRAMES], state) if FRAMES in system else NO_FRAMES
    values["path"] = tuple(system.get(PATH, ()))
    values["run"] = system.get(RUN, {})
    values["writes"] = tuple(map(write_of, row.writes))
    return unchecked(Checkpoint, values)


def current_head(store: Backend, branch: BranchKey) -> CheckpointMeta | None:
    """Return the metadata of the branch's current head."""
    head = store.head(branch)
    return None if head is None or head.row is None else meta_of(head.row)


def checked_branch(branch: Branch) -> Branch:
    """Return a branch as lists show it; Corrupted if its head cannot be read."""
    if branch.head is None or UNREADABLE in branch.head:
        raise head_is_lost(branch.key)
    return branch


def _checked(name: bytes, data: bytes, row: Row, what: str) -> bytes:
    if hashlib.sha256(data).digest() != name:
        raise _damaged(row, f"{what} does not match its digest")
    return data


def _damaged(row: Row, what: str, key: Key | None = None) -> Corrupted:
    return damaged(row, what, None if key is None else _key_name(key))


def _key_name(key: Key) -> str:
    return f"state.{key}" if isinstance(key, str) else SYSTEM_NAMES.get(key, f"entry {key}")
