"""``Store`` and ``AsyncStore``: an open store. Their methods call the operations."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointMeta
from backstay.model.decision import InterruptKind
from backstay.model.ids import IdMaker, check_id
from backstay.model.runs import UNFINISHED, RunStatus
from backstay.operations import load, retention
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
from backstay.operations.run_records import ATTEMPTS
from backstay.store.base import Backend, Removed
from backstay.store.open import open_backend
from backstay.thread.access import access_of, awaited
from backstay.thread.lease import AsyncLease, Lease, check_lease_options
from backstay.thread.runs import (
    AsyncRun,
    Claimable,
    Run,
    Runs,
    check_claim,
    check_filter,
    claim,
    list_runs,
    show_claimed,
)
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
    r"""Open a store: a path of a SQLite file, ``dir:path``, ``postgresql://…`` or ``:memory:``. Creates it if missing.

    ``sqlite:///x.db`` is a relative path and ``sqlite:////tmp/x.db`` an absolute one, as in SQLAlchemy. Two or more
    letters before the first colon are a scheme, and an unknown one is refused; one letter is a drive (``C:\x.db``).
    Write ``./a:b.db`` for a file whose name has a colon. The parent directory must exist.

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

    def runs(
        self,
        *,
        status: RunStatus | str | None = None,
        graph: str | None = None,
        thread: str | None = None,
        holder: str | None = None,
        limit: int = 100,
        after: Run | None = None,
        on_damage: OnDamage = "raise",
    ) -> Runs[Run]:
        """Return a page of runs of graphs and loops, newest first: what runs, what waits, what died, what ended.

        ``holder`` is the host, "host:pid" or owner's name of a process: the runs that it executes now. ``after`` is the
        last run of the page before. A page costs as much as its runs, however many the store has. Printed, it is a
        table. A run that cannot be read raises Corrupted; with ``on_damage="mark"`` a ``Damaged`` takes its place.
        """
        wanted = check_filter(status, graph, thread, holder, limit, after)
        found = list_runs(self._access.store, self._access, wanted, Run)
        return Runs(raise_or_mark(found, check_on_damage(on_damage)))

    def count_runs(self) -> dict[str, int]:
        """Return how many runs have each status, of those that have not ended; the cost does not grow with the rest.

        A run whose process died counts as running until it is continued or claimed.
        """
        return self._access.store.count_runs(self.namespace, [each.value for each in UNFINISHED])

    def claim(
        self,
        graphs: Iterable[Claimable] | Claimable,
        limit: int = 1,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
        attempts: int = ATTEMPTS,
    ) -> list[Lease]:
        """Take over up to ``limit`` runs of these graphs that no process executes, and return their leases.

        These are queued runs, abandoned ones (their process died or stopped), those whose sleep or timeout is over, and
        those that a person has answered; the longest waiting first, and only if one of the graphs can execute them.
        Several workers may claim at the same time; no run goes to two of them. Continue each with
        ``graph.resume(lease.thread, lease=lease)``, inside ``with lease:``; ``lease.run`` is the run. Until then the
        heartbeat renews the lease, even if the block is never entered. A claimed run that fails is given out again
        after a pause; after ``attempts`` failures without a step in between, it has failed.
        """
        options = check_lease_options(owner, ttl, heartbeat, on_lost)
        asked = check_claim(graphs, limit, attempts, options)
        leases = []
        for grant, request, started, keeper in claim(self._access.store, self._access, asked):
            lease = Lease(Thread(self._access, Cursor(grant.branch)), options, keeper)
            lease._take(grant, request, started)
            lease.run = show_claimed(self._access, grant, request, Run)
            leases.append(lease)
        return leases

    @overload
    def interrupts(self, *, on_damage: Literal["raise"] = ..., pending: bool = ...) -> Iterator[InterruptRecord]: ...

    @overload
    def interrupts(self, *, on_damage: Literal["mark"], pending: bool = ...) -> Iterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> Iterator[Any]:
        """Iterate over the interrupts of all threads, oldest first; with ``pending``, only those that still wait."""
        return read_pages(self._access, inbox_of(self.namespace, None, pending), check_on_damage(on_damage))

    def check(self, *, thread: str | None = None, every: bool = False) -> Report:
        """Check every byte of the namespace and of the store below it, or only of one thread, and report all damage.

        A check changes nothing. It covers checkpoints, pending writes, effects, interrupts and runs. With
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

    def compact(self, *, full: bool = False) -> int:
        """Make the store as small as possible and return the bytes freed. Others may use the store meanwhile.

        On PostgreSQL, the freed space stays in the tables, for new data. ``full=True`` also shrinks the tables: each is
        locked while it is rewritten (``VACUUM FULL``), and the database user must own it. Other stores ignore it.
        """
        if not isinstance(full, bool):
            raise InvalidInput(f"full must be True or False, not {type(full).__name__}")
        return self._access.store.compact(full)

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


def aopen(url: str | os.PathLike[str], *, namespace: str = "", clock: Callable[[], datetime] | None = None) -> Opening:
    """Open a store for use with an event loop: ``async with backstay.aopen(…) as store``, or await it; see ``open``."""

    async def aopen() -> AsyncStore:
        services = make_services(namespace, clock)
        import asyncio

        return AsyncStore(await asyncio.to_thread(open_backend, url), services)

    return Opening(aopen())


class Opening(Coroutine[Any, Any, "AsyncStore"]):
    """A store that is being opened. Await it, or use it in an ``async with`` block, which closes the store."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncStore]) -> None:
        self._opening = opening
        self._store: AsyncStore | None = None

    def __await__(self) -> Generator[Any, Any, AsyncStore]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        """Continue, as a coroutine does; ``throw`` and ``close`` likewise."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error in it."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """Give up opening the store."""
        self._opening.close()

    async def __aenter__(self) -> AsyncStore:
        self._store = await self
        return self._store

    async def __aexit__(self, *_: object) -> None:
        if self._store is not None:
            await self._store.close()

    def __getattr__(self, name: str) -> Any:
        if hasattr(AsyncStore, name):
            raise InvalidInput(_NOT_AWAITED, hint=_AWAIT)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_NOT_AWAITED = "this store is not open yet: aopen() was not awaited"
_AWAIT = "Write store = await backstay.aopen(…), or async with backstay.aopen(…) as store"


def check_store(store: object, *kinds: type) -> None:
    """Raise InvalidInput unless this is an open store, of one of these classes if any are given."""
    kinds = kinds or (Store, AsyncStore)
    if isinstance(store, kinds):
        return
    hint = "Open it with backstay.open(…)"
    if isinstance(store, Opening):
        raise InvalidInput(_NOT_AWAITED, hint=_AWAIT)
    if isinstance(store, Thread | AsyncThread):
        hint = "Pass the store that the thread is from, not one of its threads"
    elif isinstance(store, str | os.PathLike):  # which is not shown: a URL may have a password
        hint = "Open the path or URL first: store = backstay.open(…)"
    raise InvalidInput(f"an open store is needed here, not {type(store).__name__}", hint=hint)


def async_twin(store: Store) -> AsyncStore:
    """Return an open store for use with an event loop; both share everything, and closing one closes the other."""
    twin = AsyncStore.__new__(AsyncStore)
    twin._wrap(store)
    return twin


def _backup_access(backup: Store | AsyncStore | None) -> Access | None:
    if backup is None:
        return None
    check_store(backup)
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
    count_runs = awaited(Store.count_runs)
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

    async def runs(
        self,
        *,
        status: RunStatus | str | None = None,
        graph: str | None = None,
        thread: str | None = None,
        holder: str | None = None,
        limit: int = 100,
        after: Run | None = None,
        on_damage: OnDamage = "raise",
    ) -> Runs[AsyncRun]:
        """Return a page of runs, newest first; see ``Store.runs``."""
        wanted = check_filter(status, graph, thread, holder, limit, after)
        found = await self._access.arun(list_runs, self._access, wanted, AsyncRun)
        return Runs(raise_or_mark(found, check_on_damage(on_damage)))

    async def claim(
        self,
        graphs: Iterable[Claimable] | Claimable,
        limit: int = 1,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: AsyncOnLost | None = None,
        attempts: int = ATTEMPTS,
    ) -> list[AsyncLease]:
        """Take over up to ``limit`` runs that no process executes, and return their leases; see ``Store.claim``."""
        options = check_lease_options(owner, ttl, heartbeat, on_lost)
        asked = check_claim(graphs, limit, attempts, options)
        leases: list[AsyncLease] = []

        def take() -> None:
            for grant, request, started, keeper in claim(self._access.store, self._access, asked):
                lease = AsyncLease(AsyncThread(self._access, Cursor(grant.branch)), options, keeper)
                lease._take(grant, request, started)
                lease.run = show_claimed(self._access, grant, request, AsyncRun)
                leases.append(lease)

        try:
            await finish(self._access.offload.start(take))
        except BaseException:  # a cancelled caller gets no leases to release
            await finish(self._access.offload.start(lambda: [each._handle.run(each._abandon) for each in leases]))
            raise
        return leases

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
