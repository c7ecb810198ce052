"""One directory store, several processes and handles: forks, a second handle, closing, a process that is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import StoreBusy, StoreError
from backstay.store.directory.store import DirectoryStore
from backstay.thread.store import Store, make_services
from support.processes import ended_well, forked

SAVES = 15

LOCK_HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def save_many(store: Store, name: str) -> None:
    for number in range(SAVES):
        store.thread(name).save({"n": number}, id=f"{name}-{number}")


def check_saved(store: Store, names: list[str]) -> None:
    for name in names:
        expected = [f"{name}-{number}" for number in reversed(range(SAVES))]
        assert [meta.id for meta in store.thread(name).history()] == expected
    assert store.check()


def test_parent_and_child_of_a_fork_both_go_on(path: Path) -> None:
    with backstay.open(f"dir:{path}") as store:
        store.thread("before").save({"n": 0})
        child = forked(lambda: save_many(store, "child"))
        save_many(store, "parent")

        assert ended_well(child)
        check_saved(store, ["parent", "child"])


def test_a_fork_in_the_middle_of_a_save_leaves_a_child_that_can_go_on_and_close(path: Path) -> None:
    """Another thread saves without end, so its locks are held at the fork now and then; the child must not wait."""
    stop, begun = threading.Event(), threading.Event()
    acked: list[str] = []

    def work() -> None:
        thread = store.thread("busy")
        while not stop.is_set():
            acked.append(thread.save({"n": len(acked)}).id)
            begun.set()

    def go_on(name: str) -> None:
        save_many(store, name)
        store.close()

    with backstay.open(f"dir:{path}") as store:
        worker = threading.Thread(target=work)
        worker.start()
        assert begun.wait(30)
        saving = [forked(lambda name=f"child {number}": go_on(name)) for number in range(3)]  # type: ignore[misc]
        closing = [forked(store.close) for _ in range(10)]
        results = [ended_well(child) for child in (*saving, *closing)]
        stop.set()
        worker.join()

        assert results == [True] * 13
        assert [meta.id for meta in store.thread("busy").history()] == acked[::-1]
        check_saved(store, [f"child {number}" for number in range(3)])


def test_two_handles_in_one_process_see_each_other_at_once(path: Path) -> None:
    with backstay.open(f"dir:{path}") as one, backstay.open(f"dir:{path}") as two:
        first = one.thread("thread").save({"n": 1})
        assert two.get(first.id) is not None
        assert two.thread("thread").save({"n": 2}).parent_id == first.id

        workers = [threading.Thread(target=save_many, args=pair) for pair in ((one, "one"), (two, "two"))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        check_saved(one, ["one", "two"])
        one.close()
        check_saved(two, ["one", "two"])


def test_a_store_is_closed_twice_and_then_refuses(path: Path) -> None:
    store = backstay.open(f"dir:{path}")
    store.thread("thread").save({"n": 1}, id="first")
    store.close()
    store.close()

    with pytest.raises(StoreError, match="closed"):
        store.get("first")
    with pytest.raises(StoreError, match="closed"):
        store.thread("thread").save({"n": 2})


def open_here(path: Path) -> list[str]:
    """Return which files under a path this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [name for name in found if name.startswith(str(path))]


def test_nothing_stays_open_when_a_store_is_closed_or_cannot_be_opened(path: Path) -> None:
    with backstay.open(f"dir:{path}") as store:
        store.thread("thread").save({"n": 1})
    assert open_here(path) == []
    (path / "branches" / "00000002.log").unlink()
    (path / "branches" / "00000002.log").mkdir()
    with pytest.raises(StoreError):
        backstay.open(f"dir:{path}")

    assert open_here(path) == []


@contextlib.contextmanager
def stopped_holder(path: Path) -> Iterator[None]:
    """Let a process that is stopped hold the store's lock."""
    with subprocess.Popen(
        [sys.executable, "-c", LOCK_HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            os.kill(holder.pid, signal.SIGCONT)
            holder.communicate()


@pytest.mark.crash
def test_a_store_locked_by_a_stopped_process_is_busy_and_works_again_after_it(path: Path) -> None:
    with Store(DirectoryStore(f"dir:{path}", timeout_s=0.2), make_services("", None)) as store:
        thread = store.thread("thread")
        thread.save({"n": 1}, id="first")
        with stopped_holder(path):
            for _ in range(2):
                with pytest.raises(StoreBusy, match=str(path)) as caught:
                    thread.save({"n": 2}, id="second")
                assert caught.value.retry_safe
            latest = store.thread("thread").latest()  # reading needs no lock
            assert latest is not None
            assert latest.id == "first"
            with pytest.raises(StoreBusy):
                DirectoryStore(f"dir:{path}", timeout_s=0.1)

        assert thread.save({"n": 2}, id="second").parent_id == "first"
        assert store.check().good["checkpoints"] == 2


def test_processes_may_open_a_new_store_at_the_same_moment(path: Path) -> None:
    def save(name: str) -> None:
        with backstay.open(f"dir:{path}") as store:
            store.thread(name).save({"n": 1}, id=name)

    children = [forked(lambda name=f"p{number}": save(name)) for number in range(6)]  # type: ignore[misc]

    assert [ended_well(child) for child in children] == [True] * 6
    with backstay.open(f"dir:{path}") as store:
        assert sorted(meta.id for meta in store.threads()) == [f"p{number}" for number in range(6)]
        assert store.check()
