"""``SyncCheckpointWriter``: checkpoints of sessions as JSON files that a person can read, for callers without a loop.

A save is done when the checkpoint's own file is on the disk. What comes after it (``latest.json``, backups, pruning,
the session's record) may fail without harm: no reader depends on it. Such a failure is never hidden either; it is in
``problems`` and in the log.

Writers of one session, in threads and processes, take turns by a lock. Readers need none: a file that has a name is
whole and never changes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from backstay.compat.sessions import state
from backstay.compat.sessions.atomic import AtomicFileWriter
from backstay.compat.sessions.backups import back_up, prune_backups, remove_old_backup
from backstay.compat.sessions.canonical import Tree, canonical
from backstay.compat.sessions.checksum import Verdict
from backstay.compat.sessions.data import CheckpointData, CheckpointMeta, utc_now
from backstay.compat.sessions.folder import (
    BACKUP,
    LATEST,
    SessionFolder,
    file_name,
    leftovers_among,
)
from backstay.compat.sessions.ids import CheckpointId, check_safe, check_twins
from backstay.compat.sessions.latest import linked_name, point_latest
from backstay.compat.sessions.order import Entry, Index, next_seq, numbered
from backstay.compat.sessions.report import Diary, RecoveryReport, Scan, Skipped
from backstay.compat.sessions.search import newest_intact
from backstay.compat.sessions.stored import encode, read_stored, to_record, verdict_on
from backstay.compat.sessions.summary import SessionSummary, summarize
from backstay.errors import BackstayError, Corrupted, IdTaken, InvalidInput
from backstay.model.usage import check_count
from backstay.store import atomic

DEFAULT_ROOT = "~/.backstay/sessions"
BACKUPS_MAX = 3
LOCK_TIMEOUT_S = 30.0

Entries = list[Entry]
Metas = list[CheckpointMeta]
Names = list[str]
Problems = list[Skipped]
"""Named here because inside the class ``list`` is a method."""

_log = logging.getLogger("backstay.compat.sessions")


class SyncCheckpointWriter:
    """Saves and loads checkpoints of sessions below a directory, which need not be there yet.

    ``max_backups``: how many of the newest checkpoints have a backup. ``max_checkpoints``: how many a session keeps;
    None keeps all. ``links``: whether ``latest.json`` is a symbolic link; if not, a copy.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str] = DEFAULT_ROOT,
        *,
        max_backups: int = BACKUPS_MAX,
        max_checkpoints: int | None = None,
        links: bool = sys.platform != "win32",
        lock_timeout: float = LOCK_TIMEOUT_S,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.storage_path = Path(storage_path).expanduser()
        self.max_backups = check_count(max_backups, "max_backups")
        self.max_checkpoints = max_checkpoints
        if max_checkpoints is not None:
            check_count(max_checkpoints, "max_checkpoints", least=1)
        self.atomic_writer = AtomicFileWriter()
        self._links = links
        self._lock_timeout = lock_timeout
        self._clock = clock
        self._diary = Diary()
        self._indexes: dict[str, Index] = {}
        self._made: set[str] = set()

    def with_max_backups(self, most: int) -> SyncCheckpointWriter:
        """Set how many of the newest checkpoints have a backup; return this writer."""
        self.max_backups = check_count(most, "max_backups")
        return self

    def with_max_checkpoints(self, most: int | None) -> SyncCheckpointWriter:
        """Set how many checkpoints a session keeps, None for all; return this writer."""
        self.max_checkpoints = None if most is None else check_count(most, "max_checkpoints", least=1)
        return self

    @property
    def problems(self) -> Problems:
        """Return the last things that went wrong without making a call fail, oldest first."""
        return list(self._diary.entries)

    # Writing ------------------------------------------------------------------------------------------------------

    def save(self, data: CheckpointData) -> CheckpointId:
        """Save a checkpoint and return its id. Again with the same content: nothing more; with other: IdTaken."""
        if not isinstance(data, CheckpointData):
            raise InvalidInput(f"save needs a CheckpointData, not {type(data).__name__}")
        data.check()
        record = to_record(data)
        index = self._index(data.session_id)
        folder = index.folder
        if folder.session not in self._made or not folder.exists():
            folder.make()
            self._made.add(folder.session)
        with folder.locked(self._lock_timeout):
            names, entries = self._look(index)
            if leftovers_among(names):
                self._try("clean up after a crash", folder.sweep)
            present = next((entry for entry in entries if entry.checkpoint_id == data.checkpoint_id), None)
            if present is None:
                self._add(index, entries, data, record)
            else:
                self._compare(folder, present, record)
                newest = next(entry.name for entry in entries if entry.has_file or entry is present)
                if linked_name(folder, names)[0] != newest:  # a writer died, or failed, before it could say so
                    self._try(f"update {LATEST}", lambda: point_latest(folder, newest, link=self._links))
        return CheckpointId(data.checkpoint_id)

    def delete(self, session_id: str, checkpoint_id: str) -> bool:
        """Delete a checkpoint with all its copies; return whether there was one."""
        wanted = check_safe(checkpoint_id, "checkpoint_id")
        index = self._index(session_id)
        if not index.folder.exists():
            return False
        with index.folder.locked(self._lock_timeout):
            _, entries = self._look(index)
            gone = [entry for entry in entries if entry.checkpoint_id == wanted]
            remove_old_backup(index.folder, wanted)
            # Also if it is gone already: whoever deleted it may have died before that was on the disk.
            self._remove(index.folder, gone, [entry for entry in entries if entry.checkpoint_id != wanted])
        return bool(gone)

    def clear_session(self, session_id: str) -> int:
        """Delete all checkpoints of a session; return how many there were."""
        index = self._index(session_id)
        if not index.folder.exists():
            return 0
        with index.folder.locked(self._lock_timeout):
            _, entries = self._look(index)
            remove_old_backup(index.folder, None)
            self._remove(index.folder, entries, [])
            index.folder.sweep()
        return len(entries)

    # Reading ------------------------------------------------------------------------------------------------------

    def load(self, session_id: str, checkpoint_id: str | None = None) -> CheckpointData | None:
        """Return a checkpoint, or None if there is none. A damaged one that is asked for by its id is an error.

        Without an id it is the newest that is intact; ``load_report`` also says what was passed over for it. If there
        are checkpoints and none is intact, that is an error.
        """
        if checkpoint_id is not None:
            return self._load_one(session_id, check_safe(checkpoint_id, "checkpoint_id"))
        report = self.load_report(session_id)
        if report.data is None and report.skipped:
            raise Corrupted(
                f"session {session_id!r} has no intact checkpoint: " + "; ".join(map(str, report.skipped[:5])),
                thread=str(session_id),
                path=str(self._index(session_id).folder.checkpoints),
            )
        return report.data

    def load_latest(self, session_id: str) -> CheckpointData | None:
        """Return the newest checkpoint that is intact, or None if there is none."""
        return self.load(session_id)

    def load_report(self, session_id: str) -> RecoveryReport[CheckpointData]:
        """Return the newest checkpoint that is intact, with what was passed over for it and why."""
        index = self._index(session_id)
        if not index.folder.exists():
            return RecoveryReport(index.folder.session)
        report = newest_intact(index)
        self._note(report.skipped)
        return report

    def list(self, session_id: str) -> Metas:
        """Return summaries of the intact checkpoints, newest first; ``scan`` tells of the others too.

        Every file is read whole, because its checksum covers all of it.
        """
        scan = self.scan(session_id)
        self._note(scan.damaged)
        return [*scan.good]

    def scan(self, session_id: str) -> Scan:
        """Look at everything of a session and say what is intact, what is damaged and what is left over."""
        index = self._index(session_id)
        if not index.folder.exists():
            return Scan()
        names = index.folder.names()
        linked, oddity = linked_name(index.folder, names)
        good, damaged = [], []
        entries = index.entries(names, linked)
        for name in (name for entry in entries for name in _files_of(entry)):
            try:
                stored = read_stored(index.folder, name)
            except BackstayError as error:
                damaged.append(Skipped(name, error.what))
            else:
                if stored is not None and not name.endswith(BACKUP):
                    good.append(stored.meta)
        return Scan(
            good=tuple(good),
            damaged=tuple(damaged),
            leftovers=tuple(leftovers_among(names)),
            backups=tuple(entry.name + BACKUP for entry in entries if entry.has_backup),
            notes=() if oddity is None else (oddity,),
        )

    def has_checkpoints(self, session_id: str) -> bool:
        """Tell whether a session has any checkpoint, intact or not."""
        index = self._index(session_id)
        return index.folder.exists() and bool(self._look(index)[1])

    def summary(self, session_id: str) -> SessionSummary | None:
        """Return a session at a glance, None if there is no such session. Every file is read, as by ``list``."""
        folder = self._index(session_id).folder
        folder.refuse_links()
        scan = self.scan(session_id)
        newest = self.load(session_id) if scan.good else None
        return summarize(folder.session, state.read_meta(folder), scan.good, newest)

    def verify(self, path: str | os.PathLike[str]) -> Verdict:
        """Tell whether the file at a path is intact; the verdict is false with a reason if not.

        A file that is there and cannot be read raises StoreError: whether it is intact is not known.
        """
        return verdict_on(Path(path))

    # Parts of these -----------------------------------------------------------------------------------------------

    def _index(self, session_id: str) -> Index:
        folder = SessionFolder(self.storage_path, session_id)
        return self._indexes.setdefault(folder.session, Index(folder))

    def _look(self, index: Index) -> tuple[Names, Entries]:
        names = index.folder.names()
        return names, index.entries(names, linked_name(index.folder, names)[0])

    def _add(self, index: Index, entries: Entries, data: CheckpointData, record: dict[str, Tree]) -> None:
        folder = index.folder
        check_twins(data.checkpoint_id, {entry.checkpoint_id for entry in entries}, "checkpoint_id")
        if self.max_backups > 0:
            entries = self._with_backup(folder, entries)
        name, seq = file_name(data), next_seq(entries)
        self.atomic_writer.write_atomic(folder.checkpoints / name, encode(record, seq))
        self._try(f"update {LATEST}", lambda: point_latest(folder, name, link=self._links))
        entries = [numbered(name, data.checkpoint_id, seq), *entries]
        self._try("remove old backups", lambda: prune_backups(folder, entries, self.max_backups))
        self._try("remove old checkpoints", lambda: self._prune(folder, entries))
        self._try(f"update {state.META}", lambda: state.touch(folder, data.iteration, self._clock()))

    def _with_backup(self, folder: SessionFolder, entries: Entries) -> Entries:
        """Copy aside the newest checkpoint there is; return the entries as they are then."""
        place = next((place for place, entry in enumerate(entries) if entry.has_file), None)
        if place is None:
            return entries
        newest = entries[place]
        if self._try(f"back up {newest.name}", lambda: back_up(folder, newest.name)):
            return [*entries[:place], newest._replace(has_backup=True), *entries[place + 1 :]]
        return entries

    def _compare(self, folder: SessionFolder, present: Entry, record: dict[str, Tree]) -> None:
        """Accept a save that was done before; refuse one of other content."""
        name = _files_of(present)[0]
        stored = read_stored(folder, name)
        if stored is None or stored.content != canonical(record):
            raise IdTaken(
                f"checkpoint {present.checkpoint_id!r} exists with other content",
                thread=folder.session,
                checkpoint=present.checkpoint_id,
                hint="Checkpoints do not change: save it under a new id, or delete the other one first",
            )
        if not present.has_file:
            self.atomic_writer.write_atomic(folder.checkpoints / present.name, stored.path.read_bytes())
        # The writer of that file may have been killed, or told of an error, before its name was on the disk.
        atomic.sync_directory(folder.checkpoints)

    def _remove(self, folder: SessionFolder, gone: Entries, left: Entries) -> None:
        """Remove checkpoints: the reference first, then backups, so that a crash leaves each one whole or gone."""
        names = {entry.name for entry in gone}
        present = folder.names()
        linked, _ = linked_name(folder, present)
        if linked is None or linked in names:
            newest = next((entry.name for entry in left if entry.has_file), None)
            if newest is not None:
                self._try(f"update {LATEST}", lambda: point_latest(folder, newest, link=self._links))
            else:
                atomic.remove(folder.checkpoints / LATEST)
        for entry in gone:
            atomic.remove(folder.checkpoints / (entry.name + BACKUP))
            atomic.remove(folder.checkpoints / entry.name)
        atomic.sync_directory(folder.checkpoints)

    def _prune(self, folder: SessionFolder, entries: Entries) -> None:
        if self.max_checkpoints is not None and len(entries) > self.max_checkpoints:
            self._remove(folder, entries[self.max_checkpoints :], entries[: self.max_checkpoints])

    def _load_one(self, session_id: str, wanted: str) -> CheckpointData | None:
        index = self._index(session_id)
        if not index.folder.exists():
            return None
        _, entries = self._look(index)
        entry = next((entry for entry in entries if entry.checkpoint_id == wanted), None)
        if entry is None:
            return None
        name = _files_of(entry)[0]
        try:
            stored = read_stored(index.folder, name)
        except Corrupted as error:
            hint = "There is a backup beside it" if entry.has_backup else None
            raise Corrupted(
                error.what, thread=str(session_id), checkpoint=wanted, path=error.path, hint=hint
            ) from error
        if name.endswith(BACKUP):
            self._note([Skipped(entry.name, "is not there; its backup was taken")])
        return None if stored is None else stored.data

    def _try(self, what: str, function: Callable[[], object]) -> bool:
        """Do something whose failure does no harm; note it if it fails, and tell."""
        try:
            function()
        except (BackstayError, OSError) as error:
            self._note([Skipped(f"cannot {what}", str(error))])
            return False
        return True

    def _note(self, problems: Iterable[Skipped]) -> None:
        for problem in problems:
            if problem not in self._diary.entries:  # a damaged file is met again by every list
                _log.warning("%s", problem)
                self._diary.add(*problem)


def _files_of(entry: Entry) -> list[str]:
    """Return the names of a checkpoint's file and backup, as far as they are there."""
    backup = [entry.name + BACKUP] if entry.has_backup else []
    return [entry.name, *backup] if entry.has_file else backup
