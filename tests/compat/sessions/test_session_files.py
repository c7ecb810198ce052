"""Session files: where they are, what they hold, and what saving, loading, listing and deleting do to them."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backstay.compat.sessions import (
    CheckpointData,
    CheckpointId,
    CheckpointSystem,
    CheckpointWriter,
    ChecksumUtils,
    SyncCheckpointWriter,
)
from backstay.errors import IdTaken, InvalidInput, StoreError
from support.session_records import START, Fault, damage, file_of, fill, folder, names, record


def text_of(root: Path, number: int) -> str:
    return file_of(root, number).read_text(encoding="utf-8")


# The writer -------------------------------------------------------------------------------------------------------


def test_a_writer_is_built_from_any_path_and_touches_nothing(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there"

    writer = CheckpointWriter(str(root))

    assert writer.sync.storage_path == root
    assert writer.sync.max_backups == 3
    assert writer.with_max_backups(7).with_max_checkpoints(50) is writer
    assert (writer.sync.max_backups, writer.sync.max_checkpoints) == (7, 50)
    assert CheckpointWriter(root).sync.storage_path == root
    assert list(tmp_path.iterdir()) == []
    for wrong in (-1, True, "3"):
        with pytest.raises(InvalidInput, match="max_backups"):
            writer.with_max_backups(wrong)  # type: ignore[arg-type]


def test_without_a_path_sessions_are_kept_below_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    writer = CheckpointWriter()

    asyncio.run(writer.save(record(1)))

    assert writer.sync.storage_path == tmp_path / ".backstay" / "sessions"
    assert file_of(tmp_path / ".backstay" / "sessions", 1).exists()


def test_the_writer_is_a_checkpoint_system_whose_methods_are_awaited_but_for_verify(tmp_path: Path) -> None:
    async def use(system: CheckpointSystem) -> None:
        data = record()
        assert await system.save(data) == "id-1"
        assert await system.load("s1", "id-1") == data
        assert await system.load("s1") == data
        (meta,) = await system.list("s1")
        assert meta.checkpoint_id == "id-1"
        assert await asyncio.to_thread(system.verify, file_of(tmp_path, 1))
        assert await system.delete("s1", "id-1")
        assert not await system.delete("s1", "id-1")
        assert await system.load("s1") is None

    writer = CheckpointWriter(tmp_path)
    assert isinstance(writer, CheckpointSystem)
    asyncio.run(use(writer))


def test_the_awaited_writer_and_the_other_have_the_same_methods_and_arguments() -> None:
    def methods(cls: type) -> dict[str, list[inspect.Parameter]]:
        found = {name: value for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}
        return {name: list(inspect.signature(value).parameters.values()) for name, value in found.items()}

    assert methods(CheckpointWriter) == methods(SyncCheckpointWriter)
    assert (
        list(inspect.signature(CheckpointWriter).parameters.values())
        == list(inspect.signature(SyncCheckpointWriter).parameters.values())
    )  # fmt: skip


def test_the_awaited_writer_has_everything_else_too(tmp_path: Path) -> None:
    async def use() -> None:
        writer = CheckpointWriter(tmp_path)
        assert not await writer.has_checkpoints("s1")
        await writer.save(record(1))
        await writer.save(record(2))
        assert await writer.has_checkpoints("s1")
        assert await writer.load_latest("s1") == record(2)
        assert (await writer.load_report("s1")).data == record(2)
        assert len((await writer.scan("s1")).good) == 2
        assert await writer.clear_session("s1") == 2
        assert not await writer.has_checkpoints("s1")
        assert await writer.load_latest("s1") is None
        assert writer.problems == []

    asyncio.run(use())


# Saving -----------------------------------------------------------------------------------------------------------


def test_the_layout_on_disk(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    data = record(1, created_at=datetime(2024, 2, 29, 23, 59, 58, 999999, tzinfo=UTC))

    SyncCheckpointWriter(root).save(data)

    name = "cp_20240229_235958_id-1.json"  # the record's own moment, not that of another clock
    assert names(root) == [name, "latest.json"]
    assert os.readlink(folder(root) / "latest.json") == name
    assert SyncCheckpointWriter(root).verify(folder(root) / "latest.json")


def test_the_file_is_pretty_json_with_its_checksum_in_it(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    text = text_of(tmp_path, 1)
    stored = json.loads(text)

    assert text == json.dumps(stored, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert text.splitlines()[1].startswith('  "_checksum": "')
    assert stored["_version"] == "1.0"
    assert stored["checkpoint_id"] == "id-1"
    assert stored["created_at"] == "2026-01-31T09:31:00.000000Z"
    assert stored["resume_hint"] is None
    assert ChecksumUtils.verify_checksum(stored) == (True, None)


def test_another_program_can_check_the_file_with_the_older_rule(tmp_path: Path) -> None:
    """Sorted, compact, without the two fields: what the older reader computes, here without our code."""
    fill(tmp_path, 1)
    stored = json.loads(text_of(tmp_path, 1))
    stated = stored.pop("_checksum")
    del stored["_version"]

    text = json.dumps(stored, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == stated


def test_numbers_stand_in_the_file_as_the_older_reader_prints_them(tmp_path: Path) -> None:
    """So its checksum, which is over its own print of them, comes out the same."""
    SyncCheckpointWriter(tmp_path).save(record(1, tool_results=[1e-7, 1e16, 0.00001, 1.0], cost_estimate=2.5e-7))
    text = text_of(tmp_path, 1)
    compact = re.sub(r"\n *", "", text).replace('": ', '":')
    stated = json.loads(text)["_checksum"]

    assert '"tool_results":[1e-7,1e+16,0.00001,1.0]' in compact
    assert '"cost_estimate":2.5e-7' in compact
    body = compact.replace(f'"_checksum":"{stated}",', "").replace('"_version":"1.0",', "")
    assert hashlib.sha256(body.encode()).hexdigest() == stated


def test_what_was_saved_is_loaded_equal(tmp_path: Path) -> None:
    data = record(
        3,
        trigger="before_tool_call",
        messages=[{"role": "assistant", "content": "né\u2028 \x7f \U0001f600", "n": [1, 2.5, -0.0, None, True, {}]}],
        tool_calls_pending=[{"id": 1, "arguments": {"": []}}],
        tool_results={"big": 2**64 - 1, "small": -(2**63), "tiny": 1e-300},
        tokens_used=12345,
        cost_estimate=0.01,
        resume_hint="",
    )
    writer = SyncCheckpointWriter(tmp_path)

    saved = writer.save(data)

    assert saved == "id-3"
    assert type(saved) is CheckpointId
    assert SyncCheckpointWriter(tmp_path).load("s1") == data
    assert SyncCheckpointWriter(tmp_path).load("s1", "id-3") == data


def test_saving_an_id_again_is_nothing_new_if_equal_and_refused_if_not(tmp_path: Path) -> None:
    writer = fill(tmp_path, 2)
    before = {name: (folder(tmp_path) / name).read_bytes() for name in names(tmp_path)}

    assert writer.save(record(1)) == "id-1"
    with pytest.raises(IdTaken, match="id-1") as caught:
        writer.save(record(1, iteration=99))
    with pytest.raises(IdTaken):
        writer.save(record(1, created_at=START))  # another second would be another file

    assert caught.value.checkpoint == "id-1"
    assert {name: (folder(tmp_path) / name).read_bytes() for name in names(tmp_path)} == before
    assert writer.load("s1", "id-1") == record(1)
    assert writer.load("s1") == record(2)


def test_one_number_is_not_another_that_equals_it(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path)
    writer.save(record(1, tool_results=1))

    for other in (1.0, True):
        with pytest.raises(IdTaken):
            writer.save(record(1, tool_results=other))


# Backups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 3, 5])
def test_there_are_as_many_backups_as_there_may_be(tmp_path: Path, most: int) -> None:
    writer = SyncCheckpointWriter(tmp_path).with_max_backups(most)
    writer.save(record(1))
    assert names(tmp_path, ending=".backup") == []  # there was nothing to copy aside

    for number in range(2, 9):
        writer.save(record(number))

    newest = [f"{file_of(tmp_path, number).name}.backup" for number in range(8 - most, 8)]
    assert names(tmp_path, ending=".backup") == newest
    for number in range(8 - most, 8):
        copy = file_of(tmp_path, number, ending=".json.backup")
        assert copy.read_bytes() == file_of(tmp_path, number).read_bytes()
    assert writer.problems == []


def test_the_backup_is_made_before_the_new_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = fill(tmp_path, 1)
    with monkeypatch.context() as patch:
        fault = Fault(patch, "replace", lambda path: path.endswith("id-2.json"))
        with pytest.raises(StoreError):
            writer.save(record(2))
        assert fault.fired

    assert names(tmp_path, ending=".backup") == [f"{file_of(tmp_path, 1).name}.backup"]
    assert writer.load("s1") == record(1)


def test_pruning_touches_nothing_but_backups(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3)
    strange = ["notes.txt", "cp_x.backup.txt", "notes.json"]
    for name in strange:
        (folder(tmp_path) / name).write_text("mine")

    for number in range(4, 12):
        writer.save(record(number))

    assert set(strange) <= set(names(tmp_path))
    assert len(writer.list("s1")) == 11


def test_which_backups_stay_is_not_told_by_the_files_dates(tmp_path: Path) -> None:
    writer = fill(tmp_path, 5)
    for number in range(2, 5):  # the older, the later it seems to be changed
        os.utime(file_of(tmp_path, number, ending=".json.backup"), (9e9 - number, 9e9 - number))
    unreadable = folder(tmp_path) / "cp_20990101_000000_id-99.json.backup"
    unreadable.write_text("no JSON, so nobody knows how old it is")

    writer.save(record(6))

    kept = [re.sub(r".*_(id-\d+).*", r"\1", name) for name in names(tmp_path, ending=".backup")]
    assert kept == ["id-3", "id-4", "id-5"]


def test_damage_is_never_copied_over_a_good_backup(tmp_path: Path) -> None:
    writer = fill(tmp_path, 2)
    good = file_of(tmp_path, 1, ending=".json.backup").read_bytes()
    damage(file_of(tmp_path, 2))

    writer.save(record(3))

    assert file_of(tmp_path, 1, ending=".json.backup").read_bytes() == good
    assert [name for name in names(tmp_path, ending=".backup") if "id-2" in name] == []
    assert "cannot back up" in str(writer.problems[-1])


# Loading ----------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_not_an_error(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path)

    for _ in range(2):
        assert writer.load("s1") is None
        assert writer.load("s1", "id-9") is None
        assert writer.load_latest("s1") is None
        assert writer.list("s1") == []
        assert not writer.delete("s1", "id-9")
        assert writer.clear_session("s1") == 0
        assert not writer.has_checkpoints("s1")
        assert not writer.verify(folder(tmp_path) / "cp_20260101_000000_id-9.json")
        folder(tmp_path).mkdir(parents=True, exist_ok=True)  # and the same with an empty directory
    assert writer.load_report("s1").data is None


def test_a_checkpoint_is_found_by_its_id_whatever_its_time(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3)

    assert writer.load("s1", "id-1") == record(1)
    assert writer.load("s1", CheckpointId("id-3")) == record(3)


def test_the_older_writers_link_tells_which_of_its_files_is_the_newest(tmp_path: Path) -> None:
    old_tree(tmp_path, 3)
    (folder(tmp_path) / "latest.json").symlink_to(file_of(tmp_path, 2).name)

    assert SyncCheckpointWriter(tmp_path).load("s1") == record(2)


def test_without_a_link_the_newest_is_still_the_newest_whatever_dates_names_and_clocks_say(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path)
    for number in range(1, 5):  # a clock that runs backwards: names and moments say the opposite
        writer.save(record(number, created_at=START.replace(year=2040 - number)))
    (folder(tmp_path) / "latest.json").unlink()
    for number in range(1, 5):
        os.utime(file_of(tmp_path, number), (9e9 - number, 9e9 - number))

    for reader in (writer, SyncCheckpointWriter(tmp_path)):
        found = reader.load("s1")
        assert found is not None
        assert found.checkpoint_id == "id-4"
        assert [meta.checkpoint_id for meta in reader.list("s1")] == ["id-4", "id-3", "id-2", "id-1"]
        assert [meta.seq for meta in reader.list("s1")] == [4, 3, 2, 1]


def test_a_tree_that_was_copied_says_the_same(tmp_path: Path) -> None:
    fill(tmp_path / "a", 5)

    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True, copy_function=shutil.copyfile)
    (tmp_path / "b").rename(tmp_path / "c")

    assert SyncCheckpointWriter(tmp_path / "c").load("s1") == record(5)
    assert (folder(tmp_path / "c") / "latest.json").resolve() == file_of(tmp_path / "c", 5)
    SyncCheckpointWriter(tmp_path / "c").save(record(6))
    assert SyncCheckpointWriter(tmp_path / "c").load("s1") == record(6)


def test_a_file_that_vanished_is_not_found(tmp_path: Path) -> None:
    writer = fill(tmp_path, 2)
    assert writer.load("s1", "id-2") == record(2)

    file_of(tmp_path, 2).unlink()

    assert writer.load("s1", "id-2") is None
    assert writer.load("s1") == record(1)


# Listing ----------------------------------------------------------------------------------------------------------


def test_a_list_has_a_summary_of_every_checkpoint_newest_first(tmp_path: Path) -> None:
    writer = fill(tmp_path, 4)
    (folder(tmp_path) / ".tmp_checkpoint_0").write_text("{}")
    (folder(tmp_path) / "cp_20260131_093100_id-1.json.old").write_text("{}")
    (folder(tmp_path) / "xcp_20260131_093100_id-7.json").write_text("{}")

    metas = writer.list("s1")

    assert [meta.checkpoint_id for meta in metas] == ["id-4", "id-3", "id-2", "id-1"]
    assert [meta.created_at for meta in metas] == sorted((meta.created_at for meta in metas), reverse=True)
    first = metas[0]
    assert (first.session_id, first.trigger, first.iteration) == ("s1", "manual", 4)
    assert first.checksum == json.loads(text_of(tmp_path, 4))["_checksum"]
    assert writer.scan("s1").damaged == ()
    assert writer.scan("s1").leftovers == (".tmp_checkpoint_0",)


# Deleting ---------------------------------------------------------------------------------------------------------


def test_deleting_leaves_nothing_of_it_and_moves_the_link(tmp_path: Path) -> None:
    writer = fill(tmp_path, 4)

    assert writer.delete("s1", "id-4")
    assert writer.delete("s1", "id-3")

    assert [name for name in names(tmp_path) if "id-3" in name or "id-4" in name] == []
    assert os.readlink(folder(tmp_path) / "latest.json") == file_of(tmp_path, 2).name
    assert writer.load("s1") == record(2)
    assert not writer.delete("s1", "id-4")
    assert writer.delete("s1", "id-1")
    assert writer.delete("s1", "id-2")
    assert names(tmp_path) == []
    assert writer.load("s1") is None


def test_what_the_older_writer_saved_twice_is_loaded_newest_and_deleted_whole(tmp_path: Path) -> None:
    old_tree(tmp_path, 2)
    again = record(1, iteration=77, created_at=START.replace(year=2027))
    write_old(tmp_path, again)
    (folder(tmp_path) / "latest.json.backup").write_bytes(file_of_old(tmp_path, again).read_bytes())
    writer = SyncCheckpointWriter(tmp_path)

    assert writer.load("s1", "id-1") == again
    assert writer.delete("s1", "id-1")

    assert [name for name in names(tmp_path) if "id-1" in name or name.endswith(".backup")] == []
    assert writer.load("s1", "id-1") is None
    assert writer.load("s1") == record(2)


def test_clearing_a_session_removes_all_of_it_and_nothing_of_another(tmp_path: Path) -> None:
    writer = fill(tmp_path, 5)
    fill(tmp_path, 2, session="s2")

    assert writer.clear_session("s1") == 5

    assert names(tmp_path) == []
    assert writer.load("s1") is None
    assert writer.load("s2") == record(2, "s2")
    writer.save(record(9))
    assert writer.load("s1") == record(9)


def test_a_session_keeps_the_newest_so_many_if_it_is_told_to(tmp_path: Path) -> None:
    writer = fill(tmp_path, 12, max_checkpoints=5)

    assert [meta.checkpoint_id for meta in writer.list("s1")] == [f"id-{number}" for number in range(12, 7, -1)]
    assert len(names(tmp_path, ending=".json")) == 6  # five and the link
    assert len(names(tmp_path, ending=".backup")) == 3
    assert writer.problems == []


# Without links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("platform", "is_link"), [("linux", True), ("darwin", True), ("win32", False)])
def test_the_reference_is_a_link_except_on_windows(platform: str, is_link: bool) -> None:
    code = f"""
import importlib, inspect, sys
from backstay.compat.sessions import writer
sys.platform = {platform!r}
importlib.reload(writer)
made = (writer.CheckpointWriter, writer.SyncCheckpointWriter)
print([inspect.signature(each).parameters["links"].default for each in made])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.strip() == str([is_link, is_link])


def test_without_links_the_reference_is_a_plain_copy_that_never_serves_deleted_data(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3, links=False)
    latest = folder(tmp_path) / "latest.json"

    assert not latest.is_symlink()
    assert latest.read_bytes() == file_of(tmp_path, 3).read_bytes()
    assert writer.delete("s1", "id-3")
    assert latest.read_bytes() == file_of(tmp_path, 2).read_bytes()
    assert writer.load("s1") == record(2)
    assert writer.problems == []
    writer.clear_session("s1")
    assert names(tmp_path) == []


# The older writer's trees -----------------------------------------------------------------------------------------


def write_old(root: Path, data: CheckpointData) -> None:
    """Write a record as the older writer did: no number of its own."""
    folder(root).mkdir(parents=True, exist_ok=True)
    content = json.dumps(ChecksumUtils.add_checksum(data.to_dict()), indent=2, sort_keys=True)
    file_of_old(root, data).write_text(content)


def file_of_old(root: Path, data: CheckpointData) -> Path:
    return folder(root) / f"cp_{data.created_at:%Y%m%d_%H%M%S}_{data.checkpoint_id}.json"


def old_tree(root: Path, count: int) -> None:
    for number in range(1, count + 1):
        write_old(root, record(number))


def test_the_older_writers_files_come_before_ours_and_in_their_own_order(tmp_path: Path) -> None:
    old_tree(tmp_path, 3)
    writer = SyncCheckpointWriter(tmp_path)
    for number in range(1, 4):
        os.utime(file_of(tmp_path, number), (9e9 - number, 9e9 - number))
    assert writer.load("s1") == record(3)

    writer.save(record(4, created_at=START.replace(year=2001)))

    assert [meta.checkpoint_id for meta in writer.list("s1")] == ["id-4", "id-3", "id-2", "id-1"]
    assert [meta.seq for meta in writer.list("s1")] == [4, None, None, None]
    assert writer.load_report("s1").notes == ()


def test_the_older_writers_moments_are_compared_as_moments_and_not_as_text(tmp_path: Path) -> None:
    texts = ["2026-01-31T09:30:00Z", "2026-01-31T09:30:00.5Z", "2026-01-31T10:30:00.75+01:00"]
    for number, text in enumerate(texts, 1):
        stored = ChecksumUtils.add_checksum({**record(number).to_dict(), "created_at": text})
        folder(tmp_path).mkdir(parents=True, exist_ok=True)
        (folder(tmp_path) / f"cp_20260131_093000_id-{number}.json").write_text(json.dumps(stored))

    metas = SyncCheckpointWriter(tmp_path).list("s1")

    assert [meta.checkpoint_id for meta in metas] == ["id-3", "id-2", "id-1"]


def test_the_older_writers_one_backup_is_the_last_resort(tmp_path: Path) -> None:
    old_tree(tmp_path, 1)
    shutil.copyfile(file_of(tmp_path, 1), folder(tmp_path) / "latest.json.backup")
    damage(file_of(tmp_path, 1))

    report = SyncCheckpointWriter(tmp_path).load_report("s1")

    assert report.data == record(1)
    assert report.from_backup
    assert [skip.what for skip in report.skipped] == [file_of(tmp_path, 1).name]


def test_a_person_can_read_and_reformat_a_file_without_breaking_it(tmp_path: Path) -> None:
    writer = fill(tmp_path, 2)
    path = file_of(tmp_path, 2)
    shown = subprocess.run(["cat", str(folder(tmp_path) / "latest.json")], capture_output=True, text=True, check=True)
    assert '"content": "message 2"' in shown.stdout

    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))

    assert writer.verify(path)
    assert writer.load("s1") == record(2)
    assert writer.list("s1")[0].seq == 2


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s1").mkdir()
    (tmp_path / "s1" / "checkpoints").write_text("a file")

    with pytest.raises(StoreError, match="Not a directory"):
        SyncCheckpointWriter(tmp_path).save(record(1))
