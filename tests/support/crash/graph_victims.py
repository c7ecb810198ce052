"""The processes of ``test_graph_kills``: a program that runs a random graph, and the person who answers what it asks.

The program is killed and started again by ``backstay.testing``'s rig. It adds what it finds and does to the rig's log,
so that the test can judge all lives together without asking the engine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from backstay import AsyncThread, Graph, Thread
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
from backstay.operations.cursor import Cursor
from backstay.operations.interrupts import InterruptRecord
from backstay.testing.judge import parse_position
from support.crash.graph_mutants import MUTANTS
from support.simulation.graphs import Flaky, Scenario, World, build, make, number_of

LOG = "../log"
"""The rig's log, from the working directory of a run."""

ROUNDS_MAX = 120
"""How often a process may resume a run; one that never ends is a failure, not a wait."""


def run_scenario(thread: Thread, given: dict[str, Any]) -> None:
    """Run the graph of a seed, or resume it, until it is over, waits for a person, or fails as it is to fail."""
    MUTANTS[given["mutant"]]()
    if given["seed"] % 2:  # every fan-out counts as wide: a commit inside a branch is stored for this branch alone
        position.WIDE = 0  # type: ignore[misc] # why: no program changes it
    scenario, world = make(given["seed"]), World(LOG)
    graph = build(scenario.graph, world)
    is_async = (scenario.seed + len(world.lines("life"))) % 2 == 1
    result: Result | None = None
    for _ in range(ROUNDS_MAX):
        head = thread.latest()
        if head is not None and head.is_over:
            write_end(thread, head, result, world)
            return
        if result is not None and any(each.decision is None for each in thread.interrupts()):
            return
        result = take_up(graph, thread, is_async, scenario, is_new=head is None)
        world.tell("returned", result.status.value)
        if result.status is Status.FAILED:
            check_failure(result.error)
            return  # what it has cancelled may still be under way: the next process goes on
    raise AssertionError(f"not done after {ROUNDS_MAX} rounds")


def take_up(graph: Graph, thread: Thread, is_async: bool, scenario: Scenario, is_new: bool) -> Result:
    how: dict[str, Any] = {"trigger": every_node() if scenario.every is None else every(scenario.every)}
    if is_new:
        how |= {"input": scenario.input, "before": scenario.before, "after": scenario.after}
    if not is_async:
        return graph.run_sync(thread, **how) if is_new else graph.resume_sync(thread, **how)
    twin = AsyncThread(thread._access, Cursor(thread._cursor.branch))
    return asyncio.run(graph.run(twin, **how) if is_new else graph.resume(twin, **how))


def write_end(thread: Thread, head: Checkpoint, last: Result | None, world: World) -> None:
    """Say how it ended, by what is stored; what the engine returned must be the same."""
    if last is not None:
        assert (dict(last.values), list(last.path)) == (dict(head.state), list(head.path))
    found = [thread.get(meta.id) for meta in thread.history()]
    paths = [list(checkpoint.path) for checkpoint in found if checkpoint is not None]
    straight = all(list(head.path)[: len(path)] == path for path in paths)
    world.tell("over", straight, *sorted({effect.status.value for effect in thread.effects()}))


def check_failure(error: BaseException | None) -> None:
    """Nothing may fail but what is to fail."""
    errors = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for each in errors:
        if not isinstance(each, NodeFailed) or not isinstance(each.error, Flaky):
            raise AssertionError("a run failed that must not") from error


# The person who is asked ------------------------------------------------------------------------------------------


class Person:
    """Answers what the runs of a rig ask: the same question always in the same way."""

    def __init__(self) -> None:
        self._scenario = make(0)
        self._answers: dict[str, tuple[InterruptRecord, Decision]] = {}

    def meet(self, scenario: Scenario) -> None:
        """Be asked by another run from now on."""
        self._scenario = scenario
        self._answers.clear()

    def __call__(self, record: InterruptRecord) -> Decision:
        """Return the decision; a process may have died before an earlier one was stored."""
        if record.id not in self._answers:
            self._answers[record.id] = record, self._answer(record)
        decision = self._answers[record.id][1]
        World(LOG).tell("answer", record.interrupt.kind.value, decision.kind.value, *_subject(record))
        return decision

    def _answer(self, record: InterruptRecord) -> Decision:
        interrupt = record.interrupt
        payload = interrupt.payload
        number = number_of(self._scenario.seed, interrupt.kind.value, payload)
        if number % 5 == 0 and not self._has_deferred(record):
            return Defer()
        if interrupt.kind is InterruptKind.USER_REQUEST:
            return Answer(number % 1000)
        if interrupt.kind is InterruptKind.TOOL_APPROVAL:
            return self._allow(payload, number // 5)
        return self._pass(payload, interrupt.kind, number // 5)

    def _has_deferred(self, record: InterruptRecord) -> bool:
        asked = record.interrupt
        return any(
            (each.interrupt.kind, each.interrupt.payload) == (asked.kind, asked.payload)
            for each, decision in self._answers.values()
            if decision.kind is DecisionKind.DEFER
        )

    def _allow(self, payload: Any, number: int) -> Decision:
        graph, node, _, key = parse_position(payload["args"]["position"].rpartition(">")[2])
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


def _subject(record: InterruptRecord) -> list[object]:
    payload = record.interrupt.payload
    return [payload[name] for name in ("graph", "node") if name in payload]
