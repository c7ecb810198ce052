"""Frames: the layout of records in a log, which distinguishes whole records from torn and damaged ones. No I/O.

A log starts with a line of text and eight random bytes, its **mark**. Each record starts with the mark again: after a
damaged length a reader looks for the next mark. A record is

    mark 8, number 8, length of the head 4, length of the payload 8, digest of the payload 16, digest 16, head, payload

(big-endian). The last digest covers everything before it and the head. So opening a log reads only heads, and a payload
is checked where it matters: at the log's end, and by the digests of the values in it. Digests here are the first 16
bytes of SHA-256, enough to detect damage; checkpoints have full digests of their own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

MARK_BYTES = 8
TITLE = b"backstay log 1\n\n"
FILE_HEAD_BYTES = len(TITLE) + MARK_BYTES
_HEAD = struct.Struct(">8sQIQ16s")
HEAD_BYTES = _HEAD.size + 16
WINDOW_BYTES = 1 << 20
SECTOR_BYTES = 512
NUMBER_MAX = (1 << 63) - 1

Read = Callable[[int, int], bytes]  # (offset, length) -> at most that many bytes


class RecordFrame(NamedTuple):
    """A whole record: its place in the log, and its head."""

    start: int
    number: int
    head: bytes
    payload_at: int
    payload_bytes: int
    payload_digest: bytes

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.payload_at + self.payload_bytes


class Gap(NamedTuple):
    """Bytes of a log that are not a record."""

    start: int
    end: int


def file_head(mark: bytes) -> bytes:
    """Return the first bytes of a log with this mark."""
    return TITLE + mark


def mark_of(head: bytes) -> bytes | None:
    """Return the mark in the first bytes of a log; None if these are not a log's."""
    return head[len(TITLE) :] if len(head) == FILE_HEAD_BYTES and head.startswith(TITLE) else None


def mark_in(read: Read, size: int) -> bytes | None:
    """Return the mark of a log of this size; None if it is not a log.

    If the first bytes are damaged, the mark comes from the first record, whose digest covers it.
    """
    first = read(0, FILE_HEAD_BYTES + MARK_BYTES)
    stated, repeated = mark_of(first[:FILE_HEAD_BYTES]), first[FILE_HEAD_BYTES:]
    if stated == repeated or len(repeated) < MARK_BYTES:
        return stated
    return repeated if _frame(_ReadWindow(read, size), repeated, FILE_HEAD_BYTES, size) is not None else stated


def pack(mark: bytes, number: int, head: bytes, payload: bytes) -> bytes:
    """Return a record."""
    fields = _HEAD.pack(mark, number, len(head), len(payload), digest(payload))
    return b"".join((fields, digest(fields, head), head, payload))


def digest(*parts: bytes) -> bytes:
    """Return the digest that frames use."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.digest()[:16]


def scan(read: Read, mark: bytes, start: int, end: int) -> Iterator[RecordFrame | Gap]:
    """Yield the parts of a log between two offsets, in order: whole records, and gaps between them."""
    window = _ReadWindow(read, end)
    position = start
    while position < end:
        frame = _frame(window, mark, position, end)
        if frame is not None:
            yield frame
            position = frame.end
            continue
        gap, position = position, position + 1
        while position < end:
            position = window.find(mark, position)
            if _frame(window, mark, position, end) is not None:
                break
            position += 1
        position = min(position, end)
        yield Gap(gap, position)


def is_whole(read: Read, frame: RecordFrame) -> bool:
    """Return whether a record's payload matches its digest."""
    return digest(read(frame.payload_at, frame.payload_bytes)) == frame.payload_digest


def is_blank(read: Read, start: int, end: int) -> bool:
    """Return whether a part holds only zeros: space that was allocated in advance."""
    return _last_written(read, start, end) == start


def is_torn(read: Read, start: int, end: int, mark: bytes) -> bool:
    """Return whether the end of a log looks like a write that a power failure cut short, rather than like damage.

    It is torn if the record is longer than the file, or if a sector of it was never written and reads as zeros. A
    record may start in the last bytes of a sector: then only part of its mark may have been written.
    """
    fields = read(start, HEAD_BYTES)
    if (start_of_mark := fields.rstrip(b"\0")) and mark.startswith(start_of_mark):
        return True
    extent = _last_written(read, start, end)
    if len(fields) == HEAD_BYTES and fields.startswith(mark):
        _, _, head_bytes, payload_bytes, _ = _HEAD.unpack_from(fields)
        extent = start + HEAD_BYTES + head_bytes + payload_bytes
    if extent > end or len(fields) < HEAD_BYTES:
        return True
    position = start
    while position < extent:
        until = min(extent, position + SECTOR_BYTES - position % SECTOR_BYTES)
        if not any(read(position, until - position)):
            return True
        position = until
    return False


def _last_written(read: Read, start: int, end: int) -> int:
    """Return where the zeros at the end of a part start."""
    while end > start:
        at = max(start, end - WINDOW_BYTES)
        found = len(read(at, end - at).rstrip(b"\0"))
        if found:
            return at + found
        end = at
    return start


def _frame(window: _ReadWindow, mark: bytes, position: int, end: int) -> RecordFrame | None:
    fields = window.read(position, HEAD_BYTES)
    if len(fields) < HEAD_BYTES:
        return None
    found, number, head_bytes, payload_bytes, payload_digest = _HEAD.unpack_from(fields)
    at = position + HEAD_BYTES
    if found != mark or number > NUMBER_MAX or at + head_bytes + payload_bytes > end:
        return None
    head = window.read(at, head_bytes)
    if digest(fields[: _HEAD.size], head) != fields[_HEAD.size :]:
        return None
    return RecordFrame(position, number, head, at + head_bytes, payload_bytes, payload_digest)


class _ReadWindow:
    """Reads a log through a large buffer, so that many small records cost few calls."""

    def __init__(self, read: Read, end: int) -> None:
        self._read = read
        self._end = end
        self._start = 0
        self._data = b""

    def read(self, position: int, length: int) -> bytes:
        """Return the bytes at an offset; fewer at the log's end."""
        at = position - self._start
        if at < 0 or at + length > len(self._data):
            size = max(length, min(WINDOW_BYTES, self._end - position))
            self._start, self._data, at = position, self._read(position, size), 0
        return self._data[at : at + length]

    def find(self, mark: bytes, position: int) -> int:
        """Return the offset of the next mark, or the end."""
        while position + MARK_BYTES <= self._end:
            data = self.read(position, min(WINDOW_BYTES, self._end - position))
            at = data.find(mark)
            if at >= 0:
                return position + at
            position += max(1, len(data) - MARK_BYTES + 1)
        return self._end
