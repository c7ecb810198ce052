"""``AsyncStore``: ``Store`` for callers with an event loop. Same names, same arguments, same flows; awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar, Unpack, overload

from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointMeta
from backstay.model.damaged import Damaged, OnDamage, check_on_damage
from backstay.model.interrupt import InterruptKind
from backstay.model.lease import ExpiredLease
from backstay.model.session import InterruptedRun, Session
from backstay.store.base import Backend, Removed
from backstay.store.open import open_backend
from backstay.thread import front
from backstay.thread import lease as leasing
from backstay.thread import session as running
from backstay.thread.cursor import Context, Cursor
from backstay.thread.damage import Pages, told
from backstay.thread.history import Wanted
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.lease import AsyncLease, check_terms
from backstay.thread.offload import Offload
from backstay.thread.perform import Flow
from backstay.thread.retention import Keep, Pruned
from backstay.thread.stats import Stats
from backstay.thread.store import make_context
from backstay.thread.thread_async import AsyncThread, OnLost
from backstay.thread.verify import Report

T = TypeVar("T")


async def aopen(
    url: str | os.PathLike[str], *, namespace: str = "", clock: Callable[[], datetime] | None = None
) -> AsyncStore:
    """Open a store for use with an event loop; see ``open``."""
    context = make_context(namespace, clock)
    return AsyncStore(await asyncio.to_thread(open_backend, url), context)


class AsyncStore:
    """An open store. Close it, or use it in an ``async with`` block, from any event loop."""

    def __init__(self, backend: Backend, context: Context) -> None:
        self._backend = backend
        self._context = context
        self._offload = Offload(backend)

    @property
    def url(self) -> str:
        """Return what the store was opened with."""
        return self._backend.url

    @property
    def namespace(self) -> str:
        """Return the namespace everything here happens in."""
        return self._context.namespace

    def thread(self, thread_id: str, *, branch: str = MAIN, scope: str = "") -> AsyncThread:
        """Return a handle on a thread's branch; nothing is read or written until it is used."""
        return AsyncThread(self, Cursor(front.lane_key(self.namespace, thread_id, branch, scope)))

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
        """Iterate over threads, the last made first, each shown by its newest checkpoint; filters apply to that.

        At one that cannot be read it raises Corrupted; with ``on_damage="mark"`` it gives a ``Damaged`` in its place.
        """
        listing = front.threads(self._context, limit, tag, graph, trigger, interrupt, where)
        return self._listed(listing, check_on_damage(on_damage))

    async def get(self, id: str) -> Checkpoint | None:
        """Load a checkpoint by its id, whichever thread it belongs to; None if it is not there."""
        return await self._run(front.get(self.namespace, id))

    async def delete_thread(self, thread_id: str) -> Removed:
        """Delete a thread with all its branches and return what went."""
        return await self._run(front.delete_thread(self.namespace, thread_id))

    async def clear(self) -> Removed:
        """Delete every thread of this namespace and return what went."""
        return await self._run(front.clear(self._context))

    async def prune(self, keep: Keep, *, dry_run: bool = False) -> Pruned:
        """Delete what the rules do not want, in all threads; ``dry_run`` only says what would go."""
        return await self._run(front.prune(self._context, None, keep, dry_run))

    @overload
    async def expired(self, *, on_damage: Literal["raise"] = ...) -> list[ExpiredLease]: ...

    @overload
    async def expired(self, *, on_damage: Literal["mark"]) -> list[ExpiredLease | Damaged]: ...

    async def expired(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the leases that were neither renewed nor given back in time, the one that ended first first."""
        return list(told(await self._run(leasing.expired(self._context)), check_on_damage(on_damage)))

    async def claim(
        self,
        n: int = 1,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
    ) -> list[AsyncLease]:
        """Take over up to ``n`` expired leases and return them, taken: go on with ``lease.thread``.

        Several workers may claim at the same time; no lease goes to two of them. Use each in a ``with`` block, or call
        its ``release()``. Until then the heartbeat keeps it alive, also if the block is never entered. Closing the
        store gives nothing back: it stops the heartbeat, and others may claim what is left when its time is over.
        """
        terms = check_terms(owner, ttl, heartbeat, on_lost)
        leases = []
        for taken in await self._run(leasing.claim(self._context, n, terms)):
            lease = AsyncLease(AsyncThread(self, Cursor(taken[0].lane)), terms)
            lease._take(*taken)
            leases.append(lease)
        return leases

    @overload
    async def sessions(self, *, on_damage: Literal["raise"] = ..., active: bool = ...) -> list[Session]: ...

    @overload
    async def sessions(self, *, on_damage: Literal["mark"], active: bool = ...) -> list[Session | Damaged]: ...

    async def sessions(self, *, on_damage: OnDamage = "raise", active: bool = True) -> list[Any]:
        """Return the sessions of all threads, the one begun first first; ``active``: those that have not ended."""
        return list(told(await self._run(running.sessions(self._context, active)), check_on_damage(on_damage)))

    @overload
    async def interrupted(self, *, on_damage: Literal["raise"] = ...) -> list[InterruptedRun]: ...

    @overload
    async def interrupted(self, *, on_damage: Literal["mark"]) -> list[InterruptedRun | Damaged]: ...

    async def interrupted(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the runs that did not end and whose process is gone, the one seen last first.

        On the machine of the run, a process that merely sleeps is told from one that died; elsewhere a run counts as
        interrupted when its heartbeats are overdue.
        """
        return list(told(await self._run(running.interrupted(self._context)), check_on_damage(on_damage)))

    @overload
    def interrupts(
        self, *, on_damage: Literal["raise"] = ..., pending: bool = ...
    ) -> AsyncIterator[InterruptRecord]: ...

    @overload
    def interrupts(
        self, *, on_damage: Literal["mark"], pending: bool = ...
    ) -> AsyncIterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> AsyncIterator[Any]:
        """Iterate over the interrupts of all threads, oldest first; ``pending``: those that are not consumed yet."""
        return self._listed(front.inbox(self.namespace, None, pending), check_on_damage(on_damage))

    async def verify(self) -> Report:
        """Check every byte of every checkpoint against its digest, and the store below; report all damage."""
        return await self._run(front.verify_store(self._context))

    async def stats(self) -> Stats:
        """Return how much is stored, by thread and key, and what full copies would take."""
        return await self._run(front.stats(self._context, None))

    async def compact(self) -> int:
        """Make the store as small as it can be and return the bytes given back."""
        return await self._run(front.compact())

    async def close(self) -> None:
        """Release everything. Closing twice is fine."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._context.heartbeat.close()
        self._offload.close()
        self._backend.close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncStore {self.url}>"

    async def _run(self, flow: Flow[T]) -> T:
        return await self._offload.run(flow)

    async def _listed(self, pages: Pages, on_damage: OnDamage) -> AsyncIterator[Any]:
        while not pages.done:
            for entry in told(await self._run(pages.next_page()), on_damage):
                yield entry
