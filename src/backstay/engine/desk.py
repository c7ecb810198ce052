"""What a run asks of its thread besides saving: decisions, finished jobs, attempts, pauses.

A run without a thread has no desk. A thread of a synchronous store is asked at once; one of an asynchronous store is
awaited. Nodes that are plain functions ask at once in either case: they run where nobody else waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from backstay.model.checkpoint import Write
from backstay.model.decision import Decision
from backstay.thread import front, pause, question
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.perform import Flow, drive
from backstay.thread.question import Question
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

T = TypeVar("T")

UPDATE, ATTEMPT = "update", "attempt"
"""Channels of what is written beside a checkpoint: what a job returned, and that it was tried and failed."""


class Desk:
    """The durable side of a run."""

    def __init__(self, thread: Thread | AsyncThread, pause_check_s: float) -> None:
        self.thread = thread
        self.context = thread._store._context
        self.cursor = thread._cursor
        self._pause_check_s = pause_check_s
        self._pause_checked = float("-inf")

    async def ask(self, flow: Flow[T]) -> T:
        """Run a flow on the store."""
        if isinstance(self.thread, AsyncThread):
            return await self.thread._run(flow)
        return self.thread._run(flow)

    async def ask_cancellable(self, flow: Flow[T], on_cancel: Flow[object] | None = None) -> T:
        """Run a flow on the store; if the caller is cancelled meanwhile, run the other one too."""
        if isinstance(self.thread, AsyncThread):
            return await self.thread._run(flow, on_cancel)
        return self.thread._run(flow)

    def ask_now(self, flow: Flow[T], on_cancel: Flow[object] | None = None) -> T:
        """Run a flow on the store, here and now, from whichever thread of the program."""
        return drive(flow, self.thread._store._backend, self.cursor.lock)

    async def settle(self, checkpoint_id: str, asked: Question) -> Decision | InterruptRecord:
        """Return the decision on a question, or the record that waits for one."""
        return await self.ask(question.settle(self.context, self.cursor, checkpoint_id, asked))

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
        return await self.ask(pause.obey(self.context, self.cursor))

    async def _write(self, checkpoint_id: str, write: Write) -> None:
        await self.ask(front.write(self.cursor, checkpoint_id, [write], True))


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
