"""Frame: the position of one graph, and the stack of them from the outermost graph to the innermost.

A frame is pushed when a subgraph is entered and popped when it is left; moving on inside a graph replaces the top
frame. So the depth of the stack is nesting, never history. Each frame has the state of its own graph, in its own shape.
Values inside a state are not looked at here: the codec does that when it stores them.

Where a graph runs several nodes side by side, its frame is the innermost of the stack, and each of its **tasks** has
the frames inside it. Loop counters and what the join waits for are in the frame too: a position is complete in itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backstay.errors import InvalidInput
from backstay.model.continuation import Continuation, continuation_from_plain
from backstay.model.ids import check_id
from backstay.model.usage import check_count

FRAME_DEPTH_MAX = 100  # frames; graphs nested deeper are an endless recursion

Position = tuple[str, str, int, str | None]  # graph_id, node_id, visit, fanout_key


class Projecting(Protocol):
    """A run-time state that says itself which part of it is to be kept."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return what is to be stored of this state, and nothing that cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where one graph stands, with its state.

    The state is copied into a fresh dict, one level deep: keys that the caller adds, replaces or removes later do not
    show here, but a list or dict inside the state is still the caller's own object.
    """

    graph_id: str
    node_id: str
    cursor: int = 0  # node index or number of steps done, as the graph counts
    visit: int = 1  # how often this node has been entered, this time included: tells rounds of a loop apart
    fanout_key: str | None = None  # which of the parallel runs of one node this is
    state: Mapping[str, Any] = field(default_factory=dict, hash=False)
    last_node: str | None = None  # has finished
    continuation: Continuation | None = None  # what is to run; None = decided from ``last_node`` when the run goes on
    visits: Mapping[str, int] = field(default_factory=dict, hash=False)  # how often each node was entered
    passed: bool = False  # what was asked after ``last_node`` is answered
    path: tuple[str, ...] = ()  # nodes finished in this graph; the outermost frame's is the checkpoint's
    tasks: tuple[Task, ...] = ()  # what is known of the nodes to run
    waits: tuple[str, ...] = ()  # ids of the interrupts that the whole run waits for; only in the outermost frame
    steps: int = 0  # nodes finished in the whole run, inner graphs included; only in the outermost frame

    def __post_init__(self) -> None:
        check_id(self.graph_id, "graph_id")
        check_id(self.node_id, "node_id")
        check_count(self.cursor, "cursor")
        check_count(self.visit, "visit", least=1)
        if self.fanout_key is not None:
            check_id(self.fanout_key, "fanout_key")
        if not isinstance(self.state, Mapping):
            raise InvalidInput(
                f"state of frame {self.node_id!r} is {type(self.state).__name__}, not a mapping",
                hint="Pass a dict of keys to values, or use Frame.of with a state that has snapshot()",
            )
        object.__setattr__(self, "state", dict(self.state))

    @classmethod
    def of(cls, graph_id: str, node_id: str, runtime_state: Projecting | Mapping[str, Any], cursor: int = 0) -> Frame:
        """Make a frame of a run-time state: what its ``snapshot()`` gives if it has one, else the mapping itself."""
        snapshot = getattr(runtime_state, "snapshot", None)
        state: Any = snapshot() if callable(snapshot) else runtime_state  # what it really is, the constructor checks
        return cls(graph_id=graph_id, node_id=node_id, cursor=cursor, state=state)

    @property
    def position(self) -> Position:
        """What tells this frame from every other one of the same run."""
        return (self.graph_id, self.node_id, self.visit, self.fanout_key)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values; the state's dict is a copy, its values are not.

        What an engine adds is left out where there is nothing of it: a position is stored with every step.
        """
        plain: dict[str, Any] = {
            "graph_id": self.graph_id,
            "node_id": self.node_id,
            "cursor": self.cursor,
            "visit": self.visit,
            "fanout_key": self.fanout_key,
            "state": dict(self.state),
            "last_node": self.last_node,
            "continuation": self.continuation and self.continuation.to_plain(),
            "visits": dict(self.visits),
            "passed": self.passed,
            "path": list(self.path),
            "tasks": [task.to_plain() for task in self.tasks],
            "waits": list(self.waits),
            "steps": self.steps,
        }
        return {name: value for name, value in plain.items() if value or name in _ALWAYS}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Frame:
        """Make a frame of what ``to_plain`` gave; missing and unknown fields are refused, not guessed."""
        try:
            fields = dict(plain)
            if "continuation" in fields:
                fields["continuation"] = continuation_from_plain(fields["continuation"])
            if "tasks" in fields:
                fields["tasks"] = tuple(Task.from_plain(each) for each in fields["tasks"])
            for name in ("path", "waits"):
                if name in fields:
                    fields[name] = tuple(fields[name])
            return cls(**fields)
        except TypeError as error:  # only the call itself can raise it: __post_init__ refuses with InvalidInput
            raise InvalidInput(f"not a frame: {error}", hint="Pass what Frame.to_plain() returned") from None


_ALWAYS = ("graph_id", "node_id", "cursor", "visit", "fanout_key", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is known of one node that is to run: how far it came."""

    node: str
    visit: int = 1
    key: str | None = None  # which of several side by side; None if it runs alone
    tries: int = 0  # attempts that failed
    done: bool = False
    update: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what it returned, once it is done
    passed: bool = False  # what was asked before it is answered
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what that answer wants the state to be
    looked: bool = False  # what was asked after it is answered
    edited: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what that answer wants the state to be
    path: tuple[str, ...] = ()  # nodes finished in it
    left: Mapping[str, int] = field(default_factory=dict, hash=False)  # nodes it was sent away from, with the visit
    frames: tuple[Frame, ...] = ()  # the graphs inside it, outer to inner, if it stands side by side with others

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that say something, as plain values."""
        plain: dict[str, Any] = {
            "node": self.node,
            "visit": self.visit,
            "key": self.key,
            "tries": self.tries,
            "done": self.done,
            "update": dict(self.update),
            "passed": self.passed,
            "given": dict(self.given),
            "looked": self.looked,
            "edited": dict(self.edited),
            "path": list(self.path),
            "left": dict(self.left),
            "frames": [frame.to_plain() for frame in self.frames],
        }
        return {name: value for name, value in plain.items() if value}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Task:
        """Make a task of what ``to_plain`` gave."""
        try:
            frames = tuple(Frame.from_plain(each) for each in plain.get("frames", ()))
            return cls(**{**plain, "frames": frames, "path": tuple(plain.get("path", ()))})
        except TypeError as error:
            raise InvalidInput(f"not a task: {error}", hint="Pass what Task.to_plain() returned") from None


@dataclass(frozen=True, slots=True)
class FrameStack:
    """Frames from outer to inner. Never changed: ``push`` and ``pop`` give a new stack."""

    frames: tuple[Frame, ...] = ()  # a list is taken and kept as tuple

    def __post_init__(self) -> None:
        if not isinstance(self.frames, tuple | list):
            raise InvalidInput(f"frames are {type(self.frames).__name__}", hint="Pass a tuple of Frame")
        frames = tuple(self.frames)
        if len(frames) > FRAME_DEPTH_MAX:
            raise InvalidInput(
                f"frames are nested {len(frames)} deep, {FRAME_DEPTH_MAX} are allowed",
                hint="Pop a frame when its subgraph is left; look for a graph that contains itself",
            )
        for index, frame in enumerate(frames):
            if not isinstance(frame, Frame):
                raise InvalidInput(f"frames[{index}] is {type(frame).__name__}, not a Frame", hint="Pass Frame values")
        object.__setattr__(self, "frames", frames)

    def push(self, frame: Frame) -> FrameStack:
        """Return a stack with ``frame`` as its innermost: a subgraph is entered."""
        return FrameStack((*self.frames, frame))

    def pop(self) -> tuple[Frame | None, FrameStack]:
        """Return the innermost frame, or None, and the stack without it: a subgraph is left."""
        return self.current, FrameStack(self.frames[:-1])

    @property
    def current(self) -> Frame | None:
        """The innermost frame, or None."""
        return self.frames[-1] if self.frames else None

    @property
    def depth(self) -> int:
        """How many graphs are nested."""
        return len(self.frames)

    @property
    def is_empty(self) -> bool:
        """Whether there is no frame."""
        return not self.frames

    @property
    def path(self) -> tuple[Position, ...]:
        """The positions from outer to inner."""
        return tuple(frame.position for frame in self.frames)

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self.frames)

    def __bool__(self) -> bool:
        return bool(self.frames)

    def to_plain(self) -> list[dict[str, Any]]:
        """Return the frames as plain values, outer to inner."""
        return [frame.to_plain() for frame in self.frames]

    @classmethod
    def from_plain(cls, plain: Sequence[Mapping[str, Any]]) -> FrameStack:
        """Make a stack of what ``to_plain`` gave."""
        if not isinstance(plain, list | tuple):
            raise InvalidInput(f"not a frame stack: {type(plain).__name__}", hint="Pass a list of plain frames")
        return cls(tuple(Frame.from_plain(one) for one in plain))


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """The least that describes a commit to a sink."""

    node_id: str  # the node whose commit just finished
    step: int  # steps counted from the start of this run

    def __post_init__(self) -> None:
        check_id(self.node_id, "node_id")
        check_count(self.step, "step")
