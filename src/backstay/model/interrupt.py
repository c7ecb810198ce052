"""Interrupt: a recorded pause that waits for a decision.

It says why a run stopped, where, and what the person who decides should see. It does not know the answer: decisions
are values of their own, and are bound to an interrupt by its id.
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
"""Encoded bytes of one interrupt, and of one decision: every list of them reads both."""


class InterruptKind(StrEnum):
    """Why a run paused; the value is the name on the wire."""

    BEFORE_NODE = "beforenode"  # about to enter a node that has not run
    AFTER_NODE = "afternode"  # a node ran and its result is committed; the next one has not started
    TOOL_APPROVAL = "toolapproval"  # a tool call waits for permission and has not been made
    USER_REQUEST = "userrequest"  # somebody asked the run to stop, or the run asks somebody


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """One pause. ``kind`` may also be given as its wire name."""

    id: str  # what a decision names; unique in the store
    kind: InterruptKind
    node: str | None = None  # the node that is guarded or has just run; None if the pause is not about a node
    payload: Any = field(default=None, hash=False)  # what is to be decided, such as the tool call; checked by the codec
    prompt: str = ""  # the question for the person

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

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values; the payload is handed out as it is, not copied."""
        return {
            "id": self.id,
            "kind": self.kind.value,
            "node": self.node,
            "payload": self.payload,
            "prompt": self.prompt,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Interrupt:
        """Make an interrupt of what ``to_plain`` gave; missing and unknown fields are refused, not guessed."""
        try:
            return cls(**plain)
        except TypeError as error:  # only the call itself can raise it: __post_init__ refuses with InvalidInput
            raise InvalidInput(f"not an interrupt: {error}", hint="Pass what Interrupt.to_plain() returned") from None
