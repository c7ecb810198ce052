"""The bytes of the memory store: blobs by name, and streams as lists of chunks."""

from __future__ import annotations

from bisect import insort

from holdfast.errors import Corrupted
from holdfast.pieces.coverage import Coverage, assemble, is_needed
from holdfast.pieces.manifest import Source
from holdfast.pieces.piece import Range
from holdfast.store.base import Commit


class KeptBytes:
    """All blobs and streams."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.streams: dict[int, list[tuple[int, bytes]]] = {}  # in rising order of offset
        self._next_stream = 1

    def reserve(self, count: int) -> int:
        """See ``Backend.reserve``."""
        first = self._next_stream
        self._next_stream += count
        return first

    def keep(self, commit: Commit) -> None:
        """Take a commit's new bytes in."""
        for name, data in commit.blobs.items():
            self.blobs.setdefault(name, data)
        for stream, offset, data in commit.chunks:
            insort(self.streams.setdefault(stream, []), (offset, data))

    def end(self, stream: Source) -> int | None:
        """Return where a stream ends; None if it has no bytes, or is none."""
        chunks = self.streams.get(stream) if isinstance(stream, int) else None
        return chunks[-1][0] + len(chunks[-1][1]) if chunks else None

    def sizes(self) -> dict[Source, int]:
        """Return how many bytes each blob and stream takes."""
        sources: dict[Source, int] = {name: len(data) for name, data in self.blobs.items()}
        sources.update({stream: sum(len(data) for _, data in chunks) for stream, chunks in self.streams.items()})
        return sources

    def read(self, piece: Range) -> list[bytes]:
        """Return the bytes of a range."""
        if isinstance(piece.source, bytes):
            rows = [(0, self.blobs[piece.source])] if piece.source in self.blobs else []
        else:
            rows = self.streams.get(piece.source, [])
        data = assemble(((o, d) for o, d in rows if o + len(d) > piece.start), piece.start, piece.length)
        if data is None:
            raise Corrupted(f"bytes of {source_name(piece.source)} are missing")
        return data

    def trim(self, source: Source, referred: bool, coverage: Coverage) -> int:
        """Drop what nothing needs of a source, and return how many bytes that were."""
        if isinstance(source, bytes):
            return 0 if referred else len(self.blobs.pop(source, b""))
        chunks = self.streams.get(source, [])
        ranges = coverage.ranges(source) if referred else []
        kept = [(offset, data) for offset, data in chunks if is_needed(offset, offset + len(data), ranges)]
        freed = sum(len(data) for _, data in chunks) - sum(len(data) for _, data in kept)
        if kept:
            self.streams[source] = kept
        else:
            self.streams.pop(source, None)
        return freed


def source_name(source: Source) -> str:
    """Return what a source is called in errors and findings."""
    return f"stream {source}" if isinstance(source, int) else f"blob {source.hex()[:16]}"
