"""Findings: the entries of a check's report, each one problem in one place, the same for every store.

A finding names the place as exactly as possible, describes the problem, and names the repair that would help. It never
holds a value of a state, so it may be logged and shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.store.leases import BranchKey

GOOD = "good"
"""Every byte was read and verified."""

DAMAGED = "damaged"
"""It exists but cannot be read, or does not match its digest."""

MISSING = "missing"
"""Something refers to it, but it does not exist."""

INCONSISTENT = "inconsistent"
"""Two places contradict each other, and one of them can be derived from the rest."""

ORPHAN = "orphan"
"""Nothing refers to it any more."""

LEFTOVER = "leftover"
"""An unfinished operation left it: a temporary file, or a torn end that was cut off."""

UNREACHABLE = "unreachable"
"""It may be intact, but its thread or branch does not exist, so no call can reach it."""

KINDS = (GOOD, DAMAGED, MISSING, INCONSISTENT, ORPHAN, LEFTOVER, UNREACHABLE)

REBUILD = "rebuild"
"""The store can derive it from its own rows and manifests."""

RESTORE = "restore"
"""The bytes can be restored from another copy, if there is one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of one of ``KINDS``. ``repair`` names the repair that would help; None if none would."""

    kind: str
    where: str
    what: str
    thread: str | None = None
    checkpoint: str | None = None
    key: str | None = None  # of the state, or the name of other data of a checkpoint
    branch: str | None = None
    scope: str = ""
    namespace: str = ""
    repair: str | None = None

    @property
    def is_harmless(self) -> bool:
        """Return whether the stored data is sound: a leftover was never part of it."""
        return self.kind in (GOOD, LEFTOVER)

    def to_dict(self) -> dict[str, str | None]:
        """Return the fields as a dictionary, for programs."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


def about_branch(kind: str, branch: BranchKey, what: str, repair: str | None = REBUILD) -> Finding:
    """Return a finding about a branch."""
    return Finding(
        kind,
        f"branch {branch.name!r} of thread {branch.thread!r}",
        what,
        branch.thread,
        branch=branch.name,
        scope=branch.scope,
        namespace=branch.namespace,
        repair=repair,
    )


def source_name(source: int | bytes) -> str:
    """Return a stream or blob as a finding names it."""
    return f"stream {source}" if isinstance(source, int) else f"blob {source.hex()[:16]}"
