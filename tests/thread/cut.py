"""A flow that stands still between two calls of the store: others act meanwhile, or it never goes on, as in a crash."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, TypeVar

from backstay.thread.perform import Flow

import backstay
from backstay.thread.access import access_of

T = TypeVar("T")


class Cut(Generic[T]):
    """A flow run for so many calls; ``is_over`` if it had no more. ``finish`` does the rest."""

    def __init__(self, flow: Flow[T], store: backstay.Store, calls: int) -> None:
        self._flow = flow
        self._store = store
        self.is_over = False
        try:
            self._call = next(flow)
            for _ in range(calls):
                self._call = flow.send(self._call(access_of(store).store))
        except StopIteration:
            self.is_over = True

    def finish(self) -> T:
        """Go on from where it stands."""
        assert not self.is_over
        return self._rest(self._store._backend)

    def _rest(self) -> Generator[Any, Any, T]:
        call = self._call
        try:
            while True:
                try:
                    answer = yield call
                except backstay.BackstayError as error:
                    call = self._flow.throw(error)
                else:
                    call = self._flow.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
