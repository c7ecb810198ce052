"""The bytes of the memory store: blobs by name, and streams as lists of chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from backstay.errors import Corrupted
from backstay.pieces.manifest import Range, Source, assemble
from backstay.store.finding import source_name


class Content(Protocol):
    """Bytes, in memory or in a log."""

    @property
    def size(self) -> int:
        """Number of bytes that ``read`` returns."""

    @property
    def stored(self) -> int:
        """Number of bytes they take where they are stored, which may be compressed."""

    def read(self) -> bytes:
        """Return the bytes."""


class MemoryContent(NamedTuple):
    """Bytes in memory."""

    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def stored(self) -> int:
        return len(self.data)

    def read(self) -> bytes:
        return self.data


Chunk = tuple[int, Content]  # offset in the stream, and the bytes from there


class StoredBytes:
    """All blobs and streams."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, Content] = {}
        self.streams: dict[int, list[Chunk]] = {}  # in rising order of offset

    def put(
        self, blobs: Mapping[bytes, Content], chunks: Sequence[tuple[int, int, Content]], replace: bool = False
    ) -> None:
        """Store new bytes. Bytes that are stored already stay, unless ``replace``."""
        for name, body in blobs.items():
            if replace or name not in self.blobs:
                self.blobs[name] = body
        for stream, offset, body in chunks:
            kept = self.streams.setdefault(stream, [])
            if replace:
                end = offset + body.size
                kept[:] = [c for c in kept if not (offset <= c[0] and c[0] + c[1].size <= end)]
            at = bisect_left(kept, offset, key=_offset)
            if not replace:  # new bytes go to a stream's end; bytes after that belonged to deleted checkpoints
                del kept[at:]
            kept.insert(at, (offset, body))

    def blob(self, name: bytes) -> bytes:
        """Return the bytes of a blob; Corrupted if it is missing."""
        if name not in self.blobs:
            raise Corrupted(f"bytes of {source_name(name)} are missing")
        return self.blobs[name].read()

    def end(self, stream: Source) -> int | None:
        """Return where a stream ends; None if it has no bytes, or if the source is a blob."""
        chunks = self.streams.get(stream) if isinstance(stream, int) else None
        return chunks[-1][0] + chunks[-1][1].size if chunks else None

    def names(self) -> list[Source]:
        """Return all blobs and streams."""
        return [*self.blobs, *self.streams]

    def sizes(self, sources: Iterable[Source]) -> dict[Source, int]:
        """Return how many bytes each of these blobs and streams takes, if it exists."""
        found: dict[Source, int] = {}
        for source in sources:
            if isinstance(source, bytes) and source in self.blobs:
                found[source] = self.blobs[source].stored
            elif isinstance(source, int) and source in self.streams:
                found[source] = sum(body.stored for _, body in self.streams[source])
        return found

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
        """Yield the chunks that overlap a range."""
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

    def chunks(self, stream: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stored ranges of a stream that overlap this one."""
        return [(offset, offset + body.size) for offset, body in self._over(Range(stream, start, end - start))]

    def drop_chunks(self, stream: int, chunks: Collection[tuple[int, int]]) -> list[Content]:
        """Drop stored ranges, and return them."""
        kept, dropped = self.streams.get(stream, []), []
        for start, end in sorted(chunks, reverse=True):
            at = bisect_left(kept, start, key=_offset)
            while at < len(kept) and kept[at][0] == start:
                if kept[at][1].size == end - start:
                    dropped.append(kept.pop(at)[1])
                    break
                at += 1
        if not kept:
            self.streams.pop(stream, None)
        return dropped

    def drop(self, source: Source) -> list[Content]:
        """Drop a blob or a stream, and return its parts."""
        if isinstance(source, bytes):
            return [self.blobs.pop(source)] if source in self.blobs else []
        return [body for _, body in self.streams.pop(source, [])]


def _offset(chunk: Chunk) -> int:
    return chunk[0]
