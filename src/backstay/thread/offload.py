"""Where an event loop meets a store, and nowhere else.

A whole operation runs in a worker thread, so that the loop never waits for a disk and each operation costs one hop, not
one per store call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

WORKERS_MAX = 8
"""Threads per asynchronous store: enough for concurrent savers to share commits."""


class Offload:
    """Runs operations in worker threads on behalf of an event loop."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a worker and wait for it. A cancelled caller leaves at once; the call runs to its end."""
        return await asyncio.get_running_loop().run_in_executor(
            self._workers(), functools.partial(function, *args, **kwargs)
        )

    def submit(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function in a worker, for nobody who waits for it."""
        self._workers().submit(function, *args, **kwargs)

    def close(self) -> None:
        """Wait for what is under way and end the workers."""
        pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown(wait=True)

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="backstay")
            self._process = os.getpid()
        return self._pool


def in_event_loop() -> bool:
    """Tell whether this thread runs an event loop, which nothing of ours may block."""
    return asyncio._get_running_loop() is not None


async def rest(seconds: float) -> None:
    """Let others run for a while."""
    await asyncio.sleep(seconds)


class Interruption:
    """Ends the body of an ``async with`` block from another thread, by cancelling the task that runs it.

    Made by that task. Others may cancel it at the same time: ``end`` tells whether this was the only cause.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._before = task.cancelling()
        self._cancelled = False
        self._over = False

    def begin(self) -> None:
        """Cancel the task soon; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: there is nothing to end any more
            self._loop.call_soon_threadsafe(self._cancel)

    def end(self, error: BaseException | None) -> bool:
        """Cancel nothing from now on, and tell whether the error that left the block is this cancellation."""
        self._over = True
        if not self._cancelled:
            return False
        return self._task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError)

    def _cancel(self) -> None:
        if not self._over:
            self._cancelled = True
            self._task.cancel()
