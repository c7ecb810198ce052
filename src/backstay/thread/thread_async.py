"""``AsyncThread``: ``Thread`` for callers with an event loop. Same names, same arguments, same functions; awaited.

Each method runs the one of ``Thread`` in a worker thread, one hop for all of it. By hand are only lists, blocks, and
what calls the user's own functions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Literal, Unpack, overload

from backstay.model.checkpoint import CheckpointMeta, Notes
from backstay.model.damaged import Damaged, OnDamage, check_on_damage
from backstay.model.effect import EffectRecord
from backstay.model.interrupt import InterruptKind
from backstay.store.base import Lane
from backstay.thread.access import Access, Handle, awaited
from backstay.thread.cursor import Cursor
from backstay.thread.damage import alisted
from backstay.thread.effects import UNKNOWN_ON, EffectCall, Reconcile, aperform
from backstay.thread.history import Filter, WantedOfThread, listing_of_thread
from backstay.thread.interrupts import InterruptRecord, inbox_of
from backstay.thread.lease import AsyncLease, check_terms
from backstay.thread.ledger import ledger_of
from backstay.thread.loop import PAUSE_CHECK_S, AsyncLoop, check_plan
from backstay.thread.session import AsyncRunSession
from backstay.thread.thread import Thread

OnLost = Callable[[AsyncLease], None]


class AsyncThread:
    """A handle on one branch of a thread. It builds on the head it last loaded or wrote; nothing is read before that.

    A handle may be used by several tasks; its operations then happen one after the other.
    """

    def __init__(self, access: Access, cursor: Cursor) -> None:
        self._access = access
        self._sync = Thread(access, cursor, blocking=False)
        self._handle: Handle = self._sync._handle

    @property
    def id(self) -> str:
        """Return the thread's id."""
        return self._sync.id

    @property
    def branch(self) -> str:
        """Return the branch this handle writes to."""
        return self._sync.branch

    save = awaited(Thread.save)
    append = awaited(Thread.append)
    latest = awaited(Thread.latest)
    at = awaited(Thread.at)
    get = awaited(Thread.get)
    rewind = awaited(Thread.rewind)
    tag = awaited(Thread.tag)
    untag = awaited(Thread.untag)
    write = awaited(Thread.write)
    delete = awaited(Thread.delete)
    delete_before = awaited(Thread.delete_before)
    clear = awaited(Thread.clear)
    prune = awaited(Thread.prune)
    interrupt = awaited(Thread.interrupt)
    decide = awaited(Thread.decide)
    consume = awaited(Thread.consume)
    request_pause = awaited(Thread.request_pause)
    settle = awaited(Thread.settle)
    verify = awaited(Thread.verify)
    stats = awaited(Thread.stats)

    async def fork(
        self,
        checkpoint: CheckpointMeta | str,
        *,
        branch: str | None = None,
        to: str | None = None,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        id: str | None = None,
        **notes: Unpack[Notes],
    ) -> AsyncThread:
        """Begin another branch, or another thread (``to``), with a checkpoint's state; see ``Thread.fork``."""
        forked = await self._access.offload.run(
            self._sync.fork, checkpoint, branch=branch, to=to, set=set, delete=delete, id=id, **notes
        )
        return AsyncThread(self._access, forked._handle.cursor)

    @overload
    def history(
        self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[WantedOfThread]
    ) -> AsyncIterator[CheckpointMeta]: ...

    @overload
    def history(
        self, *, on_damage: Literal["mark"], **wanted: Unpack[WantedOfThread]
    ) -> AsyncIterator[CheckpointMeta | Damaged]: ...

    def history(
        self,
        *,
        on_damage: OnDamage = "raise",
        limit: int | None = None,
        before: CheckpointMeta | int | None = None,
        branch: str | None = None,
        tag: str | None = None,
        graph: str | None = None,
        trigger: str | None = None,
        interrupt: bool | InterruptKind | str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Any]:
        """Iterate over checkpoints' metadata, newest first; see ``Thread.history``."""
        wanted = Filter(tag, graph, trigger, interrupt, where)
        listing = listing_of_thread(self._handle.cursor.lane, limit, before, branch, wanted)
        return alisted(self._access, listing, check_on_damage(on_damage))

    @overload
    async def branches(self, *, on_damage: Literal["raise"] = ...) -> list[Lane]: ...

    @overload
    async def branches(self, *, on_damage: Literal["mark"]) -> list[Lane | Damaged]: ...

    async def branches(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the thread's branches, oldest first; see ``Thread.branches``."""
        return await self._access.offload.run(lambda: list(self._sync.branches(on_damage=on_damage)))

    @overload
    def interrupts(
        self, *, on_damage: Literal["raise"] = ..., pending: bool = ...
    ) -> AsyncIterator[InterruptRecord]: ...

    @overload
    def interrupts(
        self, *, on_damage: Literal["mark"], pending: bool = ...
    ) -> AsyncIterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> AsyncIterator[Any]:
        """Iterate over the interrupts of all branches of this thread, oldest first; see ``Thread.interrupts``."""
        inbox = inbox_of(self._handle.cursor.lane.namespace, self.id, pending)
        return alisted(self._access, inbox, check_on_damage(on_damage))

    @overload
    def effects(self, *, on_damage: Literal["raise"] = ...) -> AsyncIterator[EffectRecord]: ...

    @overload
    def effects(self, *, on_damage: Literal["mark"]) -> AsyncIterator[EffectRecord | Damaged]: ...

    def effects(self, *, on_damage: OnDamage = "raise") -> AsyncIterator[Any]:
        """Iterate over the effects of all branches of this thread; see ``Thread.effects``."""
        ledger = ledger_of(self._handle.cursor.lane.namespace, self.id)
        return alisted(self._access, ledger, check_on_damage(on_damage))

    def lease(
        self,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
        wait_s: float = 0.0,
    ) -> AsyncLease:
        """Return the right to write this branch, to be used in an ``async with`` block; see ``Thread.lease``.

        If it is lost, the body of the block is cancelled, and leaving it raises Fenced.
        """
        return AsyncLease(self, check_terms(owner, ttl, heartbeat, on_lost, wait_s))

    def session(self, *, owner: str | None = None, note: str = "", ttl: float = 30.0) -> AsyncRunSession:
        """Return a record that a run is under way, to be used in an ``async with`` block; see ``Thread.session``."""
        return AsyncRunSession(self, owner, note, ttl)

    def loop(
        self,
        initial: Mapping[str, Any],
        *,
        input: Mapping[str, Any] | None = None,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        pause_check_s: float = PAUSE_CHECK_S,
        ttl: float = 30.0,
        owner: str | None = None,
        wait_s: float = 0.0,
    ) -> AsyncLoop:
        """Return a durable loop, to be used in an ``async with`` block and iterated over; see ``Thread.loop``."""
        terms = check_terms(owner, ttl, True, None, wait_s)
        return AsyncLoop(self, check_plan(initial, input, limit, metadata, pause_check_s, terms))

    async def effect(
        self,
        key: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        reconcile: Reconcile | None = None,
        idempotent: bool = False,
        unknown_on: tuple[type[BaseException], ...] = UNKNOWN_ON,
        **kwargs: Any,
    ) -> Any:
        """Do something to the world outside once, and return its result; see ``Thread.effect``.

        ``fn`` and ``reconcile`` may be plain functions or coroutine functions.
        """
        call = EffectCall(key, fn, args, kwargs, reconcile, idempotent, unknown_on)
        return await aperform(self._handle, call)

    def __repr__(self) -> str:
        return f"<AsyncThread {self.id!r} branch {self.branch!r} of {self._access.store.url}>"
