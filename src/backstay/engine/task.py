"""Running one node: its function, its attempts, its time, and what it may return.

Plain functions run in the caller's own thread where nothing else waits for them, else in a thread of their own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from backstay.codec import encode
from backstay.engine import event
from backstay.engine.context import AsyncContext, BaseContext, Context
from backstay.engine.desk import Desk
from backstay.engine.failed import incident_of, question_of, update_of
from backstay.engine.node import Body, Node
from backstay.engine.position import Activation, Job
from backstay.engine.recorder import Recorder
from backstay.engine.schema import sizes_of, undone
from backstay.engine.signals import Ask
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
)
from backstay.model.decision import Decision, DecisionKind
from backstay.recovery.failure import Failure

_NOT_THE_NODES = (Conflict, Fenced, OutcomeUnknown, StoreError, Corrupted)
"""Errors of the store and of other writers: they end the run as they are, whichever node met them."""


@dataclass(slots=True)
class Tasks:
    """Runs nodes for a run."""

    recorder: Recorder
    desk: Desk | None
    emit: Callable[[event.Event], None]
    blocking: bool  # the program has nothing to do meanwhile
    attempts: dict[str, int]  # how often jobs were tried after the checkpoint that the run was taken up from
    chance: random.Random = field(default_factory=random.Random)
    incidents: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # what is asked about failed jobs

    async def run(self, activation: Activation, job: Job, answers: Mapping[str, Decision]) -> BaseContext | None:
        """Run a node until it succeeds or has no attempts left; its update is in the job then.

        Of a node that has failed for good, and whose run paused for that, the decision is carried out first.
        """
        is_told = bool(answers)  # it was left at a question, and goes on for those who watch
        if job.position in self.incidents:
            update = self._decided(job, answers)
            if update is not None:
                job.update = update
                return None
            is_told = False
        return await self._attempts(activation, job, answers, is_told)

    async def _attempts(
        self, activation: Activation, job: Job, answers: Mapping[str, Decision], is_told: bool
    ) -> BaseContext | None:
        node = activation.graph.nodes[job.node]
        began_at = self._now()
        while True:
            job.tries = self.attempts.pop(job.position, job.tries)
            attempt = job.tries + 1
            context = self._context(node.body, job, answers, attempt)
            if not is_told:
                self.emit(event.NodeStarted(job.position, job.node, job.visit, job.key, attempt))
            is_told = False
            began = time.perf_counter()
            try:
                job.update = await self._once(activation, job, node.body, context)
            except (*_NOT_THE_NODES, Rejected) as error:
                if isinstance(error, EffectChanged):
                    raise await self._failed(node, job, attempt, error) from error
                raise
            except BadUpdate as error:
                self.emit(event.NodeFailed(job.position, job.node, attempt, type(error).__name__))
                raise
            except Exception as error:
                if not node.retry.wants(attempt, error):
                    return await self._give_up(activation, job, answers, attempt, error, began_at)
                await self._again(node, job, attempt, error)
            else:
                self.emit(event.NodeFinished(job.position, job.node, tuple(job.update), time.perf_counter() - began))
                return context
            finally:
                context._close()

    def _context(
        self,
        body: Body | None,
        job: Job,
        answers: Mapping[str, Decision],
        attempt: int,
        error: Exception | None = None,
    ) -> BaseContext:
        assert body is not None
        make = AsyncContext if body.is_async else Context
        return make(job, self.recorder.options, self.desk, self.emit, answers, attempt, error)

    async def _once(
        self, activation: Activation, job: Job, body: Body | None, context: BaseContext
    ) -> Mapping[str, Any]:
        assert body is not None
        live = activation.live
        values = live.with_update("decision", job.given) if job.given else live.values
        view = live.schema.view(values)
        sizes = sizes_of(values)
        before = encode(dict(live.schema.stored(values)), "state") if activation.graph.strict else b""
        # Inside a fan-out a function in this thread would hold up the branches beside it.
        alone = self.blocking and "[" not in job.position
        arguments = (view, context) if body.wants_context else (view,)
        timeout_s = activation.graph.nodes[job.node].timeout_s
        try:
            if timeout_s is None:
                returned = await _called(body, arguments, alone)
            else:
                async with asyncio.timeout(timeout_s):
                    returned = await _called(body, arguments, False)
        except (Exception, Ask) as error:  # it is run again, or the run ends: with the state as it was
            if (damaged := undone(values, sizes)) is not None:
                self.recorder.is_spoiled = True
                raise _in_place(job, damaged) from error
            raise
        changed = live.schema.mutated(view, values, sizes)
        self.recorder.is_spoiled |= undone(values, sizes) is not None
        if before and encode(dict(live.schema.stored(values)), "state") != before:
            self.recorder.is_spoiled = True
            changed = changed or "(something inside)"
        if changed is not None:
            raise _in_place(job, changed)
        return _checked(job, returned)

    async def _again(self, node: Node, job: Job, attempt: int, error: Exception) -> None:
        wait_s = node.retry.wait_s(attempt, self.chance)
        self.emit(event.NodeFailed(job.position, job.node, attempt, type(error).__name__, True, wait_s))
        await self._count(job, attempt, error, False)
        await asyncio.sleep(wait_s)

    # When there are no attempts left ------------------------------------------------------------------------------

    async def _give_up(
        self,
        activation: Activation,
        job: Job,
        answers: Mapping[str, Decision],
        attempt: int,
        error: Exception,
        began_at: datetime,
    ) -> BaseContext | None:
        """Call the node's fallback; without one, or if it fails too, ask a person, or fail."""
        node = activation.graph.nodes[job.node]
        if node.fallback is not None:
            try:
                return await self._fall_back(activation, job, answers, attempt, error)
            except Exception as second:
                ends = isinstance(second, (*_NOT_THE_NODES, Rejected, BadUpdate))
                if ends and not isinstance(second, EffectChanged):
                    raise
                attempt, error = attempt + 1, second
        failed = await self._failed(node, job, attempt, error)
        if not node.pauses or self.desk is None:
            raise failed from error
        failure = Failure.of(error, node.retry.rules)
        self.incidents[job.position] = incident_of(job, attempt, failure, began_at, self._now())
        self.recorder.moved()  # stored as waiting before the question is recorded, it cannot be asked twice
        self._decided(job, answers)
        raise AssertionError("unreachable: nobody can have decided yet")

    async def _fall_back(
        self, activation: Activation, job: Job, answers: Mapping[str, Decision], attempt: int, error: Exception
    ) -> BaseContext:
        """Run the fallback, as one attempt more."""
        self.emit(event.NodeFailed(job.position, job.node, attempt, type(error).__name__, True))
        await self._count(job, attempt, error, False)
        body = activation.graph.nodes[job.node].fallback
        context = self._context(body, job, answers, attempt + 1, error)
        self.emit(event.NodeStarted(job.position, job.node, job.visit, job.key, attempt + 1))
        began = time.perf_counter()
        try:
            job.update = await self._once(activation, job, body, context)
        except BadUpdate as bad:
            self.emit(event.NodeFailed(job.position, job.node, attempt + 1, type(bad).__name__))
            raise
        finally:
            context._close()
        self.emit(event.NodeFinished(job.position, job.node, tuple(job.update), time.perf_counter() - began))
        return context

    def _decided(self, job: Job, answers: Mapping[str, Decision]) -> Mapping[str, Any] | None:
        """Return the update that somebody decided on, None if the node is to be tried again; ask if nobody did."""
        payload = self.incidents[job.position]
        question = question_of(self.recorder.options.asks_as, job, payload)
        decision = answers.get(question.position)
        if decision is None:
            raise Ask(question, of_state=True)
        del self.incidents[job.position]
        if decision.kind is DecisionKind.REJECT:
            self.recorder.moved()  # so that the run is stored as failed, and no longer as waiting
        return update_of(job, payload, decision)

    def _now(self) -> datetime:
        return datetime.now(UTC) if self.desk is None else self.desk.context.now()

    async def _failed(self, node: Node, job: Job, attempt: int, error: Exception) -> NodeFailed:
        self.emit(event.NodeFailed(job.position, job.node, attempt, type(error).__name__))
        if node.retry.retries or node.fallback is not None:
            await self._count(job, attempt, error, True)
        where = {} if self.desk is None else {"thread": self.desk.cursor.lane.thread}
        return NodeFailed(job.writer, attempt, error, hint="Mend the cause, then graph.resume(thread)", **where)

    async def _count(self, job: Job, attempt: int, error: Exception, is_last: bool) -> None:
        job.tries = 0 if is_last else attempt
        if self.desk is None:
            return
        async with self.recorder.saving:  # else it might be written beside a checkpoint that is the newest no more
            if self.recorder.is_current:
                await self.desk.tried(self.recorder.head_id, job.position, attempt, type(error).__name__, is_last)


async def _called(body: Body, arguments: tuple[Any, ...], alone: bool) -> Any:
    if body.is_async:
        return await body.function(*arguments)
    if alone:
        return body.function(*arguments)
    return await asyncio.to_thread(_in_thread, body.function, arguments)


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except StopIteration as error:  # no future can hold one: whoever waits for the thread would wait for ever
        raise RuntimeError("the function raised StopIteration") from error


def _in_place(job: Job, key: str) -> BadUpdate:
    return BadUpdate(job.writer, key, "was changed in place: return the new value instead", hint="Return {key: value}")


def _checked(job: Job, returned: Any) -> Mapping[str, Any]:
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise BadUpdate(
            job.writer,
            None,
            f"returned {type(returned).__name__}, not a mapping of the keys to update",
            hint="Return {key: value}, or None",
        )
    return returned
