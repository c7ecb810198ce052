"""Moving in what is damaged, hostile, encrypted, old or in use; and an import that is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Send

import backstay
from backstay.langgraph import BackstaySaver
from backstay.langgraph.importer.importer import import_langgraph
from support.langgraph.moving import STORIES, Origin, account, config_of, go_on, postgres_origin, sqlite_origin, tell
from support.processes import Nursery
from support.running import RAM_FOLDER, Show

SERDE = JsonPlusSerializer()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Origin]:
    with sqlite_origin(tmp_path / "stock.sqlite") as made:
        yield made


@pytest.fixture
def tables(postgres: Any) -> Iterator[Origin]:
    with postgres_origin(postgres) as made:
        yield made


@pytest.fixture
def target() -> Iterator[backstay.Store]:
    with backstay.open("memory:") as opened:
        yield opened
        assert opened.check()


class Verbatim:
    """A serializer that opens nothing: values are what is stored."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        raise AssertionError("nothing is written here")

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return data


def id_of(config: Any) -> str:
    return str(config["configurable"]["checkpoint_id"])


def values_in(store: backstay.Store, config: Any, serde: Any = None) -> dict[str, Any]:
    found = BackstaySaver(store, serde=serde).get_tuple(config)
    assert found is not None
    return found.checkpoint["channel_values"]


# Damage -------------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-3],
    "a byte that begins no value": lambda data: data[:1] + b"\xc1" + data[2:],
    "a length beyond the end": lambda data: b"\xdf\xff\xff\xff\xff" + data[1:],
    "more than one value": lambda data: data + b"\x01",
    "nothing": lambda data: b"",
    "no checkpoint": lambda data: ormsgpack.packb({"id": "another"}),
    "versions that are none": lambda data: data.replace(b"\xb0channel_versions\x81", b"\xb0channel_versions\x91"),
    "no map": lambda data: ormsgpack.packb([1, 2]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_others_are_carried(
    damage: str, file: Origin, target: backstay.Store
) -> None:
    first = file.put("t", {"x": ["first"]})
    bad = file.put("t", {"x": ["bad"]}, first)
    child = file.put("t", {"x": ["child"]}, bad)
    file.put("u", {"x": ["other"]})
    ((data,),) = file.execute("SELECT checkpoint FROM checkpoints WHERE checkpoint_id = ?", id_of(bad))
    changed = DAMAGES[damage](data)
    assert changed != data
    file.execute("UPDATE checkpoints SET checkpoint = ? WHERE checkpoint_id = ?", changed, id_of(bad))

    report = import_langgraph(target, file.where)

    assert not report
    assert report.stored == 3
    assert [(note.thread, id_of(bad) in note.where) for note in report.missing] == [("t", True)]
    assert [note.what for note in report.notes] == [f"its parent {id_of(bad)} is missing"]
    assert values_in(target, child) == {"x": ["child"]}
    found = BackstaySaver(target).get_tuple(child)
    assert found is not None
    assert found.parent_config is not None
    assert id_of(found.parent_config) == id_of(bad)


def test_a_damaged_write_is_named_and_the_rest_is_carried(file: Origin, target: backstay.Store) -> None:
    config = file.put("t", {"x": [1]})
    file.saver.put_writes(config, [("a", [1, 2, 3]), ("b", 2)], "task")
    file.execute("UPDATE {writes} SET {value} = ? WHERE idx = 0", b"\x93\x01")

    report = import_langgraph(target, file.where)

    assert report.stored == 1
    assert [note.what.partition(":")[0] for note in report.missing] == ["the write 0 of task task to 'a' is damaged"]
    found = BackstaySaver(target).get_tuple(config)
    assert found is not None
    assert found.pending_writes == [("task", "b", 2)]


def test_a_damaged_channel_is_named_and_the_rest_is_carried(tables: Origin, target: backstay.Store) -> None:
    config = tables.put("t", {"good": [1], "bad": [2], "small": 3})
    tables.execute("UPDATE checkpoint_blobs SET blob = ? WHERE channel = 'bad'", b"\x93\x01")

    report = import_langgraph(target, tables.where)

    assert not report
    assert [note.what.startswith("the channel 'bad'") for note in report.missing] == [True]
    assert values_in(target, config) == {"good": [1], "small": 3}


def test_a_file_with_a_damaged_page_gives_what_can_be_read(file: Origin, target: backstay.Store) -> None:
    for number in range(40):
        file.put(f"thread-{number:02}", {"x": [os.urandom(3000)]})
    file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.connection.close()
    path = Path(file.where)
    data = bytearray(path.read_bytes())
    page = len(data) // 4096 // 2
    data[page * 4096 : (page + 1) * 4096] = b"\xff" * 4096
    path.write_bytes(data)

    report = import_langgraph(target, file.where)

    assert not report
    assert 20 < report.stored < 40
    assert len(report.missing) + len(report.refused) + report.stored >= 40


# What must not be opened --------------------------------------------------------------------------------------------


def hostile(flag: Path) -> bytes:
    """Return a value that runs a command when LangGraph's serializer opens it: a constructor with one argument."""
    return ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(["os", "system", f"touch {flag}"])))


def test_bytes_that_name_a_function_are_carried_and_never_run(
    file: Origin, tables: Origin, target: backstay.Store, tmp_path: Path
) -> None:
    flag = tmp_path / "ran"
    data = hostile(flag)
    SERDE.loads_typed(("msgpack", data))
    assert flag.exists(), "the bytes would run"
    flag.unlink()
    for origin in (file, tables):
        config = origin.put(origin.kind, {"x": ["harmless"]})
        origin.saver.put_writes(config, [("x", ["harmless"])], "task")
        origin.execute("UPDATE {writes} SET {value} = ?", data)
        if origin is tables:
            origin.execute("UPDATE checkpoint_blobs SET blob = ?", data)
        else:
            ((whole,),) = origin.execute("SELECT checkpoint FROM checkpoints")
            assert whole.count(ormsgpack.packb(["harmless"])) == 1
            origin.execute("UPDATE checkpoints SET checkpoint = ?", whole.replace(ormsgpack.packb(["harmless"]), data))

        assert import_langgraph(target, origin.where)

        assert values_in(target, config, Verbatim()) == {"x": ("msgpack", data)}
        found = BackstaySaver(target, serde=Verbatim()).get_tuple(config)
        assert found is not None
        assert found.pending_writes == [("task", "x", ("msgpack", data))]
        assert import_langgraph(target, origin.where).present == 1
    assert not flag.exists()


def test_pickles_are_left_behind_and_named(file: Origin, tables: Origin, target: backstay.Store) -> None:
    for origin in (file, tables):
        config = origin.put(origin.kind, {"x": [1], "y": [2]})
        origin.saver.put_writes(config, [("x", [1]), ("y", [2])], "task")
        origin.execute("UPDATE {writes} SET type = 'pickle' WHERE channel = 'y'")
    tables.execute("UPDATE checkpoint_blobs SET type = 'pickle' WHERE channel = 'y'")
    whole = file.put("pickled", {"x": [1]})
    file.execute("UPDATE checkpoints SET type = 'pickle' WHERE checkpoint_id = ?", id_of(whole))

    of_file, of_tables = import_langgraph(target, file.where), import_langgraph(target, tables.where)

    assert of_file.stored == of_tables.stored == 1
    assert [note.what for note in of_file.missing] == [
        "cannot be stored: has the type 'pickle', which is never loaded",
        "the write 1 of task task to 'y' is a pickle, and pickles are never loaded: skipped",
    ]
    assert [note.what for note in of_tables.missing] == [
        "the channel 'y' is a pickle, and pickles are never loaded: skipped",
        "the write 1 of task task to 'y' is a pickle, and pickles are never loaded: skipped",
    ]


# Encrypted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_an_encrypted_source_comes_with_its_key(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, target: backstay.Store
) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    if kind == "sqlite":
        made = sqlite_origin(tmp_path / "sealed.sqlite", serde)
    else:
        made = postgres_origin(request.getfixturevalue("postgres"), serde)
    with made as origin:
        tell(origin.saver)

        report = import_langgraph(target, origin.where, serde=serde)

        assert report, str(report)
        assert report.notes == ()
        saver = BackstaySaver(target, serde=serde)
        for name in STORIES:
            assert account(saver, name) == account(origin.saver, name)
        again = import_langgraph(target, origin.where, serde=serde)
        assert (again.stored, again.present) == (0, report.stored)
        stored = BackstaySaver(target, serde=Verbatim()).get_tuple(config_of("talk"))
        assert stored is not None
        assert {tag.partition("+")[2] for tag, _ in stored.checkpoint["channel_values"].values()} == {"aes"}
        assert go_on(saver, "talk") == go_on(origin.saver, "talk")


def test_ciphertext_is_carried_over_without_a_key_too(postgres: Any, target: backstay.Store) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    with postgres_origin(postgres, serde) as origin:
        config = origin.put("t", {"secret": ["list"], "small": "in plain text"})
        ((blob,),) = origin.execute("SELECT blob FROM checkpoint_blobs")

        report = import_langgraph(target, origin.where)

    assert report
    assert ["in plain text" in note.what for note in report.notes] == [True]
    assert values_in(target, config, Verbatim())["secret"] == ("msgpack+aes", blob)


def test_a_file_that_is_encrypted_as_a_whole_is_named(tmp_path: Path, target: backstay.Store) -> None:
    right, wrong = (EncryptedSerializer.from_pycryptodome_aes(key=key * 16) for key in (b"r", b"w"))
    with sqlite_origin(tmp_path / "sealed.sqlite", right) as origin:
        origin.put("t", {"x": [1]})

        without, mistaken = import_langgraph(target, origin.where), import_langgraph(target, origin.where, serde=wrong)

    assert without.stored == mistaken.stored == 0
    assert "encrypted as a whole (msgpack+aes)" in without.missing[0].what
    assert "cannot be decrypted" in mistaken.missing[0].what


# Old ----------------------------------------------------------------------------------------------------------------


def test_json_of_old_is_carried_over_as_it_is(file: Origin, target: backstay.Store) -> None:
    config = file.put("t", {"x": [1]})
    envelope = {"lc": 2, "type": "constructor", "id": ["uuid", "UUID"], "kwargs": {"hex": "0" * 32}}
    whole = {
        "v": 1,
        "id": id_of(config),
        "ts": "2024-01-01T00:00:00+00:00",
        "channel_values": {"x": [1, 2.5, None], "named": envelope},
        "channel_versions": {"x": 1, "named": 2},
        "versions_seen": {},
        "pending_sends": [],
    }
    text = json.dumps(whole, indent=1).encode()
    file.execute("UPDATE checkpoints SET type = 'json', checkpoint = ?", text)

    assert import_langgraph(target, file.where)

    stored = values_in(target, config, Verbatim())
    assert stored["named"][0] == "json"
    assert stored["named"][1] in text
    assert BackstaySaver(target, serde=SERDE).get_tuple(config) == file.saver.get_tuple(config)


def test_metadata_of_old_files_may_be_msgpack(file: Origin, target: backstay.Store) -> None:
    config = file.put("t", {"x": [1]})
    file.execute("UPDATE checkpoints SET metadata = ?", ormsgpack.packb({"source": "loop", "step": 3, "who": "me"}))

    assert import_langgraph(target, file.where)

    found = BackstaySaver(target).get_tuple(config)
    assert found is not None
    assert found.metadata == {"source": "loop", "step": 3, "who": "me"}


def test_a_file_from_before_task_paths_is_read(file: Origin, target: backstay.Store) -> None:
    config = file.put("t", {"x": [1]})
    file.saver.put_writes(config, [("x", [1])], "task")
    file.connection.execute("ALTER TABLE writes DROP COLUMN task_path")

    assert import_langgraph(target, file.where)

    found = BackstaySaver(target).get_tuple(config)
    assert found is not None
    assert found.pending_writes == [("task", "x", [1])]


def test_sends_of_before_version_4_are_where_langgraph_looks_for_them(
    file: Origin, tables: Origin, target: backstay.Store
) -> None:
    sends = [Send("work", {"number": number}) for number in range(3)]
    old: dict[str, Any] = {"v": 3, "channel_versions": {"x": "0001"}}
    parent = tables.put("tables", {"x": [0]}, **old)
    tables.saver.put_writes(parent, [("__pregel_tasks", sends[0]), ("x", 1)], "a", "path~2")
    tables.saver.put_writes(parent, [("__pregel_tasks", sends[1]), ("__pregel_tasks", sends[2])], "b", "path~1")
    child = tables.put("tables", {"x": [1]}, parent, **old)
    in_file = file.put("file", {"x": [1]}, pending_sends=sends, **old)

    assert import_langgraph(target, tables.where)
    assert import_langgraph(target, file.where)

    found = BackstaySaver(target, serde=SERDE).get_tuple(child)
    assert found is not None
    assert found.checkpoint["channel_values"]["__pregel_tasks"] == [sends[1], sends[2], sends[0]]
    for saver, config in ((tables.saver, child), (file.saver, in_file)):
        assert BackstaySaver(target, serde=SERDE).get_tuple(config) == saver.get_tuple(config)


def test_a_channel_that_is_marked_as_empty_is_absent(tables: Origin, target: backstay.Store) -> None:
    config = tables.put("t", {"x": [1]}, channel_versions={"x": "1", "gone": "2"})
    tables.execute("INSERT INTO checkpoint_blobs VALUES ('t', '', 'gone', '2', 'empty', NULL)")

    report = import_langgraph(target, tables.where)

    assert report, str(report)
    assert BackstaySaver(target).get_tuple(config) == tables.saver.get_tuple(config)
    assert values_in(target, config) == {"x": [1]}


def test_numbers_that_msgpack_has_no_room_for_are_kept(tables: Origin, target: backstay.Store) -> None:
    """PostgreSQL keeps them as decimal numbers; a large float comes back as an integer, there as here."""
    exact = {"wide": 2**80, "negative": -(2**70), "tiny": 5e-324, "text": "é\u2028", "no": None, "yes": True}
    config = tables.put("t", {**exact, "huge": 1e30})

    assert import_langgraph(target, tables.where)

    stock = tables.saver.get_tuple(config)
    assert stock is not None
    assert values_in(target, config, SERDE) == stock.checkpoint["channel_values"] == {**exact, "huge": 10**30}


# In use, read-only, large -------------------------------------------------------------------------------------------


def test_a_file_in_use_is_read_with_its_log_and_not_changed(file: Origin, target: backstay.Store) -> None:
    tell(file.saver, "talk")
    file.connection.execute("BEGIN IMMEDIATE")
    file.connection.execute("DELETE FROM checkpoints")  # not committed: nobody sees it
    path, log = Path(file.where), Path(file.where + "-wal")
    before = (path.read_bytes(), log.read_bytes())

    report = import_langgraph(target, file.where)

    assert report.stored == 10
    assert (path.read_bytes(), log.read_bytes()) == before
    assert len(before[1]) > len(before[0])
    file.connection.rollback()


READ_ONLY = """
import os, sys
import backstay
from backstay.langgraph.importer.importer import import_langgraph
with backstay.open("memory:") as store:
    if os.geteuid() == 0:
        os.setuid(65534)
    assert not os.access(os.path.dirname(sys.argv[1]), os.W_OK)
    print(import_langgraph(store, sys.argv[1]).stored)
"""


def test_a_file_that_nobody_may_write_to_is_read(file: Origin) -> None:
    tell(file.saver, "diary")
    file.connection.close()
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copy(file.where, folder / "stock.sqlite")
        folder.chmod(0o555)
        program = [sys.executable, "-c", READ_ONLY, str(folder / "stock.sqlite")]
        done = subprocess.run(program, capture_output=True, text=True, check=False)

        assert (done.stdout, done.returncode) == ("13\n", 0), done.stderr
        assert [path.name for path in folder.iterdir()] == ["stock.sqlite"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_memory_does_not_grow_with_the_source(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, show: Show
) -> None:
    origin: Origin = request.getfixturevalue("file" if kind == "sqlite" else "tables")
    config = None
    for _ in range(50):
        config = origin.put("big", {"x": [os.urandom(200_000)]}, config)
    with backstay.open(tmp_path / "target.db") as store:
        tracemalloc.start()
        report = import_langgraph(store, origin.where)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    show(f"most memory while 10 MB were imported ({kind})", f"{peak / 1e6:.1f} MB")

    assert report.stored == 50
    assert peak < 3_000_000


# Killed -------------------------------------------------------------------------------------------------------------


@pytest.mark.crash
def test_an_import_that_is_killed_anywhere_is_completed_by_the_next(file: Origin, tmp_path: Path, show: Show) -> None:
    tell(file.saver, "fan")
    root = file.put("forked", {"x": [0]})
    for number in range(2):
        child = file.put("forked", {"x": [0, number]}, root)
        file.saver.put_writes(child, [("x", [number])], "task")
    stock = {name: list(file.saver.list(config_of(name))) for name in ("fan", "forked")}
    ram = (RAM_FOLDER if RAM_FOLDER.is_dir() else tmp_path) / f"moving-{os.getpid()}"
    counted, total, kills, partial = tmp_path / "counted", 6, 0, 0
    with Nursery() as nursery:

        def run(deadline: int, after: bool) -> int:
            shutil.rmtree(ram, ignore_errors=True)
            ram.mkdir()
            counted.unlink(missing_ok=True)
            given = [str(ram / "store.db"), file.where, deadline, after]
            return nursery.wait(nursery.start("support.langgraph.moving:import_until", given, str(counted)))

        try:
            assert run(0, False) == 0
            calls = int(counted.read_text(encoding="utf-8"))
            for deadline in range(1, calls + 1):
                assert run(deadline, after=deadline % 2 == 0) == -signal.SIGKILL
                kills += 1
                with backstay.open(ram / "store.db") as store:
                    assert store.check(), "what an import has stored is whole at any moment"
                    report = import_langgraph(store, file.where)
                    assert report, str(report)
                    assert (report.stored + report.present, report.notes) == (total, ())
                    partial += 0 < report.present < total
                    for name, tuples in stock.items():
                        assert list(BackstaySaver(store).list(config_of(name))) == tuples
        finally:
            shutil.rmtree(ram, ignore_errors=True)
    show("imports from LangGraph killed", f"{kills} at {calls} calls, {partial} of them half done")

    assert calls > total, "writes are calls of their own"
    assert partial >= total
