"""Random programs of runs that stop, resume, replay, fork and rewind, with prunes in between.

A program is played twice, with the same seed: on a store that deletes obsolete records, and on one that keeps all
records and deletes only the same checkpoints. Both must do the same to the world, in the same order: a call or effect
that is made only on the first was made again because its record was deleted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import backstay
from backstay import Graph, Keep
from backstay.engine.reducers import append
from backstay.engine.sinks import Retained
from backstay.errors import BackstayError
from backstay.model.decision import Approve

OPS = 14


class Stop(Exception):
    """Ends a node or a turn with an error."""


class Killed(BaseException):
    """Ends a node or a turn as if the process had died there, except that the lease is released."""


class World:
    """What programs did to it, and the dice that decide what happens."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.log: list[str] = []
        self.seen: Counter[str] = Counter()

    def do(self, what: str, request: str, fails: bool = False) -> str:
        """Do something that can be seen; some of it leaves its caller in doubt."""
        self.log.append(f"{what} {request}")
        if fails and self.chance.random() < 0.05:
            raise ConnectionResetError("the answer was lost")
        return f"result of {what} {request}"

    def may_stop(self, kills: bool = True) -> None:
        """End the caller here, now and then."""
        if self.chance.random() < 0.04:
            raise Killed if kills and self.chance.random() < 0.5 else Stop


class State(TypedDict, total=False):
    n: int
    items: list[int]
    log: Annotated[list[str], append]


def graph_of(world: World) -> Graph:
    """Return a graph with a loop, a fan-out, a map and a subgraph, whose nodes make calls and have effects."""

    def node(name: str, kills: bool = True, more: Callable[[State], dict[str, Any]] = lambda state: {}) -> Any:
        def run(state: State, ctx: Any) -> dict[str, Any]:
            request = f"{name} {state.get('n', 0)} {ctx.item} {len(state['log'])}"
            world.may_stop(kills)
            first = ctx.call("think", world.do, "call", request)
            world.may_stop(kills)
            second = ctx.effect("act", world.do, "effect", request, fails=kills)
            ctx.call("think", world.do, "call", f"{request} again")
            world.may_stop(kills)
            return {"log": [first[-20:], second[-20:]], **more(state)}

        return run

    inner = Graph("inner", state=State)
    inner.node("one", node("one"))
    inner.node("two", node("two"))
    inner.edge("one", "two")
    inner.start("one")
    inner.end("two")
    graph = Graph("outer", state=State)
    graph.node("plan", node("plan", more=lambda state: {"n": state["n"] + 1, "items": list(range(state["n"] % 3 + 1))}))
    graph.node("left", node("left", kills=False))
    graph.node("right", node("right", kills=False))
    graph.node("join", node("join"))
    graph.node("each", node("each", kills=False))
    graph.subgraph("sub", inner)
    graph.node("last", node("last"))
    graph.start("plan")
    # One at a time, so that the dice are thrown in the same order in both plays.
    graph.parallel(
        "plan", ["left", "right"], join="join", at_once=1, when=lambda state: state["n"] % 3 == 0, name="third"
    )
    graph.map("plan", "each", "items", join="join", at_once=1, when=lambda state: state["n"] % 3 == 1, name="other")
    graph.edge("plan", "sub", fallback=True)
    graph.edge("sub", "join")
    graph.edge("join", "plan", when=lambda state: state["n"] % 5 != 0, name="more")
    graph.edge("join", "last", fallback=True)
    graph.end("last")
    return graph


def random_keep(chance: random.Random) -> Keep:
    return chance.choice(
        [Keep(last=1), Keep(last=1), Keep(last=2), Keep(last=5), Keep(every=4), Keep(milestones=3), Keep(days=0)]
    )


class RetentionProgram:
    """One program on one thread. ``kind`` is "graph" or "loop"."""

    def __init__(self, store: backstay.Store, kind: str, seed: int) -> None:
        self.store, self.kind = store, kind
        self.world = World(seed)
        self.chance = self.world.chance
        self.graph = graph_of(self.world)
        self.branches = ["main"]
        self.pruned = 0
        self.did: Counter[str] = Counter()

    def play(self) -> list[str]:
        """Play the program; return what it did to the world, and how its steps ended."""
        self._step("run")
        for _ in range(OPS):
            names = [
                "run",
                "run",
                "run",
                "prune",
                "prune",
                "prune",
                "fork",
                "rewind",
                "drop_head",
                "drop",
                "save",
                "tag",
            ]
            if self.kind == "graph":
                names += ["replay", "replay", "run_pruning"]
            self._step(self.chance.choice(names))
        for name in list(self.branches):  # at the end every branch is run on, and every checkpoint is replayed
            self._step("run", name)
        if self.kind == "graph":
            for meta in sorted(self._checkpoints(), key=lambda meta: meta.seq)[:6]:
                self._step("replay", meta)
        return self.world.log

    def _step(self, name: str, *args: Any) -> None:
        try:
            ended = getattr(self, f"_{name}")(*args)
        except (BackstayError, Stop, Killed) as error:
            ended = type(error).__name__
        self.did[f"{name} {ended}"] += 1
        self.world.log.append(f"-- {name}: {ended}")

    def _thread(self, branch: str | None = None) -> backstay.Thread:
        return self.store.thread("t", branch=self.chance.choice(self.branches) if branch is None else branch)

    def _checkpoints(self) -> list[backstay.CheckpointMeta]:
        return [meta for name in self.branches for meta in self.store.thread("t", branch=name).history()]

    def _any(self) -> backstay.CheckpointMeta:
        return self.chance.choice(self._checkpoints())

    def _new_branch(self) -> str:
        self.branches.append(f"b{len(self.branches)}")
        return self.branches[-1]

    # What may happen ----------------------------------------------------------------------------------------------

    def _run(self, branch: str | None = None) -> str:
        thread = self._thread(branch)
        return self._run_loop(thread) if self.kind == "loop" else self._run_graph(thread)

    def _run_graph(self, thread: backstay.Thread, **options: Any) -> str:
        head = next(thread.history(limit=1), None)
        if head is None or head.is_over or head.graph is None:
            n = 1 if head is None else self.chance.randrange(1, 5)
            return str(self.graph.run_sync(thread, {"n": n, "log": [f"run {self._number()}"]}, **options).status)
        waiting = [record for record in thread.interrupts() if record.branch == thread.branch]
        answers = {record.id: Approve() for record in waiting}
        return str(self.graph.resume_sync(thread, answers or None, **options).status)

    def _run_pruning(self) -> str:
        keep = random_keep(self.chance)
        return self._run_graph(self._thread(), sink=lambda own: Retained(keep, own))

    def _run_loop(self, thread: backstay.Thread) -> str:
        world = self.world
        head = next(thread.history(limit=1), None)
        is_over = head is None or head.is_over or self.chance.random() < 0.1
        given = {"log": [f"input {self._number()}"]} if is_over else None
        with thread.loop({"log": []}, input=given) as loop:
            for turn in loop:
                request = f"{turn.iteration} {len(turn.state['log'])} {turn.state['log'][-1:]}"
                world.may_stop()
                first = turn.call("think", world.do, "call", request)
                world.may_stop()
                second = turn.effect("act", world.do, "effect", request)
                turn.call("think", world.do, "call", f"{request} again")
                world.may_stop()
                turn.append(log=[first[-9:], second[-9:]])
                if self.chance.random() < 0.2:
                    loop.finish()
        return str(loop.status)

    def _number(self) -> int:
        self.world.seen["inputs"] += 1
        return self.world.seen["inputs"]

    def _prune(self) -> str:
        keep = random_keep(self.chance)
        pruned = (self.store if self.chance.random() < 0.5 else self._thread("main")).prune(keep)
        self.pruned += pruned.effects
        assert not pruned.damaged
        return f"{pruned.deleted} checkpoints"

    def _replay(self, meta: backstay.CheckpointMeta | None = None) -> str:
        meta = self._any() if meta is None else meta
        if meta.is_over or meta.graph is None:
            return "over"
        return str(self.graph.replay_sync(self._thread("main"), meta, branch=self._new_branch()).status)

    def _fork(self) -> str:
        meta = self._any()
        self._thread("main").fork(meta, branch=self._new_branch())
        return "done"

    def _rewind(self) -> str:
        self._thread().rewind(self._any())
        return "done"

    def _drop_head(self) -> str:
        thread = self._thread()
        metas = list(thread.history(limit=2))
        return str(thread.delete_checkpoint(metas[0])) if len(metas) == 2 else "only one"

    def _drop(self) -> str:
        meta = self._any()
        return str(self._thread("main").delete_checkpoint(meta)) if len(self._checkpoints()) > 3 else "too few"

    def _save(self) -> str:
        thread = self._thread()
        head = next(thread.history(limit=1), None)
        if self.kind == "graph" and head is not None and not head.is_over:
            return "unfinished"
        thread.append({"log": ["other code"]})
        return "done"

    def _tag(self) -> str:
        self._thread("main").tag(self._any(), "kept")
        return "done"
