"""The interrupts of the memory store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.interrupts import InterruptRow, interrupt_missing, interrupt_taken


class InterruptTable:
    """All interrupts. What a verb would make of one is asked for first, then put."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], InterruptRow] = {}
        self.last_number = 0

    def __iter__(self) -> Iterator[InterruptRow]:
        return iter(self._rows.values())

    def recorded(self, row: InterruptRow) -> InterruptRow:
        """Return a new interrupt of a checkpoint that is there, or the one with this id."""
        first = self.find(row.lane.namespace, row.id)
        if first is None:
            number = self.last_number + 1
            return InterruptRow(row.id, row.lane, row.checkpoint, row.digest, row.body, row.created_us, number)
        if (first.digest, first.lane, first.checkpoint) != (row.digest, row.lane, row.checkpoint):
            raise interrupt_taken(row)
        return first

    def decided(self, namespace: str, name: str, digest: bytes, decision: bytes, by: str, at_us: int) -> InterruptRow:
        """Return the row after ``Interrupts.decide``."""
        row = self._get(namespace, name)
        if row.digest != digest or row.decision is not None:
            return row
        return replace(row, decision=decision, decided_by=by, decided_us=at_us)

    def consumed(self, namespace: str, name: str, by: str, epoch: int, at_us: int) -> InterruptRow:
        """Return the row after ``Interrupts.consume``."""
        row = self._get(namespace, name)
        if row.decision is None or (row.consumer is not None and row.consumer_epoch >= epoch):
            return row
        return replace(row, consumer=by, consumer_epoch=epoch, consumed_us=at_us)

    def put(self, row: InterruptRow) -> None:
        """Keep an interrupt as it is now."""
        self.last_number = max(self.last_number, row.number)
        self._rows[row.lane.namespace, row.id] = row

    def listed(
        self, namespace: str, thread: str | None, pending_only: bool, after: int, limit: int
    ) -> list[InterruptRow]:
        """See ``Interrupts.interrupts``."""
        found = [
            row
            for row in self
            if row.lane.namespace == namespace
            and thread in (None, row.lane.thread)
            and not (pending_only and row.consumer is not None)
            and row.number > after
        ]
        return sorted(found, key=lambda row: row.number)[: max(0, min(limit, PAGE_ROWS_MAX))]

    def find(self, namespace: str, name: str) -> InterruptRow | None:
        """Return one interrupt, or None."""
        return self._rows.get((namespace, name))

    def is_awaited(self, namespace: str, checkpoint: str) -> bool:
        """Tell whether a checkpoint has an interrupt that is not consumed."""
        return any(
            (row.lane.namespace, row.checkpoint) == (namespace, checkpoint) and row.consumer is None for row in self
        )

    def drop(self, namespace: str, checkpoint: str) -> None:
        """Delete the interrupts of a checkpoint."""
        gone = [name for name, row in self._rows.items() if (name[0], row.checkpoint) == (namespace, checkpoint)]
        for name in gone:
            del self._rows[name]

    def _get(self, namespace: str, name: str) -> InterruptRow:
        row = self.find(namespace, name)
        if row is None:
            raise interrupt_missing(name)
        return row
