"""Lineage: how checkpoints descend from each other.

Pure walks over anything that has an id, a parent id, a seq and a branch, such as the metadata of a thread. Nothing is
loaded here. A parent that is not among the nodes was deleted, or is in another thread; its child then counts as a root,
or as a child of the survivor that ``adopt`` names. No walk recurses, so a history may have any length. A cycle, which
only damaged or hostile records can have, is refused at construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from backstay.errors import InvalidInput, NotFound

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


class Lineage(Generic[N]):
    """The descent of ``nodes``, built once in one pass; siblings are ordered by seq.

    ``adopt`` maps the id of a missing parent to its replacement; it may take several hops to a survivor.
    """

    def __init__(self, nodes: Iterable[N], *, adopt: Mapping[str, str] | None = None) -> None:
        ordered = sorted(nodes, key=lambda node: (node.seq, node.id))
        self._nodes = {node.id: node for node in ordered}
        if len(self._nodes) != len(ordered):
            raise InvalidInput("two nodes have the same id", hint="Pass each checkpoint once")
        self._parents = _surviving_parents(self._nodes, adopt or {})
        self._children: dict[str, list[str]] = {}
        self._roots = [id for id, parent in self._parents.items() if parent is None]
        for id, parent in self._parents.items():
            if parent is not None:
                self._children.setdefault(parent, []).append(id)
        self._depths = self._measure()

    def _measure(self) -> dict[str, int]:
        """Return each node's distance from its root, parents first; a node that no root leads to is in a cycle."""
        depths: dict[str, int] = {}
        depth, level = 0, self._roots
        while level:
            depths.update(dict.fromkeys(level, depth))
            depth, level = depth + 1, [child for id in level for child in self._children.get(id, ())]
        if len(depths) < len(self._nodes):
            lost = next(id for id in self._nodes if id not in depths)
            raise InvalidInput(
                f"the parents of checkpoint {lost!r} lead into a cycle",
                hint="Check the store with store.check(): a save cannot cause this",
            )
        return depths

    @property
    def roots(self) -> tuple[N, ...]:
        """The nodes without a parent among the nodes."""
        return self._pick(self._roots)

    @property
    def branch_points(self) -> tuple[N, ...]:
        """The nodes with more than one child, by seq."""
        return self._pick(id for id in self._nodes if len(self._children.get(id, ())) > 1)

    def children(self, id: str) -> tuple[N, ...]:
        """Return the nodes that build directly on ``id``."""
        self._require(id)
        return self._pick(self._children.get(id, ()))

    def ancestors(self, id: str) -> tuple[N, ...]:
        """Return the ancestors of ``id``, nearest first."""
        self._require(id)
        found = []
        parent = self._parents[id]
        while parent is not None:
            found.append(parent)
            parent = self._parents[parent]
        return self._pick(found)

    def descendants(self, id: str) -> tuple[N, ...]:
        """Return the descendants of ``id``, each line to its end before the next."""
        self._require(id)
        found = []
        waiting = list(reversed(self._children.get(id, ())))
        while waiting:
            one = waiting.pop()
            found.append(one)
            waiting.extend(reversed(self._children.get(one, ())))
        return self._pick(found)

    def common_ancestor(self, a: str, b: str) -> N | None:
        """Return the nearest node from which both descend, or None; here a node is its own ancestor."""
        left: str | None = self._require(a)
        right: str | None = self._require(b)
        while left is not None and right is not None:
            if left == right:
                return self._nodes[left]
            if self._depths[left] >= self._depths[right]:
                left = self._parents[left]
            else:
                right = self._parents[right]
        return None

    def depth(self, id: str) -> int:
        """Return how many ancestors ``id`` has."""
        return self._depths[self._require(id)]

    def tree(self) -> tuple[Tree[N], ...]:
        """Return one tree per root."""
        built: dict[str, Tree[N]] = {}
        for id in reversed(self._depths):  # children before parents
            built[id] = Tree(self._nodes[id], tuple(built.pop(child) for child in self._children.get(id, ())))
        return tuple(built[id] for id in self._roots)

    def _pick(self, ids: Iterable[str]) -> tuple[N, ...]:
        return tuple(self._nodes[id] for id in ids)

    def _require(self, id: str) -> str:
        if id not in self._nodes:
            raise NotFound("no such checkpoint in this lineage", checkpoint=id, hint="It may have been deleted")
        return id


def _surviving_parents(nodes: Mapping[str, LineageNode], adopt: Mapping[str, str]) -> dict[str, str | None]:
    """Map each node to its nearest existing parent, following ``adopt`` from missing ones."""
    settled: dict[str, str | None] = {}  # missing id -> survivor: no hop is taken twice
    parents: dict[str, str | None] = {}
    for id, node in nodes.items():
        at = node.parent_id
        hops: dict[str, None] = {}
        while at is not None and at not in nodes:
            if at in hops:
                raise InvalidInput(f"adopt leads from {at!r} back to itself", hint="Map missing ids to surviving ones")
            hops[at] = None
            at = settled[at] if at in settled else adopt.get(at)
        settled.update(dict.fromkeys(hops, at))
        parents[id] = at
    return parents


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
    return "\n".join(draw(Lineage(nodes).tree(), label))
