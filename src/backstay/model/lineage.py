"""Lineage: how checkpoints descend from each other, as trees and as a drawing.

It works on anything that has an id, a parent id, a seq and a branch, such as the metadata of a thread. A node whose
parent is not among the nodes (it was deleted, or is in another thread) is a root. Nothing recurses, so a history may
have any length. A cycle, which only damaged or hostile records can have, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from backstay.errors import InvalidInput

DRAW_DEPTH_MAX = 32  # forks of forks; deeper ones are drawn, but not indented further


class LineageNode(Protocol):
    """The facts about a checkpoint that a lineage needs."""

    @property
    def id(self) -> str:
        """Unique among the nodes."""

    @property
    def parent_id(self) -> str | None:
        """The node it builds on; None for the first of a thread."""

    @property
    def seq(self) -> int:
        """Orders siblings."""

    @property
    def branch(self) -> str:
        """The branch it belongs to; only drawing uses it."""


N = TypeVar("N", bound=LineageNode)


# Equality and repr ignore the children: they would otherwise recurse through the whole history.
@dataclass(frozen=True, slots=True, eq=False)
class Tree(Generic[N]):
    """A node with all its descendants."""

    node: N
    children: tuple[Tree[N], ...]  # by seq

    def __repr__(self) -> str:
        return f"Tree({self.node.id!r}, {len(self.children)} children)"


def trees_of(nodes: Iterable[N]) -> tuple[Tree[N], ...]:
    """Return one tree for each node without a parent among the nodes; siblings are ordered by seq."""
    ordered = sorted(nodes, key=lambda node: (node.seq, node.id))
    by_id = {node.id: node for node in ordered}
    if len(by_id) != len(ordered):
        raise InvalidInput("two nodes have the same id", hint="Pass each checkpoint once")
    children: dict[str, list[str]] = {}
    roots: list[str] = []
    for node in ordered:
        siblings = children.setdefault(node.parent_id, []) if node.parent_id in by_id else roots
        siblings.append(node.id)
    reached = dict.fromkeys(roots)  # parents before their children
    level = roots
    while level:
        level = [child for id in level for child in children.get(id, ())]
        reached.update(dict.fromkeys(level))
    if len(reached) < len(by_id):
        lost = next(id for id in by_id if id not in reached)
        raise InvalidInput(
            f"the parents of checkpoint {lost!r} lead into a cycle",
            hint="Check the store with store.check(): a save cannot cause this",
        )
    built: dict[str, Tree[N]] = {}
    for id in reversed(reached):
        built[id] = Tree(by_id[id], tuple(built.pop(child) for child in children.get(id, ())))
    return tuple(built[id] for id in roots)


def draw(forest: Iterable[Tree[N]], label: Callable[[N], str]) -> list[str]:
    """Return one line per node: a branch goes straight down, its forks are indented.

    ::

        ● 1
        ● 2
        ├─● 3 what-if
        │ ● 4 what-if
        ● 5
    """
    lines: list[str] = []
    waiting = [(tree, "", "") for tree in reversed(tuple(forest))]
    while waiting:
        tree, lead, margin = waiting.pop()
        # An id may contain line breaks and terminal escapes, which must not reach the terminal.
        text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in label(tree.node))
        lines.append(f"{lead}● {text}")
        if not tree.children:
            continue
        # One child always stays in the column, so that a long chain needs no more width.
        onward = next((one for one in tree.children if one.node.branch == tree.node.branch), tree.children[-1])
        waiting.append((onward, margin, margin))
        outer = margin[: 2 * (DRAW_DEPTH_MAX - 1)]
        forks = [one for one in tree.children if one is not onward]
        waiting.extend((fork, f"{outer}├─", f"{outer}│ ") for fork in reversed(forks))
    return lines


def lineage_text(nodes: Iterable[N], label: Callable[[N], str]) -> str:
    """Return the drawing of ``nodes`` as one text."""
    return "\n".join(draw(trees_of(nodes), label))
