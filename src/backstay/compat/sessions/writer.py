"""``CheckpointWriter``: the same as ``SyncCheckpointWriter``, awaited. Disks are waited for in a worker thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import datetime

from backstay.compat.sessions.checksum import Verdict
from backstay.compat.sessions.data import CheckpointData, utc_now
from backstay.compat.sessions.ids import CheckpointId
from backstay.compat.sessions.report import RecoveryReport, Scan
from backstay.compat.sessions.summary import SessionSummary
from backstay.compat.sessions.sync import (
    BACKUPS_MAX,
    DEFAULT_ROOT,
    LOCK_TIMEOUT_S,
    Metas,
    Problems,
    SyncCheckpointWriter,
)
from backstay.compat.worker import in_worker


class CheckpointWriter:
    """Saves and loads checkpoints of sessions below a directory.

    ``sync`` is the same writer for callers without a loop.

    A caller that is cancelled leaves at once; what it began goes on to its end. Saving again with the same id settles
    whether that was stored.
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
        self.sync = SyncCheckpointWriter(
            storage_path,
            max_backups=max_backups,
            max_checkpoints=max_checkpoints,
            links=links,
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
        """Return the last things that went wrong without making a call fail, oldest first."""
        return self.sync.problems

    async def save(self, data: CheckpointData) -> CheckpointId:
        """Save a checkpoint and return its id. Again with the same content: nothing more; with other: IdTaken."""
        return await in_worker(lambda: self.sync.save(data))

    async def delete(self, session_id: str, checkpoint_id: str) -> bool:
        """Delete a checkpoint with all its copies; return whether there was one."""
        return await in_worker(lambda: self.sync.delete(session_id, checkpoint_id))

    async def clear_session(self, session_id: str) -> int:
        """Delete all checkpoints of a session; return how many there were."""
        return await in_worker(lambda: self.sync.clear_session(session_id))

    async def load(self, session_id: str, checkpoint_id: str | None = None) -> CheckpointData | None:
        """Return a checkpoint, or None if there is none; without an id the newest that is intact."""
        return await in_worker(lambda: self.sync.load(session_id, checkpoint_id))

    async def load_latest(self, session_id: str) -> CheckpointData | None:
        """Return the newest checkpoint that is intact, or None if there is none."""
        return await in_worker(lambda: self.sync.load_latest(session_id))

    async def load_report(self, session_id: str) -> RecoveryReport[CheckpointData]:
        """Return the newest checkpoint that is intact, with what was passed over for it and why."""
        return await in_worker(lambda: self.sync.load_report(session_id))

    async def list(self, session_id: str) -> Metas:
        """Return summaries of the intact checkpoints, newest first; ``scan`` tells of the others too."""
        return await in_worker(lambda: self.sync.list(session_id))

    async def scan(self, session_id: str) -> Scan:
        """Look at everything of a session and say what is intact, what is damaged and what is left over."""
        return await in_worker(lambda: self.sync.scan(session_id))

    async def has_checkpoints(self, session_id: str) -> bool:
        """Tell whether a session has any checkpoint, intact or not."""
        return await in_worker(lambda: self.sync.has_checkpoints(session_id))

    async def summary(self, session_id: str) -> SessionSummary | None:
        """Return a session at a glance, None if there is no such session. Every file is read, as by ``list``."""
        return await in_worker(lambda: self.sync.summary(session_id))

    def verify(self, path: str | os.PathLike[str]) -> Verdict:
        """Tell whether the file at a path is intact; the verdict is false with a reason if not.

        Not awaited, as in the system it replaces: it reads the file in the caller's thread, so a coroutine should call
        it in a worker thread.
        """
        return self.sync.verify(path)
