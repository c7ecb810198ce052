"""Engines take turns, a few steps each: then one waits inside its node until the others have done theirs.

An engine cannot be asked for one step, so each runs in a thread of its own and its node hands on to the next. A step's
time is what passes between leaving the node and entering it again: all that the engine does, and nothing of the node.
After a change of threads the processor's caches are another's: that is why a turn is more than one step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.timing import Times, quiet

LAP_STEPS = 10

Pause = Callable[[], None]
"""Called by a node as the only thing that it does."""

Race = Callable[[Pause], None]
"""Runs an engine whose node calls what it is given."""


@dataclass(slots=True)
class _Runner:
    race: Race
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    seconds: list[float] = field(default_factory=list)
    left: float | None = None
    ended: bool = False
    error: BaseException | None = None


def relay(races: Mapping[str, Race]) -> dict[str, Times]:
    """Run all of them to their ends in turn; return the times of their steps."""
    runners = [_Runner(race) for race in races.values()]
    with quiet():
        threads = [threading.Thread(target=_run, args=(runners, place)) for place in range(len(runners))]
        for thread in threads:
            thread.start()
        runners[0].turn.release()
        for thread in threads:
            thread.join()
    for runner in runners:
        if runner.error is not None:
            raise runner.error
    return {name: Times(runner.seconds) for name, runner in zip(races, runners, strict=True)}


def _run(runners: list[_Runner], place: int) -> None:
    runner = runners[place]

    def pause() -> None:
        if runner.left is not None:
            runner.seconds.append(time.perf_counter() - runner.left)
        if len(runner.seconds) % LAP_STEPS == 0:
            _hand_on(runners, place)
            runner.turn.acquire()
        runner.left = time.perf_counter()

    runner.turn.acquire()
    try:
        runner.race(pause)
    except BaseException as error:  # the others must not wait for ever
        runner.error = error
    finally:
        runner.ended = True
        _hand_on(runners, place)


def _hand_on(runners: list[_Runner], place: int) -> None:
    """Give the turn to the next one that still runs."""
    following = runners[place + 1 :] + runners[: place + 1]
    for runner in following:
        if not runner.ended:
            runner.turn.release()
            return
