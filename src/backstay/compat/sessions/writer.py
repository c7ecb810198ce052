"""Save and load the checkpoints of sessions as JSON files: ``SyncCheckpointWriter``, and ``CheckpointWriter`` to await.

A save is complete when the checkpoint's own file is on the disk. The steps after it (``latest.json``, backups, pruning,
the session's record) may fail without harm, because no reader depends on them. Such a failure is not hidden: it is in
``problems`` and in the log.

Writers of one session, in threads and processes, take turns with a lock. Readers need none: a file under its final name
is complete and never changes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from backstay.compat.adapter import in_worker
from backstay.compat.sessions import checkpoint, files, order, state
from backstay.compat.sessions.checkpoint import CheckpointData, CheckpointId, CheckpointMeta, check_safe, check_twins
from backstay.compat.sessions.checksum import Tree, Verdict, find_problem, parse, to_tree
from backstay.compat.sessions.files import BACKUP, LATEST, ORDER, AtomicFileWriter, SessionFolder
from backstay.compat.sessions.order import Entry, Index, Look, RecoveryReport, Scan, Skipped
from backstay.compat.sessions.state import SessionSummary
from backstay.errors import BackstayError, Corrupted, DecodeError, IdTaken, InvalidInput
from backstay.model.ids import check_count
from backstay.store import atomic

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_ROOT = "~/.backstay/sessions"
BACKUPS_MAX = 3
PROBLEMS_MAX = 100  # a full disk stays full for a while
LOCK_TIMEOUT_S = 30.0

# These have names because inside the classes ``list`` is a method.
Entries = list[Entry]
Metas = list[CheckpointMeta]
Problems = list[Skipped]

_log = logging.getLogger("backstay.compat.sessions")


class OpenSession:
    """A locked session, with what is known of its files."""

    def __init__(self, index: Index, look: Look) -> None:
        self.index = index
        self.look = look
        self.saved = 0
        self.folded = {entry.checkpoint_id.casefold(): entry.checkpoint_id for entry in look.entries}


class SyncCheckpointWriter:
    """Saves and loads the checkpoints of sessions below a directory; the first save creates it.

    ``max_backups``: how many of the checkpoints before the newest have a backup. ``max_checkpoints``: how many a
    session keeps; None keeps all. ``links``: whether ``latest.json`` is a symbolic link; otherwise it is a copy.
    ``check_roles``: whether a save refuses messages other than objects with the role system, user, assistant or tool.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str] = DEFAULT_ROOT,
        *,
        max_backups: int = BACKUPS_MAX,
        max_checkpoints: int | None = None,
        links: bool = sys.platform != "win32",
        check_roles: bool = False,
        lock_timeout: float = LOCK_TIMEOUT_S,
        clock: Callable[[], datetime] = checkpoint.utc_now,
    ) -> None:
        self.storage_path = Path(storage_path).expanduser()
        self.with_max_backups(max_backups)
        self.with_max_checkpoints(max_checkpoints)
        self.atomic_writer = AtomicFileWriter()
        self._links = links
        self._check_roles = check_roles
        self._lock_timeout = lock_timeout
        self._clock = clock
        self._problems: deque[Skipped] = deque(maxlen=PROBLEMS_MAX)
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
        """Return the last problems that did not make a call fail, oldest first."""
        return list(self._problems)

    # Writing ------------------------------------------------------------------------------------------------------

    def save(self, data: CheckpointData) -> CheckpointId:
        """Save a checkpoint and return its id. Saving it again changes nothing; other content raises IdTaken."""
        record = self._checked(data)
        with self._opened(data.session_id) as session:
            self._save_into(session, data, record)
        return CheckpointId(data.checkpoint_id)

    def _checked(self, data: CheckpointData) -> dict[str, Tree]:
        """Return the content of a checkpoint's file; raise InvalidInput or EncodeError if it cannot be saved."""
        if not isinstance(data, CheckpointData):
            raise InvalidInput(f"save needs a CheckpointData, not {type(data).__name__}")
        data.check(roles=self._check_roles)
        return {name: to_tree(value, name, depth=2) for name, value in data.to_dict().items()}

    @contextlib.contextmanager
    def _opened(self, session_id: str) -> Iterator[OpenSession]:
        """Lock a session and look at its files once, to save several checkpoints; the first save creates it."""
        index = self._index(session_id)
        folder = index.folder
        if folder.session not in self._made or not folder.exists():
            folder.make()
            self._made.add(folder.session)
        with folder.locked(self._lock_timeout):
            session = OpenSession(index, index.look())
            if files.leftovers_among(session.look.names):
                self._try("clean up after a crash", folder.sweep)
            yield session

    def _save_into(self, session: OpenSession, data: CheckpointData, record: dict[str, Tree]) -> None:
        """Save a checkpoint, with its checked content, into its session."""
        folder, look = session.index.folder, session.look
        entries = look.entries
        present = next((entry for entry in entries if entry.checkpoint_id == data.checkpoint_id), None)
        if present is None:
            self._add(session, data, record)
            return
        self._compare(folder, present, data)
        newest = next(entry.name for entry in entries if entry.has_file or entry is present)
        linked, _ = files.linked_name(folder, look.names)
        if linked != newest:  # an earlier writer died or failed before this step
            self._try(f"update {LATEST}", lambda: files.point_latest(folder, newest, link=self._links))

    def _add(self, session: OpenSession, data: CheckpointData, record: dict[str, Tree]) -> None:
        folder, look = session.index.folder, session.look
        entries = look.entries
        check_twins(data.checkpoint_id, session.folded, "checkpoint_id")
        place = next((place for place, entry in enumerate(entries) if entry.has_file), None)
        if self.max_backups > 0 and place is not None:
            newest = entries[place]
            if self._try(f"back up {newest.name}", lambda: order.back_up(folder, newest.name)):
                entries = [*entries[:place], newest._replace(has_backup=True), *entries[place + 1 :]]
        name = files.file_name(data)
        seq, order_json = order.number_older(folder, look)
        self.atomic_writer.write_atomic(folder.checkpoints / name, files.encode(record, seq, order_json))
        # The checkpoint is saved. The steps that follow may fail without harm.
        self._try(f"update {LATEST}", lambda: files.point_latest(folder, name, link=self._links))
        entries = [order.numbered(name, data.checkpoint_id, seq), *entries]
        self._try("remove old backups", lambda: order.prune_backups(folder, entries, self.max_backups))
        most = self.max_checkpoints
        if most is not None and len(entries) > most:
            self._try("remove old checkpoints", lambda: self._remove(folder, entries[most:], entries[:most]))
            entries = entries[:most]
        self._try(f"update {state.META}", lambda: state.touch(folder, data.iteration, self._clock()))
        session.saved += 1
        session.folded[data.checkpoint_id.casefold()] = data.checkpoint_id
        if order_json == look.order.last:
            session.look = look._replace(entries=entries, names=[*look.names, name], linked=name)
        else:
            session.look = session.index.look()

    def _compare(self, folder: SessionFolder, present: Entry, data: CheckpointData) -> None:
        """Accept a checkpoint that was saved before; raise IdTaken if the content differs."""
        stored = files.read_stored(folder, present.files[0])
        # Values are compared, not texts: the older program's times have nanoseconds, and its numbers other formats.
        if stored is None or _text_of(stored.data) != _text_of(data):
            raise IdTaken(
                f"checkpoint {present.checkpoint_id!r} exists with other content",
                thread=folder.session,
                checkpoint=present.checkpoint_id,
                hint="Checkpoints do not change: save it under a new id, or delete the existing one first",
            )
        if not present.has_file:
            self.atomic_writer.write_atomic(folder.checkpoints / present.name, stored.path.read_bytes())
        # The writer of that file may have died, or failed, before its name was on the disk.
        atomic.sync_directory(folder.checkpoints)

    def delete(self, session_id: str, checkpoint_id: str) -> bool:
        """Delete a checkpoint with all its copies; return whether it existed."""
        index = self._index(session_id)
        wanted = self._wanted(index, checkpoint_id)
        if not index.folder.exists():
            return False
        with index.folder.locked(self._lock_timeout):
            entries = index.look().entries
            gone = [entry for entry in entries if entry.checkpoint_id == wanted]
            order.remove_old_backup(index.folder, wanted)
            # Also if it does not exist: a process that deleted it may have died before that was on the disk.
            self._remove(index.folder, gone, [entry for entry in entries if entry.checkpoint_id != wanted])
        return bool(gone)

    def clear_session(self, session_id: str) -> int:
        """Delete all checkpoints of a session; return how many there were."""
        index = self._index(session_id)
        if not index.folder.exists():
            return 0
        with index.folder.locked(self._lock_timeout):
            entries = index.look().entries
            order.remove_old_backup(index.folder, None)
            self._remove(index.folder, entries, [])
            atomic.remove(index.folder.checkpoints / ORDER)
            index.folder.sweep()
        return len(entries)

    def _remove(self, folder: SessionFolder, gone: Entries, left: Entries) -> None:
        """Remove checkpoints: the link, then backups, then files, so that a crash leaves each one complete or gone."""
        names = {entry.name for entry in gone}
        linked, _ = files.linked_name(folder, folder.names())
        if linked is None or linked in names:
            newest = next((entry.name for entry in left if entry.has_file), None)
            if newest is not None:
                self._try(f"update {LATEST}", lambda: files.point_latest(folder, newest, link=self._links))
            else:
                atomic.remove(folder.checkpoints / LATEST)
        for entry in gone:
            atomic.remove(folder.checkpoints / (entry.name + BACKUP))
            atomic.remove(folder.checkpoints / entry.name)
        atomic.sync_directory(folder.checkpoints)

    # Reading ------------------------------------------------------------------------------------------------------

    def load(self, session_id: str, checkpoint_id: str | None = None) -> CheckpointData | None:
        """Return a checkpoint, or None if it does not exist. Loading a damaged one by its id is an error.

        Without an id this returns the newest intact checkpoint; ``load_report`` also names those that were skipped. If
        there are checkpoints and none is intact, that is an error.
        """
        if checkpoint_id is None:
            report = self.load_report(session_id)
            if report.data is None and report.skipped:
                raise Corrupted(
                    f"session {session_id!r} has no intact checkpoint: " + "; ".join(map(str, report.skipped[:5])),
                    thread=str(session_id),
                    path=str(self._index(session_id).folder.checkpoints),
                    hint="load_report() names every damaged file",
                )
            return report.data
        index = self._index(session_id)
        wanted = self._wanted(index, checkpoint_id)
        entry = next((entry for entry in index.look().entries if entry.checkpoint_id == wanted), None)
        if entry is None:
            return None
        name = entry.files[0]
        try:
            stored = files.read_stored(index.folder, name)
        except Corrupted as error:
            hint = f"{entry.name}{BACKUP} is a backup of it" if entry.has_backup else None
            raise Corrupted(
                error.what, thread=str(session_id), checkpoint=wanted, path=error.path, hint=hint
            ) from error
        if name.endswith(BACKUP):
            self._note([Skipped(entry.name, "is missing; its backup was loaded")])
        return None if stored is None else stored.data

    def load_latest(self, session_id: str) -> CheckpointData | None:
        """Return the newest intact checkpoint, or None if there is none."""
        return self.load(session_id)

    def load_report(self, session_id: str) -> RecoveryReport[CheckpointData]:
        """Return the newest intact checkpoint, with the newer ones that were skipped and why."""
        report = order.newest_intact(self._index(session_id))
        self._note(report.skipped)
        return report

    def list(self, session_id: str) -> Metas:
        """Return summaries of the intact checkpoints, newest first; ``scan`` also reports the others.

        This reads every file completely, because its checksum covers all of it.
        """
        scan = self.scan(session_id)
        self._note(scan.damaged)
        return [*scan.good]

    def scan(self, session_id: str) -> Scan:
        """Read everything of a session and report intact checkpoints, damaged files and leftovers."""
        index = self._index(session_id)
        look = index.look()
        good, damaged = [], []
        for name in (name for entry in look.entries for name in entry.files):
            try:
                stored = files.read_stored(index.folder, name)
            except BackstayError as error:
                damaged.append(Skipped(name, error.what))
            else:
                if stored is not None and not name.endswith(BACKUP):
                    good.append(stored.meta)
        return Scan(
            good=tuple(good),
            damaged=tuple(damaged),
            leftovers=tuple(files.leftovers_among(look.names)),
            backups=tuple(entry.name + BACKUP for entry in look.entries if entry.has_backup),
            notes=look.warnings,
        )

    def has_checkpoints(self, session_id: str) -> bool:
        """Return whether a session has any checkpoint, intact or not."""
        return bool(self._index(session_id).look().entries)

    def summary(self, session_id: str) -> SessionSummary | None:
        """Return a summary of a session, None if it does not exist. This reads every file, as ``list`` does."""
        folder = self._index(session_id).folder
        folder.refuse_links()
        scan = self.scan(session_id)
        newest = self.load(session_id) if scan.good else None
        return state.summarize(folder.session, state.read_meta(folder), scan.good, newest)

    def verify(self, path: str | os.PathLike[str]) -> Verdict:
        """Check whether the file at a path is intact. The verdict is false, with a reason, if not.

        A file that exists and cannot be read raises StoreError: it may be intact or not.
        """
        file = Path(path)
        if file.name == LATEST and file.is_symlink() and files.id_in(os.readlink(file)):
            file = file.with_name(os.readlink(file))
        content = files.read_file(file)
        if content is None:
            return Verdict(False, "it does not exist")
        try:
            problem = find_problem(parse(content))
        except DecodeError as error:
            problem = f"it {error.what}"
        return Verdict(problem is None, problem)

    def _wanted(self, index: Index, checkpoint_id: object) -> str:
        """Return an id; refuse one that could not be saved, unless the older program saved it."""
        found = any(entry.checkpoint_id == checkpoint_id for entry in index.look().entries)
        return str(checkpoint_id) if found else check_safe(checkpoint_id, "checkpoint_id")

    def _index(self, session_id: str) -> Index:
        folder = SessionFolder(self.storage_path, session_id)
        return self._indexes.setdefault(folder.session, Index(folder))

    def _try(self, what: str, function: Callable[[], object]) -> bool:
        """Run a step that may fail without harm; log a failure."""
        try:
            function()
        except (BackstayError, OSError) as error:
            self._note([Skipped(f"cannot {what}", str(error))])
            return False
        return True

    def _note(self, problems: Iterable[Skipped]) -> None:
        for problem in problems:
            if problem not in self._problems:  # every list finds the same damaged file again
                _log.warning("%s", problem)
                self._problems.append(problem)


def _text_of(data: CheckpointData) -> str:
    return json.dumps(data.to_dict(), sort_keys=True)


# The same, awaited ------------------------------------------------------------------------------------------------


@runtime_checkable
class CheckpointSystem(Protocol):
    """The interface of session checkpoints, safe to share between threads and tasks. ``CheckpointWriter`` has it."""

    async def save(self, data: CheckpointData) -> CheckpointId:
        """Save a checkpoint and return its id."""

    async def load(self, session_id: str, checkpoint_id: str | None = None) -> CheckpointData | None:
        """Return a checkpoint, the newest if no id is given, or None if there is none."""

    async def list(self, session_id: str) -> Metas:
        """Return summaries of a session's checkpoints, newest first."""

    async def delete(self, session_id: str, checkpoint_id: str) -> bool:
        """Delete a checkpoint; return whether it existed."""

    def verify(self, path: str | os.PathLike[str]) -> Verdict:
        """Check whether the file at a path is intact."""


def _awaited(
    method: Callable[Concatenate[SyncCheckpointWriter, P], T],
) -> Callable[Concatenate[CheckpointWriter, P], Coroutine[Any, Any, T]]:
    """Return a method of the writer that runs in a worker thread."""

    @functools.wraps(method)
    async def call(self: CheckpointWriter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_worker(method, self.sync, *args, **kwargs)

    return call


class CheckpointWriter:
    """Saves and loads the checkpoints of sessions below a directory, like ``SyncCheckpointWriter``, but awaited.

    ``sync`` is the same writer for callers without an event loop. If the caller is cancelled, it returns at once, and
    the operation runs to its end. To find out whether a save was stored, save again with the same id.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str] = DEFAULT_ROOT,
        *,
        max_backups: int = BACKUPS_MAX,
        max_checkpoints: int | None = None,
        links: bool = sys.platform != "win32",
        check_roles: bool = False,
        lock_timeout: float = LOCK_TIMEOUT_S,
        clock: Callable[[], datetime] = checkpoint.utc_now,
    ) -> None:
        self.sync = SyncCheckpointWriter(
            storage_path,
            max_backups=max_backups,
            max_checkpoints=max_checkpoints,
            links=links,
            check_roles=check_roles,
            lock_timeout=lock_timeout,
            clock=clock,
        )

    def with_max_backups(self, most: int) -> CheckpointWriter:
        """Set how many of the newest checkpoints have a backup; return this writer."""
        self.sync.with_max_backups(most)
        return self

    def with_max_checkpoints(self, most: int | None) -> CheckpointWriter:
        """Set how many checkpoints a session keeps, None for all; return this writer."""
        self.sync.with_max_checkpoints(most)
        return self

    @property
    def problems(self) -> Problems:
        """Return the last problems that did not make a call fail, oldest first."""
        return self.sync.problems

    save = _awaited(SyncCheckpointWriter.save)
    delete = _awaited(SyncCheckpointWriter.delete)
    clear_session = _awaited(SyncCheckpointWriter.clear_session)
    load = _awaited(SyncCheckpointWriter.load)
    load_latest = _awaited(SyncCheckpointWriter.load_latest)
    load_report = _awaited(SyncCheckpointWriter.load_report)
    list = _awaited(SyncCheckpointWriter.list)
    scan = _awaited(SyncCheckpointWriter.scan)
    has_checkpoints = _awaited(SyncCheckpointWriter.has_checkpoints)
    summary = _awaited(SyncCheckpointWriter.summary)

    def verify(self, path: str | os.PathLike[str]) -> Verdict:
        """Check whether the file at a path is intact. The verdict is false, with a reason, if not.

        This is not awaited, as in the original system. It reads the file in the caller's thread, so a coroutine should
        call it in a worker thread.
        """
        return self.sync.verify(path)
