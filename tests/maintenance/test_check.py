"""The check: every kind of thing that can be wrong is found, named, and hides nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import Corrupted
from backstay.operations.records import PAGE_ROWS
from backstay.pieces.manifest import Range
from backstay.store.finding import KINDS
from backstay.thread.access import access_of
from support.damage import IDS, change, clock, fill, flip_column, make
from support.thread.stored_runs import put_run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("original") / "agent.db")


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "agent.db"))


@pytest.fixture
def reopened(path: Path) -> Iterator[backstay.Store]:
    with backstay.open(path) as store:
        yield store


def found(path: Path, thread: str | None = None) -> list[tuple[str, str]]:
    with backstay.open(path) as store:
        report = store.check(thread=thread)
        assert {finding.kind for finding in report.findings} <= set(KINDS)
        return [(finding.kind, finding.where) for finding in report.findings]


def test_a_sound_store_is_counted(url: str) -> None:
    with backstay.open(url, clock=clock) as store:
        fill(store)
        put_run(store, "alpha")
        report = store.check()

    assert report
    assert report.good == {"checkpoints": len(IDS), "writes": 1, "effects": 1, "interrupts": 1, "runs": 1}
    assert (report.findings, report.entries, report.counts, report.damaged) == ((), (), {}, ())
    assert str(report) == f"{len(IDS)} checkpoints, 1 write, 1 effect, 1 interrupt, 1 run: all good"


def test_what_is_good_is_listed_if_asked(reopened: backstay.Store) -> None:
    report = reopened.check(every=True)

    assert {entry.checkpoint for entry in report.entries if entry.where.startswith("checkpoint")} == set(IDS)
    assert {entry.kind for entry in report.entries} == {"good"}
    assert len(report.entries) == len(IDS) + 2


def test_one_thread_can_be_checked_alone(path: Path) -> None:
    flip_column(path, "checkpoint", "notes", "id = 'a3'", 3)

    assert found(path, "beta") == []
    assert [kind for kind, _ in found(path, "alpha")] == ["damaged"]
    with backstay.open(path) as store:
        assert store.check(thread="alpha").good["checkpoints"] == 8


def test_a_report_is_plain_values_under_fixed_names(path: Path) -> None:
    flip_column(path, "checkpoint", "notes", "id = 'a3'", 3)
    with backstay.open(path) as store:
        told = json.loads(store.check().to_json())

    assert list(told) == ["url", "namespace", "thread", "ok", "good", "counts", "findings", "entries"]
    assert (told["ok"], told["counts"], told["good"]["checkpoints"]) == (False, {"damaged": 1}, len(IDS) - 1)
    assert told["findings"] == [
        {
            "kind": "damaged",
            "where": "checkpoint a3",
            "what": told["findings"][0]["what"],
            "thread": "alpha",
            "checkpoint": "a3",
            "key": None,
            "branch": "main",
            "scope": "",
            "namespace": "",
            "repair": "restore",
        }
    ]


def test_a_damaged_effect_is_found(path: Path) -> None:
    flip_column(path, "record", "body", "key = 'mail'")

    assert found(path) == [("damaged", "effect 'mail'")]


@pytest.mark.parametrize("at", [0, 8, 100])
def test_a_damaged_interrupt_or_decision_is_found(path: Path, at: int) -> None:
    flip_column(path, "record", "body", "key = 'ask'", at)

    assert found(path) == [("damaged", "interrupt ask")]


def test_a_pending_write_that_cannot_be_read_is_found(path: Path) -> None:
    change(path, "UPDATE write SET body = x'c1'")

    assert found(path) == [("damaged", "checkpoint a7, writes[task][0]")]


@pytest.mark.parametrize("column", ["body", "status", "graph", "fingerprint", "due", "namespace"])
def test_a_damaged_run_is_found(path: Path, column: str) -> None:
    with backstay.open(path) as store:
        put_run(store, "alpha", id="queued")
        put_run(store, "beta", id="other")
    if column == "body":
        flip_column(path, "record", "body", "key = 'queued'")
    else:
        change(path, f"UPDATE record SET {column} = ? WHERE key = 'queued'", (5 if column == "due" else "else",))

    assert {where for _, where in found(path)} <= {"run queued", "row of run 'queued'"}
    assert {kind for kind, _ in found(path)} == {"damaged"}


def test_a_parent_that_is_gone_without_leaving_its_digest_is_missing(path: Path) -> None:
    change(path, "DELETE FROM checkpoint WHERE id = 'b1'")

    assert ("missing", "checkpoint b2") in found(path)


def test_what_belongs_to_a_branch_that_is_gone_is_unreachable(path: Path) -> None:
    change(path, "DELETE FROM branch WHERE thread = (SELECT id FROM thread WHERE name = 'beta')")
    kinds = dict(found(path))

    assert kinds["unreachable"] == "3 rows of checkpoint"
    assert "orphan" in kinds


def test_a_base_that_is_lost_damages_only_what_stands_on_it(path: Path) -> None:
    ((base, needed),) = change(
        path, "SELECT base, group_concat(id) FROM checkpoint WHERE base IS NOT NULL GROUP BY base LIMIT 1"
    )
    change(path, "DELETE FROM blob WHERE id = ?", (base,))
    wrong = {where.removeprefix("checkpoint ") for _, where in found(path) if where.startswith("checkpoint ")}

    assert wrong == set(needed.split(","))


def test_a_base_that_cannot_be_unpacked_damages_only_what_stands_on_it(path: Path) -> None:
    ((base, needed),) = change(
        path, "SELECT base, group_concat(id) FROM checkpoint WHERE base IS NOT NULL GROUP BY base LIMIT 1"
    )
    change(path, "UPDATE blob SET body = x'00' WHERE id = ?", (base,))
    wrong = {where.removeprefix("checkpoint ") for _, where in found(path) if where.startswith("checkpoint ")}

    assert wrong == set(needed.split(","))


def test_long_branches_are_read_page_by_page_and_nothing_is_left_out(tmp_path: Path) -> None:
    count = 2 * PAGE_ROWS + 50
    path = tmp_path / "long.db"
    with backstay.open(path) as store:
        thread = store.thread("t")
        for number in range(count):
            thread.append({"log": [f"{number:04}" * 20]}, id=f"c{number}")
    for number in (0, PAGE_ROWS, count - 1):
        flip_column(path, "checkpoint", "digest", f"id = 'c{number}'", 3)
    with backstay.open(path) as store:
        report = store.check()

    wrong = {f"c{number}" for place in (0, PAGE_ROWS, count - 1) for number in (place, place + 1)} - {f"c{count}"}
    assert set(report.damaged) == wrong  # and the child of each, whose digest covers its parent's
    assert report.good["checkpoints"] == count - len(wrong)


def of_small_items(store: backstay.Store, count: int) -> backstay.Thread:
    """Save a list that grows by a few bytes at a time: they stay in the manifest until there are more."""
    thread = store.thread("t")
    for number in range(count):
        thread.append({"log": [number]}, id=f"c{number}")
    return thread


def test_a_list_of_small_items_is_read_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    with backstay.open(url) as store:
        backend = type(access_of(store).store)
        fetch = backend.fetch
        for count in (400, 800):
            store.delete_all()
            thread, fetched = of_small_items(store, count), 0

            def counted(self: object, ranges: Iterable[Range]) -> list[list[bytes]]:
                nonlocal fetched
                found: list[list[bytes]] = fetch(self, ranges := list(ranges))  # type: ignore[arg-type]
                fetched += sum(each.length for each in ranges)
                return found

            with monkeypatch.context() as patched:
                patched.setattr(backend, "fetch", counted)
                assert thread.check()
            read.append(fetched)

    assert 0 < read[1] < 3 * read[0], read


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("column", ["chunk.body", "checkpoint.manifest"])
def test_damage_in_a_list_of_small_items_is_found_in_each_checkpoint_that_has_it(
    column: str, place: float, tmp_path: Path
) -> None:
    path, (table, name) = tmp_path / "small.db", column.split(".")
    with backstay.open(path) as store:
        of_small_items(store, 400)
    key = {"chunk": "address", "checkpoint": "key"}[table]
    keys = [number for (number,) in change(path, f"SELECT {key} FROM {table} ORDER BY 1")]
    flip_column(path, table, name, f"{key} = {keys[int(place * len(keys))]}", -1)

    with backstay.open(path) as store:
        wrong = set()
        for number in range(400):
            try:
                store.get(f"c{number}")
            except Corrupted:
                wrong.add(f"c{number}")
        assert wrong
        assert set(store.thread("t").check().damaged) == wrong
