"""Which checkpoints may go. Pure: it sees metadata and a moment, and returns ids."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from backstay.errors import InvalidInput
from backstay.model.checkpoint import CheckpointMeta
from backstay.model.damaged import Damaged

_DAYS_MAX = timedelta.max.days


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep; a checkpoint stays if any rule wants it. All else goes when pruned.

    Always kept, whatever the rules: each branch's newest checkpoint, those that branches were forked from, those with
    an interrupt that is not consumed, and, unless ``tagged=False``, all with a tag. Rules count within one branch.
    """

    last: int | None = None  # the newest so many
    days: float | None = None  # those younger than this
    every: int | None = None  # those whose step is a multiple of this
    milestones: int | None = None  # the first, the last, and so many in all, evenly spread
    tagged: bool = True

    def __post_init__(self) -> None:
        for name in ("last", "every", "milestones"):
            value = getattr(self, name)
            least = 2 if name == "milestones" else 1
            if value is not None and (type(value) is not int or value < least):
                raise InvalidInput(f"Keep({name}=…) must be a whole number from {least} on, not {value!r:.40}")
        days = self.days
        if days is not None and (
            isinstance(days, bool) or not isinstance(days, int | float) or not math.isfinite(days) or days < 0
        ):
            raise InvalidInput(f"Keep(days=…) must be a number of days from 0 on, not {days!r:.40}")
        if (self.last, self.days, self.every, self.milestones) == (None, None, None, None):
            raise InvalidInput("Keep needs at least one rule", hint="For example Keep(last=10) or Keep(days=30)")

    def doomed(self, branch: Sequence[CheckpointMeta], now: datetime, protected: Collection[str]) -> list[str]:
        """Return the ids that may go, of one branch's checkpoints given newest first."""
        kept = set(protected)
        if branch:
            kept.add(branch[0].id)
        kept.update(meta.id for meta in branch[: self.last or 0])
        kept.update(meta.id for meta in branch if self._wanted(meta, now))
        kept.update(self._milestones(branch))
        return [meta.id for meta in branch if meta.id not in kept]

    def _wanted(self, meta: CheckpointMeta, now: datetime) -> bool:
        return (
            (self.tagged and bool(meta.tags))
            or (self.every is not None and meta.step % self.every == 0)
            or (self.days is not None and now - meta.created_at < timedelta(days=min(self.days, _DAYS_MAX)))
        )

    def _milestones(self, branch: Sequence[CheckpointMeta]) -> set[str]:
        if self.milestones is None or not branch:
            return set()
        count = min(self.milestones, len(branch) + 1)  # no more than there are: that may be a huge number
        return {branch[round(index * (len(branch) - 1) / (count - 1))].id for index in range(count)}


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune did, or would do."""

    deleted: int
    kept: int
    bytes: int  # given back; 0 for a dry run, which cannot know
    dry_run: bool
    checkpoints: tuple[str, ...]  # the ids deleted
    damaged: tuple[Damaged, ...] = ()  # what cannot be read: it was kept, and so was what it may need

    def __str__(self) -> str:
        verb = "would delete" if self.dry_run else "deleted"
        done = f"{verb} {self.deleted} checkpoints, kept {self.kept}" + (
            "" if self.dry_run else f", {self.bytes} bytes freed"
        )
        return done if not self.damaged else f"{done}; {len(self.damaged)} that cannot be read were not judged"
