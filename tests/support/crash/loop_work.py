"""What killed processes do in ``test_loops`` and ``test_recovery_kills``: they die at a given call of the store.

The agent's deeds are lines in a file that only grows, so that what was really done can be counted afterwards.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import backstay
from backstay.retry import ErrorRecovery, RecoveryResult, RetryPolicy
from backstay.store.open import open_backend
from backstay.thread.loop import Loop
from backstay.thread.store import Store, make_services
from backstay.thread.turn import Turn

TTL_S = 0.5
DEADLY = (
    "acquire",
    "release",
    "reserve",
    "commit",
    "put_record",
)
"""The verbs by which a loop writes. Renewals come from another thread, at any time."""


class World:
    """The world outside: what an agent did to it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def do(self, what: str) -> str:
        """Do something that can be seen afterwards, and cannot be undone."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, f"{what}\n".encode())
        os.close(descriptor)
        return f"did {what}"

    @property
    def deeds(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []


class Deadly:
    """A store that kills its process right before, or right after, the nth call that writes."""

    def __init__(self, backend: Any, number: int, after: bool) -> None:
        self._backend = backend
        self._number = number
        self._after = after
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        done = getattr(self._backend, verb)
        if verb not in DEADLY or threading.current_thread() is not threading.main_thread():
            return done

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(verb)
            deadly = len(self.calls) == self._number
            if deadly and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = done(*arguments, **options)
            if deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call


def story(thread: backstay.Thread, world: World, careless: bool = False) -> Loop:
    """Run the agent until it is done or waits for somebody. A careless one does its deeds without the ledger."""

    def do(turn: Turn, key: str, what: str) -> None:
        done = world.do(what) if careless else turn.effect(key, world.do, what)
        turn.append(log=[done])
        turn.usage(tokens=10)

    with thread.loop({"log": []}, limit=3, ttl=TTL_S) as loop:
        for turn in loop:
            if turn.iteration == 1:
                do(turn, "look", "look")
            elif turn.iteration == 2:
                do(turn, "quote", "quote")
                args = turn.approve("pay", {"amount": 5})
                do(turn, "pay", f"pay {args['amount']}")
            else:
                do(turn, "mail", "mail ann")
                do(turn, "mail 2", "mail bob")
                loop.finish(answer=42)
    return loop


def live_and_die(url: str, thread: str, path: str, number: int, after: bool, careless: bool) -> None:
    """Run the story in a process that dies at a call; if it does not, tell which calls there were."""
    backend = Deadly(open_backend(url), number, after)
    with Store(backend, make_services("", None)) as store:
        story(store.thread(thread), World(path), careless)
    os.write(1, (" ".join(backend.calls) + "\n").encode())


# An operation with recovery, of a service that is down for the first four attempts ----------------------------------


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


def recover_and_die(url: str, path: str, number: int, after: bool, deadly_call: int, careless: bool) -> None:
    """Do it in a process that dies at a call of the store, or of the service; if it lives, tell which calls it made."""
    backend = Deadly(open_backend(url), number, after)
    with Store(backend, make_services("", None)) as store:
        attempt_it(None if careless else store.thread("t"), World(path), deadly_call)
    os.write(1, (" ".join(backend.calls) + "\n").encode())
