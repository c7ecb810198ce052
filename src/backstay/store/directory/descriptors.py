"""Open files, as many as may be open at once; the one that was not used for longest is closed first."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from backstay.errors import BackstayError, StoreRefused
from backstay.store.atomic import failure
from backstay.store.directory import frame

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait


class Moved(BackstayError):
    """A log was written anew by another process: places in it must be looked up again. Never leaves this store."""


File = tuple[int, int]
"""What tells one open file from all others: its device and its inode."""


class Opened(NamedTuple):
    """An open log: its descriptor, the mark that it had when it was opened, and which file it is."""

    descriptor: int
    mark: bytes
    file: File


class Descriptors:
    """Open logs. For one thread at a time."""

    def __init__(self, flags: int, most: int) -> None:
        self._flags = flags | _FLAGS
        self._most = most
        self._open: OrderedDict[int, Opened] = OrderedDict()

    def get(self, number: int, path: Path) -> Opened:
        """Return a log, opened; its mark is b"" if it does not begin as a log does. Moved if it is gone."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        try:
            descriptor = os.open(path, self._flags)
        except FileNotFoundError as error:
            raise Moved(f"log {number} is not there") from error
        except OSError as error:
            raise failure(error, "open", path) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StoreRefused(f"{path} is no plain file", path=str(path), hint="Look who put it there")
            mark = frame.mark_in(lambda at, length: read_at(descriptor, at, length, path), found.st_size) or b""
        except BaseException:
            os.close(descriptor)
            raise
        while len(self._open) >= self._most:
            os.close(self._open.popitem(last=False)[1].descriptor)
        opened = self._open[number] = Opened(descriptor, mark, (found.st_dev, found.st_ino))
        return opened

    def has(self, number: int) -> bool:
        """Tell whether a log is open."""
        return number in self._open

    def drop(self, number: int) -> None:
        """Close a log's descriptor, if it is open."""
        if number in self._open:
            os.close(self._open.pop(number).descriptor)

    def close(self) -> None:
        """Close all."""
        for number in list(self._open):
            self.drop(number)


def read_at(descriptor: int, at: int, length: int, path: Path) -> bytes:
    """Return bytes of a file; fewer at its end."""
    parts = []
    try:
        while length > 0 and (part := os.pread(descriptor, length, at)):
            parts.append(part)
            at += len(part)
            length -= len(part)
    except OSError as error:
        raise failure(error, "read", path) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def found_at(path: Path) -> os.stat_result | None:
    """Return what there is at a path, links not followed; None if there is nothing."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise failure(error, "look at", path) from error


def file_of(path: Path) -> File | None:
    """Return which file there is at a path; None if there is none."""
    found = found_at(path)
    return None if found is None else (found.st_dev, found.st_ino)
