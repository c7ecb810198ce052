"""Who holds a lane, as its row keeps it, and the rules of ``leases`` as pure functions of it."""

from __future__ import annotations

from typing import NamedTuple

from backstay.errors import Fenced
from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.leases import Claim, fenced


class Tenure(NamedTuple):
    """The lease of one lane. Without a token nobody holds it; the epoch stays."""

    epoch: int = 0
    owner: str | None = None
    token: str | None = None
    expires_us: int = 0
    boot: str = ""

    def left_us(self, now: Moment) -> int:
        """Return how long the lease still runs: 0 or less = it does not."""
        return 0 if self.token is None else now.left_us(self.expires_us, self.boot)

    def acquired(self, lane: LaneKey, claim: Claim, now: Moment) -> Tenure:
        """Return the lease after ``acquire``. The token's own is extended, also if it has expired."""
        if self.token == claim.token:
            return self.extended(claim, now)
        if self.left_us(now) > 0:
            raise self.refusal(lane, 0, now)
        return Tenure(self.epoch + 1, claim.owner, claim.token).extended(claim, now)

    def renewed(self, lane: LaneKey, epoch: int, claim: Claim, now: Moment) -> Tenure:
        """Return the lease after ``renew``."""
        if (epoch, claim.token) != (self.epoch, self.token):
            raise self.refusal(lane, epoch, now)
        return self.extended(claim, now)

    def released(self, lane: LaneKey, epoch: int, token: str, now: Moment) -> Tenure:
        """Return the lease after ``release``: nobody's."""
        if epoch != self.epoch or self.token not in (None, token):
            raise self.refusal(lane, epoch, now)
        return Tenure(self.epoch)

    def extended(self, claim: Claim, now: Moment) -> Tenure:
        """Return the lease with the claim's time from now on."""
        return self._replace(expires_us=now.us + claim.ttl_us, boot=now.boot)

    def check_writer(self, lane: LaneKey, epoch: int | None, token: str | None, now: Moment) -> None:
        """Raise Fenced unless who comes with this epoch (None = whichever it is) and token may write."""
        holds = self.token == token or (token is None and self.left_us(now) <= 0)
        if epoch not in (None, self.epoch) or not holds:
            raise self.refusal(lane, epoch or 0, now)

    def check_delete(self, lane: LaneKey, token: str | None, now: Moment) -> None:
        """Raise Fenced if a lease runs that is not the token's."""
        if self.left_us(now) > 0 and self.token != token:
            raise self.refusal(lane, 0, now)

    def refusal(self, lane: LaneKey, epoch: int, now: Moment) -> Fenced:
        """Return the error for a caller with this epoch."""
        return fenced(lane, epoch, self.epoch, self.owner, self.left_us(now))


FREE = Tenure()
"""Nobody holds the lane and nobody ever did; also what there is to say of a lane that does not exist."""
