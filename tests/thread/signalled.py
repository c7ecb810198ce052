"""A program that gets real signals at random moments: ``signalled.py URL MODE COUNT SEED`` prints what happened.

``interrupt``: each one raises, sometimes two in a row; the program goes on with the same handle. ``handler``: each one
saves through the very handle that it interrupted. Meanwhile another thread saves through the same store.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import holdfast
from holdfast.errors import Conflict, Fenced, HoldfastError, OutcomeUnknown

sys.path.insert(0, str(Path(__file__).parent))
from interrupted_runs import LINE, TTL_S, Run

GAP_S_MAX = 0.004
CLOCKS = [(signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_PROF, signal.SIGPROF)]


class Program(Run):
    """One handle that is used again and again."""

    def __init__(self, store: holdfast.Store, seed: int) -> None:
        super().__init__(store, "signalled")
        self.chance = random.Random(seed)
        self.signals = 0  # that came
        self.armed = 0  # that may still come
        self.raised = 0
        self.behind = False
        self.refused: list[str] = []

    def act(self) -> None:
        way = self.chance.randrange(10)
        if way == 0:
            with self.thread.lease(ttl=TTL_S, wait_s=30.0):
                self.append(self.thread, f"{LINE}leased")
        elif way == 1:
            self.thread.latest()
        elif way == 2:
            self.save(self.thread, {"log": [f"{LINE}{number}" for number in range(30)], "n": self.signals})
        else:
            self.append(self.thread, f"{LINE}{self.signals}")

    def once(self, clocks: int) -> None:
        """Do something with a signal on its way."""
        self.armed, self.behind = clocks, False
        try:
            for clock, _ in CLOCKS[:clocks]:
                signal.setitimer(clock, self.chance.uniform(0.00001, GAP_S_MAX))
            while self.armed:
                self.act()
        except (Conflict, Fenced, OutcomeUnknown) as error:
            self.refused.append(type(error).__name__)
            self.behind = True
        except KeyboardInterrupt:
            self.raised += 1
        finally:
            self.armed = 0

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed -= 1
            self.signals += 1
            raise KeyboardInterrupt

    def save_in_handler(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = 0
            try:
                self.append(self.thread, f"{LINE}of the handler")
                self.signals += 1
            except HoldfastError as error:
                self.refused.append(f"in the handler: {type(error).__name__}")


def beside(store: holdfast.Store, done: threading.Event, saved: list[int]) -> None:
    handle = store.thread("beside")
    while not done.is_set():
        try:
            handle.save({"n": len(saved)})
            saved.append(1)
        except (Conflict, OutcomeUnknown):  # it was stored together with one that was interrupted
            handle.latest()


def main(url: str, mode: str, count: int, seed: int) -> None:
    done, saved = threading.Event(), list[int]()
    with holdfast.open(url) as store:
        program = Program(store, seed)
        handler: Callable[[int, FrameType | None], None] = program.interrupt
        if mode == "handler":
            handler = program.save_in_handler
        for _, number in CLOCKS:
            signal.signal(number, handler)
        other = threading.Thread(target=beside, args=(store, done, saved), daemon=True)
        other.start()
        while program.signals < count:
            program.once(program.chance.choice([1, 1, 2]) if mode == "interrupt" else 1)
            if program.behind:
                program.thread.latest()
        before = len(saved)
        while len(saved) == before:  # the other thread goes on
            other.join(0.01)
        done.set()
        other.join()
        program.check()
        report = store.verify()
        assert report, str(report)
    refused = {what: program.refused.count(what) for what in sorted(set(program.refused))}
    sys.stdout.write(
        f"{program.signals} signals, {program.raised} raised, {len(program.asked)} saves acknowledged and exact, "
        f"{len(saved)} of another thread, refused {refused}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
