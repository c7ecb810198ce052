"""A node's effects: the thread's ledger, with keys made of the node's position, and people to ask.

An effect's key begins with the run and the position, so the same line of code in the next round of a loop, or in
another branch of a fan-out, is another effect. In a run that was forked from another, what that one did after the fork
with the same arguments is taken over instead of being done again.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from backstay.engine.desk import Desk
from backstay.engine.options import RunOptions
from backstay.engine.position import Job
from backstay.errors import EffectUnknown
from backstay.model.decision import Decision, DecisionKind
from backstay.model.effect import EffectRecord, Outcome
from backstay.model.interrupt import InterruptKind
from backstay.store.base import Backend
from backstay.thread import ledger
from backstay.thread.effects import EffectCall, Reconcile, aperform, perform, request_of
from backstay.thread.question import Question

BY_DECISION = "decision"
"""Who settled an effect, if a person did by answering the run."""

_POSITION_LENGTH_MAX = 600


class Ledger:
    """The effects of one visit of one node."""

    def __init__(
        self,
        desk: Desk | None,
        options: RunOptions,
        job: Job,
        answered: Callable[[Question], Decision],
        replayed: Callable[[str], None],
    ) -> None:
        self._desk = desk
        self._options = options
        self._job = job
        self._answered = answered
        self._replayed = replayed

    def call(
        self,
        key: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        reconcile: Reconcile | None,
        idempotent: bool,
        unknown_on: tuple[type[BaseException], ...],
    ) -> EffectCall:
        """Return a call with the key that it has in the whole thread."""
        ledger.check_key(key)
        return EffectCall(
            effect_key(self._options.run_id, self._job.position, key),
            fn,
            args,
            kwargs,
            reconcile,
            idempotent,
            unknown_on,
        )

    def perform(self, call: EffectCall) -> Any:
        """Do an effect here and now."""
        desk = self._desk
        if desk is None:
            return call.fn(*call.args, **call.kwargs)
        call = self._taken_over(call, desk.handle.run(self._earlier, desk, call))
        watched = self._watched(call)
        while True:
            try:
                result = perform(desk.handle, watched)
                break
            except EffectUnknown as unknown:
                record = unknown.record
                outcome = self._outcome(record)
                desk.handle.run(ledger.settle, desk.context, desk.cursor, record, outcome, BY_DECISION)
        return self._told(watched, result)

    async def aperform(self, call: EffectCall) -> Any:
        """Do an effect and await it."""
        desk = self._desk
        if desk is None:
            answer = call.fn(*call.args, **call.kwargs)
            return await answer if inspect.isawaitable(answer) else answer
        call = self._taken_over(call, await desk.run(self._earlier, desk, call))
        watched = self._watched(call)
        while True:
            try:
                result = await aperform(desk.handle, watched)
                break
            except EffectUnknown as unknown:
                record = unknown.record
                outcome = self._outcome(record)
                await desk.run(ledger.settle, desk.context, desk.cursor, record, outcome, BY_DECISION)
        return self._told(watched, result)

    def _outcome(self, record: EffectRecord) -> Outcome:
        """Ask a person what became of an effect."""
        payload = {
            "effect": record.key,
            "attempt": record.attempt,
            "idempotency_key": record.idempotency_key,
            "begun_at": record.created_at,
        }
        question = Question(
            f"{self._options.asks_as}:{self._job.position}:effect:{record.key}:{record.attempt}",
            InterruptKind.USER_REQUEST,
            self._job.node,
            payload,
            f"Nobody knows whether effect {record.key.rpartition(':')[2]!r} was done. Approve: it was not, do it. "
            "Modify: it was, with this result. Reject: end the run.",
        )
        decision = self._answered(question)
        return Outcome.done(decision.value) if decision.kind is DecisionKind.MODIFY else Outcome.not_done()

    # What a fork takes over ---------------------------------------------------------------------------------------

    def _earlier(self, store: Backend, desk: Desk, call: EffectCall) -> EffectRecord | None:
        """Return what another branch did at this very place with these very arguments."""
        lane, request = desk.cursor.lane, request_of(call)
        for branch in self._options.effects_from:
            other = lane._replace(branch=branch)
            row = ledger.find(store, other, call.key)
            if row is not None and row.status == ledger.DONE and request and row.request == request:
                record = ledger.shown_of(row)
                return record if record.error is None else None
        return None

    def _taken_over(self, call: EffectCall, earlier: EffectRecord | None) -> EffectCall:
        if earlier is None:
            return call
        self._replayed(call.key)
        return replace(call, fn=_Known(earlier.result))

    def _watched(self, call: EffectCall) -> EffectCall:
        if isinstance(call.fn, _Known | functools.partial) or inspect.iscoroutinefunction(call.fn):
            return call
        return replace(call, fn=_Watched(call.fn))

    def _told(self, call: EffectCall, result: Any) -> Any:
        if isinstance(call.fn, _Watched) and not call.fn.called:
            self._replayed(call.key)
        return result


def effect_key(run_id: str, position: str, key: str) -> str:
    """Return the key of an effect in its thread. A place that is too deep to be spelled out is named by its digest."""
    if len(position) > _POSITION_LENGTH_MAX:
        position = f"{position[:100]}…{hashlib.sha256(position.encode()).hexdigest()}"
    return f"{run_id}:{position}:{key}"


class _Known:
    """Stands for a function whose result is known."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._result


class _Watched:
    """A function that remembers whether it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function  # where ``inspect.signature`` looks
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return self.__wrapped__(*args, **kwargs)
