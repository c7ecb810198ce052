"""Damaged logs of a directory store: what is flipped, cut, exchanged or planted is noticed, and hides nothing else.

An answer of a damaged store, lists included, is the right one or an error.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import backstay
from backstay.errors import Corrupted, DecodeError, StoreError, StoreRefused
from backstay.store.directory.frame import FILE_HEAD_BYTES, RecordFrame, scan
from backstay.store.finding import DAMAGED, LEFTOVER
from backstay.thread.access import access_of
from support.crash.directory_story import folder_in_memory
from support.running import Show, effort, spread

SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))
RANDOM_FLIPS = 15 * effort()
LOG_FLIPS = 150 * effort()
CUTS = 20 * effort()  # of each log
REPAIRS = 8 * effort()
IDS = ("a1", "a2", "a3", "f1", "b1", "b2", "b3")
BRANCHES = (("alpha", "main"), ("alpha", "what-if"), ("beta", "main"))
REFUSALS = (Corrupted, DecodeError, StoreRefused)

Answers = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_in_memory(tmp_path_factory.mktemp("damage")) as made:
        yield made


def fill(path: Path, close: bool = True) -> None:
    """Make a small store with several branches and all kinds of records in several logs."""
    store = backstay.open(f"dir:{path}")
    alpha, beta = store.thread("alpha"), store.thread("beta")
    alpha.save({"log": ["one"], "n": 1}, id="a1")
    beta.save({"b": 1}, id="b1")
    alpha.save({"log": ["one", "two"], "n": 2}, id="a2")
    alpha.fork("a2", branch="what-if", set={"n": -2}, id="f1")
    beta.save({"b": 2}, id="b2")
    alpha.tag("a1", "good")
    beta.delete_checkpoint("b1")
    alpha.save({"log": ["one", "two", "three"], "n": 3}, id="a3")
    beta.save({"b": 3}, id="b3")
    if close:
        store.close()


class Original:
    """The undamaged store: its files and what it answers."""

    def __init__(self, path: Path) -> None:
        self.files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        with backstay.open(f"dir:{path}") as store:
            assert store.check()
            self.answers = ask(store)
        assert not [answer for answer in self.answers.values() if isinstance(answer, Exception)]

    @property
    def logs(self) -> dict[str, bytes]:
        return {name: data for name, data in self.files.items() if name.endswith(".log")}

    def write(self, folder: Path, changes: dict[str, bytes | None]) -> Path:
        """Make a copy in which files are changed, or missing."""
        place = Path(tempfile.mkdtemp(dir=folder))
        (place / "branches").mkdir()
        for name, data in (self.files | changes).items():
            if data is not None:
                (place / name).write_bytes(data)
        return place

    def log_of(self, thread: str, branch: str = "main") -> str:
        """Return the name of a branch's log."""
        numbers = {("alpha", "main"): 2, ("beta", "main"): 4, ("alpha", "what-if"): 5}
        name = f"branches/{numbers[thread, branch]:08}.log"
        assert thread.encode() in self.files[name]
        return name


@pytest.fixture(scope="module")
def original(folder: Path) -> Original:
    fill(folder / "original")
    return Original(folder / "original")


def frames(data: bytes) -> list[RecordFrame]:
    mark = data[FILE_HEAD_BYTES - 8 : FILE_HEAD_BYTES]
    parts = list(scan(lambda at, length: data[at : at + length], mark, FILE_HEAD_BYTES, len(data)))
    return [part for part in parts if isinstance(part, RecordFrame)]


def plain(found: backstay.Checkpoint | None) -> Any:
    return None if found is None else (found.id, found.seq, found.step, found.parent_id, found.digest, found.state)


def ask(store: backstay.Store) -> Answers:
    """Ask a store everything; an answer is a value or one of the errors that tell of damage."""
    questions: dict[str, Callable[[], Any]] = {name: functools.partial(_get, store, name) for name in IDS}
    for thread, branch in BRANCHES:
        questions[f"latest {thread} {branch}"] = functools.partial(_latest, store, thread, branch)
        questions[f"history {thread} {branch}"] = functools.partial(_history, store, thread, branch)
    questions["tags"] = lambda: [meta.id for meta in store.thread("alpha").history(tag="good")]
    answers: Answers = {}
    for name, question in questions.items():
        try:
            answers[name] = question()
        except REFUSALS as error:
            answers[name] = error
    return answers


def _get(store: backstay.Store, name: str) -> Any:
    return plain(store.get(name))


def _latest(store: backstay.Store, thread: str, branch: str) -> Any:
    return plain(store.thread(thread, branch=branch).latest())


def _history(store: backstay.Store, thread: str, branch: str) -> Any:
    return [meta.id for meta in store.thread(thread, branch=branch).history()]


def judge(original: Original, place: Path, readable: set[str]) -> tuple[str, list[str]]:
    """Open a damaged copy, ask it everything, and return what became of it and every wrong answer."""
    try:
        store = backstay.open(f"dir:{place}")
    except REFUSALS as error:
        return "refused", [f"{readable} should be readable: {error}"] if readable else []
    with store:
        reported = [finding for finding in store.check().findings if finding.kind != LEFTOVER]
        answers = ask(store)
    refused = [name for name, answer in answers.items() if isinstance(answer, Exception)]
    wrong = [
        f"{name}: {answer}"
        for name, answer in answers.items()
        if name not in refused and not is_right(original, name, answer, bool(reported))
    ]
    wrong += [f"{name} should be readable: {answers[name]}" for name in readable & set(refused)]
    if refused and not reported:
        wrong.append(f"{refused} cannot be read, and the check does not say why")
    return ("partly refused" if refused else "reported" if reported else "harmless"), wrong


def is_right(original: Original, name: str, answer: Any, reported: bool) -> bool:
    right = original.answers[name]
    if answer == right:
        return True
    if name == "b1":  # was deleted; if the record of that is damaged, it is back, as it was
        return reported and answer[0] == "b1" and answer[-1] == {"b": 1}
    return False


def flipped(data: bytes, place: int, bits: int) -> bytes:
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


class Damage(NamedTuple):
    """Files that are changed, or missing (None); and what can surely still be read."""

    changes: dict[str, bytes | None]
    readable: set[str] = set()


def flip(original: Original, name: str, place: int, bits: int) -> Damage:
    """Return a flip, and what it cannot hide: the other thread, and what stands before it in the same log."""
    data = original.files[name]
    kept = {"a1", "a2", "a3", "f1"} if name == original.log_of("beta") else {"b2", "b3"}
    for frame in frames(data):
        if frame.end <= place or place < FILE_HEAD_BYTES:
            kept |= {each for each in IDS if each.encode() in frame.head[:40] and each != "b1"}
    return Damage({name: flipped(data, place, bits)}, kept)


def total(original: Original, folder: Path, damages: list[Damage]) -> Counter[str]:
    """Judge every damaged copy; none may give a wrong answer."""
    outcomes: Counter[str] = Counter()
    for damage in damages:
        place = original.write(folder, damage.changes)
        outcome, wrong = judge(original, place, damage.readable)
        assert not wrong, f"{place}: {wrong}"
        outcomes[outcome] += 1
        shutil.rmtree(place)
    return outcomes


# Flipped bits -----------------------------------------------------------------------------------------------------


@pytest.mark.effort
def test_no_flip_in_any_log_gives_a_wrong_answer(original: Original, folder: Path, show: Show) -> None:
    rng = random.Random(SEED)
    places = [(name, place) for name, data in original.logs.items() for place in range(len(data))]
    damages = [flip(original, name, place, 1 << rng.randrange(8)) for name, place in spread(places, LOG_FLIPS)]

    outcomes = total(original, folder, damages)

    show("flips in logs", f"seed {SEED}, {len(damages)} of {len(places)}, {dict(outcomes)}, 0 wrong")
    assert outcomes["harmless"] == 0


@pytest.mark.effort
def test_no_random_flip_in_the_files_of_a_store_that_was_never_closed_gives_a_wrong_answer(
    folder: Path, show: Show
) -> None:
    """The logs have room at their ends, of which nothing is written yet; and the control file is flipped as well."""
    rng = random.Random(SEED)
    fill(folder / "open", close=False)
    shutil.copytree(folder / "open", folder / "left")
    left = Original(folder / "left")
    sizes = {name: min(len(data), 900) for name, data in left.files.items()}  # of the control file: what is in use
    damages = []
    for _ in range(RANDOM_FLIPS):
        name = rng.choice(list(sizes))
        place = rng.randrange(sizes[name])
        damages.append(Damage({name: flipped(left.files[name], place, 1 << rng.randrange(8))}))

    outcomes = total(left, folder, damages)

    show("random flips", f"seed {SEED}, {len(damages)}, {dict(outcomes)}, 0 wrong")


# Cut ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.effort
def test_an_acknowledged_end_that_is_cut_off_is_damage(original: Original, folder: Path, show: Show) -> None:
    """Many lengths of the last two records of every branch: going on from an older checkpoint would lose the newer."""
    cut = 0
    for thread, branch in BRANCHES:
        name = original.log_of(thread, branch)
        data = original.files[name]
        first = frames(data)[-2:][0].start
        for length in spread(range(first, len(data)), CUTS):
            place = original.write(folder, {name: data[:length]})
            with backstay.open(f"dir:{place}") as store:
                with pytest.raises(Corrupted, match="repair"):
                    store.thread(thread, branch=branch).latest()
                with pytest.raises(Corrupted):
                    store.thread(thread, branch=branch).save({"n": 0})
                assert DAMAGED in {finding.kind for finding in access_of(store).store.check()}
            assert (place / name).read_bytes() == data[:length], "nothing is cut off that may be needed"
            outcome, wrong = judge(original, place, {"a1", "a2"} if thread == "beta" else {"b2", "b3"})
            assert (outcome, wrong) == ("partly refused", [])
            shutil.rmtree(place)
            cut += 1

    show("acknowledged ends cut off", f"{cut} lengths, all noticed")
    assert cut > min(300, 2 * CUTS)


@pytest.mark.effort
def test_the_same_after_the_log_was_written_anew(folder: Path) -> None:
    """Then the control file knows an older mark of it; the number of its last record tells."""
    fill(folder / "compacted")
    with backstay.open(f"dir:{folder / 'compacted'}") as store:
        store.compact()
    compacted = Original(folder / "compacted")
    name = compacted.log_of("alpha")
    data = compacted.files[name]
    for length in spread(range(FILE_HEAD_BYTES, frames(data)[-2].end), CUTS):
        place = compacted.write(folder, {name: data[:length]})
        with backstay.open(f"dir:{place}") as store, pytest.raises(Corrupted):
            store.thread("alpha").latest()
        shutil.rmtree(place)


@pytest.mark.effort
def test_a_torn_end_of_which_nobody_knows_is_cut_off_and_told(original: Original, folder: Path, show: Show) -> None:
    """Without the control file, as after a copy by Git, the end of a log may be a write that did not end."""
    cut = 0
    for thread, branch in BRANCHES:
        name = original.log_of(thread, branch)
        data = original.files[name]
        last = frames(data)[-1]
        for length in spread(range(last.start + 1, len(data)), CUTS):
            place = original.write(folder, {name: data[:length], "control": None})
            with backstay.open(f"dir:{place}") as store:
                assert {finding.kind for finding in access_of(store).store.check()} == {LEFTOVER}
                head = store.thread(thread, branch=branch).latest()
                before = original.answers[f"history {thread} {branch}"][1:]
                assert (head.id if head else None) == (before[0] if before else None)
                store.thread(thread, branch=branch).save({"n": 0}, id="next")
            with backstay.open(f"dir:{place}") as store:
                assert store.check()
                assert store.get("next") is not None
            shutil.rmtree(place)
            cut += 1

    show("torn ends", f"{cut} lengths, all cut off and told")
    assert cut > min(200, 2 * CUTS)


# Other files in their place ---------------------------------------------------------------------------------------


def test_two_logs_that_were_exchanged_are_noticed(original: Original, folder: Path) -> None:
    one, two = original.log_of("alpha"), original.log_of("beta")
    place = original.write(folder, {one: original.files[two], two: original.files[one]})

    assert judge(original, place, set()) == ("partly refused", [])
    with backstay.open(f"dir:{place}") as store:
        store.compact()
    assert (place / one).read_bytes() == original.files[two], "what is not understood is not written anew"
    assert (place / two).read_bytes() == original.files[one]


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_log_of_another_store_is_noticed(original: Original, folder: Path, branch: tuple[str, str]) -> None:
    other = Path(tempfile.mkdtemp(dir=folder)) / "other"
    with backstay.open(f"dir:{other}") as store:
        for thread in ("gamma", "delta"):
            store.thread(thread).save({"foreign": True}, id=f"{thread}1")
        store.thread("gamma").fork("gamma1", branch="x", id="x1")
    name = original.log_of(*branch)
    place = original.write(folder, {name: (other / name).read_bytes()})

    outcome, wrong = judge(original, place, {"b2", "b3"} if branch[0] == "alpha" else {"a1", "a2", "a3", "f1"})

    assert (outcome, wrong) == ("partly refused", [])


def test_a_link_in_the_place_of_a_log_is_refused(original: Original, folder: Path) -> None:
    name = original.log_of("alpha")
    place = original.write(folder, {name: None})
    secret = place / "secret"
    secret.write_bytes(original.files[name])
    (place / name).symlink_to(secret)

    with pytest.raises(StoreError, match="symbolic link"):
        backstay.open(f"dir:{place}")
    assert secret.read_bytes() == original.files[name]


def test_a_folder_or_a_pipe_in_the_place_of_a_log_is_refused(original: Original, folder: Path) -> None:
    name = original.log_of("alpha")
    for make in (Path.mkdir, os.mkfifo):
        place = original.write(folder, {name: None})
        make(place / name)
        with pytest.raises(StoreError):
            backstay.open(f"dir:{place}")


def test_garbage_behind_the_end_hides_nothing(original: Original, folder: Path) -> None:
    rng = random.Random(SEED)
    for length in (1, 7, 60, 600, 5000):
        for thread, branch in BRANCHES:
            name = original.log_of(thread, branch)
            place = original.write(folder, {name: original.files[name] + rng.randbytes(length)})
            outcome, wrong = judge(original, place, set(IDS) - {"b1"})
            assert wrong == [], (outcome, length)
            shutil.rmtree(place)


# Repair -----------------------------------------------------------------------------------------------------------


@pytest.mark.effort
def test_a_repair_makes_every_branch_usable_from_its_newest_whole_checkpoint(
    original: Original, folder: Path, show: Show
) -> None:
    rng = random.Random(SEED)
    repaired = 0
    for name, data in original.logs.items():
        for place_in_log in spread(range(len(data)), REPAIRS):
            place = original.write(folder, {name: flipped(data, place_in_log, 1 << rng.randrange(8))})
            with backstay.open(f"dir:{place}") as store:
                before = ask(store)
            repair(place)
            with backstay.open(f"dir:{place}") as store:
                after = ask(store)
                for thread, branch in BRANCHES:
                    store.thread(thread, branch=branch).latest()
                    store.thread(thread, branch=branch).save({"n": 9})
            lost = [name for name in IDS if is_value(before[name]) and before[name] != after[name]]
            assert not lost, f"{place}: {lost} could be read before the repair"
            shutil.rmtree(place)
            repaired += 1

    show("repairs", f"{repaired}, 0 lost")
    assert repaired >= min(100, 2 * REPAIRS)


def is_value(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, Exception)


def repair(place: Path) -> None:
    """Repair as the guide says: once for what hides others, once for what that shows."""
    with backstay.open(f"dir:{place}") as store:
        for _ in range(2):
            store.repair(quarantine_dir=place / "quarantine", dry_run=False)
        wrong = [finding for finding in store.check().findings if finding.kind != LEFTOVER]
        assert not wrong, f"{place}: {wrong}"
    assert [*(place / "damaged").glob("*"), *(place / "quarantine").glob("*")], "the damaged bytes are kept"
