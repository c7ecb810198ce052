"""A directory store whose files are removed, moved, replaced or cut short while it is open.

Either nothing of it matters (the control file: it is made anew), or it is noticed before anything is acknowledged, and
the store refuses to go on. What was acknowledged is there, in the directory or where it was moved to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import BackstayError, Conflict, Corrupted, OutcomeUnknown, StoreError, StoreRefused
from backstay.store.base import Query
from backstay.store.directory import logs as logs_module
from backstay.store.directory.control import CONTROL_BYTES
from backstay.store.directory.store import DirectoryStore
from backstay.testing.drafts import branch_key, damage, draft, long_list, put, state_of
from support.processes import ended_well, forked

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(f"dir:{path}")
    put(store, branch_key(), {"list": long_list(9)}, "first")
    put(store, branch_key(), {"list": long_list(12)}, "second")
    put(store, branch_key("other"), {"n": 1}, "other")
    yield store
    store.close()


def log_of(path: Path) -> Path:
    """Return the log that saves go to."""
    return path / "branches" / "00000002.log"


# What is gone must be told ----------------------------------------------------------------------------------------


def remove_directory(path: Path) -> None:
    shutil.rmtree(path)


def move_directory(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replace_by_a_copy(path: Path) -> None:
    shutil.copytree(path, path.with_name("copy"))
    path.rename(path.with_name("elsewhere"))
    path.with_name("copy").rename(path)


def replace_by_a_copy_of_links(path: Path) -> None:
    shutil.copytree(path, path.with_name("copy"), copy_function=os.link)
    path.rename(path.with_name("elsewhere"))
    path.with_name("copy").rename(path)


def replace_by_another_store(path: Path) -> None:
    shutil.rmtree(path)
    with backstay.open(f"dir:{path}") as other:
        other.thread("t").save({"n": 1}, id="foreign")


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


def remove_log(path: Path) -> None:
    log_of(path).unlink()


def move_log(path: Path) -> None:
    log_of(path).rename(path / "branches" / "was there")


def remove_log_and_put_another_there(path: Path) -> None:
    other = (path / "branches" / "00000004.log").read_bytes()
    log_of(path).unlink()
    log_of(path).write_bytes(other)


def replace_log_by_an_older_copy(path: Path) -> None:
    older = log_of(path).read_bytes()[:400]
    log_of(path).unlink()
    log_of(path).write_bytes(older)


def truncate_log(path: Path) -> None:
    os.truncate(log_of(path), 100)


def empty_log(path: Path) -> None:
    os.truncate(log_of(path), 0)


def remove_store_log(path: Path) -> None:
    (path / "store.log").unlink()


def truncate_store_log(path: Path) -> None:
    os.truncate(path / "store.log", 30)


def move_branches(path: Path) -> None:
    (path / "branches").rename(path / "were there")


def remove_name_file(path: Path) -> None:
    (path / "backstay.json").unlink()


def make_newer(path: Path) -> None:
    (path / "backstay.json").write_text('{"format": "backstay directory store", "version": 2}')


MISHAPS: list[Callable[[Path], None]] = [
    remove_directory,
    move_directory,
    replace_by_a_copy,
    replace_by_a_copy_of_links,
    replace_by_another_store,
    replace_by_a_file,
    remove_log,
    move_log,
    remove_log_and_put_another_there,
    replace_log_by_an_older_copy,
    truncate_log,
    empty_log,
    remove_store_log,
    move_branches,
    remove_name_file,
    make_newer,
]


def is_typed(error: BackstayError, path: Path) -> bool:
    return error.hint is not None and error.path is not None and error.path.startswith(str(path))


@pytest.mark.parametrize("mishap", MISHAPS)
def test_what_is_gone_is_told_before_anything_is_acknowledged(
    store: DirectoryStore, path: Path, mishap: Callable[[Path], None]
) -> None:
    commits = [draft(store, branch_key(), {"list": long_list(15)}, f"new {number}") for number in range(3)]
    mishap(path)

    for commit in commits:
        with pytest.raises((StoreRefused, Corrupted)) as caught:
            store.commit(commit)
        assert is_typed(caught.value, path), caught.value


@pytest.mark.parametrize("mishap", MISHAPS)
def test_what_is_gone_in_the_middle_of_a_save_is_told_too(
    store: DirectoryStore, path: Path, mishap: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mishap comes when the record is written and not yet acknowledged; the next save is refused in any case."""
    commits = [draft(store, branch_key(), {"list": long_list(15)}, f"new {number}") for number in range(3)]
    happened: list[object] = []
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        real(descriptor)
        if not happened:
            happened.append(mishap)
            mishap(path)

    monkeypatch.setattr(os, "fdatasync", sync)
    unknown: list[OutcomeUnknown] = []
    try:
        store.commit(commits[0])
    except OutcomeUnknown as error:
        unknown.append(error)
    assert happened
    assert all(is_typed(error, path) for error in unknown)
    with pytest.raises((StoreRefused, Corrupted)):
        store.commit(commits[1])
    if not unknown:  # then it is there, in what is at the path now, whatever else is gone
        assert b"new 0" in log_of(path).read_bytes()


@pytest.mark.parametrize("name", [".", "branches", "branches/00000002.log"])
def test_what_is_put_back_is_used_again(store: DirectoryStore, path: Path, name: str) -> None:
    commit = draft(store, branch_key(), {"list": long_list(15)}, "new")
    elsewhere = path.with_name("elsewhere")
    (path / name).rename(elsewhere)
    with pytest.raises((StoreRefused, Corrupted)):
        store.commit(commit)
    elsewhere.rename(path / name)

    assert store.commit(commit).fresh
    assert [state_of(store, name) for name in ("second", "new")] == [{"list": long_list(n)} for n in (12, 15)]
    assert damage(store) == []


@pytest.mark.parametrize("mishap", [remove_directory, move_directory, replace_by_a_copy, replace_by_another_store])
def test_readers_are_told_that_the_directory_is_another_one(
    store: DirectoryStore, path: Path, mishap: Callable[[Path], None]
) -> None:
    mishap(path)

    with pytest.raises(StoreRefused, match="was removed, moved or replaced"):
        store.head(branch_key())


def test_a_copy_in_which_others_work_is_not_touched(store: DirectoryStore, path: Path) -> None:
    commit = draft(store, branch_key(), {"list": long_list(15)}, "lost")
    replace_by_a_copy(path)
    other = DirectoryStore(f"dir:{path}")
    put(other, branch_key(), {"list": long_list(14)}, "theirs")
    before = {each: each.read_bytes() for each in path.rglob("*.log")}
    with pytest.raises(StoreRefused):
        store.commit(commit)

    assert {each: each.read_bytes() for each in path.rglob("*.log")} == before
    assert state_of(other, "theirs") == {"list": long_list(14)}
    other.close()


# The control file may go at any time ------------------------------------------------------------------------------


def remove_control(path: Path) -> None:
    (path / "control").unlink()


def replace_control(path: Path) -> None:
    (path / "control").unlink()
    (path / "control").write_bytes(bytes(CONTROL_BYTES))


def put_an_older_control_there(path: Path) -> None:
    kept = (path / "control").with_name("older")
    (path / "control").unlink()
    if kept.exists():
        shutil.copy(kept, path / "control")


def truncate_control(path: Path) -> None:
    os.truncate(path / "control", 0)


def move_control(path: Path) -> None:
    (path / "control").rename(path / "was control")


@pytest.mark.parametrize(
    "mishap", [remove_control, replace_control, put_an_older_control_there, truncate_control, move_control]
)
def test_the_control_file_may_go_at_any_time(store: DirectoryStore, path: Path, mishap: Callable[[Path], None]) -> None:
    shutil.copy(path / "control", path / "older")
    other = DirectoryStore(f"dir:{path}")
    for number in range(1, 13):
        writer, reader = (store, other) if number % 2 else (other, store)
        put(writer, branch_key(), {"list": long_list(12 + number)}, f"c{number}")
        if number % 3 == 0:
            mishap(path)
        assert state_of(reader, f"c{number}") == {"list": long_list(12 + number)}
        if number % 4 == 0:
            mishap(path)
    for each in (store, other):
        assert [row.id for row in each.find(Query("", "t"))][:12] == [f"c{number}" for number in range(12, 0, -1)]
        assert [finding for finding in damage(each) if not finding.is_harmless] == []
    other.close()


@pytest.mark.crash
def test_two_processes_lose_nothing_while_a_third_removes_the_control_file(path: Path) -> None:
    saves = 100

    def add(own: backstay.Store, item: str) -> None:
        while True:
            with contextlib.suppress(Conflict):
                own.thread("both").append({"log": [item]}, id=item + "!")
                return

    def work(name: str) -> None:
        with backstay.open(f"dir:{path}") as own:
            for number in range(saves):
                own.thread(name).save({"n": number}, id=f"{name}-{number}")
                add(own, f"{name}-{number}")

    def remove() -> None:
        while len(list((path / "branches").iterdir())) < 3:  # until both have begun
            os.sched_yield()
        for _ in range(10):
            (path / "control").unlink(missing_ok=True)
            subprocess.run([sys.executable, "-c", ""], check=True)  # takes a while, in which they go on

    with backstay.open(f"dir:{path}") as store:
        store.thread("both").save({"log": []})
        children = [forked(lambda name=name: work(name)) for name in ("one", "two")]  # type: ignore[misc]
        children.append(forked(remove))
        assert [ended_well(child) for child in children] == [True] * 3

    with backstay.open(f"dir:{path}") as store:
        for name in ("one", "two"):
            assert [meta.id for meta in store.thread(name).history()] == [f"{name}-{n}" for n in reversed(range(saves))]
        both = store.thread("both").latest()
        assert both is not None
        assert sorted(both.state["log"]) == sorted(f"{name}-{n}" for name in ("one", "two") for n in range(saves))
        assert store.check()


# What is not ours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "branches/3.log",
        "branches/00000000.log",
        "branches/notes.txt",
        "branches/٣.log",
        f"branches/{'9' * 200}.log",
        "notes.txt",
        "7.log",
    ],
)
def test_a_stray_file_is_not_taken_for_ours(path: Path, name: str) -> None:
    with backstay.open(f"dir:{path}") as store:
        store.thread("thread").save({"n": 1}, id="first")
    (path / name).write_bytes(b"not a log")
    with backstay.open(f"dir:{path}") as store:
        assert store.get("first") is not None
        store.thread("thread").save({"n": 2}, id="second")
        store.thread("new").save({"n": 2}, id="new")
        store.compact()
        report = store.check()
        assert report, str(report)
        assert [finding.where for finding in report.findings] == (
            [f"file {Path(name).name}"] if name.startswith("branches") else []
        )
    assert (path / name).read_bytes() == b"not a log"


def test_a_file_in_the_place_of_a_log_that_is_to_be_made_is_refused_and_kept(path: Path) -> None:
    with backstay.open(f"dir:{path}") as store:
        store.thread("thread").save({"n": 1}, id="first")
        for number in range(3, 9):
            (path / "branches" / f"{number:08}.log").write_bytes(b"precious")
        with pytest.raises(StoreError, match="is not a log of this store"):
            store.thread("new").save({"n": 2}, id="new")

    assert {each.read_bytes() for each in (path / "branches").iterdir()} > {b"precious"}


def test_nobody_writes_over_a_record_that_the_control_file_does_not_tell_of(store: DirectoryStore, path: Path) -> None:
    """As after a control file was put back in its place that is older than the logs."""
    older = (path / "control").read_bytes()
    late = DirectoryStore(f"dir:{path}")
    put(store, branch_key(), {"list": long_list(15)}, "third")
    with (path / "control").open("r+b") as file:
        file.write(older)
    put(late, branch_key("other"), {"n": 2}, "from other")
    with contextlib.suppress(Conflict):  # it was made for the branch without the record that nobody told of
        put(late, branch_key(), {"list": long_list(17)}, "fourth")
    put(late, branch_key(), {"list": long_list(18)}, "fifth")

    assert [state_of(late, name) for name in ("third", "fifth")] == [{"list": long_list(n)} for n in (15, 18)]
    assert damage(late) == []
    late.close()


def test_without_looking_it_would_be_written_over(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: its mishap does harm if nobody looks."""
    monkeypatch.setattr(logs_module, "is_free", lambda *_: True)
    with pytest.raises((AssertionError, Corrupted)):
        test_nobody_writes_over_a_record_that_the_control_file_does_not_tell_of(store, store._root.path)
