"""Telling the sink: one moment after the other, each with everything that is needed to go on from it.

All graphs and branches of a run tell through one recorder, so what is stored is always the whole position at once. The
state of every graph in it is one that was committed: commits do not wait for anything in their middle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from backstay.engine import event
from backstay.engine.moment import Cause, Moment, StepRecord
from backstay.engine.options import RunOptions
from backstay.engine.position import Activation, plain_frames
from backstay.engine.sink import CheckpointSink, tell
from backstay.engine.store_sink import StoreSink
from backstay.engine.trigger import Counter
from backstay.model.checkpoint import Notes
from backstay.model.continuation import End, FanOut, NextNode
from backstay.model.frame import FrameStack
from backstay.model.interrupt import Interrupt


class Recorder:
    """The run's identity and place, and the sink that is told of it."""

    def __init__(
        self,
        root: Activation,
        options: RunOptions,
        store: StoreSink | None,
        sink: CheckpointSink | None,
        trigger: Counter,
        emit: Callable[[event.Event], None],
    ) -> None:
        self.root = root
        self.options = options
        self.store = store
        self.sink = sink
        self.emit = emit
        self.steps = 0
        self.is_spoiled = False  # a node changed the live state in place, and it could not be undone
        self.tokens = 0
        self.cost = 0.0
        self.waits: list[str] = []  # ids of the interrupts that the run waits for
        self.first_step: int | None = None  # what the thread's first checkpoint is called
        self._run: tuple[int, Mapping[str, Any]] = (0, {})  # what is stored of the options, and of which version
        self._trigger = trigger
        self.saving = asyncio.Lock()  # held while the sink is told
        self._moves = 0
        self._moves_told = -1

    def moved(self) -> None:
        """Take note that the run stands somewhere else than the last time the sink was told."""
        self._moves += 1

    def stands_as_stored(self) -> None:
        """Take note that the run stands where the newest stored checkpoint says."""
        self._moves_told = self._moves

    @property
    def is_current(self) -> bool:
        """Tell whether the newest stored checkpoint describes where the run stands, but for jobs that finished."""
        return self.store is not None and self._moves == self._moves_told

    @property
    def head_id(self) -> str:
        """Return the id of the newest stored checkpoint."""
        assert self.store is not None
        assert self.store.head is not None
        return self.store.head.id

    async def tell(
        self,
        activation: Activation,
        node: str,
        cause: Cause,
        *,
        mutated: bool = True,
        requested: bool = False,
        at_barrier: bool = False,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Tell the sink where the run stands, if the trigger wants it."""
        if self.sink is None:
            return
        moment = Moment(
            node_id=node,
            step=self.steps,
            graph_id=activation.graph.name,
            run_id=self.options.run_id,
            attempt=self.options.attempt,
            trigger=cause,
            mutated=mutated,
            requested=requested,
            at_barrier=at_barrier,
            frames=self._frames,
            live=self.root.live,
            own=activation.live,
            record=lambda: self._record(cause, interrupt),
        )
        if not self._trigger.wants(moment):
            return
        async with self.saving:
            await self._told(moment)

    async def _told(self, moment: Moment) -> None:
        assert self.sink is not None
        before = self.store.head if self.store is not None else None
        moves = self._moves
        live = self.root.live
        try:
            await tell(self.sink, live.schema.stored(live.values), moment)
        except Exception as error:
            sink, kind = type(self.sink).__name__, type(error).__name__
            self.emit(event.SinkFailed(sink, kind, moment.step, moment.trigger))
            raise
        head = self.store.head if self.store is not None else None
        if head is not before:
            self._moves_told = moves
        saved = head.id if head is not None and head is not before else None
        self.emit(event.CheckpointSaved(saved, moment.step, moment.trigger, moment.node_id))

    def _frames(self) -> FrameStack:
        frames = plain_frames(self.root, self.steps, self.waits)
        frames[0]["state"] = dict(self.root.live.schema.stored(self.root.live.values))
        return FrameStack.from_plain(frames)

    def _record(self, cause: Cause, interrupt: Interrupt | None) -> StepRecord:
        options, root = self.options, self.root
        notes: Notes = {
            "run_id": options.run_id,
            "attempt": options.attempt,
            "graph": root.graph.name,
            "graph_hash": options.graph_hash,
            "last_node": root.last,
            "trigger": cause,
            "tokens_used": self.tokens,
            "cost_estimate": self.cost,
        }
        match root.todo:
            case NextNode(node=node):
                notes["next_node"] = node
            case FanOut() | End() as continuation:
                notes["continuation"] = continuation
        if interrupt is not None:
            notes["interrupt"] = interrupt
            notes["resume_hint"] = interrupt.prompt or None
        if options.metadata:
            notes["metadata"] = options.metadata
        if self.store is not None and self.store.head is None and self.first_step is not None:
            notes["step"] = self.first_step
        frames = plain_frames(root, self.steps, self.waits)
        if self._run[0] != options.version:
            self._run = (options.version, options.to_plain())
        return StepRecord(frames, root.path, self._run[1], options.version, notes)
