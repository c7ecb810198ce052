"""Parts that all adapters share: the store that an adapter works on, and lists that report problems."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from backstay.codec.msgpack import DEPTH_MAX
from backstay.errors import EncodeError, InvalidInput, StoreError
from backstay.operations.cursor import Services
from backstay.operations.drivers import Offload
from backstay.store.base import Backend
from backstay.store.open import open_backend
from backstay.thread.access import access_of
from backstay.thread.store import AsyncStore, Store, async_twin, make_services

# JSON values: the adapters accept exactly what JSON can express, and refuse anything that only looks like it.
#
# Values are copied deeply, so that a later change by the caller does not alter a record. A value that would come back
# different (a tuple, a NaN, a number as a key) is refused, with its path, before anything is stored.


def copied(value: object, path: str, depth: int = DEPTH_MAX) -> Any:
    """Return a deep copy of a JSON value. EncodeError names the path of a part that JSON cannot express."""
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if type(value) is str:
        return _text(value, path)
    if type(value) is float:
        if not math.isfinite(value):
            _refuse(path, f"is {value}, which JSON does not have", "Use None, or leave it out")
        return value
    if depth == 0:
        _refuse(path, f"is nested more than {DEPTH_MAX} levels deep", "Use a flatter structure")
    if type(value) is list:
        return [copied(item, f"{path}[{index}]", depth - 1) for index, item in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                _refuse(path, f"has a key of type {type(key).__name__}", "Use text keys: JSON has no others")
        return {_text(key, path): copied(item, f"{path}.{key}", depth - 1) for key, item in value.items()}
    _refuse(path, f"is {kind.__name__}, which JSON does not have", "Convert it to text, a number, a list or a dict")


def copied_object(value: object, path: str) -> dict[str, Any]:
    """Return a deep copy of a JSON object."""
    if type(value) is not dict:
        raise InvalidInput(f"{path} must be a dict, not {type(value).__name__}", path=path)
    copy: dict[str, Any] = copied(value, path)
    return copy


def copied_list(value: object, path: str) -> list[Any]:
    """Return a deep copy of a JSON array."""
    if type(value) is not list:
        raise InvalidInput(f"{path} must be a list, not {type(value).__name__}", path=path)
    copy: list[Any] = copied(value, path)
    return copy


def is_same_json(one: object, other: object) -> bool:
    """Return whether two JSON values are the same: 1, 1.0 and True are three values, and so are 0.0 and -0.0 two."""
    if type(one) is not type(other):
        return False
    if type(one) is dict and type(other) is dict:
        return one.keys() == other.keys() and all(is_same_json(one[key], other[key]) for key in one)
    if type(one) is list and type(other) is list:
        return len(one) == len(other) and all(map(is_same_json, one, other))
    return one == other and not (type(one) is float and str(one) != str(other))


def parse_json(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError or RecursionError for anything else, also for NaN and infinities."""
    return json.loads(data, parse_constant=_not_json)


def _not_json(text: str) -> NoReturn:
    raise ValueError(text)


def _text(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            hint = "Check how this text was decoded: a lone surrogate has no UTF-8 form"
            _refuse(path, "contains a lone surrogate", hint)
    return text


def _refuse(path: str, why: str, hint: str) -> NoReturn:
    raise EncodeError(f"{path} {why}", path=path, hint=hint)


P = ParamSpec("P")
T = TypeVar("T")

StoreOrUrl = Store | AsyncStore | str | os.PathLike[str]

in_worker = Offload().run
"""Runs a blocking function in a worker thread, for callers with an event loop."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An entry that a list left out, or shows with a warning.

    ``kind``: "damaged" (fails its checksum or cannot be parsed), "unreadable" (the system refuses access), "foreign"
    (a file of another program, never touched), "unchecked" (has no checksum; shown), "leftover" (a temporary file of a
    writer that died).
    """

    kind: str
    where: str  # a checkpoint's id, or a file's name
    what: str


class Listed(list[T]):
    """A list with the ``problems`` found while it was made. A damaged entry never hides another one."""

    def __init__(self, items: Iterable[T] = (), problems: Iterable[Problem] = ()) -> None:
        super().__init__(items)
        self.problems: tuple[Problem, ...] = tuple(problems)


class AdapterStore:
    """The store of an adapter: an open one, or the path or URL of one that is opened when first used.

    ``close`` closes only a store that was opened here.
    """

    def __init__(self, store: StoreOrUrl, namespace: str = "") -> None:
        if not isinstance(store, Store | AsyncStore | str | os.PathLike):
            raise InvalidInput(
                f"store must be an open store, a path or a URL, not {type(store).__name__}",
                hint='For example StoreBackend("agent.db")',
            )
        if namespace and isinstance(store, Store | AsyncStore):
            raise InvalidInput(
                "namespace= works only with a path or URL: an open store has a namespace already",
                hint="Pass namespace= to backstay.open instead",
            )
        self.given = store
        self._services = make_services(namespace, None)
        self._store: AsyncStore | None = None
        if isinstance(store, Store | AsyncStore):
            self._store = async_twin(store) if isinstance(store, Store) else store
        self._owned = self._store is None
        self._closed = False
        self._lock = threading.Lock()  # only taken in worker threads; two first uses open the store once

    async def store(self) -> AsyncStore:
        """Return the store; the first call opens it."""
        if self._store is not None:
            return self._store

        def open_once() -> AsyncStore:
            with self._lock:
                if self._closed:
                    raise StoreError("the store is closed", hint="Create a new adapter")
                if self._store is None:
                    assert not isinstance(self.given, Store | AsyncStore)
                    self._store = AsyncStore(open_backend(self.given), self._services)
                return self._store

        return await in_worker(open_once)

    async def run(
        self, operation: Callable[Concatenate[Backend, Services, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation on the store in a worker thread."""
        access = access_of(await self.store())
        return await access.arun(operation, access.services, *args, **kwargs)

    async def close(self) -> None:
        """Close the store if it was opened here. Closing twice is fine."""
        if not self._owned:
            return

        def detach() -> AsyncStore | None:
            with self._lock:
                self._closed, store, self._store = True, self._store, None
                return store

        store = await in_worker(detach)
        if store is not None:
            await store.close()
