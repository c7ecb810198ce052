"""Checking what killed writers left behind, from nothing but the lines they wrote and the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kill_victims import state_after

import backstay
from backstay.model.checkpoint import Checkpoint


@dataclass
class Told:
    """What the victims said: checkpoints they were told are kept, and saves they began."""

    acks: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # id -> thread, digest, token
    invoked: set[str] = field(default_factory=set)  # tokens
    conflicts: set[str] = field(default_factory=set)  # tokens

    def take(self, line: str) -> None:
        """Note one line of a victim's output."""
        kind, *words = line.split(" ")
        if kind == "INVOKE":
            self.invoked.add(words[0])
        elif kind == "CONFLICT":
            self.conflicts.add(words[0])
        elif kind == "ACK":
            thread, name, digest, token = words
            self.acks[name] = (thread, digest, token)
        else:
            raise AssertionError(f"a victim said {line!r}")

    @property
    def unknown(self) -> set[str]:
        """Return the tokens of saves that began and whose end nobody saw."""
        return self.invoked - self.conflicts - {token for _, _, token in self.acks.values()}


@dataclass
class Found:
    """What the store holds, compared with what was told."""

    stored: int = 0
    unknown_applied: int = 0
    lost: list[str] = field(default_factory=list)  # acknowledged ids that are not there
    wrong: list[str] = field(default_factory=list)  # checkpoints with another content, digest or thread than told
    broken: list[str] = field(default_factory=list)  # links, numbers or steps that do not make one chain
    undead: list[str] = field(default_factory=list)  # saves that were refused and are there nevertheless
    findings: list[str] = field(default_factory=list)  # what verify() reports


def compare(path: str, told: Told) -> Found:
    """Read everything that is in the store and compare it with what the victims said."""
    found = Found()
    with backstay.open(path) as store:
        found.findings = [str(finding) for finding in store.verify().findings]
        seen: dict[str, Checkpoint] = {}
        for meta in store.threads():
            seen.update(_walk(store, meta.thread_id, found))
    for name, (thread, digest, token) in told.acks.items():
        checkpoint = seen.get(name)
        if checkpoint is None:
            found.lost.append(name)
        elif (checkpoint.thread_id, checkpoint.digest.hex(), checkpoint.state["token"]) != (thread, digest, token):
            found.wrong.append(name)
    tokens = {checkpoint.state["token"] for checkpoint in seen.values()}
    found.stored = len(seen)
    found.unknown_applied = len(tokens & told.unknown)
    found.undead = sorted(tokens & told.conflicts)
    return found


def _walk(store: backstay.Store, thread: str, found: Found) -> dict[str, Checkpoint]:
    """Follow a thread from its first checkpoint to its head; note every link that is not as it must be."""
    seen: dict[str, Checkpoint] = {}
    before: Checkpoint | None = None
    state: dict[str, Any] | None = None
    for position, meta in enumerate(reversed(list(store.thread(thread).history(branch="*"))), 1):
        checkpoint = store.get(meta.id)
        if checkpoint is None:
            found.lost.append(meta.id)
            continue
        if (meta.parent_id, meta.seq, meta.step) != (before.id if before else None, position, position):
            found.broken.append(meta.id)
        if checkpoint.state != state_after(state, checkpoint.state["token"]):
            found.wrong.append(meta.id)
        seen[meta.id] = before = checkpoint
        state = checkpoint.state
    head = store.thread(thread).latest()
    if head is None or before is None or head.id != before.id:
        found.broken.append(f"head of {thread}")
    return seen
