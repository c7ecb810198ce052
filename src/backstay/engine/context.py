"""What a node is handed besides the state: who it is, and how it reaches the world and the people outside.

A node that asks somebody, or whose effect has an unknown outcome, is left at that line and run again from its beginning
once there is an answer. So what it does before that line must be harmless to repeat: do it through ``effect``, which
does not repeat it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backstay.engine import event
from backstay.engine.desk import Desk
from backstay.engine.effects import Ledger
from backstay.engine.options import RunOptions
from backstay.engine.position import Job
from backstay.engine.signals import Ask, Rerouted
from backstay.errors import Fenced, Rejected
from backstay.model.decision import Decision, DecisionKind
from backstay.model.interrupt import InterruptKind
from backstay.model.usage import Usage
from backstay.thread.effects import UNKNOWN_ON, Reconcile
from backstay.thread.question import Question, check_answer


class BaseContext:
    """What contexts of plain and of asynchronous nodes have in common."""

    def __init__(
        self,
        job: Job,
        options: RunOptions,
        desk: Desk | None,
        emit: Callable[[event.Event], None],
        answers: Mapping[str, Decision],
        attempt: int,
        error: Exception | None = None,
    ) -> None:
        self._job = job
        self._options = options
        self._desk = desk
        self._emit = emit
        self._answers = answers
        self._asked: Counter[str] = Counter()
        self._closed = False
        self._usage = (0, 0.0)
        self._wants_checkpoint = False
        self.attempt = attempt
        self.error = error  # what the node failed with, for its fallback

    @functools.cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._desk, self._options, self._job, self._answered, self._replayed)

    @property
    def node(self) -> str:
        """The node's name."""
        return self._job.node

    @property
    def visit(self) -> int:
        """How often the node has been entered in its graph, this time included."""
        return self._job.visit

    @property
    def position(self) -> str:
        """What names this visit of this node in this run: the same after a restart, and nowhere else."""
        return self._job.position

    @property
    def key(self) -> str | None:
        """Which of several jobs side by side this is; None if it runs alone."""
        return self._job.key

    @property
    def item(self) -> Any:
        """The item of the list that this node is mapped over."""
        return self._job.item

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._options.run_id

    @property
    def thread_id(self) -> str | None:
        """The id of the thread the run is kept in."""
        return None if self._desk is None else self._desk.cursor.lane.thread

    def emit(self, data: Any) -> None:
        """Show something to those who watch the run, such as a token; it is not stored."""
        self._check_open()
        self._emit(event.Token(self._job.position, self._job.node, data))

    def usage(self, tokens: int = 0, cost: float = 0.0) -> None:
        """Count tokens and money; they are stored when the node is done."""
        used = Usage(tokens, cost)
        self._usage = (self._usage[0] + used.tokens_used, self._usage[1] + used.cost_estimate)

    def checkpoint(self) -> None:
        """Ask for a checkpoint when this node is done, whatever the trigger says."""
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
        """Ask whether a tool may be called; return the arguments to call it with, which may be others than proposed.

        Raises Rejected, with the reason, if it may not: let it end the run, or catch it and tell the model. Until there
        is a decision the run waits here.
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
        """Ask a person for a value and return it, checked against the type ``answer``; Rejected if they refuse.

        A plain approval gives None.
        """
        self._check_open()
        position = self._place("ask")
        question = Question(
            position, InterruptKind.USER_REQUEST, self.node, payload, prompt, timeout, on_timeout, answer=answer
        )
        return check_answer(self._answered(question), answer)

    def _place(self, what: str) -> str:
        """Return the position of the next question of a kind: two equal ones in a node are two questions."""
        self._asked[what] += 1
        return f"{self._options.asks_as}:{self._job.position}:{what}:{self._asked[what]}"

    def _answered(self, question: Question) -> Decision:
        decision = self._answers.get(question.position)
        if decision is None:
            raise Ask(question)
        if decision.kind is DecisionKind.REJECT:
            raise Rejected(
                f"node {self.node!r}: {question.prompt or 'what it asked'} was answered with no", reason=decision.reason
            )
        if decision.kind is DecisionKind.REROUTE:
            assert decision.target is not None
            raise Rerouted(decision.target)
        return decision

    def _replayed(self, key: str) -> None:
        self._emit(event.EffectReplayed(self._job.position, key))

    def _check_open(self) -> None:
        if self._closed:
            raise Fenced(
                f"node {self.node!r} has been given up: it took too long or the run was cancelled",
                epoch=0,
                current=0,
                thread=self.thread_id,
                hint="End the function; whatever it returns is not used",
            )

    def _close(self) -> None:
        self._closed = True


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
        """Do something to the world once, and return its result; after a restart the stored result comes back.

        ``key`` names it within this visit of the node. If a crash left it unknown whether it was done, ``reconcile`` is
        asked; without it a person is, unless it is ``idempotent``. A function with a parameter ``idempotency_key`` is
        given one to pass on to the provider.
        """
        self._check_open()
        call = self._ledger.call(key, fn, args, kwargs, reconcile, idempotent, tuple(unknown_on))
        return self._ledger.perform(call)


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
        """Do something to the world once, as ``Context.effect``; the functions may be coroutine functions."""
        self._check_open()
        call = self._ledger.call(key, fn, args, kwargs, reconcile, idempotent, tuple(unknown_on))
        return await self._ledger.aperform(call)
