"""A small program, killed or failed at each of its system calls in turn.

strace counts the calls and injects the fault at the n-th. Every case proves that its fault fired: by the signal that
ended the program, or by the mark that strace leaves in its log. ``--seccomp-bpf`` must not be used: with it strace
drops the signal without a word. A killed call is not executed, so "killed after call n" is "killed at call n + 1".
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from nursery import Nursery
from syscall_victim import REMOVES, STATES, THREAD

import holdfast

STRACE = shutil.which("strace")
CALLS = ("pwrite64", "fdatasync", "fsync", "ftruncate", "unlink", "openat")
KILL_POINTS_MAX = 300
ERROR_POINTS_MAX = 100  # of each call and each error
LANES = 2

Show = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def strace() -> None:
    if STRACE is None:
        missing = "strace is not installed (Debian package strace): kill and error points cannot be tested"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)


@dataclass
class Run:
    """One run of the program under strace."""

    folder: Path
    code: int
    log: str
    events: list[dict[str, Any]]

    @property
    def path(self) -> str:
        return str(self.folder / "agent.db")

    def steps(self, kind: str) -> set[str]:
        """Return the names of the steps that began, or that are done."""
        return {event[kind] for event in self.events if kind in event}

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event for event in self.events if "error" in event]


class Bench:
    """Runs the program under strace, several at a time."""

    def __init__(self, root: Path, nurseries: list[Nursery]) -> None:
        self._root = root
        self._free: queue.SimpleQueue[Nursery] = queue.SimpleQueue()
        for nursery in nurseries:
            self._free.put(nursery)
        self._pool = ThreadPoolExecutor(len(nurseries))

    def each(self, cases: list[list[str]]) -> Iterator[Run]:
        """Run the program once for each list of strace's options, and return the runs in order."""
        return self._pool.map(self.run, cases)

    def run(self, options: list[str]) -> Run:
        nursery = self._free.get()
        try:
            folder = self._root / "-".join(options).replace(":", "_")
            folder.mkdir()
            out, log = str(folder / "out"), str(folder / "log")
            pid = nursery.start("syscall_victim:run", [str(folder / "agent.db")], out, held=True)
            assert STRACE is not None
            command = [STRACE, "-f", "-y", "-o", log, *(word for option in options for word in ("-e", option))]
            with subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True) as tracer:
                assert tracer.stderr is not None
                attached = tracer.stderr.readline()
                assert "attached" in attached, attached
                nursery.release(pid)
                code = nursery.wait(pid)
                tracer.stderr.read()
            events = [json.loads(line) for line in Path(out).read_text().splitlines()]
            return Run(folder, code, Path(log).read_text(), events)
        finally:
            self._free.put(nursery)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        nurseries = [stack.enter_context(Nursery()) for _ in range(LANES)]
        yield Bench(tmp_path_factory.mktemp("syscalls"), nurseries)


def calls_to_the_store(bench: Bench, call: str) -> list[int]:
    """Return which of the program's calls of this name concern the store's files, counted from 1.

    Others, such as those of a module that is imported late, are none of ours.
    """
    run = bench.run([f"trace={call}"])
    assert run.code == 0, run.events[-1]
    assert run.steps("done") == run.steps("begin")
    lines = [line for line in run.log.splitlines() if f" {call}(" in line]
    shutil.rmtree(run.folder)
    return [number for number, line in enumerate(lines, 1) if str(run.folder) in line]


def spread(numbers: list[int], most: int) -> list[int]:
    """Return all the numbers, or so many of them, evenly spread and with both ends."""
    if len(numbers) <= most:
        return numbers
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]


def check_store(run: Run) -> None:
    """Check that all acknowledged is there and equal, all removed is not, nothing is damaged, and saving goes on."""
    begun, done = run.steps("begin"), run.steps("done")
    digests = {event["done"]: event["digest"] for event in run.events if "done" in event}
    with holdfast.open(run.path) as store:
        report = store.verify()
        assert report, str(report)
        for name, state in STATES.items():
            found = store.get(name)
            removers = [step for step, names in REMOVES.items() if name in names]
            if name not in begun or any(step in done for step in removers):
                assert found is None, f"{name} should not be there"
            elif name in done and not any(step in begun for step in removers):
                assert found is not None, f"{name} was acknowledged and is lost"
            if found is not None:
                assert found.state == state, f"{name} has another content"
                assert digests.get(name, "") in ("", found.digest.hex()), f"{name} has another digest"
        if "tag" in done:
            tagged = store.get("s3")
            assert tagged is not None
            assert tagged.tags == ("good",)
        thread = store.thread(THREAD)
        head = thread.latest()
        thread.save({**(head.state if head else {}), "after": True}, id="next")
        assert store.thread("another").save({"n": 1}).step == 1
        report = store.verify()
        assert report, str(report)


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.row("G1")
def test_a_kill_at_any_system_call_loses_and_breaks_nothing(bench: Bench, show: Show) -> None:
    calls = {call: calls_to_the_store(bench, call) for call in CALLS}
    counts = {call: len(numbers) for call, numbers in calls.items()}
    share = KILL_POINTS_MAX / sum(counts.values())
    points = {call: spread(numbers, max(12, int(len(numbers) * share))) for call, numbers in calls.items()}
    cases = [
        [f"trace={call}", f"inject={call}:signal=SIGKILL:when={number}"]
        for call, numbers in points.items()
        for number in numbers
    ]

    killed = 0
    for case, run in zip(cases, bench.each(cases), strict=True):
        assert run.code == -signal.SIGKILL, f"{case}: the kill did not fire"
        killed += 1
        try:
            check_store(run)
        except Exception as error:
            raise AssertionError(f"after {case}, in {run.events[-1:]}, {run.path}") from error
        shutil.rmtree(run.folder)

    show("kill points", f"{killed} of {sum(counts.values())}, 0 bad ({counts})")
    assert killed >= 200


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.row("G2", "C9", "C12")
@pytest.mark.parametrize("errno", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync"])
def test_an_error_of_any_write_or_sync_is_reported_and_then_overcome(
    bench: Bench, show: Show, call: str, errno: str
) -> None:
    numbers = spread(calls_to_the_store(bench, call), ERROR_POINTS_MAX)
    cases = [[f"trace={call}", f"inject={call}:error={errno}:when={number}"] for number in numbers]

    raised: dict[str, int] = {}
    for case, run in zip(cases, bench.each(cases), strict=True):
        where = f"after {case}: {run.events[-2:]}, {run.path}"
        assert "(INJECTED)" in run.log, f"{case}: the error did not fire"
        assert run.code == 0, where
        assert all(event["known"] for event in run.errors), where
        for event in run.errors:
            raised[event["error"]] = raised.get(event["error"], 0) + 1
        try:
            check_store(run)
        except Exception as error:
            raise AssertionError(where) from error
        shutil.rmtree(run.folder)

    show(f"{errno} at {call}", f"{len(cases)} points, raised {raised}, 0 bad")
    assert raised, "no error was ever seen by the program"
