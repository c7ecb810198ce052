"""The course of one execution: try, try something else, ask. Written once, for plain and for asynchronous callers.

It is a generator of *steps* that call the operation, a fallback or a person, wait, or ask the store; see
``thread.steps``. Only ``Exception`` is ever dealt with here: a cancelled
task, Ctrl-C and the exit of the program pass through.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from backstay.errors import Conflict, EffectUnknown, Fenced, InvalidInput, Rejected
from backstay.model.effect import EffectStatus
from backstay.recovery.action import ActionKind, RecoveryAction
from backstay.recovery.category import ErrorCategory
from backstay.recovery.failure import Failure
from backstay.recovery.fallback import FallbackKind, FallbackStrategy
from backstay.recovery.incident import (
    Incident,
    Standing,
    check_offered,
    effect_key,
    find_standing,
    record,
    settle_unknown,
)
from backstay.recovery.policy import UNSAFE, RetryPolicy
from backstay.recovery.result import RecoveryLayer, RecoveryResult
from backstay.recovery.statistics import Tally
from backstay.thread.access import access_of, handle_of
from backstay.thread.effects import UNKNOWN_ON, Reconcile, key_of
from backstay.thread.steps import Steps
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

CHOICES_MAX = 100
"""How often a callback may choose in one execution: one that always says "retry" is a loop without an end."""

UNKNOWN_HINT = "Nobody knows whether it was done: find out first. To try it again says that it was not"

OnExhausted = Callable[[str, list[RecoveryAction]], Any]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an operation that takes an argument is told about its call."""

    number: int  # from 1, counted on across processes if there is a thread
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the settings, as people changed them
    idempotency_key: str | None = None  # with a thread: the same in every attempt and process


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How operations are to be recovered: what is the same in every execution."""

    policy: RetryPolicy
    fallbacks: tuple[FallbackStrategy, ...]
    on_exhausted: OnExhausted | None
    config: Mapping[str, Any]
    thread: Thread | AsyncThread | None
    sleep: Callable[[float], Any]
    chance: random.Random
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What is to be done, and what it is called."""

    function: Callable[..., Any]
    wants_attempt: bool
    name: str
    key: str | None
    idempotent: bool
    reconcile: Reconcile | None


class Course:
    """One execution."""

    def __init__(self, plan: Plan, operation: Operation) -> None:
        self._plan = plan
        self._policy = plan.policy
        self._operation = operation
        self._standing = Standing()
        self._config = dict(plan.config)
        self._calls = 0  # made so far, in all processes
        self._tried = 0  # of the attempts there are, since somebody last said to try again
        self._choices = 0
        self._error: Exception | None = None
        self._failure: Failure | None = None
        self._is_unknown = False  # whether something was done that must not be done twice
        self._fallback_errors: list[Exception] = []
        self._action: RecoveryAction | None = None
        self._began_at = self._now()

    def run(self) -> Steps[RecoveryResult[Any]]:
        """Do it, and return what came of it."""
        earlier = yield from self._stand()
        if earlier is not None:
            return earlier
        self._action = self._standing.action
        while True:
            if self._action is not None and not self._action.tries_again:
                result = yield from self._carry_out(self._action)
            else:
                result = yield from self._try()
                if result is None and self._may_do_else():
                    result = yield from self._fall_back()
            if result is not None:
                return result
            choice = yield from self._choose()
            if isinstance(choice, RecoveryResult):
                return choice
            yield from self._begin_anew(choice)

    # How it stands ------------------------------------------------------------------------------------------------

    def _stand(self) -> Steps[RecoveryResult[Any] | None]:
        """Find out what earlier processes did; return the result if it needs nothing more."""
        thread, key = self._plan.thread, self._operation.key
        if thread is None or key is None:
            return None
        names = tuple(each.name for each in self._plan.fallbacks if each.function is not None)
        handle = handle_of(thread)
        standing: Standing = yield lambda: handle.run_either(find_standing, handle.context, handle.cursor, key, names)
        self._standing = standing
        self._config |= standing.config
        self._calls = standing.attempts
        self._tried = max(0, standing.attempts - standing.base)
        if standing.was_consumed:
            self._plan.tally.add("user_interventions")
        if standing.instead is not None:
            name, value = standing.instead
            self._action = standing.action
            chosen = standing.action is not None and standing.action.kind is ActionKind.SWITCH_TO_BACKUP
            layer = RecoveryLayer.USER_INTERVENTION if chosen else RecoveryLayer.FALLBACK
            return self._succeeded(value, layer, fallback=name, replayed=True)
        return self._look_at_ledger(standing)

    def _look_at_ledger(self, standing: Standing) -> RecoveryResult[Any] | None:
        effect = standing.effect
        if effect is not None and effect.status is EffectStatus.DONE:
            self._tried = 0  # one more look gives the value, without a call
            if standing.action is not None and not standing.action.tries_again:
                standing.action = None
            return None
        if standing.incident is not None:
            self._failure = standing.incident.failure
        elif effect is not None:
            self._failure = Failure.of_name(effect.error or EffectUnknown.__name__)
        if effect is not None and effect.outcome_unknown and not self._operation.idempotent:
            self._tried = min(self._tried, self._policy.retries)  # what nobody knows of did not use up an attempt
        return None if standing.waiting is None else self._unsolved(standing.waiting)

    def _now(self) -> datetime:
        thread = self._plan.thread
        return datetime.now(UTC) if thread is None else access_of(thread).context.now()

    # Layer 1: trying again ----------------------------------------------------------------------------------------

    def _try(self) -> Steps[RecoveryResult[Any] | None]:
        """Call the operation as often as the policy wants; None if that did not help."""
        yield from self._rest_of_the_wait()
        while self._tried < self._policy.attempts:
            self._tried += 1
            before = self._calls
            try:
                value = yield self._call
            except Exception as error:
                self._failed(error)
                if not self._policy.wants(self._tried, error) or (self._is_unknown and not self._operation.reconcile):
                    return None
                wait_s = self._policy.wait_s(self._tried, self._plan.chance)
                yield lambda wait_s=wait_s: self._plan.sleep(wait_s)  # type: ignore[misc]  # mypy: a lambda's default
            else:
                cache_error = yield from self._keep(value)
                return self._succeeded(value, self._layer(), cache_error=cache_error, replayed=before == self._calls)
        return None

    def _rest_of_the_wait(self) -> Steps[None]:
        """Wait as long as the process that made the last attempt would have waited."""
        effect = self._standing.effect
        if effect is None or effect.status is not EffectStatus.FAILED or effect.ended_at is None or not self._tried:
            return
        passed_s = (self._now() - effect.ended_at).total_seconds()
        left_s = self._policy.wait_s(self._tried, self._plan.chance) - max(0.0, passed_s)
        if left_s > 0 and self._tried < self._policy.attempts:
            yield lambda: self._plan.sleep(left_s)

    def _call(self) -> Any:
        """Call the operation: through the thread's ledger if there is one."""
        thread, operation = self._plan.thread, self._operation
        if thread is None or operation.key is None:
            return self._called()
        name = effect_key(operation.key)
        return thread.effect(name, self._called, reconcile=operation.reconcile, idempotent=operation.idempotent)

    def _called(self) -> Any:
        self._calls += 1
        operation, thread = self._operation, self._plan.thread
        if not operation.wants_attempt:
            return operation.function()
        name = None
        if thread is not None and operation.key is not None:
            name = key_of(handle_of(thread).cursor, effect_key(operation.key))
        return operation.function(Attempt(self._calls, dict(self._config), name))

    def _layer(self) -> RecoveryLayer | None:
        if self._action is not None:
            return RecoveryLayer.USER_INTERVENTION
        return RecoveryLayer.AUTOMATIC if self._error is not None or self._calls > 1 else None

    def _keep(self, value: Any) -> Steps[Exception | None]:
        """Put a success where a later failure finds it; return the error if that does not work."""
        for strategy in self._plan.fallbacks:
            cache = strategy.cache
            if cache is not None:
                key = self._cache_key(strategy)
                try:
                    yield lambda cache=cache, key=key: cache.put(key, value)  # type: ignore[misc]  # as above
                except Exception as error:
                    return error
        return None

    def _cache_key(self, strategy: FallbackStrategy) -> str:
        return strategy.key or self._operation.key or self._operation.name

    # Layer 2: something else instead ------------------------------------------------------------------------------

    def _may_do_else(self) -> bool:
        """Tell whether another way is open: not if it may have been done, or must not be done."""
        return not self._is_unknown and not isinstance(self._error, UNSAFE) and self._may_be_asked_about()

    def _fall_back(self) -> Steps[RecoveryResult[Any] | None]:
        for strategy in self._plan.fallbacks:
            if strategy.automatic and not self._is_unknown:
                result = yield from self._instead(strategy, RecoveryLayer.FALLBACK)
                if result is not None:
                    return result
        return None

    def _instead(self, strategy: FallbackStrategy, layer: RecoveryLayer) -> Steps[RecoveryResult[Any] | None]:
        """Do one thing instead; None if that did not help."""
        cache = strategy.cache
        try:
            if strategy.kind is FallbackKind.SKIP:
                return self._succeeded(strategy.value, layer, fallback=strategy.name, skipped=True)
            if cache is not None:
                found = yield lambda: cache.get(self._cache_key(strategy))
                if found is None or found.age_s > strategy.max_age_s:
                    return None
                return self._succeeded(found.value, layer, fallback=strategy.name, cached_age_s=found.age_s)
            value = yield lambda: self._call_instead(strategy)
            return self._succeeded(value, layer, fallback=strategy.name)
        except Exception as error:
            self._plan.tally.add("total_errors")
            self._fallback_errors.append(error)
            self._is_unknown = self._leaves_unknown(error)
            return None

    def _call_instead(self, strategy: FallbackStrategy) -> Any:
        thread, key, function = self._plan.thread, self._operation.key, strategy.function
        assert function is not None
        if thread is None or key is None:
            return function()
        return thread.effect(effect_key(key, strategy.name), function, idempotent=self._operation.idempotent)

    # Layer 3: a person --------------------------------------------------------------------------------------------

    def _may_be_asked_about(self) -> bool:
        """Tell whether a person could help: not if one has said no, or the branch is somebody else's."""
        interrupted = self._failure is not None and self._failure.category is ErrorCategory.USER_INTERRUPT
        return not interrupted and not isinstance(self._error, Conflict | Fenced | Rejected)

    def _choose(self) -> Steps[RecoveryAction | RecoveryResult[Any]]:
        """Return what a person chose, or the result if nobody did."""
        if not self._may_be_asked_about():
            return self._unsolved(None)
        incident = self._incident()
        ask = self._plan.on_exhausted
        if ask is not None and self._choices < CHOICES_MAX:
            choice = yield lambda: ask(incident.prompt, list(incident.actions))
            if choice is not None:
                return self._chosen(choice, incident)
        thread, key = self._plan.thread, self._operation.key
        if thread is None or key is None:
            return self._unsolved(None, incident)
        handle, numbered = handle_of(thread), self._standing.numbered
        asked = yield lambda: handle.run_either(record, handle.context, handle.cursor, key, numbered, incident)
        return self._unsolved(asked, incident)

    def _chosen(self, choice: object, incident: Incident) -> RecoveryAction:
        if not isinstance(choice, RecoveryAction):
            raise InvalidInput(
                f"on_exhausted returned {type(choice).__name__}, not a RecoveryAction",
                hint="Return one of the actions it was offered, or None if nobody answers",
            ) from self._error
        try:
            check_offered(choice, incident.actions)
        except InvalidInput as refused:
            raise refused from self._error
        self._choices += 1
        self._plan.tally.add("user_interventions")
        return choice

    def _incident(self) -> Incident:
        assert self._failure is not None
        return Incident(
            operation=self._operation.name,
            failure=self._failure,
            attempts=self._calls,
            began_at=self._began_at,
            failed_at=self._now(),
            actions=tuple(self._offered()),
        )

    def _offered(self) -> list[RecoveryAction]:
        """Return what can be carried out, and nothing else."""
        settings = self._config if self._operation.wants_attempt else {}
        services = () if self._is_unknown else self._plan.fallbacks
        return [
            RecoveryAction.retry(),
            RecoveryAction.skip(),
            RecoveryAction.abort(),
            *(RecoveryAction.modify_config(key, value) for key, value in settings.items()),
            *(RecoveryAction.switch_to_backup(each.service) for each in services if each.service is not None),
        ]

    def _begin_anew(self, choice: RecoveryAction) -> Steps[None]:
        """Take a choice over; if it is to be tried again, with all attempts."""
        self._action = choice
        self._began_at = self._now()
        if not choice.tries_again:
            return
        if choice.kind is ActionKind.MODIFY_CONFIG and choice.key is not None:
            self._config[choice.key] = choice.value
        self._tried, self._is_unknown = 0, False
        thread, key = self._plan.thread, self._operation.key
        if thread is not None and key is not None:
            self._standing.effect = None  # there is no wait left over
            handle = handle_of(thread)
            yield lambda: handle.run_either(settle_unknown, handle.context, handle.cursor, key, self._calls)

    def _carry_out(self, action: RecoveryAction) -> Steps[RecoveryResult[Any] | None]:
        layer = RecoveryLayer.USER_INTERVENTION
        if action.kind is ActionKind.SKIP:
            return self._succeeded(None, layer, skipped=True)
        if action.kind is ActionKind.ABORT:
            return self._unsolved(None)
        strategy = next((each for each in self._plan.fallbacks if each.service == action.service), None)
        if strategy is None:
            raise InvalidInput(
                f"there is no backup service {action.service!r}", hint="It was chosen: hand it in as a fallback again"
            )
        return (yield from self._instead(strategy, layer))

    # What came of it ----------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._failure = Failure.of(error, self._policy.rules)
        self._is_unknown = self._leaves_unknown(error)
        if self._is_unknown:
            self._failure = replace(self._failure, hint=UNKNOWN_HINT)
        self._plan.tally.add("total_errors")

    def _leaves_unknown(self, error: Exception) -> bool:
        """Tell whether, by the ledger, nobody knows now what was done."""
        durable = self._plan.thread is not None and self._operation.key is not None
        return durable and not self._operation.idempotent and isinstance(error, (*UNKNOWN_ON, EffectUnknown))

    def _succeeded(self, value: Any, layer: RecoveryLayer | None, **rest: Any) -> RecoveryResult[Any]:
        return RecoveryResult(success=True, value=value, layer=layer, **self._told(), **rest)

    def _unsolved(self, asked: Any, incident: Incident | None = None) -> RecoveryResult[Any]:
        return RecoveryResult(
            success=False,
            layer=self._last_layer(),
            incident=incident or self._standing.incident,
            interrupt=asked,
            **self._told(),
        )

    def _last_layer(self) -> RecoveryLayer:
        if self._action is not None:
            return RecoveryLayer.USER_INTERVENTION
        return RecoveryLayer.FALLBACK if self._fallback_errors else RecoveryLayer.AUTOMATIC

    def _told(self) -> dict[str, Any]:
        return {
            "attempts": self._calls,
            "error": self._error,
            "failure": self._failure,
            "fallback_errors": tuple(self._fallback_errors),
            "action": self._action,
        }
