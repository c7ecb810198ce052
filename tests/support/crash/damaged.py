"""A small store with everything in it, damaged copies of it, and what they answer.

The files are damaged as bytes and written to new places; a database that is open is never touched by anything but
SQLite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import backstay
from backstay.errors import BackstayError
from backstay.model.checkpoint import CheckpointMeta, Write

THREADS = ("alpha", "beta")
CUT = -1

Answer = Any
Damage = tuple[int, int]
"""A byte's place and the bits to flip in it; or ``CUT`` and the length to cut the file to."""


def text(seed: str, length: int) -> str:
    return hashlib.shake_128(seed.encode()).hexdigest(length // 2)


def fill(path: str) -> None:
    """Make a small store that has everything in it."""
    with backstay.open(path) as store:
        thread = store.thread("alpha")
        log = [text(f"log {number}", 300) for number in range(3)]
        for number in range(9):
            log = [*log, text(f"entry {number}", 200)]
            thread.save({"log": log, "n": number, "doc": text("doc", 2000)}, id=f"a{number}", label=f"step {number}")
        thread.write("a8", [Write("task", 0, "channel", {"answer": 42})])
        thread.tag("a3", "good", "kept")
        thread.interrupt("a6", payload={"q": 1}, id="ask")
        thread.effect("mail", lambda: {"sent": 1})
        store.compact()
        log[2] = text("edited", 40)  # in the middle: the value is now made of several pieces
        thread.save({"log": [*log, text("late", 600)], "n": 9, "doc": text("doc", 2000)}, id="a9")
        thread.fork("a4", branch="what-if", set={"n": -4}, id="f0")
        other = store.thread("beta")
        for number in range(3):
            other.save({"log": [text("beta", 400)] * (number + 1)}, id=f"b{number}")


def plain(meta: CheckpointMeta | None) -> Answer:
    """Return everything about a checkpoint, so that any difference shows."""
    if meta is None:
        return None
    fields = {name: getattr(meta, name) for name in ("id", "seq", "parent_id", "step", "digest", "tags", "created_at")}
    fields["label"] = meta.label
    if isinstance(meta, backstay.Checkpoint):
        fields["state"], fields["writes"] = meta.state, meta.writes
    return fields


def ask(store: backstay.Store) -> dict[str, Answer]:
    """Ask a store everything; an answer is a value or one of our errors."""
    ids = [*(f"a{number}" for number in range(10)), *(f"b{number}" for number in range(3)), "f0"]
    questions: dict[str, Callable[[], Answer]] = {name: functools.partial(_get, store, name) for name in ids}
    questions["threads"] = lambda: [plain(meta) for meta in store.threads()]
    questions["branch"] = lambda: plain(store.thread("alpha", branch="what-if").latest())
    questions["tagged"] = lambda: [plain(meta) for meta in store.thread("alpha").history(tag="good")]
    questions["branches"] = lambda: [
        (branch.key.name, branch.head, branch.head_seq) for branch in store.thread("alpha").branches()
    ]
    questions["step"] = lambda: plain(store.thread("alpha").at(step=5))
    questions["interrupts"] = lambda: [(each.id, each.thread_id, each.decision) for each in store.interrupts()]
    questions["effect"] = lambda: store.thread("alpha").effect("mail", _must_not_run)
    for thread in THREADS:
        questions[f"latest {thread}"] = functools.partial(_latest, store, thread)
        questions[f"history {thread}"] = functools.partial(_history, store, thread)
    answers: dict[str, Answer] = {}
    for name, question in questions.items():
        try:
            answers[name] = question()
        except BackstayError as error:
            answers[name] = error
    return answers


def _must_not_run() -> None:
    raise AssertionError("an effect that was done is done again")


def _get(store: backstay.Store, name: str) -> Answer:
    return plain(store.get(name))


def _latest(store: backstay.Store, thread: str) -> Answer:
    return plain(store.thread(thread).latest())


def _history(store: backstay.Store, thread: str) -> Answer:
    return [plain(meta) for meta in store.thread(thread).history(branch="*")]


@dataclass
class Verdict:
    """What became of damaged files."""

    tried: int = 0
    refused: int = 0  # at opening
    reported: int = 0  # by verify()
    silent: int = 0  # nothing reported, every answer right
    failed_answers: int = 0  # our errors instead of answers
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.tried + other.tried,
            self.refused + other.refused,
            self.reported + other.reported,
            self.silent + other.silent,
            self.failed_answers + other.failed_answers,
            self.wrong + other.wrong,
        )


def damaged(data: bytes, damage: Damage) -> bytes:
    """Return a damaged copy."""
    place, value = damage
    if place == CUT:
        return data[:value]
    return data[:place] + bytes([data[place] ^ value]) + data[place + 1 :]


def judge(data: bytes, expected: dict[str, Answer], path: str, damage: Damage) -> Verdict:
    """Open a damaged copy, verify it and ask it everything. Any exception but ours leaves this function."""
    for name in (path, path + "-wal", path + "-shm"):
        Path(name).unlink(missing_ok=True)
    Path(path).write_bytes(damaged(data, damage))
    verdict = Verdict(tried=1)
    try:
        store = backstay.open(path)
    except BackstayError:
        verdict.refused = 1
        return verdict
    # A second connection keeps the log in place while errors make the store close and open its own: much faster.
    with store, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as idle:
        idle.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        try:
            verdict.reported = int(not store.check())
        except BackstayError:
            verdict.reported = 1
        for name, answer in ask(store).items():
            if isinstance(answer, BackstayError):
                verdict.failed_answers += 1
            elif answer != expected[name]:
                verdict.wrong.append(f"{damage}: {name}")
    verdict.silent = int(not verdict.reported and not verdict.failed_answers)
    return verdict


def judge_all(original: str, folder: str, damages: list[Damage]) -> None:
    """Judge many, in a process of its own; the sum goes to standard output."""
    with backstay.open(original) as store:
        expected = ask(store)
    data = Path(original).read_bytes()  # closed: nobody in this process has it open any more
    path = str(Path(folder) / "damaged.db")
    total = sum((judge(data, expected, path, damage) for damage in damages), Verdict())
    os.write(1, json.dumps(dataclasses.asdict(total)).encode())
