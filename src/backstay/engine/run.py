"""The run loop: execute, commit, route, checkpoint. Only this file decides the order.

A checkpoint holds its next node, so the node is chosen before the sink is called, from the committed state alone, and
starts only when the sink is done. If a person must answer a question after a node, the checkpoint comes first. The
nodes of a graph run one after the other, or in parallel where an edge says so; the nodes of a subgraph run inside their
node. A commit never awaits anything halfway, so every checkpoint is consistent. Failures of nodes and decisions of
people become a ``Result``; exceptions that leave this file come from the store or from another writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from backstay.engine import events
from backstay.engine.approvals import Approvals, check_state_answer, check_target
from backstay.engine.control import Ask, Cancellation, Paused, Rerouted, RunRejected, RunStopped
from backstay.engine.durable import DurableRun, RunRecorder
from backstay.engine.events import Feed, Result, Status
from backstay.engine.limits import Limiter
from backstay.engine.nodes import FAIL_FAST, ForEach, NodeKind, Parallel
from backstay.engine.position import (
    Activation,
    Job,
    commit,
    enter_subgraph,
    fan_edge,
    leave_subgraph,
    open_jobs,
    plan_commit,
    route,
)
from backstay.engine.task import FIX, TaskRunner
from backstay.engine.triggers import Cause
from backstay.errors import (
    BackstayError,
    BadUpdate,
    EncodeError,
    MergeConflict,
    NodeFailed,
    Rejected,
    StepsExceeded,
)
from backstay.model.decision import Decision, Interrupt
from backstay.model.frame import End, FanOut, NextNode
from backstay.operations.drivers import finish
from backstay.operations.question import close_ended
from backstay.thread.access import saved_by

_NODE_ERRORS = (NodeFailed, BadUpdate, MergeConflict, StepsExceeded)
"""Errors that end a run as failed."""


class Runner:
    """Runs one run from its position to its end or its next pause."""

    def __init__(
        self,
        recorder: RunRecorder,
        durable: DurableRun | None,
        tasks: TaskRunner,
        finished: Mapping[str, Mapping[str, Any]],
        emit: Callable[[events.Event], None],
        cancel: Cancellation | None = None,
    ) -> None:
        self.recorder = recorder
        self.durable = durable
        self.tasks = tasks
        self.approvals = Approvals(recorder, durable)
        self.emit = emit
        self._feed = emit if isinstance(emit, Feed) else None
        self._inside: dict[str, str] = {}  # the names of the nodes around a subgraph, by the prefix of its positions
        self._cancel = cancel
        self._finished = dict(finished)  # updates of jobs that finished after the checkpoint was saved

    async def run(self, first: Cause | None) -> Result:
        """Run to the end or to the next pause. ``first`` is the cause of a checkpoint to save before anything runs."""
        recorder, root = self.recorder, self.recorder.root
        has_asked = False  # whether the nodes that wait were run again, and asked their questions again
        try:
            if first is not None:
                recorder.mark_moved()
                await recorder.notify(root, root.here, first)
            self._show(root)
            await self.approvals.obey_pause(root)
            has_asked = True
            await self._run_graph(root)
        except Paused as pause:
            await self._flush("interrupt", pause.records[0].interrupt if pause.records else None)
            if has_asked:
                await self.approvals.close_others(record.id for record in pause.records)
            return self.result(pause.status, interrupts=tuple(pause.records))
        except RunRejected as rejection:
            await self._end_for_good(rejection.node, "rejected")
            return self.result(Status.REJECTED, reason=rejection.reason)
        except RunStopped as stop:
            await self._end_for_good(root.here, "cancelled")
            return self.result(Status.CANCELLED, reason=stop.reason)
        except _NODE_ERRORS as error:
            return await self._failed(error)
        except BaseExceptionGroup as group:
            failures, others = group.split(_NODE_ERRORS)
            if failures is None or others is not None or not isinstance(failures, Exception):
                raise
            return await self._failed(failures)
        except asyncio.CancelledError as cancelled:
            await self._cancelled(cancelled)
        return self.result(Status.COMPLETED)

    async def _end_for_good(self, node: str, cause: Cause) -> None:
        """Store that the run is over although its nodes are not, and close its questions."""
        root, recorder = self.recorder.root, self.recorder
        root.todo, root.jobs, recorder.waits = End(), [], []
        recorder.mark_moved()
        await recorder.notify(root, node, cause)
        if self.durable is not None:
            await self.durable.run(close_ended, self.durable.services, self.durable.cursor)

    async def _cancelled(self, cancelled: asyncio.CancelledError) -> NoReturn:
        """Store how far the run came, and raise the cancellation. If that cannot be stored, the error is its cause."""
        try:
            await self._flush("end" if isinstance(self.recorder.root.todo, End) else "cancelled")
        except Exception as error:
            raise cancelled from error
        raise cancelled

    def result(self, status: Status, **rest: Any) -> Result:
        """Return the result of the run as it is now."""
        root, store = self.recorder.root, self.recorder.store
        return Result(
            status=status,
            run_id=self.recorder.options.run_id,
            state=root.state.schema.view(root.state.values),
            values=dict(root.state.values),
            path=tuple(root.path),
            steps=self.recorder.steps,
            checkpoint=None if store is None or store.head is None else saved_by(store.thread, store.head),
            **rest,
        )

    async def _failed(self, error: Exception) -> Result:
        """Store that the run failed, where, and with which kind of error. A killed run has no such checkpoint."""
        kinds = []
        for each in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
            match each:
                case NodeFailed():
                    kinds.append(f"node {each.node!r} raised {type(each.error).__name__}")
                case BadUpdate():
                    kinds.append(f"node {each.node!r}: {each.summary}")
                case BackstayError():
                    kinds.append(each.summary)
        self.recorder.hint = f"{'; '.join(kinds)}. {FIX}"
        self.recorder.mark_moved()
        await self._flush("failed")
        return self.result(Status.FAILED, error=error)

    def _show(self, activation: Activation, updates: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> None:
        """Give the updates that were just committed, or the new state of the outermost graph, to a stream."""
        if self._feed is None or self._feed.mode == "events":
            return
        if self._feed.mode == "updates":
            for writer, update in updates:
                self._feed.add({self._inside.get(activation.prefix, "") + writer: dict(update)})
        elif activation is self.recorder.root:
            self._feed.add(activation.state.schema.view(activation.state.values))

    async def _flush(self, cause: Cause, interrupt: Interrupt | None = None) -> None:
        """Store the commits since the last checkpoint, which the trigger had skipped."""
        if self.recorder.sink is None or self.recorder.is_current or self.recorder.store is None:
            return
        if self.recorder.is_damaged:  # a node changed the state in place: only the stored state can be trusted
            return
        root = self.recorder.root
        await self.recorder.notify(root, root.here, cause, interrupt=interrupt)

    # One graph ------------------------------------------------------------------------------------------------------

    async def _run_graph(self, activation: Activation) -> None:
        """Run a graph to its end."""
        while True:
            if activation.todo is None and activation.last is not None:
                await self._route(activation)
            if isinstance(activation.todo, End):
                return
            if self._cancel is not None:
                self._cancel.check()
            task = asyncio.current_task()
            assert task is not None
            if not self.tasks.blocking or task.cancelling():
                await asyncio.sleep(0)  # let other tasks run between two nodes, or be cancelled
            own = self.recorder.options.limit if activation is self.recorder.root else None
            limit = own or activation.graph.limit
            if activation.cursor >= limit:
                raise StepsExceeded(
                    f"graph {activation.graph.name!r} ran {activation.cursor} nodes and is not done; "
                    f"its limit is {limit}",
                    limit=limit,
                    hint="All steps are stored. Raise the limit and resume, or look for an endless loop",
                )
            open_jobs(activation)
            try:
                if isinstance(activation.todo, FanOut):
                    await self._parallel(activation)
                else:
                    await self._job(activation, activation.jobs[0])
            except Rerouted as reroute:
                alone = activation.jobs[0]
                activation.visits[alone.node] = alone.visit  # it was entered, so the next visit asks and acts again
                await self._reroute(activation, reroute.target)
                continue
            await self._commit(activation)

    async def _route(self, activation: Activation) -> None:
        """Find the next node after the last one, once the question after it is answered."""
        node = activation.last
        assert node is not None
        if not activation.passed:
            visit = activation.visits.get(node, 1)
            question = self.approvals.after(activation, node, visit)
            if question is not None:
                try:
                    given = await self.approvals.ask_after(activation, node, question)
                except Rerouted as reroute:
                    await self._reroute(activation, reroute.target)
                    return
                activation.state.apply(activation.state.plan([("decision", given)]))
                activation.passed = True
                if given:
                    self._show(activation, [(node, given)])
        activation.todo = route(activation.graph, node, activation.state)
        activation.passed = False
        self.recorder.mark_moved(activation)
        if isinstance(activation.todo, End) and activation is self.recorder.root:
            await self.recorder.notify(activation, node, "end")

    async def _reroute(self, activation: Activation, target: str) -> None:
        activation.todo, activation.jobs, activation.passed = NextNode(target), [], False
        self.recorder.mark_moved()
        await self.recorder.notify(activation, activation.here, "manual", requested=True)

    async def _commit(self, activation: Activation) -> None:
        """Commit the results, then store the position."""
        recorder = self.recorder
        jobs, nodes = activation.jobs, [job.node for job in activation.jobs]
        notes, positions = [job.notes for job in jobs], {job.position for job in jobs}
        try:
            plan = plan_commit(activation)
        except (BadUpdate, MergeConflict) as error:
            # The jobs run again when the run resumes, because after a fix they return another update.
            writers = error.writers if isinstance(error, MergeConflict) else (error.node,)
            for job in activation.jobs:
                if job.writer in writers:
                    job.done, job.looked, job.update, job.edited, job.path, job.notes = False, False, {}, {}, [], {}
            recorder.mark_moved()
            raise
        mutated = commit(activation, plan)
        recorder.steps += 1
        for each in notes:
            recorder.tokens += each.get("tokens", 0)
            recorder.cost += each.get("cost", 0.0)
            recorder.options.receive(each.get("received", {}), positions)
        requested = any(each.get("checkpoint") for each in notes)
        recorder.mark_moved(activation)
        self._show(activation, [update for job in jobs for update in job.updates()])
        if activation is recorder.root:
            await self.approvals.close_others()
        at_barrier = any(activation.graph.nodes[node].kind is NodeKind.BARRIER for node in nodes)
        await self._boundary(activation, nodes[-1] if nodes else activation.here, mutated, requested, at_barrier)

    async def _boundary(
        self, activation: Activation, node: str, mutated: bool, requested: bool, at_barrier: bool
    ) -> None:
        """Find the next node, and store the position with the question that guards it."""
        failure: Exception | None = None
        interrupt = question = None
        if activation.todo is None:
            question = self.approvals.after(activation, node, activation.visits[node])
            if question is None:
                try:
                    activation.todo = route(activation.graph, node, activation.state)
                except _NODE_ERRORS as error:  # the node is done nevertheless, and is stored as done
                    failure = error
        if isinstance(activation.todo, NextNode):
            activation.jobs = [activation.job(activation.todo.node)]
            question = self.approvals.before(activation, activation.jobs[0])
        if question is not None:
            interrupt = self.approvals.interrupt_of(question)
            if interrupt.id not in self.recorder.waits:
                self.recorder.waits.append(interrupt.id)
        is_end = isinstance(activation.todo, End) and activation is self.recorder.root
        cause: Cause = "interrupt" if interrupt else "end" if is_end else "barrier" if at_barrier else "node"
        try:
            await self.recorder.notify(
                activation,
                node,
                cause,
                mutated=mutated,
                requested=requested,
                at_barrier=at_barrier,
                interrupt=interrupt,
            )
        except EncodeError as error:  # what a reducer or snapshot() made of the updates cannot be stored
            self.recorder.is_damaged = True
            raise NodeFailed(node, 1, error, hint=FIX) from error
        if failure is not None:
            raise failure
        if not is_end:
            await self.approvals.obey_pause(activation)

    # One node -------------------------------------------------------------------------------------------------------

    async def _job(self, activation: Activation, job: Job) -> None:
        """Ask the question before a job, then run its node. Afterwards the job has the update."""
        stored = None if job.done else self._finished.pop(job.position, None)
        if stored is not None:
            job.update, job.path, job.done = stored["update"], list(stored["path"]), True
            job.given, job.notes, job.inner = stored["given"], stored["notes"], None
        if job.done:
            self.recorder.options.receivers |= dict.fromkeys(job.notes.get("received", ()), job.position)
            return
        question = self.approvals.before(activation, job)
        if question is not None:
            await self.approvals.ask_before(activation, job, question)
        if self._feed is not None:
            await self._feed.room()
        kind = activation.graph.nodes[job.node].kind
        if kind is NodeKind.SUBGRAPH:
            await self._subgraph(activation, job)
        answers: dict[str, Decision] = {}
        while kind is NodeKind.TASK:  # start the node again whenever it got an answer
            try:
                await self.tasks.run(activation, job, answers)
                break
            except Ask as signal:
                check = check_state_answer if signal.of_state else check_target
                answers[signal.question.position] = await self.approvals.ask(activation, signal.question, check)
            except Rejected as refusal:
                raise RunRejected(job.node, refusal.reason) from refusal
        job.done = True

    async def _subgraph(self, activation: Activation, job: Job) -> None:
        self.emit(events.NodeStarted(job.position, job.node, job.visit, job.key))
        if job.inner is None:
            job.inner = enter_subgraph(activation, job)
        inner = job.inner
        self._inside[inner.prefix] = f"{self._inside.get(activation.prefix, '')}{job.writer}/"
        try:
            async with asyncio.timeout(activation.graph.nodes[job.node].timeout_s):
                await self._run_graph(inner)
        except TimeoutError as error:
            raise NodeFailed(job.writer, 1, error) from error
        del self._inside[inner.prefix]
        job.update = leave_subgraph(activation, job, inner)
        job.path = [f"{job.writer}/{each}" for each in inner.path]
        job.inner = None
        self.emit(events.NodeFinished(job.position, job.node, tuple(job.update), update=dict(job.update)))

    # Several nodes --------------------------------------------------------------------------------------------------

    async def _parallel(self, activation: Activation) -> None:
        """Run jobs in parallel. A waiting job does not block the others, and each finished job is stored at once."""
        pauses: list[Paused] = []
        failures: list[Exception] = []
        assert isinstance(activation.todo, FanOut)
        fan = fan_edge(activation, activation.todo).target
        assert isinstance(fan, Parallel | ForEach)
        limiter, fails_fast = Limiter(fan.at_once), fan.on_error == FAIL_FAST

        async def one(job: Job) -> None:
            try:
                async with limiter.turn():
                    await self._branch(activation, job)
            except Paused as pause:
                pauses.append(pause)
            except _NODE_ERRORS as error:
                if fails_fast:
                    raise
                failures.append(error)

        try:
            async with asyncio.TaskGroup() as group:
                for job in activation.jobs:
                    group.create_task(one(job))
        except BaseExceptionGroup as errors:
            error = _decisive_error(errors)
            raise error from error.__cause__  # without the group, which says nothing more
        if failures:
            raise failures[0] if len(failures) == 1 else ExceptionGroup("several branches failed", failures)
        if pauses:
            records = {record.id: record for pause in pauses for record in pause.records}
            raise Paused([*records.values()], deferred=all(pause.deferred for pause in pauses))

    async def _branch(self, activation: Activation, job: Job) -> None:
        """Run one of several parallel jobs; a reroute replaces its node."""

        async def store_finished(durable: DurableRun) -> None:
            async with self.recorder.saving:  # a save under way does not have this job yet
                if self.recorder.is_current_for(activation, job):
                    stored = {
                        "update": dict(job.update),
                        "given": dict(job.given),
                        "path": job.path,
                        "notes": job.notes,
                        "totals": self.recorder.totals_stored,  # it replaces a write that had them
                    }
                    await durable.record_update(self.recorder.head_id, job.position, stored)

        while True:
            try:
                was_done = job.done
                await self._job(activation, job)
                if not was_done and self.durable is not None:
                    await finish(store_finished(self.durable))  # stored even if another branch fails
                if not job.looked:
                    question = self.approvals.after(activation, job.node, job.visit, job.key)
                    if question is not None:
                        job.edited = await self.approvals.ask_after(activation, job.node, question)
                        job.looked = True
                return
            except Rerouted as reroute:
                job.left = {**job.left, job.node: job.visit}
                fresh = activation.job(reroute.target, job.key, job.item, job.left.get(reroute.target, 0))
                job.node, job.visit, job.position = fresh.node, fresh.visit, fresh.position
                job.passed, job.given, job.inner, job.done, job.update, job.edited = False, {}, None, False, {}, {}
                job.path, job.notes = [], {}
                self.recorder.mark_moved()
                await self.recorder.notify(activation, job.node, "manual", requested=True)


def _decisive_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended parallel jobs: a rejection comes before a failure, a failure before a reroute."""
    for kind in (RunRejected, Exception, BaseException):
        found: BaseException | None = group.subgroup(kind)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is not None:
            return found
    return group
