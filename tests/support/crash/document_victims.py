"""The processes of ``test_documents_killed``: each runs one Python block of a page as a program, and may die in it.

The nursery imports this module, and with it everything slow that a page may import, once. So a block starts within
milliseconds. A victim counts its storing calls, before and after each: SQL statements, writes, syncs, renames and
locks. It dies at one of them if it is told to.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

SLOW_TO_IMPORT = (
    "langgraph.checkpoint.sqlite",
    "langgraph.graph",
    "backstay.bundle",
    "backstay.compat.backend",
    "backstay.compat.graph",
    "backstay.compat.sessions",
    "backstay.compat.workflow",
    "backstay.engine.reducers",
    "backstay.langgraph",
    "backstay.maintenance",
    "backstay.retry",
    "backstay.store.directory.store",
    "backstay.store.sqlite.store",
    "backstay.thread.store",
)
"""Modules that pages import."""

for module in SLOW_TO_IMPORT:
    importlib.import_module(module)
gc.freeze()  # collecting garbage in a victim would copy all their pages

STORING = (
    *("execute", "executemany", "executescript", "commit", "rollback", "write", "pwrite", "writev", "fsync"),
    *("fdatasync", "ftruncate", "rename", "replace", "link", "unlink", "mkdir", "flock", "lockf", "fcntl"),
)
"""Names of builtin functions and methods. A process that dies before or after one of them leaves another disk."""

OPENING = ("migrate", "check_schema", "pragma", "_open", "connect", "_identify", "_use_log")
"""Functions that open a SQLite file, with ten times as many statements as a save has. They are not counted, or else
most kills would come before the example does anything; kills by time do hit them."""

ERROR = 1
"""Exit code of a program that ends by an exception, as Python has it."""


def do_nothing() -> None:
    """Be started: by then this module is imported."""


def run_block(folder: str, name: str, out: str, counted: str = "", die_at: int = 0) -> None:
    """Run a block as ``python -W error`` does, in its folder, and write ``out``.stdout and ``out``.stderr.

    ``counted`` is a file for the number of storing calls. With ``die_at`` the process kills itself at that one.
    """
    os.chdir(folder)
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{out}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    sys.argv, sys.path[0] = [name], folder
    warnings.simplefilter("error")
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    calls = count(1)
    if counted or die_at:
        watch(calls, die_at)
    code = 0
    try:
        runpy.run_path(name, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = ERROR
    end(code, counted, calls)


def watch(calls: count[int], die_at: int) -> None:
    """Count storing calls in all threads; ``next`` of a count is atomic."""

    def see(frame: FrameType, event: str, function: Any) -> None:
        if event not in ("c_call", "c_return") or function.__name__ not in STORING:
            return
        if isinstance(function.__self__, str) or frame.f_code.co_name in OPENING:  # str.replace stores nothing
            return
        if next(calls) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(see)
    sys.setprofile(see)


def end(code: int, counted: str, calls: count[int]) -> None:
    """End as an interpreter does, with what threads and exit functions say; but leave the nursery's objects alone."""
    asyncio.set_event_loop(None)
    threading._shutdown()  # type: ignore[attr-defined] # why: only this waits for threads as the interpreter does
    atexit._run_exitfuncs()
    sys.setprofile(None)
    sys.stdout.flush()
    sys.stderr.flush()
    if counted:
        Path(counted).write_text(str(next(calls) - 1))
    os._exit(code)
