"""Two runs of a graph on the head of one thread cannot both win, and none is lost in silence.

Both have read the same head before either saves: a mixin before the saver lets each wait for the other. On SQLite, the
directory store and PostgreSQL they are two processes, on the memory store two threads; as coroutines they are two
tasks of one loop, or two loops. The same races run over LangGraph's own savers: a harness that cannot fail shows
nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint

from backstay.langgraph import BackstaySaver
from support.crew import Crew, Worker
from support.langgraph.children import PATIENCE_S, Answer, Racer, at, build_talk, open_meeting, words_of
from support.running import Show, effort

ROUNDS = max(1, effort() // 4)
NAMES = ("Anna", "Bela")
DURABILITIES = ("sync", "async", "exit")
STARTS = ("head", "fresh", "resume")
TRAVELS = 5 * ROUNDS
WORKERS = 16
INVOKES = 4 * ROUNDS
HANDS = 8
WRITES = 20 * ROUNDS

RunBoth = Callable[..., list[Answer]]


class Pair:
    """Two racers, wherever they are."""

    def __init__(self, run_both: RunBoth, ask_first: Callable[..., Any], ask_second: Callable[..., Any]) -> None:
        self.run_both = run_both
        self.ask_first = ask_first
        self.ask_second = ask_second

    def race(self, thread: str, start: str, shape: str, durability: str) -> str:
        """Let both run from the same head; return what became of it, in words."""
        before = self.ask_first("prepare", thread, start)
        answers = self.run_both(thread, start, shape, durability)
        after = self.ask_first("messages", thread)
        assert after == self.ask_second("messages", thread)
        outcome = judge(thread, start, before, answers, after)
        if outcome == "one won" and shape == "kept subgraph" and after[-2] not in self.ask_first("remembered", thread):
            return "one won, and its subgraph forgot it"
        return outcome


def judge(thread: str, start: str, before: list[str], answers: list[Answer], after: list[str]) -> str:
    """Say what became of a race, by what both were told and by what is stored."""
    won = [answer for answer in answers if "error" not in answer]
    for loser in (answer for answer in answers if "error" in answer):
        assert loser["error"] == "Conflict"
        assert thread in loser["text"], f"it does not say where: {loser['text']}"
    if not won:
        return "nobody won"
    if len(won) == 1:
        said = words_of(won[0]["name"], start)
        # Two that resume one task share its subgraph: who begins it later finds what the other one has done in it.
        words = [said, *([words_of(name, start)[0], *said[1:]] for name in NAMES if start == "resume")]
        return "one won" if after == won[0]["messages"] and after[len(before) :] in words else f"wrong: {after}"
    lost = [name for name in NAMES if not set(words_of(name, start)) <= set(after)]
    return "a silent loss" if lost else "both kept"


# Places to race in ------------------------------------------------------------------------------------------------


class Track:
    """Two workers that live as long as this module's tests, and open what each test needs."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew = crew
        self.folder = folder
        self.count = 0

    def pair(self, kind: str, url: str) -> Pair:
        """Hire two racers, each in a process of its own."""
        self.count += 1
        own, others = str(self.folder / f"first.{self.count}"), str(self.folder / f"second.{self.count}")
        os.mkfifo(own)
        os.mkfifo(others)
        work = "support.langgraph.children:ProcessRacer"
        workers: list[Worker] = [self.crew.hire(work, NAMES[0], kind, url, own, others)]
        workers.append(self.crew.hire(work, NAMES[1], kind, url, others, own))

        def run_both(*order: Any) -> list[Answer]:
            for worker in workers:
                worker.tell("run", *order)
            return [worker.hear() for worker in workers]

        return Pair(run_both, workers[0].ask, workers[1].ask)


@pytest.fixture(scope="module")
def track(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Track]:
    folder = tmp_path_factory.mktemp("track")
    with Crew(folder) as crew:
        yield Track(crew, folder)


@contextmanager
def in_one_process(kind: str, how: str, url: str) -> Iterator[Pair]:
    """Make two racers that share a saver; they run as two threads, two loops, or two tasks of one loop."""
    saver = open_meeting(kind, url)
    barrier = threading.Barrier(len(NAMES))
    racers = [Racer(name, saver, lambda: void(barrier.wait(PATIENCE_S))) for name in NAMES]
    with ThreadPoolExecutor(len(NAMES)) as pool:

        def run_both(*order: str) -> list[Answer]:
            if how == "tasks":
                return asyncio.run(as_tasks(racers, order))
            run = run_as_loop if how == "loops" else run_as_thread
            return [each.result(PATIENCE_S) for each in [pool.submit(run, racer, *order) for racer in racers]]

        def ask(order: str, *given: str) -> Any:
            return getattr(racers[0], order)(*given)

        yield Pair(run_both, ask, ask)
    if hasattr(saver, "close"):
        saver.close()


def void(_: object) -> None:
    pass


def run_as_thread(racer: Racer, *order: str) -> Answer:
    return racer.run(*order)


def run_as_loop(racer: Racer, *order: str) -> Answer:
    return asyncio.run(racer.arun(*order))


async def as_tasks(racers: list[Racer], order: tuple[str, ...]) -> list[Answer]:
    return list(await asyncio.gather(*[racer.arun(*order) for racer in racers]))


PLACES = ["sqlite", "postgres", "memory threads", "sqlite threads", "sqlite tasks", "sqlite loops"]


@contextmanager
def open_pair(place: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Open a pair of racers at a place."""
    store, _, how = place.partition(" ")
    url = {"sqlite": str(tmp_path / "agent.db"), "dir": f"dir:{tmp_path / 'logs'}", "memory": "memory:"}.get(store)
    url = url or str(request.getfixturevalue("postgres_url"))
    if how:
        with in_one_process(kind, how, url) as pair:
            yield pair
    else:
        yield request.getfixturevalue("track").pair(kind, url)


@pytest.fixture(params=PLACES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with open_pair(request.param, "raise", request, tmp_path) as made:
        yield made


# Races ------------------------------------------------------------------------------------------------------------


class Outcomes:
    """How races ended: how often in which way, and which kind of race in which way."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, outcome: str, *kind: str) -> None:
        self.counts[outcome] += 1
        self.kinds[outcome][" ".join(kind)] += 1

    def __str__(self) -> str:
        return ", ".join(f"{outcome}: {count}" for outcome, count in self.counts.items())

    def other_than(self, *outcomes: str) -> dict[str, dict[str, int]]:
        """Return the kinds of races that ended otherwise."""
        return {outcome: dict(kinds) for outcome, kinds in self.kinds.items() if outcome not in outcomes}


def race_all(pair: Pair, shapes: tuple[str, ...]) -> Outcomes:
    """Run every kind of race, and count how they ended."""
    found = Outcomes()
    for number in range(ROUNDS):
        for kind in itertools.product(STARTS, shapes, DURABILITIES):
            found.add(pair.race(f"{'-'.join(kind)}-{number}", *kind), *kind)
    return found


@pytest.mark.effort
def test_of_two_runs_on_one_head_exactly_one_wins(pair: Pair, show: Show, request: pytest.FixtureRequest) -> None:
    found = race_all(pair, ("plain", "subgraph"))

    show(f"races on {request.node.callspec.id}", found)
    assert found.other_than("one won") == {}


@pytest.mark.parametrize("theirs", ["SqliteSaver", "InMemorySaver"])
def test_the_harness_sees_what_other_savers_lose(theirs: str, track: Track, show: Show, tmp_path: Path) -> None:
    """A harness that cannot fail shows nothing."""
    if theirs == "SqliteSaver":
        found = race_all(track.pair(theirs, str(tmp_path / "theirs.db")), ("plain",))
    else:
        with in_one_process(theirs, "threads", "") as pair:
            found = race_all(pair, ("plain", "subgraph"))

    show(f"races on LangGraph's own {theirs}", found)
    assert found.other_than("a silent loss") == {}


@pytest.mark.effort
@pytest.mark.parametrize("place", ["sqlite", "memory threads", "sqlite loops"])
def test_two_runs_that_share_a_kept_subgraph_never_lose_in_silence(
    place: str, show: Show, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """They meet in the thread and in the subgraph's own history: each may win one of them, and then both are told."""
    with open_pair(place, "raise", request, tmp_path) as pair:
        found = race_all(pair, ("kept subgraph",))

    show(f"races with a kept subgraph on {place}", found)
    assert found.other_than("one won", "nobody won") == {}
    assert found.counts["one won"]


@pytest.mark.effort
@pytest.mark.parametrize("place", ["sqlite", "postgres", "memory threads", "sqlite loops"])
def test_a_saver_that_branches_keeps_both_runs_whole(
    place: str, show: Show, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found: Counter[str] = Counter()
    with open_pair(place, "branch", request, tmp_path) as pair:
        for start, durability in itertools.product(STARTS * ROUNDS, DURABILITIES):
            thread = f"{start}-{durability}-{sum(found.values())}"
            before = pair.ask_first("prepare", thread, start)
            answers = pair.run_both(thread, start, "plain", durability)
            states = [before + words_of(name, start) for name in NAMES]
            latest = pair.ask_first("messages", thread)
            assert [answer.get("messages") for answer in answers] == states
            assert latest in states
            assert all(state in pair.ask_second("all_messages", thread) for state in states)
            branches = pair.ask_second("branches", thread)
            assert sorted(branches.values()) == sorted(states)
            found[f"{len(branches)} branches"] += 1

    show(f"races that branch on {place}", dict(found))
    assert set(found) == {"2 branches"}


# What is no race --------------------------------------------------------------------------------------------------


@pytest.fixture
def saver(url: str) -> Iterator[BackstaySaver]:
    with BackstaySaver(url) as opened:
        yield opened
        report = opened.store.check()
        assert report, str(report)


@pytest.mark.effort
def test_going_on_from_the_past_is_never_a_conflict(saver: BackstaySaver) -> None:
    """Others save at the head all the while."""
    graph = build_talk("Anna", saver, "plain")
    graph.invoke({"messages": ["question"]}, at("t"))
    head, *past = [state.config for state in graph.get_state_history(at("t"))][:3]
    is_over = threading.Event()

    def go_on() -> int:
        """Go on where this one left off, by name: the newest may be where a traveller is just now."""
        count, config = 0, head
        while not is_over.is_set() or not count:
            for event in graph.stream({"messages": [f"more {count}"]}, config, stream_mode="checkpoints"):
                config = event["config"]
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(go_on)
        try:
            for number in range(TRAVELS):
                travelled = graph.invoke(None, past[number % 2])
                changed = graph.update_state(past[number % 2], {"messages": [f"other {number}"]})
                assert graph.get_state(changed).values["messages"][-1] == f"other {number}"
                assert travelled["messages"] == ["question", "Anna: first", "Anna: second"]
        finally:
            is_over.set()
        assert others.result(PATIENCE_S)


@pytest.mark.effort
def test_two_that_go_on_from_the_same_past_both_succeed(saver: BackstaySaver) -> None:
    graph = build_talk("before", saver, "plain")
    graph.invoke({"messages": ["question"]}, at("t"))
    past = next(state.config for state in graph.get_state_history(at("t")) if state.next == ("first",))
    barrier = threading.Barrier(2)

    def travel(name: str) -> Any:
        barrier.wait(PATIENCE_S)
        return build_talk(name, saver, "plain").invoke(None, past)["messages"]

    with ThreadPoolExecutor(2) as pool:
        for _ in range(TRAVELS):
            found = [each.result(PATIENCE_S) for each in [pool.submit(travel, name) for name in NAMES]]
            assert found == [["question", f"{name}: first", f"{name}: second"] for name in NAMES]

    stored = [state.values.get("messages") for state in graph.get_state_history(at("t"))]
    assert [stored.count(state) for state in found] == [TRAVELS, TRAVELS]


# Many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.effort
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_many_threads_of_one_saver_run_and_are_read_at_once(saver: BackstaySaver, show: Show) -> None:
    is_over = threading.Event()
    expected = [word for _ in range(INVOKES) for word in ("question", "Anna: first", "Anna: second")]

    def run(number: int) -> list[str]:
        graph = build_talk("Anna", saver, "plain")
        for _ in range(INVOKES):
            result: list[str] = graph.invoke({"messages": ["question"]}, at(f"t{number}"))["messages"]
        return result

    def read() -> int:
        graph, count = build_talk("reader", saver, "plain"), 0
        while not is_over.is_set() or not count:
            for number in range(WORKERS):
                found = graph.get_state(at(f"t{number}")).values.get("messages", [])
                assert found == expected[: len(found)]
                for each in saver.list(at(f"t{number}"), limit=5):
                    messages = each.checkpoint["channel_values"].get("messages", [])
                    assert messages == expected[: len(messages)]
                    count += 1
        return count

    with ThreadPoolExecutor(WORKERS + 1) as pool:
        reader = pool.submit(read)
        try:
            found = list(pool.map(run, range(WORKERS), timeout=PATIENCE_S * 2))
        finally:
            is_over.set()
        show("runs at once", f"{WORKERS * INVOKES} runs, {reader.result(PATIENCE_S)} checkpoints read meanwhile")
    assert found == [expected] * WORKERS


@pytest.mark.effort
@pytest.mark.parametrize("order", ["put last", "put meanwhile", "put first"])
def test_no_write_is_lost_that_comes_while_its_checkpoint_is_put(saver: BackstaySaver, order: str) -> None:
    checkpoint = empty_checkpoint()
    parent: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    config: RunnableConfig = {"configurable": {**parent["configurable"], "checkpoint_id": checkpoint["id"]}}
    barrier = threading.Barrier(HANDS + 1)

    def put() -> None:
        saver.put(parent, checkpoint, {"step": -1}, {})

    def write(hand: int) -> None:
        barrier.wait(PATIENCE_S)
        for number in range(WRITES):
            saver.put_writes(config, [("messages", [hand, number]), ("other", hand)], f"task {hand} {number}")

    with ThreadPoolExecutor(HANDS) as pool:
        if order == "put first":
            put()
        hands = [pool.submit(write, hand) for hand in range(HANDS)]
        barrier.wait(PATIENCE_S)
        if order == "put meanwhile":
            put()
        for each in hands:
            each.result(PATIENCE_S)
        if order == "put last":
            put()

    found = saver.get_tuple(config)
    assert found is not None
    expected: set[tuple[str, str, str]] = set()
    for hand, number in itertools.product(range(HANDS), range(WRITES)):
        task = f"task {hand} {number}"
        expected |= {(task, "messages", str([hand, number])), (task, "other", str(hand))}
    assert {(task, channel, str(value)) for task, channel, value in found.pending_writes or []} == expected
    assert len(found.pending_writes or []) == len(expected)
