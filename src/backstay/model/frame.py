"""The position of a run: frames, and the continuation that says what runs next.

A **frame** is the position of one graph, with the state of that graph. A frame is pushed when a subgraph is entered
and popped when it is left; a step inside a graph replaces the top frame. So the depth of the stack is nesting, never
history. The values inside a state are not checked here: the codec does that when it stores them.

Where a graph runs several nodes in parallel, its frame is the innermost of the stack, and each of its **tasks** has
the frames inside it. Loop counters and the state of a join are in the frame too: a position is complete in itself.

A **continuation** is one node, several nodes in parallel, or the end. It is stored with the position, so that resuming
never evaluates a condition again and never confuses a fan-out with a single next node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from backstay.errors import InvalidInput
from backstay.model.ids import check_count, check_id

FRAME_DEPTH_MAX = 100  # frames; graphs nested deeper are an endless recursion

Position = tuple[str, str, int, str | None]  # graph_id, node_id, visit, fanout_key


@dataclass(frozen=True, slots=True)
class NextNode:
    """One node runs next."""

    kind: ClassVar[str] = "node"

    node: str

    def __post_init__(self) -> None:
        check_id(self.node, "next node")

    def to_plain(self) -> dict[str, Any]:
        """Return the tag and the fields as plain values."""
        return {"kind": self.kind, "node": self.node}


@dataclass(frozen=True, slots=True)
class FanOut:
    """Several nodes run in parallel; ``join`` runs when all are done, or nothing if it is None."""

    kind: ClassVar[str] = "fanout"

    targets: tuple[str, ...]  # distinct, in the order the graph names them; a list becomes a tuple
    join: str | None = None

    def __post_init__(self) -> None:
        # A str is a sequence too: "ab" would silently become the nodes "a" and "b".
        if not isinstance(self.targets, tuple | list):
            raise InvalidInput(
                f"fan-out targets must be a tuple, not {type(self.targets).__name__}", hint="Pass a tuple of node names"
            )
        targets = tuple(check_id(target, "fan-out target") for target in self.targets)
        if not targets:
            raise InvalidInput("fan-out has no targets", hint="Name at least one node, or use End()")
        if len(set(targets)) != len(targets):
            raise InvalidInput("fan-out names a target twice", hint="Name each node once")
        if self.join is not None:
            check_id(self.join, "fan-out join")
        object.__setattr__(self, "targets", targets)

    def to_plain(self) -> dict[str, Any]:
        """Return the tag and the fields as plain values."""
        return {"kind": self.kind, "targets": list(self.targets), "join": self.join}


@dataclass(frozen=True, slots=True)
class End:
    """Nothing runs next: the graph is done."""

    kind: ClassVar[str] = "end"

    def to_plain(self) -> dict[str, Any]:
        """Return the tag as a plain value."""
        return {"kind": self.kind}


Continuation = NextNode | FanOut | End

_BY_KIND: dict[str, type[NextNode] | type[FanOut] | type[End]] = {one.kind: one for one in (NextNode, FanOut, End)}


def continuation_from_plain(plain: Mapping[str, Any]) -> Continuation:
    """Make a continuation from the result of ``to_plain``; refuse unknown kinds and fields."""
    try:
        fields = dict(plain)
        cls = _BY_KIND[fields.pop("kind")]
        return cls(**fields)
    except InvalidInput:
        raise  # a field was refused with its own reason; InvalidInput is a ValueError
    except KeyError as error:
        raise InvalidInput(
            f"not a continuation: kind {str(error)[:40]} is missing or unknown",
            hint=f"Use one of {', '.join(_BY_KIND)}",
        ) from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"not a continuation: {error}", hint="Pass the result of to_plain()") from None


class HasSnapshot(Protocol):
    """A run-time state that decides itself which part of it is stored."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return the part of this state to store; every value in it must be storable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The position of one graph, with its state.

    The state is copied one level deep: keys that the caller adds, replaces or removes later do not change the frame,
    but a list or dict inside the state is still the caller's own object.
    """

    graph_id: str
    node_id: str
    cursor: int = 0  # node index or number of steps done, as the graph counts them
    visit: int = 1  # how often this node has been entered, this time included
    fanout_key: str | None = None  # which of the parallel runs of one node this is
    state: Mapping[str, Any] = field(default_factory=dict, hash=False)
    last_node: str | None = None  # has finished
    continuation: Continuation | None = None  # what runs next; None = decided from ``last_node`` on resume
    visits: Mapping[str, int] = field(default_factory=dict, hash=False)  # how often each node was entered
    passed: bool = False  # the question asked after ``last_node`` has its answer
    path: tuple[str, ...] = ()  # nodes finished in this graph; the outermost frame's is the checkpoint's
    tasks: tuple[Task, ...] = ()  # the progress of the nodes to run
    waits: tuple[str, ...] = ()  # ids of the interrupts the whole run waits for; only in the outermost frame
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
                f"the state of frame {self.node_id!r} is {type(self.state).__name__}, not a mapping",
                hint="Pass a dict of keys to values, or use Frame.of with a state that has snapshot()",
            )
        object.__setattr__(self, "state", dict(self.state))

    @classmethod
    def of(cls, graph_id: str, node_id: str, runtime_state: HasSnapshot | Mapping[str, Any], cursor: int = 0) -> Frame:
        """Make a frame from a run-time state: its ``snapshot()`` if it has one, else the mapping itself."""
        snapshot = getattr(runtime_state, "snapshot", None)
        state: Any = snapshot() if callable(snapshot) else runtime_state  # the constructor checks its type
        return cls(graph_id=graph_id, node_id=node_id, cursor=cursor, state=state)

    @property
    def position(self) -> Position:
        """The key of this frame within its run."""
        return (self.graph_id, self.node_id, self.visit, self.fanout_key)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values; the state's dict is a copy, its values are not.

        Empty fields of an engine are left out, because a position is stored with every step.
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
        """Make a frame from the result of ``to_plain``; refuse missing and unknown fields."""
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
        except TypeError as error:  # only the call itself raises it: __post_init__ raises InvalidInput
            raise InvalidInput(f"not a frame: {error}", hint="Pass the result of Frame.to_plain()") from None


_ALWAYS = ("graph_id", "node_id", "cursor", "visit", "fanout_key", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The progress of one node that is to run."""

    node: str
    visit: int = 1
    key: str | None = None  # which of several in parallel; None if it runs alone
    tries: int = 0  # attempts that failed
    done: bool = False
    update: Mapping[str, Any] = field(default_factory=dict, hash=False)  # its result, once it is done
    passed: bool = False  # the question asked before it has its answer
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the changes to the state in that answer
    looked: bool = False  # the question asked after it has its answer
    edited: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the changes to the state in that answer
    path: tuple[str, ...] = ()  # nodes finished in it
    notes: Mapping[str, Any] = field(default_factory=dict, hash=False)  # tokens, cost, and what else it reported
    left: Mapping[str, int] = field(
        default_factory=dict, hash=False
    )  # nodes that an answer rerouted it from, with the visit
    frames: tuple[Frame, ...] = ()  # the graphs inside it, outer to inner, if it runs in parallel with others

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that are not empty, as plain values."""
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
            "notes": dict(self.notes),
            "left": dict(self.left),
            "frames": [frame.to_plain() for frame in self.frames],
        }
        return {name: value for name, value in plain.items() if value}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Task:
        """Make a task from the result of ``to_plain``."""
        try:
            frames = tuple(Frame.from_plain(each) for each in plain.get("frames", ()))
            return cls(**{**plain, "frames": frames, "path": tuple(plain.get("path", ()))})
        except TypeError as error:
            raise InvalidInput(f"not a task: {error}", hint="Pass the result of Task.to_plain()") from None


@dataclass(frozen=True, slots=True)
class FrameStack:
    """Frames from outer to inner. It is immutable: ``push`` and ``pop`` return a new stack."""

    frames: tuple[Frame, ...] = ()  # a list becomes a tuple

    def __post_init__(self) -> None:
        if not isinstance(self.frames, tuple | list):
            raise InvalidInput(
                f"frames must be a tuple, not {type(self.frames).__name__}", hint="Pass a tuple of Frame"
            )
        frames = tuple(self.frames)
        if len(frames) > FRAME_DEPTH_MAX:
            raise InvalidInput(
                f"frames are nested {len(frames)} deep; at most {FRAME_DEPTH_MAX} are allowed",
                hint="Pop a frame when its subgraph ends, and look for a graph that contains itself",
            )
        for index, frame in enumerate(frames):
            if not isinstance(frame, Frame):
                raise InvalidInput(f"frames[{index}] is {type(frame).__name__}, not a Frame", hint="Pass Frame values")
        object.__setattr__(self, "frames", frames)

    def push(self, frame: Frame) -> FrameStack:
        """Return a stack with ``frame`` as its innermost, for entering a subgraph."""
        return FrameStack((*self.frames, frame))

    def pop(self) -> tuple[Frame | None, FrameStack]:
        """Return the innermost frame, or None, and the stack without it, for leaving a subgraph."""
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
        """Make a stack from the result of ``to_plain``."""
        if not isinstance(plain, list | tuple):
            raise InvalidInput(f"not a frame stack: {type(plain).__name__}", hint="Pass a list of plain frames")
        return cls(tuple(Frame.from_plain(one) for one in plain))


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """The minimum that describes a commit to a sink."""

    node_id: str  # the node whose commit just finished
    step: int  # steps counted from the start of this run

    def __post_init__(self) -> None:
        check_id(self.node_id, "node_id")
        check_count(self.step, "step")
