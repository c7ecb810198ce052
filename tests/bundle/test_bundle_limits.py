"""Bundles made to take memory and time: each is refused at its limit, and no memory is taken beyond it."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest

import backstay
from backstay.bundle import BundleLimits, check_bundle, export_bundle, import_bundle, read_bundle, records
from backstay.bundle.blocks import WORK_PER_BYTE, BlockWriter
from backstay.bundle.records import CheckpointRecord, Edit
from backstay.bundle.state import WINDOW_BYTES, State, entries_of, follow
from backstay.errors import BackstayError, InvalidInput, LimitExceeded
from backstay.model.checkpoint import CheckpointMeta, unchecked
from backstay.operations.arguments import KEYS_MAX
from backstay.operations.rows import NO_PARENT, checkpoint_digest, checksum, from_microseconds
from backstay.pieces.manifest import SYSTEM_NAMES, Key, root_digest
from backstay.store.base import BranchKey, WriteRow
from support.running import Show, effort

MIB = 1024 * 1024
Records = Iterator[tuple[int, bytes]]

HEADER = (records.HEADER, records.pack_names(""))
THREAD = (records.THREAD, records.pack_names("t"))


def branch_record(number: int) -> tuple[int, bytes]:
    return records.BRANCH, records.pack_branch(BranchKey("", "t", "", f"b{number}"), None)


class Forge:
    """Makes checkpoints of any size whose digests are right, each on the newest state of a branch."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.made = 0

    def checkpoint(
        self, branch: int, base: int | None, edits: list[Edit], between: bytes = b"", writes: int = 0
    ) -> Records:
        """Yield the records of one checkpoint; ``between`` is what each edit with a length takes its bytes from."""
        self.made += 1
        name = f"cp{self.made}"
        record = CheckpointRecord(
            branch, name, False, None, None, base, 1, 0, bytes(32), b"", (), None, [], edits, writes
        )
        new = {edit.key: [between[: edit.length]] for edit in edits if edit.length}
        before: State = {} if base is None else self.states[base]
        state = self.states[branch] = follow(before, record, new, base == branch)
        values: dict[str, Any] = {"id": name, "thread_id": "t", "branch": f"b{branch}", "step": 1}
        meta = unchecked(CheckpointMeta, {**values, "created_at": from_microseconds(0)})
        entries = entries_of(state)
        record.digest = checkpoint_digest(NO_PARENT, root_digest(entries), list(state), meta, 0, b"")
        size = sum(entry.size for entry in entries.values())
        record.notes = checksum(b"", name, None, 1, 0, record.digest, size)
        yield records.CHECKPOINT, record.pack()
        yield from ((records.VALUE_BYTES, data) for (data,) in new.values())


def written(path: Path, made: Records, counts: tuple[int, ...] = (0, 0, 0, 0, 0)) -> Path:
    """Write a bundle of any records, with all its checksums right; the counts at its end may be wrong."""
    with path.open("wb") as file:
        writer = BlockWriter(file)
        for kind, data in (HEADER, *made):
            writer.add(kind, data)
        writer.finish(records.pack_numbers(*counts))
    return path


# Files that ask for much ------------------------------------------------------------------------------------------


def one_byte_of_a_large_value(changes: int) -> Records:
    forge, size = Forge(), 100 * MIB
    yield from (THREAD, branch_record(0))
    yield from forge.checkpoint(0, None, [Edit("k", "b", 0, 0, 0, size)], bytes(size))
    for _ in range(changes):
        yield from forge.checkpoint(0, 0, [Edit("k", "b", 0, size // 2, size - size // 2 - 1, 1)], b"x")


def a_state_of_keys(count: int, size: int) -> Records:
    yield from (THREAD, branch_record(0))
    edits = [Edit(f"k{n}", "b", 0, 0, 0, size) for n in range(count)]
    yield from Forge().checkpoint(0, None, edits, bytes(size))


def a_state_that_never_comes() -> Records:
    edits = [Edit(f"k{n}", "b", 0, 0, 0, 200 * MIB) for n in range(3)]
    record = CheckpointRecord(0, "cp", False, None, None, None, 1, 0, bytes(32), b"", (), None, [], edits)
    yield from (THREAD, branch_record(0), (records.CHECKPOINT, record.pack()))


def branches_of_many_empty_values() -> Records:
    forge = Forge()
    yield from (THREAD, branch_record(0))
    yield from forge.checkpoint(0, None, [Edit(f"k{n}", "b", 0, 0, 0, 0) for n in range(KEYS_MAX)])
    first = forge.states[0]
    for number in range(1, 40):
        forge.states = {0: first}
        yield branch_record(number)
        yield from forge.checkpoint(number, 0, [])


def the_same_checkpoint_again() -> Records:
    yield from (THREAD, branch_record(0))
    again = list(Forge().checkpoint(0, None, [Edit("k", "b", 0, 0, 0, 1)], b"x"))
    for _ in range(10_000):
        yield from again


def many_pending_writes() -> Records:
    yield from (THREAD, branch_record(0))
    write = records.pack_write(WriteRow("task", 0, "c", "b", 0, bytes(120 * MIB)))
    yield from Forge().checkpoint(0, None, [], writes=100)
    for _ in range(5):
        yield records.WRITE, write


def writes_without_end() -> Records:
    yield from (THREAD, branch_record(0))
    yield from Forge().checkpoint(0, None, [], writes=2**62)
    write = records.pack_write(WriteRow("task", 0, "c", "b", 0, b""))
    for _ in range(200_000):
        yield records.WRITE, write


def a_list_of_empty_lists(kind: int) -> Records:
    yield THREAD
    yield kind, b"\xdd" + (24 * MIB).to_bytes(4, "big") + b"\x90" * (24 * MIB)


def notes_of_empty_lists() -> Records:
    yield from (THREAD, branch_record(0))
    made = ormsgpack.packb({"x": [[]] * (4 * MIB)})
    made += checksum(made, "cp", None, 1, 0, bytes(32), 0)
    yield (
        records.CHECKPOINT,
        CheckpointRecord(0, "cp", False, None, None, None, 1, 0, bytes(32), made, (), None).pack(),
    )


def damage_without_end() -> Records:
    yield THREAD
    for _ in range(30_000):
        yield records.DAMAGE, records.pack_names("", "x" * 50)


def threads_without_end() -> Records:
    for _ in range(30_000):
        yield THREAD


ATTACKS: dict[str, tuple[Callable[[], Records], int]] = {
    "a byte of 100 MB changed ten times": (lambda: one_byte_of_a_large_value(10), 100 * MIB),
    "a state of 600 MB": (a_state_that_never_comes, 0),
    "forty branches of ten thousand empty values": (branches_of_many_empty_values, 0),
    "the same checkpoint ten thousand times": (the_same_checkpoint_again, 0),
    "600 MB of pending writes": (many_pending_writes, 760 * MIB),  # 512 MiB, and two copies of the one being read
    "pending writes without end": (writes_without_end, 0),
    "24 MB of empty lists for a checkpoint": (lambda: a_list_of_empty_lists(records.CHECKPOINT), 24 * MIB),
    "24 MB of empty lists for an interrupt": (lambda: a_list_of_empty_lists(records.INTERRUPT), 24 * MIB),
    "24 MB of empty lists for an effect": (lambda: a_list_of_empty_lists(records.EFFECT), 24 * MIB),
    "24 MB of empty lists for a thread": (lambda: a_list_of_empty_lists(records.THREAD), 24 * MIB),
    "a description of four million empty lists": (notes_of_empty_lists, 8 * MIB),
    "thirty thousand reports of damage": (damage_without_end, 0),
    "thirty thousand threads": (threads_without_end, 0),
}
"""What is in the file, and the bytes that its largest state or record may take."""

LONG = {
    "a byte of 100 MB changed ten times",
    "forty branches of ten thousand empty values",
    "600 MB of pending writes",
}

CHILD = """
import sys
import backstay
from backstay.bundle import import_bundle, check_bundle

def peak():  # not ru_maxrss, which begins with the size of the process that started this one
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

with backstay.open(sys.argv[2]) as store:
    store.thread("warm").save({"k": 1})
    for read in (lambda: check_bundle(sys.argv[1]), lambda: import_bundle(sys.argv[1], store)):
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak begins anew
        before = peak()
        try:
            ended = "read" if read() else "refused"
        except backstay.BackstayError as error:
            ended = type(error).__name__
        print(ended, peak() - before)
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.effort(2) if name in LONG else ()) for name in ATTACKS]
)
def test_a_small_file_takes_no_more_memory_than_its_largest_state_and_the_window(
    name: str, tmp_path: Path, show: Show
) -> None:
    made, largest = ATTACKS[name]
    path = written(tmp_path / "forged", made())
    size = path.stat().st_size
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(tmp_path / "store.db")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (verified, taken), (imported, importing) = (line.split() for line in run.stdout.splitlines())
    show(f"{name}, {size:,} bytes", f"{verified} {int(taken) // MIB} MiB, {imported} {int(importing) // MIB} MiB")

    assert size < 200_000
    assert verified in ("Corrupted", "LimitExceeded")
    assert imported in ("Corrupted", "LimitExceeded", "refused")
    assert int(taken) <= largest + WINDOW_BYTES + 32 * MIB
    assert int(importing) <= 5 * largest + WINDOW_BYTES + 32 * MIB


@pytest.mark.parametrize(
    ("made", "limit"),
    [
        pytest.param(lambda: a_state_of_keys(3, MIB), "state_bytes", id="state"),
        pytest.param(the_same_checkpoint_again, "work_bytes", id="work"),
    ],
)
def test_the_error_names_the_limit_and_a_raised_limit_lets_the_file_pass(
    made: Callable[[], Records], limit: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "forged", made())
    trusting = BundleLimits(state_bytes=2**31, work_bytes=2**40)

    with pytest.raises(LimitExceeded, match=f"BundleLimits\\({limit}=") as raised:
        check_bundle(path, limits=BundleLimits(state_bytes=2 * MIB))
    assert raised.value.limit == limit
    with pytest.raises(BackstayError, match="does not hold as many"):  # all of it was read, to its forged end
        check_bundle(path, limits=trusting)


def test_limits_are_numbers_of_bytes() -> None:
    wrong: list[dict[str, Any]] = [{"state_bytes": -1}, {"state_bytes": None}, {"work_bytes": 1.5}]
    for numbers in wrong:
        with pytest.raises(InvalidInput):
            BundleLimits(**numbers)


# Honest files pass ------------------------------------------------------------------------------------------------


def rewritten(thread: backstay.Thread, step: int, text: list[str]) -> None:
    thread.save({"all": {"step": step, "messages": text}})


def one_of_many_keys(thread: backstay.Thread, step: int, text: list[str]) -> None:
    thread.save({**{f"k{n}": 0 for n in range(500)}, "k5": step})


@pytest.mark.parametrize("save", [rewritten, one_of_many_keys])
def test_a_history_of_any_length_of_a_large_state_pays_for_itself(
    save: Callable[[backstay.Thread, int, list[str]], None], tmp_path: Path, show: Show
) -> None:
    """A number at the front of 2 MB changes in each step: the worst that an agent can do.

    The bytes of the file alone pay for it, without the fixed part of the budget, so any number of steps passes.
    """
    rng = random.Random(1)
    words = ["plan", "tool", "search", "answer", "file", "error", "check", "reply"]
    text = [" ".join(rng.choices(words, k=90)) for _ in range(3600)]
    with backstay.open("memory:") as store:
        for step in range(40):
            save(store.thread("t"), step, text)
        export_bundle(store, tmp_path / "b")
    size = (tmp_path / "b").stat().st_size
    show(f"{save.__name__}: bytes of the file for a step", size // 40)

    with backstay.open("memory:") as other:
        assert import_bundle(tmp_path / "b", other, limits=BundleLimits(work_bytes=WORK_PER_BYTE * size)).stored == 40
    assert len(list(read_bundle(tmp_path / "b", limits=BundleLimits(work_bytes=WORK_PER_BYTE * size)))) == 40


# Any numbers ------------------------------------------------------------------------------------------------------


def random_records(rng: random.Random) -> Records:
    """Yield checkpoints of forged numbers: most are possible, so that many are read before the first that is not."""
    forge = Forge()
    branches = 0
    yield THREAD
    for _ in range(rng.randrange(1, 40)):
        if not branches or rng.random() < 0.2:
            yield branch_record(branches)
            branch, base = branches, rng.choice([None, *forge.states])
            branches += 1
        else:
            branch = rng.randrange(branches)
            base = branch
        old: State = {} if base is None else forge.states[base]
        known: list[Key] = ["a", "b", "c", *SYSTEM_NAMES]
        keys = rng.sample(known, rng.randrange(1, 4))
        edits = []
        for key in keys:
            size = old[key].entry.size if key in old else 0
            prefix = rng.choice([0, size, rng.randint(0, size)])
            suffix = rng.randint(0, size - prefix)
            edits.append(Edit(key, "b", 0, prefix, suffix, rng.choice([0, 1, 3000, 400_000, 900_000])))
        try:
            yield from forge.checkpoint(branch, base, edits, bytes(900_000))
        except BackstayError:
            return
        if rng.random() < 0.05:
            yield rng.choice([records.CHECKPOINT, records.WRITE, records.EFFECT]), rng.randbytes(50)


@pytest.mark.effort
def test_forged_numbers_never_take_more_than_the_limits(tmp_path: Path, show: Show) -> None:
    limits = BundleLimits(state_bytes=2 * MIB, work_bytes=12 * MIB)
    ends: dict[str, int] = {}
    highest = 0
    for seed in range(max(40, 4 * effort())):
        path = written(tmp_path / "forged", random_records(random.Random(seed)))
        for what in (check_bundle, lambda path, limits: sum(1 for _ in read_bundle(path, limits=limits))):
            tracemalloc.start()
            try:
                what(path, limits=limits)
                end = "read"
            except BackstayError as error:
                end = getattr(error, "limit", type(error).__name__)
            highest = max(highest, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            ends[end] = ends.get(end, 0) + 1
    show("forged bundles ended by", ends)
    show("peak of memory", f"{highest / MIB:.1f} MiB")

    assert {"state_bytes", "work_bytes", "Corrupted"} <= set(ends)
    assert highest <= 2 * MIB + WINDOW_BYTES
