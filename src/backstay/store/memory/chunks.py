"""The bytes of the memory store: blobs by name, and streams as lists of chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from backstay.errors import Corrupted
from backstay.pieces.coverage import Coverage, assemble, is_needed
from backstay.pieces.manifest import Source
from backstay.pieces.piece import Range


class Body(Protocol):
    """Bytes, wherever they are."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def stored(self) -> int:
        """How many they take where they are."""

    def read(self) -> bytes:
        """Return them."""


class Whole(NamedTuple):
    """Bytes in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """See ``Body``."""
        return len(self.data)

    @property
    def stored(self) -> int:
        """See ``Body``."""
        return len(self.data)

    def read(self) -> bytes:
        """See ``Body``."""
        return self.data


Chunk = tuple[int, Body]  # the offset in the stream, and the bytes from there on


class KeptBytes:
    """All blobs and streams."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, Body] = {}
        self.streams: dict[int, list[Chunk]] = {}  # in rising order of offset

    def keep(self, blobs: Mapping[bytes, Body], chunks: Sequence[tuple[int, int, Body]], replace: bool = False) -> None:
        """Take new bytes in; what is there already stays, unless it is to be replaced."""
        for name, body in blobs.items():
            if replace or name not in self.blobs:
                self.blobs[name] = body
        for stream, offset, body in chunks:
            kept = self.streams.setdefault(stream, [])
            if replace:
                end = offset + body.size
                kept[:] = [c for c in kept if not (offset <= c[0] and c[0] + c[1].size <= end)]
            at = bisect_left(kept, offset, key=_offset)
            if not replace:  # new bytes go to a stream's end: what lies behind it was of checkpoints deleted by now
                del kept[at:]
            kept.insert(at, (offset, body))

    def blob(self, name: bytes) -> bytes:
        """Return the bytes of a blob that must be there."""
        if name not in self.blobs:
            raise Corrupted(f"bytes of {source_name(name)} are missing")
        return self.blobs[name].read()

    def end(self, stream: Source) -> int | None:
        """Return where a stream ends; None if it has no bytes, or is none."""
        chunks = self.streams.get(stream) if isinstance(stream, int) else None
        return chunks[-1][0] + chunks[-1][1].size if chunks else None

    def sizes(self) -> dict[Source, int]:
        """Return how many bytes each blob and stream takes."""
        sources: dict[Source, int] = {name: body.stored for name, body in self.blobs.items()}
        sources.update({stream: sum(body.stored for _, body in chunks) for stream, chunks in self.streams.items()})
        return sources

    def read(self, piece: Range) -> list[bytes]:
        """Return the bytes of a range."""
        if isinstance(piece.source, bytes):
            rows = [(0, self.blob(piece.source))]
        else:
            rows = [(offset, body.read()) for offset, body in self._over(piece)]
        data = assemble(iter(rows), piece.start, piece.length)
        if data is None:
            raise Corrupted(f"bytes of {source_name(piece.source)} are missing")
        return data

    def _over(self, piece: Range) -> Iterator[Chunk]:
        """Give the chunks that may hold bytes of a range."""
        assert isinstance(piece.source, int)
        kept = self.streams.get(piece.source, [])
        first = max(0, bisect_left(kept, piece.start + 1, key=_offset) - 1)
        while first and kept[first - 1][0] + kept[first - 1][1].size > piece.start:  # rows may overlap
            first -= 1
        for at in range(first, len(kept)):
            if kept[at][0] >= piece.start + piece.length:
                return
            if kept[at][0] + kept[at][1].size > piece.start:
                yield kept[at]

    def trim(self, source: Source, referred: bool, coverage: Coverage) -> list[Body]:
        """Drop what nothing needs of a source, and return it."""
        if isinstance(source, bytes):
            return [] if referred or source not in self.blobs else [self.blobs.pop(source)]
        chunks = self.streams.get(source, [])
        ranges = coverage.ranges(source) if referred else []
        kept: list[Chunk] = []
        dropped: list[Body] = []
        for offset, body in chunks:
            if is_needed(offset, offset + body.size, ranges):
                kept.append((offset, body))
            else:
                dropped.append(body)
        if kept:
            self.streams[source] = kept
        else:
            self.streams.pop(source, None)
        return dropped


def _offset(chunk: Chunk) -> int:
    return chunk[0]


def source_name(source: Source) -> str:
    """Return what a source is called in errors and findings."""
    return f"stream {source}" if isinstance(source, int) else f"blob {source.hex()[:16]}"
