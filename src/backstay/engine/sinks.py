"""Sinks: where the checkpoints of a run go.

    graph.run_sync(thread, input, sink=sinks.MemorySink())                            # in addition to the thread
    graph.run_sync(thread, input, sink=lambda own: sinks.EveryN(5, own))              # around the thread's own sink

The engine commits a node, chooses the next one, calls ``on_checkpoint``, and waits until the sink is done before the
next node starts: a sink receives events in order, each with its next node, and its errors reach the run. The state is
borrowed: it is the run's own, without the fields that are not stored, and valid until the call is done. A sink that
keeps it must copy it.

Wrappers pass on some events, and always the start, the pauses and the end of a run (``event.forced``). They remember
each run separately, so one sink may serve many runs. They remember only events that their sink took without an error,
so after a failure the next event is due at once.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

from backstay.codec import decode, encode
from backstay.engine.state import RunState
from backstay.engine.triggers import Cause, CheckpointEvent, StepRecord, check_every, check_seconds
from backstay.errors import BackstayError, Conflict, Fenced, InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta, SavedCheckpoint
from backstay.model.frame import Frame
from backstay.operations import rows
from backstay.operations.arguments import StepChange, check_snapshot_fits, check_step_fits, encode_snapshot, encode_step
from backstay.operations.drivers import finish
from backstay.operations.retention import Keep
from backstay.operations.save import MakeChange, SaveRequest, save_change
from backstay.thread.access import handle_of
from backstay.thread.thread import AsyncThread, Thread

__all__ = [
    "CheckpointSink",
    "EveryN",
    "IfChanged",
    "MemorySink",
    "NoSink",
    "OnFailure",
    "OnlyNodes",
    "Retained",
    "SinkFailure",
    "SinkWarning",
    "StoreSink",
    "Tee",
    "Throttle",
]

if TYPE_CHECKING:
    from asyncio import Future

RUNS_MAX: Final = 100_000  # unfinished runs that a wrapper remembers; then it forgets the least recent one
FAILURES_MAX: Final = 100  # errors that OnFailure keeps; the oldest go first

State = Mapping[str, Any]
MaybeAwaitable = Awaitable[None] | None
Policy = Literal["raise", "warn", "degrade"]
T = TypeVar("T")

_ENDS: Final[frozenset[Cause]] = frozenset({"end", "rejected", "failed", "cancelled"})


class SinkWarning(UserWarning):
    """A sink failed, and the run continues without it."""


@runtime_checkable
class CheckpointSink(Protocol):
    """Receives checkpoints. ``on_checkpoint`` may be a plain or a coroutine function."""

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Store a state, or skip it. The state is borrowed, so copy what you keep. Raise if it could not be stored."""


async def notify(sink: CheckpointSink, state: State, event: CheckpointEvent) -> None:
    """Call a sink, and wait until it is done."""
    answer = sink.on_checkpoint(state, event)
    if answer is not None:
        await answer


def check_sink(sink: object) -> CheckpointSink:
    """Return a sink, checked. The class of a sink, passed without calling it, is not a sink."""
    if isinstance(sink, type) or not isinstance(sink, CheckpointSink):
        shown = sink.__qualname__ if isinstance(sink, type) else type(sink).__qualname__
        raise InvalidInput(f"{shown} is not a sink", hint="Pass an object with on_checkpoint(state, event)")
    return sink


class NoSink:
    """Stores nothing."""

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "NoSink()"


# The thread -------------------------------------------------------------------------------------------------------


class StoreSink:
    """Saves each event as the next checkpoint of a thread, and writes only what is new.

    It remembers when each key was last replaced and how long its value was, so it need not see every event: wrapped in
    ``EveryN`` it saves the changes of several events at once. It encodes the change before it awaits anything, because
    parallel branches of the run continue in the meantime.
    """

    def __init__(self, thread: Thread | AsyncThread) -> None:
        if not isinstance(thread, Thread | AsyncThread):
            raise InvalidInput(
                f"a run is stored in a thread, not in {type(thread).__name__}", hint='Pass store.thread("name")'
            )
        self.thread = thread
        self._handle = handle_of(thread)
        self.head: CheckpointMeta | None = None
        self._stored: dict[str, tuple[int, int]] = {}  # key -> the version that replaced it, and its length then
        self._version = 0
        self._path = 0
        self._new_path = False
        self._run_version = 0
        self._is_sure = True  # False after a save whose outcome is unknown

    def start(self, checkpoint: Checkpoint, run_state: RunState) -> None:
        """Start a new run on a checkpoint with the same state."""
        self.head = checkpoint.meta
        self._new_path = True
        self._remember(run_state)

    def resume(self, checkpoint: Checkpoint, run_state: RunState, is_same: bool = True) -> None:
        """Resume from a checkpoint with the same state, or with ``is_same=False`` with a migrated state."""
        self.head = checkpoint.meta
        self._path = len(checkpoint.path)
        self._run_version = 1
        self._is_sure = is_same
        self._remember(run_state)

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Save what is new."""
        assert event.record is not None
        record, run_state, handle = event.record(), event.run_state, self._handle
        if record.writes is not None:
            return self._write(record)
        make = self._encode(state, run_state, record)
        request = SaveRequest(record.fields)
        save = partial(save_change, services=handle.services, cursor=handle.cursor, make=make, request=request)
        self._is_sure = False
        if handle.blocking:
            self._saved(handle.run(save), run_state, record)
            return None

        async def wait() -> None:
            saving = handle.start(save)
            try:
                await finish(saving)
            finally:  # a cancelled run knows what is stored, too
                if _has_succeeded(saving):
                    self._saved(saving.result(), run_state, record)

        return wait()

    def _write(self, record: StepRecord) -> MaybeAwaitable:
        """Store the progress of single parallel jobs. Their checkpoint stays the newest."""
        assert self.head is not None
        arguments = (self._handle.cursor.branch, self.head.id, record.writes or [], True)
        if self._handle.blocking or not record.writes:
            if record.writes:
                self._handle.run(rows.write, *arguments)
            record.is_stored = True
            return None

        async def wait() -> None:
            writing = self._handle.start(rows.write, *arguments)
            try:
                await finish(writing)
            finally:
                record.is_stored = _has_succeeded(writing)

        return wait()

    def has_options(self, version: int) -> bool:
        """Return whether the newest checkpoint has this version of the run's options."""
        return self.head is not None and self._is_sure and self._run_version == version

    def _saved(self, saved: SavedCheckpoint, run_state: RunState, record: StepRecord) -> None:
        self.head = saved
        record.is_stored = True
        self._path, self._new_path = len(record.path), False
        self._run_version = record.run_version
        self._remember(run_state)
        self._is_sure = True  # last, so that an interruption before this line makes the next save compare everything

    def _remember(self, run_state: RunState) -> None:
        self._version = run_state.version
        self._stored = {
            key: (version, len(value) if type(value := run_state.values[key]) is list else 0)
            for key, version in run_state.replaced.items()
        }

    def _encode(self, state: State, run_state: RunState, record: StepRecord) -> MakeChange:
        change = StepChange(
            frames=record.frames,
            path=list(record.path[self._path :]),
            new_path=self._new_path,
            run=None if record.run_version == self._run_version else record.run,
        )
        if not self._is_sure:  # a cancelled save may or may not be stored: compare the whole state with the store
            change.path, change.new_path, change.run = list(record.path), True, record.run
        if run_state.schema.snapshots or not self._is_sure:
            return partial(check_snapshot_fits, encode_snapshot(state, change))
        if run_state.version != self._version or self.head is None:
            append: dict[str, Any] = {}
            put: dict[str, Any] = {}
            for key, version in run_state.replaced.items():
                if not run_state.schema.is_stored(key):
                    continue
                value, stored = run_state.values[key], self._stored.get(key)
                if stored is None or stored[0] != version:
                    put[key] = value
                elif type(value) is list and len(value) > stored[1]:
                    append[key] = value[stored[1] :]
            gone = [key for key in run_state.gone if key in self._stored]
            change.append, change.put, change.delete = append, put, gone
        return partial(check_step_fits, encode_step(change))


def _has_succeeded(work: Future[Any]) -> bool:
    return work.done() and not work.cancelled() and work.exception() is None


class Retained:
    """Saves checkpoints in a thread, and after every ``n``-th deletes those that ``Keep`` does not protect.

    So the thread does not grow with the length of the run. The newest checkpoint and those with tags, forks or pending
    interrupts always stay. Pass it to a run as ``sink=lambda own: Retained(Keep(last=10), own)``.
    """

    def __init__(self, keep: Keep, sink: StoreSink, n: int = 1) -> None:
        self.inside = (sink,)
        self.deleted = 0  # checkpoints
        self._keep = keep
        self._sink = sink
        self._n = check_every(n)
        self._events = 0

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Save, then prune. An error in either ends the run; a saved checkpoint stays saved."""
        answer = self._sink.on_checkpoint(state, event)
        thread = self._sink.thread
        if answer is not None:
            return self._wait(answer)
        if self._is_due() and not isinstance(thread, AsyncThread):
            self.deleted += thread.prune(self._keep).deleted
        return None

    async def _wait(self, answer: Awaitable[None]) -> None:
        await answer
        thread = self._sink.thread
        if self._is_due() and isinstance(thread, AsyncThread):
            self.deleted += (await thread.prune(self._keep)).deleted

    def _is_due(self) -> bool:
        self._events += 1
        return self._events % self._n == 0

    def __repr__(self) -> str:
        return f"Retained({self._keep!r}, every {self._n})"


# Memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _EncodedFrame:
    run_id: str
    graph_id: str
    node_id: str
    step: int
    values: dict[str, bytes]  # encoded

    def frame(self) -> Frame:
        state = {key: decode(data) for key, data in self.values.items()}
        return Frame(graph_id=self.graph_id, node_id=self.node_id, cursor=self.step, state=state)


class MemorySink:
    """Stores a frame of each commit in memory, with the state of its graph: for debugging and tests.

    States are stored encoded, and values that did not change are stored once. Frames are decoded for each caller and
    share nothing with the run. With ``max_frames``, the oldest frames are dropped first.
    """

    def __init__(self, max_frames: int | None = None) -> None:
        self.max_frames = None if max_frames is None else check_every(max_frames)
        self._frames: deque[_EncodedFrame] = deque(maxlen=self.max_frames)
        self._lock = threading.RLock()  # reentrant: a signal handler may call a method

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> None:
        """Store a copy, unless there is no commit yet or nothing is new since this run's newest frame."""
        if event.step == 0:
            return
        if event.node_state is not None and event.node_state is not event.run_state:
            state = event.node_state.schema.stored(event.node_state.values)
        values = {key: encode(value, key) for key, value in state.items()}
        with self._lock:
            newest = next((each for each in reversed(list(self._frames)) if each.run_id == event.run_id), None)
            if newest is not None:
                if (newest.step, newest.node_id, newest.values) == (event.step, event.node_id, values):
                    return
                for key, data in newest.values.items():
                    if values.get(key) == data:
                        values[key] = data  # the same object, so that equal values take memory once
            self._frames.append(_EncodedFrame(event.run_id, event.graph_id, event.node_id, event.step, values))

    @property
    def frames(self) -> list[Frame]:
        """The frames, oldest first. They belong to the caller."""
        with self._lock:
            frames = list(self._frames)
        return [each.frame() for each in frames]

    def into_frames(self) -> list[Frame]:
        """Return the frames and drop them from the sink."""
        with self._lock:
            empty: deque[_EncodedFrame] = deque(maxlen=self.max_frames)
            frames, self._frames = self._frames, empty
        return [each.frame() for each in frames]

    @property
    def size_bytes(self) -> int:
        """The size of all encoded values; values that frames share count once."""
        with self._lock:
            frames = list(self._frames)
        return sum({id(data): len(data) for each in frames for data in each.values.values()}.values())

    def __len__(self) -> int:
        return len(self._frames)

    def __bool__(self) -> bool:
        return True  # an empty sink is still a sink

    def __repr__(self) -> str:
        with self._lock:
            frames = list(self._frames)
        newest = f", newest {frames[-1].node_id!r}" if frames else ""
        return f"<MemorySink: {len(frames)} frames{newest}>"


# Wrappers that skip events ----------------------------------------------------------------------------------------


class _Wrapper:
    """A sink around one other sink."""

    def __init__(self, sink: CheckpointSink) -> None:
        self.sink = check_sink(sink)

    @property
    def inside(self) -> tuple[CheckpointSink, ...]:
        """The sinks that this one notifies."""
        return (self.sink,)


class _Filter(_Wrapper, ABC, Generic[T]):
    """Passes on the events that are due. It remembers one value per unfinished run."""

    def __init__(self, sink: CheckpointSink) -> None:
        super().__init__(sink)
        self._runs: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.RLock()  # reentrant: a signal handler may call a method

    @abstractmethod
    def due(self, state: State, event: CheckpointEvent, known: T | None) -> tuple[bool, T | None, T | None]:
        """Return whether to pass an event on, the value to remember until then, and the value once the sink took it."""

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Pass the event on if it is due."""
        is_due, until_taken, once_taken = self.due(state, event, self._runs.get(event.run_id))
        self._remember(event, until_taken)
        if not is_due:
            return None
        answer = self.sink.on_checkpoint(state, event)
        if answer is None:
            self._remember(event, once_taken)
            return None

        async def wait() -> None:
            await answer
            self._remember(event, once_taken)

        return wait()

    def _remember(self, event: CheckpointEvent, value: T | None) -> None:
        with self._lock:
            self._runs.pop(event.run_id, None)
            if value is not None and event.trigger not in _ENDS:
                self._runs[event.run_id] = value
                if len(self._runs) > RUNS_MAX:
                    self._runs.popitem(last=False)


class EveryN(_Filter[int]):
    """Passes on each ``n``-th event, counted from the last one that it passed on."""

    def __init__(self, n: int, sink: CheckpointSink) -> None:
        super().__init__(sink)
        self.n = check_every(n)

    def due(self, state: State, event: CheckpointEvent, known: int | None) -> tuple[bool, int, int]:
        """Count the skipped events; after a failure the next event is due."""
        count = (known or 0) + 1
        is_due = event.forced or count >= self.n
        return is_due, self.n if is_due else count, 0

    def __repr__(self) -> str:
        return f"EveryN({self.n}, {self.sink!r})"


class Throttle(_Filter[float]):
    """Passes on no event within ``seconds`` after the last one that it passed on."""

    def __init__(self, seconds: float, sink: CheckpointSink, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sink)
        self.seconds = check_seconds(seconds)
        self._clock = clock

    def due(self, state: State, event: CheckpointEvent, known: float | None) -> tuple[bool, float | None, float]:
        """Compare the clock with the last event that the sink took."""
        now = self._clock()
        is_due = event.forced or known is None or now - known >= self.seconds
        return is_due, None if is_due else known, now

    def __repr__(self) -> str:
        return f"Throttle({self.seconds}, {self.sink!r})"


class IfChanged(_Filter[bytes]):
    """Passes on states that differ from the last one that it passed on. It encodes the state to compare it.

    The states of inner graphs and the updates of finished parallel branches count too: a store does not have them yet.
    """

    def due(self, state: State, event: CheckpointEvent, known: bytes | None) -> tuple[bool, bytes | None, bytes]:
        """Compare the digest of the state with the last one that the sink took."""
        outermost, *inside = event.frames()
        contents = [dict(state), [_tasks(outermost)], [_inner(frame) for frame in inside]]
        digest = hashlib.sha256(encode(contents, "state")).digest()
        is_due = event.forced or digest != known
        return is_due, None if is_due else known, digest

    def __repr__(self) -> str:
        return f"IfChanged({self.sink!r})"


def _inner(frame: Frame) -> list[Any]:
    return [frame.graph_id, dict(frame.state), _tasks(frame)]


def _tasks(frame: Frame) -> list[Any]:
    return [
        [task.node, task.visit, task.key, dict(task.update), [_inner(inner) for inner in task.frames]]
        for task in frame.tasks
        if task.done or task.frames
    ]


class OnlyNodes(_Wrapper):
    """Passes on the commits of some nodes: a list of names, or a function of a name."""

    def __init__(self, nodes: str | Iterable[str] | Callable[[str], bool], sink: CheckpointSink) -> None:
        super().__init__(sink)
        self._holds: Callable[[str], Any]
        if callable(nodes):
            self._holds, self._shown = nodes, getattr(nodes, "__qualname__", repr(nodes))
        else:
            names = frozenset({nodes} if isinstance(nodes, str) else nodes)
            self._holds, self._shown = names.__contains__, repr(sorted(names))

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Pass the event on if it is a commit of one of the nodes."""
        if event.forced or self._holds(event.node_id):
            return self.sink.on_checkpoint(state, event)
        return None

    def __repr__(self) -> str:
        return f"OnlyNodes({self._shown}, {self.sink!r})"


# Several sinks, and failures --------------------------------------------------------------------------------------


class Tee:
    """Notifies several sinks, one after the other. A failing sink does not keep the others from being notified.

    After all sinks were notified, the errors are raised as one ExceptionGroup.
    """

    def __init__(self, *sinks: CheckpointSink) -> None:
        self.inside = tuple(map(check_sink, sinks))

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Notify all sinks; from the first asynchronous sink on, this is asynchronous too."""
        rest, errors = iter(self.inside), list[Exception]()
        for sink in rest:
            try:
                answer = sink.on_checkpoint(state, event)
            except Exception as error:
                errors.append(error)
            else:
                if answer is not None:
                    return self._wait(answer, rest, errors, state, event)
        _raise_all(errors)
        return None

    async def _wait(
        self,
        answer: Awaitable[None],
        rest: Iterator[CheckpointSink],
        errors: list[Exception],
        state: State,
        event: CheckpointEvent,
    ) -> None:
        try:
            await answer
        except Exception as error:
            errors.append(error)
        for sink in rest:
            try:
                await notify(sink, state, event)
            except Exception as error:
                errors.append(error)
        _raise_all(errors)

    def __repr__(self) -> str:
        return f"Tee({', '.join(map(repr, self.inside))})"


def _raise_all(errors: list[Exception]) -> None:
    if errors:
        raise ExceptionGroup(f"{len(errors)} of the sinks failed", errors)


class Then:
    """Notifies two sinks, the second only if the first succeeded, so that nothing is shown that is not stored."""

    def __init__(self, first: CheckpointSink, second: CheckpointSink) -> None:
        self.inside = (check_sink(first), check_sink(second))

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Notify both; asynchronous only if one of them is."""
        first, second = self.inside
        answer = first.on_checkpoint(state, event)
        if answer is None:
            return second.on_checkpoint(state, event)

        async def wait() -> None:
            await answer
            await notify(second, state, event)

        return wait()

    def __repr__(self) -> str:
        return f"Then({', '.join(map(repr, self.inside))})"


@dataclass(frozen=True, slots=True)
class SinkFailure:
    """One error of a sink."""

    node_id: str
    step: int
    trigger: Cause
    error: Exception


class OnFailure(_Wrapper):
    """Decides what happens to a run whose sink fails.

    ``raise``: the run gets the error. ``warn``: a SinkWarning each time, and the run continues. ``degrade``: one
    SinkWarning, and from this event on the ``fallback`` is notified instead, if there is one. The errors are in
    ``failures``, ``failure_count`` and ``degraded``.

    Fenced and Conflict always reach the run: another writer has taken over, and this run would do its work twice.
    """

    def __init__(
        self, sink: CheckpointSink, policy: Policy = "raise", *, fallback: CheckpointSink | None = None
    ) -> None:
        super().__init__(sink)
        if policy not in get_args(Policy):
            raise InvalidInput(f"policy {policy!r:.40} is not known", hint=f"Use one of {', '.join(get_args(Policy))}")
        if fallback is not None and policy != "degrade":
            raise InvalidInput(f"policy {policy!r} never uses a fallback", hint='Use policy="degrade"')
        self.policy = policy
        self.fallback = None if fallback is None else check_sink(fallback)
        self.failures: deque[SinkFailure] = deque(maxlen=FAILURES_MAX)
        self.failure_count = 0
        self.degraded = False

    @property
    def inside(self) -> tuple[CheckpointSink, ...]:
        """The sinks that this one notifies."""
        return (self.sink,) if self.fallback is None else (self.sink, self.fallback)

    def on_checkpoint(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        """Notify the sink, or its fallback."""
        if self.degraded:
            return self._instead(state, event)
        try:
            answer = self.sink.on_checkpoint(state, event)
        except Exception as error:
            self._failed(error, event)
            return self._instead(state, event)
        if answer is None:
            return None

        async def wait() -> None:
            try:
                await answer
            except Exception as error:
                self._failed(error, event)
                instead = self._instead(state, event)
                if instead is not None:
                    await instead

        return wait()

    def _instead(self, state: State, event: CheckpointEvent) -> MaybeAwaitable:
        return self.fallback.on_checkpoint(state, event) if self.degraded and self.fallback is not None else None

    def _failed(self, error: Exception, event: CheckpointEvent) -> None:
        """Record an error; raise it if the run must get it."""
        self.failures.append(SinkFailure(event.node_id, event.step, event.trigger, error))
        self.failure_count += 1
        decisive = (Fenced, Conflict)
        is_decisive = isinstance(error, decisive)
        if isinstance(error, ExceptionGroup):
            is_decisive = error.subgroup(decisive) is not None
        if self.policy == "raise" or is_decisive:
            raise error
        self.degraded = self.policy == "degrade"
        effect = "it gets no further checkpoints" if self.degraded else "it does not have this state"
        # Our own errors never show a value of the state. Other errors may, so only their type is shown.
        what = str(error) if isinstance(error, BackstayError) else type(error).__name__
        warnings.warn(
            f"{type(self.sink).__name__} failed at step {event.step}, after node {event.node_id!r}; {effect}. "
            f"Run {event.run_id!r} continues: {what}",
            SinkWarning,
            stacklevel=3,
        )

    def __repr__(self) -> str:
        fallback = "" if self.fallback is None else f", fallback={self.fallback!r}"
        return f"OnFailure({self.sink!r}, {self.policy!r}{fallback})"
