"""Workflow checkpoints as files: one JSON file each, whole or not at all, and nobody else's touched."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from backstay.compat.workflow import Checkpoint, CheckpointInfo, FileCheckpointStore, InterruptType, SharedState
from backstay.errors import Corrupted, DecodeError, EncodeError, InvalidInput, StoreError, StoreRefused
from backstay.store import atomic
from support.processes import child_environment

T = TypeVar("T")
VICTIM = [sys.executable, "-m", "support.crash.workflow_victim"]
FOREIGN = {"package.json": '{"name": "x", "id": "package"}', "list.json": "[1, 2]", "notes.json": "{ not JSON"}


def run(awaited: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(awaited)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "some" / "base"


@pytest.fixture
def store(base: Path) -> FileCheckpointStore:
    return FileCheckpointStore(base)


def made(name: str = "a", **given: Any) -> Checkpoint:
    state = SharedState({"text": "héllo", "n": 1})
    each = Checkpoint.new("graph", "node", state, ["start"], 1, InterruptType.AFTER_NODE)
    each.id = name
    for key, value in given.items():
        setattr(each, key, value)
    return each


def save_all(store: FileCheckpointStore, *names: str) -> None:
    for name in names:
        run(store.save(made(name)))


def problems(store: FileCheckpointStore) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where) for problem in run(store.list()).problems]


def old_style(checkpoint: Checkpoint) -> str:
    """Return the file that the system this format comes from would have written: no checksum."""
    return json.dumps(checkpoint.to_dict(), indent=2, ensure_ascii=False)


# Writing ----------------------------------------------------------------------------------------------------------


def test_reading_makes_no_directory(store: FileCheckpointStore, base: Path) -> None:
    assert run(store.list()) == []
    assert run(store.load("a")) is None
    assert (run(store.delete("a")), run(store.clear())) == (0, 0)

    assert not base.parent.exists()
    assert FileCheckpointStore(str(base)) is not None
    assert not base.parent.exists()


def test_a_checkpoint_is_one_indented_json_file_in_the_promised_form(store: FileCheckpointStore, base: Path) -> None:
    kept = made("a.1_B-2")
    run(store.save(kept))

    (path,) = base.iterdir()
    text = path.read_text(encoding="utf-8")
    plain = json.loads(text)
    assert path.name == "a.1_B-2.json"
    assert text.startswith('{\n  "id": "a.1_B-2",\n  "graph_name": "graph",\n')
    assert "héllo" in text
    assert {key: plain[key] for key in kept.to_dict()} == kept.to_dict()
    assert (plain["interrupt_type"], plain["pending_action"], plain["created_at"][-1]) == ("afternode", None, "Z")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_the_checksum_is_of_the_file_with_zeros_in_its_place(store: FileCheckpointStore, base: Path) -> None:
    """Enough for another program to verify it, without our code."""
    save_all(store, "a")
    data = (base / "a.json").read_bytes()

    name, digest = json.loads(data)["_checksum"].split(":")

    assert name == "sha256"
    assert hashlib.sha256(data.replace(digest.encode(), b"0" * 64)).hexdigest() == digest


def test_a_save_is_a_rename_of_a_synced_file_with_a_name_of_its_own(
    store: FileCheckpointStore, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    replace, fsync = os.replace, os.fsync

    def watched_fsync(number: int) -> None:
        done.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{number}"))))
        fsync(number)

    def watched_replace(source: Path, target: Path) -> None:
        done.append(("rename", Path(source).name))
        assert Path(source).parent == Path(target).parent == base
        replace(source, target)

    base.mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    save_all(store, "a", "a")

    first, second = done[0][1], done[3][1]
    for name, steps in ((first, done[:3]), (second, done[3:])):
        assert steps == [("fsync", name), ("rename", name), ("fsync", "base")]
    assert first != second
    assert not first.endswith(".json")


def test_concurrent_saves_of_one_id_leave_one_of_them_whole(store: FileCheckpointStore, base: Path) -> None:
    versions = [made(step_count=number, path=["n"] * (number * 50)) for number in range(16)]
    stores = [store, FileCheckpointStore(base)]

    async def main() -> None:
        await asyncio.gather(*(stores[number % 2].save(each) for number, each in enumerate(versions)))

    run(main())

    assert run(store.load("a")) in versions
    assert [path.name for path in base.iterdir()] == ["a.json"]


def test_each_way_to_fail_has_its_own_error(store: FileCheckpointStore, base: Path, tmp_path: Path) -> None:
    with pytest.raises(EncodeError, match="state_snapshot is nan"):
        run(store.save(made(state_snapshot=float("nan"))))
    with pytest.raises(EncodeError, match="Failed to serialize checkpoint"):
        run(store.save(made(state_snapshot=10**5000)))
    assert not base.exists()

    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Failed to create checkpoint dir"):
        run(FileCheckpointStore(tmp_path / "file" / "base").save(made()))
    with pytest.raises(StoreError, match="Failed to write temp checkpoint"):
        run(FileCheckpointStore("/proc/self").save(made()))  # where nobody can make a file
    (base / "a.json").mkdir(parents=True)
    with pytest.raises(StoreError, match="Failed to rename checkpoint file"):
        run(store.save(made()))
    assert [path.name for path in base.iterdir()] == ["a.json"]  # no temporary is left


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_temporary(
    store: FileCheckpointStore, base: Path
) -> None:
    save_all(store, "a")
    before = (base / "a.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = made(state_snapshot="x" * 200_000)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match="Failed to write temp checkpoint"):
            run(store.save(large))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)

    assert [path.name for path in base.iterdir()] == ["a.json"]
    assert (base / "a.json").read_bytes() == before
    run(store.save(large))
    assert run(store.load("a")) == large


def test_what_a_killed_writer_left_is_reported_and_swept_by_the_next_save_and_by_clear(
    store: FileCheckpointStore, base: Path
) -> None:
    save_all(store, "a")
    left = base / f"{atomic.PREFIX}0123"
    for sweep in (lambda: FileCheckpointStore(base).save(made("b")), store.clear):
        left.write_text("half")
        assert ("leftover", left.name) in problems(store)
        run(sweep())
        assert not left.exists()


@pytest.mark.crash
def test_a_killed_program_loses_nothing_that_was_acknowledged(base: Path) -> None:
    """Killed right after its fifth answer, while it saves the sixth; ``--check`` then loads all that is listed."""
    with subprocess.Popen([*VICTIM, str(base), "100000"], stdout=subprocess.PIPE, env=child_environment()) as victim:
        assert victim.stdout is not None
        acknowledged: list[str] = []
        while len(acknowledged) < 5:
            word, name = victim.stdout.readline().decode().split()
            acknowledged += [name] if word == "ACK" else []
        victim.kill()
        acknowledged += [line.split()[1] for line in victim.stdout.read().decode().splitlines() if line[:3] == "ACK"]
    checked = subprocess.run(
        [*VICTIM, "--check", str(base)], capture_output=True, text=True, check=False, env=child_environment()
    )

    assert victim.returncode == -signal.SIGKILL
    assert (checked.returncode, checked.stderr) == (0, "")
    assert set(acknowledged) <= set(checked.stdout.split())


def test_the_check_of_the_victim_can_fail(store: FileCheckpointStore, base: Path) -> None:
    save_all(store, "a")
    (base / "a.json").write_bytes((base / "a.json").read_bytes()[:-5])

    checked = subprocess.run([*VICTIM, "--check", str(base)], capture_output=True, check=False, env=child_environment())

    assert (checked.returncode, checked.stdout) == (1, b"")


# Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/x", "a/b", "a\\b", ".hidden", "a\0", "é", "a" * 129, "-a", "a\n", "*", "nul"]
)
def test_an_id_that_is_no_plain_name_is_refused_everywhere(
    store: FileCheckpointStore, base: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "x.json").write_text(old_style(made("x")))
    (tmp_path / "some").mkdir()
    before = sorted(tmp_path.rglob("*"))

    for call in (lambda: store.save(made(name)), lambda: store.load(name), lambda: store.delete(name)):
        with pytest.raises(InvalidInput):
            run(call())

    assert sorted(tmp_path.rglob("*")) == before
    assert not base.exists()


def test_a_link_in_the_directory_is_neither_read_nor_written_through(
    store: FileCheckpointStore, base: Path, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere.json"
    text = old_style(made("a"))
    target.write_text(text)
    base.mkdir(parents=True)
    (base / "a.json").symlink_to(target)
    os.mkfifo(base / "pipe.json")

    with pytest.raises(StoreError, match="cannot read"):
        run(store.load("a"))
    with pytest.raises(StoreError, match="cannot read"):
        run(store.save(made("a")))
    assert problems(store) == [("unreadable", "a.json"), ("unreadable", "pipe.json")]
    assert run(store.clear()) == 0
    assert target.read_text() == text
    assert (base / "a.json").is_symlink()


# Reading ----------------------------------------------------------------------------------------------------------


def test_missing_unreadable_and_unparsable_are_three_answers(store: FileCheckpointStore, base: Path) -> None:
    save_all(store, "cut", "odd")
    (base / "cut.json").write_bytes((base / "cut.json").read_bytes()[:40])
    (base / "odd.json").unlink()
    (base / "odd.json").mkdir()

    assert run(store.load("missing")) is None
    with pytest.raises(DecodeError, match="Failed to parse checkpoint cut"):
        run(store.load("cut"))
    with pytest.raises(StoreError, match="cannot read"):
        run(store.load("odd"))


def test_any_changed_byte_is_found_on_load_and_on_list(store: FileCheckpointStore, base: Path) -> None:
    save_all(store, "a", "b")
    path = base / "a.json"
    whole = path.read_bytes()

    missed = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :])
        try:
            run_now(store, "a")
            missed.append(place)
        except (Corrupted, DecodeError, StoreRefused):
            pass
    assert missed == []

    path.write_bytes(whole.replace(b'"n": 1', b'"n": 7'))
    with pytest.raises(Corrupted, match="does not match its checksum"):
        run(store.load("a"))
    shown = run(store.list())
    assert [info.id for info in shown] == ["b"]
    assert [(problem.kind, problem.where) for problem in shown.problems] == [("damaged", "a.json")]


def run_now(store: FileCheckpointStore, name: str) -> None:
    store._files.read(name)  # hundreds of loads, without a loop for each


def test_one_damaged_file_hides_no_other_and_is_not_hidden(store: FileCheckpointStore, base: Path) -> None:
    save_all(store, "a", "b", "c")
    whole = (base / "b.json").read_bytes()
    for damaged in (whole[:100], b"", b"\0" * 50, b"\xff\xfe", b"[" * 100_000):
        (base / "b.json").write_bytes(damaged)
        assert {info.id for info in run(store.list())} == {"a", "c"}
        assert problems(store) == [("damaged", "b.json")]

    (base / "b.json").write_bytes(whole[:100])
    assert run(store.delete("b")) == 1
    assert problems(store) == []


def test_a_file_that_cannot_be_read_hides_no_other(store: FileCheckpointStore, base: Path) -> None:
    save_all(store, "a", "b", "c")
    (base / "b.json").unlink()
    (base / "b.json").mkdir()

    assert {info.id for info in run(store.list())} == {"a", "c"}
    assert problems(store) == [("unreadable", "b.json")]


def test_a_damaged_checkpoint_can_be_saved_again(store: FileCheckpointStore, base: Path) -> None:
    for damaged in (slice(0, 60), slice(0, 0)):
        kept = made("a")
        run(store.save(kept))
        path = base / "a.json"
        path.write_bytes(path.read_bytes()[damaged])

        run(store.save(kept))

        assert run(store.load("a")) == kept


def test_files_of_the_old_system_are_read_and_reported_as_unchecked(store: FileCheckpointStore, base: Path) -> None:
    kept = made("old")
    base.mkdir(parents=True)
    (base / "old.json").write_text(old_style(kept), encoding="utf-8")
    (base / "other.json.tmp").write_text("{")

    assert run(store.load("old")) == kept
    assert run(store.list()) == [CheckpointInfo.of(kept)]
    assert problems(store) == [("unchecked", "old.json"), ("leftover", "other.json.tmp")]
    run(store.save(kept))
    assert problems(store) == [("leftover", "other.json.tmp")]


def test_a_file_that_lost_only_its_checksum_is_not_taken_for_an_old_one(store: FileCheckpointStore, base: Path) -> None:
    save_all(store, "a")
    plain = json.loads((base / "a.json").read_text(encoding="utf-8"))
    del plain["_checksum"]
    (base / "a.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")

    with pytest.raises(Corrupted):
        run(store.load("a"))


# Other people's files ---------------------------------------------------------------------------------------------


def test_foreign_files_are_reported_and_never_touched(store: FileCheckpointStore, base: Path) -> None:
    save_all(store, "a", "b", "c")
    for name, text in FOREIGN.items():
        (base / name).write_text(text)
    (base / "copy.json").write_bytes((base / "a.json").read_bytes())
    (base / "readme.txt").write_text("mine")
    (base / "c.json").write_bytes((base / "c.json").read_bytes()[:80])

    assert [info.id for info in run(store.list())] == ["b", "a"]
    assert problems(store) == [
        ("damaged", "c.json"),
        ("foreign", "copy.json"),
        ("foreign", "list.json"),
        ("damaged", "notes.json"),
        ("foreign", "package.json"),
    ]
    for name in ("package", "list", "notes", "copy"):
        with pytest.raises(StoreRefused):
            run(store.save(made(name)))
    for name in ("package", "list", "copy"):
        with pytest.raises(StoreRefused):
            run(store.load(name))
        with pytest.raises(StoreRefused):
            run(store.delete(name))

    assert run(store.clear()) == 3  # c too: what is left of it shows whose it was
    assert sorted(path.name for path in base.iterdir()) == sorted([*FOREIGN, "copy.json", "readme.txt"])
    assert all((base / name).read_text() == text for name, text in FOREIGN.items())


def test_clear_says_what_it_could_not_remove_after_trying_all(
    store: FileCheckpointStore, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(store, "a", "b", "c")
    unlink = os.unlink

    def stubborn(path: Path) -> None:
        if Path(path).name == "b.json":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path)

    monkeypatch.setattr(os, "unlink", stubborn)
    with pytest.raises(StoreError, match=r"1 checkpoint files could not be removed, 2 were.*b\.json"):
        run(store.clear())

    assert [path.name for path in base.iterdir()] == ["b.json"]


def test_a_file_that_goes_while_the_list_is_read_is_no_error(
    store: FileCheckpointStore, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(store, "a", "b")
    listdir = os.listdir

    def late(path: Path) -> list[str]:
        names = listdir(path)
        (base / "a.json").unlink()
        return names

    monkeypatch.setattr(os, "listdir", late)

    assert [info.id for info in run(store.list())] == ["b"]
