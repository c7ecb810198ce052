"""Store the content of a bundle: checkpoints in batches, each digest computed again before it is committed.

An import can be repeated, and resumes where an earlier one died: checkpoints that the store already has, with the same
digest and in the same place, are skipped. Before the first checkpoint is added to a thread, the thread is compared with
the bundle. If it holds anything else, it is refused and stays as it is, and the import continues with the next thread.

Inside a thread the order is: pending writes, then their checkpoint, then interrupts, then effects. So a checkpoint in
the store always has its writes. A thread is complete when the import returns; do not run it before that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from backstay.bundle import exporter as walk
from backstay.bundle.blocks import BundleLimits
from backstay.bundle.reader import BundleCheckpoint, BundleReader, ThreadStarted, Totals
from backstay.bundle.report import ImportReport, Note, Progress, ProgressReporter, Refused
from backstay.errors import BackstayError, Conflict, Corrupted, Fenced, InvalidInput, NotFound
from backstay.operations import interrupts, ledger
from backstay.operations.cursor import Base
from backstay.operations.interrupts import InterruptRow
from backstay.operations.ledger import FAILED, INTENDED, EffectRow
from backstay.operations.load import find_row, load_values, open_head_state
from backstay.operations.records import unstored
from backstay.operations.rows import CHECKSUM_BYTES, NO_PARENT, checkpoint_digest, meta_of
from backstay.pieces.body import Body
from backstay.pieces.head_state import Change, HeadState
from backstay.store.base import Backend, Commit, Row
from backstay.store.records import Fence
from backstay.thread.access import access_of
from backstay.thread.store import Store, check_store

BATCH_ROWS = 256
BATCH_BYTES = 4 * 1024 * 1024
"""Limits of one commit: larger ones would block other writers of the store for longer."""

STREAMS_AT_ONCE = 64


def import_bundle(
    path: str | os.PathLike[str],
    store: Store,
    *,
    threads: Iterable[str] | None = None,
    progress: Progress | bool | None = None,
    limits: BundleLimits | None = None,
) -> ImportReport:
    """Store the threads of a bundle, or those named, in a store of any kind. Ids and digests stay the same.

    An import can be run again, also after it died. If a thread of the store is neither a start of the bundle's thread
    nor a continuation of it, that thread is refused: the report says so, and the other threads are imported.
    A bundle that needs more memory or work than ``limits`` allow raises LimitExceeded.
    """
    if isinstance(threads, str):
        raise InvalidInput(
            f"threads must be a list of thread ids, not the text {threads!r}", hint=f"Write threads=[{threads!r}]"
        )
    check_store(store, Store)
    wanted = None if threads is None else set(threads)
    with BundleReader(path, wanted, limits) as reader:
        if reader.namespace != store.namespace:
            raise InvalidInput(
                f"the bundle is of namespace {reader.namespace!r}, but the store was opened with {store.namespace!r}",
                hint="Open the store with the bundle's namespace: the digests of its checkpoints include it",
            )
        reporter = ProgressReporter(progress, "importing", reader.size, "bytes")
        return _Import(access_of(store).store, reader, wanted, reporter).run()


@dataclass(slots=True)
class _ImportedBranch:
    """A branch that the import adds to: what the store has of it, its newest state, and the commits that wait."""

    base: Base
    head_state: HeadState
    waiting: list[Commit] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True)
class _ImportedThread:
    """The current thread. ``present`` yields the checkpoints that the store had before, oldest first."""

    name: str
    present: Iterator[Row | BackstayError]
    branches: dict[int, _ImportedBranch] = field(default_factory=dict)
    stored: int = 0
    compared: bool = False  # all of ``present`` was compared: the checkpoints that follow are new
    refused: BackstayError | None = None


@dataclass(slots=True)
class _Import:
    backend: Backend
    reader: BundleReader
    wanted: set[str] | None
    reporter: ProgressReporter
    names: set[str] = field(default_factory=set)
    thread: _ImportedThread = field(default_factory=lambda: _ImportedThread("", iter(())))
    streams: list[int] = field(default_factory=list)
    stored: int = 0
    present: int = 0
    interrupts: int = 0
    effects: int = 0
    refused: list[Refused] = field(default_factory=list)
    missing: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def run(self) -> ImportReport:
        """Store everything and report it."""
        namespace = self.reader.namespace
        for event in self.reader.events():
            match event:
                case ThreadStarted(name):
                    self._finish_thread()
                    self.names.add(name)
                    pages = walk.pages_of(self.backend, namespace, name)
                    self.thread = _ImportedThread(
                        name, walk.rows_of(self.backend, namespace, name, pages, payload=False)
                    )
                case Note():
                    self.missing.append(event)
                case Totals():
                    self._finish_thread()
                case _ if self.thread.refused is None:
                    self._store(event)
            self.reporter.update(self.reader.position)
        self.reporter.finish()
        absent = sorted((self.wanted or set()) - self.names)
        self.missing += [Note("the bundle has no such thread", str(self.reader.path), name) for name in absent]
        return ImportReport(
            len(self.names),
            self.stored,
            self.present,
            self.interrupts,
            self.effects,
            tuple(self.refused),
            tuple(self.missing),
            tuple(self.notes),
        )

    def _finish_thread(self) -> None:
        if self.thread.refused is None:
            self._store(None)
        if self.thread.refused is not None:
            self.refused.append(Refused(self.thread.name, self.thread.refused, self.thread.stored))
        self.thread = _ImportedThread("", iter(()))

    def _store(self, event: BundleCheckpoint | InterruptRow | EffectRow | None) -> None:
        """Store one event, or with None only the commits that wait. A refusal ends this thread, not the import."""
        try:
            if isinstance(event, BundleCheckpoint):
                self._checkpoint(event)
                return
            self._flush()
            if isinstance(event, InterruptRow):
                self._interrupt(event)
            elif isinstance(event, EffectRow):
                self._effect(event)
        except (Conflict, Fenced, Corrupted, InvalidInput) as error:
            if error.path == str(self.reader.path):
                raise
            self.thread.refused = error

    # Checkpoints --------------------------------------------------------------------------------------------------

    def _checkpoint(self, event: BundleCheckpoint) -> None:
        thread, row = self.thread, event.row
        if not thread.compared and self._is_present(event):
            self.present += 1
            return
        thread.compared = True
        branch = thread.branches.get(event.record.branch)
        if branch is None or any(each.waiting for each in thread.branches.values() if each is not branch):
            self._flush()  # sequence numbers follow the order of the bundle, also between branches
        if branch is None:
            branch, change, forked_from = self._open(event)
        else:
            change, forked_from = _change(event, branch.head_state), None
        commit = self._plan(event, branch, change, forked_from)
        branch.waiting.append(commit)
        branch.bytes += sum(map(len, commit.blobs.values())) + sum(len(data) for _, _, data in commit.chunks)
        if row.writes:
            self.backend.write(row.branch, row.id, row.writes, False)
        if len(branch.waiting) >= BATCH_ROWS or branch.bytes >= BATCH_BYTES:
            self._flush()
        for number in event.left:
            self._flush()
            thread.branches.pop(number, None)

    def _is_present(self, event: BundleCheckpoint) -> bool:
        """Return whether the store has this checkpoint next; raise Conflict if it has another one in its place."""
        stored = next(self.thread.present, None)
        if stored is None:
            return False
        if isinstance(stored, BackstayError):
            raise stored
        row = event.row
        if (stored.branch, stored.id, stored.digest) != (row.branch, row.id, row.digest):
            raise Conflict(
                f"thread {self.thread.name!r} has other content: checkpoint {stored.id} in place of {row.id}",
                winner=meta_of(stored),
                thread=self.thread.name,
                checkpoint=row.id,
                hint="Import the bundle into another store, or delete the thread in this one first",
            )
        if stored.tags != row.tags:
            self.notes.append(
                Note("the store has other tags than the bundle and keeps them", "tags", self.thread.name, row.id)
            )
        return True

    def _open(self, event: BundleCheckpoint) -> tuple[_ImportedBranch, Change, Row | None]:
        """Open a branch of the store. Return it, the change to its state, and the row that it is forked from.

        A new branch that is a fork of a stored checkpoint shares that checkpoint's bytes, as every fork does.
        """
        row = event.row
        head = self.backend.head(row.branch)
        base = Base.of(head)
        if (None if base.head is None else (base.head.id, base.head.digest)) != event.before:
            raise Conflict(
                f"another process is writing to branch {row.branch.name!r} of thread {row.branch.thread!r}",
                thread=row.branch.thread,
                checkpoint=row.id,
                hint="Stop that process, then run the import again",
            )
        parent: Row | None = None
        head_state = HeadState()
        if head is not None and head.row is not None:
            head_state = open_head_state(self.backend, head.row, head.owned)
        elif row.parent_id is not None and row.parent_id == event.origin:
            found = find_row(self.backend, row.branch.namespace, row.parent_id)
            if found is not None and found.digest == row.parent_digest:
                parent, head_state = found, open_head_state(self.backend, found, {})
        branch = self.thread.branches[event.record.branch] = _ImportedBranch(base, head_state)
        return branch, _whole_change(event, head_state), parent

    def _new_stream(self) -> int:
        if not self.streams:
            first = self.backend.reserve(STREAMS_AT_ONCE)
            self.streams += range(first, first + STREAMS_AT_ONCE)
        return self.streams.pop()

    def _plan(
        self, event: BundleCheckpoint, branch: _ImportedBranch, change: Change, forked_from: Row | None
    ) -> Commit:
        """Return the commit of a checkpoint, its digest computed from the bytes to be stored."""
        row, base, head_state = event.row, branch.base, branch.head_state
        # Values that wait to be committed are in memory already; this loads the others.
        load_values(self.backend, head_state, head_state.unloaded(change), row)
        draft = head_state.plan(change, self._new_stream)
        parent = row.parent_digest or NO_PARENT
        fields = row.notes[:-CHECKSUM_BYTES]
        if checkpoint_digest(parent, draft.root, draft.keys, meta_of(row), row.created_us, fields) != row.digest:
            raise Corrupted(
                f"checkpoint {row.id} would not match its digest once stored",
                path=str(self.reader.path),
                checkpoint=row.id,
                hint="It was not stored. This is a bug in Backstay: please report it",
            )
        return Commit(
            branch=row.branch,
            number=base.number,
            last_seq=base.last_seq,
            head_seq=base.head.seq if base.head is not None else 0,
            epoch=base.epoch,
            id=row.id,
            parent_id=row.parent_id,
            step=row.step,
            created_us=row.created_us,
            digest=row.digest,
            notes=row.notes,
            size=draft.size,
            manifest=draft.manifest,
            base=draft.base,
            tags=row.tags,
            blobs=draft.blobs,
            chunks=draft.chunks,
            sources=draft.sources if forked_from is None else head_state.sources,
            owned=draft.owned,
            requires=None if forked_from is None else forked_from.id,
            parent_digest=None if event.record.follows else row.parent_digest,
            origin=event.origin,
        )

    def _flush(self) -> None:
        """Commit what waits. Only one branch at a time has commits waiting."""
        for number, branch in list(self.thread.branches.items()):
            if not branch.waiting:
                continue
            commits, branch.waiting, branch.bytes = branch.waiting, [], 0
            done = self.backend.commit_all(commits)
            if not all(each.fresh for each in done):  # another import stored some of them, with their bytes elsewhere
                del self.thread.branches[number]
            newest = commits[-1].row(0, done[-1].seq)
            branch.base = Base(done[-1].number, done[-1].seq, commits[0].epoch, newest)
            self.thread.stored += len(done)
            self.stored += len(done)

    # Interrupts and effects ---------------------------------------------------------------------------------------

    def _interrupt(self, row: InterruptRow) -> None:
        name, thread = row.stored.key, row.stored.branch.thread

        def as_in_bundle(stored: InterruptRow) -> InterruptRow:
            if row.decision is not None:
                stored = interrupts.decided(stored, row.decision, row.decided_by or "", row.decided_us or 0)
            if row.consumer is not None and stored.decision == row.decision and stored.consumer is None:
                is_closed, at_us = row.consumer == interrupts.CLOSED, row.consumed_us or 0
                stored = (
                    interrupts.closed(stored, at_us)
                    if is_closed
                    else interrupts.consumed(stored, row.consumer, 0, at_us)
                )
            return stored

        try:
            # Epochs of another store mean nothing here: the holder of the lease may take over from a dead consumer.
            stored = interrupts.add(self.backend, replace(row, stored=unstored(row.stored), consumer_epoch=0))
            stored = interrupts.put(self.backend, stored, as_in_bundle)
        except NotFound:
            what = f"interrupt {name} belongs to a checkpoint that does not exist"
            self.missing.append(Note(what, "", thread, row.stored.checkpoint))
            return
        self.interrupts += 1
        if (stored.decision, stored.consumer) != (row.decision, row.consumer):
            what = f"the store has another decision or consumer for interrupt {name} and keeps it"
            self.notes.append(Note(what, "", thread, row.stored.checkpoint))

    def _effect(self, row: EffectRow) -> None:
        first = replace(row, stored=unstored(row.stored)).sealed()
        stored = ledger.row_of(self.backend.put_record(first, fence=Fence()))
        while True:
            # The bundle's record replaces the stored one if it is a later state: its receipt, or the next attempt.
            if (row.attempt, row.owner) == (stored.attempt, stored.owner):
                is_later = stored.status == INTENDED and row.status != INTENDED
            else:
                is_later = stored.status == FAILED and row.attempt == stored.attempt + 1
            if not is_later:
                break
            record = replace(row, stored=stored.stored).sealed()
            stored = ledger.row_of(self.backend.put_record(record, fence=Fence()))
        self.effects += 1
        if replace(row, stored=stored.stored) != stored:
            what = f"effect {row.stored.key!r} continued differently in the store, which keeps its own record"
            self.notes.append(Note(what, "", row.stored.branch.thread))


def _change(event: BundleCheckpoint, head_state: HeadState) -> Change:
    """Return the change that a checkpoint makes to the state of its branch."""
    if event.record.base != event.record.branch:
        return _whole_change(event, head_state)
    change = Change(delete=set(event.record.removed), order=list(event.state))
    for edit in event.record.edits:
        value = head_state.values.get(edit.key)
        if value is not None and value.entry.kind == edit.kind and value.entry.size == edit.prefix and edit.length:
            grown = b"".join(event.between[edit.key])
            change.append[edit.key] = Body(edit.kind, edit.count - value.entry.count, grown)
        else:
            change.put[edit.key] = Body(edit.kind, edit.count, event.state[edit.key].data())
    return change


def _whole_change(event: BundleCheckpoint, head_state: HeadState) -> Change:
    """Return the change from any state to that of a checkpoint. Equal values are recognized by their digests."""
    put = {key: Body(value.entry.kind, value.entry.count, value.data()) for key, value in event.state.items()}
    return Change(put=put, delete={key for key in head_state.values if key not in put}, order=list(event.state))
