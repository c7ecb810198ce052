"""Channels that LangGraph keeps as writes only (``DeltaChannel``): their history, and how it outlives what is deleted.

Such a channel has no value in most checkpoints: it is rebuilt from the writes of all ancestors back to the nearest one
that holds a value. Ancestors come in one query of the namespace's rows; the chain of parents picks from them.

So writes are primary data, and deleting an ancestor would change what its descendants are. Before that happens, a
descendant that stays is given what the walk through its ancestors finds: **carried** writes, kept beside it under a
task id of ours. The walk takes them instead of the ancestors, and nobody else sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.pieces.manifest import Entries, Key, decode_base, decode_manifest
from backstay.store.base import Backend, Query, Row, WriteRow
from backstay.thread.load import fill, find_row, open_tip
from backstay.thread.removal import REBUILT_FROM

CARRIED = "backstay:carried"
"""The task id of carried writes."""

_SEED = "seed"
_PAGE_ROWS_MIN, _PAGE_ROWS_MAX = 64, 1000


def is_carried(write: WriteRow) -> bool:
    """Tell whether a write stands for deleted ancestors and is no pending write of the checkpoint itself."""
    return write.task_id == CARRIED


@dataclass(slots=True)
class Trail:
    """What the walk found of one channel: writes, oldest first when it is over, and the value they build on."""

    writes: list[WriteRow] = field(default_factory=list)
    seed: WriteRow | None = None


def rebuilt_channels(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the channels of a checkpoint whose value is in its ancestors' writes."""
    counters = metadata.get(REBUILT_FROM)
    return tuple(counters) if isinstance(counters, dict) else ()


def walk(store: Backend, target: Row, channels: Iterable[str]) -> dict[str, Trail]:
    """Return each channel's writes before a checkpoint that was found with its writes, back to where it had a value."""
    trails = {channel: Trail() for channel in channels}
    open_channels = set(trails)
    bases: dict[bytes, Entries] = {}
    row, child = None, target
    ancestors = _Ancestors(target)
    while open_channels:
        _take_carried(child, trails, open_channels)
        if not open_channels:
            break
        row = ancestors.parent_of(store, child)
        if row is None:
            break
        for write in reversed(row.writes):
            if write.channel in open_channels and not is_carried(write):
                trails[write.channel].writes.append(write)
        keys = _keys(row, bases)
        held = {channel for channel in open_channels if channel in keys}
        if held:
            seeds = _seeds(store, row, held)
            for channel, seed in seeds.items():
                trails[channel].seed = seed
            open_channels -= held
        child = row
    for trail in trails.values():
        trail.writes.reverse()
    return trails


def carried_writes(trails: Mapping[str, Trail]) -> list[WriteRow]:
    """Return a checkpoint's history as writes to be kept beside it."""
    carried: list[WriteRow] = []
    for channel, trail in trails.items():
        if trail.seed is not None:
            carried.append(_carried(trail.seed, channel, len(carried), _SEED))
        for write in trail.writes:
            carried.append(_carried(write, channel, len(carried), f"{len(carried):08d}:{write.task_id}"))
    return carried


def _carried(write: WriteRow, channel: str, index: int, path: str) -> WriteRow:
    return WriteRow(CARRIED, index, channel, write.kind, write.count, write.body, path)


def _take_carried(row: Row, trails: Mapping[str, Trail], open_channels: set[str]) -> None:
    """Take what a checkpoint carries instead of its ancestors."""
    carried = [write for write in row.writes if is_carried(write) and write.channel in open_channels]
    for write in sorted(carried, key=lambda each: each.index, reverse=True):
        trail = trails[write.channel]
        if write.task_path == _SEED:
            trail.seed = write
        else:
            task_id = write.task_path.split(":", 1)[1]
            trail.writes.append(WriteRow(task_id, 0, write.channel, write.kind, write.count, write.body))
    open_channels -= {write.channel for write in carried}


class _Ancestors:
    """The rows before a checkpoint in its namespace, read in pages that grow."""

    def __init__(self, target: Row) -> None:
        lane = target.lane
        self._namespace = lane.namespace
        self._query = (lane.namespace, lane.thread, lane.scope)
        self._before = target.seq
        self._rows: dict[str, Row] = {}
        self._size = _PAGE_ROWS_MIN
        self._is_over = False

    def parent_of(self, store: Backend, row: Row) -> Row | None:
        """Return a row's parent, or None if it has none any more."""
        name = row.parent_id
        if name is None:
            return None
        while name not in self._rows and not self._is_over:
            query = Query(*self._query, before=self._before, limit=self._size, payload=True, writes=True)
            page = store.find(query)
            self._rows = {each.id: each for each in page}  # the ones before are newer than any ancestor still wanted
            self._is_over = len(page) < self._size
            self._before = page[-1].seq if page else self._before
            self._size = min(self._size * 4, _PAGE_ROWS_MAX)
        return self._rows.get(name) or (find_row(store, self._namespace, name))


def _keys(row: Row, bases: dict[bytes, Entries]) -> set[Key]:
    """Return the names of the values that a row holds."""
    base: Entries = {}
    if row.base is not None and row.base_data is not None:
        if row.base not in bases:
            bases[row.base] = decode_base(row.base_data)
        base = bases[row.base]
    return set(decode_manifest(row.manifest, base))


def _seeds(store: Backend, row: Row, channels: Iterable[str]) -> dict[str, WriteRow]:
    tip = open_tip(store, row, {})
    wanted = list(channels)
    fill(store, tip, wanted, row)
    return {
        channel: WriteRow("", 0, channel, live.entry.kind, live.entry.count, b"".join(live.parts or ()))
        for channel, live in ((channel, tip.lives[channel]) for channel in wanted)
    }


def decoded(trails: Mapping[str, Trail], load: Any) -> dict[str, dict[str, Any]]:
    """Return the history as LangGraph wants it; ``load`` decodes a write's value."""
    found: dict[str, dict[str, Any]] = {}
    for channel, trail in trails.items():
        writes: Sequence[WriteRow] = trail.writes
        found[channel] = {"writes": [(write.task_id, channel, load(write)) for write in writes]}
        if trail.seed is not None:
            found[channel]["seed"] = load(trail.seed)
    return found
