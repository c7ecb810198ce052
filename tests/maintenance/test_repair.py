"""Repair: what can be made good is, from whatever has the right bytes; what was good stays so; nothing unasked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.maintenance import Report, read_quarantine
from backstay.pieces.body import to_body
from backstay.store.sqlite.store import SqliteStore
from support.damage import IDS, change, clock, dump, fill, flip_column, loaded, make, text

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("original") / "agent.db")


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "agent.db"))


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[backstay.Store]:
    """Give a store with the same checkpoints, all of their bytes at other places. Nobody changes it."""
    with backstay.open(tmp_path_factory.mktemp("backup") / "backup.db", clock=clock) as store:
        for number in range(5):
            store.thread("first").append({"log": [text(f"other {number}", 5000)]})
        fill(store)
        yield store


def names_of(report: Report) -> set[str]:
    return {action.name for action in report.actions}


def all_of(path: Path) -> dict[str, object]:
    with backstay.open(path) as store:
        return loaded(store)


# What damages, and what is needed to make it good -----------------------------------------------------------------


def lose_references(path: Path) -> None:
    change(path, "DELETE FROM ref")


def move_heads_back(path: Path) -> None:
    change(path, "UPDATE branch SET head = head - 1, last_seq = 1")


def forget_numbers(path: Path) -> None:
    change(path, "UPDATE thread SET floor = floor + 1")


def leave_bytes_behind(path: Path) -> None:
    change(path, "INSERT INTO blob (digest, size, body) VALUES (zeroblob(32), 3, x'010203')")
    change(path, "INSERT INTO chunk SELECT value - 1 << 28, 3, x'010203' FROM counter WHERE name = 'stream'")
    change(path, "INSERT INTO ref SELECT branch + 50, source, 0, 0 FROM ref")


REBUILDABLE = [lose_references, move_heads_back, forget_numbers, leave_bytes_behind]


def flip_shared_document(path: Path) -> None:
    flip_column(path, "blob", "body", f"size = 2000 AND digest = x'{_sha(text('doc', 2000)).hex()}'")


def flip_stream(path: Path) -> None:
    flip_column(path, "chunk", "body", "address = (SELECT min(address) FROM chunk)")


def lose_stream(path: Path) -> None:
    change(path, "DELETE FROM chunk WHERE address = (SELECT max(address) FROM chunk)")


def lose_all_streams(path: Path) -> None:
    change(path, "DELETE FROM chunk")


def lose_blobs(path: Path) -> None:
    change(path, "DELETE FROM blob")


def flip_every_blob(path: Path) -> None:
    for (number,) in change(path, "SELECT id FROM blob"):
        flip_column(path, "blob", "body", f"id = {number}", 7)


def flip_notes(path: Path) -> None:
    flip_column(path, "checkpoint", "notes", "id = 'a3'", 3)


def flip_digest(path: Path) -> None:
    flip_column(path, "checkpoint", "digest", "id = 'a7'", 3)


def change_step(path: Path) -> None:
    change(path, "UPDATE checkpoint SET step = step + 100 WHERE id = 'b1'")


def break_manifest(path: Path) -> None:
    change(path, "UPDATE checkpoint SET manifest = x'c1' WHERE id IN ('a2', 'b1', 'c5')")


def swap_manifests(path: Path) -> None:
    change(path, "UPDATE checkpoint SET manifest = (SELECT manifest FROM checkpoint WHERE id = 'b0') WHERE id = 'b2'")


def lose_parent(path: Path) -> None:
    change(path, "DELETE FROM checkpoint WHERE id = 'b1'")


NEED_BACKUP = [
    flip_shared_document,
    flip_stream,
    lose_stream,
    lose_all_streams,
    lose_blobs,
    flip_every_blob,
    flip_notes,
    change_step,
    break_manifest,
    swap_manifests,
]


def stream_of(path: Path, thread: str) -> int:
    """Return the number of a stream that a thread owns."""
    statement = """
      SELECT r.source FROM ref r JOIN branch br ON br.id = r.branch JOIN thread t ON t.id = br.thread
      WHERE r.owned AND t.name = ?"""
    return int(change(path, statement, (thread,))[0][0])


def _sha(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()


# Rebuilding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", REBUILDABLE, ids=lambda damage: damage.__name__)
def test_what_follows_from_the_rest_is_rebuilt(path: Path, damage: Damage) -> None:
    before = all_of(path)
    sound = dump(path)
    damage(path)
    assert dump(path) != sound
    with backstay.open(path) as store:
        assert not store.check()
        report = store.repair(dry_run=False)

        assert report
        assert names_of(report) == {"rebuild"}
        assert loaded(store) == before
        assert not store.repair(dry_run=False).actions


def test_after_lost_references_a_delete_takes_nothing_that_others_need(path: Path) -> None:
    lose_references(path)
    with backstay.open(path) as store:
        store.repair(dry_run=False)
        store.thread("alpha").delete()

        assert set(loaded(store)) == {name for name in IDS if name[0] in "bc"}
        assert store.check()


def test_after_a_rebuild_a_branch_goes_on(path: Path) -> None:
    for damage in (lose_references, move_heads_back, forget_numbers):
        damage(path)
    with backstay.open(path) as store:
        store.repair(dry_run=False)
        assert store.repair(dry_run=False), "first the rows, then what follows from them"
        thread = store.thread("alpha")
        newest = thread.latest()
        assert newest is not None
        saved = thread.append({"log": ["on it goes" * 100]})

        assert newest.id == "a7"
        assert saved.seq > newest.seq
        assert store.check()


# Restoring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", NEED_BACKUP, ids=lambda damage: damage.__name__)
def test_what_a_backup_has_becomes_good_with_the_same_digest(
    path: Path, backup: backstay.Store, damage: Damage
) -> None:
    before = all_of(path)
    damage(path)
    with backstay.open(path) as store:
        broken = set(before) - set(loaded(store))
        assert broken
        alone = store.repair()
        assert not alone
        planned = store.repair(backup=backup)
        done = store.repair(backup=backup, dry_run=False)

        assert planned.actions == done.actions
        assert done, str(done)
        assert done.good["checkpoints"] == len(IDS)
        assert loaded(store) == before
        assert "restore from backup" in names_of(done)
        assert not store.repair(backup=backup, dry_run=False).actions


def test_bytes_that_another_checkpoint_of_the_store_has_need_no_backup(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    items = [text(f"item {number}", 300) for number in range(6)]
    with backstay.open(path) as store:
        grown = store.thread("grown")
        for count in range(1, 7):
            grown.append({"log": [items[count - 1]]}, id=f"g{count}")  # a stream
        store.thread("copy").save({"log": items}, id="copy")  # one blob with the same bytes
        before = [store.get("g6"), store.get("copy")]
    flip_column(path, "chunk", "body", "address = (SELECT max(address) FROM chunk)")
    with backstay.open(path) as store:
        assert store.check().damaged == ("g6",)
        report = store.repair(dry_run=False)

        assert report
        assert [(action.name, action.checkpoint) for action in report.actions] == [("restore", "g6")]
        assert [store.get("g6"), store.get("copy")] == before


def test_a_digest_that_a_child_proves_needs_no_backup(path: Path) -> None:
    before = all_of(path)
    flip_column(path, "checkpoint", "digest", "id = 'a3'", 3)
    with backstay.open(path) as store:
        assert set(store.check().damaged) == {"a3", "a4"}
        report = store.repair(dry_run=False)

        assert report
        assert names_of(report) == {"restore"}
        assert loaded(store) == before


def test_a_base_under_a_wrong_name_needs_no_backup(path: Path) -> None:
    """What the manifests say is proven by the checkpoints' digests, wherever it came from."""
    before = all_of(path)
    flip_column(path, "blob", "digest", "id = (SELECT max(base) FROM checkpoint)")
    with backstay.open(path) as store:
        assert len(store.check().damaged) > 5
        assert store.repair(dry_run=False)

        assert loaded(store) == before


def test_a_digest_that_nothing_proves_is_not_believed(path: Path) -> None:
    flip_digest(path)
    with backstay.open(path) as store:
        report = store.repair(dry_run=False)

        assert not report
        assert [finding.checkpoint for finding in report.findings] == ["a7"]


def test_the_digest_of_a_lost_parent_comes_from_the_backup(path: Path, backup: backstay.Store) -> None:
    lose_parent(path)
    with backstay.open(path) as store:
        assert "b2" in store.check().damaged
        assert store.repair(backup=backup, dry_run=False)

        assert set(loaded(store)) == set(IDS) - {"b1"}


def test_a_manifest_that_names_the_bytes_of_others_does_not_get_its_own_put_there(
    path: Path, backup: backstay.Store
) -> None:
    """An address has no digest. To believe a damaged one would write over what others need."""
    before = all_of(path)
    alpha, beta = stream_of(path, "alpha"), stream_of(path, "beta")
    ((manifest,),) = change(path, "SELECT manifest FROM checkpoint WHERE id = 'b2'")
    wrong = bytes(manifest).replace(bytes([beta]), bytes([alpha]))
    assert wrong != manifest
    change(path, "UPDATE checkpoint SET manifest = ? WHERE id = 'b2'", (wrong,))
    with backstay.open(path) as store:
        assert "b2" in store.check().damaged
        report = store.repair(backup=backup, dry_run=False)

        assert report, str(report)
        assert loaded(store) == before


def test_a_writer_who_saw_a_head_that_was_written_anew_is_out_of_date(path: Path, backup: backstay.Store) -> None:
    """It would build on the places where the bytes were, and these are gone."""
    with backstay.open(path) as store:
        writer = store.thread("gamma")
        writer.latest()
        change(path, "UPDATE checkpoint SET manifest = x'c1' WHERE id = 'c6'")
        assert store.repair(backup=backup, dry_run=False)
        with pytest.raises(backstay.Conflict):
            writer.append({"items": ["on it goes"]})
        writer.latest()
        writer.append({"items": ["on it goes"]})

        assert store.check()


def test_another_checkpoint_under_the_same_id_is_not_taken_for_the_right_one(path: Path, tmp_path: Path) -> None:
    flip_notes(path)
    with backstay.open(path) as store, backstay.open(tmp_path / "other.db") as other:
        other.thread("alpha").save({"n": 1}, id="a3")
        report = store.repair(backup=other, dry_run=False)

        assert not report
        assert not report.actions


# Quarantine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [lose_all_streams, lose_blobs, break_manifest, flip_digest, lose_parent],
    ids=lambda damage: damage.__name__,
)
def test_what_nothing_can_repair_is_taken_out_only_if_asked(path: Path, tmp_path: Path, damage: Damage) -> None:
    damage(path)
    good = all_of(path)
    folder = tmp_path / "quarantine"
    with backstay.open(path) as store:
        left = store.repair(dry_run=False)
        assert not left
        assert loaded(store) == good
        report = store.repair(dry_run=False, quarantine_dir=folder)

        assert report, str(report)
        assert report.before is not None
        assert loaded(store) == good
        assert {action.checkpoint for action in report.actions if action.name == "quarantine"} == set(
            report.before.damaged
        )
        assert len(report.files) == len(report.before.damaged)
        assert not store.repair(dry_run=False, quarantine_dir=folder).actions
    assert sorted(map(str, folder.iterdir())) == sorted(report.files)


def test_a_quarantine_file_holds_everything_that_could_be_read(path: Path, tmp_path: Path) -> None:
    stream = stream_of(path, "alpha")
    with backstay.open(path) as store:
        state = store.get("a6").state  # type: ignore[union-attr]
        good = {key: to_body(value, key).data for key, value in state.items()}
    flip_column(path, "chunk", "body", f"address = (SELECT min(address) FROM chunk WHERE address >> 28 = {stream})")
    change(path, "UPDATE checkpoint SET manifest = x'c1' WHERE id = 'b1'")
    with backstay.open(path) as store:
        report = store.repair(dry_run=False, quarantine_dir=tmp_path / "q")
    files = {kept.checkpoint["id"]: kept for kept in map(read_quarantine, report.files)}

    unreadable, damaged = files["b1"], files["a6"]
    assert (unreadable.values, unreadable.checkpoint["branch"]) == (None, ["", "beta", "", "main"])
    assert unreadable.findings[0]["checkpoint"] == "b1"
    values = {value["key"]: b"".join(part for _, part in value["parts"]) for value in damaged.values or ()}
    assert values["doc"] == text("doc", 2000).encode()
    log = next(value for value in damaged.values or () if value["key"] == "log")
    assert log["size"] / 2 < len(values["log"]) < log["size"]  # all but the damaged row
    assert all(good["log"][at : at + len(part)] == part for at, part in log["parts"])
    assert [asked["key"] for asked in damaged.interrupts] == ["ask"]
    assert [write["task_id"] for write in files["a7"].writes] == ["task"]
    assert all(re.fullmatch(r"[0-9a-f]{32}-[0-9a-f]{16}\.quarantine", Path(each).name) for each in report.files)


def test_damaged_writes_do_not_keep_their_checkpoint_from_being_taken_out(path: Path, tmp_path: Path) -> None:
    change(path, "UPDATE write SET body = x'c1'")
    change(path, "UPDATE checkpoint SET manifest = x'c1' WHERE id = 'a7'")
    with backstay.open(path) as store:
        (file,) = store.repair(dry_run=False, quarantine_dir=tmp_path / "q").files
        assert store.check()

    assert read_quarantine(file).writes == [{"task_id": "task", "index": 0, "body": b"\xc1", "task_path": ""}]


def test_a_damaged_quarantine_file_is_refused(path: Path, tmp_path: Path) -> None:
    flip_notes(path)
    with backstay.open(path) as store:
        (file,) = store.repair(dry_run=False, quarantine_dir=tmp_path).files
    data = Path(file).read_bytes()
    Path(file).write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])

    with pytest.raises(backstay.Corrupted):
        read_quarantine(file)
    with pytest.raises(backstay.StoreError):
        read_quarantine(tmp_path / "not there")


def test_after_the_newest_was_taken_out_the_newest_good_one_is_loaded_and_the_branch_goes_on(
    path: Path, tmp_path: Path
) -> None:
    change(path, "UPDATE checkpoint SET notes = x'c1' WHERE id IN ('a6', 'a7')")
    with backstay.open(path) as store:
        with pytest.raises(backstay.BackstayError):
            store.thread("alpha").latest()
        store.repair(dry_run=False, quarantine_dir=tmp_path / "q")
        thread = store.thread("alpha")
        newest = thread.latest()
        assert newest is not None
        thread.append({"log": ["after"]})

        assert newest.id == "a5"
        assert store.check()


def test_effects_of_a_branch_that_was_taken_out_stay(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        store.thread("t").save({"n": 1}, id="only")
        store.thread("t").effect("mail", lambda: 1)
    change(path, "UPDATE checkpoint SET notes = x'c1'")
    with backstay.open(path) as store:
        store.repair(dry_run=False, quarantine_dir=tmp_path / "q")

        assert [effect.key for effect in store.thread("t").effects()] == ["mail"]
        assert store.thread("t").latest() is None


# Nothing unasked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [lose_references, flip_stream, break_manifest], ids=lambda damage: damage.__name__)
def test_a_dry_run_changes_nothing_and_says_what_would_be_done(
    path: Path, tmp_path: Path, backup: backstay.Store, damage: Damage
) -> None:
    damage(path)
    before = dump(path)
    with backstay.open(path) as store:
        report = store.repair(backup=backup, quarantine_dir=tmp_path / "q")

    assert dump(path) == before
    assert not (tmp_path / "q").exists()
    assert report, str(report)
    assert not report.applied
    assert report.actions
    assert "actions planned" in str(report)


def test_a_sound_store_has_nothing_to_repair(path: Path, tmp_path: Path) -> None:
    before = dump(path)
    with backstay.open(path) as store:
        report = store.repair(dry_run=False, quarantine_dir=tmp_path / "q")

    assert (str(report), dump(path)) == ("nothing to repair", before)


def test_a_branch_under_a_lease_is_left_alone_unless_forced(path: Path, tmp_path: Path) -> None:
    flip_notes(path)
    before = dump(path)
    with backstay.open(path) as store:
        lease = store.thread("alpha").lease(ttl=3600, heartbeat=False)
        with lease, pytest.raises(backstay.Fenced):
            store.repair(dry_run=False, quarantine_dir=tmp_path / "q")
        with store.thread("beta").lease(ttl=3600, heartbeat=False):  # another branch's is none of our business
            assert store.repair(dry_run=False, quarantine_dir=tmp_path / "q")
    assert dump(path) != before


def test_force_repairs_under_a_lease(path: Path, tmp_path: Path) -> None:
    flip_notes(path)
    with backstay.open(path) as store, store.thread("alpha").lease(ttl=3600, heartbeat=False):
        assert store.repair(dry_run=False, quarantine_dir=tmp_path / "q", force=True)


def test_of_one_thread_only_that_is_repaired(path: Path, tmp_path: Path) -> None:
    flip_notes(path)
    change_step(path)
    with backstay.open(path) as store:
        report = store.repair(store.check(thread="beta"), dry_run=False, quarantine_dir=tmp_path / "q")
        assert {action.checkpoint for action in report.actions} == {"b1"}
        assert store.check().damaged == ("a3",)


def test_a_report_of_another_namespace_is_refused(path: Path) -> None:
    with backstay.open(path) as store, backstay.open(path, namespace="other") as other:
        theirs = other.check()
        with pytest.raises(backstay.InvalidInput):
            store.repair(theirs)


def test_a_report_is_plain_values_under_fixed_names(path: Path, tmp_path: Path) -> None:
    flip_notes(path)
    with backstay.open(path) as store:
        report = json.loads(store.repair(dry_run=False, quarantine_dir=tmp_path / "q").to_json())

    of_a_check = ["url", "namespace", "thread", "ok", "good", "counts", "findings", "entries"]
    assert list(report) == [*of_a_check, "before", "actions", "applied", "files"]
    assert list(report["before"]) == of_a_check
    assert (report["before"]["ok"], report["applied"], report["ok"]) == (False, True, True)
    assert list(report["actions"][0]) == ["name", "where", "what", "thread", "checkpoint", "branch"]


def test_a_lost_thread_is_reported_and_its_bytes_stay(path: Path) -> None:
    """Only a backup has its name, without which nothing of it can be verified."""
    change(path, "DELETE FROM thread WHERE id = (SELECT min(id) FROM thread)")
    with contextlib.closing(SqliteStore(str(path))) as backend:
        bytes_before = backend.sizes().sources
        with backstay.open(path) as store:
            for _ in range(4):
                done = store.repair(dry_run=False)

            assert not done.actions, "a program that repairs until nothing is left to do would never end"
            assert not done
            assert "unreachable" in {finding.kind for finding in store.check().findings}
        assert backend.sizes().sources == bytes_before


def test_a_repaired_counter_gives_no_number_that_an_open_store_has_reserved(path: Path) -> None:
    with backstay.open(path) as mine, backstay.open(path) as other:
        mine.thread("mine").save({"a": ["x" * 600]})
        mine.thread("mine").append({"a": ["y" * 600]})  # its store has reserved some numbers of streams
        change(path, "UPDATE counter SET seal = seal + 1 WHERE name = 'stream'")
        assert other.repair(dry_run=False)
        for number in range(20):
            for store, name in ((mine, "mine"), (other, "other")):
                thread = store.thread(name)
                thread.append({f"list {number}": ["x" * 600]})
                thread.append({f"list {number}": ["y" * 600]})
        assert mine.check()


def test_a_branch_that_is_dropped_leaves_its_numbers_behind(path: Path) -> None:
    with backstay.open(path) as store:
        thread = store.thread("numbers")
        root = thread.save({"n": 0})
        fork = thread.fork(root, branch="lost")
        last = [fork.append({"log": [number]}) for number in range(3)][-1]
    change(path, f"DELETE FROM checkpoint WHERE key >> 32 = (SELECT id FROM branch WHERE name = '{fork.branch}')")
    with backstay.open(path) as store:
        store.repair(dry_run=False)
        assert store.thread("numbers").fork(root.id, branch="new").append({"log": [9]}).seq > last.seq


def test_nothing_is_added_to_a_branch_whose_base_is_missing(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "agent.db") as store:
        thread = store.thread("t")
        thread.save({f"key {number}": "a value of some length " * 5 for number in range(60)})
        change(tmp_path / "agent.db", "DELETE FROM blob")
        with pytest.raises(backstay.Corrupted, match="base"):
            thread.append(set={"n": 1})
        assert len(list(thread.history())) == 1


def test_nothing_good_goes_while_something_damaged_may_need_it(path: Path) -> None:
    """A manifest that cannot be read needs bytes that look like nobody's."""
    change(path, "UPDATE checkpoint SET manifest = x'c1' WHERE id IN ('c5', 'c6')")
    with contextlib.closing(SqliteStore(str(path))) as backend:
        bytes_before = backend.sizes().sources
        with backstay.open(path) as store:
            store.repair(dry_run=False)

        assert backend.sizes().sources == bytes_before
