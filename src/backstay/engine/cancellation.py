"""A way to end a run from elsewhere in the program: from another task, another thread, or a signal handler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Cancellation:
    """Handed to a run; ``cancel`` makes that run end with the status "cancelled". It can be resumed."""

    def __init__(self) -> None:
        self.reason = ""
        self._cancelled = False
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = []

    @property
    def cancelled(self) -> bool:
        """Tell whether it was asked for."""
        return self._cancelled

    def cancel(self, reason: str = "") -> None:
        """End the run at its next await, or between two nodes."""
        # No lock: a signal handler that waits for one would wait for what it interrupted.
        if self._cancelled:
            return
        self.reason, self._cancelled = reason, True
        for loop, task in list(self._watchers):
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing to end any more
                loop.call_soon_threadsafe(self._end, (loop, task))

    def check(self) -> None:
        """End the run here, if it was asked for: a run that never awaits anything would not hear of it."""
        if self._cancelled:
            raise asyncio.CancelledError(self.reason)

    def _end(self, watcher: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]) -> None:
        if watcher in self._watchers:  # else the run is over, and its task does something else by now
            watcher[1].cancel()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Cancellation]:
        """Cancel the body when asked to, and leave the block quietly then."""
        task = asyncio.current_task()
        assert task is not None
        watcher = (asyncio.get_running_loop(), task)
        self._watchers.append(watcher)
        try:
            yield self
        except asyncio.CancelledError:
            if not self._cancelled or task.uncancel() > 0:
                raise
        finally:
            self._watchers.remove(watcher)
