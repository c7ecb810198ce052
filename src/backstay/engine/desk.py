"""What a run asks of its thread besides saving: decisions, finished jobs, attempts, pauses.

A run without a thread has no desk. In a loop of the caller's the store is asked in worker threads; ``run_sync`` asks it
at once. Nodes that are plain functions ask at once in either case: they run where nobody else waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from backstay.model.checkpoint import Write
from backstay.model.decision import Decision
from backstay.store.base import Backend
from backstay.thread import pause, question, record
from backstay.thread.access import handle_of
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.question import Question
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

P = ParamSpec("P")
T = TypeVar("T")

UPDATE, ATTEMPT = "update", "attempt"
"""Channels of what is written beside a checkpoint: what a job returned, and that it was tried and failed."""


class Desk:
    """The durable side of a run."""

    def __init__(self, thread: Thread | AsyncThread, pause_check_s: float) -> None:
        self.handle = handle_of(thread)
        self.context = self.handle.context
        self.cursor = self.handle.cursor
        self._pause_check_s = pause_check_s
        self._pause_checked = float("-inf")

    async def run(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation on the store."""
        if self.handle.blocking:
            return self.handle.run(operation, *args, **kwargs)
        return await self.handle.arun(operation, *args, **kwargs)

    async def settle(self, checkpoint_id: str, asked: Question) -> Decision | InterruptRecord:
        """Return the decision on a question, or the record that waits for one."""
        return await self.run(question.settle, self.context, self.cursor, checkpoint_id, asked)

    async def keep(self, checkpoint_id: str, position: str, value: Mapping[str, Any]) -> None:
        """Store what a finished job returned beside the checkpoint the run stands at."""
        await self._write(checkpoint_id, Write(position, 0, UPDATE, dict(value)))

    async def tried(self, checkpoint_id: str, position: str, attempt: int, error: str, is_last: bool) -> None:
        """Store that a job was tried and failed, so that a crash does not begin the count anew."""
        await self._write(checkpoint_id, Write(position, attempt, ATTEMPT, {"error": error, "last": is_last}))

    async def must_stop(self) -> InterruptRecord | None:
        """Return somebody's request that the run must stop for; looked for now and then."""
        now = time.monotonic()
        if now - self._pause_checked < self._pause_check_s:
            return None
        self._pause_checked = now
        return await self.run(pause.obey, self.context, self.cursor)

    async def _write(self, checkpoint_id: str, write: Write) -> None:
        await self.run(record.write, self.cursor.lane, checkpoint_id, [write], True)


def finished(writes: Iterable[Write]) -> dict[str, Mapping[str, Any]]:
    """Return what finished jobs returned, by position."""
    return {write.task_id: write.value for write in writes if write.channel == UPDATE}


def attempts(writes: Iterable[Write]) -> dict[str, int]:
    """Return how often jobs were tried, by position: 0 for those that used up all their attempts and begin anew."""
    counts: dict[str, tuple[int, bool]] = {}
    for write in writes:
        if write.channel == ATTEMPT:
            counts[write.task_id] = max(counts.get(write.task_id, (0, False)), (write.index, write.value["last"]))
    return {position: 0 if is_last else count for position, (count, is_last) in counts.items()}
