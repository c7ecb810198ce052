"""The power fails at any moment of a story on a SQLite store, and leaves any part of what was not synced.

SQLite is a library in C, so strace records what it does. Every state of the disk that ``power`` enumerates must open,
and contain exactly what the store contained at some moment between the last acknowledgement and the cut: nothing that
was acknowledged is lost, nothing deleted comes back, and no transaction is there in part. It must pass every check,
take the next save, and open again. The index of the log, ``-shm``, is memory: there it is missing, empty or garbage.

What the store contained at each moment is read from the recording itself: all of it, as a kill would leave it. After
each step that is compared with a store in memory that was told the same story.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from backstay.store.finding import LEFTOVER
from support.crash.directory_story import folder_in_memory
from support.crash.power import Cuts, Disk, Op, Trace, Tree, placed, write_tree
from support.crash.sqlite_story import CONCURRENT, COPY, Content, content_of, contents_in_memory, save_after
from support.crash.strace_bench import PLACE, Bench, need_strace
from support.running import Show, effort

SEED = int(os.environ.get("BACKSTAY_SEED", "20261117"))
DATABASE = "agent.db"
INDEX = "-shm"
INDEX_BYTES = 32768
STATES_A_CUT = 2 if effort() < 10 else 4
SECOND_CUTS = effort()
STATES_MIN = 500
LOOK_BACK = 40
"""How many operations a transaction of another thread may be ahead of an acknowledgement."""

SHARES = {
    "story": 0.05,
    "records": 0.05,
    "retention": 0.04,
    "group": 0.05,
    "processes": 0.04,
    "large": 0.0015,
    "backup": 0.05,
}
"""After which part of the operations the power is cut, with an effort of 1."""


class Recording:
    """What a story did to the disk, and what the store contained at each moment of it."""

    def __init__(self, folder: Path, ops: list[Op], before: Tree | None = None, is_concurrent: bool = False) -> None:
        self.ops = ops
        self._is_concurrent = is_concurrent
        self._folder, self._before = folder, before
        self._disk, self._played = Disk(before), -1
        self._contents: dict[int, Content] = {}
        self._told = {op.name: number for number, op in enumerate(ops) if op.kind == "told"}
        self.acknowledged = [number for event, number in self._told.items() if event.startswith("done")]

    def content(self, number: int) -> Content:
        """Return what the store contains after an operation, if nothing is lost."""
        if number not in self._contents:
            if number < self._played:
                self._disk, self._played = Disk(self._before), -1
            for op in self.ops[self._played + 1 : number + 1]:
                self._disk.play(op)
            self._played = number
            with placed(self._folder, self._disk.now()) as place, backstay.open(place / DATABASE) as store:
                self._contents[number] = content_of(store)
        return self._contents[number]

    def judge(self, place: Path, told: list[str], number: int) -> None:
        """Raise an error if the store is not one that a cut after an operation may leave."""
        index, rng = place / f"{DATABASE}{INDEX}", random.Random(number)
        if index.exists():
            index.write_bytes(rng.choice((b"", bytes(INDEX_BYTES), rng.randbytes(INDEX_BYTES))))
        if "done backup" in told:
            with backstay.open(place / COPY) as store:
                _check(store)
                assert content_of(store) == self.content(self._told["done backup"]), "the backup is not as it was"
        with backstay.open(place / DATABASE) as store:
            found = content_of(store)
            self._compare(found, number)
            _check(store)
            save_after(store)
        with backstay.open(place / DATABASE) as store:
            _check(store)
            kept = {meta.id for head in store.threads() for meta in store.thread(head.thread_id).history(branch="*")}
            assert kept >= {"after-after", *(key[1] for key in found if key[0] == "checkpoint")}, "not after a save"

    def _compare(self, found: Content, number: int) -> None:
        first = max((each for each in self.acknowledged if each <= number), default=-1)
        if found in (self.content(first), self.content(number)):
            return
        for each in range(first, number):
            # A transaction ends with its last write, after which comes a sync, or with the end of its journal.
            if self.ops[each + 1].kind in ("sync", "forget", "told") and found == self.content(each):
                return
        expected = self.content(first)
        if self._is_concurrent:
            # A thread may write its next transaction, unsynced, before another one says what was stored by the last.
            # So the content may also be older than that, if it has everything that was acknowledged.
            told = {
                ("checkpoint", self.ops[each].name.removeprefix("done "))
                for each in self.acknowledged
                if each <= number
            }
            if told & expected.keys() <= found.keys():
                for each in range(first - 1, max(-1, first - LOOK_BACK), -1):
                    if self.ops[each + 1].kind in ("sync", "forget", "told") and found == self.content(each):
                        return
        differs = [key for key in {*found, *expected} if found.get(key) != expected.get(key)]
        raise AssertionError(f"the content is of no moment since the last acknowledgement, differs in {differs[:5]}")


def _check(store: backstay.Store) -> None:
    wrong = [str(finding) for finding in store.check().findings if finding.kind != LEFTOVER]
    assert not wrong, str(wrong)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    need_strace()
    with (
        folder_in_memory(tmp_path_factory.getbasetemp()) as folder,
        Bench(folder, "support.crash.sqlite_story:run", lambda _: []) as made,
    ):
        yield made


def record(bench: Bench, story: str, before: Tree | None = None) -> Recording:
    """Tell a story, on what was there before, and note what it does to the disk."""

    def prepare(folder: Path) -> None:
        (folder / PLACE).mkdir()
        write_tree(folder / PLACE, before or {})

    bench.prepare = prepare
    bench.arguments = lambda folder: [str(folder / PLACE / DATABASE), story]
    run = bench.run(None, (Trace.CALLS,), Trace.OPTIONS)
    assert run.code == 0, run.lines[-3:]
    trace = Trace(run.place, run.folder / "out", INDEX, before)
    return Recording(bench.root, trace.read(run.log), before, story in CONCURRENT)


@pytest.mark.effort
@pytest.mark.parametrize("story", SHARES)
def test_no_power_cut_loses_what_was_acknowledged(bench: Bench, show: Show, story: str) -> None:
    recording = record(bench, story)
    expected = contents_in_memory(story)
    for number, content in enumerate(expected):
        if story not in CONCURRENT:
            assert recording.content(recording.acknowledged[number]) == content, f"step {number} is not as in memory"
    assert recording.content(len(recording.ops) - 1) == expected[-1]
    cuts = Cuts(bench.root, SEED, recording.judge)

    cuts.everywhere(recording.ops, STATES_A_CUT, share=min(1.0, effort() * SHARES[story]))

    figures = f"seed {SEED}, {len(recording.ops)} operations, {cuts.tried} states, {len(cuts.broken)} broken"
    show(f"power cuts on SQLite: {story}", figures)
    assert cuts.broken == []
    assert cuts.tried >= min(STATES_MIN, 10 * effort())


@pytest.mark.effort
def test_nor_does_another_cut_while_the_store_is_opened_again(bench: Bench, show: Show) -> None:
    rng, tried = random.Random(SEED), 0
    broken: list[str] = []
    first = Cuts(bench.root, SEED, lambda *_: None)
    for story in ("story", "records", "retention"):
        first.everywhere(record(bench, story).ops, 2, share=0.2)
    for tree, _ in rng.sample(first.states, SECOND_CUTS):
        again = record(bench, "again", tree)
        cuts = Cuts(bench.root, SEED, again.judge)
        cuts.everywhere(again.ops, STATES_A_CUT, tree, share=0.15)
        tried, broken = tried + cuts.tried, broken + cuts.broken

    show("second power cuts on SQLite", f"seed {SEED}, {SECOND_CUTS} openings, {tried} states, {len(broken)} broken")
    assert broken == []
    assert tried >= 5 * SECOND_CUTS


# Recorders and stores that must be noticed ----------------------------------------------------------------------------


@pytest.mark.parametrize("unsynced", ["", "-wal", DATABASE, "the folder"])
def test_a_store_that_syncs_too_little_is_noticed(bench: Bench, show: Show, unsynced: str) -> None:
    whole = record(bench, "story").ops
    names = {op.node: op.name for op in whole if op.kind == "make"}
    ops = [op for op in whole if op.kind != "sync" or not names.get(op.node, "the folder").endswith(unsynced)]
    assert len(ops) < len(whole), "nothing was left out"
    recording = Recording(bench.root, ops)
    cuts = Cuts(bench.root, SEED, recording.judge)

    cuts.everywhere(ops, 2, share=0.04)

    show(f"without syncs of {unsynced or 'anything'}", f"{cuts.tried} states, {len(cuts.broken)} broken")
    assert cuts.broken


def test_a_database_in_mapped_memory_is_noticed(bench: Bench) -> None:
    """Writes to mapped memory are no system calls: a recording without them would prove nothing."""
    with pytest.raises(AssertionError, match="a change that cannot be played again"):
        record(bench, "mapped")
