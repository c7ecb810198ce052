"""Damaged database files: a flipped bit or a cut end is noticed where it is read, or harmless; no answer is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import backstay
from backstay.errors import BackstayError
from backstay.model.checkpoint import Write
from backstay.store.sqlite.database import PAGE_BYTES
from support.crash.damaged import CUT, Answer, Damage, Verdict, ask, damaged, fill, text
from support.processes import Nursery
from support.running import Show, effort, spread

SEED = int(os.environ.get("BACKSTAY_SEED", "20261115"))
RANDOM_FLIPS = 150 * effort()
PAGE_FLIPS = 205 * effort()  # with twenty times the effort, every byte
BRANCHES = 2


@dataclass(frozen=True)
class Original:
    """The undamaged store: its bytes, and what it answers."""

    path: str
    data: bytes
    answers: dict[str, Answer]

    def page_with(self, needle: bytes) -> int:
        """Return the number (from 0) of the only page that holds these bytes."""
        places = {at // PAGE_BYTES for at in range(len(self.data)) if self.data.startswith(needle, at)}
        assert len(places) == 1
        return places.pop()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    path = tmp_path_factory.mktemp("original") / "agent.db"
    fill(str(path))
    with backstay.open(path) as store:
        assert store.check()
        answers = ask(store)
    assert not [answer for answer in answers.values() if answer is None or isinstance(answer, BackstayError)]
    return Original(str(path), path.read_bytes(), answers)  # closed: nobody has it open any more


def judged(original: Original, folder: Path, damages: list[Damage]) -> Verdict:
    """Judge damaged copies in several processes at once."""
    total = Verdict()
    with contextlib.ExitStack() as stack:
        running = []
        for branch in range(BRANCHES):
            place = folder / str(branch)
            place.mkdir()
            copy = shutil.copy(original.path, place / "original.db")
            nursery = stack.enter_context(Nursery())
            pid = nursery.start(
                "support.crash.damaged:judge_all",
                [str(copy), str(place), damages[branch::BRANCHES]],
                str(place / "verdict"),
            )
            running.append((nursery, pid, place / "verdict"))
        for nursery, pid, out in running:
            assert nursery.wait(pid) == 0, "an exception that is not ours: see above"
            total += Verdict(**json.loads(out.read_text()))
    assert total.tried == len(damages)
    return total


@pytest.mark.effort
def test_no_random_flip_gives_a_wrong_answer(original: Original, tmp_path: Path, show: Show) -> None:
    """Every second one in bytes that are not zero: most of a small file is empty, and a flip there is harmless."""
    rng = random.Random(SEED)
    used = [place for place, byte in enumerate(original.data) if byte]
    places = [rng.choice(used) if number % 2 else rng.randrange(len(original.data)) for number in range(RANDOM_FLIPS)]

    verdict = judged(original, tmp_path, [(place, 1 << rng.randrange(8)) for place in places])

    show("random flips", f"seed {SEED}, {verdict}")
    assert verdict.wrong == []
    assert verdict.refused + verdict.reported > RANDOM_FLIPS // 4, "the flips hit nothing"


@pytest.mark.effort
@pytest.mark.parametrize("what", ["header", "newest checkpoint"])
def test_no_flip_in_any_byte_of_a_page_gives_a_wrong_answer(
    original: Original, tmp_path: Path, show: Show, what: str
) -> None:
    rng = random.Random(SEED)
    page = 0 if what == "header" else original.page_with(original.answers["latest beta"]["digest"])
    flips = [(page * PAGE_BYTES + place, 1 << rng.randrange(8)) for place in spread(range(PAGE_BYTES), PAGE_FLIPS)]

    verdict = judged(original, tmp_path, flips)

    show(f"bytes of the page of the {what}", f"seed {SEED}, {verdict}")
    assert verdict.wrong == []
    assert verdict.refused + verdict.reported > 0


def test_no_truncation_gives_a_wrong_answer(original: Original, tmp_path: Path, show: Show) -> None:
    """Files of no byte and of one are left out: SQLite takes both for a new database (see ``test_sqlite_opening``)."""
    rng = random.Random(SEED)
    whole = len(original.data)
    pages = range(PAGE_BYTES, whole, PAGE_BYTES)
    lengths = {*pages, *(page - 1 for page in pages), *(page + 1 for page in pages), 2, 15, 16, 99, 100, 511, 512}
    lengths |= {rng.randrange(2, whole) for _ in range(100)} | {whole - 1}

    verdict = judged(original, tmp_path, [(CUT, length) for length in sorted(lengths)])

    show("truncations", f"seed {SEED}, {verdict}")
    assert verdict.wrong == []
    assert verdict.refused > 0


def test_a_file_that_ends_inside_a_page_gives_no_wrong_answer(tmp_path: Path) -> None:
    """SQLite fills the rest of the page with zeros."""
    path = tmp_path / "agent.db"
    writes = tuple(Write(f"task {index:02}", 0, "channel", text(f"write {index}", 300)) for index in range(60))
    with backstay.open(path) as store:
        store.thread("thread").save({"n": 1}, id="c")
        store.thread("thread").write("c", writes)
    data = path.read_bytes()  # closed: nobody has it open any more
    noticed = 0

    for length in range(len(data) - PAGE_BYTES + 1, len(data), 25):
        path.write_bytes(data[:length])
        try:
            with backstay.open(path) as store:
                found = store.get("c")
                assert found is not None
                assert found.writes == writes
        except BackstayError:
            noticed += 1
        for name in ("agent.db-wal", "agent.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)

    assert noticed


def damage_a_chunk(original: Original, path: Path) -> None:
    needle = text("late", 600)[:100].encode()  # stands in a row of chunks as it is, too short to be compressed
    path.write_bytes(damaged(original.data, (original.data.index(needle) + 50, 1)))


def test_one_damaged_row_leaves_the_checkpoints_of_others_readable(
    original: Original, tmp_path: Path, show: Show
) -> None:
    damage_a_chunk(original, tmp_path / "damaged.db")
    with backstay.open(tmp_path / "damaged.db") as store:
        answers = ask(store)

    kept = [name for name, answer in answers.items() if not isinstance(answer, BackstayError)]
    lost = [name for name in answers if name not in kept]
    show("one flip in a row of chunks", f"{len(kept)} answers of {len(answers)} readable, not readable: {lost}")
    assert lost
    assert {name: answers[name] for name in kept} == {name: original.answers[name] for name in kept}
    assert {"a0", "b0", "history alpha", "history beta"} <= set(kept)


def test_a_check_reports_a_damaged_row_and_continues(original: Original, tmp_path: Path) -> None:
    damage_a_chunk(original, tmp_path / "damaged.db")
    with backstay.open(tmp_path / "damaged.db") as store:
        report = store.check()

    assert not report
    assert report.good["checkpoints"] + len(report.damaged) == 14
    assert {finding.checkpoint for finding in report.findings} >= {"a9"}
