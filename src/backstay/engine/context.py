"""The context of a node: its identity, its questions to people, and its effects.

A node that asks a question, or whose effect has an unknown outcome, stops at that line and runs again from its start
once there is an answer. So everything it does before that line must be safe to repeat. Use ``effect`` for what must not
be repeated.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from backstay.engine import events
from backstay.engine.control import Ask, Rerouted
from backstay.engine.durable import DurableRun, RunOptions
from backstay.engine.position import Job
from backstay.errors import Fenced, InvalidInput, Rejected
from backstay.model.decision import Decision, DecisionKind, InterruptKind
from backstay.model.fields import Usage
from backstay.model.runs import EffectRecord, Outcome
from backstay.operations import ledger
from backstay.operations.cursor import Handle
from backstay.operations.drivers import Steps
from backstay.operations.question import (
    Question,
    check_answer,
    outcome_of,
    outcome_question,
    raise_if_late,
    sleep_question,
    wait_question,
)
from backstay.store.base import Backend
from backstay.thread.calls import AsyncCalls, CallNames, CallSite, PlainCalls, current_task
from backstay.thread.effects import EffectCall, RunOperation

_POSITION_LENGTH_MAX = 600


class _KnownResult:
    """Replaces a function whose result is known."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._result


class BaseContext(CallSite):
    """The common part of the contexts of plain and asynchronous nodes.

    A context remembers that its node stopped at a question, or was sent elsewhere by an answer. From then on it refuses
    everything that the node does, and the run asks when the node ends, even if the node caught the signal.
    """

    _on_unknown = "ask"
    _is_async = False

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
        self._known_lists: Callable[[list[Any]], bytes | None] = lambda items: None
        self._names = CallNames(current_task() if self._is_async else None)
        self._closed = False
        self._left: Ask | Rerouted | None = None  # the node stopped here
        self._used: Usage | None = None
        self._wants_checkpoint = False
        self._received: dict[str, int] = {}
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
        self._used = used if self._used is None else self._used + used

    def checkpoint(self) -> None:
        """Ask for a checkpoint when this node is done, with any trigger."""
        self._wants_checkpoint = True

    def _notes(self) -> dict[str, Any]:
        """Return what the node reported in addition to its update."""
        notes: dict[str, Any] = {}
        if self._used is not None:
            notes |= {"tokens": self._used.tokens_used, "cost": self._used.cost_estimate}
        if self._wants_checkpoint:
            notes["checkpoint"] = True
        if self._received:
            notes["received"] = self._received
        return notes

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
        """Ask a person for a value of the type ``answer`` and return it; raise Rejected if they refuse."""
        self._check_open()
        position = self._place("ask")
        question = Question(
            position,
            InterruptKind.USER_REQUEST,
            self.node,
            payload,
            prompt,
            timeout,
            on_timeout,
            answer=answer or object,
        )
        return check_answer(self._answered(question), answer)

    def wait_for(self, name: str, *, timeout: float | None = None) -> Any:
        """Wait for a value that another program sends with ``thread.send(name, value)``, and return it.

        The run pauses here, as with ``ask``, until it is resumed after the value was sent. Each value is received once,
        in the order in which they were sent. Raises TimeoutError if none was sent within ``timeout`` seconds.
        """
        self._check_open()
        options, position = self._options, self._job.position
        if options.receivers.setdefault(name, position) != position:
            raise InvalidInput(
                f"two parallel branches wait for {name!r}, so it is not clear which one gets the value",
                thread=self.thread_id,
                hint=f'Give each its own name, for example f"{name}-{{ctx.key}}"',
            )
        number = options.received.get(name, 0) + self._received.get(name, 0) + 1
        question = wait_question(options.line_name, name, number, timeout)
        raise_if_late(self._answers.get(question.position), name)
        decision = self._answered(question)
        self._received[name] = self._received.get(name, 0) + 1
        return decision.value

    def sleep(self, seconds: float | None = None, *, until: datetime | None = None) -> None:
        """Wait for a time, without a process: the run ends here as "sleeping", and this line returns when it resumes.

        A worker (``graph.work``) continues it when the time has come; so does ``graph.run`` or ``resume`` after that.
        Like everything that waits, this runs the node again from its start.
        """
        self._check_open()
        now = datetime.now(UTC) if self._durable is None else self._durable.services.now()
        self._answered(sleep_question(self._place("sleep"), self.node, seconds, until, now))

    def _place(self, what: str) -> str:
        """Return the position of the next question of a kind: equal questions of a node are separate questions."""
        self._asked[what] += 1
        return f"{self._options.line_name}:{self._job.position}:{what}:{self._asked[what]}"

    def _answered(self, question: Question) -> Decision:
        decision = self._answers.get(question.position)
        if decision is None:
            if self._durable is not None:  # a question that cannot be stored is refused in the line that asks
                question.interrupt(self._durable.cursor.branch, 0)
            self._left = Ask(question)
            raise self._left.again()
        if decision.kind is DecisionKind.REJECT:
            asked = f": {question.prompt}" if question.prompt else ""
            raise Rejected(f"a person rejected the question of node {self.node!r}{asked}", reason=decision.reason)
        if decision.kind is DecisionKind.REROUTE:
            assert decision.target is not None
            self._left = Rerouted(decision.target)
            raise self._left.again()
        return decision

    def _check_open(self) -> None:
        if self._left is not None:
            raise self._left.again()
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

    # Calls and effects --------------------------------------------------------------------------------------------

    def _handle_of_calls(self) -> Handle | None:
        return None if self._durable is None else self._durable.handle

    def _place_of_calls(self) -> str:
        """Return the run and the position.

        So the same line of code in the next visit, or in another parallel branch, is another call. A position that is
        too long is replaced by its digest.
        """
        position = self._job.position
        if len(position) > _POSITION_LENGTH_MAX:
            position = f"{position[:100]}…{hashlib.sha256(position.encode()).hexdigest()}"
        return f"{self._options.line_name}:{position}:"

    def _known_list(self, items: list[Any]) -> bytes | None:
        return self._known_lists(items)

    def _reusing(self, run: RunOperation, call: EffectCall) -> Steps[EffectCall]:
        durable = self._durable
        if durable is None or not self._options.effects_from or not call.request:
            return call
        branch, place = durable.cursor.branch, self._options.line_name

        def find(store: Backend) -> EffectRecord | None:
            """Return the call that the source of this fork made here with the same arguments."""
            for name, line in self._options.effects_from:
                row = ledger.find(store, branch._replace(name=name), line + call.key.removeprefix(place))
                if row is not None and row.status == ledger.DONE and row.request == call.request:
                    record = ledger.shown_of(row)
                    return record if record.error is None else None
            return None

        earlier: EffectRecord | None = yield lambda: run(find, None)
        return call if earlier is None else replace(call, fn=_KnownResult(earlier.result), timeout=None)

    def _report(self, call: EffectCall, is_replayed: bool) -> None:
        if is_replayed:
            self._emit(events.EffectReplayed(self._job.position, call.key))

    def _ask_outcome(self, run: RunOperation, record: EffectRecord) -> Steps[Outcome]:
        place = f"{self._options.line_name}:{self._job.position}:effect:{record.key}:{record.attempt}"
        return outcome_of(self._answered(outcome_question(place, self._job.node, record)))
        yield  # the answer is known already, or the node stops here


class Context(PlainCalls, BaseContext):
    """The context of a node that is a plain function."""


class AsyncContext(AsyncCalls, BaseContext):
    """The context of a node that is a coroutine function.

    A question may be awaited or not: ``await ctx.approve(…)`` and ``ctx.approve(…)`` give the same.
    """

    _is_async = True

    def approve(self, *args: Any, **kwargs: Any) -> Any:
        """Ask a person whether a tool may be called; see ``Context.approve``."""
        return _maybe_awaited(super().approve(*args, **kwargs))

    def ask(self, *args: Any, **kwargs: Any) -> Any:
        """Ask a person for a value; see ``Context.ask``."""
        return _maybe_awaited(super().ask(*args, **kwargs))

    def wait_for(self, name: str, *, timeout: float | None = None) -> Any:
        """Wait for a value that another program sends; see ``Context.wait_for``."""
        return _maybe_awaited(super().wait_for(name, timeout=timeout))

    def sleep(self, seconds: float | None = None, *, until: datetime | None = None) -> Any:
        """Wait for a time, without a process; see ``Context.sleep``."""
        return _maybe_awaited(super().sleep(seconds, until=until))


def _maybe_awaited(value: Any) -> Any:
    """Return the value, or an awaitable for it if the node's next instruction awaits it.

    A question waits in the store and not here, so there is nothing to await. But everything else in an async node is
    awaited, and a node that forgot that it need not await would fail only after the person has answered.
    """
    frame = sys._getframe(2)
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while at < len(code) and code[at] == _CACHE:
        at += 2
    return _ready(value) if at < len(code) and code[at] == _GET_AWAITABLE else value


async def _ready(value: Any) -> Any:
    return value


_CACHE, _GET_AWAITABLE = dis.opmap.get("CACHE", 0), dis.opmap["GET_AWAITABLE"]
