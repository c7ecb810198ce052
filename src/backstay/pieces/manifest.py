"""Manifests: the values that make up a checkpoint's state, and where the bytes of each value are.

A **piece** says where some consecutive bytes of a value are. It is either a **range** of a source (an append-only
stream, named by an integer, or an immutable blob, named by the SHA-256 of its bytes) or, for bytes shorter than an
address, the **bytes themselves**. A list that only grows is one range whose end moves. No piece is empty; ranges that
touch are one range; a literal is at most ``LITERAL_BYTES_MAX`` long.

An **entry** describes one value: its kind, count, size, digest and place. The place is one of

- inline: the body itself, up to ``INLINE_BYTES_MAX``;
- whole: one blob, whose name is the value's own digest;
- pieces: up to ``PIECES_MAX_INLINE`` pieces;
- table: a blob that lists all pieces but the last, and the last piece, whose end moves while the value grows.

Entries that stay the same need not be repeated in every manifest: they move to a **base**, a blob of entries that
manifests refer to and override. If the base is large, and now this and now that small value of it changes, the new
inline entries move to a **journal**: a list that only grows, stored in pieces as any other, whose later items override
earlier ones. A journal has inline entries only, and only of keys that are inline in the base, so that a manifest and
its base name all keys and all sources. When it is twice as long as the base, a new base takes its place. Apart from its
base, its journal and its tables a manifest is self-contained: no chains.

Keys are text for the caller's state and small integers for the parts that Backstay adds to it (``FRAMES``, ``PATH``,
``RUN``, ``VERSIONS``), so the two cannot be confused. The **root** digest covers the sorted content only: it does not
depend on where the bytes are, so every store computes the same one.
"""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ormsgpack

from backstay.codec.msgpack import header
from backstay.errors import DecodeError

LITERAL_BYTES_MAX = 24
"""Longer bytes go to a stream: a range costs about as much as this in a manifest."""

OFFSET_BITS = 28
STREAM_BYTES_MAX = 1 << OFFSET_BITS
"""A stream rolls over before it reaches this, so one 63-bit integer addresses every byte: stream << 28 | offset."""

STREAM_ID_MAX = (1 << (63 - OFFSET_BITS)) - 1

DIGEST_BYTES = 32


class Range(NamedTuple):
    """``length`` bytes of ``source``, starting at ``start``."""

    source: int | bytes
    start: int
    length: int


Piece = Range | bytes


def piece_length(piece: Piece) -> int:
    """Return how many bytes of the value the piece holds."""
    return piece.length if isinstance(piece, Range) else len(piece)


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same bytes in as few pieces as touching ranges and short literals allow."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Range):
            if piece.length == 0:
                continue
            if isinstance(last, Range) and last.source == piece.source and last.start + last.length == piece.start:
                joined[-1] = Range(last.source, last.start, last.length + piece.length)
                continue
        elif not piece:
            continue
        elif isinstance(last, bytes) and len(last) + len(piece) <= LITERAL_BYTES_MAX:
            joined[-1] = last + piece
            continue
        joined.append(piece)
    return joined


def cut_pieces(pieces: Sequence[Piece], start: int, length: int) -> Iterator[Piece]:
    """Yield the pieces of ``length`` bytes, starting at ``start``."""
    end = start + length
    position = 0
    for piece in pieces:
        size = piece_length(piece)
        low, high = max(start - position, 0), min(end - position, size)
        if low < high:
            yield Range(piece.source, piece.start + low, high - low) if isinstance(piece, Range) else piece[low:high]
        position += size
        if position >= end:
            return


def grown_by(old: Sequence[Piece], new: Sequence[Piece]) -> list[Piece] | None:
    """Return the pieces that a value grew by; None if its start is no longer stored in the same place."""
    if not old or len(new) < len(old) or list(new[: len(old) - 1]) != list(old[:-1]):
        return None
    last, now = old[-1], new[len(old) - 1]
    if isinstance(last, bytes) or isinstance(now, bytes):
        if not isinstance(last, bytes) or not isinstance(now, bytes) or not now.startswith(last):
            return None
        return [*([now[len(last) :]] if len(now) > len(last) else []), *new[len(old) :]]
    if (now.source, now.start) != (last.source, last.start) or now.length < last.length:
        return None
    rest = [Range(now.source, now.start + last.length, now.length - last.length)] if now.length > last.length else []
    return [*rest, *new[len(old) :]]


def pack_pieces(pieces: Iterable[Piece]) -> list[Any]:
    """Return a flat list of plain values: a literal as itself, a range as its three fields."""
    flat: list[Any] = []
    for piece in pieces:
        if isinstance(piece, Range):
            # The length comes first: it is an integer, and a literal is bytes, so the first element says which it is.
            flat += (piece.length, piece.source, piece.start)
        else:
            flat.append(piece)
    return flat


def unpack_pieces(flat: Sequence[Any]) -> tuple[Piece, ...]:
    """Return the pieces of ``pack_pieces``; raise DecodeError on anything else."""
    pieces: list[Piece] = []
    position = 0
    try:
        while position < len(flat):
            length = flat[position]
            if isinstance(length, bytes):
                pieces.append(length)
                position += 1
                continue
            source, start = flat[position + 1], flat[position + 2]
            is_stream = type(source) is int and 0 < source <= STREAM_ID_MAX
            is_blob = type(source) is bytes and len(source) == DIGEST_BYTES
            is_length = type(length) is int and length > 0 and type(start) is int and start >= 0
            if not (is_length and (is_stream or is_blob)):
                raise DecodeError("a manifest contains an impossible range")
            pieces.append(Range(source, start, length))
            position += 3
    except (IndexError, TypeError) as error:
        raise DecodeError("a manifest's list of pieces is incomplete") from error
    return tuple(pieces)


INLINE_BYTES_MAX = 256
PIECES_MAX_INLINE = 8
PLACES_MAX = 256  # keys whose order is written as one byte each

Key = str | int
FRAMES = 0
PATH = 1
RUN = 2
VERSIONS = 3  # the part of another engine's run that changes with every step; RUN holds the rest
JOURNAL = -1  # not a part of the state: newer entries than those of the base

SYSTEM_NAMES = {FRAMES: "frames", PATH: "path", RUN: "run", VERSIONS: "marks"}

Source = int | bytes

_NAME = operator.itemgetter(0, 1)
_END = operator.itemgetter(1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: what it is and where its bytes are. With neither ``body`` nor ``pieces`` it is a blob of its own."""

    kind: str
    count: int
    size: int
    digest: bytes
    body: bytes | None = None
    pieces: tuple[Piece, ...] | None = None
    table: bytes | None = None  # digest of the blob that lists the pieces before ``pieces``, and its size
    table_size: int = 0


Entries = dict[Key, Entry]


def encode_manifest(
    changed: Mapping[Key, Entry], order: bytes | list[Key] | None = None, removed: Iterable[Key] = ()
) -> bytes:
    """Return the bytes of a manifest with the entries that differ from the base; the others are from ``arrange``."""
    return ormsgpack.packb([order, [*removed], *_pack_entries(changed)])


def arrange(
    keys: Sequence[Key], base: Mapping[Key, Entry], changed: Mapping[Key, Entry]
) -> tuple[bytes | list[Key] | None, list[Key]]:
    """Return the order that a manifest must state, None if it follows from the base, and the removed keys of the base.

    ``keys`` are those of the state in their order.
    """
    present = set(keys)
    natural = [key for key in base if key in present] + [key for key in changed if key not in base]
    removed = [key for key in base if key not in present]
    if natural == list(keys):
        return None, removed
    if len(natural) > PLACES_MAX:
        return list(keys), removed
    # Each key's place in the natural order: one byte is shorter than its name.
    places = {key: place for place, key in enumerate(natural)}
    return bytes(places[key] for key in keys), removed


def decode_manifest(data: bytes, base: Mapping[Key, Entry]) -> Entries:
    """Return the entries of a manifest over its base, in the state's order; a journal comes last: see ``replay``."""
    fields = _unpack_list(data, "manifest")
    if len(fields) < 2 or not isinstance(fields[1], list):
        raise DecodeError("a manifest has an unknown form")
    entries: Entries = {key: entry for key, entry in base.items() if key not in fields[1]}
    entries.update(_unpack_entry(plain) for plain in fields[2:])
    order = fields[0]
    if order is None:
        return entries
    journal = entries.pop(JOURNAL, None)
    try:
        if len(order) != len(entries):
            raise DecodeError("a manifest's order does not name all its keys")
        if isinstance(order, bytes):
            natural = list(entries)
            order = [natural[place] for place in order]
        entries = {key: entries[key] for key in order}
    except (IndexError, KeyError, TypeError) as error:
        raise DecodeError("a manifest's order names an unknown key") from error
    if journal is not None:
        entries[JOURNAL] = journal
    return entries


def replay(entries: Entries, base: Entries, journal: Iterable[bytes]) -> None:
    """Update the base, and those entries that are from the base, with the bytes of the journal; remove its entry."""
    count, data = entries.pop(JOURNAL).count, b"".join(journal)
    if count > len(data):
        raise DecodeError("a journal is shorter than its manifest says")
    newest: dict[Any, list[Any]] = {}
    for plain in _unpack_list(header(count, 0x90, 0xDC) + data, "journal"):
        if type(plain) is not list or len(plain) != 4 or type(plain[0]) not in (str, int):
            raise DecodeError("a journal's entry has an unknown form")
        newest[plain[0]] = plain
    for plain in newest.values():
        key, entry = _unpack_entry(plain)
        known = base.get(key)
        if known is None or known.body is None:
            raise DecodeError("a journal has an entry whose key is not inline in the base")
        base[key] = entry
        if entries.get(key) is known:
            entries[key] = entry


def pack_record(key: Key, entry: Entry) -> bytes:
    """Return an inline entry as an item of a journal."""
    return ormsgpack.packb([key, entry.kind, entry.count, entry.body])


def encode_base(entries: Mapping[Key, Entry]) -> bytes:
    """Return the bytes of a base blob."""
    return ormsgpack.packb(_pack_entries(entries))


def decode_base(data: bytes) -> Entries:
    """Return the entries of a base blob."""
    return dict(_unpack_entry(plain) for plain in _unpack_list(data, "base"))


def encode_table(pieces: Iterable[Piece]) -> bytes:
    """Return the bytes of a table blob."""
    return ormsgpack.packb(pack_pieces(pieces))


def decode_table(data: bytes) -> tuple[Piece, ...]:
    """Return the pieces of a table blob."""
    return unpack_pieces(_unpack_list(data, "table"))


def root_digest(entries: Mapping[Key, Entry]) -> bytes:
    """Return the digest of the content: every key with its value's kind, count and digest, in sorted order."""
    named = [(str(key), type(key) is int, entry) for key, entry in entries.items()]
    named.sort(key=_NAME)
    content = [[name, system, entry.kind, entry.count, entry.digest] for name, system, entry in named]
    return hashlib.sha256(ormsgpack.packb(content)).digest()


def pack_content(key: Key, entry: Entry) -> bytes:
    """Return what the root digest covers of one value, packed, so that the next root need not pack it again."""
    return ormsgpack.packb([str(key), type(key) is int, entry.kind, entry.count, entry.digest])


def sort_keys(keys: Iterable[Key]) -> list[Key]:
    """Return keys in the order in which the root digest covers them."""
    return sorted(keys, key=lambda key: (str(key), type(key) is int))


def _pack_entries(entries: Mapping[Key, Entry]) -> list[list[Any]]:
    packed: list[list[Any]] = []
    for key, entry in entries.items():
        if entry.body is not None:
            packed.append([key, entry.kind, entry.count, entry.body])
        elif entry.pieces is None:
            packed.append([key, entry.kind, entry.count, entry.size, entry.digest])
        else:
            plain: list[Any] = [key, entry.kind, entry.count, entry.digest]
            if len(entry.pieces) == 1 and type(piece := entry.pieces[0]) is Range:  # as ``pack_pieces``, without a call
                plain.append([piece.length, piece.source, piece.start])
            else:
                plain.append(pack_pieces(entry.pieces))
            if entry.table is not None:
                plain += (entry.table, entry.table_size, entry.size)
            packed.append(plain)
    return packed


def _unpack_entry(plain: Sequence[Any]) -> tuple[Key, Entry]:
    try:
        key, kind, count, *place = plain
        if type(key) not in (str, int) or type(kind) is not str or type(count) is not int or count < 0:
            raise DecodeError("a manifest's entry has an impossible key, kind or count")
        match place:
            case [bytes(body)]:
                return key, Entry(kind, count, len(body), hashlib.sha256(body).digest(), body=body)
            case [int(size), bytes(digest)]:
                return key, Entry(kind, count, size, _digest(digest))
            case [bytes(digest), list(flat)]:
                pieces = unpack_pieces(flat)
                size = sum([piece[2] if type(piece) is Range else len(piece) for piece in pieces])
                return key, Entry(kind, count, size, _digest(digest), pieces=pieces)
            case [bytes(digest), list(flat), bytes(table), int(table_size), int(size)]:
                pieces = unpack_pieces(flat)
                return key, Entry(kind, count, size, _digest(digest), None, pieces, _digest(table), table_size)
    except (TypeError, ValueError) as error:
        raise DecodeError("a manifest's entry is incomplete") from error
    raise DecodeError("a manifest's entry has an unknown form")


def _digest(data: bytes) -> bytes:
    if len(data) != DIGEST_BYTES:
        raise DecodeError("a manifest's digest has the wrong length")
    return data


def _unpack_list(data: bytes, what: str) -> list[Any]:
    try:
        fields = ormsgpack.unpackb(data)
    except ValueError as error:
        raise DecodeError(f"a {what} is not valid msgpack") from error
    if not isinstance(fields, list):
        raise DecodeError(f"a {what} has an unknown form")
    return fields


class Coverage:
    """Collects the byte ranges that a set of manifests needs: a delete may remove everything outside them.

    ``read_blob`` returns the bytes of bases and tables.
    """

    def __init__(self, read_blob: Callable[[bytes], bytes]) -> None:
        self._read_blob = read_blob
        self._bases: dict[bytes, Entries] = {}
        self._tables: dict[bytes, tuple[Piece, ...]] = {}
        self._needed: dict[Source, set[tuple[int, int]]] = {}

    def add(self, manifest: bytes, base: bytes | None) -> set[Source]:
        """Add one manifest and return the sources it needs."""
        if base is not None and base not in self._bases:
            self._bases[base] = decode_base(self._read_blob(base))
        sources: set[Source] = set() if base is None else {base}
        for entry in decode_manifest(manifest, {} if base is None else self._bases[base]).values():
            pieces = entry.pieces or ()
            if entry.body is None and entry.pieces is None:
                sources.add(entry.digest)
            if entry.table is not None:
                if entry.table not in self._tables:
                    self._tables[entry.table] = decode_table(self._read_blob(entry.table))
                sources.add(entry.table)
                pieces += self._tables[entry.table]
            for piece in pieces:
                if isinstance(piece, Range):
                    sources.add(piece.source)
                    self._needed.setdefault(piece.source, set()).add((piece.start, piece.start + piece.length))
        return sources

    def ranges(self, source: Source) -> list[tuple[int, int]]:
        """Return the needed (start, end) ranges of a source, sorted and not touching each other."""
        return merge_ranges(self._needed.get(source, ()))


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of ranges, sorted and not touching each other."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract_ranges(ranges: Iterable[tuple[int, int]], less: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of ranges that are in none of the others. Both are sorted, and none touches another."""
    left: list[tuple[int, int]] = []
    others = iter(less)
    other = next(others, None)
    for start, end in ranges:
        while other is not None and other[0] < end:
            if start < other[0]:
                left.append((start, other[0]))
            start = max(start, other[1])
            if other[1] > end:  # it reaches into the next range
                break
            other = next(others, None)
        if start < end:
            left.append((start, end))
    return left


def is_needed(start: int, end: int, ranges: list[tuple[int, int]]) -> bool:
    """Return whether any byte of [start, end) lies in the sorted ranges."""
    first = bisect_right(ranges, start, key=_END)  # the first range that ends after ``start``
    return first < len(ranges) and ranges[first][0] < end


def assemble(rows: Iterable[tuple[int, bytes]], start: int, length: int) -> list[bytes] | None:
    """Return ``length`` bytes from ``start`` in parts, from ordered (offset, bytes) rows; None if any is missing."""
    parts: list[bytes] = []
    position, end = start, start + length
    for offset, data in rows:
        after = offset + len(data)
        if offset == position and after <= end:  # nearly always
            parts.append(data)
        elif position >= end:
            break
        elif offset > position:
            return None
        elif after > position:
            parts.append(data[position - offset : end - offset])
        else:
            continue
        position = after
    return parts if position >= end else None
