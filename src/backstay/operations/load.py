"""Load checkpoints. Every byte is checked against its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from backstay.errors import Corrupted, DecodeError, InvalidInput, NotFound
from backstay.model.checkpoint import PAYLOAD_FIELDS, Checkpoint, CheckpointMeta, unchecked
from backstay.operations.arguments import check_step, id_of
from backstay.operations.cursor import Base, Cursor
from backstay.operations.listing import every_branch, read_each, unreadable
from backstay.operations.rows import (
    CHECKSUM_BYTES,
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
from backstay.pieces.body import LIST, from_body
from backstay.pieces.head_state import HeadState, StoredValue
from backstay.pieces.manifest import (
    FRAMES,
    JOURNAL,
    PATH,
    RUN,
    SYSTEM_NAMES,
    Entries,
    Entry,
    Key,
    Piece,
    Range,
    decode_base,
    decode_manifest,
    decode_table,
    grown_by,
    root_digest,
)
from backstay.store.base import Backend, Branch, BranchKey, Query, Row, head_is_lost
from backstay.store.layout import UNREADABLE

T = TypeVar("T")

TAIL_BYTES_MIN = 4096
"""A shorter list is read as a whole."""

KEYS_SHOWN_MAX = 20


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
                head_state = cursor.inherit(base) or open_head_state(store, row, head.owned)
            load_values(store, head_state, head_state.values, row)
            values = values_of(row)
            if not known:
                verify_digest(row, values, head_state.entries())
            checkpoint = assemble(row, values, head_state.values)
        except Corrupted:
            if row == failed:
                raise
            failed = row  # another writer replaced or deleted it meanwhile, or it is damaged: read again to find out
        else:
            cursor.base, cursor.head_state = base, head_state
            return checkpoint


def load_row(store: Backend, row: Row, keys: Collection[str] | None = None) -> Checkpoint:
    """Load the checkpoint of a row that was read with payload and writes; with ``keys``, only these of its state."""
    try:
        head_state = open_head_state(store, row, {})
        values = values_of(row)
        verify_digest(row, values, head_state.entries())
        stored = head_state.values
        if keys is not None:
            for key in keys:
                _check_key(row, stored, key)
            stored = {key: value for key, value in stored.items() if type(key) is int or key in keys}
        load_values(store, head_state, stored, row)
        return assemble(row, values, stored)
    except Corrupted:
        if is_stored(store, row):
            raise
        raise deleted_while_reading(row) from None


def get(store: Backend, namespace: str, name: str, keys: Collection[str] | None = None) -> Checkpoint | None:
    """Load a checkpoint by its id; with ``keys``, only these of its state."""
    row = find_row(store, namespace, name, surely=True)
    return None if row is None else load_row(store, row, keys)


def get_of_thread(
    store: Backend, branch: BranchKey, name: str, keys: Collection[str] | None = None
) -> Checkpoint | None:
    """Load a checkpoint by its id if it belongs to the thread."""
    row = find_row(store, branch.namespace, name, surely=True)
    return None if row is None or row.branch.thread != branch.thread else load_row(store, row, keys)


def tail(store: Backend, branch: BranchKey, key: str, count: int) -> list[Any]:
    """Return the last items of a list in the branch's newest checkpoint, without reading the others if possible."""
    failed: Row | None = None
    while True:
        head = store.head(branch)
        if head is None or head.row is None:
            return []
        row = head.row
        try:
            entries = read_all_entries(store, row)
            verify_digest(row, values_of(row), entries)
            entry = _check_key(row, entries, key)
            if entry.kind != LIST:
                raise InvalidInput(
                    f"state.{key} is not a list",
                    thread=branch.thread,
                    checkpoint=row.id,
                    hint=f"Load it with thread.get(id, keys=[{key!r}])",
                )
            start = max(0, entry.count - count)
            added, pieces = _added_since(store, row, entry, key, start)
            if pieces is None:
                return list(load_row(store, row, [key]).state[key][start:])
            parts = [part for found in _fetched(store, row, pieces) for part in found]
            try:
                items = list(from_body(LIST, added, parts)[max(0, added - count) :])
            except DecodeError as error:
                raise _undecodable(row, key, error) from error
            if is_stored(store, row):  # else its bytes may have been deleted, and others put in their place
                return items
        except (Corrupted, DecodeError, NotFound):
            if row == failed or is_stored(store, row):
                raise
            failed = row  # as in ``latest``


def _added_since(store: Backend, row: Row, entry: Entry, key: str, start: int) -> tuple[int, list[Piece] | None]:
    """Return how many items a list got since it had at most ``start`` items, and their pieces; None if nothing says so.

    The bytes of a list have no marks between its items, but an older checkpoint says how many items and bytes the list
    had, and a list that only grew still starts with these bytes. The rows of the bytes after them check themselves.
    """
    if entry.pieces is None or entry.table is not None or entry.size < TAIL_BYTES_MIN:
        return 0, None
    back = 1 + (entry.count - start) * row.seq // entry.count  # if it grew evenly
    while start and back < row.seq:
        try:
            older = store.find(Query(*row.branch, before=row.seq - back + 1, limit=1, payload=True))
            entries = read_all_entries(store, older[0]) if older else {}
            known = entries.get(key)
            if known is None or known.kind != LIST or known.pieces is None or known.table is not None:
                break
            pieces = grown_by(known.pieces, entry.pieces)
            if pieces is None:
                break  # the list was rewritten since
            if known.count <= start:
                verify_digest(older[0], values_of(older[0]), entries)
                return entry.count - known.count, pieces
            back *= 2
        except Corrupted:
            break  # this damage must not hide the newest checkpoint
    return 0, None


def read_all_entries(store: Backend, row: Row) -> Entries:
    """Return the entries of a row's manifest, those in its journal too."""
    entries, _ = read_entries(row)
    return open_head_state(store, row, {}).entries() if JOURNAL in entries else entries


def _check_key(row: Row, values: Mapping[Key, T], key: str) -> T:
    found = values.get(key) if type(key) is str else None
    if found is None:
        names = ", ".join(repr(name) for name in list(values)[:KEYS_SHOWN_MAX] if type(name) is str)
        raise NotFound(
            f"the state has no key {key!r:.100}",
            thread=row.branch.thread,
            checkpoint=row.id,
            hint=f"It has {names:.500}" if names else "It is empty",
        )
    return found


def branches(store: Backend, branch: BranchKey) -> list[Branch | Damaged]:
    """Return a thread's branches, oldest first."""
    found = every_branch(store, branch.namespace, branch.thread, branch.scope)
    shown = read_each(found, checked_branch, lambda each: (each.key.thread, None, each.head_seq))
    return [*unreadable(store, branch.namespace, branch.thread), *shown]


def scopes(store: Backend, branch: BranchKey) -> list[str]:
    """Return the scopes of a thread, oldest first."""
    return list(dict.fromkeys(each.key.scope for each in every_branch(store, branch.namespace, branch.thread)))


def payload_in_memory(cursor: Cursor, saved: CheckpointMeta) -> dict[str, Any] | None:
    """Return the payload of a checkpoint that was just saved if the handle still has all of it in memory; read nothing.

    The writes are not included: another process may have stored some.
    """
    copied = cursor.copy_head_state(lambda base, row: (row.id, row.digest) == (saved.id, saved.digest))
    if copied is None or any(stored.parts is None for stored in copied[1].values.values()):
        return None
    row, head_state = copied
    found = assemble(row, {}, head_state.values)
    return {field: getattr(found, field) for field in PAYLOAD_FIELDS if field != "writes"}


def payload(store: Backend, saved: CheckpointMeta) -> dict[str, Any]:
    """Load the payload of a checkpoint that was just saved. Called only when the payload is first used."""
    found = get(store, saved.namespace, saved.id)
    if found is None or found.digest != saved.digest:
        happened = "deleted" if found is None else "replaced"
        raise NotFound(
            f"checkpoint {saved.id} was {happened} after it was saved",
            thread=saved.thread_id,
            checkpoint=saved.id,
            hint="Load the newest checkpoint with thread.latest()",
        )
    return {field: getattr(found, field) for field in PAYLOAD_FIELDS}


def is_stored(store: Backend, row: Row) -> bool:
    """Return whether a checkpoint is stored unchanged. If not, missing bytes are not damage: they were deleted too."""
    if UNREADABLE in row.id:
        return True
    rows = store.find(Query(row.branch.namespace, ids=(row.id,), surely=True))
    return bool(rows) and row.digest in (b"", rows[0].digest)  # it is empty if the row could not be read


def deleted_while_reading(row: Row) -> NotFound:
    """Return the error for a checkpoint that was deleted or replaced while it was being read."""
    return NotFound(
        f"checkpoint {row.id} was deleted while it was being read", thread=row.branch.thread, checkpoint=row.id
    )


def find_row(store: Backend, namespace: str, name: str, surely: bool = False) -> Row | None:
    """Return a checkpoint's row with payload and writes; ``surely`` is for callers who expect it to exist."""
    rows = store.find(Query(namespace, ids=(name,), payload=True, writes=True, surely=surely))
    return rows[0] if rows else None


def at_step(store: Backend, branch: BranchKey, step: int, exact: bool) -> Checkpoint | None:
    """Load the newest checkpoint at or before a step; ``exact`` raises NotFound if the step is missing."""
    row = _row_exactly_at(store, branch, step) if exact else _row_up_to(store, branch, step)
    found = None if row is None else find_row(store, branch.namespace, row.id, surely=True)
    return None if found is None else load_row(store, found)


def checkpoint_id(store: Backend, branch: BranchKey, checkpoint: CheckpointMeta | str | int) -> str:
    """Return the id of a checkpoint, which may be given as a step of a branch."""
    if not isinstance(checkpoint, int):
        return id_of(checkpoint)
    if isinstance(checkpoint, bool) or checkpoint < 0:
        raise InvalidInput(f"a step must be a whole number, 0 or more, not {checkpoint!r:.40}", thread=branch.thread)
    return _row_exactly_at(store, branch, check_step(checkpoint)).id


def _row_exactly_at(store: Backend, branch: BranchKey, step: int) -> Row:
    row = _row_up_to(store, branch, step)
    earlier = None if row is None else values_of(row)["step"]
    if row is not None and earlier == step:
        return row
    later = None
    for line, before in _line_of(store, branch):
        while rows := store.find(Query(*line, before=before)):
            above = [number for each in rows if (number := values_of(each)["step"]) > step]
            later, before = min(above, default=later), rows[-1].seq
            if len(above) < len(rows):
                break
    near = " and ".join(str(each) for each in (earlier, later) if each is not None)
    raise NotFound(
        f"branch {branch.name!r} of thread {branch.thread!r} has no checkpoint at step {step}",
        thread=branch.thread,
        hint=f"The nearest: step {near}" if near else "It has no checkpoints: check the thread id",
    )


def _row_up_to(store: Backend, branch: BranchKey, step: int) -> Row | None:
    """Return the newest row at or before a step; before a fork's first step, from its source branch."""
    found = (_row_at(store, line, step, before) for line, before in _line_of(store, branch))
    return next((row for row in found if row is not None), None)


def _line_of(store: Backend, branch: BranchKey) -> Iterator[tuple[BranchKey, int | None]]:
    """Yield a branch and the ones it was forked from, each with the number before which its rows belong to the line."""
    before: int | None = None
    visited: set[BranchKey] = set()
    while branch not in visited:  # branch names that were deleted and reused can form a cycle
        visited.add(branch)
        yield branch, before
        branches = every_branch(store, branch.namespace, branch.thread, branch.scope)
        name = next((other.origin for other in branches if other.key == branch), None)
        origin = None if name is None else find_row(store, branch.namespace, name)
        if origin is None:
            return
        branch, before = origin.branch, origin.seq + 1


def _row_at(store: Backend, branch: BranchKey, step: int, before: int | None) -> Row | None:
    """Return a branch's newest row at or before a step. Steps rise with sequence numbers, so halving finds it."""
    rows = store.find(Query(*branch, before=before, limit=1))
    if not rows or (newest := values_of(rows[0])["step"]) <= step:
        return rows[0] if rows else None
    # The row at ``high`` comes after the step; ``best`` is the newest up to ``low``. Most saves are one step, so the
    # first look is where it would be then.
    best, low, high = None, 0, rows[0].seq
    guess = high - (newest - step)
    while high - low > 1:
        middle, guess = guess if low < guess < high else (low + high) // 2, 0
        later, *earlier = store.find(Query(*branch, before=middle + 2, limit=2)) or (None,)
        if later is None or values_of(later)["step"] <= step:
            best, low = later, middle + 1
        elif not earlier or values_of(earlier[0])["step"] <= step:
            return earlier[0] if earlier else None
        else:
            high = earlier[0].seq
    return best


def open_head_state(store: Backend, row: Row, owned: Mapping[int, int]) -> HeadState:
    """Return the pieces of a row's state; no value's bytes are read yet, except the inline ones."""
    entries, base_entries = read_entries(row)
    try:
        named = [(entry.table, entry.table_size) for entry in entries.values() if entry.table is not None]
        blobs = (store.fetch([Range(name, 0, size) for name, size in named])) if named else []
        tables: dict[bytes, Sequence[Piece]] = {}
        for (name, _), parts in zip(named, blobs, strict=True):
            tables[name] = decode_table(_checked(name, b"".join(parts), row, "a table of pieces"))
        head_state = HeadState.load(entries, tables, row.base, base_entries, owned)
        if head_state.journal is not None:
            _load(store, [(JOURNAL, head_state.journal)], row)
            head_state.replay_journal()
        return head_state
    except DecodeError as error:
        raise _damaged(row, f"its manifest is damaged: {error.what}") from error


def read_entries(row: Row) -> tuple[Entries, Entries]:
    """Return the entries of a row's manifest, and those of its base."""
    try:
        base_entries: Entries = {}
        if row.base is not None:
            if row.base_data is None:
                raise _damaged(row, "the base of its manifest is missing")
            base_entries = decode_base(_checked(row.base, row.base_data, row, "the base of its manifest"))
        return decode_manifest(row.manifest, base_entries), base_entries
    except DecodeError as error:
        raise _damaged(row, f"its manifest is damaged: {error.what}") from error


def load_values(store: Backend, head_state: HeadState, keys: Iterable[Key], row: Row) -> None:
    """Load the bytes of these values into memory and check them against their digests."""
    values = head_state.values
    wanted = [(key, stored) for key in keys if (stored := values[key]).parts is None]
    if wanted:
        _load(store, wanted, row)


def _load(store: Backend, wanted: Sequence[tuple[Key, StoredValue]], row: Row) -> None:
    found = iter(_fetched(store, row, [piece for _, stored in wanted for piece in stored.pieces]))
    for key, stored in wanted:
        stored.fill([part for _ in stored.pieces for part in next(found)])
        if stored.hasher.digest() != stored.entry.digest:
            raise _damaged(row, f"the bytes of {_key_name(key)} do not match their digest", key)


def _fetched(store: Backend, row: Row, pieces: Sequence[Piece]) -> list[Sequence[bytes]]:
    """Return the bytes of each piece, in the parts they are stored in."""
    try:
        found = iter(store.fetch([piece for piece in pieces if isinstance(piece, Range)]))
    except Corrupted as error:
        error.thread, error.checkpoint = error.thread or row.branch.thread, error.checkpoint or row.id
        raise
    return [next(found) if isinstance(piece, Range) else (piece,) for piece in pieces]


def expected_digest(row: Row, meta: CheckpointMeta, entries: Entries, parent_digest: bytes) -> bytes:
    """Return the digest the row must have."""
    return checkpoint_digest(
        parent_digest, root_digest(entries), list(entries), meta, row.created_us, row.notes[:-CHECKSUM_BYTES]
    )


def verify_digest(row: Row, values: Mapping[str, Any], entries: Entries) -> None:
    """Raise Corrupted unless the digest of a row matches its fields and entries."""
    parent = NO_PARENT if row.parent_id is None else row.parent_digest
    if parent is None:
        raise _damaged(row, f"its parent {row.parent_id} is missing")
    meta, root = unchecked(CheckpointMeta, dict(values)), root_digest(entries)
    if checkpoint_digest(parent, root, list(entries), meta, row.created_us, row.notes[:-CHECKSUM_BYTES]) != row.digest:
        raise _damaged(row, "its fields or content do not match its digest")


def assemble(row: Row, values: dict[str, Any], payload: Mapping[Key, StoredValue]) -> Checkpoint:
    """Return a checkpoint made of its fields, which become its own, and of its values, whose bytes are in memory."""
    state: dict[str, Any] = {}
    system: dict[Key, Any] = {}
    for key, stored in payload.items():
        try:
            value = stored.value()
        except DecodeError as error:
            raise _undecodable(row, key, error) from error
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


def _undecodable(row: Row, key: Key, error: DecodeError) -> DecodeError:
    what, thread = f"{_key_name(key)} cannot be decoded: {error.what}", row.branch.thread
    return type(error)(what, thread=thread, checkpoint=row.id, hint=error.hint)


def _key_name(key: Key) -> str:
    if key == JOURNAL:
        return "the journal of its manifest"
    return f"state.{key}" if isinstance(key, str) else SYSTEM_NAMES.get(key, f"entry {key}")
