"""``Store``: an open store as its user sees it. A thin shell over the operations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Unpack, overload

from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointMeta
from backstay.model.damaged import Damaged, OnDamage, check_on_damage
from backstay.model.ids import IdMaker, check_id
from backstay.model.interrupt import InterruptKind
from backstay.model.lease import ExpiredLease
from backstay.model.session import InterruptedRun, Session
from backstay.store.base import Backend, Removed
from backstay.store.open import open_backend
from backstay.thread import lease as leasing
from backstay.thread import load, removal
from backstay.thread import session as running
from backstay.thread.access import Access
from backstay.thread.arguments import lane_key
from backstay.thread.cursor import Context, Cursor
from backstay.thread.damage import listed, told
from backstay.thread.history import Filter, History, Wanted, history_of, listing_of_threads
from backstay.thread.interrupts import InterruptRecord, inbox_of
from backstay.thread.lease import Lease, check_terms
from backstay.thread.offload import Offload
from backstay.thread.retention import Keep, Pruned
from backstay.thread.stats import Stats
from backstay.thread.stats import stats as measure
from backstay.thread.thread import OnLost, Thread
from backstay.thread.verify import Report, verify_lanes


def make_context(namespace: str, clock: Callable[[], datetime] | None) -> Context:
    """Return what all threads of a store share."""
    if namespace != "":
        check_id(namespace, "namespace")
    if clock is not None and (
        not callable(clock) or not isinstance(moment := clock(), datetime) or moment.tzinfo is None
    ):
        raise InvalidInput("clock must give datetimes with a time zone", hint="Use datetime.now(timezone.utc)")
    maker = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
    return Context(namespace, clock or partial(datetime.now, UTC), maker.make)


def open(url: str | os.PathLike[str], *, namespace: str = "", clock: Callable[[], datetime] | None = None) -> Store:
    """Open a store: the path of a SQLite file, ``dir:path``, ``postgresql://…`` or ``memory:``. Made if not there.

    Everything done through the store stays inside ``namespace``: the same ids in another one are other threads.
    ``clock`` gives the moment that checkpoints are stamped with; nothing else depends on it.
    """
    context = make_context(namespace, clock)
    return Store(open_backend(url), context)


class Store:
    """An open store. Close it, or use it in a ``with`` block. It may be used from any thread of the program."""

    def __init__(self, backend: Backend, context: Context) -> None:
        self._access = Access(backend, context, Offload())

    @property
    def url(self) -> str:
        """Return what the store was opened with."""
        return self._access.store.url

    @property
    def namespace(self) -> str:
        """Return the namespace everything here happens in."""
        return self._access.context.namespace

    def thread(self, thread_id: str, *, branch: str = MAIN, scope: str = "") -> Thread:
        """Return a handle on a thread's branch; nothing is read or written until it is used."""
        return Thread(self._access, Cursor(lane_key(self._access.context.namespace, thread_id, branch, scope)))

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
        listing = listing_of_threads(self.namespace, limit, Filter(tag, graph, trigger, interrupt, where))
        return history_of(self._access, listing, check_on_damage(on_damage))

    def get(self, id: str) -> Checkpoint | None:
        """Load a checkpoint by its id, whichever thread it belongs to; None if it is not there."""
        return load.get(self._access.store, self.namespace, check_id(id, "checkpoint id"))

    def delete_thread(self, thread_id: str) -> Removed:
        """Delete a thread with all its branches and return what went."""
        return self._access.store.delete_thread(self.namespace, check_id(thread_id, "thread id"))

    def clear(self) -> Removed:
        """Delete every thread of this namespace and return what went."""
        return removal.clear(self._access.store, self._access.context)

    def prune(self, keep: Keep, *, dry_run: bool = False) -> Pruned:
        """Delete what the rules do not want, in all threads; ``dry_run`` only says what would go."""
        return removal.prune(self._access.store, self._access.context, None, keep, dry_run, None)

    @overload
    def expired(self, *, on_damage: Literal["raise"] = ...) -> list[ExpiredLease]: ...

    @overload
    def expired(self, *, on_damage: Literal["mark"]) -> list[ExpiredLease | Damaged]: ...

    def expired(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the leases that were neither renewed nor given back in time, the one that ended first first."""
        return list(told(leasing.expired(self._access.store, self.namespace), check_on_damage(on_damage)))

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
        for taken in leasing.claim(self._access.store, self.namespace, n, terms):
            lease = Lease(Thread(self._access, Cursor(taken[0].lane)), terms)
            lease._take(*taken)
            leases.append(lease)
        return leases

    @overload
    def sessions(self, *, on_damage: Literal["raise"] = ..., active: bool = ...) -> list[Session]: ...

    @overload
    def sessions(self, *, on_damage: Literal["mark"], active: bool = ...) -> list[Session | Damaged]: ...

    def sessions(self, *, on_damage: OnDamage = "raise", active: bool = True) -> list[Any]:
        """Return the sessions of all threads, the one begun first first; ``active``: those that have not ended."""
        return list(told(running.sessions(self._access.store, self.namespace, active), check_on_damage(on_damage)))

    @overload
    def interrupted(self, *, on_damage: Literal["raise"] = ...) -> list[InterruptedRun]: ...

    @overload
    def interrupted(self, *, on_damage: Literal["mark"]) -> list[InterruptedRun | Damaged]: ...

    def interrupted(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the runs that did not end and whose process is gone, the one seen last first.

        On the machine of the run, a process that merely sleeps is told from one that died; elsewhere a run counts as
        interrupted when its heartbeats are overdue.
        """
        return list(told(running.interrupted(self._access.store, self.namespace), check_on_damage(on_damage)))

    @overload
    def interrupts(self, *, on_damage: Literal["raise"] = ..., pending: bool = ...) -> Iterator[InterruptRecord]: ...

    @overload
    def interrupts(self, *, on_damage: Literal["mark"], pending: bool = ...) -> Iterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> Iterator[Any]:
        """Iterate over the interrupts of all threads, oldest first; ``pending``: those that are not consumed yet."""
        return listed(self._access, inbox_of(self.namespace, None, pending), check_on_damage(on_damage))

    def verify(self) -> Report:
        """Check every byte of every checkpoint against its digest, and the store below; report all damage."""
        return verify_lanes(self._access.store, self._access.context, None, whole_store=True)

    def stats(self) -> Stats:
        """Return how much is stored, by thread and key, and what full copies would take."""
        return measure(self._access.store, self._access.context, None)

    def compact(self) -> int:
        """Make the store as small as it can be and return the bytes given back."""
        return self._access.store.compact()

    def close(self) -> None:
        """Release everything. Closing twice is fine."""
        self._access.context.heartbeat.close()
        self._access.offload.close()
        self._access.store.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.url}>"
