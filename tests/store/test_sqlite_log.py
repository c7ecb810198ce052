"""The write-ahead log stays short, or a warning says why it does not; and the file without it is a store."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import backstay
from backstay.errors import StoreWarning
from backstay.store.finding import LEFTOVER
from backstay.store.sqlite.files import _COMMITS_BETWEEN_LOOKS, FOLD_S, REPORTED_BYTES, WAL_BYTES
from backstay.thread.access import access_of

READER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("BEGIN")
connection.execute("SELECT count(*) FROM checkpoint").fetchall()
print("reading", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
connection.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


@contextmanager
def foreign_reader(path: Path) -> Iterator[None]:
    """Another program keeps a read transaction open."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        yield
        reader.communicate("done\n")
    assert reader.returncode == 0


def log_bytes(path: Path) -> int:
    return path.with_name("agent.db-wal").stat().st_size


def fill(store: backstay.Store, size: int) -> None:
    """Save so many bytes that cannot be compressed, some MB at a time."""
    chance, thread = random.Random(size), store.thread("large")
    for _ in range(size // 4_000_000 + 1):
        thread.save({"n": chance.randbytes(4_000_000)})


def copied(path: Path) -> Path:
    """Copy the main file alone, in another process: closing a descriptor here would drop the locks of this one."""
    target = path.with_name("copy.db")
    subprocess.run(["cp", path, target], check=True)
    return target


def test_a_bare_copy_of_a_new_file_is_a_store(path: Path) -> None:
    with backstay.open(path), backstay.open(copied(path)) as copy:
        assert copy.check()
        copy.thread("thread").save({"n": 1})


def test_a_bare_copy_under_load_is_at_most_a_second_old(path: Path) -> None:
    with backstay.open(path) as store:
        thread, number = store.thread("thread"), 0
        started = time.monotonic()
        while time.monotonic() - started <= 2 * FOLD_S:
            number += 1
            thread.append({"log": [number]}, metadata={"at": time.monotonic()})
        with backstay.open(copied(path)) as copy:
            newest = copy.thread("thread").latest()
            assert newest is not None
            assert copy.check()
            assert newest.state["log"] == list(range(1, newest.step + 1))
            folded = [meta for meta in store.thread("thread").history() if meta.step == newest.step + 1]
            assert all(started + FOLD_S < meta.metadata["at"] for meta in folded), "the copy is older than a second"


def test_a_large_save_does_not_leave_a_large_log(path: Path) -> None:
    with backstay.open(path) as store:
        store.thread("large").save({"n": random.Random(1).randbytes(3 * WAL_BYTES)})
        assert log_bytes(path) <= WAL_BYTES
        assert store.check()


def test_a_reader_that_stays_is_reported_once_and_saves_go_on(path: Path) -> None:
    with backstay.open(path) as store:
        store.thread("thread").save({"n": 1})
        with foreign_reader(path):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fill(store, REPORTED_BYTES + WAL_BYTES)
                for n in range(_COMMITS_BETWEEN_LOOKS):  # a fast disk takes all that before the store looks again
                    store.thread("thread").save({"n": n})
            assert log_bytes(path) > REPORTED_BYTES, "the reader was not in the way"
            [told] = [each for each in caught if issubclass(each.category, StoreWarning)]
            assert str(path) in str(told.message)
            report = store.check()
            assert report, "a long log is no damage"
            findings = access_of(store).store.check()
            assert [(finding.kind, finding.where) for finding in findings] == [(LEFTOVER, "write-ahead log")]
        fill(store, 3 * WAL_BYTES)
        for n in range(_COMMITS_BETWEEN_LOOKS):
            store.thread("thread").save({"n": n})
        assert log_bytes(path) <= WAL_BYTES, "it is not cut when the reader has gone"
        assert access_of(store).store.check() == []


def test_a_program_that_makes_errors_of_warnings_keeps_its_saves(path: Path) -> None:
    with backstay.open(path) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        store.thread("thread").save({"n": 1})
        with foreign_reader(path):
            fill(store, REPORTED_BYTES + WAL_BYTES)
        assert store.check()
