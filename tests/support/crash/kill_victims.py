"""What the killed processes of ``test_kill`` do, save and report each save, and what they must leave behind.

A state describes itself: from a checkpoint's token and its parent's state the whole state can be computed again, so
whoever checks the store needs nothing from the victims but the lines they wrote.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import backstay
from backstay.errors import Conflict
from backstay.model.checkpoint import Checkpoint
from support.processes import Nursery

SHARED = "shared"
LOG_LENGTH_MAX = 40
SLOW_BYTES = 8_000_000
UNKNOWN_DIGEST = "?"


def state_after(before: dict[str, Any] | None, token: str) -> dict[str, Any]:
    """Return the state that a save with this token makes of the one before it."""
    log = [] if before is None or len(before["log"]) >= LOG_LENGTH_MAX else before["log"]
    noise = hashlib.sha256(token.encode()).digest()
    return {
        "token": token,
        "log": [*log, f"{token} {noise.hex()}"],
        "payload": hashlib.shake_128(token.encode()).digest(64 + noise[0] * 16),
        "count": len(log),
    }


def save_without_end(path: str, name: str, generation: int) -> None:
    """Save in turn on a thread of one's own and on the one that all writers share."""
    store = backstay.open(path)
    for number in range(1_000_000):
        for thread in (store.thread(f"own-{name}"), store.thread(SHARED)):
            token = f"{name}.{generation}.{number}.{thread.id}"
            before = thread.latest()
            _tell("INVOKE", token)
            try:
                saved = thread.save(state_after(before.state if before else None, token), id=_own_id(thread.id, token))
            except Conflict:
                _tell("CONFLICT", token)
            else:
                _tell("ACK", thread.id, saved.id, saved.digest.hex(), token)


def acknowledge_before_saving(path: str, name: str, generation: int) -> None:
    """Do what no store may: say that a checkpoint is kept, then keep it."""
    thread = backstay.open(path).thread(f"own-{name}")
    token = f"{name}.{generation}.early"
    before = thread.latest()
    state = state_after(before.state if before else None, token) | {"slow": os.urandom(SLOW_BYTES)}
    _tell("INVOKE", token)
    _tell("ACK", thread.id, token, UNKNOWN_DIGEST, token)
    thread.save(state, id=token)


def acknowledge_conflicts(path: str, name: str, generation: int) -> None:
    """Do what no writer may: take a conflict for success. The first line read back tells that the race is lost."""
    store = backstay.open(path)
    mine, other = store.thread(SHARED), store.thread(SHARED)
    mine.latest()
    other.save(state_after(None, f"{name}.{generation}.winner"))
    token = f"{name}.{generation}.loser"
    _tell("INVOKE", token)
    try:
        mine.save(state_after(None, token), id=token)
    except Conflict:
        _tell("ACK", SHARED, token, UNKNOWN_DIGEST, token)


def _own_id(thread: str, token: str) -> str | None:
    return None if thread == SHARED else token


def _tell(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


# What the victims left behind ---------------------------------------------------------------------------------------


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
        found.findings = [str(finding) for finding in store.check().findings]
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


# Killing them ---------------------------------------------------------------------------------------------------------


@dataclass
class Victim:
    """A writer that may be killed."""

    name: str
    pid: int
    pipe: int
    generation: int
    unread: bytes = b""
    lines: int = 0


class Arena:
    """Writers, their pipes, and what they said."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.nursery = nursery
        self.folder = folder
        self.path = str(folder / "agent.db")
        self.told = Told()
        self.killed = 0
        self.selector = selectors.DefaultSelector()

    def start(self, name: str, generation: int) -> Victim:
        """Start a writer; what it says comes through a fifo of its own."""
        fifo = str(self.folder / f"{name}.{generation}")
        os.mkfifo(fifo)
        pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        pid = self.nursery.start("support.crash.kill_victims:save_without_end", [self.path, name, generation], fifo)
        victim = Victim(name, pid, pipe, generation)
        self.selector.register(pipe, selectors.EVENT_READ, victim)
        return victim

    def read_until(self, victim: Victim, lines: int) -> None:
        """Read what all say until one has said so many lines."""
        while victim.lines < lines:
            for key, _ in self.selector.select():
                assert self._take(key.data), f"{key.data.name} ended by itself: see its error above"

    def kill(self, victim: Victim) -> None:
        """Kill a writer and read what it had said before it died."""
        os.kill(victim.pid, signal.SIGKILL)
        assert self.nursery.wait(victim.pid) == -signal.SIGKILL
        self.killed += 1
        while self._take(victim):
            pass
        self.selector.unregister(victim.pipe)
        os.close(victim.pipe)

    def _take(self, victim: Victim) -> bool:
        try:
            found = os.read(victim.pipe, 1 << 16)
        except BlockingIOError:
            return False
        *lines, victim.unread = (victim.unread + found).split(b"\n")
        victim.lines += len(lines)
        for line in lines:
            self.told.take(line.decode())
        return bool(found)
