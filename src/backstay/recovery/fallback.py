"""What is done instead when an operation failed for good: each strategy really does it, or has failed too.

A strategy that calls a function has failed if the function raises; then the next one is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backstay.errors import InvalidInput
from backstay.model.ids import check_id
from backstay.recovery.cache import Cache, MemoryCache


class FallbackKind(StrEnum):
    """What a strategy does."""

    NONE = "none"
    CALL = "call"  # calls a function
    BACKUP_SERVICE = "backup_service"  # calls a function with the address of another service
    USE_CACHE = "use_cache"  # takes the value of an earlier success
    SIMPLIFIED = "simplified"  # calls a function with a mode in which less is asked for
    SKIP = "skip"  # goes on without


@dataclass(frozen=True, slots=True)
class FallbackStrategy:
    """One thing that can be done instead; made by one of the functions below."""

    kind: FallbackKind
    name: str
    function: Callable[[], Any] | None = field(default=None, repr=False)
    service: str | None = None
    automatic: bool = True  # else it is done only if a person says so
    max_age_s: float = 0.0
    key: str | None = None
    cache: Cache | None = field(default=None, repr=False)
    value: Any = field(default=None, repr=False, hash=False)

    @classmethod
    def none(cls) -> FallbackStrategy:
        """Do nothing: the operation stays failed."""
        return cls(FallbackKind.NONE, "none")

    @classmethod
    def call(cls, function: Callable[[], Any], *, name: str | None = None) -> FallbackStrategy:
        """Take what a function returns; ``name`` tells it from others, and is the function's own if left out."""
        called = name or getattr(_check(function), "__name__", type(function).__name__)
        return cls(FallbackKind.CALL, f"call {called}", function)

    @classmethod
    def backup_service(
        cls, endpoint: str, function: Callable[[str], Any], *, automatic: bool = True
    ) -> FallbackStrategy:
        """Call a function with the address of another service.

        With ``automatic=False`` that is done only if a person says so: for one that is dear, or worse.
        """
        _check(function)
        service = check_id(endpoint, "endpoint")
        return cls(
            FallbackKind.BACKUP_SERVICE, f"backup {service}", lambda: function(service), service, automatic is True
        )

    @classmethod
    def use_cache(cls, max_age: float, key: str | None = None, *, cache: Cache | None = None) -> FallbackStrategy:
        """Take the value of an earlier success that is not older than ``max_age`` seconds.

        Every success is put into the ``cache``: the process's memory, unless another is given, such as a
        ``ThreadCache``. ``key`` names the value there; left out it is the operation's own key or name.
        """
        if isinstance(max_age, bool) or not isinstance(max_age, int | float) or not max_age >= 0:
            raise InvalidInput(f"max_age must be a number of seconds, 0 or more, not {max_age!r:.40}")
        chosen = MemoryCache() if cache is None else cache
        if not all(callable(getattr(chosen, method, None)) for method in ("get", "put")):
            raise InvalidInput("a cache must have get(key) and put(key, value)", hint="For example MemoryCache()")
        if key is not None:
            check_id(key, "cache key")
        name = "cache" if key is None else f"cache {key}"
        return cls(FallbackKind.USE_CACHE, name, max_age_s=float(max_age), key=key, cache=chosen)

    @classmethod
    def simplified(cls, mode: str, function: Callable[[str], Any]) -> FallbackStrategy:
        """Call a function with the name of a mode in which less is asked for."""
        _check(function)
        check_id(mode, "mode")
        return cls(FallbackKind.SIMPLIFIED, f"simplified {mode}", lambda: function(mode))

    @classmethod
    def skip(cls, value: Any = None) -> FallbackStrategy:
        """Go on without, with this value."""
        return cls(FallbackKind.SKIP, "skip", value=value)


def _check(function: Any) -> Any:
    if not callable(function):
        raise InvalidInput(f"a fallback needs a function, not {type(function).__name__}")
    return function


def check_strategies(given: object) -> tuple[FallbackStrategy, ...]:
    """Return strategies in their order; no two may have the same name, which is what they are found again by."""
    strategies = (given,) if isinstance(given, FallbackStrategy) else given
    if not isinstance(strategies, list | tuple) or not all(isinstance(each, FallbackStrategy) for each in strategies):
        raise InvalidInput("fallback must be a FallbackStrategy or a list of them", hint="FallbackStrategy.call(f)")
    wanted = tuple(each for each in strategies if each.kind is not FallbackKind.NONE)
    names = [each.name for each in wanted]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"two fallbacks are called {twice!r}", hint="FallbackStrategy.call(f, name=…)")
    return wanted
