"""The state that a thread handle keeps between calls, and the services that all handles of a store share.

A cursor builds on the head it last loaded or wrote. An operation that changes the head state takes it out of the
cursor, and puts it back only when the store is known to hold the same. So after an error, Ctrl-C, or a signal handler
that saves through the same handle, the cursor has no head state and the next call reads the store. The ``base`` stays,
so that the next save cannot silently build on another writer's checkpoint.

A signal handler may run at any call, so fields that belong together are assigned in one statement without a call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from backstay.errors import Corrupted, Fenced
from backstay.operations.drivers import Offload, finish
from backstay.operations.leases import Heartbeat, HeldLease, free_dead, is_alive
from backstay.pieces.head_state import HeadState
from backstay.store.base import Backend, BranchKey, Head, Row

if TYPE_CHECKING:
    from asyncio import Future

P = ParamSpec("P")
T = TypeVar("T")

STREAMS_AT_ONCE = 16
RECENT_MAX = 256
RECENT_BYTES_MAX = 64 * 1024 * 1024
"""How many handles a store remembers, and how large their states may be together, as they were when it did."""


class Services:
    """Shared by all threads of an open store: namespace, clock, id maker, heartbeat and a supply of stream numbers."""

    def __init__(self, namespace: str, now: Callable[[], datetime], new_id: Callable[[], str]) -> None:
        self.namespace = namespace
        self.now = now
        self.new_id = new_id
        self.heartbeat = Heartbeat()
        self.dead_tokens: frozenset[str] = frozenset()  # of leases whose holders on this machine have died,
        self.dead_checked = float("-inf")  # as of this moment
        self.recent: dict[BranchKey, Cursor] = {}  # the handle that last used each branch, oldest first
        self._sizes: dict[BranchKey, int] = {}  # of their states
        self._streams: deque[int] = deque()
        _reset_after_fork.add(self)

    def reset(self) -> None:
        """Start from scratch in a forked process: the parent keeps the reserved stream numbers."""
        self._streams = deque()
        self.recent.clear()
        self._sizes.clear()
        self.heartbeat.reset()

    def remember(self, cursor: Cursor) -> None:
        """Keep the head state of a handle for the next handle of its branch; forget the oldest ones if it is too much.

        A server makes a handle for each request, and must not load the whole state for each.
        """
        branch, base, sizes = cursor.branch, cursor.base, self._sizes
        self.recent.pop(branch, None)
        sizes.pop(branch, None)
        self.recent[branch] = cursor
        sizes[branch] = 0 if base is None or base.head is None else base.head.size
        while len(sizes) > RECENT_MAX or sum(sizes.values()) > RECENT_BYTES_MAX:
            oldest = next(iter(sizes), branch)
            sizes.pop(oldest, None)
            self.recent.pop(oldest, None)

    def new_stream(self, store: Backend) -> int:
        """Return an unused stream number; they are reserved a few at a time.

        Each is taken in one step, so that none is used twice. An interrupt may lose some numbers, which is harmless.
        """
        try:
            return self._streams.popleft()
        except IndexError:
            first = store.reserve(STREAMS_AT_ONCE)
            self._streams.extend(range(first + 1, first + STREAMS_AT_ONCE))
            return first


@dataclass(frozen=True, slots=True)
class Access:
    """An open store, for operations that belong to no thread in particular."""

    store: Backend
    services: Services
    offload: Offload

    async def arun(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation in a worker thread."""
        return await self.offload.run(operation, self.store, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Base:
    """The state of a branch that a save builds on."""

    number: int = 0
    last_seq: int = 0
    epoch: int = 0
    head: Row | None = None

    @classmethod
    def of(cls, head: Head | None) -> Base:
        """Return the base for a head that was read from the store."""
        return cls() if head is None else cls(head.number, head.last_seq, head.epoch, head.row)

    def same_place(self, other: Base) -> bool:
        """Return whether nothing was written between this base and the other."""
        if not self.last_seq and not other.last_seq:
            return True  # nothing was ever written; a lease taken in between changes nothing
        mine, theirs = self.head, other.head
        return (self.number, self.last_seq, mine and mine.seq) == (other.number, other.last_seq, theirs and theirs.seq)


def _nobody() -> None:
    return None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Cursor:
    """The place of one handle in its branch."""

    branch: BranchKey
    base: Base | None = None
    head_state: HeadState | None = None  # None while an operation changes it
    lease: HeldLease | None = None  # the lease that this handle's saves are written under
    leftovers: list[Callable[[Backend], object]] = field(default_factory=list)  # undo the work of cancelled callers
    lock: threading.RLock = field(default_factory=threading.RLock)
    user: Callable[[], object | None] = _nobody  # a weak reference to the run or loop that uses this handle
    user_lock: threading.RLock = field(default_factory=threading.RLock)  # never held while anything waits
    recent: Mapping[BranchKey, Cursor] = field(default_factory=dict)  # of all handles of the store

    def __post_init__(self) -> None:
        _reset_after_fork.add(self)

    @property
    def is_leased(self) -> bool:
        """Return whether this handle holds a lease that an object is left to release."""
        lease = self.lease
        return lease is not None and not lease.is_abandoned

    def start_use(self, user: object, may_be_leased: bool) -> bool:
        """Let a run or loop use this handle, if no other one does and it holds no lease that is not for this one."""
        with self.user_lock:
            if self.user() is not None or (self.is_leased and not may_be_leased):
                return False
            self.user = weakref.ref(user)
            return True

    def end_use(self, user: object) -> None:
        """End the use of this handle by a run or loop."""
        if self.user() is user:
            self.user = _nobody

    @property
    def token(self) -> str | None:
        """Return the token of the lease that this handle holds."""
        lease = self.lease
        return None if lease is None else lease.request.token

    def inherit(self, base: Base) -> HeadState | None:
        """Return a copy of the head state of the handle that last used this branch; None if it is of another head."""
        other, mine = self.recent.get(self.branch), base.head
        if other is None or other is self or mine is None:
            return None
        same = (mine.digest, mine.base, mine.manifest)
        copied = other.copy_head_state(
            lambda theirs, row: theirs.same_place(base) and (row.digest, row.base, row.manifest) == same
        )
        return None if copied is None else copied[1]

    def copy_head_state(self, fits: Callable[[Base, Row], bool]) -> tuple[Row, HeadState] | None:
        """Return the head that this handle builds on and a copy of its state in memory; None if that does not fit.

        It needs no lock, which an interrupt could leave behind. If another thread, or a signal handler, changes the
        head state during the copy, the handle has none or another base afterwards.
        """
        base, head_state = self.base, self.head_state
        if base is None or base.head is None or head_state is None or not fits(base, base.head):
            return None
        copied = head_state.copy()
        return (base.head, copied) if self.base is base and self.head_state is head_state else None

    def take(self) -> tuple[Base | None, HeadState | None]:
        """Return the base and take the head state out, to change it."""
        base, head_state, self.head_state = self.base, self.head_state, None
        return base, head_state

    def move(self, before: Base | None, base: Base, head_state: HeadState | None) -> None:
        """Move from ``before`` to what is stored now, unless a signal handler has moved the cursor meanwhile."""
        if self.base is before:
            self.base, self.head_state = base, head_state

    def tidy(self, store: Backend) -> None:
        """Undo the unfinished work of cancelled callers. Needs the handle's lock."""
        while self.leftovers:
            self.leftovers.pop()(store)

    def reset(self) -> None:
        """Start from scratch in a forked process, where no other thread can release the lock."""
        self.lock = threading.RLock()
        self.user_lock = threading.RLock()
        self.lease, self.user = None, _nobody  # they belong to the parent
        self.leftovers = []
        self.head_state = None


class Handle:
    """Everything that the operations of one handle need, and the lock that runs them one at a time."""

    def __init__(self, access: Access, cursor: Cursor, blocking: bool = True) -> None:
        self.access = access
        self.services = access.services  # what all threads of the store share
        self.cursor = cursor
        cursor.recent = self.services.recent
        self.blocking = blocking  # False: an event loop uses it, and its thread must not wait for the store

    def run(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation in this thread, with the handle's lock.

        An operation without a lease that is refused because of a process of this machine that has died is run again.
        """
        cursor, store = self.cursor, self.access.store
        try:
            with cursor.lock:
                if cursor.leftovers:
                    cursor.tidy(store)
                is_leased = cursor.lease is not None
                try:
                    result = operation(store, *args, **kwargs)
                except Fenced as refusal:
                    if is_leased or refusal.holder is None or is_alive(refusal.holder) is not False:
                        raise
                    free_dead(store, cursor.branch)
                    result = operation(store, *args, **kwargs)
                if cursor.head_state is not None and self.services.recent.get(cursor.branch) is not cursor:
                    self.services.remember(cursor)
                return result
        except Corrupted as error:
            error.thread = error.thread or cursor.branch.thread
            raise

    def start(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start an operation in a worker thread, with the handle's lock, and return a future of its result."""
        return self.access.offload.start(lambda: self.run(operation, *args, **kwargs))

    async def arun(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation in a worker thread. A cancelled caller leaves at once; the operation runs to its end."""
        return await self.start(operation, *args, **kwargs)

    async def finish(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation in a worker thread. A cancelled caller leaves when the operation has ended."""
        return await finish(self.start(operation, *args, **kwargs))

    def run_either(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run an operation in this thread, or return an awaitable if an event loop uses the handle."""
        return self.run(operation, *args, **kwargs) if self.blocking else self.arun(operation, *args, **kwargs)

    async def arun_undoable(
        self, operation: Callable[[Backend], T], undo: Callable[[Backend], object] | None = None
    ) -> T:
        """Run an operation in a worker thread; if the caller is cancelled meanwhile, undo it.

        The operation always runs to its end, so a commit is never cut short. ``undo`` may also run before it.
        """
        import asyncio

        try:
            return await self.arun(operation)
        except asyncio.CancelledError:
            if undo is not None:
                self.cursor.leftovers.append(undo)
                self.access.offload.submit(self.run, lambda store: None)  # runs the undo
            raise


_reset_after_fork: weakref.WeakSet[Services | Cursor] = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [each.reset() for each in list(_reset_after_fork)])
