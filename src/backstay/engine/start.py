"""Start a run, or continue one.

A run holds the lease of its thread, so a second worker is refused before any of its nodes run. The stored position is
also judged before anything runs: a position of another graph, or of a changed graph, is refused with the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backstay.codec import decode
from backstay.engine import events
from backstay.engine.build import BuiltGraph
from backstay.engine.compatibility import Verdict, current_names, migrate, require
from backstay.engine.control import Cancellation
from backstay.engine.declaration import check_limit
from backstay.engine.driver import call_outside
from backstay.engine.durable import (
    DurableRun,
    RunOptions,
    RunRecorder,
    attempts,
    finished,
    with_progress,
    with_taken_over,
)
from backstay.engine.events import Result, Status
from backstay.engine.fingerprint import fingerprint_of, hex_of, identity
from backstay.engine.migration import migration_chain
from backstay.engine.position import Activation, from_frames, restart_changed_items
from backstay.engine.run import Runner
from backstay.engine.sinks import CheckpointSink, StoreSink, Then, check_sink
from backstay.engine.state import CommitPlan, RunState
from backstay.engine.task import TaskRunner, incidents
from backstay.engine.triggers import Cause, Trigger, every_node
from backstay.errors import BadUpdate, Conflict, InvalidInput, NodeFailed, NotFound
from backstay.model.checkpoint import COPIES, Checkpoint
from backstay.model.decision import Decision
from backstay.model.frame import FanOut, FrameStack, NextNode
from backstay.model.runs import RunStatus
from backstay.operations import interrupts
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.load import get_of_thread, latest
from backstay.operations.question import close_ended
from backstay.operations.rows import meta_of, to_microseconds
from backstay.operations.run_keeper import Plan, RunKeeper, check_same, settle_over, was_joined
from backstay.operations.run_records import (
    ABANDONED,
    GRAPH,
    RunOutcome,
    RunRow,
    digest_of_input,
    head_of,
    id_for_key,
    is_begun,
    new_row,
    outcome_of_head,
    row_of,
)
from backstay.store.base import Backend, Query
from backstay.thread.access import handle_of
from backstay.thread.lease import AsyncHandleUse, AsyncLease, HandleUse, Lease, check_lease_options
from backstay.thread.thread import AsyncThread, Thread

AnyThread = Thread | AsyncThread
DEFAULT_LEASE_S = 30.0
ENDED_PAGE = 100
Compose = Callable[[StoreSink], CheckpointSink]

Answers = Decision | str | Mapping[str, Decision | str] | None
"""One decision, or one for each interrupt id. A decision without details may be given by its name: "approve"."""


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
    wait: float | None = None  # how long to wait for the lease, and for another run on the same handle; None: no end
    lease: Lease | AsyncLease | None = None  # the caller's, of this very handle
    pause_check_s: float = 0.2
    blocking: bool = False
    cancel: Cancellation | None = None
    emit: Callable[[events.Event], None] = field(init=False)  # ``on_event``, or a function that does nothing
    keeper: RunKeeper | None = field(init=False, default=None)  # the record of the run

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


class StartPlan:
    """Finds the run that ``start`` executes: the unfinished one of the thread, or a new one."""

    def __init__(
        self,
        durable: DurableRun,
        built: BuiltGraph,
        has_input: bool,
        digest: bytes,
        key: str | None,
        asked: RunOptions,
    ) -> None:
        self._branch, self._now_us = durable.cursor.branch, durable.now_us
        self._built = built
        self._has_input = has_input
        self._digest = digest
        self._key = key
        self._fingerprint = hex_of(asked.graph_hash)
        self.run_id = asked.run_id if key is None else id_for_key(self._branch, key)

    def __call__(self, store: Backend, newest: RunRow | None, waited_for: RunRow | None) -> RunRow | None:
        """Return the run; None if it is over, and its result is wanted."""
        branch, name = self._branch, self._built.name
        head = head_of(store, branch)
        newest = None if newest is None else settle_over(store, newest, head, self._now_us())
        known = None if self._key is None else store.record("run", branch, self.run_id)
        if known is not None and row_of(known).is_over:
            return None
        is_wanted = waited_for is not None and waited_for.name == name and self._key in (None, waited_for.key)
        if is_wanted and waited_for is not None and was_joined(store, waited_for, self._digest):
            self.run_id = waited_for.id  # another process has finished it meanwhile
            return None
        if newest is not None and not newest.is_over:
            check_same(store, newest, GRAPH, name, self._digest or None, self._key, head)
            return newest
        run_id = self.run_id
        if head is not None and head.graph is not None and not head.is_over and not self._has_input:
            run_id = head.run_id or head.id  # a fork, or an import
        return new_row(branch, run_id, GRAPH, name, self._now_us(), self._fingerprint, self._key, self._digest)


async def start(setup: Setup, given: Mapping[str, Any], asked: RunOptions, key: str | None = None) -> Result:
    """Start a run on a thread, or continue its unfinished run of the same graph and input."""
    if setup.thread is None:
        return await _start(setup, given, asked, None, None)
    durable = setup.durable("start")
    plan = StartPlan(durable, setup.built, bool(given), digest_of_input(given), key, asked)
    async with _leased(setup, durable, plan) as keeper:
        before = await durable.run(latest, durable.cursor)
        if keeper.row is None:
            return await durable.run(_ended_result, setup, plan.run_id)
        has_begun = not keeper.is_new and await durable.run(is_begun, keeper.row, before)
        if keeper.row.input is not None and not has_begun:
            return await _start_queued(setup, durable, keeper.row, before)
        if has_begun and before is not None and before.graph is None:
            raise InvalidInput(
                f"other code has saved step {before.step} of thread {before.thread_id!r} on top of its unfinished run",
                thread=before.thread_id,
                checkpoint=before.id,
                hint="Rewind the thread to the run's last checkpoint to continue it, or end the run with run.cancel()",
            )
        if before is not None and before.graph is not None and not before.is_over:
            if keeper.is_new and given:
                _state_to_continue(setup, before)  # which refuses it
            if not before.run_id or before.run_id == keeper.id:
                return await _resume(setup, durable, ResumeRequest(), keeper)
        asked.run_id = keeper.id
        return await _start(setup, given, asked, durable, before)


def _ended_result(store: Backend, setup: Setup, run_id: str) -> Result:
    """Return the result of a run that is over, from its last checkpoint."""
    assert setup.thread is not None
    branch, schema = handle_of(setup.thread).cursor.branch, setup.built.schema
    query = Query(*branch, limit=ENDED_PAGE)
    while rows := store.find(query):
        last = next((row.id for row in rows if meta_of(row).run_id == run_id), None)
        if last is not None:
            found = get_of_thread(store, branch, last)
            assert found is not None
            values = schema.restore(found.state, setup.runtime)
            status = Status.COMPLETED if outcome_of_head(found).status is RunStatus.COMPLETED else Status.REJECTED
            return Result(
                status=status,
                run_id=run_id,
                state=schema.view(values),
                values=values,
                path=tuple(found.path),
                checkpoint=found,
            )
        query = replace(query, before=rows[-1].seq)
    raise NotFound(
        f"the run with this key is over, and its checkpoints on branch {branch.name!r} were deleted",
        thread=branch.thread,
        hint="Use another key to run it again",
    )


async def _start(
    setup: Setup, given: Mapping[str, Any], asked: RunOptions, durable: DurableRun | None, before: Checkpoint | None
) -> Result:
    """Start a run, under the lease."""
    built = setup.built
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
    """Resume the run of a thread, or start it if it is queued."""
    durable = setup.durable("resume")
    branch, built = durable.cursor.branch, setup.built

    def plan(store: Backend, newest: RunRow | None, waited_for: RunRow | None) -> RunRow | None:
        head = head_of(store, branch)
        newest = None if newest is None else settle_over(store, newest, head, durable.now_us())
        if newest is not None and not newest.is_over:
            return newest if (newest.kind, newest.name) == (GRAPH, built.name) else None
        if head is None or head.graph is None or head.is_over:
            return None
        name = head.run_id or head.id  # a fork, an import, or a rewound run
        known = store.record("run", branch, name)
        if known is not None:
            return row_of(known)
        hashed = hex_of(fingerprint_of(built))
        return new_row(branch, name, GRAPH, built.name, durable.now_us(), hashed)

    async with _leased(setup, durable, plan) as keeper:
        return await _resume(setup, durable, request, keeper)


async def _resume(setup: Setup, durable: DurableRun, request: ResumeRequest, keeper: RunKeeper) -> Result:
    """Resume a run, under the lease."""
    assert setup.thread is not None
    built = setup.built
    found = await durable.run(latest, durable.cursor)
    row = keeper.row
    if row is not None and row.input is not None and not await durable.run(is_begun, row, found):
        return await _start_queued(setup, durable, row, found)
    checkpoint = _resumable(setup.thread, found, request.on)
    checkpoint = with_progress(with_taken_over(checkpoint))
    is_copy = checkpoint.trigger in COPIES
    state, frames, judgement = migrate(built, checkpoint)
    require(judgement, request.compatible)
    check_keys(built, "runtime", setup.runtime)
    options = _stored_options(built, checkpoint, frames, request)
    if is_copy:  # a rewound run asks again, and the questions from before the rewind no longer count
        await durable.run(close_ended, durable.services, durable.cursor)
    waiting = [] if is_copy else await durable.run(interrupts.found, durable.cursor, frames.frames[0].waits)
    root = from_frames(built, frames.frames, setup.runtime)
    root.state = RunState(built.schema, built.schema.restore(state, setup.runtime))
    root.path = list(checkpoint.path)
    edit = _planned(root, "update", built.schema.given(request.update or {}, built.name))
    store = StoreSink(setup.thread)
    recorder = _recorder(setup, root, options, store)
    # Record the decisions last, when nothing else can fail, because a decision is final.
    for record, decision in _match_answers(durable.cursor.branch.thread, waiting, request.answers):
        await durable.run(interrupts.decide, durable.services, durable.cursor, record, decision, request.by)
    await durable.run(keeper.see_news)
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


async def _start_queued(setup: Setup, durable: DurableRun, row: RunRow, before: Checkpoint | None) -> Result:
    """Start a run that ``submit`` has stored."""
    known = identity(setup.built)
    if row.fingerprint != hex_of(known.hash) and migration_chain(setup.built, int(row.fingerprint, 16)) is None:
        raise InvalidInput(
            f"the run was submitted for another version of graph {setup.built.name!r} (0x{row.fingerprint})",
            thread=durable.cursor.branch.thread,
            hint=f"Deploy that graph, or register graph.migrate(0x{row.fingerprint}, …)",
        )
    stored = decode(row.input or b"")
    options = RunOptions(
        row.id,
        known.hash,
        known.shape,
        limit=stored["limit"],
        before=frozenset(stored["before"]),
        after=frozenset(stored["after"]),
        metadata=stored["metadata"],
    )
    return await _start(setup, stored["input"], options, durable, before)


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
    """Return each answer with the interrupt that it is for; raise InvalidInput unless all of them fit."""
    if answers is None:
        return []
    undecided = {record.id: record for record in waiting if record.decision is None and record.pending}
    if isinstance(answers, Decision | str):
        if len(undecided) != 1:
            if not undecided:
                what = "there is an answer, but no open interrupt that it could be for"
                raise InvalidInput(what, thread=thread, hint="Call resume(thread) without an answer")
            listed = "; ".join(record.headline for record in undecided.values())
            raise InvalidInput(
                f"there is one answer for {len(undecided)} open interrupts: {listed}",
                thread=thread,
                hint="Pass {interrupt id: answer, …}",
            )
        (record,) = undecided.values()
        return [(record, _decision(record, answers))]
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
    return [(record, _decision(record, answers[record.id])) for record in waiting if record.id in answers]


def _decision(record: InterruptRecord, given: Decision | str) -> Decision:
    if not isinstance(given, Decision | str):
        raise InvalidInput(
            f"an answer must be a decision, not {type(given).__name__}", hint="For example Approve(), or Answer(value)"
        )
    decision = interrupts.check_decision(given, None, None, "", None)
    interrupts.check_fit(record, decision)
    return decision


# Both -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _leased(setup: Setup, durable: DurableRun, plan: Plan) -> AsyncIterator[RunKeeper]:
    """Use the handle alone, under the lease of the thread, unless the caller holds the lease or does not want it.

    The run's record is kept along: ``plan`` says which run it is.
    """
    thread, takes_lease = setup.thread, setup.lease_s is not None
    assert thread is not None
    ttl = DEFAULT_LEASE_S if setup.lease_s is None else setup.lease_s
    options = check_lease_options(None, ttl, wait=setup.wait)
    keeper = RunKeeper(durable.cursor.branch, durable.now_us, plan)
    if isinstance(thread, AsyncThread):
        async with AsyncHandleUse(thread, setup.lease, options, keeper, takes_lease) as used:
            setup.keeper = durable.keeper = used.keeper
            yield used.keeper
    else:
        use = HandleUse(thread, setup.lease, options, keeper, takes_lease)
        with contextlib.ExitStack() as stack:
            # It is pushed first: Ctrl-C may come when the use has started. Leaving one that has not does nothing.
            stack.push(use)
            call_outside(use.__enter__, ())  # Ctrl-C ends the wait
            setup.keeper = durable.keeper = use.keeper
            yield use.keeper


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
    keeper = setup.keeper
    _end_as(keeper, ABANDONED)
    try:
        if setup.cancel is None:
            result = await runner.run(first)
        else:
            ended: Result | None = None
            async with setup.cancel.watching():
                ended = await runner.run(first)
            result = ended or runner.result(Status.CANCELLED, reason=setup.cancel.reason)
            if ended is None and _is_over(runner):
                result = runner.result(Status.COMPLETED)  # it was cancelled while its end was being stored
        status, error = result.status.value, "" if result.error is None else type(result.error).__name__
        _end_as(keeper, _outcome(result, _is_over(runner)))
        return result
    except BaseException as raised:
        error = type(raised).__name__
        is_stopped = isinstance(raised, asyncio.CancelledError)
        left = ABANDONED if is_stopped else RunOutcome(RunStatus.ABANDONED, error=error)
        store = runner.recorder.store
        _end_as(keeper, outcome_of_head(store.head) if _is_over(runner) and store and store.head else left)
        status = "cancelled" if isinstance(raised, asyncio.CancelledError) else status
        raise
    finally:
        recorder = runner.recorder
        head = None if recorder.store is None else recorder.store.head
        head_id = None if head is None else head.id
        setup.emit(events.RunEnded(status, recorder.options.run_id, recorder.steps, head_id, error or None))


def _end_as(keeper: RunKeeper | None, outcome: RunOutcome) -> None:
    if keeper is not None:  # a run without a thread has no record
        keeper.outcome = outcome


def _is_over(runner: Runner) -> bool:
    """Return whether the end of the run is stored. The thread's newest checkpoint may be of the run before it."""
    store, run_id = runner.recorder.store, runner.recorder.options.run_id
    head = None if store is None else store.head
    return head is not None and head.is_over and head.run_id == run_id


def _outcome(result: Result, is_over: bool) -> RunOutcome:
    """Return how this execution of the run ended, as its record says it."""
    waits = tuple(record.id for record in result.interrupts)
    wake_us = None if result.wake_at is None else to_microseconds(result.wake_at)
    match result.status:
        case Status.COMPLETED:
            return RunOutcome(RunStatus.COMPLETED)
        case Status.INTERRUPTED | Status.DEFERRED:
            return RunOutcome(RunStatus.INTERRUPTED, None, waits, wake_us)
        case Status.SLEEPING:
            return RunOutcome(RunStatus.SLEEPING, None, waits, wake_us)
        case Status.REJECTED:
            return RunOutcome(RunStatus.CANCELLED, reason=result.reason or "rejected")
        case Status.FAILED:
            error = result.error
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            return RunOutcome(
                RunStatus.FAILED, error=type(error.error if isinstance(error, NodeFailed) else error).__name__
            )
        case Status.CANCELLED:
            return RunOutcome(RunStatus.CANCELLED if is_over else RunStatus.ABANDONED, reason=result.reason)
