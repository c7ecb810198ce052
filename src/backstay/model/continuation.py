"""Continuation: what is to run after a checkpoint.

A tagged union of three frozen values: one node, several nodes side by side, or nothing. It is stored with the position,
so that resuming never has to evaluate a condition again and never takes a fan-out for a single next node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from backstay.errors import InvalidInput
from backstay.model.ids import check_id


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
    """Several nodes run side by side; when all are done ``join`` runs, or nothing if it is None."""

    kind: ClassVar[str] = "fanout"

    targets: tuple[str, ...]  # distinct, in the order the graph names them; a list is taken and kept as tuple
    join: str | None = None

    def __post_init__(self) -> None:
        # Text is a sequence of texts too: "ab" would silently become the nodes "a" and "b".
        if not isinstance(self.targets, tuple | list):
            raise InvalidInput(f"fan-out targets are {type(self.targets).__name__}", hint="Pass a tuple of node names")
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
    """Make a continuation of what ``to_plain`` gave; unknown kinds and fields are refused, not guessed."""
    try:
        fields = dict(plain)
        cls = _BY_KIND[fields.pop("kind")]
        return cls(**fields)
    except InvalidInput:
        raise  # a field was refused, with its own reason; it is a ValueError too
    except KeyError as error:
        raise InvalidInput(
            f"not a continuation: kind {str(error)[:40]} is missing or not known",
            hint=f"Use one of {', '.join(_BY_KIND)}",
        ) from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"not a continuation: {error}", hint="Pass what to_plain() returned") from None
