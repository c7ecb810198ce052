"""Files that are there whole or not at all, and stay when the power fails.

A file is written beside its place under a hidden, random name, synced, checked, and renamed into place; then the
directory is synced, because a name lives there and not in the file. Until the rename nothing has changed; after the
last sync nothing can be lost.

A writer that is killed leaves its temporary file behind. It holds a lock on it while it lives, which the kernel gives
back when it dies: so ``sweep`` can tell what a crash left from what somebody is writing now.

What the system refuses becomes a StoreError that names the path. After a failed sync the kernel may have dropped what
it could not write and say nothing of it the next time, so the descriptor is closed and never asked again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from backstay.errors import BackstayError, Corrupted, OutcomeUnknown, StoreError, StoreFull

if sys.platform != "win32":
    import fcntl

PREFIX = ".tmp_checkpoint_"
"""Every temporary file's name begins so."""

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _CLOSE_ON_EXEC
_FULL = {errno.ENOSPC, errno.EDQUOT}


def failure(error: OSError, doing: str, path: Path) -> StoreError:
    """Return the error of ours for what the system refused; ``doing`` follows "cannot"."""
    what = f"cannot {doing} {path}: {error.strerror or error}"
    if error.errno in _FULL:
        return StoreFull(what, path=str(path), hint="Free space on this file system, then try again")
    return StoreError(what, path=str(path), hint=_HINTS.get(error.errno or 0))


_HINTS = {
    errno.EACCES: "Let this user read and write there, or choose another place",
    errno.EPERM: "Let this user read and write there, or choose another place",
    errno.EROFS: "The file system is mounted read-only: choose another place, or look for the disk's errors",
    errno.EIO: "The disk failed: look at the system's log before you go on",
    errno.ELOOP: "A symbolic link stands where a file should be; look who put it there",
    errno.ENAMETOOLONG: "Choose a shorter path",
}


@contextlib.contextmanager
def _telling(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(error, doing, path) from error


# Directories ------------------------------------------------------------------------------------------------------


def make_directory(path: Path, mode: int = DIRECTORY_MODE) -> None:
    """Make a directory and its missing parents, each with this mode whatever the umask, each synced in its parent."""
    missing = []
    place = path
    while not place.is_dir():
        missing.append(place)
        if place == place.parent:
            break
        place = place.parent
    for directory in reversed(missing):
        with _telling("make the directory", directory):
            with contextlib.suppress(FileExistsError):  # another process came first: it still must be synced
                os.mkdir(directory, mode)
                os.chmod(directory, mode)
            if not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power failure."""
    if sys.platform == "win32":  # a directory cannot be opened there; its file system journals names
        return
    with _telling("sync the directory", path):
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
    """Give a file to write; when the block ends well, it takes the place of ``path`` in one step.

    ``check`` is called with the temporary file's path once all is written and synced, and may raise. If anything fails,
    the old file stays as it was and the temporary is removed. Only if the very last step fails, the sync of the
    directory, the new file is in place and may be lost with the power: that is OutcomeUnknown.
    """
    temporary, file = _temporary(path, mode)
    try:
        yield file
        file.flush()
        if sync:
            os.fsync(file.fileno())
        if check is not None:
            check(temporary)
        # The file is still open, and so locked: no sweep takes it before it has its name.
        os.replace(temporary, path)
    except BaseException as error:
        _discard(temporary, file)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):  # else: not this file's
            raise failure(error, "write", path) from error
        raise
    with _telling("close", path):
        file.close()
    if sync:
        _settle(path)


def write_whole(path: Path, data: bytes, *, mode: int = FILE_MODE, sync: bool = True, verify: bool = True) -> None:
    """Put these bytes in the place of a file, in one step; ``verify`` reads them back before that."""

    def same(temporary: Path) -> None:
        with _telling("read back", temporary):
            found = temporary.read_bytes()
        if found != data:
            raise Corrupted(
                f"what was read back from {path} is not what was written",
                path=str(path),
                hint="Nothing was replaced. The disk or memory of this machine fails: look at the system's log",
            )

    with replacing(path, mode=mode, sync=sync, check=same if verify else None) as file:
        file.write(data)


def remove(path: Path, *, sync: bool = False) -> bool:
    """Remove a file; return False if it was gone already, which is just as well."""
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


def _discard(temporary: Path, file: BinaryIO) -> None:
    """Give up a temporary file; it is closed even if that fails, because what is still in memory cannot be written."""
    with contextlib.suppress(OSError):
        file.close()
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def _settle(path: Path) -> None:
    try:
        sync_directory(path.parent)
    except BackstayError as error:
        raise OutcomeUnknown(
            f"{path} was written, but its directory could not be synced: it may be lost with the power",
            path=str(path),
            hint="Write it again once the disk works",
        ) from error


def _temporary(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Return a new file beside ``path`` that is locked by this process, and its path."""
    while True:
        temporary = path.with_name(f"{PREFIX}{secrets.token_hex(16)}")
        with _telling("write beside", path):
            descriptor = os.open(temporary, _NEW, mode)
            file = os.fdopen(descriptor, "wb")
            try:
                if hasattr(os, "fchmod"):
                    os.fchmod(descriptor, mode)  # whatever the umask is
                if _lock(descriptor) and os.fstat(descriptor).st_nlink > 0:
                    return temporary, file
            except BaseException:
                file.close()
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            file.close()  # a sweep took it before it was locked: another one


def _lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# What crashes left ------------------------------------------------------------------------------------------------


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    """Return the names in a directory. Unlike other calls, Python does not make this one again after a signal."""
    while True:
        try:
            return os.listdir(directory)
        except InterruptedError:
            continue


def leftovers(directory: Path) -> list[Path]:
    """Return the temporary files in a directory, of dead and of living writers."""
    try:
        names = sorted(name for name in names_in(directory) if name.startswith(PREFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise failure(error, "list", directory) from error
    return [directory / name for name in names]


def sweep(directory: Path) -> list[Path]:
    """Remove the temporary files whose writer is dead; return them. A living writer's stay."""
    return [path for path in leftovers(directory) if _take(path)]


def _take(path: Path) -> bool:
    """Remove a temporary file if nobody holds its lock."""
    if sys.platform == "win32":  # without locks the living cannot be told from the dead
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | _NO_FOLLOW | _CLOSE_ON_EXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):  # gone, or never one of ours
            return False
        raise failure(error, "open", path) from error
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor) and remove(path)
    finally:
        os.close(descriptor)
