"""One SQLite store, several processes: forks, two handles on one file, fairness, and a process that is stopped."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import UserDict
from collections.abc import Callable, ItemsView, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import backstay
from backstay.errors import Conflict, StoreBusy, StoreError
from backstay.store.sqlite.store import SqliteStore
from backstay.testing.drafts import wait_until
from backstay.thread.store import Store, make_services
from support.processes import ended_well, forked

SAVES = 25
FAIR_WRITERS = 4
FAIR_SAVES = 150

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork.*:DeprecationWarning"  # from 3.12 on Python warns of what this file is about
)

FAIR_WRITER = """
import sys, time, backstay
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with backstay.open(path) as store:
    thread = store.thread(name)
    print("ready", flush=True)
    sys.stdin.readline()
    worst, begin = 0.0, time.monotonic()
    for number in range(count):
        start = time.monotonic()
        thread.save({"n": number})
        worst = max(worst, time.monotonic() - start)
    print(worst, begin, time.monotonic(), flush=True)
"""

LOCK_HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1] + "-lock", os.O_RDWR)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


def save_many(store: Store, name: str) -> None:
    """Save on a thread of one's own and, racing with all others, on a shared one."""
    own, shared = store.thread(name), store.thread("shared")
    for number in range(SAVES):
        own.save({"n": number, "by": name})
        while True:
            shared.latest()
            try:
                shared.save({"by": name, "n": number}, id=f"{name}-{number}")
                break
            except Conflict:
                continue


def check(store: Store, names: list[str]) -> None:
    """Everything that was saved is there, in one line without gaps."""
    for name in names:
        assert [meta.step for meta in store.thread(name).history()] == list(range(SAVES, 0, -1))
        latest = store.thread(name).latest()
        assert latest is not None
        assert latest.state == {"n": SAVES - 1, "by": name}
    history = list(store.thread("shared").history())
    assert sorted(meta.id for meta in history) == sorted(f"{name}-{n}" for name in names for n in range(SAVES))
    assert [meta.seq for meta in history] == list(range(len(history), 0, -1))
    assert [meta.parent_id for meta in history[:-1]] == [meta.id for meta in history[1:]]
    report = store.check()
    assert report, str(report)


def test_parent_and_child_of_a_fork_both_go_on_saving(path: Path) -> None:
    with backstay.open(path) as store:
        store.thread("before").save({"n": 0})
        child = forked(lambda: save_many(store, "child"))
        save_many(store, "parent")

        assert ended_well(child)
        check(store, ["parent", "child"])


def test_a_child_of_multiprocessing_may_use_the_store_of_its_parent(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with backstay.open(path) as store:
        store.thread("before").save({"n": 0})
        children = [context.Process(target=save_many, args=(store, f"child {number}")) for number in range(2)]
        for child in children:
            child.start()
        save_many(store, "parent")
        for child in children:
            child.join()

        assert [child.exitcode for child in children] == [0, 0]
        check(store, ["parent", "child 0", "child 1"])


@contextmanager
def saving_meanwhile(store: Store) -> Iterator[list[str]]:
    """Save in another thread of this process until the block ends; the list holds the ids that were acknowledged."""
    acked: list[str] = []
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        thread = store.thread("busy")
        while not stop.is_set():
            acked.append(thread.save({"n": len(acked)}).id)
            begun.set()

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(30)
    try:
        yield acked
    finally:
        stop.set()
        worker.join()


def test_a_fork_while_another_thread_is_saving_loses_nothing(path: Path) -> None:
    with backstay.open(path) as store:
        with saving_meanwhile(store) as acked:
            children = [forked(lambda name=f"child {number}": save_many(store, name)) for number in range(4)]  # type: ignore[misc]
            results = [ended_well(child) for child in children]

        assert results == [True] * 4
        assert [meta.id for meta in store.thread("busy").history()] == acked[::-1]
        check(store, [f"child {number}" for number in range(4)])


def test_a_handle_with_a_known_head_is_not_fooled_by_what_the_other_side_of_a_fork_saved(path: Path) -> None:
    with backstay.open(path) as store:
        thread = store.thread("thread")
        thread.save({"n": 1})
        assert ended_well(forked(lambda: thread.save({"n": 2})))

        with pytest.raises(Conflict):
            thread.save({"n": 3})
        latest = thread.latest()
        assert latest is not None
        assert latest.state == {"n": 2}


def test_a_handle_that_another_thread_was_using_at_a_fork_works_in_the_child(path: Path) -> None:
    """The handle is held by a save whose state is just being read, so that the fork surely comes in the middle."""
    inside, go_on = threading.Event(), threading.Event()

    class SlowState(UserDict[str, int]):
        def items(self) -> ItemsView[str, int]:
            inside.set()
            assert go_on.wait(30)
            return super().items()

    def use(thread: backstay.Thread) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3)  # ends the child if it hangs
        thread.latest()

    with backstay.open(path) as store:
        thread = store.thread("thread")
        thread.save({"n": 1})
        worker = threading.Thread(target=lambda: thread.save(SlowState(n=2)))
        worker.start()
        assert inside.wait(30)
        child = forked(lambda: use(thread))
        result = ended_well(child)
        go_on.set()
        worker.join()

    assert result


def test_a_store_closed_in_the_child_stays_open_in_the_parent(path: Path) -> None:
    with backstay.open(path) as store:
        store.thread("thread").save({"n": 1})
        assert ended_well(forked(store.close))

        store.thread("other").save({"n": 2})
        assert store.check().good["checkpoints"] == 2


def test_a_copy_in_a_process_that_python_did_not_fork_is_refused(path: Path) -> None:
    """A fork behind Python's back runs none of its hooks; only the process id can tell."""
    script = (
        "import ctypes, os, sys, backstay\n"
        "store = backstay.open(sys.argv[1])\n"
        "store.thread('thread').save({'n': 1})\n"
        "pid = ctypes.PyDLL(None).fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        store.thread('thread').latest()\n"
        "    except backstay.StoreError as error:\n"
        "        os.write(1, str(error).encode())\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "store.thread('other').save({'n': 2})\n"
        "store.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)

    assert "another process" in done.stdout
    with backstay.open(path) as store:
        assert store.check().good["checkpoints"] == 2


def test_two_stores_on_one_file_in_one_process_see_each_other_at_once(path: Path) -> None:
    with backstay.open(path) as one, backstay.open(path) as two:
        first = one.thread("thread").save({"n": 1})
        assert two.get(first.id) is not None
        saved = two.thread("thread").save({"n": 2})
        assert saved.parent_id == first.id

        workers = [threading.Thread(target=save_many, args=pair) for pair in ((one, "one"), (two, "two"))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        check(one, ["one", "two"])
        one.close()
        assert two.check().good["checkpoints"] == 2 + 4 * SAVES


def test_no_writer_starves_among_four_busy_ones(path: Path, record_property: Callable[[str, object], None]) -> None:
    """All are done at about the same time, and nobody ever waits for a large part of the whole."""
    backstay.open(path).close()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", FAIR_WRITER, str(path), f"writer {number}", str(FAIR_SAVES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(FAIR_WRITERS)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    figures = [[float(word) for word in child.communicate()[0].split()] for child in children]

    whole = max(end for _, _, end in figures) - min(begin for _, begin, _ in figures)
    worst = max(wait for wait, _, _ in figures)
    record_property("fairness", f"worst wait {worst * 1000:.1f} ms of {whole * 1000:.0f} ms")
    assert worst < whole / 2
    assert min(end - begin for _, begin, end in figures) > whole / 4
    with backstay.open(path) as store:
        assert store.check().good["checkpoints"] == FAIR_WRITERS * FAIR_SAVES


@contextmanager
def stopped_holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Give a process that holds the store's lock and is stopped."""
    with subprocess.Popen(
        [sys.executable, "-c", LOCK_HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield holder
        finally:
            os.kill(holder.pid, signal.SIGCONT)
            holder.communicate()


@pytest.mark.crash
def test_a_store_locked_by_a_stopped_process_is_busy_and_works_again_after_it(path: Path) -> None:
    with Store(SqliteStore(str(path), timeout_s=0.2), make_services("", None)) as store:
        thread = store.thread("thread")
        thread.save({"n": 1}, id="first")
        with stopped_holder(path):
            for _ in range(3):
                with pytest.raises(StoreBusy, match=str(path)) as caught:
                    thread.save({"n": 2}, id="second")
                assert caught.value.retry_safe
            assert store.get("second") is None
            latest = store.thread("thread").latest()  # reading needs no lock
            assert latest is not None
            assert latest.id == "first"
            with pytest.raises(StoreBusy):
                SqliteStore(str(path), timeout_s=0.1)

        assert thread.save({"n": 2}, id="second").parent_id == "first"
        assert store.check().good["checkpoints"] == 2


def descriptors_of(path: str) -> int:
    """Return how many descriptors of this process are open on a file; those of other tests may come and go."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}") == path
    return found


def test_waiting_in_vain_leaves_no_descriptor_behind(path: Path) -> None:
    with Store(SqliteStore(str(path), timeout_s=0.05), make_services("", None)) as store:
        store.thread("thread").save({"n": 1})
        before = descriptors_of(f"{path}-lock")
        with stopped_holder(path):
            for _ in range(5):
                with pytest.raises(StoreError):
                    store.thread("other").save({"n": 2})
            assert descriptors_of(f"{path}-lock") == before + 5, "each waits with a descriptor of its own"
        wait_until(lambda: descriptors_of(f"{path}-lock") == before == 0)
