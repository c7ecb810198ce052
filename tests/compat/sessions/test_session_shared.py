"""The original program and ours on one directory: the newest is the one that was saved last, by whichever.

The original program's files are real ones (``tests/golden/sessions``), put there step by step as it saves them. It
writes no numbers, takes no lock, and may be killed between any two steps, as ours may.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

import backstay
from backstay.compat.sessions import CheckpointData, CrashRecovery, SyncCheckpointWriter, import_sessions
from backstay.errors import StoreError, StoreRefused
from support.session_records import GOLDEN, Fault, folder, original_saves

FILES = {path.name[19:-5]: path for path in sorted((GOLDEN / "rust/values/checkpoints").glob("cp_*.json"))}
A, B, C = FILES  # as the original program saved them
EARLY = datetime(2001, 1, 1, tzinfo=UTC)


@pytest.fixture(params=[True, False], ids=["link", "copy"])
def is_link(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Shared:
    """A directory on which both programs work."""

    def __init__(self, root: Path, is_link: bool = True) -> None:
        self.root, self.is_link = root, is_link
        self.checkpoints = folder(root, "values")
        self.checkpoints.mkdir(parents=True)
        self.writer = SyncCheckpointWriter(root, links=is_link)

    def ours(self, name: str) -> None:
        """Save with a clock that is behind that of the original program."""
        self.writer.save(CheckpointData(checkpoint_id=name, session_id="values", created_at=EARLY))

    def theirs(self, name: str, until: str = "end") -> None:
        original_saves(self.checkpoints, FILES[name], link=self.is_link, until=until)

    def seen(self) -> list[str]:
        """Return the order, newest first, on which all ways to look at the directory must agree."""
        for writer in (self.writer, SyncCheckpointWriter(self.root, links=self.is_link)):
            listed = [str(meta.checkpoint_id) for meta in writer.list("values")]
            report = writer.load_report("values")
            assert report.skipped == ()
            assert (listed[0] if listed else None) == (None if report.data is None else report.data.checkpoint_id)
            assert writer.load("values") == report.data
        assert CrashRecovery(self.root).recover_session("values").data == report.data
        with backstay.open("memory:") as store:
            assert import_sessions(self.root, store).missing == ()
            assert [meta.id for meta in store.thread("values").history()] == listed
        return listed

    def point(self, name: str) -> None:
        """Make ``latest.json`` name a checkpoint, in the form of this directory."""
        (path,) = self.checkpoints.glob(f"cp_*_{name}.json")
        (self.checkpoints / "latest.json").unlink(missing_ok=True)
        if self.is_link:
            (self.checkpoints / "latest.json").symlink_to(path.name)
        else:
            shutil.copyfile(path, self.checkpoints / "latest.json")


def test_the_newest_is_the_one_that_was_saved_last_by_either_program(tmp_path: Path, is_link: bool) -> None:
    shared = Shared(tmp_path, is_link)
    expected: list[str] = []
    for name in ("one", A, B, "two", "three", C, "four"):
        (shared.theirs if name in FILES else shared.ours)(name)
        expected.insert(0, name)
        assert shared.seen() == expected

    backups = [path.name for path in shared.checkpoints.glob("cp_*.backup")]
    assert len(backups) == 3
    assert all(any(name in backup for backup in backups) for name in (B, "two", C))
    numbers = [meta.seq for meta in shared.writer.list("values")]
    assert numbers == [7, None, 5, 4, None, None, 1]


def test_a_save_of_theirs_that_was_killed_before_the_link_is_newer_or_absent(tmp_path: Path, is_link: bool) -> None:
    shared = Shared(tmp_path, is_link)
    shared.theirs(A)
    shared.ours("one")

    shared.theirs(B, until="written")
    assert shared.seen() == ["one", A]
    shared.theirs(B, until="renamed")
    assert shared.seen() == [B, "one", A]
    shared.ours("two")
    assert shared.seen() == ["two", B, "one", A]


def test_a_save_of_ours_that_did_not_reach_the_link_is_newer_than_what_it_names(tmp_path: Path, is_link: bool) -> None:
    shared = Shared(tmp_path, is_link)
    shared.ours("one")
    shared.theirs(A)
    shared.ours("two")

    shared.point(A)
    assert shared.seen() == ["two", A, "one"]
    shared.point("one")
    assert shared.seen() == ["two", A, "one"]
    shared.theirs(B)
    assert shared.seen() == [B, "two", A, "one"]


def test_numbers_that_were_given_before_a_failed_save_do_no_harm(
    tmp_path: Path, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared(tmp_path, is_link)
    shared.ours("one")
    shared.theirs(A)
    with monkeypatch.context() as patch:
        fault = Fault(patch, "replace", lambda path: path.endswith("_two.json"))
        with pytest.raises(StoreError):
            shared.ours("two")
    assert fault.fired
    assert (shared.checkpoints / "order.json").exists()

    assert shared.seen() == [A, "one"]
    shared.theirs(B)
    assert shared.seen() == [B, A, "one"]
    shared.ours("two")
    assert shared.seen() == ["two", B, A, "one"]


def test_what_they_delete_leaves_the_next_newest(tmp_path: Path, is_link: bool) -> None:
    shared = Shared(tmp_path, is_link)
    shared.writer.with_max_backups(0)
    for name in ("one", A, "two", B, C):
        (shared.theirs if name in FILES else shared.ours)(name)

    for name, expected in ((C, [B, "two", A, "one"]), ("two", [B, A, "one"]), (B, [A, "one"]), (A, ["one"])):
        next(shared.checkpoints.glob(f"cp_*_{name}.json")).unlink()  # the link is left as it is
        assert shared.seen() == expected


def test_a_damaged_file_of_theirs_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    for name in (A, "one", B, C):
        (shared.theirs if name in FILES else shared.ours)(name)
    path = shared.checkpoints / FILES[C].name
    path.write_bytes(path.read_bytes().replace(b'"manual"', b'"mutual"'))

    report = shared.writer.load_report("values")

    assert report.data is not None
    assert report.data.checkpoint_id == B
    assert [skip.what for skip in report.skipped] == [path.name]
    shared.ours("two")
    assert [str(meta.checkpoint_id) for meta in shared.writer.list("values")] == ["two", B, "one", A]
    assert shared.writer.load_report("values").skipped == ()  # the damaged one is older now


def test_a_file_that_they_wrote_over_ours_is_newer(tmp_path: Path) -> None:
    """They save a checkpoint of ours again, in the second that is in its name."""
    shared = Shared(tmp_path)
    shared.theirs(A)
    moment = datetime(2026, 3, 1, 10, 1, 1, tzinfo=UTC)
    shared.writer.save(CheckpointData(checkpoint_id=B, session_id="values", created_at=moment))
    assert (shared.checkpoints / FILES[B].name).exists()
    shared.ours("one")

    shared.theirs(B)

    assert shared.seen() == [B, "one", A]
    newest = shared.writer.load("values")
    assert newest is not None
    assert newest.tool_results is False  # their content


def test_a_file_that_could_not_be_read_for_a_while_does_not_become_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared(tmp_path)
    shared.theirs(A)
    shared.theirs(B)
    with monkeypatch.context() as patch:
        fault = Fault(patch, "open", lambda path: path.endswith(FILES[B].name))
        shared.ours("one")
    assert fault.fired

    assert shared.seen() == ["one", A, B]
    shared.theirs(C)
    assert shared.seen() == [C, "one", A, B]


# Without order.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["lost", "flipped", "older", "no JSON"])
def test_without_its_order_a_directory_that_names_a_file_of_theirs_is_refused(tmp_path: Path, damage: str) -> None:
    shared = Shared(tmp_path)
    order = shared.checkpoints / "order.json"
    for name in (A, "one"):
        (shared.theirs if name in FILES else shared.ours)(name)
    older = order.read_bytes()
    for name in (B, "two"):
        (shared.theirs if name in FILES else shared.ours)(name)
    content = {
        "flipped": order.read_bytes().replace(b'"seq": 1', b'"seq": 9'),
        "older": older,
        "no JSON": b"{",
    }
    order.unlink()
    if damage != "lost":
        order.write_bytes(content[damage])

    report = shared.writer.load_report("values")  # the link names ours, so it came last
    assert report.data is not None
    assert report.data.checkpoint_id == "two"
    assert "order.json" in report.notes[0]
    shared.point(B)  # ours did not reach the link, or they saved later: nobody knows
    for load in (shared.writer.load, CrashRecovery(tmp_path).recover_session):
        with pytest.raises(StoreRefused, match=r"order\.json, which says whether") as caught:
            load("values")
        assert caught.value.path == str(order)
    assert shared.writer.load("values", B) is not None
    assert {str(meta.checkpoint_id) for meta in shared.writer.list("values")} == {"two", "one", A, B}

    shared.ours("three")

    assert shared.seen()[:3] == ["three", "two", "one"]
    shared.theirs(C)
    assert shared.seen()[:3] == [C, "three", "two"]


def test_a_damaged_number_does_not_make_a_directory_refuse(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    for name in (A, "one", "two", B):
        (shared.theirs if name in FILES else shared.ours)(name)
    (path,) = shared.checkpoints.glob("cp_*_two.json")
    path.write_bytes(path.read_bytes().replace(b'"_order": 2', b'"_order": 8'))

    newest = shared.writer.load("values")

    assert newest is not None
    assert newest.checkpoint_id == B


def test_a_session_without_files_of_theirs_needs_no_order(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    shared.ours("one")
    shared.ours("two")

    (path,) = shared.checkpoints.glob("cp_*_two.json")
    assert "_order" not in json.loads(path.read_text())
    assert not (shared.checkpoints / "order.json").exists()
    shared.theirs(A)
    shared.ours("three")
    assert shared.writer.clear_session("values") == 4
    assert [name for name in os.listdir(shared.checkpoints) if name != "latest.json.backup"] == []
