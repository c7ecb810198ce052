"""A small program on SQLite, killed or failed at each of its system calls in turn; every fault is proven to fire."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from support.crash.strace_bench import PLACE, Bench, Fault, Run, need_strace
from support.crash.syscall_victim import REMOVES, STATES, THREAD
from support.running import Show, effort, spread

CALLS = ("pwrite64", "fdatasync", "fsync", "ftruncate", "unlink", "openat")
KILL_POINTS = 16 * effort()
ERROR_POINTS_MAX = 5 * effort()  # of each call and each error


def database(folder: Path) -> str:
    return str(folder / PLACE / "agent.db")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    need_strace()
    made = Bench(
        tmp_path_factory.mktemp("syscalls"), "support.crash.syscall_victim:run", lambda folder: [database(folder)]
    )
    made.prepare = lambda folder: (folder / PLACE).mkdir()
    with made:
        yield made


def steps(run: Run, kind: str) -> set[str]:
    """Return the names of the steps that began, or that are done."""
    return {event[kind] for event in run.events if kind in event}


def check_store(run: Run) -> None:
    """Check that all acknowledged is there and equal, all removed is not, nothing is damaged, and saving goes on."""
    begun, done = steps(run, "begin"), steps(run, "done")
    digests = {event["done"]: event["digest"] for event in run.events if "done" in event}
    with backstay.open(database(run.folder)) as store:
        report = store.check()
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
        report = store.check()
        assert report, str(report)


@pytest.mark.crash
@pytest.mark.effort
def test_a_kill_at_any_system_call_loses_and_breaks_nothing(bench: Bench, show: Show) -> None:
    calls = bench.calls(CALLS)
    counts = {call: len(numbers) for call, numbers in calls.items()}
    share = KILL_POINTS / sum(counts.values())
    points = {call: spread(numbers, max(3, int(len(numbers) * share))) for call, numbers in calls.items()}
    faults = [Fault(call, number, "signal=SIGKILL") for call, numbers in points.items() for number in numbers]
    for run in bench.each(faults):
        assert run.fired, f"{run.fault}: the kill did not fire"
        check_after(run)

    show("kill points", f"{len(faults)} of {sum(counts.values())}, 0 bad ({counts})")
    assert len(faults) >= KILL_POINTS * 2 // 3


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("errno", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync"])
def test_an_error_of_any_write_or_sync_is_reported_and_then_overcome(
    bench: Bench, show: Show, call: str, errno: str
) -> None:
    numbers = spread(bench.calls((call,))[call], ERROR_POINTS_MAX)
    raised: Counter[str] = Counter()
    for run in bench.each([Fault(call, number, f"error={errno}") for number in numbers]):
        where = f"after {run.fault}: {run.events[-2:]}"
        errors = [event for event in run.events if "error" in event]
        assert run.fired, f"{run.fault}: the error did not fire"
        assert run.code == 0, where
        assert all(event["known"] for event in errors), where
        raised.update(event["error"] for event in errors)
        check_after(run)

    show(f"{errno} at {call}", f"{len(numbers)} points, raised {dict(raised)}, 0 bad")
    assert raised, "no error was ever seen by the program"


def check_after(run: Run) -> None:
    """Check the store that a run left, say after which fault if it is not right, and take it away."""
    try:
        check_store(run)
    except Exception as error:
        raise AssertionError(f"after {run.fault}, in {run.events[-1:]}, {run.folder}") from error
    shutil.rmtree(run.folder)
