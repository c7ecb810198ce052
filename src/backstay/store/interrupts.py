"""The interrupt part of the store contract: pauses that wait for a decision, which is made once and consumed once.

An interrupt belongs to one checkpoint and goes with it. Its digest covers what the person who decides was shown; a
decision names it, so an answer to something else cannot be taken for an answer to this. Both steps are
compare-and-swap: the verbs return the row as it is afterwards, and the caller sees there whether it won.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backstay.errors import IdTaken, NotFound
from backstay.store.lane import LaneKey


@dataclass(frozen=True, slots=True)
class InterruptRow:
    """One recorded interrupt; ``body`` and ``decision`` are encoded values the store does not look into."""

    id: str
    lane: LaneKey
    checkpoint: str
    digest: bytes
    body: bytes
    created_us: int
    number: int = 0  # rises in the order in which interrupts were recorded; given by the store
    decision: bytes | None = None
    decided_by: str | None = None
    decided_us: int | None = None
    consumer: str | None = None
    consumer_epoch: int = 0
    consumed_us: int | None = None


def interrupt_missing(interrupt: str) -> NotFound:
    """Return the error for an interrupt that is not there."""
    return NotFound(f"interrupt {interrupt}", hint="It went with its checkpoint, or never was")


def interrupt_taken(row: InterruptRow) -> IdTaken:
    """Return the error for an interrupt whose id another one has."""
    return IdTaken(
        f"interrupt {row.id} exists and is another one",
        thread=row.lane.thread,
        checkpoint=row.checkpoint,
        hint="Give each interrupt its own id",
    )


class Interrupts(Protocol):
    """The verbs on interrupts."""

    def interrupt(self, row: InterruptRow) -> InterruptRow:
        """Record an interrupt of a checkpoint, which must exist in that lane's thread and scope (else NotFound).

        The same id with the same digest, lane and checkpoint gives the first row again; any other raises IdTaken.
        """

    def decide(
        self, namespace: str, interrupt: str, digest: bytes, decision: bytes, by: str, decided_us: int
    ) -> InterruptRow:
        """Set the decision if the digest is the interrupt's and there is no decision yet; return the row as it is now.

        Raises NotFound if there is no such interrupt.
        """

    def consume(self, namespace: str, interrupt: str, by: str, epoch: int, consumed_us: int) -> InterruptRow:
        """Set the consumer if there is a decision and no consumer, or one with a lower epoch; return the row as it is.

        A consumer with a lower epoch was fenced out, so its work may be taken over. Raises NotFound if there is no
        such interrupt.
        """

    def interrupts(
        self, namespace: str, thread: str | None, pending_only: bool, after: int, limit: int
    ) -> list[InterruptRow]:
        """Return interrupts with a higher number than ``after``, in that order; pending = not consumed yet.

        At most ``limit``, and never more than ``PAGE_ROWS_MAX``.
        """

    def find_interrupt(self, namespace: str, interrupt: str) -> InterruptRow | None:
        """Return one interrupt, or None."""
