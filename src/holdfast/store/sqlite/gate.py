"""Calls under way: counted, so that a close or a fork can wait for them.

A child that inherits a SQLite connection to a file can lose committed data even through connections of its own, because
SQLite thinks it still holds the parent's locks. So at the moment of a fork there must be no connection: whoever is
registered here is disconnected before it, and connects again afterwards, in both processes, when needed.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from holdfast.errors import StoreError


class Gate:
    """Counts the calls under way, so that a close or a fork can wait for them, and refuses calls after a close."""

    def __init__(self) -> None:
        self._renew()
        self._closed = False

    def __enter__(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                "the store was opened in another process than this copy of it",
                hint="Open the store after forking, or fork with os.fork or multiprocessing",
            )
        with self._changed:
            while self._shut:
                self._changed.wait()
            if self._closed:
                raise StoreError("the store is closed", hint="Open it again with holdfast.open")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._shut and not self._inside:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in any more and wait until everybody is out."""
        with self._changed:
            self._shut = True
            while self._inside:
                self._changed.wait()

    def reopen(self) -> None:
        """Let callers in again."""
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def close(self) -> bool:
        """Shut for good; return False if it was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._shut = True
            while self._inside:
                self._changed.wait()
            self._shut = False
            self._changed.notify_all()
            return True

    def renew(self) -> None:
        """Begin anew in a forked process, where nobody else is inside."""
        self._renew()

    def _renew(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._shut = False
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
