"""Which checkpoint of a session is newer: told by a number inside the file, not by a clock, a file's date or a name.

Every save writes the next number. Reading all files whole to find the newest would cost too much, so the number is read
from the first line of each and remembered; the file that is then taken is checked whole, and the number with it.
Files of the older writer have none. They count as older than all that have, and among themselves go by their own
``created_at``; only there does it matter which one ``latest.json`` names.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from backstay.compat.sessions.canonical import Number, parse
from backstay.compat.sessions.data import FieldReader, moment_text
from backstay.compat.sessions.folder import BACKUP, SessionFolder, id_in, read_file
from backstay.compat.sessions.stored import SEQ_FIELD
from backstay.errors import BackstayError, DecodeError

_HEAD = re.compile(rb'\A\{\s*"_checksum":\s*"[0-9a-f]{64}",\s*"_seq":\s*([0-9]{1,18}),')
_HEAD_BYTES = 256

_UNREADABLE, _UNNUMBERED, _NUMBERED = range(3)


class Place(NamedTuple):
    """Where a file stands in the order; greater is newer."""

    rank: int = _UNREADABLE
    seq: int = 0
    linked: bool = False
    created_at: str = ""

    @property
    def is_known(self) -> bool:
        """Tell whether it could be read."""
        return self.rank != _UNREADABLE


class Entry(NamedTuple):
    """A checkpoint: its file, its backup, or both. The greater is newer."""

    place: Place
    name: str  # of the file
    checkpoint_id: str
    has_file: bool
    has_backup: bool


_Remembered = tuple[tuple[int, int, int], Place]


class Index:
    """The order of one session's files; what was read once is not read again while the file is the same."""

    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        self._prefix = f"{folder.checkpoints}{os.sep}"
        self._table: dict[str, _Remembered] = {}

    def entries(self, names: list[str], linked: str | None = None) -> list[Entry]:
        """Return the checkpoints among these names, newest first; ``linked`` is what ``latest.json`` names."""
        files: dict[str, str] = {}
        backups: dict[str, str] = {}
        # Built beside the old table and put in its place in one step: other threads may be reading it.
        table: dict[str, _Remembered] = {}
        for name in names:
            bare = name.removesuffix(BACKUP)
            checkpoint_id = id_in(bare)
            if checkpoint_id is not None:
                (files if bare == name else backups)[bare] = checkpoint_id
                self._remember(name, table)
        self._table = table
        found = []
        for name, checkpoint_id in {**backups, **files}.items():
            place = _place_of(name, table)
            if name == linked and place.rank == _UNNUMBERED:
                place = place._replace(linked=True)
            found.append(Entry(place, name, checkpoint_id, name in files, name in backups))
        found.sort(reverse=True)
        return found

    def _remember(self, name: str, table: dict[str, _Remembered]) -> None:
        with contextlib.suppress(OSError):  # it is gone
            status = os.lstat(self._prefix + name)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._table.get(name)
            table[name] = known if known is not None and known[0] == stamp else (stamp, self._read(name))

    def _read(self, name: str) -> Place:
        path = self.folder.checkpoints / name
        with contextlib.suppress(BackstayError):  # whoever wants the file itself will be told
            head = _HEAD.match(read_file(path, _HEAD_BYTES) or b"")
            if head is not None:
                return Place(_NUMBERED, int(head[1]))
            return _place_in(parse(read_file(path) or b""))
        return Place()


def _place_of(name: str, table: dict[str, _Remembered]) -> Place:
    """Return a checkpoint's place: its file's, or its backup's if that cannot be read."""
    for known in (name, name + BACKUP):
        if known in table and table[known][1].is_known:
            return table[known][1]
    return Place()


def _place_in(tree: object) -> Place:
    """Return the place of a file that is not laid out as we lay it out."""
    if not isinstance(tree, dict):
        raise DecodeError("is no object")
    seq = tree.get(SEQ_FIELD)
    if isinstance(seq, Number) and isinstance(seq.value, int):
        return Place(_NUMBERED, seq.value)
    return Place(_UNNUMBERED, created_at=moment_text(FieldReader(tree).moment("created_at")))


def numbered(name: str, checkpoint_id: str, seq: int) -> Entry:
    """Return the entry of a checkpoint that was just written."""
    return Entry(Place(_NUMBERED, seq), name, checkpoint_id, has_file=True, has_backup=False)


def next_seq(entries: list[Entry]) -> int:
    """Return the number of the next checkpoint."""
    return 1 + max((entry.place.seq for entry in entries), default=0)
