"""Something happens at one chosen line of our code: an interrupt, or a call from a signal handler.

Python runs a signal handler between two instructions of the main thread, so a handler may come at every line. Here the
trace function plays the handler, at exactly the line that the test says, so that every line gets its turn.

One kind of line event is left out: the second one of a ``with`` statement, when its block is over. CPython runs no
handler between the end of a block and the call of ``__exit__``, so an error there cannot come from a signal.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import backstay

OURS = Path(backstay.__file__).parent

Happen = Callable[[], None]


@functools.cache
def _with_blocks(path: str) -> dict[int, int]:
    """Return the line of every ``with`` in a file, and the last line of its block."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {
        node.lineno: node.end_lineno or node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith)
    }


class Lines:
    """Counts the line events of our code in this thread, and lets something happen at one of them.

    What our code uses of the standard library for locks is written in Python too, so it counts.
    """

    def __init__(self, *places: str) -> None:
        self._prefixes = (*(str(OURS / place) for place in places), threading.__file__)
        self._seen: dict[FrameType, int] = {}
        self._happen: Happen | None = None
        self._at = -1
        self._own: FrameType | None = None  # who traces: its own ``with`` is not to be struck
        self.count = 0
        self.place = ""

    def recorded(self, run: Callable[[], object]) -> int:
        """Return how many events there are in a run."""
        with self._traced():
            run()
        return self.count

    def struck(self, run: Callable[[], object], at: int, happen: Happen) -> Any:
        """Run, and let it happen at one event, once; ``place`` tells where that was, "" if the run was shorter."""
        self._at, self._happen, self.place = at, happen, ""
        with self._traced():
            return run()

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        self.count, self._own = 0, sys._getframe(2)
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)
            self._seen.clear()

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        is_counted = frame.f_code.co_filename.startswith(self._prefixes) and frame.f_back is not self._own
        return self._line if is_counted else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not self._is_exit(frame):
            at, self.count = self.count, self.count + 1
            if at == self._at and self._happen is not None:
                happen, self._happen = self._happen, None
                self.place = f"{frame.f_code.co_filename.removeprefix(str(OURS))}:{frame.f_lineno}"
                happen()
        return self._line

    def _is_exit(self, frame: FrameType) -> bool:
        line, before = frame.f_lineno, self._seen.get(frame, 0)
        self._seen[frame] = line
        return line < before <= _with_blocks(frame.f_code.co_filename).get(line, 0)
