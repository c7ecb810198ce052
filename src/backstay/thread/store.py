"""``Store``: an open store as its user sees it. A thin shell over the flows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, Unpack, overload

from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointMeta
from backstay.model.damaged import Damaged, OnDamage, check_on_damage
from backstay.model.ids import IdMaker, check_id
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
from backstay.thread.history import History, Listing, Wanted
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.lease import Lease, check_terms
from backstay.thread.perform import Flow, drive
from backstay.thread.retention import Keep, Pruned
from backstay.thread.stats import Stats
from backstay.thread.thread import OnLost, Thread
from backstay.thread.verify import Report

T = TypeVar("T")


def utc_now() -> datetime:
    """Return the present moment."""
    return datetime.now(UTC)


def make_context(namespace: str, clock: Callable[[], datetime] | None) -> Context:
    """Return what all threads of a store share."""
    if namespace != "":
        check_id(namespace, "namespace")
    if clock is not None and (
        not callable(clock) or not isinstance(moment := clock(), datetime) or moment.tzinfo is None
    ):
        raise InvalidInput("clock must give datetimes with a time zone", hint="Use datetime.now(timezone.utc)")
    maker = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
    return Context(namespace, clock or utc_now, maker.make)


def open(url: str | os.PathLike[str], *, namespace: str = "", clock: Callable[[], datetime] | None = None) -> Store:
    """Open a store: the path of a SQLite file, or ``memory:``. It is made if it is not there.

    Everything done through the store stays inside ``namespace``: the same ids in another one are other threads.
    ``clock`` gives the moment that checkpoints are stamped with; nothing else depends on it.
    """
    context = make_context(namespace, clock)
    return Store(open_backend(url), context)


class Store:
    """An open store. Close it, or use it in a ``with`` block. It may be used from any thread of the program."""

    def __init__(self, backend: Backend, context: Context) -> None:
        self._backend = backend
        self._context = context

    @property
    def url(self) -> str:
        """Return what the store was opened with."""
        return self._backend.url

    @property
    def namespace(self) -> str:
        """Return the namespace everything here happens in."""
        return self._context.namespace

    def thread(self, thread_id: str, *, branch: str = MAIN, scope: str = "") -> Thread:
        """Return a handle on a thread's branch; nothing is read or written until it is used."""
        return Thread(self, Cursor(front.lane_key(self.namespace, thread_id, branch, scope)))

    @overload
    def threads(self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[Wanted]) -> History[CheckpointMeta]: ...

    @overload
    def threads(self, *, on_damage: Literal["mark"], **wanted: Unpack[Wanted]) -> History[CheckpointMeta | Damaged]: ...

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
        """Iterate over threads, the last made first, each shown by its newest checkpoint; filters apply to that.

        At one that cannot be read it raises Corrupted; with ``on_damage="mark"`` it gives a ``Damaged`` in its place.
        """
        listing = front.threads(self._context, limit, tag, graph, trigger, interrupt, where)
        return self._history(listing, check_on_damage(on_damage))

    def get(self, id: str) -> Checkpoint | None:
        """Load a checkpoint by its id, whichever thread it belongs to; None if it is not there."""
        return self._run(front.get(self.namespace, id))

    def delete_thread(self, thread_id: str) -> Removed:
        """Delete a thread with all its branches and return what went."""
        return self._run(front.delete_thread(self.namespace, thread_id))

    def clear(self) -> Removed:
        """Delete every thread of this namespace and return what went."""
        return self._run(front.clear(self._context))

    def prune(self, keep: Keep, *, dry_run: bool = False) -> Pruned:
        """Delete what the rules do not want, in all threads; ``dry_run`` only says what would go."""
        return self._run(front.prune(self._context, None, keep, dry_run))

    @overload
    def expired(self, *, on_damage: Literal["raise"] = ...) -> list[ExpiredLease]: ...

    @overload
    def expired(self, *, on_damage: Literal["mark"]) -> list[ExpiredLease | Damaged]: ...

    def expired(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the leases that were neither renewed nor given back in time, the one that ended first first."""
        return list(told(self._run(leasing.expired(self._context)), check_on_damage(on_damage)))

    def claim(
        self,
        n: int = 1,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
    ) -> list[Lease]:
        """Take over up to ``n`` expired leases and return them, taken: go on with ``lease.thread``.

        Several workers may claim at the same time; no lease goes to two of them. Use each in a ``with`` block, or call
        its ``release()``. Until then the heartbeat keeps it alive, also if the block is never entered. Closing the
        store gives nothing back: it stops the heartbeat, and others may claim what is left when its time is over.
        """
        terms = check_terms(owner, ttl, heartbeat, on_lost)
        leases = []
        for taken in self._run(leasing.claim(self._context, n, terms)):
            lease = Lease(Thread(self, Cursor(taken[0].lane)), terms)
            lease._take(*taken)
            leases.append(lease)
        return leases

    @overload
    def sessions(self, *, on_damage: Literal["raise"] = ..., active: bool = ...) -> list[Session]: ...

    @overload
    def sessions(self, *, on_damage: Literal["mark"], active: bool = ...) -> list[Session | Damaged]: ...

    def sessions(self, *, on_damage: OnDamage = "raise", active: bool = True) -> list[Any]:
        """Return the sessions of all threads, the one begun first first; ``active``: those that have not ended."""
        return list(told(self._run(running.sessions(self._context, active)), check_on_damage(on_damage)))

    @overload
    def interrupted(self, *, on_damage: Literal["raise"] = ...) -> list[InterruptedRun]: ...

    @overload
    def interrupted(self, *, on_damage: Literal["mark"]) -> list[InterruptedRun | Damaged]: ...

    def interrupted(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the runs that did not end and whose process is gone, the one seen last first.

        On the machine of the run, a process that merely sleeps is told from one that died; elsewhere a run counts as
        interrupted when its heartbeats are overdue.
        """
        return list(told(self._run(running.interrupted(self._context)), check_on_damage(on_damage)))

    @overload
    def interrupts(self, *, on_damage: Literal["raise"] = ..., pending: bool = ...) -> Iterator[InterruptRecord]: ...

    @overload
    def interrupts(self, *, on_damage: Literal["mark"], pending: bool = ...) -> Iterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> Iterator[Any]:
        """Iterate over the interrupts of all threads, oldest first; ``pending``: those that are not consumed yet."""
        return self._listed(front.inbox(self.namespace, None, pending), check_on_damage(on_damage))

    def verify(self) -> Report:
        """Check every byte of every checkpoint against its digest, and the store below; report all damage."""
        return self._run(front.verify_store(self._context))

    def stats(self) -> Stats:
        """Return how much is stored, by thread and key, and what full copies would take."""
        return self._run(front.stats(self._context, None))

    def compact(self) -> int:
        """Make the store as small as it can be and return the bytes given back."""
        return self._run(front.compact())

    def close(self) -> None:
        """Release everything. Closing twice is fine."""
        self._context.heartbeat.close()
        self._backend.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def _run(self, flow: Flow[T]) -> T:
        return drive(flow, self._backend)

    def _history(self, listing: Listing, on_damage: OnDamage) -> History[Any]:
        return History(lambda: self._listed(replace(listing), on_damage))

    def _listed(self, pages: Pages, on_damage: OnDamage) -> Iterator[Any]:
        while not pages.done:
            yield from told(self._run(pages.next_page()), on_damage)
