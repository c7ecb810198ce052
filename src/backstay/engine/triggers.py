"""Triggers: when a run notifies its sink.

    graph.run_sync(thread, input, trigger=triggers.every(n=10))

A ``CheckpointEvent`` describes a point from which the run could resume; the engine makes one after each commit and at
each end of a run. A trigger decides on these facts and its own counters, never on values of the state. The start, each
pause and the end of a run always reach the sink, and so does every checkpoint that a node asked for.

A trigger is configuration and never changes, so many runs may share it. Each run calls ``start`` and uses the result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

from backstay.engine.state import RunState
from backstay.errors import InvalidInput
from backstay.model.checkpoint import CheckpointFields, Write
from backstay.model.frame import FrameInfo, FrameStack

__all__ = ["CheckpointEvent", "Trigger", "any_of", "barrier_only", "every", "every_node", "manual", "on_mutation"]

Cause = Literal["input", "node", "interrupt", "manual", "end", "rejected", "failed", "cancelled", "barrier"]
"""The cause of a checkpoint; stored as its ``trigger``."""

FORCED: Final[frozenset[Cause]] = frozenset({"input", "interrupt", "end", "rejected", "failed", "cancelled"})
"""The start, the pauses and the ends of a run. Without these, the store could not show the status of a run."""


@dataclass(slots=True)
class StepRecord:
    """The stored fields of a checkpoint, without the state."""

    frames: list[dict[str, Any]]  # plain, the outermost without its state
    path: Sequence[str]  # all nodes finished in the outermost graph
    run: Mapping[str, Any]  # the graph's shape and the run's options
    run_version: int  # rises when ``run`` changes
    fields: CheckpointFields
    writes: list[Write] | None = None  # store only these, as pending writes of the newest checkpoint
    is_stored: bool = False  # set by the sink that stored it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointEvent:
    """One consistent state and its place in the run. Like the state, it is valid until the sink returns.

    ``frames`` and ``record`` are functions because they take time: a sink calls them only if it needs the result.
    """

    node_id: str  # the node that just committed; the start node at the start
    step: int  # nodes committed so far in the run; 0 before the first
    graph_id: str  # the graph of this node: the outermost, or one inside it
    run_id: str
    attempt: int = 1
    trigger: Cause = "node"
    mutated: bool = True  # the commit changed the state
    at_barrier: bool = False
    forced: bool = False  # passes every trigger and every wrapper; set for the causes in ``FORCED``
    requested: bool = False  # the node asked for it
    frames: Callable[[], FrameStack] = field(repr=False)
    run_state: RunState = field(repr=False)  # of the outermost graph, for sinks that store only what is new
    node_state: RunState | None = field(default=None, repr=False)  # of the graph of this node; None = the outermost
    record: Callable[[], StepRecord] | None = field(default=None, repr=False)  # for sinks that store resumable runs

    def __post_init__(self) -> None:
        if self.trigger in FORCED:
            object.__setattr__(self, "forced", True)

    @property
    def info(self) -> FrameInfo:
        """The node and the step."""
        return FrameInfo(self.node_id, self.step)


class RunTrigger(Protocol):
    """A trigger with the counters of one run."""

    def wants(self, event: CheckpointEvent) -> bool:
        """Return whether to notify the sink. The run asks once for each event, in order."""


@runtime_checkable
class Trigger(Protocol):
    """When a run notifies its sink; made by one of the functions below."""

    def start(self) -> RunTrigger:
        """Return a trigger for one run."""


def every_node() -> Trigger:
    """Notify the sink after each commit."""
    return _ByFact("every_node()", lambda event: True)


def barrier_only() -> Trigger:
    """Notify the sink at barriers."""
    return _ByFact("barrier_only()", lambda event: event.at_barrier)


def on_mutation() -> Trigger:
    """Notify the sink after each commit that changed the state."""
    return _ByFact("on_mutation()", lambda event: event.mutated)


def manual() -> Trigger:
    """Notify the sink only when a node asks for it."""
    return _ByFact("manual()", lambda event: False)


def every(
    n: int | None = None, *, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Trigger:
    """Notify the sink after each ``n`` commits, or at the first commit ``seconds`` after the last notification."""
    if (n is None) == (seconds is None):
        raise InvalidInput(
            "every() takes either a number of commits or seconds", hint="Use any_of(every(n=…), every(seconds=…))"
        )
    return _ByTime(check_seconds(seconds), clock) if seconds is not None else _ByCount(check_every(n))


def any_of(*triggers: Trigger) -> Trigger:
    """Notify the sink when at least one of these triggers would; each has its own counters."""
    for trigger in triggers:
        if isinstance(trigger, type) or not isinstance(trigger, Trigger):
            raise InvalidInput(f"any_of() takes triggers, not {type(trigger).__name__}", hint="Such as every(n=10)")
    return _AnyOf(triggers)


def check_every(n: object) -> int:
    """Return ``n``, checked: a whole number of at least 1."""
    if type(n) is not int or n < 1:
        raise InvalidInput(f"n must be a whole number of at least 1, not {n!r:.40}")
    return n


def check_seconds(seconds: object) -> float:
    """Return ``seconds``, checked: a finite number of at least 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"seconds must be a number of at least 0, not {seconds!r:.40}")
    return seconds


@dataclass(frozen=True, slots=True)
class _ByFact:
    """Decides on the event alone. It counts nothing, so all runs share it."""

    name: str
    holds: Callable[[CheckpointEvent], bool]

    def start(self) -> RunTrigger:
        return self

    def wants(self, event: CheckpointEvent) -> bool:
        return event.forced or event.requested or self.holds(event)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _ByCount:
    n: int

    def start(self) -> RunTrigger:
        return _CommitCounter(self.n)

    def __repr__(self) -> str:
        return f"every(n={self.n})"


@dataclass(slots=True)
class _CommitCounter:
    n: int
    skipped: int = 0

    def wants(self, event: CheckpointEvent) -> bool:
        self.skipped += 1
        is_due = event.forced or event.requested or self.skipped >= self.n
        if is_due:
            self.skipped = 0
        return is_due


@dataclass(frozen=True, slots=True)
class _ByTime:
    seconds: float
    clock: Callable[[], float] = field(compare=False)

    def start(self) -> RunTrigger:
        return _Stopwatch(self.seconds, self.clock, self.clock())

    def __repr__(self) -> str:
        return f"every(seconds={self.seconds})"


@dataclass(slots=True)
class _Stopwatch:
    seconds: float
    clock: Callable[[], float]
    since: float

    def wants(self, event: CheckpointEvent) -> bool:
        now = self.clock()
        is_due = event.forced or event.requested or now - self.since >= self.seconds
        if is_due:
            self.since = now
        return is_due


@dataclass(frozen=True, slots=True)
class _AnyOf:
    triggers: tuple[Trigger, ...]

    def start(self) -> RunTrigger:
        return _AnyCounter([trigger.start() for trigger in self.triggers])

    def __repr__(self) -> str:
        return f"any_of({', '.join(map(repr, self.triggers))})"


@dataclass(slots=True)
class _AnyCounter:
    counters: list[RunTrigger]

    def wants(self, event: CheckpointEvent) -> bool:
        answers = [counter.wants(event) for counter in self.counters]  # all of them, so that each one counts
        return any(answers) or event.forced or event.requested
