"""The control file: the newest records, and the record that a writer was about to write when it was killed.

It is only a hint: it is never synced and may be removed at any time; the next process creates another one and reads all
logs again. A reader compares one number in it with the last record it knows, and finds in a ring which logs have grown.
A writer notes in advance where it will write; if it dies, the next writer looks there. After a power failure the
control file may be old, but it is never ahead of the logs, because it is written after they are synced. So every record
that it calls acknowledged must exist; if one does not, that is damage and not a torn end.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import NamedTuple

from backstay.store.atomic import failure
from backstay.store.directory.descriptors import File, file_of
from backstay.store.directory.frame import NUMBER_MAX

_HEAD = struct.Struct("<16sQQQQQ")
_ENTRY = struct.Struct("<QQQ8s")
_TITLE = b"backstay dir 1\n\n"
RING_ENTRIES = 1024
_RING_AT = 64
CONTROL_BYTES = _RING_AT + RING_ENTRIES * _ENTRY.size


class ControlState(NamedTuple):
    """The content of the control file."""

    last: int = 0  # the number of the last record
    rewrites: int = 0  # changes when a log is rewritten: offsets that a reader knows are then out of date
    pending_log: int = 0  # where a record is being written, if its number is not 0
    pending_at: int = 0
    pending_number: int = 0


class RingEntry(NamedTuple):
    """A stored record: its number, its log, the offset of its end, and the log's mark at that time."""

    number: int
    log: int
    end: int
    mark: bytes


class Control:
    """The control file, through a descriptor that its owner closes. Without a file it reads as empty."""

    def __init__(self, descriptor: int, path: Path, file: File | None) -> None:
        self.descriptor = descriptor
        self._path = path
        self._file = file

    def is_in_place(self) -> bool:
        """Return whether this is still the file at its path."""
        return file_of(self._path) == self._file

    def read(self) -> ControlState | None:
        """Return the content; None if it cannot be understood."""
        data = self._read(_HEAD.size, 0)
        if len(data) < _HEAD.size or not data.startswith(_TITLE):
            return None
        return ControlState(*_HEAD.unpack(data)[1:])

    def write(self, state: ControlState) -> None:
        """Replace the state."""
        self._write(_HEAD.pack(_TITLE, *state), 0)

    def publish(self, state: ControlState, entry: RingEntry) -> None:
        """Announce a durable record to readers."""
        self._write(_ENTRY.pack(*entry), _RING_AT + entry.number % RING_ENTRIES * _ENTRY.size)
        self.write(state)

    def entries(self, first: int, last: int) -> list[RingEntry] | None:
        """Return the records with these numbers; None if the ring no longer holds all of them."""
        if last - first >= RING_ENTRIES:
            return None
        found = []
        for number in range(first, last + 1):
            data = self._read(_ENTRY.size, _RING_AT + number % RING_ENTRIES * _ENTRY.size)
            entry = RingEntry(*_ENTRY.unpack(data)) if len(data) == _ENTRY.size else None
            if entry is None or entry.number != number:
                return None
            found.append(entry)
        return found

    def acknowledged(self) -> list[RingEntry]:
        """Return the newest acknowledged record of each log in the ring."""
        data = self._read(_ENTRY.size * RING_ENTRIES, _RING_AT)
        slots = enumerate(_ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]))
        entries = [RingEntry(*fields) for slot, fields in slots if fields[0] and fields[0] % RING_ENTRIES == slot]
        return list({entry.log: entry for entry in sorted(entries) if entry.number <= NUMBER_MAX}.values())

    def _read(self, length: int, at: int) -> bytes:
        try:
            return os.pread(self.descriptor, length, at)
        except OSError as error:
            raise failure(error, "read", self._path) from error

    def _write(self, data: bytes, at: int) -> None:
        try:
            if os.pwrite(self.descriptor, data, at) < len(data):
                raise OSError(errno.EIO, "only part of the data was written")
        except OSError as error:
            raise failure(error, "write", self._path) from error
