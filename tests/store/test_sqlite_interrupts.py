"""Ctrl-C, or a signal handler that calls the store, at every line of the SQLite store's code."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

import backstay
from backstay.errors import BackstayError, StoreError
from backstay.store.lock import CallGuard, ProcessLock
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.store import SqliteStore
from backstay.store.sqlite.transactions import Writer
from backstay.thread.store import Store, make_services
from support.running import RAM_FOLDER, Show
from support.store.lines import Lines

PLACES = ("store/sqlite", "store/lock.py", "store/gate.py")

T = TypeVar("T")
Verb = Callable[[Store], object]

VERBS: dict[str, Verb] = {
    "save": lambda store: store.thread("main").save({"n": 1, "log": ["x" * 500]}),
    "read": lambda store: store.thread("main").latest(),
    "list": lambda store: list(store.thread("main").history(limit=3)),
    "tag": lambda store: store.thread("main").tag(next(iter(store.thread("main").history(limit=1))).id, "good"),
    "prune": lambda store: store.thread("main").prune(backstay.Keep(last=2)),
    "compact": lambda store: store.compact(),
    "stats": lambda store: store.stats(),
}


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    folder = RAM_FOLDER / f"backstay-{tmp_path.name}-{id(tmp_path)}" if RAM_FOLDER.is_dir() else tmp_path / "own"
    folder.mkdir()
    yield folder / "agent.db"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(SqliteStore(str(path), timeout_s=5), make_services("", None)) as opened:
        for n in range(4):
            opened.thread("main").save({"n": n, "log": ["x" * 400]})
        yield opened
        assert opened.check()


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
    struck, handled = 0, sys.exc_info()
    for at in range(points):
        with contextlib.suppress(KeyboardInterrupt):
            lines.struck(lambda: run(store), at, interrupt)
        struck += bool(lines.place)
        assert sys.exc_info() == handled, lines.place
        assert_free(path, store, lines.place)
        if verb == "prune":
            store.thread("main").save({"n": at, "log": ["y" * 400]})
    show(f"interrupts at lines of {verb}", struck)
    assert struck > points // 2


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_interrupts_in_a_row_leave_no_transaction_open(path: Path, store: Store, show: Show) -> None:
    """The second comes while the first is on its way out, and Python's garbage collector does not help."""
    lines = Lines(*PLACES)
    save = VERBS["save"]
    save(store)
    points = lines.recorded(lambda: save(store))
    twice = 0
    gc.collect()
    gc.disable()
    try:
        for at in range(points):
            for skipped in range(5):
                again = SecondInterrupt(skipped)
                with contextlib.suppress(KeyboardInterrupt):
                    lines.struck(lambda: save(store), at, again.interrupt)
                sys.setprofile(None)
                if not again.came:
                    break
                twice += 1
                store.thread("next").save({"after": lines.place})
                assert_free(path, store, lines.place)
    finally:
        gc.enable()
    show("two interrupts in a row", twice)
    assert twice > points


class SecondInterrupt:
    """Raises an interrupt, and another one where a signal handler could run next, or some such places later."""

    def __init__(self, skipped: int) -> None:
        self.skipped = skipped
        self.came = False

    def interrupt(self) -> None:
        sys.setprofile(self._at_event)
        raise KeyboardInterrupt

    def _at_event(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "c_return") or "/backstay/store/" not in frame.f_code.co_filename:
            return
        if self.skipped == 0:
            sys.setprofile(None)
            self.came = True
            raise KeyboardInterrupt
        self.skipped -= 1


def assert_free(path: Path, store: Store, place: str) -> None:
    """Fail unless other processes and other threads can save at once."""
    with open(f"{path}-lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    connection = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    saver = threading.Thread(target=lambda: store.thread("side").save({"after": place}), daemon=True)
    saver.start()
    saver.join(20)
    assert not saver.is_alive(), f"another thread waits for ever after an interrupt at {place}"
    latest = store.thread("side").latest()
    assert latest is not None
    assert latest.state == {"after": place}


@pytest.mark.parametrize("verb", ["save", "read", "tag", "prune", "compact"])
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
        with contextlib.suppress(BackstayError):
            lines.struck(lambda: run(store), at, save_from_the_handler)
    show(f"calls from a handler at lines of {verb}", outcomes)
    assert outcomes["worked"] > 0
    assert sum(outcomes.values()) > points // 2


def save_beside_a_prune(path: Path) -> list[BaseException]:
    """Save in this thread while another one prunes; return what went wrong."""
    with backstay.open(str(path)) as store:
        pruned = threading.Event()
        errors: list[BaseException] = []

        def prune() -> None:
            try:
                for n in range(60):
                    store.thread("b").save({"n": n, "x": os.urandom(100_000)})
                    store.thread("b").prune(backstay.Keep(last=1))
            except BaseException as error:
                errors.append(error)
            finally:
                pruned.set()

        pruner = threading.Thread(target=prune)
        pruner.start()
        thread, saved = store.thread("a"), 0
        try:
            while not pruned.is_set():
                thread.append({"log": [saved]})
                saved += 1
        except (OSError, ValueError) as error:
            errors.append(error)
        pruner.join()
        latest = store.thread("a").latest()

        assert latest is not None
        assert errors or latest.state["log"] == list(range(saved))
        assert store.check()
        return errors


def test_a_save_beside_a_prune_in_another_thread_says_what_happened(path: Path) -> None:
    """Each has a lock of its own: neither gives back the other's, and no save that is stored raises."""
    assert save_beside_a_prune(path) == []


# Stores that are wrong on purpose: each must be caught -------------------------------------------------------------


class SharedLock(ProcessLock):
    """One descriptor for all users of the lock: the first who is done gives back what the others rely on."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__(path, timeout_s)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.held = -1

    def take(self) -> AbstractContextManager[object]:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.held = self.descriptor
        return contextlib.closing(self)

    def close(self) -> None:
        held, self.held = self.held, -1
        fcntl.flock(held, fcntl.LOCK_UN)


def test_a_descriptor_that_two_users_share_is_caught(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstay.store.sqlite.database.ProcessLock", SharedLock)
    monkeypatch.setattr(Writer, "alone", without_the_turn)

    assert save_beside_a_prune(path) != []


def without_the_turn(self: Writer, work: Callable[[Connection], T]) -> T:
    with self._database.lock.take(), contextlib.closing(self._database.connect()) as connection:
        return work(connection)


class CountingGuard(CallGuard):
    """Counts who is inside, under a lock whose ``with`` is written in Python."""

    def reset(self) -> None:
        super().reset()
        self.changed = threading.Condition()

    def mine(self) -> Any:
        return self.changed


@pytest.mark.effort(2)
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_a_lock_that_python_code_takes_is_caught(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstay.store.sqlite.transactions.CallGuard", CountingGuard)
    assert is_caught(path)


def is_caught(path: Path) -> bool:
    """Tell whether an interrupt at some line leaves another thread waiting."""
    store = Store(SqliteStore(str(path), timeout_s=1), make_services("", None))
    save = VERBS["save"]
    save(store)
    lines = Lines(*PLACES)
    for at in range(lines.recorded(lambda: save(store))):
        with contextlib.suppress(KeyboardInterrupt):
            lines.struck(lambda: save(store), at, interrupt)
        saver = threading.Thread(target=lambda: store.thread("side").save({}), daemon=True)
        saver.start()
        saver.join(3)
        if saver.is_alive():
            return True  # and the store is left as it is: it cannot even be closed
    store.close()
    return False
