"""The newest state of a branch in memory, as the pieces in which it is stored, ready for the next change.

``plan`` turns a change into a ``Draft``: exactly the new bytes and the manifest that describes the result. It does no
I/O; the caller provides new stream ids. It changes the head state in place, so that the cost of an append depends
only on what is appended: **if the plan is not committed, the head state is ahead of the store and must be discarded.**

How a value is stored:
- up to 256 bytes: inline in the manifest;
- new, or mostly new: as one blob, shared with every thread that has the same bytes;
- grown: its pieces stay, and one range of the branch's own stream for that key is added;
- contained in a value that the same change deletes: as a part of that value's bytes, so that an input that becomes a
  part of the state is not stored twice;
- edited: the bytes shared with the previous value are reused. Many small pieces are consolidated when their table has
  cost more than rewriting the cheapest half of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from backstay.pieces.body import Body
from backstay.pieces.manifest import (
    INLINE_BYTES_MAX,
    LITERAL_BYTES_MAX,
    PIECES_MAX_INLINE,
    STREAM_BYTES_MAX,
    Entries,
    Entry,
    Key,
    Piece,
    Range,
    Source,
    cut_pieces,
    encode_base,
    encode_manifest,
    encode_table,
    join_pieces,
    piece_length,
    root_digest,
)
from backstay.pieces.splice import Copy, splice

SEED_BYTES_MAX = 4096
"""A value up to this size is copied into its stream when the stream starts, so that it stays one range."""

BASE_WASTE_MIN = 512
"""A base is written when repeating unchanged entries has cost this many bytes more than the base would."""

MOVED_BYTES_MIN = 1024
"""Smaller values are stored again instead of as part of another value: a range would not be shorter."""

CONSOLIDATE_PIECES_MIN = 16
PART_BYTES_MIN = 1024
"""Appended bytes are kept in memory in parts of at least about this size."""

NewStream = Callable[[], int]


@dataclass(slots=True)
class Change:
    """The change that a save makes, already encoded. ``order`` has all keys of the new state; None keeps the order."""

    put: dict[Key, Body] = field(default_factory=dict)
    append: dict[Key, Body] = field(default_factory=dict)
    delete: set[Key] = field(default_factory=set)
    order: list[Key] | None = None


@dataclass(slots=True)
class Draft:
    """Everything that one save must write: new blobs, new ranges of streams, new references, and the manifest."""

    blobs: dict[bytes, bytes] = field(default_factory=dict)
    chunks: list[tuple[int, int, bytes]] = field(default_factory=list)
    sources: set[Source] = field(default_factory=set)  # referred to by the new state and not by the head it builds on
    owned: set[int] = field(default_factory=set)  # streams that start with this save
    manifest: bytes = b""
    base: bytes | None = None
    root: bytes = b""
    keys: tuple[Key, ...] = ()
    size: int = 0


@dataclass(slots=True)
class StoredValue:
    """One value of the head. ``parts`` are its bytes if they are in memory; ``hasher`` continues its SHA-256."""

    entry: Entry
    pieces: list[Piece]
    parts: list[bytes] | None = None
    hasher: Any = None
    stream: int | None = None  # the branch's own stream for this key
    end: int = 0  # where that stream ends
    table_bytes: int = 0  # written for tables since the last consolidation

    def data(self) -> bytes:
        """Return the value's bytes, which must be in memory."""
        assert self.parts is not None, "the bytes of this value were not loaded"
        if len(self.parts) != 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0]

    def fill(self, parts: list[bytes]) -> None:
        """Load the value's bytes into memory."""
        self.parts = parts
        self.hasher = hashlib.sha256()
        for part in parts:
            self.hasher.update(part)

    def recount(self, count: int) -> StoredValue:
        """Return the value with the same bytes and another number of elements."""
        if self.entry.count != count:
            self.entry = replace(self.entry, count=count)
        return self


class HeadState:
    """The newest state of one branch as pieces. Discard it if a plan is not committed."""

    def __init__(self) -> None:
        self.values: dict[Key, StoredValue] = {}
        self.base: bytes | None = None
        self.base_entries: Entries = {}
        self.sources: set[Source] = set()
        self.items: dict[str, list[Any]] = {}  # the lists this state was saved with, for saves that trust identity
        self._waste = 0

    @classmethod
    def load(
        cls,
        entries: Mapping[Key, Entry],
        tables: Mapping[bytes, Sequence[Piece]],
        base: bytes | None,
        base_entries: Entries,
        owned: Mapping[int, int],
    ) -> HeadState:
        """Make the head state of a stored manifest; ``owned`` maps the branch's own streams to where they end."""
        head_state = cls()
        head_state.base, head_state.base_entries = base, base_entries
        for key, entry in entries.items():
            if entry.body is not None:
                stored = StoredValue(entry, [], [entry.body], hashlib.sha256(entry.body))
            elif entry.pieces is None:
                stored = StoredValue(entry, [Range(entry.digest, 0, entry.size)])
            else:
                stored = StoredValue(entry, [*(tables[entry.table] if entry.table else ()), *entry.pieces])
                for piece in stored.pieces:
                    if type(piece) is Range and type(piece.source) is int and piece.source in owned:
                        stored.stream, stored.end = piece.source, owned[piece.source]
            head_state.values[key] = stored
        head_state.sources = _sources(head_state.values.values(), base)
        return head_state

    def entries(self) -> Entries:
        """Return the manifest's entries in the state's order."""
        return {key: stored.entry for key, stored in self.values.items()}

    def unloaded(self, change: Change) -> list[Key]:
        """Return the keys whose current bytes this change needs and which are not in memory."""
        wanted = []
        for key in change.append:
            stored = self.values.get(key)
            if stored is not None and stored.hasher is None:
                wanted.append(key)
        for key, body in change.put.items():
            stored = self.values.get(key)
            if stored is None or stored.parts is not None or stored.entry.kind != body.kind:
                continue
            if stored.entry.size != len(body.data) or stored.entry.digest != body.digest():
                wanted.append(key)
        return wanted

    def plan(self, change: Change, new_stream: NewStream) -> Draft:
        """Apply the change and return what must be written for it."""
        draft = Draft()
        before = {key: stored.entry for key, stored in self.values.items()}
        gone = [stored for key in change.delete if (stored := self.values.pop(key, None)) is not None]
        for key, body in change.put.items():
            old = self.values.get(key)
            if old is None or old.entry.kind != body.kind:
                moved = _part_of_removed(body, gone) if gone and old is None else None
                self.values[key] = moved or _whole(body, draft)
            else:
                self.values[key] = _replace(old, body, draft, new_stream)
        for key, body in change.append.items():
            old = self.values.get(key)
            self.values[key] = _append(old, body, draft, new_stream) if old else _whole(body, draft)
        if change.order is not None:
            self.values = {key: self.values[key] for key in change.order}
        self._write_manifest(before, draft)
        # An append to a known stream refers to nothing new, unless the stream lost its reference in the meantime.
        if change.put or change.delete or draft.blobs or any(chunk[0] not in self.sources for chunk in draft.chunks):
            sources = _sources(self.values.values(), self.base)
            draft.sources = sources - self.sources
            self.sources = sources
        return draft

    def _write_manifest(self, before: Entries, draft: Draft) -> None:
        """Describe the new state. Unchanged entries move to a base once repeating them has cost more than a base."""
        entries = {key: stored.entry for key, stored in self.values.items()}
        unchanged = {key: entry for key, entry in entries.items() if before.get(key) is entry}
        repeated = 0  # bytes
        for key, entry in unchanged.items():
            known = self.base_entries.get(key)
            if known is not entry and known != entry:
                repeated += 48 + len(entry.body or b"") + (12 * len(entry.pieces) if entry.pieces else 0)
        if repeated:
            self._waste += repeated
            # A rough size decides whether to look closer; the exact size decides.
            if self._waste > BASE_WASTE_MIN and self._waste > BASE_WASTE_MIN + len(base := encode_base(unchanged)):
                self.base, self.base_entries = hashlib.sha256(base).digest(), unchanged
                draft.blobs[self.base] = base
                self._waste = 0
        draft.manifest = encode_manifest(entries, self.base_entries)
        draft.base = self.base
        draft.root = root_digest(entries)
        draft.keys = tuple(entries)
        draft.size = sum(entry.size for entry in entries.values())


def _replace(old: StoredValue, body: Body, draft: Draft, new_stream: NewStream) -> StoredValue:
    """Return the value with new bytes of the same kind."""
    # If its bytes are not loaded, ``unloaded`` found that the digest is the same.
    if old.parts is None or body.data == old.data():
        return old.recount(body.count)
    data, previous = body.data, old.data()
    if len(data) <= INLINE_BYTES_MAX:
        return _whole(body, draft)
    if old.entry.body is not None:  # it is inline in the manifest, so there is no piece to share
        return _whole(body, draft, stream=old.stream, end=old.end)
    if data.startswith(previous):
        grown = Body(body.kind, body.count - old.entry.count, data[len(previous) :])
        _append(old, grown, draft, new_stream)
        old.parts = [data]
        return old
    edits = splice(previous, data)
    new_bytes = sum(len(edit) for edit in edits if not isinstance(edit, Copy))
    if new_bytes * 2 > len(data):
        return _whole(body, draft, stream=old.stream, end=old.end)
    pieces: list[Piece] = []
    for edit in edits:
        if isinstance(edit, Copy):
            pieces.extend(cut_pieces(old.pieces, edit.start, edit.length))
        elif len(edit) <= LITERAL_BYTES_MAX:
            pieces.append(edit)
        else:
            pieces.append(_to_stream(old, edit, draft, new_stream))
    old.pieces = join_pieces(pieces)
    old.fill([data])
    _consolidate(old, draft, new_stream)
    old.entry = _describe(old, body.count, len(data), draft)
    return old


def _append(old: StoredValue, body: Body, draft: Draft, new_stream: NewStream) -> StoredValue:
    """Return the value with more bytes at its end."""
    entry, data = old.entry, body.data
    size, count = entry.size + len(data), entry.count + body.count
    if entry.body is not None or size <= INLINE_BYTES_MAX:
        return _whole(Body(entry.kind, count, old.data() + data), draft)
    if not data:
        return old.recount(count)
    old.hasher.update(data)
    pieces, parts = old.pieces, old.parts
    # A few bytes stay in the manifest until there are more: a row in a stream costs a page.
    tail = pieces[-1] if pieces and type(pieces[-1]) is bytes else b""
    if len(tail) + len(data) <= LITERAL_BYTES_MAX and len(pieces) < PIECES_MAX_INLINE:
        pieces[len(pieces) - bool(tail) :] = [tail + data]
    else:
        if old.stream is None and entry.size <= SEED_BYTES_MAX:
            pieces[:] = [_to_stream(old, old.data(), draft, new_stream)]
            tail, parts = b"", old.parts
        elif tail:
            pieces.pop()
        piece, last = _to_stream(old, tail + data, draft, new_stream), pieces[-1] if pieces else None
        if type(last) is Range and last.source == piece.source and last.start + last.length == piece.start:
            pieces[-1] = Range(last.source, last.start, last.length + piece.length)
        else:
            pieces.append(piece)
    if parts and len(parts[-1]) + len(data) <= PART_BYTES_MIN:  # an object each would take many times their length
        parts[-1] += data
    elif parts is not None:
        parts.append(data)
    old.entry = _describe(old, count, size, draft)
    return old


def _part_of_removed(body: Body, gone: Iterable[StoredValue]) -> StoredValue | None:
    """Return the value as a part of one that the same change deletes; None if no loaded one contains it."""
    size = len(body.data)
    if size < MOVED_BYTES_MIN:
        return None
    for old in gone:
        start = old.data().find(body.data) if old.parts is not None and old.entry.size >= size else -1
        if start < 0 or not old.pieces:
            continue
        pieces = list(cut_pieces(old.pieces, start, size))
        if len(pieces) <= PIECES_MAX_INLINE:
            hasher = hashlib.sha256(body.data)
            entry = Entry(body.kind, body.count, size, hasher.digest(), pieces=tuple(pieces))
            return StoredValue(entry, pieces, parts=[body.data], hasher=hasher)
    return None


def _whole(body: Body, draft: Draft, stream: int | None = None, end: int = 0) -> StoredValue:
    """Store the value as it is: inline if it is small, else as a blob. Its stream, if any, stays for later appends."""
    hasher = hashlib.sha256(body.data)
    digest, size = hasher.digest(), len(body.data)
    inline = size <= INLINE_BYTES_MAX
    if not inline:
        draft.blobs[digest] = body.data
    entry = Entry(body.kind, body.count, size, digest, body=body.data if inline else None)
    pieces: list[Piece] = [] if inline else [Range(digest, 0, size)]
    return StoredValue(entry, pieces, parts=[body.data], hasher=hasher, stream=stream, end=end)


def _to_stream(stored: StoredValue, data: bytes, draft: Draft, new_stream: NewStream) -> Range:
    if stored.stream is None or stored.end + len(data) > STREAM_BYTES_MAX:
        stored.stream, stored.end = new_stream(), 0
        draft.owned.add(stored.stream)
    piece = Range(stored.stream, stored.end, len(data))
    draft.chunks.append((stored.stream, stored.end, data))
    stored.end += len(data)
    return piece


def _describe(stored: StoredValue, count: int, size: int, draft: Draft) -> Entry:
    """Return the entry of a value whose pieces have changed, with a table for them if there are many."""
    kind, digest = stored.entry.kind, stored.hasher.digest()
    if len(stored.pieces) <= PIECES_MAX_INLINE:
        return Entry(kind, count, size, digest, pieces=tuple(stored.pieces))
    table = encode_table(stored.pieces[:-1])
    name = hashlib.sha256(table).digest()
    if name != stored.entry.table:
        draft.blobs[name] = table
        stored.table_bytes += len(table)
    return Entry(kind, count, size, digest, None, tuple(stored.pieces[-1:]), name, len(table))


def _consolidate(stored: StoredValue, draft: Draft, new_stream: NewStream) -> None:
    """Rewrite the cheapest half of the pieces as one, once their table has cost more than that."""
    if len(stored.pieces) <= CONSOLIDATE_PIECES_MIN:
        return
    lengths = [piece_length(piece) for piece in stored.pieces]
    half = len(lengths) // 2
    offsets = [0, *accumulate(lengths)]
    cheapest, first = min((offsets[at + half] - offsets[at], at) for at in range(len(lengths) - half + 1))
    if stored.table_bytes <= cheapest:
        return
    offset = offsets[first]
    merged = _to_stream(stored, stored.data()[offset : offset + cheapest], draft, new_stream)
    stored.pieces = join_pieces([*stored.pieces[:first], merged, *stored.pieces[first + half :]])
    stored.table_bytes = 0


def _sources(values: Iterable[StoredValue], base: bytes | None) -> set[Source]:
    named: set[Source] = set() if base is None else {base}
    for stored in values:
        named.update(piece.source for piece in stored.pieces if isinstance(piece, Range))
        if stored.entry.table is not None:
            named.add(stored.entry.table)
    return named
