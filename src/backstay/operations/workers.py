"""Threads for plain functions that an event loop must not wait for, or that may take too long.

asyncio's own threads are few, are shared with the rest of the program, and are waited for when the program ends. A
function that hangs would keep others from running. Here every call gets a thread of its own at once, and a daemon
thread, so neither other calls nor the end of the program wait for a function that hangs. Idle threads are used again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from backstay.operations.drivers import settle

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

IDLE_S = 10.0
"""How long an idle thread waits for the next call before it ends."""


async def call_in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function in a thread, in a copy of the caller's context, and wait for it.

    A cancelled caller leaves at once. The function runs to its end, and its result is dropped.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def call() -> Callable[[], None]:
        try:
            return partial(settle, loop, future, context.run(function, *arguments), None)
        except BaseException as error:
            return partial(settle, loop, future, None, error)

    _start(call)
    return await future


def wait_in_thread(function: Callable[[], T], timeout_s: float) -> T:
    """Call a function in a thread, in a copy of the caller's context; raise TimeoutError if it takes too long.

    A function cannot be stopped: it runs to its end, and its result is dropped.
    """
    ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    context = copy_context()

    def call() -> Callable[[], None]:
        try:
            return partial(ended.put, (context.run(function), None))
        except BaseException as error:
            return partial(ended.put, (None, error))

    _start(call)
    try:
        result, error = ended.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"it took longer than {timeout_s:g} s") from None
    if error is not None:
        raise error
    found: T = result
    return found


def _start(call: Callable[[], Callable[[], None]]) -> None:
    """Make a call in an idle thread, or in a new one."""
    try:
        _idle.pop()
    except IndexError:
        threading.Thread(target=_work, name="backstay call", daemon=True).start()
    _calls.put(call)


def _work() -> None:
    """Make one call after another, until no call comes for a while."""
    wait_s: float | None = None
    while True:
        try:
            call = _calls.get(timeout=wait_s)
        except Empty:
            try:
                _idle.pop()
                return
            except IndexError:  # every idle thread is taken: the call of this one comes
                continue
        deliver = call()
        wait_s = IDLE_S
        _idle.append(None)  # before the caller continues, so that its next call finds this thread
        deliver()
        del call, deliver  # they hold the state of a run


_calls: SimpleQueue[Callable[[], Callable[[], None]]] = SimpleQueue()
_idle: deque[None] = deque()
"""One item for each thread that waits for a call. A caller takes an item away, or starts a thread."""


def _forget_threads() -> None:
    """Start from scratch in a forked process, where no thread but its own survives."""
    global _calls
    _calls = SimpleQueue()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_threads)
