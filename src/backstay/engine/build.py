"""Build a declared graph: check it as a whole, and report every mistake at once."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backstay.engine.nodes import END, Choice, Edge, ForEach, Node, Parallel, required_count
from backstay.engine.state import Schema
from backstay.errors import InvalidGraph
from backstay.model.frame import FRAME_DEPTH_MAX

if TYPE_CHECKING:
    from backstay.engine.declaration import Declaration
    from backstay.engine.migration import Migration


@dataclass(frozen=True, eq=False)
class BuiltGraph:
    """A graph that was checked. It no longer changes."""

    name: str
    schema: Schema
    start: str
    nodes: Mapping[str, Node]
    edges: Mapping[str, tuple[Edge, ...]]  # by source, in the order in which they are tried
    limit: int
    before: frozenset[str]
    after: frozenset[str]
    strict: bool
    inner: Mapping[str, BuiltGraph]  # by subgraph node
    migrations: Mapping[int, Migration]  # by the fingerprint they start from; more may be added later


def all_graphs(built: BuiltGraph) -> Iterator[BuiltGraph]:
    """Yield a graph and all graphs inside it."""
    yield built
    for inner in built.inner.values():
        yield from all_graphs(inner)


def build(graph: Declaration, above: tuple[Declaration, ...] = ()) -> BuiltGraph:
    """Return the graph in the form in which it runs, or raise InvalidGraph with every mistake.

    ``above`` are the graphs that this one is nested in.
    """
    nodes, edges, starts = graph._nodes, graph._edges, graph._starts
    known = {node.name: node for node in nodes}
    ordered = {
        name: tuple(sorted((edge for edge in edges if edge.source == name), key=lambda edge: edge.rank))
        for name in known
    }
    problems = [*graph.schema.problems, *_name_problems(nodes, starts)]
    problems += [problem for edge in edges for problem in _edge_problems(edge, known, graph.schema)]
    parallel = _only_in_parallel(nodes, edges, starts)
    problems += [problem for name, ways in ordered.items() for problem in _route_problems(name, ways, name in parallel)]
    problems += [problem for node in nodes for problem in _node_problems(node, known, graph.schema)]
    unknown = sorted((graph.before | graph.after) - {"*"} - known.keys())
    problems += [f"pause at {name!r}: there is no such node" for name in unknown]
    if not problems:
        problems += _reach_problems(starts[0], known, ordered)
    inner = {}
    for node in nodes:
        if node.inner is None:
            continue
        nested = node.inner.graph
        if nested is graph or nested in above or len(above) >= FRAME_DEPTH_MAX:
            problems.append(f"subgraph node {node.name!r} leads back into graph {nested.name!r}: it would never end")
            continue
        try:
            inner[node.name] = build(nested, (*above, graph))
        except InvalidGraph as error:
            problems += [f"in subgraph node {node.name!r}: {problem}" for problem in error.problems]
    if problems:
        raise InvalidGraph(graph.name, problems)
    return BuiltGraph(
        graph.name,
        graph.schema,
        starts[0],
        known,
        ordered,
        graph.limit,
        graph.before,
        graph.after,
        graph.strict,
        inner,
        graph.migrations,
    )


def _name_problems(nodes: Sequence[Node], starts: Sequence[str]) -> Iterator[str]:
    names = Counter(node.name for node in nodes)
    if not starts:
        yield "no entry: name the first node with start(…)"
    elif len(set(starts)) > 1:
        yield f"several entries: {', '.join(dict.fromkeys(starts))}"
    for start in dict.fromkeys(starts):
        if start not in names:
            yield f"entry {start!r}: there is no such node"
    for name, count in names.items():
        if count > 1:
            yield f"node {name!r} is declared {count} times"
        if name == END:
            yield f"node {name!r}: this name is reserved for the end"


def _edge_problems(edge: Edge, known: Mapping[str, Node], schema: Schema) -> Iterator[str]:
    source = edge.source
    if source not in known:
        yield f"edge from {source!r}: there is no such node"
    for target in dict.fromkeys(edge.target.nodes()):
        if target != END and target not in known:
            yield f"node {source!r}: edge to {target!r}, but there is no such node"
    match edge.target:
        case Parallel(targets=branches, join=join):
            yield from _fan_out_problems(source, branches, join)
        case ForEach(node=node, over=over, join=join):
            yield from _fan_out_problems(source, (node,), join)
            if isinstance(over, str) and not schema.knows(over):
                yield f"node {source!r}: map over {over!r}, which is not a key of the state"
        case Choice(ways=ways) if not ways:
            yield f"node {source!r}: a choice without targets"
    functions = [edge.when.function] if edge.when else []
    functions += [edge.target.function] if isinstance(edge.target, Choice) else []
    if any(inspect.iscoroutinefunction(function) for function in functions):
        yield f"node {source!r}: a condition is asynchronous; it must be a plain function of the state"


def _fan_out_problems(source: str, branches: tuple[str, ...], join: str) -> Iterator[str]:
    if not branches:
        yield f"node {source!r}: a join without branches"
    for name, count in Counter(branches).items():
        if count > 1:
            yield f"node {source!r}: branch {name!r} is named {count} times"
        if name == END:
            yield f"node {source!r}: a branch cannot be the end"
        if name == join:
            yield f"node {source!r}: {name!r} is both a branch and the join"


def _only_in_parallel(nodes: Sequence[Node], edges: Sequence[Edge], starts: Sequence[str]) -> set[str]:
    """Return the nodes that only ever run in parallel. They need no edge of their own: the join comes after them."""
    parallel: set[str] = set()
    alone = {*starts, *(node.wait.on_reject for node in nodes if node.wait is not None)}
    for edge in edges:
        match edge.target:
            case Parallel(targets=targets, join=join):
                parallel.update(targets)
                alone.add(join)
            case ForEach(node=node, join=join):
                parallel.add(node)
                alone.add(join)
            case target:
                alone.update(target.nodes())
    return parallel - alone


def _route_problems(name: str, ways: tuple[Edge, ...], only_parallel: bool) -> Iterator[str]:
    if not ways and not only_parallel:
        yield f"node {name!r} leads nowhere: add an edge, or name it in end(…)"
    plain = [edge for edge in ways if edge.rank == 1]
    if len(plain) > 1:
        yield f"node {name!r} has {len(plain)} edges without a condition; use parallel(…) to take several"
    if sum(1 for edge in ways if edge.rank == 2) > 1:
        yield f"node {name!r} has several fallbacks"
    conditions = Counter(edge.when.name for edge in ways if edge.when)
    for condition, count in conditions.items():
        if count > 1:
            yield f"node {name!r} has {count} conditions called {condition!r}: give each its own name="
    if plain and any(edge.rank == 2 for edge in ways) and not isinstance(plain[0].target, Choice):
        yield f"node {name!r} has a fallback that is never taken: it also has an edge without a condition"


def _node_problems(node: Node, known: Mapping[str, Node], schema: Schema) -> Iterator[str]:
    name = node.name
    if node.body is not None and required_count(node.body.function) > 2:
        yield f"node {name!r} takes more than the state and the context"
    if node.wait is not None and node.wait.on_reject is not None and node.wait.on_reject not in known:
        yield f"barrier {name!r}: on_reject names {node.wait.on_reject!r}, but there is no such node"
    inner = node.inner
    if inner is None:
        return
    nested = inner.graph.schema
    for what, mapping, source, target in (("into", inner.into, schema, nested), ("out", inner.out, nested, schema)):
        keys = dict(mapping) if isinstance(mapping, Mapping) else {}
        for left, right in keys.items():
            if not source.knows(left):
                yield f"subgraph node {name!r}: {what} reads {left!r}, which is not a key of that state"
            if not target.knows(right):
                yield f"subgraph node {name!r}: {what} writes {right!r}, which is not a key of that state"
            if left != {value: key for key, value in keys.items()}[right]:
                yield f"subgraph node {name!r}: {what} writes {right!r} twice: map one key to it, or use a function"
    if inner.into is None and not nested.open and not schema.open and not nested.fields.keys() & schema.fields.keys():
        yield f"subgraph node {name!r} shares no key with the graph around it: map keys with into= and out="


def _reach_problems(start: str, known: Mapping[str, Node], ways: Mapping[str, tuple[Edge, ...]]) -> Iterator[str]:
    reached, waiting = {start}, [start]
    ends = False
    while waiting:
        name = waiting.pop()
        node = known[name]
        targets = [target for edge in ways[name] for target in edge.target.nodes()]
        if node.wait is not None and node.wait.on_reject is not None:
            targets.append(node.wait.on_reject)
        ends = ends or END in targets
        fresh = {target for target in targets if target != END} - reached
        reached |= fresh
        waiting += fresh
    for name in known:
        if name not in reached:
            yield f"node {name!r} cannot be reached from {start!r}"
    if not ends:
        yield "no exit: no reachable node leads to the end"
