"""Taking times on a noisy machine: alternatives take turns, step by step, so that all of them meet the same noise."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Op = Callable[[int], float]
"""Does one thing, with whatever must be prepared or cleaned up around it; returns the seconds of the thing alone."""


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds that the repetitions of one thing took."""

    seconds: Sequence[float]

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def p10(self) -> float:
        """The time that only one in ten beats: what is left when other programs disturb the least."""
        return sorted(self.seconds)[len(self.seconds) // 10]

    @property
    def p99(self) -> float:
        """The time that one in a hundred exceeds; the worst if there are fewer."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    def ratio(self, other: Times) -> float:
        """Return how the medians compare."""
        return self.p50 / other.p50


def timed(thing: Callable[[int], object]) -> Op:
    """Return an op for something that needs no preparation."""

    def op(number: int) -> float:
        began = time.perf_counter()
        thing(number)
        return time.perf_counter() - began

    return op


def clock(thing: Callable[[], object]) -> float:
    """Return how long something takes, once."""
    began = time.perf_counter()
    thing()
    return time.perf_counter() - began


def take_turns(ops: Sequence[Op], count: int, warm_up: int = 3) -> list[Times]:
    """Run each op ``count`` times; all of them each round, and another one first each time."""
    taken: list[list[float]] = [[] for _ in ops]
    with quiet():
        for number in range(-warm_up, count):
            for place in range(len(ops)):
                which = (number + place) % len(ops)
                seconds = ops[which](number + warm_up)
                if number >= 0:
                    taken[which].append(seconds)
    return [Times(seconds) for seconds in taken]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the benchmark's own data away from the garbage collector, which stays on for what is measured."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
