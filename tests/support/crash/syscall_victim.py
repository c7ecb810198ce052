"""The program that ``test_syscalls`` interrupts: a little of everything that writes, told line by line as JSON.

    {"begin": step}                        before a step
    {"done": step, "digest": ..., ...}     after it
    {"error": class, "known": bool, ...}   it raised; ``known`` if the class is one a store may raise

``states`` holds what every checkpoint must contain, so a reader needs nothing else to check them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import backstay
from backstay.errors import BackstayError, Conflict, OutcomeUnknown, StoreError

THREAD = "thread"
TRIES_MAX = 4


def _text(seed: str, length: int) -> str:
    return hashlib.shake_128(seed.encode()).hexdigest(length // 2)


_FIRST = [_text("a", 300), _text("b", 300)]
_SECOND = [*_FIRST, _text("c", 500)]
_LARGE = [*_SECOND, _text("large", 90_000)]  # with what is there it crosses a 64 KiB window of the stream
_FOURTH = [*_LARGE, _text("d", 400)]

STATES: dict[str, dict[str, Any]] = {
    "s1": {"messages": _FIRST, "n": 1},
    "s2": {"messages": _SECOND, "n": 2},
    "s3": {"messages": _LARGE, "n": 3},
    "s4": {"messages": _FOURTH, "n": 4, "file": _text("file", 6000)},
    "s5": {"messages": [*_FOURTH, "appended"], "n": 5, "file": _text("file", 6000)},
    "f1": {"messages": _SECOND, "n": -2},
}
REMOVES = {"delete": {"s4"}, "prune": {"s1"}}
"""Which checkpoints a step takes away. s2 stays because f1 was forked from it, s3 because it is tagged."""


class Program:
    """One run: steps in order, each of which may fail."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self) -> str:
        self.store = backstay.open(self.path)
        self.thread = self.store.thread(THREAD)
        return ""

    def save(self, name: str) -> str:
        return self.thread.save(STATES[name], id=name).digest.hex()

    def append(self) -> str:
        return self.thread.append({"messages": ["appended"]}, set={"n": 5}, id="s5").digest.hex()

    def fork(self) -> str:
        try:
            self.thread.fork("s2", branch="what-if", set={"n": -2}, id="f1")
        except Conflict:  # an earlier try did it after all
            found = self.store.thread(THREAD, branch="what-if").latest()
            assert found is not None
            assert found.state == STATES["f1"]
        return ""

    def close(self) -> str:
        self.store.close()
        return ""

    def steps(self) -> list[tuple[str, Callable[[], Any]]]:
        return [
            ("open", self.open),
            ("s1", lambda: self.save("s1")),
            ("s2", lambda: self.save("s2")),
            ("s3", lambda: self.save("s3")),
            ("s4", lambda: self.save("s4")),
            ("s5", self.append),
            ("f1", self.fork),
            ("tag", lambda: self.thread.tag("s3", "good")),
            ("delete", lambda: self.thread.delete_checkpoint("s4")),
            ("prune", lambda: self.thread.prune(backstay.Keep(last=1))),
            ("compact", lambda: self.store.compact()),
            ("close", self.close),
        ]


def run(path: str) -> None:
    """Run all steps; a step that raises an error a store may raise is tried again, as a caller would."""
    for step, function in Program(path).steps():
        _tell({"begin": step})
        for attempt in range(TRIES_MAX):
            try:
                answer = function()
            except (StoreError, OutcomeUnknown) as error:
                _tell({"error": type(error).__name__, "known": True, "step": step, "text": str(error)})
                assert attempt < TRIES_MAX - 1, f"{step} does not recover"
            except BackstayError as error:
                _tell({"error": type(error).__name__, "known": False, "step": step, "text": str(error)})
                raise
            else:
                _tell({"done": step, "digest": answer if isinstance(answer, str) else ""})
                break


def _tell(event: dict[str, Any]) -> None:
    os.write(1, (json.dumps(event) + "\n").encode())
