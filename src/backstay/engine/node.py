"""Nodes: what a graph is made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from backstay.model.decision import DecisionKind
from backstay.recovery.policy import ONCE, RetryPolicy

if TYPE_CHECKING:
    from backstay.engine.declaration import Declaration

Projection = Callable[..., Mapping[str, Any]]


class NodeKind(StrEnum):
    """What a node is; part of the graph's fingerprint."""

    TASK = "task"  # a function of the state that returns an update
    SUBGRAPH = "subgraph"  # another graph, run on a part of the state
    BARRIER = "barrier"  # runs nothing: waits for somebody's decision


@dataclass(frozen=True, slots=True)
class Body:
    """A node's function and how it is to be called."""

    function: Callable[..., Any]
    is_async: bool
    wants_context: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Body:
        """Look at a function once, when the graph is defined."""
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        return cls(function, is_async, positional_count(function) > 1)


def positional_count(function: Callable[..., Any]) -> int:
    """Return how many arguments a function takes by position and has no default for."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return 1
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(1 for each in parameters if each.kind in taken and each.default is inspect.Parameter.empty)


@dataclass(frozen=True, slots=True)
class Inner:
    """A subgraph node's graph, and how state goes in and out."""

    graph: Declaration
    into: Mapping[str, str] | Projection | None = None  # outer key -> inner key, or a function of the outer state
    out: Mapping[str, str] | Projection | None = None  # inner key -> outer key, or a function of the inner state


@dataclass(frozen=True, slots=True)
class Wait:
    """What a barrier asks, and what becomes of it if nobody answers or the answer is no."""

    prompt: str = ""
    payload: Callable[[Any], Any] | None = None  # of the state: what is shown to the person who decides
    timeout_s: float | None = None
    on_timeout: DecisionKind = DecisionKind.REJECT
    on_reject: str | None = None  # the node to go to; None = the run ends, rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, as declared."""

    name: str
    kind: NodeKind
    body: Body | None = None
    inner: Inner | None = None
    wait: Wait | None = None
    retry: RetryPolicy = ONCE
    fallback: Body | None = None  # called instead, once there are no attempts left
    pauses: bool = False  # when that did not help either, a person is asked; else the run fails
    timeout_s: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)  # the caller's own, for drawings and lists
