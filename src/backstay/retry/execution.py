"""One execution of an operation, and its result: retry, fall back, ask a person.

An execution is a generator of steps, so that it is written once for plain and for asynchronous callers; see
``run_steps``. It handles only ``Exception``: a cancelled task, Ctrl-C and the exit of the program pass through.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from backstay.errors import Conflict, EffectUnknown, Fenced, InvalidInput, Rejected, Unrecovered
from backstay.model.category import ErrorCategory, Failure
from backstay.model.ids import check_id
from backstay.model.retry import UNSAFE, RetryPolicy
from backstay.model.runs import EffectStatus
from backstay.operations.drivers import Steps
from backstay.operations.interrupts import InterruptRecord
from backstay.retry.fallback import FallbackKind, FallbackStrategy
from backstay.retry.incident import (
    ActionKind,
    Incident,
    OperationState,
    RecoveryAction,
    check_offered,
    effect_key,
    load_operation_state,
    record_incident,
    settle_unknown,
)
from backstay.thread.access import handle_of
from backstay.thread.effects import UNKNOWN_ON, Reconcile, idempotency_key_of
from backstay.thread.thread import AsyncThread, Thread

T_co = TypeVar("T_co", covariant=True)

CHOICES_MAX = 100
"""How often the callback may choose in one execution: a callback that always answers "retry" must not loop forever."""

UNKNOWN_HINT = "It may have been done: find out first, and retry only if it was not"

OnExhausted = Callable[[str, list[RecoveryAction]], Any]


class RecoveryLayer(StrEnum):
    """The layer that helped, or the last one that tried."""

    AUTOMATIC = "automatic"  # a retry
    FALLBACK = "fallback"  # something else instead
    USER_INTERVENTION = "user_intervention"  # a person


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryResult(Generic[T_co]):
    """The outcome of an execution. A failure raises nothing until you call ``unwrap``."""

    success: bool  # there is a value to continue with
    value: T_co | None = field(default=None, repr=False)
    layer: RecoveryLayer | None = None  # None if the first call succeeded
    attempts: int = 0  # calls of the operation; with a thread, those of earlier processes included
    error: Exception | None = field(default=None, repr=False)  # the operation's last error, also after a recovery
    failure: Failure | None = None  # that error in a form that is safe to show, also if an earlier process met it
    fallback: str | None = None  # the fallback that gave the value
    fallback_errors: tuple[Exception, ...] = field(default=(), repr=False)  # of the fallbacks that failed
    cached_age_s: float | None = None  # the age of a value from a cache
    cache_error: Exception | None = field(default=None, repr=False)  # why the value was not put into the cache
    action: RecoveryAction | None = None  # what a person chose
    skipped: bool = False  # continue without it
    replayed: bool = False  # an earlier execution did it: this is the stored value
    incident: Incident | None = None  # the failure that a person was asked about
    interrupt: InterruptRecord | None = None  # the question, until a person has answered it

    @property
    def waiting(self) -> bool:
        """Return whether it waits for a decision: after the decision, execute it again with the same key."""
        return self.interrupt is not None

    @property
    def category(self) -> ErrorCategory | None:
        """The category of the error."""
        return None if self.failure is None else self.failure.category

    @property
    def error_message(self) -> str | None:
        """The message of the error. It may quote values; ``failure`` does not."""
        if self.error is not None:
            return str(self.error) or type(self.error).__name__
        return None if self.failure is None else str(self.failure)

    @property
    def suggested_action(self) -> str | None:
        """Advice on what a person can do about the failure; None after a success."""
        if self.success or self.failure is None:
            return None
        if self.interrupt is not None:
            return f"{self.failure.hint}. Decide on interrupt {self.interrupt.id}, then execute with the same key again"
        return self.failure.hint

    def unwrap(self) -> T_co:
        """Return the value, or raise the operation's error."""
        if self.success:
            return self.value  # type: ignore[return-value]  # of a success, which may be None
        if self.error is not None:
            raise self.error
        raise Unrecovered(
            f"the operation failed in an earlier process: {self.failure}",
            hint=self.suggested_action,
            interrupt=self.interrupt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStatistics:
    """Counts of executions and errors. Each execution counts once, for the layer in which it ended.

    An execution without an error, or one that found a stored value, counts only in ``executions``.
    """

    executions: int = 0  # that returned a result
    total_errors: int = 0  # calls of operations and fallbacks that raised
    auto_recovered: int = 0  # executions that a retry saved
    fallback_recovered: int = 0  # executions that a fallback saved
    user_recovered: int = 0  # executions that a person's choice saved
    user_interventions: int = 0  # choices of people
    unrecovered: int = 0  # executions that failed
    waiting: int = 0  # executions that wait for a decision


_COUNTER_OF_LAYER = {
    RecoveryLayer.AUTOMATIC: "auto_recovered",
    RecoveryLayer.FALLBACK: "fallback_recovered",
    RecoveryLayer.USER_INTERVENTION: "user_recovered",
}


class Tally:
    """Counters that several threads may use at once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()  # reentrant, because a signal handler may count too

    def add(self, *names: str) -> None:
        """Add one to each of these counters."""
        with self._lock:
            self._counts.update(names)

    @property
    def now(self) -> RecoveryStatistics:
        """The counts so far."""
        with self._lock:
            return RecoveryStatistics(**self._counts)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Facts about one call: the argument of an operation that takes one."""

    number: int  # from 1; with a thread, calls of earlier processes count too
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the settings, with the changes people made
    idempotency_key: str | None = None  # with a thread: the same in every attempt and process


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The settings that all executions of a recovery share."""

    policy: RetryPolicy
    fallbacks: tuple[FallbackStrategy, ...]
    on_exhausted: OnExhausted | None
    config: Mapping[str, Any]
    thread: Thread | AsyncThread | None
    sleep: Callable[[float], Any]
    chance: random.Random
    tally: Tally = field(default_factory=Tally)


class Execution:
    """One execution of one operation."""

    def __init__(
        self,
        plan: RecoveryPlan,
        function: Callable[..., Any],
        key: str | None,
        name: str | None,
        idempotent: bool,
        reconcile: Reconcile | None,
    ) -> None:
        if not callable(function):
            raise InvalidInput(f"operation must be a function, not {type(function).__name__}")
        if key is not None:
            check_id(key, "key of the operation")
        elif plan.thread is not None:
            raise InvalidInput(
                "with a thread, an operation needs a key",
                hint='The key identifies it in the thread: execute(call, key="plan trip")',
            )
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # some built-in functions have no signature
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own_name: str = getattr(function, "__name__", type(function).__name__)
        self._plan = plan
        self._policy = plan.policy
        self._function = function
        self._takes_attempt = any(
            each.kind in positional and each.default is inspect.Parameter.empty for each in parameters
        )
        self._name = name or key or own_name
        self._key = key or name or own_name  # in the thread's ledger, and in caches
        self._idempotent = idempotent
        self._reconcile = reconcile
        self._handle = None if plan.thread is None else handle_of(plan.thread)
        self._stored = OperationState()
        self._config = dict(plan.config)
        self._calls = 0  # by all processes
        self._tried = 0  # attempts used since a person last chose to retry
        self._choices = 0
        self._error: Exception | None = None
        self._failure: Failure | None = None
        self._is_unknown = False  # something may have been done that must not be done twice
        self._fallback_errors: list[Exception] = []
        self._action: RecoveryAction | None = None
        self._began_at = self._now()

    def run(self) -> Steps[RecoveryResult[Any]]:
        """Execute the operation and return its result."""
        result = yield from self._restore()
        while result is None:
            if self._action is not None and not self._action.tries_again:
                result = yield from self._carry_out(self._action)
            else:
                result = yield from self._try()
                if result is None and self._may_ask() and not isinstance(self._error, UNSAFE):
                    for strategy in self._plan.fallbacks:
                        if result is None and strategy.automatic and not self._is_unknown:
                            result = yield from self._instead(strategy, RecoveryLayer.FALLBACK)
            if result is None:
                result = yield from self._ask()
        if result.success:
            ended = () if result.layer is None or result.replayed else (_COUNTER_OF_LAYER[result.layer],)
        else:
            ended = ("waiting",) if result.waiting else ("unrecovered",)
        self._plan.tally.add("executions", *ended)
        return result

    def _restore(self) -> Steps[RecoveryResult[Any] | None]:
        """Take over the work of earlier processes; return the result if there is nothing left to do."""
        if self._handle is None:
            return None
        names = tuple(each.name for each in self._plan.fallbacks if each.function is not None)
        stored: OperationState = yield lambda: self._on_thread(load_operation_state, names)
        effect, action = stored.effect, stored.action
        self._stored = stored
        self._config |= stored.config
        self._calls = stored.attempts
        self._tried = max(0, stored.attempts - stored.base)
        if stored.was_consumed:
            self._plan.tally.add("user_interventions")
        if stored.instead is not None:
            name, value = stored.instead
            self._action = action
            chosen = action is not None and action.kind is ActionKind.SWITCH_TO_BACKUP
            layer = RecoveryLayer.USER_INTERVENTION if chosen else RecoveryLayer.FALLBACK
            return self._succeeded(layer, value, fallback=name, replayed=True)
        if effect is not None and effect.status is EffectStatus.DONE:
            # One more attempt returns the stored value without calling the operation.
            self._tried = 0
            self._action = action if action is not None and action.tries_again else None
            return None
        if stored.incident is not None:
            self._failure = stored.incident.failure
        elif effect is not None:
            self._failure = Failure.of_name(effect.error or EffectUnknown.__name__)
        if effect is not None and effect.outcome_unknown and not self._idempotent:
            self._tried = min(self._tried, self._policy.retries)  # an unknown outcome does not use up an attempt
        if stored.waiting is not None:
            return self._failed(stored.incident, stored.waiting)
        self._action = action
        return None

    def _try(self) -> Steps[RecoveryResult[Any] | None]:
        """Layer 1: call the operation as often as the policy allows. Return None if that did not help."""
        policy, effect = self._policy, self._stored.effect
        if self._tried and effect is not None and effect.status is EffectStatus.FAILED and effect.ended_at is not None:
            # An earlier process ended during the wait after its last attempt: wait for the rest of that time.
            passed_s = max(0.0, (self._now() - effect.ended_at).total_seconds())
            left_s = policy.wait_s(self._tried, self._plan.chance) - passed_s
            if left_s > 0 and self._tried < policy.attempts:
                yield lambda: self._plan.sleep(left_s)
        while self._tried < policy.attempts:
            self._tried += 1
            before = self._calls
            try:
                value = yield self._call
            except Exception as error:
                self._plan.tally.add("total_errors")
                self._error, self._failure = error, Failure.of(error, policy.rules)
                self._is_unknown = self._leaves_unknown(error)
                if self._is_unknown:
                    self._failure = replace(self._failure, hint=UNKNOWN_HINT)
                if not policy.wants(self._tried, error) or (self._is_unknown and not self._reconcile):
                    return None
                wait_s = policy.wait_s(self._tried, self._plan.chance)
                yield lambda wait_s=wait_s: self._plan.sleep(wait_s)  # type: ignore[misc]  # mypy: a lambda's default
            else:
                recovered = RecoveryLayer.AUTOMATIC if self._error is not None or self._calls > 1 else None
                layer = recovered if self._action is None else RecoveryLayer.USER_INTERVENTION
                cache_error = yield from self._fill_caches(value)
                return self._succeeded(layer, value, cache_error=cache_error, replayed=before == self._calls)
        return None

    def _call(self) -> Any:
        """Call the operation; with a thread, as an effect that its ledger records."""
        thread, name = self._plan.thread, effect_key(self._key)

        def call() -> Any:
            self._calls += 1
            if not self._takes_attempt:
                return self._function()
            key = None if self._handle is None else idempotency_key_of(self._handle.cursor, name)
            return self._function(Attempt(self._calls, dict(self._config), key))

        if thread is None:
            return call()
        return thread.effect(name, call, reconcile=self._reconcile, idempotent=self._idempotent)

    def _fill_caches(self, value: Any) -> Steps[Exception | None]:
        """Store a success for a later failure; return the error if that fails."""
        for strategy in self._plan.fallbacks:
            cache, key = strategy.cache, strategy.key or self._key
            if cache is not None:
                try:
                    yield lambda cache=cache, key=key: cache.put(key, value)  # type: ignore[misc]  # as above
                except Exception as error:
                    return error
        return None

    def _instead(self, strategy: FallbackStrategy, layer: RecoveryLayer) -> Steps[RecoveryResult[Any] | None]:
        """Layer 2: carry out one fallback. Return None if it did not help."""
        thread, cache, function = self._plan.thread, strategy.cache, strategy.function
        try:
            if strategy.kind is FallbackKind.SKIP:
                return self._succeeded(layer, strategy.value, fallback=strategy.name, skipped=True)
            if cache is not None:
                found = yield lambda: cache.get(strategy.key or self._key)
                if found is None or found.age_s > strategy.max_age_s:
                    return None
                return self._succeeded(layer, found.value, fallback=strategy.name, cached_age_s=found.age_s)
            assert function is not None
            if thread is None:
                value = yield function
            else:
                name = effect_key(self._key, strategy.name)
                value = yield lambda: thread.effect(name, function, idempotent=self._idempotent)
            return self._succeeded(layer, value, fallback=strategy.name)
        except Exception as error:
            self._plan.tally.add("total_errors")
            self._fallback_errors.append(error)
            self._is_unknown = self._leaves_unknown(error)
            return None

    def _ask(self) -> Steps[RecoveryResult[Any] | None]:
        """Layer 3: ask a person. Return None if they have chosen what to do next."""
        if not self._may_ask():
            return self._failed()
        assert self._failure is not None
        settings = self._config if self._takes_attempt else {}
        backups = () if self._is_unknown else self._plan.fallbacks
        incident = Incident(
            operation=self._name,
            failure=self._failure,
            attempts=self._calls,
            began_at=self._began_at,
            failed_at=self._now(),
            actions=(
                RecoveryAction.retry(),
                RecoveryAction.skip(),
                RecoveryAction.abort(),
                *(RecoveryAction.modify_config(key, value) for key, value in settings.items()),
                *(RecoveryAction.switch_to_backup(each.service) for each in backups if each.service is not None),
            ),
        )
        callback, choice = self._plan.on_exhausted, None
        if callback is not None and self._choices < CHOICES_MAX:
            choice = yield lambda: callback(incident.prompt, list(incident.actions))
        if choice is None:
            asked = None
            if self._handle is not None:
                asked = yield lambda: self._on_thread(record_incident, self._stored.numbered, incident)
            return self._failed(incident, asked)
        if not isinstance(choice, RecoveryAction):
            raise InvalidInput(
                f"on_exhausted returned {type(choice).__name__}, not a RecoveryAction",
                hint="Return one of the offered actions, or None for no answer",
            ) from self._error
        try:
            check_offered(choice, incident.actions)
        except InvalidInput as refused:
            raise refused from self._error
        self._choices += 1
        self._plan.tally.add("user_interventions")
        self._action, self._began_at = choice, self._now()
        if choice.tries_again:
            self._tried, self._is_unknown = 0, False
            if choice.key is not None:
                self._config[choice.key] = choice.value
            if self._handle is not None:
                yield lambda: self._on_thread(settle_unknown, self._calls)
        return None

    def _carry_out(self, action: RecoveryAction) -> Steps[RecoveryResult[Any] | None]:
        """Carry out an action that does not retry. Return None if it did not help."""
        if action.kind is ActionKind.SKIP:
            return self._succeeded(RecoveryLayer.USER_INTERVENTION, None, skipped=True)
        if action.kind is ActionKind.ABORT:
            return self._failed()
        strategy = next((each for each in self._plan.fallbacks if each.service == action.service), None)
        if strategy is None:
            raise InvalidInput(
                f"a person chose the backup service {action.service!r}, but no fallback has it",
                hint="Pass it again: fallback=FallbackStrategy.backup_service(...)",
            )
        return (yield from self._instead(strategy, RecoveryLayer.USER_INTERVENTION))

    def _may_ask(self) -> bool:
        """Return whether a person could help: not if one has said no, or if another process owns the branch."""
        interrupted = self._failure is not None and self._failure.category is ErrorCategory.USER_INTERRUPT
        return not interrupted and not isinstance(self._error, Conflict | Fenced | Rejected)

    def _leaves_unknown(self, error: Exception) -> bool:
        """Return whether the ledger now has an effect with an unknown outcome."""
        return self._handle is not None and not self._idempotent and isinstance(error, (*UNKNOWN_ON, EffectUnknown))

    def _now(self) -> datetime:
        return datetime.now(UTC) if self._handle is None else self._handle.services.now()

    def _on_thread(self, operation: Callable[..., Any], *rest: Any) -> Any:
        """Run a function on the thread's store; returns an awaitable if the thread is asynchronous."""
        assert self._handle is not None
        return self._handle.run_either(operation, self._handle.services, self._handle.cursor, self._key, *rest)

    def _succeeded(self, layer: RecoveryLayer | None, value: Any, **rest: Any) -> RecoveryResult[Any]:
        return self._result(success=True, layer=layer, value=value, **rest)

    def _failed(
        self, incident: Incident | None = None, interrupt: InterruptRecord | None = None
    ) -> RecoveryResult[Any]:
        layer = RecoveryLayer.FALLBACK if self._fallback_errors else RecoveryLayer.AUTOMATIC
        if self._action is not None:
            layer = RecoveryLayer.USER_INTERVENTION
        return self._result(success=False, layer=layer, incident=incident or self._stored.incident, interrupt=interrupt)

    def _result(self, **rest: Any) -> RecoveryResult[Any]:
        return RecoveryResult(
            attempts=self._calls,
            error=self._error,
            failure=self._failure,
            fallback_errors=tuple(self._fallback_errors),
            action=self._action,
            **rest,
        )
