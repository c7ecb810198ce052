"""Letting savers and deleters loose on one store, and comparing the store with what they noted."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import backstay
from support.crew import Crew
from support.simulation.prune_work import FIRST_SEQ, KEPT, fingerprint

EVERYTHING = ["Saver", "Saver", "Saver", "Deleter", "Deleter"]
SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))


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
    found = [str(finding) for finding in store.check().findings]
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
            crew.hire(f"support.simulation.prune_work:{kind}", url, str(folder / f"notes-{seed}"), seed, mutation)
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
