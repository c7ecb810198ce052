"""How threads and stores, and the packages above them, reach the operations.

An operation is a plain function that takes the store first: ``save_append(store, context, cursor, …)``. ``Handle.run``
holds the handle's lock and calls it; ``Handle.arun`` does the same in a worker thread, one hop for the whole
operation. Users never see these classes: ``handle_of`` and ``access_of`` give them to the engine, the LangGraph saver
and the other packages that run operations of their own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from backstay.store.base import Backend
from backstay.thread.cursor import Context, Cursor
from backstay.thread.offload import Offload

if TYPE_CHECKING:
    from backstay.thread.store import Store
    from backstay.thread.store_async import AsyncStore
    from backstay.thread.thread import Thread
    from backstay.thread.thread_async import AsyncThread

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Access:
    """An open store, for operations that belong to no thread in particular."""

    store: Backend
    context: Context
    offload: Offload

    async def arun(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation in a worker thread."""
        return await self.offload.run(operation, self.store, *args, **kwargs)


class Handle:
    """One handle on one branch: what its operations need, and the lock that keeps them apart."""

    def __init__(self, access: Access, cursor: Cursor, blocking: bool = True) -> None:
        self.access = access
        self.context = access.context  # what all threads of the store share
        self.cursor = cursor
        self.blocking = blocking  # False: an event loop uses it, so nothing may touch the store in that loop's thread

    def run(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation here and now, with the handle's lock."""
        cursor, store = self.cursor, self.access.store
        with cursor.lock:
            if cursor.leftovers:
                cursor.tidy(store)
            return operation(store, *args, **kwargs)

    async def arun(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation in a worker thread, with the handle's lock."""
        return await self.access.offload.run(lambda: self.run(operation, *args, **kwargs))

    def run_either(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run an operation: here and now, or return what to await for it if an event loop uses the handle."""
        return self.run(operation, *args, **kwargs) if self.blocking else self.arun(operation, *args, **kwargs)

    async def arun_undoable(
        self, operation: Callable[[Backend], T], undo: Callable[[Backend], object] | None = None
    ) -> T:
        """Run an operation in a worker thread; if the caller is cancelled meanwhile, undo what nobody would know of.

        The operation runs to its end, so that a commit under way is never torn. ``undo`` may also come first.
        """
        try:
            return await self.arun(operation)
        except asyncio.CancelledError:
            if undo is not None:
                self.cursor.leftovers.append(undo)
                self.access.offload.submit(self.run, lambda store: None)  # to tidy up, unless others do it first
            raise


class Twin(Protocol[S]):
    """What the async twin of a class has: the object whose methods it runs, and the workers that run them."""

    _access: Access
    _sync: S


def awaited(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Twin[S], P], Coroutine[Any, Any, T]]:
    """Return a method of a class as one of its async twin: the same, run in a worker thread."""

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
