"""Give higher packages access to the operations behind a thread or a store.

An operation is a plain function that takes the store first: ``save_append(store, services, cursor, …)``. ``access_of``
and ``handle_of`` return what you need to run one. ``awaited`` derives a method of an async twin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from backstay.model.checkpoint import Checkpoint, CheckpointMeta, SavedCheckpoint, unchecked
from backstay.operations.cursor import Access, Handle

if TYPE_CHECKING:
    from backstay.thread.store import AsyncStore, Store
    from backstay.thread.thread import AsyncThread, Thread

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Twin(Protocol[S]):
    """The async twin of a class: it holds the object whose methods it calls, and the workers that run them."""

    _access: Access
    _sync: S


def awaited(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Twin[S], P], Coroutine[Any, Any, T]]:
    """Return a method of a class as a method of its async twin, which runs it in a worker thread."""

    @functools.wraps(method)
    async def call(self: Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._access.offload.run(method, self._sync, *args, **kwargs)

    return call


def access_of(store: Store | AsyncStore | Thread | AsyncThread) -> Access:
    """Return what operations on an open store need, given the store or one of its threads."""
    return store._access


def handle_of(thread: Thread | AsyncThread) -> Handle:
    """Return what operations on a thread need."""
    return thread._handle


def saved_by(thread: Thread | AsyncThread, meta: CheckpointMeta) -> Checkpoint:
    """Return a checkpoint of a thread whose payload is loaded when it is first used."""
    saved = meta if isinstance(meta, SavedCheckpoint) else unchecked(SavedCheckpoint, dict(meta.__dict__))
    sync: Any = getattr(thread, "_sync", thread)
    bound: Checkpoint = sync._bind(saved)
    return bound
