"""``ErrorRecovery``: run an operation so that its failure is dealt with, in three layers.

1. It is tried again, with growing waits, if its error is of a kind that may pass.
2. Something else is done instead: the fallbacks, in their order.
3. A person is asked: a callback now, or, with a thread, whoever looks into the inbox of interrupts, whenever.

    recovery = ErrorRecovery(RetryPolicy(retries=5), fallback=FallbackStrategy.use_cache(3600))
    answer = recovery.execute(call_model).unwrap()

With ``thread=`` and a ``key`` the attempts are in the thread's ledger of effects: a process that is killed does not
begin the count anew, and what is done is not done again.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from backstay.errors import InvalidInput
from backstay.model.ids import check_id
from backstay.recovery.course import Course, OnExhausted, Operation, Plan
from backstay.recovery.fallback import FallbackStrategy, check_strategies
from backstay.recovery.policy import RetryPolicy
from backstay.recovery.result import RecoveryResult
from backstay.recovery.statistics import RecoveryStatistics, Tally
from backstay.thread.effects import Reconcile
from backstay.thread.offload import rest
from backstay.thread.steps import arun_steps, run_steps
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

T = TypeVar("T")
ThreadT = TypeVar("ThreadT", Thread, AsyncThread)

Fallbacks = FallbackStrategy | Iterable[FallbackStrategy]


class _Recovery(Generic[ThreadT]):
    """What both kinds have in common."""

    _threads: type[Thread] | type[AsyncThread]
    _sleep: Callable[[float], Any]

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        fallback: Fallbacks = (),
        on_exhausted: OnExhausted | None = None,
        config: Mapping[str, Any] | None = None,
        thread: ThreadT | None = None,
        sleep: Callable[[float], Any] | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """Say how operations are to be recovered.

        ``on_exhausted`` is called with a text and the list of ``RecoveryAction`` that can be carried out, and returns
        one of them, or None if nobody answers. ``config`` are settings that a person may change; an operation that
        takes an argument finds them in ``attempt.config``. ``sleep`` and ``chance`` are for tests.
        """
        if policy is not None and not isinstance(policy, RetryPolicy):
            raise InvalidInput(f"policy must be a RetryPolicy, not {type(policy).__name__}")
        if thread is not None and not isinstance(thread, self._threads):
            raise InvalidInput(
                f"{type(self).__name__} takes a thread of type {self._threads.__name__}, not {type(thread).__name__}",
                hint="ErrorRecovery goes with backstay.open, AsyncErrorRecovery with backstay.aopen",
            )
        if on_exhausted is not None and not callable(on_exhausted):
            raise InvalidInput(f"on_exhausted must be a function, not {type(on_exhausted).__name__}")
        self._tally = Tally()
        self._plan = Plan(
            policy=policy or RetryPolicy(),
            fallbacks=check_strategies(fallback if isinstance(fallback, FallbackStrategy) else list(fallback)),
            on_exhausted=on_exhausted,
            config={check_id(key, "setting"): value for key, value in (config or {}).items()},
            thread=thread,
            sleep=sleep or type(self)._sleep,
            chance=chance or random.Random(),
            tally=self._tally,
        )

    @property
    def statistics(self) -> RecoveryStatistics:
        """Return the counts of what was done so far."""
        return self._tally.now

    def _course(
        self,
        operation: Callable[..., Any],
        key: str | None,
        name: str | None,
        idempotent: bool,
        reconcile: Reconcile | None,
    ) -> Course:
        if not callable(operation):
            raise InvalidInput(f"operation must be a function, not {type(operation).__name__}")
        if key is None and self._plan.thread is not None:
            raise InvalidInput(
                "with a thread an operation needs a key", hint='It names it there: execute(call, key="plan trip")'
            )
        if key is not None:
            check_id(key, "key of the operation")
        own_name: str = getattr(operation, "__name__", type(operation).__name__)
        return Course(
            self._plan,
            Operation(
                function=operation,
                wants_attempt=_wants_attempt(operation),
                name=name or key or own_name,
                key=key,
                idempotent=idempotent,
                reconcile=reconcile,
            ),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.statistics}>"


class ErrorRecovery(_Recovery[Thread]):
    """Runs operations with recovery: tries again, falls back, asks. See the module for the three layers."""

    _threads = Thread
    _sleep = staticmethod(time.sleep)

    def execute(
        self,
        operation: Callable[..., T],
        *,
        key: str | None = None,
        name: str | None = None,
        idempotent: bool = False,
        reconcile: Reconcile | None = None,
    ) -> RecoveryResult[T]:
        """Run an operation and return what came of it; nothing is raised for a failure.

        An operation with a parameter is told its ``Attempt``. With a thread it runs as an effect named ``key``: what
        is done is not done again, and after a timeout, or a crash in its middle, nobody knows whether it was done. It
        is then tried again if it is ``idempotent`` (twice does no harm), or if ``reconcile`` finds that it was not
        done; else a person is asked. See ``Thread.effect``.
        """
        course = self._course(operation, key, name, idempotent, reconcile).run()
        result: RecoveryResult[T] = run_steps(course, _asynchronous)
        self._tally.add_result(result)
        return result

    execute_with_recovery = execute


class AsyncErrorRecovery(_Recovery[AsyncThread]):
    """``ErrorRecovery`` for callers with an event loop: what it calls may be a plain or a coroutine function."""

    _threads = AsyncThread
    _sleep = staticmethod(rest)

    async def execute(
        self,
        operation: Callable[..., Any],
        *,
        key: str | None = None,
        name: str | None = None,
        idempotent: bool = False,
        reconcile: Reconcile | None = None,
    ) -> RecoveryResult[Any]:
        """Run an operation and return what came of it; nothing is raised for a failure. See ``ErrorRecovery``."""
        result = await arun_steps(self._course(operation, key, name, idempotent, reconcile).run())
        self._tally.add_result(result)
        return result

    execute_with_recovery = execute


def _wants_attempt(operation: Callable[..., Any]) -> bool:
    """Tell whether a function takes an argument that has no default."""
    try:
        parameters = inspect.signature(operation).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in taken and each.default is inspect.Parameter.empty for each in parameters)


def _asynchronous() -> InvalidInput:
    return InvalidInput("a function of this recovery has to be awaited", hint="Use AsyncErrorRecovery")
