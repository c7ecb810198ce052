"""Interrupts and the decisions that answer them.

An **interrupt** is a recorded pause that waits for a decision: why and where a run stopped, and what the person who
decides should see. A **decision** says what happens next and nothing else; it names its interrupt by id. The record of
the interrupt says who decided it, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backstay.errors import InvalidInput
from backstay.model.ids import check_id, check_label

PROMPT_LENGTH_MAX = 65_536  # characters; longer material belongs in the payload
QUESTION_BYTES_MAX = 1024 * 1024
"""Encoded bytes of one interrupt, and of one decision: every list of interrupts reads both."""


class InterruptKind(StrEnum):
    """The reason why a run paused; the value is the stored name."""

    BEFORE_NODE = "beforenode"  # about to enter a node that has not run
    AFTER_NODE = "afternode"  # a node ran and its result is committed; the next one has not started
    TOOL_APPROVAL = "toolapproval"  # a tool call waits for permission and has not been made
    USER_REQUEST = "userrequest"  # a person asked the run to stop, or the run asks a person


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """One pause. ``kind`` may also be its stored name."""

    id: str  # a decision names it; unique in the store
    kind: InterruptKind
    node: str | None = None  # the node that is guarded or has just run; None if the pause is not about a node
    payload: Any = field(
        default=None, hash=False
    )  # the subject of the decision, such as the tool call; the codec checks it
    prompt: str = ""  # the question for the person
    answer: Mapping[str, Any] | None = field(default=None, hash=False)
    """The wanted answer of a question; None if a person approves something instead.

    ``{"type": "int"}`` for a built-in type, "any" for any value, or the name of a class with its module; for a pydantic
    model also ``required``, a list of keys, and ``fields``, their types. No class is imported to read it.
    """

    def __post_init__(self) -> None:
        check_id(self.id, "interrupt id")
        try:
            object.__setattr__(self, "kind", InterruptKind(self.kind))
        except ValueError:
            raise InvalidInput(
                f"interrupt kind {str(self.kind)[:40]!r} is not known", hint=f"Use one of {', '.join(InterruptKind)}"
            ) from None
        if self.node is not None:
            check_id(self.node, "interrupt node")
        check_label(self.prompt, "interrupt prompt", length_max=PROMPT_LENGTH_MAX)
        if self.answer is not None and not _is_description(self.answer):
            raise InvalidInput("the answer of an interrupt must describe a type", hint='For example {"type": "int"}')

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values; the payload is not copied."""
        plain = {
            "id": self.id,
            "kind": self.kind.value,
            "node": self.node,
            "payload": self.payload,
            "prompt": self.prompt,
        }
        return plain if self.answer is None else {**plain, "answer": dict(self.answer)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Interrupt:
        """Make an interrupt from the result of ``to_plain``; refuse missing and unknown fields."""
        try:
            return cls(**plain)
        except TypeError as error:  # only the call itself raises it: __post_init__ raises InvalidInput
            raise InvalidInput(f"not an interrupt: {error}", hint="Pass the result of Interrupt.to_plain()") from None


def _is_description(given: object) -> bool:
    if not isinstance(given, Mapping) or not given.keys() <= {"type", "required", "fields"}:
        return False
    required, fields = given.get("required", []), given.get("fields", {})
    names = [given.get("type"), *(required if isinstance(required, list) else [None])]
    names += [*fields, *fields.values()] if isinstance(fields, Mapping) else [None]
    return all(isinstance(name, str) for name in names)


REASON_LENGTH_MAX = 65_536  # characters


class DecisionKind(StrEnum):
    """The kinds of decisions; the value is the stored name."""

    APPROVE = "approve"  # continue as proposed
    MODIFY = "modify"  # continue with another value than the proposed one
    REJECT = "reject"  # do not do it
    DEFER = "defer"  # do not do it now; asking again takes a new interrupt
    REROUTE = "reroute"  # do not do it, continue at another node
    ANSWER = "answer"  # the value that a question asks for; it may be None


_BELONGS_TO = {
    "scope": (DecisionKind.APPROVE,),
    "value": (DecisionKind.MODIFY, DecisionKind.ANSWER),
    "target": (DecisionKind.REROUTE,),
}
_NEEDED = {DecisionKind.MODIFY: "value", DecisionKind.REROUTE: "target"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One answer. ``kind`` may also be its stored name."""

    kind: DecisionKind
    scope: str | None = None  # what else an approval covers, such as "all calls of this tool"
    value: Any = field(default=None, hash=False)  # an answer, or the replacement in a modification, never None there
    reason: str = ""  # for people
    target: str | None = None  # the node a reroute goes to

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", DecisionKind(self.kind))
        except ValueError:
            raise InvalidInput(
                f"unknown decision {str(self.kind)[:40]!r}", hint=f"Use one of {', '.join(DecisionKind)}"
            ) from None
        for name, kinds in _BELONGS_TO.items():
            given = getattr(self, name) is not None
            if given and self.kind not in kinds:
                hint = f"Only {' and '.join(repr(kind.value) for kind in kinds)} can have one"
                raise InvalidInput(f"decision {self.kind.value!r} takes no {name}", hint=hint)
            if not given and _NEEDED.get(self.kind) == name:
                raise InvalidInput(f"decision {self.kind.value!r} needs a {name}", hint=f"Pass {name}=…")
        if self.scope is not None:
            check_id(self.scope, "decision scope")
        if self.target is not None:
            check_id(self.target, "decision target")
        check_label(self.reason, "decision reason", length_max=REASON_LENGTH_MAX)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values; the value is not copied."""
        return {
            "kind": self.kind.value,
            "scope": self.scope,
            "value": self.value,
            "reason": self.reason,
            "target": self.target,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Decision:
        """Make a decision from the result of ``to_plain``; refuse missing and unknown fields."""
        try:
            return cls(**plain)
        except TypeError as error:  # only the call itself raises it: __post_init__ raises InvalidInput
            raise InvalidInput(f"not a decision: {error}", hint="Pass the result of Decision.to_plain()") from None


# Answers, as in ``graph.resume(thread, Approve())``. Each function makes a ``Decision``.


def Approve(scope: str | None = None, *, reason: str = "") -> Decision:  # they read as the nouns they make
    """Continue as proposed. ``scope``, the name of a tool or node or "*" for all tools, approves later calls too."""
    return Decision(kind=DecisionKind.APPROVE, scope=scope, reason=reason)


def Modify(value: Any, *, reason: str = "") -> Decision:
    """Approve with another value: a tool's arguments, or keys of the state to update."""
    return Decision(kind=DecisionKind.MODIFY, value=value, reason=reason)


def Answer(value: Any, *, reason: str = "") -> Decision:
    """Answer a question with a value, which may be None."""
    return Decision(kind=DecisionKind.ANSWER, value=value, reason=reason)


def Reject(reason: str = "") -> Decision:
    """Do not do it."""
    return Decision(kind=DecisionKind.REJECT, reason=reason)


def Defer(reason: str = "") -> Decision:
    """Do not do it now; the run stays where it is and asks again when it is resumed."""
    return Decision(kind=DecisionKind.DEFER, reason=reason)


def Reroute(target: str, *, reason: str = "") -> Decision:
    """Do not do it; continue at another node."""
    return Decision(kind=DecisionKind.REROUTE, target=target, reason=reason)
