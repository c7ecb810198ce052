"""The directory itself: the file that identifies it, its permissions, and its lock.

Writers lock the directory's own inode, because it cannot be removed while its files stay.

backstay.json   names the format and its version; written first
control         the newest records, for readers and writers of other processes
store.log       see ``logs``
branches/          see ``logs``
damaged/        damaged parts that a repair took out of logs
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from backstay.errors import InvalidInput, StoreError, StoreRefused
from backstay.store.atomic import (
    FILE_MODE,
    check_parent,
    failure,
    leftovers,
    make_directory,
    names_in,
    sync_directory,
    write_whole,
)
from backstay.store.directory.control import CONTROL_BYTES, Control
from backstay.store.directory.descriptors import found_at
from backstay.store.directory.logs import BRANCHES
from backstay.store.lock import DirectoryLock

FORMAT = "backstay directory store"
VERSION = 1
NAME_FILE = "backstay.json"
SETTLED_NS = 3_000_000_000
"""A directory's change time is trusted once it is this old: two changes within one tick share their time."""

_NAME_FILE_BYTES_MAX = 4096  # of backstay.json; it takes 60
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def path_of(url: str) -> Path:
    """Return the directory that a URL names."""
    text = url.partition(":")[2] if url.startswith("dir:") else url
    text = text[2:] if text.startswith("///") else text.removeprefix("//")
    if not text:
        raise InvalidInput(f"{url} does not name a directory", hint='For example backstay.open("dir:./checkpoints")')
    return Path(text)


class Root:
    """An opened directory. ``read_only`` if this process may only read it."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path.absolute()
        self.read_only = False
        self.is_open = False
        self._lock = DirectoryLock(str(self.path), timeout_s)
        self._settled_ns = -1
        self._name_path = self.path / NAME_FILE
        if not self._is_ours():
            self._make()
        try:
            self._directory = os.open(
                self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )  # keeps its inode from reuse
        except OSError as error:
            raise failure(error, "open", self.path) from error
        try:
            found = os.fstat(self._directory)
            self._file = (found.st_dev, found.st_ino)
            self._name_file = self._stamp()
            self.control = self._open_control()
        except BaseException:
            os.close(self._directory)
            raise
        self.is_open = True

    def take(self) -> AbstractContextManager[object]:
        """Take the lock against all other writers and return it; raise StoreBusy if that takes too long."""
        try:
            return nullcontext() if self.read_only else self._lock.take()
        except StoreRefused:
            self.check()
            raise

    def take_now(self) -> AbstractContextManager[object] | None:
        """Take the lock and return it, or return None if another process holds it."""
        return None if self.read_only else self._lock.take_now()

    def check(self) -> bool:
        """Raise StoreRefused if another directory is at the path now; return whether its names may have changed."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except OSError as error:
            raise failure(error, "look at", self.path) from error
        if found is None or (found.st_dev, found.st_ino) != self._file:
            raise StoreRefused(
                f"{self.path} was removed, moved or replaced while the store was open",
                path=str(self.path),
                hint="Put the directory back, or open the store again to use the new directory",
            )
        if found.st_mtime_ns == self._settled_ns:
            return False
        stamp = self._stamp()
        if stamp is None or stamp != self._name_file:
            if not self._is_ours():
                raise StoreRefused(
                    f"{self.path / NAME_FILE} was removed, and the store cannot be opened without it",
                    path=str(self.path / NAME_FILE),
                    hint="Put it back: docs/formats/directory-v1.md shows its content",
                )
            self._name_file = stamp
        # A change within the same tick of the file system's clock does not change the time.
        self._settled_ns = found.st_mtime_ns if time.time_ns() - found.st_mtime_ns > SETTLED_NS else -1
        return True

    def _stamp(self) -> tuple[int, ...] | None:
        """Return a value that changes when the file that names the format changes; None if the file is missing."""
        found = found_at(self._name_path)
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def reopen(self) -> None:
        """Open the current control file, or create one."""
        before, self.control = self.control, self._open_control()
        os.close(before.descriptor)

    def _open_control(self) -> Control:
        path = self.path / "control"
        flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise failure(error, "open", path) from error
            self.read_only = True
            return self._open_to_read(path, flags)
        try:
            found = os.fstat(descriptor)
            if found.st_size < CONTROL_BYTES:
                os.fchmod(descriptor, FILE_MODE)
                os.posix_fallocate(descriptor, 0, CONTROL_BYTES)  # otherwise a full disk could stop a later write
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise failure(error, "write", path) from error
            raise
        return Control(descriptor, path, (found.st_dev, found.st_ino))

    def sync(self) -> None:
        """Sync the directories, so that their names survive a power failure."""
        for directory in (self.path, self.path / BRANCHES):
            if directory.is_dir():
                sync_directory(directory)

    def leftovers(self) -> list[Path]:
        """Return the temporary files of writers, running or dead."""
        return [path for directory in (self.path, self.path / BRANCHES) for path in leftovers(directory)]

    def check_writable(self) -> None:
        """Raise StoreError if this process may not write."""
        if self.read_only:
            raise StoreError(
                f"{self.path} is read-only for this process",
                path=str(self.path),
                hint="Give this user write permission, or mount the file system for writing",
            )

    def close(self) -> None:
        """Release the descriptors."""
        if self.is_open:
            self.is_open = False
            os.close(self.control.descriptor)
            os.close(self._directory)

    def _is_ours(self) -> bool:
        path = self.path / "backstay.json"
        try:
            with path.open("rb") as file:
                text = file.read(_NAME_FILE_BYTES_MAX + 1)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise failure(error, "read", path) from error
        try:
            if len(text) > _NAME_FILE_BYTES_MAX:
                raise ValueError("too long")
            said = json.loads(text)
            name, version = said["format"], said["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreRefused(
                f"{path} was not written by Backstay",
                path=str(path),
                hint="Choose another directory, or restore the file: docs/formats/directory-v1.md shows its content",
            ) from error
        if name != FORMAT or version != VERSION:
            raise StoreRefused(
                f"{self.path} has format {name!r}, version {version!r}; this Backstay reads version {VERSION}",
                path=str(self.path),
                hint="Open it with the version of Backstay that wrote it, or a newer one",
            )
        return True

    def _make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreRefused(f"{self.path} is not a directory", path=str(self.path), hint="Choose another name")
        if self.path.is_dir():
            try:
                names = set(names_in(self.path)) - {path.name for path in leftovers(self.path)}
            except OSError as error:
                raise failure(error, "list", self.path) from error
            if names - {BRANCHES, "control"}:  # more files than an interrupted opening leaves
                if self._is_ours():  # another process created it just now
                    return
                raise StoreRefused(
                    f"{self.path} contains files of another program",
                    path=str(self.path),
                    hint="Choose an empty directory, or one that does not exist yet",
                )
        check_parent(self.path)
        make_directory(self.path)
        make_directory(self.path / BRANCHES)
        if os.access(self.path.parent, os.R_OK):  # its creator may have been killed before syncing it
            sync_directory(self.path.parent)
        said = json.dumps({"format": FORMAT, "version": VERSION}, indent=2) + "\n"
        write_whole(self.path / "backstay.json", said.encode())
        sync_directory(self.path)

    def _open_to_read(self, path: Path, flags: int) -> Control:
        try:
            descriptor = os.open(path, os.O_RDONLY | flags)
            found = os.fstat(descriptor)
            return Control(descriptor, path, (found.st_dev, found.st_ino))
        except FileNotFoundError:  # no process ever wrote here, or a copy left it out
            return Control(os.open(os.devnull, os.O_RDONLY | flags), path, None)
        except OSError as error:
            raise failure(error, "open", path) from error
