"""Sinks: who is told that a run stands at a consistent state, and decides whether, where and how much to keep.

The engine calls ``on_checkpoint`` after a commit and before it looks where to go next, and waits until it is done: a
sink is told in order, and its errors reach the run. The state is lent: it is the run's own, in the projection that
may be stored, and true until the call is done. Who keeps it, copies it.

Wrappers pass on some of what they are told, and always how a run begins, waits and ends (``moment.forced``). What they
remember they remember for each run, so one sink may serve many runs; and they remember only what their sink has taken
without an error, so after one that failed the next moment is due at once.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

from backstay.codec import decode, encode
from backstay.engine.moment import Cause, Moment
from backstay.engine.trigger import check_every, check_seconds
from backstay.errors import BackstayError, Conflict, Fenced, InvalidInput
from backstay.model.frame import Frame

RUNS_MAX: Final = 100_000  # unfinished runs that a wrapper remembers something of; beyond, the longest silent one goes
FAILURES_MAX: Final = 100  # errors that OnFailure keeps; the oldest go

State = Mapping[str, Any]
Answer = Awaitable[None] | None
Policy = Literal["raise", "warn", "degrade"]
T = TypeVar("T")

_ENDS: Final[frozenset[Cause]] = frozenset({"end", "rejected", "failed", "cancelled"})
_DECISIVE: Final = (Fenced, Conflict)


class SinkWarning(UserWarning):
    """A sink failed and the run goes on without it."""


@runtime_checkable
class CheckpointSink(Protocol):
    """Is told of checkpoints. May be a plain or an asynchronous function."""

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Take note of a state, or not. It is lent: copy what is to be kept. Raise if it could not be kept."""


async def tell(sink: CheckpointSink, state: State, moment: Moment) -> None:
    """Tell a sink, and wait until it is done."""
    answer = sink.on_checkpoint(state, moment)
    if answer is not None:
        await answer


class NoSink:
    """Keeps nothing."""

    def on_checkpoint(self, state: State, moment: Moment) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "NoSink()"


# Memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    run_id: str
    graph_id: str
    node_id: str
    step: int
    values: dict[str, bytes]  # encoded

    def frame(self) -> Frame:
        state = {key: decode(data) for key, data in self.values.items()}
        return Frame(graph_id=self.graph_id, node_id=self.node_id, cursor=self.step, state=state)


class MemorySink:
    """Keeps a frame of each commit in memory, with the state of the graph it was made in: to debug, test, look back.

    States are kept encoded. What did not change from one commit to the next is kept once; what is handed out is made
    anew each time and shares nothing with the run. With ``max_frames`` the oldest go.
    """

    def __init__(self, max_frames: int | None = None) -> None:
        self.max_frames = None if max_frames is None else check_every(max_frames)
        self._kept: deque[_Kept] = deque(maxlen=self.max_frames)
        self._lock = threading.RLock()  # a signal handler may come in

    def on_checkpoint(self, state: State, moment: Moment) -> None:
        """Keep a copy, unless there is no commit yet, or nothing is new since this run's newest frame."""
        if moment.step == 0:
            return
        if moment.own is not None and moment.own is not moment.live:
            state = moment.own.schema.stored(moment.own.values)
        values = {key: encode(value, key) for key, value in state.items()}
        with self._lock:
            newest = next((kept for kept in reversed(list(self._kept)) if kept.run_id == moment.run_id), None)
            if newest is not None:
                if (newest.step, newest.node_id, newest.values) == (moment.step, moment.node_id, values):
                    return
                values = {key: _either(newest.values.get(key), data) for key, data in values.items()}
            self._kept.append(_Kept(moment.run_id, moment.graph_id, moment.node_id, moment.step, values))

    @property
    def frames(self) -> list[Frame]:
        """Return the frames, oldest first. They are the caller's own."""
        with self._lock:
            kept = list(self._kept)
        return [each.frame() for each in kept]

    def into_frames(self) -> list[Frame]:
        """Return the frames and keep none of them."""
        with self._lock:
            fresh: deque[_Kept] = deque(maxlen=self.max_frames)
            kept, self._kept = self._kept, fresh
        return [each.frame() for each in kept]

    @property
    def size_bytes(self) -> int:
        """Return how many bytes of encoded values are kept; what frames share counts once."""
        with self._lock:
            kept = list(self._kept)
        return sum({id(data): len(data) for each in kept for data in each.values.values()}.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __bool__(self) -> bool:
        return True  # a sink without frames is a sink

    def __repr__(self) -> str:
        with self._lock:
            kept = list(self._kept)
        newest = f", newest {kept[-1].node_id!r}" if kept else ""
        return f"<MemorySink: {len(kept)} frames{newest}>"


def _either(old: bytes | None, new: bytes) -> bytes:
    return old if old is not None and old == new else new


# Wrappers that choose ---------------------------------------------------------------------------------------------


class _PerRun(Generic[T]):
    """Something remembered of each run that has not ended."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.RLock()  # a signal handler may come in

    def get(self, moment: Moment) -> T | None:
        with self._lock:
            return self._known.get(moment.run_id)

    def drop(self, moment: Moment) -> None:
        with self._lock:
            self._known.pop(moment.run_id, None)

    def put(self, moment: Moment, value: T) -> None:
        if moment.trigger in _ENDS:
            self.drop(moment)
            return
        with self._lock:
            self._known.pop(moment.run_id, None)
            self._known[moment.run_id] = value
            if len(self._known) > RUNS_MAX:
                self._known.popitem(last=False)


class _Wrapper:
    """Around one sink."""

    def __init__(self, sink: CheckpointSink) -> None:
        self.sink = check_sink(sink)

    @property
    def inside(self) -> tuple[CheckpointSink, ...]:
        """The sinks that this one tells."""
        return (self.sink,)


class EveryN(_Wrapper):
    """Passes on each ``n``-th moment, counted from the last one that was passed on."""

    def __init__(self, n: int, sink: CheckpointSink) -> None:
        super().__init__(sink)
        self.n = check_every(n)
        self._passed_over: _PerRun[int] = _PerRun()

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Count, and pass on what is due."""
        count = (self._passed_over.get(moment) or 0) + 1
        if not moment.forced and count < self.n:
            self._passed_over.put(moment, count)
            return None
        self._passed_over.put(moment, self.n)
        answer = self.sink.on_checkpoint(state, moment)
        return _after(answer, lambda: self._passed_over.put(moment, 0))

    def __repr__(self) -> str:
        return f"EveryN({self.n}, {self.sink!r})"


class Throttle(_Wrapper):
    """Passes on no moment within ``seconds`` after the last one that was passed on."""

    def __init__(self, seconds: float, sink: CheckpointSink, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sink)
        self.seconds = check_seconds(seconds)
        self._clock = clock
        self._told: _PerRun[float] = _PerRun()

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Look at the clock, and pass on what is due."""
        now, told = self._clock(), self._told.get(moment)
        if not moment.forced and told is not None and now - told < self.seconds:
            return None
        self._told.drop(moment)
        answer = self.sink.on_checkpoint(state, moment)
        return _after(answer, lambda: self._told.put(moment, now))

    def __repr__(self) -> str:
        return f"Throttle({self.seconds}, {self.sink!r})"


class OnlyNodes(_Wrapper):
    """Passes on the commits of some nodes, given by their names or by a function of a name."""

    def __init__(self, nodes: str | Iterable[str] | Callable[[str], bool], sink: CheckpointSink) -> None:
        super().__init__(sink)
        self._holds: Callable[[str], Any]
        if callable(nodes):
            self._holds, self._shown = nodes, getattr(nodes, "__qualname__", repr(nodes))
        else:
            names = frozenset({nodes} if isinstance(nodes, str) else nodes)
            self._holds, self._shown = names.__contains__, repr(sorted(names))

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Look at the node, and pass on what is wanted."""
        if moment.forced or self._holds(moment.node_id):
            return self.sink.on_checkpoint(state, moment)
        return None

    def __repr__(self) -> str:
        return f"OnlyNodes({self._shown}, {self.sink!r})"


class IfChanged(_Wrapper):
    """Passes on what differs from the last state that was passed on. It encodes the state to find out.

    States of graphs inside, and what finished branches of a fan-out came to, are part of it: to a store they are news.
    """

    def __init__(self, sink: CheckpointSink) -> None:
        super().__init__(sink)
        self._digest: _PerRun[bytes] = _PerRun()

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Compare, and pass on what is new."""
        digest = hashlib.sha256(encode(_contents(state, moment), "state")).digest()
        if not moment.forced and digest == self._digest.get(moment):
            return None
        self._digest.drop(moment)
        answer = self.sink.on_checkpoint(state, moment)
        return _after(answer, lambda: self._digest.put(moment, digest))

    def __repr__(self) -> str:
        return f"IfChanged({self.sink!r})"


def _contents(state: State, moment: Moment) -> list[Any]:
    inside = list(moment.frames())
    return [dict(state), [_tasks(frame) for frame in inside[:1]], [_inner(frame) for frame in inside[1:]]]


def _inner(frame: Frame) -> list[Any]:
    return [frame.graph_id, dict(frame.state), _tasks(frame)]


def _tasks(frame: Frame) -> list[Any]:
    return [
        [task.node, task.visit, task.key, dict(task.update), [_inner(inner) for inner in task.frames]]
        for task in frame.tasks
        if task.done or task.frames
    ]


# Several, and failures --------------------------------------------------------------------------------------------


class Tee:
    """Tells several sinks, one after the other. One that fails does not keep the others from being told.

    What failed is raised when all were told, as one ExceptionGroup.
    """

    def __init__(self, *sinks: CheckpointSink) -> None:
        self.inside = tuple(map(check_sink, sinks))

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Tell all; asynchronous only from the first sink on that is."""
        rest, errors = iter(self.inside), list[Exception]()
        for sink in rest:
            try:
                answer = sink.on_checkpoint(state, moment)
            except Exception as error:
                errors.append(error)
            else:
                if answer is not None:
                    return self._wait(answer, rest, errors, state, moment)
        _raise_all(errors)
        return None

    async def _wait(
        self,
        answer: Awaitable[None],
        rest: Iterator[CheckpointSink],
        errors: list[Exception],
        state: State,
        moment: Moment,
    ) -> None:
        try:
            await answer
        except Exception as error:
            errors.append(error)
        for sink in rest:
            try:
                await tell(sink, state, moment)
            except Exception as error:
                errors.append(error)
        _raise_all(errors)

    def __repr__(self) -> str:
        return f"Tee({', '.join(map(repr, self.inside))})"


class Then:
    """Tells two sinks, the second only if the first did not fail: what is not stored is not shown elsewhere either."""

    def __init__(self, first: CheckpointSink, second: CheckpointSink) -> None:
        self.inside = (check_sink(first), check_sink(second))

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Tell both; asynchronous only if one of them is."""
        first, second = self.inside
        answer = first.on_checkpoint(state, moment)
        return second.on_checkpoint(state, moment) if answer is None else self._wait(answer, state, moment)

    async def _wait(self, answer: Awaitable[None], state: State, moment: Moment) -> None:
        await answer
        await tell(self.inside[1], state, moment)

    def __repr__(self) -> str:
        return f"Then({', '.join(map(repr, self.inside))})"


@dataclass(frozen=True, slots=True)
class Failure:
    """One error of a sink."""

    node_id: str
    step: int
    trigger: Cause
    error: Exception


class OnFailure(_Wrapper):
    """Says what becomes of a run whose sink fails.

    ``raise``: the run gets the error. ``warn``: a SinkWarning each time, and the run goes on. ``degrade``: one
    SinkWarning, and from then on, this moment included, ``fallback`` is told instead, or nobody. What happened is in
    ``failures``, ``failure_count`` and ``degraded``.

    That another writer has taken over (Fenced, Conflict) is no failure of the sink: the run always gets it, because
    going on would be doing the other's work a second time.
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
        self.failures: deque[Failure] = deque(maxlen=FAILURES_MAX)
        self.failure_count = 0
        self.degraded = False

    @property
    def inside(self) -> tuple[CheckpointSink, ...]:
        """The sinks that this one tells."""
        return (self.sink,) if self.fallback is None else (self.sink, self.fallback)

    def on_checkpoint(self, state: State, moment: Moment) -> Answer:
        """Tell the sink, or what takes its place."""
        if self.degraded:
            return self._instead(state, moment)
        try:
            answer = self.sink.on_checkpoint(state, moment)
        except Exception as error:
            self._failed(error, moment)
            return self._instead(state, moment)
        return None if answer is None else self._wait(answer, state, moment)

    async def _wait(self, answer: Awaitable[None], state: State, moment: Moment) -> None:
        try:
            await answer
        except Exception as error:
            self._failed(error, moment)
            instead = self._instead(state, moment)
            if instead is not None:
                await instead

    def _instead(self, state: State, moment: Moment) -> Answer:
        return self.fallback.on_checkpoint(state, moment) if self.degraded and self.fallback is not None else None

    def _failed(self, error: Exception, moment: Moment) -> None:
        """Write an error down; raise it if the run is to have it."""
        self.failures.append(Failure(moment.node_id, moment.step, moment.trigger, error))
        self.failure_count += 1
        if self.policy == "raise" or _is_decisive(error):
            raise error
        self.degraded = self.policy == "degrade"
        told = "is not told again" if self.degraded else "does not have this state"
        # An error of ours never shows a value of the state; of others only the type is known not to.
        what = str(error) if isinstance(error, BackstayError) else type(error).__name__
        warnings.warn(
            f"{type(self.sink).__name__} failed at step {moment.step}, after node {moment.node_id!r}, and {told}; "
            f"run {moment.run_id!r} goes on: {what}",
            SinkWarning,
            stacklevel=3,
        )

    def __repr__(self) -> str:
        fallback = "" if self.fallback is None else f", fallback={self.fallback!r}"
        return f"OnFailure({self.sink!r}, {self.policy!r}{fallback})"


def check_sink(sink: object) -> CheckpointSink:
    """Return what can be told of checkpoints; the class of a sink, left without its brackets, cannot."""
    if isinstance(sink, type) or not isinstance(sink, CheckpointSink):
        shown = sink.__qualname__ if isinstance(sink, type) else type(sink).__qualname__
        raise InvalidInput(f"{shown} is no sink", hint="Pass an object with on_checkpoint(state, moment)")
    return sink


def _after(answer: Answer, done: Callable[[], None]) -> Answer:
    """Do something once a sink has taken what it was told."""
    if answer is None:
        done()
        return None
    return _after_waiting(answer, done)


async def _after_waiting(answer: Awaitable[None], done: Callable[[], None]) -> None:
    await answer
    done()


def _raise_all(errors: list[Exception]) -> None:
    if errors:
        raise ExceptionGroup(f"{len(errors)} of the sinks failed", errors)


def _is_decisive(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(_DECISIVE) is not None
    return isinstance(error, _DECISIVE)
