"""A store as it would be if some bytes were put back: what a repair is tried out on before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backstay.errors import Corrupted
from backstay.pieces.piece import Range
from backstay.store.base import Backend
from backstay.store.finding import source_name


class Overlay:
    """Reads through to the store; bytes that were put here come first."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.blobs: dict[bytes, bytes] = {}
        self._streams: dict[int, dict[int, bytes]] = {}  # by offset; they never overlap

    @property
    def chunks(self) -> list[tuple[int, int, bytes]]:
        """Return what was put into streams, as ``Mending.restore`` takes it."""
        return [
            (stream, offset, self._streams[stream][offset])
            for stream in self._streams
            for offset in self.stretches(stream)
        ]

    def stretches(self, stream: int) -> list[int]:
        """Return where what was put into a stream begins, in order."""
        return sorted(self._streams.get(stream, ()))

    def put(self, stream: int, start: int, data: bytes) -> bool:
        """Put bytes into a stream; False, and nothing is done, if other bytes were put there."""
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
        """Return the bytes of each range, as the store's own verb does."""
        return [self._fetch(piece) for piece in ranges]

    def _fetch(self, piece: Range) -> list[bytes]:
        source, start, length = piece
        if isinstance(source, bytes):
            if source not in self.blobs:
                return self._backend.fetch([piece])[0]
            if start + length > len(self.blobs[source]):
                raise Corrupted(f"{source_name(source)} is shorter than its manifest says")
            return [self.blobs[source][start : start + length]]
        parts: list[bytes] = []
        position, end = start, start + length
        for offset in self.stretches(source):
            data = self._streams[source][offset]
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
        return getattr(self._backend, name)  # every other verb is the store's own
