"""Decision: the answer to one interrupt.

It says what is to happen and nothing else; who decided, when, and to which interrupt it belongs is recorded beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backstay.errors import InvalidInput
from backstay.model.ids import check_id, check_label

REASON_LENGTH_MAX = 65_536  # characters


class DecisionKind(StrEnum):
    """What is to happen; the value is the name on the wire."""

    APPROVE = "approve"  # go on as proposed
    MODIFY = "modify"  # go on with another value
    REJECT = "reject"  # do not do it
    DEFER = "defer"  # do not do it now; whoever wants to ask again makes a new interrupt
    REROUTE = "reroute"  # do not do it, go on elsewhere


_BELONGS_TO = {"scope": DecisionKind.APPROVE, "value": DecisionKind.MODIFY, "target": DecisionKind.REROUTE}
_NEEDED = ("value", "target")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One answer. ``kind`` may also be given as its wire name."""

    kind: DecisionKind
    scope: str | None = None  # of an approval that reaches further, such as "all calls of this tool"
    value: Any = field(default=None, hash=False)  # what a modification puts in place of the proposed; never None there
    reason: str = ""  # for people
    target: str | None = None  # the node a reroute goes to

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", DecisionKind(self.kind))
        except ValueError:
            raise InvalidInput(
                f"decision {str(self.kind)[:40]!r} is not known", hint=f"Use one of {', '.join(DecisionKind)}"
            ) from None
        for name, kind in _BELONGS_TO.items():
            given = getattr(self, name) is not None
            if given and self.kind is not kind:
                raise InvalidInput(f"decision {self.kind.value!r} takes no {name}", hint=f"Only {kind.value!r} does")
            if not given and self.kind is kind and name in _NEEDED:
                raise InvalidInput(f"decision {kind.value!r} needs a {name}", hint=f"Pass {name}=…")
        if self.scope is not None:
            check_id(self.scope, "decision scope")
        if self.target is not None:
            check_id(self.target, "decision target")
        check_label(self.reason, "decision reason", length_max=REASON_LENGTH_MAX)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values; the value is handed out as it is, not copied."""
        return {
            "kind": self.kind.value,
            "scope": self.scope,
            "value": self.value,
            "reason": self.reason,
            "target": self.target,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Decision:
        """Make a decision of what ``to_plain`` gave; missing and unknown fields are refused, not guessed."""
        try:
            return cls(**plain)
        except TypeError as error:  # only the call itself can raise it: __post_init__ refuses with InvalidInput
            raise InvalidInput(f"not a decision: {error}", hint="Pass what Decision.to_plain() returned") from None
