"""Wall clocks that are set while workers save and hold leases: by an hour and by a day, forwards and backwards.

libfaketime, preloaded into the workers (and once into a PostgreSQL server), makes their wall clock tell what a file
says; the monotonic and the boot clock stay right, as they do when somebody sets a machine's clock. Order and newest
must not notice. Leases on SQLite go by the boot clock, on PostgreSQL by the server's: if that one is set, a lease may
end early or late, but never do two holders both save.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of
from support.crash.lease_work import expired
from support.crew import Crew, Worker
from support.running import Show, effort, skip_unless_ci
from support.simulation.chain import chains_of, check_chain
from support.simulation.history import CallHistory

HOUR_S, DAY_S = 3600, 86_400
OFFSETS_S = (0, HOUR_S, -HOUR_S, DAY_S, -DAY_S)
STEPS = 6 * effort()
LEASE_ROUNDS = max(1, effort() // 4)
SERVER_ROUNDS = max(1, effort() // 2)
TTL_S = 0.3
LONG_TTL_S = 120.0
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))


class FakeClock:
    """The wall clock of the processes that run in ``environment``: as many seconds off as it was last set to."""

    def __init__(self, folder: Path) -> None:
        library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
        if library is None:
            skip_unless_ci("libfaketime is not installed (Debian package faketime): clocks cannot be set")
        self._file = folder / "clock"
        self.offset_s = 0
        self.steps = 0
        self.set(0)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, offset_s: int) -> None:
        """Set the clock; a file that is replaced is never read half written."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.chmod(0o644)
        new.replace(self._file)
        self.steps += offset_s != self.offset_s
        self.offset_s = offset_s

    def shows(self, moment_s: float) -> bool:
        """Tell whether a moment is what this clock shows now."""
        return abs(moment_s - time.time() - self.offset_s) < 60


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    with tempfile.TemporaryDirectory(prefix="backstay-clock-") as folder:
        Path(folder).chmod(0o755)  # PostgreSQL runs as somebody else, who must be able to read the clock too
        yield FakeClock(Path(folder))


class Place:
    """A store, workers whose clock is set at will, and the history of all they did."""

    def __init__(self, url: str, folder: Path, crew: Crew) -> None:
        self.url = url
        self.crew = crew
        self.store = backstay.open(url)
        self.history = str(folder / "history.jsonl")

    def hire(self, name: str, mutation: str = "") -> Worker:
        return self.crew.hire("support.crash.lease_work:Holder", self.url, self.history, name, mutation)

    def judge(self) -> str:
        history = CallHistory.read(self.history)
        verdict = check_chain(history, chains_of(self.store, history.branches))
        report = self.store.check()
        assert verdict, str(verdict)
        assert report, str(report)
        return str(verdict)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Place]:
    url = str(tmp_path / "agent.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with Crew(tmp_path, clock.environment) as crew:
        made = Place(url, tmp_path, crew)
        yield made
        made.store.close()


def other_offset(clock: FakeClock, chance: random.Random) -> int:
    return chance.choice([offset for offset in OFFSETS_S if offset != clock.offset_s])


def moment(checkpoint: dict[str, str]) -> float:
    return datetime.fromisoformat(checkpoint["created"]).timestamp()


@pytest.mark.crash
@pytest.mark.effort
def test_order_and_newest_do_not_notice_that_clocks_are_set(place: Place, clock: FakeClock, show: Show) -> None:
    """Two workers save in turn; the clock is set before each save, or in the middle of it."""
    chance = random.Random(SEED)
    workers = [place.hire(f"worker {number}") for number in range(2)]
    saved: list[dict[str, str]] = []
    for number in range(STEPS):
        worker = workers[number % 2]
        worker.ask("handle", "thread")
        if number % 3 == 0:
            worker.tell("save_asleep", "thread", str(number))
            wait_until(lambda: worker.is_stopped)  # noqa: B023
            clock.set(other_offset(clock, chance))
            worker.go_on()
            saved.append(worker.hear())
        else:
            clock.set(other_offset(clock, chance))
            saved.append(worker.ask("save", "thread", str(number)))
            assert clock.shows(moment(saved[-1])), "the clock was not set"
        assert clock.shows(worker.ask("clocks")["wall"])
        latest = place.store.thread("thread").latest()
        assert latest is not None
        assert (latest.id, latest.step, latest.state["text"]) == (saved[-1]["id"], number + 1, str(number))

    back = sum(moment(later) < moment(earlier) - HOUR_S / 2 for earlier, later in pairwise(saved))
    ahead = sum(moment(later) > moment(earlier) + HOUR_S / 2 for earlier, later in pairwise(saved))
    metas = list(place.store.thread("thread").history())
    assert [meta.id for meta in metas] == [checkpoint["id"] for checkpoint in reversed(saved)]
    assert [meta.seq for meta in metas] == list(range(STEPS, 0, -1))
    show("clock steps", f"{clock.steps} ({back} seen to go back, {ahead} ahead), seed {SEED}; {place.judge()}")
    assert clock.steps >= STEPS * 5 // 6
    assert min(back, ahead) >= STEPS // 6


@pytest.mark.crash
@pytest.mark.effort
def test_leases_do_not_notice_that_the_clocks_of_workers_are_set(place: Place, clock: FakeClock, show: Show) -> None:
    """A long lease is not taken from its holder after a step ahead, and a short one ends although time went back."""
    holder, rival = place.hire("holder"), place.hire("rival")
    assert holder.ask("take", "held", LONG_TTL_S) == 1
    refused = taken_over = 0
    for offset in (*OFFSETS_S[1:], 0) * LEASE_ROUNDS:
        clock.set(offset)
        assert clock.shows(rival.ask("clocks")["wall"])
        assert rival.ask("expired") == [] == expired(place.store)
        assert rival.ask("take", "held", LONG_TTL_S)["error"] == "Fenced"
        assert rival.ask("claim", 1) == {}
        assert "error" not in holder.ask("save", "held", str(offset))
        refused += 2
    for number, offset in enumerate(OFFSETS_S):
        thread = f"short {number}"
        clock.set(0)
        holder.ask("take", thread, TTL_S)
        holder.tell("save_asleep", thread, "stale")
        wait_until(lambda: holder.is_stopped)
        clock.set(offset)
        wait_until(lambda: thread in rival.ask("expired"))  # noqa: B023
        assert rival.ask("claim", 1) == {thread: 2}
        assert "error" not in rival.ask("finish", thread, "rescued")
        holder.go_on()
        assert holder.hear()["error"] == "Fenced"
        taken_over += 1

    show(
        "leases under set clocks",
        f"{clock.steps} steps, {refused} takeovers refused while the lease ran, {taken_over} granted after it; "
        f"{place.judge()}",
    )


@pytest.mark.crash
def test_leases_that_go_by_the_wall_clock_are_given_away_early_but_never_written_by_two(
    tmp_path: Path, clock: FakeClock
) -> None:
    """So the test above would notice; and where there is no boot clock, nothing worse happens than that."""
    with Crew(tmp_path, clock.environment) as crew:
        place = Place(str(tmp_path / "agent.db"), tmp_path, crew)
        holder, rival = (place.hire(name, "wall clock") for name in ("holder", "rival"))
        for number, offset in enumerate((HOUR_S, DAY_S)):
            thread = f"thread {number}"
            clock.set(0)
            holder.ask("take", thread, LONG_TTL_S)
            holder.ask("save", thread, "first")
            clock.set(offset)
            assert rival.ask("take", thread, LONG_TTL_S) == 2
            assert set(holder.ask("refusals", thread)) == {"Fenced"}
            assert rival.ask("finish", thread, "second")["step"] == 2
        place.judge()
        place.store.close()


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.usefixtures("postgres")  # which says so if this machine cannot run one
def test_never_do_two_save_under_one_lease_also_if_the_clock_of_the_server_is_set(
    tmp_path: Path, clock: FakeClock, show: Show
) -> None:
    """Set ahead, PostgreSQL gives a running lease away; its holder then finds itself fenced. Set back, it keeps one."""
    with server_under(clock) as url, Crew(tmp_path) as crew:
        place = Place(url, tmp_path, crew)
        one, other = place.hire("one"), place.hire("other")
        given_away = kept = 0
        for number, offset in enumerate((*OFFSETS_S[1:], 0) * SERVER_ROUNDS):
            thread = f"thread {number}"
            before = clock.offset_s
            one.ask("take", thread, LONG_TTL_S)
            one.ask("save", thread, "first")
            clock.set(offset)
            assert clock.shows(server_time(place.store))
            answer = other.ask("take", thread, LONG_TTL_S)
            if offset > before:
                assert answer == 2
                assert set(one.ask("refusals", thread)) == {"Fenced"}
                assert other.ask("finish", thread, "second")["step"] == 2
                given_away += 1
            else:
                assert answer["error"] == "Fenced"
                assert one.ask("finish", thread, "second")["step"] == 2
                kept += 1

        figures = place.judge()
        place.store.close()
    show("server clock steps", f"{clock.steps}: {given_away} leases given away early, {kept} kept; {figures}")
    assert clock.steps >= len(OFFSETS_S) * SERVER_ROUNDS - 1
    assert given_away
    assert kept


def server_time(store: backstay.Store) -> float:
    """Return what time it is for the server of a store."""
    backend: Any = access_of(store).store
    found = backend._pool.read(lambda connection: connection.execute("SELECT clock_timestamp()").fetchone())
    value: datetime = found[0]
    return value.timestamp()


@contextlib.contextmanager
def server_under(clock: FakeClock) -> Iterator[str]:
    """Run a PostgreSQL server of its own, by a clock that can be set; return the URL of a store there."""
    from support.postgres import PostgresServer

    with pytest.MonkeyPatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        server = PostgresServer().__enter__()
    with contextlib.closing(server):
        yield server.url(schema="clocks")
