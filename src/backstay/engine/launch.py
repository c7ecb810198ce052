"""Beginning a run, taking one up, and running from any point of the past.

Whoever runs a thread holds its lease: a second worker is told before anything of its runs. What was stored is judged
before anything runs, too: a position of another graph, or of one that has changed, is refused with the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backstay.engine import event
from backstay.engine.build import Built
from backstay.engine.cancellation import Cancellation
from backstay.engine.compat import migrate, names_now
from backstay.engine.desk import Desk, attempts, finished
from backstay.engine.failed import incidents
from backstay.engine.fingerprint import identity
from backstay.engine.live import LiveState, Plan
from backstay.engine.moment import Cause
from backstay.engine.options import RunOptions
from backstay.engine.position import Activation, revive
from backstay.engine.recorder import Recorder
from backstay.engine.result import Result, Status
from backstay.engine.run import Runner
from backstay.engine.sink import CheckpointSink, Then, check_sink
from backstay.engine.store_sink import StoreSink
from backstay.engine.task import Tasks
from backstay.engine.trigger import Trigger, every_node
from backstay.engine.verdict import Verdict, require
from backstay.errors import BadUpdate, InvalidInput, NotFound
from backstay.model.checkpoint import Checkpoint, bare
from backstay.model.continuation import NextNode
from backstay.model.decision import Decision
from backstay.model.frame import FrameStack
from backstay.model.interrupt import Interrupt
from backstay.store.base import Backend
from backstay.thread import interrupts
from backstay.thread.access import handle_of
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.load import latest
from backstay.thread.records import find_by_id
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

AnyThread = Thread | AsyncThread
Compose = Callable[[StoreSink], CheckpointSink]


@dataclass(slots=True, kw_only=True)
class Setup:
    """How a run is to be carried out; nothing of this is stored."""

    built: Built
    thread: AnyThread | None
    sink: CheckpointSink | Compose | None = None
    trigger: Trigger = field(default_factory=every_node)
    on_event: Callable[[event.Event], None] | None = None
    runtime: Mapping[str, Any] = field(default_factory=dict)  # values of fields that are not stored
    lease_s: float | None = 30.0  # None = the caller sees to it that nobody else runs the thread
    wait_s: float = 0.0  # how long to wait for the lease
    pause_check_s: float = 0.2
    blocking: bool = False
    cancel: Cancellation | None = None

    def emit(self, what: event.Event) -> None:
        """Tell who watches."""
        if self.on_event is not None:
            self.on_event(what)


# Beginning --------------------------------------------------------------------------------------------------------


async def start(setup: Setup, given: Mapping[str, Any], asked: RunOptions) -> Result:
    """Begin a run on a thread that is new or whose last run is over."""
    async with _held(setup):
        desk = _desk(setup)
        before = None if desk is None else await desk.run(latest, desk.cursor)
        root = _beginning(setup, before)
        check_keys(setup.built, "runtime", setup.runtime)
        store = None if setup.thread is None else StoreSink(setup.thread)
        recorder = _recorder(setup, root, asked, store)
        if before is None:
            recorder.first_step = 0
            values = setup.built.schema.begin(given, setup.built.name)
            root.live = LiveState(setup.built.schema, {**values, **setup.runtime})
        else:
            assert store is not None
            store.begin(before, root.live)
            recorder.tokens, recorder.cost = before.tokens_used, before.cost_estimate
            given = setup.built.schema.given(given, setup.built.name)
            root.live.apply(_planned(root, "input", given))
        runner = _runner(setup, recorder, desk, None)
        setup.emit(event.RunStarted(asked.run_id, setup.built.name))
        return await _finish(setup, runner, "input")


def _beginning(setup: Setup, before: Checkpoint | None) -> Activation:
    """Return a run at its first node, with the state that the thread has."""
    built = setup.built
    if before is None:
        return Activation(built, LiveState(built.schema, {}), todo=NextNode(built.start))
    if before.graph is not None and not before.is_over:
        raise InvalidInput(
            f"thread {before.thread_id!r} has an unfinished run of graph {before.graph!r}, at step {before.step}",
            thread=before.thread_id,
            checkpoint=before.id,
            hint="Go on with it by resume(thread), or begin another thread",
        )
    unknown = sorted(key for key in before.state if not built.schema.knows(key))
    if unknown:
        raise InvalidInput(
            f"the thread's state has {unknown[0]!r}, which graph {built.name!r} does not know",
            thread=before.thread_id,
            hint="Begin another thread, or declare the key",
        )
    live = LiveState(built.schema, built.schema.restore(before.state, setup.runtime))
    return Activation(built, live, todo=NextNode(built.start))


def check_keys(built: Built, what: str, given: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless all of it are keys of a graph's state."""
    unknown = sorted(str(key) for key in given if not (isinstance(key, str) and built.schema.knows(key)))
    if unknown:
        raise InvalidInput(
            f"{what}: graph {built.name!r} has no state key {unknown[0]!r}",
            hint=f"Its keys are {', '.join(built.schema.fields)}",
        )


def _planned(root: Activation, what: str, given: Mapping[str, Any]) -> Plan:
    try:
        return root.live.plan([(what, given)])
    except BadUpdate as error:  # the caller's, not a node's
        raise InvalidInput(f"{what} cannot be taken: {error.what}", hint=error.hint) from error


# Going on ---------------------------------------------------------------------------------------------------------

Answers = Decision | str | Mapping[str, Decision | str] | None
"""One decision, or one for each interrupt's id. A decision without details may be given by its name: "approve"."""

_COPIES = ("fork", "rewind")
"""Triggers of checkpoints that took another one's position over: what was asked after that is asked again."""


@dataclass(slots=True, kw_only=True)
class Taking:
    """How a stored run is taken up."""

    answers: Answers = None
    by: str = "resume"
    update: Mapping[str, Any] | None = None
    compatible: bool = False
    limit: int | None = None
    effects_from: tuple[str, ...] | None = None  # branches whose effects are taken over; None = as it was
    writes_of: Checkpoint | None = None  # where finished jobs are written, if not beside the thread's newest
    is_edited: bool = False  # the state was changed on the way, so what jobs made of the old one does not count


async def resume(setup: Setup, taking: Taking) -> Result:
    """Go on where a thread's run stands."""
    if setup.thread is None:
        raise InvalidInput("there is nothing to resume without a thread", hint='Pass store.thread("name")')
    desk = _desk(setup)
    assert desk is not None
    async with _held(setup):
        found = await desk.run(latest, desk.cursor)
        checkpoint = _resumable(setup.thread, found)
        if taking.writes_of is not None:
            checkpoint = _copied(checkpoint, taking.writes_of, taking.is_edited)
        state, frames, judgement = migrate(setup.built, checkpoint)
        require(judgement, taking.compatible)
        check_keys(setup.built, "runtime", setup.runtime)
        options = _options_of(setup.built, checkpoint, taking)
        waiting = [] if checkpoint.trigger in _COPIES else await _waiting(desk, frames)
        root = _revived(setup, checkpoint, state, frames)
        edit = _planned(root, "update", setup.built.schema.given(taking.update or {}, setup.built.name))
        store = StoreSink(setup.thread)
        recorder = _recorder(setup, root, options, store)
        await _decide(desk, waiting, taking)  # once nothing else can be wrong: a decision counts for good
        store.resume(checkpoint, root.live, is_same=judgement.overall is Verdict.SAME)
        recorder.tokens, recorder.cost = checkpoint.tokens_used, checkpoint.cost_estimate
        recorder.steps = frames.frames[0].steps
        is_migrated = judgement.overall is not Verdict.SAME
        # In another graph what was asked may not be asked any more; what still is puts itself on the list again.
        recorder.waits = [] if is_migrated else [record.id for record in waiting if record.pending]
        if is_migrated or checkpoint.trigger in _COPIES or taking.limit:
            options.version += 1
        root.live.apply(edit)
        runner = _runner(setup, recorder, desk, checkpoint)
        runner.tasks.incidents.update(incidents(_asked(checkpoint, waiting)))
        setup.emit(event.RunStarted(options.run_id, setup.built.name, options.attempt, True))
        begins: Cause | None = "manual" if is_migrated or taking.update else None
        if begins is None:
            recorder.stands_as_stored()
        return await _finish(setup, runner, begins)


def _copied(checkpoint: Checkpoint, source: Checkpoint, is_edited: bool) -> Checkpoint:
    """Return a fork's checkpoint with the finished jobs of the one it was forked from, unless its state is another."""
    if not is_edited:
        # What finished while somebody was asked may rest on the answer, which does not count in this line of history.
        writes = () if source.frames.frames[0].waits else source.writes
        return bare(Checkpoint, {**checkpoint.__dict__, "writes": writes})
    outermost, *inner = checkpoint.frames
    unfinished = tuple(task for task in outermost.tasks if not task.done)
    frames = FrameStack((replace(outermost, tasks=unfinished), *inner))
    return bare(Checkpoint, {**checkpoint.__dict__, "writes": (), "frames": frames})


def _resumable(thread: AnyThread, found: Checkpoint | None) -> Checkpoint:
    if found is None:
        raise NotFound(
            f"branch {thread.branch!r} of thread {thread.id!r} has no checkpoint, so there is nothing to resume",
            thread=thread.id,
            hint="Begin with run(thread, input), or look for the right id with store.threads()",
        )
    if found.graph is None:
        raise InvalidInput(
            "the newest checkpoint is not of a graph's run",
            thread=thread.id,
            checkpoint=found.id,
            hint="Begin with run(thread, input): it goes on from this state",
        )
    if found.is_over:
        raise InvalidInput(
            f"the run of graph {found.graph!r} is over ({found.trigger}), at step {found.step}",
            thread=thread.id,
            checkpoint=found.id,
            hint="Begin another with run(thread, input), or go back with replay(thread, checkpoint)",
        )
    return found


def _revived(setup: Setup, checkpoint: Checkpoint, state: Mapping[str, Any], frames: FrameStack) -> Activation:
    root = revive(setup.built, frames.frames, setup.runtime)
    root.live = LiveState(setup.built.schema, setup.built.schema.restore(state, setup.runtime))
    root.path = list(checkpoint.path)
    return root


def _options_of(built: Built, checkpoint: Checkpoint, taking: Taking) -> RunOptions:
    known = identity(built)
    run_id = checkpoint.run_id or checkpoint.id
    options = RunOptions(run_id, known.hash, known.shape, attempt=checkpoint.attempt + 1)
    options.take_over(checkpoint.run)
    options.before = names_now(built, checkpoint, options.before)
    options.after = names_now(built, checkpoint, options.after)
    options.limit = taking.limit or options.limit
    if taking.effects_from is not None:
        options.effects_from = taking.effects_from
    if checkpoint.trigger in _COPIES:  # what was allowed in one line of history is not allowed in another
        options.line, options.grants = checkpoint.id, set()
    return options


async def _waiting(desk: Desk, frames: FrameStack) -> list[InterruptRecord]:
    """Return the interrupts that a run waits for."""
    records = []
    for name in frames.frames[0].waits:
        record = await desk.run(_found, desk.cursor.lane.namespace, name)
        if record is not None:
            records.append(record)
    return records


def _asked(checkpoint: Checkpoint, waiting: list[InterruptRecord]) -> list[Interrupt]:
    """Return what a run waits for; also what a process that died had stored with the position, and not yet recorded."""
    asked = [record.interrupt for record in waiting]
    if checkpoint.trigger not in _COPIES and checkpoint.interrupt is not None:
        asked.append(checkpoint.interrupt)
    return asked


def _found(store: Backend, namespace: str, name: str) -> InterruptRecord | None:
    stored = find_by_id(store, "interrupt", namespace, name)
    return None if stored is None else interrupts.record_of(stored)


async def _decide(desk: Desk, waiting: list[InterruptRecord], taking: Taking) -> None:
    """Record the answers that were handed in, each on the interrupt it is meant for."""
    for record, decision in _matched(desk, waiting, taking.answers):
        await desk.run(interrupts.decide, desk.context, desk.cursor, record, decision, taking.by)


def _matched(desk: Desk, waiting: list[InterruptRecord], answers: Answers) -> list[tuple[InterruptRecord, Decision]]:
    if answers is None:
        return []
    thread = desk.cursor.lane.thread
    open_ones = {record.id: record for record in waiting if record.decision is None}
    if isinstance(answers, Decision | str):
        if len(open_ones) != 1:
            listed = "; ".join(str(record) for record in open_ones.values()) or "nothing"
            raise InvalidInput(
                f"one answer for {len(open_ones)} open interrupts: {listed}",
                thread=thread,
                hint="Pass {interrupt id: answer, …}" if open_ones else "The run waits for nobody; resume(thread)",
            )
        return [(next(iter(open_ones.values())), _decision(answers))]
    if not isinstance(answers, Mapping):
        raise InvalidInput(
            f"answers must be a decision or a mapping of interrupt ids to decisions, not {type(answers).__name__}",
            hint="For example resume(thread, Approve()), or resume(thread, {record.id: Reject()})",
        )
    stale = [name for name in answers if name not in {record.id for record in waiting if record.pending}]
    if stale:
        raise InvalidInput(
            f"the run does not wait for interrupt {stale[0]!r}: it was answered, or the run has moved on",
            thread=thread,
            hint="Nothing was decided. Look at thread.interrupts(); resume(thread) goes on with what was answered",
        )
    return [(record, _decision(answers[record.id])) for record in waiting if record.id in answers]


def _decision(given: Decision | str) -> Decision:
    if not isinstance(given, Decision | str):
        raise InvalidInput(
            f"an answer must be a decision, not {type(given).__name__}", hint="For example Approve(), or Answer(value)"
        )
    return interrupts.check_decision(given, None, None, "", None)


# Both -------------------------------------------------------------------------------------------------------------


def _desk(setup: Setup) -> Desk | None:
    return None if setup.thread is None else Desk(setup.thread, setup.pause_check_s)


@contextlib.asynccontextmanager
async def _held(setup: Setup) -> AsyncIterator[None]:
    """Hold the thread's lease, unless the caller does or does not want it."""
    thread = setup.thread
    if thread is None or setup.lease_s is None or handle_of(thread).cursor.hold is not None:
        yield
    elif isinstance(thread, AsyncThread):
        async with thread.lease(ttl=setup.lease_s, wait_s=setup.wait_s):
            yield
    else:
        with thread.lease(ttl=setup.lease_s, wait_s=setup.wait_s):
            yield


def _recorder(setup: Setup, root: Activation, options: RunOptions, store: StoreSink | None) -> Recorder:
    sink = setup.sink
    if callable(sink) and not hasattr(sink, "on_checkpoint"):
        if store is None:
            raise InvalidInput("a sink made of the store's needs a thread", hint="Pass a thread, or a sink")
        composed: CheckpointSink | None = check_sink(sink(store))
    elif sink is None:
        composed = store
    else:
        composed = check_sink(sink) if store is None else Then(store, check_sink(sink))
    return Recorder(root, options, store, composed, setup.trigger.begin(), setup.emit)


def _runner(setup: Setup, recorder: Recorder, desk: Desk | None, checkpoint: Checkpoint | None) -> Runner:
    writes = () if checkpoint is None else checkpoint.writes
    tasks = Tasks(recorder, desk, setup.emit, setup.blocking, attempts(writes))
    return Runner(recorder, desk, tasks, finished(writes), setup.emit, setup.cancel)


async def _finish(setup: Setup, runner: Runner, begins: Cause | None) -> Result:
    """Run, and tell those who watch how it ended, exactly once."""
    status, error = "error", ""
    try:
        result = await _cancellable(setup, runner, begins)
        status, error = result.status.value, "" if result.error is None else type(result.error).__name__
        return result
    except BaseException as raised:
        error = type(raised).__name__
        status = "cancelled" if isinstance(raised, asyncio.CancelledError) else status
        raise
    finally:
        head = None if runner.recorder.store is None else runner.recorder.store.head
        setup.emit(
            event.RunEnded(
                status,
                runner.recorder.options.run_id,
                runner.recorder.steps,
                None if head is None else head.id,
                error or None,
            )
        )


async def _cancellable(setup: Setup, runner: Runner, begins: Cause | None) -> Result:
    if setup.cancel is None:
        return await runner.go(begins)
    async with setup.cancel.watching() as cancelled:
        return await runner.go(begins)
    return runner.result(Status.CANCELLED, reason=cancelled.reason)
