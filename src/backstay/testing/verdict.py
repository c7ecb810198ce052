"""What the check of a history says: a verdict, with every violation that was found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from backstay.testing.history import Branch


class Kind(StrEnum):
    """What can be wrong with a history; ``chain`` tells how each is found."""

    LOST = "lost"  # acknowledged, but not in the chain
    DUPLICATE = "duplicate"  # twice in the chain
    PHANTOM = "phantom"  # in the chain, but nobody appended it
    APPLIED_FAILURE = "applied-failure"  # in the chain, but its append was told to have failed
    FORK = "fork"  # two with the same parent
    GAP = "gap"  # its parent is not the one before it
    SEQ = "seq"  # numbers do not rise
    MISREPORTED = "misreported"  # an answer differs from the chain
    ORDER = "order"  # acknowledged before another began that stands before it
    FUTURE_READ = "future-read"  # saw what had not begun
    STALE_READ = "stale-read"  # did not see what had been acknowledged
    BACKWARD_READ = "backward-read"  # did not see what another read had seen
    DIRTY_READ = "dirty-read"  # saw what is not in the chain
    UNJUSTIFIED_CONFLICT = "unjustified-conflict"  # its parent was the head during the whole call
    STALE_EPOCH = "stale-epoch"  # behind a higher epoch, or landed after one was granted
    GRANT = "grant"  # epochs were granted twice, or falling
    UNJUSTIFIED_FENCE = "unjustified-fence"  # its epoch was the highest, and not given back


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that cannot be."""

    kind: Kind
    branch: Branch
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.branch}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    """What a check looked at and what it found. It is true if nothing is wrong."""

    violations: tuple[Violation, ...]
    stored: int = 0  # checkpoints in the chains
    acknowledged: int = 0  # appends
    reads: int = 0
    conflicts: int = 0
    unknown: int = 0  # appends whose outcome their caller does not know
    unknown_applied: int = 0  # those of them that are in the chains

    @property
    def kinds(self) -> set[Kind]:
        """Return the kinds of violations found."""
        return {violation.kind for violation in self.violations}

    def __bool__(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        figures = (
            f"{self.acknowledged} acknowledged, {self.conflicts} conflicts, {self.reads} reads, {self.unknown} unknown "
            f"({self.unknown_applied} applied), {self.stored} stored, {len(self.violations)} violations"
        )
        return "\n  ".join((figures, *map(str, self.violations)))
