"""One stored file: from bytes to a record that is known to be whole, and back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from backstay.compat.sessions.canonical import Number, Tree, canonical, parse, plain, pretty, to_tree
from backstay.compat.sessions.checksum import (
    CHECKSUM_FIELD,
    ChecksumUtils,
    Verdict,
    find_problem,
    is_of_another_version,
)
from backstay.compat.sessions.data import CheckpointData, CheckpointMeta
from backstay.compat.sessions.folder import BACKUP, LATEST, SessionFolder, id_in, read_file
from backstay.errors import Corrupted, DecodeError, StoreRefused

SEQ_FIELD = "_seq"
"""The place in the session's order. The older reader ignores it, and its checksum covers it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that was found intact."""

    path: Path
    seq: int | None
    checksum: str
    data: CheckpointData
    tree: dict[str, Tree]

    @property
    def content(self) -> str:
        """Return what must be equal if it is to be the same checkpoint: all but order, checksum and version."""
        return canonical({key: item for key, item in self.tree.items() if not key.startswith("_")})

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


def to_record(data: CheckpointData) -> dict[str, Tree]:
    """Return a copy of a record as JSON; raise EncodeError, naming the place, for what JSON cannot give back."""
    return {name: to_tree(value, name, depth=2) for name, value in data.to_dict().items()}


def encode(record: dict[str, Tree], seq: int) -> bytes:
    """Return the file of a record."""
    return pretty(ChecksumUtils.add_checksum({**record, SEQ_FIELD: Number(str(seq))})).encode()


def read_stored(folder: SessionFolder, name: str) -> Stored | None:
    """Return a checkpoint's file or backup if it is intact, None if it is not there; else raise what is wrong."""
    path = folder.checkpoints / name
    content = read_file(path)
    if content is None:
        return None
    try:
        stored = decode(path, content)
    except DecodeError as error:
        raise Corrupted(f"{path.name} {error.what}", path=str(path)) from error
    _check_place(stored, folder, name)
    return stored


def decode(path: Path, content: bytes) -> Stored:
    """Return the record in a file's bytes."""
    tree = parse(content)
    problem = find_problem(tree)
    if problem is not None:
        if is_of_another_version(tree):
            raise StoreRefused(
                f"{path.name} is in another layout: {problem}",
                path=str(path),
                hint="Read it with the version that wrote it; if no other version did, it is damaged",
            )
        raise Corrupted(f"{path.name}: {problem}", path=str(path))
    record = plain(tree)
    seq = record.get(SEQ_FIELD)
    if seq is not None and (type(seq) is not int or seq < 1):
        raise DecodeError(f"has a {SEQ_FIELD} that is no place in an order")
    return Stored(path, seq, record[CHECKSUM_FIELD], CheckpointData.from_dict(record), tree)


def _check_place(stored: Stored, folder: SessionFolder, name: str) -> None:
    """Refuse a file that was renamed or moved: what it holds is not what its name says."""
    data = stored.data
    if data.checkpoint_id != id_in(name.removesuffix(BACKUP)) or data.session_id != folder.session:
        raise Corrupted(
            f"{name} holds checkpoint {data.checkpoint_id!r} of session {data.session_id!r}", path=str(stored.path)
        )


def verdict_on(path: Path) -> Verdict:
    """Tell whether the file at a path is intact; a file that cannot be read is an error, because nobody can tell."""
    if path.name == LATEST and path.is_symlink() and id_in(os.readlink(path)):
        path = path.with_name(os.readlink(path))
    content = read_file(path)
    if content is None:
        return Verdict(False, "it is not there")
    try:
        problem = find_problem(parse(content))
    except DecodeError as error:
        problem = f"it {error.what}"
    return Verdict(problem is None, problem)
