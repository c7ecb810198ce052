"""The same three layers for asyncio."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.retry import (
    AsyncErrorRecovery,
    ErrorRecovery,
    FallbackStrategy,
    RecoveryAction,
    RecoveryLayer,
    RetryPolicy,
    ThreadCache,
)


def quick(**options: Any) -> AsyncErrorRecovery:
    return AsyncErrorRecovery(RetryPolicy(1, first_s=0), **options)


def test_operations_fallbacks_and_callbacks_may_be_awaited() -> None:
    calls: list[str] = []

    async def operation() -> str:
        calls.append("operation")
        raise TimeoutError

    async def elsewhere(service: str) -> str:
        calls.append(service)
        if len(calls) < 5:
            raise ConnectionError
        return "from there"

    async def person(text: str, actions: list[RecoveryAction]) -> RecoveryAction:
        calls.append("asked")
        return RecoveryAction.switch_to_backup("eu")

    recovery = quick(fallback=FallbackStrategy.backup_service("eu", elsewhere), on_exhausted=person)
    result = asyncio.run(recovery.execute(operation))

    assert (result.value, result.layer) == ("from there", RecoveryLayer.USER_INTERVENTION)
    assert calls == ["operation", "operation", "eu", "asked", "eu"]


def test_plain_functions_may_be_used_too() -> None:
    assert asyncio.run(quick().execute(lambda: 3)).unwrap() == 3
    assert asyncio.run(quick().execute_with_recovery(lambda: 3)).unwrap() == 3


def test_cancelling_ends_the_operation_and_the_wait_at_once() -> None:
    calls: list[int] = []

    async def story(policy: RetryPolicy, hangs: bool) -> None:
        began = asyncio.Event()

        async def operation() -> None:
            calls.append(1)
            began.set()
            if hangs:
                await asyncio.Event().wait()
            raise TimeoutError

        recovery = AsyncErrorRecovery(policy, fallback=FallbackStrategy.skip())
        task = asyncio.create_task(recovery.execute(operation))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert recovery.statistics.executions == 0

    asyncio.run(story(RetryPolicy(), hangs=True))
    asyncio.run(story(RetryPolicy(first_s=3600, cap_s=3600), hangs=False))
    assert calls == [1, 1]


def test_both_kinds_have_the_same_methods_and_arguments() -> None:
    for name in ("execute", "execute_with_recovery", "__init__"):
        plain, awaited = (inspect.signature(getattr(kind, name)) for kind in (ErrorRecovery, AsyncErrorRecovery))
        assert list(plain.parameters) == list(awaited.parameters)


def test_a_thread_of_an_asynchronous_store_keeps_attempts_incidents_and_values(tmp_path: Path) -> None:
    calls: list[int] = []

    async def operation(attempt: Any) -> str:
        calls.append(attempt.number)
        if attempt.number < 4:
            raise ConnectionRefusedError
        return "done"

    async def story() -> None:
        async with await backstay.aopen(str(tmp_path / "a.db")) as store:
            thread = store.thread("t")
            await thread.save({"a": 1})
            cache = ThreadCache(store.thread("cache"))
            recovery = quick(thread=thread, fallback=FallbackStrategy.use_cache(3600, "rates", cache=cache))
            waiting = await recovery.execute(operation, key="fetch")
            assert (waiting.waiting, waiting.attempts, calls) == (True, 2, [1, 2])
            shown = [record async for record in store.interrupts()]
            await thread.decide(shown[0], RecoveryAction.retry().decision(), by="ann")
            done = await quick(thread=thread, fallback=recovery._plan.fallbacks).execute(operation, key="fetch")
            assert (done.unwrap(), done.attempts, done.layer) == ("done", 4, RecoveryLayer.USER_INTERVENTION)
            again = await recovery.execute(operation, key="fetch")
            assert (again.value, again.replayed, calls) == ("done", True, [1, 2, 3, 4])
            found = await cache.get("rates")
            assert found.value == "done"

    asyncio.run(story())
