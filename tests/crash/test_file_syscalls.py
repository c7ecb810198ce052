"""The writers of JSON files, of sessions (S1) and of workflows (S4), killed or failed at each of their system calls.

A file is there whole or not at all: after any fault each that was acknowledged can be loaded, in its newest version,
nothing is half there, and the next save works.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backstay.compat.sessions import SyncCheckpointWriter
from backstay.compat.workflow import FileCheckpointStore
from support.crash import session_victim, workflow_victim
from support.crash.directory_story import folder_in_memory
from support.crash.strace_bench import PLACE, Bench, Fault, Run, need_strace
from support.running import Show, effort, spread

CALLS = ("openat", "write", "fsync", "rename", "unlink", "mkdir")
ERRORS = {
    "EIO": {"StoreError", "OutcomeUnknown", "StoreRefused"},
    "ENOSPC": {"StoreFull", "OutcomeUnknown", "StoreRefused"},
}
FILES = 3
POINTS_A_CALL = 4 * effort()

Have = Callable[[Path], set[str]]

pytestmark = pytest.mark.crash


@pytest.fixture(autouse=True)
def strace() -> None:
    need_strace()


def sessions_in(root: Path) -> set[str]:
    """Return the session files that can be loaded; nothing may be wrong with any other; and save one more."""
    have, wrong = session_victim.check(str(root))
    assert wrong == []
    SyncCheckpointWriter(str(root)).save(session_victim.data_of(99))
    after, wrong = session_victim.check(str(root))
    assert wrong == []
    assert set(after) == {*have, "cp-000099"}
    return set(have)


def workflows_in(root: Path) -> set[str]:
    """Return the workflow files that can be loaded, with their versions; and save one more."""
    return asyncio.run(_workflows_in(root))


async def _workflows_in(root: Path) -> set[str]:
    store = FileCheckpointStore(root)
    listed = await store.list()
    assert [problem for problem in listed.problems if problem.kind != "leftover"] == []
    have = set()
    for info in listed:
        loaded = await store.load(info.id)
        assert loaded is not None
        assert loaded.state_snapshot["filler"] == workflow_victim.FILLER
        have.add(f"{info.id}.{loaded.state_snapshot['version']}")
    made = workflow_victim.checkpoint(99)
    await store.save(made)
    assert await store.load(made.id) is not None
    return have


VICTIMS: dict[str, Have] = {"sessions": sessions_in, "workflows": workflows_in}


def expected(lines: list[str]) -> list[set[str]]:
    """Return which of these must be there: one of each set, with "" for none of it."""
    found: dict[str, set[str]] = {}
    for line in lines:
        kind, _, name = line.partition(" ")
        versions = found.setdefault(name.partition(".")[0], {""})
        if kind == "TRY":
            versions |= {name}
        elif kind == "ACK":
            versions.intersection_update({name})
        elif kind == "DEL":
            versions |= {""}
        elif kind == "GONE":
            versions.intersection_update({""})
    return list(found.values())


def judge(run: Run, have: Have) -> None:
    where = f"after {run.fault}, {run.lines[-2:]}, {run.folder}"
    assert run.fired, f"{where}: the fault did not fire"
    choices = expected(run.lines)
    try:
        found = have(run.place)
    except Exception as error:
        raise AssertionError(where) from error
    for versions in choices:
        assert len(found & versions) == 1 or ("" in versions and not found & versions), (
            f"{where}: not one of {versions}"
        )
    assert found <= set().union(*choices), f"{where}: {found} should not be there"
    shutil.rmtree(run.folder)


@contextlib.contextmanager
def bench_for(victim: str, otherwise: Path) -> Iterator[Bench]:
    # A kill does not test the disk, since what was written survives it: so memory will do.
    with (
        folder_in_memory(otherwise) as folder,
        Bench(folder, f"support.crash.file_victims:{victim}", lambda made: [str(made / PLACE), FILES]) as bench,
    ):
        yield bench


@pytest.mark.effort
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_at_any_system_call_leaves_whole_files_only(tmp_path: Path, show: Show, victim: str) -> None:
    with bench_for(victim, tmp_path) as bench:
        calls = bench.calls(CALLS)
        points = [
            Fault(name, number, "signal=SIGKILL") for name in CALLS for number in spread(calls[name], POINTS_A_CALL)
        ]
        for run in bench.each(points):
            judge(run, VICTIMS[victim])

    show(f"kill points of {victim}", f"{len(points)}, 0 bad, { ({name: len(calls[name]) for name in CALLS}) }")
    assert len(points) >= min(25, 3 * POINTS_A_CALL)


@pytest.mark.effort
@pytest.mark.parametrize("victim", VICTIMS)
def test_an_error_of_any_system_call_is_told_and_overcome(tmp_path: Path, show: Show, victim: str) -> None:
    raised: Counter[str] = Counter()
    with bench_for(victim, tmp_path) as bench:
        calls = bench.calls(CALLS)
        calls["openat"] = calls["openat"][:: max(1, len(calls["openat"]) // 20)]  # most of them only read
        points = [
            Fault(name, number, f"error={error}")
            for error, every in (("EIO", 1), ("ENOSPC", 2))
            for name in CALLS
            for number in spread(calls[name], POINTS_A_CALL)[::every]
        ]
        for run in bench.each(points):
            where = f"after {run.fault}, {run.lines[-3:]}, {run.folder}"
            assert run.code == 0, where
            assert run.fault is not None
            told = [line.partition(" ")[2] for line in run.lines if line.startswith("ERR")]
            assert set(told) <= ERRORS[run.fault.what.partition("=")[2]], where
            assert run.lines[-1] == "FDS 0", where
            raised.update(told)
            judge(run, VICTIMS[victim])

    show(f"error points of {victim}", f"{len(points)}, 0 bad, raised {dict(raised)}")
    assert len(points) >= min(30, 3 * POINTS_A_CALL)
    assert raised["StoreError"]
    assert raised["StoreFull"]


@pytest.mark.effort
def test_a_kill_at_any_system_call_leaves_the_last_save_of_either_program_the_newest(
    tmp_path: Path, show: Show
) -> None:
    """The victim saves in turn with the original program; both are killed, and both go on."""
    with bench_for("shared_sessions", tmp_path) as bench:
        calls = bench.calls((*CALLS, "symlink"))
        points = [
            Fault(name, number, "signal=SIGKILL")
            for name in (*CALLS, "symlink")
            for number in spread(calls[name], POINTS_A_CALL)
        ]
        for run in bench.each(points):
            assert run.fired
            where = f"after {run.fault}, {run.lines[-2:]}, {run.folder}"
            told = [line.split() for line in run.lines]
            order = [name for verb, name in told if verb == "ACK"][::-1]
            tried = [told[-1][1]] if told and told[-1][0] == "TRY" else []
            assert newest_first(run.place) in (order, tried + order), where
            source = next(path for path in session_victim.THEIRS if path.stem.rpartition("_")[2] not in order + tried)
            before = newest_first(run.place)
            (run.place / session_victim.SHARED / "checkpoints").mkdir(parents=True, exist_ok=True)
            session_victim.save_theirs(str(run.place), source)
            theirs = source.stem.rpartition("_")[2]
            assert newest_first(run.place) == [theirs, *before], where
            session_victim.save_shared(SyncCheckpointWriter(run.place), 99)
            assert newest_first(run.place) == ["cp-000099", theirs, *before], where
            shutil.rmtree(run.folder)

    show("kill points of two programs on one session", f"{len(points)}, 0 bad")
    assert len(points) >= min(25, 3 * POINTS_A_CALL)


def newest_first(root: Path) -> list[str]:
    """Return the checkpoints of the shared session, on which the list and the load agree."""
    writer = SyncCheckpointWriter(root)
    listed = [str(meta.checkpoint_id) for meta in writer.list(session_victim.SHARED)]
    newest = writer.load(session_victim.SHARED)
    assert (None if newest is None else newest.checkpoint_id) == (listed[0] if listed else None)
    return listed


def test_a_writer_that_writes_in_place_is_noticed(tmp_path: Path, show: Show) -> None:
    noticed = ""
    with bench_for("workflows_in_place", tmp_path) as bench:
        for number in bench.calls(("write",))["write"]:
            run = bench.run(Fault("write", number, "signal=SIGKILL"))
            try:
                judge(run, workflows_in)
            except AssertionError as error:
                noticed = str(error)
                break

    show("a writer that writes in place", noticed[:100])
    assert noticed
