"""What is decided once for a run and stored with it, so that it goes on as it began, in whichever process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RunOptions:
    """A run's identity and options. ``version`` rises with what changes while it runs."""

    run_id: str
    graph_hash: int
    shape: Mapping[str, Any]
    attempt: int = 1  # how often the run was begun or taken up
    limit: int | None = None  # of nodes; None = the graph's own
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    effects_from: tuple[str, ...] = ()  # branches whose effects are replayed in this one
    grants: set[str] = field(default_factory=set)  # tools and nodes that need no further approval
    line: str = ""  # the checkpoint at which a fork or a rewind began this line of history
    version: int = 1

    @property
    def asks_as(self) -> str:
        """Return what the places of questions begin with: nothing that was answered in another line counts here."""
        return f"{self.run_id}@{self.line}" if self.line else self.run_id

    def grant(self, scope: str) -> None:
        """Do not ask about this any more."""
        if scope not in self.grants:
            self.grants.add(scope)
            self.version += 1

    def is_granted(self, tool: str) -> bool:
        """Tell whether an approval reached this far: that tool, or all tools. A node is granted by its name only."""
        return tool in self.grants or "*" in self.grants

    def to_plain(self) -> dict[str, Any]:
        """Return what is stored of it; the identity is in the checkpoint's own fields."""
        return {
            "shape": self.shape,
            "limit": self.limit,
            "before": sorted(self.before),
            "after": sorted(self.after),
            "metadata": dict(self.metadata),
            "effects_from": list(self.effects_from),
            "grants": sorted(self.grants),
            "line": self.line,
        }

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Go on with the options that a run was begun with."""
        self.limit = plain.get("limit")
        self.before = frozenset(plain.get("before", ()))
        self.after = frozenset(plain.get("after", ()))
        self.metadata = plain.get("metadata", {})
        self.effects_from = tuple(plain.get("effects_from", ()))
        self.grants = set(plain.get("grants", ()))
        self.line = plain.get("line", "")
