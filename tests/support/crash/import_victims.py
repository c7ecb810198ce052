"""A process that imports a bundle and is killed at a chosen call of the store, before it or right after it."""

from __future__ import annotations

import os
import signal
from typing import Any

from backstay.bundle import import_bundle
from backstay.store.open import open_backend
from backstay.thread.store import Store, make_services

CHANGING = {"commit", "commit_all", "write", "put_record", "reserve"}


class Mortal:
    """A store that counts the calls which change something, and ends the process at one of them."""

    def __init__(self, backend: Any, deadline: int, after: bool) -> None:
        self._backend = backend
        self._deadline = deadline
        self._after = after
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._backend, name)
        return self._watched(verb) if name in CHANGING else verb

    def _watched(self, verb: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._deadline and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = verb(*arguments, **options)
            if self.calls == self._deadline:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call


def import_until(url: str, bundle: str, deadline: int, after: bool) -> None:
    """Import, and die at the call; print how many calls there were if it was never reached."""
    mortal = Mortal(open_backend(url), deadline, after)
    store = Store(mortal, make_services("", None))
    assert import_bundle(bundle, store)
    os.write(1, f"{mortal.calls}\n".encode())
