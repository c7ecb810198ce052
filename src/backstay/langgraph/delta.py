"""Channels that LangGraph stores as writes only (``DeltaChannel``): their history, and how it survives deletions.

Such a channel has no value in most checkpoints. Its value is rebuilt from the writes of all ancestors, back to the
nearest one that holds a value. One query reads the rows of the namespace; the chain of parents picks from them.

So writes are primary data, and deleting an ancestor would change its descendants. Before that happens, a descendant
that stays gets **carried** writes: what the walk through its ancestors finds, stored with it under a task id of ours.
The walk takes them instead of the ancestors; no other reader sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backstay.operations.load import find_row, load_values, open_head_state
from backstay.pieces.manifest import Entries, decode_base, decode_manifest
from backstay.store.base import Backend, Query, Row, WriteRow

CARRIED = "backstay:carried"
"""The task id of writes that replace deleted ancestors, and are not pending writes of the checkpoint itself."""

_SEED = "seed"
_PAGE_ROWS_MIN, _PAGE_ROWS_MAX = 64, 1000


@dataclass(slots=True)
class ChannelWrites:
    """The history of one channel: its writes, oldest first after the walk, and the value they build on."""

    writes: list[WriteRow] = field(default_factory=list)
    seed: WriteRow | None = None


def walk(store: Backend, target: Row, channels: Iterable[str]) -> dict[str, ChannelWrites]:
    """Return each channel's writes before a checkpoint, back to its last value; ``target`` was found with writes."""
    found = {channel: ChannelWrites() for channel in channels}
    open_channels = set(found)
    bases: dict[bytes, Entries] = {}
    ancestors = _Ancestors(target)
    child = target
    while open_channels:
        open_channels -= _take_carried(child, found, open_channels)
        row = ancestors.parent_of(store, child) if open_channels else None
        if row is None:
            break
        for write in reversed(row.writes):
            if write.channel in open_channels and write.task_id != CARRIED:
                found[write.channel].writes.append(write)
        base: Entries = {}
        if row.base is not None and row.base_data is not None:
            if row.base not in bases:
                bases[row.base] = decode_base(row.base_data)
            base = bases[row.base]
        stored = open_channels & {key for key in decode_manifest(row.manifest, base) if isinstance(key, str)}
        if stored:
            head_state = open_head_state(store, row, {})
            load_values(store, head_state, list(stored), row)
            for channel in stored:
                value = head_state.values[channel]
                data = b"".join(value.parts or ())
                found[channel].seed = WriteRow("", 0, channel, value.entry.kind, value.entry.count, data)
            open_channels -= stored
        child = row
    for each in found.values():
        each.writes.reverse()
    return found


def _take_carried(row: Row, found: Mapping[str, ChannelWrites], open_channels: set[str]) -> set[str]:
    """Take the writes that a checkpoint carries in place of its ancestors, and return their channels."""
    carried = [write for write in row.writes if write.task_id == CARRIED and write.channel in open_channels]
    for write in sorted(carried, key=lambda each: each.index, reverse=True):
        if write.task_path == _SEED:
            found[write.channel].seed = write
        else:
            task_id = write.task_path.split(":", 1)[1]
            original = WriteRow(task_id, 0, write.channel, write.kind, write.count, write.body)
            found[write.channel].writes.append(original)
    return {write.channel for write in carried}


def carried_writes(found: Mapping[str, ChannelWrites]) -> list[WriteRow]:
    """Return a checkpoint's history as writes to be stored with it."""
    carried: list[WriteRow] = []
    for channel, each in found.items():
        seeds = [] if each.seed is None else [(each.seed, _SEED)]
        first = len(carried) + len(seeds)
        numbered = [(write, f"{number:08d}:{write.task_id}") for number, write in enumerate(each.writes, first)]
        for write, path in (*seeds, *numbered):
            carried.append(WriteRow(CARRIED, len(carried), channel, write.kind, write.count, write.body, path))
    return carried


class _Ancestors:
    """The rows before a checkpoint in its namespace, read in growing pages."""

    def __init__(self, target: Row) -> None:
        place = target.branch[:3]  # namespace, thread and scope
        self._query = Query(*place, before=target.seq, limit=_PAGE_ROWS_MIN, payload=True, writes=True)
        self._rows: dict[str, Row] = {}
        self._is_over = False

    def parent_of(self, store: Backend, row: Row) -> Row | None:
        """Return a row's parent, or None if it has none or it was deleted."""
        name = row.parent_id
        if name is None:
            return None
        while name not in self._rows and not self._is_over:
            page, limit = store.find(self._query), self._query.limit
            self._rows = {each.id: each for each in page}  # earlier pages are newer than any ancestor still wanted
            self._is_over = len(page) < limit
            if not self._is_over:
                self._query = replace(self._query, before=page[-1].seq, limit=min(limit * 4, _PAGE_ROWS_MAX))
        return self._rows.get(name) or find_row(store, self._query.namespace, name)


def decoded(found: Mapping[str, ChannelWrites], load: Callable[[WriteRow], Any]) -> dict[str, dict[str, Any]]:
    """Return the history as LangGraph expects it; ``load`` decodes the value of a write."""
    decoded: dict[str, dict[str, Any]] = {}
    for channel, each in found.items():
        decoded[channel] = {"writes": [(write.task_id, channel, load(write)) for write in each.writes]}
        if each.seed is not None:
            decoded[channel]["seed"] = load(each.seed)
    return decoded
