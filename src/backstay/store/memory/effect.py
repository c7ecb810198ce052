"""The effects of the memory store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.effects import INTENDED, EffectRow, effect_missing, intent, may_begin
from backstay.store.lane import LaneKey


class EffectTable:
    """All effects. What a verb would make of one is asked for first, then put."""

    def __init__(self) -> None:
        self._rows: dict[tuple[LaneKey, str], EffectRow] = {}
        self.last_number = 0

    def __iter__(self) -> Iterator[EffectRow]:
        return iter(self._rows.values())

    def begun(self, row: EffectRow, retry_of: int | None) -> EffectRow:
        """Return the intent if it is the next attempt, else what is there; who may do so was checked before."""
        stored = self.find(row.lane, row.key)
        if stored is None:
            return intent(row, self.last_number + 1)
        return intent(row, stored.number) if may_begin(row, stored, retry_of) else stored

    def ended(
        self,
        lane: LaneKey,
        key: str,
        attempt: int,
        owner: str,
        status: str,
        body: bytes,
        ended_us: int,
        by: str | None = None,
    ) -> EffectRow:
        """Return the row after ``Effects.end_effect``."""
        row = self.find(lane, key)
        if row is None:
            raise effect_missing(lane, key)
        if (row.status, row.attempt, row.owner) != (INTENDED, attempt, owner):
            return row
        return replace(row, status=status, body=body, ended_us=ended_us, settled_by=by)

    def put(self, row: EffectRow) -> None:
        """Keep an effect as it is now."""
        self.last_number = max(self.last_number, row.number)
        self._rows[row.lane, row.key] = row

    def find(self, lane: LaneKey, key: str) -> EffectRow | None:
        """Return one effect, or None."""
        return self._rows.get((lane, key))

    def listed(self, namespace: str, thread: str | None, after: int, limit: int) -> list[EffectRow]:
        """See ``Effects.effects``."""
        found = [
            row
            for row in self
            if row.lane.namespace == namespace and thread in (None, row.lane.thread) and row.number > after
        ]
        return sorted(found, key=lambda row: row.number)[: max(0, min(limit, PAGE_ROWS_MAX))]

    def has_any(self, namespace: str, thread: str) -> bool:
        """Tell whether a thread has effects."""
        return any(lane[:2] == (namespace, thread) for lane, _ in self._rows)

    def drop(self, *names: str) -> None:
        """Delete the effects of a thread, named by namespace and thread, or of a lane, named by all its names."""
        self._rows = {name: row for name, row in self._rows.items() if name[0][: len(names)] != names}
