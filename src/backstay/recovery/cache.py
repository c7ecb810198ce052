"""Values of earlier successes, to be used when nothing better is to be had, with their age."""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from backstay.errors import Conflict
from backstay.model.ids import check_id
from backstay.store.base import Backend
from backstay.thread.access import handle_of
from backstay.thread.load import latest
from backstay.thread.save import Request, save_append
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

WRITES_MAX = 5
"""How often a cache in a thread tries to write while others write too."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A value and its age."""

    value: Any = field(repr=False)
    age_s: float


class Cache(Protocol):
    """Where values are kept. Both methods may be coroutine functions if the recovery is asynchronous."""

    def get(self, key: str) -> Cached | Awaitable[Cached | None] | None:
        """Return the newest value put under a key, or None."""

    def put(self, key: str, value: Any) -> object:
        """Keep a value under a key, instead of any older one."""


class MemoryCache:
    """Keeps values as long as the process lives. Values go in and come out as copies."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, tuple[Any, float]] = {}  # each put is one assignment, so there is no lock

    def get(self, key: str) -> Cached | None:
        """Return the newest value put under a key, or None."""
        found = self._values.get(key)
        return None if found is None else Cached(copy.deepcopy(found[0]), max(0.0, self._clock() - found[1]))

    def put(self, key: str, value: Any) -> None:
        """Keep a value under a key."""
        self._values[key] = (copy.deepcopy(value), self._clock())


class ThreadCache:
    """Keeps values in a thread of their own, so that they survive the process: each ``put`` is a save there."""

    def __init__(self, thread: Thread | AsyncThread) -> None:
        self._handle = handle_of(thread)

    def get(self, key: str) -> Any:
        """Return the newest value put under a key, or None; to be awaited if the thread's methods are."""
        return self._handle.run_either(self._getting, check_id(key, "cache key"))

    def put(self, key: str, value: Any) -> Any:
        """Keep a value under a key; to be awaited if the thread's methods are."""
        return self._handle.run_either(self._putting, check_id(key, "cache key"), value)

    def _getting(self, store: Backend, key: str) -> Cached | None:
        found = latest(store, self._handle.cursor)
        entry = None if found is None else found.state.get(key)
        if entry is None:
            return None
        put_at: datetime = entry["at"]
        return Cached(entry["value"], max(0.0, (self._handle.context.now() - put_at).total_seconds()))

    def _putting(self, store: Backend, key: str, value: Any) -> None:
        for tries in range(1, WRITES_MAX + 1):
            entry = {key: {"value": value, "at": self._handle.context.now()}}
            try:
                save_append(store, self._handle.context, self._handle.cursor, None, entry, (), Request({}))
            except Conflict:  # somebody put something else: it stays, this is added
                if tries == WRITES_MAX:
                    raise
                latest(store, self._handle.cursor)
            else:
                return
