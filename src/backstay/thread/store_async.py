"""``AsyncStore``: ``Store`` for callers with an event loop. Same names, same arguments, same functions; awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any, Literal, Unpack, overload

from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.model.damaged import Damaged, OnDamage, check_on_damage
from backstay.model.interrupt import InterruptKind
from backstay.model.lease import ExpiredLease
from backstay.model.session import InterruptedRun, Session
from backstay.store.base import Backend
from backstay.store.open import open_backend
from backstay.thread.access import access_of, awaited
from backstay.thread.arguments import lane_key
from backstay.thread.cursor import Context, Cursor
from backstay.thread.damage import alisted
from backstay.thread.history import Filter, Wanted, listing_of_threads
from backstay.thread.interrupts import InterruptRecord, inbox_of
from backstay.thread.lease import AsyncLease, check_terms, claim
from backstay.thread.store import Store, make_context
from backstay.thread.thread_async import AsyncThread, OnLost


async def aopen(
    url: str | os.PathLike[str], *, namespace: str = "", clock: Callable[[], datetime] | None = None
) -> AsyncStore:
    """Open a store for use with an event loop; see ``open``."""
    context = make_context(namespace, clock)
    return AsyncStore(await asyncio.to_thread(open_backend, url), context)


def async_twin(store: Store) -> AsyncStore:
    """Return an open store for use with an event loop; both share everything, and closing one closes the other."""
    twin = AsyncStore.__new__(AsyncStore)
    twin._wrap(store)
    return twin


class AsyncStore:
    """An open store. Close it, or use it in an ``async with`` block, from any event loop."""

    def __init__(self, backend: Backend, context: Context) -> None:
        self._wrap(Store(backend, context))

    def _wrap(self, store: Store) -> None:
        self._sync = store
        self._access = access_of(store)

    @property
    def url(self) -> str:
        """Return what the store was opened with."""
        return self._sync.url

    @property
    def namespace(self) -> str:
        """Return the namespace everything here happens in."""
        return self._sync.namespace

    def thread(self, thread_id: str, *, branch: str = MAIN, scope: str = "") -> AsyncThread:
        """Return a handle on a thread's branch; nothing is read or written until it is used."""
        return AsyncThread(self._access, Cursor(lane_key(self.namespace, thread_id, branch, scope)))

    get = awaited(Store.get)
    delete_thread = awaited(Store.delete_thread)
    clear = awaited(Store.clear)
    prune = awaited(Store.prune)
    verify = awaited(Store.verify)
    stats = awaited(Store.stats)
    compact = awaited(Store.compact)

    @overload
    def threads(
        self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[Wanted]
    ) -> AsyncIterator[CheckpointMeta]: ...

    @overload
    def threads(
        self, *, on_damage: Literal["mark"], **wanted: Unpack[Wanted]
    ) -> AsyncIterator[CheckpointMeta | Damaged]: ...

    def threads(
        self,
        *,
        on_damage: OnDamage = "raise",
        limit: int | None = None,
        tag: str | None = None,
        graph: str | None = None,
        trigger: str | None = None,
        interrupt: bool | InterruptKind | str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Any]:
        """Iterate over threads, the last made first, each shown by its newest checkpoint; see ``Store.threads``."""
        listing = listing_of_threads(self.namespace, limit, Filter(tag, graph, trigger, interrupt, where))
        return alisted(self._access, listing, check_on_damage(on_damage))

    @overload
    async def expired(self, *, on_damage: Literal["raise"] = ...) -> list[ExpiredLease]: ...

    @overload
    async def expired(self, *, on_damage: Literal["mark"]) -> list[ExpiredLease | Damaged]: ...

    async def expired(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the leases that were neither renewed nor given back in time; see ``Store.expired``."""
        return await self._access.offload.run(lambda: list(self._sync.expired(on_damage=on_damage)))

    async def claim(
        self,
        n: int = 1,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
    ) -> list[AsyncLease]:
        """Take over up to ``n`` expired leases and return them, taken; see ``Store.claim``."""
        terms = check_terms(owner, ttl, heartbeat, on_lost)
        leases = []
        for taken in await self._access.arun(claim, self.namespace, n, terms):
            lease = AsyncLease(AsyncThread(self._access, Cursor(taken[0].lane)), terms)
            lease._take(*taken)
            leases.append(lease)
        return leases

    @overload
    async def sessions(self, *, on_damage: Literal["raise"] = ..., active: bool = ...) -> list[Session]: ...

    @overload
    async def sessions(self, *, on_damage: Literal["mark"], active: bool = ...) -> list[Session | Damaged]: ...

    async def sessions(self, *, on_damage: OnDamage = "raise", active: bool = True) -> list[Any]:
        """Return the sessions of all threads; see ``Store.sessions``."""
        return await self._access.offload.run(lambda: list(self._sync.sessions(on_damage=on_damage, active=active)))

    @overload
    async def interrupted(self, *, on_damage: Literal["raise"] = ...) -> list[InterruptedRun]: ...

    @overload
    async def interrupted(self, *, on_damage: Literal["mark"]) -> list[InterruptedRun | Damaged]: ...

    async def interrupted(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the runs that did not end and whose process is gone; see ``Store.interrupted``."""
        return await self._access.offload.run(lambda: list(self._sync.interrupted(on_damage=on_damage)))

    @overload
    def interrupts(
        self, *, on_damage: Literal["raise"] = ..., pending: bool = ...
    ) -> AsyncIterator[InterruptRecord]: ...

    @overload
    def interrupts(
        self, *, on_damage: Literal["mark"], pending: bool = ...
    ) -> AsyncIterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> AsyncIterator[Any]:
        """Iterate over the interrupts of all threads, oldest first; see ``Store.interrupts``."""
        return alisted(self._access, inbox_of(self.namespace, None, pending), check_on_damage(on_damage))

    async def close(self) -> None:
        """Release everything. Closing twice is fine."""
        await asyncio.to_thread(self._sync.close)  # not by one of the workers, which it waits for

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncStore {self.url}>"
