"""A kill at any system call of a verb that stores a run with a lease, or another record, leaves both or neither."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from support.crash.sqlite_story import Content, content_of, contents_of_runs
from support.crash.strace_bench import Bench, Fault, Run, need_strace
from support.running import RAM_FOLDER, Show, effort

KILLED = ("pwrite64", "write", "fdatasync", "fsync", "rename", "ftruncate", "unlink", "flock", "fcntl")
POINTS_A_CALL = 6 * effort()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else tmp_path) as folder:
        yield Path(folder)


def spread(numbers: list[int]) -> list[int]:
    """Return some of the numbers, with both ends."""
    step = max(1, len(numbers) // POINTS_A_CALL)
    return sorted({*numbers[::step], *numbers[-1:]})


def judge(run: Run, url: str, expected: dict[str, Content]) -> None:
    """Demand that the store holds what it held before the step that was killed, or after it."""
    names, said = list(expected), [line.split(" ", 1) for line in run.lines]
    done = [step for word, step in said if word == "done"]
    following = names[min(len(done), len(names) - 1)]
    allowed = [expected[done[-1]] if done else {}, expected[following]]
    with backstay.open(url) as store:
        left, report = content_of(store), store.check()
    assert left in allowed, f"{run.fault}, after {done[-1:]}: {left}"
    assert report, f"{run.fault}: {report}"


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("kind", ["sqlite", "dir"])
def test_a_run_and_its_lease_change_together_whatever_call_is_killed(kind: str, root: Path, show: Show) -> None:
    need_strace()

    def url_in(folder: Path) -> str:
        return f"dir:{folder}/store" if kind == "dir" else f"{folder}/store"

    expected = contents_of_runs()
    with Bench(root, "support.crash.sqlite_story:tell_runs", lambda folder: [url_in(folder)]) as bench:
        calls = bench.calls(KILLED)
        points = [Fault(name, number, "signal=SIGKILL") for name in KILLED for number in spread(calls[name])]
        for run in bench.each(points):
            assert run.fired, f"{run.fault} did not fire"
            judge(run, url_in(run.folder), expected)
            shutil.rmtree(run.folder)

    show(f"kill points of runs, {kind}", f"{len(points)}: { {name: len(found) for name, found in calls.items()} }")
    assert len(points) >= 10
