"""What the killed processes of ``test_graph_kills`` do: run a random graph, answer what it asks, and die where told.

A *life* is one process. It begins the run, or takes it up where the last life left it, and goes on until the run is
over or the life ends: at a write of the store, right before or right after it, or inside an effect. Each life says in
the world's file what it finds and does, so that the test can judge all lives together without asking the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from backstay import Graph
from backstay.engine import Result, Status, position
from backstay.engine.triggers import every, every_node
from backstay.errors import NodeFailed
from backstay.model.checkpoint import Checkpoint
from backstay.model.decision import (
    Answer,
    Approve,
    Decision,
    DecisionKind,
    Defer,
    InterruptKind,
    Modify,
    Reject,
    Reroute,
)
from backstay.model.frame import End, Frame
from backstay.operations.interrupts import InterruptRecord
from backstay.store.records import Record
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import AsyncStore, Store, make_services
from backstay.thread.thread import Thread
from support.crash.graph_mutants import MUTANTS
from support.simulation.graphs import Flaky, Scenario, World, build, make, number_of, result_of

THREAD = "t"
ROUNDS_MAX = 120
"""How often a life may take a run up; one that never ends is a failure, not a wait."""

WRITES = frozenset(
    {
        *("acquire", "renew", "release", "claim", "put_record"),
        *("reserve", "commit", "commit_all", "write", "tag", "delete"),
        *("delete_thread", "compact", "rebuild", "restore", "quarantine"),
    }
)
READS = frozenset(
    {
        *("head", "find", "branches", "forked", "fetch", "leases", "record", "records"),
        *("sizes", "totals", "check", "backup", "close", "unread"),
    }
)
"""All verbs of the store contract are one or the other; a test says so."""

Point = tuple[str, int, bool]  # "verb" or "effect", which one of this life, and whether it is done first


class Deadly:
    """A store that ends its process at a write."""

    def __init__(self, backend: SqliteStore, world: World, point: Point | None) -> None:
        self._backend = backend
        self._world = world
        self._point = point
        self._lock = threading.Lock()
        self.writes = 0
        self.acts = 0
        world.at_effect = self.at_effect

    def __getattr__(self, verb: str) -> Any:
        done = getattr(self._backend, verb)
        if verb not in WRITES or verb == "renew":  # renewals come from another thread, at any time
            return done

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.writes += 1
                number = self.writes
            if verb == "acquire":
                self._world.tell("lease", arguments[1].token)
            name = _name(arguments[0]) if verb == "put_record" else verb
            self._die_at(name, "verb", number, False)
            answer = done(*arguments, **options)
            self._world.tell("stored", name, *self._details(verb, arguments))
            self._die_at(name, "verb", number, True)
            return answer

        return call

    def at_effect(self, is_done: bool) -> None:
        """Be told that an effect begins, or that it is done and says so to nobody yet."""
        if not is_done:
            with self._lock:
                self.acts += 1
        self._die_at("effect", "effect", self.acts, is_done)

    def _die_at(self, where: str, *point: Any) -> None:
        if point == self._point:
            self._world.tell("dies", "after" if point[2] else "before", where)
            os.kill(os.getpid(), signal.SIGKILL)

    def _details(self, verb: str, arguments: tuple[Any, ...]) -> Iterable[object]:
        if verb == "write":
            return [word for row in arguments[2] for word in (row.channel, row.task_id, row.index)]
        return ()


def _name(record: Record) -> str:
    """Return what a write to a record does: effects begin and end, interrupts are asked, decided and consumed."""
    if not record.open:
        return f"close_{record.kind}"
    return f"change_{record.kind}" if record.version else f"new_{record.kind}"


# One life ---------------------------------------------------------------------------------------------------------


def live(folder: str, seed: int, life: int, point: list[Any] | None, mutant: str = "") -> None:
    """Live one life, and tell how the run ended and how many points there were to die at."""
    MUTANTS[mutant]()
    if seed % 2:  # every fan-out counts as wide: a commit inside a branch is stored for this branch alone
        position.WIDE = 0  # type: ignore[misc] # why: no program changes it
    scenario, world = make(seed), World(f"{folder}/world")
    backend = SqliteStore(f"{folder}/agent.db")
    _free(backend, world)
    deadly = Deadly(backend, world, None if point is None else (point[0], point[1], point[2]))
    is_async = (seed + life) % 2 == 1
    world.tell("life", life, "async" if is_async else "sync")
    told = Life(scenario, world, backend, deadly)
    (_drive_async if is_async else _drive)(told, deadly)
    told.write_end(deadly)


def _free(backend: SqliteStore, world: World) -> None:
    """Give a dead life's lease back, as time would: nobody else can."""
    for row in backend.leases("", THREAD, False):
        backend.release(row.branch, row.epoch, world.lines("lease")[-1][1])


class Life:
    """What is to be done next, until the run is over; how it is done is up to the driver."""

    def __init__(self, scenario: Scenario, world: World, backend: SqliteStore, deadly: Deadly) -> None:
        self.scenario = scenario
        self.world = world
        self.graph = build(scenario.graph, world)
        self.backend = backend
        self.person = Person(scenario, world, Store(deadly, make_services("", None)).thread(THREAD))
        self.how: dict[str, Any] = {"trigger": every_node() if scenario.every is None else every(scenario.every)}
        self.last: Result | None = None

    def course(self) -> Generator[tuple[str, dict[str, Any]], Result, None]:
        """Yield calls of the graph and be sent their results."""
        for _ in range(ROUNDS_MAX):
            head = self.look()
            if head is None:
                given = {"input": self.scenario.input, "before": self.scenario.before, "after": self.scenario.after}
                result = yield "run", {**given, **self.how}
            elif isinstance(head.continuation, End):
                return
            else:
                self.world.is_covered = Covered(head)
                result = yield "resume", {"answers": self.person.answers(head), **self.how}
            self.last = result
            self.world.tell("returned", result.status.value)
            if result.status is Status.FAILED:
                _check_failure(result.error)
                return  # what it has cancelled may still be under way: the next life goes on
        raise AssertionError(f"not done after {ROUNDS_MAX} rounds")

    def look(self) -> Checkpoint | None:
        """Return what is stored, by eyes of its own."""
        return Store(self.backend, make_services("", None)).thread(THREAD).latest()

    def write_end(self, deadly: Deadly) -> None:
        """Say how it ended, by what is stored; what the engine returned must be the same."""
        head = self.look()
        assert head is not None
        is_over = isinstance(head.continuation, End)
        if is_over and self.last is not None:
            assert (dict(self.last.values), list(self.last.path)) == (dict(head.state), list(head.path))
        store = Store(self.backend, make_services("", None))
        if is_over and self.scenario.seed % 4 == 0:
            report = store.check()
            assert report, str(report)
        paths = [list(checkpoint.path) for checkpoint in _checkpoints(store)] if is_over else []
        told = {
            "over": head.trigger if is_over else None,
            "digest": f"{number_of(head.state, list(head.path)):08x}",
            "state": head.state,
            "path": list(head.path),
            "straight": all(list(head.path)[: len(path)] == path for path in paths),
            "ledger": sorted({effect.status.value for effect in store.thread(THREAD).effects()}),
            "writes": deadly.writes,
            "effects": deadly.acts,
        }
        os.write(1, (json.dumps(told) + "\n").encode())


def _checkpoints(store: Store) -> list[Checkpoint]:
    found = [store.get(meta.id) for meta in store.thread(THREAD).history()]
    return [checkpoint for checkpoint in found if checkpoint is not None]


def _check_failure(error: BaseException | None) -> None:
    """Nothing may fail but what is to fail."""
    errors = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for each in errors:
        if not isinstance(each, NodeFailed) or not isinstance(each.error, Flaky):
            raise AssertionError("a run failed that must not") from error


def _drive(life: Life, deadly: Deadly) -> None:
    store = Store(deadly, make_services("", None))
    _steps(life.course(), lambda name, given: _call(life.graph, f"{name}_sync", store.thread(THREAD), given))


def _drive_async(life: Life, deadly: Deadly) -> None:
    async def go() -> None:
        store = AsyncStore(deadly, make_services("", None))
        course = life.course()
        try:
            name, given = next(course)
            while True:
                name, given = course.send(await _call(life.graph, name, store.thread(THREAD), given))
        except StopIteration:
            pass

    asyncio.run(go())


def _call(graph: Graph, name: str, thread: Any, given: dict[str, Any]) -> Any:
    return getattr(graph, name)(thread, **given)


def _steps(course: Generator[tuple[str, dict[str, Any]], Result, None], do: Callable[..., Result]) -> None:
    try:
        name, given = next(course)
        while True:
            name, given = course.send(do(name, given))
    except StopIteration:
        pass


# What is stored ---------------------------------------------------------------------------------------------------


class Covered:
    """Tells by a stored position whether a place's work is in it, so that it must never be done again."""

    def __init__(self, head: Checkpoint) -> None:
        self._frames = tuple(head.frames)
        self._written = {write.task_id for write in head.writes if write.channel == "update"}

    def __call__(self, position: str) -> bool:
        frames, so_far = self._frames, ""
        for part in position.split(">"):
            so_far = f"{so_far}>{part}" if so_far else part
            if not frames or so_far in self._written:
                return so_far in self._written
            node, visit, key = parse(part)[1:]
            if visit <= frames[0].visits.get(node, 0):
                return True
            frames, is_done = _inside(frames, node, visit, key)
            if is_done:
                return True
        return False


def _inside(frames: tuple[Frame, ...], node: str, visit: int, key: str | None) -> tuple[tuple[Frame, ...], bool]:
    for task in frames[0].tasks:
        if (task.node, task.visit, task.key) == (node, visit, key):
            return task.frames or frames[1:], task.done
    return (), False


def parse(part: str) -> tuple[str, str, int, str | None]:
    """Return the graph, node, visit and key of one part of a position."""
    graph, _, rest = part.partition("/")
    node, _, rest = rest.partition("#")
    visit, _, key = rest.partition("[")
    return graph, node, int(visit), key.rstrip("]") or None


# The person who is asked ------------------------------------------------------------------------------------------


class Person:
    """Answers what a run asks: the same question always in the same way."""

    def __init__(self, scenario: Scenario, world: World, thread: Thread) -> None:
        self._scenario = scenario
        self._world = world
        self._thread = thread
        self._goes_to_the_thread = scenario.seed % 4 == 1

    def answers(self, head: Checkpoint) -> dict[str, Decision] | None:
        """Return answers to all that a run waits for."""
        waits = head.frames.frames[0].waits
        known = list(self._thread.interrupts(pending=False))
        asked = [record for record in known if record.id in waits and record.decision is None]
        answers = {}
        for record in asked:
            answers[record.id] = decision = self._answer(record, known)
            self._world.tell("answer", record.interrupt.kind.value, decision.kind.value, *_subject(record))
            if self._goes_to_the_thread:
                self._thread.decide(record, decision, by="ann")
        return answers if answers and not self._goes_to_the_thread else None

    def _answer(self, record: InterruptRecord, known: list[InterruptRecord]) -> Decision:
        interrupt = record.interrupt
        payload = interrupt.payload
        if "effect" in payload:
            return self._look(payload["effect"])
        number = number_of(self._scenario.seed, interrupt.kind.value, payload)
        if number % 5 == 0 and not _was_deferred(interrupt.payload, interrupt.kind, known):
            return Defer()
        if interrupt.kind is InterruptKind.USER_REQUEST:
            return Answer(number % 1000)
        if interrupt.kind is InterruptKind.TOOL_APPROVAL:
            return self._allow(payload, number // 5)
        return self._pass(payload, interrupt.kind, number // 5)

    def _look(self, key: str) -> Decision:
        position, _, name = key.partition(":")[2].rpartition(":")
        self._world.tell("unknown", position, name)
        return Modify(result_of(position, name)) if self._world.has_done(position, name) else Approve()

    def _allow(self, payload: Any, number: int) -> Decision:
        graph, node, _, key = parse(payload["args"]["position"].rpartition(">")[2])
        if number_of(graph, node) % 4 == 0:
            return Approve(scope=payload["tool"])  # always for this tool, so that it is the same whoever asks first
        ways = self._scenario.find(graph).forward(node) if key is None else []
        if number % 8 == 0 and ways:
            return Reroute(ways[number % len(ways)])
        return (Approve(), Approve(), Modify({"other": number % 100}), Reject("no"))[number % 4]

    def _pass(self, payload: Any, kind: InterruptKind, number: int) -> Decision:
        spec = self._scenario.find(payload["graph"])
        node = spec.node(payload["node"])
        ways = [] if node.beside else spec.forward(node.name)
        may_refuse = node.kind == "barrier" and not node.beside and (node.on_reject is not None or not spec.beside)
        if may_refuse and kind is InterruptKind.BEFORE_NODE and number % 4 == 0:
            return Reject("not now")
        if number % 7 == 0 and ways:
            return Reroute(ways[number % len(ways)])
        if number % 3 == 0:
            return Modify({"total": number % 50, "seen": {f"{kind.value}-{number}": number % 50}})
        return Approve()


def _was_deferred(payload: Any, kind: InterruptKind, known: list[InterruptRecord]) -> bool:
    same = [each for each in known if (each.interrupt.kind, each.interrupt.payload) == (kind, payload)]
    return any(each.decision is not None and each.decision.kind is DecisionKind.DEFER for each in same)


def _subject(record: InterruptRecord) -> list[object]:
    payload = record.interrupt.payload
    return [payload[name] for name in ("graph", "node") if name in payload]
