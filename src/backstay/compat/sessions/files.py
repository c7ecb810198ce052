"""The directory of one session: its files, their names, and how they are read and written.

    <root>/<session>/session_meta.json                                  whether the session is active, and its process
    <root>/<session>/checkpoints/cp_YYYYMMDD_HHMMSS_<id>.json           one checkpoint
    <root>/<session>/checkpoints/cp_YYYYMMDD_HHMMSS_<id>.json.backup    a copy of it
    <root>/<session>/checkpoints/latest.json                            a link to the newest
    <root>/<session>/checkpoints/order.json                             the places of the older program's checkpoints

Below the root no symbolic link is followed, neither to a directory nor to a file. ``latest.json`` is read as a name.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path

from backstay.compat.sessions.checkpoint import CheckpointData, CheckpointMeta, check_safe, check_twins
from backstay.compat.sessions.checksum import (
    CHECKSUM_FIELD,
    ChecksumUtils,
    Number,
    Tree,
    find_problem,
    is_of_another_version,
    parse,
    plain,
    pretty,
)
from backstay.errors import BackstayError, Corrupted, DecodeError, InvalidInput, StoreError, StoreRefused
from backstay.store import atomic
from backstay.store.lock import ProcessLock

LATEST = "latest.json"
BACKUP = ".backup"
OLD_BACKUP = LATEST + BACKUP
"""The only backup that the older writer kept."""

ORDER = "order.json"
LINK_PREFIX = ".tmp_latest_"
IDLE_S = 300.0
_CHECKPOINT = re.compile(r"cp_\d{8}_\d{6}_(.+)\.json", re.DOTALL)  # the older program accepted any id
READ_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Follow no link, and do not wait for a pipe."""


def file_name(data: CheckpointData) -> str:
    """Return the name of a checkpoint's file. Its time is the record's own ``created_at``."""
    moment = data.created_at.astimezone(UTC)
    return f"cp_{moment.year:04}{moment:%m%d_%H%M%S}_{data.checkpoint_id}.json"


def id_in(name: str) -> str | None:
    """Return the id in the name of a checkpoint's file, or None for any other name."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else found[1]


def moment_in(name: str) -> str:
    """Return the time in the name of a checkpoint's file."""
    return name.removeprefix("cp_")[: len("YYYYMMDD_HHMMSS")]


class SessionFolder:
    """One session's directory below a root. ``listed`` names are safe: any characters are allowed."""

    def __init__(self, root: Path, session: object, *, listed: bool = False) -> None:
        self.root = root
        self.session = str(session) if listed else check_safe(session, "session_id")
        self.path = root / self.session
        self.checkpoints = self.path / "checkpoints"

    def make(self) -> None:
        """Create the directories, and make sure that they are on the disk, even if another process created them."""
        if not self.path.is_dir():
            check_twins(self.session, {name.casefold(): name for name in _names_in(self.root)}, "session_id")
        self.refuse_links()
        for directory in (self.path, self.checkpoints):
            atomic.make_directory(directory)
            atomic.sync_directory(directory.parent)

    def exists(self) -> bool:
        """Return whether there is a directory of checkpoints."""
        self.refuse_links()
        return self.checkpoints.is_dir()

    def refuse_links(self) -> None:
        """Refuse a session whose directory is a symbolic link: it could lead anywhere."""
        for directory in (self.path, self.checkpoints):
            if directory.is_symlink():
                raise StoreRefused(
                    f"{directory} is a symbolic link, which is not followed",
                    path=str(directory),
                    hint="Find out what created the link, and replace it by the real directory",
                )

    def locked(self, timeout_s: float) -> AbstractContextManager[object]:
        """Return a lock that keeps other writers of this session out, in this process and in others."""
        return ProcessLock(str(self.path / ".lock"), timeout_s).take()

    def names(self) -> list[str]:
        """Return all names in the directory of checkpoints; none if it does not exist."""
        return _names_in(self.checkpoints)

    def sweep(self) -> list[str]:
        """Remove the temporary files of crashed writers and return their names. Call this with the lock.

        The older program takes no lock, so it may still be writing a file that changed in the last minutes.
        """
        swept = [path.name for each in (self.path, self.checkpoints) for path in atomic.sweep(each, idle_s=IDLE_S)]
        for name in self.names():
            path = self.checkpoints / name
            if name.startswith(LINK_PREFIX) and atomic.is_idle(path, IDLE_S) and atomic.remove(path):
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
    """Return the names of temporary files."""
    return [name for name in names if name.startswith((atomic.PREFIX, LINK_PREFIX))]


def read_file(path: Path, size: int = -1) -> bytes | None:
    """Return the first ``size`` bytes of a regular file, or all; None if it does not exist."""
    try:
        descriptor = os.open(path, READ_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreRefused(f"{path} is a symbolic link, which is not followed", path=str(path)) from error
        raise atomic.failure(error, "open", path) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreError(f"{path} is not a regular file", path=str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(size)
    except OSError as error:
        raise atomic.failure(error, "read", path) from error
    finally:
        os.close(descriptor)


class AtomicFileWriter:
    """Writes files atomically: a file is replaced completely, or stays as it was.

    With ``sync_on_write`` the file survives a power failure once the call returns. With ``verify_write`` it is read
    back and compared before it replaces the old file.
    """

    def __init__(self, sync_on_write: bool = True, verify_write: bool = True) -> None:
        self.sync_on_write = sync_on_write
        self.verify_write = verify_write

    def write_atomic(self, path: str | os.PathLike[str], content: str | bytes) -> None:
        """Replace a file by this content; create missing parent directories."""
        target = Path(path)
        if not target.name or target.name == "..":
            raise InvalidInput(f"{str(path)!r} is not the path of a file", hint="Pass the path of a file")
        atomic.make_directory(target.parent)
        data = content.encode() if isinstance(content, str) else content
        atomic.write_whole(target, data, sync=self.sync_on_write, verify=self.verify_write)

    def safe_remove(self, path: str | os.PathLike[str]) -> bool:
        """Remove a file; return False if it did not exist."""
        return atomic.remove(Path(path), sync=self.sync_on_write)


# One stored file --------------------------------------------------------------------------------------------------

SEQ_FIELD = "_seq"
"""The number that orders a session's checkpoints. The older reader ignores it; the checksum covers it."""

ORDER_FIELD = "_order"
"""The number of the save that wrote the ``order.json`` on which this file relies; missing if there was none."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An intact file."""

    path: Path
    seq: int | None
    checksum: str
    data: CheckpointData
    tree: dict[str, Tree]

    @property
    def meta(self) -> CheckpointMeta:
        """Return its summary."""
        return CheckpointMeta(
            checkpoint_id=self.data.checkpoint_id,
            session_id=self.data.session_id,
            created_at=self.data.created_at,
            trigger=self.data.trigger,
            iteration=self.data.iteration,
            checksum=self.checksum,
            seq=self.seq,
        )


def encode(record: dict[str, Tree], seq: int, order: int) -> bytes:
    """Return the file of a record, with its number and the ``order.json`` that it relies on, 0 for none."""
    places = {SEQ_FIELD: Number(str(seq))} | ({ORDER_FIELD: Number(str(order))} if order else {})
    return pretty(ChecksumUtils.add_checksum({**record, **places})).encode()


def read_stored(folder: SessionFolder, name: str) -> Stored | None:
    """Return a checkpoint's file or backup, None if it does not exist; raise an error if it is damaged."""
    path = folder.checkpoints / name
    content = read_file(path)
    if content is None:
        return None
    try:
        stored = decode(path, content)
    except DecodeError as error:
        raise Corrupted(f"{path.name} {error.what}", path=str(path)) from error
    data = stored.data
    if data.checkpoint_id != id_in(name.removesuffix(BACKUP)) or data.session_id != folder.session:
        raise Corrupted(  # the file was renamed or moved
            f"{name} holds checkpoint {data.checkpoint_id!r} of session {data.session_id!r}", path=str(path)
        )
    return stored


def decode(path: Path, content: bytes) -> Stored:
    """Return the record in a file's bytes."""
    tree = parse(content)
    problem = find_problem(tree)
    if problem is not None:
        if is_of_another_version(tree):
            raise StoreRefused(
                f"{path.name} has another version of the layout: {problem}",
                path=str(path),
                hint="Read it with the version that wrote it. If no other version did, it is damaged",
            )
        raise Corrupted(f"{path.name}: {problem}", path=str(path))
    record = plain(tree)
    seq = record.get(SEQ_FIELD)
    if seq is not None and (type(seq) is not int or seq < 1):
        raise DecodeError(f"has an invalid {SEQ_FIELD}")
    return Stored(path, seq, record[CHECKSUM_FIELD], CheckpointData.from_dict(record), tree)


# latest.json ------------------------------------------------------------------------------------------------------
#
# It names the newest checkpoint, for people and for readers that know no other order. It is a link to a bare name, so
# the tree can be moved, and is replaced in one step. Where links are not available (Windows) it is a plain copy. It is
# never trusted: a link that leaves the directory is not followed, and one to an older checkpoint is reported.


def point_latest(folder: SessionFolder, name: str, *, link: bool) -> None:
    """Make ``latest.json`` name a checkpoint, in one step that survives a power failure."""
    path = folder.checkpoints / LATEST
    if not link:
        atomic.write_whole(path, read_file(folder.checkpoints / name) or b"")
        return
    temporary = folder.checkpoints / f"{LINK_PREFIX}{secrets.token_hex(16)}"
    try:
        os.symlink(name, temporary)
        os.replace(temporary, path)
    except OSError as error:
        atomic.remove(temporary)
        raise atomic.failure(error, "replace", path) from error
    atomic.sync_directory(folder.checkpoints)


def linked_name(folder: SessionFolder, names: list[str]) -> tuple[str | None, str | None]:
    """Return the checkpoint's file that ``latest.json`` names, and a warning if something is wrong with it.

    A name that is not in ``names`` was saved after they were listed.
    """
    if LATEST not in names:
        return None, None
    path = folder.checkpoints / LATEST
    try:
        if path.is_symlink():
            name: str | None = os.readlink(path)
        else:  # a copy of a file with the same id; the older program may have saved several
            content = read_file(path) or b""
            record = parse(content)
            wanted = record.get("checkpoint_id") if isinstance(record, dict) else None
            named = [each for each in reversed(names) if wanted is not None and id_in(each) == wanted]
            equal = (each for each in named if len(named) == 1 or read_file(folder.checkpoints / each) == content)
            name = next(equal, named[0] if named else None)
    except (OSError, BackstayError) as error:
        return None, f"{LATEST} cannot be read: {error}"
    if name is None or id_in(name) is None:
        return None, f"{LATEST} does not name a checkpoint of this directory and is ignored"
    if name not in names and not os.path.lexists(folder.checkpoints / name):
        return None, f"{LATEST} names {name}, which does not exist"
    return name, None
