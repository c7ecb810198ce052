"""Verification and measuring."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.maintenance.check import check
from backstay.store.memory import MemoryStore
from backstay.store.memory.chunks import MemoryContent
from backstay.thread.access import access_of
from backstay.thread.store import Store, make_services
from support import damage
from support.meanwhile import Meanwhile


def opened(backend: MemoryStore) -> Store:
    """Return a store that has read nothing yet."""
    return Store(backend, make_services("", None))


def filled(backend: MemoryStore) -> Store:
    store = opened(backend)
    thread = store.thread("t")
    thread.save({"m": ["x" * 600], "doc": "d" * 5000, "small": 1})
    for number in range(5):
        thread.append({"m": [f"{number}" * 300]})
    store.thread("other").save({"doc": "o" * 5000})
    return store


def test_an_intact_store_verifies(store: backstay.Store) -> None:
    thread = store.thread("t")
    saved = thread.save({"m": ["x" * 600]})

    assert store.check()
    assert thread.check()
    assert thread.check(saved)
    assert str(store.check()) == "1 checkpoint: all good"
    with pytest.raises(backstay.NotFound):
        thread.check("unknown")


def test_damaged_bytes_are_named_with_their_place_and_harm_nothing_else() -> None:
    backend = MemoryStore()
    store = filled(backend)
    stream = max(backend._tables.bytes.streams)
    chunks = backend._tables.bytes.streams[stream]
    offset, data = chunks[3][0], chunks[3][1].read()
    chunks[3] = (offset, MemoryContent(bytes([data[0] ^ 1]) + data[1:]))
    report = store.check()

    assert {(finding.thread, finding.key) for finding in report.findings} == {("t", "m")}
    assert len(report.findings) == 3
    with pytest.raises(backstay.Corrupted, match=r"state\.m do not match"):
        opened(backend).thread("t").latest()
    intact = store.thread("t").at(2)
    assert intact is not None
    assert len(intact.state["m"]) == 2
    assert store.thread("other").latest() is not None


def test_a_missing_blob_is_found() -> None:
    backend = MemoryStore()
    store = filled(backend)
    blobs = backend._tables.bytes.blobs
    blobs.pop(next(name for name, body in blobs.items() if body.read() == b"o" * 5000))
    report = store.check()

    assert [(finding.kind, finding.thread, finding.key) for finding in report.findings] == [
        ("missing", None, None),
        ("damaged", "other", "doc"),
    ]
    with pytest.raises(backstay.Corrupted):
        opened(backend).thread("other").latest()


@pytest.mark.parametrize("field", ["notes", "digest", "parent_id", "step", "created_us", "manifest", "id"])
def test_a_changed_field_of_a_row_is_found(field: str) -> None:
    backend = MemoryStore()
    store = filled(backend)
    row = backend._tables.rows["", next(store.thread("t").history()).id]
    changes: dict[str, Any] = {
        "notes": b"\x81\xa5label\xa1x",
        "digest": bytes(32),
        "parent_id": next(store.thread("other").history()).id,
        "step": row.step + 1,
        "created_us": row.created_us + 1,
        "manifest": backend._tables.rows["", next(store.thread("other").history()).id].manifest,
        "id": "renamed",
    }
    branch = backend._tables.branches[row.branch]
    branch.rows[-1] = backend._tables.rows["", row.id] = row._replace(**{field: changes[field]})

    assert not store.check()
    with pytest.raises(backstay.BackstayError):
        store.thread("t").latest()


def test_a_checkpoint_moved_to_another_thread_is_found() -> None:
    backend = MemoryStore()
    store = filled(backend)
    theirs = backend._tables.branches[next(key for key in backend._tables.branches if key.thread == "other")]
    mine = backend._tables.branches[next(key for key in backend._tables.branches if key.thread == "t")]
    moved = mine.rows[-1]._replace(branch=theirs.key)
    theirs.rows[-1] = moved
    backend._tables.rows["", moved.id] = moved

    assert not store.check()


def test_bytes_that_belong_to_nothing_are_found() -> None:
    backend = MemoryStore()
    store = filled(backend)
    backend._tables.bytes.blobs[bytes(32)] = MemoryContent(b"left over")
    kinds = [finding.kind for finding in store.check().findings]

    assert kinds == ["orphan"]


def test_a_page_changed_by_another_program_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with backstay.open(path) as store:
        store.thread("t").save({"doc": "d" * 5000})
    ((body,),) = damage.change(path, "SELECT body FROM blob")
    data = path.read_bytes()
    path.write_bytes(damage.flip(data, data.rindex(body) + len(body) // 2))
    with backstay.open(path) as store:
        report = store.check()

        assert not report
        assert [(finding.kind, finding.thread, finding.key) for finding in report.findings] == [("damaged", "t", "doc")]


def test_stats_tell_what_full_copies_would_take(store: backstay.Store) -> None:
    thread = store.thread("t")
    thread.save({"m": [], "doc": "d" * 200_000})
    for number in range(50):
        thread.append({"m": [f"{number:03}" * 100]})
    stats = store.stats()
    mine = thread.stats()

    assert (stats.threads, stats.branches, stats.checkpoints) == (1, mine.branches, mine.checkpoints) == (1, 1, 51)
    assert stats.full_copy_bytes == mine.full_copy_bytes
    assert mine.full_copy_bytes == sum(meta.size for meta in thread.history())
    assert mine.full_copy_bytes > 51 * 200_000
    assert set(mine.keys) == {"m", "doc"}
    assert mine.stored_bytes < mine.full_copy_bytes / 10
    assert stats.ratio > 5


def test_compacting_changes_nothing_but_the_size(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "x.db") as store:
        thread = store.thread("t")
        for number in range(400):
            thread.append({"m": [f"{number:05}" * 120]})
        states = [(meta.id, store.get(meta.id).state) for meta in thread.history(limit=20)]  # type: ignore[union-attr]
        before = access_of(store).store.sizes()
        store.compact()
        after = access_of(store).store.sizes()

        assert sum(after.sources.values()) < sum(before.sources.values())
        assert store.compact() == 0
        assert [(name, store.get(name).state) for name, _ in states] == states  # type: ignore[union-attr]
        thread.append({"m": ["goes on"]})
        assert store.check()


def test_the_log_is_folded_into_the_file_on_close(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "x.db") as store:
        store.thread("t").save({"n": 1})

    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.db", "x.db-lock"]
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    assert connection.execute("SELECT count(*) FROM checkpoint").fetchone() == (1,)
    connection.close()


def test_saves_during_a_check_are_no_finding(store: backstay.Store) -> None:
    """Another writer saves before each store call of the check in turn, and before all of them."""
    access = access_of(store)
    for number in range(3):
        store.thread("busy").append({"n": [number]}, tags=["kept"])

    def checked(*calls: int) -> Meanwhile:
        between = Meanwhile(access.store)
        for call in calls:
            between.before(call, lambda: store.thread("busy").append({"n": [0]}))
        report = check(between, access.services)
        assert report, str(report)
        return between

    calls = checked().calls
    assert calls > 3
    for call in range(1, calls + 1):
        assert checked(call).is_over
    checked(*range(1, calls + 1))


def test_stats_name_the_parts_of_a_store_that_they_could_not_count(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'store'}"
    with backstay.open(url) as store:
        for name in ("a", "b"):
            for number in range(5):
                store.thread(name).append({"m": [f"{name} {number} {'x' * 200}"]})
        right = store.stats()
        assert (right.checkpoints, right.damaged) == (10, ())
    (log,) = (path for path in (tmp_path / "store").rglob("*.log") if b"a 2 xx" in path.read_bytes())
    data = log.read_bytes()
    reported = 0
    for place in range(len(data) // 4, len(data) // 2, 7):
        log.write_bytes(damage.flip(data, place))
        with backstay.open(url) as store:
            stats = store.stats()
        if stats.damaged:
            reported += 1
            assert {part.thread_id for part in stats.damaged} <= {"a", None}
        else:
            assert (stats.threads, stats.branches, stats.checkpoints) == (2, 2, 10), place
            assert stats.full_copy_bytes == right.full_copy_bytes, place
    assert reported > 0
