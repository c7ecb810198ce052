"""The host's boot clock: one clock for all processes of a machine, which no one can set.

It counts from the boot, also while the machine sleeps, and is told apart from the clock of another boot by the boot's
id: what was to end in an earlier boot has ended. Linux has both. Where either is missing (another system, or no
``/proc``) the wall clock stands in. If that is set, leases end too early or too late, and nothing worse: who may write
is decided by the epoch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
WALL_CLOCK = "wall"
"""Stands for the boot's id where the wall clock is used."""


class Moment(NamedTuple):
    """A reading of a clock: microseconds since the boot, and which boot."""

    us: int
    boot: str

    def left_us(self, expires_us: int, boot: str) -> int:
        """Return how long it is until that moment: 0 or less = it is over, at the latest since this boot began."""
        return expires_us - self.us if boot == self.boot else -self.us


Clock = Callable[[], Moment]


def boot_clock() -> Moment:
    """Return the moment it is now."""
    boot = boot_id()
    ns = time.time_ns() if boot == WALL_CLOCK else time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return Moment(ns // 1000, boot)


@functools.cache
def boot_id(path: Path = BOOT_ID_PATH) -> str:
    """Return the id of this boot, or ``WALL_CLOCK`` where there is no boot clock or no id."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return WALL_CLOCK
    try:
        return path.read_text(encoding="ascii").strip() or WALL_CLOCK
    except OSError:
        return WALL_CLOCK
