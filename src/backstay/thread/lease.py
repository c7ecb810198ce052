"""Leases: the right to write a branch, taken for a time, renewed while in use, and released.

Only saves through the handle that took the lease carry it. The store checks inside every save that no other worker
writes; a lease object only lets its holder know early that it must stop. ``LeaseBase`` is the common part: ``Lease``
and ``AsyncLease`` differ in how they reach the store, and a lost ``AsyncLease`` cancels the body of its block.

To the store, two runs that save through the same handle look like one, so only one run or loop may use a handle at a
time: see ``HandleUse``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import uuid
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from backstay.errors import BackstayError, Corrupted, Fenced, InvalidInput
from backstay.model.ids import check_label
from backstay.operations.cursor import Cursor, Handle
from backstay.operations.drivers import TaskCancellation, async_sleep
from backstay.operations.leases import HeldLease, LeaseLoss, is_alive, short_name, this_process
from backstay.operations.run_keeper import RunKeeper, retried
from backstay.store.base import Backend, BranchKey
from backstay.store.leases import Holder, LeaseGrant, LeaseRequest
from backstay.thread.access import handle_of

if TYPE_CHECKING:
    from types import TracebackType

    from backstay.thread.thread import AsyncThread, Thread

TTL_S_MIN = 0.05
TTL_S_MAX = 86_400.0
ACQUIRE_RETRY_S = 0.1
"""How long to wait for another worker's lease to end before asking the store again."""

HANDLE_RETRY_S = 0.01
HANDLE_WAIT_S = 0.5
"""How long a run or loop at least waits for another one on its handle: a cancelled one needs a moment to end."""

_uses: ContextVar[tuple[weakref.ref[LeaseBase | HandleUseBase], ...]] = ContextVar("backstay uses")
_log = logging.getLogger("backstay.run")


def check_ttl(ttl: object) -> float:
    """Return the ttl of a lease in seconds, checked."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not TTL_S_MIN <= ttl <= TTL_S_MAX:
        raise InvalidInput(f"ttl must be a number of seconds from {TTL_S_MIN:g} to {TTL_S_MAX:g}, not {ttl!r:.40}")
    return float(ttl)


def to_us(ttl: float) -> int:
    """Return seconds as whole microseconds."""
    return round(ttl * 1_000_000)


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """The arguments of ``Thread.lease``."""

    label: str  # the owner's name; "" = host and process
    ttl: float
    heartbeat: bool
    on_lost: Callable[[Any], None] | None
    wait: float | None = 0.0  # how many seconds to wait if another worker has it; None = until it ends

    def request(self) -> LeaseRequest:
        """Return a request with a new token. Reads files, so not in the thread of an event loop."""
        return LeaseRequest(str(this_process(self.label)), uuid.uuid4().hex, to_us(self.ttl))

    def deadline(self) -> float:
        """Return when to stop waiting."""
        return math.inf if self.wait is None else time.monotonic() + self.wait


def check_lease_options(
    owner: str | None,
    ttl: float,
    heartbeat: bool = True,
    on_lost: Callable[[Any], None] | None = None,
    wait: float | None = 0.0,
) -> LeaseOptions:
    """Return the options of a lease, checked."""
    if not isinstance(heartbeat, bool):
        raise InvalidInput(f"heartbeat must be True or False, not {type(heartbeat).__name__}")
    if on_lost is not None and not callable(on_lost):
        raise InvalidInput(f"on_lost must be a function that takes the lease, not {type(on_lost).__name__}")
    is_number = isinstance(wait, int | float) and not isinstance(wait, bool) and 0 <= wait <= TTL_S_MAX
    if wait is not None and not is_number:
        raise InvalidInput(f"wait must be a number of seconds from 0 to {TTL_S_MAX:g}, or None, not {wait!r:.40}")
    label = "" if owner is None else check_label(owner, "owner")
    return LeaseOptions(label, check_ttl(ttl), heartbeat, on_lost, wait)


class LeaseBase:
    """One lease, from before it is taken until after it is released. An object can be used only once."""

    def __init__(self, handle: Handle, options: LeaseOptions, keeper: RunKeeper | None = None) -> None:
        self._handle = handle
        self._cursor = handle.cursor
        self._options = options
        self._keeper = keeper  # the record of the run that it is taken for, which is stored with it
        self.run: Any = None  # the run that ``store.claim`` took it for
        self._has_logged = False
        self._held: HeldLease | None = None
        self._request: LeaseRequest | None = None  # the last one sent to the store
        self._entered = False
        self._failure: BaseException | None = None  # raised by on_lost

    @property
    def owner(self) -> str:
        """Return the owner's name, for people to read."""
        if self._request is not None:
            return Holder.parse(self._request.owner).name
        return self._options.label or short_name()

    @property
    def ttl(self) -> float:
        """Return how many seconds the lease lasts after each renewal."""
        return self._options.ttl

    @property
    def epoch(self) -> int:
        """Return the epoch, which rises with every lease of the branch; 0 before the lease is taken."""
        return 0 if self._held is None else self._held.epoch

    @property
    def lost(self) -> bool:
        """Return whether the lease is or may be lost: the store refused it, or it was not renewed within its ttl."""
        return self._held is not None and self._held.refusal() is not None

    @property
    def _holds(self) -> bool:
        return self._held is not None and not self._held.is_over

    def raise_if_lost(self) -> None:
        """Raise Fenced if the lease is lost. If ``on_lost`` raised an error, the first call raises that one instead."""
        held = self._taken()
        self._raise_loss(held)
        refusal = held.refusal()
        if refusal is not None:
            raise refusal
        if held.is_over:
            raise InvalidInput("the lease was released", thread=held.branch.thread, hint="Take a new one")

    def _take(self, grant: LeaseGrant, request: LeaseRequest, started: float) -> None:
        """Hold the lease that the store granted to a call; ``started`` is when that call started."""
        me = weakref.ref(self)

        def on_loss(loss: LeaseLoss) -> None:
            lease = me()
            if lease is not None:
                lease._notify(loss)

        self._request = request
        held = HeldLease(self._handle.access.store, grant, request, started, on_loss, me)
        self._held = self._cursor.lease = held
        if self._options.heartbeat:
            self._handle.services.heartbeat.add(held.renewal)

    # Operations; all but _renew need the handle's lock --------------------------------------------------------------

    def _acquire(self, store: Backend) -> None:
        cursor, request, other = self._cursor, self._options.request(), self._cursor.lease
        if cursor.is_leased:
            raise _handle_is_busy(cursor, is_used=False)
        if other is not None:
            cursor.lease = None
            with contextlib.suppress(BackstayError):
                store.release(other.branch, other.epoch, other.request.token)
        started = time.monotonic()
        self._request = request
        grant = self._grant(store, request)
        self._take(grant, request, started)
        base, head_state = cursor.take()
        # If the branch had no checkpoint, the lease may have created it, so the next save reads the head again.
        if base is not None and base.last_seq:
            cursor.move(base, replace(base, epoch=grant.epoch), head_state)

    def _grant(self, store: Backend, request: LeaseRequest) -> LeaseGrant:
        """Ask the store for the lease; if its holder is a process of this machine that has died, take it over."""
        keeper, branch = self._keeper, self._cursor.branch
        try:
            if keeper is None:
                return store.acquire(branch, request)
            grant = retried(lambda: store.acquire(branch, request, keeper.begin(store, request.token, request.owner)))
            keeper.began(grant.run)
            return grant
        except Fenced as refusal:
            if request.over == refusal.current or refusal.holder is None or is_alive(refusal.holder) is not False:
                raise
            return self._grant(store, request._replace(over=refusal.current))

    def _retry_after(self, deadline: float, refusal: Fenced) -> float:
        """Return how long to wait before asking again; raise the store's refusal after the deadline."""
        left = deadline - time.monotonic()
        if left <= 0 or is_held_around(self._handle):
            raise refusal
        if not self._has_logged:
            self._has_logged = True
            _log.warning(
                "thread %r: waiting for %s, whose lease lasts another %.0f s unless it is renewed",
                self._cursor.branch.thread,
                refusal.owner,
                refusal.left_s,
            )
        return min(ACQUIRE_RETRY_S, left)

    def _renew(self, store: Backend) -> None:
        """Extend the lease; without the handle's lock, so that a long save does not block it."""
        held = self._taken()
        if held.loss is not None or held.is_inherited or held.is_over:
            self.raise_if_lost()
        started = time.monotonic()
        try:
            store.renew(held.branch, held.epoch, held.request)
        except Fenced as error:
            held.fenced(error)
            raise
        held.renewal.extended(started)

    def _release(self, store: Backend) -> None:
        held, cursor = self._taken(), self._cursor
        if held.is_over:
            return
        if held.is_inherited:
            self.raise_if_lost()
        held.renewal.stopped, cursor.lease = True, None
        held.start_release()
        self._handle.services.heartbeat.remove(held.renewal)
        try:
            self._release_with_run(store, held.branch, held.epoch, held.request.token)
        except Fenced as error:
            held.fenced(error, releasing=True)
        finally:
            held.finish_release()
        if cursor.base is not None and not cursor.base.last_seq:
            cursor.head_state = None  # a branch without a checkpoint is deleted with its lease
        self._raise_loss(held)

    def _release_with_run(self, store: Backend, branch: BranchKey, epoch: int, token: str) -> None:
        """Release the lease in the store, and store the outcome of its run with it."""
        keeper = self._keeper
        if keeper is None:
            store.release(branch, epoch, token)
        else:
            try:
                retried(lambda: store.release(branch, epoch, token, keeper.finish(store)))
            except Corrupted:  # of the run's record: the lease must not outlive its block
                store.release(branch, epoch, token)
                raise
            keeper.drop_unused(store)

    def _undo(self, store: Backend) -> None:
        """Release a lease that an interrupted caller may have taken without knowing it."""
        request, held, branch = self._request, self._held, self._cursor.branch
        if request is not None:
            with contextlib.suppress(BackstayError):
                # If the answer was lost, asking again with the same token returns the same lease, and so its epoch.
                taken = held or (store.acquire(branch, request))
                self._release_with_run(store, branch, taken.epoch, request.token)
        if held is not None:
            held.finish_release()

    def _renew_or_release(self, store: Backend) -> None:
        """Renew a lease that was taken before its block was entered; release it if that fails."""
        try:
            self._renew(store)
        except Exception:
            with contextlib.suppress(BackstayError):
                self._release(store)
            raise

    def _abandon(self, store: Backend) -> None:
        """Release the lease of a caller that was cancelled before its block started."""
        if self._held is not None:
            with contextlib.suppress(BackstayError):  # no caller is left to get the error
                self._release(store)

    # State ----------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._entered:
            raise InvalidInput("a lease can be entered only once", hint="Take another: thread.lease()")
        self._entered = True

    def _taken(self) -> HeldLease:
        if self._held is None:
            raise InvalidInput("the lease is not taken yet", hint="Write: with thread.lease() as lease: …")
        return self._held

    def _notify(self, loss: LeaseLoss) -> None:
        """Notify the holder, in the thread where the loss was found."""
        if self._held is not None:
            self._handle.services.heartbeat.remove(self._held.renewal)
        if self._options.on_lost is not None:
            try:
                self._options.on_lost(self)
            except BaseException as failure:  # raise_if_lost() raises it, where the holder sees it
                self._failure = failure
        if not loss.called:
            self._stop_body()

    def _stop_body(self) -> None:
        """Cancel the body of the block; only an event loop can do that."""

    def _raise_loss(self, held: HeldLease) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if held.loss is not None:
            raise held.refusal() or held.loss.error

    def __repr__(self) -> str:
        branch, held = self._cursor.branch, self._held
        state = "not taken" if held is None else "lost" if self.lost else "released" if held.is_over else "held"
        return f"<{type(self).__name__} on {branch.thread!r} branch {branch.name!r} by {self.owner!r}, {state}>"


class Lease(LeaseBase):
    """The right to write a branch, while a ``with`` block runs.

    Attributes: ``thread`` (the handle whose saves carry it), ``owner``, ``epoch``, ``ttl``, ``lost``, and ``run`` if
    ``store.claim`` returned it.
    """

    def __init__(self, thread: Thread, options: LeaseOptions, keeper: RunKeeper | None = None) -> None:
        super().__init__(handle_of(thread), options, keeper)
        self.thread = thread

    def renew(self) -> None:
        """Extend the lease by its ttl from now, even if it expired and no one took it. Raises Fenced if it is lost."""
        self._renew(self._handle.access.store)

    def release(self) -> None:
        """Release the lease. Raises Fenced if it was lost. Releasing twice does nothing."""
        self._handle.run(self._release)

    def __enter__(self) -> Lease:
        self._enter()
        try:
            if self._held is not None:
                if self.lost:
                    self._handle.run(self._renew_or_release)
                return self
            deadline = self._options.deadline()
            while True:
                try:
                    self._handle.run(self._acquire)
                    start_use(self)
                    return self
                except Fenced as error:
                    time.sleep(self._retry_after(deadline, error))
        except BackstayError:
            raise
        except BaseException:
            self._release_after_interrupt()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        end_use(self)
        try:
            self.release()
        except Exception as failure:
            if error is None:
                raise
            if not isinstance(failure, Fenced):
                add_failure_note(error, failure)
        except BaseException:
            self._release_after_interrupt()
            raise

    def _release_after_interrupt(self) -> None:
        """Make sure that an interrupt leaves no lease behind. If a second one comes here, the lease has to expire."""
        held, cursor = self._held, self._cursor
        if held is not None:
            held.renewal.stopped = True
            if cursor.lease is held:
                cursor.lease = None
        self._handle.run(self._undo)


class AsyncLease(LeaseBase):
    """The right to write a branch, while an ``async with`` block runs. If it is lost, the block is cancelled.

    Attributes: ``thread`` (the handle whose saves carry it), ``owner``, ``epoch``, ``ttl``, ``lost``, and ``run`` if
    ``store.claim`` returned it.
    """

    def __init__(self, thread: AsyncThread, options: LeaseOptions, keeper: RunKeeper | None = None) -> None:
        super().__init__(handle_of(thread), options, keeper)
        self.thread = thread
        self._body: TaskCancellation | None = None

    async def renew(self) -> None:
        """Extend the lease by its ttl from now, even if it expired and no one took it. Raises Fenced if it is lost."""
        await self._handle.access.arun(self._renew)

    async def release(self) -> None:
        """Release the lease. Raises Fenced if it was lost. Releasing twice does nothing."""
        await self._handle.finish(self._release)

    async def __aenter__(self) -> AsyncLease:
        self._enter()
        try:
            if self._held is not None and self.lost:
                await self._handle.finish(self._renew_or_release)
            deadline = self._options.deadline()
            while self._held is None:
                try:
                    await self._handle.finish(self._acquire)
                except Fenced as error:
                    await async_sleep(self._retry_after(deadline, error))
        except Exception:
            raise
        except BaseException:  # the caller is cancelled, and no block will release what was taken
            await self._handle.finish(self._abandon)
            raise
        start_use(self)
        self._body = TaskCancellation()
        if self._taken().loss is not None:  # the body could not be cancelled yet
            self._body.end(None)
            await self.release()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        end_use(self)
        cancelled = self._body is not None and self._body.end(error)
        try:
            await self.release()
        except Exception as failure:
            if error is None:
                raise
            if cancelled:
                raise failure from error
            if not isinstance(failure, Fenced):
                add_failure_note(error, failure)

    def _stop_body(self) -> None:
        if self._body is not None:
            self._body.start()


# The use of a handle by a run or loop --------------------------------------------------------------------------------


class HandleUseBase:
    """The use of a handle by one run or loop, under the lease that the caller took, or one of its own, or none.

    The handle knows its user by a weak reference: if an interrupt keeps the use from ending, it ends with the object.
    """

    def __init__(
        self, handle: Handle, given: object, options: LeaseOptions, keeper: RunKeeper, takes_lease: bool
    ) -> None:
        if given is not None and not isinstance(given, LeaseBase):
            raise InvalidInput(
                f"lease must be a lease that you took, not {type(given).__name__}",
                hint="Write: with thread.lease() as lease: …, and pass lease=lease",
            )
        if given is not None and given._cursor is not handle.cursor:
            raise InvalidInput(
                f"this handle of thread {handle.cursor.branch.thread!r} did not take the lease",
                thread=handle.cursor.branch.thread,
                hint="Run on lease.thread, the handle that took it",
            )
        self._handle = handle
        self._cursor = handle.cursor
        self._given = given
        self._options = options
        self._takes_lease = takes_lease and given is None
        self._started = 0.0
        # A claimed run comes with the lease that was taken for it.
        claimed = None if given is None else given._keeper
        self.keeper = keeper if claimed is None else claimed
        self._keeps_record = not self._takes_lease and claimed is None  # otherwise the lease does

    _holds = True

    def _attach(self, store: Backend) -> None:
        """Store the run's record, because no lease does that."""
        self.keeper.attach(store, self._cursor.token or "", str(this_process(self._options.label)))

    def _detach(self, store: Backend) -> None:
        """Leave no record behind that says that the run executes."""
        with contextlib.suppress(BackstayError):  # the caller gets the error that stopped it
            self.keeper.detach(store)

    def _try_start(self) -> bool:
        return self._cursor.start_use(self, may_be_leased=self._given is not None)

    def _retry_after(self) -> float:
        """Return how long to wait before trying again; raise Fenced after the deadline."""
        is_used = self._cursor.user() is not None
        # Without an end, it waits only for a moment: the other run may be waiting for this one.
        wait_s = max(self._options.wait or 0.0, HANDLE_WAIT_S if is_used else 0.0)
        left = self._started + wait_s - time.monotonic()
        if left <= 0:
            raise _handle_is_busy(self._cursor, is_used)
        return min(HANDLE_RETRY_S, left)

    def _lease_options(self) -> LeaseOptions:
        """Return the options of the lease to take, with the time that is left to wait for it."""
        wait, waited = self._options.wait, time.monotonic() - self._started
        return replace(self._options, wait=None if wait is None else max(0.0, wait - waited))

    def _end(self) -> None:
        self._cursor.end_use(self)
        end_use(self)


class HandleUse(HandleUseBase):
    """The use of a handle by a run or loop, while a ``with`` block runs."""

    def __init__(
        self,
        thread: Thread,
        given: LeaseBase | None,
        options: LeaseOptions,
        keeper: RunKeeper,
        takes_lease: bool = True,
    ) -> None:
        super().__init__(handle_of(thread), given, options, keeper, takes_lease)
        self.thread = thread
        self.lease: Lease | None = None  # its own

    def __enter__(self) -> HandleUse:
        self._started = time.monotonic()
        while not self._try_start():
            time.sleep(self._retry_after())
        try:
            if self._given is not None:
                self._given.raise_if_lost()
            if self._takes_lease:
                self.lease = Lease(self.thread, self._lease_options(), self.keeper).__enter__()
            if self._keeps_record:
                self._handle.run(self._attach)
            start_use(self)
        except BaseException:
            if self._keeps_record:
                self._handle.run(self._detach)
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if self._keeps_record:
                self._handle.run(self.keeper.detach)
            if self.lease is not None:
                self.lease.__exit__(kind, error, where)
        finally:
            self._end()


class AsyncHandleUse(HandleUseBase):
    """The use of a handle by a run or loop, while an ``async with`` block runs."""

    def __init__(
        self,
        thread: AsyncThread,
        given: LeaseBase | None,
        options: LeaseOptions,
        keeper: RunKeeper,
        takes_lease: bool = True,
    ) -> None:
        super().__init__(handle_of(thread), given, options, keeper, takes_lease)
        self.thread = thread
        self.lease: AsyncLease | None = None  # its own

    async def __aenter__(self) -> AsyncHandleUse:
        self._started = time.monotonic()
        while not self._try_start():
            await async_sleep(self._retry_after())
        try:
            if self._given is not None:
                self._given.raise_if_lost()
            if self._takes_lease:
                self.lease = await AsyncLease(self.thread, self._lease_options(), self.keeper).__aenter__()
            if self._keeps_record:
                await self._handle.finish(self._attach)
            start_use(self)
        except BaseException:
            if self._keeps_record:  # the caller may be cancelled after the record was stored
                await self._handle.finish(self._detach)
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if self._keeps_record:
                await self._handle.finish(self.keeper.detach)
            if self.lease is not None:
                await self.lease.__aexit__(kind, error, where)
        finally:
            self._end()


def _handle_is_busy(cursor: Cursor, is_used: bool) -> Fenced:
    """Return the refusal for a run, loop or lease on a handle that a run or loop uses, or that holds a lease."""
    branch, held = cursor.branch, cursor.lease
    if is_used:
        what = f"another run or loop uses this handle of thread {branch.thread!r}"
        hint = "Let it end first, or wait for it: wait=…"
    else:
        what = f"this handle already holds the lease on branch {branch.name!r} of thread {branch.thread!r}"
        hint = "If you took it, pass it to the run or loop: lease=lease. To wait for its end: wait=…"
    holder = None if held is None else Holder.parse(held.request.owner)
    return Fenced(
        what,
        epoch=0,
        current=0 if held is None else held.epoch,
        owner=None if holder is None else holder.name,
        thread=branch.thread,
        hint=hint,
    )


def is_held_around(handle: Handle) -> bool:
    """Return whether a block around this call holds the handle's branch: waiting for that would never end."""
    store, branch = handle.access.store, handle.cursor.branch
    for ref in _uses.get(()):
        block = ref()
        if block is None or not block._holds or block._cursor.branch != branch:
            continue
        held = block._handle.access.store
        # Two stores in memory have the same URL and nothing else in common.
        if held is store or (held.url == store.url and not store.url.endswith("memory:")):
            return True
    return False


def start_use(block: LeaseBase | HandleUseBase) -> None:
    """Note that the block that starts here holds a branch. An object that is gone holds nothing."""
    _uses.set((*_uses.get(()), weakref.ref(block)))


def end_use(block: LeaseBase | HandleUseBase) -> None:
    """Note that the block that ends here holds nothing any more; a block around it may hold the same branch."""
    _uses.set(tuple(ref for ref in _uses.get(()) if ref() not in (block, None)))


def add_failure_note(error: BaseException, failure: Exception) -> None:
    """Attach a failure that happened while leaving a block to the error that ended the block."""
    error.add_note(f"While leaving the block: {type(failure).__name__}: {failure}")
