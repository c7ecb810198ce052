"""Where an event loop meets a store, and nowhere else.

A whole operation runs in a worker thread, so that the loop never waits for a disk and each operation costs one hop, not
one per store call.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.store.base import Backend
from holdfast.thread.perform import Flow, drive

T = TypeVar("T")

WORKERS_MAX = 8
"""Threads per asynchronous store: enough for concurrent savers to share commits."""


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
