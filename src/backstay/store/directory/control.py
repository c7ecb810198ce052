"""The control file: what was written last, and what a writer was about to do when it was killed.

It is a hint that is never synced, and may be removed at any time: whoever comes next makes another one and reads
everything anew. A reader compares one number in it with the last record it knows, and finds in a ring which logs have
grown. A writer says beforehand where it will write; if it dies, the next one looks there. After a power failure
whatever is left in it may be old, but never ahead of the logs, because it is written after they were synced: so what it
says was acknowledged must be there, and if it is not, that is damage and not a torn end.
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


class State(NamedTuple):
    """What the control file says."""

    last: int = 0  # the number of the last record
    rewrites: int = 0  # another one when a log was written anew: what a reader knows of places is then out of date
    pending_log: int = 0  # where a record is being written; only if its number is not 0
    pending_at: int = 0
    pending_number: int = 0


class Entry(NamedTuple):
    """A record that was written: its number, its log, where it ends there, and the log's mark then."""

    number: int
    log: int
    end: int
    mark: bytes


class Control:
    """The control file, by a descriptor that its owner closes. Without a file it says nothing, until there is one."""

    def __init__(self, descriptor: int, path: Path, file: File | None) -> None:
        self.descriptor = descriptor
        self._path = path
        self._file = file

    def is_in_place(self) -> bool:
        """Tell whether this is still what others find there."""
        return file_of(self._path) == self._file

    def read(self) -> State | None:
        """Return what it says; None if it says nothing that can be understood."""
        data = self._read(_HEAD.size, 0)
        if len(data) < _HEAD.size or not data.startswith(_TITLE):
            return None
        return State(*_HEAD.unpack(data)[1:])

    def write(self, state: State) -> None:
        """Say this from now on."""
        self._write(_HEAD.pack(_TITLE, *state), 0)

    def publish(self, state: State, entry: Entry) -> None:
        """Tell readers of a record that is durable."""
        self._write(_ENTRY.pack(*entry), _RING_AT + entry.number % RING_ENTRIES * _ENTRY.size)
        self.write(state)

    def entries(self, first: int, last: int) -> list[Entry] | None:
        """Return the records with these numbers; None if the ring no longer has them all."""
        if last - first >= RING_ENTRIES:
            return None
        found = []
        for number in range(first, last + 1):
            data = self._read(_ENTRY.size, _RING_AT + number % RING_ENTRIES * _ENTRY.size)
            entry = Entry(*_ENTRY.unpack(data)) if len(data) == _ENTRY.size else None
            if entry is None or entry.number != number:
                return None
            found.append(entry)
        return found

    def acknowledged(self) -> list[Entry]:
        """Return the newest record of each log that is known here to have been acknowledged."""
        data = self._read(_ENTRY.size * RING_ENTRIES, _RING_AT)
        slots = enumerate(_ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]))
        entries = [Entry(*fields) for slot, fields in slots if fields[0] and fields[0] % RING_ENTRIES == slot]
        return list({entry.log: entry for entry in sorted(entries) if entry.number <= NUMBER_MAX}.values())

    def _read(self, length: int, at: int) -> bytes:
        try:
            return os.pread(self.descriptor, length, at)
        except OSError as error:
            raise failure(error, "read", self._path) from error

    def _write(self, data: bytes, at: int) -> None:
        try:
            if os.pwrite(self.descriptor, data, at) < len(data):
                raise OSError(errno.EIO, "only a part could be written")
        except OSError as error:
            raise failure(error, "write", self._path) from error
