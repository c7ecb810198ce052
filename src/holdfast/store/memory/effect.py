"""The effects of the memory store."""

from __future__ import annotations

from dataclasses import replace

from holdfast.store.base import PAGE_ROWS_MAX
from holdfast.store.effects import INTENDED, EffectRow, effect_missing, intent, may_begin
from holdfast.store.lane import LaneKey


class EffectTable:
    """All effects, in the order in which they were first begun."""

    def __init__(self) -> None:
        self._rows: dict[tuple[LaneKey, str], EffectRow] = {}
        self._last_number = 0

    def begin(self, row: EffectRow, retry_of: int | None) -> EffectRow:
        """Store an intent if it is the next attempt, and return what is there; who may do so was checked before."""
        stored = self.find(row.lane, row.key)
        if stored is not None and not may_begin(row, stored, retry_of):
            return stored
        if stored is None:
            self._last_number += 1
        return self._put(intent(row, self._last_number if stored is None else stored.number))

    def end(
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
        """See ``Effects.end_effect``."""
        row = self.find(lane, key)
        if row is None:
            raise effect_missing(lane, key)
        if (row.status, row.attempt, row.owner) != (INTENDED, attempt, owner):
            return row
        return self._put(replace(row, status=status, body=body, ended_us=ended_us, settled_by=by))

    def find(self, lane: LaneKey, key: str) -> EffectRow | None:
        """Return one effect, or None."""
        return self._rows.get((lane, key))

    def listed(self, namespace: str, thread: str | None, after: int, limit: int) -> list[EffectRow]:
        """See ``Effects.effects``."""
        return [
            row
            for row in self._rows.values()
            if row.lane.namespace == namespace and thread in (None, row.lane.thread) and row.number > after
        ][: max(0, min(limit, PAGE_ROWS_MAX))]

    def has_any(self, namespace: str, thread: str) -> bool:
        """Tell whether a thread has effects."""
        return any(lane[:2] == (namespace, thread) for lane, _ in self._rows)

    def drop(self, *names: str) -> None:
        """Delete the effects of a thread, named by namespace and thread, or of a lane, named by all its names."""
        self._rows = {name: row for name, row in self._rows.items() if name[0][: len(names)] != names}

    def _put(self, row: EffectRow) -> EffectRow:
        self._rows[row.lane, row.key] = row
        return row
