"""A finding: one thing that a check says about one place. Every check of every store speaks in these.

A finding names the place as exactly as it is known, says in words what is wrong, and which repair would help. It never
holds a value of a state, so it may be logged and sent to others.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.store.lane import LaneKey

GOOD = "good"
"""Read and verified, every byte."""

DAMAGED = "damaged"
"""It is there and cannot be read, or is not what its digest says."""

MISSING = "missing"
"""Something refers to it and it is not there."""

INCONSISTENT = "inconsistent"
"""Two places say different things of the same, and one of them can be worked out from the rest."""

ORPHAN = "orphan"
"""It belongs to nothing any more."""

LEFTOVER = "leftover"
"""What an operation that did not end left behind: a temporary file, a torn end that was cut off."""

UNREACHABLE = "unreachable"
"""It may be intact, but what it belongs to is not there, so no call can reach it."""

KINDS = (GOOD, DAMAGED, MISSING, INCONSISTENT, ORPHAN, LEFTOVER, UNREACHABLE)

REBUILD = "rebuild"
"""The store can work it out from its own rows and manifests."""

RESTORE = "restore"
"""The right bytes, if they are kept anywhere else, can be put back."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a check found, of one of ``KINDS``. ``repair`` names what would help, None if nothing here would."""

    kind: str
    where: str
    what: str
    thread: str | None = None
    checkpoint: str | None = None
    key: str | None = None  # of the state, or the name of what else is kept beside a checkpoint
    branch: str | None = None
    scope: str = ""
    namespace: str = ""
    repair: str | None = None

    @property
    def is_harmless(self) -> bool:
        """Tell whether nothing is wrong with what is stored: a leftover was never part of it."""
        return self.kind in (GOOD, LEFTOVER)

    def to_dict(self) -> dict[str, str | None]:
        """Return it as plain values under fixed names, for programs."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


def about_lane(kind: str, lane: LaneKey, what: str, repair: str | None = REBUILD) -> Finding:
    """Return a finding about a branch."""
    return Finding(
        kind,
        f"branch {lane.branch!r} of thread {lane.thread!r}",
        what,
        lane.thread,
        branch=lane.branch,
        scope=lane.scope,
        namespace=lane.namespace,
        repair=repair,
    )


def source_name(source: int | bytes) -> str:
    """Return a stream or blob as a finding names it."""
    return f"stream {source}" if isinstance(source, int) else f"blob {source.hex()[:16]}"
