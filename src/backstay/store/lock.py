"""One writer at a time over all processes, in the order in which they ask.

SQLite's own write lock is taken by trying again after a pause, and whoever pauses longest loses: with four busy
writers one may wait for more than a second. ``flock`` queues in the kernel instead.

A lock that is held is an open file of its own, and closing it gives the lock back. So it keeps out the other threads of
this process as it keeps out other processes, and two users of it cannot give back each other's. What ``take`` returns
is an object of Python's own, written in C, because ``with`` on such an object cannot be interrupted: no signal comes
between taking it and entering the block, nor between leaving the block and closing it.

``flock`` has no timeout, so a wait that must be able to end happens in a helper thread with an open file of its own;
without contention there is neither thread nor wait.
"""

from __future__ import annotations

import _thread
import contextlib
import io
import os
import sys
import threading
from contextlib import AbstractContextManager
from typing import Protocol

from backstay.errors import StoreBusy, StoreError, StoreRefused

if sys.platform != "win32":
    import fcntl

    _WAIT, _NOW = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB

_CLOSED_IN_CHILDREN: set[int] = set()
"""Descriptors of helper threads that wait. A forked process that kept one open would share its lock for ever."""


class Held(AbstractContextManager[object], Protocol):
    """A lock that was taken: an open file. Leaving its ``with`` block, or closing it, gives the lock back."""

    def close(self) -> None:
        """Give the lock back."""


class ProcessLock:
    """An exclusive lock on a file that exists for this alone, to be held for one transaction."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def take(self) -> AbstractContextManager[object]:
        """Return the lock, taken, for a ``with`` statement; raise StoreBusy if it cannot be had within the timeout."""
        if sys.platform == "win32":  # no flock there: SQLite's busy handler alone decides who is next
            return contextlib.nullcontext()
        try:
            return self._locked(_NOW)
        except BlockingIOError:
            return self._wait()
        except OSError as error:
            raise self._failed(error) from error

    def take_now(self) -> AbstractContextManager[object] | None:
        """Return the lock, taken, or None if somebody else has it."""
        if sys.platform == "win32":  # as above
            return contextlib.nullcontext()
        try:
            return self._locked(_NOW)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._failed(error) from error

    def _wait(self) -> AbstractContextManager[object]:
        held = _Waiter(self).wait(self._timeout_s)
        if held is not None:
            return held
        raise StoreBusy(
            f"another process kept the store locked for {self._timeout_s:g} s",
            path=self._path,
            hint="Try again; if it stays locked, look for a stopped process that has the store open",
        )

    def _locked(self, how: int) -> Held:
        """Open the file and lock it; ``how`` says whether to wait."""
        file = io.FileIO(self._path, "r+", opener=_open_private)
        try:
            if how == _NOW:
                fcntl.flock(file.fileno(), how)
            else:
                _wait_for(file.fileno())
            return file
        except BaseException:
            file.close()
            raise

    def _failed(self, error: OSError) -> StoreError:
        what = f"cannot lock {self._path}: {error.strerror}"
        return StoreRefused(what, path=self._path, hint="Check the rights of the file and of its folder")


class DirectoryLock(ProcessLock):
    """An exclusive lock on a directory itself: nobody can remove or replace it and leave its files where they are."""

    def _locked(self, how: int) -> Held:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if how == _NOW:
                fcntl.flock(descriptor, how)
            else:
                _wait_for(descriptor)
            return os.scandir(descriptor)  # has a descriptor of its own for the same open file, so keeps its lock
        finally:
            os.close(descriptor)


def is_mine(lock: threading.RLock) -> bool:
    """Tell whether this thread holds a lock: then a signal handler or a finalizer has interrupted its holder."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # what threading.Condition relies on too


def reentered(path: str) -> StoreError:
    """Return the error for a call from inside another call of the same thread, which can never be waited for."""
    return StoreError(
        "this thread is in the middle of another call to the store, so nothing was done: the call came from a signal "
        "handler, a __del__ method or a weak reference's callback",
        path=path,
        hint="In a signal handler only set a flag, and save when the call that was interrupted has returned",
    )


class _Waiter:
    """Waits for the lock in a thread of its own, which gives it back if nobody is there any more to take it.

    The thread is started without ``threading.Thread``, whose start waits in code that an interrupt can break.
    """

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock
        self._held: Held | None = None  # had, and not taken yet
        self._error: OSError | None = None
        self._asking = threading.Lock()  # held by who asks, until it takes the lock or leaves without
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self, timeout_s: float) -> Held | None:
        with self._asking:
            _thread.start_new_thread(self._run, ())
            self._ended.acquire(timeout=timeout_s)
            held, self._held = self._held, None
        if self._error is not None:
            raise self._lock._failed(self._error) from self._error
        return held

    def _run(self) -> None:
        try:
            self._held = self._lock._locked(_WAIT)
        except OSError as error:
            self._error = error
        self._ended.release()
        with self._asking:
            if self._held is not None:
                self._held.close()


def _wait_for(descriptor: int) -> None:
    _CLOSED_IN_CHILDREN.add(descriptor)
    try:
        fcntl.flock(descriptor, _WAIT)
    finally:
        _CLOSED_IN_CHILDREN.discard(descriptor)


def _open_private(path: str, flags: int) -> int:
    flags |= os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o600)
        os.fchmod(descriptor, 0o600)  # whatever the umask is: it is opened again for every transaction
        return descriptor


def _after_fork_in_child() -> None:
    for descriptor in _CLOSED_IN_CHILDREN:
        os.close(descriptor)
    _CLOSED_IN_CHILDREN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
