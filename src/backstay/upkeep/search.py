"""Looking for bytes by their digest: what a damaged checkpoint lacks, and whether any other place has it.

A value's digest is the same wherever and in whatever pieces its bytes are kept. So what one checkpoint lost, another
one of the same store, or of any other store, may still have; and the digest proves that it is the right one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from backstay.errors import BackstayError
from backstay.pieces.coverage import merge_ranges
from backstay.pieces.manifest import Entries, decode_base, decode_manifest
from backstay.pieces.piece import Piece, Range, piece_length
from backstay.pieces.tip import Tip
from backstay.store.base import Backend, Query, Row
from backstay.thread.load import open_tip
from backstay.upkeep.overlay import Overlay

PAGE_ROWS = 200


@dataclass(slots=True)
class Wants:
    """What a checkpoint lacks, by digest: blobs, and values with the pieces they are made of here."""

    blobs: set[bytes] = field(default_factory=set)
    values: dict[bytes, Sequence[Piece]] = field(default_factory=dict)

    @property
    def digests(self) -> set[bytes]:
        """Return everything to look for."""
        return self.blobs | set(self.values)


def rows_of(backend: Backend, namespace: str) -> Iterator[Row]:
    """Iterate over all checkpoints with their payloads, page by page; what cannot be read is passed over."""
    try:
        lanes = backend.lanes(namespace, None, None)
    except BackstayError:
        return
    for lane in lanes:
        before: int | None = None
        while True:
            try:
                page = backend.find(Query(*lane.key, before=before, limit=PAGE_ROWS, payload=True))
            except BackstayError:
                break
            yield from page
            if len(page) < PAGE_ROWS:
                break
            before = page[-1].seq


def tip_of(store: Overlay | Backend, row: Row) -> Tip:
    """Return the pieces of a row's state, with what was put into the overlay."""
    return open_tip(cast(Backend, store), with_base(store, row), {})


def read_value(store: Overlay | Backend, pieces: Sequence[Piece]) -> bytes:
    """Return a value's bytes; Corrupted if some are not there."""
    found = iter(store.fetch([piece for piece in pieces if isinstance(piece, Range)]))
    return b"".join(b"".join(next(found)) if isinstance(piece, Range) else piece for piece in pieces)


def is_right(store: Overlay | Backend, pieces: Sequence[Piece], digest: bytes) -> bool:
    """Tell whether these pieces are there and have this digest."""
    try:
        return hashlib.sha256(read_value(store, pieces)).digest() == digest
    except BackstayError:
        return False


def lacking(store: Overlay, row: Row) -> Wants:
    """Return what a row lacks; raises DecodeError or Corrupted if its own manifest cannot be read."""
    wants = Wants()
    row = with_base(store, row)
    if row.base is not None and hashlib.sha256(row.base_data or b"").digest() != row.base:
        wants.blobs.add(row.base)
        return wants
    for entry in entries_of(row).values():
        if entry.table is not None and not is_right(store, [Range(entry.table, 0, entry.table_size)], entry.table):
            wants.blobs.add(entry.table)
    if wants.blobs:
        return wants
    for live in tip_of(store, row).lives.values():
        if live.entry.body is None and not is_right(store, live.pieces, live.entry.digest):
            wants.values[live.entry.digest] = live.pieces
            # A value that is one blob lacks that. Of a range of a blob nobody can tell; to put it back does no harm.
            wants.blobs.update(
                piece.source for piece in live.pieces if isinstance(piece, Range) and isinstance(piece.source, bytes)
            )
    return wants


def find_bytes(backend: Backend, namespace: str, wanted: set[bytes]) -> dict[bytes, bytes]:
    """Return what a store has of these digests, every byte verified."""
    finder = _Finder(backend, wanted)
    for row in rows_of(backend, namespace):
        if len(finder.found) == len(wanted):
            break
        finder.look_through(row)
    return finder.found


class _Finder:
    """Collects bytes by their digests, from wherever rows say that they are."""

    def __init__(self, backend: Backend, wanted: set[bytes]) -> None:
        self._backend = backend
        self._wanted = wanted
        self._tried: set[tuple[bytes, tuple[Piece, ...]]] = set()
        self.found: dict[bytes, bytes] = {}

    def look_through(self, row: Row) -> None:
        """Take what is wanted of everything that a row is made of."""
        if row.base is not None and row.base_data is not None:
            self._look(row.base, [row.base_data])
        try:
            tip = tip_of(self._backend, row)
        except BackstayError:
            return
        for entry, pieces in ((live.entry, live.pieces) for live in tip.lives.values()):
            if entry.table is not None:
                self._look(entry.table, [Range(entry.table, 0, entry.table_size)])
            self._look(entry.digest, [entry.body] if entry.body is not None else pieces)

    def _look(self, digest: bytes, pieces: Sequence[Piece]) -> None:
        if digest in self.found or digest not in self._wanted or (digest, tuple(pieces)) in self._tried:
            return
        self._tried.add((digest, tuple(pieces)))
        try:
            data = read_value(self._backend, pieces)
        except BackstayError:
            return
        if hashlib.sha256(data).digest() == digest:
            self.found[digest] = data


class Ground:
    """The stretches of streams that good checkpoints are made of: nothing there may be changed."""

    def __init__(self) -> None:
        self._streams: dict[int, list[tuple[int, int]]] = {}

    def add(self, backend: Backend, row: Row) -> None:
        """Take in a good checkpoint."""
        try:
            lives = tip_of(backend, row).lives.values()
        except BackstayError:  # damaged since it was looked at
            return
        for piece in (piece for live in lives for piece in live.pieces):
            if isinstance(piece, Range) and isinstance(piece.source, int):
                known = self._streams.get(piece.source, [])
                self._streams[piece.source] = merge_ranges([*known, (piece.start, piece.start + piece.length)])

    def split(self, stream: int, start: int, end: int) -> list[tuple[int, int, bool]]:
        """Return a stretch in parts, each with whether good checkpoints are made of it."""
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


def place(store: Overlay, ground: Ground, data: bytes, pieces: Sequence[Piece]) -> bool:
    """Put a value's bytes where its pieces say they are; False, and nothing is done, if that cannot be right.

    A manifest's addresses have no digest. If one is damaged it names bytes of others, which must stay what they are.
    """
    stretches: list[tuple[int, int, bytes]] = []
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
            lacking_here = _unlike(store, ground, piece.source, piece.start, part)
            if lacking_here is None:
                return False
            stretches += lacking_here
    if not all(store.put(*stretch) for stretch in stretches):
        return False
    store.blobs.update(blobs)
    return True


def _unlike(
    store: Overlay, ground: Ground, stream: int, start: int, data: bytes
) -> list[tuple[int, int, bytes]] | None:
    """Return the parts of a stretch that are not as they should be; None if a good checkpoint is made of one."""
    found: list[tuple[int, int, bytes]] = []
    for low, high, held in ground.split(stream, start, start + len(data)):
        part = data[low - start : high - start]
        if not _has(store, Range(stream, low, high - low), part):
            if held:
                return None
            found.append((stream, low, part))
    return found


def _has(store: Overlay, place_of: Range, data: bytes) -> bool:
    try:
        return b"".join(store.fetch([place_of])[0]) == data
    except BackstayError:
        return False


def with_base(store: Overlay | Backend, row: Row) -> Row:
    """Return the row with the base that was put into the overlay, if any was."""
    if isinstance(store, Overlay) and row.base in store.blobs:
        return row._replace(base_data=store.blobs[row.base])
    return row


def entries_of(row: Row) -> Entries:
    """Return what a row's manifest says, with its base; no byte of any value or table is read."""
    return decode_manifest(row.manifest, {} if row.base is None else decode_base(row.base_data or b""))
