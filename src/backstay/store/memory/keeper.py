"""How the verbs of the memory store run: each inside the store's locks, whole, or not at all.

A verb is run by ``_read`` or ``_write`` instead of opening a block itself, because only ``with`` on a lock that is
written in C cannot be interrupted between taking the lock and entering the block. An exception may come between any two
instructions (Ctrl-C), and a call from inside another one (a signal handler that saves): the first leaves no lock behind
and no fact half taken in, the second is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

from backstay.store.base import Removed
from backstay.store.gate import Gate, forget, register
from backstay.store.lock import is_mine, reentered
from backstay.store.memory.chunks import KeptBytes
from backstay.store.memory.fact import Fact
from backstay.store.memory.tables import Tables

T = TypeVar("T")
P = ParamSpec("P")


class Keeper:
    """Tables, and the locks around them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.gate = Gate()
        self._lock = threading.RLock()
        self._tables = Tables(KeptBytes())
        self._begun: Fact | None = None  # is being taken in, or was when that was interrupted
        register(self)

    def _read(self, look: Callable[[], T]) -> T:
        """Return what a look at the tables shows, which are as fresh as the contract says."""
        return self._write(look)

    def _write(self, change: Callable[[], T]) -> T:
        """Return what a change gives, which looks at the tables and keeps a fact; nobody else does meanwhile."""
        with self._mine():
            self.gate.check()
            with self._lock:
                if self._begun is not None:
                    self._keep(self._begun)  # again, from wherever it was: that comes to the same
                return change()

    def _keep(self, fact: Fact) -> Removed:
        """Make a fact true; return what it took away."""
        self._begun = fact
        removed = self._tables.apply(fact)
        self._tables.dropped.clear()
        self._begun = None
        return removed

    def _mine(self) -> threading.RLock:
        """Return the lock of this thread's calls, unless it is in the middle of one."""
        lock = self.gate.mine()
        if is_mine(lock) or is_mine(self._lock):
            raise reentered(self.url)
        return lock

    def disconnect(self) -> None:
        """Do nothing: a forked process may have all that this store has."""

    def close(self) -> None:
        """Refuse calls from now on; once those under way have ended, let go of what is open."""
        self._mine()
        self.gate.close()
        with self._mine():
            self._let_go()
        forget(self)

    def _let_go(self) -> None:
        """Close what is open: nothing here."""


K = TypeVar("K", bound=Keeper)


def reading(verb: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """Make a method a verb that only looks."""

    @wraps(verb)
    def call(self: K, /, *given: P.args, **named: P.kwargs) -> T:
        return self._read(partial(verb, self, *given, **named))

    return call


def writing(verb: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """Make a method a verb that may keep a fact."""

    @wraps(verb)
    def call(self: K, /, *given: P.args, **named: P.kwargs) -> T:
        return self._write(partial(verb, self, *given, **named))

    return call
