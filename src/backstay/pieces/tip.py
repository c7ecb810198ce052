"""The tip: a branch's newest state in memory, as the pieces it is stored in, ready to take the next change.

``plan`` turns a change into a ``Draft``: exactly the bytes that are new and the manifest that describes the result.
It does no I/O; new stream ids are handed in. It works on the tip in place, so that an append costs what is appended:
**after a plan that was not committed the tip is ahead of the store and must be thrown away.**

What a value becomes:
- up to 256 bytes it stays inline in the manifest;
- a value that is new, or mostly new, is one blob, shared with every thread that has the same bytes;
- a value that grew keeps its pieces and adds one range of the branch's own stream for that key;
- a value that comes with the change that takes away another one which contains it is a part of that one's bytes: an
  input that becomes a part of the state is not stored twice;
- a value that was edited keeps what it shares with its previous bytes; many small pieces are consolidated when their
  table has cost more than rewriting the cheapest half of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backstay.pieces.body import Body
from backstay.pieces.manifest import (
    INLINE_BYTES_MAX,
    PIECES_MAX_INLINE,
    Entries,
    Entry,
    Key,
    Source,
    encode_base,
    encode_manifest,
    encode_table,
    root_digest,
)
from backstay.pieces.piece import (
    LITERAL_BYTES_MAX,
    STREAM_BYTES_MAX,
    Piece,
    Range,
    cut_pieces,
    join_pieces,
    piece_length,
)
from backstay.pieces.splice import Copy, splice

SEED_BYTES_MAX = 4096
"""A value up to this size is copied into its stream when the stream begins, so that it stays one range."""

BASE_WASTE_MIN = 512
"""Bytes that repeating unchanged entries may waste, beyond the size of a new base, before a base is written."""

MOVED_BYTES_MIN = 1024
"""Smaller values are stored anew where they come from another one: a range into a blob is no shorter than that much."""

CONSOLIDATE_PIECES_MIN = 16
PART_BYTES_MIN = 1024
"""Bytes that are appended one after the other are kept in parts of about this size, or larger."""


@dataclass(slots=True)
class Change:
    """What a save does to the state, already encoded. ``order`` names all keys of the new state, or None to keep it."""

    put: dict[Key, Body] = field(default_factory=dict)
    append: dict[Key, Body] = field(default_factory=dict)
    delete: set[Key] = field(default_factory=set)
    order: list[Key] | None = None


@dataclass(slots=True)
class Draft:
    """What one save must write: new blobs, new stretches of streams, new references, and the manifest."""

    blobs: dict[bytes, bytes] = field(default_factory=dict)
    chunks: list[tuple[int, int, bytes]] = field(default_factory=list)
    sources: set[Source] = field(default_factory=set)  # referred to by the new state and not by the head it builds on
    owned: set[int] = field(default_factory=set)  # streams that begin with this save
    manifest: bytes = b""
    base: bytes | None = None
    root: bytes = b""
    keys: tuple[Key, ...] = ()
    size: int = 0


@dataclass(slots=True)
class Live:
    """One value of the tip. ``parts`` are its bytes if they are at hand; ``digest`` continues its SHA-256."""

    entry: Entry
    pieces: list[Piece]
    parts: list[bytes] | None = None
    hasher: Any = None
    stream: int | None = None  # the branch's own stream for this key
    end: int = 0  # where that stream ends
    table_bytes: int = 0  # written for tables since the last consolidation

    def data(self) -> bytes:
        """Return the value's bytes; they must be at hand."""
        assert self.parts is not None, "the bytes of this value were not loaded"
        if len(self.parts) != 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0]

    def fill(self, parts: list[bytes]) -> None:
        """Bring the value's bytes into memory."""
        self.parts = parts
        self.hasher = hashlib.sha256()
        for part in parts:
            self.hasher.update(part)


NewStream = Callable[[], int]


class Tip:
    """The newest state of one branch as pieces. See the module's docstring for the rule about failed saves."""

    def __init__(self) -> None:
        self.lives: dict[Key, Live] = {}
        self.base: bytes | None = None
        self.base_entries: Entries = {}
        self.sources: set[Source] = set()
        self.items: dict[str, list[Any]] = {}  # lists as this very state was saved with, for saves that trust identity
        self._waste = 0

    @classmethod
    def load(
        cls,
        entries: Mapping[Key, Entry],
        tables: Mapping[bytes, Sequence[Piece]],
        base: bytes | None,
        base_entries: Entries,
        owned: Mapping[int, int],
    ) -> Tip:
        """Make the tip of a stored manifest; ``owned`` maps the branch's own streams to where they end."""
        tip = cls()
        tip.base, tip.base_entries = base, base_entries
        for key, entry in entries.items():
            tip.lives[key] = _revive(entry, tables, owned)
        tip.sources = _sources(tip.lives.values(), base)
        return tip

    def entries(self) -> Entries:
        """Return the manifest's entries in the state's order."""
        return {key: live.entry for key, live in self.lives.items()}

    def unloaded(self, change: Change) -> list[Key]:
        """Return the keys whose present bytes are needed for this change and are not in memory."""
        wanted = []
        for key in change.append:
            live = self.lives.get(key)
            if live is not None and live.hasher is None:
                wanted.append(key)
        for key, body in change.put.items():
            live = self.lives.get(key)
            if live is None or live.parts is not None or live.entry.kind != body.kind:
                continue
            if live.entry.size != len(body.data) or live.entry.digest != body.digest():
                wanted.append(key)
        return wanted

    def plan(self, change: Change, new_stream: NewStream) -> Draft:
        """Take the change in and return what must be written for it."""
        draft = Draft()
        before = {key: live.entry for key, live in self.lives.items()}
        gone = [live for key in change.delete if (live := self.lives.pop(key, None)) is not None]
        for key, body in change.put.items():
            old = self.lives.get(key)
            moved = _moved(body, gone) if old is None else None
            self.lives[key] = moved or self._put(old, body, draft, new_stream)
        for key, body in change.append.items():
            self.lives[key] = self._append(self.lives.get(key), body, draft, new_stream)
        if change.order is not None:
            self.lives = {key: self.lives[key] for key in change.order}
        self._write_manifest(before, draft)
        # Else nothing new is referred to. A stream that is written on after a while may have lost its reference.
        resumed = any(stream not in self.sources for stream, _, _ in draft.chunks)
        if draft.blobs or draft.owned or resumed or change.put or change.delete:
            sources = _sources(self.lives.values(), self.base)
            draft.sources = sources - self.sources
            self.sources = sources
        return draft

    # One value ----------------------------------------------------------------------------------------------------

    def _put(self, old: Live | None, body: Body, draft: Draft, new_stream: NewStream) -> Live:
        if old is None or old.entry.kind != body.kind:
            return _whole(body, draft)
        if old.parts is None:
            return _retold(old, body)  # not loaded, so `unloaded` found its digest to be the same
        data, previous = body.data, old.data()
        if data == previous:
            return _retold(old, body)
        if len(data) <= INLINE_BYTES_MAX:
            return _whole(body, draft)
        if old.entry.body is not None:  # it lies in the manifest: there is no piece that the new bytes could share
            return _whole(body, draft, stream=old.stream, end=old.end)
        if data.startswith(previous):
            grown = Body(body.kind, body.count - old.entry.count, data[len(previous) :])
            live = self._append(old, grown, draft, new_stream)
            live.parts = [data]
            return live
        return self._edit(old, body, draft, new_stream)

    def _append(self, old: Live | None, body: Body, draft: Draft, new_stream: NewStream) -> Live:
        if old is None:
            return _whole(body, draft)
        size = old.entry.size + len(body.data)
        if old.entry.body is not None or size <= INLINE_BYTES_MAX:
            return _whole(Body(old.entry.kind, old.entry.count + body.count, old.data() + body.data), draft)
        if not body.data:
            old.entry = _recount(old.entry, old.entry.count + body.count)
            return old
        self._lengthen(old, body.data, draft, new_stream)
        old.hasher.update(body.data)
        parts = old.parts
        if (
            parts and len(parts[-1]) + len(body.data) <= PART_BYTES_MIN
        ):  # an object each would take many times their length
            parts[-1] += body.data
        elif parts is not None:
            parts.append(body.data)
        old.entry = self._describe(old, old.entry.kind, old.entry.count + body.count, size, draft)
        return old

    def _lengthen(self, live: Live, data: bytes, draft: Draft, new_stream: NewStream) -> None:
        """Add bytes at the end. A few stay in the manifest until there are more: a row in a stream costs a page."""
        tail = live.pieces[-1] if live.pieces and isinstance(live.pieces[-1], bytes) else b""
        if len(tail) + len(data) <= LITERAL_BYTES_MAX and len(live.pieces) < PIECES_MAX_INLINE:
            live.pieces[len(live.pieces) - bool(tail) :] = [tail + data]
            return
        if live.stream is None and live.entry.size <= SEED_BYTES_MAX:
            live.pieces = [self._to_stream(live, live.data(), draft, new_stream)]
        elif tail:
            live.pieces.pop()
            data = tail + data
        piece, last = self._to_stream(live, data, draft, new_stream), live.pieces[-1] if live.pieces else None
        if isinstance(last, Range) and last.source == piece.source and last.start + last.length == piece.start:
            live.pieces[-1] = Range(last.source, last.start, last.length + piece.length)
        else:
            live.pieces.append(piece)

    def _edit(self, old: Live, body: Body, draft: Draft, new_stream: NewStream) -> Live:
        edits = splice(old.data(), body.data)
        new_bytes = sum(len(edit) for edit in edits if not isinstance(edit, Copy))
        if new_bytes * 2 > len(body.data):
            return _whole(body, draft, stream=old.stream, end=old.end)
        pieces: list[Piece] = []
        for edit in edits:
            if isinstance(edit, Copy):
                pieces.extend(cut_pieces(old.pieces, edit.start, edit.length))
            elif len(edit) <= LITERAL_BYTES_MAX:
                pieces.append(edit)
            else:
                pieces.append(self._to_stream(old, edit, draft, new_stream))
        old.pieces = join_pieces(pieces)
        old.fill([body.data])
        self._consolidate(old, draft, new_stream)
        old.entry = self._describe(old, body.kind, body.count, len(body.data), draft)
        return old

    def _to_stream(self, live: Live, data: bytes, draft: Draft, new_stream: NewStream) -> Range:
        if live.stream is None or live.end + len(data) > STREAM_BYTES_MAX:
            live.stream, live.end = new_stream(), 0
            draft.owned.add(live.stream)
        piece = Range(live.stream, live.end, len(data))
        draft.chunks.append((live.stream, live.end, data))
        live.end += len(data)
        return piece

    @staticmethod
    def _describe(live: Live, kind: str, count: int, size: int, draft: Draft) -> Entry:
        digest = live.hasher.digest()
        if len(live.pieces) <= PIECES_MAX_INLINE:
            return Entry(kind, count, size, digest, pieces=tuple(live.pieces))
        table = encode_table(live.pieces[:-1])
        name = hashlib.sha256(table).digest()
        if name != live.entry.table:
            draft.blobs[name] = table
            live.table_bytes += len(table)
        return Entry(kind, count, size, digest, None, tuple(live.pieces[-1:]), name, len(table))

    def _consolidate(self, live: Live, draft: Draft, new_stream: NewStream) -> None:
        """Rewrite the cheapest half of the pieces as one, once their table has cost more than that."""
        if len(live.pieces) <= CONSOLIDATE_PIECES_MIN:
            return
        lengths = [piece_length(piece) for piece in live.pieces]
        half = len(lengths) // 2
        window = cheapest = sum(lengths[:half])
        first = 0
        for start in range(1, len(lengths) - half + 1):
            window += lengths[start + half - 1] - lengths[start - 1]
            if window < cheapest:
                first, cheapest = start, window
        if live.table_bytes <= cheapest:
            return
        offset = sum(lengths[:first])
        data = live.data()[offset : offset + cheapest]
        merged = self._to_stream(live, data, draft, new_stream)
        live.pieces = join_pieces([*live.pieces[:first], merged, *live.pieces[first + half :]])
        live.table_bytes = 0

    # The manifest -------------------------------------------------------------------------------------------------

    def _write_manifest(self, before: Entries, draft: Draft) -> None:
        entries, base_entries = {key: live.entry for key, live in self.lives.items()}, self.base_entries
        steady = {key: entry for key, entry in entries.items() if before.get(key) is entry}
        repeated = 0  # bytes of what is described again though it is as it was
        for key, entry in steady.items():
            known = base_entries.get(key)
            if known is not entry and known != entry:
                repeated += 48 + len(entry.body or b"") + (12 * len(entry.pieces) if entry.pieces else 0)
        if repeated:
            self._waste += repeated
            # Rough sizes decide whether it is time to look; the exact size decides.
            if self._waste > BASE_WASTE_MIN and self._waste > BASE_WASTE_MIN + len(base := encode_base(steady)):
                self.base = hashlib.sha256(base).digest()
                self.base_entries = steady
                draft.blobs[self.base] = base
                self._waste = 0
        draft.manifest = encode_manifest(entries, self.base_entries)
        draft.base = self.base
        draft.root = root_digest(entries)
        draft.keys = tuple(entries)
        draft.size = sum(entry.size for entry in entries.values())


def _moved(body: Body, gone: Iterable[Live]) -> Live | None:
    """Return the value as a part of one that goes with the same change and is at hand; None if none contains it."""
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
            return Live(entry, pieces, parts=[body.data], hasher=hasher)
    return None


def _whole(body: Body, draft: Draft, stream: int | None = None, end: int = 0) -> Live:
    """Store the value as it is: inline if it is small, else as a blob. Its stream, if any, stays for later appends."""
    hasher = hashlib.sha256(body.data)
    digest, size = hasher.digest(), len(body.data)
    if size <= INLINE_BYTES_MAX:
        entry = Entry(body.kind, body.count, size, digest, body=body.data)
        return Live(entry, [], parts=[body.data], hasher=hasher, stream=stream, end=end)
    draft.blobs[digest] = body.data
    entry = Entry(body.kind, body.count, size, digest)
    return Live(entry, [Range(digest, 0, size)], parts=[body.data], hasher=hasher, stream=stream, end=end)


def _retold(live: Live, body: Body) -> Live:
    """Return the value with the same bytes; a count may change without them (a list of empty parts cannot, but may)."""
    live.entry = _recount(live.entry, body.count)
    return live


def _recount(entry: Entry, count: int) -> Entry:
    if entry.count == count:
        return entry
    return replace(entry, count=count)


def _sources(lives: Iterable[Live], base: bytes | None) -> set[Source]:
    named: set[Source] = set() if base is None else {base}
    for live in lives:
        named.update(piece.source for piece in live.pieces if isinstance(piece, Range))
        if live.entry.table is not None:
            named.add(live.entry.table)
    return named


def _revive(entry: Entry, tables: Mapping[bytes, Sequence[Piece]], owned: Mapping[int, int]) -> Live:
    if entry.body is not None:
        live = Live(entry, [])
        live.fill([entry.body])
        return live
    if entry.pieces is None:
        return Live(entry, [Range(entry.digest, 0, entry.size)])
    pieces = [*tables[entry.table], *entry.pieces] if entry.table is not None else list(entry.pieces)
    live = Live(entry, pieces)
    for piece in pieces:
        if isinstance(piece, Range) and isinstance(piece.source, int) and piece.source in owned:
            live.stream, live.end = piece.source, owned[piece.source]
    return live
