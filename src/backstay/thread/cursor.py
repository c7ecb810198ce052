"""What a thread handle remembers between calls, and what all handles of a store share.

A cursor builds on the head it last loaded or wrote. Whoever works on its tip takes it out, and puts it back when the
store is known to have the same. So whatever comes between (an error, Ctrl-C, a signal handler that saves through this
very handle) finds a cursor without a tip and reads the store. What the cursor has *seen* stays, so that the next save
cannot quietly build on somebody else's checkpoint.

A signal handler may run wherever a call is made. So what belongs together is changed in one statement without a call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from backstay.pieces.tip import Tip
from backstay.store.base import Backend, Head, LaneKey, Row
from backstay.thread.heartbeat import Heartbeat
from backstay.thread.hold import Hold

STREAMS_AT_ONCE = 16


class Context:
    """What all threads of an open store share: namespace, clock, id maker, heartbeat and a supply of stream numbers."""

    def __init__(self, namespace: str, now: Callable[[], datetime], new_id: Callable[[], str]) -> None:
        self.namespace = namespace
        self.now = now
        self.new_id = new_id
        self.heartbeat = Heartbeat()
        self._streams: deque[int] = deque()
        _renewed_in_children.add(self)

    def renew(self) -> None:
        """Begin anew in a forked process: stream numbers in hand stay with the parent."""
        self._streams = deque()
        self.heartbeat.renew()

    def new_stream(self, store: Backend) -> int:
        """Return a stream number that was never used; they are reserved a few at a time.

        Each leaves in one step, so that none is given out twice. An interrupt may lose some: there are enough.
        """
        try:
            return self._streams.popleft()
        except IndexError:
            first = store.reserve(STREAMS_AT_ONCE)
            self._streams.extend(range(first + 1, first + STREAMS_AT_ONCE))
            return first


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a branch that a save builds on."""

    number: int = 0
    last_seq: int = 0
    epoch: int = 0
    head: Row | None = None

    @classmethod
    def of(cls, head: Head | None) -> Seen:
        """Return what a look at the store shows."""
        return cls() if head is None else cls(head.number, head.last_seq, head.epoch, head.row)

    def same_place(self, other: Seen) -> bool:
        """Tell whether nothing was written in between."""
        if not self.last_seq and not other.last_seq:
            return True  # nothing was ever written; that somebody took a lease in between changes nothing
        mine, theirs = self.head, other.head
        return (self.number, self.last_seq, mine and mine.seq) == (other.number, other.last_seq, theirs and theirs.seq)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Cursor:
    """One handle's place in one branch."""

    lane: LaneKey
    seen: Seen | None = None
    tip: Tip | None = None  # the pieces of what was seen, unless somebody works on them
    hold: Hold | None = None  # the lease that this handle's saves are written under
    leftovers: list[Callable[[Backend], object]] = field(default_factory=list)  # undoes what cancelled callers began
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        _renewed_in_children.add(self)

    @property
    def token(self) -> str | None:
        """Return what shows the store that this handle holds the lease."""
        hold = self.hold
        return None if hold is None else hold.claim.token

    def take(self) -> tuple[Seen | None, Tip | None]:
        """Return what was seen and take its tip out, to work on it."""
        seen, tip, self.tip = self.seen, self.tip, None
        return seen, tip

    def move(self, before: Seen | None, seen: Seen, tip: Tip | None) -> None:
        """Go on from ``before`` to what is stored now, unless a signal handler went on from it meanwhile."""
        if self.seen is before:
            self.seen, self.tip = seen, tip

    def tidy(self, store: Backend) -> None:
        """Undo what cancelled callers left behind; called with the handle's lock, before anything else is done."""
        while self.leftovers:
            self.leftovers.pop()(store)

    def renew(self) -> None:
        """Begin anew in a forked process: whoever was using the handle there is not here to let go of it."""
        self.lock = threading.RLock()
        self.hold = None  # it is the parent's, and so is
        self.leftovers = []
        self.tip = None


_renewed_in_children: weakref.WeakSet[Context | Cursor] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for each in list(_renewed_in_children):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
