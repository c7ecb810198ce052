"""Does something at a chosen moment of a call at which CPython would run a signal handler.

That is after a call, at the start of a function, or at a jump back. Nowhere else does a signal reach a program.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection
from functools import cache
from types import CodeType, FrameType
from typing import Any

Moment = tuple[str, str, int]
"""A place in the code: the file, the function, and the offset of the instruction that comes next."""


def _is_followed_by_signals(opname: str) -> bool:
    return opname == "RESUME" or opname.startswith("CALL") or "JUMP_BACKWARD" in opname


@cache
def _handler(code: CodeType, offset: int) -> int:
    """Return where an exception goes on that is raised at this place."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), -1)


class Watch:
    """Traces one call; before the ``at``-th moment in the files named it does something, which may raise.

    What a signal raises comes from the instruction before; what is raised here comes from the one after. If these go on
    at different places, as at the end of a ``with`` block, the moment is left out.
    """

    def __init__(self, files: Collection[str], at: int = -1, do: Callable[[], None] = lambda: None) -> None:
        self.moments: list[Moment] = []
        self._files = files
        self._at = at
        self._do = do
        self._before: dict[FrameType, int] = {}

    def run(self, function: Callable[[], object]) -> object:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            code, before = frame.f_code, self._before.pop(frame, -1)
            self._before[frame] = frame.f_lasti
            is_moment = before >= 0 and _is_followed_by_signals(dis.opname[code.co_code[before]])
            if is_moment and _handler(code, before) == _handler(code, frame.f_lasti):
                self._passed(frame)
        else:  # an exception: what comes next does not follow that instruction
            self._before.pop(frame, None)
        return self._stepped

    def _passed(self, frame: FrameType) -> None:
        self.moments.append((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lasti))
        if len(self.moments) - 1 == self._at:
            self._do()
