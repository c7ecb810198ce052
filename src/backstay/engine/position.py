"""Where a run stands: a tree of graphs under way, and how it becomes frames and comes back from them.

An ``Activation`` is one graph being run, with its state, its loop counters, what is to run next and the jobs of that:
one job, or several side by side. A job of a subgraph has an activation inside. A position is named by the whole way to
it, ``outer/node#visit[key]>inner/node#visit``: so the second round of a loop, the third branch of a fan-out and the
same node in two graphs are never mistaken for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.engine.build import Built
from backstay.engine.live import LiveState
from backstay.model.continuation import Continuation, FanOut, NextNode
from backstay.model.frame import Frame, Task


@dataclass(slots=True, eq=False)
class Job:
    """One node that is to run, or has run while others beside it have not."""

    node: str
    visit: int
    position: str
    key: str | None = None  # which of several side by side; None if it runs alone
    item: Any = None  # of the list that is mapped over
    tries: int = 0  # attempts that failed
    done: bool = False
    update: Mapping[str, Any] = field(default_factory=dict)
    passed: bool = False  # what was asked before it is answered
    given: Mapping[str, Any] = field(default_factory=dict)  # what that answer wants the state to be
    looked: bool = False  # what was asked after it is answered
    edited: Mapping[str, Any] = field(default_factory=dict)  # what that answer wants the state to be
    path: list[str] = field(default_factory=list)  # nodes finished in the graph inside
    left: Mapping[str, int] = field(default_factory=dict)  # nodes it was sent away from, with the visit
    inner: Activation | None = None

    @property
    def writer(self) -> str:
        """Return what a person calls it."""
        return self.node if self.key is None or self.key == self.node else f"{self.node}[{self.key}]"

    def has_begun(self) -> bool:
        """Tell whether there is anything to keep of it."""
        return self.done or self.passed or bool(self.tries or self.left) or self.inner is not None


@dataclass(slots=True, eq=False)
class Activation:
    """One graph under way."""

    graph: Built
    live: LiveState
    prefix: str = ""  # the position of the job around it
    cursor: int = 0
    visits: dict[str, int] = field(default_factory=dict)
    last: str | None = None
    todo: Continuation | None = None  # None = to be decided from ``last``
    passed: bool = False  # what was asked after ``last`` is answered
    path: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def position(self, node: str, visit: int, key: str | None) -> str:
        """Return the name of a place in this graph."""
        place = f"{self.prefix}{self.graph.name}/{node}#{visit}"
        return place if key is None else f"{place}[{key}]"

    def job(self, node: str, key: str | None = None, item: Any = None, left: int = 0) -> Job:
        """Return the job of a node that is entered now; ``left`` is the last visit that the job was sent away from."""
        visit = max(self.visits.get(node, 0), left) + 1
        place = f"{self.prefix}{self.graph.name}/{node}#{visit}"  # as ``position`` says
        return Job(node, visit, place if key is None else f"{place}[{key}]", key, item)

    @property
    def is_side_by_side(self) -> bool:
        """Tell whether several jobs run at once."""
        return isinstance(self.todo, FanOut)

    @property
    def here(self) -> str:
        """Return the node that stands for the place: the one to run, or else the last that ran."""
        if isinstance(self.todo, NextNode):
            return self.todo.node
        return self.last or self.graph.start


def inner_prefix(job: Job) -> str:
    """Return what the positions inside a job begin with."""
    return f"{job.position}>"


# To frames --------------------------------------------------------------------------------------------------------


def plain_frames(root: Activation, steps: int, waits: Sequence[str]) -> list[dict[str, Any]]:
    """Return the stack as plain values, the outermost without state and path, which are stored on their own."""
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
        plain["state"] = activation.live.schema.stored(activation.live.values)
        if activation.path:
            plain["path"] = activation.path
        frames.append(plain)
        activation, key = _inside(activation), None
    return frames


def _inside(activation: Activation) -> Activation | None:
    """Return the graph that runs inside the only job of another."""
    jobs = activation.jobs
    return jobs[0].inner if len(jobs) == 1 and not isinstance(activation.todo, FanOut) else None


def _plain(activation: Activation, key: str | None) -> dict[str, Any]:
    """Return a frame without its state and path; what there is nothing of is left out."""
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
    alone = not isinstance(todo, FanOut)
    tasks = [_plain_task(job, alone) for job in activation.jobs if job.has_begun()]
    if tasks:
        plain["tasks"] = tasks
    return plain


def _plain_task(job: Job, alone: bool) -> dict[str, Any]:
    task: dict[str, Any] = {"node": job.node, "visit": job.visit}
    rest = {
        "key": job.key,
        "tries": job.tries,
        "done": job.done,
        "update": job.update,
        "passed": job.passed,
        "given": job.given,
        "looked": job.looked,
        "edited": job.edited,
        "path": job.path,
        "left": job.left,
        "frames": None if alone or job.inner is None else _stack(job.inner, job.key),
    }
    task.update((name, value) for name, value in rest.items() if value)
    return task


# From frames ------------------------------------------------------------------------------------------------------


def revive(built: Built, frames: Sequence[Frame], runtime: Mapping[str, Any]) -> Activation:
    """Return the run that a stack of frames describes; jobs that have not begun are opened when it goes on."""
    return _revive(built, frames, runtime, "")


def _revive(built: Built, frames: Sequence[Frame], runtime: Mapping[str, Any], prefix: str) -> Activation:
    frame = frames[0]
    given = {key: value for key, value in runtime.items() if built.schema.knows(key)}
    activation = Activation(
        built,
        LiveState(built.schema, built.schema.restore(frame.state, given)),
        prefix,
        frame.cursor,
        dict(frame.visits),
        frame.last_node,
        frame.continuation,
        frame.passed,
        list(frame.path),
    )
    for task in frame.tasks:
        inside = task.frames or (frames[1:] if not activation.is_side_by_side else ())
        activation.jobs.append(_revive_job(activation, task, inside, runtime))
    return activation


def _revive_job(activation: Activation, task: Task, inside: Sequence[Frame], runtime: Mapping[str, Any]) -> Job:
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
        left=task.left,
    )
    if inside and not task.done:
        job.inner = _revive(activation.graph.inner[task.node], inside, runtime, inner_prefix(job))
    return job


def activations(root: Activation) -> Iterator[Activation]:
    """Yield a graph under way and all those inside it."""
    yield root
    for job in root.jobs:
        if job.inner is not None:
            yield from activations(job.inner)
