"""Running flows.

An operation on a store is written once, as a *flow*: a generator that yields calls and is sent their answers. A call is
a function of the store (``lambda store: store.head(lane)``). ``drive`` runs a flow here and now; for
callers that have an event loop, ``offload`` runs a whole flow in a worker thread.

An error of the store is thrown into the flow at the line that asked, so that the flow can react and the traceback shows
it. A flow holds no transaction while it waits; the lock of the caller's own handle is the only one held around it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from backstay.store.base import Backend

T = TypeVar("T")

Call = Callable[[Backend], Any]
Flow = Generator[Call, Any, T]


def ask(call: Callable[[Backend], T]) -> Flow[T]:
    """Return the answer to one call of the store, typed; used with ``yield from``."""
    answer: T = yield call
    return answer


def drive(flow: Flow[T], store: Backend, lock: AbstractContextManager[Any] | None = None) -> T:
    """Run a flow to its end in this thread, holding a handle's lock: its operations happen one after the other.

    The lock is held here, not by the flow: a signal handler may raise between any two lines, also between two steps of
    a flow, which would then be left waiting with all that it holds until nobody remembers the error.
    """
    if lock is not None:
        with lock:
            return drive(flow, store)
    try:
        call = next(flow)
        while True:
            try:
                answer = call(store)
            except BaseException as error:
                call = flow.throw(error)
            else:
                call = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's return value, typed by Flow[T]
    finally:
        flow.close()
