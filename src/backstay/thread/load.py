"""Reading: from a row to a state, every byte checked against its digest on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from backstay.errors import Corrupted, DecodeError, NotFound
from backstay.model.checkpoint import PAYLOAD_FIELDS, Checkpoint, CheckpointMeta, bare
from backstay.model.damaged import Damaged
from backstay.pieces.body import from_body
from backstay.pieces.manifest import (
    FRAMES,
    PATH,
    RUN,
    SYSTEM_NAMES,
    Entries,
    Key,
    decode_base,
    decode_manifest,
    decode_table,
    root_digest,
)
from backstay.pieces.piece import Piece, Range
from backstay.pieces.tip import Live, Tip
from backstay.store.base import Backend, Head, Lane, LaneKey, Query, Row, head_is_lost
from backstay.store.layout import UNREADABLE
from backstay.thread import frames
from backstay.thread.cursor import Cursor, Seen
from backstay.thread.damage import read_each, unread
from backstay.thread.record import checkpoint_digest, damaged, meta_of, parent_digest, values_of, write_of


def latest(store: Backend, cursor: Cursor) -> Checkpoint | None:
    """Load the branch's newest checkpoint and go on from there."""
    failed: Row | None = None
    while True:
        head = store.head(cursor.lane)
        if head is None or head.row is None:
            cursor.seen, cursor.tip = Seen.of(head), (Tip() if head is None else None)
            return None
        try:
            return _load_head(store, cursor, head, head.row)
        except Corrupted:
            if head.row == failed or (is_there(store, head.row)):
                raise
            failed = head.row  # superseded and deleted while it was read: there is a newer one now, or it is damage


def _load_head(store: Backend, cursor: Cursor, head: Head, row: Row) -> Checkpoint:
    seen = Seen.of(head)
    before, tip, cursor.tip = cursor.seen, cursor.tip, None  # take it out: see Cursor.take
    known = tip is not None and before is not None and before.same_place(seen)
    if tip is None or not known:
        tip = open_tip(store, row, head.owned)
    fill(store, tip, list(tip.lives), row)
    checkpoint = _finish(row, tip, verify=not known)
    cursor.seen, cursor.tip = seen, tip
    return checkpoint


def load_row(store: Backend, row: Row) -> Checkpoint:
    """Load the checkpoint of a row that was found with its payload and writes."""
    try:
        tip = open_tip(store, row, {})
        fill(store, tip, list(tip.lives), row)
        return _finish(row, tip, verify=True)
    except Corrupted:
        if is_there(store, row):
            raise
        raise deleted_meanwhile(row) from None


def get(store: Backend, namespace: str, name: str) -> Checkpoint | None:
    """Load a checkpoint by its id."""
    row = find_row(store, namespace, name)
    return None if row is None else (load_row(store, row))


def get_of_thread(store: Backend, lane: LaneKey, name: str) -> Checkpoint | None:
    """Load a checkpoint by its id if it belongs to the thread."""
    found = get(store, lane.namespace, name)
    return found if found is not None and found.thread_id == lane.thread else None


def branches(store: Backend, lane: LaneKey) -> list[Lane | Damaged]:
    """Return a thread's branches, oldest first."""
    found = store.lanes(lane.namespace, lane.thread, lane.scope)
    shown = read_each(found, checked_lane, lambda each: (each.key.thread, None, each.head_seq))
    return [*unread(store, lane.namespace, lane.thread), *shown]


def payload_at_hand(cursor: Cursor, name: str) -> dict[str, Any] | None:
    """Return a just saved checkpoint's payload if the handle still has all of it in memory; reads nothing.

    Not the writes: others may have stored some before. Whoever uses the handle at this moment is not waited for.
    """
    if not cursor.lock.acquire(blocking=False):
        return None
    try:
        seen, tip = cursor.seen, cursor.tip
        if tip is None or seen is None or seen.head is None or seen.head.id != name:
            return None
        if any(live.parts is None for live in tip.lives.values()):
            return None
        found = assemble(seen.head, {}, decoders(tip))
        return {field: getattr(found, field) for field in PAYLOAD_FIELDS if field != "writes"}
    finally:
        cursor.lock.release()


def payload(store: Backend, namespace: str, name: str) -> dict[str, Any]:
    """Load what a just saved checkpoint leaves out until it is looked at."""
    found = get(store, namespace, name)
    if found is None:
        raise NotFound(name, checkpoint=name, hint="It was deleted after it was saved")
    return {field: getattr(found, field) for field in PAYLOAD_FIELDS}


def is_there(store: Backend, row: Row) -> bool:
    """Tell whether a checkpoint is still what it was. If not, bytes that lack are no damage: they went with it."""
    rows = store.find(Query(row.lane.namespace, ids=(row.id,)))
    return bool(rows) and rows[0].digest == row.digest


def deleted_meanwhile(row: Row) -> NotFound:
    """Return the error for a checkpoint that was deleted or replaced while it was being read."""
    return NotFound(row.id, thread=row.lane.thread, checkpoint=row.id, hint="It was deleted while being read")


def find_row(store: Backend, namespace: str, name: str) -> Row | None:
    """Return a checkpoint's row with payload and writes."""
    rows = store.find(Query(namespace, ids=(name,), payload=True, writes=True))
    return rows[0] if rows else None


def at_step(store: Backend, lane: LaneKey, step: int) -> Checkpoint | None:
    """Load the newest checkpoint at or before a step; before a fork's own first step, look where it was forked from."""
    before: int | None = None
    visited: set[LaneKey] = set()
    while lane not in visited:  # a name deleted and taken again can make branches descend from each other
        visited.add(lane)
        query = Query(*lane, step_max=step, before=before, limit=1, payload=True, writes=True)
        rows = store.find(query)
        if rows:
            return load_row(store, rows[0])
        origin = _origin(store, lane)
        if origin is None:
            return None
        lane, before = origin.lane, origin.seq + 1
    return None


def open_tip(store: Backend, row: Row, owned: Mapping[int, int]) -> Tip:
    """Return the pieces of a row's state; no value's bytes are read yet, except the inline ones."""
    try:
        base_entries = {} if row.base is None else _base_entries(row, row.base)
        entries = decode_manifest(row.manifest, base_entries)
        named = [(entry.table, entry.table_size) for entry in entries.values() if entry.table is not None]
        blobs = (store.fetch([Range(name, 0, size) for name, size in named])) if named else []
        tables: dict[bytes, Sequence[Piece]] = {}
        for (name, _), parts in zip(named, blobs, strict=True):
            tables[name] = decode_table(_checked(name, b"".join(parts), row, "a table of pieces"))
        return Tip.load(entries, tables, row.base, base_entries, owned)
    except DecodeError as error:
        raise _damaged(row, f"its manifest is damaged: {error.what}") from error


def fill(store: Backend, tip: Tip, keys: Iterable[Key], row: Row) -> None:
    """Bring the bytes of these values into memory, checked against their digests."""
    wanted = [(key, tip.lives[key]) for key in keys if tip.lives[key].parts is None]
    ranges = [piece for _, live in wanted for piece in live.pieces if isinstance(piece, Range)]
    if not wanted:
        return
    found = iter(store.fetch(ranges))
    for key, live in wanted:
        live.fill([part for piece in live.pieces for part in (next(found) if isinstance(piece, Range) else (piece,))])
        if live.hasher.digest() != live.entry.digest:
            raise _damaged(row, f"the bytes of {_key_name(key)} do not match their digest", key)


def decoders(tip: Tip) -> dict[Key, Callable[[], Any]]:
    """Return for each value the function that decodes it; all bytes are in memory."""
    return {
        key: partial(from_body, live.entry.kind, live.entry.count, live.parts or ()) for key, live in tip.lives.items()
    }


def decode_live(live: Live) -> Any:
    """Return the value of loaded bytes."""
    assert live.parts is not None
    return from_body(live.entry.kind, live.entry.count, live.parts)


def expected_digest(row: Row, meta: CheckpointMeta, entries: Entries, parent_digest: bytes) -> bytes:
    """Return the digest the row must have."""
    return checkpoint_digest(parent_digest, root_digest(entries), list(entries), meta, row.created_us, row.notes)


def verify_digest(row: Row, values: Mapping[str, Any], entries: Entries) -> None:
    """Raise Corrupted unless a row's digest is that of its description (its record's fields) and its entries."""
    parent = parent_digest(row)
    if parent is None:
        raise _damaged(row, f"its parent {row.parent_id} is missing")
    if expected_digest(row, bare(CheckpointMeta, dict(values)), entries, parent) != row.digest:
        raise _damaged(row, "its description or content does not match its digest")


def _finish(row: Row, tip: Tip, verify: bool) -> Checkpoint:
    values = values_of(row)
    if verify:
        verify_digest(row, values, tip.entries())
    return assemble(row, values, decoders(tip))


def assemble(row: Row, values: dict[str, Any], payload: Mapping[Key, Callable[[], Any]]) -> Checkpoint:
    """Return a checkpoint made of its record's fields, which become its own, and functions that decode its values."""
    state: dict[str, Any] = {}
    system: dict[Key, Any] = {}
    for key, decoded in payload.items():
        try:
            value = decoded()
        except DecodeError as error:
            raise type(error)(
                f"{_key_name(key)} cannot be decoded: {error.what}",
                thread=row.lane.thread,
                checkpoint=row.id,
                hint=error.hint,
            ) from error
        if isinstance(key, str):
            state[key] = value
        else:
            system[key] = value
    values["state"] = state
    values["frames"] = frames.read(system[FRAMES], state) if FRAMES in system else frames.NONE
    values["path"] = tuple(system.get(PATH, ()))
    values["run"] = system.get(RUN, {})
    values["writes"] = tuple(map(write_of, row.writes))
    return bare(Checkpoint, values)


def winner_of(store: Backend, lane: LaneKey) -> CheckpointMeta | None:
    """Return the metadata of the branch's present head."""
    head = store.head(lane)
    return None if head is None or head.row is None else meta_of(head.row)


def checked_lane(lane: Lane) -> Lane:
    """Return a branch as lists show it, if its head can be named."""
    if lane.head is None or UNREADABLE in lane.head:
        raise head_is_lost(lane.key)
    return lane


def _origin(store: Backend, lane: LaneKey) -> Row | None:
    lanes = store.lanes(lane.namespace, lane.thread, lane.scope)
    for other in lanes:
        if other.key == lane and other.origin is not None:
            return find_row(store, lane.namespace, other.origin)
    return None


def _base_entries(row: Row, base: bytes) -> Entries:
    if row.base_data is None:
        raise _damaged(row, "the base of its manifest is missing")
    return decode_base(_checked(base, row.base_data, row, "the base of its manifest"))


def _checked(name: bytes, data: bytes, row: Row, what: str) -> bytes:
    if hashlib.sha256(data).digest() != name:
        raise _damaged(row, f"{what} does not match its digest")
    return data


def _damaged(row: Row, what: str, key: Key | None = None) -> Corrupted:
    return damaged(row, what, None if key is None else _key_name(key))


def _key_name(key: Key) -> str:
    return f"state.{key}" if isinstance(key, str) else SYSTEM_NAMES.get(key, f"entry {key}")
