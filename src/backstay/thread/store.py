"""``Store`` and ``AsyncStore``: an open store. Their methods call the operations."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointMeta
from backstay.model.decision import InterruptKind
from backstay.model.ids import IdMaker, check_id
from backstay.model.runs import ExpiredLease, InterruptedRun, Session
from backstay.operations import load, retention, sessions
from backstay.operations.arguments import branch_key, names_of
from backstay.operations.cursor import Access, Cursor, Services
from backstay.operations.drivers import Offload, finish
from backstay.operations.interrupts import InterruptRecord, inbox_of
from backstay.operations.listing import (
    Filter,
    History,
    ListOptions,
    aread_pages,
    history_of,
    listing_of_threads,
    raise_or_mark,
    read_pages,
)
from backstay.operations.retention import Keep, Pruned
from backstay.operations.rows import Damaged, OnDamage, check_on_damage
from backstay.store.base import Backend, Removed
from backstay.store.open import open_backend
from backstay.thread.access import access_of, awaited
from backstay.thread.lease import AsyncLease, Lease, check_lease_options, claim
from backstay.thread.thread import AsyncOnLost, AsyncThread, OnLost, Thread

if TYPE_CHECKING:
    from backstay.maintenance import NewestGood, Report, Stats


def make_services(namespace: str, clock: Callable[[], datetime] | None) -> Services:
    """Return the services that all threads of a store share."""
    if namespace != "":
        check_id(namespace, "namespace")
    if clock is not None and (
        not callable(clock) or not isinstance(moment := clock(), datetime) or moment.tzinfo is None
    ):
        raise InvalidInput("clock must give datetimes with a time zone", hint="Use datetime.now(timezone.utc)")
    maker = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
    return Services(namespace, clock or partial(datetime.now, UTC), maker.make)


def open(url: str | os.PathLike[str], *, namespace: str = "", clock: Callable[[], datetime] | None = None) -> Store:
    """Open a store: the path of a SQLite file, ``dir:path``, ``postgresql://…`` or ``memory:``. Creates it if missing.

    The store sees only its ``namespace``: the same ids in another namespace are other threads. ``clock`` gives every
    time that is stored, and the timeouts of questions and ages in retention are compared with it; leases use the clock
    of the store itself. A test passes a ``backstay.testing.Clock``, which it can move.
    """
    services = make_services(namespace, clock)
    return Store(open_backend(url), services)


class Store:
    """An open store. Close it, or use it in a ``with`` block. Any thread of the program may use it."""

    def __init__(self, backend: Backend, services: Services) -> None:
        self._access = Access(backend, services, Offload())

    @property
    def url(self) -> str:
        """Return what the store was opened with."""
        return self._access.store.url

    @property
    def namespace(self) -> str:
        """Return the namespace of this store."""
        return self._access.services.namespace

    def thread(self, thread_id: str, *, branch: str = MAIN, scope: str = "") -> Thread:
        """Return a handle on a thread's branch; nothing is read or written until it is used."""
        return Thread(self._access, Cursor(branch_key(self._access.services.namespace, thread_id, branch, scope)))

    @overload
    def threads(
        self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[ListOptions]
    ) -> History[CheckpointMeta]: ...

    @overload
    def threads(
        self, *, on_damage: Literal["mark"], **wanted: Unpack[ListOptions]
    ) -> History[CheckpointMeta | Damaged]: ...

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
    ) -> History[Any]:
        """Iterate over threads, newest first, each shown by its newest checkpoint. Filters apply to that checkpoint.

        A thread that cannot be read raises Corrupted; with ``on_damage="mark"`` a ``Damaged`` is returned in its place.
        """
        listing = listing_of_threads(self.namespace, limit, Filter(tag, graph, trigger, interrupt, where))
        return history_of(self._access, listing, check_on_damage(on_damage))

    def get(self, id: str, *, keys: Iterable[str] | None = None) -> Checkpoint | None:
        """Load a checkpoint of any thread by its id; None if it does not exist. ``keys`` as in ``Thread.get``."""
        wanted = None if keys is None else names_of(keys, "keys")
        return load.get(self._access.store, self.namespace, check_id(id, "checkpoint id"), wanted)

    def delete_all(self) -> Removed:
        """Delete every thread of this namespace and return what was deleted."""
        return retention.delete_all(self._access.store, self._access.services)

    def prune(self, keep: Keep, *, dry_run: bool = False) -> Pruned:
        """Delete the checkpoints that the rules do not keep, in all threads. With ``dry_run``, only report them."""
        return retention.prune(self._access.store, self._access.services, None, keep, dry_run, None)

    @overload
    def expired(self, *, on_damage: Literal["raise"] = ...) -> list[ExpiredLease]: ...

    @overload
    def expired(self, *, on_damage: Literal["mark"]) -> list[ExpiredLease | Damaged]: ...

    def expired(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return expired leases, oldest first."""
        return list(
            raise_or_mark(sessions.expired_leases(self._access.store, self.namespace), check_on_damage(on_damage))
        )

    def claim(
        self,
        n: int = 1,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
    ) -> list[Lease]:
        """Take over up to ``n`` expired leases and return them; continue with ``lease.thread``.

        Several workers may claim at the same time; no lease goes to two of them. Use each in a ``with`` block, or call
        its ``release()``. Until then the heartbeat renews it, even if the block is never entered. Closing the store
        releases nothing: it stops the heartbeat, and other workers may claim the leases after they expire.
        """
        options = check_lease_options(owner, ttl, heartbeat, on_lost)
        leases = []
        for taken in claim(self._access.store, self.namespace, n, options):
            lease = Lease(Thread(self._access, Cursor(taken[0].branch)), options)
            lease._take(*taken)
            leases.append(lease)
        return leases

    @overload
    def sessions(self, *, on_damage: Literal["raise"] = ..., active: bool = ...) -> list[Session]: ...

    @overload
    def sessions(self, *, on_damage: Literal["mark"], active: bool = ...) -> list[Session | Damaged]: ...

    def sessions(self, *, on_damage: OnDamage = "raise", active: bool = True) -> list[Any]:
        """Return the sessions of all threads, oldest first; with ``active``, only those that have not ended."""
        return list(
            raise_or_mark(sessions.sessions(self._access.store, self.namespace, active), check_on_damage(on_damage))
        )

    @overload
    def interrupted(self, *, on_damage: Literal["raise"] = ...) -> list[InterruptedRun]: ...

    @overload
    def interrupted(self, *, on_damage: Literal["mark"]) -> list[InterruptedRun | Damaged]: ...

    def interrupted(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the runs that did not end and whose process is gone, most recently seen first.

        On the same machine a sleeping process counts as alive. Elsewhere a run counts as interrupted when its
        heartbeats are overdue.
        """
        return list(raise_or_mark(sessions.interrupted(self._access.store, self.namespace), check_on_damage(on_damage)))

    @overload
    def interrupts(self, *, on_damage: Literal["raise"] = ..., pending: bool = ...) -> Iterator[InterruptRecord]: ...

    @overload
    def interrupts(self, *, on_damage: Literal["mark"], pending: bool = ...) -> Iterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> Iterator[Any]:
        """Iterate over the interrupts of all threads, oldest first; with ``pending``, only those that still wait."""
        return read_pages(self._access, inbox_of(self.namespace, None, pending), check_on_damage(on_damage))

    def check(self, *, thread: str | None = None, every: bool = False) -> Report:
        """Check every byte of the namespace and of the store below it, or only of one thread, and report all damage.

        A check changes nothing. It covers checkpoints, pending writes, effects, interrupts and sessions. With
        ``every``, the report also lists each good record.
        """
        from backstay.maintenance.check import check

        return check(self._access.store, self._access.services, thread, every=every)

    def repair(
        self,
        report: Report | None = None,
        *,
        backup: Store | AsyncStore | None = None,
        quarantine_dir: str | os.PathLike[str] | None = None,
        dry_run: bool = True,
        force: bool = False,
    ) -> Report:
        """Plan the repair of what a check found. By default this only reports the plan; ``dry_run=False`` applies it.

        ``report`` is the report of an earlier check, of the store or of one thread; without it, this call checks the
        store first. The repair looks for the right bytes in the store itself, then in ``backup``. Checkpoints that it
        cannot restore are moved to files in ``quarantine_dir``, if given. If the store cannot read a part of itself,
        this call rebuilds only that part: call it again for the rest. It raises Fenced, and changes nothing, if a
        process holds a lease on a branch that would change, unless ``force``.
        """
        from backstay.maintenance.repair import repair
        from backstay.maintenance.report import Report

        if report is not None and not isinstance(report, Report):
            raise InvalidInput(
                f"report must be the report of a check, not {type(report).__name__}", hint="Pass store.check()"
            )
        return repair(
            self._access,
            report,
            backup=_backup_access(backup),
            quarantine_dir=quarantine_dir,
            dry_run=dry_run,
            force=force,
        )

    def newest_good(
        self, thread_id: str, *, branch: str = MAIN, scope: str = "", backup: Store | AsyncStore | None = None
    ) -> NewestGood | None:
        """Return the newest checkpoint of a branch that passes its check; None if none does.

        Use it when the newest checkpoint is damaged. If all of them are, it looks in ``backup``. It changes nothing.
        """
        from backstay.maintenance.check import newest_good

        key = branch_key(self.namespace, thread_id, branch, scope)
        return newest_good(self._access, key, _backup_access(backup))

    def stats(self) -> Stats:
        """Return how much the store holds and how much full copies would take. ``thread.stats()`` has it by key."""
        from backstay.maintenance.stats import stats

        return stats(self._access.store, self._access.services)

    def compact(self) -> int:
        """Make the store as small as possible and return the bytes freed."""
        return self._access.store.compact()

    def backup(self, path: str | os.PathLike[str]) -> Report:
        """Write a copy of a SQLite or directory store to a new path, and check every byte of it; return the report.

        The copy is the store as of one moment, with all namespaces; saves continue meanwhile. To restore it, open it.
        """
        from backstay.maintenance.backup import backup

        return backup(self._access.store, self._access.services, path)

    def close(self) -> None:
        """Close the store. Closing twice does nothing."""
        self._access.services.heartbeat.close()
        self._access.offload.close()
        self._access.store.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.url}>"


# ``AsyncStore``: ``Store`` for callers with an event loop. Same names, same arguments, same functions, but awaited.


async def aopen(
    url: str | os.PathLike[str], *, namespace: str = "", clock: Callable[[], datetime] | None = None
) -> AsyncStore:
    """Open a store for use with an event loop; see ``open``."""
    services = make_services(namespace, clock)
    import asyncio

    return AsyncStore(await asyncio.to_thread(open_backend, url), services)


def async_twin(store: Store) -> AsyncStore:
    """Return an open store for use with an event loop; both share everything, and closing one closes the other."""
    twin = AsyncStore.__new__(AsyncStore)
    twin._wrap(store)
    return twin


def _backup_access(backup: Store | AsyncStore | None) -> Access | None:
    if backup is None:
        return None
    if not isinstance(backup, Store | AsyncStore):
        raise InvalidInput(f"backup must be an open store, not {type(backup).__name__}", hint="Pass backstay.open(…)")
    return access_of(backup)


class AsyncStore:
    """An open store. Close it, or use it in an ``async with`` block, from any event loop."""

    def __init__(self, backend: Backend, services: Services) -> None:
        self._wrap(Store(backend, services))

    def _wrap(self, store: Store) -> None:
        self._sync = store
        self._access = access_of(store)

    @property
    def url(self) -> str:
        """Return what the store was opened with."""
        return self._sync.url

    @property
    def namespace(self) -> str:
        """Return the namespace of this store."""
        return self._sync.namespace

    def thread(self, thread_id: str, *, branch: str = MAIN, scope: str = "") -> AsyncThread:
        """Return a handle on a thread's branch; nothing is read or written until it is used."""
        return AsyncThread(self._access, Cursor(branch_key(self.namespace, thread_id, branch, scope)))

    get = awaited(Store.get)
    delete_all = awaited(Store.delete_all)
    prune = awaited(Store.prune)
    check = awaited(Store.check)
    repair = awaited(Store.repair)
    newest_good = awaited(Store.newest_good)
    stats = awaited(Store.stats)
    compact = awaited(Store.compact)
    backup = awaited(Store.backup)

    @overload
    def threads(
        self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[ListOptions]
    ) -> AsyncIterator[CheckpointMeta]: ...

    @overload
    def threads(
        self, *, on_damage: Literal["mark"], **wanted: Unpack[ListOptions]
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
        """Iterate over threads, newest first, each shown by its newest checkpoint; see ``Store.threads``."""
        listing = listing_of_threads(self.namespace, limit, Filter(tag, graph, trigger, interrupt, where))
        return aread_pages(self._access, listing, check_on_damage(on_damage))

    @overload
    async def expired(self, *, on_damage: Literal["raise"] = ...) -> list[ExpiredLease]: ...

    @overload
    async def expired(self, *, on_damage: Literal["mark"]) -> list[ExpiredLease | Damaged]: ...

    async def expired(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return expired leases, oldest first; see ``Store.expired``."""
        return await self._access.offload.run(lambda: list(self._sync.expired(on_damage=on_damage)))

    async def claim(
        self,
        n: int = 1,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: AsyncOnLost | None = None,
    ) -> list[AsyncLease]:
        """Take over up to ``n`` expired leases and return them; see ``Store.claim``."""
        options = check_lease_options(owner, ttl, heartbeat, on_lost)
        leases: list[AsyncLease] = []

        def take() -> None:
            for taken in claim(self._access.store, self.namespace, n, options):
                lease = AsyncLease(AsyncThread(self._access, Cursor(taken[0].branch)), options)
                lease._take(*taken)
                leases.append(lease)

        try:
            await finish(self._access.offload.start(take))
        except BaseException:  # a cancelled caller gets no leases to release
            await finish(self._access.offload.start(lambda: [each._handle.run(each._abandon) for each in leases]))
            raise
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
        return aread_pages(self._access, inbox_of(self.namespace, None, pending), check_on_damage(on_damage))

    async def close(self) -> None:
        """Close the store. Closing twice does nothing."""
        # Not in one of the store's workers, because closing waits for them.
        import asyncio

        await asyncio.to_thread(self._sync.close)

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncStore {self.url}>"
