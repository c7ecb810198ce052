"""Pauses: what is asked before, after and inside nodes, and what each answer does.

Nothing that is guarded runs before its question is answered with a yes. A question belongs to one visit of one node in
one run, so an answer opens exactly one gate, once. While it waits, the whole position is stored, and the question too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from backstay.engine import event
from backstay.engine.desk import Desk
from backstay.engine.node import Node
from backstay.engine.position import Activation, Job
from backstay.engine.recorder import Recorder
from backstay.engine.signals import Paused, Rerouted, TurnedDown
from backstay.errors import BadUpdate, InvalidInput
from backstay.model.decision import Decision, DecisionKind
from backstay.model.interrupt import Interrupt, InterruptKind
from backstay.thread.interrupts import InterruptRecord, is_pause
from backstay.thread.question import Question

ROUNDS_LOOKED_AT = 20
"""How often a question can have been deferred and still be taken off the list of what is waited for by its answer."""


class Gate:
    """Asks a run's questions."""

    def __init__(self, recorder: Recorder, desk: Desk | None) -> None:
        self._recorder = recorder
        self._desk = desk

    # What guards a node -------------------------------------------------------------------------------------------

    def before(self, activation: Activation, job: Job) -> Question | None:
        """Return what must be asked before a job, or None."""
        if job.passed or job.done or job.node in self._recorder.options.grants:
            return None
        node = activation.graph.nodes[job.node]
        if node.wait is not None:
            return self._barrier(activation, job, node)
        named = activation.graph.before | self._recorder.options.before
        if not (job.node in named or "*" in named):
            return None
        payload = {"graph": activation.graph.name, "node": job.node, "visit": job.visit}
        return self._question(
            f"{job.position}:before", InterruptKind.BEFORE_NODE, job.node, payload, f"Run {job.node}?"
        )

    def after(self, activation: Activation, node: str, visit: int, position: str) -> Question | None:
        """Return what must be asked after a node, or None."""
        named = activation.graph.after | self._recorder.options.after
        if not (node in named or "*" in named):
            return None
        payload = {"graph": activation.graph.name, "node": node, "visit": visit}
        return self._question(f"{position}:after", InterruptKind.AFTER_NODE, node, payload, f"Go on after {node}?")

    def _barrier(self, activation: Activation, job: Job, node: Node) -> Question:
        wait = node.wait
        assert wait is not None
        payload: Any = {"graph": activation.graph.name, "node": job.node, "visit": job.visit}
        if wait.payload is not None:
            try:
                payload = wait.payload(activation.live.schema.view(activation.live.values))
            except Exception as error:
                raise BadUpdate(job.node, None, f"could not say what it asks: {error!r:.200}") from error
        asked = self._question(f"{job.position}:before", InterruptKind.BEFORE_NODE, job.node, payload, wait.prompt)
        return replace(asked, timeout_s=wait.timeout_s, on_timeout=wait.on_timeout)

    def _question(self, position: str, kind: InterruptKind, node: str, payload: Any, prompt: str) -> Question:
        return Question(f"{self._recorder.options.asks_as}:{position}", kind, node, payload, prompt)

    def interrupt_of(self, question: Question) -> Interrupt:
        """Return the interrupt that a question will be, so that it can be stored together with the position."""
        return question.interrupt(self._need_desk(question).cursor.lane, 0)

    # Asking -------------------------------------------------------------------------------------------------------

    async def ask(self, activation: Activation, question: Question, acceptable: Any) -> Decision:
        """Return the decision, or raise Paused. One that makes no sense here is told so, and the question asked anew.

        ``acceptable`` takes a decision and raises InvalidInput or BadUpdate if it cannot be carried out.
        """
        asked = question
        for number in count(1):
            decision = await self._settle(activation, asked)
            try:
                if decision.kind is not DecisionKind.DEFER:
                    acceptable(decision)
                return decision
            except (InvalidInput, BadUpdate) as error:
                note = f"{question.prompt} (The last answer could not be used: {error.what})".strip()
                asked = replace(question, position=f"{question.position}~{number}", prompt=note)
        raise AssertionError("unreachable: the loop has no end")

    async def _settle(self, activation: Activation, question: Question) -> Decision:
        desk = self._need_desk(question)
        if not self._recorder.is_current:
            await self._store(activation, question, self.interrupt_of(question))
        try:
            found = await desk.settle(self._recorder.head_id, question)
        except InvalidInput:  # an answer of the wrong type: it is closed, and the question waits anew
            with contextlib.suppress(Paused):
                await self._settle(activation, question)
            raise
        if isinstance(found, InterruptRecord):
            if found.id not in self._recorder.waits:
                await self._store(activation, question, found.interrupt)
            self._recorder.emit(event.Interrupted(found))
            raise Paused([found])
        self._recorder.emit(event.DecisionTaken(self._answered(desk, question), found.kind))
        if found.kind is DecisionKind.DEFER:
            try:
                await self._settle(activation, question)
            except Paused as pause:  # asked anew at once, so that it can be answered whenever somebody is ready
                raise Paused(pause.records, deferred=True) from None
        return found

    def _answered(self, desk: Desk, question: Question) -> str:
        """Wait for a question no longer, whichever of its rounds it was; return the id of the last one waited for."""
        last = self.interrupt_of(question).id
        for number in range(ROUNDS_LOOKED_AT):
            each = question.interrupt(desk.cursor.lane, number).id
            if each in self._recorder.waits:
                self._recorder.waits.remove(each)
                last = each
        return last

    async def _store(self, activation: Activation, question: Question, interrupt: Interrupt) -> None:
        if interrupt.id not in self._recorder.waits:
            self._recorder.waits.append(interrupt.id)
        self._recorder.moved()
        await self._recorder.tell(activation, question.node or activation.here, "interrupt", interrupt=interrupt)

    def _need_desk(self, question: Question) -> Desk:
        if self._desk is None:
            raise InvalidInput(
                f"node {question.node!r} waits for a decision, but this run has no thread to wait in",
                hint='Run it with a thread: graph.run(store.thread("name"), …)',
            )
        return self._desk

    async def obey(self, activation: Activation) -> None:
        """Raise Paused if somebody asked from outside that the run stops."""
        if self._desk is None:
            return
        record = await self._desk.must_stop()
        if record is None:
            self._recorder.waits = [each for each in self._recorder.waits if not is_pause(each)]
            return
        if record.decision is not None and record.decision.kind is DecisionKind.REJECT:
            raise TurnedDown(activation.here, record.decision.reason)
        if record.id not in self._recorder.waits:
            self._recorder.waits.append(record.id)
            self._recorder.moved()
            await self._recorder.tell(activation, activation.here, "interrupt", interrupt=record.interrupt)
        self._recorder.emit(event.Interrupted(record))
        raise Paused([record], deferred=record.decision is not None)

    # What answers do ----------------------------------------------------------------------------------------------

    async def pass_before(self, activation: Activation, job: Job, question: Question) -> None:
        """Wait at the gate before a job; go through with a yes."""
        decision = await self.ask(activation, question, lambda answer: check_state_answer(activation, answer))
        job.given = self._carry_out(activation.graph.nodes[job.node], decision)
        job.passed = True

    async def pass_after(self, activation: Activation, node: str, question: Question) -> Mapping[str, Any]:
        """Wait at the gate after a node; return what the answer wants the state to be."""
        decision = await self.ask(activation, question, lambda answer: check_state_answer(activation, answer))
        return self._carry_out(activation.graph.nodes[node], decision)

    def _carry_out(self, node: Node, decision: Decision) -> Mapping[str, Any]:
        match decision.kind:
            case DecisionKind.REJECT:
                if node.wait is not None and node.wait.on_reject is not None:
                    raise Rerouted(node.wait.on_reject)
                raise TurnedDown(node.name, decision.reason)
            case DecisionKind.REROUTE:
                assert decision.target is not None
                raise Rerouted(decision.target)
            case DecisionKind.MODIFY:
                given: Mapping[str, Any] = decision.value
                return given
            case _:
                if decision.scope is not None:
                    self._recorder.options.grant(decision.scope)
                return {}


def check_state_answer(activation: Activation, decision: Decision) -> None:
    """Raise unless a decision at a gate can be carried out in this graph."""
    check_target(activation, decision)
    if decision.kind is DecisionKind.MODIFY:
        if not isinstance(decision.value, Mapping):
            raise InvalidInput(
                f"to modify at a node takes a mapping of state keys, not {type(decision.value).__name__}"
            )
        activation.live.plan([("decision", decision.value)])


def check_target(activation: Activation, decision: Decision) -> None:
    """Raise unless a reroute leads to a node of this graph."""
    if decision.kind is DecisionKind.REROUTE and decision.target not in activation.graph.nodes:
        known = ", ".join(activation.graph.nodes)
        raise InvalidInput(f"graph {activation.graph.name!r} has no node {decision.target!r}; it has {known}")
