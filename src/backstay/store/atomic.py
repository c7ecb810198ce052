"""Files that are written completely or stay unchanged, and survive a power failure.

A file is written next to its path under a hidden, random name, synced, checked, and renamed; then the directory is
synced, because the name is stored there. Before the rename nothing has changed; after the last sync nothing can be
lost.

A killed writer leaves its temporary file behind. A writer holds a lock on its temporary file, which the kernel releases
when the process dies. So ``sweep`` can distinguish leftovers of a crash from files that are being written now.

An error of the operating system becomes a StoreError with the path. After a failed sync the kernel may have dropped the
data without reporting an error again, so the descriptor is closed and not used again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from backstay.errors import BackstayError, Corrupted, OutcomeUnknown, StoreError, StoreFull, StoreRefused

if sys.platform != "win32":
    import fcntl

PREFIX = ".tmp_checkpoint_"
"""Names of temporary files start with this."""

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _CLOSE_ON_EXEC
_COPY_BYTES = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


def failure(error: OSError, doing: str, path: Path) -> StoreError:
    """Return our error for an error of the operating system; ``doing`` follows "cannot"."""
    what = f"cannot {doing} {path}: {error.strerror or error}"
    if error.errno in _FULL:
        return StoreFull(what, path=str(path), hint="Free space on this file system, then try again")
    return StoreError(what, path=str(path), hint=_HINTS.get(error.errno or 0))


_HINTS = {
    errno.EACCES: "Give this user read and write permission there, or choose another path",
    errno.EPERM: "Give this user read and write permission there, or choose another path",
    errno.EROFS: "The file system is mounted read-only: choose another path, or check the disk for errors",
    errno.EIO: "The disk failed: check the system log before you continue",
    errno.ELOOP: "There is a symbolic link instead of a file: find out which program created it",
    errno.ENAMETOOLONG: "Choose a shorter path",
}


@contextlib.contextmanager
def _translated(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(error, doing, path) from error


# Directories ------------------------------------------------------------------------------------------------------


def make_directory(path: Path, mode: int = DIRECTORY_MODE) -> None:
    """Create a directory and its missing parents, each with this mode despite the umask, and sync their parents."""
    missing = []
    place = path
    while not place.is_dir():
        missing.append(place)
        if place == place.parent:
            break
        place = place.parent
    for directory in reversed(missing):
        with _translated("create the directory", directory):
            with contextlib.suppress(FileExistsError):  # another process created it, but it must still be synced
                os.mkdir(directory, mode)
                os.chmod(directory, mode)
            if not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        sync_directory(directory.parent)


def check_parent(path: Path) -> None:
    """Raise StoreRefused if the directory in which a store would be created does not exist."""
    if not os.path.isdir(path.parent):
        raise StoreRefused(
            f"the directory {path.parent} does not exist",
            path=str(path),
            hint="Create it, then open the store again; or correct the path",
        )


def sync_directory(path: Path) -> None:
    """Sync a directory, so that its names survive a power failure."""
    if sys.platform == "win32":  # directories cannot be opened there; the file system journals names
        return
    with _translated("sync the directory", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _CLOSE_ON_EXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(
    path: Path, *, mode: int = FILE_MODE, sync: bool = True, check: Callable[[Path], None] | None = None
) -> Iterator[BinaryIO]:
    """Yield a file to write; if the block succeeds, the file replaces ``path`` in one step.

    ``check`` is called with the temporary file's path after everything is written and synced, and may raise. If
    anything fails, the old file stays and the temporary file is removed. If only the last step fails, the sync of the
    directory, the new file is in place but a power failure may undo that, so OutcomeUnknown is raised.
    """
    temporary, file = _temporary(path, mode)
    try:
        yield file
        file.flush()
        if sync:
            os.fsync(file.fileno())
        if check is not None:
            check(temporary)
        # The file is still open, and therefore locked: no sweep removes it before it has its name.
        os.replace(temporary, path)
    except BaseException as error:
        # Closing may fail too, because buffered data cannot be written; the descriptor is closed even then.
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):  # about this file
            raise failure(error, "write", path) from error
        raise
    with _translated("close", path):
        file.close()
    if sync:
        try:
            sync_directory(path.parent)
        except BackstayError as error:
            raise OutcomeUnknown(
                f"{path} was written, but its directory could not be synced, so a power failure may undo the write",
                path=str(path),
                hint="Write it again once the disk works",
            ) from error


def write_whole(path: Path, data: bytes, *, mode: int = FILE_MODE, sync: bool = True, verify: bool = True) -> None:
    """Replace a file's content in one step; ``verify`` reads it back first."""

    def same(temporary: Path) -> None:
        with _translated("read back", temporary):
            found = temporary.read_bytes()
        if found != data:
            raise Corrupted(
                f"the bytes read back from {path} differ from the bytes written",
                path=str(path),
                hint="The old file is unchanged. The disk or memory of this machine is failing: check the system log",
            )

    with replacing(path, mode=mode, sync=sync, check=same if verify else None) as file:
        file.write(data)


def copy_start(source: Path, target: Path, length: int) -> bool:
    """Copy the first bytes of a file to a new one and sync it; return False if the file is shorter."""
    with source.open("rb") as original, target.open("xb") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        while length > 0:
            part = original.read(min(length, _COPY_BYTES))
            if not part:
                return False
            file.write(part)
            length -= len(part)
        file.flush()
        os.fsync(file.fileno())
    return True


def remove(path: Path, *, sync: bool = False) -> bool:
    """Remove a file; return False if it did not exist."""
    try:
        os.unlink(path)
        gone = False
    except FileNotFoundError:
        gone = True
    except OSError as error:
        raise failure(error, "remove", path) from error
    if sync:
        sync_directory(path.parent)
    return not gone


def _temporary(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Create a file next to ``path``, locked by this process; return its path and the file."""
    while True:
        temporary = path.with_name(f"{PREFIX}{os.urandom(16).hex()}")
        with _translated("write next to", path):
            descriptor = os.open(temporary, _NEW, mode)
            file = os.fdopen(descriptor, "wb")
            try:
                if hasattr(os, "fchmod"):
                    os.fchmod(descriptor, mode)  # despite the umask
                if _lock(descriptor) and os.fstat(descriptor).st_nlink > 0:
                    return temporary, file
            except BaseException:
                file.close()
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            file.close()  # a sweep removed it before it was locked: try again


def _lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Leftovers of crashes ---------------------------------------------------------------------------------------------


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    """Return the names in a directory. Unlike for other calls, Python does not retry listdir after a signal."""
    while True:
        try:
            return os.listdir(directory)
        except InterruptedError:
            continue


def leftovers(directory: Path) -> list[Path]:
    """Return the temporary files in a directory, of running and dead writers."""
    try:
        names = sorted(name for name in names_in(directory) if name.startswith(PREFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise failure(error, "list", directory) from error
    return [directory / name for name in names]


def sweep(directory: Path, idle_s: float = 0.0) -> list[Path]:
    """Remove the temporary files of dead writers that did not change for this time; return their paths."""
    return [path for path in leftovers(directory) if is_idle(path, idle_s) and _take(path)]


def is_idle(path: Path, idle_s: float) -> bool:
    """Return whether a file exists and did not change for this time."""
    with contextlib.suppress(OSError):
        return idle_s == 0.0 or time.time() - os.lstat(path).st_mtime >= idle_s
    return False


def _take(path: Path) -> bool:
    """Remove a temporary file if no process holds its lock."""
    if sys.platform == "win32":  # without locks, a running writer looks like a dead one
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | _NO_FOLLOW | _CLOSE_ON_EXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):  # removed meanwhile, or not ours
            return False
        raise failure(error, "open", path) from error
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor) and remove(path)
    finally:
        os.close(descriptor)
