"""States as bytes, rebuilt edit by edit, and the window of states that may be a base.

The window holds the newest state of each branch of the current thread, up to ``WINDOW_BYTES`` in all; the state that
was not updated for the longest time leaves first. This rule is part of the format: a reader needs no more memory than
the window and the current state, and a writer must not refer to a state that has left. Each key counts ``KEY_BYTES`` in
addition to its value, because a thousand branches of ten thousand empty values are not small.

A value's bytes are kept in parts, so that an edit copies only the parts that it cuts, and states share all others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from backstay.bundle.blocks import KEY_WORK, Budget
from backstay.bundle.records import CheckpointRecord, Edit
from backstay.codec.msgpack import VALUE_BYTES_MAX
from backstay.errors import DecodeError
from backstay.operations.arguments import KEYS_MAX
from backstay.pieces.head_state import PART_BYTES_MIN, StoredValue
from backstay.pieces.manifest import SYSTEM_NAMES, Entries, Entry, Key
from backstay.pieces.splice import common_prefix, common_suffix

WINDOW_BYTES: Final = 64 * 1024 * 1024
KEY_BYTES: Final = 1024
"""Bytes that the window counts for each value in addition to its own: about the memory of its objects."""

STATE_BYTES_MAX: Final = 2 * 1024 * 1024 * 1024
"""Bytes of one state: a few kilobytes of a bundle can claim any size, and the state must fit into memory."""


State = dict[Key, StoredValue]
"""The values of a checkpoint, all of them in memory. ``pieces`` says where the exporting store keeps a value."""


def whole(kind: str, count: int, data: bytes) -> StoredValue:
    """Return a value made of all its bytes."""
    hasher = hashlib.sha256(data)
    return StoredValue(Entry(kind, count, len(data), hasher.digest()), [], [data], hasher)


def add_part(parts: list[bytes], part: bytes) -> None:
    """Add bytes at the end of a value's parts."""
    if parts and len(parts[-1]) + len(part) <= PART_BYTES_MIN:
        parts[-1] += part  # one object for each short part would take many times its length
    elif part:
        parts.append(part)


def copy_of(state: Mapping[Key, StoredValue]) -> State:
    """Return the same values for another state; the bytes are shared, but not the lists of parts, which may grow."""
    return {key: replace(value, parts=list(value.parts or ())) for key, value in state.items()}


def size_of(state: Mapping[Key, StoredValue]) -> int:
    """Return the bytes of a state."""
    return sum(value.entry.size for value in state.values())


def entries_of(state: Mapping[Key, StoredValue]) -> Entries:
    """Return the entries of a state, which its digest covers."""
    return {key: value.entry for key, value in state.items()}


def edit_between(key: Key, old: bytes, kind: str, count: int, new: bytes) -> tuple[Edit, bytes]:
    """Return the edit from the base's bytes to the new bytes, and the bytes between."""
    prefix = common_prefix(old, new) if old else 0
    suffix = common_suffix(old[prefix:], new[prefix:]) if prefix < min(len(old), len(new)) else 0
    between = new[prefix : len(new) - suffix]
    return Edit(key, kind, count, prefix, suffix, len(between)), between


def natural_order(base: Mapping[Key, StoredValue], record_removed: Sequence[Key], edits: Sequence[Edit]) -> list[Key]:
    """Return the order of keys that a record has if it names none."""
    gone = set(record_removed)
    kept = [key for key in base if key not in gone]
    return [*kept, *(edit.key for edit in edits if edit.key not in base)]


def check_size(base: Mapping[Key, StoredValue], record: CheckpointRecord, in_place: bool, budget: Budget) -> int:
    """Return how many bytes a record's state has; raise an error if that is too many. Call this before reading them.

    The budget pays for building the state: for all of it if it starts as a copy of another branch's state.
    """
    sizes = {key: value.entry.size for key, value in base.items()}
    for key in record.removed:
        sizes.pop(key, None)
    rebuilt = 0
    for edit in record.edits:
        size = sizes[edit.key] = edit.prefix + edit.suffix + edit.length
        old = base.get(edit.key)
        if old is None or edit.prefix != old.entry.size or old.entry.kind != edit.kind:
            rebuilt += size
    total = sum(sizes.values())
    if len(sizes) > KEYS_MAX + len(SYSTEM_NAMES) or total > STATE_BYTES_MAX:
        raise DecodeError("a state in the bundle has more keys or bytes than the format allows")
    if max(sizes.values(), default=0) > VALUE_BYTES_MAX:
        raise DecodeError("a value in the bundle is larger than the format allows")
    budget.hold(total)
    budget.spend(len(sizes) * KEY_WORK + (rebuilt if in_place else total))
    return total


def follow(base: State, record: CheckpointRecord, between: Mapping[Key, Sequence[bytes]], in_place: bool) -> State:
    """Return the state of a record. With ``in_place`` it may change the base, which is not needed any more."""
    state = dict(base) if in_place else copy_of(base)
    for key in record.removed:
        if state.pop(key, None) is None:
            raise DecodeError("a checkpoint in the bundle removes a key that does not exist")
    for edit in record.edits:
        state[edit.key] = _edited(state.get(edit.key), edit, between.get(edit.key, ()))
    order = natural_order(base, record.removed, record.edits) if record.order is None else record.order
    if len(order) != len(state) or not all(key in state for key in order):
        raise DecodeError("a checkpoint in the bundle does not list its own keys")
    return {key: state[key] for key in order}


def _edited(old: StoredValue | None, edit: Edit, between: Sequence[bytes]) -> StoredValue:
    """Return the value after an edit. A value that only grew keeps its list of parts, and the list grows too."""
    size, parts = (0, []) if old is None else (old.entry.size, old.parts or [])
    if edit.prefix + edit.suffix > size or sum(map(len, between)) != edit.length:
        raise DecodeError("a value in the bundle claims more bytes of its base than that has")
    if old is not None and edit.prefix == size and edit.kind == old.entry.kind:
        hasher, added = old.hasher.copy(), between
    else:
        added = [*_cut(parts, 0, edit.prefix), *between, *_cut(parts, size - edit.suffix, size)]
        hasher, parts = hashlib.sha256(), []
    for part in added:
        hasher.update(part)
        add_part(parts, part)
    size = edit.prefix + edit.length + edit.suffix
    return StoredValue(Entry(edit.kind, edit.count, size, hasher.digest()), [], parts, hasher)


def _cut(parts: Iterable[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes from ``start`` to ``stop``, in parts."""
    at = 0
    for part in parts:
        if at >= stop:
            return
        end = at + len(part)
        if end > start:
            yield part if start <= at and end <= stop else part[max(start - at, 0) : stop - at]
        at = end


class Window:
    """The states that may be a base, as described above."""

    def __init__(self, limit: int = WINDOW_BYTES) -> None:
        self._limit = limit
        self._states: OrderedDict[int, tuple[State, int]] = OrderedDict()
        self._size = 0

    def get(self, branch: int) -> State | None:
        """Return the newest state of a branch, or None if it has left the window."""
        found = self._states.get(branch)
        return None if found is None else found[0]

    def put(self, branch: int, state: State) -> list[int]:
        """Add a branch's newest state; return the branches whose states leave the window for it."""
        _, before = self._states.pop(branch, ({}, 0))
        size = size_of(state) + KEY_BYTES * len(state)
        self._states[branch] = (state, size)
        self._size += size - before
        left = []
        while self._size > self._limit and len(self._states) > 1:
            oldest, (_, freed) = self._states.popitem(last=False)
            self._size -= freed
            left.append(oldest)
        return left
