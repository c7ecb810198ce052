"""Find bytes by their digest: which bytes a damaged checkpoint is missing, and where else they are stored.

A value's digest does not depend on where its bytes are stored or how they are cut into pieces. So bytes that one
checkpoint lost may still be stored for another checkpoint, of this store or of a backup, and the digest proves it.
``Overlay`` shows the store as it would be with the bytes found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from backstay.errors import BackstayError, Corrupted
from backstay.operations.listing import every_branch
from backstay.operations.load import open_head_state
from backstay.pieces.head_state import HeadState
from backstay.pieces.manifest import (
    JOURNAL,
    Entries,
    Piece,
    Range,
    decode_base,
    decode_manifest,
    merge_ranges,
    piece_length,
    replay,
)
from backstay.store.base import Backend, Query, Row
from backstay.store.finding import source_name

PAGE_ROWS = 200


class Overlay:
    """A store with restored bytes on top. Reads return the restored bytes first; the store itself does not change."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.blobs: dict[bytes, bytes] = {}
        self._streams: dict[int, dict[int, bytes]] = {}  # by offset; the parts of a stream never overlap

    @property
    def chunks(self) -> list[tuple[int, int, bytes]]:
        """Return the restored parts of streams, as the store's ``restore`` takes them."""
        return [(stream, offset, parts[offset]) for stream, parts in self._streams.items() for offset in sorted(parts)]

    def put(self, stream: int, start: int, data: bytes) -> bool:
        """Add bytes of a stream; return False, and change nothing, if they contradict bytes added before."""
        known = self._streams.setdefault(stream, {})
        end = start + len(data)
        missing: list[tuple[int, bytes]] = []
        position = start
        for offset in sorted(known):
            low, high = max(start, offset), min(end, offset + len(known[offset]))
            if low >= high:
                continue
            if known[offset][low - offset : high - offset] != data[low - start : high - start]:
                return False
            if position < low:
                missing.append((position, data[position - start : low - start]))
            position = max(position, high)
        if position < end:
            missing.append((position, data[position - start :]))
        known.update(missing)
        return True

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        """Return the bytes of each range, as the store's ``fetch`` does."""
        return [self._fetch(piece) for piece in ranges]

    def _fetch(self, piece: Range) -> list[bytes]:
        source, start, length = piece
        if isinstance(source, bytes):
            if source not in self.blobs:
                return self._backend.fetch([piece])[0]
            if start + length > len(self.blobs[source]):
                raise Corrupted(f"{source_name(source)} is shorter than its manifest says")
            return [self.blobs[source][start : start + length]]
        restored = self._streams.get(source, {})
        parts: list[bytes] = []
        position, end = start, start + length
        for offset in sorted(restored):
            data = restored[offset]
            low, high = max(position, offset), min(end, offset + len(data))
            if low >= high:
                continue
            if position < low:
                parts += self._backend.fetch([Range(source, position, low - position)])[0]
            parts.append(data[low - offset : high - offset])
            position = high
        if position < end:
            parts += self._backend.fetch([Range(source, position, end - position)])[0]
        return parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)  # every other method is the store's own


# Reading rows -----------------------------------------------------------------------------------------------------


def rows_of(backend: Backend, namespace: str) -> Iterator[Row]:
    """Iterate over all checkpoints with their payloads, page by page. Unreadable pages are skipped."""
    branches = every_branch(backend, namespace, None)
    while True:
        try:
            branch = next(branches, None)
        except BackstayError:
            return
        if branch is None:
            return
        before: int | None = None
        while True:
            try:
                page = backend.find(Query(*branch.key, before=before, limit=PAGE_ROWS, payload=True))
            except BackstayError:
                break
            yield from page
            if len(page) < PAGE_ROWS:
                break
            before = page[-1].seq


def with_base(store: Overlay | Backend, row: Row) -> Row:
    """Return the row with its base from the overlay, if that was restored."""
    if isinstance(store, Overlay) and row.base in store.blobs:
        return row._replace(base_data=store.blobs[row.base])
    return row


def entries_of(store: Overlay | Backend, row: Row) -> Entries:
    """Return the entries of a row's manifest, base and journal; no bytes of values or tables are read."""
    row = with_base(store, row)
    base = {} if row.base is None else decode_base(row.base_data or b"")
    entries = decode_manifest(row.manifest, base)
    if JOURNAL in entries:
        replay(entries, base, [read_value(store, entries[JOURNAL].pieces or ())])
    return entries


def state_of(store: Overlay | Backend, row: Row) -> HeadState:
    """Return the pieces of a row's state, with the bytes of the overlay."""
    return open_head_state(cast(Backend, store), with_base(store, row), {})


def read_value(store: Overlay | Backend, pieces: Sequence[Piece]) -> bytes:
    """Return a value's bytes; raise Corrupted if some are missing."""
    found = iter(store.fetch([piece for piece in pieces if isinstance(piece, Range)]))
    return b"".join(b"".join(next(found)) if isinstance(piece, Range) else piece for piece in pieces)


def is_intact(store: Overlay | Backend, pieces: Sequence[Piece], digest: bytes) -> bool:
    """Return whether these pieces exist and have this digest."""
    try:
        return hashlib.sha256(read_value(store, pieces)).digest() == digest
    except BackstayError:
        return False


# Missing bytes ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MissingBytes:
    """The bytes that a checkpoint is missing, by digest: blobs, and values with their pieces in this store."""

    blobs: set[bytes] = field(default_factory=set)
    values: dict[bytes, Sequence[Piece]] = field(default_factory=dict)

    @property
    def digests(self) -> set[bytes]:
        """Return all digests to look for."""
        return self.blobs | set(self.values)


def find_missing(store: Overlay, row: Row) -> MissingBytes:
    """Return the bytes that a row is missing; raise DecodeError or Corrupted if its own manifest cannot be read."""
    missing = MissingBytes()
    row = with_base(store, row)
    if row.base is not None and hashlib.sha256(row.base_data or b"").digest() != row.base:
        missing.blobs.add(row.base)
        return missing
    entries = decode_manifest(row.manifest, {} if row.base is None else decode_base(row.base_data or b""))
    journal = entries.get(JOURNAL)
    if journal is not None and not is_intact(store, journal.pieces or (), journal.digest):
        missing.values[journal.digest] = journal.pieces or ()
        return missing
    for entry in entries.values():
        if entry.table is not None and not is_intact(store, [Range(entry.table, 0, entry.table_size)], entry.table):
            missing.blobs.add(entry.table)
    if missing.blobs:
        return missing
    for value in state_of(store, row).values.values():
        if value.entry.body is None and not is_intact(store, value.pieces, value.entry.digest):
            missing.values[value.entry.digest] = value.pieces
            # If the value is one whole blob, that blob is missing. If it is a part of a blob, the blob may be missing;
            # restoring an intact blob does no harm.
            missing.blobs.update(
                piece.source for piece in value.pieces if isinstance(piece, Range) and isinstance(piece.source, bytes)
            )
    return missing


def find_bytes(backend: Backend, namespace: str, wanted: set[bytes]) -> dict[bytes, bytes]:
    """Return the bytes with these digests that a store has. Every byte is verified."""
    found: dict[bytes, bytes] = {}
    tried: set[tuple[bytes, tuple[Piece, ...]]] = set()

    def look(digest: bytes, pieces: Sequence[Piece]) -> None:
        attempt = (digest, tuple(pieces))
        if digest not in wanted or digest in found or attempt in tried:
            return
        tried.add(attempt)
        try:
            data = read_value(backend, pieces)
        except BackstayError:
            return
        if hashlib.sha256(data).digest() == digest:
            found[digest] = data

    for row in rows_of(backend, namespace):
        if len(found) == len(wanted):
            break
        look(row.base or b"", [row.base_data or b""])
        try:
            state = state_of(backend, row)
        except BackstayError:
            continue
        for value in state.stored():
            entry = value.entry
            if entry.table is not None:
                look(entry.table, [Range(entry.table, 0, entry.table_size)])
            look(entry.digest, [entry.body] if entry.body is not None else value.pieces)
    return found


# Where restored bytes may go --------------------------------------------------------------------------------------


class OccupiedRanges:
    """The ranges of streams that belong to good checkpoints: a repair must not change them."""

    def __init__(self) -> None:
        self._streams: dict[int, list[tuple[int, int]]] = {}

    def add(self, backend: Backend, row: Row) -> None:
        """Add the ranges of a good checkpoint."""
        try:
            values = state_of(backend, row).stored()
        except BackstayError:  # damaged since it was checked
            return
        for piece in (piece for value in values for piece in value.pieces):
            if isinstance(piece, Range) and isinstance(piece.source, int):
                known = self._streams.get(piece.source, [])
                self._streams[piece.source] = merge_ranges([*known, (piece.start, piece.start + piece.length)])

    def split(self, stream: int, start: int, end: int) -> list[tuple[int, int, bool]]:
        """Split a range into parts, each with a flag: whether good checkpoints use it."""
        parts: list[tuple[int, int, bool]] = []
        position = start
        for low, high in self._streams.get(stream, []):
            low, high = max(low, position), min(high, end)
            if low >= high:
                continue
            if position < low:
                parts.append((position, low, False))
            parts.append((low, high, True))
            position = high
        return [*parts, (position, end, False)] if position < end else parts


def place(store: Overlay, occupied: OccupiedRanges, data: bytes, pieces: Sequence[Piece]) -> bool:
    """Put a value's bytes where its pieces say they belong; return False, and change nothing, if that cannot be right.

    The addresses in a manifest have no digest. A damaged address points at the bytes of other values, which must stay.
    """
    parts: list[tuple[int, int, bytes]] = []
    blobs: dict[bytes, bytes] = {}
    position = 0
    for piece in pieces:
        part = data[position : position + piece_length(piece)]
        position += len(part)
        if not isinstance(piece, Range):
            if piece != part:
                return False
        elif isinstance(piece.source, bytes):
            if piece.start == 0 and hashlib.sha256(part).digest() == piece.source:
                blobs[piece.source] = part
        else:
            different = _different_parts(store, occupied, piece.source, piece.start, part)
            if different is None:
                return False
            parts += different
    if not all(store.put(*part) for part in parts):
        return False
    store.blobs.update(blobs)
    return True


def _different_parts(
    store: Overlay, occupied: OccupiedRanges, stream: int, start: int, data: bytes
) -> list[tuple[int, int, bytes]] | None:
    """Return the parts of a range that must change; None if a good checkpoint uses one of them."""
    found: list[tuple[int, int, bytes]] = []
    for low, high, used in occupied.split(stream, start, start + len(data)):
        part = data[low - start : high - start]
        try:
            if b"".join(store.fetch([Range(stream, low, high - low)])[0]) == part:
                continue
        except BackstayError:  # these bytes are missing
            pass
        if used:
            return None
        found.append((stream, low, part))
    return found
