"""Approvals: the questions before, after and inside nodes, and what each answer does.

A guarded node never runs before its question is answered with yes. A question belongs to one visit of one node in one
run, so an answer counts exactly once. While the run waits, its position and the question are stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from backstay.codec import encode
from backstay.engine import events
from backstay.engine.control import Paused, Rerouted, RunRejected
from backstay.engine.durable import DurableRun, RunRecorder
from backstay.engine.nodes import Node
from backstay.engine.position import Activation, Job
from backstay.errors import BadUpdate, EncodeError, InvalidInput
from backstay.model.decision import Decision, DecisionKind, Interrupt, InterruptKind
from backstay.operations.interrupts import InterruptRecord, is_pause
from backstay.operations.question import Question, WrongAnswer, close_questions

DEFERRALS_MAX = 20
"""How many deferrals of a question are removed from the list of open questions when it is answered."""


class Approvals:
    """Asks the questions of a run."""

    def __init__(self, recorder: RunRecorder, durable: DurableRun | None) -> None:
        self._recorder = recorder
        self._durable = durable

    # Which question guards a node -----------------------------------------------------------------------------------

    def before(self, activation: Activation, job: Job) -> Question | None:
        """Return the question to ask before a job, or None."""
        if job.passed or job.done or job.node in self._recorder.options.grants:
            return None
        payload: Any = {"graph": activation.graph.name, "node": job.node, "visit": job.visit}
        position, barrier = f"{job.position}:before", activation.graph.nodes[job.node].wait
        if barrier is not None:
            if barrier.payload is not None:
                try:
                    payload = barrier.payload(activation.state.schema.view(activation.state.values))
                except Exception as error:
                    raise BadUpdate(job.node, None, f"its payload function raised {error!r:.200}") from error
                try:
                    encode(payload, "payload")
                except EncodeError as error:
                    raise BadUpdate(job.node, None, f"asks a question that cannot be stored: {error.what}") from error
            asked = self._question(position, InterruptKind.BEFORE_NODE, job.node, payload, barrier.prompt)
            return replace(asked, timeout_s=barrier.timeout_s, on_timeout=barrier.on_timeout)
        options, prompt = self._recorder.options, f"Run {job.node}?"
        imported = options.imported
        if imported and not activation.prefix and imported["visits"].get(job.node) == job.visit:
            kind, asked = InterruptKind(imported["kind"]), imported["payload"]
            prompt = imported["prompt"] or prompt
            return self._question(position, kind, job.node, payload if asked is None else asked, prompt)
        named = activation.graph.before | options.before
        if not (job.node in named or "*" in named):
            return None
        return self._question(position, InterruptKind.BEFORE_NODE, job.node, payload, prompt)

    def after(self, activation: Activation, node: str, visit: int, key: str | None = None) -> Question | None:
        """Return the question to ask after a node, or None."""
        named = activation.graph.after | self._recorder.options.after
        if not (node in named or "*" in named):
            return None
        payload = {"graph": activation.graph.name, "node": node, "visit": visit}
        position = activation.position(node, visit, key)
        return self._question(f"{position}:after", InterruptKind.AFTER_NODE, node, payload, f"Continue after {node}?")

    def _question(self, position: str, kind: InterruptKind, node: str, payload: Any, prompt: str) -> Question:
        return Question(f"{self._recorder.options.line_name}:{position}", kind, node, payload, prompt)

    def interrupt_of(self, question: Question) -> Interrupt:
        """Return the interrupt of a question, to store it together with the position."""
        return question.interrupt(self._require_durable(question).cursor.branch, 0)

    # Asking ---------------------------------------------------------------------------------------------------------

    async def ask(
        self, activation: Activation, question: Question, check: Callable[[Activation, Decision], None]
    ) -> Decision:
        """Return the decision, or raise Paused.

        ``check`` raises InvalidInput or BadUpdate for a decision that cannot be carried out; the question is then asked
        again, with the reason.
        """
        asked = question
        for number in count(1):
            decision = await self._settle(activation, asked)
            try:
                if decision.kind is not DecisionKind.DEFER:
                    check(activation, decision)
                return decision
            except (InvalidInput, BadUpdate) as error:
                prompt = f"{question.prompt} (The last answer could not be used: {error.what})".strip()
                asked = replace(question, position=f"{question.position}~{number}", prompt=prompt)
        raise AssertionError("unreachable: the loop has no end")

    async def _settle(self, activation: Activation, question: Question) -> Decision:
        durable, recorder = self._require_durable(question), self._recorder
        if not recorder.is_current:
            await self._store(activation, question, self.interrupt_of(question))
        try:
            found = await durable.settle(recorder.head_id, question)
        except WrongAnswer:  # it is closed: ask again
            with contextlib.suppress(Paused):
                await self._settle(activation, question)
            raise
        if isinstance(found, InterruptRecord):
            if found.id not in recorder.waits:
                await self._store(activation, question, found.interrupt)
            recorder.emit(events.Interrupted(found))
            raise Paused([found])
        # The run no longer waits for this question, nor for any of its deferrals.
        answered = self.interrupt_of(question).id
        for number in range(DEFERRALS_MAX):
            each = question.interrupt(durable.cursor.branch, number).id
            if each in recorder.waits:
                recorder.waits.remove(each)
                answered = each
        recorder.emit(events.DecisionTaken(answered, found.kind))
        if found.kind is DecisionKind.DEFER:
            try:
                await self._settle(activation, question)
            except Paused as pause:  # ask again at once, so that a person can answer at any time
                raise Paused(pause.records, deferred=True) from None
        return found

    async def _store(self, activation: Activation, question: Question, interrupt: Interrupt) -> None:
        if interrupt.id not in self._recorder.waits:
            self._recorder.waits.append(interrupt.id)
        self._recorder.mark_moved()
        await self._recorder.notify(activation, question.node or activation.here, "interrupt", interrupt=interrupt)

    def _require_durable(self, question: Question) -> DurableRun:
        if self._durable is None:
            raise InvalidInput(
                f"node {question.node!r} waits for a decision, but this run has no thread to wait in",
                hint='Run it with a thread: graph.run(store.thread("name"), …)',
            )
        return self._durable

    async def close_others(self, asked: Iterable[str] = ()) -> None:
        """Close the questions that the run waited for and has not asked again; ``asked`` are those it asks now."""
        recorder, kept = self._recorder, set(asked)
        others = [each for each in recorder.waits if each not in kept and not is_pause(each)]
        if others and self._durable is not None:
            recorder.waits = [each for each in recorder.waits if each not in others]
            durable = self._durable
            await durable.run(close_questions, durable.services, durable.cursor, others)

    async def obey_pause(self, activation: Activation) -> None:
        """Raise Paused if a person has asked the run to pause."""
        if self._durable is None:
            return
        record = await self._durable.pause_request()
        recorder = self._recorder
        if record is None:
            recorder.waits = [each for each in recorder.waits if not is_pause(each)]
            return
        if record.decision is not None and record.decision.kind is DecisionKind.REJECT:
            raise RunRejected(activation.here, record.decision.reason)
        if record.id not in recorder.waits:
            recorder.waits.append(record.id)
            recorder.mark_moved()
            await recorder.notify(activation, activation.here, "interrupt", interrupt=record.interrupt)
        recorder.emit(events.Interrupted(record))
        raise Paused([record], deferred=record.decision is not None)

    # Acting on answers ----------------------------------------------------------------------------------------------

    async def ask_before(self, activation: Activation, job: Job, question: Question) -> None:
        """Ask the question before a job; return once the job may run."""
        decision = await self.ask(activation, question, check_state_answer)
        job.given = self._carry_out(activation.graph.nodes[job.node], decision)
        job.passed = True

    async def ask_after(self, activation: Activation, node: str, question: Question) -> Mapping[str, Any]:
        """Ask the question after a node; return the update that the answer makes to the state."""
        decision = await self.ask(activation, question, check_state_answer)
        return self._carry_out(activation.graph.nodes[node], decision)

    def _carry_out(self, node: Node, decision: Decision) -> Mapping[str, Any]:
        match decision.kind:
            case DecisionKind.REJECT:
                if node.wait is not None and node.wait.on_reject is not None:
                    raise Rerouted(node.wait.on_reject)
                raise RunRejected(node.name, decision.reason)
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
    """Raise unless this graph can carry out a decision before or after a node."""
    check_target(activation, decision)
    if decision.kind is DecisionKind.MODIFY:
        if not isinstance(decision.value, Mapping):
            raise InvalidInput(
                f"a modification at a node must be a mapping of state keys, not {type(decision.value).__name__}"
            )
        activation.state.plan([("decision", decision.value)])


def check_target(activation: Activation, decision: Decision) -> None:
    """Raise unless a reroute leads to a node of this graph."""
    if decision.kind is DecisionKind.REROUTE and decision.target not in activation.graph.nodes:
        known = ", ".join(activation.graph.nodes)
        raise InvalidInput(f"graph {activation.graph.name!r} has no node {decision.target!r}; it has {known}")
