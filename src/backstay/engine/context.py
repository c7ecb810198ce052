"""The context of a node: its identity, its questions to people, and its effects.

A node that asks a question, or whose effect has an unknown outcome, stops at that line and runs again from its start
once there is an answer. So everything it does before that line must be safe to repeat. Use ``effect`` for what must not
be repeated.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from backstay.engine import events
from backstay.engine.control import Ask, Rerouted
from backstay.engine.durable import DurableRun, RunOptions
from backstay.engine.position import Job
from backstay.errors import EffectUnknown, Fenced, Rejected
from backstay.model.decision import Decision, DecisionKind, InterruptKind
from backstay.model.fields import Usage
from backstay.model.runs import EffectRecord, Outcome
from backstay.operations import ledger
from backstay.operations.question import Question, check_answer
from backstay.store.base import Backend
from backstay.thread.effects import UNKNOWN_ON, EffectCall, Reconcile, arguments_digest, arun_effect, run_effect

BY_DECISION = "decision"
"""The name under which an effect is settled when a person settles it by answering the run."""

_POSITION_LENGTH_MAX = 600


class _KnownResult:
    """Replaces a function whose result is known."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._result


class _TrackedFunction:
    """A function that remembers whether it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function  # where ``inspect.signature`` looks
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return self.__wrapped__(*args, **kwargs)


class BaseContext:
    """The common part of the contexts of plain and asynchronous nodes."""

    def __init__(
        self,
        job: Job,
        options: RunOptions,
        durable: DurableRun | None,
        emit: Callable[[events.Event], None],
        answers: Mapping[str, Decision],
        attempt: int,
        error: Exception | None = None,
    ) -> None:
        self._job = job
        self._options = options
        self._durable = durable
        self._emit = emit
        self._answers = answers
        self._asked: Counter[str] = Counter()
        self._closed = False
        self._usage = (0, 0.0)
        self._wants_checkpoint = False
        self.attempt = attempt
        self.error = error  # for a fallback: the error of the node

    @property
    def node(self) -> str:
        """The node's name."""
        return self._job.node

    @property
    def visit(self) -> int:
        """How often the run entered the node in its graph, including this time."""
        return self._job.visit

    @property
    def position(self) -> str:
        """The name of this visit of this node in this run. It is the same after a restart, and used nowhere else."""
        return self._job.position

    @property
    def key(self) -> str | None:
        """Which of several parallel jobs this is; None if the node runs alone."""
        return self._job.key

    @property
    def item(self) -> Any:
        """The item of the list, for a node that runs once per item."""
        return self._job.item

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._options.run_id

    @property
    def thread_id(self) -> str | None:
        """The id of the thread that stores the run; None without a thread."""
        return None if self._durable is None else self._durable.cursor.branch.thread

    def emit(self, data: Any) -> None:
        """Show data, such as a token, to observers of the run. It is not stored."""
        self._check_open()
        self._emit(events.Token(self._job.position, self._job.node, data))

    def usage(self, tokens: int = 0, cost: float = 0.0) -> None:
        """Count tokens and money. They are stored when the node is done."""
        used = Usage(tokens, cost)
        self._usage = (self._usage[0] + used.tokens_used, self._usage[1] + used.cost_estimate)

    def checkpoint(self) -> None:
        """Ask for a checkpoint when this node is done, with any trigger."""
        self._wants_checkpoint = True

    def approve(
        self,
        tool: str,
        args: Any = None,
        *,
        prompt: str = "",
        timeout: float | None = None,
        on_timeout: DecisionKind = DecisionKind.REJECT,
    ) -> Any:
        """Ask a person whether a tool may be called. Return the arguments to use, which the person may have changed.

        Raises Rejected, with the reason, if the answer is no: let it end the run, or catch it and pass it to the model.
        The run waits here until there is a decision.
        """
        self._check_open()
        if self._options.is_granted(tool):
            return args
        payload = {"tool": tool, "args": args}
        position = self._place(f"tool:{tool}")
        text = prompt or f"May {tool} be called?"
        question = Question(position, InterruptKind.TOOL_APPROVAL, self.node, payload, text, timeout, on_timeout)
        decision = self._answered(question)
        if decision.kind is DecisionKind.APPROVE and decision.scope is not None:
            self._options.grant(decision.scope)
        return decision.value if decision.kind is DecisionKind.MODIFY else args

    def ask(
        self,
        payload: Any = None,
        *,
        prompt: str = "",
        answer: type | None = None,
        timeout: float | None = None,
        on_timeout: DecisionKind = DecisionKind.REJECT,
    ) -> Any:
        """Ask a person for a value of the type ``answer`` and return it; raise Rejected if they refuse.

        A plain approval gives None.
        """
        self._check_open()
        position = self._place("ask")
        question = Question(
            position, InterruptKind.USER_REQUEST, self.node, payload, prompt, timeout, on_timeout, answer=answer
        )
        return check_answer(self._answered(question), answer)

    def _place(self, what: str) -> str:
        """Return the position of the next question of a kind: equal questions of a node are separate questions."""
        self._asked[what] += 1
        return f"{self._options.question_prefix}:{self._job.position}:{what}:{self._asked[what]}"

    def _answered(self, question: Question) -> Decision:
        decision = self._answers.get(question.position)
        if decision is None:
            raise Ask(question)
        if decision.kind is DecisionKind.REJECT:
            asked = f": {question.prompt}" if question.prompt else ""
            raise Rejected(f"a person rejected the question of node {self.node!r}{asked}", reason=decision.reason)
        if decision.kind is DecisionKind.REROUTE:
            assert decision.target is not None
            raise Rerouted(decision.target)
        return decision

    def _check_open(self) -> None:
        if self._closed:
            raise Fenced(
                f"node {self.node!r} was abandoned: it took too long, or the run was cancelled",
                epoch=0,
                current=0,
                thread=self.thread_id,
                hint="Return from the function; its result is not used",
            )

    def _close(self) -> None:
        self._closed = True

    # Effects --------------------------------------------------------------------------------------------------------

    def _effect_call(
        self,
        key: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        reconcile: Reconcile | None,
        idempotent: bool,
        unknown_on: Iterable[type[BaseException]],
    ) -> EffectCall:
        """Return a call with its key in the whole thread.

        The key has the run and the position, so the same line of code in the next visit, or in another parallel branch,
        is another effect. A position that is too long is replaced by its digest.
        """
        self._check_open()
        ledger.check_key(key)
        position = self._job.position
        if len(position) > _POSITION_LENGTH_MAX:
            position = f"{position[:100]}…{hashlib.sha256(position.encode()).hexdigest()}"
        name = f"{self._options.run_id}:{position}:{key}"
        return EffectCall(name, fn, args, kwargs, reconcile, idempotent, tuple(unknown_on))

    def _earlier(self, store: Backend, durable: DurableRun, call: EffectCall) -> EffectRecord | None:
        """Return the effect that the source branch of this fork did here with the same arguments."""
        branch, request = durable.cursor.branch, arguments_digest(call)
        for name in self._options.effects_from:
            row = ledger.find(store, branch._replace(name=name), call.key)
            if row is not None and row.status == ledger.DONE and request and row.request == request:
                record = ledger.shown_of(row)
                return record if record.error is None else None
        return None

    def _tracked(self, call: EffectCall, earlier: EffectRecord | None) -> EffectCall:
        """Return a call that reuses an earlier result, or that knows afterwards whether its function was called."""
        if earlier is not None:
            self._emit(events.EffectReplayed(self._job.position, call.key))
            return replace(call, fn=_KnownResult(earlier.result))
        if isinstance(call.fn, functools.partial) or inspect.iscoroutinefunction(call.fn):
            return call
        return replace(call, fn=_TrackedFunction(call.fn))

    def _report_replay(self, call: EffectCall) -> None:
        if isinstance(call.fn, _TrackedFunction) and not call.fn.called:
            self._emit(events.EffectReplayed(self._job.position, call.key))

    def _ask_outcome(self, record: EffectRecord) -> Outcome:
        """Ask a person whether an effect was done."""
        payload = {
            "effect": record.key,
            "attempt": record.attempt,
            "idempotency_key": record.idempotency_key,
            "started_at": record.created_at,
        }
        question = Question(
            f"{self._options.question_prefix}:{self._job.position}:effect:{record.key}:{record.attempt}",
            InterruptKind.USER_REQUEST,
            self._job.node,
            payload,
            f"It is unknown whether effect {record.key.rpartition(':')[2]!r} was done. Approve: it was not, do it. "
            "Modify: it was, with this result. Reject: end the run.",
        )
        decision = self._answered(question)
        return Outcome.done(decision.value) if decision.kind is DecisionKind.MODIFY else Outcome.not_done()


class Context(BaseContext):
    """The context of a node that is a plain function."""

    def effect(
        self,
        key: str,
        fn: Callable[..., Any],
        *args: Any,
        reconcile: Reconcile | None = None,
        idempotent: bool = False,
        unknown_on: Iterable[type[BaseException]] = UNKNOWN_ON,
        **kwargs: Any,
    ) -> Any:
        """Call a function that must not run twice, and return its result; after a restart, return the stored result.

        ``key`` names the effect within this visit of the node. If a crash left its outcome unknown, ``reconcile`` is
        called. Without it a person is asked, unless the effect is ``idempotent``. A function with a parameter
        ``idempotency_key`` gets one to pass on to the provider.
        """
        call = self._effect_call(key, fn, args, kwargs, reconcile, idempotent, unknown_on)
        durable = self._durable
        if durable is None:
            return fn(*args, **kwargs)
        call = self._tracked(call, durable.handle.run(self._earlier, durable, call))
        while True:
            try:
                result = run_effect(durable.handle, call)
                break
            except EffectUnknown as unknown:
                record, outcome = unknown.record, self._ask_outcome(unknown.record)
                durable.handle.run(ledger.settle, durable.services, durable.cursor, record, outcome, BY_DECISION)
        self._report_replay(call)
        return result


class AsyncContext(BaseContext):
    """The context of a node that is a coroutine function."""

    async def effect(
        self,
        key: str,
        fn: Callable[..., Any],
        *args: Any,
        reconcile: Reconcile | None = None,
        idempotent: bool = False,
        unknown_on: Iterable[type[BaseException]] = UNKNOWN_ON,
        **kwargs: Any,
    ) -> Any:
        """Like ``Context.effect``; the functions may be coroutine functions."""
        call = self._effect_call(key, fn, args, kwargs, reconcile, idempotent, unknown_on)
        durable = self._durable
        if durable is None:
            answer = fn(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer
        call = self._tracked(call, await durable.run(self._earlier, durable, call))
        while True:
            try:
                result = await arun_effect(durable.handle, call)
                break
            except EffectUnknown as unknown:
                record, outcome = unknown.record, self._ask_outcome(unknown.record)
                await durable.run(ledger.settle, durable.services, durable.cursor, record, outcome, BY_DECISION)
        self._report_replay(call)
        return result
