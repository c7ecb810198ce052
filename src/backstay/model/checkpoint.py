"""Checkpoints: ``CheckpointMeta`` (everything but the payload) and ``Checkpoint`` (with the payload).

A checkpoint is immutable. The caller gives the ``id``, the store gives ``seq`` and ``digest``; the other fields are
checked when the object is made. Lists return ``CheckpointMeta``, which is read without reading any state. ``path`` (the
nodes executed so far) grows with every step, so it is stored and loaded with the payload.

``CheckpointFields`` is the part of the record a caller may give when saving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, TypedDict, TypeVar

from backstay.model.decision import Interrupt, InterruptKind
from backstay.model.fields import Usage, check_fields
from backstay.model.frame import Continuation, End, FanOut, FrameStack, NextNode, continuation_from_plain
from backstay.model.readable import to_json

MAIN = "main"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


M = TypeVar("M", bound="CheckpointMeta")


COPIES = ("fork", "rewind")
"""Triggers of checkpoints that copy another one. Answers, calls and effects from before do not count after them."""


class CheckpointFields(TypedDict, total=False):
    """The fields of a checkpoint that a caller may set in addition to its state; all are optional."""

    step: int
    iteration: int
    run_id: str | None
    attempt: int
    graph: str | None
    graph_hash: int | None
    last_node: str | None
    next_node: str | None
    continuation: Continuation | None
    interrupt: Interrupt | None
    resume_hint: str | None
    tokens_used: int
    cost_estimate: float
    trigger: str
    tags: list[str] | tuple[str, ...]
    label: str | None
    summary: str
    created_at: datetime
    metadata: Mapping[str, Any]
    frames: FrameStack
    path: list[str] | tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CheckpointMeta:
    """A checkpoint without its payload. Two are equal if they have the same id, digest and tags."""

    # identity
    id: str
    thread_id: str
    namespace: str = ""
    scope: str = ""  # a sub-history inside the thread, such as one subgraph's
    branch: str = MAIN
    seq: int = 0  # given by the store, rising within the thread, never reused; 0 = not stored yet
    parent_id: str | None = None
    run_id: str | None = None
    attempt: int = 1
    # position
    graph: str | None = None
    graph_hash: int | None = None
    last_node: str | None = None  # the node that finished
    next_node: str | None = None  # the node that runs next
    continuation: Continuation | None = None
    step: int = 1
    iteration: int = 0
    # pause
    interrupt: Interrupt | None = None
    resume_hint: str | None = None
    # usage
    tokens_used: int = 0
    cost_estimate: float = 0.0
    # description
    trigger: str = "manual"
    tags: tuple[str, ...] = ()
    label: str | None = None
    summary: str = ""
    created_at: datetime = EPOCH
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # integrity
    digest: bytes = b""  # covers the parent's digest, the state and this description
    size: int = 0  # bytes of the state, encoded

    def __post_init__(self) -> None:
        self.__dict__.update(check_fields({name: self.__dict__[name] for name in META_FIELDS}))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointMeta):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        # Never show the state: it may be huge, and it may be secret.
        where = self.thread_id if self.branch == MAIN else f"{self.thread_id}@{self.branch}"
        kind = "CheckpointMeta" if type(self) is CheckpointMeta else "Checkpoint"
        return f"<{kind} {self.id} of {where!r}, step {self.step}, seq {self.seq}>"

    def _identity(self) -> tuple[object, ...]:
        return (self.namespace, self.thread_id, self.scope, self.branch, self.id, self.seq, self.digest, self.tags)

    @property
    def usage(self) -> Usage:
        """Return tokens and cost as one value."""
        return Usage(self.tokens_used, self.cost_estimate)

    @property
    def is_over(self) -> bool:
        """Return whether the run ended here: no node runs after this checkpoint."""
        return isinstance(self.continuation, End)

    @property
    def meta(self) -> CheckpointMeta:
        """Return the metadata alone."""
        if type(self) is CheckpointMeta:
            return self
        values = {name: self.__dict__[name] for name in META_FIELDS if name in self.__dict__}
        return unchecked(CheckpointMeta, values)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return all of it as JSON text, for people and ``jq``; with the state if this has it.

        Values that JSON does not have are shown as a person would read them: times in ISO form, sets and tuples as
        lists, bytes as ``{"type": "bytes", "base64": …}``, objects as ``{"type": name, …fields}``.
        """
        names = META_FIELDS if type(self) is CheckpointMeta else (*META_FIELDS, *PAYLOAD_FIELDS)
        shown = {name: getattr(self, name) for name in names} | {"digest": self.digest.hex()}
        for name in _TO_PLAIN:
            shown[name] = None if shown[name] is None else shown[name].to_plain()
        if "frames" in shown:
            shown["frames"] = list(shown["frames"])
        return to_json(shown, indent)

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in describe(self)
        )
        return f"<table>{rows}</table>"


@dataclass(frozen=True, slots=True)
class Write:
    """The result of one finished task inside a step that is not finished yet."""

    task_id: str
    index: int
    channel: str
    value: Any
    task_path: str = ""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Checkpoint(CheckpointMeta):
    """A checkpoint with its payload. ``state`` is a fresh dictionary that the caller may change freely."""

    state: dict[str, Any] = field(default_factory=dict)
    frames: FrameStack = field(default_factory=FrameStack)
    path: tuple[str, ...] = field(default_factory=tuple)
    writes: tuple[Write, ...] = field(default_factory=tuple)
    run: Mapping[str, Any] = field(default_factory=dict)  # what an engine stores about the run

    @property
    def messages(self) -> list[Any]:
        """Return the conversation: the state's ``messages``, or an empty list."""
        found = self.state.get("messages", [])
        return found if isinstance(found, list) else [found]

    @property
    def tool_results(self) -> Any:
        """Return the state's ``tool_results``, or None."""
        return self.state.get("tool_results")

    @property
    def pending_tool_calls(self) -> list[Any]:
        """Return the state's ``pending_tool_calls``, or an empty list."""
        found = self.state.get("pending_tool_calls", [])
        return found if isinstance(found, list) else [found]

    @property
    def pending_action(self) -> Any:
        """Return the tool call that waits for approval here, or else the state's ``pending_action``, or None."""
        asked = self.interrupt
        if asked is not None and asked.kind is InterruptKind.TOOL_APPROVAL and asked.payload is not None:
            return asked.payload
        return self.state.get("pending_action")

    def _repr_html_(self) -> str:
        from html import escape

        keys = "".join(
            f"<details><summary><code>{escape(key)}</code> <small>{escape(type(value).__name__)}</small>"
            f"</summary><pre>{escape(shorten(repr(value), 2000))}</pre></details>"
            for key, value in self.state.items()
        )
        return f"{super()._repr_html_()}{keys}"


PAYLOAD_FIELDS = ("state", "frames", "path", "writes", "run")


class SavedCheckpoint(Checkpoint):
    """A checkpoint that was just saved. Its payload is loaded when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name not in PAYLOAD_FIELDS:
            raise AttributeError(name)
        # A state that the caller has seen, and may have changed, stays as it is.
        self.__dict__.update({**self.__dict__["_load"](name), **self.__dict__})
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is independent: it has the payload and no reference to the open store.
        payload = {name: getattr(self, name) for name in PAYLOAD_FIELDS}
        return unchecked, (Checkpoint, {**self.meta.__dict__, **payload})


META_FIELDS = tuple(item.name for item in fields(CheckpointMeta))

ENCODED_FIELDS = (
    "run_id",
    "attempt",
    "graph",
    "graph_hash",
    "last_node",
    "next_node",
    "continuation",
    "iteration",
    "interrupt",
    "resume_hint",
    "tokens_used",
    "cost_estimate",
    "trigger",
    "label",
    "summary",
    "metadata",
)
"""The fields that a store keeps as one encoded value; the others have columns or tables of their own."""

_DEFAULTS: dict[str, Any] = {
    item.name: {} if item.name == "metadata" else item.default for item in fields(CheckpointMeta)
}
FIELD_KEYS = {
    "run_id": "r",
    "attempt": "a",
    "graph": "g",
    "graph_hash": "h",
    "last_node": "l",
    "next_node": "n",
    "tokens_used": "k",
    "cost_estimate": "c",
    "trigger": "t",
}
"""Short stored keys of the fields that an engine writes with every step; other fields are stored by name."""

FIELD_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("attempt", "graph_hash", "iteration", "tokens_used"), (int,)),
    **dict.fromkeys(
        ("run_id", "graph", "last_node", "next_node", "resume_hint", "trigger", "label", "summary"), (str,)
    ),
    "continuation": (NextNode, FanOut, End),
    "interrupt": (Interrupt,),
    "cost_estimate": (float, int),
    "metadata": (dict,),
}
"""The types that each stored field may have."""

_FIELD_NAMES = {key: name for name, key in FIELD_KEYS.items()}
_FIELD_DEFAULTS = tuple((name, FIELD_KEYS.get(name, name), _DEFAULTS[name]) for name in ENCODED_FIELDS)
_TO_PLAIN = ("continuation", "interrupt")


def unchecked(cls: type[M], values: dict[str, Any]) -> M:
    """Return an instance from values that were checked when they were first stored; defaults fill the rest.

    The dictionary becomes the instance's own.
    """
    made = object.__new__(cls)
    if "metadata" not in values:
        values["metadata"] = {}
    object.__setattr__(made, "__dict__", values)
    return made


def fields_to_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ from their defaults as plain values, always in the same order."""
    plain: dict[str, Any] = {}
    for name, key, default in _FIELD_DEFAULTS:
        value = values.get(name, default)
        if value is not default and value != default:
            plain[key] = value.to_plain() if name in _TO_PLAIN else value
    return plain


def fields_from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a checkpoint from the plain values of ``fields_to_plain``."""
    values = {_FIELD_NAMES.get(key, key): value for key, value in plain.items()}
    if "continuation" in values:
        values["continuation"] = continuation_from_plain(values["continuation"])
    if "interrupt" in values:
        values["interrupt"] = Interrupt.from_plain(values["interrupt"])
    return values


def describe(meta: CheckpointMeta) -> list[tuple[str, str]]:
    """Return the facts about a checkpoint that a person wants to see, as rows of name and text."""
    rows = [
        ("checkpoint", meta.id),
        ("thread", meta.thread_id + (f" ({meta.branch})" if meta.branch != MAIN else "")),
        ("step", f"{meta.step}  (seq {meta.seq})"),
        ("created", meta.created_at.isoformat(timespec="seconds")),
        ("position", f"{meta.last_node or '-'} → {meta.next_node or '-'}" if meta.last_node or meta.next_node else ""),
        ("trigger", meta.trigger),
        ("tags", ", ".join(meta.tags)),
        ("label", meta.label or ""),
        ("summary", meta.summary),
        ("waiting", meta.interrupt.kind.value if meta.interrupt else ""),
        ("tokens", str(meta.tokens_used) if meta.tokens_used else ""),
        ("cost", f"{meta.cost_estimate:g}" if meta.cost_estimate else ""),
        ("state", f"{meta.size} bytes"),
    ]
    return [(name, value) for name, value in rows if value]


def shorten(text: str, limit: int) -> str:
    """Return the text cut to ``limit`` characters, with a mark where it was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
