"""The sink that stores a run in a thread, each time no more than what is new since the last.

It remembers of each key when it was last replaced and how long it was, so it does not matter how many moments it was
not told: wrapped in ``EveryN`` it saves once for all of them.

What is saved is encoded before anything is awaited: meanwhile the run's other branches go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from backstay.engine.live import LiveState
from backstay.engine.moment import Moment, StepRecord
from backstay.errors import InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta, SavedCheckpoint
from backstay.store.base import Backend
from backstay.thread.access import handle_of
from backstay.thread.change import StepChange, encode_snapshot, encode_step, fit_snapshot, fit_step
from backstay.thread.save import MakeChange, Request, save_change
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread


class StoreSink:
    """Stores each moment it is told as the thread's next checkpoint."""

    def __init__(self, thread: Thread | AsyncThread) -> None:
        if not isinstance(thread, Thread | AsyncThread):
            raise InvalidInput(
                f"a run is kept in a thread, not in {type(thread).__name__}", hint='Pass store.thread("name")'
            )
        self.thread = thread
        self._handle = handle_of(thread)
        self.head: CheckpointMeta | None = None
        self._kept: dict[str, tuple[int, int]] = {}  # key -> the version that replaced it, and its length then
        self._version = 0
        self._path = 0
        self._new_path = False
        self._run_version = 0
        self._is_sure = True  # False after a save of which nobody knows how far it came

    def begin(self, checkpoint: Checkpoint, live: LiveState) -> None:
        """Begin a new run on a checkpoint whose state is that of ``live``."""
        self.head = checkpoint.meta
        self._new_path = True
        self._remember(live)

    def resume(self, checkpoint: Checkpoint, live: LiveState, is_same: bool = True) -> None:
        """Go on from a checkpoint whose state is that of ``live``, or with ``is_same=False`` was migrated to it."""
        self.head = checkpoint.meta
        self._path = len(checkpoint.path)
        self._run_version = 1
        self._is_sure = is_same
        self._remember(live)

    def on_checkpoint(self, state: Mapping[str, Any], moment: Moment) -> Awaitable[None] | None:
        """Save what is new."""
        assert moment.record is not None
        record = moment.record()
        make, handle = self._encoded(state, moment.live, record), self._handle
        self._is_sure = False
        save = partial(
            save_change, context=handle.context, cursor=handle.cursor, make=make, request=Request(record.notes)
        )
        if not handle.blocking:
            return self._save_async(save, moment.live, record)
        self._saved(handle.run(save), moment.live, record)
        return None

    async def _save_async(
        self, save: Callable[[Backend], SavedCheckpoint], live: LiveState, record: StepRecord
    ) -> None:
        self._saved(await self._handle.arun(save), live, record)

    def _saved(self, saved: SavedCheckpoint, live: LiveState, record: StepRecord) -> None:
        self.head = saved
        self._path, self._new_path = len(record.path), False
        self._run_version = record.run_version
        self._remember(live)
        self._is_sure = True  # last: an interrupt before leaves it unsure, and then all of the state is compared

    def _remember(self, live: LiveState) -> None:
        self._version = live.version
        self._kept = {
            key: (version, len(value) if type(value := live.values[key]) is list else 0)
            for key, version in live.replaced.items()
        }

    def _encoded(self, state: Mapping[str, Any], live: LiveState, record: StepRecord) -> MakeChange:
        change = StepChange(
            frames=record.frames,
            path=list(record.path[self._path :]),
            new_path=self._new_path,
            run=None if record.run_version == self._run_version else record.run,
        )
        if not self._is_sure:  # its caller was cancelled, say: what is stored is found out by comparing all of it
            change.path, change.new_path, change.run = list(record.path), True, record.run
        if live.schema.snapshots or not self._is_sure:
            return partial(fit_snapshot, encode_snapshot(state, change))
        change.append, change.put, change.delete = self._news(live)
        return partial(fit_step, encode_step(change))

    def _news(self, live: LiveState) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        append: dict[str, Any] = {}
        put: dict[str, Any] = {}
        if live.version == self._version and self.head is not None:
            return append, put, []
        for key, version in live.replaced.items():
            if not live.schema.is_stored(key):
                continue
            value = live.values[key]
            kept = self._kept.get(key)
            if kept is None or kept[0] != version:
                put[key] = value
            elif type(value) is list and len(value) > kept[1]:
                append[key] = value[kept[1] :]
        return append, put, [key for key in live.gone if key in self._kept]
