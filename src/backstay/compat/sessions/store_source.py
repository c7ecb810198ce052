"""A Backstay store as a place to look for sessions after a crash: a session is a thread, a run of it is its session."""

from __future__ import annotations

import time

from backstay.compat.sessions.interrupted import InterruptedSession
from backstay.compat.sessions.report import RecoveryReport, Skipped
from backstay.errors import Corrupted, DecodeError, InvalidInput
from backstay.model.checkpoint import Checkpoint
from backstay.model.damaged import Damaged
from backstay.model.ids import check_label
from backstay.model.session import InterruptedRun
from backstay.thread.access import Access, access_of
from backstay.thread.session import RunSession, end_by_id
from backstay.thread.store import Store


class StoreSessions:
    """The threads of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[str, RunSession] = {}

    def interrupted(self) -> tuple[list[InterruptedSession], list[Skipped]]:
        """Return all runs that did not end and whose process is gone, last seen first."""
        found = self._store.interrupted(on_damage="mark")
        problems = [Skipped(f"session {run.id or '?'}", run.error.what) for run in found if isinstance(run, Damaged)]
        return [_shown(run) for run in found if not isinstance(run, Damaged)], problems

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
        """Begin a session of the thread; it beats until it is terminated or this process ends."""
        before = self._runs.pop(session_id, None)
        if before is not None:
            before.end("begun again")
        run = self._store.thread(session_id).session(owner=owner, note=task)
        self._runs[session_id] = run.__enter__()

    def terminate(self, session_id: str, reason: str) -> bool:
        """End the thread's sessions, those of dead processes too."""
        if not check_label(reason, "reason"):
            raise InvalidInput("a session ends for a reason", hint='For example "completed"')
        run = self._runs.pop(session_id, None)
        if run is not None:
            run.end(reason)
            return True
        found = [run for run in self._store.interrupted(on_damage="mark") if run.thread_id == session_id]
        dead = [run.id if isinstance(run, Damaged) else run.session_id for run in found]
        ended = [_end(access_of(self._store), name, reason) for name in dead if name is not None]
        return any(ended)


def _end(access: Access, name: str, reason: str) -> bool:
    return end_by_id(access.store, access.context.namespace, name, time.time_ns() // 1000, reason)


def _shown(run: InterruptedRun) -> InterruptedSession:
    return InterruptedSession(
        session_id=run.thread_id,
        last_iteration=0 if run.checkpoint is None else run.checkpoint.iteration,
        last_activity=run.last_seen,
        task_description=run.note or None,
        owner=run.owner,
        resume_hint=run.hint,
    )
