"""Running a victim under strace, which counts its system calls and makes the n-th of them fail, or the end of it.

Every run tells whether its fault fired: by the signal that ended the victim, or by the mark that strace leaves in its
log. ``--seccomp-bpf`` must not be used: with it strace drops the signal without a word. A killed call is not executed,
so "killed after call n" is "killed at call n + 1".
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import Nursery
from support.running import skip_unless_ci

STRACE = shutil.which("strace")
BRANCHES = 2
PLACE = "store"

Arguments = Callable[[Path], list[Any]]
"""What a victim is called with, by its own folder; the files to be hurt are in ``PLACE`` in there."""


def need_strace() -> None:
    """Skip a test that needs strace; fail it where everything must be tested."""
    if STRACE is None:
        skip_unless_ci("strace is not installed (Debian package strace): kill and error points cannot be tested")


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th call of a name: ``signal=SIGKILL``, ``error=EIO``, ``retval=1``."""

    call: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} at {self.call} {self.number}"


@dataclass
class Run:
    """One run of the victim."""

    fault: Fault | None
    folder: Path
    code: int
    log: str
    lines: list[str]

    @property
    def place(self) -> Path:
        return self.folder / PLACE

    @property
    def fired(self) -> bool:
        """Whether the fault came."""
        killed = self.fault is not None and self.fault.what.startswith("signal")
        return self.code == -9 if killed else "(INJECTED)" in self.log

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the victim said, if it speaks JSON."""
        return [json.loads(line) for line in self.lines]


class Bench:
    """Runs victims under strace, several at a time."""

    def __init__(self, root: Path, victim: str, arguments: Arguments) -> None:
        self.root = root
        self.victim = victim
        self.arguments = arguments
        self.prepare: Callable[[Path], object] = lambda _: None
        self._free: queue.SimpleQueue[Nursery] = queue.SimpleQueue()

    def __enter__(self) -> Bench:
        self._stack = contextlib.ExitStack()
        for _ in range(BRANCHES):
            self._free.put(self._stack.enter_context(Nursery()))
        self._pool = self._stack.enter_context(ThreadPoolExecutor(BRANCHES))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def calls(self, names: tuple[str, ...]) -> dict[str, list[int]]:
        """Return which of the victim's calls concern its files, by name. All others are none of ours.

        strace counts from 1 in each thread by itself, so the same number may mean a call in each of them.
        """
        shutil.rmtree(self.run(None, names).folder)  # the first run may compile modules, and then it opens more files
        run = self.run(None, names)
        assert run.code == 0, run.lines[-3:]
        found: dict[str, list[int]] = {}
        for name in names:
            counts: Counter[str] = Counter()
            ours = set()
            for line in run.log.splitlines():
                if made := re.match(rf"(\d+) +{name}\(", line):
                    counts[made[1]] += 1
                    if str(run.place) in line:
                        ours.add(counts[made[1]])
            found[name] = sorted(ours)
        shutil.rmtree(run.folder)
        return found

    def each(self, faults: list[Fault]) -> Iterator[Run]:
        """Run the victim once for each fault, and give the runs in order."""
        return self._pool.map(self.run, faults)

    def run(self, fault: Fault | None, trace: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Run:
        """Run the victim, with a fault or without, and with more options of strace."""
        nursery = self._free.get()
        try:
            folder = Path(tempfile.mkdtemp(dir=self.root))
            self.prepare(folder)
            out, log = str(folder / "out"), str(folder / "log")
            options = [f"trace={','.join(trace) if fault is None else fault.call}"]
            if fault is not None:
                options.append(f"inject={fault.call}:{fault.what}:when={fault.number}")
            pid = nursery.start(self.victim, self.arguments(folder), out, held=True)
            assert STRACE is not None
            command = [STRACE, "-f", "-y", "-o", log, *more, *(word for option in options for word in ("-e", option))]
            with subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True) as tracer:
                assert tracer.stderr is not None
                attached = tracer.stderr.readline()
                assert "attached" in attached, attached
                nursery.release(pid)
                code = nursery.wait(pid)
                tracer.stderr.read()
            return Run(fault, folder, code, Path(log).read_text(), Path(out).read_text().splitlines())
        finally:
            self._free.put(nursery)
