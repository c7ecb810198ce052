"""Two policies for the checkpoints of a run: when to take one, and how long to keep it. They combine freely.

Both are arguments of a run::

    graph.run_sync(thread, {}, trigger=TriggerPolicy.ON_MUTATION, sink=RetentionPolicy(latest=5).sink)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from backstay.engine import triggers
from backstay.engine.sinks import CheckpointSink, Retained, StoreSink
from backstay.errors import InvalidInput
from backstay.operations.retention import Keep

_SECONDS_OF_DAY = 86400


class TriggerPolicy(Enum):
    """When a run takes a checkpoint. Pass it as ``trigger=``.

    The start, the pauses and the end of a run are stored under every policy.
    """

    EVERY_NODE = "every_node"  # after each node, the default of a run
    BARRIER_ONLY = "barrier_only"  # after each decision at a barrier
    MANUAL = "manual"  # when a node asks for it, with ctx.checkpoint()
    ON_MUTATION = "on_mutation"  # after each node that changed the state

    def start(self) -> triggers.RunTrigger:
        """Return a trigger for one run; the engine calls it."""
        made: triggers.Trigger = getattr(triggers, self.value)()
        return made.start()


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which checkpoints stay: all by default, or the latest so many, or those younger than an age.

    The newest checkpoint always stays, and so do those with tags, forks or open interrupts.
    """

    latest: int | None = None
    age: timedelta | None = None

    def __post_init__(self) -> None:
        if self.age is not None and not isinstance(self.age, timedelta):
            raise InvalidInput(f"age must be a timedelta, not {type(self.age).__name__}")
        _ = self.keep  # refuses invalid numbers now, not during a run

    @property
    def keep(self) -> Keep | None:
        """The rule for ``thread.prune``; None keeps everything."""
        if self.latest is None and self.age is None:
            return None
        days = None if self.age is None else self.age.total_seconds() / _SECONDS_OF_DAY
        return Keep(last=self.latest, days=days)

    def prune_keep(self) -> int | None:
        """Return how many checkpoints to keep; None if their number does not decide."""
        return self.latest

    def sink(self, own: StoreSink) -> CheckpointSink:
        """Return the sink of a run that prunes after each save. Pass this method to a run as ``sink=``."""
        return own if self.keep is None else Retained(self.keep, own)
