"""Merge a checkpoint of another branch into a branch: three-way, key by key.

The base is the newest checkpoint that both sides have in common: where the branches parted, or what was merged last. A
key that only the other side has changed since then is taken over, one that only this side has changed stays, and one
that both have changed to different values is a conflict. Keys are compared by their digests, so only the values that
are taken over are read. Nothing is merged within a value.

A merged checkpoint follows this branch's newest, has its position, and names its other source in its metadata. If each
side has merged the other since the last common checkpoint, there are two bases; a side has then changed a key if it
differs from either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from backstay.errors import Corrupted, InvalidInput, MergeConflict, NotFound
from backstay.model.checkpoint import SavedCheckpoint, unchecked
from backstay.model.ids import check_id
from backstay.operations.arguments import append_change, check_mapping, names_of
from backstay.operations.cursor import Base, Cursor, Services
from backstay.operations.listing import every_branch
from backstay.operations.load import (
    deleted_while_reading,
    find_row,
    is_stored,
    load_row,
    read_all_entries,
    verify_digest,
)
from backstay.operations.rows import values_of
from backstay.operations.save import SaveRequest, check_base, copied_fields, find_or_raise, save_change
from backstay.pieces.head_state import Change, HeadState
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Query, Row

MERGED = "backstay.merged"
"""The metadata key of a merged checkpoint that names its other source."""

Prefer = Literal["ours", "theirs"]
Places = dict[BranchKey, int]
"""The branches that a checkpoint comes from, nearest first, and the highest sequence number of each that it has."""


def merge(
    store: Backend,
    services: Services,
    cursor: Cursor,
    source: str,
    prefer: Prefer | None,
    put: Mapping[str, Any] | None,
    delete: Iterable[str],
    request: SaveRequest,
) -> SavedCheckpoint:
    """Append a checkpoint that has the changes of both sides; return the newest one if there is nothing to merge."""
    put, to_delete = dict(check_mapping(put, "set")), names_of(delete, "delete")
    if prefer not in (None, "ours", "theirs"):
        raise InvalidInput(f"prefer must be 'ours', 'theirs' or None, not {prefer!r:.40}")
    theirs = find_or_raise(store, services, source)
    repeated = None
    if request.name is not None:
        repeated = find_row(store, services.namespace, check_id(request.name, "checkpoint id"))
    if repeated is None:
        head = store.head(cursor.branch)
        check_base(store, cursor, cursor.base, Base.of(head), request.on)
        ours = None if head is None else head.row
    else:  # compare with what the first attempt merged into; if that is gone, with its result
        ours = (repeated.parent_id and find_row(store, services.namespace, repeated.parent_id)) or repeated
    if ours is None:
        raise NotFound(
            f"branch {cursor.branch.name!r} has no checkpoint to merge into",
            thread=cursor.branch.thread,
            hint="Start it with fork() instead",
        )
    bases = _bases(store, ours, theirs)
    if repeated is None and not put and not to_delete and theirs.id in {base.id for base in bases}:
        return unchecked(SavedCheckpoint, values_of(ours))
    unknown = next((key for key in to_delete if type(key) is not str), None)
    if unknown is not None:
        raise InvalidInput(f"delete must hold names of keys, not {type(unknown).__name__}")
    taken, gone = _changes(store, ours, theirs, bases, prefer, {*put, *to_delete})
    if taken:
        put |= load_row(store, theirs, taken).state
    request.inherited = copied_fields(ours, "merge")
    metadata = check_mapping(request.fields.get("metadata", request.inherited.get("metadata")), "metadata")
    request.fields = {**request.fields, "metadata": {**metadata, MERGED: theirs.id}}
    request.on = ours.id

    def make(head_state: HeadState) -> Change:
        still_there = [key for key in (*gone, *to_delete) if key in head_state.values]
        return append_change({}, put, still_there, request.fields, head_state, carry=True)

    return save_change(store, services, cursor, make, request)


def _changes(
    store: Backend, ours: Row, theirs: Row, bases: Iterable[Row], prefer: Prefer | None, settled: set[str]
) -> tuple[list[str], list[str]]:
    """Return the keys to take from the other side, and those to delete because it did."""
    mine, other = _entries(store, ours), _entries(store, theirs)
    before = [_entries(store, base) for base in bases]
    taken: list[str] = []
    clashes: list[str] = []
    for key in sorted({*mine, *other} - settled):
        if mine.get(key) == other.get(key) or all(other.get(key) == base.get(key) for base in before):
            continue
        if all(mine.get(key) == base.get(key) for base in before) or prefer == "theirs":
            taken.append(key)
        elif prefer is None:
            clashes.append(key)
    if clashes:
        raise MergeConflict(
            clashes,
            (ours.id, theirs.id),
            f"{ours.id} and {theirs.id} have both changed {', '.join(map(repr, clashes[:20]))}",
            thread=ours.branch.thread,
            checkpoint=ours.id,
            hint='Nothing was stored. Settle each with set= or delete=, or choose a side: prefer="ours" or "theirs"',
        )
    return [key for key in taken if key in other], [key for key in taken if key not in other]


def _entries(store: Backend, row: Row) -> dict[str, tuple[str, int, bytes]]:
    """Return what identifies the content of each key of a checkpoint's state."""
    try:
        entries = read_all_entries(store, row)
        verify_digest(row, values_of(row), entries)
    except Corrupted:
        if is_stored(store, row):
            raise
        raise deleted_while_reading(row) from None
    return {key: (entry.kind, entry.count, entry.digest) for key, entry in entries.items() if isinstance(key, str)}


# The newest common checkpoint -------------------------------------------------------------------------------------


def _bases(store: Backend, ours: Row, theirs: Row) -> list[Row]:
    """Return the newest checkpoints that both sides have in common: one, or two if each has merged the other."""
    mine, other = _places(store, ours), _places(store, theirs)
    shared = next((branch for branch in mine if branch in other), None)
    seq = 0 if shared is None else min(mine[shared], other[shared])
    rows = [] if shared is None else store.find(Query(*shared, before=seq + 1, limit=1, payload=True))
    if shared is None or not rows or rows[0].seq != seq:
        raise NotFound(
            f"checkpoints {ours.id} and {theirs.id} have no stored checkpoint in common",
            thread=ours.branch.thread,
            checkpoint=theirs.id,
            hint="Only branches of one origin can be merged. Copy single keys with append(set=…) instead",
        )
    into_ours = _last_merge(store, mine, theirs, other, {shared: seq})
    # An older merge in the other direction is part of what was merged.
    since = {shared: seq} if into_ours is None else _places(store, into_ours[1])
    into_theirs = _last_merge(store, other, ours, mine, since)
    if into_ours is None or into_theirs is None:
        last = into_ours or into_theirs
        return [rows[0] if last is None else last[1]]
    (merged, taken), (_, given) = into_ours, into_theirs
    return [given] if _has(_places(store, given), merged) else [taken, given]


def _places(store: Backend, row: Row) -> Places:
    """Return the branches that a checkpoint comes from, each with its highest number there."""
    places: Places = {row.branch: row.seq}
    while True:
        branch = row.branch
        branches = every_branch(store, branch.namespace, branch.thread, branch.scope)
        name = next((other.origin for other in branches if other.key == branch), None)
        origin = None if name is None else find_row(store, branch.namespace, name)
        if origin is None or origin.branch in places:  # names that were deleted and used again can form a cycle
            return places
        row = origin
        places[row.branch] = row.seq


def _has(places: Places, row: Row) -> bool:
    return row.seq <= places.get(row.branch, 0)


def _last_merge(store: Backend, into: Places, other: Row, places: Places, since: Places) -> tuple[Row, Row] | None:
    """Return the last merge of the other side into one side since a place: the merged row, and what it took."""
    for branch, seq in into.items():
        for row in _rows_down_to(store, branch, seq, since.get(branch, 0)):
            name = values_of(row).get("metadata", {}).get(MERGED)
            merged = find_row(store, branch.namespace, name) if isinstance(name, str) else None
            if merged is not None and _has(places, merged):
                return row, merged
            if merged is not None and _has(_places(store, merged), other):  # a later checkpoint than this one
                return row, other
        if branch in since:
            break
    return None


def _rows_down_to(store: Backend, branch: BranchKey, seq: int, least: int) -> Iterator[Row]:
    """Yield the rows of a branch from one number down to another, without the last."""
    while True:
        page = store.find(Query(*branch, before=seq + 1))
        for row in page:
            if row.seq <= least:
                return
            yield row
        if len(page) < PAGE_ROWS_MAX:
            return
        seq = page[-1].seq - 1
