"""Calls under way: known, so that a close or a fork can wait for them.

A child that inherits a SQLite connection to a file can lose committed data even through connections of its own, because
SQLite thinks it still holds the parent's locks; and a child that inherits a lock keeps it. So at the moment of a fork
nobody may be inside: whoever is registered here is waited for and disconnected before it, and connects again
afterwards, in both processes, when needed.

Each thread has a lock of its own, which it holds during a call; who wants everybody out takes them all. There is no
count to keep: an exception between any two instructions leaves no lock behind, because ``with`` on a lock that is
written in C cannot be interrupted, and a signal handler that calls again finds its own thread's lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from backstay.errors import StoreError
from backstay.store.lock import is_mine


class Gate:
    """Lets calls in until the store is closed. Every call of a store is made as ``with gate.mine(): gate.check()``."""

    def __init__(self) -> None:
        self._closed = False
        self._forking: threading.RLock | None = None
        self.renew()

    def mine(self) -> threading.RLock:
        """Return the lock that this thread holds during its calls; ``check`` comes first inside it."""
        thread = threading.get_ident()
        lock = self._locks.get(thread) or self._locks.setdefault(thread, threading.RLock())
        forking = self._forking  # read after the lock was made known: who forks later sees the lock and waits for it
        if forking is not None and not is_mine(lock):
            with forking:
                pass
        return lock

    def check(self) -> None:
        """Refuse a call in a copy of the process that nobody told us of, and after a close."""
        if self._process != os.getpid():
            raise StoreError(
                "the store was opened in another process than this copy of it",
                hint="Open the store after forking, or fork with os.fork or multiprocessing",
            )
        if self._closed:
            raise StoreError("the store is closed", hint="Open it again with backstay.open")

    def shut(self) -> None:
        """Let nobody in any more and wait until everybody is out, but for this thread itself."""
        self._forking = threading.RLock()
        for lock in (self._forking, *self._locks.values()):
            self._taken.append(lock)
            lock.acquire()

    def reopen(self) -> None:
        """Let callers in again."""
        self._forking = None
        while self._taken:
            lock = self._taken.pop()
            if is_mine(lock):
                lock.release()

    def close(self) -> bool:
        """Refuse calls from now on and wait until everybody is out; return False if it was closed before."""
        was_closed, self._closed = self._closed, True
        for lock in list(self._locks.values()):
            with lock:
                pass
        return not was_closed

    def renew(self) -> None:
        """Begin anew in a forked process, where nobody else is inside."""
        self._locks: dict[int, threading.RLock] = {}  # by thread; a thread that ended leaves its lock to the next
        self._taken: list[threading.RLock] = []
        self._forking = None
        self._process = os.getpid()


class Disconnecting(Protocol):
    """What must be disconnected before a fork."""

    gate: Gate

    def disconnect(self) -> None:
        """Close all connections; they are opened again when needed."""


_open: weakref.WeakSet[Disconnecting] = weakref.WeakSet()


def register(store: Disconnecting) -> None:
    """Have the store disconnected before every fork from now on."""
    _open.add(store)


def forget(store: Disconnecting) -> None:
    """Undo ``register``."""
    _open.discard(store)


def _before_fork() -> None:
    for store in list(_open):
        store.gate.shut()
        store.disconnect()


def _after_fork_in_parent() -> None:
    for store in list(_open):
        store.gate.reopen()


def _after_fork_in_child() -> None:
    for store in list(_open):
        store.gate.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
