"""How the calls grow: each is measured at n, 2n and 4n, and in a full run at a large size.

The table shows the slope of log time over log n, in processor time, which other programs disturb less: 0 = it costs the
same at any size, 1 = linear, 2 = quadratic. A thread here has three checkpoints. A call that shows a page, or that
concerns one small thread, must have a slope near 0; every other call a slope of at most about 1.
"""

from __future__ import annotations

import math
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import backstay
from backstay.store.sqlite.database import Database
from backstay.store.sqlite.files import Connection
from benchmarks.bench import Bench
from benchmarks.table import Row, Target
from benchmarks.timing import clock

Call = Callable[[backstay.Store], object]
KEEP = backstay.Keep(last=1)
TEXT = "some text of a message, a little longer than a line of a terminal is wide; " * 2
REPEATS, REPEATED_S_MAX = 5, 2.0
LINEAR, FLAT, WAIT = Target(1.25, on="ours"), Target(0.35, on="ours"), Target(0.25, on="ours")

OF_THREADS: dict[str, tuple[Call, bool]] = {  # by name: the call, and whether it must cost the same at any size
    "threads(limit=20)": (lambda store: list(store.threads(limit=20)), True),
    "threads(), all": (lambda store: sum(1 for _ in store.threads()), False),
    "one thread: history()": (lambda store: list(store.thread("t1").history()), True),
    "one thread: branches()": (lambda store: store.thread("t1").branches(), True),
    "one thread: check()": (lambda store: store.thread("t1").check(), True),
    "one thread: stats()": (lambda store: store.thread("t1").stats(), True),
    "one thread: prune()": (lambda store: store.thread("t1").prune(KEEP), True),
    "one thread: delete()": (lambda store: store.thread("t2").delete(), True),
    "stats()": (lambda store: store.stats(), False),
    "check()": (lambda store: store.check(), False),
    "prune()": (lambda store: store.prune(KEEP), False),
    "delete_all()": (lambda store: store.delete_all(), False),
}
OF_BRANCHES: dict[str, tuple[Call, bool]] = {
    "threads(limit=20)": (lambda store: list(store.threads(limit=20)), False),
    "history(limit=20) of a branch": (lambda store: list(store.thread("t").history(limit=20)), True),
    "branches()": (lambda store: store.thread("t").branches(), False),
    "stats()": (lambda store: store.thread("t").stats(), False),
    "check()": (lambda store: store.thread("t").check(), False),
    "prune()": (lambda store: store.thread("t").prune(KEEP), False),
    "delete()": (lambda store: store.thread("t").delete(), False),
}
OF_CHECKPOINTS: dict[str, tuple[Call, bool]] = {
    "history(limit=20)": (lambda store: list(store.thread("t").history(limit=20)), True),
    "delete one checkpoint": (lambda store: _delete_one(store.thread("t")), True),
    "save(replace=True)": (lambda store: _replace(store.thread("t")), True),
    "prune()": (lambda store: store.thread("t").prune(KEEP), False),
}


def run(bench: Bench) -> None:
    """Measure every call on SQLite and on the directory store."""
    for kind, large in (("sqlite", 100_000), ("dir", 0)):
        _family(bench, kind, "threads", OF_THREADS, bench.pick(2000, 250), large, _threads)
        _family(bench, kind, "branches of one thread", OF_BRANCHES, bench.pick(500, 125), large // 10, _branches)
        _family(bench, kind, "checkpoints of one thread", OF_CHECKPOINTS, bench.pick(4000, 500), large, _checkpoints)


def _family(
    bench: Bench,
    kind: str,
    of: str,
    calls: dict[str, tuple[Call, bool]],
    first: int,
    large: int,
    fill: Callable[[backstay.Store, int], None],
) -> None:
    sizes = [first, first * 2, first * 4] + ([large] if large and not bench.quick else [])
    what = f"ours: growth exponent from n = {first:,} to {first * 4:,} {of}; then the time at n = {sizes[-1]:,}"
    bench.table.begin(f"scale: {kind}, {of}", what)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    waits: dict[str, float] = {}
    for size in sizes:
        path = bench.new_path(".db" if kind == "sqlite" else "")
        with _unsynced(), backstay.open(_url(kind, path)) as store:
            fill(store, size)
        for name, (call, _) in calls.items():
            with _opened_copy(bench, kind, path) as store:
                taken[name].append(_seconds(call, store, is_repeatable=not _changes(name)))
            if size == sizes[-1] and _changes(name) and name != "delete_all()":
                with _opened_copy(bench, kind, path) as store:
                    waits[name] = _worst_save(call, store)
        _remove(path)
    for name, (_, is_flat) in calls.items():
        exponent = slope(sizes[:3], [busy for _, busy in taken[name][:3]])
        target = FLAT if is_flat else LINEAR
        bench.table.add(Row(name, exponent, "x", None, taken[name][-1][0], f"at n={sizes[-1]:,}", "s", 0, target))
    for name, wait in waits.items():
        bench.table.add(Row(f"{name}: longest save meanwhile", wait, target=WAIT))


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of the line through the logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(each) for each in seconds]).slope


def _seconds(call: Call, store: backstay.Store, is_repeatable: bool) -> tuple[float, float]:
    """Return the shortest time that the call took, and the least processor time."""
    took: list[float] = []
    busy: list[float] = []
    while not took or (is_repeatable and len(took) < REPEATS and sum(took) < REPEATED_S_MAX):
        began = time.process_time()
        took.append(clock(lambda: call(store)))
        busy.append(time.process_time() - began)
    return min(took), min(busy)


def _changes(name: str) -> bool:
    return any(word in name for word in ("prune", "delete", "clear"))


@contextmanager
def _opened_copy(bench: Bench, kind: str, path: Path) -> Iterator[backstay.Store]:
    copy = bench.new_path(".db" if kind == "sqlite" else "")
    (shutil.copyfile if kind == "sqlite" else shutil.copytree)(path, copy)
    with backstay.open(_url(kind, copy)) as store:
        next(iter(store.threads(limit=1)), None)  # a directory is read when it is first used
        yield store
    _remove(copy)


def _url(kind: str, path: Path) -> str:
    return str(path) if kind == "sqlite" else f"dir:{path}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    for name in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        name.unlink(missing_ok=True)


@contextmanager
def _unsynced() -> Iterator[None]:
    """Fill stores without waiting for the disk, or it would take most of the time."""

    def connect(database: Database) -> Connection:
        connection = connected(database)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    connected = Database.connect
    with patch.object(Database, "connect", connect), patch("os.fsync"), patch("os.fdatasync"):
        yield


def _worst_save(call: Call, store: backstay.Store) -> float:
    """Return the longest time that a save in another thread took while the call ran."""
    taken: list[float] = []
    is_over = threading.Event()

    def save() -> None:
        other = store.thread("another")
        while not is_over.is_set():
            taken.append(clock(lambda: other.save({"n": len(taken)})))

    saver = threading.Thread(target=save)
    saver.start()
    try:
        call(store)
    finally:
        is_over.set()
        saver.join()
    return max(taken)


def _threads(store: backstay.Store, count: int) -> None:
    for number in range(count):
        thread = store.thread(f"t{number}")
        for step in range(3):
            thread.save({"messages": [f"{TEXT} {number} {each}" for each in range(step + 1)], "n": step})


def _branches(store: backstay.Store, count: int) -> None:
    thread = store.thread("t")
    saved = [thread.save({"messages": [f"{TEXT} {each}" for each in range(step + 1)], "n": step}) for step in range(5)]
    for number in range(count - 1):
        fork = thread.fork(saved[number % 5], branch=f"b{number}")
        for step in range(2):
            fork.append({"messages": [f"{TEXT} {number} {step}"]}, set={"n": step})


def _checkpoints(store: backstay.Store, count: int) -> None:
    thread = store.thread("t")
    for step in range(count):
        thread.save({"scratch": f"{step} {TEXT}{TEXT}", "lately": [f"{TEXT} {step - back}" for back in range(5)]})


def _delete_one(thread: backstay.Thread) -> None:
    middle = next(islice(thread.history(limit=20), 19, None))
    thread.delete_checkpoint(middle.id)


def _replace(thread: backstay.Thread) -> None:
    head = thread.latest()
    assert head is not None
    thread.save({**head.state, "scratch": f"{time.perf_counter_ns()} {TEXT}{TEXT}"}, id=head.id, replace=True)
