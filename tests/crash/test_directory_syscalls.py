"""A story on a directory store, killed or failed at each of its system calls in turn.

After each fault all that was acknowledged must be there, nothing may be half there, and saving must go on. A second
process, which had the store open all the time, must go on as well: it knows logs that the killed one was writing.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import Conflict, Corrupted, DecodeError, StoreError
from backstay.store.directory import logs
from support.crash.directory_story import (
    MAIN_THREAD,
    REMOVES,
    STATES,
    Story,
    check,
    folder_in_memory,
    prepare,
    steps_of,
)
from support.crash.strace_bench import Bench, Fault, Run, need_strace
from support.running import Show, effort, spread

CHANGES = ("pwrite64", "write", "fdatasync", "fsync", "ftruncate", "rename", "unlink", "mkdir", "fallocate")
ALL = sys.maxsize
POINTS_A_CALL = 5 * effort()
KILLED = (*CHANGES, "openat")
FAILED = (*CHANGES, "openat")
ERRORS = {
    "EIO": {"StoreError", "StoreRefused", "OutcomeUnknown"},
    "ENOSPC": {"StoreFull", "StoreRefused", "OutcomeUnknown"},
}
"""Which errors of ours may come of an error of the system."""


pytestmark = pytest.mark.crash


@pytest.fixture(autouse=True)
def strace() -> None:
    need_strace()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Return a function that makes a bench for a telling of the story."""
    with folder_in_memory(tmp_path) as folder:  # a kill does not test the disk: what was written survives it

        def make(*arguments: Any) -> Bench:
            return Bench(folder, "support.crash.directory_story:run", lambda made: [f"dir:{made}/store", *arguments])

        yield make


def faults(calls: dict[str, list[int]], names: tuple[str, ...], what: str, most: int = POINTS_A_CALL) -> list[Fault]:
    return [Fault(name, number, what) for name in names for number in spread(calls[name], most)]


def judge(run: Run) -> None:
    """Check the store that a run left, and throw it away."""
    where = f"after {run.fault}, {run.lines[-2:]}, {run.folder}"
    assert run.fired, f"{where}: the fault did not fire"
    try:
        check(f"dir:{run.place}", *steps_of(run.events))
    except Exception as error:
        raise AssertionError(where) from error
    shutil.rmtree(run.folder)


def judge_errors(run: Run, allowed: set[str]) -> list[str]:
    """Check what a run that met an error said of it; return the errors that it was told."""
    where = f"after {run.fault}, {run.lines[-2:]}, {run.folder}"
    assert run.code == 0, where
    raised = [event["error"] for event in run.events if "error" in event]
    assert set(raised) <= allowed, where
    assert not [event for event in run.events if "lied" in event], where
    assert run.events[-1] == {"leaked": []}, where
    return raised


@pytest.mark.effort
def test_a_kill_at_any_system_call_loses_and_breaks_nothing(make_bench: Callable[..., Bench], show: Show) -> None:
    with make_bench() as bench:
        calls = bench.calls(KILLED)
        points = faults(calls, KILLED, "signal=SIGKILL")
        for run in bench.each(points):
            judge(run)

    show("kill points of the directory store", f"{len(points)}, 0 bad, {count(points)}")
    assert len(points) >= min(160, 4 * POINTS_A_CALL)


@pytest.mark.effort
@pytest.mark.parametrize("errno", ERRORS)
def test_an_error_of_any_system_call_is_told_as_it_is_and_overcome(
    make_bench: Callable[..., Bench], show: Show, errno: str
) -> None:
    raised: Counter[str] = Counter()
    with make_bench() as bench:
        calls = bench.calls(FAILED)
        calls["openat"] = calls["openat"][::2]  # most of them only read
        points = faults(calls, FAILED, f"error={errno}")
        points = points if errno == "EIO" else points[::2]
        for run in bench.each(points):
            told = judge_errors(run, ERRORS[errno])
            assert run.fault is not None
            assert told or run.fault.call != "fdatasync", f"nobody was told that a sync failed: {run.fault}"
            raised.update(told)
            judge(run)

    show(f"{errno} points of the directory store", f"{len(points)}, 0 bad, raised {dict(raised)}, {count(points)}")
    assert len(points) >= min(60, 2 * POINTS_A_CALL)
    assert raised.keys() >= {"StoreError", "OutcomeUnknown"} if errno == "EIO" else {"StoreFull", "OutcomeUnknown"}


@pytest.mark.effort
def test_an_error_of_a_read_or_of_the_lock_is_told_and_overcome(make_bench: Callable[..., Bench], show: Show) -> None:
    with make_bench() as bench:
        calls = bench.calls(("pread64", "flock"))
        points = faults(calls, tuple(calls), "error=EIO")
        told = 0
        for run in bench.each(points):
            told += len(judge_errors(run, ERRORS["EIO"] | {"Corrupted"}))
            judge(run)

    show("EIO points of reading and locking", f"{len(points)}, 0 bad, {told} errors told")
    assert told >= len(points) // 2


@pytest.mark.effort
def test_an_interrupted_call_is_simply_made_again(make_bench: Callable[..., Bench], show: Show) -> None:
    with make_bench() as bench:
        points = faults(bench.calls(("pwrite64", "fsync", "openat")), ("pwrite64", "fsync", "openat"), "error=EINTR")
        for run in bench.each(points):
            assert judge_errors(run, set()) == []
            judge(run)

    show("EINTR points", f"{len(points)}, 0 bad")
    assert len(points) >= 10


@pytest.mark.effort
def test_a_write_that_claims_more_than_it_did_is_noticed_by_whoever_reads(
    make_bench: Callable[..., Bench], show: Show
) -> None:
    """The disk says that one byte was written, and writes none: what was acknowledged may be unreadable, not wrong."""
    outcomes: Counter[str] = Counter()
    with make_bench("", "open", False) as bench:
        points = spread(faults(bench.calls(("pwrite64",)), ("pwrite64",), "retval=1", ALL)[::4], POINTS_A_CALL)
        for run in bench.each(list(points)):
            assert run.fired
            begun, done = steps_of(run.events)
            kept = STATES.keys() & done.keys() - {name for step in REMOVES.keys() & begun for name in REMOVES[step]}
            with backstay.open(f"dir:{run.place}") as store:
                outcomes.update(asked(store, name) for name in kept)
            shutil.rmtree(run.folder)

    show("lying writes", f"{len(points)} points, {dict(outcomes)}")
    assert outcomes.keys() <= {"right", "refused"}
    assert outcomes["right"] > len(points)


def asked(store: backstay.Store, name: str) -> str:
    try:
        found = store.get(name)
    except (Corrupted, DecodeError, StoreError):
        return "refused"
    return "not there" if found is None else "right" if found.state == STATES[name] else "wrong"


# Another process, which lives on ----------------------------------------------------------------------------------


class Watchers:
    """Stores that this process opened, and told the beginning of the story in, before the victim goes on with it."""

    def __init__(self) -> None:
        self.stories: dict[Path, Story] = {}

    def begin(self, folder: Path) -> None:
        story = self.stories[folder] = Story(f"dir:{folder}/store")
        for step, function in story.steps():
            if step == "o1":
                return
            function()

    def go_on(self, run: Run) -> None:
        """Look at everything and save through the old handle; then look with a new one."""
        story = self.stories.pop(run.folder)
        begun, done = steps_of(run.events)
        first = {"s1", "s2", "f1", "tag", "s3"}
        for name in (first | done.keys()) & STATES.keys():
            found = story.store.get(name)
            gone = {"s3": "delete", "o1": "drop"}.get(name) in begun
            assert (found is not None and found.state == STATES[name]) or gone, f"{name} is lost"
        with contextlib.suppress(Conflict):  # a save that was whole and not told of is finished by who writes next
            self._save(story)
        state = self._save(story)
        with backstay.open(f"dir:{run.place}") as store:
            watched = store.thread(MAIN_THREAD).latest()
            assert watched is not None
            assert watched.state == state
        check(f"dir:{run.place}", begun | first, dict.fromkeys(first, "") | done)
        story.store.close()  # only now: closing cuts off what lies behind the last record
        shutil.rmtree(run.folder)

    def _save(self, story: Story) -> dict[str, Any]:
        head = story.thread.latest()
        assert head is not None
        state = {**head.state, "watched": head.step}
        story.thread.save(state)
        return state


@pytest.mark.effort
def test_a_process_that_had_it_open_goes_on_after_any_kill_of_another(
    make_bench: Callable[..., Bench], show: Show
) -> None:
    watchers = Watchers()
    with make_bench("", "o1") as bench:
        bench.prepare = watchers.begin
        calls = bench.calls(CHANGES)
        points = faults(calls, CHANGES, "signal=SIGKILL")
        for run in bench.each(points):
            assert run.fired, run.fault
            try:
                watchers.go_on(run)
            except Exception as error:
                raise AssertionError(f"after {run.fault}, {run.lines[-2:]}, {run.folder}") from error

    show("kill points beside an open store", f"{len(points)}, 0 bad, {count(points)}")
    assert len(points) >= min(60, 2 * POINTS_A_CALL)


# The sweeps notice broken stores ----------------------------------------------------------------------------------


def first_noticed(bench: Bench, points: list[Fault], look: Callable[[Run], object]) -> str:
    """Return what was noticed first; run no more than that takes."""
    for run in map(bench.run, points):
        try:
            look(run)
        except Exception as error:
            return f"{type(error).__name__} {run.fault}"
    return ""


@pytest.mark.parametrize(
    ("mutant", "fault"),
    [
        ("acknowledges before the write", "signal=SIGKILL"),
        ("swallows errors of syncs", "error=EIO"),
    ],
)
def test_a_broken_store_is_noticed(make_bench: Callable[..., Bench], show: Show, mutant: str, fault: str) -> None:
    call = "fdatasync" if fault == "error=EIO" else "pwrite64"

    def look(run: Run) -> None:
        if fault == "error=EIO":
            assert judge_errors(run, ERRORS["EIO"])
        judge(run)

    with make_bench(mutant) as bench:
        noticed = first_noticed(bench, faults(bench.calls((call,)), (call,), fault, ALL), look)

    show(f"a store that {mutant}", noticed)
    assert noticed


def test_a_store_that_keeps_torn_ends_is_noticed(
    make_bench: Callable[..., Bench], show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is the next process that is broken, which opens what a kill left."""
    with make_bench() as bench:
        points = faults(bench.calls(("pwrite64",)), ("pwrite64",), "signal=SIGKILL", ALL)
        prepare("keeps torn ends", monkeypatch.setattr)
        noticed = first_noticed(bench, points, judge)

    show("a store that keeps torn ends", noticed)
    assert noticed


def test_a_store_that_notes_nothing_beforehand_is_noticed(
    make_bench: Callable[..., Bench], show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the note another process, if it does not look, writes over the record of which nobody knows."""
    monkeypatch.setattr(logs, "is_free", lambda *_: True)
    watchers = Watchers()
    with make_bench("notes nothing beforehand", "o1") as bench:
        bench.prepare = watchers.begin
        points = faults(bench.calls(("pwrite64",)), ("pwrite64",), "signal=SIGKILL", ALL)
        noticed = first_noticed(bench, points, watchers.go_on)
    for story in watchers.stories.values():
        story.store.close()

    show("a store that notes nothing beforehand", noticed)
    assert noticed


def count(points: list[Fault]) -> dict[str, int]:
    return dict(Counter(point.call for point in points))
