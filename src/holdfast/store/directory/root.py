"""The directory itself: what says that it is ours, its permissions, and its one lock.

holdfast.json   names the format and its version; written first
control         the lock of all writers, and what they tell readers
store.log       see ``logs``
lanes/          see ``logs``
damaged/        what a repair took out
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from holdfast.errors import InvalidInput, StoreError, StoreRefused
from holdfast.store.atomic import FILE_MODE, failure, leftovers, make_directory, sync_directory, write_whole
from holdfast.store.directory.control import CONTROL_BYTES, Control
from holdfast.store.directory.logs import LANES
from holdfast.store.lock import ProcessLock

FORMAT = "holdfast directory store"
VERSION = 1
_SAID_BYTES_MAX = 4096  # of holdfast.json; it takes 60
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def path_of(url: str) -> Path:
    """Return the directory that a URL names."""
    text = url.partition(":")[2] if url.startswith("dir:") else url
    text = text[2:] if text.startswith("///") else text.removeprefix("//")
    if not text:
        raise InvalidInput(f"{url} names no directory", hint='For example holdfast.open("dir:./checkpoints")')
    return Path(text)


class Root:
    """An opened directory. ``read_only`` if this process may not write there: then everything can still be read."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path.absolute()
        self._timeout_s = timeout_s
        self.read_only = False
        self._lock: ProcessLock | None = None
        self._descriptor = -1
        if not self._is_ours():
            self._make()
        self.reopen()

    def reopen(self) -> None:
        """Open the control file; in a forked process, anew."""
        path = self.path / "control"
        flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise failure(error, "open", path) from error
            self.read_only = True
            self._descriptor = self._open_to_read(path, flags)
        self.control = Control(self._descriptor, path)
        try:
            self._lock = None if self.read_only else ProcessLock(str(path), self._timeout_s)
            if not self.read_only and os.fstat(self._descriptor).st_size < CONTROL_BYTES:
                os.fchmod(self._descriptor, FILE_MODE)
                os.posix_fallocate(self._descriptor, 0, CONTROL_BYTES)  # else a full disk could stop a later hint
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise failure(error, "write", path) from error
            raise

    def lock(self) -> None:
        """Keep all other processes from writing; raise StoreBusy if that cannot be had in time."""
        if self._lock is not None:
            self._lock.acquire()

    def lock_now(self) -> bool:
        """Keep all other processes from writing if none of them is just writing; return whether that is so."""
        return self._lock is not None and self._lock.acquire_now()

    def unlock(self) -> None:
        """Let others write again."""
        if self._lock is not None:
            try:
                self._lock.release()
            except OSError:  # closing the file lets go of the lock too
                self._lock.close()
                self._lock = ProcessLock(str(self.path / "control"), self._timeout_s)

    def sync(self) -> None:
        """Make all names in the directory survive a power failure."""
        for directory in (self.path, self.path / LANES):
            if directory.is_dir():
                sync_directory(directory)

    def leftovers(self) -> list[Path]:
        """Return the temporary files of writers, dead or alive."""
        return [path for directory in (self.path, self.path / LANES) for path in leftovers(directory)]

    def check_writable(self) -> None:
        """Raise StoreError if this process may not write."""
        if self.read_only:
            raise StoreError(
                f"{self.path} may only be read",
                path=str(self.path),
                hint="Let this user write there, or mount the file system for writing",
            )

    def close(self, is_forked: bool = False) -> None:
        """Release the descriptors; in a forked process also those of threads that are not there any more."""
        if self._lock is not None:
            if is_forked:
                self._lock.abandon()
            else:
                self._lock.close()
            self._lock = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_ours(self) -> bool:
        path = self.path / "holdfast.json"
        try:
            with path.open("rb") as file:
                text = file.read(_SAID_BYTES_MAX + 1)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise failure(error, "read", path) from error
        try:
            if len(text) > _SAID_BYTES_MAX:
                raise ValueError("too long")
            said = json.loads(text)
            name, version = said["format"], said["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreRefused(f"{path} is not what Holdfast writes there", path=str(path)) from error
        if name != FORMAT or version != VERSION:
            raise StoreRefused(
                f"{self.path} is {name!r}, version {version!r}; this Holdfast knows version {VERSION}",
                path=str(self.path),
                hint="Open it with the version of Holdfast that wrote it, or a newer one",
            )
        return True

    def _make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreRefused(f"{self.path} is no directory", path=str(self.path), hint="Choose another name")
        if self.path.is_dir() and self._has_foreign_files():
            if self._is_ours():  # another process made it just now
                return
            raise StoreRefused(
                f"{self.path} has files in it that are not Holdfast's",
                path=str(self.path),
                hint="Choose an empty directory, or one that does not exist yet",
            )
        make_directory(self.path)
        make_directory(self.path / LANES)
        if os.access(self.path.parent, os.R_OK):  # who made the directory may have been killed before it was synced
            sync_directory(self.path.parent)
        said = json.dumps({"format": FORMAT, "version": VERSION}, indent=2) + "\n"
        write_whole(self.path / "holdfast.json", said.encode())
        sync_directory(self.path)

    def _has_foreign_files(self) -> bool:
        """Tell whether there is more than what an interrupted opening leaves."""
        ours = {LANES, "control"}
        names = {path.name for path in self.path.iterdir()} - {path.name for path in leftovers(self.path)}
        return bool(names - ours)

    def _open_to_read(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, os.O_RDONLY | flags)
        except FileNotFoundError:
            return os.open(
                os.devnull, os.O_RDONLY | flags
            )  # says nothing: there never was a writer, or it was left out
        except OSError as error:
            raise failure(error, "open", path) from error
