"""After a crash: find the sessions that did not end, and the newest intact checkpoint of each.

Both classes work on a directory of session directories and on a Backstay store. In a store, each session is a thread,
and an active session is a run of that thread (see ``store.runs()``), so both classes read the same record.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Generic, TypeVar, cast, overload

from backstay.compat.sessions.checkpoint import CheckpointData, utc_now
from backstay.compat.sessions.files import SessionFolder
from backstay.compat.sessions.order import Index, InterruptedSession, RecoveryReport, Skipped, newest_intact, render
from backstay.compat.sessions.state import SessionMeta, read_meta, write_meta
from backstay.compat.sessions.writer import LOCK_TIMEOUT_S
from backstay.errors import BackstayError, Corrupted, DecodeError, InvalidInput
from backstay.model.checkpoint import MAIN, Checkpoint
from backstay.model.ids import check_label
from backstay.model.runs import RunStatus
from backstay.operations.leases import is_alive, short_name, this_process
from backstay.operations.rows import Damaged, to_microseconds
from backstay.operations.run_records import SESSION, RunOutcome, change_run, ended, new_row, row_of, started
from backstay.store import atomic
from backstay.store.records import RunQuery
from backstay.thread.access import access_of, handle_of
from backstay.thread.runs import Run
from backstay.thread.store import Store

T = TypeVar("T")
SILENCE_S = 300.0

_log = logging.getLogger("backstay.compat.sessions")


class SessionDirectories:
    """The sessions below a root directory.

    A session of another host or container counts as dead only after ``silence`` without a save.
    """

    def __init__(self, root: Path, silence: timedelta) -> None:
        self._root = root
        self._silence = silence

    def interrupted(self) -> tuple[list[InterruptedSession], list[Skipped]]:
        """Return the sessions that did not end and whose process is dead, last active first, and unreadable ones."""
        try:
            with os.scandir(self._root) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            names = []
        except OSError as error:
            raise atomic.failure(error, "list", self._root) from error
        found, skipped = [], []
        for name in names:
            try:
                meta = read_meta(SessionFolder(self._root, name))
            except BackstayError as error:
                skipped.append(Skipped(name, error.what))
                continue
            if meta is None or not meta.is_active or meta.termination_reason is not None:
                continue  # it has no record, or it ended
            if meta.is_gone(utc_now(), self._silence):
                found.append(
                    InterruptedSession(
                        session_id=meta.session_id,
                        last_iteration=meta.last_iteration,
                        last_activity=meta.last_updated,
                        task_description=meta.task_description,
                        owner=meta.owner,
                        resume_hint=f"Resume it from recover_session({meta.session_id!r})",
                    )
                )
        return sorted(found, key=lambda session: session.last_activity, reverse=True), skipped

    def recover(self, session_id: str, branch: str) -> RecoveryReport[CheckpointData]:
        """Return the newest intact checkpoint. Session directories have only one branch."""
        return newest_intact(Index(SessionFolder(self._root, session_id)))

    def activate(self, session_id: str, owner: str | None, task: str) -> None:
        """Record that this process runs a session from now on; create its directory if necessary."""
        folder, now = SessionFolder(self._root, session_id), utc_now()
        folder.make()
        with folder.locked(LOCK_TIMEOUT_S):
            before: SessionMeta | None = None
            with contextlib.suppress(BackstayError):  # a damaged record is replaced
                before = read_meta(folder)
            folder.sweep()
            newest = newest_intact(Index(folder)).data if before is None else None
            reached = 0 if newest is None else newest.iteration  # it may have saved before it had a record
            meta = SessionMeta(
                session_id=folder.session,
                is_active=True,
                termination_reason=None,
                last_updated=now,
                last_iteration=reached if before is None else before.last_iteration,
                owner=check_label(short_name() if owner is None else owner, "owner"),
                process=str(this_process()),
                started_at=now,
                task_description=check_label(task, "task") or (None if before is None else before.task_description),
                others={} if before is None else before.others,
            )
            write_meta(folder, meta)

    def terminate(self, session_id: str, reason: str) -> bool:
        """Record why a session ended; return False if it has no record."""
        folder = SessionFolder(self._root, session_id)
        if not folder.path.is_dir():
            return False
        folder.refuse_links()
        with folder.locked(LOCK_TIMEOUT_S):
            meta = read_meta(folder)
            if meta is None:
                return False
            write_meta(folder, replace(meta, is_active=False, termination_reason=reason, last_updated=utc_now()))
        return True


class StoreSessions:
    """The threads of a store as sessions. Each session that is active is a run of its thread, without a lease."""

    def __init__(self, store: Store, silence: timedelta) -> None:
        self._store = store
        self._silence = silence

    def interrupted(self) -> tuple[list[InterruptedSession], list[Skipped]]:
        """Return the runs that did not end and whose process is dead, last active first, and unreadable ones."""
        found: list[InterruptedSession] = []
        skipped: list[Skipped] = []
        for status in (RunStatus.ABANDONED, RunStatus.RUNNING):
            after: Run | None = None
            while page := self._store.runs(status=status, graph=SESSION, after=after, on_damage="mark"):
                for run in page:
                    if isinstance(run, Damaged):
                        skipped.append(Skipped(f"run {run.id or '?'}", run.error.what))
                    elif run.kind == SESSION and (gone := self._gone(run)) is not None:
                        found.append(gone)
                whole = [run for run in page if isinstance(run, Run)]
                if not whole:
                    break
                after = whole[-1]
        return sorted(found, key=lambda session: session.last_activity, reverse=True), list(dict.fromkeys(skipped))

    def _gone(self, run: Run) -> InterruptedSession | None:
        """Return a session that did not end and whose process is dead: elsewhere, a long silence decides."""
        newest = next(iter(run.thread.history(limit=1, on_damage="mark")), None)
        newest = None if isinstance(newest, Damaged) else newest
        seen = run.updated_at if newest is None else max(run.updated_at, newest.created_at)
        alive = None if run.holder is None else is_alive(run.holder)
        if alive or (alive is None and utc_now() - seen <= self._silence):
            return None
        hint = "Start it again: it saved nothing"
        return InterruptedSession(
            session_id=run.thread_id,
            last_iteration=0 if newest is None else newest.iteration,
            last_activity=seen,
            task_description=run.note or None,
            owner=None if run.holder is None else run.holder.name,
            resume_hint=hint if newest is None else f"Resume it from store.thread({run.thread_id!r}).latest()",
        )

    def recover(self, session_id: str, branch: str) -> RecoveryReport[Checkpoint]:
        """Return the newest checkpoint of a branch whose every byte matches its digest."""
        skipped = []
        for meta in self._store.thread(session_id, branch=branch).history(on_damage="mark"):
            if isinstance(meta, Damaged):
                skipped.append(Skipped(f"checkpoint {meta.id or '?'} (seq {meta.seq})", meta.error.what))
                continue
            try:
                checkpoint = self._store.get(meta.id)
            except (Corrupted, DecodeError) as error:
                skipped.append(Skipped(f"checkpoint {meta.id} (seq {meta.seq})", error.what))
                continue
            if checkpoint is not None:  # else it was deleted meanwhile
                return RecoveryReport(session_id, checkpoint, skipped=tuple(skipped))
        return RecoveryReport(session_id, skipped=tuple(skipped))

    def activate(self, session_id: str, owner: str | None, task: str) -> None:
        """Record that this process runs a session from now on; an earlier run of the thread has ended."""
        access = access_of(self._store)
        branch, now_us = handle_of(self._store.thread(session_id)).cursor.branch, _now_us()
        self.terminate(session_id, "started again")
        fresh = new_row(branch, access.services.new_id(), SESSION, SESSION, now_us)
        holder = str(this_process("" if owner is None else check_label(owner, "owner")))
        row = started(replace(fresh, note=check_label(task, "task")), "", holder, now_us)
        access.store.put_record(row.sealed())

    def terminate(self, session_id: str, reason: str) -> bool:
        """End the session of a thread; return False if there was none."""
        store, branch = access_of(self._store).store, handle_of(self._store.thread(session_id)).cursor.branch
        outcome = RunOutcome(RunStatus.COMPLETED, reason=reason)
        for found in store.runs(RunQuery(branch.namespace, branch.thread, RunStatus.RUNNING, SESSION)):
            row = row_of(found.record)
            if row.kind == SESSION and found.record.branch == branch:
                change_run(
                    store, row, lambda row: None if row.ended_us else ended(row, outcome, _now_us(), row.news, None)
                )
                return True
        return False


def _now_us() -> int:
    return to_microseconds(utc_now())


class _Detector:
    """Looks for interrupted sessions in a directory or a store."""

    def __init__(self, source: Store | str | os.PathLike[str], *, silence: float = SILENCE_S) -> None:
        self._source: StoreSessions | SessionDirectories
        if isinstance(source, Store):
            self._source = StoreSessions(source, timedelta(seconds=silence))
        else:
            self._source = SessionDirectories(Path(source).expanduser(), timedelta(seconds=silence))
        self.problems: list[Skipped] = []  # the sessions that the last detection could not read

    def _detect(self) -> list[InterruptedSession]:
        sessions, self.problems = self._source.interrupted()
        for problem in self.problems:
            _log.warning("%s", problem)
        return sessions


class CrashRecovery(_Detector, Generic[T]):
    """Finds sessions that a crash ended, and the checkpoints to resume them from.

    ``source`` is a directory of session directories, or an open store. ``silence`` applies to sessions whose process
    cannot be checked from here (another host or container): they count as dead after so many seconds without a save.
    """

    @overload
    def __init__(self: CrashRecovery[Checkpoint], source: Store, *, silence: float = SILENCE_S) -> None: ...

    @overload
    def __init__(
        self: CrashRecovery[CheckpointData], source: str | os.PathLike[str], *, silence: float = SILENCE_S
    ) -> None: ...

    def __init__(self, source: Store | str | os.PathLike[str], *, silence: float = SILENCE_S) -> None:
        super().__init__(source, silence=silence)

    def detect_unclean_shutdown(self) -> list[InterruptedSession]:
        """Return all active sessions without a reason for an end whose process is dead, last active first.

        ``problems`` names the sessions that could not be read.
        """
        return self._detect()

    def recover_session(self, session_id: str, *, branch: str = MAIN) -> RecoveryReport[T]:
        """Return the newest intact checkpoint, with the newer ones that were skipped. It is false if there is none.

        ``branch`` is a branch of a store's thread; session directories have only one.
        """
        return cast("RecoveryReport[T]", self._source.recover(session_id, branch))

    def mark_session_active(self, session_id: str, *, owner: str | None = None, task: str = "") -> None:
        """Record that this process runs a session from now on, and clear the reason of an earlier end."""
        self._source.activate(session_id, owner, task)

    def mark_session_terminated(self, session_id: str, reason: str) -> bool:
        """Record why a session ended; return False if there was none to end."""
        if not check_label(reason, "reason"):
            raise InvalidInput("reason must not be empty", hint='Say why the session ended, for example "completed"')
        return self._source.terminate(session_id, reason)


class SessionRecovery(_Detector):
    """Shows the interrupted sessions. ``source`` and ``silence`` are as in ``CrashRecovery``."""

    def detect_interrupted_sessions(self) -> list[InterruptedSession]:
        """Return the interrupted sessions, last active first. ``problems`` names those that could not be read."""
        return self._detect()

    def describe(self) -> str:
        """Return the interrupted sessions as text, with how to resume each."""
        return render(self.detect_interrupted_sessions())
