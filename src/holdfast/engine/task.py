"""Running one node: its function, its attempts, its time, and what it may return.

Plain functions run in the caller's own thread where nothing else waits for them, else in a thread of their own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.codec import encode
from holdfast.engine import event
from holdfast.engine.context import AsyncContext, BaseContext, Context
from holdfast.engine.desk import Desk
from holdfast.engine.node import Body, Node
from holdfast.engine.position import Activation, Job
from holdfast.engine.recorder import Recorder
from holdfast.engine.schema import sizes_of, undone
from holdfast.engine.signals import Ask
from holdfast.errors import (
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
from holdfast.model.decision import Decision

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

    async def run(self, activation: Activation, job: Job, answers: Mapping[str, Decision]) -> BaseContext:
        """Run a node until it succeeds or has no attempts left; its update is in the job then."""
        node = activation.graph.nodes[job.node]
        is_told = bool(answers)  # it was left at a question, and goes on for those who watch
        while True:
            job.tries = self.attempts.pop(job.position, job.tries)
            attempt = job.tries + 1
            context = self._context(node, job, answers, attempt)
            if not is_told:
                self.emit(event.NodeStarted(job.position, job.node, job.visit, job.key, attempt))
            is_told = False
            began = time.perf_counter()
            try:
                job.update = await self._once(activation, job, node, context)
            except (*_NOT_THE_NODES, Rejected) as error:
                if isinstance(error, EffectChanged):
                    raise await self._failed(node, job, attempt, error) from error
                raise
            except BadUpdate as error:
                self.emit(event.NodeFailed(job.position, job.node, attempt, type(error).__name__))
                raise
            except Exception as error:
                if not node.retry.wants(attempt, error):
                    raise await self._failed(node, job, attempt, error) from error
                await self._again(node, job, attempt, error)
            else:
                self.emit(event.NodeFinished(job.position, job.node, tuple(job.update), time.perf_counter() - began))
                return context
            finally:
                context._close()

    def _context(self, node: Node, job: Job, answers: Mapping[str, Decision], attempt: int) -> BaseContext:
        assert node.body is not None
        make = AsyncContext if node.body.is_async else Context
        return make(job, self.recorder.options, self.desk, self.emit, answers, attempt)

    async def _once(self, activation: Activation, job: Job, node: Node, context: BaseContext) -> Mapping[str, Any]:
        assert node.body is not None
        live = activation.live
        values = live.with_update("decision", job.given) if job.given else live.values
        view = live.schema.view(values)
        sizes = sizes_of(values)
        before = encode(dict(live.schema.stored(values)), "state") if activation.graph.strict else b""
        # Inside a fan-out a function in this thread would hold up the branches beside it.
        alone = self.blocking and "[" not in job.position
        arguments = (view, context) if node.body.wants_context else (view,)
        try:
            if node.timeout_s is None:
                returned = await _called(node.body, arguments, alone)
            else:
                async with asyncio.timeout(node.timeout_s):
                    returned = await _called(node.body, arguments, False)
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

    async def _failed(self, node: Node, job: Job, attempt: int, error: Exception) -> NodeFailed:
        self.emit(event.NodeFailed(job.position, job.node, attempt, type(error).__name__))
        if node.retry.attempts > 1:
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
