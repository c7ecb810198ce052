"""Forked children that say by their exit how it went."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable


def forked(function: Callable[[], object]) -> int:
    """Run a function in a forked child and return the child's id. One that hangs is ended."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended_well(pid: int) -> bool:
    """Wait for a child; tell whether its function returned."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
