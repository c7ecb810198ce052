"""Other programs use the file: they read it, keep tables of their own in it, copy it and lock it, in any order.

A store in SQLite is an ordinary database. So after a crash any tool may be the first that opens it, any library may be
used in our own process, and every usual way to back up a database gives a copy that opens and holds what was
acknowledged before the backup began.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import importlib.util
import inspect
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.store.sqlite import SqliteStore as LangGraphStore

import backstay
from backstay.errors import StoreBusy
from backstay.store.finding import LEFTOVER
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import Store, make_services
from support.crash.kill_victims import Arena, Told, compare
from support.processes import Nursery
from support.running import Show, effort, skip_unless_ci

SEED = int(os.environ.get("BACKSTAY_SEED", "20261118"))
SQLITE = shutil.which("sqlite3")
WRITERS = 4
ORDERS = min(40, 3 * effort())
BACKUPS = min(16, 2 * effort())  # the store grows meanwhile, and each copy is read in full
LINES_BEFORE_KILL_MAX = 16
BUSY_TIMEOUT_S = 0.2
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def program() -> None:
    if SQLITE is None:
        skip_unless_ci("sqlite3 is not installed (Debian package sqlite3): other programs cannot be tested")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


# Programs that use the file -------------------------------------------------------------------------------------------


def command_line(path: str, *commands: str) -> str:
    done = subprocess.run(
        [str(SQLITE), "-cmd", ".timeout 30000", path, *commands], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def read_by_command_line(path: str) -> None:
    assert "checkpoint" in command_line(path, ".tables")
    assert command_line(path, "SELECT count(*) FROM checkpoint", "PRAGMA integrity_check").endswith("\nok\n")


def read_here(path: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            connection.execute(f"SELECT * FROM {name}").fetchall()


def read_in_another_process(path: str) -> None:
    program = f"import contextlib, sqlite3, sys\n{inspect.getsource(read_here)}\nread_here(sys.argv[1])"
    subprocess.run([sys.executable, "-S", "-c", program, path], check=True, timeout=DEADLINE_S)


def keep_items_in_it(path: str) -> None:
    with LangGraphStore.from_conn_string(path) as items:
        items.setup()
        items.put(("notes",), "key", {"n": 1})
        found = items.get(("notes",), "key")
        assert found is not None
        assert found.value == {"n": 1}


def keep_checkpoints_in_it(path: str) -> None:
    with SqliteSaver.from_conn_string(path) as saver:
        saver.setup()
        saver.put({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, empty_checkpoint(), {}, {})
        assert saver.get_tuple({"configurable": {"thread_id": "t"}}) is not None


def read_with_pandas(path: str) -> None:
    import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with contextlib.closing(sqlite3.connect(path)) as connection:
        pandas.read_sql("SELECT * FROM checkpoint", connection)


TOOLS: dict[str, Callable[[str], object]] = {
    "the sqlite3 program": read_by_command_line,
    "Python's module here": read_here,
    "Python's module in another process": read_in_another_process,
    "LangGraph's store": keep_items_in_it,
    "LangGraph's saver": keep_checkpoints_in_it,
}
if importlib.util.find_spec("pandas"):
    TOOLS["pandas"] = read_with_pandas


def check_all(path: str, told: Told) -> None:
    """Check that the store is sound, holds all that was told and nothing else, and takes the next save."""
    found = compare(path, told)
    damage = [finding for finding in found.findings if not finding.startswith(LEFTOVER)]
    assert (found.lost, found.wrong, found.broken, found.undead, damage) == ([], [], [], [], [])
    with backstay.open(path) as store:
        assert store.thread("after").save({"n": 1}).step == 1
        store.thread("after").delete()
        assert store.check()


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("held", [False, True], ids=["closed here", "open here"])
def test_after_crashes_any_tools_may_open_the_file_first_in_any_order(
    tmp_path: Path, nursery: Nursery, show: Show, held: bool
) -> None:
    rng = random.Random(SEED)
    for number in range(ORDERS):
        order = rng.sample(list(TOOLS), len(TOOLS))
        folder = tmp_path / f"{number}"
        folder.mkdir()
        arena = Arena(nursery, folder)
        with backstay.open(arena.path) if held else contextlib.nullcontext() as store:
            for generation, tool in enumerate(order):
                victim = arena.start("w", generation)
                arena.read_until(victim, rng.randint(1, LINES_BEFORE_KILL_MAX))
                arena.kill(victim)
                try:
                    TOOLS[tool](arena.path)
                    if store is not None:
                        store.thread("held").append({"log": [tool]})
                        store.thread("held").delete()
                    check_all(arena.path, arena.told)
                except Exception as error:
                    raise AssertionError(f"seed {SEED}, {order[: generation + 1]}") from error
        assert arena.killed == len(TOOLS)

    show(f"tools after crashes, {'open' if held else 'closed'} here", f"seed {SEED}, {ORDERS} orders of {len(TOOLS)}")


@pytest.mark.crash
@pytest.mark.effort
def test_any_tools_may_use_the_file_while_four_processes_save(tmp_path: Path, nursery: Nursery, show: Show) -> None:
    rng, arena, uses = random.Random(SEED), Arena(nursery, tmp_path), 0
    victims = [arena.start(f"w{number}", 0) for number in range(WRITERS)]
    with backstay.open(arena.path) as store:
        for victim in victims:
            arena.read_until(victim, 2)
        for _ in range(ORDERS):
            for tool in rng.sample(list(TOOLS), len(TOOLS)):
                TOOLS[tool](arena.path)
                store.thread("held").append({"log": [tool]})
                victim = rng.choice(victims)
                arena.read_until(victim, victim.lines + 2)
                uses += 1
        log = store.thread("held").latest()
        assert log is not None
        assert len(log.state["log"]) == uses
        store.thread("held").delete()
    for victim in victims:
        arena.kill(victim)

    show("tools while four processes save", f"{uses} uses, {len(arena.told.acks)} saves")
    check_all(arena.path, arena.told)


# Backups --------------------------------------------------------------------------------------------------------------


def connection_backup(path: str, target: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(target)) as copied:
        source.backup(copied)


def copy_under_our_lock(path: str, target: str) -> None:
    with open(f"{path}-lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _copy_both(path, target)


def copy_under_a_read_lock(path: str, target: str) -> None:
    """Do as Litestream does: a read transaction keeps all programs from starting the log again while it is copied."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM checkpoint").fetchone()
        _copy_both(path, target)
        reader.execute("COMMIT")


def _copy_both(path: str, target: str) -> None:
    shutil.copyfile(path, target)
    with contextlib.suppress(FileNotFoundError):  # a folded log may be gone
        shutil.copyfile(f"{path}-wal", f"{target}-wal")


def store_backup(path: str, target: str) -> None:
    with backstay.open(path) as store:
        store.backup(target)


WAYS: dict[str, Callable[[str, str], object]] = {
    ".backup": lambda path, target: command_line(path, f".backup '{target}'"),
    "VACUUM INTO": lambda path, target: command_line(path, f"VACUUM INTO '{target}'"),
    "Connection.backup": connection_backup,
    "files under our lock": copy_under_our_lock,
    "files under a read lock": copy_under_a_read_lock,
    "store.backup": store_backup,
}


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("way", WAYS)
def test_a_backup_while_four_processes_save_holds_what_was_acknowledged_before(
    tmp_path: Path, nursery: Nursery, show: Show, way: str
) -> None:
    rng, arena = random.Random(SEED), Arena(nursery, tmp_path)
    victims = [arena.start(f"w{number}", 0) for number in range(WRITERS)]
    copies: list[tuple[str, Told]] = []
    for number in range(BACKUPS):
        victim = rng.choice(victims)
        arena.read_until(victim, victim.lines + rng.randint(1, LINES_BEFORE_KILL_MAX))
        before, target = copy.deepcopy(arena.told), str(tmp_path / f"copy{number}.db")
        WAYS[way](arena.path, target)
        copies.append((target, before))
    for victim in victims:
        arena.kill(victim)

    show(f"backups by {way}", f"{BACKUPS} while {len(arena.told.acks)} saves were made")
    for target, before in copies:
        # Of saves that were refused or unknown then, some were repeated before the copy was made.
        check_all(target, Told(before.acks))
    check_all(arena.path, arena.told)


@pytest.mark.crash
@pytest.mark.effort
def test_a_bare_copy_of_the_main_file_is_at_worst_a_little_old(tmp_path: Path, nursery: Nursery, show: Show) -> None:
    """The log is not copied, so what was not folded yet is not in the copy; what is in it is whole."""
    rng, arena = random.Random(SEED), Arena(nursery, tmp_path)
    victims = [arena.start(f"w{number}", 0) for number in range(WRITERS)]
    copies: list[tuple[int, int]] = []  # how many saves are in it, and how many were acknowledged
    while len([stored for stored, _ in copies if stored]) < BACKUPS:  # the log is folded now and then
        victim = rng.choice(victims)
        arena.read_until(victim, victim.lines + LINES_BEFORE_KILL_MAX)
        target, acknowledged = str(tmp_path / f"copy{len(copies)}.db"), len(arena.told.acks)
        with open(f"{arena.path}-lock", "a") as lock:  # a copy made while the log is folded would mix two moments
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.copyfile(arena.path, target)
        with backstay.open(target) as store:
            copies.append((sum(head.seq for head in store.threads()), acknowledged))
    for victim in victims:
        arena.kill(victim)
    for number in range(len(copies)):
        check_all(str(tmp_path / f"copy{number}.db"), Told())

    show("bare copies", f"saves in each, of those acknowledged: {copies}")
    assert [stored for stored, _ in copies] == sorted(stored for stored, _ in copies)
    check_all(arena.path, arena.told)


# Locks ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked_here(path: str) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("COMMIT")


@contextlib.contextmanager
def locked_by_the_program(path: str) -> Iterator[None]:
    with subprocess.Popen([str(SQLITE), path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write("BEGIN IMMEDIATE;\n.print locked\n")
        other.stdin.flush()
        assert other.stdout.readline() == "locked\n"
        yield
        other.communicate("COMMIT;\n", timeout=DEADLINE_S)


@pytest.mark.parametrize("locked", [locked_here, locked_by_the_program])
def test_a_foreign_write_lock_makes_a_save_raise_and_loses_nothing(
    tmp_path: Path, locked: Callable[[str], contextlib.AbstractContextManager[None]]
) -> None:
    path = str(tmp_path / "agent.db")
    with Store(SqliteStore(path, timeout_s=BUSY_TIMEOUT_S), make_services("", None)) as store:
        thread = store.thread("t")
        thread.append({"log": [1]}, id="first")
        with locked(path):
            with pytest.raises(StoreBusy, match="another program held a lock"):
                thread.append({"log": [2]}, id="second")
            assert thread.get("second") is None
        assert thread.append({"log": [2]}, id="second").state == {"log": [1, 2]}
        assert store.check()
