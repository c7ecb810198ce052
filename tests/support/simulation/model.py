"""What a store must do, in the plainest form: dictionaries that hold every state in full.

It shares no code with the library but the moment it is told and the rules of ``Keep`` as their documentation states
them. Slow and simple on purpose: every answer is computed from scratch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from backstay.operations.retention import Keep

Branch = tuple[str, str]
"""Thread and branch."""


class Place(NamedTuple):
    """What a writer builds on. A branch that is not there is ``NOWHERE``."""

    line: int
    last_seq: int
    head: str | None


NOWHERE = Place(0, 0, None)


@dataclass
class Point:
    """One checkpoint."""

    id: str
    branch: Branch
    seq: int
    step: int
    parent: str | None
    state: dict[str, Any]
    created: datetime
    trigger: str
    tags: set[str] = field(default_factory=set)

    def view(self) -> tuple[object, ...]:
        """Return what a store must show of it, besides its state."""
        tags = tuple(sorted(self.tags))
        return (self.id, *self.branch, self.seq, self.step, self.parent, self.trigger, tags, self.created)


@dataclass
class Line:
    """One branch; made anew under its old name it is another line."""

    number: int
    origin: str | None
    last_seq: int = 0
    ids: list[str] = field(default_factory=list)


class Model:
    """All checkpoints of a store, in full."""

    def __init__(self) -> None:
        self.points: dict[str, Point] = {}
        self.lines: dict[Branch, Line] = {}
        self.next_seq: dict[str, int] = {}  # in the order in which threads were made
        self._lines_made = 0

    def place(self, branch: Branch) -> Place:
        """Return what the next save of a branch must build on."""
        line = self.lines.get(branch)
        return NOWHERE if line is None else Place(line.number, line.last_seq, line.ids[-1] if line.ids else None)

    def head(self, branch: Branch) -> Point | None:
        """Return a branch's newest point."""
        name = self.place(branch).head
        return None if name is None else self.points[name]

    def add(
        self, name: str, branch: Branch, step: int, parent: str | None, state: dict[str, Any], created: datetime
    ) -> Point:
        """Add a point at the end of a branch; its trigger and the line's origin are set by the caller."""
        assert name not in self.points
        seq = self.next_seq.get(branch[0], 1)
        self.next_seq[branch[0]] = seq + 1
        if branch not in self.lines:
            self._lines_made += 1
            self.lines[branch] = Line(self._lines_made, None)
        line = self.lines[branch]
        line.last_seq = seq
        line.ids.append(name)
        point = self.points[name] = Point(name, branch, seq, step, parent, deepcopy(state), created, "manual")
        return point

    def remove(self, names: Collection[str]) -> int:
        """Delete points and the branches that have none left; return how many points went."""
        gone = [name for name in names if self.points.pop(name, None) is not None]
        for branch, line in list(self.lines.items()):
            line.ids = [name for name in line.ids if name not in gone]
            if not line.ids:
                del self.lines[branch]
        return len(gone)

    def remove_thread(self, thread: str) -> int:
        """Delete a thread with its numbers."""
        self.next_seq.pop(thread, None)
        return self.remove([name for name, point in self.points.items() if point.branch[0] == thread])

    def newest_first(self, thread: str, branch: str | None = None) -> list[Point]:
        """Return a thread's points, or those of one branch."""
        wanted = [p for p in self.points.values() if p.branch[0] == thread and branch in (None, p.branch[1])]
        return sorted(wanted, key=lambda point: point.seq, reverse=True)

    def threads(self) -> list[str]:
        """Return the newest point's id of each thread, the thread made last first."""
        found = (self.newest_first(thread) for thread in reversed(self.next_seq))
        return [points[0].id for points in found if points]

    def at(self, branch: Branch, step: int) -> Point | None:
        """Return the newest point at or before a step, looking where a branch came from before its own first."""
        below: int | None = None
        while branch in self.lines:
            for point in self.newest_first(*branch):
                if point.step <= step and (below is None or point.seq < below):
                    return point
            origin = self.points.get(self.lines[branch].origin or "")
            if origin is None:
                return None
            branch, below = origin.branch, origin.seq + 1
        return None

    def doomed(self, thread: str | None, keep: Keep, now: datetime) -> list[str]:
        """Return what a prune must delete, branch by branch in the order they were made."""
        origins = {line.origin for line in self.lines.values()}
        found = []
        for branch, line in self.lines.items():
            if thread not in (None, branch[0]):
                continue
            points = [self.points[name] for name in reversed(line.ids)]
            kept = {*origins, points[0].id, *(p.id for p in points[: keep.last or 0])}
            kept.update(_milestones(points, keep.milestones))
            found += [p.id for p in points if p.id not in kept and not _wanted(p, keep, now)]
        return found


def _wanted(point: Point, keep: Keep, now: datetime) -> bool:
    return (
        bool(keep.tagged and point.tags)
        or bool(keep.every and point.step % keep.every == 0)
        or (keep.days is not None and point.created > now - timedelta(days=keep.days))
    )


def _milestones(points: list[Point], count: int | None) -> Iterator[str]:
    for index in range(count or 0):
        assert count is not None
        yield points[round(index * (len(points) - 1) / (count - 1))].id
