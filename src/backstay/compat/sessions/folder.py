"""The directory of one session: where its files are, which names are ours, and how they are opened.

    <root>/<session>/session_meta.json                                  whether the session is active, and who runs it
    <root>/<session>/checkpoints/cp_YYYYMMDD_HHMMSS_<id>.json           one checkpoint
    <root>/<session>/checkpoints/cp_YYYYMMDD_HHMMSS_<id>.json.backup    a copy of it
    <root>/<session>/checkpoints/latest.json                            a link to the newest

Nobody's symbolic link is followed below the root: not as a directory, not as a file. ``latest.json`` is read as a name.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import AbstractContextManager
from datetime import UTC
from pathlib import Path

from backstay.compat.sessions.data import CheckpointData
from backstay.compat.sessions.ids import SAFE_ID, check_safe, check_twins
from backstay.errors import StoreError, StoreRefused
from backstay.store import atomic
from backstay.store.lock import ProcessLock

LATEST = "latest.json"
BACKUP = ".backup"
OLD_BACKUP = LATEST + BACKUP
"""The one backup that the older writer kept."""

LINK_PREFIX = ".tmp_latest_"
_CHECKPOINT = re.compile(rf"cp_\d{{8}}_\d{{6}}_({SAFE_ID})\.json")
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def file_name(data: CheckpointData) -> str:
    """Return the name of a checkpoint's file; its time is the record's own, not that of another clock."""
    moment = data.created_at.astimezone(UTC)
    return f"cp_{moment.year:04}{moment:%m%d_%H%M%S}_{data.checkpoint_id}.json"


def id_in(name: str) -> str | None:
    """Return the id in the name of a checkpoint's file, or None if the name is no such."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else found[1]


class SessionFolder:
    """One session's directory below a root."""

    def __init__(self, root: Path, session: object) -> None:
        self.root = root
        self.session = check_safe(session, "session_id")
        self.path = root / self.session
        self.checkpoints = self.path / "checkpoints"

    def make(self) -> None:
        """Make the directories, and make sure that their names are on the disk, also if another process made them."""
        check_twins(self.session, set(_names_in(self.root)), "session_id")
        self.refuse_links()
        for directory in (self.path, self.checkpoints):
            atomic.make_directory(directory)
            atomic.sync_directory(directory.parent)

    def exists(self) -> bool:
        """Tell whether there is a directory of checkpoints."""
        self.refuse_links()
        return self.checkpoints.is_dir()

    def refuse_links(self) -> None:
        """Refuse a session whose directory is a symbolic link: it could lead anywhere."""
        for directory in (self.path, self.checkpoints):
            if directory.is_symlink():
                raise StoreRefused(
                    f"{directory} is a symbolic link, which is not followed",
                    path=str(directory),
                    hint="Look who put it there; move the real directory into its place",
                )

    def locked(self, timeout_s: float) -> AbstractContextManager[object]:
        """Keep out other writers of this session, in this process and in others, while the block runs."""
        return ProcessLock(str(self.path / ".lock"), timeout_s).take()

    def names(self) -> list[str]:
        """Return all names in the directory of checkpoints; none if there is no such directory."""
        return _names_in(self.checkpoints)

    def sweep(self) -> list[str]:
        """Remove what crashed writers left; return the names. To be called with the lock."""
        swept = [path.name for directory in (self.path, self.checkpoints) for path in atomic.sweep(directory)]
        for name in self.names():
            if name.startswith(LINK_PREFIX) and atomic.remove(self.checkpoints / name):
                swept.append(name)
        return swept


def _names_in(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise atomic.failure(error, "list", directory) from error


def leftovers_among(names: list[str]) -> list[str]:
    """Return the names of temporaries."""
    return [name for name in names if name.startswith((atomic.PREFIX, LINK_PREFIX))]


def read_file(path: Path, size: int = -1) -> bytes | None:
    """Return the beginning of a regular file, or all of it; None if it is not there."""
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreRefused(f"{path} is a symbolic link, which is not followed", path=str(path)) from error
        raise atomic.failure(error, "open", path) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreError(f"{path} is no regular file", path=str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(size)
    except OSError as error:
        raise atomic.failure(error, "read", path) from error
    finally:
        os.close(descriptor)
