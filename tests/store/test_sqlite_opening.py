"""Opening a SQLite store: what is refused stays as it was, and what is opened has settings that keep what is saved."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import Corrupted, StoreError, StoreRefused
from backstay.store.sqlite import schema
from backstay.store.sqlite.database import PAGE_BYTES, Database
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.schema import APPLICATION_ID, check_schema, migrate, newest_version, schema_script
from support.damage import fill, loaded

OPEN_AND_SAVE = """
import sys, backstay
sys.stdin.readline()
with backstay.open(sys.argv[1]) as store:
    print(store.thread(sys.argv[2]).save({"n": 1}).id)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


def make_store(path: Path) -> None:
    with backstay.open(path) as store:
        store.thread("thread").save({"n": 1}, id="first")


def plain_database(path: Path, script: str) -> None:
    """Make a database as any other program would."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def make_foreign(path: Path) -> None:
    plain_database(path, "CREATE TABLE customer (name TEXT); INSERT INTO customer VALUES ('Ann')")


def make_foreign_by_application_id(path: Path) -> None:
    plain_database(path, "PRAGMA application_id=77")


def make_foreign_by_version(path: Path) -> None:
    plain_database(path, "PRAGMA user_version=3")


def make_text(path: Path) -> None:
    path.write_text("this is a diary, not a database\n" * 200)


def make_one_byte(path: Path) -> None:
    path.write_bytes(b"x")


def make_future(path: Path) -> None:
    make_store(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version={newest_version() + 1}")


@pytest.mark.parametrize(
    "make",
    [
        make_foreign,
        make_foreign_by_application_id,
        make_foreign_by_version,
        make_text,
        make_one_byte,
        make_future,
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    before = path.read_bytes()

    with pytest.raises(StoreError, match=str(path)) as caught:
        backstay.open(path)

    assert type(caught.value) is StoreRefused
    assert caught.value.hint
    assert path.read_bytes() == before
    assert not path.with_name("agent.db-wal").exists()


def vacuum_into(original: sqlite3.Connection, path: Path) -> None:
    original.execute("VACUUM INTO ?", (str(path),))


def back_up(original: sqlite3.Connection, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as copy:
        original.backup(copy)


def dump_and_restore(original: sqlite3.Connection, path: Path) -> None:
    """Copy all rows, and the numbers that say whose file it is: a dump does not have them."""
    versions = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={newest_version()};"
    plain_database(path, "\n".join(original.iterdump()) + versions)


@pytest.mark.parametrize("copy", [vacuum_into, back_up, dump_and_restore])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_copy_that_another_program_wrote_is_a_store(
    path: Path, tmp_path: Path, copy: Callable[[sqlite3.Connection, Path], None], is_open: bool
) -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(backstay.open(tmp_path / "original.db"))
        fill(store)
        before = loaded(store)
        if not is_open:
            stack.close()
        with contextlib.closing(sqlite3.connect(tmp_path / "original.db")) as connection:
            copy(connection, path)

    with backstay.open(path) as store:
        assert loaded(store) == before
        assert store.check()
        store.thread("alpha").append({"log": ["more"]}, id="more")
        store.thread("beta").delete()
        store.compact()
        assert store.check()
    with backstay.open(tmp_path / "original.db") as store:
        assert loaded(store) == before
        assert store.get("more") is None


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match=str(tmp_path)):
        backstay.open(tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["~no-such-user-here/agent.db", "x" * 300])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreRefused, match=name[:20]):
        backstay.open(name)

    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_store_is_the_same_store(path: Path, tmp_path: Path) -> None:
    """They share their lock, and so the numbers that one writer may not give twice."""
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with backstay.open(path) as one, backstay.open(link) as other:
        root = one.thread("thread").save({"n": 0})
        branches = [store.thread("thread").fork(root, branch=name) for store, name in ((one, "a"), (other, "b"))]
        numbers = [branch.append({"log": [number]}).seq for number in range(3) for branch in branches]

        assert numbers == list(range(4, 10))
        assert one.check()
    assert not Path(f"{link}-lock").exists()


def test_another_program_may_have_switched_the_log_off(path: Path) -> None:
    with backstay.open(path) as store:  # it has no connection yet, so nothing keeps the other program out
        with contextlib.closing(sqlite3.connect(path)) as other:
            assert other.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
        store.thread("thread").save({"n": 1})
        with contextlib.closing(sqlite3.connect(path)) as other:
            assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store.check()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(StoreRefused, match=str(tmp_path)):
        backstay.open(tmp_path / "file" / "sub" / "agent.db")


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only: by its mode, or, for root, who may write anyway, by a read-only mount."""
    if os.geteuid():
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    done = subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(
            f"root may write anywhere and cannot mount here: read-only folders are not tested ({done.stderr!r})"
        )
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_new_store_in_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with read_only(folder), pytest.raises(StoreRefused, match=str(folder)):
        backstay.open(folder / "agent.db")

    assert list(folder.iterdir()) == []


def test_a_store_in_a_folder_that_became_read_only_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "agent.db"
    make_store(path)
    before = path.read_bytes()

    with read_only(folder), pytest.raises(StoreRefused, match=str(folder)):
        backstay.open(path)
    assert path.read_bytes() == before
    with backstay.open(path) as store:
        assert store.get("first") is not None


def test_a_read_only_file_is_refused() -> None:
    """Tried by somebody who may not write it: root, who may write anything, becomes nobody in a forked process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "agent.db")
        make_store(path)
        Path(folder).chmod(0o755)
        path.chmod(0o444)
        child = os.fork()
        if child == 0:
            os._exit(_open_as_nobody(path))

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == REFUSED


REFUSED = 7


def _open_as_nobody(path: Path) -> int:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        backstay.open(path).close()
    except StoreRefused as error:
        return REFUSED if str(path) in str(error) else 1
    except BaseException:
        return 2
    return 0


@pytest.mark.parametrize("umask", [0, 0o777])
def test_only_the_owner_can_read_the_files_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "agent.db"
    usual = os.umask(umask)
    try:
        store = backstay.open(path)
        store.thread("thread").save({"n": 1})
        modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in tmp_path.rglob("*")}
        store.close()
    finally:
        os.umask(usual)

    assert modes == dict.fromkeys(("agent.db", "agent.db-wal", "agent.db-shm", "agent.db-lock"), 0o600)


def test_a_sqlite_that_is_too_old_is_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))

    with pytest.raises(StoreRefused, match=r"3\.34\.1.* 3\.35 or newer") as caught:
        backstay.open(path)

    assert "newer Python" in str(caught.value)
    assert not path.exists()


def test_every_connection_keeps_what_is_acknowledged(path: Path) -> None:
    make_store(path)
    database = Database(str(path), 1.0)
    with contextlib.closing(database.connect()) as connection:
        settings = {
            name: connection.pragma(name)
            for name in (
                "journal_mode",
                "synchronous",
                "trusted_schema",
                "cell_size_check",
                "page_size",
                "auto_vacuum",
                "application_id",
                "user_version",
            )
        }

    assert settings == {
        "journal_mode": "wal",
        "synchronous": 2,  # FULL
        "trusted_schema": 0,
        "cell_size_check": 1,
        "page_size": PAGE_BYTES,
        "auto_vacuum": 2,  # incremental
        "application_id": APPLICATION_ID,
        "user_version": newest_version(),
    }


def in_memory() -> Connection:
    return sqlite3.connect(":memory:", isolation_level=None, factory=Connection)


def dump(connection: Connection) -> tuple[object, ...]:
    """Return everything that makes up a schema, without the comments that only its text has."""
    tables = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY 1, 2").fetchall()
    rows = connection.execute("SELECT * FROM counter ORDER BY 1").fetchall()
    return tables, rows, connection.pragma("user_version"), connection.pragma("application_id")


@pytest.fixture
def next_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Give Backstay two more migrations, as later releases will have; return all versions of the schema."""
    first = schema_script()
    second = first.replace("lease_seal INTEGER\n", "lease_seal INTEGER,\nnote TEXT\n")
    third = second + "\nCREATE TABLE extra (n INTEGER);\n"
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "0002_note.sql").write_text("ALTER TABLE branch ADD COLUMN note TEXT;")
    (tmp_path / "migrations" / "0003_extra.sql").write_text("CREATE TABLE extra (n INTEGER);")
    (tmp_path / "schema.sql").write_text(third)
    monkeypatch.setattr(schema, "_MIGRATIONS", tmp_path / "migrations")
    monkeypatch.setattr(schema, "_SCHEMA", tmp_path / "schema.sql")
    for cached in (schema.newest_version, schema.our_objects):
        cached.cache_clear()
    yield first, second, third
    for cached in (schema.newest_version, schema.our_objects):
        cached.cache_clear()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_migrating_from_any_version_gives_the_newest_schema(next_versions: tuple[str, ...], version: int) -> None:
    new, old = in_memory(), in_memory()
    migrate(new)
    old.executescript(next_versions[version - 1])
    old.executescript(f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={version}")
    old.executemany("INSERT INTO counter VALUES (?, ?, ?)", new.execute("SELECT * FROM counter").fetchall())
    migrate(old)

    check_schema(old, "old")
    check_schema(new, "new")
    assert (dump(old)[1:], dump(old)[2]) == (dump(new)[1:], 3)


def test_a_store_of_an_older_version_is_migrated_when_it_is_opened(path: Path, request: pytest.FixtureRequest) -> None:
    make_store(path)
    request.getfixturevalue("next_versions")
    with backstay.open(path) as store:
        assert [meta.thread_id for meta in store.threads()] != []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)


def test_migrating_twice_changes_nothing() -> None:
    connection = in_memory()
    migrate(connection)
    before = dump(connection)
    migrate(connection)

    assert dump(connection) == before


def test_processes_may_open_a_new_store_at_the_same_moment(path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN_AND_SAVE, str(path), f"thread {number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    ids = [child.communicate()[0].strip() for child in children]

    assert [child.returncode for child in children] == [0, 0, 0, 0]
    with backstay.open(path) as store:
        assert sorted(meta.id for meta in store.threads()) == sorted(ids)
        assert store.check()


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    make_store(path)

    with backstay.open(path) as store:
        assert store.check().good["checkpoints"] == 1


HEADER = {
    "magic": (0, StoreRefused),
    "page size": (16, StoreRefused),
    "version": (60, StoreRefused),
    "application": (68, StoreRefused),
    "kind of page": (100, Corrupted),
}


@pytest.mark.parametrize("what", HEADER)
def test_a_damaged_header_is_reported_and_left_as_it_is(path: Path, what: str) -> None:
    make_store(path)
    data = bytearray(path.read_bytes())
    place, error = HEADER[what]
    data[place] ^= 1
    path.write_bytes(data)

    with pytest.raises(error, match=str(path)):
        backstay.open(path)
    assert path.read_bytes() == data
