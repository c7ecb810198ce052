"""Write a bundle, one checkpoint at a time. Every byte is verified before it is written.

Of a value that only grew, only the new bytes are read. A damaged checkpoint is named in the report and in the bundle
itself, and the export continues: one damaged checkpoint must not keep the good ones from being exported.

Effects and interrupts are read after the checkpoints. So a bundle may know an effect whose checkpoint was saved too
late to be in it; the other way round, a thread could resume from the bundle and repeat the effect.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from backstay.bundle import records
from backstay.bundle.blocks import BlockWriter
from backstay.bundle.records import CheckpointRecord, Edit
from backstay.bundle.report import ExportReport, Note, Progress, ProgressReporter
from backstay.bundle.state import STATE_BYTES_MAX, State, Window, add_part, copy_of, edit_between, natural_order
from backstay.errors import BackstayError, Corrupted, DecodeError, InvalidInput, NotFound
from backstay.model.checkpoint import CheckpointMeta, unchecked
from backstay.model.runs import RunStatus
from backstay.operations import interrupts, ledger
from backstay.operations.listing import every_branch
from backstay.operations.load import expected_digest, is_stored, open_head_state
from backstay.operations.records import all_records, unstored
from backstay.operations.rows import parent_digest, values_of
from backstay.operations.run_records import threads_with_runs
from backstay.pieces.head_state import StoredValue
from backstay.pieces.manifest import Key, Piece, Range, grown_by
from backstay.store.atomic import replacing
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Query, Row
from backstay.store.records import Kind, Record
from backstay.thread.access import access_of
from backstay.thread.store import Store, check_store

# Read the threads of a store, oldest checkpoint first, one page at a time.
#
# Stores list the newest first. So a first pass counts the checkpoints and remembers where each page starts; a second
# one reads the pages from the last to the first. It does not see checkpoints that are added or deleted in between.


PAGE_ROWS = 100
"""How many checkpoints, with their manifests, are in memory at once."""


@dataclass(slots=True)
class ThreadPages:
    """Where the pages of a thread start, newest first, and how many checkpoints there are."""

    count: int = 0
    before: list[int] = field(default_factory=list)


def thread_names(backend: Backend, namespace: str) -> list[str]:
    """Return all threads: those with checkpoints in the order of their creation, then those with only effects."""
    names: list[str] = []
    before: int | None = None
    while True:
        page = backend.find(Query(namespace, heads_of_threads=True, before=before))
        names += [row.branch.thread for row in page]
        if len(page) < PAGE_ROWS_MAX:
            break
        before = page[-1].thread_number
    names.reverse()
    known = set(names)
    for effect in all_records(backend, "effect", namespace, None):
        if effect.branch.thread not in known:
            known.add(effect.branch.thread)
            names.append(effect.branch.thread)
    return names


def pages_of(backend: Backend, namespace: str, thread: str) -> ThreadPages:
    """Count the checkpoints of a thread and return where its pages start."""
    pages = ThreadPages()
    before: int | None = None
    while True:
        found = backend.find(Query(namespace, thread, before=before))
        pages.count += len(found)
        pages.before += [row.seq + 1 for row in found[::PAGE_ROWS]]
        if len(found) < PAGE_ROWS_MAX:
            return pages
        before = found[-1].seq


def rows_of(
    backend: Backend, namespace: str, thread: str, pages: ThreadPages, payload: bool
) -> Iterator[Row | BackstayError]:
    """Yield a thread's rows, oldest first. An unreadable row is yielded as its error."""
    last = 0
    for before in reversed(pages.before):
        query = Query(namespace, thread, before=before, limit=PAGE_ROWS, payload=payload, writes=payload)
        for row in _page(backend, query):
            if isinstance(row, BackstayError):
                yield row
            elif row.seq > last:
                last = row.seq
                yield row


def _page(backend: Backend, query: Query) -> list[Row | BackstayError]:
    try:
        return list(reversed(backend.find(query)))
    except BackstayError as error:
        if not query.payload:
            return [error]
    # One of these rows cannot be read. Read them one by one to find out which.
    plain = Query(query.namespace, query.thread, before=query.before, limit=query.limit)
    found: list[Row | BackstayError] = []
    for row in _page(backend, plain):
        if isinstance(row, BackstayError):
            found.append(row)
            continue
        try:
            found += backend.find(Query(query.namespace, ids=(row.id,), payload=True, writes=True))
        except BackstayError as error:
            error.checkpoint = error.checkpoint or row.id
            found.append(error)
    return found


OnDamage = Literal["report", "refuse"]


def export_bundle(
    store: Store,
    path: str | os.PathLike[str],
    *,
    threads: Iterable[str] | None = None,
    on_damage: OnDamage = "report",
    progress: Progress | bool | None = None,
) -> ExportReport:
    """Write threads of a store, or its whole namespace, into one file. The file appears only when it is complete.

    The same content gives the same bytes from every kind of store. Leases and runs are left out: they belong to
    processes. The report names the threads whose run is still queued. With ``on_damage="refuse"`` a damaged checkpoint
    raises an error; by default it is left out and the report names it. ``progress`` is called with (done, total, unit);
    True shows a line on a terminal.
    """
    if on_damage not in get_args(OnDamage):
        raise InvalidInput(f"on_damage must be 'report' or 'refuse', not {on_damage!r}")
    check_store(store, Store)
    backend = access_of(store).store
    names, wanted = thread_names(backend, store.namespace), set[str]()
    if threads is not None:
        if isinstance(threads, str):
            raise InvalidInput(
                f"threads must be a list of thread ids, not the text {threads!r}", hint=f"Write threads=[{threads!r}]"
            )
        wanted = set(threads)
        if unknown := wanted - set(names):
            raise NotFound(
                f"thread {min(unknown)!r}", thread=min(unknown), hint="store.threads() lists the threads to export"
            )
        names = [name for name in names if name in wanted]
    # Count first, so that progress knows the total. A thread whose list is damaged is reported later, in its place.
    pages: dict[str, ThreadPages | BackstayError] = {}
    for name in names:
        try:
            pages[name] = pages_of(backend, store.namespace, name)
        except (Corrupted, DecodeError) as error:
            pages[name] = error
    total = sum(each.count for each in pages.values() if isinstance(each, ThreadPages))
    reporter = ProgressReporter(progress, "exporting", total, "checkpoints")
    with replacing(Path(path)) as file:
        export = _Export(backend, store.namespace, BlockWriter(file), on_damage, reporter)
        digest = export.run(pages)
        file.flush()
        size = os.fstat(file.fileno()).st_size
    reporter.finish()
    queued = threads_with_runs(backend, store.namespace, [RunStatus.QUEUED])
    left = "its queued run is not part of a bundle: submit it again in the other store, or let a worker finish it first"
    notes = tuple(Note(left, thread=name) for name in queued if threads is None or name in wanted)
    counts = (len(names), export.checkpoints, export.interrupts, export.effects)
    return ExportReport(*counts, size, digest, tuple(export.damaged), notes)


@dataclass(slots=True)
class _ExportedThread:
    """The thread that is being written: its branches so far, and the states that may be a base."""

    name: str
    origins: dict[BranchKey, str | None]
    numbers: dict[BranchKey, int] = field(default_factory=dict)
    last: dict[BranchKey, tuple[str, bytes]] = field(default_factory=dict)  # id and digest of the newest checkpoint
    window: Window = field(default_factory=Window)
    damaged: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Export:
    backend: Backend
    namespace: str
    writer: BlockWriter
    on_damage: OnDamage
    reporter: ProgressReporter
    damaged: list[Note] = field(default_factory=list)
    checkpoints: int = 0
    interrupts: int = 0
    effects: int = 0

    def run(self, threads: dict[str, ThreadPages | BackstayError]) -> bytes:
        """Write all threads and return the digest of the bundle."""
        self.writer.add(records.HEADER, records.pack_names(self.namespace))
        for name, pages in threads.items():
            self.writer.add(records.THREAD, records.pack_names(name))
            if isinstance(pages, BackstayError):
                self._report(name, None, pages)
                pages = ThreadPages()
            origins = {branch.key: branch.origin for branch in every_branch(self.backend, self.namespace, name)}
            thread = _ExportedThread(name, origins)
            for row in rows_of(self.backend, self.namespace, name, pages, payload=True):
                if isinstance(row, BackstayError):
                    self._report(name, row.checkpoint, row)
                    continue
                try:
                    self._export_row(thread, row)
                except (Corrupted, DecodeError) as error:
                    if is_stored(self.backend, row):  # else another process deleted it during the export
                        thread.damaged.add(row.id)
                        self._report(name, row.id, error)
                self.reporter.update(self.checkpoints)
            self.interrupts += self._export_records("interrupt", name)
            self.effects += self._export_records("effect", name)
        counts = (len(threads), self.checkpoints, self.interrupts, self.effects, len(self.damaged))
        return self.writer.finish(records.pack_numbers(*counts))

    def _export_records(self, kind: Kind, thread: str) -> int:
        """Write all interrupts or effects that can be read; return how many."""
        count = 0
        for stored in all_records(self.backend, kind, self.namespace, thread):
            exported: Record
            try:
                if kind == "interrupt":
                    interrupts.record_of(stored)  # verifies every byte
                    row = interrupts.row_of(stored)
                    # The epoch of the consumer means nothing in another store.
                    exported = replace(row, stored=unstored(stored), consumer_epoch=0).sealed()
                else:
                    exported = replace(ledger.row_of(stored), stored=unstored(stored)).sealed()
            except (Corrupted, DecodeError) as error:
                self._report(thread, stored.checkpoint, error)
                continue
            self.writer.add(records.INTERRUPT if kind == "interrupt" else records.EFFECT, records.pack_record(exported))
            count += 1
        return count

    def _report(self, thread: str, checkpoint: str | None, error: BackstayError) -> None:
        if self.on_damage == "refuse":
            raise error
        self.damaged.append(Note(error.what, "damaged", thread, checkpoint))
        self.writer.add(records.DAMAGE, records.pack_names(checkpoint or "", error.what))

    def _export_row(self, thread: _ExportedThread, row: Row) -> None:
        # The base is the branch's previous state; for the first checkpoint of a branch, the state of its parent's.
        own = thread.numbers.get(row.branch)
        number = own
        if number is None and row.parent_id is not None and row.parent_id not in thread.damaged:
            found = self.backend.find(Query(self.namespace, ids=(row.parent_id,)))
            if found and found[0].seq < row.seq:
                number = thread.numbers.get(found[0].branch)
        base = None if number is None else thread.window.get(number)
        if base is None:
            number, base = None, {}
        state = _verified_values(self.backend, row)
        edits = self._load(state, base, in_place=number is not None and number == own)
        removed = [key for key in base if key not in state]
        natural = natural_order(base, removed, [edit for edit, _ in edits])
        # All reads are done: from here on only writing the file can fail.
        if own is None:
            own = thread.numbers[row.branch] = len(thread.numbers)
            self.writer.add(records.BRANCH, records.pack_branch(row.branch, thread.origins.get(row.branch)))
        follows = row.parent_id is not None and thread.last.get(row.branch) == (row.parent_id, row.parent_digest)
        record = CheckpointRecord(
            branch=own,
            id=row.id,
            follows=follows,
            parent_id=None if follows else row.parent_id,
            parent_digest=None if follows or row.parent_id is None else row.parent_digest,
            base=number,
            step=row.step,
            created_us=row.created_us,
            digest=row.digest,
            notes=row.notes,
            tags=row.tags,
            order=None if natural == list(state) else list(state),
            removed=removed,
            edits=[edit for edit, _ in edits],
            writes=len(row.writes),
        )
        self.writer.add(records.CHECKPOINT, record.pack())
        for edit, between in edits:
            if edit.length:
                self.writer.add(records.VALUE_BYTES, between)
        for write in row.writes:
            self.writer.add(records.WRITE, records.pack_write(write))
        thread.last[row.branch] = (row.id, row.digest)
        thread.window.put(own, state)
        self.checkpoints += 1

    def _load(self, state: State, base: State, in_place: bool) -> list[tuple[Edit, bytes]]:
        """Bring the values of a state into memory and return how they differ from the base, with the bytes between.

        Of a value that only grew, only the new bytes are read. With ``in_place`` the state takes over the base's parts.
        """
        if not in_place:
            base = copy_of(base)
        changed: list[tuple[Key, Sequence[Piece], StoredValue | None]] = []  # what to read, and what that extends
        for key, value in state.items():
            old, identity = base.get(key), (value.entry.kind, value.entry.count, value.entry.digest)
            if old is not None and (old.entry.kind, old.entry.count, old.entry.digest) == identity:
                value.parts, value.hasher = old.parts, old.hasher
                continue
            rest = None if old is None or value.parts is not None else grown_by(old.pieces, value.pieces)
            changed.append((key, value.parts or value.pieces, None) if rest is None else (key, rest, old))
        ranges = [piece for _, pieces, _ in changed for piece in pieces if isinstance(piece, Range)]
        found = iter(self.backend.fetch(ranges)) if ranges else iter(())
        edits = []
        grown: list[tuple[list[bytes], bytes]] = []
        for key, pieces, extended in changed:
            value, entry, old = state[key], state[key].entry, base.get(key)
            parts = [part for piece in pieces for part in (next(found) if isinstance(piece, Range) else (piece,))]
            data = b"".join(parts)
            value.hasher = hashlib.sha256() if extended is None else extended.hasher.copy()
            value.hasher.update(data)
            if value.hasher.digest() != entry.digest:
                raise Corrupted(f"the bytes of {key!r} do not match their digest")
            if extended is not None and extended.entry.kind == entry.kind:
                edits.append((Edit(key, entry.kind, entry.count, extended.entry.size, 0, len(data)), data))
                value.parts = extended.parts or []
                grown.append((value.parts, data))
                continue
            before = b"" if old is None else b"".join(old.parts or ())
            value.parts = [data if extended is None else before + data]
            edits.append(edit_between(key, before, entry.kind, entry.count, value.parts[0]))
        for parts, data in grown:  # all bytes are right: until now, an error would have left the base as it was
            add_part(parts, data)
        return edits


def _verified_values(backend: Backend, row: Row) -> State:
    """Return the values of a checkpoint; raise Corrupted unless its digest covers them and its description."""
    state = open_head_state(backend, row, {})
    parent = parent_digest(row)
    if parent is None:
        raise Corrupted(f"checkpoint {row.id}: its parent {row.parent_id} is missing", checkpoint=row.id)
    meta = unchecked(CheckpointMeta, values_of(row))
    if expected_digest(row, meta, state.entries(), parent) != row.digest:
        raise Corrupted(f"checkpoint {row.id}: description or content does not match its digest", checkpoint=row.id)
    if row.size > STATE_BYTES_MAX:
        raise DecodeError(f"checkpoint {row.id} is larger than the {STATE_BYTES_MAX} bytes a bundle can hold")
    return state.values
