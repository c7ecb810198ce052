"""Keeping leases and sessions alive: one thread of an open store renews them all.

Each is renewed when a third of its time has passed. If the store refuses, it is over at once. If a renewal fails for
another reason (the store cannot be reached), it is tried again until the whole time has passed since the last one that
succeeded *began*: from then on the store may have given it to somebody else, and nobody here can know.

The thread starts with the first and ends with the last. It does not survive a fork: a child renews nothing. All are
renewed by one thread, one after the other, so a store that blocks keeps them all waiting.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from backstay.errors import Fenced

BEATS_PER_TTL = 3
TRIES_PER_TTL = 10
CLOSE_S_MAX = 5.0
"""How long ``close`` waits for a renewal that is under way."""


class Pulse:
    """What is kept alive. ``renew`` asks the store and tells whether to go on; ``give_up`` is told why it is over.

    Without ``give_up`` failures never end it: nobody else can take it.
    """

    def __init__(
        self, ttl: float, began: float, renew: Callable[[], bool], give_up: Callable[[Exception], None] | None = None
    ) -> None:
        self.ttl = ttl
        self.stopped = False  # True: it is not renewed any more. One assignment, which nothing can come between
        self._since = began
        self._retry_at = 0.0
        self._renew = renew
        self._give_up = give_up

    @property
    def overdue(self) -> bool:
        """Tell whether its time has passed without a renewal that is known to have succeeded."""
        return time.monotonic() >= self._since + self.ttl

    def extended(self, began: float) -> None:
        """Take note of a call that renewed it and began at this moment (of ``time.monotonic``)."""
        self._since = max(self._since, began)

    def due(self) -> float:
        """Return the moment of the next renewal."""
        return max(self._since + self.ttl / BEATS_PER_TTL, self._retry_at)

    def beat(self) -> bool:
        """Renew it and tell whether to go on."""
        if self.stopped:
            return False
        began = time.monotonic()
        try:
            going_on = self._renew()
        except Exception as error:  # whatever it is: the next try, or the end of its time, decides
            return self._failed(error)
        if going_on:
            self.extended(began)
        return going_on

    def _failed(self, error: Exception) -> bool:
        now, end = time.monotonic(), self._since + self.ttl
        if self._give_up is not None and (isinstance(error, Fenced) or now >= end):
            self._give_up(error)
            return False
        pause = now + self.ttl / TRIES_PER_TTL
        self._retry_at = pause if now >= end else min(pause, end)
        return True


class Heartbeat:
    """The thread that renews, while there is anything to renew."""

    def __init__(self) -> None:
        self._closed = False
        self.renew()

    def renew(self) -> None:
        """Begin anew in a forked process: what the parent keeps alive is the parent's."""
        # Both may be used by a signal handler that interrupts their user, and neither stays locked if that raises.
        self._lock = threading.RLock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._pulses: set[Pulse] = set()
        self._thread: threading.Thread | None = None

    def add(self, pulse: Pulse) -> None:
        """Keep it alive from now on."""
        with self._lock:
            if self._closed:
                return
            self._pulses.add(pulse)
            if self._thread is None:
                # Not Thread.start, which waits: interrupted there it leaves a lock taken that the new thread needs.
                _thread.start_new_thread(self._start, ())
        self._wake.put(None)

    def remove(self, pulse: Pulse) -> None:
        """Let it go."""
        with self._lock:
            self._pulses.discard(pulse)
        self._wake.put(None)

    def close(self) -> None:
        """Let all go and end the thread."""
        self._closed = True
        with self._lock:
            self._pulses.clear()
            thread = self._thread
        self._wake.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)

    def _start(self) -> None:
        """Start the thread, unless there is one. Called in a thread of its own, where no signal comes in between."""
        with self._lock, contextlib.suppress(RuntimeError):  # the program is just ending
            if self._thread is None and self._pulses:
                thread = threading.Thread(target=self._run, name="backstay-heartbeat", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while (pulse := self._next()) is not None:
            if not pulse.beat():
                self.remove(pulse)

    def _next(self) -> Pulse | None:
        """Wait until a pulse is due and return it; None if there is none left."""
        while True:
            with self._lock:
                self._pulses = {pulse for pulse in self._pulses if not pulse.stopped}
                if not self._pulses:
                    self._thread = None
                    return None
                pulse = min(self._pulses, key=Pulse.due)
            wait_s = pulse.due() - time.monotonic()
            if wait_s <= 0:
                return pulse
            with contextlib.suppress(Empty):
                self._wake.get(timeout=wait_s)
