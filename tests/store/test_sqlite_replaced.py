"""The files of a SQLite store are deleted, moved or replaced while it is open: it notices before it acknowledges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import BackstayError, Corrupted, OutcomeUnknown, StoreRefused
from backstay.store.leases import ClockReading, boot_clock
from backstay.store.sqlite import files
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.access import access_of
from backstay.thread.store import Store, make_services
from support.processes import ended_well, forked

OTHER = """
import json, sys, backstay
from backstay.store.sqlite import files
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import Store, make_services
stores = []
for line in sys.stdin:
    verb, path, name = json.loads(line)
    try:
        if verb == "open":
            stores.append(Store(SqliteStore(path, timeout_s=0.5), make_services("", None)))
        elif verb == "save":
            stores[-1].thread("other").save({"n": name}, id=name)
        else:
            stores.pop().close()
        print("done", flush=True)
    except backstay.BackstayError as error:
        print(type(error).__name__, flush=True)
"""


class Other:
    """Another process that opens the path, saves into whatever is there, and remembers what was acknowledged."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.acknowledged: list[str] = []

    def ask(self, verb: str, path: Path, name: str = "") -> bool:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, str(path), name]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer, "the other process died"
        return answer == "done"

    def save(self, path: Path, name: str) -> None:
        if self.ask("save", path, name):
            self.acknowledged.append(name)


@pytest.fixture(scope="module")
def other_process() -> Iterator[Other]:
    other = Other()
    with other.process:
        yield other


@pytest.fixture
def other(other_process: Other) -> Other:
    other_process.acknowledged.clear()
    return other_process


class Victim:
    """A store whose clock can be made to do something in the middle of a transaction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.strike: Callable[[], None] | None = None
        self.struck = 0
        self.store = Store(SqliteStore(str(path), clock=self._clock), make_services("", None))
        self.thread = self.store.thread("mine")  # knows its head once it has saved, and then reads nothing
        self.acknowledged: list[str] = []
        self.failures: list[BackstayError] = []

    def _clock(self) -> ClockReading:
        strike, self.strike = self.strike, None
        if strike is not None:
            strike()
            self.struck += 1
        return boot_clock()

    def save(self, name: str) -> None:
        try:
            self.thread.save({"n": name}, id=name)
            self.acknowledged.append(name)
        except BackstayError as error:
            self.failures.append(error)


def companion(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def make_elsewhere(path: Path) -> Path:
    """Make another store of the same kind, with other content."""
    elsewhere = path.with_name("elsewhere.db")
    with backstay.open(elsewhere) as store:
        store.thread("foreign").save({"n": 0}, id="foreign")
    return elsewhere


def copy(source: Path, target: Path) -> None:
    """Copy by another program: whoever closes a descriptor of the database here drops the store's locks."""
    subprocess.run(["cp", "-r", source, target], check=True)


def unlink(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        companion(path, suffix).unlink(missing_ok=True)


def replace_by_copy(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        file = companion(path, suffix)
        copy(file, file.with_name("copy"))
        os.replace(file.with_name("copy"), file)


def move_folder(path: Path) -> None:
    os.rename(path.parent, path.parent.with_name("moved"))
    path.parent.mkdir()


def replace_folder(path: Path) -> None:
    copy(path.parent, path.parent.with_name("copied"))
    os.rename(path.parent, path.parent.with_name("moved"))
    os.rename(path.parent.with_name("copied"), path.parent)


def restore_backup(path: Path) -> None:
    elsewhere = make_elsewhere(path)
    os.replace(elsewhere, path)
    unlink(path, "-wal", "-shm")


WAYS: dict[str, Callable[[Path], None]] = {
    "database deleted": lambda path: unlink(path, ""),
    "all deleted": lambda path: unlink(path, "", "-wal", "-shm"),
    "all and the lock deleted": lambda path: unlink(path, "", "-wal", "-shm", "-lock"),
    "database moved": lambda path: os.rename(path, path.with_name("moved.db")),
    "folder moved": move_folder,
    "folder moved, and nothing is at its path": lambda path: os.rename(path.parent, path.parent.with_name("moved")),
    "folder replaced by a copy": replace_folder,
    "database replaced by a copy": lambda path: replace_by_copy(path, ""),
    "database replaced by another": lambda path: os.replace(make_elsewhere(path), path),
    "backup restored": restore_backup,
    "all replaced by copies": lambda path: replace_by_copy(path, "", "-wal", "-shm"),
    "log deleted": lambda path: unlink(path, "-wal"),
    "log replaced by a copy": lambda path: replace_by_copy(path, "-wal"),
    "index deleted": lambda path: unlink(path, "-shm"),
    "index replaced by a copy": lambda path: replace_by_copy(path, "-shm"),
    "log and index deleted": lambda path: unlink(path, "-wal", "-shm"),
    "database emptied": lambda path: os.truncate(path, 0),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder / "agent.db"


def is_told(error: BaseException, way: str) -> bool:
    """Tell whether an error says what happened. No look at names tells that a file was emptied: that shows later."""
    if way == "database emptied" and isinstance(error, Corrupted | OutcomeUnknown | StoreRefused):
        return True
    return type(error) is StoreRefused and "while the store was open" in str(error)


def check_refused(victim: Victim, way: str) -> None:
    """Everything is refused by now, says what happened, and nothing more is acknowledged."""
    before = list(victim.acknowledged)
    victim.save("after")
    assert victim.acknowledged == before
    assert is_told(victim.failures[-1], way)
    assert str(victim.path) in str(victim.failures[-1])
    for read in (
        lambda: victim.store.thread("mine").latest(),
        lambda: list(victim.store.threads()),
        lambda: victim.store.get("first"),
        lambda: victim.store.check(),
        lambda: victim.store.compact(),
    ):
        with pytest.raises(BackstayError) as caught:
            read()
        assert is_told(caught.value, way)


def ids_at(path: Path) -> set[str]:
    with backstay.open(path) as store:
        assert store.check()
        return {meta.id for head in store.threads() for meta in store.thread(head.thread_id).history()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("saves_before", [0, 2])
def test_nothing_is_acknowledged_after_the_files_were_taken_away(path: Path, way: str, saves_before: int) -> None:
    victim = Victim(path)
    for number in range(saves_before):
        victim.save(f"before {number}")
    if not saves_before:
        list(victim.store.threads())  # a connection is open, and nothing was ever written through it
    assert len(victim.acknowledged) == saves_before

    WAYS[way](path)
    victim.save("first")

    assert len(victim.acknowledged) == saves_before
    assert is_told(victim.failures[0], way)
    check_refused(victim, way)
    victim.store.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_save_under_way_when_the_files_are_taken_is_not_acknowledged(path: Path, way: str) -> None:
    victim = Victim(path)
    victim.save("before")
    victim.strike = lambda: WAYS[way](path)
    victim.save("first")

    assert victim.struck == 1
    assert victim.acknowledged == ["before"]
    assert type(victim.failures[0]) is OutcomeUnknown
    assert victim.failures[0].checkpoint == "first"
    assert "while the store was open" in str(victim.failures[0].__cause__)
    check_refused(victim, way)
    victim.store.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("closes_first", [True, False])
def test_what_another_process_saves_into_the_new_file_stays(
    path: Path, way: str, closes_first: bool, other: Other
) -> None:
    """Neither a write of the first store nor its close takes anything from the file that is at the path now."""
    victim = Victim(path)
    victim.save("before")
    WAYS[way](path)
    opened = other.ask("open", path)
    if opened:
        other.save(path, "one")
    victim.save("first")
    if opened:
        other.save(path, "two")
    check_refused(victim, way)
    if opened and closes_first:
        other.ask("close", path)
    victim.store.close()
    if opened and not closes_first:
        other.save(path, "three")
        other.ask("close", path)

    assert victim.acknowledged == ["before"]
    if other.acknowledged:
        assert set(other.acknowledged) <= ids_at(path)
    else:
        could_not = {"database deleted", "database moved", "database emptied", "log deleted", "log replaced by a copy"}
        could_not |= {"folder moved, and nothing is at its path"}
        assert way in could_not, "it could have saved there"


@pytest.mark.parametrize("way", WAYS)
def test_it_is_noticed_too_after_the_folder_was_left_alone_for_long(
    path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then only the folder is looked at."""
    monkeypatch.setattr(files, "FOLDER_SETTLED_NS", 20_000_000)
    victim = Victim(path)
    victim.save("before")
    while time.time_ns() - path.parent.stat().st_ctime_ns < 60_000_000:
        os.sched_yield()
    victim.save("settled")
    backend = access_of(victim.store).store
    assert isinstance(backend, SqliteStore)
    assert backend._readers[0].files is not None
    assert backend._readers[0].files._folder is not None, "the shorter way was not taken"

    WAYS[way](path)
    victim.save("first")
    assert victim.acknowledged == ["before", "settled"]
    check_refused(victim, way)
    victim.store.close()


def test_files_moved_away_and_back_are_the_same_unless_somebody_looked_meanwhile(path: Path) -> None:
    victim, away = Victim(path), path.parent.with_name("away")
    victim.save("before")
    os.rename(path.parent, away)
    os.rename(away, path.parent)
    victim.save("unseen")
    assert victim.acknowledged == ["before", "unseen"]

    os.rename(path.parent, away)
    victim.save("seen")
    os.rename(away, path.parent)
    check_refused(victim, "folder moved")
    victim.store.close()
    assert ids_at(path) == {"before", "unseen"}


def test_a_link_that_leads_elsewhere_is_noticed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    path.touch()
    link.symlink_to(path)
    victim = Victim(link)
    victim.save("before")
    assert victim.acknowledged == ["before"]

    elsewhere = make_elsewhere(path)
    link.unlink()
    link.symlink_to(elsewhere)
    victim.save("first")
    assert victim.acknowledged == ["before"]
    check_refused(victim, "")
    victim.store.close()
    assert ids_at(elsewhere) == {"foreign"}


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_connections_after_a_fork_are_to_the_same_file_or_refused(path: Path) -> None:
    victim = Victim(path)
    victim.save("before")

    def child() -> None:
        victim.save("forked")
        assert victim.acknowledged == ["before", "forked"]

    assert ended_well(forked(child))
    restore_backup(path)

    def lost_child() -> None:
        victim.save("lost")
        check_refused(victim, "")
        assert victim.acknowledged == ["before"]

    assert ended_well(forked(lost_child))
    check_refused(victim, "")
    victim.store.close()
    assert ids_at(path) == {"foreign"}


OLDER, ANOTHER, NOTHING_LIKE_IT = "an older copy", "another store", "zeros"


@pytest.mark.parametrize("content", [OLDER, ANOTHER, NOTHING_LIKE_IT])
@pytest.mark.parametrize("folded", [True, False])
def test_content_copied_over_the_file_in_place_is_never_called_fine(path: Path, content: str, folded: bool) -> None:
    """The same file with other bytes in it: nobody sees that from outside. It shows as damage, or nothing is lost."""
    victim = Victim(path)
    victim.save("before")
    older = path.with_name("older.db")
    victim.store.compact()
    copy(path, older)
    for number in range(20):
        victim.save(f"more {number}")
    if folded:
        victim.store.compact()
    zeros = path.with_name("zeros")
    zeros.write_bytes(bytes(path.stat().st_size))
    source = {OLDER: older, ANOTHER: make_elsewhere(path), NOTHING_LIKE_IT: zeros}[content]
    copy(source, path)
    for number in range(5):
        victim.save(f"after {number}")
    victim.store.close()

    acknowledged = [name for name in victim.acknowledged if name.startswith("after")]
    try:
        left = ids_at(path)
    except (BackstayError, AssertionError):
        return  # opening it or verify() told
    assert set(acknowledged) <= left
