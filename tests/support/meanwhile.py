"""A store between whose calls something else happens: somebody else acts, or the process dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import backstay
from backstay.store.base import Backend
from backstay.thread.access import access_of


class Meanwhile:
    """A store that does something else right before some of its calls, in the middle of the caller's operation."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._actions: dict[str | int, Callable[[], object]] = {}
        self.calls = 0

    def before(self, when: str | int, action: Callable[[], object]) -> None:
        """Do this before a verb is next called, or before the call with this number; the first is 1."""
        self._actions[when] = action

    @property
    def is_over(self) -> bool:
        """Tell whether everything that was to happen has happened."""
        return not self._actions

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if callable(found):
            self.calls += 1
            for when in (name, self.calls):
                self._actions.pop(when, lambda: None)()
        return found


class Dies(BaseException):
    """Ends the process, as far as the store can tell."""


def die() -> NoReturn:
    """Be the end of the process."""
    raise Dies


def dies_after(calls: int, store: backstay.Store, operation: Callable[[Backend], object]) -> bool:
    """Run an operation whose process dies after so many calls of the store; False if it was done by then."""
    dying = Meanwhile(access_of(store).store)
    dying.before(calls + 1, die)
    try:
        operation(dying)
    except Dies:
        return True
    return False
