"""What comes next, decided from the graph and the state alone: no clock, no store, nothing runs here but conditions.

Conditions are functions of the state without side effects. Where they lead is stored with the position, so that a run
that goes on after a crash never asks them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backstay.engine.build import Built
from backstay.engine.edge import END, FAIL_FAST, Choice, Edge, ForEach, To, Together, name_of
from backstay.engine.live import LiveState, Plan
from backstay.engine.position import Activation, Job
from backstay.errors import BadUpdate, NodeFailed
from backstay.model.continuation import Continuation, End, FanOut, NextNode


def route(built: Built, node: str, live: LiveState) -> Continuation:
    """Return what comes after a node; raise NodeFailed if a condition does, BadUpdate if none holds."""
    view = live.schema.view(live.values)
    for edge in built.edges[node]:
        if edge.when is None or _holds(node, edge, view):
            return _continuation(node, edge, view)
    tried = ", ".join(edge.when.name for edge in built.edges[node] if edge.when)
    raise BadUpdate(
        node, None, f"leads nowhere: no condition holds ({tried})", hint="Add an edge with fallback=True, or end(…)"
    )


def _holds(node: str, edge: Edge, view: Any) -> bool:
    assert edge.when is not None
    try:
        return bool(edge.when.function(view))
    except Exception as error:
        raise NodeFailed(f"{node} (condition {edge.when.name})", 1, error) from error


def _continuation(node: str, edge: Edge, view: Any) -> Continuation:
    match edge.target:
        case To(node=target):
            return End() if target == END else NextNode(target)
        case Together(targets=targets, join=join):
            return FanOut(targets, None if join == END else join)
        case ForEach(node=target, join=join):
            return FanOut((target,), None if join == END else join)
        case Choice() as choice:
            return _chosen(node, choice, view)


def _chosen(node: str, choice: Choice, view: Any) -> Continuation:
    try:
        way = choice.function(view)
    except Exception as error:
        raise NodeFailed(f"{node} (choice {name_of(choice.function)})", 1, error) from error
    target = choice.ways.get(way) if isinstance(way, str) else None
    if target is None:
        raise BadUpdate(node, None, f"leads nowhere: the choice is {way!r:.60}, not one of {', '.join(choice.ways)}")
    return End() if target == END else NextNode(target)


def open_jobs(activation: Activation) -> None:
    """Make the jobs of what is to run next; those that have begun before stay as they are."""
    begun = {job.key: job for job in activation.jobs}
    match activation.todo:
        case NextNode(node=node):
            activation.jobs = [begun.get(None) or activation.job(node)]
        case FanOut() as fan_out:
            activation.jobs = _jobs_of(activation, fan_out, begun)
        case _:
            activation.jobs = []


def _jobs_of(activation: Activation, fan_out: FanOut, begun: Mapping[str | None, Job]) -> list[Job]:
    each = fan_edge(activation, fan_out).target
    if not isinstance(each, ForEach):
        return [begun.get(target) or activation.job(target, target) for target in fan_out.targets]
    items = _items(activation, each)
    jobs = []
    for index, item in enumerate(items):
        job = begun.get(str(index)) or activation.job(each.node, str(index))
        job.item = item
        jobs.append(job)
    if begun and max(int(key or 0) for key in begun) >= len(jobs):
        raise BadUpdate(
            str(activation.last), None, "was mapped over more items before: what it is mapped over must not change"
        )
    return jobs


def _items(activation: Activation, each: ForEach) -> Sequence[Any]:
    source = str(activation.last)
    try:
        if callable(each.over):
            found = each.over(activation.live.schema.view(activation.live.values))
        else:
            found = activation.live.values.get(each.over, ())
        return list(found)
    except Exception as error:
        raise NodeFailed(f"{source} (map over)", 1, error) from error


def fan_edge(activation: Activation, fan_out: FanOut) -> Edge:
    """Return the edge that a fan-out came from."""
    join = fan_out.join or END
    for edge in activation.graph.edges.get(activation.last or "", ()):
        match edge.target:
            case Together(targets=targets, join=joined) if (targets, joined) == (fan_out.targets, join):
                return edge
            case ForEach(node=node, join=joined) if ((node,), joined) == (fan_out.targets, join):
                return edge
    raise BadUpdate(str(activation.last), None, f"has no edge to {', '.join(fan_out.targets)} side by side any more")


def fails_fast(activation: Activation) -> bool:
    """Tell whether the first failure of jobs side by side ends the others."""
    assert isinstance(activation.todo, FanOut)
    target = fan_edge(activation, activation.todo).target
    return isinstance(target, Together | ForEach) and target.on_error == FAIL_FAST


def plan_commit(activation: Activation) -> Plan:
    """Return what the finished jobs come to; raise BadUpdate or MergeConflict and change nothing."""
    updates = [
        (job.writer, update) for job in activation.jobs for update in (job.given, job.update, job.edited) if update
    ]
    if isinstance(activation.todo, FanOut):
        return activation.live.plan_together(updates)
    return activation.live.plan(updates)


def commit(activation: Activation, plan: Plan) -> bool:
    """Take the finished jobs' results in and move on; tell whether the state changed."""
    mutated = activation.live.apply(plan)
    for job in activation.jobs:
        for node, visit in (*job.left.items(), (job.node, job.visit)):
            activation.visits[node] = max(activation.visits.get(node, 0), visit)
        activation.path += job.path
        activation.path.append(job.writer)
    activation.cursor += 1
    if isinstance(activation.todo, FanOut):
        join = activation.todo.join
        activation.todo = End() if join is None else NextNode(join)
    else:
        activation.last = activation.jobs[0].node
        activation.todo = None
    activation.passed = False
    activation.jobs = []
    return mutated
