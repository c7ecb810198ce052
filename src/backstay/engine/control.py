"""Signals that let a run leave a node without an error, and the cancellation of runs.

The signals are not ``Exception``s, so that ``except Exception`` in a node does not keep its run from pausing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from backstay.engine.events import Status
from backstay.operations.interrupts import InterruptRecord, is_sleep
from backstay.operations.question import Question


class Ask(BaseException):
    """A node asks a question: it runs again from its start once the question is answered.

    With ``of_state``, a modifying answer is an update of the state.
    """

    def __init__(self, question: Question, of_state: bool = False) -> None:
        super().__init__(question.position)
        self.question = question
        self.of_state = of_state

    def again(self) -> Ask:
        """Return the same signal, to be raised once more."""
        return Ask(self.question, self.of_state)


class Paused(BaseException):
    """The run waits for decisions; ``deferred`` if a person chose to decide later."""

    def __init__(self, records: Sequence[InterruptRecord], deferred: bool = False) -> None:
        super().__init__(", ".join(record.id for record in records))
        self.records = list(records)
        self.deferred = deferred

    @property
    def status(self) -> Status:
        """The status of a run that waits."""
        if self.records and all(is_sleep(record.id) for record in self.records):
            return Status.SLEEPING
        return Status.DEFERRED if self.deferred else Status.INTERRUPTED


class Rerouted(BaseException):
    """A decision sends the run to another node."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target

    def again(self) -> Rerouted:
        """Return the same signal, to be raised once more."""
        return Rerouted(self.target)


class RunRejected(BaseException):
    """A decision rejects what the node would do: the run ends here."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(node)
        self.node = node
        self.reason = reason


class RunStopped(BaseException):
    """A person has cancelled the run with ``run.cancel()``: it ends here for good."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Cancellation:
    """Ends a run from another task, another thread or a signal handler. The run can be resumed.

    Pass it to a run as ``cancel=``; after ``cancel()`` the run ends with the status "cancelled".
    """

    def __init__(self) -> None:
        self.reason = ""
        self._cancelled = False
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = []

    @property
    def cancelled(self) -> bool:
        """True after ``cancel()``."""
        return self._cancelled

    def cancel(self, reason: str = "") -> None:
        """End the run at its next await, or between two nodes."""
        # Without a lock: a signal handler that waits for a lock could wait for the very code it interrupted.
        if self._cancelled:
            return
        self.reason, self._cancelled = reason, True
        for watcher in list(self._watchers):
            loop, task = watcher

            def end(watcher: object = watcher, task: asyncio.Task[object] = task) -> None:
                if watcher in self._watchers:  # otherwise the run is over, and its task does something else by now
                    task.cancel()

            with contextlib.suppress(RuntimeError):  # the loop is closed, so the run is over
                loop.call_soon_threadsafe(end)

    def check(self) -> None:
        """End the run here if it was cancelled. Otherwise a run that never awaits would not notice."""
        if self._cancelled:
            raise asyncio.CancelledError(self.reason)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Cancellation]:
        """Cancel the body of the block after ``cancel()``, and leave the block without an error."""
        task = asyncio.current_task()
        assert task is not None
        watcher = (asyncio.get_running_loop(), task)
        self._watchers.append(watcher)
        try:
            yield self
        except asyncio.CancelledError as error:
            if not self._cancelled or task.uncancel() > 0:
                raise
            if error.__cause__ is not None:  # the run could not be stored
                raise error.__cause__ from None
        finally:
            self._watchers.remove(watcher)
