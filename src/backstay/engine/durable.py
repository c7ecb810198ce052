"""The durable side of a run: its stored options, and all store operations that it needs except saving checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from backstay.engine import events
from backstay.engine.control import RunStopped
from backstay.engine.position import Activation, Job, to_frames, to_task, wide_job
from backstay.engine.sinks import CheckpointSink, StoreSink
from backstay.engine.triggers import Cause, CheckpointEvent, RunTrigger, StepRecord
from backstay.model.checkpoint import COPIES, Checkpoint, CheckpointFields, Write, unchecked
from backstay.model.decision import Decision, Interrupt
from backstay.model.frame import End, FanOut, Frame, FrameStack, NextNode, Task
from backstay.operations import question, rows
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.question import Question, line_name_of
from backstay.operations.run_keeper import RunKeeper
from backstay.store.base import Backend
from backstay.thread.access import handle_of
from backstay.thread.thread import AsyncThread, Thread

P = ParamSpec("P")
T = TypeVar("T")

UPDATE, ATTEMPT, PROGRESS = "update", "attempt", "progress"
"""Channels of the pending writes of a checkpoint: the update of a finished job, a failed attempt, and the position
inside one of many parallel jobs, which its update replaces."""


class DurableRun:
    """Stored decisions, finished jobs, failed attempts and pause requests. A run without a thread has none.

    In the caller's event loop, operations run in worker threads; ``run_sync`` runs them directly. Nodes that are plain
    functions always run them directly, because no event loop waits in their thread.
    """

    def __init__(self, thread: Thread | AsyncThread, pause_check_s: float) -> None:
        self.handle = handle_of(thread)
        self.services = self.handle.services
        self.cursor = self.handle.cursor
        self.keeper: RunKeeper | None = None  # the record of the run
        self._pause_check_s = pause_check_s
        self._pause_checked = float("-inf")

    async def run(self, operation: Callable[Concatenate[Backend, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation on the store. It has ended when a cancelled run releases its lease."""
        if self.handle.blocking:
            return self.handle.run(operation, *args, **kwargs)
        return await self.handle.finish(operation, *args, **kwargs)

    def now_us(self) -> int:
        """Return the time now, by the store's clock."""
        return rows.to_microseconds(self.services.now())

    async def settle(self, checkpoint_id: str, asked: Question) -> Decision | InterruptRecord:
        """Return the decision on a question, or the record that waits for one."""
        return await self.run(question.settle, self.services, self.cursor, checkpoint_id, asked)

    async def record_update(self, checkpoint_id: str, position: str, value: Mapping[str, Any]) -> None:
        """Store the update of a finished job as a pending write of the current checkpoint."""
        write = Write(position, 0, UPDATE, dict(value))
        await self.run(rows.write, self.cursor.branch, checkpoint_id, [write], True)

    async def record_attempt(self, checkpoint_id: str, position: str, attempt: int, error: str, is_last: bool) -> None:
        """Store a failed attempt of a job, so that a crash does not reset the count."""
        write = Write(position, attempt, ATTEMPT, {"error": error, "last": is_last})
        await self.run(rows.write, self.cursor.branch, checkpoint_id, [write], True)

    async def pause_request(self) -> InterruptRecord | None:
        """Return a request to pause that the run must obey; raise RunStopped if it was cancelled.

        Reads the store at most every ``pause_check_s`` seconds.
        """
        now = time.monotonic()
        if now - self._pause_checked < self._pause_check_s:
            return None
        self._pause_checked = now
        stopped = None if self.keeper is None else await self.run(self.keeper.stop_request)
        if stopped is not None:
            raise RunStopped(stopped.reason or f"by {stopped.cancelled_by}")
        return await self.run(question.check_pause, self.services, self.cursor)


REPLAY = "replay"
"""The key in the stored options of a replay's first checkpoint: what it takes over from its source."""


def taken_over(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return what a replay's first checkpoint takes over from its source; empty for any other, and for its copies."""
    found: Mapping[str, Any] = checkpoint.run.get(REPLAY, {})
    return found if found.get("of") == checkpoint.id else {}


def with_taken_over(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the finished jobs that its replay takes over; in an edited state, without any."""
    taken = taken_over(checkpoint)
    if not taken:
        return checkpoint
    fields: dict[str, Any] = {**checkpoint.__dict__}
    if taken["is_edited"] and checkpoint.frames:
        outermost, *inner = checkpoint.frames
        # The progress inside parallel jobs belongs to the old state too.
        tasks = () if isinstance(outermost.continuation, FanOut) else outermost.tasks
        fields["frames"] = FrameStack((replace(outermost, tasks=tasks), *inner))
    jobs = (Write(position, 0, UPDATE, value) for position, value in taken["finished"].items())
    fields["writes"] = (*jobs, *checkpoint.writes)
    return unchecked(Checkpoint, fields)


def with_progress(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the positions inside parallel jobs that were stored after it."""
    found = {write.task_id: write.value for write in checkpoint.writes if write.channel == PROGRESS}
    done = [write.value for write in checkpoint.writes if write.channel in (UPDATE, PROGRESS)]
    totals = [value["totals"] for value in done if "totals" in value]
    if not totals:
        return checkpoint
    by_place: dict[str, list[Task]] = {}
    for position, value in found.items():
        by_place.setdefault(position[: position.rindex("/") + 1], []).append(Task.from_plain(value["task"]))
    newest = max(totals, key=lambda each: each["steps"])
    outermost, *inner = _merge_tasks(checkpoint.frames.frames, "", by_place)
    fields = {
        **checkpoint.__dict__,
        "frames": FrameStack((replace(outermost, steps=newest["steps"]), *inner)),
        "tokens_used": newest["tokens"],
        "cost_estimate": newest["cost"],
    }
    return unchecked(Checkpoint, fields)


def _merge_tasks(frames: Sequence[Frame], prefix: str, by_place: Mapping[str, list[Task]]) -> tuple[Frame, ...]:
    merged = []
    for frame in frames:
        place = f"{prefix}{frame.graph_id}/"
        if isinstance(frame.continuation, FanOut):
            tasks = {task.key: task for task in (*frame.tasks, *by_place.get(place, ()))}
            for key, task in tasks.items():
                inside = _merge_tasks(task.frames, f"{place}{task.node}#{task.visit}[{key}]>", by_place)
                tasks[key] = replace(task, frames=inside)
            frame = replace(frame, tasks=tuple(tasks.values()))
        elif frame.tasks:
            prefix = f"{place}{frame.tasks[0].node}#{frame.tasks[0].visit}>"
        merged.append(frame)
    return tuple(merged)


def replay_options(source: Checkpoint, name: str, is_edited: bool, reuses_effects: bool) -> dict[str, Any]:
    """Return the stored options of a replay's first checkpoint, called ``name``, a copy of its source.

    They hold what the replay takes over: effects that the source's branch did later, and its finished parallel jobs. So
    a replay that dies before its next checkpoint takes over the same when it resumes. Jobs that finished while the run
    waited may depend on an answer, which does not count here; in an edited state none of them counts.
    """
    kept = () if is_edited or (source.frames and source.frames.frames[0].waits) else source.writes
    earlier = [list(each) for each in source.run.get("effects_from", ())]
    return {
        **source.run,
        "effects_from": [[source.branch, line_name_of(source)], *earlier] if reuses_effects else [],
        REPLAY: {"of": name, "is_edited": is_edited, "finished": finished(kept)},
    }


def finished(writes: Iterable[Write]) -> dict[str, Mapping[str, Any]]:
    """Return the updates of finished jobs, by position."""
    return {write.task_id: write.value for write in writes if write.channel == UPDATE}


def attempts(writes: Iterable[Write]) -> dict[str, int]:
    """Return the number of failed attempts by position. A job that used up all attempts may try again and counts 0."""
    counts: dict[str, tuple[int, bool]] = {}
    for write in writes:
        if write.channel == ATTEMPT:
            counts[write.task_id] = max(counts.get(write.task_id, (0, False)), (write.index, write.value["last"]))
    return {position: 0 if is_last else count for position, (count, is_last) in counts.items()}


@dataclass(slots=True)
class RunOptions:
    """A run's identity and options, stored so that any process resumes it the way it was started.

    ``version`` rises when an option changes during the run.
    """

    run_id: str
    graph_hash: int
    shape: Mapping[str, Any]
    attempt: int = 1  # 1 for the start, one more for each resume
    limit: int | None = None  # the limit of nodes; None = the graph's own
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    effects_from: tuple[tuple[str, str], ...] = ()  # branches whose effects are replayed here, and their line names
    grants: set[str] = field(default_factory=set)  # tools and nodes that need no further approval
    line: str = ""  # the checkpoint at which a fork or a rewind started this line of history
    imported: Mapping[str, Any] = field(default_factory=dict)  # the pause of another program, to be asked about here
    received: dict[str, int] = field(default_factory=dict)  # how many values the run has received, by name
    receivers: dict[str, str] = field(default_factory=dict)  # who waits for a name, by position; not stored
    version: int = 1

    @property
    def line_name(self) -> str:
        """The prefix of all questions, calls and effects: those of another line of history do not count here."""
        return f"{self.run_id}@{self.line}" if self.line else self.run_id

    def grant(self, scope: str) -> None:
        """Stop asking about this tool or node."""
        if scope not in self.grants:
            self.grants.add(scope)
            self.version += 1

    def receive(self, counts: Mapping[str, int], positions: Collection[str]) -> None:
        """Count the values that the committed jobs at these positions received with ``wait_for``."""
        for name, count in counts.items():
            self.received[name] = self.received.get(name, 0) + count
            self.version += 1
            if self.receivers.get(name) in positions:
                del self.receivers[name]

    def is_granted(self, tool: str) -> bool:
        """Return whether an approval covers this tool, by its name or by "*". Nodes are granted by name only."""
        return tool in self.grants or "*" in self.grants

    def to_plain(self) -> dict[str, Any]:
        """Return the stored options. The identity is in the checkpoint's own fields."""
        return {
            **({"imported": self.imported} if self.imported else {}),
            "shape": self.shape,
            "limit": self.limit,
            "before": sorted(self.before),
            "after": sorted(self.after),
            "metadata": dict(self.metadata),
            "effects_from": [list(each) for each in self.effects_from],
            "grants": sorted(self.grants),
            "line": self.line,
            **({"received": dict(self.received)} if self.received else {}),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over the stored options of a run."""
        plain = checkpoint.run
        self.limit = plain.get("limit")
        self.before = frozenset(plain.get("before", ()))
        self.after = frozenset(plain.get("after", ()))
        self.metadata = plain.get("metadata", {})
        if checkpoint.trigger not in COPIES or taken_over(checkpoint):
            self.effects_from = tuple((branch, line) for branch, line in plain.get("effects_from", ()))
        self.grants = set(plain.get("grants", ()))
        self.line = plain.get("line", "")
        self.imported = plain.get("imported", {})
        self.received = dict(plain.get("received", {}))


# Notify the sink of a run's checkpoints, each with everything that is needed to resume from it.
#
# All graphs and branches of a run share one recorder, so a checkpoint always holds the whole position. Every state in
# it was committed, because a commit never awaits anything halfway.


class RunRecorder:
    """A run's identity and position, and the sink that receives them."""

    def __init__(
        self,
        root: Activation,
        options: RunOptions,
        store: StoreSink | None,
        sink: CheckpointSink | None,
        trigger: RunTrigger,
        emit: Callable[[events.Event], None],
    ) -> None:
        self.root = root
        self.options = options
        self.store = store
        self.sink = sink
        self.emit = emit
        self.steps = 0
        self.is_damaged = False  # a node changed the state in place, and the change could not be undone
        self.tokens = 0
        self.cost = 0.0
        self.waits: list[str] = []  # ids of the interrupts that the run waits for
        self.hint: str | None = None  # why the run failed, and what to do next
        self.first_step: int | None = None  # the step of the thread's first checkpoint
        self._run: tuple[int, Mapping[str, Any]] = (0, {})  # the stored options, and their version
        self._trigger = trigger
        self.saving = asyncio.Lock()  # held while the sink works
        # A move inside one of many parallel jobs concerns this job alone, and any other move the whole run.
        self._moves = 0
        self._trunk_moved = 0
        self._trunk_stored = -1
        self.totals_stored = self._totals()  # what the stored position has cost
        self._ahead: dict[str, tuple[int, Job]] = {}  # parallel jobs that moved since they were stored, by position

    def mark_moved(self, activation: Activation | None = None) -> None:
        """Record that the position, or that of a graph inside it, differs from the last one that the sink received."""
        self._moves += 1
        job = None if activation is None else wide_job(activation)
        if job is None:
            self._trunk_moved = self._moves
        else:
            self._ahead[job.position] = (self._moves, job)

    def mark_stored(self) -> None:
        """Record that the newest stored checkpoint has the run's position."""
        self._trunk_stored, self.totals_stored = self._trunk_moved, self._totals()

    @property
    def is_current(self) -> bool:
        """True if the newest stored checkpoint has the run's position, except for jobs that finished since."""
        return self.is_current_for(self.root) and not self._ahead

    def is_current_for(self, activation: Activation, job: Job | None = None) -> bool:
        """Return the same for one graph, or for one of its parallel jobs, without the other parallel jobs."""
        job = wide_job(activation) or job
        is_ahead = job is not None and job.position in self._ahead
        return self.store is not None and self._trunk_moved == self._trunk_stored and not is_ahead

    @property
    def head_id(self) -> str:
        """The id of the newest stored checkpoint."""
        assert self.store is not None
        assert self.store.head is not None
        return self.store.head.id

    async def notify(
        self,
        activation: Activation,
        node: str,
        cause: Cause,
        *,
        mutated: bool = True,
        requested: bool = False,
        at_barrier: bool = False,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Send the position to the sink if the trigger asks for it."""
        if self.sink is None:
            return
        made: list[tuple[StepRecord, int, dict[str, tuple[int, Job]], dict[str, Any]]] = []

        def record() -> StepRecord:
            progress = self._progress(activation) if cause == "node" and not requested else None
            moved = (self._trunk_moved, dict(self._ahead), self._totals())
            made.append((progress or self.record(cause, interrupt), *moved))
            return made[-1][0]

        event = CheckpointEvent(
            node_id=node,
            step=self.steps,
            graph_id=activation.graph.name,
            run_id=self.options.run_id,
            attempt=self.options.attempt,
            trigger=cause,
            mutated=mutated,
            requested=requested,
            at_barrier=at_barrier,
            frames=self.frames,
            run_state=self.root.state,
            node_state=activation.state,
            record=record,
        )
        if not self._trigger.wants(event):
            return
        async with self.saving:
            before = self.store.head if self.store is not None else None
            state = self.root.state
            try:
                answer = self.sink.on_checkpoint(state.schema.stored(state.values), event)
                if answer is not None:
                    await answer
            except Exception as error:
                self.emit(events.SinkFailed(type(self.sink).__name__, type(error).__name__, event.step, cause))
                raise
            finally:  # a save that was cancelled is stored nevertheless
                head = self.store.head if self.store is not None else None
                for _, trunk, ahead, totals in [each for each in made if each[0].is_stored]:
                    self._trunk_stored, self.totals_stored = trunk, totals
                    self._ahead = {name: moved for name, moved in self._ahead.items() if ahead.get(name) != moved}
            saved = head.id if head is not None and head is not before else None
            self.emit(events.CheckpointSaved(saved, event.step, cause, node))

    def _progress(self, activation: Activation) -> StepRecord | None:
        """Return the positions inside the parallel jobs that moved, or None if a commit concerns the whole run.

        They become pending writes of the newest checkpoint, one for each job; the next checkpoint has them all. So a
        commit costs as much as its own job.
        """
        is_known = self.store is not None and self.store.has_options(self.options.version)
        if not is_known or self._trunk_moved != self._trunk_stored or wide_job(activation) is None:
            return None
        totals = self._totals()
        writes = [
            Write(position, 0, PROGRESS, {"task": to_task(job), "totals": totals})
            for position, (_, job) in self._ahead.items()
        ]
        return StepRecord([], (), {}, 0, {}, writes)

    def _totals(self) -> dict[str, Any]:
        return {"steps": self.steps, "tokens": self.tokens, "cost": self.cost}

    def frames(self) -> FrameStack:
        """Return the position as frames, with all states."""
        frames = to_frames(self.root, self.steps, self.waits)
        frames[0]["state"] = dict(self.root.state.schema.stored(self.root.state.values))
        return FrameStack.from_plain(frames)

    def record(self, cause: Cause, interrupt: Interrupt | None) -> StepRecord:
        """Return everything that a checkpoint stores except the state."""
        options, root = self.options, self.root
        fields: CheckpointFields = {
            "run_id": options.run_id,
            "attempt": options.attempt,
            "graph": root.graph.name,
            "graph_hash": options.graph_hash,
            "last_node": root.last,
            "trigger": cause,
            "tokens_used": self.tokens,
            "cost_estimate": self.cost,
        }
        match root.todo:
            case NextNode(node=node):
                fields["next_node"] = node
            case FanOut() | End() as continuation:
                fields["continuation"] = continuation
        if interrupt is not None:
            fields["interrupt"] = interrupt
            fields["resume_hint"] = interrupt.prompt or None
        elif cause == "failed" and self.hint is not None:
            fields["resume_hint"] = self.hint
        if options.metadata:
            fields["metadata"] = options.metadata
        if self.store is not None and self.store.head is None and self.first_step is not None:
            fields["step"] = self.first_step
        frames = to_frames(root, self.steps, self.waits)
        if self._run[0] != options.version:
            self._run = (options.version, options.to_plain())
        return StepRecord(frames, root.path, self._run[1], options.version, fields)
