"""Random graphs, made of a seed: first a description in plain values, then the graph that it describes.

A graph is a row of *segments* (one node, a loop, a condition, a choice, a fan-out, a map, a subgraph, a barrier), so
it always ends: the only way back is from a loop's tail, which counts its visits, and answers lead forward only. What a
node returns depends on nothing but the state and its position, and on all of the state: whatever goes wrong on the way
shows at the end. What nodes do to the world are lines of one file that only grows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from backstay import Graph
from backstay.engine import AsyncContext, Context
from backstay.engine.reducers import add, append, merge
from backstay.errors import Rejected
from backstay.model.runs import EffectRecord, Outcome
from backstay.retry import RetryPolicy

NODES_MAX = 12
DEPTH_MAX = 3
LIMIT = 300
COMMON, MAPPING, FUNCTION = "common", "mapping", "function"
SHARED = ("log", "total", "seen", "best")
"""Keys that several branches may write, so that they go in and out of every subgraph."""


def larger(old: int | None, new: int) -> int:
    return new if old is None else max(old, new)


class State(TypedDict, total=False):
    log: Annotated[list[str], append]
    total: Annotated[int, add]
    seen: Annotated[dict[str, int], merge]
    best: Annotated[int, larger]
    counts: Annotated[dict[str, int], merge]  # of loops' tails
    last: str
    items: list[int]


def number_of(*parts: object) -> int:
    """Return a number that depends on all of these and on nothing else."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


# The world --------------------------------------------------------------------------------------------------------


class World:
    """A file of lines, such as the log of a crash rig: what ran, what was done. A line's first word is its kind."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()

    def tell(self, *words: object) -> None:
        """Add a line, in one write."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, (json.dumps([str(word) for word in words]) + "\n").encode())
        os.close(descriptor)

    def lines(self, *first: str) -> list[list[str]]:
        """Return the lines that begin so, as words."""
        if not Path(self.path).exists():
            return []
        found: list[list[str]] = [json.loads(line) for line in Path(self.path).read_text().splitlines()]
        return [words for words in found if words[: len(first)] == list(first)]

    def has_done(self, position: str, key: str) -> bool:
        """Tell whether an effect can be seen."""
        return bool(self.lines("effect", position, key))

    def outcome(self, position: str, key: str) -> Outcome:
        """Tell what became of an effect."""
        self.tell("looked", position, key)
        return Outcome.done(result_of(position, key)) if self.has_done(position, key) else Outcome.not_done()

    def do(self, position: str, key: str) -> int:
        """Have an effect."""
        self.tell("effect", position, key)
        return result_of(position, key)

    def do_once(self, position: str, key: str, idempotency_key: str) -> int:
        """Have an effect as a provider would that knows idempotency keys: the second call with a key does nothing."""
        with self._lock:
            if not self.lines("effect", position, key, idempotency_key):
                self.tell("effect", position, key, idempotency_key)
        return result_of(position, key)

    async def do_slowly(self, position: str, key: str) -> int:
        """Have an effect and let others run in the middle of it."""
        await asyncio.sleep(0)
        self.tell("effect", position, key)
        await asyncio.sleep(0)
        return result_of(position, key)


def result_of(position: str, key: str) -> int:
    """Return what an effect gives, wherever and whenever it is done."""
    return number_of("effect", position, key) % 1000


class Flaky(Exception):
    """What a node fails with that is to fail."""


# Descriptions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSpec:
    name: str
    kind: str = "task"  # or subgraph, barrier
    is_async: bool = False
    ops: tuple[str, ...] = ()  # what it does, in order: plain, reconciled, idempotent, slow (effects), fail, approve, …
    fails: int = 0  # so many times in all
    attempts: int = 1
    items: int | None = None  # how long a list it puts up for a map
    is_tail: bool = False
    writes_last: bool = False
    beside: bool = False  # it runs side by side with others
    mapped: bool = False
    inner: GraphSpec | None = None
    into: str = COMMON
    on_reject: str | None = None


@dataclass(frozen=True)
class EdgeSpec:
    kind: str  # plain, when, fallback, choose, parallel, map, end
    source: str
    targets: tuple[str, ...] = ()
    join: str = ""
    modulus: int = 2
    on_error: str = "fail_fast"


@dataclass(frozen=True)
class GraphSpec:
    name: str
    nodes: tuple[NodeSpec, ...]
    edges: tuple[EdgeSpec, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    beside: bool = False  # it runs, at some depth, side by side with others: who ends the run there ends it anywhere

    def node(self, name: str) -> NodeSpec:
        return next(node for node in self.nodes if node.name == name)

    def forward(self, name: str) -> list[str]:
        """Return the nodes that an answer may lead to from a node: later ones that do not run side by side."""
        names = [node.name for node in self.nodes]
        return [node.name for node in self.nodes[names.index(name) + 1 :] if not node.beside]

    def graphs(self) -> Iterator[GraphSpec]:
        yield self
        for node in self.nodes:
            if node.inner is not None:
                yield from node.inner.graphs()


@dataclass(frozen=True)
class Scenario:
    """A graph and how it is run."""

    seed: int
    graph: GraphSpec
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    every: int | None = None  # commits between checkpoints; None = after each

    @property
    def input(self) -> dict[str, Any]:
        return {"total": self.seed % 7, "log": [f"seed-{self.seed}"]}

    def find(self, graph: str) -> GraphSpec:
        return next(each for each in self.graph.graphs() if each.name == graph)

    def guards(self, graph: str, node: str) -> bool:
        """Tell whether somebody is asked before a node runs."""
        spec = self.find(graph)
        return node in spec.before or node in self.before or spec.node(node).kind == "barrier"

    def features(self) -> Counter[str]:
        """Return what occurs in it, and how often."""
        found: Counter[str] = Counter()
        for depth, spec in _with_depth(self.graph, 1):
            found[f"depth {depth}"] += 1
            for node in spec.nodes:
                found.update(_features_of(node))
            for edge in spec.edges:
                found[edge.kind] += 1
                found[edge.on_error] += edge.kind in ("parallel", "map")
            found["before"] += len(spec.before)
            found["after"] += len(spec.after)
            found["subgraph in a loop"] += _inner_in_loops(spec)
        found["run before"], found["run after"] = len(self.before), len(self.after)
        found["every n"] = self.every is not None
        return +found

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, before {self.before}, after {self.after}, every {self.every}"]
        for spec in self.graph.graphs():
            lines.append(f"graph {spec.name}, before {spec.before}, after {spec.after}")
            lines += [f"  {replace(node, inner=None)}" for node in spec.nodes]
            lines += [f"  {edge}" for edge in spec.edges]
        return "\n".join(lines)


FEATURES = (
    *("plain", "when", "fallback", "choose", "parallel", "map", "end", "fail_fast", "collect_all"),
    *("before", "after", "run before", "run after", "every n", "depth 1", "depth 2", "depth 3", "subgraph in a loop"),
    *("task", "subgraph", "barrier", "async", "sync", "on reject", "tail", "subgraph beside", "subgraph mapped"),
    *("effect plain", "effect reconciled", "effect idempotent", "effect slow", "fail", "approve", "ask", "checkpoint"),
    *("map of 0", "map of 1", "map of 2", "map of 3", "map of 4", "retried", "fails the run", "barrier beside"),
    *("into common", "into mapping", "into function", "approve beside", "effect beside"),
)


def _with_depth(spec: GraphSpec, depth: int) -> Iterator[tuple[int, GraphSpec]]:
    yield depth, spec
    for node in spec.nodes:
        if node.inner is not None:
            yield from _with_depth(node.inner, depth + 1)


def _features_of(node: NodeSpec) -> Iterator[str]:
    yield node.kind
    if node.beside:
        yield f"{node.kind} beside"
        yield from (f"{op} beside" if op == "approve" else "effect beside" for op in node.ops)
    if node.kind == "task":
        yield "async" if node.is_async else "sync"
    if node.inner is not None:
        yield f"into {node.into}"
        yield "subgraph mapped" if node.mapped else "subgraph"
    yield from (op if op in ("fail", "approve", "ask", "checkpoint") else f"effect {op}" for op in node.ops)
    if node.items is not None:
        yield f"map of {node.items}"
    if node.fails:
        yield "retried" if node.attempts > node.fails else "fails the run"
    yield from (name for name, there in (("tail", node.is_tail), ("on reject", node.on_reject)) if there)


def _inner_in_loops(spec: GraphSpec) -> int:
    names = [node.name for node in spec.nodes]
    loops = [edge for edge in spec.edges if edge.kind == "when" and spec.node(edge.source).is_tail]
    spans = [spec.nodes[names.index(loop.targets[0]) : names.index(loop.source)] for loop in loops]
    return sum(node.inner is not None for span in spans for node in span)


# Making -----------------------------------------------------------------------------------------------------------


def make(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    maker = _Maker(random.Random(f"graph {seed}"))
    graph = maker.graph(1, maker.rng.randint(3, NODES_MAX), True)
    names = [node.name for each in graph.graphs() for node in each.nodes]
    before, after = ((maker.rng.choice(names),) if maker.rng.random() < chance else () for chance in (0.25, 0.2))
    return Scenario(seed, graph, before, after, 3 if seed % 3 == 0 else None)


Exits = list[tuple[str, str]]  # names of nodes, and the kind of edge that leads on from each


@dataclass
class _Maker:
    rng: random.Random
    graphs: int = 0

    def graph(self, depth: int, budget: int, may_write_last: bool, beside: bool = False) -> GraphSpec:
        self.graphs += 1
        draft = _Draft(self, f"g{self.graphs}", depth, budget, may_write_last, beside)
        exits = draft.segment()
        while draft.left > 0:
            first = len(draft.nodes)
            after = draft.segment()
            draft.edges += [EdgeSpec(kind, name, (draft.nodes[first].name,)) for name, kind in exits]
            exits = after
        draft.edges += [EdgeSpec("end", name) for name, _ in exits]
        return draft.finished()


@dataclass
class _Draft:
    """A graph in the making."""

    maker: _Maker
    name: str
    depth: int
    left: int  # nodes that may still be added, those of graphs inside included
    may_write_last: bool
    beside: bool
    nodes: list[NodeSpec] = field(default_factory=list)
    edges: list[EdgeSpec] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        return self.maker.rng

    def segment(self) -> Exits:
        """Add a segment; its first node is where it begins."""
        if self.left < 4:
            return self.rng.choice((self.single, self.single, self.barrier, self.inner))()
        kinds = (self.loop, self.loop, self.condition, self.choice, self.parallel, self.parallel, self.map, self.map)
        return self.rng.choice((self.single, self.barrier, self.inner, self.map, *kinds))()

    def single(self) -> Exits:
        return [(self.task().name, "plain")]

    def barrier(self) -> Exits:
        return [(self.add(kind="barrier").name, "plain")]

    def inner(self) -> Exits:
        return [(self.subgraph().name, "plain")]

    def loop(self) -> Exits:
        first = self.any()
        if self.left > 1 and self.rng.random() < 0.5:
            self.edges.append(EdgeSpec("plain", first.name, (self.any().name,)))
        before = self.nodes[-1]
        tail = self.task(is_tail=True)
        self.edges.append(EdgeSpec("plain", before.name, (tail.name,)))
        self.edges.append(EdgeSpec("when", tail.name, (first.name,), modulus=self.rng.randint(2, 3)))
        return [(tail.name, "fallback")]

    def condition(self) -> Exits:
        fork, one, other = self.task(), self.any(), self.any()
        self.edges.append(EdgeSpec("when", fork.name, (one.name,)))
        self.edges.append(EdgeSpec("fallback", fork.name, (other.name,)))
        return [(one.name, "plain"), (other.name, "plain")]

    def choice(self) -> Exits:
        fork, ways = self.task(), [self.any() for _ in range(self.rng.randint(2, 3))]
        self.edges.append(EdgeSpec("choose", fork.name, tuple(way.name for way in ways), modulus=len(ways)))
        return [(way.name, "plain") for way in ways]

    def parallel(self) -> Exits:
        fork, may_write_last = self.task(), self.may_write_last
        branches = []
        for number in range(self.rng.randint(2, 3)):
            self.may_write_last = may_write_last and number == 0  # else they would contradict each other
            branches.append(self.any(beside=True).name)
        self.may_write_last = may_write_last
        join = self.task()
        self.edges.append(EdgeSpec("parallel", fork.name, tuple(branches), join.name, on_error=self.on_error()))
        return [(join.name, "plain")]

    def map(self) -> Exits:
        fork, may_write_last = self.task(items=self.rng.randint(0, 4)), self.may_write_last
        self.may_write_last = False
        node = self.any(beside=True, mapped=True)
        self.may_write_last = may_write_last
        join = self.task()
        self.edges.append(EdgeSpec("map", fork.name, (node.name,), join.name, on_error=self.on_error()))
        return [(join.name, "plain")]

    def on_error(self) -> str:
        return self.rng.choice(("fail_fast", "collect_all"))

    def any(self, **given: Any) -> NodeSpec:
        chance = self.rng.random()
        if chance < 0.1 and not given.get("mapped"):
            return self.add(kind="barrier", **given)
        return self.subgraph(**given) if chance < 0.4 else self.task(**given)

    def subgraph(self, **given: Any) -> NodeSpec:
        if self.depth == DEPTH_MAX or self.left < 3:
            return self.task(**given)
        size, beside = min(self.left - 1, self.rng.randint(1, 6)), self.beside or given.get("beside", False)
        inner = self.maker.graph(self.depth + 1, size, self.may_write_last, beside)
        self.left -= sum(len(each.nodes) for each in inner.graphs())
        into = self.rng.choice((COMMON, MAPPING, FUNCTION))
        return self.add(kind="subgraph", inner=inner, into=into, writes_last=self.may_write_last, **given)

    def task(self, **given: Any) -> NodeSpec:
        rng = self.rng
        ops = [rng.choice(("plain", "reconciled", "idempotent", "slow")) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
        fails, attempts = 0, 1
        for op, chance in (("approve", 0.12), ("ask", 0.1), ("checkpoint", 0.1), ("fail", 0.2)):
            if rng.random() < chance:
                ops.insert(rng.randint(0, len(ops)), op)
        if "fail" in ops:
            fails = rng.randint(1, 2)
            attempts = fails + 1 if rng.random() < 0.85 else 1
        last = self.may_write_last and rng.random() < 0.5
        return self.add(
            is_async=rng.random() < 0.5, ops=tuple(ops), fails=fails, attempts=attempts, writes_last=last, **given
        )

    def add(self, **given: Any) -> NodeSpec:
        self.left -= 1
        node = NodeSpec(f"n{len(self.nodes)}", **given)
        self.nodes.append(node)
        return node

    def finished(self) -> GraphSpec:
        """Return the graph, with pauses, and ways on for barriers that are turned down."""
        spec = GraphSpec(self.name, tuple(self.nodes), tuple(self.edges), beside=self.beside)
        nodes = tuple(self._with_way_on(spec, node) for node in self.nodes)
        names = [node.name for node in nodes]
        before = tuple(name for name in names if self.rng.random() < 0.06)
        after = tuple(name for name in names if self.rng.random() < 0.05)
        return replace(spec, nodes=nodes, before=before, after=after)

    def _with_way_on(self, spec: GraphSpec, node: NodeSpec) -> NodeSpec:
        ways = spec.forward(node.name)
        if node.kind != "barrier" or node.beside or not ways or self.rng.random() < 0.3:
            return node
        return replace(node, on_reject=self.rng.choice(ways))


# Building ---------------------------------------------------------------------------------------------------------


def build(spec: GraphSpec, world: World) -> Graph:
    """Return the graph that a description describes."""
    graph = Graph(spec.name, state=State, limit=LIMIT, before=spec.before, after=spec.after)
    for node in spec.nodes:
        _add(graph, node, world)
    for edge in spec.edges:
        _connect(graph, edge, spec)
    graph.start(spec.nodes[0].name)
    graph.build()
    return graph


def _add(graph: Graph, node: NodeSpec, world: World) -> None:
    if node.kind == "barrier":
        graph.barrier(node.name, f"Pass {node.name}?", payload=_shown(graph.name, node.name), on_reject=node.on_reject)
    elif node.inner is not None:
        into, out = _projections(node)
        graph.subgraph(node.name, build(node.inner, world), into=into, out=out)
    else:
        body = _async_body(node, world) if node.is_async else _body(node, world)
        graph.node(node.name, body, retry=RetryPolicy(node.attempts - 1, first_s=0, on=(Exception,)))


def _shown(graph: str, node: str) -> Callable[[State], dict[str, Any]]:
    return lambda state: {"graph": graph, "node": node, "total": state.get("total", 0)}


def _projections(node: NodeSpec) -> tuple[Any, Any]:
    keys = (*SHARED, "last") if node.writes_last else SHARED
    out = {key: key for key in keys}
    if node.into == FUNCTION:
        return _into_with_item if node.mapped else _into, out
    return (dict(out) if node.into == MAPPING else None), out


def _into(state: State) -> dict[str, Any]:
    return {key: state[key] for key in SHARED if key in state}  # type: ignore[literal-required]


def _into_with_item(state: State, item: int) -> dict[str, Any]:
    return {**_into(state), "items": [item]}


def _connect(graph: Graph, edge: EdgeSpec, spec: GraphSpec) -> None:
    match edge.kind:
        case "plain" | "fallback":
            graph.edge(edge.source, edge.targets[0], fallback=edge.kind == "fallback")
        case "when":
            graph.edge(edge.source, edge.targets[0], when=_condition(edge, spec), name="goes-there")
        case "choose":
            ways = {str(number): target for number, target in enumerate(edge.targets)}
            graph.choose(edge.source, _choice(edge.modulus), ways)
        case "parallel":
            graph.parallel(edge.source, edge.targets, join=edge.join, on_error=edge.on_error)
        case "map":
            graph.map(edge.source, edge.targets[0], "items", join=edge.join, on_error=edge.on_error)
        case _:
            graph.end(edge.source)


def _condition(edge: EdgeSpec, spec: GraphSpec) -> Callable[[State], bool]:
    if spec.node(edge.source).is_tail:
        return lambda state: state.get("counts", {}).get(edge.source, 0) % edge.modulus != 0
    return lambda state: state.get("total", 0) % edge.modulus == 0


def _choice(modulus: int) -> Callable[[State], str]:
    return lambda state: str(state.get("total", 0) % modulus)


@dataclass(frozen=True)
class _Act:
    """An effect that a node wants done."""

    key: str
    function: Callable[..., Any]
    options: Mapping[str, Any]


_Course = Generator[_Act, Any, dict[str, Any]]


def _course(node: NodeSpec, world: World, state: State, ctx: Context | AsyncContext) -> _Course:
    """Do what a node does; plain and asynchronous ones differ only in how its effects are done."""
    place = ctx.position
    world.tell("run", place, ctx.attempt)
    found: list[Any] = []
    for number, op in enumerate(node.ops):
        if op == "fail":
            if len(world.lines("fail", place)) < node.fails:
                world.tell("fail", place)
                raise Flaky(place)
        elif op == "checkpoint":
            ctx.checkpoint()
        elif op == "approve":
            try:
                found.append(ctx.approve(f"tool-{node.name}", {"position": place}))
            except Rejected:
                found.append("refused")
        elif op == "ask":
            found.append(ctx.ask({"position": place}, answer=int))
        else:
            key = f"e{number}"
            found.append((yield _act(op, key, place, world, isinstance(ctx, AsyncContext))))
    world.tell("ran", place)
    return _update(node, state, ctx, found)


def _act(op: str, key: str, place: str, world: World, is_async: bool) -> _Act:
    def look(record: EffectRecord) -> Outcome:
        return world.outcome(place, key)

    match op:
        case "reconciled":
            return _Act(key, world.do, {"reconcile": look})
        case "idempotent":
            return _Act(key, world.do_once, {"idempotent": True})
        case "slow" if is_async:
            return _Act(key, world.do_slowly, {})
        case _:
            return _Act(key, world.do, {})


def _update(node: NodeSpec, state: State, ctx: Context | AsyncContext, found: list[Any]) -> dict[str, Any]:
    place = ctx.position
    number = number_of(place, ctx.item, state, found)
    update: dict[str, Any] = {
        "log": [f"{place}={number}"],
        "total": number % 97,
        "seen": {place: number % 1009},
        "best": number % 10007,
    }
    if node.is_tail:
        update["counts"] = {node.name: ctx.visit}
    if node.writes_last:
        update["last"] = place
    if node.items is not None:
        update["items"] = [number_of(place, each) % 100 for each in range(node.items)]
    return update


def _body(node: NodeSpec, world: World) -> Callable[[State, Context], dict[str, Any]]:
    def body(state: State, ctx: Context) -> dict[str, Any]:
        course = _course(node, world, state, ctx)
        try:
            act = next(course)
            while True:
                act = course.send(
                    ctx.effect(act.key, act.function, ctx.position, act.key, **act.options),
                )
        except StopIteration as end:
            return dict(end.value)

    return body


def _async_body(node: NodeSpec, world: World) -> Callable[[State, AsyncContext], Awaitable[dict[str, Any]]]:
    async def body(state: State, ctx: AsyncContext) -> dict[str, Any]:
        course = _course(node, world, state, ctx)
        try:
            act = next(course)
            while True:
                act = course.send(await ctx.effect(act.key, act.function, ctx.position, act.key, **act.options))
        except StopIteration as end:
            return dict(end.value)

    return body
