"""The records of the memory store, each with the moment until which it lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.records import KINDS, Kind, Record, record_id


class KeptRecord(NamedTuple):
    """A record, and the end of its time to live if it has one."""

    record: Record
    expiry: Moment | None

    def shown(self, now: Moment) -> Record:
        """Return the record with the time that is left."""
        return self.record if self.expiry is None else replace(self.record, left_us=now.left_us(*self.expiry))


class RecordTable:
    """All records, by kind and name."""

    def __init__(self) -> None:
        self._kept: dict[Kind, dict[bytes, KeptRecord]] = {kind: {} for kind in KINDS}
        self.last_number = 0

    def __iter__(self) -> Iterator[Record]:
        return (kept.record for by_name in self._kept.values() for kept in by_name.values())

    def put(self, kept: KeptRecord) -> None:
        """Keep a record as it is now."""
        record = kept.record
        self.last_number = max(self.last_number, record.number)
        self._kept[record.kind][record_id(record.kind, record.lane, record.key)] = kept

    def find(self, kind: Kind, lane: LaneKey, key: str) -> KeptRecord | None:
        """Return one record, or None."""
        return self._kept[kind].get(record_id(kind, lane, key))

    def listed(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int, now: Moment
    ) -> list[Record]:
        """See ``Records.records``."""
        found = [
            kept
            for kept in self._kept[kind].values()
            if kept.record.number > after
            and kept.record.lane.namespace == namespace
            and thread in (None, kept.record.lane.thread)
            and (kept.record.open or not open_only)
        ]
        found.sort(key=lambda kept: kept.record.number)
        return [kept.shown(now) for kept in found[: max(0, min(limit, PAGE_ROWS_MAX))]]

    def drop(self, is_gone: Callable[[Record], bool]) -> None:
        """Delete all records of which this is true."""
        self._kept = {
            kind: {name: kept for name, kept in by_name.items() if not is_gone(kept.record)}
            for kind, by_name in self._kept.items()
        }
