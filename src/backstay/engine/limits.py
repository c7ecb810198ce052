"""Limits: how many run at the same time, and how many start per second.

One limit may be shared by runs in several threads, each with its own event loop. Waiting is asynchronous, and in order.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Place:
    """One caller that waits for its turn, or has it."""

    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]

    def wake(self) -> None:
        """Let the caller know that it has its turn. It may have been cancelled meanwhile."""
        if not self.granted.done():
            self.granted.set_result(None)


class Limiter:
    """At most ``at_once`` blocks run at the same time, and at most ``per_second`` start in a second.

    A caller joins the queue, waits, runs, and leaves. It may leave in every state, so a cancellation or an exception
    from a signal handler can neither lose a place nor give it away twice.
    """

    def __init__(self, at_once: int | None = None, per_second: float | None = None) -> None:
        self._at_once = at_once
        self._every_s = 0.0 if per_second is None else 1 / per_second
        self._pace = None if per_second is None else Limiter(1)  # the first in the queue waits for the next start
        self._next_start = float("-inf")
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler may run a graph while it interrupts this code
        self._waiting: deque[_Place] = deque()
        self._running: set[_Place] = set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place and for the next start; hold the place while the block runs."""
        if self._process != os.getpid():  # the holders of the places did not survive the fork
            self._reset()
        loop = asyncio.get_running_loop()
        place = _Place(loop, loop.create_future())
        try:
            if self._at_once is not None:
                with self._lock:
                    self._waiting.append(place)
                    self._grant()
                if place not in self._running:
                    await place.granted
            if self._pace is not None:
                async with self._pace.turn():
                    await asyncio.sleep(max(0.0, self._next_start - time.monotonic()))
                    self._next_start = max(self._next_start, time.monotonic()) + self._every_s
            yield
        finally:
            with self._lock:
                self._running.discard(place)
                if place in self._waiting:
                    self._waiting.remove(place)
                self._grant()

    def _grant(self) -> None:
        """Give free places to those who wait longest."""
        while self._waiting and self._at_once is not None and len(self._running) < self._at_once:
            place = self._waiting[0]
            self._running.add(place)
            self._waiting.popleft()
            try:
                place.loop.call_soon_threadsafe(place.wake)
            except RuntimeError:  # its loop is closed, so no caller waits
                self._running.discard(place)
