"""Any damage, any repair: what could be loaded before can be loaded after, and is the same."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backstay
from backstay.maintenance.report import may_hide_checkpoints
from support.damage import IDS, change, clock, fill, flip, loaded, make, text
from support.running import effort

FLIPPED = (
    ("chunk", "address", "body"),
    ("blob", "id", "body"),
    ("blob", "id", "digest"),
    ("checkpoint", "key", "manifest"),
    ("checkpoint", "key", "notes"),
    ("checkpoint", "key", "digest"),
)
NUMBERED = (("checkpoint", "key", "step"), ("checkpoint", "key", "created"), ("blob", "id", "size"))
LOSABLE = (("chunk", "address"), ("blob", "id"), ("checkpoint", "key"))
CHANGES = (
    "DELETE FROM ref WHERE abs(random()) % 3 = 0",
    "UPDATE branch SET head = head - 1",
    "UPDATE branch SET last_seq = 1",
    "UPDATE thread SET floor = 2",
    "UPDATE ref SET owned = 0",
)

REPAIRS_MAX = 3

Damage = tuple[str, tuple[str, ...] | str, int, int]

damages = st.one_of(
    st.tuples(st.just("flip"), st.sampled_from(FLIPPED), st.integers(0, 100), st.integers(0, 5000)),
    st.tuples(st.just("number"), st.sampled_from(NUMBERED), st.integers(0, 100), st.integers(1, 1 << 40)),
    st.tuples(st.just("lose"), st.sampled_from(LOSABLE), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("change"), st.sampled_from(CHANGES), st.just(0), st.just(0)),
)


def damage(path: Path, what: str, place: Any, row: int, value: int) -> None:
    if what == "change":
        change(path, place)
        return
    table, key, *column = place
    keys = [number for (number,) in change(path, f"SELECT {key} FROM {table} ORDER BY {key}")]
    if not keys:
        return
    number = keys[row % len(keys)]
    if what == "lose":
        change(path, f"DELETE FROM {table} WHERE {key} = ?", (number,))
        return
    ((old,),) = change(path, f"SELECT {column[0]} FROM {table} WHERE {key} = ?", (number,))
    new = old + value if what == "number" else flip(old, value) if old else b"x"
    change(path, f"UPDATE {table} SET {column[0]} = ? WHERE {key} = ?", (new, number))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("original") / "agent.db")


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path_factory.mktemp("backup") / "backup.db", clock=clock) as store:
        store.thread("first").append({"log": [text("other", 5000)]})
        fill(store)
        yield store


@settings(max_examples=4 * effort())
@given(what=st.lists(damages, min_size=1, max_size=4), has_backup=st.booleans(), quarantines=st.booleans())
def test_no_repair_makes_anything_worse(
    original: Path, backup: backstay.Store, what: list[Damage], has_backup: bool, quarantines: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copy(original, Path(folder) / "agent.db"))
        for each in what:
            damage(path, *each)
        with backstay.open(path) as store:
            good = loaded(store)
            repair = functools.partial(
                store.repair,
                backup=backup if has_backup else None,
                quarantine_dir=Path(folder) / "q" if quarantines else None,
                dry_run=False,
            )
            report = repair()
            for _ in range(REPAIRS_MAX):  # rows that hide others are repaired first, at a call of their own
                if report.before is None or not any(map(may_hide_checkpoints, report.before.findings)):
                    break
                report = repair()
            after = loaded(store)
            again = store.check()

            assert {name: after.get(name) for name in good} == good
            assert set(again.damaged) <= set(IDS) - set(good)
            assert {name: state for name, state in loaded(backup).items() if name in after} == after
            assert report.before is not None
            assert set(again.damaged) <= set(report.before.damaged)
            if quarantines:
                assert again.damaged == ()
            if has_backup:  # the rows that are there are all good; only what was lost as a whole stays lost
                rows = {str(name) for (name,) in rows_of(path)}
                assert set(after) == rows & set(IDS)


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    return change(path, "SELECT id FROM checkpoint")
