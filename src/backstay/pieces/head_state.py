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

A manifest has the entries that differ from its base and journal. Entries that it would only repeat move to the journal,
or to a new base when repeating them has cost more than the base. Everything about the other keys (packed contents, the
order, the size) is kept from one save to the next, so that a save of one key of many costs little more than that key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from backstay.codec.msgpack import header
from backstay.pieces.body import LIST, Body, from_body
from backstay.pieces.manifest import (
    INLINE_BYTES_MAX,
    JOURNAL,
    LITERAL_BYTES_MAX,
    PIECES_MAX_INLINE,
    STREAM_BYTES_MAX,
    Entries,
    Entry,
    Key,
    Piece,
    Range,
    Source,
    arrange,
    cut_pieces,
    encode_base,
    encode_manifest,
    encode_table,
    join_pieces,
    pack_content,
    pack_record,
    piece_length,
    replay,
    sort_keys,
)
from backstay.pieces.splice import Copy, splice

SEED_BYTES_MAX = 4096
"""A value up to this size is copied into its stream when the stream starts, so that it stays one range."""

BASE_WASTE_MIN = 512
"""A base is written when repeating unchanged entries has cost this many bytes more than the base would."""

BASE_AT_ONCE_BYTES = 4096
"""A state whose entries take more than this starts with a base."""

KEYS_WITHOUT_BASE = BASE_AT_ONCE_BYTES // (INLINE_BYTES_MAX + 16)

JOURNAL_BASE_MIN = 2048
"""A shorter base is written again instead of getting a journal, whose entry every manifest has."""

MOVED_BYTES_MIN = 1024
"""Smaller values are stored again instead of as part of another value: a range would not be shorter."""

CONSOLIDATE_PIECES_MIN = 16
SOURCES_MAX = 32
"""Each fork of a fork adds a stream to a value that grows. With more sources than this, some are copied to its own."""

GATHERED_MIN = 4
"""At least so many pieces are copied, and at least so many times the length of the longest of them."""

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
    moved: bool = False  # some bytes were copied, so the state needs fewer sources than before


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
    was_decoded: bool = False  # these bytes, apart from those that were encoded and appended since

    def data(self) -> bytes:
        """Return the value's bytes, which must be in memory."""
        assert self.parts is not None, "the bytes of this value were not loaded"
        if len(self.parts) != 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0]

    def value(self) -> Any:
        """Decode the value, whose bytes must be in memory."""
        assert self.parts is not None, "the bytes of this value were not loaded"
        found = from_body(self.entry.kind, self.entry.count, self.parts, self.was_decoded)
        self.was_decoded = True
        return found

    def fill(self, parts: list[bytes]) -> None:
        """Load the value's bytes into memory."""
        self.parts, self.was_decoded = parts, False
        self.hasher = hashlib.sha256()
        for part in parts:
            self.hasher.update(part)

    def copy(self) -> StoredValue:
        """Return the value for another head state. Bytes are shared: they never change."""
        parts, hasher = self.parts, self.hasher
        return StoredValue(
            self.entry,
            [*self.pieces],
            None if parts is None else [*parts],
            None if hasher is None else hasher.copy(),
            self.stream,
            self.end,
            self.table_bytes,
            self.was_decoded,
        )

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
        self.journal: StoredValue | None = None
        self.sources: set[Source] = set()
        self.items: dict[str, list[Any]] = {}  # the lists this state was saved with, for saves that trust identity
        self._loaded = False  # whether the bytes of all values are known to be in memory
        self._known: Entries = {}  # of the base and the journal
        self._changed: Entries = {}  # the entries that differ from those
        self._base_bytes = 0  # the length of the base; 0 if it is not known
        self._waste = 0  # bytes of repeated entries since the last base
        self._recent: Collection[Key] = ()  # the keys that the last save changed
        self._base_due = BASE_WASTE_MIN  # the waste from which on a new base may be worth it
        # For all keys of the state. None: some were added, removed or reordered, or there is another base.
        self._header = b""
        self._contents: dict[Key, bytes] | None = None  # packed for the root digest, in its order
        self._keys: tuple[Key, ...] = ()
        self._order: bytes | list[Key] | None = None
        self._order_bytes = 0  # of an order that repeats all names
        self._removed: list[Key] = []
        self._size = 0

    @classmethod
    def load(
        cls,
        entries: Mapping[Key, Entry],
        tables: Mapping[bytes, Sequence[Piece]],
        base: bytes | None,
        base_entries: Mapping[Key, Entry],
        owned: Mapping[int, int],
    ) -> HeadState:
        """Make the head state of a stored manifest; ``owned`` maps the branch's own streams to where they end.

        If it has a journal, ``replay_journal`` must follow.
        """
        head_state = cls()
        head_state.base, head_state._known = base, dict(base_entries)
        taken: set[int] = set()  # a stream grows for one value; a value that was moved may share it with others
        for key, entry in entries.items():
            if entry.body is not None:
                stored = StoredValue(entry, [], [entry.body], hashlib.sha256(entry.body))
            elif entry.pieces is None:
                stored = StoredValue(entry, [Range(entry.digest, 0, entry.size)])
            else:
                stored = StoredValue(entry, [*(tables[entry.table] if entry.table else ()), *entry.pieces])
                for piece in stored.pieces:
                    stream = piece.source if type(piece) is Range else None
                    if type(stream) is int and stream in owned and stream not in taken:
                        stored.stream, stored.end = stream, owned[stream]
                        taken.add(stream)
            head_state.values[key] = stored
        head_state.journal = head_state.values.pop(JOURNAL, None)
        head_state.sources = head_state._find_sources()
        head_state._changed = {key: entry for key, entry in entries.items() if base_entries.get(key) is not entry}
        return head_state

    def replay_journal(self) -> None:
        """Bring the values up to date with the journal, whose bytes were loaded."""
        assert self.journal is not None
        entries = {JOURNAL: self.journal.entry, **self.entries()}
        replay(entries, self._known, self.journal.parts or ())
        for key, entry in entries.items():
            if entry is not self.values[key].entry:
                self.values[key] = StoredValue(entry, [], [entry.body or b""], hashlib.sha256(entry.body or b""))
        self._changed.pop(JOURNAL, None)

    def copy(self) -> HeadState:
        """Return an independent head state of the same place, without the lists that only its own saver may trust."""
        twin = HeadState()
        twin.__dict__.update(self.__dict__)
        twin.items = {}
        twin.values = {key: stored.copy() for key, stored in list(self.values.items())}
        twin.journal = None if self.journal is None else self.journal.copy()
        twin.sources, twin._known, twin._changed = set(self.sources), dict(self._known), dict(self._changed)
        twin._contents = None if self._contents is None else dict(self._contents)
        twin._removed = list(self._removed)
        return twin

    def entries(self) -> Entries:
        """Return the manifest's entries in the state's order."""
        return {key: stored.entry for key, stored in self.values.items()}

    def stored(self) -> Iterator[StoredValue]:
        """Yield everything that is stored for the state: its values and the journal."""
        yield from self.values.values()
        if self.journal is not None:
            yield self.journal

    def unloaded(self, change: Change) -> list[Key]:
        """Return the keys whose current bytes this change needs and which are not in memory."""
        wanted: list[Key] = []
        if self._loaded:
            return wanted
        for key in change.append:
            stored = self.values.get(key)
            if stored is not None and stored.hasher is None:
                wanted.append(key)
        for key, body in change.put.items():
            stored = self.values.get(key)
            if stored is None or stored.parts is not None or stored.entry.kind != body.kind:
                continue
            if stored.entry.size != body.size or stored.entry.digest != body.digest():
                wanted.append(key)
        self._loaded = not wanted and all(stored.parts is not None for stored in self.values.values())
        return wanted

    def plan(self, change: Change, new_stream: NewStream) -> Draft:
        """Apply the change and return what must be written for it."""
        draft, values = Draft(), self.values
        before: dict[Key, Entry | None] = {}  # of each key whose entry changes
        gone: list[StoredValue] = []
        for key in change.delete:
            if (old := values.pop(key, None)) is not None:
                before[key] = old.entry
                gone.append(old)
        for key, body in change.put.items():
            old = values.get(key)
            entry = None if old is None else old.entry
            if old is not None and len(body.parts) == 1 and old.parts == body.parts and old.entry.kind == body.kind:
                new = old.recount(body.count)
            elif old is None or old.entry.kind != body.kind:
                moved = _part_of_removed(body, gone) if gone and old is None else None
                new = moved or _whole(body, draft)
            else:
                new = _replace(old, body, draft, new_stream)
            if new.entry is not entry:
                values[key] = new
                before[key] = entry
        for key, body in change.append.items():
            old = values.get(key)
            before[key] = None if old is None else old.entry
            values[key] = _append(old, body, draft, new_stream) if old else _whole(body, draft)
        if change.order is not None and change.order != list(values):
            self.values = {key: values[key] for key in change.order}
            self._contents = None
        self._write_manifest(before, draft, new_stream)
        if self._refers_elsewhere(change, before, draft):
            sources = self._find_sources()
            draft.sources = sources - self.sources
            self.sources = sources
        return draft

    def _refers_elsewhere(self, change: Change, before: Mapping[Key, Entry | None], draft: Draft) -> bool:
        """Return whether the state may need other sources than before."""
        if draft.blobs or draft.moved:
            return True
        for stream, _, _ in draft.chunks:
            if stream not in self.sources:  # it is new, or lost its reference in the meantime
                return True
        for key in before.keys() - change.append.keys():  # an append to a known stream refers to nothing new
            old, new = before[key], self.values.get(key)
            if (old is not None and old.body is None) or (new is not None and new.entry.body is None):
                return True
        return False

    def _write_manifest(self, before: dict[Key, Entry | None], draft: Draft, new_stream: NewStream) -> None:
        """Describe the new state."""
        changed, contents = self._changed, self._contents
        for key, old in before.items():
            new = self.values[key].entry if key in self.values else None
            if new is None or new == self._known.get(key):
                changed.pop(key, None)
            else:
                changed[key] = new
            if old is None or new is None or contents is None:
                contents = None
            else:
                contents[key] = pack_content(key, new)
                self._size += new.size - old.size
        self._contents = contents
        self._move_repeated(before, draft, new_stream)
        if self._contents is None:
            self._keys = tuple(self.values)
            self._header = header(len(self._keys), 0x90, 0xDC)
            self._contents = {key: pack_content(key, self.values[key].entry) for key in sort_keys(self._keys)}
            self._changed = {key: self._changed[key] for key in self._keys if key in self._changed}
            self._order, self._removed = arrange(self._keys, self._known, self._changed)
            self._order_bytes = sum(map(len, map(str, self._order))) if type(self._order) is list else 0
            self._size = sum(stored.entry.size for stored in self.values.values())
        listed = self._changed if self.journal is None else {**self._changed, JOURNAL: self.journal.entry}
        draft.manifest = encode_manifest(listed, self._order, self._removed)
        draft.base = self.base
        draft.root = hashlib.sha256(b"".join((self._header, *self._contents.values()))).digest()
        draft.keys = self._keys
        draft.size = self._size

    def _move_repeated(self, before: dict[Key, Entry | None], draft: Draft, new_stream: NewStream) -> None:
        """Move entries that this manifest would repeat to the journal or to a new base, if that is worth it.

        Never to both: a base ends the journal, and nothing would refer to bytes that it was given before.
        """
        may_be_large = self.base is None and len(self._changed) > KEYS_WITHOUT_BASE
        if may_be_large and _estimate(self._changed, ()) > BASE_AT_ONCE_BYTES:
            return self._start_base(self.entries(), draft)
        recent, self._recent = self._recent, before.keys()
        waste = _estimate(self._changed, before) + self._order_bytes
        light: Entries = {}
        if self.base is not None and (self.journal is not None or self._waste + waste > BASE_WASTE_MIN):
            light = self._fit_for_journal(before, recent)
            waste = _estimate(self._changed, {*before, *light}) + self._order_bytes
        self._waste += waste
        if waste and self._waste > self._base_due:
            entries = self.entries()
            base = encode_base(entries)
            if len(base) < JOURNAL_BASE_MIN:  # then without what changes often, so that other threads may share it
                entries = {key: entry for key, entry in entries.items() if key not in before}
                base = encode_base(entries)
            self._base_due = BASE_WASTE_MIN + len(base)
            if self._waste > self._base_due:
                return self._start_base(entries, draft)
        if light:
            self._extend_journal(light, draft, new_stream)
        return None

    def _fit_for_journal(self, before: Collection[Key], recent: Collection[Key]) -> Entries:
        """Return the entries that would be repeated and that a journal can take: the inline ones.

        A value that changes now but did not change in the last save would be repeated too.
        """
        known = self._known
        if not self._base_bytes:
            self._base_bytes = len(encode_base(known))
        if self._base_bytes < JOURNAL_BASE_MIN:
            return {}
        return {
            key: entry
            for key, entry in self._changed.items()
            if entry.body is not None
            and (key not in before or key not in recent)
            and (old := known.get(key)) is not None
            and old.body is not None
        }

    def _extend_journal(self, light: Entries, draft: Draft, new_stream: NewStream) -> None:
        """Move these entries to the journal; start a new base instead if the journal is long enough."""
        records = b"".join([pack_record(key, entry) for key, entry in light.items()])
        journal = self.journal or StoredValue(Entry(LIST, 0, 0, b""), [], [], hashlib.sha256())
        if journal.entry.size + len(records) > 2 * self._base_bytes or len(journal.pieces) >= PIECES_MAX_INLINE:
            return self._start_base(self.entries(), draft)
        self.journal = _append(journal, Body(LIST, len(light), records), draft, new_stream)
        self._known.update(light)
        for key in light:
            del self._changed[key]
        return None

    def _start_base(self, entries: Entries, draft: Draft) -> None:
        base = encode_base(entries)
        self.base, self.journal, self._known = hashlib.sha256(base).digest(), None, entries
        draft.blobs[self.base] = base
        self._changed = {
            key: stored.entry for key, stored in self.values.items() if entries.get(key) is not stored.entry
        }
        self._base_bytes, self._base_due, self._waste = len(base), BASE_WASTE_MIN, 0
        self._contents = None

    def _find_sources(self) -> set[Source]:
        named: set[Source] = set() if self.base is None else {self.base}
        for stored in self.stored():
            if stored.pieces:
                named.update([piece.source for piece in stored.pieces if isinstance(piece, Range)])
                if stored.entry.table is not None:
                    named.add(stored.entry.table)
        return named


def _estimate(entries: Entries, but: Collection[Key]) -> int:
    """Return roughly how many bytes these entries take in a manifest, without those of some keys."""
    total = 0
    for key, entry in entries.items():
        if key not in but:
            total += 48 + 12 * len(entry.pieces or ()) if entry.body is None else 16 + len(entry.body)
    return total


def _replace(old: StoredValue, body: Body, draft: Draft, new_stream: NewStream) -> StoredValue:
    """Return the value with new bytes of the same kind."""
    if old.parts is None:  # then ``unloaded`` found that the digest is the same
        return old.recount(body.count)
    rest = body.after(old.parts)
    if rest == b"":
        return old.recount(body.count)
    size = body.size
    if size <= INLINE_BYTES_MAX:
        return _whole(body, draft)
    if old.entry.body is not None:  # it is inline in the manifest, so there is no piece to share
        return _whole(body, draft, stream=old.stream, end=old.end)
    if rest is not None:
        _append(old, Body(body.kind, body.count - old.entry.count, rest), draft, new_stream)
        old.parts = list(body.parts)
        return old
    edits = splice(old.data(), body.data)
    new_bytes = sum(len(edit) for edit in edits if not isinstance(edit, Copy))
    if new_bytes * 2 > size:
        return _whole(body, draft, stream=old.stream, end=old.end)
    pieces: list[Piece] = []
    for edit in edits:
        if isinstance(edit, Copy):
            pieces.extend(cut_pieces(old.pieces, edit.start, edit.length))
        else:
            pieces.append(edit)
    old.pieces = join_pieces(pieces)
    old.fill(list(body.parts))
    _consolidate(old)
    # Only now are new bytes put into the stream: none that the consolidation has replaced.
    old.pieces = join_pieces(
        [
            _to_stream(old, piece, draft, new_stream)
            if type(piece) is bytes and len(piece) > LITERAL_BYTES_MAX
            else piece
            for piece in old.pieces
        ]
    )
    old.entry = _describe(old, body.count, size, draft)
    return old


def _append(old: StoredValue, body: Body, draft: Draft, new_stream: NewStream) -> StoredValue:
    """Return the value with more bytes at its end."""
    entry, data = old.entry, body.data
    size, count = entry.size + len(data), entry.count + body.count
    if entry.body is not None:
        return _whole(Body(entry.kind, count, entry.body + data), draft)
    if not data:
        return old.recount(count)
    if len(old.pieces) > SOURCES_MAX:
        _gather(old, draft, new_stream)
    old.hasher.update(data)
    pieces, parts = old.pieces, old.parts
    # A few bytes stay in the manifest until there are more: a row in a stream costs a page.
    tail = pieces[-1] if pieces and type(pieces[-1]) is bytes else b""
    if len(tail) + len(data) <= LITERAL_BYTES_MAX and len(pieces) < PIECES_MAX_INLINE:
        pieces[len(pieces) - bool(tail) :] = [tail + data]
    else:
        if old.stream is None and 0 < entry.size <= SEED_BYTES_MAX:
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
    size = body.size
    if size < MOVED_BYTES_MIN:
        return None
    for old in gone:
        start = old.data().find(body.data) if old.parts is not None and old.entry.size >= size else -1
        if start < 0 or not old.pieces:
            continue
        pieces = list(cut_pieces(old.pieces, start, size))
        if len(pieces) <= PIECES_MAX_INLINE:
            stored = StoredValue(Entry(body.kind, body.count, size, body.digest(), pieces=tuple(pieces)), pieces)
            stored.fill(list(body.parts))
            return stored
    return None


def _whole(body: Body, draft: Draft, stream: int | None = None, end: int = 0) -> StoredValue:
    """Store the value as it is: inline if it is small, else as a blob. Its stream, if any, stays for later appends."""
    data = body.data
    hasher, size = hashlib.sha256(data), len(data)
    digest = hasher.digest()
    if size <= INLINE_BYTES_MAX:
        entry = Entry(body.kind, body.count, size, digest, data)
        return StoredValue(entry, [], [data], hasher, stream, end)
    draft.blobs[digest] = data
    entry = Entry(body.kind, body.count, size, digest)
    return StoredValue(entry, [Range(digest, 0, size)], list(body.parts), hasher, stream, end)


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


def _consolidate(stored: StoredValue) -> None:
    """Replace the cheapest half of the pieces by their bytes, once their table has cost more than that."""
    if len(stored.pieces) > CONSOLIDATE_PIECES_MIN:
        offsets, first, end = _cheapest_half(stored.pieces)
        if stored.table_bytes > offsets[end] - offsets[first]:
            stored.pieces[first:end] = [stored.data()[offsets[first] : offsets[end]]]
            stored.table_bytes = 0


def _gather(stored: StoredValue, draft: Draft, new_stream: NewStream) -> None:
    """Copy some of the pieces to the branch's own stream if they are in too many sources.

    It takes as many neighbours as possible that are each much shorter than all of them together. So the copy is several
    times as long as each, and a byte is copied only a few times, however long the chain of forks is.
    """
    pieces = stored.pieces
    if len({piece.source for piece in pieces if type(piece) is Range}) <= SOURCES_MAX:
        return
    offsets, first, end = _cheapest_half(pieces)
    most = GATHERED_MIN - 1
    for start in range(max(0, len(pieces) - 2 * SOURCES_MAX), len(pieces)):
        largest = 0
        for number in range(start, len(pieces)):
            largest = max(largest, offsets[number + 1] - offsets[number])
            if number - start >= most and GATHERED_MIN * largest <= offsets[number + 1] - offsets[start]:
                most, first, end = number + 1 - start, start, number + 1
    pieces[first:end] = [_to_stream(stored, stored.data()[offsets[first] : offsets[end]], draft, new_stream)]
    draft.moved = True


def _cheapest_half(pieces: Sequence[Piece]) -> tuple[list[int], int, int]:
    """Return where each piece starts, and the first and the end of the half of them that has the fewest bytes."""
    offsets = [0, *accumulate(map(piece_length, pieces))]
    half = len(pieces) // 2
    _, first = min((offsets[at + half] - offsets[at], at) for at in range(len(pieces) - half + 1))
    return offsets, first, first + half
