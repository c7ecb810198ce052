"""The reports of a run: its events while it runs, and its result.

The events of a run start with ``RunStarted`` and end with exactly one ``RunEnded``, however the run ends. The ``repr``
of an event shows names of nodes, keys and error types, never values of the state, so a log of them contains no secrets.
Two events carry values: ``NodeFinished`` has the node's update, and ``Token`` has data that its node chose to show.

A ``Stream`` yields the events of a run, or its states, or its updates. Between the run and the reader is a ``Feed`` of
limited length: a run waits for a slow reader before it starts another node.

A **position** names one visit of one node in one run: it is the same after a restart, and differs from the position of
every other node, visit and parallel branch.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar, get_args

from backstay.errors import BackstayError, InvalidInput, Rejected
from backstay.model.checkpoint import Checkpoint
from backstay.model.decision import DecisionKind, Interrupt
from backstay.operations.drivers import finish
from backstay.operations.interrupts import InterruptRecord

__all__ = [
    "CheckpointSaved",
    "DecisionTaken",
    "EffectReplayed",
    "Event",
    "Interrupted",
    "Missed",
    "NodeAttemptFailed",
    "NodeFinished",
    "NodeStarted",
    "RunEnded",
    "RunStarted",
    "SinkFailed",
    "Stream",
    "Token",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run starts, or resumes where it stopped."""

    run_id: str
    graph: str
    attempt: int = 1  # 1 for the start, one more for each resume
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """A node's function is about to be called, or its subgraph entered."""

    position: str
    node: str
    visit: int = 1  # how often the run entered this node, including this time
    key: str | None = None  # which of several parallel jobs
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class NodeFinished:
    """A node is done."""

    position: str
    node: str
    update_keys: tuple[str, ...] = ()  # the keys it updates
    seconds: float = 0.0
    update: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class NodeAttemptFailed:
    """A node raised an error. No result of this attempt is stored."""

    position: str
    node: str
    attempt: int
    error: str  # the name of its type
    will_retry: bool = False
    wait_s: float = 0.0  # until the next attempt


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The sink received a checkpoint and is done with it."""

    checkpoint_id: str | None  # None if the sink stored no new checkpoint
    step: int
    trigger: str
    node: str | None = None  # the node that committed


@dataclass(frozen=True, slots=True, repr=False)
class Interrupted:
    """The run waits for a decision."""

    record: InterruptRecord | Interrupt = field(hash=False)

    def __repr__(self) -> str:
        return f"Interrupted({self.record.id!r})"  # the question may be secret


@dataclass(frozen=True, slots=True)
class DecisionTaken:
    """The run uses a person's decision."""

    interrupt_id: str
    kind: DecisionKind


@dataclass(frozen=True, slots=True)
class Token:
    """Output that a node shows while it works. It is not stored, and not sent again after a restart."""

    position: str
    node: str
    data: Any = field(hash=False, repr=False)


@dataclass(frozen=True, slots=True)
class Missed:
    """The reader of a stream was too slow: this many events from inside a node were dropped here."""

    count: int


@dataclass(frozen=True, slots=True)
class EffectReplayed:
    """An effect was done earlier: its stored result was used."""

    position: str
    key: str


@dataclass(frozen=True, slots=True)
class SinkFailed:
    """A sink raised an error, and the run ends because of it."""

    sink: str  # the name of its class
    error: str  # the name of its type
    step: int
    trigger: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has stopped; this is the last event."""

    status: str  # completed, interrupted, failed, cancelled, rejected
    run_id: str
    step: int = 0  # nodes committed so far in the run
    checkpoint_id: str | None = None  # the newest checkpoint
    error: str | None = None  # the name of its type


Event = (
    RunStarted
    | NodeStarted
    | NodeFinished
    | NodeAttemptFailed
    | CheckpointSaved
    | Interrupted
    | DecisionTaken
    | Token
    | Missed
    | EffectReplayed
    | SinkFailed
    | RunEnded
)


class Status(StrEnum):
    """How a run ended, or why it waits."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"  # waits for decisions
    SLEEPING = "sleeping"  # waits for a time: see ``Result.wake_at``
    DEFERRED = "deferred"  # waits, because a person chose to decide later; it asks again when it resumes
    REJECTED = "rejected"  # a person said no: the run is over, and the guarded node did not run
    FAILED = "failed"  # a node failed; everything committed before is stored, and the run can be resumed
    CANCELLED = "cancelled"  # by a ``Cancellation`` (the run can be resumed), or for good by ``run.cancel()``


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a run. The state is the last committed state, for every status."""

    status: Status
    run_id: str
    state: Any = field(repr=False)  # as declared: a dict, or an instance of the state's class
    values: Mapping[str, Any] = field(repr=False)
    path: tuple[str, ...] = field(repr=False)  # the nodes that ran, in order
    steps: int = 0
    checkpoint: Checkpoint | None = None  # the newest checkpoint; its state is loaded when it is first used
    interrupts: tuple[InterruptRecord, ...] = ()  # the questions it waits for
    error: Exception | None = None
    reason: str = ""  # of a rejection or cancellation

    @property
    def wake_at(self) -> datetime | None:
        """Return when the first sleep or timeout ends, None if there is none."""
        return min((each.deadline for each in self.interrupts if each.deadline is not None), default=None)

    def raise_for_status(self) -> Result:
        """Return this result if the run completed; otherwise raise the error that says why it did not."""
        if self.error is not None:
            raise self.error
        if self.status is Status.REJECTED:
            raise Rejected(f"the run was rejected: {self.reason or 'no reason given'}", reason=self.reason)
        if self.status is not Status.COMPLETED:
            raise BackstayError(
                f"the run is {self.status.value}, not completed",
                thread=None if self.checkpoint is None else self.checkpoint.thread_id,
                hint="Decide on result.interrupts, then call graph.resume(thread)" if self.interrupts else None,
            )
        return self


# Streams ----------------------------------------------------------------------------------------------------------

Mode = Literal["events", "values", "updates"]
MODES: tuple[Mode, ...] = get_args(Mode)
BUFFER = 1000
"""How many items a stream holds by default for a reader that is slower than the run."""

_DROPPED = (Token, EffectReplayed)
"""Events from inside a node, where the run cannot wait for the reader. A node may emit any number of them."""


class Feed:
    """The items of a stream that the reader has not taken yet. Plain nodes add to it from worker threads."""

    def __init__(self, mode: Mode, buffer: int) -> None:
        self.mode = mode
        self.result: Result | None = None
        self._length = buffer
        self._items: deque[Any] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._added, self._taken = asyncio.Event(), asyncio.Event()

    def __call__(self, event: Event) -> None:
        """Add an event, if events are streamed; if it does not fit and the run cannot wait, count it instead."""
        if self.mode != "events":
            return
        if isinstance(event, _DROPPED) and len(self._items) >= self._length:
            with self._lock:
                if self._items and isinstance(self._items[-1], Missed):
                    self._items[-1] = Missed(self._items[-1].count + 1)
                    return
            self.add(Missed(1))
        else:
            self.add(event)

    def add(self, item: Any) -> None:
        """Add an item, and wake the reader."""
        with self._lock:
            self._items.append(item)
            is_awaited = len(self._items) == 1
        if is_awaited and self._loop is not None:
            self._loop.call_soon_threadsafe(self._added.set)

    async def room(self) -> None:
        """Wait until the reader has taken enough. Awaited before each node."""
        while len(self._items) >= self._length:
            self._taken.clear()
            await self._taken.wait()

    async def take(self) -> Any:
        """Return the next item; wait for it."""
        self._loop = asyncio.get_running_loop()
        while not self._items:
            self._added.clear()
            if not self._items:  # otherwise a worker thread has just added one
                await self._added.wait()
        with self._lock:
            item = self._items.popleft()
        self._taken.set()
        return item


class Stream(Generic[T]):
    """The items of a run, as they happen. Leaving the loop early cancels the run, which can be resumed.

    Read it once, with ``async for``. After the loop, ``result`` has the outcome of the run. Leave it early with
    ``aclose()``, or use it in ``async with``: then the run has ended when the block is left.
    """

    def __init__(self, run: Callable[[Feed], Awaitable[Result]], mode: Mode, buffer: int) -> None:
        if mode not in MODES:
            raise InvalidInput(f"mode is {mode!r:.40}", hint=f"Use one of {', '.join(MODES)}")
        if type(buffer) is not int or buffer < 1:
            raise InvalidInput(f"buffer must be a whole number of items, 1 or more, not {buffer!r:.40}")
        self._feed = Feed(mode, buffer)
        # It must not refer to this object: once the reader drops the stream, the event loop ends it and the run.
        self._items = _read(self._feed, run)

    @property
    def result(self) -> Result:
        """Return the outcome of the run, once the stream was read to its end."""
        if self._feed.result is None:
            raise InvalidInput("the stream was not read to its end", hint="Use stream.result after the async for loop")
        return self._feed.result

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        item: T = await self._items.__anext__()
        return item

    async def aclose(self) -> None:
        """End the run, if it has not ended."""
        await self._items.aclose()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_END = object()


async def _read(feed: Feed, run: Callable[[Feed], Awaitable[Result]]) -> AsyncGenerator[Any, None]:
    running = asyncio.ensure_future(run(feed))
    running.add_done_callback(lambda _: feed.add(_END))
    try:
        while (item := await feed.take()) is not _END:
            yield item
        feed.result = await running
    finally:
        if not running.done():
            running.cancel()
            await finish(asyncio.wait([running]))  # the reader may be cancelled again while the run releases its lease
        if not running.cancelled():
            running.exception()  # mark it as seen, or asyncio would log it
