"""Copies of a whole store: backups of one that works, and what can be read of a SQLite file that does not open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import BackstayError, Corrupted, InvalidInput, StoreRefused
from backstay.maintenance import salvage
from backstay.store.sqlite.database import PAGE_BYTES
from backstay.store.sqlite.transactions import TIMEOUT_S
from support import damage
from support.crash.damaged import ask, fill
from support.running import Show, effort, spread

SEED = int(os.environ.get("BACKSTAY_SEED", "20261117"))
PAGES = 6 * effort()


@pytest.fixture(params=["sqlite", "dir"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"dir:{tmp_path}/live" if request.param == "dir" else str(tmp_path / "live.db")


def copy_url(source: str, path: Path) -> str:
    return f"dir:{path}" if source.startswith("dir:") else str(path)


def test_a_backup_is_the_store_as_of_one_moment(source: str, tmp_path: Path) -> None:
    with backstay.open(source) as store, backstay.open(source, namespace="other") as other:
        damage.fill(store)
        other.thread("t").save({"n": 1})
        expected = damage.loaded(store)
        report = store.backup(tmp_path / "copy")
        store.thread("later").save({"n": 2})

    assert report
    assert report.good["checkpoints"] == len(damage.IDS)
    url = copy_url(source, tmp_path / "copy")
    with backstay.open(url) as copy, backstay.open(url, namespace="other") as others:
        assert damage.loaded(copy) == expected
        assert [meta.thread_id for meta in others.threads()] == ["t"]
        assert copy.thread("later").latest() is None
        copy.thread("alpha").save({"goes": "on"})
        assert copy.check()


def test_saves_and_deletes_continue_during_a_backup(source: str, tmp_path: Path) -> None:
    stop = threading.Event()
    with backstay.open(source) as store:
        thread = store.thread("t")
        thread.save({"log": []})

        def save() -> None:
            while not stop.is_set():
                if thread.append({"log": ["x" * 2000]}).step % 40 == 0:
                    store.prune(backstay.Keep(last=3))
                    store.compact()

        saver = threading.Thread(target=save)
        saver.start()
        steps = []
        try:
            for number in range(5):
                before = store.thread("t").latest()
                assert before is not None
                store.backup(tmp_path / f"copy{number}")
                with backstay.open(copy_url(source, tmp_path / f"copy{number}")) as copy:
                    found = copy.thread("t").latest()
                assert found is not None
                assert found.step >= before.step, "what was saved before the backup is in it"
                steps.append(found.step)
        finally:
            stop.set()
            saver.join()

    assert steps == sorted(steps)


def test_a_path_that_exists_is_left_alone(source: str, tmp_path: Path) -> None:
    (tmp_path / "copy").write_text("something else")
    with backstay.open(source) as store, pytest.raises(StoreRefused, match="exists already"):
        store.backup(tmp_path / "copy")

    assert (tmp_path / "copy").read_text() == "something else"


@pytest.mark.parametrize("left", ["-wal", "-journal"])
def test_a_log_that_an_older_copy_left_is_not_played_into_a_new_one(source: str, tmp_path: Path, left: str) -> None:
    (tmp_path / f"copy{left}").write_text("of another file")
    with backstay.open(source) as store, pytest.raises(StoreRefused, match=f"copy{left} exists already"):
        store.backup(tmp_path / "copy")

    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("url", ["sqlite:///copy.db", "dir:copy", "postgresql://host/copy"])
def test_a_url_is_not_a_place_for_a_copy(source: str, url: str) -> None:
    with backstay.open(source) as store, pytest.raises(InvalidInput, match="the path of a new file"):
        store.backup(url)


def test_a_damaged_store_gives_no_backup(tmp_path: Path) -> None:
    damage.make(tmp_path / "live.db")
    damage.flip_column(tmp_path / "live.db", "chunk", "body", "address > 0 LIMIT 1")
    before = sorted(path.name for path in tmp_path.iterdir())

    with backstay.open(tmp_path / "live.db") as store, pytest.raises(Corrupted, match="the store is damaged"):
        store.backup(tmp_path / "copy.db")

    assert sorted(path.name for path in tmp_path.iterdir() if "-lock" not in path.name) == [
        name for name in before if "-lock" not in name
    ]


def test_a_store_in_memory_says_what_to_do_instead(tmp_path: Path) -> None:
    with backstay.open("memory:") as store, pytest.raises(StoreRefused, match="export"):
        store.backup(tmp_path / "copy")


def test_the_async_store_has_it_too(source: str, tmp_path: Path) -> None:
    async def main() -> None:
        store = await backstay.aopen(source)
        await store.thread("t").save({"n": 1})
        assert await store.backup(tmp_path / "copy")
        await store.close()

    asyncio.run(main())
    with backstay.open(copy_url(source, tmp_path / "copy")) as copy:
        assert copy.thread("t").latest() is not None


# Salvage ----------------------------------------------------------------------------------------------------------


def rescued(path: Path, into: Path) -> dict[str, Any]:
    before = path.read_bytes()
    salvage(path, into)
    assert path.read_bytes() == before, "the damaged file is only read"
    with backstay.open(into) as store:
        with contextlib.suppress(AssertionError):  # the record of the effect may be lost: then it would be done again
            return ask(store)
        return {}


@pytest.mark.parametrize("vacuumed", [False, True])
@pytest.mark.parametrize("lost", ["the header", "the first page", "the version", "the end"])
def test_a_file_that_does_not_open_is_rescued(tmp_path: Path, lost: str, vacuumed: bool) -> None:
    path = tmp_path / "agent.db"
    fill(str(path))
    if vacuumed:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", (str(tmp_path / "vacuumed.db"),))
        path = tmp_path / "vacuumed.db"
    with backstay.open(path) as store:
        expected = ask(store)
    data = bytearray(path.read_bytes())
    match lost:
        case "the header":
            data[:100] = bytes(100)
        case "the first page":
            data[:PAGE_BYTES] = os.urandom(PAGE_BYTES)
        case "the version":
            data[60] ^= 1
        case "the end":
            del data[-(PAGE_BYTES + 7) :]
    path.write_bytes(data)
    with pytest.raises(BackstayError):
        backstay.open(path)

    found = rescued(path, tmp_path / "rescued.db")

    right = [name for name in expected if found.get(name) == expected[name]]
    if lost == "the end":
        assert len(right) > len(expected) // 2
    else:
        assert right == list(expected)


@pytest.mark.effort
def test_a_lost_page_loses_no_more_than_what_was_on_it(tmp_path: Path, show: Show) -> None:
    """No checkpoint that comes back is a wrong one; most come back."""
    path = tmp_path / "agent.db"
    fill(str(path))
    with backstay.open(path) as store:
        expected = ask(store)
    data = path.read_bytes()
    rng, ids, came_back = random.Random(SEED), [name for name in expected if len(name) == 2], 0
    pages = spread(range(1, len(data) // PAGE_BYTES), PAGES)
    for page in pages:
        start = page * PAGE_BYTES
        path.write_bytes(data[:start] + rng.randbytes(PAGE_BYTES) + data[start + PAGE_BYTES :])
        for name in ("rescued.db", "rescued.db-lock"):
            (tmp_path / name).unlink(missing_ok=True)
        try:
            found = rescued(path, tmp_path / "rescued.db")
        except StoreRefused:
            continue
        for name in ids:
            if name in found and found[name] is not None and not isinstance(found[name], BackstayError):
                assert found[name]["state"] == expected[name]["state"]
                came_back += 1

    show("checkpoints rescued after the loss of a page", f"{came_back} of {len(ids) * len(pages)}")
    assert came_back > len(ids) * len(pages) // 2


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary " * 1000)

    with pytest.raises(StoreRefused, match="none of the store's tables"):
        salvage(tmp_path / "diary.txt", tmp_path / "rescued.db")
    with pytest.raises(StoreRefused, match="is not a file"):
        salvage(tmp_path / "nothing.db", tmp_path / "rescued.db")
    assert not (tmp_path / "rescued.db").exists()


# The log is folded ------------------------------------------------------------------------------------------------

SAVE = """
import sys
import backstay
store = backstay.open(sys.argv[1])
thread = store.thread("t")
for n in range(1, int(sys.argv[2]) + 1):
    thread.save({"n": n})
    print(n, flush=True)
"""


def newest_in_a_bare_copy(path: Path) -> int:
    """Copy the main file alone, as ``cp`` does, and return what it holds."""
    copy = path.with_name("bare.db")
    shutil.copyfile(path, copy)
    with backstay.open(copy) as store:
        assert store.check()
        found = store.thread("t").latest()
        return 0 if found is None else int(found.state["n"])


def test_a_program_that_ends_leaves_everything_in_the_main_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    subprocess.run([sys.executable, "-c", SAVE, str(path), "7"], check=True, capture_output=True)

    assert not Path(f"{path}-wal").exists()
    assert newest_in_a_bare_copy(path) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_a_program_leaves_all_in_the_main_file(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "agent.db"
    for times in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE, str(path), "1000000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            seen = [child.stdout.readline() for _ in range(10 + 25 * times)]
            child.send_signal(number)
            seen += child.stdout.read().split()
            assert child.stderr is not None
            child.stderr.read()
        assert child.returncode == -number, "it ends as if the signal had not been handled"
        assert newest_in_a_bare_copy(path) >= int(seen[-1])
        for name in ("bare.db", "bare.db-lock"):
            (tmp_path / name).unlink(missing_ok=True)


TERMINATED = """
import signal, sys
import backstay
from backstay.store.leases import boot_clock
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import Store, make_services

armed = []
def clock():
    if armed:
        armed.clear()
        signal.raise_signal(signal.SIGTERM)
    return boot_clock()
def audit(event, _):
    if armed and event == "sqlite3.connect":
        armed.clear()
        signal.raise_signal(signal.SIGTERM)

store = Store(SqliteStore(sys.argv[1], clock=clock), make_services("", None))
stale, thread = store.thread("t"), store.thread("t")
stale.latest()
thread.save({"n": 1})
if sys.argv[2] == "compact":
    sys.addaudithook(audit)
armed.append(True)
calls = {"save": lambda: thread.save({"n": 2}), "conflict": lambda: stale.save({"n": 2}), "compact": store.compact}
try:
    calls[sys.argv[2]]()
except backstay.Conflict:
    pass
print("fired" if not armed else "not fired")
"""


@pytest.mark.parametrize("call", ["save", "conflict", "compact"])
def test_a_signal_inside_a_write_ends_the_program_after_it_however_it_ends(tmp_path: Path, call: str) -> None:
    path = tmp_path / "agent.db"
    command = [sys.executable, "-c", TERMINATED, str(path), call]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
    assert newest_in_a_bare_copy(path) == (2 if call == "save" else 1)


WORKER = """
import signal, sys, threading
import backstay
from backstay.store.leases import boot_clock
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import Store, make_services

def clock():
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGTERM)  # inside a save of this store, so the process does not end at once
        worker = threading.Thread(target=save_there)
        worker.start()
        worker.join()
    return boot_clock()

def save_there():
    other.thread("t").save({"n": 1})
    print("saved", flush=True)

other = backstay.open(sys.argv[2])
Store(SqliteStore(sys.argv[1], clock=clock), make_services("", None)).thread("t").save({"n": 1})
"""


def test_a_save_of_another_thread_meanwhile_is_acknowledged(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("one.db", "other.db")]
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *paths], check=False, capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "saved\n", "")
    assert newest_in_a_bare_copy(Path(paths[0])) == 1


def test_a_foreign_reader_does_not_delay_the_end_of_a_program(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        store.thread("t").save({"n": 0})
    command = [sys.executable, "-c", SAVE, str(path), "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM checkpoint").fetchone()
            seen = [child.stdout.readline() for _ in range(10)]
            child.send_signal(signal.SIGTERM)
            seen += child.stdout.read().split()
            assert child.wait(TIMEOUT_S / 2) == -signal.SIGTERM, "it waited for the reader"
    with backstay.open(path) as store:
        found = store.thread("t").latest()
        assert found is not None
        assert found.state["n"] >= int(seen[-1])


def test_a_handler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    program = """
import signal, sys
import backstay
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with backstay.open(sys.argv[1]) as store:
    store.thread("t").save({"n": 1})
    signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "agent.db")], check=False, capture_output=True)

    assert done.returncode == 7


def test_a_bare_copy_of_an_open_store_is_never_empty(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        assert newest_in_a_bare_copy(path) == 0, "a store without a thread, but a store"
        for name in ("bare.db", "bare.db-lock"):
            (tmp_path / name).unlink()
        store.thread("t").save({"n": 1})
        store.thread("t").save({"n": 2})

        assert newest_in_a_bare_copy(path) in (1, 2)
