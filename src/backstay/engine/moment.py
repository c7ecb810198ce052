"""Moment: what a sink is told, besides the state, when a run stands at a place from which it could go on.

The engine makes one after each commit and at each end of a run. It holds facts only: whether to keep anything is the
business of the sink, and when a sink is told is the business of the trigger. What costs something to make, the stack
of frames, is a function that is called only by whoever wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from backstay.engine.live import LiveState
from backstay.model.checkpoint import Notes
from backstay.model.frame import FrameInfo, FrameStack

Cause = Literal["input", "node", "interrupt", "manual", "end", "rejected", "failed", "cancelled", "barrier"]
"""Why there is a moment; stored as the checkpoint's trigger."""

FORCED: Final[frozenset[Cause]] = frozenset({"input", "interrupt", "end", "rejected", "failed", "cancelled"})
"""How a run begins, waits and ends: without these nobody could tell from what is stored how a run stands."""


@dataclass(slots=True)
class StepRecord:
    """What is stored of a moment besides the state."""

    frames: list[dict[str, Any]]  # plain, the outermost without its state
    path: Sequence[str]  # all nodes finished in the outermost graph
    run: Mapping[str, Any]  # the graph's shape and the run's options
    run_version: int  # rises when ``run`` changes
    notes: Notes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moment:
    """One consistent state's place in its run. Borrowed like the state: it is true until the callback is done."""

    node_id: str  # the node whose commit just finished; the start node at the very beginning
    step: int  # nodes committed so far in the run; 0 before the first
    graph_id: str  # the graph that this node is in: the outermost, or one inside it
    run_id: str
    attempt: int = 1
    trigger: Cause = "node"
    mutated: bool = True  # the commit changed something
    at_barrier: bool = False
    forced: bool = False  # passes every trigger and every wrapper; so do the causes above without saying it
    requested: bool = False  # the node asked for it
    frames: Callable[[], FrameStack] = field(repr=False)
    live: LiveState = field(repr=False)  # of the outermost graph, for sinks that store only what is new
    own: LiveState | None = field(default=None, repr=False)  # of the graph that this node is in; None = the outermost
    record: Callable[[], StepRecord] | None = field(default=None, repr=False)  # for sinks that store what is to resume

    def __post_init__(self) -> None:
        if self.trigger in FORCED:
            object.__setattr__(self, "forced", True)

    @property
    def info(self) -> FrameInfo:
        """The least that describes the commit."""
        return FrameInfo(self.node_id, self.step)
