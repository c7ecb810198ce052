"""What the killed processes of ``test_recovery_kills`` do: one operation with recovery, killed at a given moment.

The service that is called counts its calls in a file that only grows. It is down for the first four attempts.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from loop_work import Deadly, World

import backstay
from backstay.recovery import ErrorRecovery, RecoveryResult, RetryPolicy
from backstay.store.open import open_backend
from backstay.thread.store import Store, make_context

KEY = "call"
POLICY = RetryPolicy(retries=2, first_s=0)


def attempt_it(thread: backstay.Thread | None, world: World, deadly_call: int = 0) -> RecoveryResult[str]:
    """Call the service with recovery, without a thread in a way that forgets; die in the middle of the nth call."""

    def call(attempt: Any) -> str:
        world.do(f"call {attempt.number}")
        if len(world.deeds) == deadly_call:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt.number < 5:
            raise ConnectionRefusedError
        return "answer"

    return ErrorRecovery(POLICY, thread=thread).execute(call, key=KEY, idempotent=True)


def live_and_die(url: str, path: str, number: int, after: bool, deadly_call: int, careless: bool) -> None:
    """Do it in a process that dies at a call of the store, or of the service; if it lives, tell which calls it made."""
    backend = Deadly(open_backend(url), number, after)
    with Store(backend, make_context("", None)) as store:
        attempt_it(None if careless else store.thread("t"), World(path), deadly_call)
    os.write(1, (" ".join(backend.calls) + "\n").encode())
