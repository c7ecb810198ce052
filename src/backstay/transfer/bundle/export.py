"""Writing a bundle: a thread at a time, a checkpoint at a time, each byte checked before it is written.

Of a value that grew only the new bytes are read. A checkpoint whose bytes fail their digest is named in the report and
in the bundle itself, and the rest is exported: what was found damaged must not hide what is whole.

Effects and interrupts are read after the checkpoints. So what was done while the export ran may be known in the bundle
although its checkpoint is not there yet; the other way round a thread could go on from it and do the same again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from backstay.errors import BackstayError, Corrupted, DecodeError, InvalidInput, NotFound
from backstay.model.checkpoint import CheckpointMeta, bare
from backstay.pieces.manifest import Key
from backstay.pieces.piece import Piece, Range, grown_by
from backstay.pieces.tip import Live
from backstay.store.atomic import replacing
from backstay.store.base import Backend, LaneKey, Query, Row
from backstay.store.records import Kind, Record
from backstay.thread import interrupts, ledger
from backstay.thread.access import access_of
from backstay.thread.load import expected_digest, is_there, open_tip
from backstay.thread.record import parent_digest, values_of
from backstay.thread.records import all_records, unstored
from backstay.thread.store import Store
from backstay.transfer.bundle import records, walk
from backstay.transfer.bundle.blocks import BlockWriter
from backstay.transfer.bundle.records import CheckpointRecord, Edit
from backstay.transfer.bundle.state import (
    STATE_BYTES_MAX,
    State,
    Value,
    Window,
    edit_between,
    natural_order,
    whole,
)
from backstay.transfer.progress import Progress, Teller
from backstay.transfer.report import ExportReport, Note

OnDamage = Literal["report", "refuse"]


def export_bundle(
    store: Store,
    path: str | os.PathLike[str],
    *,
    threads: Iterable[str] | None = None,
    on_damage: OnDamage = "report",
    progress: Progress | bool | None = None,
) -> ExportReport:
    """Write threads of a store, or all of its namespace, into one file, which appears whole or not at all.

    The same content gives the same bytes from every kind of store. Leases and sessions stay: they are of processes.
    ``on_damage="refuse"`` raises at the first checkpoint that fails its digest instead of leaving it out and saying so.
    ``progress`` is called with (done, total, unit); True shows a line on a terminal.
    """
    if on_damage not in get_args(OnDamage):
        raise InvalidInput(f"on_damage must be 'report' or 'refuse', not {on_damage!r}")
    target = Path(path)
    backend = access_of(store).store
    named = walk.thread_names(backend, store.namespace)
    wanted = named if threads is None else _wanted(named, threads)
    pages, unlisted = _pages(backend, store.namespace, wanted)
    teller = Teller(progress, "exporting", sum(each.count for each in pages.values()), "checkpoints")
    with replacing(target) as file:
        export = _Export(backend, store.namespace, BlockWriter(file), on_damage, teller)
        report = export.run(pages, unlisted)
        file.flush()
        size = os.fstat(file.fileno()).st_size
    teller.finish()
    return ExportReport(*report, size, export.digest, tuple(export.damaged))


def _wanted(named: Sequence[str], threads: Iterable[str]) -> list[str]:
    if isinstance(threads, str):
        raise InvalidInput("threads is a list of thread ids, not one text", hint=f"Write threads=[{threads!r}]")
    wanted = set(threads)
    if unknown := wanted - set(named):
        raise NotFound(f"thread {min(unknown)!r}", thread=min(unknown), hint="There is nothing to export of it")
    return [name for name in named if name in wanted]


def _pages(
    backend: Backend, namespace: str, threads: Iterable[str]
) -> tuple[dict[str, walk.Pages], dict[str, BackstayError]]:
    pages: dict[str, walk.Pages] = {}
    unlisted: dict[str, BackstayError] = {}
    for thread in threads:
        pages[thread] = walk.Pages()
        try:
            pages[thread] = walk.pages_of(backend, namespace, thread)
        except (Corrupted, DecodeError) as error:
            unlisted[thread] = error
    return pages, unlisted


@dataclass(slots=True)
class _Thread:
    """The thread that is being written: its branches so far, and the states that may be a base."""

    name: str
    origins: dict[LaneKey, str | None]
    numbers: dict[LaneKey, int] = field(default_factory=dict)
    last: dict[LaneKey, Row] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    damaged: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Change:
    """What a checkpoint changes against its base."""

    state: State
    edits: list[tuple[Edit, bytes]]
    removed: list[Key]
    order: list[Key] | None


class _Export:
    def __init__(
        self, backend: Backend, namespace: str, writer: BlockWriter, on_damage: OnDamage, teller: Teller
    ) -> None:
        self.backend = backend
        self.namespace = namespace
        self.writer = writer
        self.on_damage = on_damage
        self.teller = teller
        self.damaged: list[Note] = []
        self.digest = b""
        self.checkpoints = self.interrupts = self.effects = 0

    def run(self, pages: dict[str, walk.Pages], unlisted: dict[str, BackstayError]) -> tuple[int, int, int, int]:
        """Write everything and return how much it was."""
        self.writer.add(records.HEADER, records.pack_names(self.namespace))
        for name in list(pages):
            self.writer.add(records.THREAD, records.pack_names(name))
            if name in unlisted:
                self._report(name, None, unlisted[name])
            self._export_thread(name, pages.pop(name))
        counts = (self._threads, self.checkpoints, self.interrupts, self.effects)
        self.digest = self.writer.finish(records.pack_numbers(*counts, len(self.damaged)))
        return counts

    _threads = 0

    def _export_thread(self, name: str, pages: walk.Pages) -> None:
        self._threads += 1
        origins = {lane.key: lane.origin for lane in self.backend.lanes(self.namespace, name, None)}
        thread = _Thread(name, origins)
        for row in walk.rows_of(self.backend, self.namespace, name, pages, payload=True):
            if isinstance(row, BackstayError):
                self._report(name, row.checkpoint, row)
                continue
            try:
                self._export_row(thread, row)
            except (Corrupted, DecodeError) as error:
                if is_there(self.backend, row):  # else it was deleted while it was read
                    thread.damaged.add(row.id)
                    self._report(name, row.id, error)
            self.teller.tell(self.checkpoints)
        self.interrupts += self._export_records("interrupt", name, records.INTERRUPT, _interrupt)
        self.effects += self._export_records("effect", name, records.EFFECT, _effect)

    def _export_records(self, kind: Kind, thread: str, mark: int, renewed: Callable[[Record], Record]) -> int:
        """Write all records of a kind that can be read; return how many."""
        count = 0
        for stored in all_records(self.backend, kind, self.namespace, thread):
            try:
                data = records.pack_record(renewed(stored))
            except (Corrupted, DecodeError) as error:
                self._report(thread, stored.checkpoint, error)
                continue
            self.writer.add(mark, data)
            count += 1
        return count

    def _report(self, thread: str, checkpoint: str | None, error: BackstayError) -> None:
        if self.on_damage == "refuse":
            raise error
        self.damaged.append(Note(error.what, "damaged", thread, checkpoint))
        self.writer.add(records.DAMAGE, records.pack_names(checkpoint or "", error.what))

    def _export_row(self, thread: _Thread, row: Row) -> None:
        base = self._base(thread, row)
        change = self._change(thread.window.get(base) if base is not None else None, row, base, thread)
        # From here on nothing can fail but the file.
        number = thread.numbers.get(row.lane)
        if number is None:
            number = thread.numbers[row.lane] = len(thread.numbers)
            self.writer.add(records.LANE, records.pack_lane(row.lane, thread.origins.get(row.lane)))
        before = thread.last.get(row.lane)
        follows = before is not None and (before.id, before.digest) == (row.parent_id, row.parent_digest)
        record = CheckpointRecord(
            number,
            row.id,
            follows,
            None if follows else row.parent_id,
            None if follows or row.parent_id is None else row.parent_digest,
            base,
            row.step,
            row.created_us,
            row.digest,
            row.notes,
            row.tags,
            change.order,
            change.removed,
            [edit for edit, _ in change.edits],
            len(row.writes),
        )
        self.writer.add(records.CHECKPOINT, record.pack())
        for edit, between in change.edits:
            if edit.length:
                self.writer.add(records.VALUE_BYTES, between)
        for write in row.writes:
            self.writer.add(records.WRITE, records.pack_write(write))
        thread.last[row.lane] = row._replace(manifest=b"", base_data=None, writes=(), notes=b"")
        thread.window.put(number, change.state)
        self.checkpoints += 1

    def _base(self, thread: _Thread, row: Row) -> int | None:
        """Return the branch whose newest state is the base: its own; for the first one of a branch, its parent's."""
        number = thread.numbers.get(row.lane)
        if number is None and row.parent_id is not None and row.parent_id not in thread.damaged:
            found = self.backend.find(Query(self.namespace, ids=(row.parent_id,)))
            if found and found[0].seq < row.seq:
                number = thread.numbers.get(found[0].lane)
        return number if number is not None and thread.window.get(number) is not None else None

    def _change(self, base: State | None, row: Row, number: int | None, thread: _Thread) -> _Change:
        """Return what a checkpoint changes, all of it verified; the base is as before if that fails."""
        tip = open_tip(self.backend, row, {})
        _check_row(row, tip.entries())
        if row.size > STATE_BYTES_MAX:
            raise DecodeError(f"checkpoint {row.id} is larger than the {STATE_BYTES_MAX} bytes a bundle can hold")
        in_place = number is not None and number == thread.numbers.get(row.lane)
        before: State = base or {}
        fetched = self._fetched(before, tip.lives)
        edits: list[tuple[Edit, bytes]] = []
        state: State = {}
        for key, live in tip.lives.items():
            old = before.get(key)
            if key not in fetched:
                assert old is not None
                state[key] = old if in_place else old.copy()
                state[key].pieces = live.pieces
                continue
            edit, between, state[key] = _edited(key, old, live, *fetched[key], in_place)
            edits.append((edit, between))
        removed = [key for key in before if key not in state]
        natural = natural_order(before, removed, [edit for edit, _ in edits])
        return _Change(state, edits, removed, None if natural == list(state) else list(state))

    def _fetched(self, base: State, lives: dict[Key, Live]) -> dict[Key, tuple[Any, bytes, bool]]:
        """Return of every value that changed a hasher that has seen all of it, its new bytes, and if it only grew."""
        plans: list[tuple[Key, Live, list[Piece], Value | None]] = []
        ranges: list[Range] = []
        for key, live in lives.items():
            old = base.get(key)
            if old is not None and old.is_same(live.entry):
                continue
            rest = None if old is None or live.parts is not None else grown_by(old.pieces, live.pieces)
            pieces = [] if live.parts is not None else live.pieces if rest is None else rest
            ranges += [piece for piece in pieces if isinstance(piece, Range)]
            plans.append((key, live, pieces, None if rest is None else old))
        found = iter(self.backend.fetch(ranges)) if ranges else iter(())
        fetched = {}
        for key, live, pieces, grown in plans:
            parts = live.parts
            if parts is None:
                parts = [part for piece in pieces for part in (next(found) if isinstance(piece, Range) else (piece,))]
            data = b"".join(parts)
            hasher = whole("", 0, data).hasher if grown is None else grown.hasher.copy()
            if grown is not None:
                hasher.update(data)
            if hasher.digest() != live.entry.digest:
                raise Corrupted(f"the bytes of {key!r} do not match their digest")
            fetched[key] = (hasher, data, grown is not None)
        return fetched


def _edited(
    key: Key, old: Value | None, live: Live, hasher: Any, data: bytes, grown: bool, in_place: bool
) -> tuple[Edit, bytes, Value]:
    """Return how a value that changed follows from its base, and the value."""
    entry = live.entry
    if old is not None and grown and old.kind == entry.kind:
        edit = Edit(key, entry.kind, entry.count, old.size, 0, len(data))
        value = old if in_place else old.copy()
        value.grow(entry.count, [data], hasher)
        value.pieces = live.pieces
        return edit, data, value
    if old is not None and grown:
        data = old.data() + data
    edit, between = edit_between(key, b"" if old is None else old.data(), entry.kind, entry.count, data)
    return edit, between, Value(entry.kind, entry.count, len(data), hasher, [data], live.pieces)


def _check_row(row: Row, entries: Any) -> None:
    """Raise Corrupted unless the description and the digests of all values give the checkpoint's own."""
    above = parent_digest(row)
    if above is None:
        raise Corrupted(f"checkpoint {row.id}: its parent {row.parent_id} is missing", checkpoint=row.id)
    meta = bare(CheckpointMeta, values_of(row))
    if expected_digest(row, meta, entries, above) != row.digest:
        raise Corrupted(f"checkpoint {row.id}: description or content does not match its digest", checkpoint=row.id)


def _interrupt(stored: Record) -> Record:
    """Return an interrupt, all of it checked. The epoch of its consumer means nothing in another store."""
    interrupts.record_of(stored)
    row = interrupts.row_of(stored)
    return replace(row, stored=unstored(stored), consumer_epoch=0).sealed()


def _effect(stored: Record) -> Record:
    return replace(ledger.row_of(stored), stored=unstored(stored)).sealed()
