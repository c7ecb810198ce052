"""Collect the events of a run, and check that they are the events of one whole run, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from backstay.engine.events import (
    CheckpointSaved,
    EffectReplayed,
    Event,
    NodeAttemptFailed,
    NodeFinished,
    NodeStarted,
    RunEnded,
    RunStarted,
    SinkFailed,
    Token,
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
        self._closed: dict[str, NodeFinished | NodeAttemptFailed] = {}  # how a position last ended
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
            case NodeFinished() | NodeAttemptFailed():
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

    def _node_ended(self, event: NodeFinished | NodeAttemptFailed) -> str | None:
        start = self._open.pop(event.position, None)
        if start is None:
            return f"{event.position} is not running"
        if event.node != start.node:
            return f"{event.position} began as {start.node!r} and ends as {event.node!r}"
        if isinstance(event, NodeAttemptFailed) and event.attempt != start.attempt:
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
