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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from backstay.bundle.blocks import KEY_WORK, Budget
from backstay.bundle.records import CheckpointRecord, Edit
from backstay.codec.msgpack import VALUE_BYTES_MAX
from backstay.errors import DecodeError
from backstay.operations.arguments import KEYS_MAX
from backstay.pieces.head_state import PART_BYTES_MIN
from backstay.pieces.manifest import SYSTEM_NAMES, Entries, Entry, Key, Piece
from backstay.pieces.splice import common_prefix, common_suffix

WINDOW_BYTES: Final = 64 * 1024 * 1024
KEY_BYTES: Final = 1024
"""What a value counts in the window in addition to its bytes: about the memory of its objects."""

STATE_BYTES_MAX: Final = 2 * 1024 * 1024 * 1024
"""Bytes of one state: a few kilobytes of a bundle can claim any size, and the state must fit into memory."""


@dataclass(slots=True)
class Value:
    """One value's bytes in parts, with their running SHA-256. ``pieces``: where the exporting store keeps them."""

    kind: str
    count: int
    size: int
    hasher: Any
    parts: list[bytes]
    pieces: list[Piece] = field(default_factory=list)
    digest: bytes = b""

    def __post_init__(self) -> None:
        self.digest = self.hasher.digest()

    def data(self) -> bytes:
        """Return all bytes."""
        return b"".join(self.parts)

    def cut(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` to ``stop``, in parts."""
        at = 0
        for part in self.parts:
            if at >= stop:
                return
            end = at + len(part)
            if end > start:
                yield part if start <= at and end <= stop else part[max(start - at, 0) : stop - at]
            at = end

    def copy(self) -> Value:
        """Return the same value for another state; the bytes are shared."""
        return Value(self.kind, self.count, self.size, self.hasher.copy(), list(self.parts), list(self.pieces))

    def grow(self, count: int, parts: Sequence[bytes], hasher: Any) -> None:
        """Add bytes at the end; ``hasher`` covers them already."""
        self.count, self.hasher, self.digest = count, hasher, hasher.digest()
        self.size += sum(map(len, parts))
        for part in parts:
            _add(self.parts, part)

    def is_same(self, entry: Entry) -> bool:
        """Tell whether an entry describes this value."""
        return (self.kind, self.count, self.digest) == (entry.kind, entry.count, entry.digest)


State = dict[Key, Value]


def _add(parts: list[bytes], part: bytes) -> None:
    if parts and len(parts[-1]) + len(part) <= PART_BYTES_MIN:
        parts[-1] += part  # one object for each short part would take many times its length
    elif part:
        parts.append(part)


def whole(kind: str, count: int, data: bytes) -> Value:
    """Return a value made of all its bytes."""
    return Value(kind, count, len(data), hashlib.sha256(data), [data])


def size_of(state: Mapping[Key, Value]) -> int:
    """Return the bytes of a state."""
    return sum(value.size for value in state.values())


def entries_of(state: Mapping[Key, Value]) -> Entries:
    """Return the entries of a state, which its digest covers."""
    return {key: Entry(value.kind, value.count, value.size, value.digest) for key, value in state.items()}


def edit_between(key: Key, old: bytes, kind: str, count: int, new: bytes) -> tuple[Edit, bytes]:
    """Return the edit from the base's bytes to the new bytes, and the bytes between."""
    prefix = common_prefix(old, new) if old else 0
    suffix = common_suffix(old[prefix:], new[prefix:]) if prefix < min(len(old), len(new)) else 0
    between = new[prefix : len(new) - suffix]
    return Edit(key, kind, count, prefix, suffix, len(between)), between


def natural_order(base: Mapping[Key, Value], record_removed: Sequence[Key], edits: Sequence[Edit]) -> list[Key]:
    """Return the order of keys that a record has if it names none."""
    gone = set(record_removed)
    kept = [key for key in base if key not in gone]
    return [*kept, *(edit.key for edit in edits if edit.key not in base)]


def check_size(base: Mapping[Key, Value], record: CheckpointRecord, in_place: bool, budget: Budget) -> int:
    """Return how many bytes a record's state has; raise an error if that is too many. Call this before reading them.

    The budget pays for building the state: for all of it if it starts as a copy of another branch's state.
    """
    sizes = {key: value.size for key, value in base.items()}
    for key in record.removed:
        sizes.pop(key, None)
    rebuilt = 0
    for edit in record.edits:
        size = sizes[edit.key] = edit.prefix + edit.suffix + edit.length
        old = base.get(edit.key)
        if old is None or edit.prefix != old.size or old.kind != edit.kind:
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
    state = dict(base) if in_place else {key: value.copy() for key, value in base.items()}
    for key in record.removed:
        if state.pop(key, None) is None:
            raise DecodeError("a checkpoint in the bundle removes a key that does not exist")
    for edit in record.edits:
        state[edit.key] = _edited(state.get(edit.key), edit, between.get(edit.key, ()))
    order = natural_order(base, record.removed, record.edits) if record.order is None else record.order
    if len(order) != len(state) or not all(key in state for key in order):
        raise DecodeError("a checkpoint in the bundle does not list its own keys")
    return {key: state[key] for key in order}


def _edited(old: Value | None, edit: Edit, between: Sequence[bytes]) -> Value:
    size = 0 if old is None else old.size
    if edit.prefix + edit.suffix > size or sum(map(len, between)) != edit.length:
        raise DecodeError("a value in the bundle claims more bytes of its base than that has")
    hasher = hashlib.sha256()
    if old is None:
        old = Value(edit.kind, 0, 0, hasher, [])
    elif edit.prefix != size or old.kind != edit.kind:
        kept: list[bytes] = []
        for part in (*old.cut(0, edit.prefix), *between, *old.cut(size - edit.suffix, size)):
            _add(kept, part)
        old, between = Value(edit.kind, 0, 0, hasher, []), kept
    for part in between:
        old.hasher.update(part)
    old.grow(edit.count, between, old.hasher)
    return old


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
