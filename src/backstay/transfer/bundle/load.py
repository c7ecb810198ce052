"""Storing what a bundle holds: checkpoints in batches, each digest computed anew before it is committed.

An import may be repeated, and goes on where one that died had stopped: what is there already, with the same digest and
in the same place, is passed over. A thread is compared with the bundle, checkpoint by checkpoint, before the first is
added to it. If it holds anything else, it is refused and left as it is, and the import goes on with the next thread.

Inside a thread the order is: pending writes, then the checkpoint they belong to, then interrupts, then effects. So a
checkpoint that is there has its writes. A thread is whole when the import has returned; before that, do not run it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from backstay.errors import BackstayError, Conflict, Corrupted, Fenced, InvalidInput, NotFound
from backstay.pieces.body import Body
from backstay.pieces.tip import Change, Tip
from backstay.store.base import Backend, Commit, LaneKey, Row
from backstay.store.records import Fence
from backstay.thread import interrupts, ledger
from backstay.thread.access import access_of
from backstay.thread.cursor import Seen
from backstay.thread.interrupts import InterruptRow
from backstay.thread.ledger import FAILED, INTENDED, EffectRow
from backstay.thread.load import fill, find_row, open_tip
from backstay.thread.record import NO_PARENT, checkpoint_digest, meta_of
from backstay.thread.records import unstored
from backstay.thread.store import Store
from backstay.transfer.bundle import walk
from backstay.transfer.bundle.limits import BundleLimits
from backstay.transfer.bundle.reader import Began, BundleReader, Step, Totals
from backstay.transfer.progress import Progress, Teller
from backstay.transfer.report import ImportReport, Note, Refused

BATCH_ROWS = 256
BATCH_BYTES = 4 * 1024 * 1024
"""What is committed at once, at the most: more would make other writers of the store wait for longer."""

STREAMS_AT_ONCE = 64


def import_bundle(
    path: str | os.PathLike[str],
    store: Store,
    *,
    threads: Iterable[str] | None = None,
    progress: Progress | bool | None = None,
    limits: BundleLimits | None = None,
) -> ImportReport:
    """Store the threads of a bundle, or those named, in a store of any kind; the digests stay the same.

    It may be run again, also after it died. A thread of the store that holds anything but a beginning of the bundle's,
    or the bundle's and more, is refused and left alone: the report says so, and the other threads are imported.
    A bundle that asks for more memory or work than ``limits`` allow raises LimitExceeded.
    """
    if isinstance(threads, str):
        raise InvalidInput("threads is a list of thread ids, not one text", hint=f"Write threads=[{threads!r}]")
    wanted = None if threads is None else set(threads)
    with BundleReader(path, wanted, limits) as reader:
        if reader.namespace != store.namespace:
            raise InvalidInput(
                f"the bundle is of namespace {reader.namespace!r}, the store was opened with {store.namespace!r}",
                hint="Open the store with the bundle's namespace: a checkpoint's digest covers it",
            )
        return _Import(
            access_of(store).store, reader, wanted, Teller(progress, "importing", reader.size, "bytes")
        ).run()


@dataclass(slots=True)
class _Branch:
    """A branch that is being added to: what the store has of it, its newest state as pieces, what waits."""

    lane: LaneKey
    seen: Seen
    tip: Tip
    waiting: list[Commit] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True)
class _Thread:
    """The thread at hand. ``present`` yields what the store already had of it, until it is used up."""

    name: str
    present: Iterator[Row | BackstayError]
    branches: dict[int, _Branch] = field(default_factory=dict)
    stored: int = 0
    is_behind: bool = False  # the store has nothing of it that was not yet compared: what follows is new
    refused: BackstayError | None = None


class _Import:
    def __init__(self, backend: Backend, reader: BundleReader, wanted: set[str] | None, teller: Teller) -> None:
        self.backend = backend
        self.reader = reader
        self.teller = teller
        self.wanted = wanted
        self.names: set[str] = set()
        self.thread = _Thread("", iter(()))
        self.streams: list[int] = []
        self.stored = self.present = self.interrupts = self.effects = 0
        self.refused: list[Refused] = []
        self.missing: list[Note] = []
        self.notes: list[Note] = []

    def run(self) -> ImportReport:
        """Store everything and say what became of it."""
        for event in self.reader.events():
            match event:
                case Began(name):
                    self._finish_thread()
                    self._begin_thread(name)
                case Note():
                    self.missing.append(event)
                case Totals():
                    self._finish_thread()
                case _ if self.thread.refused is None:
                    self._guarded(event)
            self.teller.tell(self.reader.position)
        self.teller.finish()
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

    # Threads ------------------------------------------------------------------------------------------------------

    def _begin_thread(self, name: str) -> None:
        self.names.add(name)
        pages = walk.pages_of(self.backend, self.reader.namespace, name)
        self.thread = _Thread(name, walk.rows_of(self.backend, self.reader.namespace, name, pages, payload=False))

    def _finish_thread(self) -> None:
        if self.thread.refused is None:
            self._guarded(None)
        if self.thread.refused is not None:
            self.refused.append(Refused(self.thread.name, self.thread.refused, self.thread.stored))
        self.thread = _Thread("", iter(()))

    def _guarded(self, event: Step | InterruptRow | EffectRow | None) -> None:
        """Take in one event, or what is still waiting; what this thread cannot take ends this thread only."""
        try:
            match event:
                case Step():
                    self._step(event)
                case InterruptRow():
                    self._flush()
                    self._interrupt(event)
                case EffectRow():
                    self._flush()
                    self._effect(event)
                case None:
                    self._flush()
        except (Conflict, Fenced, Corrupted, InvalidInput) as error:
            if error.path == str(self.reader.path):
                raise
            self.thread.refused = error

    # Checkpoints --------------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        if not self.thread.is_behind and self._is_present(step):
            self.present += 1
            return
        self.thread.is_behind = True
        branch = self.thread.branches.get(step.number)
        if branch is None or any(each.waiting for each in self.thread.branches.values() if each is not branch):
            self._flush()  # sequence numbers follow the order of the bundle, also between branches
        if branch is None:
            branch, change, takes_over = self._open(step)
        else:
            change, takes_over = _change(step, branch.tip), None
        commit = self._plan(step, branch, change, takes_over)
        branch.waiting.append(commit)
        branch.bytes += sum(map(len, commit.blobs.values())) + sum(len(data) for _, _, data in commit.chunks)
        if step.row.writes:
            self.backend.write(step.row.lane, step.row.id, step.row.writes, False)
        if len(branch.waiting) >= BATCH_ROWS or branch.bytes >= BATCH_BYTES:
            self._flush()
        for number in step.left:
            self._flush()
            self.thread.branches.pop(number, None)

    def _is_present(self, step: Step) -> bool:
        """Tell whether the store has this checkpoint next; raise Conflict if it has another one there."""
        there = next(self.thread.present, None)
        if there is None:
            return False
        if isinstance(there, BackstayError):
            raise there
        row = step.row
        if (there.lane, there.id, there.digest) != (row.lane, row.id, row.digest):
            raise Conflict(
                f"the store has other content here: checkpoint {there.id} stands where the bundle has {row.id}",
                winner=meta_of(there),
                thread=self.thread.name,
                checkpoint=row.id,
                hint="Import it into another store, or delete the thread there first",
            )
        if there.tags != row.tags:
            self.notes.append(
                Note("its tags are not the bundle's; the store's stay", "tags", self.thread.name, checkpoint=row.id)
            )
        return True

    def _open(self, step: Step) -> tuple[_Branch, Change, Row | None]:
        """Return the branch of a step as the store has it, and the change that makes the step's state of it.

        A branch that begins as a fork of a checkpoint that is there takes that one's bytes over, as a fork does.
        """
        row = step.row
        head = self.backend.head(row.lane)
        seen = Seen.of(head)
        there = None if seen.head is None else (seen.head.id, seen.head.digest)
        if there != step.before:
            raise Conflict(
                f"somebody else writes to branch {row.lane.branch!r}", thread=row.lane.thread, checkpoint=row.id
            )
        parent: Row | None = None
        tip = Tip()
        if head is not None and head.row is not None:
            tip = open_tip(self.backend, head.row, head.owned)
        elif row.parent_id is not None and row.parent_id == step.origin:
            found = find_row(self.backend, row.lane.namespace, row.parent_id)
            if found is not None and found.digest == row.parent_digest:
                parent, tip = found, open_tip(self.backend, found, {})
        branch = self.thread.branches[step.number] = _Branch(row.lane, seen, tip)
        return branch, _whole_change(step, tip), parent

    def _new_stream(self) -> int:
        if not self.streams:
            first = self.backend.reserve(STREAMS_AT_ONCE)
            self.streams += range(first, first + STREAMS_AT_ONCE)
        return self.streams.pop()

    def _plan(self, step: Step, branch: _Branch, change: Change, takes_over: Row | None) -> Commit:
        """Return the commit of a step, its digest computed from what is to be stored."""
        row, seen, tip = step.row, branch.seen, branch.tip
        fill(self.backend, tip, tip.unloaded(change), row)  # what waits to be committed is at hand: not these
        draft = tip.plan(change, self._new_stream)
        above = row.parent_digest or NO_PARENT
        if checkpoint_digest(above, draft.root, draft.keys, meta_of(row), row.created_us, row.notes) != row.digest:
            raise Corrupted(
                f"checkpoint {row.id} as it would be stored does not match its digest",
                path=str(self.reader.path),
                checkpoint=row.id,
                hint="Nothing of it was stored. This is a fault of Backstay: please report it",
            )
        follows = step.record.follows
        return Commit(
            lane=row.lane,
            number=seen.number,
            last_seq=seen.last_seq,
            head_seq=seen.head.seq if seen.head is not None else 0,
            epoch=seen.epoch,
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
            sources=draft.sources if takes_over is None else tip.sources,
            owned=draft.owned,
            requires=None if takes_over is None else takes_over.id,
            parent_digest=None if follows else row.parent_digest,
            origin=step.origin,
        )

    def _flush(self) -> None:
        """Commit what waits. Only one branch ever has something waiting."""
        for branch in self.thread.branches.values():
            if not branch.waiting:
                continue
            commits, branch.waiting, branch.bytes = branch.waiting, [], 0
            done = self.backend.commit_all(commits)
            newest = commits[-1].row(0, done[-1].seq)
            branch.seen = Seen(done[-1].number, done[-1].seq, commits[0].epoch, newest)
            self.thread.stored += len(done)
            self.stored += len(done)

    # Interrupts and effects ---------------------------------------------------------------------------------------

    def _interrupt(self, row: InterruptRow) -> None:
        name, lane = row.stored.key, row.stored.lane
        try:
            # Epochs of another store mean nothing here: whoever holds the lease may take over from a dead consumer.
            there = interrupts.add(self.backend, replace(row, stored=unstored(row.stored), consumer_epoch=0))
            there = interrupts.put(self.backend, there, lambda there: _as_far_as(row, there))
        except NotFound:
            what = f"interrupt {name} belongs to a checkpoint that is not there"
            self.missing.append(Note(what, "", lane.thread, row.stored.checkpoint))
            return
        self.interrupts += 1
        if (there.decision, there.consumer) != (row.decision, row.consumer):
            what = f"interrupt {name} was decided or consumed otherwise in the store; that stays"
            self.notes.append(Note(what, "", lane.thread, row.stored.checkpoint))

    def _effect(self, row: EffectRow) -> None:
        first = replace(row, stored=unstored(row.stored)).sealed()
        there = ledger.row_of(self.backend.put_record(first, fence=Fence()))
        while _follows(row, there):
            there = ledger.row_of(self.backend.put_record(replace(row, stored=there.stored).sealed(), fence=Fence()))
        self.effects += 1
        if replace(row, stored=there.stored) != there:
            what = f"effect {row.stored.key!r} went on otherwise in the store; that stays"
            self.notes.append(Note(what, "", row.stored.lane.thread))


def _as_far_as(row: InterruptRow, there: InterruptRow) -> InterruptRow:
    """Return an interrupt of the store, decided and consumed as the bundle says if it was not before."""
    if row.decision is not None:
        there = interrupts.decided(there, row.decision, row.decided_by or "", row.decided_us or 0)
    if row.consumer is not None and there.decision == row.decision and there.consumer is None:
        there = interrupts.consumed(there, row.consumer, 0, row.consumed_us or 0)
    return there


def _follows(row: EffectRow, there: EffectRow) -> bool:
    """Tell whether an effect of a bundle is what the one in the store became: its receipt, or the next attempt."""
    if (row.attempt, row.owner) == (there.attempt, there.owner):
        return there.status == INTENDED and row.status != INTENDED
    return there.status == FAILED and row.attempt == there.attempt + 1


def _change(step: Step, tip: Tip) -> Change:
    """Return what a step changes in its branch's state."""
    if not step.builds_on_its_branch:
        return _whole_change(step, tip)
    change = Change(delete=set(step.record.removed), order=list(step.state))
    for edit in step.record.edits:
        live = tip.lives.get(edit.key)
        if live is not None and live.entry.kind == edit.kind and live.entry.size == edit.prefix and edit.length:
            grown = b"".join(step.between[edit.key])
            change.append[edit.key] = Body(edit.kind, edit.count - live.entry.count, grown)
        else:
            change.put[edit.key] = Body(edit.kind, edit.count, step.state[edit.key].data())
    return change


def _whole_change(step: Step, tip: Tip) -> Change:
    """Return the change that makes a step's state of any other; what is the same is found by its digest."""
    put = {key: Body(value.kind, value.count, value.data()) for key, value in step.state.items()}
    return Change(put=put, delete={key for key in tip.lives if key not in put}, order=list(step.state))
