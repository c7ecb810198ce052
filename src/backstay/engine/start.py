"""Start a run, resume one, or replay one from an earlier checkpoint.

A run holds the lease of its thread, so a second worker is refused before any of its nodes run. The stored position is
also judged before anything runs: a position of another graph, or of a changed graph, is refused with the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay.engine import events
from backstay.engine.build import BuiltGraph
from backstay.engine.compatibility import Judgement, Verdict, current_names, migrate, require
from backstay.engine.control import Cancellation
from backstay.engine.declaration import check_limit
from backstay.engine.driver import call_outside
from backstay.engine.durable import (
    DurableRun,
    RunOptions,
    RunRecorder,
    attempts,
    finished,
    replay_options,
    with_progress,
    with_taken_over,
)
from backstay.engine.events import Result, Status
from backstay.engine.fingerprint import identity
from backstay.engine.position import Activation, from_frames, restart_changed_items
from backstay.engine.run import Runner
from backstay.engine.sinks import CheckpointSink, StoreSink, Then, check_sink
from backstay.engine.state import CommitPlan, RunState
from backstay.engine.task import TaskRunner, incidents
from backstay.engine.triggers import Cause, Trigger, every_node
from backstay.errors import BadUpdate, Conflict, InvalidInput, NotFound
from backstay.model.checkpoint import COPIES, Checkpoint, CheckpointMeta
from backstay.model.decision import Decision
from backstay.model.frame import FanOut, FrameStack, NextNode
from backstay.model.runs import EffectRecord, EffectStatus
from backstay.operations import interrupts
from backstay.operations.arguments import fork_target, id_of
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.ledger import ledger_of
from backstay.operations.listing import raise_or_mark
from backstay.operations.load import get_of_thread, latest
from backstay.operations.question import close_ended, line_name_of
from backstay.operations.records import find_by_id
from backstay.operations.save import SaveRequest, fork
from backstay.store.base import Backend, no_checkpoint
from backstay.thread.lease import AsyncHandleUse, AsyncLease, HandleUse, Lease, check_lease_options
from backstay.thread.thread import AsyncThread, Thread

AnyThread = Thread | AsyncThread
DEFAULT_LEASE_S = 30.0
Compose = Callable[[StoreSink], CheckpointSink]

Answers = Decision | str | Mapping[str, Decision | str] | None
"""One decision, or one for each interrupt id. A decision without details may be given by its name: "approve"."""

REPLAY, AGAIN = "replay", "again"
"""``effects`` of a replay: use the results of effects that were done after its checkpoint, or do them again."""


@dataclass(slots=True, kw_only=True)
class Setup:
    """The options for running a graph. None of them is stored."""

    built: BuiltGraph
    thread: AnyThread | None
    sink: CheckpointSink | Compose | None = None
    trigger: Trigger = field(default_factory=every_node)
    on_event: Callable[[events.Event], None] | None = None
    runtime: Mapping[str, Any] = field(default_factory=dict)  # values of fields that are not stored
    lease_s: float | None = DEFAULT_LEASE_S  # None = the caller makes sure that no other process runs the thread
    wait_s: float = 0.0  # how long to wait for the lease, and for another run on the same handle
    lease: Lease | AsyncLease | None = None  # the caller's, of this very handle
    pause_check_s: float = 0.2
    blocking: bool = False
    cancel: Cancellation | None = None
    emit: Callable[[events.Event], None] = field(init=False)  # ``on_event``, or a function that does nothing

    def __post_init__(self) -> None:
        self.emit = (lambda event: None) if self.on_event is None else self.on_event
        if isinstance(self.trigger, type) or not callable(getattr(self.trigger, "start", None)):
            raise InvalidInput(
                f"trigger must be a trigger, not {self.trigger!r:.60}",
                hint="For example trigger=backstay.engine.triggers.every_node()",
            )

    def durable(self, what: str) -> DurableRun:
        """Return the durable side of a run that needs a thread."""
        if self.thread is None:
            raise InvalidInput(f"there is nothing to {what} without a thread", hint='Pass store.thread("name")')
        return DurableRun(self.thread, self.pause_check_s)


# Starting ---------------------------------------------------------------------------------------------------------


async def start(setup: Setup, given: Mapping[str, Any], asked: RunOptions) -> Result:
    """Start a run on a thread that is new or whose last run is over."""
    async with _leased(setup):
        built = setup.built
        durable = None if setup.thread is None else setup.durable("start")
        before = None if durable is None else await durable.run(latest, durable.cursor)
        values = {} if before is None else _state_to_continue(setup, before)
        root = Activation(built, RunState(built.schema, values), todo=NextNode(built.start))
        check_keys(built, "runtime", setup.runtime)
        store = None if setup.thread is None else StoreSink(setup.thread)
        recorder = _recorder(setup, root, asked, store)
        if durable is not None and before is not None:
            await durable.run(close_ended, durable.services, durable.cursor)
        if before is None:
            recorder.first_step = 0
            root.state = RunState(built.schema, {**built.schema.initial(given, built.name), **setup.runtime})
        else:
            assert store is not None
            store.start(before, root.state)
            recorder.tokens, recorder.cost = before.tokens_used, before.cost_estimate
            root.state.apply(_planned(root, "input", built.schema.given(given, built.name)))
        runner = _runner(setup, recorder, durable, None)
        setup.emit(events.RunStarted(asked.run_id, built.name))
        return await _finish(setup, runner, "input")


def _state_to_continue(setup: Setup, before: Checkpoint) -> dict[str, Any]:
    """Return the values of a thread on which a new run starts."""
    schema = setup.built.schema
    if before.graph is not None and not before.is_over:
        raise InvalidInput(
            f"thread {before.thread_id!r} has an unfinished run of graph {before.graph!r}, at step {before.step}",
            thread=before.thread_id,
            checkpoint=before.id,
            hint="Call resume(thread) to continue it, or start another thread",
        )
    # A class with snapshot() chooses its own stored keys, and its restore() judges them.
    unknown = [] if schema.snapshots else sorted(key for key in before.state if not schema.knows(key))
    if unknown:
        raise InvalidInput(
            f"the thread's state has the key {unknown[0]!r}, which graph {setup.built.name!r} does not declare",
            thread=before.thread_id,
            hint="Start another thread, or declare the key",
        )
    return schema.restore(before.state, setup.runtime)


def check_keys(built: BuiltGraph, what: str, given: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless all keys belong to the graph's state."""
    unknown = sorted(str(key) for key in given if not (isinstance(key, str) and built.schema.knows(key)))
    if unknown:
        raise InvalidInput(
            f"{what}: graph {built.name!r} has no state key {unknown[0]!r}",
            hint=f"Its keys are {', '.join(built.schema.fields)}",
        )


def _planned(root: Activation, what: str, given: Mapping[str, Any]) -> CommitPlan:
    try:
        return root.state.plan([(what, given)])
    except BadUpdate as error:  # an error of the caller, not of a node
        raise InvalidInput(f"{what} cannot be applied: {error.what}", hint=error.hint) from error


# Resuming ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ResumeRequest:
    """How to resume a stored run."""

    answers: Answers = None
    by: str = "resume"
    update: Mapping[str, Any] | None = None
    compatible: bool = False
    limit: int | None = None
    on: str | None = None  # the id of the checkpoint that must still be the newest
    only_edits: bool = False  # store the update, and run nothing

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_limit(self.limit)


async def resume(setup: Setup, request: ResumeRequest) -> Result:
    """Resume the run of a thread."""
    durable = setup.durable("resume")
    assert setup.thread is not None
    async with _leased(setup):
        built = setup.built
        checkpoint = _resumable(setup.thread, await durable.run(latest, durable.cursor), request.on)
        checkpoint = with_progress(with_taken_over(checkpoint))
        is_copy = checkpoint.trigger in COPIES
        state, frames, judgement = migrate(built, checkpoint)
        require(judgement, request.compatible)
        check_keys(built, "runtime", setup.runtime)
        options = _stored_options(built, checkpoint, frames, request)
        if is_copy:  # a rewound run asks again, and the questions from before the rewind no longer count
            await durable.run(close_ended, durable.services, durable.cursor)
        waiting = []
        for name in () if is_copy else frames.frames[0].waits:
            stored = await durable.run(find_by_id, "interrupt", durable.cursor.branch.namespace, name)
            if stored is not None:
                waiting.append(interrupts.record_of(stored))
        root = from_frames(built, frames.frames, setup.runtime)
        root.state = RunState(built.schema, built.schema.restore(state, setup.runtime))
        root.path = list(checkpoint.path)
        edit = _planned(root, "update", built.schema.given(request.update or {}, built.name))
        store = StoreSink(setup.thread)
        recorder = _recorder(setup, root, options, store)
        # Record the decisions last, when nothing else can fail, because a decision is final.
        for record, decision in _match_answers(durable.cursor.branch.thread, waiting, request.answers):
            await durable.run(interrupts.decide, durable.services, durable.cursor, record, decision, request.by)
        is_migrated = judgement.overall is not Verdict.SAME
        store.resume(checkpoint, root.state, is_same=not is_migrated)
        if request.update:
            before = RunState(built.schema, dict(root.state.values))
            root.state.apply(edit)
            restart_changed_items(root, before)
        recorder.tokens, recorder.cost = checkpoint.tokens_used, checkpoint.cost_estimate
        recorder.steps = frames.frames[0].steps
        # Another graph, or another item, may ask other questions. Those that it does not ask again are closed.
        recorder.waits = [record.id for record in waiting if record.pending]
        if is_migrated or is_copy or request.limit:
            options.version += 1
        runner = _runner(setup, recorder, durable, checkpoint)
        if request.only_edits:
            options.attempt = checkpoint.attempt
            recorder.mark_moved()
            await recorder.notify(root, root.here, "manual", requested=True, interrupt=checkpoint.interrupt)
            return runner.result(Status.INTERRUPTED, interrupts=tuple(each for each in waiting if each.pending))
        asked = [record.interrupt for record in waiting]
        if not is_copy and checkpoint.interrupt is not None:
            asked.append(checkpoint.interrupt)  # a process may have died after storing it but before recording it
        runner.tasks.incidents.update(incidents(asked))
        setup.emit(events.RunStarted(options.run_id, built.name, options.attempt, True))
        first: Cause | None = "manual" if is_migrated or request.update else None
        if first is None:
            recorder.mark_stored()
        return await _finish(setup, runner, first)


def _resumable(thread: AnyThread, found: Checkpoint | None, on: str | None) -> Checkpoint:
    """Return the newest checkpoint if a run can be resumed there, and if it is still the one named by ``on``."""
    if found is None:
        raise NotFound(
            f"branch {thread.branch!r} of thread {thread.id!r} has no checkpoint, so there is nothing to resume",
            thread=thread.id,
            hint="Start a run with run(thread, input), or find the right id with store.threads()",
        )
    if found.graph is None:
        raise InvalidInput(
            "the newest checkpoint was not saved by a graph",
            thread=thread.id,
            checkpoint=found.id,
            hint="Start a run with run(thread, input): it continues from this state",
        )
    if found.is_over:
        raise InvalidInput(
            f"the run of graph {found.graph!r} is over ({found.trigger}), at step {found.step}",
            thread=thread.id,
            checkpoint=found.id,
            hint="Start another with run(thread, input), or go back with replay(thread, checkpoint)",
        )
    if on is not None and found.id != on:
        raise Conflict(
            f"the run has moved on: its newest checkpoint is {found.id} (step {found.step})",
            winner=found.meta,
            thread=found.thread_id,
            checkpoint=on,
            hint="Nothing was changed. Look at that one, and try again with on= its id",
        )
    return found


def _stored_options(
    built: BuiltGraph, checkpoint: Checkpoint, frames: FrameStack, request: ResumeRequest
) -> RunOptions:
    known = identity(built)
    run_id = checkpoint.run_id or checkpoint.id
    options = RunOptions(run_id, known.hash, known.shape, attempt=checkpoint.attempt + 1)
    options.restore(checkpoint)
    options.before = current_names(built, checkpoint, options.before)
    options.after = current_names(built, checkpoint, options.after)
    options.limit = request.limit or options.limit
    asked = checkpoint.interrupt
    if asked is not None and not checkpoint.frames and frames:
        # Another program saved this pause. A person cannot answer its question there any more, so the run asks it.
        following = frames.frames[0].continuation
        nodes = following.targets if isinstance(following, FanOut) else ()
        nodes = (following.node,) if isinstance(following, NextNode) else nodes
        options.imported = {
            "visits": {node: frames.frames[0].visits.get(node, 0) + 1 for node in nodes},
            "kind": asked.kind.value,
            "payload": asked.payload,
            "prompt": asked.prompt,
        }
    if checkpoint.trigger in COPIES:  # an approval in one line of history does not count in another
        options.line, options.grants = checkpoint.id, set()
    return options


def _match_answers(
    thread: str, waiting: list[InterruptRecord], answers: Answers
) -> list[tuple[InterruptRecord, Decision]]:
    """Return each answer with the interrupt that it is for."""
    if answers is None:
        return []
    undecided = {record.id: record for record in waiting if record.decision is None and record.pending}
    if isinstance(answers, Decision | str):
        if len(undecided) != 1:
            if not undecided:
                what = "there is an answer, but no open interrupt that it could be for"
                raise InvalidInput(what, thread=thread, hint="Call resume(thread) without an answer")
            listed = "; ".join(str(record) for record in undecided.values())
            raise InvalidInput(
                f"there is one answer for {len(undecided)} open interrupts: {listed}",
                thread=thread,
                hint="Pass {interrupt id: answer, …}",
            )
        return [(next(iter(undecided.values())), _decision(answers))]
    if not isinstance(answers, Mapping):
        raise InvalidInput(
            f"answers must be a decision or a mapping of interrupt ids to decisions, not {type(answers).__name__}",
            hint="For example resume(thread, Approve()), or resume(thread, {record.id: Reject()})",
        )
    stale = [name for name in answers if name not in {record.id for record in waiting if record.pending}]
    if stale:
        raise InvalidInput(
            f"the run does not wait for interrupt {stale[0]!r}: it was answered, or the run has moved past it",
            thread=thread,
            hint="Nothing was decided. See thread.interrupts(), or call resume(thread) to use the stored answers",
        )
    return [(record, _decision(answers[record.id])) for record in waiting if record.id in answers]


def _decision(given: Decision | str) -> Decision:
    if not isinstance(given, Decision | str):
        raise InvalidInput(
            f"an answer must be a decision, not {type(given).__name__}", hint="For example Approve(), or Answer(value)"
        )
    return interrupts.check_decision(given, None, None, "", None)


# Both -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _leased(setup: Setup) -> AsyncIterator[None]:
    """Use the handle alone, under the lease of the thread, unless the caller holds the lease or does not want it."""
    thread, takes_lease = setup.thread, setup.lease_s is not None
    ttl = DEFAULT_LEASE_S if setup.lease_s is None else setup.lease_s
    options = check_lease_options(None, ttl, wait_s=setup.wait_s)
    if thread is None:
        yield
    elif isinstance(thread, AsyncThread):
        async with AsyncHandleUse(thread, setup.lease, options, takes_lease):
            yield
    else:
        use = HandleUse(thread, setup.lease, options, takes_lease)
        with contextlib.ExitStack() as stack:
            # It is pushed first: Ctrl-C may come when the use has started. Leaving one that has not does nothing.
            stack.push(use)
            call_outside(use.__enter__, ())  # Ctrl-C ends the wait
            yield


def _recorder(setup: Setup, root: Activation, options: RunOptions, store: StoreSink | None) -> RunRecorder:
    sink = setup.sink
    if callable(sink) and not hasattr(sink, "on_checkpoint"):
        if store is None:
            raise InvalidInput(
                "a sink around the thread's own sink needs a thread", hint="Pass a thread, or a sink of its own"
            )
        composed: CheckpointSink | None = check_sink(sink(store))
    elif sink is None:
        composed = store
    else:
        composed = check_sink(sink) if store is None else Then(store, check_sink(sink))
    return RunRecorder(root, options, store, composed, setup.trigger.start(), setup.emit)


def _runner(setup: Setup, recorder: RunRecorder, durable: DurableRun | None, checkpoint: Checkpoint | None) -> Runner:
    writes = () if checkpoint is None else checkpoint.writes
    tasks = TaskRunner(recorder, durable, setup.emit, setup.blocking, attempts(writes))
    return Runner(recorder, durable, tasks, finished(writes), setup.emit, setup.cancel)


async def _finish(setup: Setup, runner: Runner, first: Cause | None) -> Result:
    """Run, and report the end of the run exactly once."""
    status, error = "error", ""
    try:
        if setup.cancel is None:
            result = await runner.run(first)
        else:
            ended: Result | None = None
            async with setup.cancel.watching():
                ended = await runner.run(first)
            result = ended or runner.result(Status.CANCELLED, reason=setup.cancel.reason)
        status, error = result.status.value, "" if result.error is None else type(result.error).__name__
        return result
    except BaseException as raised:
        error = type(raised).__name__
        status = "cancelled" if isinstance(raised, asyncio.CancelledError) else status
        raise
    finally:
        recorder = runner.recorder
        head = None if recorder.store is None else recorder.store.head
        head_id = None if head is None else head.id
        setup.emit(events.RunEnded(status, recorder.options.run_id, recorder.steps, head_id, error or None))


# Replaying --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The actions that a replay from a checkpoint would take. Making the plan runs and writes nothing."""

    checkpoint: CheckpointMeta
    judgement: Judgement  # whether the graph fits the position
    next_nodes: tuple[str, ...]  # the nodes that would run first
    ran_before: tuple[str, ...]  # the path up to here, which would not run again
    ran_after: tuple[str, ...]  # the nodes that ran after this point, which would run again
    replayed: tuple[EffectRecord, ...]  # effects whose stored results would be used, given the same arguments
    unknown: tuple[EffectRecord, ...]  # effects with an unknown outcome, which would be done again

    def __str__(self) -> str:
        first = ", ".join(self.next_nodes) or "nothing"
        return (
            f"from step {self.checkpoint.step}: {first} first; {len(self.ran_after)} nodes ran after it, "
            f"{len(self.replayed)} effects would be replayed, {len(self.unknown)} are unknown"
        )


async def plan_of(setup: Setup, which: CheckpointMeta | str) -> ReplayPlan:
    """Return the plan of a replay from a checkpoint."""
    durable = setup.durable("replay")
    checkpoint = await _load_checkpoint(durable, which)
    newest = await durable.run(latest, durable.cursor)
    effects = await durable.run(_effects_after, durable, checkpoint)
    after = newest.path[len(checkpoint.path) :] if newest is not None and newest.run_id == checkpoint.run_id else ()
    next_nodes: tuple[str, ...] = () if checkpoint.next_node is None else (checkpoint.next_node,)
    match checkpoint.frames.frames[0].continuation if checkpoint.frames else checkpoint.continuation:
        case NextNode(node=node):
            next_nodes = (node,)
        case FanOut(targets=targets):
            next_nodes = targets
    return ReplayPlan(
        checkpoint=checkpoint.meta,
        judgement=migrate(setup.built, checkpoint)[2],
        next_nodes=next_nodes,
        ran_before=checkpoint.path,
        ran_after=tuple(after),
        replayed=tuple(each for each in effects if each.status is EffectStatus.DONE),
        unknown=tuple(each for each in effects if each.status is EffectStatus.INTENDED),
    )


async def replay(
    setup: Setup,
    which: CheckpointMeta | str,
    branch: str,
    put: Mapping[str, Any] | None,
    effects: str,
    request: ResumeRequest,
) -> Result:
    """Fork the thread at a checkpoint and run from there."""
    if effects not in (REPLAY, AGAIN):
        raise InvalidInput(f"effects is {effects!r:.40}", hint=f"Use {REPLAY!r} or {AGAIN!r}")
    if setup.lease is not None:
        raise InvalidInput(
            "a replay runs on a new branch, which the lease does not cover",
            hint="Leave lease= out: the replay takes the lease of the new branch",
        )
    durable = setup.durable("replay")
    checkpoint = await _load_checkpoint(durable, which)
    check_keys(setup.built, "set", put or {})
    if put:
        valid = setup.built.schema.validated({**checkpoint.state, **put}, setup.built.name, put)
        put = {name: valid[name] for name in put}
    require(migrate(setup.built, checkpoint)[2], request.compatible)  # before the branch is made
    target = fork_target(durable.cursor.branch, branch, None)
    stored, removed, schema = put, [], setup.built.schema
    if put and schema.snapshots:  # the class chooses the stored keys, so they are made from the changed state
        stored = dict(schema.stored({**schema.restore(checkpoint.state, setup.runtime), **put}))
        removed = [key for key in checkpoint.state if key not in stored]
    request_fork = SaveRequest({}, name=durable.services.new_id())
    assert request_fork.name is not None
    request_fork.run = replay_options(checkpoint, request_fork.name, bool(put), effects == REPLAY)
    cursor = await durable.run(fork, durable.services, checkpoint.id, target, stored, removed, request_fork)
    handle = durable.handle
    setup.thread = (Thread if handle.blocking else AsyncThread)(handle.access, cursor)
    return await resume(setup, request)


async def _load_checkpoint(durable: DurableRun, which: CheckpointMeta | str) -> Checkpoint:
    name = id_of(which)
    found = await durable.run(get_of_thread, durable.cursor.branch, name)
    if found is None:
        raise no_checkpoint(name, durable.cursor.branch.thread)
    if found.is_over:
        raise InvalidInput(
            f"the run of graph {found.graph!r} is over at this checkpoint, so nothing can run from it",
            thread=found.thread_id,
            checkpoint=found.id,
            hint="Choose an earlier checkpoint: thread.at(step), thread.history()",
        )
    return found


def _effects_after(store: Backend, durable: DurableRun, checkpoint: Checkpoint) -> list[EffectRecord]:
    """Return the effects that the run did after a checkpoint, on its branch.

    The visits of the outermost graph's nodes show which effects come later.
    """
    if not checkpoint.frames:
        return []
    visits, line = checkpoint.frames.frames[0].visits, line_name_of(checkpoint)
    pages = ledger_of(durable.cursor.branch.namespace, durable.cursor.branch.thread)
    found: list[EffectRecord] = []
    while not pages.done:
        for effect in raise_or_mark(pages.next_page(store), "raise"):
            name, _, position = effect.key.partition(":")
            if effect.branch != checkpoint.branch or name != line:
                continue
            node, _, rest = position.partition("/")[2].partition("#")
            digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
            if digits and int(digits) > visits.get(node, 0):
                found.append(effect)
    return found
