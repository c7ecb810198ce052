"""From a declaration to a graph that can be run, or to the list of everything that is wrong with it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backstay.engine.edge import END, Choice, Edge, ForEach, Together
from backstay.engine.node import Inner, Node, positional_count
from backstay.engine.schema import Schema
from backstay.errors import InvalidGraph
from backstay.model.frame import FRAME_DEPTH_MAX

if TYPE_CHECKING:
    from backstay.engine.declaration import Declaration
    from backstay.engine.migration import Migration


@dataclass(frozen=True, eq=False)
class Built:
    """A graph that was checked. Nothing of it changes any more."""

    name: str
    schema: Schema
    start: str
    nodes: Mapping[str, Node]
    edges: Mapping[str, tuple[Edge, ...]]  # by source, in the order in which they are tried
    limit: int
    before: frozenset[str]
    after: frozenset[str]
    strict: bool
    inner: Mapping[str, Built]  # by subgraph node
    migrations: Mapping[int, Migration]  # by the fingerprint they come from; more may be added later


def all_graphs(built: Built) -> Iterator[Built]:
    """Yield a graph and all those inside it."""
    yield built
    for inner in built.inner.values():
        yield from all_graphs(inner)


def build(graph: Declaration, nodes: Sequence[Node], edges: Sequence[Edge], starts: Sequence[str]) -> Built:
    """Return the graph in the form it is run in; raise InvalidGraph that names every mistake."""
    return _build(graph, nodes, edges, starts, ())


def _build(
    graph: Declaration,
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    starts: Sequence[str],
    above: tuple[Declaration, ...],
) -> Built:
    known = {node.name: node for node in nodes}
    ordered = {
        name: tuple(sorted((edge for edge in edges if edge.source == name), key=lambda edge: edge.rank))
        for name in known
    }
    problems = [*graph.schema.problems]
    problems += _entries(starts, known)
    problems += _repeated(nodes)
    for edge in edges:
        problems += _edge_problems(edge, known)
    beside = _only_beside(nodes, edges, starts)
    for name, ways in ordered.items():
        problems += _way_problems(name, ways, name in beside)
    for node in nodes:
        problems += _node_problems(node, known, graph.schema)
    for named in sorted((graph.before | graph.after) - {"*"} - known.keys()):
        problems.append(f"pause at {named!r}, which is no node")
    if not problems:
        problems += _unreachable(starts[0], known, ordered)
    inner = _inner(graph, nodes, above, problems)
    if problems:
        raise InvalidGraph(graph.name, problems)
    return Built(
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


def _inner(
    graph: Declaration, nodes: Iterable[Node], above: tuple[Declaration, ...], problems: list[str]
) -> dict[str, Built]:
    """Build the graphs inside; what is wrong with them is wrong with this one."""
    built = {}
    for node in nodes:
        if node.inner is None:
            continue
        nested = node.inner.graph
        if nested is graph or nested in above or len(above) >= FRAME_DEPTH_MAX:
            problems.append(f"subgraph node {node.name!r} leads back into graph {nested.name!r}: it would never end")
            continue
        try:
            built[node.name] = _build(nested, nested._nodes, nested._edges, nested._starts, (*above, graph))
        except InvalidGraph as error:
            problems += [f"in subgraph node {node.name!r}: {problem}" for problem in error.problems]
    return built


def _entries(starts: Sequence[str], known: Mapping[str, Node]) -> Iterator[str]:
    if not starts:
        yield "no entry: say where it begins with start(…)"
    elif len(set(starts)) > 1:
        yield f"several entries: {', '.join(dict.fromkeys(starts))}"
    for start in dict.fromkeys(starts):
        if start not in known:
            yield f"entry {start!r} is no node"


def _repeated(nodes: Sequence[Node]) -> Iterator[str]:
    for name, count in Counter(node.name for node in nodes).items():
        if count > 1:
            yield f"node {name!r} is declared {count} times"
        if name == END:
            yield f"node {name!r}: this name stands for the end"


def _edge_problems(edge: Edge, known: Mapping[str, Node]) -> Iterator[str]:
    if edge.source not in known:
        yield f"edge from {edge.source!r}, which is no node"
    targets = edge.target.nodes()
    for target in dict.fromkeys(targets):
        if target != END and target not in known:
            yield f"node {edge.source!r}: edge to {target!r}, which is no node"
    match edge.target:
        case Together(targets=branches, join=join):
            yield from _fan_out_problems(edge.source, branches, join)
        case ForEach(node=node, join=join):
            yield from _fan_out_problems(edge.source, (node,), join)
        case Choice(ways=ways) if not ways:
            yield f"node {edge.source!r}: a choice without any way"
    functions = [edge.when.function] if edge.when else []
    functions += [edge.target.function] if isinstance(edge.target, Choice) else []
    if any(inspect.iscoroutinefunction(function) for function in functions):
        yield f"node {edge.source!r}: a condition is asynchronous; it must be a plain function of the state"


def _fan_out_problems(source: str, branches: tuple[str, ...], join: str) -> Iterator[str]:
    if not branches:
        yield f"node {source!r}: a join without branches"
    for name, count in Counter(branches).items():
        if count > 1:
            yield f"node {source!r}: branch {name!r} is named {count} times"
        if name == END:
            yield f"node {source!r}: a branch cannot be the end"
        if name == join:
            yield f"node {source!r}: {name!r} is branch and join at once"


def _only_beside(nodes: Sequence[Node], edges: Sequence[Edge], starts: Sequence[str]) -> set[str]:
    """Return the nodes that run side by side with others and nowhere else: the join comes after them."""
    beside: set[str] = set()
    alone = {*starts, *(node.wait.on_reject for node in nodes if node.wait is not None)}
    for edge in edges:
        match edge.target:
            case Together(targets=targets, join=join):
                beside.update(targets)
                alone.add(join)
            case ForEach(node=node, join=join):
                beside.add(node)
                alone.add(join)
            case target:
                alone.update(target.nodes())
    return beside - alone


def _way_problems(name: str, ways: tuple[Edge, ...], only_beside: bool) -> Iterator[str]:
    if not ways and not only_beside:
        yield f"node {name!r} leads nowhere: give it an edge, or name it in end(…)"
    plain = [edge for edge in ways if edge.rank == 1]
    if len(plain) > 1:
        yield f"node {name!r} has {len(plain)} edges without a condition; use parallel(…) to take several"
    if sum(1 for edge in ways if edge.rank == 2) > 1:
        yield f"node {name!r} has several fallbacks"
    conditions = Counter(edge.when.name for edge in ways if edge.when)
    for condition, count in conditions.items():
        if count > 1:
            yield f"node {name!r} has {count} conditions called {condition!r}: give each its name="
    if plain and any(edge.rank == 2 for edge in ways) and not isinstance(plain[0].target, Choice):
        yield f"node {name!r} has a fallback that is never taken: it has an edge without a condition too"


def _node_problems(node: Node, known: Mapping[str, Node], schema: Schema) -> Iterator[str]:
    if node.body is not None and positional_count(node.body.function) > 2:
        yield f"node {node.name!r} takes more than the state and the context"
    if node.wait is not None and node.wait.on_reject is not None and node.wait.on_reject not in known:
        yield f"barrier {node.name!r}: on_reject names {node.wait.on_reject!r}, which is no node"
    if node.inner is not None:
        yield from _projection_problems(node.name, node.inner, schema)


def _projection_problems(name: str, inner: Inner, schema: Schema) -> Iterator[str]:
    nested = inner.graph.schema
    for what, mapping, source, target in (("into", inner.into, schema, nested), ("out", inner.out, nested, schema)):
        if not isinstance(mapping, Mapping):
            continue
        for left, right in mapping.items():
            if not source.knows(left):
                yield f"subgraph node {name!r}: {what} takes {left!r}, which that state does not have"
            if not target.knows(right):
                yield f"subgraph node {name!r}: {what} gives {right!r}, which that state does not have"
    if inner.into is None and not nested.open and not schema.open and not nested.fields.keys() & schema.fields.keys():
        yield f"subgraph node {name!r} has no key in common with the graph around it: say what goes into= and out="


def _unreachable(start: str, known: Mapping[str, Node], ways: Mapping[str, tuple[Edge, ...]]) -> Iterator[str]:
    seen, waiting = {start}, [start]
    ends = False
    while waiting:
        name = waiting.pop()
        node = known[name]
        targets = [target for edge in ways[name] for target in edge.target.nodes()]
        if node.wait is not None and node.wait.on_reject is not None:
            targets.append(node.wait.on_reject)
        ends = ends or END in targets
        fresh = {target for target in targets if target != END} - seen
        seen |= fresh
        waiting += fresh
    for name in known:
        if name not in seen:
            yield f"node {name!r} cannot be reached from {start!r}"
    if not ends:
        yield "no exit: no node that can be reached leads to the end"
