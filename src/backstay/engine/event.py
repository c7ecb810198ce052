"""Events: what a run tells those who watch it, as it happens.

A run's events begin with ``RunStarted`` and end with exactly one ``RunEnded``, however the run ends. They name nodes,
keys and types of errors, never values of the state: a log of them holds no secrets. Only a ``Token`` carries data,
which its node chose to show. ``EventLog`` collects events and can tell whether their order makes sense.

A **position** is the text that names one visit of one node in one run: the same after a restart, and different from
the position of every other node, visit and parallel run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from backstay.model.decision import DecisionKind
from backstay.model.interrupt import Interrupt
from backstay.thread.interrupts import InterruptRecord


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run begins, or goes on where it stopped."""

    run_id: str
    graph: str
    attempt: int = 1  # how often this run was begun or taken up
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """A node's function is about to be called, or its subgraph entered."""

    position: str
    node: str
    visit: int = 1  # how often this node has been entered, this time included
    key: str | None = None  # which of several side by side
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class NodeFinished:
    """A node is done."""

    position: str
    node: str
    update_keys: tuple[str, ...] = ()  # what it wants to change
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """A node raised an error; nothing of this attempt is kept."""

    position: str
    node: str
    attempt: int
    error: str  # the name of its type
    will_retry: bool = False
    wait_s: float = 0.0  # until the next attempt


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The sink was told, and is done with it."""

    checkpoint_id: str | None  # None if the sink stores no checkpoints
    step: int
    trigger: str
    node: str | None = None  # whose commit it was


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run waits for a decision."""

    record: InterruptRecord | Interrupt = field(hash=False)


@dataclass(frozen=True, slots=True)
class DecisionTaken:
    """The run goes on by a decision that somebody made."""

    interrupt_id: str
    kind: DecisionKind


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of output that a node shows while it works. It is not stored and not told again."""

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
    """The run is over for now; no event comes after it."""

    status: str  # completed, interrupted, failed, cancelled, rejected
    run_id: str
    step: int = 0  # nodes committed so far in the run
    checkpoint_id: str | None = None  # the newest one
    error: str | None = None  # the name of its type


Event = (
    RunStarted
    | NodeStarted
    | NodeFinished
    | NodeFailed
    | CheckpointSaved
    | Interrupted
    | DecisionTaken
    | Token
    | EffectReplayed
    | SinkFailed
    | RunEnded
)

E = TypeVar("E")


class EventLog:
    """Collects the events of one run: hand it over as what is called with each."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self.events.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    def check(self) -> None:
        """Raise AssertionError if these cannot be the events of one run, whole and in order."""
        order = _Order()
        for index, event in enumerate(self.events):
            problem = order.problem(event)
            if problem:
                raise AssertionError(f"event {index}, {type(event).__name__}: {problem}")
        if order.ended is None:
            raise AssertionError(f"no RunEnded after {len(self.events)} events")


class _Order:
    """What is known of a run from its events so far."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self._open: dict[str, NodeStarted] = {}  # by position
        self._closed: dict[str, NodeFinished | NodeFailed] = {}  # how a position last ended
        self._step = 0

    def problem(self, event: Event) -> str | None:
        """Say what is wrong with this event coming next, or take it in."""
        if self.ended is not None:
            return "comes after RunEnded"
        if self.started is None and not isinstance(event, RunStarted):
            return "comes before RunStarted"
        match event:
            case RunStarted():
                return self._run_started(event)
            case NodeStarted():
                return self._node_started(event)
            case NodeFinished() | NodeFailed():
                return self._node_ended(event)
            case Token(position=position) | EffectReplayed(position=position):
                return None if position in self._open else f"{position} is not running"
            case CheckpointSaved(step=step) | SinkFailed(step=step):
                return self._counted(step)
            case RunEnded():
                return self._run_ended(event)
            case _:
                return None

    def _run_started(self, event: RunStarted) -> str | None:
        if self.started is not None:
            return "the run has started already"
        self.started = event
        return None if event.attempt >= 1 else f"attempt {event.attempt} is less than 1"

    def _node_started(self, event: NodeStarted) -> str | None:
        position = event.position
        if position in self._open:
            return f"{position} is running already"
        before = self._closed.get(position)
        if isinstance(before, NodeFinished):
            return f"{position} has finished already"
        if before is not None and not before.will_retry:
            return f"{position} has failed and was not to be tried again"
        if event.attempt < 1 or (before is not None and event.attempt != before.attempt + 1):
            return f"{position}: attempt {event.attempt} after {before.attempt if before else 'none'}"
        self._open[position] = event
        return None

    def _node_ended(self, event: NodeFinished | NodeFailed) -> str | None:
        start = self._open.pop(event.position, None)
        if start is None:
            return f"{event.position} is not running"
        if event.node != start.node:
            return f"{event.position} began as {start.node!r} and ends as {event.node!r}"
        if isinstance(event, NodeFailed) and event.attempt != start.attempt:
            return f"{event.position}: attempt {start.attempt} ends as attempt {event.attempt}"
        self._closed[event.position] = event
        return None

    def _run_ended(self, event: RunEnded) -> str | None:
        self.ended = event
        if self.started is not None and event.run_id != self.started.run_id:
            return f"run {self.started.run_id!r} ends as {event.run_id!r}"
        if event.status == "completed" and self._open:
            return f"completed while {', '.join(self._open)} was running"
        return self._counted(event.step)

    def _counted(self, step: int) -> str | None:
        if step < self._step:
            return f"step {step} comes after step {self._step}"
        self._step = step
        return None
