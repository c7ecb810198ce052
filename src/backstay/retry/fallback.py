"""Fallbacks: what to do instead when an operation keeps failing, and the caches that some of them read.

A fallback whose function raises has failed too; then the next one is tried.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from backstay.errors import Conflict, InvalidInput
from backstay.model.ids import check_id
from backstay.operations.load import latest
from backstay.operations.save import SaveRequest, save_append
from backstay.store.base import Backend
from backstay.thread.access import handle_of
from backstay.thread.thread import AsyncThread, Thread

WRITES_MAX = 5
"""How often a cache in a thread tries to write while other processes write too."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A value and its age."""

    value: Any = field(repr=False)
    age_s: float


class Cache(Protocol):
    """Keeps the values of earlier successes. With ``AsyncErrorRecovery`` both methods may be coroutine functions."""

    def get(self, key: str) -> Cached | Awaitable[Cached | None] | None:
        """Return the newest value of a key, or None."""

    def put(self, key: str, value: Any) -> object:
        """Store the value of a key, in place of any older one."""


class MemoryCache:
    """Keeps copies of values in memory, as long as the process lives."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, tuple[Any, float]] = {}  # no lock: each put is one assignment

    def get(self, key: str) -> Cached | None:
        """Return the newest value of a key, or None."""
        found = self._values.get(key)
        return None if found is None else Cached(copy.deepcopy(found[0]), max(0.0, self._clock() - found[1]))

    def put(self, key: str, value: Any) -> None:
        """Store the value of a key."""
        self._values[key] = (copy.deepcopy(value), self._clock())


class ThreadCache:
    """Keeps values in a thread of their own, so that they survive the process. Each ``put`` saves a checkpoint."""

    def __init__(self, thread: Thread | AsyncThread) -> None:
        self._handle = handle_of(thread)

    def get(self, key: str) -> Any:
        """Return the newest value of a key, or None; an awaitable if the thread is asynchronous."""
        check_id(key, "cache key")
        handle = self._handle

        def read(store: Backend) -> Cached | None:
            found = latest(store, handle.cursor)
            entry = None if found is None else found.state.get(key)
            if entry is None:
                return None
            stored_at: datetime = entry["at"]
            return Cached(entry["value"], max(0.0, (handle.services.now() - stored_at).total_seconds()))

        return handle.run_either(read)

    def put(self, key: str, value: Any) -> Any:
        """Store the value of a key; returns an awaitable if the thread is asynchronous."""
        check_id(key, "cache key")
        services, cursor = self._handle.services, self._handle.cursor

        def write(store: Backend) -> None:
            for tries in range(1, WRITES_MAX + 1):
                entry = {key: {"value": value, "at": services.now()}}
                try:
                    save_append(store, services, cursor, None, entry, (), SaveRequest({}))
                except Conflict:  # another process has stored something: load it and add this entry
                    if tries == WRITES_MAX:
                        raise
                    latest(store, cursor)
                else:
                    return

        return self._handle.run_either(write)


class FallbackKind(StrEnum):
    """The kinds of fallbacks."""

    NONE = "none"
    CALL = "call"  # calls a function
    BACKUP_SERVICE = "backup_service"  # calls a function with the address of another service
    USE_CACHE = "use_cache"  # returns the value of an earlier success
    SIMPLIFIED = "simplified"  # calls a function with the name of a simpler mode
    SKIP = "skip"  # continues without a result


@dataclass(frozen=True, slots=True)
class FallbackStrategy:
    """One fallback; the methods below make one of each kind."""

    kind: FallbackKind
    name: str
    function: Callable[[], Any] | None = field(default=None, repr=False)
    service: str | None = None
    automatic: bool = True  # False: only if a person chooses it
    max_age_s: float = 0.0
    key: str | None = None
    cache: Cache | None = field(default=None, repr=False)
    value: Any = field(default=None, repr=False, hash=False)

    @classmethod
    def none(cls) -> FallbackStrategy:
        """Do nothing instead: the operation has failed."""
        return cls(FallbackKind.NONE, "none")

    @classmethod
    def call(cls, function: Callable[[], Any], *, name: str | None = None) -> FallbackStrategy:
        """Call a function and return its result. ``name`` identifies the fallback, by default the function's name."""
        _check(function)
        return cls(
            FallbackKind.CALL, f"call {name or getattr(function, '__name__', type(function).__name__)}", function
        )

    @classmethod
    def backup_service(
        cls, endpoint: str, function: Callable[[str], Any], *, automatic: bool = True
    ) -> FallbackStrategy:
        """Call a function with the address of another service.

        With ``automatic=False`` this happens only if a person chooses it: for a service that is expensive, or worse.
        """
        _check(function)
        service = check_id(endpoint, "endpoint")
        return cls(
            FallbackKind.BACKUP_SERVICE, f"backup {service}", lambda: function(service), service, automatic is True
        )

    @classmethod
    def use_cache(cls, max_age: float, key: str | None = None, *, cache: Cache | None = None) -> FallbackStrategy:
        """Return the value of an earlier success that is at most ``max_age`` seconds old.

        Every success is put into the ``cache``, by default one in memory; a ``ThreadCache`` survives the process.
        ``key`` names the value there; by default it is the key or name of the operation.
        """
        if isinstance(max_age, bool) or not isinstance(max_age, int | float) or not max_age >= 0:
            raise InvalidInput(f"max_age must be a number of seconds, 0 or more, not {max_age!r:.40}")
        chosen = MemoryCache() if cache is None else cache
        if not all(callable(getattr(chosen, method, None)) for method in ("get", "put")):
            raise InvalidInput(
                "a cache must have get(key) and put(key, value)",
                hint="Use MemoryCache(), ThreadCache(thread) or a class of your own",
            )
        if key is not None:
            check_id(key, "cache key")
        name = "cache" if key is None else f"cache {key}"
        return cls(FallbackKind.USE_CACHE, name, max_age_s=float(max_age), key=key, cache=chosen)

    @classmethod
    def simplified(cls, mode: str, function: Callable[[str], Any]) -> FallbackStrategy:
        """Call a function with the name of a simpler mode."""
        _check(function)
        check_id(mode, "mode")
        return cls(FallbackKind.SIMPLIFIED, f"simplified {mode}", lambda: function(mode))

    @classmethod
    def skip(cls, value: Any = None) -> FallbackStrategy:
        """Continue with this value instead of a result."""
        return cls(FallbackKind.SKIP, "skip", value=value)


def _check(function: object) -> None:
    if not callable(function):
        raise InvalidInput(
            f"a fallback needs a function, not {type(function).__name__}", hint="For example FallbackStrategy.call(f)"
        )


def check_strategies(given: object) -> tuple[FallbackStrategy, ...]:
    """Return the fallbacks in their order. The ledger finds them by name, so no two may have the same name."""
    strategies = given if isinstance(given, Iterable) else (given,)
    wanted: list[FallbackStrategy] = []
    for each in strategies:
        if not isinstance(each, FallbackStrategy):
            raise InvalidInput(
                f"fallback must be a FallbackStrategy or a list of them, not {type(each).__name__}",
                hint="For example FallbackStrategy.call(f)",
            )
        if each.name in [other.name for other in wanted]:
            raise InvalidInput(
                f"two fallbacks have the name {each.name!r}",
                hint="Name one of them differently: FallbackStrategy.call(f, name=...)",
            )
        if each.kind is not FallbackKind.NONE:
            wanted.append(each)
    return tuple(wanted)
