"""Bits flipped in a SQLite file, as a disk does it: found where they are read, and repaired where digests allow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import BackstayError
from backstay.store.sqlite.database import PAGE_BYTES
from support.damage import IDS, change, clock, fill, loaded, make, text

SEED = 20261116


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("original") / "agent.db")


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path_factory.mktemp("backup") / "backup.db", clock=clock) as store:
        store.thread("first").append({"log": [text("other", 5000)]})
        fill(store)
        yield store


def pages(path: Path) -> dict[int, str]:
    """Return which table or index each page is of."""
    tables = dict(change(path, "SELECT name, tbl_name FROM sqlite_schema"))
    return {number: tables.get(name, name) for name, number in change(path, "SELECT name, pageno FROM dbstat")}


def flipped(original: Path, folder: Path, place: int, bit: int) -> Path:
    data = bytearray(original.read_bytes())
    data[place] ^= 1 << bit
    path = folder / "agent.db"
    for name in ("agent.db-wal", "agent.db-shm"):
        (folder / name).unlink(missing_ok=True)
    path.write_bytes(bytes(data))
    return path


def test_a_flip_in_a_page_of_bytes_is_repaired_from_a_backup(
    original: Path, backup: backstay.Store, tmp_path: Path
) -> None:
    needle = text("entry 6", 400).encode()[:100]
    place = original.read_bytes().rindex(needle) + 50  # earlier ones are what is left in pages that were written over
    path = flipped(original, tmp_path, place, 0)
    with backstay.open(original) as sound:
        before = loaded(sound)
    with backstay.open(path) as store:
        assert set(store.check().damaged) == {"a6", "a7"}  # the rest of the page is good
        assert not store.repair(dry_run=False).actions
        assert store.repair(backup=backup, dry_run=False)

        assert loaded(store) == before
        assert store.check()


def test_no_flip_anywhere_is_repaired_into_a_wrong_answer(
    original: Path, backup: backstay.Store, tmp_path: Path, show: Callable[[str, object], None]
) -> None:
    rng = random.Random(SEED)
    with backstay.open(original) as sound:
        right = loaded(sound)
    outcomes: Counter[str] = Counter()
    tables = pages(original)
    for number, table in tables.items():
        place = (number - 1) * PAGE_BYTES + rng.randrange(PAGE_BYTES)
        path = flipped(original, tmp_path, place, rng.randrange(8))
        outcomes[f"{outcome(path, backup, right)}: {table}"] += 1

    show("flips by page", f"seed {SEED}, {dict(sorted(outcomes.items()))}")
    assert sum(count for name, count in outcomes.items() if name.startswith("repaired")) > 0


def outcome(path: Path, backup: backstay.Store, right: dict[str, object]) -> str:
    """Repair as far as it goes. Whatever can be loaded before and then must be right."""
    try:
        store = backstay.open(path)
    except BackstayError:
        return "refused at opening"
    with store:
        good = loaded(store)
        assert {name: right.get(name) for name in good} == good
        if store.check():  # the bit is in no row
            assert good == right
            return "harmless"
        try:
            store.repair(backup=backup, dry_run=False)
            report = store.repair(backup=backup, dry_run=False)
        except backstay.Corrupted:
            report = None
        after = loaded(store)
        assert {name: right.get(name) for name in after} == after
        assert set(good) <= set(after)
        if report is not None and report:
            assert set(after) == set(IDS)
            assert [effect.key for effect in store.thread("alpha").effects()] == ["mail"]
            return "repaired"
        return "left as it is"
