"""Which log a fact belongs into, and what becomes useless in which log when it is taken in."""

from __future__ import annotations

from backstay.store.directory.log import STORE_LOG
from backstay.store.lane import LaneKey
from backstay.store.memory.fact import (
    Deleted,
    Fact,
    LaneDropped,
    LaneSet,
    RecordSet,
    Saved,
    Several,
    Tagged,
    ThreadDeleted,
    Wrote,
)
from backstay.store.memory.tables import Tables

RECORD_BYTES_ABOUT = 200


def home_of(fact: Fact, tables: Tables) -> int:
    """Return the number of the log that a fact is written to: its lane's, if it is about one that is there."""
    match fact:
        case Saved():
            return fact.lane_number
        case LaneSet():
            return fact.number
        case Wrote() | Tagged():
            return _log_of(fact.lane, tables)
        case RecordSet(record):
            return _log_of(record.lane, tables)
        case Several():
            homes = {home_of(each, tables) for each in fact.facts}
            return homes.pop() if len(homes) == 1 else STORE_LOG
        case _:
            return STORE_LOG


def garbage_of(fact: Fact, tables: Tables) -> dict[int, int]:
    """Return about how many bytes of which logs a fact makes useless, besides those of states."""
    match fact:
        case LaneSet() if fact.key in tables.lanes:
            return {fact.number: RECORD_BYTES_ABOUT}
        case RecordSet(record) if (kept := tables.records.find(record.kind, record.lane, record.key)) is not None:
            return {_log_of(record.lane, tables): RECORD_BYTES_ABOUT + len(kept.record.body)}
        case Deleted() | ThreadDeleted():
            garbage = {STORE_LOG: RECORD_BYTES_ABOUT + 64 * len(fact.digests)}
            for name in fact.digests:
                row = tables.rows.get((fact.namespace, name))
                if row is not None:
                    number = tables.lanes[row.lane].number
                    size = RECORD_BYTES_ABOUT + len(row.manifest) + len(row.notes)
                    garbage[number] = garbage.get(number, 0) + size
            return garbage
        case LaneDropped():
            return {STORE_LOG: RECORD_BYTES_ABOUT, tables.lanes[fact.key].number: RECORD_BYTES_ABOUT}
        case Several():
            total: dict[int, int] = {}
            for each in fact.facts:
                for number, size in garbage_of(each, tables).items():
                    total[number] = total.get(number, 0) + size
            return total
        case _:
            return {}


def _log_of(lane: LaneKey, tables: Tables) -> int:
    found = tables.lanes.get(lane)
    return found.number if found is not None else STORE_LOG
