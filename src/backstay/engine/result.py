"""How a run ended, or where it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backstay.errors import BackstayError, Rejected
from backstay.model.checkpoint import CheckpointMeta
from backstay.thread.interrupts import InterruptRecord


class Status(StrEnum):
    """What became of a run."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"  # waits for decisions
    DEFERRED = "deferred"  # waits, because somebody decided to decide later; it asks again when it is resumed
    REJECTED = "rejected"  # somebody said no: it is over, and what was guarded did not run
    FAILED = "failed"  # a node failed; what was committed before is kept, and it can be resumed
    CANCELLED = "cancelled"  # it can be resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run's outcome. The state is the last one that was committed, whatever the status."""

    status: Status
    run_id: str
    state: Any = field(repr=False)  # as declared: a dict, or an instance of the state's class
    values: Mapping[str, Any] = field(repr=False)
    path: tuple[str, ...] = field(repr=False)  # the nodes that ran, in order
    steps: int = 0
    checkpoint: CheckpointMeta | None = None  # the newest one
    interrupts: tuple[InterruptRecord, ...] = ()  # what it waits for
    error: Exception | None = None
    reason: str = ""  # of a rejection or cancellation

    def check(self) -> Result:
        """Return the result itself if the run completed; else raise what kept it from completing."""
        if self.error is not None:
            raise self.error
        if self.status is Status.REJECTED:
            raise Rejected(f"the run was rejected: {self.reason or 'no reason given'}", reason=self.reason)
        if self.status is not Status.COMPLETED:
            raise BackstayError(
                f"the run is {self.status.value}, not completed",
                thread=None if self.checkpoint is None else self.checkpoint.thread_id,
                hint="Decide on result.interrupts, then graph.resume(thread)" if self.interrupts else None,
            )
        return self
