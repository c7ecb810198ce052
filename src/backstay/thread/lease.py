"""Leases: the right to write a branch, taken for a time, kept alive while it is used, and given back.

Only saves through the handle that took the lease carry it. That nobody else writes is decided by the store inside every
save; a lease object only tells its holder early that it should stop. What both kinds of lease have in common stands in
``LeaseBase``; ``Lease`` and ``AsyncLease`` differ in how they reach the store, and in that losing a lease cancels the
body of an ``async with`` block.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from backstay.errors import BackstayError, Fenced, InvalidInput
from backstay.model.damaged import Damaged
from backstay.model.ids import check_label
from backstay.model.lease import ExpiredLease
from backstay.store.base import Backend
from backstay.store.leases import Claim, Held
from backstay.thread.access import Handle, handle_of
from backstay.thread.damage import unread
from backstay.thread.hold import Hold, Loss
from backstay.thread.offload import Interruption, rest
from backstay.thread.process import short_name

if TYPE_CHECKING:
    from types import TracebackType

    from backstay.thread.thread import Thread
    from backstay.thread.thread_async import AsyncThread

TTL_S_MIN = 0.05
TTL_S_MAX = 86_400.0
REST_S = 0.1
"""How long to wait, for somebody else's lease to end, before asking the store again."""

CLAIMS_MAX = 1000
"""The most leases that can be claimed at once."""


def check_ttl(ttl: object) -> float:
    """Return the seconds if they can be the time of a lease or session."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not TTL_S_MIN <= ttl <= TTL_S_MAX:
        raise InvalidInput(f"ttl must be a number of seconds from {TTL_S_MIN:g} to {TTL_S_MAX:g}, not {ttl!r:.40}")
    return float(ttl)


def check_owner(owner: str | None) -> str:
    """Return the name, or one made of host and process."""
    return short_name() if owner is None else check_label(owner, "owner")


def to_us(ttl: float) -> int:
    """Return seconds as whole microseconds."""
    return round(ttl * 1_000_000)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a caller asked for."""

    owner: str
    ttl: float
    heartbeat: bool
    on_lost: Callable[[Any], None] | None
    wait_s: float = 0.0  # how long to wait for it if somebody else has it

    def claim(self) -> Claim:
        """Return a claim that nobody ever had before."""
        return Claim(self.owner, uuid.uuid4().hex, to_us(self.ttl))


def check_terms(
    owner: str | None,
    ttl: float,
    heartbeat: bool,
    on_lost: Callable[[Any], None] | None,
    wait_s: float = 0.0,
) -> Terms:
    """Return the terms of a lease, checked."""
    if not isinstance(heartbeat, bool):
        raise InvalidInput(f"heartbeat must be True or False, not {type(heartbeat).__name__}")
    if on_lost is not None and not callable(on_lost):
        raise InvalidInput(f"on_lost must be a function of the lease, not {type(on_lost).__name__}")
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= TTL_S_MAX:
        raise InvalidInput(f"wait_s must be a number of seconds from 0 to {TTL_S_MAX:g}, not {wait_s!r:.40}")
    return Terms(check_owner(owner), check_ttl(ttl), heartbeat, on_lost, wait_s)


class LeaseBase:
    """One lease, from before it is taken until after it was given back. It is used once."""

    def __init__(self, handle: Handle, terms: Terms) -> None:
        self._handle = handle
        self._cursor = handle.cursor
        self._terms = terms
        self._hold: Hold | None = None
        self._claim: Claim | None = None  # what was shown to the store
        self._entered = False
        self._abandoned = False
        self._failure: BaseException | None = None  # what on_lost raised

    @property
    def owner(self) -> str:
        """Return the holder's name, for people."""
        return self._terms.owner

    @property
    def ttl(self) -> float:
        """Return for how many seconds each renewal lets it run."""
        return self._terms.ttl

    @property
    def epoch(self) -> int:
        """Return its epoch, which rises with every lease of the branch; 0 before it is taken."""
        return 0 if self._hold is None else self._hold.epoch

    @property
    def lost(self) -> bool:
        """Tell whether it is lost, or may be: the store said so, or it could not be renewed for its whole time."""
        return self._hold is not None and self._hold.refusal() is not None

    def check(self) -> None:
        """Raise Fenced if the lease is lost. What ``on_lost`` itself raised comes first, once."""
        hold = self._taken()
        self._raise_loss(hold)
        refusal = hold.refusal()
        if refusal is not None:
            raise refusal
        if hold.is_over:
            raise InvalidInput("the lease was given back", thread=hold.lane.thread, hint="Take another")

    def _take(self, held: Held, claim: Claim, began: float) -> None:
        """Be the lease that the store gave out by a call that began at this moment."""
        me = weakref.ref(self)

        def on_loss(loss: Loss) -> None:
            lease = me()
            if lease is not None:
                lease._lost(loss)

        self._claim = claim
        self._hold = self._cursor.hold = hold = Hold(self._handle.access.store, held, claim, began, on_loss, me)
        if self._terms.heartbeat:
            self._handle.context.heartbeat.add(hold.pulse)

    # The operations of its life -----------------------------------------------------------------------------------

    def _acquiring(self, store: Backend) -> None:
        """Take the lease; to be run with the handle's lock."""
        cursor, claim, other = self._cursor, self._terms.claim(), self._cursor.hold
        if other is not None and not other.is_forsaken:
            raise InvalidInput(
                f"this handle holds the lease on branch {cursor.lane.branch!r} already",
                thread=cursor.lane.thread,
                hint="Use that one, or another handle: store.thread(…)",
            )
        if self._abandoned:
            return
        if other is not None:
            cursor.hold = None
            with contextlib.suppress(BackstayError):
                store.release(other.lane, other.epoch, other.claim.token)
        began = time.monotonic()
        self._claim = claim
        held = store.acquire(cursor.lane, claim)
        self._take(held, claim, began)
        seen, tip = cursor.take()
        if seen is not None and seen.last_seq:
            cursor.move(seen, replace(seen, epoch=held.epoch), tip)
        # Else look again when saving: the branch may have been made just now, for the lease.

    def _deadline(self) -> float:
        """Return until when it is waited for."""
        return time.monotonic() + self._terms.wait_s

    def _rest_s(self, deadline: float, refusal: Fenced) -> float:
        """Return how long to wait before asking again; raise what the store said once the time is over."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise refusal
        return min(REST_S, left)

    def _renewing(self, store: Backend) -> None:
        """Extend the lease; without the handle's lock, so that a long save does not stand in the way."""
        hold = self._taken()
        if hold.loss is not None or hold.is_elsewhere or hold.is_over:
            self.check()
        began = time.monotonic()
        try:
            store.renew(hold.lane, hold.epoch, hold.claim)
        except Fenced as error:
            hold.fenced(error)
            raise
        hold.extended(began)

    def _releasing(self, store: Backend) -> None:
        """Give the lease back, once; to be run with the handle's lock."""
        hold, cursor = self._taken(), self._cursor
        if hold.is_over:
            return
        if hold.is_elsewhere:
            self.check()
        hold.pulse.stopped, cursor.hold = True, None
        hold.end()
        self._handle.context.heartbeat.remove(hold.pulse)
        try:
            store.release(hold.lane, hold.epoch, hold.claim.token)
        except Fenced as error:
            hold.fenced(error, releasing=True)
        finally:
            hold.ended()
        if cursor.seen is not None and not cursor.seen.last_seq:
            cursor.tip = None  # a branch without a checkpoint has gone with its lease
        self._raise_loss(hold)

    def _undoing(self, store: Backend) -> None:
        """Give back what an interrupted caller may have taken without knowing; to be run with the handle's lock."""
        claim, hold, lane = self._claim, self._hold, self._cursor.lane
        if claim is not None:
            with contextlib.suppress(BackstayError):
                # If the answer was lost: the same token gives the same lease again, and so tells its epoch.
                taken = hold or (store.acquire(lane, claim))
                store.release(lane, taken.epoch, claim.token)
        if hold is not None:
            hold.ended()

    def _resuming(self, store: Backend) -> None:
        """Make sure, before its block begins, that a lease taken earlier is still held; with the handle's lock."""
        try:
            self._renewing(store)
        except Exception:
            with contextlib.suppress(BackstayError):
                self._releasing(store)
            raise

    def _abandoning(self, store: Backend) -> None:
        """Undo an acquisition that nobody waited for; to be run with the handle's lock."""
        self._abandoned = True
        if self._hold is not None:
            with contextlib.suppress(BackstayError):  # nobody is there to be told
                self._releasing(store)

    # Inside -------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._entered:
            raise InvalidInput("a lease is entered once", hint="Take another: thread.lease()")
        self._entered = True

    def _taken(self) -> Hold:
        if self._hold is None:
            raise InvalidInput("the lease was not taken yet", hint="Write: with thread.lease() as lease: …")
        return self._hold

    def _lost(self, loss: Loss) -> None:
        """Tell the holder, in whichever thread the loss was met."""
        if self._hold is not None:
            self._handle.context.heartbeat.remove(self._hold.pulse)
        if self._terms.on_lost is not None:
            try:
                self._terms.on_lost(self)
            except BaseException as failure:  # not here, where nobody would see it: see check()
                self._failure = failure
        if not loss.called:
            self._stop_body()

    def _stop_body(self) -> None:
        """End the body of the ``with`` block, if that can be done from outside."""

    def _raise_loss(self, hold: Hold) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if hold.loss is not None:
            raise hold.refusal() or hold.loss.error

    def __repr__(self) -> str:
        lane, hold = self._cursor.lane, self._hold
        state = "not taken" if hold is None else "lost" if self.lost else "given back" if hold.is_over else "held"
        return f"<{type(self).__name__} on {lane.thread!r} branch {lane.branch!r} by {self.owner!r}, {state}>"


class Lease(LeaseBase):
    """The right to write a branch, for as long as a ``with`` block runs.

    Attributes: ``thread`` (the handle whose saves carry it), ``owner``, ``epoch``, ``ttl``, ``lost``.
    """

    def __init__(self, thread: Thread, terms: Terms) -> None:
        super().__init__(handle_of(thread), terms)
        self.thread = thread

    def renew(self) -> None:
        """Let it run for its time from now on, also if it had expired and nobody took it. If it is lost: Fenced."""
        self._renewing(self._handle.access.store)

    def release(self) -> None:
        """Give it back. Raises Fenced if it was lost; a second time does nothing."""
        self._handle.run(self._releasing)

    def __enter__(self) -> Lease:
        self._enter()
        try:
            if self._hold is None:
                self._wait()
            elif self.lost:
                self._handle.run(self._resuming)
        except BackstayError:
            raise
        except BaseException:
            self._let_go()
            raise
        return self

    def _wait(self) -> None:
        deadline = self._deadline()
        while True:
            try:
                self._handle.run(self._acquiring)
                return
            except Fenced as error:
                time.sleep(self._rest_s(deadline, error))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self.release()
        except Exception as failure:
            if error is None:
                raise
            if not isinstance(failure, Fenced):
                note_beside(error, failure)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Make sure that an interrupt leaves no lease behind. If another comes in here, its time runs out by itself."""
        hold, cursor = self._hold, self._cursor
        if hold is not None:
            hold.pulse.stopped = True
            if cursor.hold is hold:
                cursor.hold = None
        self._handle.run(self._undoing)


class AsyncLease(LeaseBase):
    """The right to write a branch, for as long as an ``async with`` block runs. If it is lost, the block is cancelled.

    Attributes: ``thread`` (the handle whose saves carry it), ``owner``, ``epoch``, ``ttl``, ``lost``.
    """

    def __init__(self, thread: AsyncThread, terms: Terms) -> None:
        super().__init__(handle_of(thread), terms)
        self.thread = thread
        self._body: Interruption | None = None

    async def renew(self) -> None:
        """Let it run for its time from now on, also if it had expired and nobody took it. If it is lost: Fenced."""
        await self._handle.access.arun(self._renewing)

    async def release(self) -> None:
        """Give it back. Raises Fenced if it was lost; a second time does nothing."""
        await self._handle.arun(self._releasing)

    async def __aenter__(self) -> AsyncLease:
        self._enter()
        if self._hold is None:
            deadline = self._deadline()
            while True:
                try:
                    await self._handle.arun_undoable(self._acquiring, self._abandoning)
                    break
                except Fenced as error:
                    await rest(self._rest_s(deadline, error))
        elif self.lost:
            await self._handle.arun(self._resuming)
        self._body = Interruption()
        if self._taken().loss is not None:  # too early for the body to be cancelled
            self._body.end(None)
            await self.release()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        stopped = self._body is not None and self._body.end(error)
        try:
            await self.release()
        except Exception as failure:
            if error is None:
                raise
            if stopped:
                raise failure from error
            if not isinstance(failure, Fenced):
                note_beside(error, failure)

    def _stop_body(self) -> None:
        if self._body is not None:
            self._body.begin()


def note_beside(error: BaseException, failure: Exception) -> None:
    """Keep what went wrong while a block was left beside the error that had ended it."""
    error.add_note(f"While leaving the block: {type(failure).__name__}: {failure}")


# Lists of leases --------------------------------------------------------------------------------------------------


def expired(store: Backend, namespace: str) -> list[ExpiredLease | Damaged]:
    """Return the leases that were neither renewed nor given back in time, the one that ended first first."""
    lost = unread(store, namespace, None)
    rows = store.leases(namespace, None, True)
    found = [
        ExpiredLease(
            thread_id=row.lane.thread,
            branch=row.lane.branch,
            scope=row.lane.scope,
            owner=row.owner,
            epoch=row.epoch,
            overdue=-row.left_us / 1e6,
        )
        for row in rows
    ]
    return [*lost, *found]


def claim(store: Backend, namespace: str, count: int, terms: Terms) -> list[tuple[Held, Claim, float]]:
    """Take up to ``count`` expired leases; return of each what ``LeaseBase._take`` needs."""
    if type(count) is not int or not 1 <= count <= CLAIMS_MAX:
        raise InvalidInput(f"n must be a whole number from 1 to {CLAIMS_MAX}, not {count!r:.40}")
    shown, began = terms.claim(), time.monotonic()
    rows = store.claim(namespace, count, shown)
    return [(held, shown, began) for held in rows]
