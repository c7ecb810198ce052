"""A lane and a thread as the memory store keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay.pieces.manifest import Source
from backstay.store.base import Lane, Row
from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.leases import Held, LeaseRow
from backstay.store.tenure import FREE, Tenure


@dataclass
class KeptThread:
    """A thread: its number, and the next sequence number of its checkpoints."""

    number: int
    next_seq: int = 1


@dataclass
class KeptLane:
    """A lane with its rows, what they need, and its lease. One that was only leased so far has no rows."""

    key: LaneKey
    number: int
    last_seq: int = 0
    tenure: Tenure = FREE
    origin: str | None = None
    rows: list[Row] = field(default_factory=list)  # in rising order of seq
    sources: dict[Source, bool] = field(default_factory=dict)  # -> whether the lane owns the stream

    @property
    def head_seq(self) -> int:
        """The sequence number of its newest checkpoint; 0 if there is none."""
        return self.rows[-1].seq if self.rows else 0

    def shown(self) -> Lane:
        """Return the lane as lists show it."""
        head = self.rows[-1].id if self.rows else None
        return Lane(self.key, head, self.head_seq, self.last_seq, self.tenure.epoch, self.origin)

    def held(self) -> Held:
        """Return the lease as its holder is told of it."""
        return Held(self.key, self.number, self.tenure.epoch)

    def lease(self, now: Moment) -> LeaseRow:
        """Return the lease as lists show it."""
        tenure = self.tenure
        return LeaseRow(self.key, self.number, tenure.owner or "", tenure.epoch, tenure.left_us(now))
