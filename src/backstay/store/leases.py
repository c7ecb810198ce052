"""The lease part of the store contract: who may write a lane, and until when others must let them.

A lease lives in the lane's own row: owner, token, expiry, and an epoch that rises by one with every new holder and
never falls. **Safety is the epoch**, which every commit carries and the store compares inside the commit itself: a
holder that was asleep while somebody else took over cannot write, whatever any clock says. The clock decides liveness
only, that is when a lease may be taken from a holder that no longer renews it. It is the store's own: PostgreSQL's, or
the host's boot clock together with the boot's id (a lease from before a reboot has expired).

The token tells one acquisition from every other, so a verb repeated after a lost answer gives the first result again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from backstay.errors import Fenced
from backstay.store.lane import LaneKey


class Claim(NamedTuple):
    """What a holder shows: its name for people, the token of this acquisition, and how long it asks for."""

    owner: str
    token: str
    ttl_us: int


@dataclass(frozen=True, slots=True)
class Held:
    """A lease just taken."""

    lane: LaneKey
    number: int  # the lane's
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease as lists show it. ``left_us`` is how long it still runs: 0 or less = it has expired."""

    lane: LaneKey
    number: int
    owner: str
    epoch: int
    left_us: int


def fenced(lane: LaneKey, epoch: int, current: int, owner: str | None, left_us: int) -> Fenced:
    """Return the error for a caller with this epoch (0 = without a lease) on a lane that is not its to write."""
    if epoch < current and epoch:
        what = f"the lease on branch {lane.branch!r} was taken over (epoch {current}, ours was {epoch})"
        hint = "Stop: another worker goes on with this run. Nothing of this call was stored"
    elif owner is not None and left_us > 0:
        what = f"branch {lane.branch!r} is leased to {owner!r} for another {left_us / 1e6:.1f} s"
        hint = "Only the holder may write. If it died, its time runs out: wait for that with wait_s=…"
    else:
        what = f"the lease on branch {lane.branch!r} has ended (epoch {current}, ours was {epoch})"
        hint = "Take a new lease, then load the newest checkpoint and go on from there"
    return Fenced(what, epoch=epoch, current=current, owner=owner, thread=lane.thread, hint=hint)


class Leases(Protocol):
    """The verbs on leases."""

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        """Take the lane's lease, making the lane (without a checkpoint) if it is not there.

        Free or expired: the epoch rises by one and the lease is the claim's. Held under the claim's own token: it is
        extended and the same epoch comes back. Held by anyone else: raises Fenced, naming the owner.
        """

    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        """Let the lease run for the claim's time from now on, also if it had expired and nobody took it.

        Raises Fenced if the epoch is no longer current, the token is another, or the lane is gone.
        """

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        """Give the lease back. A lane that never had a checkpoint goes with it, and a thread that never had more too.

        Again for the same epoch, or if the lane is gone: nothing happens. Raises Fenced if another took it since.
        """

    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseRow]:
        """Return leases that were not released, the one that expired first first."""

    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        """Take up to ``count`` expired leases at once, the one that expired first first.

        Several may claim at the same time: each lease goes to one of them and none waits for another. Leases already
        held under the claim's token count too: they are extended and come first.
        """
