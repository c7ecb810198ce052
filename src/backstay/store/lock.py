"""Locks: one writer at a time over all processes, and a guard that knows the calls in progress.

SQLite's own write lock is taken by trying again after a pause, and the process that pauses longest loses: with four
busy writers one may wait for more than a second. ``flock`` queues in the kernel instead. A held lock is an open file of
its own, and closing it releases the lock. So it keeps out other threads of this process as well as other processes, and
two users cannot release each other's lock. ``take`` returns an object of Python's own, written in C, because ``with``
on such an object cannot be interrupted between taking the lock and entering the block, or between leaving the block and
closing it. ``flock`` has no timeout, so a wait with a time limit happens in a helper thread with an open file of its
own; without contention there is neither a thread nor a wait.

The guard lets a close or a fork wait for calls in progress. A child process that inherits a SQLite connection can lose
committed data even through connections of its own, because SQLite thinks it still holds the parent's locks; and a child
that inherits a lock keeps it. So before a fork every registered store waits for its calls and disconnects; it connects
again later, in both processes, when needed. Each thread has a lock of its own that it holds during a call, and a fork
takes them all. There is no counter to maintain: an exception between any two instructions leaves no lock held, and a
signal handler that calls again finds its own thread's lock.
"""

from __future__ import annotations

import _thread
import contextlib
import io
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from backstay.errors import StoreBusy, StoreError, StoreRefused

if sys.platform != "win32":
    import fcntl

    _WAIT, _NOW = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB

_CLOSED_IN_CHILDREN: set[int] = set()
"""Descriptors of waiting helper threads. A forked process that kept one open would share its lock forever."""


class HeldLock(AbstractContextManager[object], Protocol):
    """A lock that was taken: an open file. Leaving its ``with`` block, or closing it, releases the lock."""

    def close(self) -> None:
        """Release the lock."""


class ProcessLock:
    """An exclusive lock on a file that exists only for this, held for one transaction."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self._timeout_s = timeout_s

    def take(self) -> AbstractContextManager[object]:
        """Take the lock and return it for a ``with`` statement; raise StoreBusy after the timeout."""
        if sys.platform == "win32":  # no flock there: SQLite's busy handler alone decides who is next
            return contextlib.nullcontext()
        try:
            return self._locked(_NOW)
        except BlockingIOError:
            held = _Waiter(self).wait(self._timeout_s)
        except OSError as error:
            raise self._failed(error) from error
        if held is not None:
            return held
        raise StoreBusy(
            f"another process held the store's lock for more than {self._timeout_s:g} s",
            path=self.path,
            hint="Try again; if it stays locked, look for a suspended process that has the store open",
        )

    def take_now(self) -> AbstractContextManager[object] | None:
        """Take the lock and return it, or return None if it is held."""
        if sys.platform == "win32":  # as above
            return contextlib.nullcontext()
        try:
            return self._locked(_NOW)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._failed(error) from error

    def _locked(self, how: int) -> HeldLock:
        """Open the file and lock it; ``how`` says whether to wait."""
        file = io.FileIO(self.path, "r+", opener=_open_private)
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
        what = f"cannot lock {self.path}: {error.strerror}"
        return StoreRefused(what, path=self.path, hint="Check the permissions of the file and its folder")


class DirectoryLock(ProcessLock):
    """An exclusive lock on a directory itself, which cannot be removed or replaced while its files stay."""

    def _locked(self, how: int) -> HeldLock:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if how == _NOW:
                fcntl.flock(descriptor, how)
            else:
                _wait_for(descriptor)
            return os.scandir(descriptor)  # duplicates the descriptor, so it keeps the lock
        finally:
            os.close(descriptor)


def is_mine(lock: threading.RLock) -> bool:
    """Return whether this thread holds a lock: then a signal handler or a finalizer interrupted its holder."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # threading.Condition relies on it too


def reentered(path: str) -> StoreError:
    """Return the error for a call from inside another call of the same thread, which would wait for itself."""
    return StoreError(
        "a signal handler, a __del__ method or a weakref callback called the store while this thread was inside "
        "another call; the inner call did nothing",
        path=path,
        hint="In a signal handler only set a flag, and save after the interrupted call has returned",
    )


class _Waiter:
    """Waits for the lock in a thread of its own, which releases it if the caller has given up.

    The thread is started without ``threading.Thread``, whose start waits in code that an interrupt can break.
    """

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock
        self._held: HeldLock | None = None  # acquired, but not taken by the caller yet
        self._error: OSError | None = None
        self._asking = threading.Lock()  # held by the caller until it takes the lock or gives up
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self, timeout_s: float) -> HeldLock | None:
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
        os.fchmod(descriptor, 0o600)  # despite the umask: it is opened again for every transaction
        return descriptor


class CallGuard:
    """Lets calls in until the store is closed. A call is made as ``with guard.mine(): guard.check()``."""

    def __init__(self) -> None:
        self._closed = False
        self._forking: threading.RLock | None = None
        self.reset()

    def mine(self) -> threading.RLock:
        """Return the lock that this thread holds during its calls; call ``check`` first inside it."""
        thread = threading.get_ident()
        lock = self._locks.get(thread) or self._locks.setdefault(thread, threading.RLock())
        forking = self._forking  # read after the lock is in the dict: a later fork sees the lock and waits for it
        if forking is not None and not is_mine(lock):
            with forking:
                pass
        return lock

    def check(self) -> None:
        """Raise StoreError after a close, and in a copy of the process that was made without Python's fork hooks."""
        if self._process != os.getpid():
            raise StoreError(
                "the store was opened in another process; this one is a copy made without Python's fork hooks",
                hint="Open the store after forking, or fork with os.fork or multiprocessing",
            )
        if self._closed:
            raise StoreError("the store is closed", hint="Open it again with backstay.open")

    def shut(self) -> None:
        """Admit no new calls, and wait until all other threads have left theirs."""
        self._forking = threading.RLock()
        for lock in (self._forking, *self._locks.values()):
            self._taken.append(lock)
            lock.acquire()

    def reopen(self) -> None:
        """Admit calls again."""
        self._forking = None
        while self._taken:
            lock = self._taken.pop()
            if is_mine(lock):
                lock.release()

    def close(self) -> bool:
        """Refuse new calls and wait for those in progress; return False if it was closed before."""
        was_closed, self._closed = self._closed, True
        for lock in list(self._locks.values()):
            with lock:
                pass
        return not was_closed

    def reset(self) -> None:
        """Start afresh in a forked process, where no call is in progress."""
        self._locks: dict[int, threading.RLock] = {}  # by thread id; ids of ended threads are reused
        self._taken: list[threading.RLock] = []
        self._forking = None
        self._process = os.getpid()


class Disconnecting(Protocol):
    """A store that must be disconnected before a fork."""

    guard: CallGuard

    def disconnect(self) -> None:
        """Close all connections; they are opened again when needed."""


_open: weakref.WeakSet[Disconnecting] = weakref.WeakSet()


def register(store: Disconnecting) -> None:
    """Disconnect the store before every fork from now on."""
    _open.add(store)


def forget(store: Disconnecting) -> None:
    """Undo ``register``."""
    _open.discard(store)


# Forking ----------------------------------------------------------------------------------------------------------


def _before_fork() -> None:
    for store in list(_open):
        store.guard.shut()
        store.disconnect()


def _all_guards(action: Callable[[CallGuard], None]) -> None:
    for store in list(_open):
        action(store.guard)


def _after_fork_in_child() -> None:
    for descriptor in _CLOSED_IN_CHILDREN:
        os.close(descriptor)
    _CLOSED_IN_CHILDREN.clear()
    _all_guards(CallGuard.reset)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=lambda: _all_guards(CallGuard.reopen), after_in_child=_after_fork_in_child
    )
