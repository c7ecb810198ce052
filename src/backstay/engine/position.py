"""The position of a run: a tree of running graphs, stored as frames and restored from them.

An ``Activation`` is one running graph, with its state, its loop counters, and the jobs that run next: one job, or
several in parallel. The job of a subgraph has an activation inside. The name of a position is the whole path to it,
``outer/node#visit[key]>inner/node#visit``: so the second round of a loop, the third branch of a fan-out and the same
node in two graphs are never confused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from backstay.engine.build import BuiltGraph
from backstay.engine.nodes import END, Choice, Edge, ForEach, Parallel, To, name_of, takes_second
from backstay.engine.reducers import (
    DELETE,
    MISSING,
    UNKNOWN,
    Append,
    CustomReducer,
    Reducer,
    Replace,
    Whole,
    same,
)
from backstay.engine.state import CommitPlan, RunState
from backstay.errors import BadUpdate, InvalidInput, NodeFailed
from backstay.model.frame import Continuation, End, FanOut, Frame, NextNode


@dataclass(slots=True, eq=False)
class Job:
    """One node to run, or one that is done while other parallel jobs are not."""

    node: str
    visit: int
    position: str
    key: str | None = None  # which of several parallel jobs; None if it runs alone
    item: Any = None  # of the list, for a node that runs once per item
    tries: int = 0  # failed attempts
    done: bool = False
    update: Mapping[str, Any] = field(default_factory=dict)
    passed: bool = False  # the question before it is answered
    given: Mapping[str, Any] = field(default_factory=dict)  # the update that this answer makes to the state
    looked: bool = False  # the question after it is answered
    edited: Mapping[str, Any] = field(default_factory=dict)  # the update that this answer makes to the state
    path: list[str] = field(default_factory=list)  # nodes finished in the graph inside
    notes: Mapping[str, Any] = field(default_factory=dict)  # tokens, cost, and what else its node reported
    left: Mapping[str, int] = field(default_factory=dict)  # the nodes that it was rerouted from, each with the visit
    inner: Activation | None = None

    @property
    def writer(self) -> str:
        """The name of the job for people."""
        return self.node if self.key is None or self.key == self.node else f"{self.node}[{self.key}]"

    def updates(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the node's update, between those that the answers before and after it make, each with the writer."""
        return [(self.writer, each) for each in (self.given, self.update, self.edited) if each or each is self.update]

    def has_started(self) -> bool:
        """Return whether this job has anything to store."""
        return self.done or self.passed or bool(self.tries or self.left) or self.inner is not None


@dataclass(slots=True, eq=False)
class Activation:
    """One running graph."""

    graph: BuiltGraph
    state: RunState
    prefix: str = ""  # the position of the job around it
    cursor: int = 0
    visits: dict[str, int] = field(default_factory=dict)
    last: str | None = None
    todo: Continuation | None = None  # None = to be routed from ``last``
    passed: bool = False  # the question after ``last`` is answered
    path: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    around: tuple[Activation, Job] | None = None  # the graph and the job that it runs in

    def position(self, node: str, visit: int, key: str | None) -> str:
        """Return the name of a position in this graph."""
        place = f"{self.prefix}{self.graph.name}/{node}#{visit}"
        return place if key is None else f"{place}[{key}]"

    def job(self, node: str, key: str | None = None, item: Any = None, left: int = 0) -> Job:
        """Return the job of a node that is entered now; ``left`` is the last visit that it was rerouted from."""
        visit = max(self.visits.get(node, 0), left) + 1
        return Job(node, visit, self.position(node, visit, key), key, item)

    @property
    def here(self) -> str:
        """The node of the position: the node to run, or else the last one that ran."""
        if isinstance(self.todo, NextNode):
            return self.todo.node
        return self.last or self.graph.start


def inner_prefix(job: Job) -> str:
    """Return the prefix of the positions inside a job."""
    return f"{job.position}>"


# To frames --------------------------------------------------------------------------------------------------------


def to_frames(root: Activation, steps: int, waits: Sequence[str]) -> list[dict[str, Any]]:
    """Return the frames as plain values; the outermost without state and path, which are stored separately."""
    outermost, inside = _plain(root, None), _inside(root)
    frames = [outermost] if inside is None else [outermost, *_stack(inside, None)]
    outermost["steps"] = steps
    if waits:
        outermost["waits"] = list(waits)
    return frames


def _stack(activation: Activation | None, key: str | None) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    while activation is not None:
        plain = _plain(activation, key)
        plain["state"] = activation.state.schema.stored(activation.state.values)
        if activation.path:
            plain["path"] = activation.path
        frames.append(plain)
        activation, key = _inside(activation), None
    return frames


def _inside(activation: Activation) -> Activation | None:
    """Return the graph inside the only job of another."""
    jobs = activation.jobs
    return jobs[0].inner if len(jobs) == 1 and not isinstance(activation.todo, FanOut) else None


def _plain(activation: Activation, key: str | None) -> dict[str, Any]:
    """Return a frame without its state and path, and without empty fields."""
    todo = activation.todo
    node, visit = activation.here, 1
    if isinstance(todo, NextNode):
        visit = activation.visits.get(node, 0) + 1
    plain: dict[str, Any] = {
        "graph_id": activation.graph.name,
        "node_id": node,
        "cursor": activation.cursor,
        "visit": visit,
    }
    if key is not None:
        plain["fanout_key"] = key
    if activation.last is not None:
        plain["last_node"] = activation.last
    if todo is not None:
        plain["continuation"] = todo.to_plain()
    if activation.visits:
        plain["visits"] = activation.visits
    if activation.passed:
        plain["passed"] = True
    tasks = [to_task(job, isinstance(todo, FanOut)) for job in activation.jobs if job.has_started()]
    if tasks:
        plain["tasks"] = tasks
    return plain


def to_task(job: Job, is_parallel: bool = True) -> dict[str, Any]:
    """Return a job as a plain task. The graph inside a job that runs alone is the next frame of the stack."""
    fields = {
        "key": job.key,
        "tries": job.tries,
        "done": job.done,
        "update": job.update,
        "passed": job.passed,
        "given": job.given,
        "looked": job.looked,
        "edited": job.edited,
        "path": job.path,
        "notes": job.notes,
        "left": job.left,
        "frames": _stack(job.inner, job.key) if is_parallel else None,
    }
    set_fields = {name: value for name, value in fields.items() if value}
    return {"node": job.node, "visit": job.visit, **set_fields}


WIDE: Final = 8
"""Parallel jobs. If there are more, a commit inside one of them is stored for that job alone."""


def wide_job(activation: Activation) -> Job | None:
    """Return the outermost of many parallel jobs that a graph runs in, or None."""
    found = None
    while activation.around is not None:
        activation, job = activation.around
        if isinstance(activation.todo, FanOut) and len(activation.jobs) > WIDE:
            found = job
    return found


# From frames ------------------------------------------------------------------------------------------------------


def from_frames(built: BuiltGraph, frames: Sequence[Frame], runtime: Mapping[str, Any], prefix: str = "") -> Activation:
    """Return the run that the frames describe. Jobs that have not started are made when it resumes."""
    frame = frames[0]
    given = {key: value for key, value in runtime.items() if built.schema.knows(key)}
    activation = Activation(
        built,
        RunState(built.schema, built.schema.restore(frame.state, given)),
        prefix,
        frame.cursor,
        dict(frame.visits),
        frame.last_node,
        frame.continuation,
        frame.passed,
        list(frame.path),
    )
    for task in frame.tasks:
        job = Job(
            task.node,
            task.visit,
            activation.position(task.node, task.visit, task.key),
            task.key,
            tries=task.tries,
            done=task.done,
            update=task.update,
            passed=task.passed,
            given=task.given,
            looked=task.looked,
            edited=task.edited,
            path=list(task.path),
            notes=task.notes,
            left=task.left,
        )
        inside = task.frames or (frames[1:] if not isinstance(activation.todo, FanOut) else ())
        if inside and not task.done:
            job.inner = from_frames(built.inner[task.node], inside, runtime, inner_prefix(job))
            job.inner.around = (activation, job)
        activation.jobs.append(job)
    return activation


# Subgraphs --------------------------------------------------------------------------------------------------------


def enter_subgraph(activation: Activation, job: Job) -> Activation:
    """Return the graph inside a job, at its start."""
    built = activation.graph.inner[job.node]
    try:
        values = built.schema.initial(_given(activation, job), built.name)
    except InvalidInput as error:
        raise BadUpdate(job.writer, None, f"cannot start: {error.what}") from error
    around = (activation, job)
    return Activation(
        built, RunState(built.schema, values), inner_prefix(job), todo=NextNode(built.start), around=around
    )


def leave_subgraph(activation: Activation, job: Job, inner: Activation) -> Mapping[str, Any]:
    """Return the update that a finished inner graph makes.

    The update is the difference between the input of the inner graph and its state now, by content. For a list that
    grew, it is only the new items, so parallel branches do not overwrite each other with old copies.
    """
    node = activation.graph.nodes[job.node]
    assert node.inner is not None
    out, outer, schema = node.inner.out, activation.graph.schema, inner.graph.schema
    if callable(out):
        try:
            result = out(schema.view(inner.state.values))
        except Exception as error:
            raise NodeFailed(f"{job.writer} (out)", 1, error) from error
        if not isinstance(result, Mapping):
            raise BadUpdate(job.writer, None, f"out returned {type(result).__name__}, not a mapping")
        return result
    given = _given(activation, job)
    is_explicit = out is not None
    if out is None:
        # A key that went in and is no longer there was deleted.
        out = {key: key for key in (*inner.state.values, *given) if outer.knows(key) and schema.is_stored(key)}
    values = activation.state.with_update("decision", job.given) if job.given else activation.state.values
    into = node.inner.into if isinstance(node.inner.into, Mapping) else {}
    came_from = {right: left for left, right in into.items()}
    update: dict[str, Any] = {}
    for left, right in out.items():
        before, after = given.get(left, MISSING), inner.state.values.get(left, MISSING)
        if after is MISSING:
            if before is not MISSING and before is not DELETE:
                update[right] = DELETE
            continue
        if is_explicit and came_from.get(left, left) != right and isinstance(outer.reducer(right), Replace):
            before = values.get(right, MISSING)  # it came from another key, so this one may still have another value
        change = _change(job, right, outer.reducer(right), values.get(right, MISSING), before, after)
        if change is not MISSING:
            update[right] = change
    return update


def _change(job: Job, key: str, reducer: Reducer, base: Any, before: Any, after: Any) -> Any:
    """Return the update that an inner graph makes to an outer key, or MISSING.

    ``base`` is the outer value, ``before`` and ``after`` are the inner ones. If the inner graph started from the outer
    value, the outer value becomes exactly the inner one.
    """
    change = reducer.update(before, after)
    if change is MISSING or isinstance(reducer, Replace):
        return change
    if not same(base, before):
        if change is UNKNOWN:
            raise BadUpdate(
                job.writer,
                key,
                f"cannot be given back: into= passed another value than the outer one, and its reducer "
                f"({reducer.name}) does not show what the inner graph added to it",
                hint="Return the update from a function: out=",
            )
        return change
    if isinstance(reducer, CustomReducer) and change is UNKNOWN and job.key is not None:  # others may write the key
        change = reducer.value_as_update(before, after)
    if isinstance(reducer, CustomReducer) or change is UNKNOWN:
        return Whole(after, change)
    if isinstance(reducer, Append):
        return change
    try:
        is_exact = same(reducer.fold(before, change), after)
    except Exception:  # a type whose difference cannot be added
        return Whole(after)
    return change if is_exact else Whole(after, change)


def _given(activation: Activation, job: Job) -> Mapping[str, Any]:
    """Return the input of the graph inside a job. The outer state does not change while it runs."""
    node = activation.graph.nodes[job.node]
    assert node.inner is not None
    outer, into, state = activation.graph.schema, node.inner.into, activation.state
    values = state.with_update("decision", job.given) if job.given else state.values
    if callable(into):
        view = outer.view(values)
        arguments = (view, job.item) if takes_second(into) else (view,)
        try:
            return into(*arguments)
        except Exception as error:
            raise NodeFailed(f"{job.writer} (into)", 1, error) from error
    if into is None:
        inner = activation.graph.inner[job.node].schema
        return {key: value for key, value in values.items() if inner.knows(key) and outer.is_stored(key)}
    return {right: values[left] for left, right in into.items() if left in values}


# The next nodes are computed from the graph and the state alone: without a clock, without a store.
#
# Conditions are functions of the state without side effects. Their result is stored with the position, so a run that
# resumes after a crash never evaluates them again.


def route(built: BuiltGraph, node: str, state: RunState) -> Continuation:
    """Return the continuation after a node. Raises NodeFailed if a condition raises, BadUpdate if none holds."""
    view = state.schema.view(state.values)
    for edge in built.edges[node]:
        if edge.when is None or _evaluate(f"{node} (condition {edge.when.name})", edge.when.function, view):
            break
    else:
        tried = ", ".join(edge.when.name for edge in built.edges[node] if edge.when)
        raise BadUpdate(
            node, None, f"leads nowhere: no condition holds ({tried})", hint="Add an edge with fallback=True, or end(…)"
        )
    match edge.target:
        case To(node=target):
            return End() if target == END else NextNode(target)
        case Parallel(targets=targets, join=join):
            return FanOut(targets, None if join == END else join)
        case ForEach(node=target, join=join):
            return FanOut((target,), None if join == END else join)
        case Choice(function=function, ways=ways):
            way = _evaluate(f"{node} (choice {name_of(function)})", function, view)
            if not isinstance(way, str) or way not in ways:
                raise BadUpdate(node, None, f"leads nowhere: the choice is {way!r:.60}, not one of {', '.join(ways)}")
            return End() if ways[way] == END else NextNode(ways[way])


def _evaluate(what: str, function: Callable[[Any], Any], view: Any) -> Any:
    try:
        return function(view)
    except Exception as error:
        raise NodeFailed(what, 1, error) from error


def open_jobs(activation: Activation) -> None:
    """Make the jobs that run next; jobs that have already started stay as they are."""
    started = {job.key: job for job in activation.jobs}
    match activation.todo:
        case NextNode(node=node):
            activation.jobs = [started.get(None) or activation.job(node)]
            return
        case FanOut() as fan_out:
            target = fan_edge(activation, fan_out).target
        case _:
            activation.jobs = []
            return
    if not isinstance(target, ForEach):
        activation.jobs = [started.get(name) or activation.job(name, name) for name in fan_out.targets]
        return
    jobs = []
    for index, item in enumerate(_items(activation, target, activation.state)):
        job = started.get(str(index)) or activation.job(target.node, str(index))
        job.item = item
        jobs.append(job)
    if started and max(int(key or 0) for key in started) >= len(jobs):
        raise BadUpdate(
            str(activation.last), None, "was mapped over more items before: the list must not change until it is done"
        )
    activation.jobs = jobs


def _items(activation: Activation, target: ForEach, state: RunState) -> list[Any]:
    """Return the items that a node is run for."""
    source, over = str(activation.last), target.over
    if isinstance(over, str) and over not in state.values:
        raise BadUpdate(
            source, over, "is mapped over, but is not in the state", hint="Return it from a node, or pass it as input"
        )

    def items(view: Any) -> list[Any]:
        return list(over(view) if callable(over) else state.values[over])

    return list(_evaluate(f"{source} (map over)", items, state.schema.view(state.values)))


def restart_changed_items(activation: Activation, before: RunState) -> bool:
    """Restart the jobs of a map whose items an update of the state changed or removed; return whether there are any.

    The result of an old item, its effects and its approvals must not count for a new one, so the job of a new item is
    another visit of its node.
    """
    target = fan_edge(activation, activation.todo).target if isinstance(activation.todo, FanOut) else None
    if not isinstance(target, ForEach):
        return False
    try:
        old, new = _items(activation, target, before), _items(activation, target, activation.state)
    except (BadUpdate, NodeFailed):  # there was no list yet; or there is none now, and then the run fails with this
        return False
    changed = {str(index) for index, item in enumerate(old) if index >= len(new) or not same(item, new[index])}
    started = {job.key: job for job in activation.jobs}
    activation.jobs = [job for job in activation.jobs if job.key not in changed]
    for index in range(min(len(old), len(new))):
        if (key := str(index)) in changed:
            job = started.get(key) or activation.job(target.node, key)
            left = {**job.left, job.node: job.visit}
            fresh = activation.job(target.node, key, left=left.get(target.node, 0))
            fresh.left = left
            activation.jobs.append(fresh)
    return bool(changed)


def fan_edge(activation: Activation, fan_out: FanOut) -> Edge:
    """Return the edge that a fan-out came from."""
    join = fan_out.join or END
    for edge in activation.graph.edges.get(activation.last or "", ()):
        match edge.target:
            case Parallel(targets=targets, join=joined) if (targets, joined) == (fan_out.targets, join):
                return edge
            case ForEach(node=node, join=joined) if ((node,), joined) == (fan_out.targets, join):
                return edge
    raise BadUpdate(str(activation.last), None, f"no longer has a fan-out to {', '.join(fan_out.targets)}")


def plan_commit(activation: Activation) -> CommitPlan:
    """Return the effect of the finished jobs on the state, or raise BadUpdate or MergeConflict. Changes nothing."""
    updates = [update for job in activation.jobs for update in job.updates()]
    if isinstance(activation.todo, FanOut):
        return activation.state.plan_together(updates)
    return activation.state.plan(updates)


def commit(activation: Activation, plan: CommitPlan) -> bool:
    """Apply the updates of the finished jobs and advance the position; return whether the state changed."""
    mutated = activation.state.apply(plan)
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
