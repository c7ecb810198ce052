"""The run loop: execute, commit, checkpoint, route. This is the only order, and the only place where it is decided.

The way on is worked out from the committed state alone and stored with it; it is taken when that is stored.

A graph's nodes run one after the other, or side by side where an edge says so; a subgraph's run inside their node's. A
commit waits for nothing in its middle, so whatever a checkpoint holds was consistent. What leaves this file as an
exception is the store's or another writer's business; what becomes of nodes and people is a ``Result``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from backstay.engine import event
from backstay.engine.cancellation import Cancellation
from backstay.engine.context import BaseContext
from backstay.engine.desk import Desk
from backstay.engine.gate import Gate, check_state_answer, check_target
from backstay.engine.moment import Cause
from backstay.engine.node import NodeKind
from backstay.engine.position import Activation, Job
from backstay.engine.projection import enter, leave
from backstay.engine.recorder import Recorder
from backstay.engine.result import Result, Status
from backstay.engine.schedule import commit, fails_fast, open_jobs, plan_commit, route
from backstay.engine.signals import Ask, Paused, Rerouted, TurnedDown
from backstay.engine.task import Tasks
from backstay.errors import BadUpdate, MergeConflict, NodeFailed, Rejected, StepsExceeded
from backstay.model.continuation import End, FanOut, NextNode
from backstay.model.decision import Decision
from backstay.model.interrupt import Interrupt

_THE_NODES = (NodeFailed, BadUpdate, MergeConflict, StepsExceeded)
"""Errors that end a run as failed."""


class Runner:
    """One run, from where it stands to where it ends or waits."""

    def __init__(
        self,
        recorder: Recorder,
        desk: Desk | None,
        tasks: Tasks,
        finished: Mapping[str, Mapping[str, Any]],
        emit: Callable[[event.Event], None],
        cancel: Cancellation | None = None,
    ) -> None:
        self.recorder = recorder
        self.desk = desk
        self.tasks = tasks
        self.gate = Gate(recorder, desk)
        self.emit = emit
        self._cancel = cancel
        self._finished = dict(finished)  # what jobs returned that finished after the checkpoint was saved

    async def go(self, begins: Cause | None) -> Result:
        """Run to the end or to the next pause. ``begins`` says why a checkpoint is due before anything runs."""
        root = self.recorder.root
        try:
            if begins is not None:
                self.recorder.moved()
                await self.recorder.tell(root, root.here, begins)
            await self.gate.obey(root)
            await self._run(root)
        except Paused as pause:
            status = Status.DEFERRED if pause.deferred else Status.INTERRUPTED
            await self._flush("interrupt", pause.records[0].interrupt if pause.records else None)
            return self.result(status, interrupts=tuple(pause.records))
        except TurnedDown as refusal:
            return await self._turned_down(refusal)
        except _THE_NODES as error:
            await self._flush("failed")
            return self.result(Status.FAILED, error=error)
        except BaseExceptionGroup as group:
            failures, others = group.split(_THE_NODES)
            if failures is None or others is not None:
                raise
            await self._flush("failed")
            return self.result(Status.FAILED, error=failures if isinstance(failures, Exception) else None)
        except asyncio.CancelledError:
            await self._flush("cancelled")
            raise
        return self.result(Status.COMPLETED)

    def result(self, status: Status, **rest: Any) -> Result:
        """Return how the run stands."""
        root, store = self.recorder.root, self.recorder.store
        return Result(
            status=status,
            run_id=self.recorder.options.run_id,
            state=root.live.schema.view(root.live.values),
            values=dict(root.live.values),
            path=tuple(root.path),
            steps=self.recorder.steps,
            checkpoint=None if store is None else store.head,
            **rest,
        )

    async def _turned_down(self, refusal: TurnedDown) -> Result:
        root = self.recorder.root
        root.todo, root.jobs = End(), []
        self.recorder.waits = []
        self.recorder.moved()
        await self.recorder.tell(root, refusal.node, "rejected")
        return self.result(Status.REJECTED, reason=refusal.reason)

    async def _flush(self, cause: Cause, interrupt: Interrupt | None = None) -> None:
        """Store what was committed since the last checkpoint, if the trigger had not wanted it."""
        if self.recorder.sink is None or self.recorder.is_current or self.recorder.store is None:
            return
        if self.recorder.is_spoiled:  # a node changed the state behind our back: what is stored is better
            return
        root = self.recorder.root
        telling = self.recorder.tell(root, root.here, cause, interrupt=interrupt)
        await asyncio.shield(asyncio.ensure_future(telling))

    # One graph ----------------------------------------------------------------------------------------------------

    async def _run(self, activation: Activation) -> None:
        """Run a graph to its end."""
        while True:
            if activation.todo is None and activation.last is not None:
                await self._route(activation)
            if isinstance(activation.todo, End):
                return
            await self._breathe()
            self._check_limit(activation)
            open_jobs(activation)
            try:
                if isinstance(activation.todo, FanOut):
                    contexts = await self._side_by_side(activation)
                else:
                    contexts = [await self._job(activation, activation.jobs[0])]
            except Rerouted as reroute:
                alone = activation.jobs[0]
                activation.visits[alone.node] = alone.visit  # it was entered: the next visit asks and acts anew
                await self._reroute(activation, reroute.target)
                continue
            await self._commit(activation, [each for each in contexts if each is not None])

    async def _breathe(self) -> None:
        """Let others run between two nodes, and end if somebody cancelled the run."""
        if self._cancel is not None:
            self._cancel.check()
        if not self.tasks.blocking:
            await asyncio.sleep(0)

    def _check_limit(self, activation: Activation) -> None:
        own = self.recorder.options.limit if activation is self.recorder.root else None
        limit = own or activation.graph.limit
        if activation.cursor >= limit:
            raise StepsExceeded(
                f"graph {activation.graph.name!r} ran {activation.cursor} nodes and is not done; its limit is {limit}",
                limit=limit,
                hint="Everything up to here is stored. Raise the limit and resume, or look for a loop without an end",
            )

    async def _route(self, activation: Activation) -> None:
        """Decide where to go after the last node, once what is to be asked after it is answered."""
        node = activation.last
        assert node is not None
        if not activation.passed:
            visit = activation.visits.get(node, 1)
            question = self.gate.after(activation, node, visit, activation.position(node, visit, None))
            if question is not None:
                try:
                    given = await self.gate.pass_after(activation, node, question)
                except Rerouted as reroute:
                    await self._reroute(activation, reroute.target)
                    return
                activation.live.apply(activation.live.plan([("decision", given)]))
                activation.passed = True
        activation.todo = route(activation.graph, node, activation.live)
        activation.passed = False
        self.recorder.moved()
        if isinstance(activation.todo, End) and activation is self.recorder.root:
            await self.recorder.tell(activation, node, "end")

    async def _reroute(self, activation: Activation, target: str) -> None:
        activation.todo, activation.jobs, activation.passed = NextNode(target), [], False
        self.recorder.moved()
        await self.recorder.tell(activation, activation.here, "manual", requested=True)

    async def _commit(self, activation: Activation, contexts: list[BaseContext]) -> None:
        """Take results in, store the position, and look where to go."""
        nodes = [job.node for job in activation.jobs]
        try:
            plan = plan_commit(activation)
        except (BadUpdate, MergeConflict) as error:
            self._reopen(activation, error.writers if isinstance(error, MergeConflict) else (error.node,))
            raise
        mutated = commit(activation, plan)
        self.recorder.steps += 1
        for context in contexts:
            tokens, cost = context._usage
            self.recorder.tokens += tokens
            self.recorder.cost += cost
        self.recorder.moved()
        requested = any(context._wants_checkpoint for context in contexts)
        at_barrier = any(activation.graph.nodes[node].kind is NodeKind.BARRIER for node in nodes)
        await self._boundary(activation, nodes[-1] if nodes else activation.here, mutated, requested, at_barrier)

    def _reopen(self, activation: Activation, writers: Sequence[str]) -> None:
        """Run jobs again when the run goes on: once they are mended they return something else."""
        for job in activation.jobs:
            if job.writer in writers:
                job.done, job.looked, job.update, job.edited, job.path = False, False, {}, {}, []
        self.recorder.moved()

    async def _boundary(
        self, activation: Activation, node: str, mutated: bool, requested: bool, at_barrier: bool
    ) -> None:
        failure: Exception | None = None
        interrupt = None
        question = None
        if activation.todo is None:
            visit = activation.visits[node]
            question = self.gate.after(activation, node, visit, activation.position(node, visit, None))
            if question is None:
                try:
                    activation.todo = route(activation.graph, node, activation.live)
                except _THE_NODES as error:  # the node is done all the same, and is stored as done
                    failure = error
        if isinstance(activation.todo, NextNode):
            question = self.gate.before(activation, activation.job(activation.todo.node))
        if question is not None:
            interrupt = self.gate.interrupt_of(question)
            if interrupt.id not in self.recorder.waits:
                self.recorder.waits.append(interrupt.id)
        is_end = isinstance(activation.todo, End) and activation is self.recorder.root
        cause: Cause = "interrupt" if interrupt else "end" if is_end else "barrier" if at_barrier else "node"
        await self.recorder.tell(
            activation,
            node,
            cause,
            mutated=mutated,
            requested=requested,
            at_barrier=at_barrier,
            interrupt=interrupt,
        )
        if failure is not None:
            raise failure
        if not is_end:
            await self.gate.obey(activation)

    # One node -----------------------------------------------------------------------------------------------------

    async def _job(self, activation: Activation, job: Job) -> BaseContext | None:
        """Do a job: what is asked before it, its node, and what it returned is in the job then."""
        if job.done:
            return None
        self._take_finished(job)
        if job.done:
            return None
        question = self.gate.before(activation, job)
        if question is not None:
            await self.gate.pass_before(activation, job, question)
        node = activation.graph.nodes[job.node]
        context = None
        if node.kind is NodeKind.SUBGRAPH:
            await self._subgraph(activation, job)
        elif node.kind is NodeKind.TASK:
            context = await self._task(activation, job)
        job.done = True
        return context

    def _take_finished(self, job: Job) -> None:
        found = self._finished.pop(job.position, None)
        if found is not None:
            job.update, job.path, job.done = found["update"], list(found["path"]), True
            job.given, job.inner = found["given"], None

    async def _task(self, activation: Activation, job: Job) -> BaseContext | None:
        """Run a node's function, again from its beginning whenever it got an answer to what it asked."""
        answers: dict[str, Decision] = {}
        while True:
            try:
                return await self.tasks.run(activation, job, answers)
            except Ask as signal:
                check = check_state_answer if signal.of_state else check_target
                answers[signal.question.position] = await self.gate.ask(
                    activation, signal.question, functools.partial(check, activation)
                )
            except Rejected as refusal:
                raise TurnedDown(job.node, refusal.reason) from refusal

    async def _subgraph(self, activation: Activation, job: Job) -> None:
        node = activation.graph.nodes[job.node]
        self.emit(event.NodeStarted(job.position, job.node, job.visit, job.key))
        if job.inner is None:
            job.inner = enter(activation, job)
        inner = job.inner
        try:
            async with asyncio.timeout(node.timeout_s):
                await self._run(inner)
        except TimeoutError as error:
            raise NodeFailed(job.writer, 1, error) from error
        job.update = leave(activation, job, inner)
        job.path = [f"{job.writer}/{each}" for each in inner.path]
        job.inner = None
        self.emit(event.NodeFinished(job.position, job.node, tuple(job.update)))

    # Several nodes ------------------------------------------------------------------------------------------------

    async def _side_by_side(self, activation: Activation) -> list[BaseContext | None]:
        """Do jobs side by side. Who must wait does not hold up the others; what has finished is kept at once."""
        pauses: list[Paused] = []
        failures: list[Exception] = []
        fast = fails_fast(activation)

        async def one(job: Job) -> BaseContext | None:
            try:
                return await self._branch(activation, job)
            except Paused as pause:
                pauses.append(pause)
            except _THE_NODES as error:
                if fast:
                    raise
                failures.append(error)
            return None

        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(job)) for job in activation.jobs]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        if failures:
            raise failures[0] if len(failures) == 1 else ExceptionGroup("several branches failed", failures)
        if pauses:
            records = {record.id: record for pause in pauses for record in pause.records}
            raise Paused([*records.values()], deferred=all(pause.deferred for pause in pauses))
        return [task.result() for task in running]

    async def _branch(self, activation: Activation, job: Job) -> BaseContext | None:
        """Do one of several jobs; a reroute replaces its node."""
        while True:
            try:
                was_done = job.done
                context = await self._job(activation, job)
                if not was_done and self.desk is not None:
                    await _to_its_end(self._keep(self.desk, job))
                await self._look(activation, job)
                return context
            except Rerouted as reroute:
                job.left = {**job.left, job.node: job.visit}
                fresh = activation.job(reroute.target, job.key, job.item, job.left.get(reroute.target, 0))
                job.node, job.visit, job.position = fresh.node, fresh.visit, fresh.position
                job.passed, job.given, job.inner, job.done, job.update, job.edited = False, {}, None, False, {}, {}
                job.path = []
                self.recorder.moved()
                await self.recorder.tell(activation, job.node, "manual", requested=True)

    async def _look(self, activation: Activation, job: Job) -> None:
        """Ask what is to be asked after a finished job, once."""
        question = None if job.looked else self.gate.after(activation, job.node, job.visit, job.position)
        if question is not None:
            given = await self.gate.pass_after(activation, job.node, question)
            job.edited = given
            job.looked = True

    async def _keep(self, desk: Desk, job: Job) -> None:
        async with self.recorder.saving:  # what is just being saved does not have it yet
            if self.recorder.is_current:
                kept = {"update": dict(job.update), "given": dict(job.given), "path": job.path}
                await desk.keep(self.recorder.head_id, job.position, kept)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that a cancelled caller must not leave undone: what a branch has finished is kept, whoever fails."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:  # once or more often: it leaves when the work is done
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended jobs side by side; a refusal counts before a failure, that before a reroute."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            flat.append(error)
    for kind in (TurnedDown, Exception, BaseException):
        for error in flat:
            if isinstance(error, kind):
                return error
    return group
