"""The reports of a run: its events while it runs, and its result.

The events of a run start with ``RunStarted`` and end with exactly one ``RunEnded``, however the run ends. They name
nodes, keys and error types, never values of the state, so a log of them contains no secrets. Only ``Token`` carries
data, which its node chose to show.

A **position** names one visit of one node in one run: it is the same after a restart, and differs from the position of
every other node, visit and parallel branch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backstay.errors import BackstayError, Rejected
from backstay.model.checkpoint import Checkpoint
from backstay.model.decision import DecisionKind, Interrupt
from backstay.operations.interrupts import InterruptRecord

__all__ = [
    "CheckpointSaved",
    "DecisionTaken",
    "EffectReplayed",
    "Event",
    "Interrupted",
    "NodeAttemptFailed",
    "NodeFinished",
    "NodeStarted",
    "RunEnded",
    "RunStarted",
    "SinkFailed",
    "Token",
]


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


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run waits for a decision."""

    record: InterruptRecord | Interrupt = field(hash=False)


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
    | EffectReplayed
    | SinkFailed
    | RunEnded
)


class Status(StrEnum):
    """How a run ended, or why it waits."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"  # waits for decisions
    DEFERRED = "deferred"  # waits, because a person chose to decide later; it asks again when it resumes
    REJECTED = "rejected"  # a person said no: the run is over, and the guarded node did not run
    FAILED = "failed"  # a node failed; everything committed before is stored, and the run can be resumed
    CANCELLED = "cancelled"  # the run can be resumed


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


async def stream(run: Callable[[Callable[[Event], None]], Awaitable[Result]]) -> AsyncIterator[Event]:
    """Yield the events of a run as they happen. Leaving the loop early cancels the run, which can be resumed."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)  # plain nodes run in worker threads

    running = asyncio.ensure_future(run(put))
    running.add_done_callback(lambda _: loop.call_soon(events.put_nowait, None))
    try:
        while (event := await events.get()) is not None:
            yield event
        await running
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running])
