"""Session directories as a place to look for sessions after a crash."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from backstay.compat.sessions.data import CheckpointData, utc_now
from backstay.compat.sessions.folder import SessionFolder
from backstay.compat.sessions.interrupted import InterruptedSession
from backstay.compat.sessions.order import Index
from backstay.compat.sessions.report import RecoveryReport, Skipped
from backstay.compat.sessions.search import newest_intact
from backstay.compat.sessions.state import SessionMeta, read_meta, write_meta
from backstay.compat.sessions.sync import LOCK_TIMEOUT_S
from backstay.errors import BackstayError, InvalidInput
from backstay.model.ids import check_label
from backstay.store import atomic
from backstay.thread.process import short_name, this_process


class SessionDirectories:
    """The sessions below a root directory.

    A session run on another host, or in another container, is taken for dead only after ``silence`` without a save.
    """

    def __init__(self, root: Path, silence: timedelta) -> None:
        self._root = root
        self._silence = silence

    def interrupted(self) -> tuple[list[InterruptedSession], list[Skipped]]:
        """Return all sessions that did not end and whose process is gone, last active first."""
        found, skipped = [], []
        for name in self._names():
            try:
                meta = read_meta(SessionFolder(self._root, name))
            except BackstayError as error:
                skipped.append(Skipped(name, error.what))
                continue
            if meta is not None and meta.is_unclean and meta.is_gone(utc_now(), self._silence):
                found.append(_shown(meta))
        return sorted(found, key=lambda session: session.last_activity, reverse=True), skipped

    def recover(self, session_id: str, branch: str) -> RecoveryReport[CheckpointData]:
        """Return the newest intact checkpoint; sessions here have one branch."""
        folder = SessionFolder(self._root, session_id)
        return newest_intact(Index(folder)) if folder.exists() else RecoveryReport(folder.session)

    def activate(self, session_id: str, owner: str | None, task: str) -> None:
        """Record that this process runs a session from now on; its directory is made if need be."""
        folder, now = SessionFolder(self._root, session_id), utc_now()
        folder.make()
        with folder.locked(LOCK_TIMEOUT_S):
            before = _readable(folder)
            folder.sweep()
            meta = SessionMeta(
                session_id=folder.session,
                is_active=True,
                termination_reason=None,
                last_updated=now,
                last_iteration=_reached(folder) if before is None else before.last_iteration,
                owner=check_label(short_name() if owner is None else owner, "owner"),
                process=str(this_process()),
                started_at=now,
                task_description=check_label(task, "task") or (None if before is None else before.task_description),
                others={} if before is None else before.others,
            )
            write_meta(folder, meta)

    def terminate(self, session_id: str, reason: str) -> bool:
        """Record why a session ended; return False if it has no record."""
        if not check_label(reason, "reason"):
            raise InvalidInput("a session ends for a reason", hint='For example "completed"')
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

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise atomic.failure(error, "list", self._root) from error


def _readable(folder: SessionFolder) -> SessionMeta | None:
    """Return the record there is, if it can be read; a damaged one is about to be replaced."""
    try:
        return read_meta(folder)
    except BackstayError:
        return None


def _reached(folder: SessionFolder) -> int:
    """Return how far a session came that saved before anybody recorded it."""
    data = newest_intact(Index(folder)).data
    return 0 if data is None else data.iteration


def _shown(meta: SessionMeta) -> InterruptedSession:
    return InterruptedSession(
        session_id=meta.session_id,
        last_iteration=meta.last_iteration,
        last_activity=meta.last_updated,
        task_description=meta.task_description,
        owner=meta.owner,
        resume_hint=f"Resume it from recover_session({meta.session_id!r})",
    )
