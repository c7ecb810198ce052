"""A thread that does not grow with its run: old checkpoints go while new ones are stored."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from backstay.engine.moment import Moment
from backstay.engine.store_sink import StoreSink
from backstay.engine.trigger import check_every
from backstay.thread.retention import Keep, Pruned
from backstay.thread.thread_async import AsyncThread


class Retained:
    """Stores checkpoints, and after every ``n``-th deletes what the rules do not want to keep.

    The newest, those with tags, with forks and with pending interrupts stay in any case: see ``Keep``. Handed to a run
    as ``sink=lambda store: Retained(Keep(last=10), store)``.
    """

    def __init__(self, keep: Keep, sink: StoreSink, n: int = 1) -> None:
        self.inside = (sink,)
        self.deleted = 0  # checkpoints
        self._keep = keep
        self._sink = sink
        self._n = check_every(n)
        self._told = 0

    def on_checkpoint(self, state: Mapping[str, Any], moment: Moment) -> Awaitable[None] | None:
        """Store, then tidy up. An error of either ends the run; what was stored is stored."""
        answer = self._sink.on_checkpoint(state, moment)
        thread = self._sink.thread
        if answer is not None:
            return self._wait(answer)
        if self._is_due() and not isinstance(thread, AsyncThread):
            self._count(thread.prune(self._keep))
        return None

    async def _wait(self, answer: Awaitable[None]) -> None:
        await answer
        thread = self._sink.thread
        if self._is_due() and isinstance(thread, AsyncThread):
            self._count(await thread.prune(self._keep))

    def _is_due(self) -> bool:
        self._told += 1
        return self._told % self._n == 0

    def _count(self, pruned: Pruned) -> None:
        self.deleted += pruned.deleted

    def __repr__(self) -> str:
        return f"Retained({self._keep!r}, every {self._n})"
