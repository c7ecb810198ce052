"""Going on from the newest checkpoint that is good."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import backstay
from support.damage import change

COUNT = 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with backstay.open(tmp_path / "agent.db") as store:
        for number in range(COUNT):
            store.thread("t").append({"log": [f"{number}" * 400]}, id=f"c{number}")
    return tmp_path / "agent.db"


def test_the_newest_that_verifies_is_found_then_that_of_a_backup_then_none(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "backup.db")
    found = []
    for broken in ([], ["c4"], ["c3", "c1"], ["c2", "c0"]):
        for name in broken:
            change(path, "UPDATE checkpoint SET notes = x'c1' WHERE id = ?", (name,))
        with backstay.open(path) as store, backstay.open(tmp_path / "backup.db") as backup:
            good = store.newest_good("t", backup=backup)
            assert good is not None
            found.append((good.checkpoint.id, good.from_backup, good.skipped))
            assert len(good.checkpoint.state["log"]) == int(good.checkpoint.id[1:]) + 1

    assert found == [("c4", False, 0), ("c3", False, 1), ("c2", False, 2), ("c4", True, 5)]
    with backstay.open(path) as store:
        assert store.newest_good("t") is None
        assert store.newest_good("another") is None


def test_it_stays_in_its_branch(path: Path) -> None:
    with backstay.open(path) as store:
        store.thread("t").fork("c2", branch="b", set={"n": 1}, id="fork")
    change(path, "UPDATE checkpoint SET notes = x'c1' WHERE id = 'fork'")
    with backstay.open(path) as store:
        assert store.newest_good("t", branch="b") is None
