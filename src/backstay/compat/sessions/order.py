"""The order of a session's checkpoints, their backups, and the newest one that is intact.

A number inside each file decides which one is newer; clocks, file dates and names do not. Every save writes the next
number. Reading all files completely to find the newest would be slow, so the number is read from the first lines of
each file and remembered; the file that is then used is verified completely, including its number.

The older program writes no numbers, and may write between two of our saves. So each save first gives a number to every
file without one, and keeps these numbers in ``order.json``, before it writes its own file with the next number. A file
that has no number there appeared since: it is newer than all others. Among such files, ``latest.json`` names the
newest, and ``created_at`` orders the others.

A file of ours also says which ``order.json`` it relies on. If that is gone, the order of the older program's files is
unknown: they count as older, and if ``latest.json`` names one of them, loading the newest is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from backstay.compat.sessions import files
from backstay.compat.sessions.checkpoint import CheckpointData, CheckpointMeta, FieldReader, moment_text
from backstay.compat.sessions.checksum import (
    CHECKSUM_FIELD,
    ChecksumUtils,
    find_problem,
    parse,
    plain,
    pretty,
    to_tree,
)
from backstay.compat.sessions.files import (
    BACKUP,
    LATEST,
    OLD_BACKUP,
    ORDER,
    ORDER_FIELD,
    SEQ_FIELD,
    SessionFolder,
    Stored,
)
from backstay.errors import BackstayError, DecodeError, StoreRefused
from backstay.store import atomic

# Reports about sessions: skipped checkpoints, scans of a directory, and interrupted sessions.


T_co = TypeVar("T_co", covariant=True)


class Skipped(NamedTuple):
    """Something that was skipped, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return self.why if self.why.startswith(self.what) else f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class RecoveryReport(Generic[T_co]):
    """The newest intact checkpoint, and the newer ones that are damaged. It is true if there is an intact one.

    ``notes`` holds other remarks, for example about a ``latest.json`` that names another checkpoint.
    """

    session_id: str
    data: T_co | None = None
    path: Path | None = None  # of a session directory; None in a store
    from_backup: bool = False
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.data is not None

    def __str__(self) -> str:
        if self.data is None:
            found = f"session {self.session_id!r}: no intact checkpoint"
        else:
            identity = getattr(self.data, "checkpoint_id", None) or getattr(self.data, "id", "")
            found = f"session {self.session_id!r}: checkpoint {str(identity)!r}"
        lines = [found + (" from its backup" if self.from_backup else "")]
        lines += [f"  skipped {item}" for item in self.skipped]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Scan:
    """The content of a session's directory: intact checkpoints, newest first, damaged files, and leftovers."""

    good: tuple[CheckpointMeta, ...] = ()
    damaged: tuple[Skipped, ...] = ()
    leftovers: tuple[str, ...] = ()
    backups: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedSession:
    """A session whose process died before it gave a reason for its end."""

    session_id: str
    last_iteration: int
    last_activity: datetime
    task_description: str | None = None
    owner: str | None = None
    resume_hint: str = ""

    def __str__(self) -> str:
        task = f" ({self.task_description!r})" if self.task_description else ""
        owner = f", run by {self.owner!r}" if self.owner else ""
        seen = self.last_activity.isoformat(sep=" ", timespec="seconds")
        hint = f". {self.resume_hint}" if self.resume_hint else ""
        return f"session {self.session_id!r}{task}: iteration {self.last_iteration}, last active {seen}{owner}{hint}"


def render(sessions: Iterable[InterruptedSession]) -> str:
    """Return the sessions as text, one per line, with how to resume each."""
    lines = [f"  {number}. {session}" for number, session in enumerate(sessions, 1)]
    if not lines:
        return "No session was interrupted"
    return "\n".join([f"{len(lines)} interrupted {'session' if len(lines) == 1 else 'sessions'}:", *lines])


_HEAD = re.compile(
    rb'\A\{\s*"_checksum":\s*"([0-9a-f]{64})",\s*(?:"_order":\s*([0-9]{1,18}),\s*)?"_seq":\s*([0-9]{1,18}),'
)
_HEAD_BYTES = 256


class Head(NamedTuple):
    """The place of a file as it states it. The older program's files have no number."""

    seq: int | None
    checksum: str
    order: int = 0  # the ``order.json`` that it relies on
    created_at: str = ""


_UNREADABLE, _UNKNOWN, _NUMBERED, _APPEARED = range(4)


class OrderKey(NamedTuple):
    """The place of a file in the order; the greater is newer."""

    rank: int = _UNREADABLE
    seq: int = 0
    linked: bool = False
    created_at: str = ""


class Entry(NamedTuple):
    """A checkpoint: its file, its backup, or both. The greater is newer."""

    place: OrderKey
    name: str  # of the file
    checkpoint_id: str
    has_file: bool
    has_backup: bool
    checksum: str = ""  # as the file states it

    @property
    def files(self) -> list[str]:
        """Return the names of its file and its backup, as far as they exist."""
        exists = {self.name: self.has_file, self.name + BACKUP: self.has_backup}
        return [name for name in exists if exists[name]]


class Order(NamedTuple):
    """The numbers of the older program's files, and the number of the save that wrote them."""

    last: int = 0
    # By name: the number, and the checksum of the file meant; "" if it could not be read at the time.
    files: dict[str, tuple[int, str]] = {}

    def place(self, name: str, head: Head | None, otherwise: int, linked: bool) -> OrderKey:
        """Return the place of a file; ``otherwise`` is its rank if it has no number."""
        if head is None:
            return OrderKey()
        if head.seq is not None:
            return OrderKey(_NUMBERED, head.seq)
        seq, checksum = self.files.get(name, (0, None))
        if checksum in (head.checksum, ""):
            return OrderKey(_NUMBERED, seq, created_at=head.created_at)
        return OrderKey(otherwise, 0, linked, head.created_at)


class Look(NamedTuple):
    """The content of a session's directory at one time."""

    names: list[str]
    entries: list[Entry]  # newest first
    linked: str | None  # the file that ``latest.json`` names
    warnings: tuple[str, ...]  # what is wrong with other files than checkpoints
    order: Order


_Stamp = tuple[int, int, int]
_Known = tuple[_Stamp, Head | None]


def _stamp(path: str) -> _Stamp:
    """Return what changes whenever a file does."""
    status = os.lstat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


class Index:
    """The order of one session's files. A file is read once, and again only if it changes."""

    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        self._prefix = f"{folder.checkpoints}{os.sep}"
        self._known: dict[str, _Known] = {}
        self._order: tuple[_Stamp | None, Order, str | None] = (None, Order(), None)

    def look(self) -> Look:
        """List the directory; it may not exist."""
        names = self.folder.names() if self.folder.exists() else []
        linked, warning = files.linked_name(self.folder, names)
        warnings = [] if warning is None else [warning]
        present: dict[str, str] = {}
        backups: dict[str, str] = {}
        # A new table replaces the old one in one step, because other threads may be reading it.
        known: dict[str, _Known] = {}
        for name in names:
            file = name.removesuffix(BACKUP)
            checkpoint_id = files.id_in(file)
            if checkpoint_id is None:
                if file.startswith("cp_") and file.endswith(".json"):
                    warnings.append(f"{name} is not named like a checkpoint and is ignored")
                continue
            (present if file == name else backups)[file] = checkpoint_id
            with contextlib.suppress(OSError):  # the file was deleted
                stamp = _stamp(self._prefix + name)
                before = self._known.get(name)
                unchanged = before is not None and before[0] == stamp
                known[name] = before if unchanged and before else (stamp, self._read(name))
        self._known = known
        # The file decides, or its backup if the file cannot be read.
        heads = {
            name: next((known[each][1] for each in (name, name + BACKUP) if each in known and known[each][1]), None)
            for name in {**backups, **present}
        }
        order, is_lost = Order(), False
        if any(head is None or head.seq is None for head in heads.values()):
            # Read after the other files, it is at least as new as each of them.
            order, problem = self._read_order()
            is_lost = self._is_lost(heads, order)
            if is_lost and problem is None:
                problem = f"{ORDER} is missing, or older than the newest checkpoint"
            if problem is not None:
                warnings.append(problem)
        found = []
        for name, head in heads.items():
            place = order.place(name, head, _UNKNOWN if is_lost else _APPEARED, name == linked)
            checkpoint_id = present.get(name) or backups[name]
            checksum = "" if head is None else head.checksum
            found.append(Entry(place, name, checkpoint_id, name in present, name in backups, checksum))
        found.sort(reverse=True)
        return Look(names, found, linked, tuple(warnings), order)

    def _read(self, name: str) -> Head | None:
        path = self.folder.checkpoints / name
        with contextlib.suppress(BackstayError):  # loading the file reports the problem
            head = _HEAD.match(files.read_file(path, _HEAD_BYTES) or b"")
            if head is not None:
                return Head(int(head[3]), head[1].decode(), int(head[2] or 0))
            tree = parse(files.read_file(path) or b"")  # another layout than ours
            if isinstance(tree, dict):
                checksum = str(tree.get(CHECKSUM_FIELD))
                seq, order = (plain(tree.get(field)) for field in (SEQ_FIELD, ORDER_FIELD))
                if type(seq) is int:
                    return Head(seq, checksum, order if type(order) is int else 0)
                return Head(None, checksum, created_at=moment_text(FieldReader(tree).moment("created_at")))
        return None

    def _read_order(self) -> tuple[Order, str | None]:
        """Return the numbers in ``order.json``, and what is wrong with it."""
        stamp: _Stamp | None = None
        with contextlib.suppress(FileNotFoundError):
            stamp = _stamp(self._prefix + ORDER)
        known = self._order  # other threads may replace it
        if known[0] == stamp:
            return known[1:]
        order, problem = Order(), None
        content = files.read_file(self.folder.checkpoints / ORDER)
        try:
            if content is not None:
                tree = parse(content)
                damage = find_problem(tree)
                if damage is not None:
                    raise DecodeError(damage)
                record = FieldReader(plain(tree))
                numbers = {
                    str(name): (FieldReader(each).of("seq", int), FieldReader(each).of("checksum", str))
                    for name, each in dict(record.value("files")).items()
                }
                order = Order(record.of("last", int), numbers)
        except (DecodeError, TypeError, ValueError) as error:
            problem = f"{ORDER} cannot be used: {error}"
        self._order = stamp, order, problem
        return order, problem

    def _is_lost(self, heads: dict[str, Head | None], order: Order) -> bool:
        """Return whether the newest checkpoint of ours relies on an ``order.json`` that is gone."""
        ours = [(head.seq, name, head.order) for name, head in heads.items() if head and head.seq is not None]
        for _, name, needed in sorted(ours, reverse=True):
            if needed <= order.last:
                return False
            for each in (name, name + BACKUP):  # a damaged file does not count
                with contextlib.suppress(BackstayError):
                    if files.read_stored(self.folder, each) is not None:
                        return True
        return False


def numbered(name: str, checkpoint_id: str, seq: int) -> Entry:
    """Return the entry of a checkpoint that was just written."""
    return Entry(OrderKey(_NUMBERED, seq), name, checkpoint_id, has_file=True, has_backup=False)


def number_older(folder: SessionFolder, look: Look) -> tuple[int, int]:
    """Give each file that has no number one that is lower than that of the next save, and store these numbers.

    Return the number of the next save, and the ``order.json`` that it relies on.
    """
    newest, oldest = (look.entries[end].place if look.entries else OrderKey(_NUMBERED) for end in (0, -1))
    if newest.rank == oldest.rank == _NUMBERED:  # all have a number
        return newest.seq + 1, look.order.last
    seq = max((entry.place.seq for entry in look.entries), default=0)
    present = {entry.name for entry in look.entries}
    numbers = {name: number for name, number in look.order.files.items() if name in present}
    new = [entry for entry in reversed(look.entries) if entry.place.rank in (_UNKNOWN, _APPEARED)]
    for entry in new:
        seq += entry.place.rank == _APPEARED
        # A file whose place is unknown counts as older than all that have a number.
        numbers[entry.name] = (seq if entry.place.rank == _APPEARED else 0, entry.checksum)
    for entry in look.entries:
        if entry.place.rank == _UNREADABLE and entry.name not in numbers:  # it must not appear to be new later
            numbers[entry.name] = (0, "")
            new.append(entry)
    seq += 1
    if not new:
        return seq, look.order.last
    record = {
        "last": seq,
        "files": {name: {"seq": number, "checksum": checksum} for name, (number, checksum) in numbers.items()},
    }
    content = pretty(to_tree(ChecksumUtils.add_checksum(record), ORDER)).encode()
    atomic.write_whole(folder.checkpoints / ORDER, content)
    return seq, seq


# Backups ----------------------------------------------------------------------------------------------------------
#
# A backup is a copy of one checkpoint's file. Only intact files are copied, and atomically: neither damage nor a crash
# ever replaces a good backup.


def back_up(folder: SessionFolder, name: str) -> None:
    """Copy a checkpoint's file to its backup, unless that is up to date; raise an error if the file is damaged."""
    content = files.read_file(folder.checkpoints / name)
    if content is None or files.read_stored(folder, name) is None:
        return
    target = folder.checkpoints / (name + BACKUP)
    try:
        present = files.read_file(target)
    except BackstayError:  # not a regular file
        present = None
    if present != content:
        atomic.write_whole(target, content)


def prune_backups(folder: SessionFolder, entries: list[Entry], keep: int) -> int:
    """Remove all backups except the newest ``keep``; return how many were removed."""
    names = [entry.name + BACKUP for entry in entries if entry.has_backup] + [OLD_BACKUP]
    return sum(atomic.remove(folder.checkpoints / name) for name in names[keep:])


def read_old_backup(folder: SessionFolder) -> Stored | None:
    """Return the older writer's backup, None if there is none; raise an error if it is damaged."""
    path = folder.checkpoints / OLD_BACKUP
    content = files.read_file(path)
    return None if content is None else files.decode(path, content)


def remove_old_backup(folder: SessionFolder, checkpoint_id: str | None) -> None:
    """Remove the older writer's backup if it holds this checkpoint; with None in any case."""
    try:
        stored = read_old_backup(folder)
    except BackstayError:  # damaged, so no checkpoint can be restored from it
        stored = None
    if checkpoint_id is None or (stored is not None and stored.data.checkpoint_id == checkpoint_id):
        atomic.remove(folder.checkpoints / OLD_BACKUP)


# The newest intact checkpoint -------------------------------------------------------------------------------------
#
# Starting with the newest, each checkpoint's file is tried and then its backup. Nothing is skipped silently: the report
# names damaged files, files whose place in the order is unknown, and a ``latest.json`` that names another checkpoint.

LOOKS_MAX = 20
"""How often the directory is listed again because it changed meanwhile."""


class _Attempts:
    """The files that were tried in one pass through the checkpoints, and those that were skipped."""

    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        self.skipped: list[Skipped] = []
        self.tried: set[str] = set()
        self.vanished = False

    def read(self, name: str) -> Stored | None:
        """Return a file if it is intact; otherwise record why it is skipped."""
        self.tried.add(name)
        try:
            stored = read_old_backup(self.folder) if name == OLD_BACKUP else files.read_stored(self.folder, name)
        except BackstayError as error:
            self.skipped.append(Skipped(name, error.what))
            return None
        self.vanished = self.vanished or stored is None
        return stored

    def read_others(self, look: Look, newest: Entry) -> list[str]:
        """Look at files that may be newer than the newest intact one; return remarks about ``latest.json``."""
        for entry in look.entries:  # a file whose place cannot be read may be the newest, and damaged
            if entry.place.rank == _UNREADABLE and entry.has_file and entry.name not in self.tried:
                self.read(entry.name)
        linked = look.linked
        if linked is None or linked == newest.name or linked in self.tried:
            return []
        stored = self.read(linked)
        if stored is None:
            return []
        return [f"{LATEST} names {linked}, but {newest.name} is newer"]  # a save is in progress, or was killed


def newest_intact(index: Index) -> RecoveryReport[CheckpointData]:
    """Return the newest intact checkpoint of a session, and what is wrong with newer ones.

    Raise StoreRefused if the older program may have saved a newer one, and its place is unknown.
    """
    folder = index.folder
    for _ in range(LOOKS_MAX):
        look = index.look()
        attempts = _Attempts(folder)
        found = ((entry, attempts.read(name)) for entry in look.entries for name in entry.files)
        newest, stored = next(((entry, stored) for entry, stored in found if stored is not None), (None, None))
        is_newer = look.linked is not None and look.linked not in look.names  # saved since the directory was listed
        if not is_newer and (stored is not None or not attempts.vanished):
            break
    unknown = next((each for each in look.entries if each.name == look.linked and each.place.rank == _UNKNOWN), None)
    if newest is not None and unknown is not None and newest is not unknown:
        raise StoreRefused(
            f"session {folder.session!r}: {LATEST} names {unknown.name}, and {ORDER}, which says whether that is newer"
            f" than {newest.name}, is missing or damaged",
            path=str(folder.checkpoints / ORDER),
            thread=folder.session,
            hint=f"Restore {ORDER}, or load the checkpoint that you want by its id and save the session again",
        )
    notes = [*look.warnings]
    if newest is not None:
        notes += attempts.read_others(look, newest)
    elif OLD_BACKUP in look.names:
        stored = attempts.read(OLD_BACKUP)
        if stored is not None and stored.data.session_id != folder.session:
            attempts.skipped.append(Skipped(OLD_BACKUP, f"belongs to session {stored.data.session_id!r}"))
            stored = None
    skipped = tuple(attempts.skipped)
    if stored is None:
        return RecoveryReport(folder.session, skipped=skipped, notes=tuple(notes))
    is_backup = stored.path.name.endswith(BACKUP)
    return RecoveryReport(folder.session, stored.data, stored.path, is_backup, skipped, tuple(notes))
