"""Run operations for event loops, and functions of the user between calls to the store.

A whole operation runs in a worker thread, so the event loop never waits for a disk, and each operation costs one hop
instead of one per store call.

asyncio takes longer to import than everything else here together, so it is imported by what only event loops call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from concurrent.futures import ThreadPoolExecutor

P = ParamSpec("P")
T = TypeVar("T")

WORKERS_MAX = 8
"""Threads per asynchronous store: enough for concurrent savers to share commits."""


class Offload:
    """Runs operations in worker threads on behalf of an event loop. A call that was started always runs to its end."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a worker and wait for it. A cancelled caller leaves at once; the call runs to its end."""
        return await self.start(function, *args, **kwargs)

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call in a worker, and return a future of its result. Cancelling the future does not stop the call."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: Future[T] = loop.create_future()
        # Not run_in_executor: cancelling its future takes a call off the queue that no worker has started yet.
        self._workers().submit(_call_for, loop, future, functools.partial(function, *args, **kwargs))
        return future

    def submit(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function in a worker without waiting for it."""
        self._workers().submit(function, *args, **kwargs)

    def close(self) -> None:
        """Wait for running calls and end the workers."""
        pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown(wait=True)

    def _workers(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="backstay")
            self._process = os.getpid()
        return self._pool


def _call_for(loop: AbstractEventLoop, future: Future[T], call: Callable[[], T]) -> None:
    """Call a function in a worker thread on behalf of a future."""
    try:
        result = call()
    except BaseException as error:
        settle(loop, future, None, error)
    else:
        settle(loop, future, result, None)
    del future  # it refers to the error, and the error to this frame


def settle(loop: AbstractEventLoop, future: Future[Any], result: Any, error: BaseException | None) -> None:
    """Settle a future of an event loop from another thread."""
    if isinstance(error, StopIteration):  # a future cannot hold one, and its waiter would wait forever
        stopped, error = error, RuntimeError("the function raised StopIteration")
        error.__cause__ = stopped

    def in_loop() -> None:
        if future.done():  # its waiter was cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no waiter
        loop.call_soon_threadsafe(in_loop)


async def finish(work: Awaitable[T]) -> T:
    """Await work to its end, even if the caller is cancelled any number of times; then raise the cancellation.

    If the work failed too, its error is the cause of the cancellation.
    """
    import asyncio

    future, cancelled = asyncio.ensure_future(work), None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    raise cancelled from None if future.cancelled() else future.exception()


def in_event_loop() -> bool:
    """Return whether this thread runs an event loop, which must not be blocked."""
    running = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
    return running is not None and running() is not None


async def async_sleep(seconds: float) -> None:
    """Sleep while the event loop runs other tasks."""
    import asyncio

    await asyncio.sleep(seconds)


class TaskCancellation:
    """Cancels the task that runs the body of an ``async with`` block, from another thread.

    The task itself creates it. Other code may cancel the task too: ``end`` returns whether this was the only cause.
    """

    def __init__(self) -> None:
        import asyncio

        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._error = asyncio.CancelledError
        self._before = task.cancelling()
        self._cancelled = False
        self._over = False

    def start(self) -> None:
        """Cancel the task soon, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the body has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def end(self, error: BaseException | None) -> bool:
        """Cancel nothing from now on; return whether the error that left the block is this cancellation."""
        self._over = True
        if not self._cancelled:
            return False
        return self._task.uncancel() <= self._before and isinstance(error, self._error)

    def _cancel(self) -> None:
        if not self._over:
            self._cancelled = True
            self._task.cancel()


# A function that calls user code between calls to the store is a generator of *steps*: functions without arguments. It
# is sent the result of each step. A step may return an awaitable; ``arun_steps`` awaits it. No lock is held in between.


Steps = Generator[Callable[[], Any], Any, T]


def run_steps(steps: Steps[T], refusal: Callable[[], Exception]) -> T:
    """Run all steps in this thread; a step that must be awaited is refused."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step()
                if inspect.isawaitable(answer):
                    if inspect.iscoroutine(answer):
                        answer.close()  # it has not started
                    raise refusal()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def arun_steps(steps: Steps[T]) -> T:
    """Run all steps and await their results where needed."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step()
                if inspect.isawaitable(answer):
                    answer = await answer
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
