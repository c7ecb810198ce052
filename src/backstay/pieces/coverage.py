"""Which stored bytes are still needed: the union of what a set of manifests points to.

Deleting is safe if, and only if, it removes nothing inside the coverage of the manifests that stay. Stores use this
for their deletes and checks; the property tests compare it with a model that keeps every state in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backstay.pieces.manifest import Entries, Source, decode_base, decode_manifest, decode_table
from backstay.pieces.piece import Range


class Coverage:
    """Collects the byte ranges that manifests need. ``read_blob`` gives the bytes of bases and tables."""

    def __init__(self, read_blob: Callable[[bytes], bytes]) -> None:
        self._read_blob = read_blob
        self._bases: dict[bytes, Entries] = {}
        self._tables: dict[bytes, list[Range]] = {}
        self._needed: dict[Source, set[tuple[int, int]]] = {}

    def add(self, manifest: bytes, base: bytes | None) -> set[Source]:
        """Take in one manifest and return the sources it needs."""
        entries = decode_manifest(manifest, self._base(base) if base is not None else {})
        sources: set[Source] = set() if base is None else {base}
        for entry in entries.values():
            if entry.body is not None:
                continue
            if entry.pieces is None:
                sources.add(entry.digest)
                continue
            ranges = [piece for piece in entry.pieces if isinstance(piece, Range)]
            if entry.table is not None:
                sources.add(entry.table)
                ranges += self._table(entry.table)
            for piece in ranges:
                sources.add(piece.source)
                self._needed.setdefault(piece.source, set()).add((piece.start, piece.start + piece.length))
        return sources

    def ranges(self, source: Source) -> list[tuple[int, int]]:
        """Return the needed (start, end) ranges of a source, sorted and not touching each other."""
        return merge_ranges(self._needed.get(source, ()))

    def _base(self, name: bytes) -> Entries:
        if name not in self._bases:
            self._bases[name] = decode_base(self._read_blob(name))
        return self._bases[name]

    def _table(self, name: bytes) -> list[Range]:
        if name not in self._tables:
            pieces = decode_table(self._read_blob(name))
            self._tables[name] = [piece for piece in pieces if isinstance(piece, Range)]
        return self._tables[name]


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of ranges, sorted and not touching each other."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def is_needed(start: int, end: int, ranges: list[tuple[int, int]]) -> bool:
    """Tell whether any byte of [start, end) lies in the sorted ranges."""
    low, high = 0, len(ranges)
    while low < high:
        middle = (low + high) // 2
        if ranges[middle][1] <= start:
            low = middle + 1
        else:
            high = middle
    return low < len(ranges) and ranges[low][0] < end


def assemble(rows: Iterable[tuple[int, bytes]], start: int, length: int) -> list[bytes] | None:
    """Return ``length`` bytes from ``start`` on, in parts, out of rising (offset, bytes) rows; None if some lack."""
    parts: list[bytes] = []
    position, end = start, start + length
    for offset, data in rows:
        if position >= end:
            break
        if offset > position:
            return None
        if offset + len(data) > position:
            whole = offset == position and offset + len(data) <= end
            parts.append(data if whole else data[position - offset : end - offset])
            position = offset + len(data)
    return parts if position >= end else None
