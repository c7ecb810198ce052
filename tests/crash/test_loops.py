"""Loops killed at every call by which they write, right before it and right after it, and run again until all is done.

The story has three turns, five effects and one approval. Whatever the moment, the end is that of a run nobody killed:
the same state, every effect done exactly once. Only where an effect was begun and has no receipt can nobody know; there
the loop says so, and somebody who looks at the world tells it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import backstay
from backstay.errors import EffectUnknown
from backstay.model.runs import EffectStatus, Outcome
from backstay.thread.loop import Loop
from support.crash.loop_work import World, story
from support.processes import Nursery
from support.running import Show, effort, spread

DEEDS = ["look", "quote", "pay 5", "mail ann", "mail bob"]
STATE = {"log": [f"did {deed}" for deed in DEEDS], "answer": 42}
KILLS = 8 * effort()


@pytest.fixture(params=["sqlite", "postgres"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "agent.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@dataclass(frozen=True)
class Death:
    """Where a process is to die: in the part before the approval or after it, at which call, on which side of it."""

    approved: bool
    number: int
    after: bool
    verb: str

    def __str__(self) -> str:
        part, side = "second" if self.approved else "first", "after" if self.after else "before"
        return f"{part} part, {side} {self.number} {self.verb}"


class Place:
    """A store, the world, and those who live and die there."""

    def __init__(self, url: str, folder: Path, nursery: Nursery) -> None:
        self.url = url
        self.folder = folder
        self.nursery = nursery
        self.store = backstay.open(url)
        self.unknown = 0

    def world(self, thread: str) -> World:
        return World(str(self.folder / f"world of {thread}"))

    def live(self, thread: str, number: int = 0, after: bool = False, careless: bool = False) -> tuple[int, list[str]]:
        """Run the story in a process of its own; return how it ended, and the calls it made if it lived."""
        out = self.folder / f"out of {thread} {number}"
        path = str(self.folder / f"world of {thread}")
        pid = self.nursery.start(
            "support.crash.loop_work:live_and_die", [self.url, thread, path, number, after, careless], str(out)
        )
        return self.nursery.wait(pid), out.read_text().split()

    def decide(self, thread: str) -> None:
        """Approve what a thread waits for."""
        for asked in self.store.thread(thread).interrupts():
            self.store.thread(thread).decide(asked, "approve", by="ann")

    def deaths(self, careless: bool = False) -> list[Death]:
        """Return every call that a run makes which nobody kills, from both sides."""
        found = []
        for approved in (False, True):
            code, calls = self.live("nobody is killed", number=-approved, careless=careless)
            assert code == 0
            self.decide("nobody is killed")
            found += [
                Death(approved, number, after, verb) for number, verb in enumerate(calls, 1) for after in (False, True)
            ]
        return found

    def kill(self, thread: str, death: Death, careless: bool = False) -> None:
        """Let a process die there; that it did is certain afterwards."""
        if death.approved:
            assert self.live(thread, careless=careless)[0] == 0
            self.decide(thread)
        assert self.live(thread, death.number, death.after, careless) == (-signal.SIGKILL, []), str(death)

    def finish(self, thread: str, careless: bool = False) -> Loop:
        """Run the story again and again, as a supervisor and a person would, until it is done."""
        handle, world = self.store.thread(thread), self.world(thread)
        while True:
            try:
                loop = story(handle, world, careless)
            except EffectUnknown as unknown:
                self.unknown += 1
                self.look(handle, unknown)
                continue
            if loop.status == "completed":
                return loop
            assert loop.status == "interrupted"
            self.decide(thread)

    def look(self, handle: backstay.Thread, unknown: EffectUnknown) -> None:
        """Find out whether an effect was done, and say so."""
        what = {"look": "look", "quote": "quote", "pay": "pay 5", "mail": "mail ann", "mail 2": "mail bob"}
        deed = what[unknown.record.key.rpartition("/")[2]]
        done = deed in self.world(handle.id).deeds
        handle.settle(unknown.record, Outcome.done(f"did {deed}") if done else Outcome.not_done(), by="ann")

    def check(self, thread: str, loop: Loop) -> None:
        """Compare everything with a run that nobody killed."""
        handle = self.store.thread(thread)
        newest = handle.latest()
        assert newest is not None
        assert loop.state == newest.state == STATE
        assert self.world(thread).deeds == DEEDS
        assert [(meta.iteration, meta.tokens_used) for meta in handle.history()] == [(3, 50), (2, 30), (1, 10), (0, 0)]
        assert {effect.status for effect in handle.effects()} == {EffectStatus.DONE}
        (asked,) = handle.interrupts(pending=False)
        assert not asked.pending


@pytest.fixture
def place(shared_url: str, tmp_path: Path) -> Iterator[Place]:
    with Nursery() as nursery:
        made = Place(shared_url, tmp_path, nursery)
        yield made
        report = made.store.check()
        assert report, str(report)
        made.store.close()


@pytest.mark.crash
@pytest.mark.effort
def test_a_loop_killed_at_any_write_ends_like_one_that_was_not(place: Place, show: Show) -> None:
    every = place.deaths()
    deaths = spread(every, KILLS)
    threads = {str(death): death for death in deaths}
    assert len(threads) == len(deaths) >= min(KILLS, 40)
    for thread, death in threads.items():
        place.kill(thread, death)
    for thread in threads:
        place.check(thread, place.finish(thread))

    show(
        "loops killed",
        f"{len(deaths)} of {len(every)}, at {sorted({death.verb for death in deaths})}; {place.unknown} in doubt",
    )
    in_doubt = 2 * len(DEEDS)  # what was begun and has no receipt, and nothing else
    assert place.unknown <= in_doubt
    assert place.unknown == in_doubt or len(deaths) < len(every)


@pytest.mark.crash
def test_an_agent_that_acts_without_the_ledger_is_noticed(place: Place) -> None:
    """A harness that cannot fail shows nothing: killed before its first turn is saved, it does the same again."""
    first_part = [death for death in place.deaths(careless=True) if not death.approved]
    last = [death for death in first_part if death.verb == "commit" and not death.after][-1]
    place.kill("careless", last, careless=True)
    place.finish("careless", careless=True)

    assert place.world("careless").deeds.count("look") == 2
    with pytest.raises(AssertionError):
        place.check("careless", place.finish("careless", careless=True))
