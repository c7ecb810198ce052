"""The chain checker: right histories are accepted, every kind of wrong one is refused, and it agrees with a search.

Real stores are raced for by threads and processes; stores that are wrong on purpose must be caught; histories made by
hand show each kind alone, beside one that is just right; simulated ones are spoiled in every way we know.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import backstay
from backstay.errors import Conflict, Fenced
from support.processes import Nursery
from support.running import Show, effort
from support.simulation import chain as checker
from support.simulation.chain import ChainVerdict, ViolationKind, chains_of, check_chain
from support.simulation.histories import (
    ROUNDS_WITHOUT_END,
    SHARED,
    SPOILERS,
    B,
    CachedReads,
    LastWriterWins,
    Register,
    Right,
    Story,
    Unfenced,
    exists_order,
    meddle,
    race,
    simulate,
    told,
)
from support.simulation.history import BranchName, CallHistory, CallKind, CallRecorder, RecordedThread

WORKERS = 4
THREAD_ROUNDS = max(100, 50 * effort())
PROCESS_ROUNDS = 20 * effort()
KILLS = max(6, effort())
SEARCHES = 100 * effort()
ROUNDS_BEFORE_KILL_MAX = 12
DEADLINE_S = 60.0
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))


def judged(recorder: CallRecorder, store: backstay.Store) -> ChainVerdict:
    history = recorder.history()
    return check_chain(history, chains_of(store, history.branches))


# Real stores --------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient() -> Iterator[None]:
    """Let threads take turns so often that they meet between a look and a save."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.effort
@pytest.mark.usefixtures("impatient")
def test_racing_threads_leave_a_right_history(url: str, show: Show) -> None:
    recorder = CallRecorder()
    with backstay.open(url) as store:
        racers = [
            threading.Thread(target=race, args=(RecordedThread(store.thread(SHARED), recorder), THREAD_ROUNDS, seed))
            for seed in range(SEED, SEED + WORKERS)
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        verdict = judged(recorder, store)

    show(f"{WORKERS} threads", verdict)
    assert verdict
    assert (verdict.acknowledged, verdict.unknown) == (verdict.stored, 0)
    assert verdict.acknowledged + verdict.conflicts == WORKERS * THREAD_ROUNDS
    assert verdict.conflicts, "the threads never met: nothing was tested"


class Arena:
    """A SQLite file, a history beside it, and processes that race on them."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder = folder
        self.nursery = nursery
        self.started = 0

    def start(self, rounds: int, held: bool = False) -> tuple[int, int]:
        """Start one more racer; return its process id and the pipe on which it says that a round is done."""
        self.started += 1
        fifo = str(self.folder / f"fifo-{self.started}")
        os.mkfifo(fifo)
        pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        arguments = [str(self.folder / "agent.db"), str(self.folder / "history"), rounds, SEED + self.started]
        return self.nursery.start("support.simulation.histories:race_as_process", arguments, fifo, held=held), pipe

    def verdict(self) -> tuple[ChainVerdict, int]:
        """Return the verdict, and how many lines of the history are torn."""
        with backstay.open(self.folder / "agent.db") as store, CallRecorder(self.folder / "history") as recorder:
            return judged(recorder, store), recorder.history().torn


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Nursery() as nursery:
        yield Arena(tmp_path, nursery)


def await_rounds(pipe: int, rounds: int) -> None:
    """Wait until a racer has said that so many more rounds are done."""
    while rounds:
        assert select.select([pipe], [], [], DEADLINE_S)[0], "a racer says nothing"
        said = os.read(pipe, rounds)
        assert said, "a racer ended by itself: see its error above"
        rounds -= len(said)


@pytest.mark.effort
def test_racing_processes_leave_a_right_history(arena: Arena, show: Show) -> None:
    racers = [arena.start(PROCESS_ROUNDS, held=True) for _ in range(WORKERS)]
    for pid, _ in racers:
        arena.nursery.release(pid)
    for pid, pipe in racers:
        await_rounds(pipe, PROCESS_ROUNDS)
        assert arena.nursery.wait(pid) == 0
        os.close(pipe)

    verdict, torn = arena.verdict()
    show(f"{WORKERS} processes", verdict)
    assert verdict
    assert (verdict.acknowledged, verdict.unknown, torn) == (verdict.stored, 0, 0)
    assert verdict.acknowledged + verdict.conflicts == WORKERS * PROCESS_ROUNDS
    assert verdict.conflicts, "the processes never met: nothing was tested"


@pytest.mark.crash
@pytest.mark.effort
def test_killed_processes_leave_a_right_history_with_unknown_outcomes(arena: Arena, show: Show) -> None:
    rng = Random(SEED)
    racers = [arena.start(ROUNDS_WITHOUT_END) for _ in range(WORKERS)]
    for kill in range(KILLS):
        pid, pipe = racers.pop(0)
        await_rounds(pipe, rng.randint(1, ROUNDS_BEFORE_KILL_MAX))
        os.kill(pid, signal.SIGKILL)
        assert arena.nursery.wait(pid) == -signal.SIGKILL
        os.close(pipe)
        if kill < KILLS - WORKERS:
            racers.append(arena.start(ROUNDS_WITHOUT_END))

    verdict, torn = arena.verdict()
    show(f"{WORKERS} processes, {KILLS} kills, seed {SEED}, {torn} lines torn", verdict)
    assert verdict
    assert verdict.unknown, "no kill came in the middle of a save: the fault did not fire"
    assert verdict.unknown + torn <= KILLS
    assert verdict.stored == verdict.acknowledged + verdict.unknown_applied


# Wrong stores -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("thread", "kinds"), [(LastWriterWins, {ViolationKind.FORK}), (Right, set())])
def test_a_store_without_compare_and_swap_is_caught(url: str, thread: type[Right], kinds: set[ViolationKind]) -> None:
    recorder = CallRecorder()
    with backstay.open(url) as store:
        one, other = (RecordedThread(thread(store.thread("t")), recorder) for _ in range(2))
        one.latest()
        other.latest()
        one.save({"n": 1})
        try:
            other.save({"n": 2})
        except Conflict:
            other.latest()

        assert judged(recorder, store).kinds == kinds


@pytest.mark.parametrize(("thread", "kinds"), [(CachedReads, {ViolationKind.STALE_READ}), (Right, set())])
def test_a_store_that_reads_from_a_cache_is_caught(url: str, thread: type[Right], kinds: set[ViolationKind]) -> None:
    recorder = CallRecorder()
    with backstay.open(url) as store:
        one, other = (RecordedThread(thread(store.thread("t")), recorder) for _ in range(2))
        one.save({"n": 1})
        other.latest()
        one.save({"n": 2})
        other.latest()

        assert judged(recorder, store).kinds == kinds


@pytest.mark.parametrize(("store", "kinds"), [(Unfenced(), {ViolationKind.STALE_EPOCH}), (Register(), set())])
def test_a_store_without_a_fence_is_caught(store: Register, kinds: set[ViolationKind]) -> None:
    """The old holder looks before it writes, so that compare-and-swap alone lets it through."""
    recorder = CallRecorder()

    def acquire() -> int:
        with recorder.acquire(B) as call:
            epoch = store.acquire()
            call.ok(epoch=epoch)
        return epoch

    def append(name: str, epoch: int) -> None:
        parent = store.head.id if store.head else None
        with recorder.append(B, name, parent=parent, epoch=epoch) as call:
            call.ok(seq=store.append(name, parent, epoch))

    old = acquire()
    append("a", old)
    new = acquire()
    append("b", new)
    try:
        append("c", old)
    except Fenced:
        append("d", new)

    assert check_chain(recorder.history(), {B: store.chain}).kinds == kinds


# Histories made by hand ---------------------------------------------------------------------------------------------

CASES = {
    "acknowledged, not there": ("a<- 1..2 =>", ViolationKind.LOST, "a<- 1.. =>"),
    "there twice": ("a<- 1..2, b<a 3..4 => a b a", ViolationKind.DUPLICATE, "a<- 1..2, b<a 3..4 => a b"),
    "nobody appended it": ("a<- 1..2 => a x", ViolationKind.PHANTOM, "a<- 1..2, x<a 3.. => a x"),
    "its id was taken, by nobody": ("a<- 1..2 taken => a", ViolationKind.PHANTOM, "a<- 1..2 taken, a<- 1.. => a"),
    "refused, but there": (
        "a<- 1..2 refused, b<a 3..4 => a b",
        ViolationKind.APPLIED_FAILURE,
        "a<- 1..2 refused, a<- 1..3, b<a 3..4 => a b",
    ),
    "two with one parent": (
        "a<- 1..2, b<a 3..4, c<a 3..4 => a b c<a",
        ViolationKind.FORK,
        "a<- 1..2, b<a 3..4, c<b 3..4 => a b c",
    ),
    "accepted on an old head, which the chain hides": (
        "a<- 1..2, b<a 3..4, c<a 5..6 => a b c",
        ViolationKind.FORK,
        "a<- 1..2, b<a 3..4, c<? 5..6 => a b c",
    ),
    "one is missing between them": (
        "a<- 1..2, c<b 5..6 => a c<b",
        ViolationKind.GAP,
        "a<- 1..2, b<a 3.., c<b 5..6 => a b c",
    ),
    "does not begin at the beginning": ("b<? 1..2 => b<a", ViolationKind.GAP, "b<? 1..2 => b"),
    "the same number": ("a<- 1..2, b<a 3..4 => a#7 b#7", ViolationKind.SEQ, "a<- 1..2, b<a 3..4 => a#7 b#9"),
    "acknowledged as another number": ("a<-#2 1..2 => a", ViolationKind.MISREPORTED, "a<-#1 1..2 => a"),
    "read as another number": ("a<- 1..2, a#2 3..4 => a", ViolationKind.MISREPORTED, "a<- 1..2, a#1 3..4 => a"),
    "accepted on no head at all": ("a<x 1..2 => a", ViolationKind.MISREPORTED, "a<? 1..2 => a"),
    "kept with another epoch": ("a<-@1 1..2 => a@2", ViolationKind.MISREPORTED, "a<-@1 1..2, a<-@2 3..4 => a@2"),
    "acknowledged before the one before it began": (
        "a<- 3.., b<a 1..2 => a b",
        ViolationKind.ORDER,
        "a<- 2.., b<a 1..2 => a b",
    ),
    "seen before it began": ("a 1..2, a<- 3..4 => a", ViolationKind.FUTURE_READ, "a 1..3, a<- 3..4 => a"),
    "seen before what is under it began": (
        "b 1..4, a<- 5.., b<a 2.. => a b",
        ViolationKind.FUTURE_READ,
        "b 1..5, a<- 5.., b<a 2.. => a b",
    ),
    "an acknowledged one not seen": ("a<- 1..2, - 3..4 => a", ViolationKind.STALE_READ, "a<- 1..2, - 2..4 => a"),
    "a seen one not seen again": (
        "a<- 1.., a 2..3, - 4..5 => a",
        ViolationKind.BACKWARD_READ,
        "a<- 1.., a 2..3, - 3..5 => a",
    ),
    "seen, then gone": ("a<- 1.., a 2..3 =>", ViolationKind.DIRTY_READ, "a<- 1.., a 2..3 => a"),
    "refused before the next one began": (
        "a<- 1..2, c<a 3..4 conflict, b<a 5..6 => a b",
        ViolationKind.UNJUSTIFIED_CONFLICT,
        "a<- 1..2, c<a 3..5 conflict, b<a 5..6 => a b",
    ),
    "refused on the last head, which it may have become during the call": (
        "a<- 1..2, b<a 3..4 conflict => a",
        ViolationKind.UNJUSTIFIED_CONFLICT,
        "a<- 1..4, b<a 3..4 conflict => a",
    ),
    "refused, but what it builds on was read afterwards": (
        "a<- 1..2, b<a 3..9, c<a 4..5 conflict, a 6..7 => a b",
        ViolationKind.UNJUSTIFIED_CONFLICT,
        "a<- 1..2, b<a 3..9, c<a 4..5 conflict, a 5..7 => a b",
    ),
    "refused, but another refusal had shown that its parent was there": (
        "a<- 1..9, b<- 2..3 conflict, c<a 4..5 conflict => a",
        ViolationKind.UNJUSTIFIED_CONFLICT,
        "a<- 1..9, b<- 2..3 conflict, c<a 3..5 conflict => a",
    ),
    "an old epoch behind a new one": (
        "a<-@2 1..2, b<a@1 3..4 => a b",
        ViolationKind.STALE_EPOCH,
        "a<-@1 1..2, b<a@2 3..4 => a b",
    ),
    "an old epoch, as the store keeps it": (
        "a<- 1..2, b<a 3..4 => a@2 b@1",
        ViolationKind.STALE_EPOCH,
        "a<- 1..2 => a@2",
    ),
    "after a higher epoch was granted": (
        "+1 1..2, +2 3..4, a<-@1 5..6 => a",
        ViolationKind.STALE_EPOCH,
        "+1 1..2, +2 3..5, a<-@1 5..6 => a",
    ),
    "not there yet when a higher epoch was granted": (
        "+1 1..2, a<-@1 3.., +2 4..5, - 6..7 => a",
        ViolationKind.STALE_EPOCH,
        "+1 1..2, a<-@1 3.., +2 4..6, - 6..7 => a",
    ),
    "granted falling": ("+2 1..2, +1 3..4 =>", ViolationKind.GRANT, "+2 1..3, +1 3..4 =>"),
    "granted twice; but a branch that is empty may go with its lease": (
        "+1 1..2, ~1 3..4 fenced, +1 5..6 =>",
        ViolationKind.GRANT,
        "+1 1..2, ~1 3..4, +1 5..6, ~1 7..8, +1 9..10 =>",
    ),
    "granted twice, and the branch was not empty": (
        "a<- 1.., a 2..3, +1 4..5, ~1 6..7, +1 8..9 => a",
        ViolationKind.GRANT,
        "a<- 1.., a 2..6, +1 4..5, ~1 6..7, +2 8..9 => a",
    ),
    "fenced while nobody else had asked": (
        "+1 1..2, a<-@1 3..4 fenced, +2 5..6 =>",
        ViolationKind.UNJUSTIFIED_FENCE,
        "+1 1..2, a<-@1 3..4 fenced, +2 4..6 =>",
    ),
    "fenced while it had not given its lease back": (
        "+1 1..2, a<-@1 3..4 fenced, ~1 5..6 =>",
        ViolationKind.UNJUSTIFIED_FENCE,
        "+1 1..2, a<-@1 3..4 fenced, ~1 4..6 =>",
    ),
}
"""What is wrong, the shortest story with it, its kind, and a story that is right, most often by one number."""


@pytest.mark.parametrize(("wrong", "kind", "right"), CASES.values(), ids=CASES)
def test_each_kind_is_found_alone_and_what_is_just_right_is_not(wrong: str, kind: ViolationKind, right: str) -> None:
    assert told(wrong).judged().kinds == {kind}
    assert told(right).judged().violations == ()


def test_every_kind_has_a_case_and_a_way_to_spoil_a_story() -> None:
    assert {kind for _, kind, _ in CASES.values()} == set(ViolationKind)
    assert set().union(*SPOILERS.values()) == set(ViolationKind)


RIGHT = {
    "nothing happened": "- 1..2 =>",
    "a read without an answer": "a<- 1..2, - 3.., - 3..4 refused => a",
    "an epoch that the store keeps": "a<-@1 1..2 => a@1",
    "an unknown one is settled by its second attempt, though others came between": "a<- 1.., b<a 3..4, a<b 5..6 => a b",
    "an unknown one is settled under another lease": "+1 1..2, a<-@1 3.., +2 4..5, a<-@2 6..7, b<a@2 8..9 => a b",
    "a conflict on what never was": "a<- 1..2, b<x 3..4 conflict => a",
    "a fence of whom no lease was recorded": "a<-@7 3..4 fenced =>",
    "a fence, when somebody who was killed may have taken the lease": "+1 1..2, a<-@1 3..4 fenced, +2 3.. =>",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_what_only_looks_wrong_is_accepted(text: str) -> None:
    assert told(text).judged().violations == ()


def test_what_was_there_before_is_given_and_must_stay() -> None:
    story = told("c<b 1..2 => b<a c")
    before = told("b<a 0..0 => b<a").chain

    assert check_chain(CallHistory(story.calls), {B: story.chain}, {B: before})
    assert check_chain(CallHistory(story.calls), {B: story.chain}).kinds == {ViolationKind.PHANTOM, ViolationKind.GAP}
    assert ViolationKind.LOST in check_chain(CallHistory(story.calls), {B: story.chain[1:]}, {B: before}).kinds


def test_branches_are_judged_apart_and_named() -> None:
    good = told("a<- 1..2, b<a 3.., c<- 3..4 conflict, d<b 3.., e<b 4.., f<- 5..6 conflict, g<b 5..6 taken => a b")
    bad = told("a<- 1..2, - 3..4 => a")
    other = BranchName("t", "what-if")
    calls = [*good.calls, *(replace(call, branch=other) for call in bad.calls)]
    verdict = check_chain(CallHistory(calls), {B: good.chain, other: bad.chain})

    assert [(each.kind, each.branch) for each in verdict.violations] == [(ViolationKind.STALE_READ, other)]
    assert str(verdict).splitlines() == [
        "2 acknowledged, 2 conflicts, 1 reads, 3 unknown (1 applied), 3 stored, 1 violations",
        "  stale-read: t@what-if: a read saw None and started after a (seq 1) had been acknowledged",
    ]


# Simulated histories ------------------------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_a_simulated_race_is_accepted(rng: Random, count: int) -> None:
    verdict = simulate(rng, count).judged()

    assert verdict, str(verdict)


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
@given(st.randoms(use_true_random=True), st.integers(20, 60))
@settings(max_examples=5 * effort())
def test_a_simulated_race_that_was_spoiled_is_refused(
    spoil: Callable[[Story, Random], Story], rng: Random, count: int
) -> None:
    try:
        spoiled = spoil(simulate(rng, count), rng)
    except (IndexError, ValueError):
        assume(False)

    assert spoiled.judged().kinds & SPOILERS[spoil]


@pytest.mark.effort
def test_the_verdict_is_that_of_a_search_through_all_orders(show: Show) -> None:
    agreed: Counter[bool] = Counter()

    @given(st.randoms(use_true_random=True), st.integers(2, 8), st.integers(0, 3))
    @settings(max_examples=SEARCHES)
    def compare(rng: Random, count: int, changes: int) -> None:
        story = simulate(rng, count, leases=False, retries=False)
        for _ in range(changes):
            story = meddle(story, rng)
        verdict, truth = story.judged(), exists_order(story)

        assert bool(verdict) == truth, str(verdict)
        agreed[truth] += 1

    compare()
    show("searched", f"{agreed[True]} right, {agreed[False]} wrong")
    assert min(agreed[True], agreed[False]) > SEARCHES // 15


# Linear time --------------------------------------------------------------------------------------------------------


class Moment(int):
    """A time that counts how often it is compared, also inside ``sorted``, ``min`` and ``max``."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Moment.compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Moment.compared += 1
        return int(self) > int(other)


def steps_of(story: Story) -> int:
    """Return how many instructions the checker runs for a story, and comparisons of times."""
    steps = 0
    calls = [replace(call, invoked=Moment(call.invoked), completed=Moment(call.completed)) for call in story.calls]

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != checker.__file__:
            return None
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    before, Moment.compared = sys.gettrace(), 0
    sys.settrace(count)
    try:
        Story(calls, story.chain).judged()
    finally:
        sys.settrace(before)
    return steps + Moment.compared


@pytest.mark.parametrize("ruined", [False, True], ids=["right", "wrong all over"])
def test_twice_as_many_calls_are_twice_as_much_work(ruined: bool, show: Show) -> None:
    steps_of(simulate(Random(SEED), 10))  # Python 3.12 counts only from the second time on
    work = []
    for size in (500, 1000, 2000):
        story = simulate(Random(SEED), size)
        if ruined:
            story = Story(
                [replace(call, id=None) if call.action is CallKind.READ else call for call in story.calls],
                [link._replace(parent_id="elsewhere", seq=1) for link in story.chain[::-1]],
            )
        work.append(steps_of(story) / size)

    show("steps a call, for 500, 1000 and 2000 calls", [round(each) for each in work])
    assert min(work) > 10, "nothing was counted"
    assert max(work) < 1.2 * min(work)
