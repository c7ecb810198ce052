"""The workers of ``test_deploys``, the graphs that they know, and the world outside the store that their nodes change.

There are three kinds of workers: ``a1`` knows graph A in its first version, ``a2`` only in its second, which has
another node and no migration, and ``b`` only graph B. A run's name starts with the kind that it was submitted for.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import backstay
from backstay.engine.context import Context
from backstay.model.runs import EffectRecord, Outcome

STEPS = 4
CALL_S = 0.04
"""How long a call takes: long enough that many are under way when a worker is killed."""

EFFECT_STEP = 2
CONCURRENCY = 2
KINDS = {"a1": ("A", "third"), "a2": ("A", "third_again"), "b": ("B", "third")}
"""The name of the graph, and of its third node."""


class World:
    """A file of lines, each added in one write, so that their order is the order of what happened.

    - ``call RUN STEP RESULT WORKER``: a call was made
    - ``stored RUN STEP RESULT WORKER``: its result was returned to the node, so it is stored
    - ``effect RUN KEY WORKER``: the effect was done
    """

    def __init__(self, path: str, worker: str = "") -> None:
        self.path = path
        self.worker = worker

    def add(self, *words: object) -> None:
        line = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(line, (" ".join(map(str, [*words, self.worker])) + "\n").encode())
        finally:
            os.close(line)

    def lines(self) -> list[list[str]]:
        path = Path(self.path)
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def work(self, run: str, step: int) -> str:
        """Do the call of a step: it takes some time, and its result is another one each time."""
        result = uuid.uuid4().hex
        self.add("call", run, step, result)
        time.sleep(CALL_S)
        return result

    def send(self, run: str, idempotency_key: str) -> str:
        self.add("effect", run, idempotency_key)
        return f"sent {run}"

    def look(self, record: EffectRecord) -> Outcome:
        """Find out whether an effect was done."""
        for line in self.lines():
            if line[0] == "effect" and line[2] == record.idempotency_key:
                return Outcome.done(f"sent {line[1]}")
        return Outcome.not_done()


def graph_of(kind: str, world: World) -> Any:
    """Return the graph that a worker of this kind knows."""
    name, third = KINDS[kind]
    names = ["first", "second", third, "fourth"]
    graph = backstay.Graph(name)

    def node(step: int) -> Any:
        def work(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
            run = state["run"]
            result = ctx.call("work", world.work, run, step)
            world.add("stored", run, step, result)
            if step == EFFECT_STEP:
                return {f"step{step}": result, "mail": ctx.effect("send", world.send, run, reconcile=world.look)}
            return {f"step{step}": result}

        return work

    for step, each in enumerate(names, 1):
        graph.node(each, node(step))
    for one, two in pairwise(names):
        graph.edge(one, two)
    graph.start(names[0])
    graph.end(names[-1])
    return graph


def work(kind: str, url: str, world: str) -> None:
    """Be a worker until SIGTERM or SIGKILL."""
    with backstay.open(url) as store:
        graph_of(kind, World(world, f"{kind}-{os.getpid()}")).work_sync(store, concurrency=CONCURRENCY)


def wrong_in(lines: list[list[str]], states: dict[str, dict[str, Any]]) -> list[str]:
    """Return what must not have happened: by the lines of the world, and the state that each run ended with."""
    wrong: list[str] = []
    stored: dict[tuple[str, str], str] = {}
    effects: dict[str, int] = defaultdict(int)
    for line in lines:
        kind, run, worker = line[0], line[1], line[-1]
        if worker.split("-")[0] != run.split("-")[0]:
            wrong.append(f"{worker} executed {run}, which it does not know")
        if kind == "effect":
            effects[run] += 1
        elif kind == "call" and (run, line[2]) in stored:
            wrong.append(f"{worker} repeated the call {line[2]} of {run}, whose result was stored")
        elif kind == "stored" and stored.setdefault((run, line[2]), line[3]) != line[3]:
            wrong.append(f"the call {line[2]} of {run} has two results")
    for run, state in states.items():
        if effects[run] != 1:
            wrong.append(f"the effect of {run} was done {effects[run]} times")
        expected = {f"step{step}": stored.get((run, str(step))) for step in range(1, STEPS + 1)}
        if state != {"run": run, "mail": f"sent {run}", **expected}:
            wrong.append(f"{run} ended with {state}")
    return wrong
