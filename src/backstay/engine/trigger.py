"""Triggers: when a run tells its sink.

A trigger decides on facts of the engine and on what it counted itself, never on the state's values. How a run begins,
waits and ends is always told, and so is what a node asked for: triggers differ only in what else they let through.

A trigger is configuration and never changes, so one may serve many runs at once. Each run calls ``begin`` and asks what
it gets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from backstay.engine.moment import Moment
from backstay.errors import InvalidInput


class Counter(Protocol):
    """A trigger at work in one run."""

    def wants(self, moment: Moment) -> bool:
        """Tell whether the sink is to be told. Asked once for each moment, in order."""


@runtime_checkable
class Trigger(Protocol):
    """When the sink is told; made by one of the functions below."""

    def begin(self) -> Counter:
        """Return what one run asks."""


def every_node() -> Trigger:
    """Tell the sink after each commit."""
    return _ByFact("every_node()", lambda moment: True)


def barrier_only() -> Trigger:
    """Tell the sink at barriers."""
    return _ByFact("barrier_only()", lambda moment: moment.at_barrier)


def on_mutation() -> Trigger:
    """Tell the sink after each commit that changed something."""
    return _ByFact("on_mutation()", lambda moment: moment.mutated)


def manual() -> Trigger:
    """Tell the sink when a node asks for it."""
    return _ByFact("manual()", lambda moment: False)


def every(
    n: int | None = None, *, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Trigger:
    """Tell the sink after each ``n`` commits, or at the first commit that is ``seconds`` after it was last told."""
    if (n is None) == (seconds is None):
        raise InvalidInput(
            "every() takes a number of commits or seconds", hint="Use any_of(every(n=…), every(seconds=…))"
        )
    return _ByTime(check_seconds(seconds), clock) if seconds is not None else _ByCount(check_every(n))


def any_of(*triggers: Trigger) -> Trigger:
    """Tell the sink when at least one of these would; each counts for itself."""
    for trigger in triggers:
        if isinstance(trigger, type) or not isinstance(trigger, Trigger):
            raise InvalidInput(f"any_of() takes triggers, not {type(trigger).__name__}", hint="Such as every(n=10)")
    return _AnyOf(triggers)


def check_every(n: object) -> int:
    """Return ``n`` if one in so many can be taken."""
    if type(n) is not int or n < 1:
        raise InvalidInput(f"n must be a whole number of at least 1, not {n!r:.40}")
    return n


def check_seconds(seconds: object) -> float:
    """Return ``seconds`` if they can be waited."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"seconds must be a number of at least 0, not {seconds!r:.40}")
    return seconds


@dataclass(frozen=True, slots=True)
class _ByFact:
    """Decides on the moment alone: it has nothing to count, so all runs may ask the same one."""

    name: str
    holds: Callable[[Moment], bool]

    def begin(self) -> Counter:
        return self

    def wants(self, moment: Moment) -> bool:
        return moment.forced or moment.requested or self.holds(moment)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _ByCount:
    n: int

    def begin(self) -> Counter:
        return _Count(self.n)

    def __repr__(self) -> str:
        return f"every(n={self.n})"


@dataclass(slots=True)
class _Count:
    n: int
    passed_over: int = 0

    def wants(self, moment: Moment) -> bool:
        self.passed_over += 1
        told = moment.forced or moment.requested or self.passed_over >= self.n
        if told:
            self.passed_over = 0
        return told


@dataclass(frozen=True, slots=True)
class _ByTime:
    seconds: float
    clock: Callable[[], float] = field(compare=False)

    def begin(self) -> Counter:
        return _Stopwatch(self.seconds, self.clock, self.clock())

    def __repr__(self) -> str:
        return f"every(seconds={self.seconds})"


@dataclass(slots=True)
class _Stopwatch:
    seconds: float
    clock: Callable[[], float]
    since: float

    def wants(self, moment: Moment) -> bool:
        now = self.clock()
        told = moment.forced or moment.requested or now - self.since >= self.seconds
        if told:
            self.since = now
        return told


@dataclass(frozen=True, slots=True)
class _AnyOf:
    triggers: tuple[Trigger, ...]

    def begin(self) -> Counter:
        return _Several([trigger.begin() for trigger in self.triggers])

    def __repr__(self) -> str:
        return f"any_of({', '.join(map(repr, self.triggers))})"


@dataclass(slots=True)
class _Several:
    counters: list[Counter]

    def wants(self, moment: Moment) -> bool:
        # All are asked, also after one said yes: who is not asked does not count.
        answers = [counter.wants(moment) for counter in self.counters]
        return any(answers) or moment.forced or moment.requested
