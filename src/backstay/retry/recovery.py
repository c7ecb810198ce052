"""``ErrorRecovery`` runs an operation and handles its failure in three layers.

1. Retry: the operation is called again, after growing waits, if its error may pass.
2. Fallback: the fallbacks are tried in their order.
3. A person: a callback is asked now, or, with a thread, the question waits in the inbox of interrupts.

    recovery = ErrorRecovery(RetryPolicy(retries=5), fallback=FallbackStrategy.use_cache(3600))
    answer = recovery.execute(call_model).unwrap()

With ``thread=`` and a ``key``, the thread's ledger of effects records the attempts. After a crash the next process
continues the count where the last one stopped, and never repeats a finished effect.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from backstay.errors import InvalidInput
from backstay.model.ids import check_id
from backstay.model.retry import RetryPolicy
from backstay.operations.drivers import arun_steps, async_sleep, run_steps
from backstay.retry.execution import Execution, OnExhausted, RecoveryPlan, RecoveryResult, RecoveryStatistics
from backstay.retry.fallback import FallbackStrategy, check_strategies
from backstay.thread.effects import Reconcile
from backstay.thread.thread import AsyncThread, Thread

T = TypeVar("T")
ThreadT = TypeVar("ThreadT", Thread, AsyncThread)


class _Recovery(Generic[ThreadT]):
    """The common part of ``ErrorRecovery`` and ``AsyncErrorRecovery``."""

    _threads: type[Thread] | type[AsyncThread]
    _sleep: Callable[[float], Any]

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        fallback: FallbackStrategy | Iterable[FallbackStrategy] = (),
        on_exhausted: OnExhausted | None = None,
        config: Mapping[str, Any] | None = None,
        thread: ThreadT | None = None,
        sleep: Callable[[float], Any] | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """Configure how to recover operations.

        ``on_exhausted`` gets a text and the list of possible ``RecoveryAction`` and returns one of them, or None for
        no answer. ``config`` holds settings that a person may change; an operation that takes an argument reads them
        from ``attempt.config``. ``sleep`` and ``chance`` are for tests.
        """
        if policy is not None and not isinstance(policy, RetryPolicy):
            raise InvalidInput(f"policy must be a RetryPolicy, not {type(policy).__name__}")
        if thread is not None and not isinstance(thread, self._threads):
            raise InvalidInput(
                f"{type(self).__name__} needs a thread of type {self._threads.__name__}, not {type(thread).__name__}",
                hint="Use ErrorRecovery with backstay.open and AsyncErrorRecovery with backstay.aopen",
            )
        if on_exhausted is not None and not callable(on_exhausted):
            raise InvalidInput(f"on_exhausted must be a function, not {type(on_exhausted).__name__}")
        self._plan = RecoveryPlan(
            policy=policy or RetryPolicy(),
            fallbacks=check_strategies(fallback),
            on_exhausted=on_exhausted,
            config={check_id(key, "setting"): value for key, value in (config or {}).items()},
            thread=thread,
            sleep=sleep or type(self)._sleep,
            chance=chance or random.Random(),
        )

    @property
    def statistics(self) -> RecoveryStatistics:
        """Return the counts so far."""
        return self._plan.tally.now

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.statistics}>"


class ErrorRecovery(_Recovery[Thread]):
    """Runs operations and handles their failures: retries, falls back, asks a person."""

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
        """Run an operation and return its result; a failure raises nothing.

        An operation with a parameter gets its ``Attempt``. With a thread, the operation runs as the effect ``key``,
        and a finished effect is never repeated. After a timeout, or a crash during the call, its outcome is unknown.
        It is then retried if it is ``idempotent`` (twice does no harm) or if ``reconcile`` finds that it was not done;
        otherwise a person is asked. See ``Thread.effect``.
        """
        return run_steps(
            Execution(self._plan, operation, key, name, idempotent, reconcile).run(),
            lambda: InvalidInput("this recovery got a coroutine function", hint="Use AsyncErrorRecovery to await it"),
        )

    execute_with_recovery = execute


class AsyncErrorRecovery(_Recovery[AsyncThread]):
    """``ErrorRecovery`` for asyncio: operations, fallbacks and callbacks may be plain or coroutine functions."""

    _threads = AsyncThread
    _sleep = staticmethod(async_sleep)

    async def execute(
        self,
        operation: Callable[..., Any],
        *,
        key: str | None = None,
        name: str | None = None,
        idempotent: bool = False,
        reconcile: Reconcile | None = None,
    ) -> RecoveryResult[Any]:
        """Run an operation and return its result; a failure raises nothing. See ``ErrorRecovery.execute``."""
        return await arun_steps(Execution(self._plan, operation, key, name, idempotent, reconcile).run())

    execute_with_recovery = execute
