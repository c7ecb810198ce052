"""After a crash: which sessions did not end, and the newest intact checkpoint of each.

Both classes work on a directory with session directories and on a Backstay store, and both tell from the one record
that is kept there: there are no two lists that could disagree.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Generic, TypeVar, cast, overload

from backstay.compat.sessions.data import CheckpointData
from backstay.compat.sessions.directory_source import SessionDirectories
from backstay.compat.sessions.interrupted import InterruptedSession, render
from backstay.compat.sessions.report import RecoveryReport, Skipped
from backstay.compat.sessions.source import SessionSource
from backstay.compat.sessions.store_source import StoreSessions
from backstay.model.checkpoint import MAIN, Checkpoint
from backstay.thread.store import Store

T = TypeVar("T")
SILENCE_S = 300.0

_log = logging.getLogger("backstay.compat.sessions")


def _open_source(source: Store | str | os.PathLike[str], silence: float) -> SessionSource[Checkpoint | CheckpointData]:
    if isinstance(source, Store):
        return StoreSessions(source)
    return SessionDirectories(Path(source).expanduser(), timedelta(seconds=silence))


class _Detector:
    """Asks a source which sessions were interrupted; ``problems`` is what could not be read when it was last asked."""

    def __init__(self, source: SessionSource[Checkpoint | CheckpointData]) -> None:
        self._source = source
        self.problems: list[Skipped] = []

    def detect(self) -> list[InterruptedSession]:
        sessions, self.problems = self._source.interrupted()
        for problem in self.problems:
            _log.warning("%s", problem)
        return sessions


class CrashRecovery(Generic[T]):
    """Finds sessions that a crash ended, and what can be gone on from.

    ``source`` is a directory with session directories, or an open store. ``silence``: after how many seconds without a
    save a session counts as dead whose process cannot be looked for from here (another host, another container).
    """

    @overload
    def __init__(self: CrashRecovery[Checkpoint], source: Store, *, silence: float = SILENCE_S) -> None: ...

    @overload
    def __init__(
        self: CrashRecovery[CheckpointData], source: str | os.PathLike[str], *, silence: float = SILENCE_S
    ) -> None: ...

    def __init__(self, source: Store | str | os.PathLike[str], *, silence: float = SILENCE_S) -> None:
        found = _open_source(source, silence)
        self._source = cast("SessionSource[T]", found)
        self._detector = _Detector(found)

    @property
    def problems(self) -> list[Skipped]:
        """Return what could not be read by the last detection."""
        return self._detector.problems

    def detect_unclean_shutdown(self) -> list[InterruptedSession]:
        """Return all sessions that are active, gave no reason for an end, and whose process is gone; last active first.

        What could not be read is in ``problems``.
        """
        return self._detector.detect()

    def recover_session(self, session_id: str, *, branch: str = MAIN) -> RecoveryReport[T]:
        """Return the newest intact checkpoint, with what was passed over for it and why; it is false if there is none.

        ``branch`` is one of a store's thread; session directories have but one.
        """
        return self._source.recover(session_id, branch)

    def mark_session_active(self, session_id: str, *, owner: str | None = None, task: str = "") -> None:
        """Record that this process runs a session from now on, and forget why it ended before."""
        self._source.activate(session_id, owner, task)

    def mark_session_terminated(self, session_id: str, reason: str) -> bool:
        """Record why a session ended; return False if there was none to end."""
        return self._source.terminate(session_id, reason)


class SessionRecovery:
    """Shows the sessions that were interrupted; ``source`` and ``silence`` as for ``CrashRecovery``."""

    def __init__(self, source: Store | str | os.PathLike[str], *, silence: float = SILENCE_S) -> None:
        self._detector = _Detector(_open_source(source, silence))

    @property
    def problems(self) -> list[Skipped]:
        """Return what could not be read by the last detection."""
        return self._detector.problems

    def detect_interrupted_sessions(self) -> list[InterruptedSession]:
        """Return the interrupted sessions, last active first; what could not be read is in ``problems``."""
        return self._detector.detect()

    def describe(self) -> str:
        """Return the interrupted sessions as text, with how to resume each."""
        return render(self.detect_interrupted_sessions())
