"""What a saver remembers of branches between two puts: the tip, the versions, fingerprints of lists.

It is only ever what is faster to know than to read again. A desk belongs to one head: a put takes it away, changes it,
and puts it back under the new head; whoever finds none reads the store. So no two puts share one, and what failed is
forgotten by not being put back. A desk that a read left has the bytes, but does not know yet what it takes to write.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay.integrations.langgraph.messages import KnownMessages
from backstay.integrations.langgraph.sealed import SealedPrints
from backstay.store.base import Row
from backstay.thread.cursor import Cursor

Known = KnownMessages | SealedPrints

DESKS_MAX = 512
DESKS_BYTES_MAX = 64 * 1024 * 1024
"""How much of states' bytes is remembered in all; the branch that was used longest ago is forgotten first."""


@dataclass(slots=True, eq=False)
class Desk:
    """One branch whose head is known."""

    cursor: Cursor
    versions: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)  # of lists: what tells whether another begins with them
    serde: object = None  # the serializer that wrote what is known

    @property
    def head(self) -> str | None:
        """Return the id of the checkpoint that is next to be built on."""
        seen = self.cursor.seen
        return None if seen is None or seen.head is None else seen.head.id

    @property
    def size(self) -> int:
        """Return about how many bytes are remembered."""
        seen = self.cursor.seen
        kept = sum(known.size for known in self.known.values())
        if seen is None or seen.head is None:
            return sum(live.entry.size for live in self.cursor.tip.lives.values()) if self.cursor.tip else 0
        return kept + seen.head.size


class Desks:
    """The desks of a saver, by the head they know."""

    def __init__(self) -> None:
        self._renew()

    def take(self, head: str) -> Desk | None:
        """Return the desk of a branch with this head and forget it, or None."""
        self._check_process()
        with self._lock:
            desk, _ = self._desks.pop(head, (None, 0))
        return None if desk is None or desk.cursor.tip is None else desk

    def keep(self, desk: Desk, read: Row | None = None) -> None:
        """Remember a desk whose head was just stored, or ``read``; what a put knows is not replaced by that."""
        self._check_process()
        head = desk.head if read is None else read.id
        if head is None:
            return
        entry = (desk, desk.size)
        with self._lock:
            if head in self._desks and read is not None:
                return
            self._desks.pop(head, None)
            self._desks[head] = entry
            while len(self._desks) > DESKS_MAX or (len(self._desks) > 1 and self._bytes() > DESKS_BYTES_MAX):
                self._desks.popitem(last=False)

    def _bytes(self) -> int:
        # Counted anew each time: a running sum would be wrong for ever after an interrupt between two of its changes.
        return sum(size for _, size in list(self._desks.values()))

    def forget_thread(self, thread: str) -> None:
        """Forget everything about a thread."""
        with self._lock:
            for head, (desk, _) in list(self._desks.items()):
                if desk.cursor.lane.thread == thread:
                    self._desks.pop(head, None)

    def _check_process(self) -> None:
        if self._process != os.getpid():  # a forked child: what was being done in the parent is not being done here
            self._renew()

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in
        self._desks: OrderedDict[str, tuple[Desk, int]] = OrderedDict()  # with its size
        self._process = os.getpid()


def unchanged(versions: Mapping[str, Any], known: Mapping[str, Any], changed: Mapping[str, Any]) -> set[str]:
    """Return the channels that are as they were: same version, and not among those said to have changed."""
    return {
        channel
        for channel, version in versions.items()
        if channel not in changed and channel in known and known[channel] == version
    }
