"""Facts: what a verb changed, decided and numbered, so that doing it again gives the same.

A verb of this store looks at the tables, refuses or decides, and ends in one fact; the tables change by facts alone.
The memory store takes a fact in and forgets it. The directory store writes it down first; reading its files again is
taking in the same facts in the same order. So a fact holds results (numbers, sequence numbers, who holds a lease until
when), never a question that a clock or another writer could answer differently the second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backstay.pieces.manifest import Source
from backstay.store.base import Row, WriteRow
from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.memory.chunks import Body
from backstay.store.records import Record
from backstay.store.tenure import Tenure


class Counters(NamedTuple):
    """The numbers that were given out last, which deleting must not bring back."""

    number: int = 0  # of threads and lanes
    stream: int = 0
    record: int = 0


class ThreadMark(NamedTuple):
    """A thread's number, and the sequence number its next checkpoint gets."""

    namespace: str
    thread: str
    number: int
    next_seq: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was added at the end of a lane, with its new bytes; the lane is made if it is not there."""

    row: Row
    lane_number: int
    blobs: Mapping[bytes, Body] = field(default_factory=dict)
    chunks: Sequence[tuple[int, int, Body]] = ()
    sources: Mapping[Source, bool] = field(default_factory=dict)  # -> whether the lane owns the stream
    origin: str | None = None  # of the lane, if this is its first
    tenure: Tenure | None = None  # the lease as it was extended
    replaces: bytes | None = None  # the digest of the head, if it had this very id; its children keep it


@dataclass(frozen=True, slots=True)
class LaneSet:
    """A lane is there, and this is its lease."""

    key: LaneKey
    number: int
    thread_number: int
    tenure: Tenure
    last_seq: int = 0
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class LaneDropped:
    """A lane that never had a checkpoint went with its lease."""

    key: LaneKey
    counters: Counters


@dataclass(frozen=True, slots=True)
class Wrote:
    """Results of tasks are kept beside a checkpoint."""

    lane: LaneKey
    thread_number: int
    checkpoint: str
    rows: Sequence[WriteRow]


@dataclass(frozen=True, slots=True)
class Tagged:
    """A checkpoint has these tags now."""

    lane: LaneKey
    checkpoint: str
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """Checkpoints were deleted. Their digests stay with their children."""

    namespace: str
    digests: Mapping[str, bytes]
    counters: Counters
    threads: Sequence[ThreadMark]
    keeps_bytes: bool = False  # and effects: they were only taken out


@dataclass(frozen=True, slots=True)
class ThreadDeleted:
    """A thread was deleted with everything in it; children in other threads keep its checkpoints' digests."""

    namespace: str
    thread: str
    digests: Mapping[str, bytes]
    counters: Counters


@dataclass(frozen=True, slots=True)
class RecordSet:
    """A record is like this now, and lives until then if it has a time to live."""

    record: Record
    thread_number: int
    expiry: Moment | None = None


@dataclass(frozen=True, slots=True)
class Marked:
    """These numbers were given out, and these threads are there, whatever else is known of them."""

    counters: Counters
    threads: Sequence[ThreadMark] = ()


@dataclass(frozen=True, slots=True)
class BytesKept:
    """Bytes are here, in place of what there was at the same addresses."""

    blobs: Mapping[bytes, Body] = field(default_factory=dict)
    chunks: Sequence[tuple[int, int, Body]] = ()


@dataclass(frozen=True, slots=True)
class RowSet:
    """A checkpoint's row is like this now; its lane needs these sources too.

    Of a head ``last_seq`` is the lane's from now on, so that whoever saw it before is out of date; else 0.
    """

    row: Row
    sources: tuple[Source, ...]
    last_seq: int = 0


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What follows from rows and manifests was worked out anew; with ``drops`` what belongs to nothing went."""

    drops: bool


@dataclass(frozen=True, slots=True)
class Several:
    """Facts that are true together or not at all."""

    facts: Sequence[Fact]


Fact = (
    Saved
    | LaneSet
    | LaneDropped
    | Wrote
    | Tagged
    | Deleted
    | ThreadDeleted
    | RecordSet
    | Marked
    | BytesKept
    | RowSet
    | Rebuilt
    | Several
)
