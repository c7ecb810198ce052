"""A state as bytes, rebuilt edit by edit; and the window of states that may be a base. Both sides keep the same one.

The window holds the newest state of each branch of the thread at hand, as long as they are not larger than
``WINDOW_BYTES`` together; those that were not added to for longest leave it first. This rule is part of the format: a
reader needs no more memory than that and the state it is at, and a writer must not refer to what has left.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.codec.limits import VALUE_BYTES_MAX
from holdfast.errors import DecodeError
from holdfast.pieces.manifest import Entries, Entry, Key
from holdfast.pieces.piece import Piece
from holdfast.pieces.splice import common_prefix, common_suffix
from holdfast.pieces.tip import PART_BYTES_MIN
from holdfast.thread.change import KEYS_MAX
from holdfast.transfer.bundle.records import CheckpointRecord, Edit

WINDOW_BYTES: Final = 64 * 1024 * 1024
STATE_BYTES_MAX: Final = 2 * 1024 * 1024 * 1024
"""Bytes of one state: a few kilobytes of a bundle can claim any number of them, and all must fit into memory."""


@dataclass(slots=True)
class Value:
    """One value's bytes in parts, with its SHA-256 as far as they go. ``pieces``: where a store keeps them."""

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
        if len(self.parts) != 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0]

    def copy(self) -> Value:
        """Return the same value for another state; the bytes are shared."""
        return Value(self.kind, self.count, self.size, self.hasher.copy(), list(self.parts), list(self.pieces))

    def grow(self, count: int, data: bytes, hasher: Any) -> None:
        """Add bytes at the end; ``hasher`` has seen them."""
        self.count, self.size, self.hasher, self.digest = count, self.size + len(data), hasher, hasher.digest()
        if self.parts and len(self.parts[-1]) + len(data) <= PART_BYTES_MIN:
            self.parts[-1] += data  # an object for each short part would take many times its length
        else:
            self.parts.append(data)

    def is_same(self, entry: Entry) -> bool:
        """Tell whether an entry describes this value."""
        return (self.kind, self.count, self.digest) == (entry.kind, entry.count, entry.digest)


State = dict[Key, Value]


def whole(kind: str, count: int, data: bytes) -> Value:
    """Return a value made of all its bytes."""
    return Value(kind, count, len(data), hashlib.sha256(data), [data])


def size_of(state: Mapping[Key, Value]) -> int:
    """Return the bytes of a state."""
    return sum(value.size for value in state.values())


def entries_of(state: Mapping[Key, Value]) -> Entries:
    """Return what a digest is made of."""
    return {key: Entry(value.kind, value.count, value.size, value.digest) for key, value in state.items()}


def edit_between(key: Key, old: bytes, kind: str, count: int, new: bytes) -> tuple[Edit, bytes]:
    """Return how new bytes follow from the base's, and those between."""
    prefix = common_prefix(old, new) if old else 0
    suffix = common_suffix(old[prefix:], new[prefix:]) if prefix < min(len(old), len(new)) else 0
    between = new[prefix : len(new) - suffix]
    return Edit(key, kind, count, prefix, suffix, len(between)), between


def natural_order(base: Mapping[Key, Value], record_removed: Sequence[Key], edits: Sequence[Edit]) -> list[Key]:
    """Return the order of keys if nothing is said about it."""
    gone = set(record_removed)
    kept = [key for key in base if key not in gone]
    return [*kept, *(edit.key for edit in edits if edit.key not in base)]


def check_size(base: Mapping[Key, Value], record: CheckpointRecord) -> None:
    """Raise DecodeError if a record's state would be larger than any; to be asked before its bytes are read."""
    sizes = {key: value.size for key, value in base.items()}
    for key in record.removed:
        sizes.pop(key, None)
    sizes.update((edit.key, edit.prefix + edit.suffix + edit.length) for edit in record.edits)
    if len(sizes) > KEYS_MAX + 3 or sum(sizes.values()) > STATE_BYTES_MAX:
        raise DecodeError("a state in the bundle has more keys or bytes than any can have")
    if max(sizes.values(), default=0) > VALUE_BYTES_MAX:
        raise DecodeError("a value in the bundle is larger than any can be")


def follow(base: State, record: CheckpointRecord, between: Mapping[Key, bytes], in_place: bool) -> State:
    """Return the state of a record; ``in_place``: the base is not needed any more."""
    state = dict(base) if in_place else {key: value.copy() for key, value in base.items()}
    for key in record.removed:
        if state.pop(key, None) is None:
            raise DecodeError("a checkpoint in the bundle removes a key that is not there")
    for edit in record.edits:
        state[edit.key] = _edited(state.get(edit.key), edit, between.get(edit.key, b""))
    order = natural_order(base, record.removed, record.edits) if record.order is None else record.order
    if len(order) != len(state) or not all(key in state for key in order):
        raise DecodeError("a checkpoint in the bundle does not name its keys")
    return {key: state[key] for key in order}


def _edited(old: Value | None, edit: Edit, between: bytes) -> Value:
    size = 0 if old is None else old.size
    if edit.prefix + edit.suffix > size or len(between) != edit.length:
        raise DecodeError("a value in the bundle claims more of its base than there is")
    if old is not None and edit.prefix == size and old.kind == edit.kind:
        hasher = old.hasher
        hasher.update(between)
        old.grow(edit.count, between, hasher)
        return old
    kept = b"" if old is None or not edit.prefix + edit.suffix else old.data()
    return whole(edit.kind, edit.count, kept[: edit.prefix] + between + kept[len(kept) - edit.suffix :])


class Window:
    """The states that may be a base; see above."""

    def __init__(self, limit: int = WINDOW_BYTES) -> None:
        self._limit = limit
        self._states: OrderedDict[int, tuple[State, int]] = OrderedDict()
        self._size = 0

    def get(self, lane: int) -> State | None:
        """Return the newest state of a branch, unless it has left."""
        found = self._states.get(lane)
        return None if found is None else found[0]

    def put(self, lane: int, state: State) -> list[int]:
        """Take a branch's newest state in; return the branches whose states leave for it."""
        _, before = self._states.pop(lane, ({}, 0))
        size = size_of(state)
        self._states[lane] = (state, size)
        self._size += size - before
        left = []
        while self._size > self._limit and len(self._states) > 1:
            oldest, (_, freed) = self._states.popitem(last=False)
            self._size -= freed
            left.append(oldest)
        return left
