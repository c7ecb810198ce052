"""A lease as its holder knows it, from the moment it was taken: what saves must show, and whether it is lost.

The store decides who may write. What is kept here only lets the holder know early, and once. It is lost when the store
says so, or when it could not be renewed for its whole time. It is over when it was given back, which is no loss.

It knows its owner, the lease object, only as long as somebody else does: an interrupt in the very first line of leaving
a ``with`` block keeps it from being given back, and then nobody may keep it alive for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from backstay.errors import Fenced
from backstay.store.leases import Claim, Held, Leases
from backstay.thread.heartbeat import Pulse


@dataclass(frozen=True, slots=True)
class Loss:
    """How a lease was lost; ``called`` tells that a call of the holder's met it, who then knows by itself."""

    error: Fenced
    called: bool


class Hold:
    """The right to write one branch."""

    def __init__(
        self,
        store: Leases,
        held: Held,
        claim: Claim,
        began: float,
        on_loss: Callable[[Loss], None],
        owner: Callable[[], object] = object,
    ) -> None:
        self.lane = held.lane
        self.epoch = held.epoch
        self.claim = claim
        self.pulse = Pulse(claim.ttl_us / 1e6, began, self._beat, self.give_up)
        self.loss: Loss | None = None
        self._store = store
        self._on_loss = on_loss
        self._owner = owner  # gives None when it is gone
        self._ending = False
        self._over = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler may save while it is held

    @property
    def is_elsewhere(self) -> bool:
        """Tell whether it belongs to the process that forked this one. No lock: the parent may have held it then."""
        return os.getpid() != self._process

    @property
    def is_forsaken(self) -> bool:
        """Tell whether nobody is left who could give it back."""
        return self._owner() is None

    @property
    def is_over(self) -> bool:
        """Tell whether it was given back."""
        return self._over

    def refusal(self) -> Fenced | None:
        """Return the error for a holder that is none, or may be none any more."""
        if self.loss is not None:
            fresh = copy(self.loss.error)  # an error that is raised twice would collect both tracebacks
            fresh.__cause__ = self.loss.error.__cause__
            return fresh
        if self._over:
            return None
        if self.is_elsewhere:
            return self._fenced("belongs to the process that forked this one", "Take a lease of your own")
        if self.pulse.overdue:
            return self._unknown()
        return None

    def extended(self, began: float) -> None:
        """Take note of a save or renewal that extended it and began at this moment."""
        self.pulse.extended(began)

    def fenced(self, error: Fenced, releasing: bool = False) -> None:
        """Take note that the store refused a call of the holder's."""
        self._lose(Loss(error, called=True), releasing)

    def give_up(self, error: Exception) -> None:
        """Take note that the heartbeat could not renew it."""
        if not isinstance(error, Fenced):
            unknown = self._unknown()
            unknown.__cause__ = error
            error = unknown
        self._lose(Loss(error, called=False))

    def end(self) -> None:
        """Begin to give it back: that a renewal is refused from now on is no loss."""
        with self._lock:
            self._ending = True

    def stay(self) -> None:
        """Undo ``end``."""
        with self._lock:
            self._ending = False

    def ended(self) -> None:
        """Finish ``end``: it is nobody's any more."""
        with self._lock:
            self._over = True

    def _beat(self) -> bool:
        # Without the handle's lock: a save that takes long must not keep its own lease from being renewed.
        if self.is_forsaken:
            return False
        self._store.renew(self.lane, self.epoch, self.claim)
        return True

    def _lose(self, loss: Loss, releasing: bool = False) -> None:
        with self._lock:
            if self._over or self.loss is not None or (self._ending and not releasing):
                return
            self.loss = loss
        self._on_loss(loss)

    def _unknown(self) -> Fenced:
        what = f"could not be renewed for {self.pulse.ttl:g} s, so it may be another worker's now"
        return self._fenced(what, "Stop. If nobody took it over, a new lease can be had at once")

    def _fenced(self, what: str, hint: str) -> Fenced:
        return Fenced(
            f"the lease on branch {self.lane.branch!r} {what}",
            epoch=self.epoch,
            current=self.epoch,
            thread=self.lane.thread,
            hint=hint,
        )
