"""What a person can answer: ``graph.resume(thread, Approve())``. Each makes a ``Decision``."""

from __future__ import annotations

from typing import Any

from backstay.model.decision import Decision, DecisionKind


def Approve(scope: str | None = None, *, reason: str = "") -> Decision:  # they read as the nouns they make
    """Go on as proposed. Within ``scope``, the name of a tool or node, or "*" for all tools, it is not asked again."""
    return Decision(kind=DecisionKind.APPROVE, scope=scope, reason=reason)


def Modify(value: Any, *, reason: str = "") -> Decision:
    """Go on with another value: a tool's arguments, or keys of the state to update."""
    return Decision(kind=DecisionKind.MODIFY, value=value, reason=reason)


def Answer(value: Any) -> Decision:
    """Give the value that was asked for."""
    return Decision(kind=DecisionKind.MODIFY, value=value)


def Reject(reason: str = "") -> Decision:
    """Do not do it."""
    return Decision(kind=DecisionKind.REJECT, reason=reason)


def Defer(reason: str = "") -> Decision:
    """Do not do it now; the run stays where it is and asks again when it is resumed."""
    return Decision(kind=DecisionKind.DEFER, reason=reason)


def Reroute(target: str, *, reason: str = "") -> Decision:
    """Do not do it; go on at another node."""
    return Decision(kind=DecisionKind.REROUTE, target=target, reason=reason)
