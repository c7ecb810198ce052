"""The log files of a directory: read at places, and appended to durably.

    store.log          what concerns no branch, or several at once
    lanes/00000012.log the branch with that number; no name of a user's ever becomes a path

An append is one write and one ``fdatasync``; a log's first also syncs the directory that got its name. A log that must
grow is given room in advance, as zeros: a sync that need not make a file longer takes two thirds of the time. If any of
it fails, the log is cut back to where it was and its descriptor closed: what a failed sync left in memory is not
trusted. Before a record is written, and again before anybody is told that it is there, the file that is open must be
the one at the log's path; and a record is only ever written where nothing is.

Reading and writing have descriptors of their own, because a reader may come while a writer waits for the disk.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from backstay.errors import BackstayError, Corrupted, OutcomeUnknown, StoreError, StoreRefused
from backstay.store.atomic import FILE_MODE, PREFIX, failure, names_in, sync_directory
from backstay.store.directory import frame
from backstay.store.directory.control import Entry
from backstay.store.directory.descriptors import Descriptors, File, Moved, file_of, found_at, read_at
from backstay.store.directory.log import STORE_LOG, Log

READERS_MAX = 64
WRITERS_MAX = 32
ROOM_BYTES_MAX = 1 << 18
LANES = "lanes"
_NAME_MAX = 24
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class Logs:
    """All logs of one directory, for one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[int, Log] = {}
        self.unreadable: set[int] = set()  # what is there in the place of a log and is none; nothing is written there
        self.as_of: int | None = None  # the number of rewrites at which ``known`` was true; None while one happens
        self._paths: dict[int, Path] = {}
        self._readers = Descriptors(os.O_RDONLY, READERS_MAX)
        self._writers = Descriptors(os.O_RDWR, WRITERS_MAX)

    # Reading, by one thread at a time -----------------------------------------------------------------------------

    def path(self, number: int) -> Path:
        """Return where a log is."""
        path = self._paths.get(number)
        if path is None:
            path = self.root / "store.log" if number == STORE_LOG else self.root / LANES / f"{number:08}.log"
            self._paths[number] = path
        return path

    def numbers(self) -> list[int]:
        """Return the numbers of all logs that are there."""
        found = [number for name in self._names() if (number := _number_in(name))]
        return sorted([STORE_LOG, *found] if file_of(self.path(STORE_LOG)) is not None else found)

    def strays(self) -> list[Path]:
        """Return what lies among the logs and has no name that a log or a temporary file could have."""
        names = sorted(name for name in self._names() if not _number_in(name) and not name.startswith(PREFIX))
        return [self.root / LANES / name for name in names]

    def _names(self) -> list[str]:
        lanes = self.root / LANES
        try:
            return names_in(lanes)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failure(error, "list", lanes) from error

    def look(self, number: int) -> Log | None:
        """Return a log, looking into its file if it is not known yet; None if it does not begin as a log does."""
        if number not in self.known:
            mark = self._readers.get(number, self.path(number)).mark
            if mark == b"":
                return None
            self.known[number] = Log(number, self.path(number), mark, frame.FILE_HEAD_BYTES)
        return self.known[number]

    def first_bytes(self, number: int) -> bytes:
        """Return how a file begins, be it a log or not."""
        path = self.path(number)
        return read_at(self._readers.get(number, path).descriptor, 0, frame.FILE_HEAD_BYTES, path)

    def size(self, log: Log) -> int:
        """Return how long a log's file is."""
        descriptor = self._readers.get(log.number, log.path).descriptor
        try:
            return os.fstat(descriptor).st_size
        except OSError as error:
            raise failure(error, "look at", log.path) from error

    def is_in_place(self, log: Log) -> bool:
        """Tell whether the file that is read as a log is the one at its path."""
        opened = self._readers.get(log.number, log.path)
        return opened.mark == log.mark and opened.file == file_of(log.path)

    def lacks(self, before: Logs) -> Log | None:
        """Return a log that was known before, in these very files, and is not there any more as far as it went."""
        for number, log in before.known.items():
            found = self.known.get(number)
            if found is None or found.mark != log.mark or found.end < log.end:
                return log
        return None

    def read(self, number: int, mark: bytes, at: int, length: int) -> bytes:
        """Return bytes of a log that has this mark; raise Moved if it has another one by now."""
        path = self.path(number)
        descriptor, found, _ = self._readers.get(number, path)
        if found != mark:
            raise Moved(f"log {number} was written anew")
        data = read_at(descriptor, at, length, path)
        if len(data) < length:
            raise Corrupted(f"{path} ends too early", path=str(path))
        return data

    def reader(self, log: Log) -> frame.Read:
        """Return what reads a log, giving less at its end."""
        descriptor, mark, _ = self._readers.get(log.number, log.path)
        if mark != log.mark:
            raise Moved(f"log {log.number} was written anew")
        return lambda at, length: read_at(descriptor, at, length, log.path)

    def scan(self, log: Log, start: int, end: int) -> Iterator[frame.Frame | frame.Gap]:
        """Give what lies in a part of a log."""
        return frame.scan(self.reader(log), log.mark, start, end)

    # Writing, by one thread at a time -----------------------------------------------------------------------------

    def append(self, number: int, record_number: int, head: bytes, payload: bytes) -> tuple[Log, int]:
        """Add a record at a log's end, durably; return the log and where it ends then. ``took`` makes that known.

        Raises OutcomeUnknown if it cannot be known whether it is durable; any other error says that it is not there.
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
        """Know that a log ends here now."""
        log.end = end
        self.known[log.number] = log

    def trim(self) -> None:
        """Take back the room that logs were given in advance, as far as they are open here."""
        for log in self.known.values():
            if self._writers.has(log.number):
                descriptor, mark, _ = self._writers.get(log.number, log.path)
                if mark == log.mark and not log.broken:
                    _cut_back(descriptor, log.end)

    def cut(self, log: Log, end: int) -> None:
        """Take away what lies behind a place of a log, durably."""
        descriptor = self._writers.get(log.number, log.path).descriptor
        try:
            os.ftruncate(descriptor, end)
            os.fdatasync(descriptor)
        except OSError as error:
            self._writers.drop(log.number)
            raise failure(error, "cut the end of", log.path) from error

    def recover(self, number: int, at: int, record_number: int) -> Entry | None:
        """Finish a record that a writer was about to write at this place; None if it is not there, whole, as the last.

        It is written again rather than synced again: if a sync of it failed, another one would say nothing. It is
        written over itself, and nothing is cut off here, because after a power failure the note may be an old one:
        then there are others behind it, or another one in its place, and they were acknowledged.
        """
        path = self.path(number)
        log = self.look(number) if file_of(path) is not None else None
        if log is None:
            return None
        size, start = self.size(log), at or frame.FILE_HEAD_BYTES
        found = next(self.scan(log, start, size), None)
        if not isinstance(found, frame.Frame) or (found.start, found.number) != (start, record_number):
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
        return Entry(record_number, number, found.end, log.mark)

    def _extend(self, log: Log, record: bytes) -> None:
        descriptor, mark, file = self._writers.get(log.number, log.path)
        size = _size_in_place(log.path, file)
        if mark != log.mark or size is None or size < log.end:
            raise Moved(f"log {log.number} is another file, or shorter than it was")
        if not is_free(descriptor, log.end, log.path):
            raise Moved(f"log {log.number} is longer than it was")
        end, is_written = log.end + len(record), False
        try:
            _write_with_room(descriptor, record, log.end, min(log.end, ROOM_BYTES_MAX) if end > size else 0)
            is_written = True
            os.fdatasync(descriptor)
        except OSError as error:
            is_cut = _cut_back(descriptor, log.end)
            self._writers.drop(log.number)
            raise _append_failed(failure(error, "write", log.path), is_written or not is_cut) from error
        if (_size_in_place(log.path, file) or 0) < end:
            raise _went_astray(log.path)

    def _begin(self, path: Path, data: bytes) -> None:
        """Make a log with its first record. Nobody knows of it yet, so there is nothing to cut it back to."""
        is_written = False
        try:
            descriptor = os.open(path, _NEW, FILE_MODE)
            try:
                os.fchmod(descriptor, FILE_MODE)  # whatever the umask is
                found = os.fstat(descriptor)
                write_at(descriptor, data, 0)
                is_written = True
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_directory(path.parent)
        except FileExistsError as error:
            raise StoreRefused(
                f"{path} is there and is no log of this store",
                path=str(path),
                hint="Look who put it there, and move it away",
            ) from error
        except (OSError, StoreError) as error:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                is_written = True  # it may be found there later, and be whole
            told = failure(error, "write", path) if isinstance(error, OSError) else error
            raise _append_failed(told, is_written) from error
        if _size_in_place(path, (found.st_dev, found.st_ino)) != len(data):
            raise _went_astray(path)

    # Both at once -------------------------------------------------------------------------------------------------

    def remove(self, number: int) -> int:
        """Delete a log that nothing needs; return how long it was. It may be back after a power failure."""
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
        """Close a log's descriptors and forget what is known of it: the file is another one now, or gone."""
        self._readers.drop(number)
        self._writers.drop(number)
        self.known.pop(number, None)

    def abandon(self) -> None:
        """Close all descriptors and forget all that is known."""
        self._readers.close()
        self._writers.close()
        self.known.clear()
        self.unreadable.clear()


def _number_in(name: str) -> int:
    """Return the number of the log with this name; 0 if no log of a branch has such a name."""
    number = int(name[:-4]) if name.endswith(".log") and name[:-4].isdecimal() and len(name) < _NAME_MAX else 0
    return number if name == f"{number:08}.log" else 0


def _size_in_place(path: Path, file: File) -> int | None:
    """Return how long a file is; None if it is not the one at its path."""
    found = found_at(path)
    return found.st_size if found is not None and (found.st_dev, found.st_ino) == file else None


def is_free(descriptor: int, at: int, path: Path) -> bool:
    """Tell whether a record may be written at this place: nobody has begun one there."""
    return not any(read_at(descriptor, at, frame.MARK_BYTES, path))


def write_at(descriptor: int, data: bytes, at: int) -> None:
    """Write all bytes, in as many calls as the system wants."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        if count == 0:
            raise OSError(errno.EIO, "nothing could be written")
        at += count
        view = view[count:]


def _write_with_room(descriptor: int, record: bytes, at: int, room_bytes: int) -> None:
    """Write a record, and zeros behind it if there is space for them."""
    try:
        write_at(descriptor, record + bytes(room_bytes), at)
    except OSError as error:
        if not room_bytes or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.ftruncate(descriptor, at)
        write_at(descriptor, record, at)


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
        f"{cause.what}: it may be stored or not",
        path=cause.path,
        hint="Do it again with the same id once the disk works; look at the system's log",
    )


def _went_astray(path: Path) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"{path} was removed, moved, replaced or cut short while it was written to: what was saved may be in it or not",
        path=str(path),
        hint="Put the file or the directory back where it was, then do it again with the same id",
    )
