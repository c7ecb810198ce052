"""Where sync and async meet, and nowhere else.

An operation on a store is written once, as a *flow*: a generator that yields calls and is sent their answers. A call is
a function of the store (``lambda store: store.head(lane)``). ``drive`` runs a flow here and now; ``Offload`` runs a
whole flow in a worker thread for callers that have an event loop, so that the loop never waits for a disk and each
operation costs one hop, not one per store call.

An error of the store is thrown into the flow at the line that asked, so that the flow can react and the traceback shows
it. A flow holds no transaction while it waits; the lock of the caller's own handle is the only one held around it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast.store.base import Backend

T = TypeVar("T")

Call = Callable[[Backend], Any]
Flow = Generator[Call, Any, T]

WORKERS_MAX = 8
"""Threads per asynchronous store: enough for concurrent savers to share commits."""


def ask(call: Callable[[Backend], T]) -> Flow[T]:
    """Return the answer to one call of the store, typed; used with ``yield from``."""
    answer: T = yield call
    return answer


def drive(flow: Flow[T], store: Backend) -> T:
    """Run a flow to its end in this thread."""
    try:
        call = next(flow)
        while True:
            try:
                answer = call(store)
            except BaseException as error:
                call = flow.throw(error)
            else:
                call = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's return value, typed by Flow[T]


def locked(lock: AbstractContextManager[Any], flow: Flow[T]) -> Flow[T]:
    """Run a flow while holding a handle's lock: the operations of one handle happen one after the other."""
    with lock:
        return (yield from flow)


class Offload:
    """Runs flows in worker threads on behalf of an event loop."""

    def __init__(self, store: Backend) -> None:
        self._store = store
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    async def run(self, flow: Flow[T]) -> T:
        """Run a flow in a worker and wait for it.

        A cancelled caller leaves at once; the flow goes on to its end, so that a commit under way is never torn.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers(), drive, flow, self._store)

    def close(self) -> None:
        """Wait for what is under way and end the workers."""
        pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown(wait=True)

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="holdfast")
            self._process = os.getpid()
        return self._pool
