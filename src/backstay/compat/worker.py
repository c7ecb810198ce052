"""Blocking work for callers with an event loop: done in a worker thread, by the same workers that stores use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from backstay.store.base import Backend
from backstay.thread.offload import Offload
from backstay.thread.perform import Flow

T = TypeVar("T")

_WORKERS = Offload(cast(Backend, None))  # what runs here is complete in itself: it asks no store anything


async def in_worker(function: Callable[[], T]) -> T:
    """Call a function in a worker thread and wait for it. It goes on to its end even if the caller is cancelled."""
    return await _WORKERS.run(_call(function))


def _call(function: Callable[[], T]) -> Flow[T]:
    return function()
    yield  # makes it a flow
