"""Run one node: call its function, retry it, fall back, or ask a person.

A plain function runs in the caller's thread if no event loop waits there (``driver.py``), otherwise in a worker thread
(``workers.py``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from backstay.codec import encode
from backstay.engine import events
from backstay.engine.context import AsyncContext, BaseContext, Context
from backstay.engine.control import Ask, Rerouted
from backstay.engine.driver import call_outside
from backstay.engine.durable import DurableRun, RunRecorder
from backstay.engine.nodes import Node, NodeFunction
from backstay.engine.position import Activation, Job
from backstay.engine.state import RunState, sizes_of, undo_growth
from backstay.errors import (
    BadUpdate,
    Conflict,
    Corrupted,
    EffectChanged,
    Fenced,
    NodeFailed,
    OutcomeUnknown,
    Rejected,
    StoreError,
    Unrecovered,
)
from backstay.model.category import Failure
from backstay.model.decision import Decision, DecisionKind, Interrupt, InterruptKind
from backstay.operations.question import Question
from backstay.operations.workers import call_in_thread
from backstay.retry.incident import Incident, is_incident
from backstay.thread.calls import CallPlace, current_place, set_place

POSITION = "position"
FIX = "Fix the cause, then call graph.resume(thread)"

_STORE_ERRORS = (Conflict, Fenced, OutcomeUnknown, StoreError, Corrupted)
"""Errors of the store and of other writers. They end the run as they are, in any node."""


def incidents(asked: Iterable[Interrupt]) -> dict[str, Mapping[str, Any]]:
    """Return the payloads of failed nodes among the interrupts that a run waits for, by position."""
    payloads = [interrupt.payload for interrupt in asked]
    return {payload[POSITION]: payload for payload in payloads if is_incident(payload) and POSITION in payload}


@dataclass(slots=True)
class TaskRunner:
    """Runs the nodes of a run."""

    recorder: RunRecorder
    durable: DurableRun | None
    emit: Callable[[events.Event], None]
    blocking: bool  # the caller has no event loop that waits
    attempts: dict[str, int]  # failed attempts since the checkpoint that the run resumed from
    chance: random.Random = field(default_factory=random.Random)
    incidents: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # payloads of the questions on failed nodes

    async def run(self, activation: Activation, job: Job, answers: Mapping[str, Decision]) -> None:
        """Run a node until it succeeds or no attempts are left. Afterwards the job has its update.

        If the run paused because this node failed, carry out the decision first.
        """
        node = activation.graph.nodes[job.node]
        is_resumed = bool(answers)  # it stopped at a question and now continues: observers saw it start
        if job.position in self.incidents:
            update = self._decided(job, answers)
            if update is not None:
                job.update = update
                return
            is_resumed = False
        started_at = self._now()
        body, node_error = node.body, None  # the fallback, once ``node_error`` is set
        while True:
            assert body is not None
            job.tries = self.attempts.pop(job.position, job.tries)
            attempt = job.tries + 1
            make = AsyncContext if body.is_async else Context
            context = make(job, self.recorder.options, self.durable, self.emit, answers, attempt, node_error)
            if not is_resumed:
                self.emit(events.NodeStarted(job.position, job.node, job.visit, job.key, attempt))
            is_resumed = False
            started = time.perf_counter()
            try:
                job.update = await self._once(activation, job, body, context)
            except Exception as error:
                if isinstance(error, BadUpdate) and error.path is None:  # not a value that the state refuses
                    self.emit(events.NodeAttemptFailed(job.position, job.node, attempt, type(error).__name__))
                    raise
                if isinstance(error, (*_STORE_ERRORS, Rejected)) and not isinstance(error, EffectChanged):
                    raise
                body, node_error = await self._after_failure(node, job, error, node_error, answers, started_at)
            else:
                took = time.perf_counter() - started
                job.notes = context._notes()
                self.emit(events.NodeFinished(job.position, job.node, tuple(job.update), took, dict(job.update)))
                return
            finally:
                context._close()

    async def _once(
        self, activation: Activation, job: Job, body: NodeFunction, context: BaseContext
    ) -> Mapping[str, Any]:
        """Call a function once, and return its update. The state must be unchanged afterwards, even on an error."""
        state = activation.state
        values = state.with_update("decision", job.given) if job.given else state.values
        view = state.schema.view(values)
        sizes = sizes_of(values)
        context._known_lists = partial(state.known_list, sizes)
        before = encode(dict(state.schema.stored(values)), "state") if activation.graph.strict else b""
        # In a fan-out, a function in this thread would block the other branches.
        alone = self.blocking and "[" not in job.position
        arguments = (view, context) if body.wants_context else (view,)
        node = activation.graph.nodes[job.node]
        place = current_place()
        set_place(CallPlace(context))
        try:
            if node.limiter is None or body is not node.body:  # a fallback has no limits
                returned = await _call(body, arguments, alone, node.timeout_s)
            else:
                async with node.limiter.turn():
                    returned = await _call(body, arguments, alone, node.timeout_s)
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            self.recorder.is_damaged |= undo_growth(values, sizes) is not None
            raise
        except BaseException as error:
            if (damaged := undo_growth(values, sizes)) is not None:
                self.recorder.is_damaged = True
                raise _in_place(job, damaged) from error
            if context._left is not None:  # the node turned the signal into another error, or a group
                raise context._left.again() from error
            raise
        finally:
            set_place(place)
        changed = state.schema.mutated(view, values, sizes)
        self.recorder.is_damaged |= undo_growth(values, sizes) is not None
        if before and encode(dict(state.schema.stored(values)), "state") != before:
            self.recorder.is_damaged = True
            changed = changed or "(a nested value)"
        if changed is not None:
            raise _in_place(job, changed)
        if context._left is not None:  # the node caught the signal and returned: its result does not count
            raise context._left.again()
        return self._checked(state, job, returned)

    def _checked(self, state: RunState, job: Job, returned: Any) -> Mapping[str, Any]:
        """Return what a node returned as an update that can be stored."""
        if not isinstance(returned, Mapping | None):
            raise BadUpdate(
                job.writer,
                None,
                f"returned {type(returned).__name__}, not a mapping of the keys to update",
                hint="Declare the node with async def, so that it is awaited"
                if isinstance(returned, Awaitable)
                else "Return {key: value}, or None",
            )
        if returned and self.recorder.sink is not None:
            # A value that cannot be stored is this node's failure, and is found before anything is committed.
            encode({key: value for key, value in returned.items() if state.schema.is_stored(key)}, "state")
        if state.schema.validator is not None:  # while the node's retries, fallback and on_failure still apply
            state.plan([(job.writer, job.given), (job.writer, returned or {})])
        return returned or {}

    async def _after_failure(
        self,
        node: Node,
        job: Job,
        error: Exception,
        node_error: Exception | None,
        answers: Mapping[str, Decision],
        started_at: datetime,
    ) -> tuple[NodeFunction | None, Exception | None]:
        """Return the function to call next: the node's own after a wait, or its fallback with the node's error.

        When no attempts are left, fail or ask a person. The question is an incident: the node, the attempts and the
        kind of error, but no values of the state. It is stored with the position, so the run waits there until a person
        decides, in this or another process.
        """
        attempt, kind = job.tries + 1, type(error).__name__
        if node_error is not None:
            _add_context(error, node_error)
        is_changed = isinstance(error, EffectChanged)
        wants = node_error is None and not is_changed and node.retry.wants(attempt, error)
        if wants or (node_error is None and not is_changed and node.fallback is not None):
            wait_s = node.retry.wait_s(attempt, self.chance) if wants else 0.0
            self.emit(events.NodeAttemptFailed(job.position, job.node, attempt, kind, True, wait_s))
            await self._count(job, attempt, kind, False)
            if not wants:
                return node.fallback, error
            await asyncio.sleep(wait_s)
            return node.body, None
        self.emit(events.NodeAttemptFailed(job.position, job.node, attempt, kind))
        if node.retry.retries or node.fallback is not None:
            await self._count(job, attempt, kind, True)
        if not node.pauses or self.durable is None or (is_changed and node_error is None):
            if isinstance(error, BadUpdate):
                raise error
            where = {} if self.durable is None else {"thread": self.durable.cursor.branch.thread}
            raise NodeFailed(job.writer, attempt, error, hint=FIX, **where) from error
        incident = Incident(
            operation=f"node {job.writer!r}",
            failure=Failure.of(error, node.retry.rules),
            attempts=attempt,
            began_at=started_at,
            failed_at=self._now(),
        )
        self.incidents[job.position] = {**incident.to_plain(), POSITION: job.position}
        self.recorder.mark_moved()  # the position is stored as waiting before the question, so it is asked only once
        self._decided(job, answers)
        raise AssertionError("unreachable: the question is new, so it has no answer")

    def _decided(self, job: Job, answers: Mapping[str, Decision]) -> Mapping[str, Any] | None:
        """Return the update that a person chose, or None to try the node again. Ask if there is no decision."""
        payload = self.incidents[job.position]
        incident = Incident.from_plain(payload)
        # The question is made from its stored payload only, so a new process asks the same question.
        question = Question(
            f"{self.recorder.options.line_name}:{job.position}:failed:{incident.failed_at.isoformat()}",
            InterruptKind.USER_REQUEST,
            job.node,
            payload,
            f"{incident.prompt} Approve: try it again. Modify: continue with this update. Reject: the run fails.",
        )
        decision = answers.get(question.position)
        if decision is None:
            raise Ask(question, of_state=True)
        del self.incidents[job.position]
        if decision.kind is DecisionKind.APPROVE:
            return None
        if decision.kind is DecisionKind.MODIFY:
            update: Mapping[str, Any] = decision.value
            return update
        if decision.kind is DecisionKind.REROUTE:
            assert decision.target is not None
            raise Rerouted(decision.target)
        self.recorder.mark_moved()  # so that the run is stored as failed, and no longer as waiting
        said = f"a person rejected it: {decision.reason}" if decision.reason else "a person rejected it"
        refused = Unrecovered(f"{incident.failure}, and {said}", hint=incident.failure.hint)
        raise NodeFailed(job.writer, incident.attempts, refused, hint=FIX)

    def _now(self) -> datetime:
        return datetime.now(UTC) if self.durable is None else self.durable.services.now()

    async def _count(self, job: Job, attempt: int, error: str, is_last: bool) -> None:
        job.tries = 0 if is_last else attempt
        if self.durable is None:
            return
        async with self.recorder.saving:  # otherwise a save under way would make another checkpoint the newest
            if self.recorder.is_current:
                await self.durable.record_attempt(self.recorder.head_id, job.position, attempt, error, is_last)


async def _call(body: NodeFunction, arguments: tuple[Any, ...], alone: bool, timeout_s: float | None) -> Any:
    if timeout_s is not None:
        async with asyncio.timeout(timeout_s):
            return await _call(body, arguments, False, None)
    if body.is_async:
        return await body.function(*arguments)
    if alone:
        return call_outside(body.function, arguments)
    return await call_in_thread(body.function, arguments)


def _add_context(error: BaseException, earlier: BaseException) -> None:
    """Append an earlier error to an error's context, as if the error had been raised while handling it."""
    chain = [error]
    while chain[-1].__context__ is not None and chain[-1].__context__ not in chain:
        chain.append(chain[-1].__context__)
    if earlier not in chain:
        chain[-1].__context__ = earlier


def _in_place(job: Job, key: str) -> BadUpdate:
    return BadUpdate(job.writer, key, "was changed in place: return the new value instead", hint="Return {key: value}")
