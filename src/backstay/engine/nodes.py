"""Nodes and edges: the parts of a declared graph.

The edges of a node are tried in a fixed order: edges with a condition as they were declared, then the plain edge, then
the fallback. The run takes the first edge that holds. A choice is one edge whose function names the target.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from backstay.engine.limits import Limiter
from backstay.model.decision import DecisionKind
from backstay.model.retry import ONCE, RetryPolicy

if TYPE_CHECKING:
    from backstay.engine.declaration import Declaration

Projection = Callable[..., Mapping[str, Any]]

END: Final = "__end__"
"""As the target of an edge: the graph is done."""

FAIL, PAUSE = "fail", "pause"
"""``on_failure`` of a node without attempts left: the run fails, or it asks a person."""

FAIL_FAST: Final = "fail_fast"
COLLECT_ALL: Final = "collect_all"


class NodeKind(StrEnum):
    """The kind of a node; part of the graph's fingerprint."""

    TASK = "task"  # a function of the state that returns an update
    SUBGRAPH = "subgraph"  # another graph, run on a part of the state
    BARRIER = "barrier"  # runs nothing: waits for a person's decision


@dataclass(frozen=True, slots=True)
class NodeFunction:
    """A node's function and how to call it."""

    function: Callable[..., Any]
    is_async: bool
    wants_context: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> NodeFunction:
        """Inspect a function once, when the graph is declared."""
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        return cls(function, is_async, takes_second(function))


def takes_second(function: Callable[..., Any]) -> bool:
    """Return whether a function takes a second argument: its second parameter has no default, or the default None.

    Another default is a value of the function's own, as in ``lambda state, name=name: …``.
    """
    parameters = _positional(function)
    return len(parameters) > 1 and any(parameters[1].default is each for each in (inspect.Parameter.empty, None))


def required_count(function: Callable[..., Any]) -> int:
    """Return the number of positional parameters without a default."""
    return sum(1 for each in _positional(function) if each.default is inspect.Parameter.empty)


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return []
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in parameters if each.kind in taken]


@dataclass(frozen=True, slots=True)
class Subgraph:
    """The graph of a subgraph node, and how state goes into it and out of it."""

    graph: Declaration
    into: Mapping[str, str] | Projection | None = None  # outer key -> inner key, or a function of the outer state
    out: Mapping[str, str] | Projection | None = None  # inner key -> outer key, or a function of the inner state


@dataclass(frozen=True, slots=True)
class Barrier:
    """The question of a barrier node, and what happens on a timeout or a rejection."""

    prompt: str = ""
    payload: Callable[[Any], Any] | None = None  # of the state; returns what to show to the person who decides
    timeout_s: float | None = None
    on_timeout: DecisionKind = DecisionKind.REJECT
    on_reject: str | None = None  # the node to go to; None = the run ends, rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, as declared."""

    name: str
    kind: NodeKind
    body: NodeFunction | None = None
    inner: Subgraph | None = None
    wait: Barrier | None = None
    retry: RetryPolicy = ONCE
    fallback: NodeFunction | None = None  # called when no attempts are left
    pauses: bool = False  # ask a person when the fallback fails too; otherwise the run fails
    timeout_s: float | None = None
    limiter: Limiter | None = field(default=None, compare=False, repr=False)  # shared by all runs in this process
    notes: Mapping[str, Any] = field(default_factory=dict)  # the caller's own, for drawings and lists


@dataclass(frozen=True, slots=True)
class To:
    """One node, or the end."""

    node: str

    def nodes(self) -> tuple[str, ...]:
        """Return every possible target."""
        return (self.node,)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Several nodes in parallel, then the join."""

    targets: tuple[str, ...]
    join: str
    on_error: str = FAIL_FAST
    at_once: int | None = None  # how many branches run at the same time; None = all

    def nodes(self) -> tuple[str, ...]:
        """Return every possible target."""
        return (*self.targets, self.join)


@dataclass(frozen=True, slots=True)
class ForEach:
    """One node for each item of a list, in parallel, then the join."""

    node: str
    over: str | Callable[[Any], Any]  # a key of the state, or a function of the state
    join: str
    on_error: str = FAIL_FAST
    at_once: int | None = None  # how many branches run at the same time; None = all

    def nodes(self) -> tuple[str, ...]:
        """Return every possible target."""
        return (self.node, self.join)


@dataclass(frozen=True, slots=True)
class Choice:
    """The target that a function of the state names."""

    function: Callable[[Any], Any]
    ways: Mapping[str, str]

    def nodes(self) -> tuple[str, ...]:
        """Return every possible target."""
        return tuple(self.ways.values())


Target = To | Parallel | ForEach | Choice


@dataclass(frozen=True, slots=True)
class Condition:
    """A named function of the state that decides whether an edge holds. The name is part of the fingerprint."""

    name: str
    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge from a node."""

    source: str
    target: Target
    when: Condition | None = None
    fallback: bool = False

    @property
    def rank(self) -> int:
        """The order in which edges are tried: 0 with a condition, 1 plain, 2 fallback."""
        return 0 if self.when is not None else 2 if self.fallback else 1


def name_of(function: Callable[..., Any]) -> str:
    """Return the name that a function has in the fingerprint."""
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
