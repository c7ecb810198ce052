"""Check and repair are the same over every store. ``restore`` checks nothing, so it also makes the damage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from backstay.pieces.manifest import JOURNAL, Entry, Range, decode_base, decode_manifest
from backstay.store.base import Query, Row
from backstay.thread.access import access_of
from support.damage import IDS, clock, fill, loaded, text

DOCUMENT = hashlib.sha256(text("doc", 2000).encode()).digest()


@pytest.fixture
def filled(url: str) -> Iterator[backstay.Store]:
    with backstay.open(url, clock=clock) as store:
        fill(store)
        yield store


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path_factory.mktemp("backup") / "backup.db", clock=clock) as store:
        store.thread("first").append({"log": [text("other", 5000)]})
        fill(store)
        yield store


def row_of(store: backstay.Store, name: str) -> Row:
    (row,) = access_of(store).store.find(Query("", ids=(name,), payload=True))
    return row


def damage(store: backstay.Store) -> None:
    """Spoil a blob that many checkpoints share, the end of a stream, a description and a manifest."""
    pieces = decode_manifest(row_of(store, "b2").manifest, {})["log"].pieces or ()
    (*_, last) = [piece for piece in pieces if isinstance(piece, Range)]
    assert isinstance(last.source, int)
    rows = [row_of(store, "a6")._replace(notes=b"\xc1"), row_of(store, "c5")._replace(manifest=b"\xc1")]
    spoiled = [(last.source, last.start + last.length - 5, b"wrong")]
    access_of(store).store.restore({DOCUMENT: b"wrong" * 400, bytes(32): b"nobody's" * 50}, spoiled, rows)


def test_everything_is_found_and_made_good(filled: backstay.Store, backup: backstay.Store) -> None:
    right = loaded(filled)
    assert right == loaded(backup)
    damage(filled)
    report = filled.check()
    assert {*IDS} - {*loaded(filled)} == set(report.damaged) == {name for name in IDS if name[0] in "abf"} | {"c5"}
    planned = filled.repair(backup=backup)
    assert filled.check() == report
    done = filled.repair(backup=backup, dry_run=False)

    assert planned.actions == done.actions
    assert done, str(done)
    assert loaded(filled) == right
    assert not filled.repair(backup=backup, dry_run=False).actions
    filled.thread("alpha").append({"log": ["on it goes"]})
    assert filled.check()


def test_what_cannot_be_made_good_is_taken_out(filled: backstay.Store, tmp_path: Path) -> None:
    damage(filled)
    good = loaded(filled)
    report = filled.repair(quarantine_dir=tmp_path / "q", dry_run=False)

    assert report, str(report)
    assert loaded(filled) == good
    assert len(report.files) == len(IDS) - len(good)
    assert [effect.key for effect in filled.thread("alpha").effects()] == ["mail"]


MANY = 60


def many_keys(store: backstay.Store, thread: str, reopen: bool = False) -> dict[str, dict[str, str]]:
    """Change one small key of many at each step, in a thread and in a fork of it; return the state of each step."""
    states: dict[str, dict[str, str]] = {}
    state = {f"key {number}": text(f"start {number}", 40) for number in range(MANY)}
    handle = store.thread(thread)
    for step in range(MANY):
        state[f"key {step * 7 % MANY}"] = text(f"{step}", 40)
        states[handle.save(state, id=f"{thread}{step}").id] = dict(state)
        if step == MANY // 2:
            handle = handle.fork(f"{thread}{step}", branch="fork", id=f"{thread} fork")
        elif reopen:  # a handle that loads the state has not counted what was repeated, so its journal is another one
            access_of(store).services.recent.clear()
            handle = store.thread(thread, branch=handle.branch)
    return states


def journal_of(store: backstay.Store, name: str) -> Entry:
    row = row_of(store, name)
    assert row.base_data is not None, "the state has no base"
    return decode_manifest(row.manifest, decode_base(row.base_data))[JOURNAL]


@pytest.mark.parametrize("same_layout", [True, False])
def test_a_lost_journal_is_found_and_made_good(url: str, tmp_path: Path, same_layout: bool) -> None:
    with backstay.open(url, clock=clock) as store, backstay.open(tmp_path / "backup.db", clock=clock) as backup:
        states, other = many_keys(store, "many"), many_keys(store, "other")
        assert many_keys(backup, "many", reopen=not same_layout) == states
        journal = journal_of(store, f"many{MANY - 1}")
        assert (journal.digest == journal_of(backup, f"many{MANY - 1}").digest) == same_layout
        (*_, (stream, begin, length)) = [piece for piece in journal.pieces or () if isinstance(piece, Range)]
        assert isinstance(stream, int)
        access_of(store).store.restore({}, [(stream, begin + length // 2, b"\xc1" * 9)])
        report = store.check()
        assert 0 < len(report.damaged) < MANY
        assert set(report.damaged) < states.keys()
        assert any("journal" in str(finding) for finding in report.findings), str(report)
        done = store.repair(backup=backup, dry_run=False)

        assert done, str(done)
        assert store.check()
        assert {name: store.get(name).state for name in states} == states  # type: ignore[union-attr]
        assert {name: store.get(name).state for name in other} == other  # type: ignore[union-attr]
