"""Processes that tests start: their environment, a nursery of those that are killed, and simple forks.

A nursery is a small process, without any store open, that forks the processes which a test kills.

Starting Python and importing Backstay takes a third of a second; forking takes a millisecond, so hundreds of victims
fit into a test. The nursery runs apart from the test's own process, so a victim inherits neither threads nor files.

    with Nursery() as nursery:
        pid = nursery.start("support.crash.victims:write", [path], out=path_of_a_file_or_fifo)
        os.kill(pid, signal.SIGKILL)
        assert nursery.wait(pid) == -signal.SIGKILL

A victim's standard output is the file or fifo ``out``. A ``held`` victim begins only when it is ``released``. One that
ends by an exception shows it on standard error and exits with ``FAILED``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

FAILED = 70
"""Exit code of a victim that ended by an exception."""

_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_TESTS = str(Path(__file__).parents[1])


def child_environment() -> dict[str, str]:
    """Return this process's environment, with a PYTHONPATH by which ``python -m support...`` works in any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")]))}


class Nursery:
    """The test's side."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def start(self, function: str, arguments: list[Any], out: str, held: bool = False) -> int:
        """Run ``module:function`` in a new process and return its id."""
        return self._ask({"start": function, "arguments": arguments, "out": out, "held": held})

    def release(self, pid: int) -> None:
        """Let a held victim begin."""
        self._ask({"release": pid})

    def wait(self, pid: int) -> int:
        """Return the victim's exit code once it has ended; a signal's number, negated, if that ended it."""
        return self._ask({"wait": pid})

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def serve() -> None:
    """Answer requests until standard input ends; no victim outlives that."""
    importlib.import_module("backstay.thread.store")  # here: ``import backstay`` alone loads nothing
    held: dict[int, int] = {}
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        answer = 0
        if "start" in request:
            answer = _fork(request, held)
            alive.add(answer)
        elif "release" in request:
            os.close(held.pop(request["release"]))
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            alive.remove(request["wait"])
        os.write(1, f"{answer}\n".encode())
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(request: dict[str, Any], held: dict[int, int]) -> int:
    module, _, name = request["start"].partition(":")
    function = getattr(importlib.import_module(module), name)  # here, so that the next victim finds it imported
    gate, opener = os.pipe()
    arrival, announcer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(gate)
        os.close(announcer)
        if request["held"]:
            held[pid] = opener
            os.read(arrival, 1)  # so that whoever traces it does not count the calls by which it becomes a victim
        else:
            os.close(opener)
        os.close(arrival)
        return pid
    code = FAILED
    try:
        for descriptor in (opener, arrival, *held.values()):
            os.close(descriptor)
        _become_victim(request["out"])
        os.close(announcer)
        os.read(gate, 1)
        os.close(gate)
        function(*request["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_victim(out: str) -> None:
    """Take ``out`` for standard output, and allow tracing."""
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # where it is not needed it fails, harmlessly


# Forked children that say by their exit how it went -----------------------------------------------------------------


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


if __name__ == "__main__":
    serve()
