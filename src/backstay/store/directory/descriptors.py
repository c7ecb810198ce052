"""Open log files, up to a limit; the least recently used one is closed first."""

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


class LogMoved(BackstayError):
    """Another process rewrote a log, so offsets in it are out of date. The store catches this error and reads again."""


File = tuple[int, int]
"""Identifies a file: its device and its inode."""


class OpenLog(NamedTuple):
    """An open log: its descriptor, its mark when it was opened, and which file it is."""

    descriptor: int
    mark: bytes
    file: File


class Descriptors:
    """A cache of open logs, for one thread at a time."""

    def __init__(self, flags: int, most: int) -> None:
        self._flags = flags | _FLAGS
        self._most = most
        self._open: OrderedDict[int, OpenLog] = OrderedDict()

    def get(self, number: int, path: Path) -> OpenLog:
        """Return an open log; its mark is b"" if the file is not a log. LogMoved if the file does not exist."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        try:
            descriptor = os.open(path, self._flags)
        except FileNotFoundError as error:
            raise LogMoved(f"log {number} does not exist") from error
        except OSError as error:
            raise failure(error, "open", path) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StoreRefused(
                    f"{path} is not a regular file", path=str(path), hint="Find out which program created it"
                )
            mark = frame.mark_in(lambda at, length: read_at(descriptor, at, length, path), found.st_size) or b""
        except BaseException:
            os.close(descriptor)
            raise
        while len(self._open) >= self._most:
            os.close(self._open.popitem(last=False)[1].descriptor)
        opened = self._open[number] = OpenLog(descriptor, mark, (found.st_dev, found.st_ino))
        return opened

    def has(self, number: int) -> bool:
        """Return whether a log is open."""
        return number in self._open

    def drop(self, number: int) -> None:
        """Close a log's descriptor, if it is open."""
        if number in self._open:
            os.close(self._open.pop(number).descriptor)

    def close(self) -> None:
        """Close all logs."""
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
    """Return the stat of a path without following links; None if nothing exists there."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise failure(error, "look at", path) from error


def file_of(path: Path) -> File | None:
    """Return which file is at a path; None if none is."""
    found = found_at(path)
    return None if found is None else (found.st_dev, found.st_ino)
