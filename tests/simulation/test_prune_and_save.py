"""Deleting while others save: processes that save in every way and processes that delete in every way, on one store.

Afterwards nothing may be missing and nothing may be left over: every checkpoint that is there holds the very state that
its saver noted, every branch that was only pruned ends with its last acknowledged save, and nobody was told of damage
on the way. The same load on stores without their locks must be noticed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from backstay.testing.postgres import PostgresServer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))

from crew import Crew
from prune_work import FIRST_SEQ, KEPT, fingerprint

import backstay
from effort import effort

EVERYTHING = ["Saver", "Saver", "Saver", "Deleter", "Deleter"]
ONE_BLOB = ["Swapper", "Swapper", "Swapper"]
SECONDS = max(5.0, 1.5 * effort())
TURN_SECONDS = 3.0
MUTANT_SECONDS_MAX = 30.0
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))

Show = Callable[[str, object], None]


@dataclass
class Told:
    """What savers noted: of each checkpoint the states it had, by seq, and what must still be there."""

    states: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # of copies: what they were made from
    ends: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)  # (thread, branch) -> newest (seq, id)
    tagged: dict[str, tuple[int, bool]] = field(default_factory=dict)  # by its newest seq: a replacement has tags anew
    awaited: dict[str, str] = field(default_factory=dict)  # interrupt -> checkpoint
    loads: list[tuple[str, list[str]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def read(self, path: Path) -> None:
        for line in path.read_text().splitlines():
            self.take(json.loads(line))

    def take(self, note: dict[str, Any]) -> None:
        if "wrong" in note:
            self.wrong.append(note["wrong"])
        elif "loaded" in note:
            self.loads.append((note["loaded"], note["state"]))
        elif "interrupt" in note:
            if note["thread"] in KEPT:
                self.awaited[note["interrupt"]] = note["checkpoint"]
        else:
            name, seq, place = note["saved"], note["seq"], (note["thread"], note["branch"])
            self.states.setdefault(name, {})[seq] = note["state"]
            if note["source"] is not None:
                self.sources[name] = note["source"]
            if note["thread"] in KEPT:
                self.ends[place] = max(self.ends.get(place, (0, "")), (seq, name))
                self.tagged[name] = max(self.tagged.get(name, (0, False)), (seq, note["tagged"]))

    def may_be(self, name: str, state: list[str], seq: int | None = None) -> bool:
        """Tell whether a checkpoint may have this state now, with this seq, or may ever have had it.

        A copy may be one of any state that its source ever had, since that is read anew when it is copied.
        """
        states = self.states.get(name, {})
        noted = list(states.values()) if seq is None else [states.get(seq, states.get(FIRST_SEQ))]
        return state in noted or (name in self.sources and state[0] in self._contents(self.sources[name]))

    def _contents(self, name: str) -> set[str]:
        inherited = self._contents(self.sources[name]) if name in self.sources else set()
        return inherited | {content for content, _ in self.states.get(name, {}).values()}


def compare(store: backstay.Store, told: Told) -> list[str]:
    """Return everything in the store that is not as the savers noted."""
    found = [str(finding) for finding in store.verify().findings]
    there: set[str] = set()
    for thread in [meta.thread_id for meta in store.threads()]:
        for meta in store.thread(thread).history(branch="*"):
            there.add(meta.id)
            checkpoint = readable(lambda: store.get(meta.id), found)  # noqa: B023
            if checkpoint is None or not told.may_be(meta.id, fingerprint(checkpoint.state), meta.seq):
                found.append(f"{meta.id} (seq {meta.seq}) is not what was saved: {told.states.get(meta.id)}")
    for (thread, branch), (seq, name) in told.ends.items():
        head = readable(store.thread(thread, branch=branch).latest, found)
        if head is None or head.id != name or seq not in (head.seq, FIRST_SEQ):
            found.append(f"{thread} {branch} ends with {head and head.id}, not with {name}")
    found += [f"tagged {name} is gone" for name, (_, tagged) in told.tagged.items() if tagged and name not in there]
    pending = {record.id: record.checkpoint_id for record in store.interrupts()}
    found += [f"interrupt {name} is gone" for name in told.awaited.keys() - pending.keys()]
    return found + [f"{name}, which waits for a decision, is gone" for name in {*pending.values()} - there]


def readable(load: Callable[[], backstay.Checkpoint | None], found: list[str]) -> backstay.Checkpoint | None:
    """Return what can be loaded; note damage among what was found."""
    try:
        return load()
    except backstay.Corrupted as error:
        found.append(str(error))
        return None


@dataclass
class Load:
    """One run of the load and what came of it."""

    told: Told
    counts: Counter[str]
    found: list[str]

    def __str__(self) -> str:
        saved = sum(len(states) for states in self.told.states.values())
        ends = Counter[str]()
        for name, number in self.counts.items():
            ends[name.rpartition(" ")[2]] += number
        return (
            f"{saved} saves, {self.counts['deleted']} checkpoints deleted, {len(self.told.loads)} loads, "
            f"{self.counts['compact ok']} times compacted, {ends['Conflict'] + ends['IdTaken']} conflicts, "
            f"{ends['NotFound']} not found, {ends['StoreBusy']} busy, "
            f"{len(self.found)} findings, {len(self.told.wrong)} errors"
        )


def run_load(url: str, folder: Path, crowd: list[str], seconds: float, mutation: str = "", turn: int = 0) -> Load:
    """Let a crowd of workers loose on a store, then compare the store with what was noted, in earlier turns too."""
    told, counts = Told(), Counter[str]()
    with Crew(folder) as crew:
        workers = [
            crew.hire(f"prune_work:{kind}", url, str(folder / f"notes-{seed}"), seed, mutation)
            for seed, kind in enumerate(crowd, SEED + turn * len(crowd))
        ]
        for worker in workers:
            worker.tell("work", seconds)
        for worker in workers:
            counts.update(worker.hear())
    for path in folder.glob("notes-*"):
        told.read(path)
    with backstay.open(url) as store:
        found = compare(store, told)
    found += [
        f"{name} was loaded with another state than was saved"
        for name, state in told.loads
        if not told.may_be(name, state)
    ]
    return Load(told, counts, found)


@pytest.fixture(params=["sqlite", "postgres"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "agent.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def deadlocks(server: PostgresServer) -> int:
    with server.connect() as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
        assert row is not None
        return int(row[0])


@pytest.mark.effort
@pytest.mark.row("C8")
def test_what_is_deleted_meanwhile_never_breaks_what_is_saved(
    shared_url: str, tmp_path: Path, request: pytest.FixtureRequest, show: Show
) -> None:
    server = request.getfixturevalue("postgres") if shared_url.startswith("postgresql:") else None
    before = deadlocks(server) if server else 0
    load = run_load(shared_url, tmp_path, EVERYTHING, SECONDS)

    resolved = f", {deadlocks(server) - before} deadlocks resolved" if server else ""
    show("prune and save", f"seed {SEED}, {load}{resolved}")
    assert load.told.wrong == [], load.told.wrong[0]
    assert load.found == []
    assert load.counts["deleted"] > min(100, 5 * effort())
    assert all(load.counts[f"{what} ok"] for what in ("append", "edit", "rewind", "replace", "prune", "delete_thread"))
    assert load.counts["fork_within ok"] + load.counts["fork_across ok"]


# The load notices a store without its locks ------------------------------------------------------------------------


def load_until_noticed(url: str, folder: Path, crowd: list[str], mutation: str) -> Load:
    """Run the load in short turns until something is found, or the time is over."""
    end = time.monotonic() + MUTANT_SECONDS_MAX
    for turn in count():
        load = run_load(url, folder, crowd, TURN_SECONDS, mutation, turn)
        if load.found or load.told.wrong or time.monotonic() > end:
            return load
    raise AssertionError


@pytest.mark.effort(2)
def test_a_store_that_looks_for_blobs_before_its_transaction_is_noticed(tmp_path: Path, show: Show) -> None:
    load = load_until_noticed(str(tmp_path / "agent.db"), tmp_path, ONE_BLOB, "looks too early")

    show("looking for blobs too early", load)
    assert any("is missing" in text for text in load.told.wrong + load.found)
