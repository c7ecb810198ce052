"""Edges: where a run goes after a node.

A node's edges are tried in a fixed order: those with a condition as they were declared, then the plain one, then the
fallback. The first that holds is taken. A choice is one edge whose function names the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

END: Final = "__end__"
"""As the target of an edge: the graph is done."""

FAIL_FAST: Final = "fail_fast"
COLLECT_ALL: Final = "collect_all"


@dataclass(frozen=True, slots=True)
class To:
    """On to one node, or to the end."""

    node: str

    def nodes(self) -> tuple[str, ...]:
        """Return every node this may lead to."""
        return (self.node,)


@dataclass(frozen=True, slots=True)
class Together:
    """Several nodes side by side, then the join."""

    targets: tuple[str, ...]
    join: str
    on_error: str = FAIL_FAST

    def nodes(self) -> tuple[str, ...]:
        """Return every node this may lead to."""
        return (*self.targets, self.join)


@dataclass(frozen=True, slots=True)
class ForEach:
    """One node for each of a list's items, side by side, then the join."""

    node: str
    over: str | Callable[[Any], Any]  # a key of the state, or a function of the state
    join: str
    on_error: str = FAIL_FAST

    def nodes(self) -> tuple[str, ...]:
        """Return every node this may lead to."""
        return (self.node, self.join)


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that a function of the state names."""

    function: Callable[[Any], Any]
    ways: Mapping[str, str]

    def nodes(self) -> tuple[str, ...]:
        """Return every node this may lead to."""
        return tuple(self.ways.values())


Target = To | Together | ForEach | Choice


@dataclass(frozen=True, slots=True)
class Condition:
    """A named function of the state that says whether an edge holds. The name is part of the graph's fingerprint."""

    name: str
    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Edge:
    """One way on from a node."""

    source: str
    target: Target
    when: Condition | None = None
    fallback: bool = False

    @property
    def rank(self) -> int:
        """Return when it is tried: conditions first, then the plain edge, then the fallback."""
        return 0 if self.when is not None else 2 if self.fallback else 1


def name_of(function: Callable[..., Any]) -> str:
    """Return what a function is called in the fingerprint."""
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
