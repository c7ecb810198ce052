"""``FileCheckpointStore``: one JSON file a checkpoint, ``<base>/<id>.json``, for people and other programs to read.

Written beside its place under a hidden, unique name and renamed, file and directory synced (``store.atomic``): a crash
leaves the old file or the new one, and at most a temporary file that never ends in ``.json`` and is swept by a later
save or clear. Reading changes nothing, and makes no directory. A file is ours by what is in it, not by its name: other
programs' files are reported and never touched.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay.compat.listed import Listed, Problem
from backstay.compat.sessions.ids import check_safe
from backstay.compat.worker import in_worker
from backstay.compat.workflow import document
from backstay.compat.workflow.checkpoint import Checkpoint, CheckpointInfo
from backstay.compat.workflow.document import Document
from backstay.compat.workflow.store import CheckpointStore, chosen
from backstay.errors import BackstayError, Corrupted, DecodeError, InvalidInput, StoreError, StoreRefused
from backstay.store import atomic

_SUFFIX = ".json"
_READ = os.O_RDONLY
for _flag in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC"):  # no link, and no pipe that would never answer
    _READ |= getattr(os, _flag, 0)


class FileCheckpointStore(CheckpointStore):
    """A directory of checkpoint files. Nothing is made until the first save; disks are waited for in worker threads."""

    def __init__(self, base_path: str | os.PathLike[str]) -> None:
        self._files = _Files(Path(base_path))

    async def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint; when this returns it survives a power cut, and until then the old one is intact.

        Raises InvalidInput for an id that cannot be a file's name, EncodeError for what JSON cannot say, StoreRefused
        if a file of another program has that name, StoreError (StoreFull) if the system refuses.
        """
        plain = checkpoint.to_dict()
        name = check_safe(checkpoint.id, "checkpoint id")
        data = document.to_bytes(plain)
        await in_worker(lambda: self._files.write(name, data))

    async def load(self, id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if there is no such file.

        Raises StoreError if it cannot be read, DecodeError if it cannot be parsed, Corrupted if it fails its checksum,
        StoreRefused if it is no checkpoint.
        """
        name = check_safe(id, "checkpoint id")
        found = await in_worker(lambda: self._files.read(name))
        return None if found is None else found.checkpoint

    async def list(
        self, *, graph_name: str | None = None, run_id: str | None = None, limit: int | None = None
    ) -> Listed[CheckpointInfo]:
        """Return summaries, newest first. Whole files are read for them: a checksum covers the whole file."""
        entries = await in_worker(self._files.scan)
        infos = [CheckpointInfo.of(entry.document.checkpoint) for entry in entries if entry.document is not None]
        problems = [entry.problem for entry in entries if entry.problem is not None]
        return chosen(infos, problems, graph_name, run_id, limit)

    async def delete(self, id: str) -> int:
        """Delete a checkpoint, also a damaged one, and return how many went; another program's file is refused."""
        name = check_safe(id, "checkpoint id")
        return await in_worker(lambda: self._files.delete(name))

    async def clear(self) -> int:
        """Delete all checkpoints, also damaged ones that can be told to be ours, and return how many went.

        All are tried; if some cannot be removed, StoreError then names them.
        """
        return await in_worker(self._files.clear)

    def __repr__(self) -> str:
        return f"<FileCheckpointStore {self._files.base}>"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file of the directory: what it holds, or what is wrong with it."""

    path: Path
    document: Document | None
    problem: Problem | None = None
    ours: bool = True


class _Files:
    """The directory, with blocking calls."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._swept = False

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            atomic.make_directory(self.base)
        except StoreError as error:
            raise _told(error, "Failed to create checkpoint dir") from error
        if not self._swept:
            self._sweep()
            self._swept = True
        self._check_place(path, name)
        try:
            atomic.write_whole(path, data)
        except StoreError as error:
            renaming = isinstance(error.__cause__, OSError) and error.__cause__.filename2 is not None
            doing = "Failed to rename checkpoint file" if renaming else "Failed to write temp checkpoint"
            raise _told(error, doing) from error

    def read(self, name: str) -> Document | None:
        data = _read(self._path(name))
        return None if data is None else document.from_bytes(data, name)

    def scan(self) -> list[_Entry]:
        """Return what is in the directory, by name."""
        try:
            names = sorted(os.listdir(self.base))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise atomic.failure(error, "list", self.base) from error
        return [entry for name in names for entry in self._entry(name)]

    def delete(self, name: str) -> int:
        path = self._path(name)
        try:
            if self.read(name) is None:
                return 0
        except (Corrupted, DecodeError):
            pass  # it is deleted all the same
        return int(atomic.remove(path, sync=True))

    def clear(self) -> int:
        removed, failures = 0, []
        for entry in self.scan():
            if entry.ours:
                try:
                    removed += atomic.remove(entry.path)
                except StoreError as error:
                    failures.append(error)
        if removed:
            atomic.sync_directory(self.base)
        self._sweep()
        if failures:
            raise StoreError(
                f"{len(failures)} checkpoint files could not be removed, {removed} were; the first: {failures[0].what}",
                path=failures[0].path,
                hint=failures[0].hint,
            ) from failures[0]
        return removed

    def _path(self, name: str) -> Path:
        return self.base / f"{name}{_SUFFIX}"

    def _sweep(self) -> None:
        with suppress(StoreError):  # what cannot be swept now is shown by every list, as a leftover
            atomic.sweep(self.base)

    def _check_place(self, path: Path, name: str) -> None:
        """Refuse to take the place of a file that is not the one of this checkpoint."""
        if path.is_dir() and not path.is_symlink():
            return  # the system will not rename a file onto it, and says so better
        data = _read(path)
        if not data:  # an empty file is what a crash of another program can leave
            return
        try:
            document.from_bytes(data, name)
        except StoreRefused:
            raise
        except BackstayError:
            if not document.begins_like_ours(data, name):
                raise StoreRefused(
                    f"{path.name} is there and is no checkpoint",
                    path=str(path),
                    hint="It belongs to another program. Choose another id, or move it away",
                ) from None

    def _entry(self, name: str) -> Iterator[_Entry]:
        """Judge one name of the directory; yields nothing for what is none of our business."""
        path = self.base / name
        if name.startswith(atomic.PREFIX) or name.endswith(f"{_SUFFIX}.tmp"):
            what = "a temporary file: its writer died, or is at work"
            yield _Entry(path, None, Problem("leftover", name, what), ours=False)
            return
        if not name.endswith(_SUFFIX) or name == _SUFFIX:
            return
        try:
            data = _read(path)
        except StoreError as error:
            yield _Entry(path, None, Problem("unreadable", name, error.what), ours=False)
            return
        if data is not None:  # else it was deleted just now
            yield _judged(path, name.removesuffix(_SUFFIX), data)


def _judged(path: Path, name: str, data: bytes) -> _Entry:
    try:
        check_safe(name, "checkpoint id")
        found = document.from_bytes(data, name)
    except (StoreRefused, InvalidInput) as error:
        return _Entry(path, None, Problem("foreign", path.name, error.what), ours=False)
    except (Corrupted, DecodeError) as error:
        ours = isinstance(error, Corrupted) or document.begins_like_ours(data, name)
        return _Entry(path, None, Problem("damaged", path.name, error.what), ours)
    if found.checked:
        return _Entry(path, found)
    return _Entry(path, found, Problem("unchecked", path.name, "it has no checksum: written by another program"))


def _read(path: Path) -> bytes | None:
    """Return a regular file's bytes, or None if there is none."""
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, _READ)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise atomic.failure(error, "read", path) from error


def _told(error: StoreError, doing: str) -> StoreError:
    """Return the same kind of error, with what was being done when it happened."""
    where: dict[str, Any] = {"path": error.path, "hint": error.hint}
    return type(error)(f"{doing}: {error.what}", **where)
