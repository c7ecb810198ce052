"""What the killed processes of ``test_effect_kills`` do: effects, each a line of a file that stands for the world."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from backstay.errors import EffectUnknown
from backstay.model.runs import EffectRecord, Outcome
from backstay.store.records import Fence, Record
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import Store, make_services
from backstay.thread.thread import Thread

POINTS = (
    "before the intent",
    "between intent and function",
    "inside the function, before it is done",
    "inside the function, after it is done",
    "between function and receipt",
    "after the receipt",
)
NOWHERE = "nowhere"
PLAIN, RECONCILED, IDEMPOTENT = "plain", "reconciled", "idempotent"


class World:
    """A file of lines; a line names the effect and carries its idempotency key."""

    def __init__(self, path: str, point: str = NOWHERE) -> None:
        self.path = path
        self.point = point

    def die_at(self, point: str) -> None:
        """End the process as a kill from outside would, if this is where it is to end."""
        if point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def add(self, name: str, idempotency_key: str) -> str:
        """Do the effect: one line, in one write."""
        self.die_at(POINTS[2])
        line = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(line, f"{name} {idempotency_key}\n".encode())
        os.close(line)
        self.die_at(POINTS[3])
        return f"did {name}"

    def lines(self) -> list[str]:
        """Return what was done, in order."""
        path = Path(self.path)
        return path.read_text().splitlines() if path.exists() else []

    def look(self, record: EffectRecord) -> Outcome:
        """Find out whether an effect was done."""
        done = any(line.endswith(record.idempotency_key) for line in self.lines())
        return Outcome.done(f"did {record.key}") if done else Outcome.not_done()


class Deadly(SqliteStore):
    """A store in whose verbs the process dies."""

    world: World

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        before, after = (POINTS[0], POINTS[1]) if record.open else (POINTS[4], POINTS[5])
        self.world.die_at(before)
        stored = super().put_record(record, fence, run)
        self.world.die_at(after)
        return stored


def opened(path: str, world: World) -> Thread:
    """Return the thread all effects belong to."""
    backend = Deadly(path)
    backend.world = world
    return Store(backend, make_services("", None)).thread("t")


def do_one(path: str, file: str, name: str, mode: str, point: str) -> None:
    """Do one effect and tell what came of it; or die."""
    world = World(file, point)
    thread = opened(path, world)
    hook = world.look if mode == RECONCILED else None
    try:
        result = thread.effect(name, world.add, name, reconcile=hook, idempotent=mode == IDEMPOTENT)
    except EffectUnknown:
        result = "unknown"
    os.write(1, f"{result}\n".encode())


def do_one_without_a_ledger(path: str, file: str, name: str, _: str, point: str) -> None:
    """Do what everybody did before: do the effect, then save that it was done."""
    world = World(file, point)
    thread = opened(path, world)
    latest = thread.latest()
    done = [] if latest is None else latest.state["done"]
    if name not in done:
        world.add(name, name)
        world.die_at(POINTS[4])
        thread.save({"done": [*done, name]})
        world.die_at(POINTS[5])
    os.write(1, f"did {name}\n".encode())


def do_many(path: str, file: str, count: int) -> None:
    """Do effects one after the other and tell each; wherever the last process ended, go on from there."""
    world = World(file)
    thread = opened(path, world)
    for number in range(count):
        name = f"effect-{number}"
        assert thread.effect(name, world.add, name, reconcile=world.look) == f"did {name}"
        os.write(1, b".")
