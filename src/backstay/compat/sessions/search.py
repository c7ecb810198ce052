"""Finding the newest checkpoint that is intact, and saying what was passed over on the way.

From the newest on, each checkpoint's file is tried and then its backup. Nothing is passed over silently: not what is
damaged, not what has a place in the order that cannot be read, not a ``latest.json`` that names something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from backstay.compat.sessions.backups import read_old_backup
from backstay.compat.sessions.data import CheckpointData
from backstay.compat.sessions.folder import BACKUP, LATEST, OLD_BACKUP, SessionFolder
from backstay.compat.sessions.latest import linked_name
from backstay.compat.sessions.order import Entry, Index
from backstay.compat.sessions.report import RecoveryReport, Skipped
from backstay.compat.sessions.stored import Stored, read_stored
from backstay.errors import BackstayError

LOOKS_MAX = 20
"""How often the directory is looked at again because it changed meanwhile."""


@dataclass(slots=True)
class _Walk:
    """One way through the checkpoints, newest first."""

    folder: SessionFolder
    skipped: list[Skipped] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    vanished: bool = False

    def first_intact(self, entries: list[Entry]) -> tuple[Entry, Stored] | None:
        for entry in entries:
            stored = self.attempt(entry.name) if entry.has_file else None
            if stored is None and entry.has_backup:
                stored = self.attempt(entry.name + BACKUP)
            if stored is not None:
                return entry, stored
        return None

    def attempt(self, name: str) -> Stored | None:
        """Return a file if it is intact; else note why not."""
        self.tried.add(name)
        try:
            stored = read_stored(self.folder, name)
        except BackstayError as error:
            self.skipped.append(Skipped(name, error.what))
            return None
        self.vanished = self.vanished or stored is None
        return stored


def newest_intact(index: Index) -> RecoveryReport[CheckpointData]:
    """Return the newest intact checkpoint of a session, with all that is wrong with newer ones."""
    folder = index.folder
    for _ in range(LOOKS_MAX):
        names = folder.names()
        linked, oddity = linked_name(folder, names)
        entries = index.entries(names, linked)
        walk = _Walk(folder)
        found = walk.first_intact(entries)
        is_newer = linked is not None and linked not in names  # saved since the directory was listed
        if not is_newer and (found is not None or not walk.vanished):
            break
    notes = [] if oddity is None else [oddity]
    if found is None:
        stored = _last_resort(walk) if OLD_BACKUP in names else None
        return _report(walk, stored, True, notes)
    entry, stored = found
    _look_beside(walk, [other for other in entries if not other.place.is_known and other.has_file])
    if linked is not None and linked != entry.name and linked not in walk.tried:
        _look_at_linked(walk, linked, entry, notes)
    return _report(walk, stored, stored.path.name.endswith(BACKUP), notes)


def _look_at_linked(walk: _Walk, linked: str, entry: Entry, notes: list[str]) -> None:
    """Say what is the matter with a file that ``latest.json`` names and that is not the newest by its number."""
    stored = walk.attempt(linked)
    if stored is None:
        return
    if stored.seq is None:
        why = f"the older writer saved it and gave it no number: it may be newer than {entry.name}"
        walk.skipped.append(Skipped(linked, why))
    else:  # a save is just under way, or could not replace the link
        notes.append(f"{LATEST} names {linked}, but {entry.name} is newer by its number")


def _look_beside(walk: _Walk, unknown: list[Entry]) -> None:
    """Try the files whose place cannot be read: one of them may be the newest, and damaged."""
    for entry in unknown:
        if entry.name not in walk.tried:
            walk.attempt(entry.name)


def _last_resort(walk: _Walk) -> Stored | None:
    try:
        stored = read_old_backup(walk.folder)
    except BackstayError as error:
        walk.skipped.append(Skipped(OLD_BACKUP, error.what))
        return None
    if stored is not None and stored.data.session_id != walk.folder.session:
        walk.skipped.append(Skipped(OLD_BACKUP, f"belongs to session {stored.data.session_id!r}"))
        return None
    return stored


def _report(walk: _Walk, stored: Stored | None, backup: bool, notes: list[str]) -> RecoveryReport[CheckpointData]:
    data: CheckpointData | None = None if stored is None else stored.data
    path: Path | None = None if stored is None else stored.path
    return RecoveryReport(
        walk.folder.session, data, path, stored is not None and backup, tuple(walk.skipped), tuple(notes)
    )
