"""The directory itself: what says that it is ours, its permissions, and its one lock.

The lock of all writers is on the directory's own inode, which nobody can remove and leave the files where they are.

backstay.json   names the format and its version; written first
control         what writers tell readers and each other
store.log       see ``logs``
lanes/          see ``logs``
damaged/        what a repair took out
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from backstay.errors import InvalidInput, StoreError, StoreRefused
from backstay.store.atomic import FILE_MODE, failure, leftovers, make_directory, names_in, sync_directory, write_whole
from backstay.store.directory.control import CONTROL_BYTES, Control
from backstay.store.directory.descriptors import found_at
from backstay.store.directory.logs import LANES
from backstay.store.lock import DirectoryLock

FORMAT = "backstay directory store"
VERSION = 1
NAME_FILE = "backstay.json"
SETTLED_NS = 3_000_000_000
"""How old a change of names must be for the time of the last one to tell it from a later one, on any file system."""

_SAID_BYTES_MAX = 4096  # of backstay.json; it takes 60
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def path_of(url: str) -> Path:
    """Return the directory that a URL names."""
    text = url.partition(":")[2] if url.startswith("dir:") else url
    text = text[2:] if text.startswith("///") else text.removeprefix("//")
    if not text:
        raise InvalidInput(f"{url} names no directory", hint='For example backstay.open("dir:./checkpoints")')
    return Path(text)


class Root:
    """An opened directory. ``read_only`` if this process may not write there: then everything can still be read."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path.absolute()
        self.read_only = False
        self.is_open = False
        self._lock = DirectoryLock(str(self.path), timeout_s)
        self._settled_ns = -1
        self._name_path = self.path / NAME_FILE
        if not self._is_ours():
            self._make()
        self._directory = self._open_directory()  # open for as long as its inode is what we know it by
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
        """Return the lock that keeps all others from writing, taken; raise StoreBusy if it cannot be had in time."""
        try:
            return nullcontext() if self.read_only else self._lock.take()
        except StoreRefused:
            self.check()
            raise

    def take_now(self) -> AbstractContextManager[object] | None:
        """Return the lock, taken, or None if it cannot be had at once."""
        return None if self.read_only else self._lock.take_now()

    def check(self) -> bool:
        """Raise StoreRefused if the path does not lead here any more; return whether names here may have changed."""
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
                hint="Put the directory back in its place, or open the store again to go on with what is there now",
            )
        if found.st_mtime_ns == self._settled_ns:
            return False
        stamp = self._stamp()
        if stamp is None or stamp != self._name_file:
            if not self._is_ours():
                raise StoreRefused(
                    f"{self.path / NAME_FILE} was removed while the store was open, and nobody can open it without",
                    path=str(self.path / NAME_FILE),
                    hint="Put it back: docs/formats/directory-v1.md says what is in it",
                )
            self._name_file = stamp
        # A change within the same tick of the file system's clock would not show in the time.
        self._settled_ns = found.st_mtime_ns if time.time_ns() - found.st_mtime_ns > SETTLED_NS else -1
        return True

    def _stamp(self) -> tuple[int, ...] | None:
        """Return what is another one if the file that names the format is, or was changed; None if it is not there."""
        found = found_at(self._name_path)
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def reopen(self) -> None:
        """Open the control file that is there now, or make one."""
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
                os.posix_fallocate(descriptor, 0, CONTROL_BYTES)  # else a full disk could stop a later hint
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise failure(error, "write", path) from error
            raise
        return Control(descriptor, path, (found.st_dev, found.st_ino))

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
            raise StoreRefused(f"{path} is not what Backstay writes there", path=str(path)) from error
        if name != FORMAT or version != VERSION:
            raise StoreRefused(
                f"{self.path} is {name!r}, version {version!r}; this Backstay knows version {VERSION}",
                path=str(self.path),
                hint="Open it with the version of Backstay that wrote it, or a newer one",
            )
        return True

    def _make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreRefused(f"{self.path} is no directory", path=str(self.path), hint="Choose another name")
        if self.path.is_dir() and self._has_foreign_files():
            if self._is_ours():  # another process made it just now
                return
            raise StoreRefused(
                f"{self.path} has files in it that are not Backstay's",
                path=str(self.path),
                hint="Choose an empty directory, or one that does not exist yet",
            )
        make_directory(self.path)
        make_directory(self.path / LANES)
        if os.access(self.path.parent, os.R_OK):  # who made the directory may have been killed before it was synced
            sync_directory(self.path.parent)
        said = json.dumps({"format": FORMAT, "version": VERSION}, indent=2) + "\n"
        write_whole(self.path / "backstay.json", said.encode())
        sync_directory(self.path)

    def _has_foreign_files(self) -> bool:
        """Tell whether there is more than what an interrupted opening leaves."""
        ours = {LANES, "control"}
        try:
            names = set(names_in(self.path)) - {path.name for path in leftovers(self.path)}
        except OSError as error:
            raise failure(error, "list", self.path) from error
        return bool(names - ours)

    def _open_directory(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise failure(error, "open", self.path) from error

    def _open_to_read(self, path: Path, flags: int) -> Control:
        try:
            descriptor = os.open(path, os.O_RDONLY | flags)
            found = os.fstat(descriptor)
            return Control(descriptor, path, (found.st_dev, found.st_ino))
        except FileNotFoundError:  # there never was a writer, or it was left out
            return Control(os.open(os.devnull, os.O_RDONLY | flags), path, None)
        except OSError as error:
            raise failure(error, "open", path) from error
