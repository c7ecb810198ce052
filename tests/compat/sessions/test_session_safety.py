"""No id, no root and no planted file makes the writer touch, read or match anything that is not its own."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backstay.compat.sessions import CrashRecovery, SyncCheckpointWriter
from backstay.errors import BackstayError, InvalidInput, StoreRefused
from support.session_records import file_of, fill, folder, names, record

HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "../../etc/x",
    "/etc/x",
    "a/b",
    "a\\b",
    "a\0b",
    "*",
    "?",
    "[a]",
    "a*",
    ".hidden",
    "-rf",
    "x" * 129,
    "x" * 300,
    "CON",
    "nul.txt",
    "dot.",
    "caf\u00e9",
    "cafe\u0301",
    "a b",
    "a\nb",
    "a\n",
    "\u202egnp",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_id_that_is_no_plain_name_is_refused_everywhere(tmp_path: Path, hostile: str) -> None:
    root = tmp_path / "root"
    writer = fill(root, 2)
    recovery = CrashRecovery(root)
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    for call in (
        lambda: writer.save(record(3, session=hostile)),
        lambda: writer.save(record(3, checkpoint_id=hostile)),
        lambda: writer.load(hostile),
        lambda: writer.load("s1", hostile),
        lambda: writer.list(hostile),
        lambda: writer.scan(hostile),
        lambda: writer.delete(hostile, "id-1"),
        lambda: writer.delete("s1", hostile),
        lambda: writer.clear_session(hostile),
        lambda: writer.has_checkpoints(hostile),
        lambda: recovery.recover_session(hostile),
        lambda: recovery.mark_session_active(hostile),
        lambda: recovery.mark_session_terminated(hostile, "x"),
    ):
        with pytest.raises(InvalidInput):
            call()

    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_an_id_matches_itself_and_nothing_that_ends_like_it(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path)
    for name in ("a", "x_a", "20260101_000000_a", "a.json", "a-1"):
        writer.save(record(1, checkpoint_id=name))

    for name in ("a", "x_a", "20260101_000000_a", "a.json", "a-1"):
        found = writer.load("s1", name)
        assert found is not None
        assert found.checkpoint_id == name
    assert writer.delete("s1", "a")
    assert [meta.checkpoint_id for meta in writer.list("s1")] == ["a-1", "a.json", "20260101_000000_a", "x_a"]


@pytest.mark.parametrize("name", [b"[a-z]*?", b"with space", b"caf\xc3\xa9", b"not-utf8-\xff", b"{a,b}", b"%s"])
def test_a_root_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    root = tmp_path / os.fsdecode(name)
    writer = fill(root, 3)

    assert os.listdir(os.fsencode(tmp_path)) == [name]
    assert writer.load("s1", "id-1") == record(1)
    assert writer.delete("s1", "id-1")
    assert writer.load("s1") == record(3)
    assert len(writer.list("s1")) == 2
    assert writer.problems == []


def test_ids_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    writer = fill(tmp_path, 1, session="Session")

    with pytest.raises(InvalidInput, match="differs from 'Session' only in case"):
        SyncCheckpointWriter(tmp_path).save(record(1, session="session"))
    with pytest.raises(InvalidInput, match="differs from 'id-1' only in case"):
        writer.save(record(1, session="Session", checkpoint_id="ID-1"))

    assert os.listdir(tmp_path) == ["Session"]


def test_a_link_in_the_place_of_a_sessions_directory_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    fill(outside, 2)
    root.mkdir()
    (root / "s1").symlink_to(outside / "s1")
    (root / "s2").mkdir()
    (root / "s2" / "checkpoints").symlink_to(outside / "s1" / "checkpoints")
    before = sorted(str(path) for path in outside.rglob("*"))
    writer = SyncCheckpointWriter(root)

    for session in ("s1", "s2"):
        calls: list[Callable[[str], object]] = [
            lambda name: writer.save(record(9, session=name)),
            writer.load,
            writer.list,
            lambda name: writer.delete(name, "id-1"),
            writer.clear_session,
            CrashRecovery(root).recover_session,
            CrashRecovery(root).mark_session_active,
            lambda name: CrashRecovery(root).mark_session_terminated(name, "over"),
        ]
        for call in calls:
            with pytest.raises(StoreRefused, match="symbolic link"):
                call(session)

    assert sorted(str(path) for path in outside.rglob("*")) == before


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3, max_backups=0)
    elsewhere = tmp_path / "elsewhere.json"
    path = file_of(tmp_path, 2)
    elsewhere.write_bytes(path.read_bytes())  # intact, and of the right name: still not ours
    path.unlink()
    path.symlink_to(elsewhere)

    with pytest.raises(StoreRefused, match="symbolic link"):
        writer.load("s1", "id-2")
    assert [meta.checkpoint_id for meta in writer.list("s1")] == ["id-3", "id-1"]
    assert writer.delete("s1", "id-2")
    assert elsewhere.exists()


@pytest.mark.parametrize(
    "target", ["../../secret.json", "/etc/passwd", "sub/cp_20260131_093100_id-1.json", "latest.json"]
)
def test_a_latest_link_that_leads_elsewhere_is_not_followed(tmp_path: Path, target: str) -> None:
    writer = fill(tmp_path, 2)
    (tmp_path / "secret.json").write_bytes(file_of(tmp_path, 1).read_bytes())
    latest = folder(tmp_path) / "latest.json"
    latest.unlink()
    latest.symlink_to(target)

    report = writer.load_report("s1")

    assert report.data == record(2)
    assert "is ignored" in report.notes[0]
    writer.save(record(3))
    assert os.readlink(latest) == file_of(tmp_path, 3).name
    assert (tmp_path / "secret.json").exists()


def test_a_pipe_in_the_place_of_a_file_does_not_make_anyone_wait(tmp_path: Path) -> None:
    writer = fill(tmp_path, 2, max_backups=0)
    file_of(tmp_path, 2).unlink()
    os.mkfifo(folder(tmp_path) / "cp_20260131_093200_id-2.json")
    os.mkfifo(tmp_path / "s1" / "session_meta.json")

    assert writer.load("s1") == record(1)
    with pytest.raises(BackstayError, match="not a regular file"):
        writer.load("s1", "id-2")
    recovery = CrashRecovery(tmp_path)
    assert recovery.detect_unclean_shutdown() == []
    assert [problem.what for problem in recovery.problems] == ["s1"]


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("links", [True, False])
def test_nothing_is_readable_by_others_whatever_the_umask(tmp_path: Path, links: bool) -> None:
    root = tmp_path / "root"
    CrashRecovery(root).mark_session_active("s1")
    fill(root, 3, links=links)

    modes: dict[str, set[int]] = {"files": set(), "directories": set()}
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            modes["directories" if path.is_dir() else "files"].add(stat.S_IMODE(path.stat().st_mode))

    assert modes == {"files": {0o600}, "directories": {0o700}}
    assert {".lock", "session_meta.json", "checkpoints"} == set(os.listdir(root / "s1"))
    assert len(names(root, ending=".backup")) == 2


def test_errors_name_the_place_and_never_show_a_value(tmp_path: Path) -> None:
    secret = "hunter2"
    writer = SyncCheckpointWriter(tmp_path, check_roles=True)
    wrong: list[dict[str, Any]] = [
        {"tool_results": {secret[:3]: {secret}}},
        {"messages": [{"role": secret}]},
        {"tool_results": [secret + "\ud800"]},
    ]

    for fields in wrong:
        with pytest.raises(InvalidInput) as caught:
            writer.save(record(1, **fields))
        assert secret not in str(caught.value)
