"""One writer at a time over all processes, in the order in which they ask.

SQLite's own write lock is taken by trying again after a pause, and whoever pauses longest loses: with four busy
writers one may wait for more than a second. ``flock`` queues in the kernel instead. It lives in a file of its own
beside the database, because closing any descriptor of the database itself would drop SQLite's locks. The directory
store and the session files use it too.

``flock`` has no timeout, so a wait that must be able to end happens in a helper thread with a descriptor of its own;
without contention there is neither thread nor wait.
"""

from __future__ import annotations

import os
import sys
import threading

from holdfast.errors import StoreBusy, StoreError, StoreRefused

if sys.platform != "win32":
    import fcntl


class ProcessLock:
    """An exclusive lock on a file's name, to be held for one transaction."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._fd = self._open()
        self._held = -1
        self._waiting: set[int] = set()  # descriptors of waits, and of the lock if it had to be waited for

    def acquire(self) -> None:
        """Take the lock; raise StoreBusy if it cannot be had within the timeout."""
        if sys.platform == "win32":  # no flock there: SQLite's busy handler alone decides who is next
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = self._fd
        except BlockingIOError:
            self._held = self._wait()
        except OSError as error:
            raise StoreError(f"cannot lock {self._path}: {error.strerror}", path=self._path) from error

    def acquire_now(self) -> bool:
        """Take the lock if nobody has it; return whether it was taken."""
        if sys.platform == "win32":  # as above
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._held = self._fd
        return True

    def release(self) -> None:
        """Give the lock back."""
        if sys.platform == "win32":  # no flock there: SQLite's busy handler alone decides who is next
            return
        held, self._held = self._held, -1
        try:
            fcntl.flock(held, fcntl.LOCK_UN)  # closing alone does not do it if a forked process has the file open too
        finally:
            if held != self._fd:
                self._waiting.discard(held)
                os.close(held)

    def abandon(self) -> None:
        """Close everything in a forked process, which shares its parent's locks as long as it has the file open."""
        for descriptor in (*self._waiting, self._fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._waiting.clear()
        self._fd = self._held = -1

    def close(self) -> None:
        """Release the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            raise StoreRefused(f"cannot make the lock file {self._path}: {error.strerror}", path=self._path) from error

    def _wait(self) -> int:
        waiter = _Waiter(self._open(), self._waiting)
        if waiter.wait(self._timeout_s):
            return waiter.fd
        raise StoreBusy(
            f"another process kept the store locked for {self._timeout_s:g} s",
            path=self._path,
            hint="Try again; if it stays locked, look for a stopped process that has the store open",
        )


class _Waiter(threading.Thread):
    """Waits for the lock; whoever gave up waiting leaves the descriptor to this thread to close."""

    def __init__(self, fd: int, waiting: set[int]) -> None:
        super().__init__(name="holdfast-lock", daemon=True)
        self.fd = fd
        self._waiting = waiting
        waiting.add(fd)
        self._done = threading.Event()
        self._handover = threading.Lock()
        self._abandoned = False
        self.start()

    def run(self) -> None:
        if sys.platform == "win32":
            return
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        with self._handover:
            if self._abandoned:
                self._waiting.discard(self.fd)
                os.close(self.fd)
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        if self._done.wait(timeout_s):
            return True
        with self._handover:
            self._abandoned = not self._done.is_set()
            return not self._abandoned
