"""The log files of a directory: read at any offset, appended to durably.

    store.log              records that concern no branch, or several
    branches/00000012.log  the branch with that number; user names never become paths

An append is one write and one ``fdatasync``; the first append to a log also syncs its directory. Space is allocated in
advance, as zeros, because a sync that does not make the file longer takes two thirds of the time. If an append fails,
the log is cut back and its descriptor closed: data that a failed sync left in memory is not trusted. Before a record is
written, and again before it is acknowledged, the open file must be the one at the log's path. A record is only written
where the file is still empty.

Reading and writing use separate descriptors, because a read may come while a write waits for the disk.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backstay.errors import BackstayError, Corrupted, OutcomeUnknown, StoreError, StoreRefused
from backstay.store.atomic import FILE_MODE, PREFIX, failure, names_in, sync_directory
from backstay.store.directory import frame
from backstay.store.directory.control import RingEntry
from backstay.store.directory.descriptors import Descriptors, File, LogMoved, file_of, found_at, read_at
from backstay.store.layout import unpack_stored

STORE_LOG = 0
"""Number of the log for records of no branch, or of several. Every other log has its branch's number."""


@dataclass(slots=True)
class Log:
    """A log and where its last whole record ends. ``garbage`` estimates how many of its bytes are no longer needed."""

    number: int
    path: Path
    mark: bytes
    end: int
    garbage: int = 0
    is_foreign: bool = False  # it replaced a log with more acknowledged records, which may have been any branch's
    gaps: int = 0  # parts without a whole record; only a repair rewrites such a log
    is_misplaced: bool = False  # its records belong to a log with another number: files were swapped
    broken: str | None = None  # what is wrong with its end, if the newest acknowledged record cannot be read


class LogContent(NamedTuple):
    """Bytes in a log, compressed if that is shorter."""

    logs: Logs
    log: int
    mark: bytes
    at: int
    stored: int
    size: int

    def read(self) -> bytes:
        """Return the original bytes."""
        data = self.logs.read(self.log, self.mark, self.at, self.stored)
        return unpack_stored(self.size, data, f"log {self.log} at {self.at}")


READERS_MAX = 64
WRITERS_MAX = 32
ROOM_BYTES_MAX = 1 << 18
BRANCHES = "branches"
_NAME_MAX = 24
REPAIR_HINT = "Repair the store with store.repair(): see docs/repair.md"
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class Logs:
    """All logs of one directory, for one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[int, Log] = {}
        self.damaged: list[Log] = []  # those with gaps, as the replay found them
        self.unreadable: set[int] = set()  # files at the path of a log that are not logs; never written to
        self.as_of: int | None = None  # the rewrite count for which ``known`` is valid; None during a rewrite
        self._paths: dict[int, Path] = {}
        self._readers = Descriptors(os.O_RDONLY, READERS_MAX)
        self._writers = Descriptors(os.O_RDWR, WRITERS_MAX)

    # Reading, by one thread at a time -----------------------------------------------------------------------------

    def path(self, number: int) -> Path:
        """Return a log's path."""
        path = self._paths.get(number)
        if path is None:
            path = self.root / "store.log" if number == STORE_LOG else self.root / BRANCHES / f"{number:08}.log"
            self._paths[number] = path
        return path

    def numbers(self) -> list[int]:
        """Return the numbers of all logs that exist."""
        found = [number for name in self._names() if (number := _number_in(name))]
        return sorted([STORE_LOG, *found] if file_of(self.path(STORE_LOG)) is not None else found)

    def strays(self) -> list[Path]:
        """Return the files in the logs' folder whose names are neither a log's nor a temporary file's."""
        names = sorted(name for name in self._names() if not _number_in(name) and not name.startswith(PREFIX))
        return [self.root / BRANCHES / name for name in names]

    def _names(self) -> list[str]:
        branches = self.root / BRANCHES
        try:
            return names_in(branches)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failure(error, "list", branches) from error

    def look(self, number: int) -> Log | None:
        """Return a log, opening its file if it is not known yet; None if the file is not a log."""
        if number not in self.known:
            mark = self._readers.get(number, self.path(number)).mark
            if mark == b"":
                return None
            self.known[number] = Log(number, self.path(number), mark, frame.FILE_HEAD_BYTES)
        return self.known[number]

    def first_bytes(self, number: int) -> bytes:
        """Return the first bytes of a file, even if it is not a log."""
        path = self.path(number)
        return read_at(self._readers.get(number, path).descriptor, 0, frame.FILE_HEAD_BYTES, path)

    def size(self, log: Log) -> int:
        """Return the size of a log's file."""
        descriptor = self._readers.get(log.number, log.path).descriptor
        try:
            return os.fstat(descriptor).st_size
        except OSError as error:
            raise failure(error, "look at", log.path) from error

    def is_in_place(self, log: Log) -> bool:
        """Return whether the open file of a log is the one at its path."""
        opened = self._readers.get(log.number, log.path)
        return opened.mark == log.mark and opened.file == file_of(log.path)

    def first_loss(self, before: Logs) -> Log | None:
        """Return a log that ``before`` knew and that is now missing, shorter or another file; None if there is none."""
        for number, log in before.known.items():
            found = self.known.get(number)
            if found is None or found.mark != log.mark or found.end < log.end:
                return log
        return None

    def read(self, number: int, mark: bytes, at: int, length: int) -> bytes:
        """Return bytes of the log with this mark; raise LogMoved if the log has another mark now."""
        path = self.path(number)
        descriptor, found, _ = self._readers.get(number, path)
        if found != mark:
            raise LogMoved(f"log {number} was rewritten")
        data = read_at(descriptor, at, length, path)
        if len(data) < length:
            raise Corrupted(f"{path} is shorter than its records say", path=str(path), hint=REPAIR_HINT)
        return data

    def reader(self, log: Log) -> frame.Read:
        """Return a function that reads the log, and returns fewer bytes at its end."""
        descriptor, mark, _ = self._readers.get(log.number, log.path)
        if mark != log.mark:
            raise LogMoved(f"log {log.number} was rewritten")
        return lambda at, length: read_at(descriptor, at, length, log.path)

    def scan(self, log: Log, start: int, end: int) -> Iterator[frame.RecordFrame | frame.Gap]:
        """Yield the records and gaps between two offsets of a log."""
        return frame.scan(self.reader(log), log.mark, start, end)

    # Writing, by one thread at a time -----------------------------------------------------------------------------

    def append(self, number: int, record_number: int, head: bytes, payload: bytes) -> tuple[Log, int]:
        """Append a record durably; return the log and its new end, which ``took`` then stores.

        Raises OutcomeUnknown if the record may or may not be durable. After any other error it is not stored.
        """
        log = self.known.get(number)
        mark = secrets.token_bytes(frame.MARK_BYTES) if log is None else log.mark
        record = frame.pack(mark, record_number, head, payload)
        if log is None:
            self._begin(self.path(number), frame.file_head(mark) + record)
            log = Log(number, self.path(number), mark, frame.FILE_HEAD_BYTES)
        else:
            self._extend(log, record)
        return log, log.end + len(record)

    def took(self, log: Log, end: int) -> None:
        """Remember that a log ends here now."""
        log.end = end
        self.known[log.number] = log

    def trim(self) -> None:
        """Cut off the space that was allocated in advance, in logs that are open here."""
        for log in self.known.values():
            if self._writers.has(log.number):
                descriptor, mark, _ = self._writers.get(log.number, log.path)
                if mark == log.mark and not log.broken:
                    _cut_back(descriptor, log.end)

    def cut(self, log: Log, end: int) -> None:
        """Cut a log off at an offset, durably."""
        descriptor = self._writers.get(log.number, log.path).descriptor
        try:
            os.ftruncate(descriptor, end)
            os.fdatasync(descriptor)
        except OSError as error:
            self._writers.drop(log.number)
            raise failure(error, "cut the end of", log.path) from error

    def recover(self, number: int, at: int, record_number: int) -> RingEntry | None:
        """Finish a record that a killed writer was about to write at this offset.

        Returns None unless the record exists, is whole, and is the last of its log. It is written again rather than
        synced again, because a sync after a failed sync would report no error. Nothing is cut off here: after a power
        failure the note about the pending record may be old, and acknowledged records may follow it or have its place.
        """
        path = self.path(number)
        log = self.look(number) if file_of(path) is not None else None
        if log is None:
            return None
        size, start = self.size(log), at or frame.FILE_HEAD_BYTES
        found = next(self.scan(log, start, size), None)
        if not isinstance(found, frame.RecordFrame) or (found.start, found.number) != (start, record_number):
            return None
        if not frame.is_whole(self.reader(log), found) or not frame.is_blank(self.reader(log), found.end, size):
            return None
        data = self.read(number, log.mark, at, found.end - at)
        try:
            descriptor = self._writers.get(number, path).descriptor
            write_at(descriptor, data, at)
            os.fdatasync(descriptor)
        except OSError as error:
            self._writers.drop(number)
            raise failure(error, "write", path) from error
        sync_directory(path.parent)
        return RingEntry(record_number, number, found.end, log.mark)

    def _extend(self, log: Log, record: bytes) -> None:
        descriptor, mark, file = self._writers.get(log.number, log.path)
        size = _size_in_place(log.path, file)
        if mark != log.mark or size is None or size < log.end:
            raise LogMoved(f"log {log.number} was replaced or cut")
        if not is_free(descriptor, log.end, log.path):
            raise LogMoved(f"log {log.number} has grown")
        end, is_written = log.end + len(record), False
        try:
            room = min(log.end, ROOM_BYTES_MAX) if end > size else 0
            try:
                write_at(descriptor, record + bytes(room), log.end)
            except OSError as error:
                if not room or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                os.ftruncate(descriptor, log.end)  # without the extra room the record may still fit on the disk
                write_at(descriptor, record, log.end)
            is_written = True
            os.fdatasync(descriptor)
        except OSError as error:
            is_cut = _cut_back(descriptor, log.end)
            self._writers.drop(log.number)
            raise _append_failed(failure(error, "write", log.path), is_written or not is_cut) from error
        if (_size_in_place(log.path, file) or 0) < end:
            raise _went_astray(log.path)

    def _begin(self, path: Path, data: bytes) -> None:
        """Create a log with its first record."""
        is_written = False
        try:
            descriptor = os.open(path, _NEW, FILE_MODE)
            try:
                os.fchmod(descriptor, FILE_MODE)  # despite the umask
                found = os.fstat(descriptor)
                write_at(descriptor, data, 0)
                is_written = True
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_directory(path.parent)
        except FileExistsError as error:
            raise StoreRefused(
                f"{path} exists but is not a log of this store",
                path=str(path),
                hint="Find out which program created it, and move it away",
            ) from error
        except (OSError, StoreError) as error:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                is_written = True  # a later open may find the whole record
            cause = failure(error, "write", path) if isinstance(error, OSError) else error
            raise _append_failed(cause, is_written) from error
        if _size_in_place(path, (found.st_dev, found.st_ino)) != len(data):
            raise _went_astray(path)

    # Both at once -------------------------------------------------------------------------------------------------

    def remove(self, number: int) -> int:
        """Delete a log that is no longer needed; return its size. After a power failure it may exist again."""
        path = self.path(number)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            size = 0
        except OSError as error:
            raise failure(error, "remove", path) from error
        self.forget(number)
        return size

    def forget(self, number: int) -> None:
        """Close a log's descriptors and forget it, because its file was replaced or removed."""
        self._readers.drop(number)
        self._writers.drop(number)
        self.known.pop(number, None)

    def abandon(self) -> None:
        """Close all descriptors and forget all logs."""
        self._readers.close()
        self._writers.close()
        self.known.clear()
        self.unreadable.clear()


def _number_in(name: str) -> int:
    """Return the number of the branch's log with this name; 0 if the name is not a log's."""
    number = int(name[:-4]) if name.endswith(".log") and name[:-4].isdecimal() and len(name) < _NAME_MAX else 0
    return number if name == f"{number:08}.log" else 0


def _size_in_place(path: Path, file: File) -> int | None:
    """Return the size of a file; None if another file is at its path."""
    found = found_at(path)
    return found.st_size if found is not None and (found.st_dev, found.st_ino) == file else None


def is_free(descriptor: int, at: int, path: Path) -> bool:
    """Return whether the log is empty at this offset, so that a record may be written there."""
    return not any(read_at(descriptor, at, frame.MARK_BYTES, path))


def write_at(descriptor: int, data: bytes, at: int) -> None:
    """Write all bytes, in as many calls as needed."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        if count == 0:
            raise OSError(errno.EIO, "no byte was written")
        at += count
        view = view[count:]


def _cut_back(descriptor: int, end: int) -> bool:
    try:
        os.ftruncate(descriptor, end)
    except OSError:
        return False
    return True


def _append_failed(cause: BackstayError, is_unknown: bool) -> BackstayError:
    if not is_unknown:
        return cause
    return OutcomeUnknown(
        f"{cause.what}: the data may or may not be stored",
        path=cause.path,
        hint="Check the system log; once the disk works, repeat the call with the same id",
    )


def _went_astray(path: Path) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"{path} was removed, moved, replaced or cut while it was written, so the save may or may not be in it",
        path=str(path),
        hint="Put the file or the directory back, then repeat the call with the same id",
    )
