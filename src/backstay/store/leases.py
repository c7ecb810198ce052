"""Leases: which writer holds a branch, and until when others must wait. Also the name of a branch, and the clock.

A lease is stored in the branch's own row: owner, token, expiry, and an epoch that rises by one with every new holder
and never falls. **Safety is the epoch**: every commit carries it, and the store compares it inside the commit. So a
holder that slept while another one took over cannot write, even if a clock is wrong. The clock only decides when a
lease may be taken from a holder that no longer renews it. The token identifies one acquisition, so a verb that is
repeated after a lost answer returns the first result again.

PostgreSQL uses its own clock. The other stores use the host's boot clock: one clock for all processes of a machine,
which cannot be set and also counts while the machine sleeps. The boot's id distinguishes it from the clock of another
boot, and a lease from an earlier boot has expired. Linux has both. Where either is missing (another system, or no
``/proc``) the wall clock is used. If that is set, leases end too early or too late, but the epoch still decides who may
write.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backstay.errors import Fenced

if TYPE_CHECKING:
    from backstay.store.records import Record

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
WALL_CLOCK = "wall"
"""Replaces the boot's id where the wall clock is used."""


class BranchKey(NamedTuple):
    """Names one branch of one scope of one thread."""

    namespace: str
    thread: str
    scope: str
    name: str


class ClockReading(NamedTuple):
    """A reading of a clock: microseconds since the boot, and which boot."""

    us: int
    boot: str

    def left_us(self, expires_us: int, boot: str) -> int:
        """Return the time left until ``expires_us`` of that boot; 0 or less if it is over."""
        return expires_us - self.us if boot == self.boot else -self.us


Clock = Callable[[], ClockReading]


def boot_clock() -> ClockReading:
    """Return the time now."""
    boot = boot_id()
    ns = time.time_ns() if boot == WALL_CLOCK else time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return ClockReading(ns // 1000, boot)


@functools.cache
def boot_id(path: Path = BOOT_ID_PATH) -> str:
    """Return the id of this boot, or ``WALL_CLOCK`` where there is no boot clock or no id."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return WALL_CLOCK
    try:
        return path.read_text(encoding="ascii").strip() or WALL_CLOCK
    except OSError:
        return WALL_CLOCK


class LeaseRequest(NamedTuple):
    """The request of a holder: who it is, the token of this acquisition, and the requested time.

    ``over`` is the epoch of a holder that is known to be dead: its lease counts as expired.
    """

    owner: str  # a ``Holder`` as text
    token: str
    ttl_us: int
    over: int = 0


class Holder(NamedTuple):
    """The process that holds a lease, as text in the lease's row.

    Process ids are reused. Together with the start time of the process, the boot of the machine and the namespaces of
    both numbers, an id identifies one process forever. Fields that a system does not provide are ``UNKNOWN``.
    """

    machine: str  # the machine's own id, as a digest
    boot: str
    namespaces: str  # those that give process ids and start times their meaning
    pid: str
    started: str
    host: str
    label: str = ""  # the owner's name, given by the program

    def __str__(self) -> str:
        return " ".join(self)

    @property
    def name(self) -> str:
        """The name for people: the label, or host and process id."""
        return self.label or f"{self.host}:{self.pid}"

    @classmethod
    def parse(cls, text: str | None) -> Holder:
        """Return the holder from its text; of any other text, one with that label and nothing else known."""
        parts = [] if text is None else text.split(" ", len(cls._fields) - 1)
        if len(parts) != len(cls._fields) or not parts[3].isdecimal() or len(parts[3]) >= 10:  # no pid is that long
            return cls(*(UNKNOWN,) * 6, text or "")
        return cls(*parts)


UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease just acquired, and the run that was stored with it."""

    branch: BranchKey
    number: int  # the branch's
    epoch: int
    run: Record | None = None


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """A lease as lists show it. ``left_us`` is its remaining time; 0 or less if it has expired."""

    branch: BranchKey
    number: int
    owner: str
    epoch: int
    left_us: int
    token: str = ""


def fenced(branch: BranchKey, epoch: int, current: int, owner: str | None, left_us: int) -> Fenced:
    """Return the error for a caller with this epoch (0 = without a lease) that may not write the branch."""
    holder = None if owner is None else Holder.parse(owner)
    if epoch < current and epoch:
        what = f"the lease on branch {branch.name!r} was taken over (epoch {current}, ours was {epoch})"
        hint = "Stop this run: the other worker continues it. This call stored nothing"
    elif holder is not None and left_us > 0:
        what = f"{holder.name!r} holds the lease on branch {branch.name!r} for another {left_us / 1e6:.1f} s"
        hint = "Only the holder may write. If it died elsewhere, its lease expires: wait for that with wait=…"
    else:
        what = f"the lease on branch {branch.name!r} has ended (epoch {current}, ours was {epoch})"
        hint = "Take a new lease, load the newest checkpoint and continue from there"
    return Fenced(
        what,
        epoch=epoch,
        current=current,
        owner=None if holder is None else holder.name,
        holder=holder,
        left_s=max(left_us, 0) / 1e6,
        thread=branch.thread,
        hint=hint,
    )


class LeaseRow(NamedTuple):
    """The lease in a branch's row, and the rules of the lease verbs. Without a token it is free; the epoch stays."""

    epoch: int = 0
    owner: str | None = None
    token: str | None = None
    expires_us: int = 0
    boot: str = ""

    def left_us(self, now: ClockReading) -> int:
        """Return the lease's remaining time; 0 or less if it is free or has expired."""
        return 0 if self.token is None else now.left_us(self.expires_us, self.boot)

    def acquired(self, branch: BranchKey, request: LeaseRequest, now: ClockReading) -> LeaseRow:
        """Return the lease after ``acquire``. The holder's own lease is extended, even if it has expired."""
        if self.token == request.token:
            return self.extended(request, now)
        if self.left_us(now) > 0 and request.over != self.epoch:
            raise self.refusal(branch, 0, now)
        return LeaseRow(self.epoch + 1, request.owner, request.token).extended(request, now)

    def renewed(self, branch: BranchKey, epoch: int, request: LeaseRequest, now: ClockReading) -> LeaseRow:
        """Return the lease after ``renew``."""
        if (epoch, request.token) != (self.epoch, self.token):
            raise self.refusal(branch, epoch, now)
        return self.extended(request, now)

    def released(self, branch: BranchKey, epoch: int, token: str, now: ClockReading) -> LeaseRow:
        """Return the lease after ``release``: free."""
        if epoch != self.epoch or self.token not in (None, token):
            raise self.refusal(branch, epoch, now)
        return LeaseRow(self.epoch)

    def extended(self, request: LeaseRequest, now: ClockReading) -> LeaseRow:
        """Return the lease with the requested time from now on."""
        return self._replace(expires_us=now.us + request.ttl_us, boot=now.boot)

    def check_writer(self, branch: BranchKey, epoch: int | None, token: str | None, now: ClockReading) -> None:
        """Raise Fenced unless a writer with this epoch (None = any) and token may write."""
        holds = self.token == token or (token is None and self.left_us(now) <= 0)
        if epoch not in (None, self.epoch) or not holds:
            raise self.refusal(branch, epoch or 0, now)

    def check_delete(self, branch: BranchKey, token: str | None, now: ClockReading) -> None:
        """Raise Fenced if a lease with another token is running."""
        if self.left_us(now) > 0 and self.token != token:
            raise self.refusal(branch, 0, now)

    def refusal(self, branch: BranchKey, epoch: int, now: ClockReading) -> Fenced:
        """Return the error for a caller with this epoch."""
        return fenced(branch, epoch, self.epoch, self.owner, self.left_us(now))


NO_LEASE = LeaseRow()
"""The lease of a branch that was never leased, or that does not exist."""
