"""Ctrl-C, or a signal handler that calls the store, at every line of the SQLite store's code."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from interrupting import Lines

import holdfast
from holdfast.errors import HoldfastError, StoreError
from holdfast.store.sqlite.database import CHECKSUM_VFS
from holdfast.store.sqlite.store import SqliteStore
from holdfast.thread.store import Store, make_context

RAM_FOLDER = Path("/dev/shm")
PLACES = ("store/sqlite", "store/lock.py", "store/gate.py")

Show = Callable[[str, object], None]
Verb = Callable[[Store], object]

VERBS: dict[str, Verb] = {
    "save": lambda store: store.thread("main").save({"n": 1, "log": ["x" * 500]}),
    "read": lambda store: store.thread("main").latest(),
    "list": lambda store: list(store.thread("main").history(limit=3)),
    "tag": lambda store: store.thread("main").tag(next(iter(store.thread("main").history(limit=1))).id, "good"),
    "prune": lambda store: store.thread("main").prune(holdfast.Keep(last=2)),
    "compact": lambda store: store.compact(),
    "stats": lambda store: store.stats(),
}


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    folder = RAM_FOLDER / f"holdfast-{tmp_path.name}-{id(tmp_path)}" if RAM_FOLDER.is_dir() else tmp_path / "own"
    folder.mkdir()
    yield folder / "agent.db"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(SqliteStore(str(path), timeout_s=5), make_context("", None)) as opened:
        for n in range(4):
            opened.thread("main").save({"n": n, "log": ["x" * 400]})
        yield opened
        assert opened.verify()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:unclosed file")  # one that no ``with`` had yet is closed when it is forgotten
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_at_any_line_leaves_nothing_locked(path: Path, store: Store, verb: str, show: Show) -> None:
    lines = Lines(*PLACES)
    run = VERBS[verb]
    run(store)
    points = lines.recorded(lambda: run(store))
    assert points > 10
    struck = 0
    for at in range(points):
        with contextlib.suppress(KeyboardInterrupt):
            lines.struck(lambda: run(store), at, interrupt)
        struck += bool(lines.place)
        assert_free(path, store, lines.place)
        if verb == "prune":
            store.thread("main").save({"n": at, "log": ["y" * 400]})
    show(f"interrupts at lines of {verb}", struck)
    assert struck > points // 2


def assert_free(path: Path, store: Store, place: str) -> None:
    """Fail unless other processes and other threads can save at once."""
    with open(f"{path}-lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=CHECKSUM_VFS)
    with contextlib.closing(connection):
        connection.execute("BEGIN IMMEDIATE; ROLLBACK")
    saver = threading.Thread(target=lambda: store.thread("side").save({"after": place}), daemon=True)
    saver.start()
    saver.join(20)
    assert not saver.is_alive(), f"another thread waits for ever after an interrupt at {place}"
    latest = store.thread("side").latest()
    assert latest is not None
    assert latest.state == {"after": place}


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_from_a_handler_at_any_line_works_or_is_refused(store: Store, verb: str, show: Show) -> None:
    lines = Lines(*PLACES)
    run = VERBS[verb]
    run(store)
    points = lines.recorded(lambda: run(store))
    outcomes = {"worked": 0, "refused": 0}

    def save_from_the_handler() -> None:
        try:
            store.thread("handler").save({"at": lines.place})
            outcomes["worked"] += 1
        except StoreError as error:
            outcomes["refused"] += "signal handler" in error.what
        else:
            latest = store.thread("handler").latest()
            assert latest is not None
            assert latest.state == {"at": lines.place}

    for at in range(points):
        with contextlib.suppress(HoldfastError):
            lines.struck(lambda: run(store), at, save_from_the_handler)
    show(f"calls from a handler at lines of {verb}", outcomes)
    assert outcomes["worked"] > 0
    assert sum(outcomes.values()) > points // 2


def test_a_save_beside_a_prune_in_another_thread_says_what_happened(path: Path) -> None:
    """Each has a lock of its own: neither gives back the other's, and no save that is stored raises."""
    with holdfast.open(str(path)) as store:
        pruned = threading.Event()
        errors: list[BaseException] = []

        def prune() -> None:
            try:
                for n in range(60):
                    store.thread("b").save({"n": n, "x": "y" * 2000})
                    store.thread("b").prune(holdfast.Keep(last=1))
            except BaseException as error:
                errors.append(error)
            finally:
                pruned.set()

        pruner = threading.Thread(target=prune)
        pruner.start()
        thread, saved = store.thread("a"), 0
        while not pruned.is_set():
            thread.append({"log": [saved]})
            saved += 1
        pruner.join()
        latest = store.thread("a").latest()

        assert errors == []
        assert latest is not None
        assert latest.state["log"] == list(range(saved))
        assert store.verify()
