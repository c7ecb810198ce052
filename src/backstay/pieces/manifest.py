"""A manifest: what a checkpoint's state consists of and where each value's bytes are.

An **entry** describes one value: its kind, count, size, digest and place. The place is one of

- inline: the body itself, up to ``INLINE_BYTES_MAX``;
- whole: one blob, whose name is the value's own digest;
- pieces: up to ``PIECES_MAX_INLINE`` pieces;
- table: a blob that lists all pieces but the last, and the last piece, whose end moves while the value grows.

Entries that stay as they are need not be repeated in every manifest: they move to a **base**, a blob of entries that
manifests refer to and override. A manifest is self-contained but for its base and tables: no chains, no replay.

Keys are text for the caller's state and small integers for what Backstay itself keeps beside it (``FRAMES``, ``PATH``,
``RUN``, ``MARKS``), so neither can be mistaken for the other. The **root** digest is over the sorted content only: it
does not depend on where the bytes are, so every store gives the same one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ormsgpack

from backstay.errors import DecodeError
from backstay.pieces.piece import DIGEST_BYTES, Piece, Range, pack_pieces, unpack_pieces

INLINE_BYTES_MAX = 256
PIECES_MAX_INLINE = 8
PLACES_MAX = 256  # keys whose order is written as one byte each

Key = str | int
FRAMES = 0
PATH = 1
RUN = 2
MARKS = 3  # what changes with every step of a run that another engine's adapter keeps; RUN holds the rest

SYSTEM_NAMES = {FRAMES: "frames", PATH: "path", RUN: "run", MARKS: "marks"}

Source = int | bytes

_NAME = operator.itemgetter(0, 1)


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

    def sources(self) -> set[Source]:
        """Return the blobs and streams this entry names itself (a table's own contents are not read here)."""
        if self.body is not None:
            return set()
        if self.pieces is None:
            return {self.digest}
        named: set[Source] = {piece.source for piece in self.pieces if isinstance(piece, Range)}
        if self.table is not None:
            named.add(self.table)
        return named


Entries = dict[Key, Entry]


def encode_manifest(entries: Mapping[Key, Entry], base: Mapping[Key, Entry]) -> bytes:
    """Return the bytes of a manifest that, over ``base``, describes ``entries`` in their order."""
    changed, get = [], base.get
    for key, entry in entries.items():
        known = get(key)
        if known is not entry and known != entry:  # mostly it is the very same, or there is none
            changed.append((key, entry))
    removed = [key for key in base if key not in entries]
    natural = [key for key in base if key in entries] + [key for key, _ in changed if key not in base]
    order = None if natural == list(entries) else _order(natural, entries)
    return ormsgpack.packb([order, removed, *(_pack_entry(key, entry) for key, entry in changed)])


def decode_manifest(data: bytes, base: Mapping[Key, Entry]) -> Entries:
    """Return the entries of a manifest over its base, in the state's order."""
    fields = _unpack_list(data, "manifest")
    if len(fields) < 2 or not isinstance(fields[1], list):
        raise DecodeError("a manifest is not of the known form")
    entries: Entries = {key: entry for key, entry in base.items() if key not in fields[1]}
    entries.update(_unpack_entry(plain) for plain in fields[2:])
    order = fields[0]
    if order is None:
        return entries
    try:
        if len(order) != len(entries):
            raise DecodeError("a manifest's order does not name its keys")
        if isinstance(order, bytes):
            natural = list(entries)
            order = [natural[place] for place in order]
        return {key: entries[key] for key in order}
    except (IndexError, KeyError, TypeError) as error:
        raise DecodeError("a manifest's order names an unknown key") from error


def _order(natural: Sequence[Key], entries: Mapping[Key, Entry]) -> bytes | list[Key]:
    """Return the order of the keys: each one's place in the natural order, if a byte can say it, else its name."""
    if len(natural) > PLACES_MAX:
        return list(entries)
    places = {key: place for place, key in enumerate(natural)}
    return bytes(places[key] for key in entries)


def encode_base(entries: Mapping[Key, Entry]) -> bytes:
    """Return the bytes of a base blob."""
    return ormsgpack.packb([_pack_entry(key, entry) for key, entry in entries.items()])


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


def _pack_entry(key: Key, entry: Entry) -> list[Any]:
    if entry.body is not None:
        return [key, entry.kind, entry.count, entry.body]
    if entry.pieces is None:
        return [key, entry.kind, entry.count, entry.size, entry.digest]
    if entry.table is None and len(entry.pieces) == 1 and type(piece := entry.pieces[0]) is Range:  # as pack_pieces
        return [key, entry.kind, entry.count, entry.digest, [piece.length, piece.source, piece.start]]
    flat = pack_pieces(entry.pieces)
    if entry.table is None:
        return [key, entry.kind, entry.count, entry.digest, flat]
    return [key, entry.kind, entry.count, entry.digest, flat, entry.table, entry.table_size, entry.size]


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
        raise DecodeError("a manifest's entry is cut short") from error
    raise DecodeError("a manifest's entry is of no known form")


def _digest(data: bytes) -> bytes:
    if len(data) != DIGEST_BYTES:
        raise DecodeError("a manifest's digest has the wrong length")
    return data


def _unpack_list(data: bytes, what: str) -> list[Any]:
    try:
        fields = ormsgpack.unpackb(data)
    except ValueError as error:
        raise DecodeError(f"a {what} is not readable") from error
    if not isinstance(fields, list):
        raise DecodeError(f"a {what} is not of the known form")
    return fields
