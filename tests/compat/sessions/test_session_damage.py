"""Damage: never returned as data, never hidden, and never in the way of what is intact."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest

from backstay.compat.sessions import CheckpointData, SyncCheckpointWriter
from backstay.errors import BackstayError, Corrupted, OutcomeUnknown, StoreBusy, StoreError, StoreFull
from support.running import Show
from support.session_records import Fault, damage, file_of, fill, folder, names, record


def is_latest(path: str) -> bool:
    return path.endswith("latest.json") or ".tmp_latest_" in path


# Loading what is damaged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "checksum verification failed"),
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"[]", "not an object"),
        (b"{}", "has no _checksum"),
    ],
)
def test_a_damaged_checkpoint_that_is_asked_for_is_an_error(tmp_path: Path, content: bytes | None, why: str) -> None:
    writer = fill(tmp_path, 3)
    for number in (2, 3):
        if content is None:
            damage(file_of(tmp_path, number))
        else:
            file_of(tmp_path, number).write_bytes(content)

    with pytest.raises(Corrupted, match=why) as caught:
        writer.load("s1", "id-3")
    assert caught.value.path == str(file_of(tmp_path, 3))
    with pytest.raises(Corrupted, match=f"{why}.*is a backup of it"):
        writer.load("s1", "id-2")


def test_a_damaged_newest_gives_way_to_the_newest_that_is_intact_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = fill(tmp_path, 3)
    damage(file_of(tmp_path, 3))

    with caplog.at_level(logging.WARNING):
        assert writer.load("s1") == record(2)

    report = writer.load_report("s1")
    assert report.path == file_of(tmp_path, 2)
    assert not report.from_backup
    assert [skip.what for skip in report.skipped] == [file_of(tmp_path, 3).name]
    assert "checksum verification failed" in report.skipped[0].why
    assert "id-3" in str(report)
    assert [problem.what for problem in writer.problems] == [file_of(tmp_path, 3).name]
    assert len([entry for entry in caplog.records if "id-3" in entry.getMessage()]) == 1


def test_a_damaged_file_gives_way_to_its_own_backup_before_an_older_checkpoint(tmp_path: Path) -> None:
    writer = fill(tmp_path, 4)
    damage(file_of(tmp_path, 4))
    damage(file_of(tmp_path, 3))

    report = writer.load_report("s1")

    assert report.data == record(3)
    assert report.from_backup
    assert report.path == file_of(tmp_path, 3, ending=".json.backup")
    assert [skip.what for skip in report.skipped] == [file_of(tmp_path, 4).name, file_of(tmp_path, 3).name]


def test_a_file_that_is_lost_is_read_from_its_backup_and_saved_back(tmp_path: Path) -> None:
    writer = fill(tmp_path, 2)
    path = file_of(tmp_path, 1)
    path.unlink()

    assert writer.load("s1", "id-1") == record(1)
    assert "its backup was loaded" in str(writer.problems[-1])
    assert [meta.checkpoint_id for meta in writer.list("s1")] == ["id-2"]

    writer.save(record(1))

    assert path.exists()
    assert [meta.checkpoint_id for meta in writer.list("s1")] == ["id-2", "id-1"]


def test_a_session_with_nothing_intact_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    writer = fill(tmp_path, 2, max_backups=0)
    for number in (1, 2):
        damage(file_of(tmp_path, number))

    with pytest.raises(Corrupted, match=r"no intact checkpoint.*id-2.*id-1"):
        writer.load("s1")
    report = writer.load_report("s1")
    assert not report
    assert len(report.skipped) == 2
    assert "no intact checkpoint" in str(report)


def test_a_newest_whose_number_cannot_be_read_is_still_noticed(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3)
    path = file_of(tmp_path, 3)
    (folder(tmp_path) / "latest.json").unlink()

    for content in (b"", path.read_bytes()[20:]):
        path.write_bytes(content)
        report = writer.load_report("s1")
        assert report.data == record(2)
        assert [skip.what for skip in report.skipped] == [path.name]


def test_a_newest_whose_number_was_lowered_is_noticed_by_the_link(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3)
    path = file_of(tmp_path, 3)
    path.write_bytes(path.read_bytes().replace(b'"_seq": 3', b'"_seq": 0'))

    report = writer.load_report("s1")

    assert report.data == record(2)
    assert [skip.what for skip in report.skipped] == [path.name]


def test_a_link_that_names_an_older_one_is_overruled_and_that_is_said(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3)
    latest = folder(tmp_path) / "latest.json"
    latest.unlink()
    latest.symlink_to(file_of(tmp_path, 1).name)

    report = writer.load_report("s1")

    assert report.data == record(3)
    assert report.skipped == ()
    first, third = file_of(tmp_path, 1).name, file_of(tmp_path, 3).name
    assert report.notes == (f"latest.json names {first}, but {third} is newer",)
    latest.unlink()
    latest.symlink_to("cp_20260131_093100_gone.json")
    assert "which does not exist" in writer.load_report("s1").notes[0]
    assert writer.load("s1") == record(3)


def test_a_file_under_another_name_is_not_taken_for_that(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3, max_backups=0)
    file_of(tmp_path, 3).write_bytes(file_of(tmp_path, 1).read_bytes())

    with pytest.raises(Corrupted, match="holds checkpoint 'id-1'"):
        writer.load("s1", "id-3")
    assert writer.load("s1") == record(2)

    fill(tmp_path, 1, session="s2")
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 1, session="s2").read_bytes())
    with pytest.raises(Corrupted, match="of session 's2'"):
        writer.load("s1", "id-1")


def test_every_flipped_bit_and_every_cut_is_detected_or_changes_nothing(tmp_path: Path, show: Show) -> None:
    data = record(1, messages=[{"role": "user", "content": "é"}], tool_results=[1.5, -2, None])
    writer = SyncCheckpointWriter(tmp_path)
    writer.save(data)
    path = file_of(tmp_path, 1)
    good = path.read_bytes()
    detected, unchanged = 0, 0
    for position in range(len(good)):
        for changed in (good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :], good[:position]):
            path.write_bytes(changed)
            try:
                found = writer.load("s1", "id-1")
            except BackstayError:
                detected += 1
            else:
                assert found == data, f"at byte {position}"
                unchanged += 1

    show("session file: flipped bits and cuts", f"{detected} detected, {unchanged} without effect, 0 wrong answers")
    assert detected > len(good)


# Lists and verdicts -----------------------------------------------------------------------------------------------


def test_a_list_leaves_out_what_is_damaged_and_the_scan_says_what_and_why(tmp_path: Path) -> None:
    writer = fill(tmp_path, 6, max_backups=0)
    damage(file_of(tmp_path, 1))
    file_of(tmp_path, 2).write_bytes(b"no JSON")
    file_of(tmp_path, 3).unlink()
    (folder(tmp_path) / "cp_20260131_093300_id-3.json").mkdir()  # an entry that cannot be read at all
    (folder(tmp_path) / "cp_20260131_093300_id-7.json").symlink_to("/etc/passwd")

    metas, scan = writer.list("s1"), writer.scan("s1")

    assert [meta.checkpoint_id for meta in metas] == ["id-6", "id-5", "id-4"]
    assert scan.good == tuple(metas)
    reasons = {skip.what: skip.why for skip in scan.damaged}
    assert [name.rpartition("_")[2] for name in sorted(reasons)] == ["id-1.json", "id-2.json", "id-3.json", "id-7.json"]
    assert all(reasons.values())
    assert {problem.what for problem in writer.problems} == set(reasons)


def test_a_verdict_on_a_file_says_why(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3)
    damage(file_of(tmp_path, 2))
    file_of(tmp_path, 3).write_bytes(b"no JSON")

    assert writer.verify(file_of(tmp_path, 1))
    assert str(writer.verify(file_of(tmp_path, 1))) == "intact"
    assert not writer.verify(folder(tmp_path) / "latest.json")  # which stands for the third
    damaged = writer.verify(file_of(tmp_path, 2))
    assert not damaged
    assert "checksum verification failed" in str(damaged.reason)
    assert "is not JSON" in str(writer.verify(file_of(tmp_path, 3)).reason)  # "not intact" is the answer, not an error
    missing = writer.verify(tmp_path / "missing")
    assert not missing
    assert missing.reason == "it does not exist"
    with pytest.raises(StoreError, match="not a regular file"):
        writer.verify(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error_of_the_store_and_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fill(tmp_path, 2)
    with monkeypatch.context() as patch:
        fault = Fault(patch, "open", lambda path: path.endswith("id-2.json"))
        with pytest.raises(StoreError, match="Input/output error"):
            writer.load("s1", "id-2")
        with pytest.raises(StoreError, match="Input/output error"):
            writer.verify(file_of(tmp_path, 2))

    assert fault.fired >= 2
    assert writer.load("s1", "id-2") == record(2)


# Saving while something fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "code"), [("replace", errno.EIO), ("fsync", errno.EIO), ("fsync", errno.ENOSPC)])
def test_a_failure_to_write_the_file_fails_the_save_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    writer = fill(tmp_path, 2, max_backups=0)
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        fault = Fault(patch, call, lambda path: ".tmp_checkpoint_" in path, code)
        with pytest.raises(StoreFull if code == errno.ENOSPC else StoreError):
            writer.save(record(3))

    assert fault.fired == 1
    assert names(tmp_path) == before
    assert writer.load("s1") == record(2)
    writer.save(record(3))
    assert writer.load("s1") == record(3)


def test_a_save_whose_last_sync_failed_is_settled_by_saving_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fill(tmp_path, 1, max_backups=0)
    with monkeypatch.context() as patch:
        fault = Fault(patch, "fsync", lambda path: path.endswith("/checkpoints"))
        with pytest.raises(OutcomeUnknown):
            writer.save(record(2))
        with pytest.raises(StoreError):  # not acknowledged as long as the name is not on the disk
            writer.save(record(2))
    assert fault.fired == 2

    assert writer.save(record(2)) == "id-2"
    assert [meta.checkpoint_id for meta in writer.list("s1")] == ["id-2", "id-1"]


@pytest.mark.parametrize("call", ["symlink", "replace"])
def test_a_failure_to_move_the_link_is_reported_and_the_newest_is_still_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    writer = fill(tmp_path, 2)
    with monkeypatch.context() as patch:
        fault = Fault(patch, call, is_latest)
        assert writer.save(record(3)) == "id-3"

    assert fault.fired == 1
    assert os.readlink(folder(tmp_path) / "latest.json") == file_of(tmp_path, 2).name
    assert "cannot update latest.json" in str(writer.problems[-1])
    assert "cannot update latest.json" in caplog.text
    assert not [name for name in names(tmp_path) if name.startswith(".tmp")]
    for reader in (writer, SyncCheckpointWriter(tmp_path)):
        assert reader.load("s1") == record(3)
        assert "latest.json names" in reader.load_report("s1").notes[0]
    writer.save(record(3))  # again: nothing new but the link
    assert os.readlink(folder(tmp_path) / "latest.json") == file_of(tmp_path, 3).name
    assert writer.load_report("s1").notes == ()


def test_a_delete_whose_last_sync_failed_is_settled_by_deleting_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fill(tmp_path, 2, max_backups=0)
    with monkeypatch.context() as patch:
        fault = Fault(patch, "fsync", lambda path: path.endswith("/checkpoints"))
        with pytest.raises(StoreError):
            writer.delete("s1", "id-1")
        with pytest.raises(StoreError):  # gone to be seen, but not yet on the disk
            writer.delete("s1", "id-1")

    assert fault.fired == 2
    assert not writer.delete("s1", "id-1")
    assert [meta.checkpoint_id for meta in writer.list("s1")] == ["id-2"]


@pytest.mark.parametrize(("call", "what"), [("replace", "cannot back up"), ("unlink", "cannot remove old backups")])
def test_a_failure_of_a_backup_is_reported_and_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, what: str
) -> None:
    writer = fill(tmp_path, 6)
    with monkeypatch.context() as patch:
        fault = Fault(patch, call, lambda path: path.endswith(".backup"))
        assert writer.save(record(7)) == "id-7"

    assert fault.fired == 1
    assert what in str(writer.problems[-1])
    assert writer.load("s1") == record(7)
    assert len(writer.list("s1")) == 7
    writer.save(record(8))
    assert len(names(tmp_path, ending=".backup")) == 3


def test_the_list_of_problems_has_a_bound(tmp_path: Path) -> None:
    writer = fill(tmp_path, 1, max_backups=0)
    for number in range(150):
        path = folder(tmp_path) / f"cp_20260131_093100_x{number}.json"
        path.write_text("no JSON")
        writer.list("s1")
        path.unlink()

    assert len(writer.problems) == 100
    assert "x149" in writer.problems[-1].what


# What a crash left ------------------------------------------------------------------------------------------------


def test_what_a_crashed_writer_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    writer = fill(tmp_path, 1)
    (folder(tmp_path) / ".tmp_checkpoint_dead").write_text("{")
    (folder(tmp_path) / ".tmp_latest_dead").symlink_to("cp_20260131_093100_id-1.json")
    (tmp_path / "s1" / ".tmp_checkpoint_dead").write_text("{")
    assert writer.scan("s1").leftovers == (".tmp_checkpoint_dead", ".tmp_latest_dead")
    left = list((tmp_path / "s1").rglob(".tmp_*"))

    writer.save(record(2))  # the older program, which takes no lock, may be writing these

    assert len(left) == 3
    assert sorted(left) == sorted((tmp_path / "s1").rglob(".tmp_*"))
    for path in left:
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    writer.save(record(3))
    assert list((tmp_path / "s1").rglob(".tmp_*")) == []


def test_all_that_a_save_names_is_synced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    root = tmp_path / "root"
    real_sync, real_replace, real_mkdir = os.fsync, os.replace, os.mkdir

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(f"sync {path.name if path.is_dir() else 'file'}")
        real_sync(descriptor)

    def replace(old: Path, new: Path) -> None:
        done.append(f"name {'link' if is_latest(str(new)) else 'file'}")
        real_replace(old, new)

    def mkdir(path: Path, mode: int) -> None:
        done.append(f"make {Path(path).name}")
        real_mkdir(path, mode)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "mkdir", mkdir)

    SyncCheckpointWriter(root).save(record(1))

    def last(what: str) -> int:
        return len(done) - 1 - done[::-1].index(what)

    assert done.index("make root") < last(f"sync {tmp_path.name}")
    assert done.index("make s1") < last("sync root")
    assert done.index("make checkpoints") < last("sync s1")
    assert done.index("sync file") < done.index("name file") < done.index("sync checkpoints") < done.index("name link")
    assert done[-1] == "sync checkpoints"


def test_a_lock_that_cannot_be_had_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system without a lock service."""
    writer = fill(tmp_path, 1)
    real = fcntl.flock
    failed: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if operation in refused:
            failed.append(operation)
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    refused = {fcntl.LOCK_EX | fcntl.LOCK_NB}
    with pytest.raises(StoreError, match=r"cannot lock.*No locks available"):
        writer.save(record(2))
    refused = set()
    writer.save(record(2))

    assert failed == [fcntl.LOCK_EX | fcntl.LOCK_NB]
    writer.save(record(3))
    assert writer.load("s1") == record(3)


def test_another_process_that_keeps_the_session_locked_makes_a_save_give_up(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    impatient = SyncCheckpointWriter(tmp_path, lock_timeout=0.05)
    with (tmp_path / "s1" / ".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreBusy):
            impatient.save(record(2))
        assert impatient.load("s1") == record(1)  # readers need no lock

    impatient.save(record(2))
    assert isinstance(impatient.load("s1"), CheckpointData)
