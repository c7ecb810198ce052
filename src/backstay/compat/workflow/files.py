"""``FileCheckpointStore``: one JSON file per checkpoint, ``<base>/<id>.json``, for people and other programs to read.

A file is written under a hidden, unique name, synced and renamed (``store.atomic``). So a crash leaves the old file or
the new one, and at most a temporary file, which never ends in ``.json`` and is removed by a later save or clear.
Reading changes nothing and creates no directory. Files of other programs, recognized by their content, are reported and
never touched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay.compat.adapter import Listed, Problem, in_worker, parse_json
from backstay.compat.sessions.checkpoint import check_safe
from backstay.compat.sessions.files import READ_FLAGS
from backstay.compat.workflow.checkpoint import Checkpoint, CheckpointInfo
from backstay.compat.workflow.store import CheckpointStore, selected
from backstay.errors import BackstayError, Corrupted, DecodeError, EncodeError, InvalidInput, StoreError, StoreRefused
from backstay.store import atomic

# The content of a file --------------------------------------------------------------------------------------------
#
# A file is indented JSON. Its last key is the checksum: the SHA-256 of the whole file, with 64 zeros in place of the
# checksum, so it covers every byte. A file with ``_version`` must have a checksum. A file with neither was written by
# another program of the same format: it is read, and reported as unchecked.

VERSION = 1
_OURS = ("_version", "_checksum")
_ZEROS = b"0" * 64
_CHECKSUM = re.compile(rb'"_checksum": "sha256:([0-9a-f]{64})"\n}\n\Z')


def to_bytes(plain: dict[str, Any]) -> bytes:
    """Return the file of a checkpoint, given as the result of its ``to_dict``."""
    for key in _OURS:
        if key in plain:
            raise InvalidInput(f"extra must not hold {key!r}, which the file format uses", hint="Choose another name")
    whole = {**plain, "_version": VERSION, "_checksum": f"sha256:{_ZEROS.decode()}"}
    try:
        blank = json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError as error:  # only a number of more than 4,300 digits, which Python does not write
        raise EncodeError(f"Failed to serialize checkpoint: {error}", checkpoint=plain["id"]) from error
    found = _CHECKSUM.search(blank)
    assert found is not None
    digest = hashlib.sha256(blank).hexdigest().encode()
    return blank[: found.start(1)] + digest + blank[found.end(1) :]


def from_bytes(data: bytes, name: str) -> tuple[Checkpoint, bool]:
    """Return the checkpoint in the file of checkpoint ``name``, and whether a checksum covers it.

    Raises DecodeError if it cannot be parsed, Corrupted if it fails its checksum, StoreRefused if it is something else.
    """
    try:
        plain = parse_json(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise DecodeError(
            f"Failed to parse checkpoint {name}: {type(error).__name__}",
            checkpoint=name,
            hint="The file is damaged: save the checkpoint again, or delete it",
        ) from error
    if type(plain) is not dict:
        plain = {}
    found = _CHECKSUM.search(data)
    if found is None:
        is_right = not any(key in plain for key in _OURS)
    else:
        blank = data[: found.start(1)] + _ZEROS + data[found.end(1) :]
        is_right = hashlib.sha256(blank).hexdigest().encode() == found[1]
    if not is_right:
        raise Corrupted(
            f"checkpoint {name}: its file does not match its checksum",
            checkpoint=name,
            hint="Save it again, or delete it. If you edited the file, remove _version and _checksum from it",
        )
    for key in _OURS:
        plain.pop(key, None)
    try:
        checkpoint = Checkpoint.from_dict(plain)
    except DecodeError as error:
        raise StoreRefused(
            f"{name}.json is not a checkpoint: {error.what}", hint="It belongs to another program and stays as it is"
        ) from error
    if checkpoint.id != name:
        raise StoreRefused(
            f"{name}.json holds checkpoint {checkpoint.id!r}",
            hint=f"It was copied or renamed: rename it to {checkpoint.id}.json",
        )
    return checkpoint, found is not None


def starts_like_ours(data: bytes, name: str) -> bool:
    """Return whether the start of a damaged file shows that it was the file of this checkpoint."""
    return re.match(rb'\{\s*"id":\s*"%s"' % re.escape(name.encode()), data) is not None


# The directory ----------------------------------------------------------------------------------------------------

_SUFFIX = ".json"


class FileCheckpointStore(CheckpointStore):
    """A directory of checkpoint files. The first save creates it. Files are read and written in worker threads."""

    def __init__(self, base_path: str | os.PathLike[str]) -> None:
        self._files = Files(Path(base_path))

    async def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint. When this returns it survives a power failure; until then the old one is intact.

        Raises InvalidInput if the id cannot be a file name, EncodeError for values that JSON cannot hold, StoreRefused
        if a file of another program has that name, StoreError (StoreFull) if the system refuses.
        """
        plain = checkpoint.to_dict()
        name = check_safe(checkpoint.id, "checkpoint id")
        data = to_bytes(plain)
        await in_worker(lambda: self._files.write(name, data))

    async def load(self, id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if there is no such file.

        Raises StoreError if it cannot be read, DecodeError if it cannot be parsed, Corrupted if it fails its checksum,
        StoreRefused if it is not a checkpoint.
        """
        name = check_safe(id, "checkpoint id")
        return await in_worker(lambda: self._files.read(name))

    async def list(
        self, *, graph_name: str | None = None, run_id: str | None = None, limit: int | None = None
    ) -> Listed[CheckpointInfo]:
        """Return summaries, newest first. This reads whole files, because a checksum covers the whole file."""
        entries = await in_worker(self._files.scan)
        infos = [CheckpointInfo.of(entry.checkpoint) for entry in entries if entry.checkpoint is not None]
        problems = [entry.problem for entry in entries if entry.problem is not None]
        return selected(infos, problems, graph_name, run_id, limit)

    async def delete(self, id: str) -> int:
        """Delete a checkpoint, even a damaged one, and return how many were deleted. Refuses other programs' files."""
        name = check_safe(id, "checkpoint id")
        return await in_worker(lambda: self._files.delete(name))

    async def clear(self) -> int:
        """Delete all checkpoints, and damaged ones that are recognized as checkpoints; return how many were deleted.

        If some cannot be removed, the others are, and then StoreError names the first.
        """
        return await in_worker(self._files.clear)

    def __repr__(self) -> str:
        return f"<FileCheckpointStore {self._files.base}>"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file of the directory: its checkpoint, or its problem. A checkpoint without a checksum has both."""

    path: Path
    checkpoint: Checkpoint | None
    problem: Problem | None = None
    ours: bool = True


class Files:
    """The directory, with blocking calls."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._swept = False

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically; refuse to replace one of another program."""
        path = self._path(name)
        try:
            atomic.make_directory(self.base)
        except StoreError as error:
            raise _with_context(error, "Failed to create checkpoint dir") from error
        if not self._swept:
            self._sweep()
            self._swept = True
        self._check_place(path, name)
        try:
            atomic.write_whole(path, data)
        except StoreError as error:
            renaming = isinstance(error.__cause__, OSError) and error.__cause__.filename2 is not None
            doing = "Failed to rename checkpoint file" if renaming else "Failed to write temp checkpoint"
            raise _with_context(error, doing) from error

    def read(self, name: str) -> Checkpoint | None:
        """Return a checkpoint, or None if there is no such file."""
        data = _read(self._path(name))
        return None if data is None else from_bytes(data, name)[0]

    def scan(self) -> list[_Entry]:
        """Return all entries of the directory, by name."""
        try:
            names = sorted(os.listdir(self.base))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise atomic.failure(error, "list", self.base) from error
        return [entry for name in names if (entry := self._entry(name)) is not None]

    def delete(self, name: str) -> int:
        """Delete a checkpoint, even a damaged one, and return how many were deleted."""
        path = self._path(name)
        try:
            if self.read(name) is None:
                return 0
        except (Corrupted, DecodeError):
            pass  # a damaged file is deleted too
        return int(atomic.remove(path, sync=True))

    def clear(self) -> int:
        """Delete all checkpoints and leftovers, and return how many checkpoints were deleted."""
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
        with suppress(StoreError):  # lists report the files that cannot be removed now, as leftovers
            atomic.sweep(self.base)

    def _check_place(self, path: Path, name: str) -> None:
        """Refuse to replace a file that does not belong to this checkpoint."""
        if path.is_dir() and not path.is_symlink():
            return  # the system refuses to replace a directory, with a clear error
        data = _read(path)
        if not data:  # a crash of another program can leave an empty file
            return
        try:
            from_bytes(data, name)
        except StoreRefused:
            raise
        except BackstayError:
            if not starts_like_ours(data, name):
                raise StoreRefused(
                    f"{path} exists and is not a checkpoint",
                    path=str(path),
                    hint="It belongs to another program. Choose another id, or move the file",
                ) from None

    def _entry(self, name: str) -> _Entry | None:
        """Judge one name of the directory; return None for a file that has nothing to do with checkpoints."""
        path = self.base / name
        if name.startswith(atomic.PREFIX) or name.endswith(f"{_SUFFIX}.tmp"):
            what = "a temporary file: its writer died, or is still writing"
            return _Entry(path, None, Problem("leftover", name, what), ours=False)
        if name.endswith(".claim"):
            what = (
                "a later version of the system died while it resumed this checkpoint: rename it to <id>.json to use it"
            )
            return _Entry(path, None, Problem("leftover", name, what), ours=False)
        if not name.endswith(_SUFFIX) or name == _SUFFIX:
            return None
        checkpoint_id, data = name.removesuffix(_SUFFIX), b""
        try:
            if (read := _read(path)) is None:  # it was deleted just now
                return None
            data = read
            checkpoint, is_checked = from_bytes(data, check_safe(checkpoint_id, "checkpoint id"))
        except (StoreRefused, InvalidInput) as error:
            return _Entry(path, None, Problem("foreign", name, error.what), ours=False)
        except StoreError as error:
            return _Entry(path, None, Problem("unreadable", name, error.what), ours=False)
        except (Corrupted, DecodeError) as error:
            ours = isinstance(error, Corrupted) or starts_like_ours(data, checkpoint_id)
            return _Entry(path, None, Problem("damaged", name, error.what), ours)
        what = "it has no checksum: another program wrote it"
        return _Entry(path, checkpoint, None if is_checked else Problem("unchecked", name, what))


def _read(path: Path) -> bytes | None:
    """Return a regular file's bytes, or None if it does not exist."""
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, READ_FLAGS)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise atomic.failure(error, "read", path) from error


def _with_context(error: StoreError, doing: str) -> StoreError:
    """Return the same error with the operation that failed."""
    where: dict[str, Any] = {"path": error.path, "hint": error.hint}
    return type(error)(f"{doing}: {error.what}", **where)
