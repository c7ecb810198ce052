"""A process that is interrupted by real signals while it saves, and says at the end how it went.

    python -m support.crash.real_signal_victim URL (interrupt | save) COUNT SEED SECONDS

``interrupt``: the handler raises KeyboardInterrupt, wherever in Backstay it comes, also while an earlier one is on its
way out; the program catches it and goes on. ``save``: the handler saves, through the very handle that it interrupted or
through another one of the same thread. A second Python thread saves all the while.

Every checkpoint is the one before it with one item more, and no item is used twice, so the whole history can be checked
from what is stored. Prints JSON: what was acknowledged, what was refused, and what is wrong.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import backstay

OURS = backstay.__file__.removesuffix("__init__.py")
PADDING = "x" * 300
WINDOW = 40
"""How long the list may get before its front is dropped."""


class Saver:
    """Saves through a handle until told to stop, whatever happens to it."""

    def __init__(self, store: backstay.Store, thread_id: str) -> None:
        self.store = store
        self.thread_id = thread_id
        self.handle = store.thread(thread_id)
        self.acknowledged: dict[str, str] = {}
        self.errors: Counter[str] = Counter()
        self.raw: list[str] = []
        self._items = (f"{thread_id}-{number} {PADDING}" for number in count())

    def save(self) -> None:
        item = next(self._items)
        try:
            latest = self.handle.latest()
            log = latest.state["log"] if latest is not None else []
            if len(log) < WINDOW:
                saved = self.handle.append({"log": [item]})
            else:
                saved = self.handle.save({"log": [*log[WINDOW // 2 :], item]}, on=latest)
            self.acknowledged[saved.id] = item
        except backstay.BackstayError as error:
            self.errors[type(error).__name__] += 1
        except Exception as error:
            self.raw.append(repr(error))


def interrupted(frame: FrameType | None) -> bool:
    """Tell whether a frame is called by our code: only that is to be interrupted, not this program's own notes."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            return True
        frame = frame.f_back
    return False


def rearm(chance: random.Random) -> None:
    """Let the next one come soon, mostly: now and then there is time for a save that begins with a new connection."""
    (pause,) = chance.choices((2e-5, 1e-3, 1e-2, 0.2), (32, 32, 32, 4))
    signal.setitimer(signal.ITIMER_REAL, pause * (0.5 + chance.random()))


def keep_armed(chance: random.Random) -> None:
    """Arm the timer again if an interrupt in the handler itself kept it from being armed."""
    if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        rearm(chance)


def under_interrupts(saver: Saver, times: int, chance: random.Random) -> int:
    """Save until so many interrupts came in the middle of our code."""
    fired = 0

    def handler(_: int, frame: FrameType | None) -> None:
        nonlocal fired
        rearm(chance)
        if interrupted(frame):
            fired += 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    rearm(chance)
    while fired < times:
        keep_armed(chance)
        try:
            saver.save()
        except KeyboardInterrupt:
            continue
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return fired


def under_handler_saves(saver: Saver, times: int, chance: random.Random) -> int:
    """Save until a handler that saves came so many times in the middle of our code."""
    fired = 0
    other = Saver(saver.store, "main")
    other.acknowledged, other.errors, other.raw = saver.acknowledged, Counter(), saver.raw
    other._items = (f"handler-{number} {PADDING}" for number in count())
    other_handle = other.handle

    def handler(_: int, frame: FrameType | None) -> None:
        nonlocal fired
        if interrupted(frame):
            fired += 1
            other.handle = chance.choice((saver.handle, other_handle))
            other.save()
        rearm(chance)

    signal.signal(signal.SIGALRM, handler)
    rearm(chance)
    while fired < times:
        keep_armed(chance)
        saver.save()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    saver.errors.update({f"in handler: {name}": number for name, number in other.errors.items()})
    return fired


def judge(store: backstay.Store, savers: list[Saver]) -> list[str]:
    """Return what is wrong with what is stored."""
    wrong: list[str] = []
    for saver in savers:
        states: dict[str, list[str]] = {}
        for meta in reversed(list(saver.handle.history())):
            found = store.get(meta.id)
            assert found is not None
            log = states[meta.id] = found.state["log"]
            before = states.get(meta.parent_id or "", [])
            if log[:-1] not in (before, before[WINDOW // 2 :]):
                wrong.append(f"{meta.id} is not its parent and one item more")
        for name, item in saver.acknowledged.items():
            if name not in states:
                wrong.append(f"{name} was acknowledged and is not there")
            elif states[name][-1] != item:
                wrong.append(f"{name} was acknowledged with another item")
    report = store.check()
    return wrong if report else [*wrong, str(report)]


def main(url: str, mode: str, times: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    store = backstay.open(url)
    main_saver, side = Saver(store, "main"), Saver(store, "side")
    side_stop = threading.Event()

    def save_beside() -> None:
        while not side_stop.is_set():
            side.save()

    beside = threading.Thread(target=save_beside, daemon=True)
    beside.start()
    work: Callable[[Saver, int, random.Random], int] = under_interrupts if mode == "interrupt" else under_handler_saves
    fired = work(main_saver, times, chance)
    side_stop.set()
    beside.join(60)
    hung = beside.is_alive()
    if url == "memory:":
        wrong = judge(store, [main_saver, side])
        store.close()
    else:
        store.close()
        with backstay.open(url) as fresh:
            for saver in (main_saver, side):
                saver.handle = fresh.thread(saver.thread_id)
            wrong = judge(fresh, [main_saver, side])
    return {
        "fired": fired,
        "acknowledged": len(main_saver.acknowledged),
        "beside": len(side.acknowledged),
        "errors": dict(main_saver.errors + side.errors),
        "raw": main_saver.raw + side.raw,
        "hung": hung,
        "wrong": wrong,
    }


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[5]), exit=True)
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
