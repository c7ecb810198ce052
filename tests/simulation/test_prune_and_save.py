"""Deleting while others save: processes that save in every way and processes that delete in every way, on one store.

Afterwards nothing may be missing and nothing may be left over: every checkpoint that is there holds the very state that
its saver noted, every branch that was only pruned ends with its last acknowledged save, and nobody was told of damage
on the way. The same load on stores without their locks must be noticed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))

from crew import Crew
from prune_work import KEPT, fingerprint

import holdfast

EVERYTHING = ["Saver", "Saver", "Saver", "Deleter", "Deleter"]
ONE_BLOB = ["Swapper", "Swapper", "Swapper"]
SECONDS = 12.0
SEED = int(os.environ.get("HOLDFAST_SEED", "20261116"))

Show = Callable[[str, object], None]


@dataclass
class Told:
    """What savers noted: of each checkpoint the states it had, by seq, and what must still be there."""

    states: dict[str, dict[int, str]] = field(default_factory=dict)
    ends: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)  # (thread, branch) -> newest (seq, id)
    tagged: dict[str, tuple[int, bool]] = field(default_factory=dict)  # by its newest seq: a replacement has tags anew
    awaited: dict[str, str] = field(default_factory=dict)  # interrupt -> checkpoint
    loads: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def read(self, path: Path) -> None:
        for line in path.read_text().splitlines():
            self.take(json.loads(line))

    def take(self, note: dict[str, Any]) -> None:
        if "wrong" in note:
            self.wrong.append(note["wrong"])
        elif "gone" in note:
            self.gone.add(note["gone"])
        elif "loaded" in note:
            self.loads.append((note["loaded"], note["state"]))
        elif "interrupt" in note:
            if note["thread"] in KEPT:
                self.awaited[note["interrupt"]] = note["checkpoint"]
        else:
            name, seq, place = note["saved"], note["seq"], (note["thread"], note["branch"])
            self.states.setdefault(name, {})[seq] = note["state"]
            if note["thread"] in KEPT:
                self.ends[place] = max(self.ends.get(place, (0, "")), (seq, name))
                self.tagged[name] = max(self.tagged.get(name, (0, False)), (seq, note["tagged"]))


def compare(store: holdfast.Store, told: Told) -> list[str]:
    """Return everything in the store that is not as the savers noted."""
    found = [str(finding) for finding in store.verify().findings]
    there: set[str] = set()
    for thread in [meta.thread_id for meta in store.threads()]:
        for meta in store.thread(thread).history(branch="*"):
            there.add(meta.id)
            if meta.id in told.gone:
                continue
            states = told.states.get(meta.id, {})
            try:
                checkpoint = store.get(meta.id)
            except holdfast.Corrupted as error:
                found.append(str(error))
                continue
            if checkpoint is None or states.get(meta.seq) != fingerprint(checkpoint.state):
                found.append(f"{meta.id} (seq {meta.seq}) is not what was saved: {states}")
    for (thread, branch), (seq, name) in told.ends.items():
        head = store.thread(thread, branch=branch).latest()
        if head is None or (head.seq, head.id) != (seq, name):
            found.append(f"{thread} {branch} ends with {head and head.id}, not with {name}")
    found += [f"tagged {name} is gone" for name, (_, tagged) in told.tagged.items() if tagged and name not in there]
    pending = {record.id: record.checkpoint_id for record in store.interrupts()}
    found += [f"interrupt {name} is gone" for name in told.awaited.keys() - pending.keys()]
    return found + [f"{name}, which waits for a decision, is gone" for name in {*pending.values()} - there]


@dataclass
class Load:
    """One run of the load and what came of it."""

    told: Told
    counts: Counter[str]
    found: list[str]

    def __str__(self) -> str:
        saved = sum(len(states) for states in self.told.states.values())
        late = sum(count for name, count in self.counts.items() if name.rpartition(" ")[2] in ("Conflict", "NotFound"))
        return (
            f"{saved} saves, {self.counts['deleted']} checkpoints deleted, {len(self.told.loads)} loads, "
            f"{self.counts['compact ok']} times compacted, {late} late, {self.counts['StoreBusy']} busy, "
            f"{len(self.found)} findings, {len(self.told.wrong)} errors"
        )


def run_load(url: str, folder: Path, crowd: list[str], seconds: float, mutation: str = "") -> Load:
    """Let a crowd of workers loose on a store, then compare the store with what they noted."""
    told, counts = Told(), Counter[str]()
    paths = [folder / f"notes-{number}" for number in range(len(crowd))]
    with Crew(folder) as crew:
        workers = [
            crew.hire(f"prune_work:{kind}", url, str(path), SEED + number, mutation)
            for number, (kind, path) in enumerate(zip(crowd, paths, strict=True))
        ]
        for worker in workers:
            worker.tell("work", seconds)
        for worker in workers:
            counts.update(worker.hear())
    for path in paths:
        if path.exists():
            told.read(path)
    with holdfast.open(url) as store:
        found = compare(store, told)
    found += [
        f"{name} was loaded with another state than was saved"
        for name, state in told.loads
        if name not in told.gone and state not in told.states.get(name, {}).values()
    ]
    return Load(told, counts, found)


@pytest.fixture(params=["sqlite", "postgres"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "agent.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.mark.slow
def test_what_is_deleted_meanwhile_never_breaks_what_is_saved(shared_url: str, tmp_path: Path, show: Show) -> None:
    load = run_load(shared_url, tmp_path, EVERYTHING, SECONDS)

    show("prune and save", f"seed {SEED}, {load}")
    show("of them", dict(sorted(load.counts.items())))
    assert load.told.wrong == [], load.told.wrong[0]
    assert load.found == []
