"""Leases of processes that are stopped, killed, or merely slow: what one takes over, the other can no longer write.

A holder that sleeps longer than its lease and wakes up in the middle of a save is the dangerous one: it believes it
still holds the branch. The clock only decides when others may take over; that the sleeper's save is refused is decided
by the epoch, inside the commit. All saves and leases of a run are recorded and judged together at the end.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from backstay.testing.drafts import wait_until
from support.crash.lease_work import FENCE_WORDS, expired
from support.crew import Crew, Worker, at_once
from support.running import Show, effort
from support.simulation.chain import ChainVerdict, ViolationKind, chains_of, check_chain
from support.simulation.history import CallHistory
from support.simulation.schedule import change_function, schema_of

TTL_S = 0.3
WORK_TTL_S = 1.5
WORK_S = 2 * WORK_TTL_S
SLEEPERS = 4
ROUNDS = max(1, effort() // 5)
DEATHS = 2 * ROUNDS
CLAIMERS = 4
DEAD_RUNS = max(20, 3 * effort())
LONG_TTL_S = 600.0
"""Longer than a test takes: the lease of a dead process of this machine is free at once."""


@pytest.fixture(params=["sqlite", "postgres"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "agent.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


class Place:
    """A store, the workers on it, and the history of all they did."""

    def __init__(self, url: str, folder: Path, crew: Crew) -> None:
        self.url = url
        self.crew = crew
        self.store = backstay.open(url)
        self.history = str(folder / "history.jsonl")

    def hire(self, name: str, mutation: str = "") -> Worker:
        return self.crew.hire("support.crash.lease_work:Holder", self.url, self.history, name, mutation)

    def wait_expired(self, *threads: str) -> None:
        """Wait until these leases have expired, by the store's own word."""
        wait_until(lambda: set(expired(self.store)) >= set(threads))

    def judge(self) -> ChainVerdict:
        """Return the verdict on everything that was recorded."""
        history = CallHistory.read(self.history)
        return check_chain(history, chains_of(self.store, history.branches))


@pytest.fixture
def place(shared_url: str, tmp_path: Path) -> Iterator[Place]:
    with Crew(tmp_path) as crew:
        made = Place(shared_url, tmp_path, crew)
        yield made
        report = made.store.check()
        assert report, str(report)
        made.store.close()


def fall_asleep(place: Place, sleepers: dict[str, Worker]) -> None:
    """Let each take a lease, save once, and fall asleep in the middle of its second save, until its time is over."""
    for thread, sleeper in sleepers.items():
        assert sleeper.ask("take", thread, TTL_S) == 1
        sleeper.ask("save", thread, "first")
        sleeper.tell("save_asleep", thread, "stale")
    for sleeper in sleepers.values():
        wait_until(lambda: sleeper.is_stopped)  # noqa: B023
    place.wait_expired(*sleepers)


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("saves", [True, False], ids=["new-owner-has-saved", "new-owner-has-not-saved-yet"])
def test_a_holder_that_slept_past_its_lease_is_refused_and_told(place: Place, saves: bool, show: Show) -> None:
    sleepers = [place.hire(f"sleeper {number}") for number in range(SLEEPERS)]
    heir = place.hire("heir")
    woken = refused = 0
    for number in range(ROUNDS):
        asleep = {f"thread {number}.{index}": sleeper for index, sleeper in enumerate(sleepers)}
        fall_asleep(place, asleep)
        assert heir.ask("claim", SLEEPERS) == dict.fromkeys(asleep, 2)
        for thread in asleep:
            heir.ask("look", thread)
            if saves:
                assert heir.ask("save", thread, "second")["step"] == 2
        for thread, sleeper in asleep.items():
            sleeper.go_on()
            assert sleeper.hear()["error"] == "Fenced"
            assert sleeper.ask("status", thread) == {"lost": True, "told": 1}
            answers = sleeper.ask("refusals", thread)
            assert set(answers) == {"Fenced"}
            woken, refused = woken + 1, refused + 1 + len(answers)
        for thread in asleep:
            assert heir.ask("finish", thread, "last")["step"] == (3 if saves else 2)

    verdict = place.judge()
    show("sleepers", f"{woken} woken past their lease, {refused} calls refused, 0 landed; {verdict}")
    assert verdict, str(verdict)
    texts = {checkpoint.state["text"] for checkpoint in everything(place.store)}
    assert texts == ({"first", "second", "last"} if saves else {"first", "last"})


def everything(store: backstay.Store) -> Iterator[backstay.Checkpoint]:
    for thread in [meta.thread_id for meta in store.threads()]:
        for meta in store.thread(thread).history():
            found = store.get(meta.id)
            assert found is not None
            yield found


def stop_between_writes(url: str, worker: Worker) -> None:
    """Stop a worker whose heartbeat writes now and then. On SQLite, not while it holds the lock that all wait for."""
    worker.stop()
    while not url.startswith("postgresql:") and is_locked(f"{url}-lock"):
        worker.go_on()
        worker.stop()


def is_locked(path: str) -> bool:
    with open(path, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.crash
def test_a_holder_is_told_by_its_heartbeat_that_it_was_replaced_while_it_was_stopped(place: Place) -> None:
    """It does nothing when it wakes up: that its lease is lost comes to it by itself."""
    sleepers = {f"thread {number}": place.hire(f"sleeper {number}") for number in range(SLEEPERS)}
    heir = place.hire("heir")
    for thread, sleeper in sleepers.items():
        sleeper.ask("take", thread, TTL_S, True)
        sleeper.ask("save", thread, "first")
        stop_between_writes(place.url, sleeper)
    place.wait_expired(*sleepers)
    assert heir.ask("claim", SLEEPERS) == dict.fromkeys(sleepers, 2)
    for thread, sleeper in sleepers.items():
        sleeper.go_on()
        wait_until(lambda: sleeper.ask("status", thread) == {"lost": True, "told": 1})  # noqa: B023
        assert sleeper.ask("save", thread, "stale")["error"] == "Fenced"
        assert heir.ask("finish", thread, "last")["step"] == 2

    verdict = place.judge()
    assert verdict, str(verdict)


@pytest.mark.crash
def test_a_holder_that_works_longer_than_its_lease_is_never_claimed_while_its_heart_beats(
    place: Place, show: Show
) -> None:
    holder = place.hire("holder")
    claimers = [place.hire(f"claimer {number}") for number in range(CLAIMERS)]
    holder.ask("take", "thread", WORK_TTL_S, True)
    holder.ask("save", "thread", "first")
    attempts, end = 0, time.monotonic() + WORK_S
    while time.monotonic() < end:
        assert at_once(claimers, "claim", 1) == [{}] * CLAIMERS
        attempts += CLAIMERS

    assert holder.ask("status", "thread") == {"lost": False, "told": 0}
    assert holder.ask("save", "thread", "second")["step"] == 2
    show("claims of a living holder", f"{attempts} in {WORK_S:g} s, all in vain")


@pytest.mark.crash
@pytest.mark.effort
def test_a_killed_holder_is_found_and_replaced_by_one_of_four_who_goes_on_where_it_was(
    place: Place, show: Show
) -> None:
    claimers = [place.hire(f"claimer {number}") for number in range(CLAIMERS)]
    for number in range(DEATHS):
        thread, victim = f"thread {number}", place.hire(f"victim {number}")
        victim.ask("take", thread, LONG_TTL_S)
        victim.ask("save", thread, "first")
        last = victim.ask("save", thread, "second")
        if number % 2:  # die in the middle of a save, else between two
            victim.tell("save_asleep", thread, "never stored")
            wait_until(lambda: victim.is_stopped)  # noqa: B023
        victim.kill()
        (found,) = place.store.runs(status="abandoned")
        assert (found.thread_id, found.step, found.attempts) == (thread, last["step"], 1)
        answers = at_once(claimers, "claim", 1)
        while not any(answers):  # a worker asks now and then who is dead
            answers = at_once(claimers, "claim", 1)
        assert sorted(map(len, answers)) == [0, 0, 0, 1]
        (heir,) = [claimer for claimer, answer in zip(claimers, answers, strict=True) if answer]
        went_on = heir.ask("finish", thread, "third")
        assert (went_on["from"], went_on["parent"], went_on["step"]) == (last["id"], last["id"], 3)
        assert place.store.count_runs() == {}
        assert expired(place.store) == []

    verdict = place.judge()
    show("killed holders", f"{DEATHS} killed, each replaced by one of {CLAIMERS}; {verdict}")
    assert verdict, str(verdict)


@pytest.mark.crash
@pytest.mark.effort
def test_four_workers_share_dead_runs_each_exactly_once(place: Place, show: Show) -> None:
    victim = place.hire("victim")
    threads = [f"thread {number}" for number in range(DEAD_RUNS)]
    for thread in threads:
        victim.ask("take", thread, TTL_S)
        victim.ask("save", thread, "first")
    victim.kill()
    assert len(place.store.runs(status="abandoned", limit=1000)) == DEAD_RUNS
    workers = [place.hire(f"worker {number}") for number in range(CLAIMERS)]
    done = at_once(workers, "finish_all", 3, "second")

    assert sorted(thread for each in done for thread in each) == sorted(threads)
    assert {meta.step for meta in place.store.threads()} == {2}
    assert place.store.count_runs() == {}
    assert expired(place.store) == []
    verdict = place.judge()
    show("dead runs shared", f"{[len(each) for each in done]}; {verdict}")
    assert verdict, str(verdict)
    assert sum(bool(each) for each in done) > 1, "one worker got them all: they did not compete"


@pytest.mark.crash
def test_a_store_that_does_not_compare_epochs_is_noticed(
    place: Place, request: pytest.FixtureRequest, show: Show
) -> None:
    """A harness that cannot fail shows nothing: without the fence the sleeper's save lands, and the verdict says so."""
    sleepers = {f"thread {number}": place.hire(f"sleeper {number}", "no fence") for number in range(SLEEPERS)}
    heir = place.hire("heir")
    fall_asleep(place, sleepers)
    assert heir.ask("claim", SLEEPERS) == dict.fromkeys(sleepers, 2)
    if place.url.startswith("postgresql:"):  # now that all have opened it: they would refuse it
        with request.getfixturevalue("postgres").connect() as connection:
            for function, words in FENCE_WORDS.items():
                change_function(connection, schema_of(place.url), function, words)
    for thread, sleeper in sleepers.items():
        heir.ask("look", thread)  # and does not see what lands only now
        sleeper.go_on()
        assert "error" not in sleeper.hear()

    verdict = place.judge()
    show("without a fence", f"{len(verdict.violations)} violations")
    assert verdict.kinds == {ViolationKind.STALE_EPOCH}
    assert len(verdict.violations) == SLEEPERS
