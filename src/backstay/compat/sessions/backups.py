"""Backups: copies of the newest checkpoints' files, each beside its own, so that their number means something.

A copy is made only of what is intact, and atomically: neither damage nor a crash ever takes the place of a good backup.
"""

from __future__ import annotations

from backstay.compat.sessions.folder import BACKUP, OLD_BACKUP, SessionFolder, read_file
from backstay.compat.sessions.order import Entry
from backstay.compat.sessions.stored import Stored, decode, read_stored
from backstay.errors import BackstayError
from backstay.store import atomic


def back_up(folder: SessionFolder, name: str) -> None:
    """Copy a checkpoint's file aside, unless that was done already; raise if it is not intact."""
    content = read_file(folder.checkpoints / name)
    if content is None or read_stored(folder, name) is None:
        return
    target = folder.checkpoints / (name + BACKUP)
    try:
        present = read_file(target)
    except BackstayError:  # whatever stands there is no backup of ours
        present = None
    if present != content:
        atomic.write_whole(target, content)


def prune_backups(folder: SessionFolder, entries: list[Entry], keep: int) -> int:
    """Remove all backups but those of the newest so many checkpoints that have one; return how many went."""
    names = [entry.name + BACKUP for entry in entries if entry.has_backup] + [OLD_BACKUP]
    return sum(atomic.remove(folder.checkpoints / name) for name in names[keep:])


def read_old_backup(folder: SessionFolder) -> Stored | None:
    """Return the older writer's backup, None if there is none; raise if it is not intact."""
    path = folder.checkpoints / OLD_BACKUP
    content = read_file(path)
    return None if content is None else decode(path, content)


def remove_old_backup(folder: SessionFolder, checkpoint_id: str | None) -> None:
    """Remove the older writer's backup if it is of this checkpoint, or whatever it is."""
    try:
        stored = read_old_backup(folder)
    except BackstayError:  # damaged: it can bring nothing back
        stored = None
    if checkpoint_id is None or (stored is not None and stored.data.checkpoint_id == checkpoint_id):
        atomic.remove(folder.checkpoints / OLD_BACKUP)
