"""Run the verbs of the memory store inside the store's locks, so that each takes full effect or none.

A verb is passed to ``_read`` or ``_write`` instead of entering a ``with`` block of its own: only ``with`` on a lock
written in C cannot be interrupted between taking the lock and entering the block. An exception may arrive between
any two instructions (Ctrl-C); it leaves no lock held and no mutation half applied. A call from inside another call (a
signal handler that saves) is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

from backstay.store.base import Removed
from backstay.store.lock import CallGuard, forget, is_mine, reentered, register
from backstay.store.memory.chunks import StoredBytes
from backstay.store.memory.mutations import Mutation
from backstay.store.memory.tables import Tables

T = TypeVar("T")
P = ParamSpec("P")


class MemoryTransactions:
    """The tables, and the locks around them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.guard = CallGuard()
        self._lock = threading.RLock()
        self._tables = Tables(StoredBytes())
        self._unfinished: Mutation | None = None  # the mutation being applied, or whose applying was interrupted
        register(self)

    def _read(self, look: Callable[[], T]) -> T:
        """Run a function that reads the tables, which are as fresh as the contract says."""
        return self._write(look)

    def _write(self, change: Callable[[], T]) -> T:
        """Run a function that reads the tables and applies a mutation, while no other call does."""
        with self._mine():
            self.guard.check()
            with self._lock:
                if self._unfinished is not None:
                    self._apply(self._unfinished)  # from the start again, with the same result
                return change()

    def _apply(self, mutation: Mutation) -> Removed:
        """Apply a mutation; return what it removed."""
        self._unfinished = mutation
        removed = mutation.apply(self._tables)
        self._tables.dropped.clear()
        self._unfinished = None
        return removed

    def _mine(self) -> threading.RLock:
        """Return the lock of this thread's calls; refuse a call from inside another call."""
        lock = self.guard.mine()
        if is_mine(lock) or is_mine(self._lock):
            raise reentered(self.url)
        return lock

    def disconnect(self) -> None:
        """Do nothing: a forked process may keep everything this store has."""

    def close(self) -> None:
        """Refuse new calls, wait for running ones, then release what is open."""
        self._mine()
        self.guard.close()
        with self._mine():
            self._release()
        forget(self)

    def _release(self) -> None:
        """Close what is open: nothing here."""


K = TypeVar("K", bound=MemoryTransactions)


def reading(verb: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """Make a method a verb that only reads."""

    @wraps(verb)
    def call(self: K, /, *given: P.args, **named: P.kwargs) -> T:
        return self._read(partial(verb, self, *given, **named))

    return call


def writing(verb: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """Make a method a verb that may apply a mutation."""

    @wraps(verb)
    def call(self: K, /, *given: P.args, **named: P.kwargs) -> T:
        return self._write(partial(verb, self, *given, **named))

    return call
