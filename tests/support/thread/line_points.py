"""Something that happens at one chosen line of our code above the stores: an interrupt is raised, or a handler runs.

CPython runs signal handlers after calls, at the beginning of functions and at backward jumps. So one can come in at any
line event of a trace function, but for one: a ``with`` statement has two, and the second is its end. There the lock is
let go of by one instruction, before which no handler runs. So that event is left out.

A second interrupt, right after the first one, comes at the next function that begins or the next built-in function that
ended: a trace function that raised is switched off, a profile function is not.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import backstay

ROOT = str(Path(backstay.__file__).parent) + "/"
BELOW = (ROOT + "store/", ROOT + "testing/", ROOT + "cli/")


class Point(NamedTuple):
    """The ``nth`` time that a line begins."""

    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.file.removeprefix(ROOT)}:{self.line} (time {self.nth})"


@cache
def is_ours(file: str) -> bool:
    return file.startswith(ROOT) and not file.startswith(BELOW)


@cache
def with_lines(file: str) -> frozenset[int]:
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return frozenset(node.lineno for node in ast.walk(tree) if isinstance(node, ast.With))


class Lines:
    """Counts the lines that begin, and acts at the chosen one."""

    def __init__(self, chosen: Point | None, act: Callable[[], None]) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        self.points: list[Point] = []
        self.fired = False
        self._chosen = chosen
        self._act = act
        self._inside: set[tuple[int, int]] = set()

    def calls(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._lines if is_ours(frame.f_code.co_filename) else None

    def _lines(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self._is_end_of_with(frame):
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.seen[place] += 1
            point = Point(*place, self.seen[place])
            self.points.append(point)
            if point == self._chosen:
                self.fired = True
                self._act()
        return self._lines

    def _is_end_of_with(self, frame: FrameType) -> bool:
        if frame.f_lineno not in with_lines(frame.f_code.co_filename):
            return False
        block = (id(frame), frame.f_lineno)
        if block in self._inside:
            self._inside.discard(block)
            return True
        self._inside.add(block)
        return False


@contextmanager
def watching(lines: Lines) -> Iterator[Lines]:
    sys.settrace(lines.calls)
    try:
        yield lines
    finally:
        sys.settrace(None)
        sys.setprofile(None)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, told from one that somebody really pressed."""


def interrupt() -> None:
    raise Interrupted


def interrupt_twice() -> None:
    def again(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and is_ours(frame.f_code.co_filename):
            sys.setprofile(None)
            raise Interrupted("again")

    sys.setprofile(again)
    raise Interrupted


def points_of(run: Callable[[], object]) -> list[Point]:
    """Return every line that begins while something runs."""
    with watching(Lines(None, interrupt)) as lines:
        run()
    return lines.points


def chosen(points: list[Point], every: bool) -> list[Point]:
    """Return all points, or of each line the first and the last time that it begins."""
    if every:
        return points
    last = {point[:2]: point for point in points}
    return [point for point in points if point.nth == 1 or last[point[:2]] == point]
