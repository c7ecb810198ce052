"""Bits flipped in a SQLite file, as a disk does it: pages become unreadable, and are read again where digests allow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import BackstayError
from backstay.store.sqlite.database import PAGE_BYTES
from backstay.store.sqlite.repair import ADOPTABLE
from support.damage import IDS, change, clock, fill, loaded, make, text

SEED = 20261116
OTHER_PAGES = 6


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
        hidden = store.check()
        assert [(finding.kind, finding.where, finding.repair) for finding in hidden.findings][:1] == [
            ("damaged", "pages of chunk", "rebuild")
        ]
        read_again = store.repair(dry_run=False)
        assert [action.name for action in read_again.actions] == ["rebuild"]
        assert set(read_again.damaged) == {"a6", "a7"}  # the rest of the page is readable, and is good
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
    ours = [number for number, table in tables.items() if table in ADOPTABLE]
    others = rng.sample(sorted(set(tables) - set(ours)), OTHER_PAGES)
    for number in [*ours, *others]:
        place = (number - 1) * PAGE_BYTES + rng.randrange(PAGE_BYTES)
        path = flipped(original, tmp_path, place, rng.randrange(8))
        outcomes[f"{outcome(path, backup, right)}: {tables[number] if number in ours else 'other tables'}"] += 1

    show("flips by page", f"seed {SEED}, {dict(sorted(outcomes.items()))}")
    assert not [name for name in outcomes if name.startswith("repaired: other")]
    assert sum(count for name, count in outcomes.items() if name.startswith("repaired")) >= len(ours) - 2


def outcome(path: Path, backup: backstay.Store, right: dict[str, object]) -> str:
    """Repair as far as it goes. Whatever can be loaded then must be right."""
    try:
        store = backstay.open(path)
    except BackstayError:
        return "refused at opening"
    with store:
        good = loaded(store)
        assert good.items() <= right.items()
        assert not store.check()
        try:
            store.repair(backup=backup, dry_run=False)
            report = store.repair(backup=backup, dry_run=False)
        except backstay.Corrupted:
            report = None
        after = loaded(store)
        assert good.items() <= after.items() <= right.items()
        if report is not None and report:
            assert set(after) == set(IDS)
            assert [effect.key for effect in store.thread("alpha").effects()] == ["mail"]
            return "repaired"
        return "left as it is"
