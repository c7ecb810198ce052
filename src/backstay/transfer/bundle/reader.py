"""Reading a bundle, record by record: every state rebuilt, every digest checked, nothing stored anywhere.

What comes out is what an import stores and ``read_bundle`` shows. Memory is bounded by the window and one state, both
memory and work by ``BundleLimits``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backstay.errors import Corrupted, DecodeError, InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta, bare
from backstay.pieces.body import from_body
from backstay.pieces.manifest import Key, root_digest
from backstay.store.atomic import failure
from backstay.store.base import LaneKey, Row, WriteRow
from backstay.thread import interrupts, ledger
from backstay.thread.interrupts import InterruptRow
from backstay.thread.ledger import EffectRow
from backstay.thread.load import assemble
from backstay.thread.record import NO_PARENT, checkpoint_digest, values_of
from backstay.transfer.bundle import records
from backstay.transfer.bundle.blocks import DIGEST_BYTES, END, BlockReader
from backstay.transfer.bundle.limits import EVENT_WORK, Budget, BundleLimits
from backstay.transfer.bundle.records import CheckpointRecord
from backstay.transfer.bundle.state import State, Window, check_size, entries_of, follow, size_of
from backstay.transfer.report import Note


@dataclass(frozen=True, slots=True)
class Began:
    """A thread begins: what follows is of this one."""

    thread: str


@dataclass(slots=True)
class Step:
    """One checkpoint with its whole state."""

    row: Row  # ``seq`` is its place in the thread; there is no payload in it
    number: int  # the branch's, in the order in which branches appear
    origin: str | None  # what the branch was forked from
    record: CheckpointRecord
    state: State
    between: dict[Key, list[bytes]]  # what of each changed value is new
    left: list[int]  # branches whose states the window let go of
    before: tuple[str, bytes] | None  # the id and digest of the checkpoint before it in its branch

    @property
    def builds_on_its_branch(self) -> bool:
        """Tell whether the edits are to be made to the state before it in the same branch."""
        return self.record.base == self.number


@dataclass(frozen=True, slots=True)
class Totals:
    """How much a bundle holds. ``digest`` is the same for the same content, whichever store it came from."""

    threads: int
    checkpoints: int
    interrupts: int
    effects: int
    damaged: int  # checkpoints that were there and could not be exported
    digest: bytes


Event = Began | Step | InterruptRow | EffectRow | Note | Totals


@dataclass(slots=True)
class _Branch:
    lane: LaneKey
    origin: str | None
    last: tuple[str, bytes] | None = None  # the id and digest of its newest checkpoint so far


class BundleReader:
    """An open bundle. Use it in a ``with`` block; ``events`` can be read once."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        threads: Collection[str] | None = None,
        limits: BundleLimits | None = None,
    ) -> None:
        self.path = Path(path)
        self._budget = Budget(limits or BundleLimits(), str(self.path))
        self._threads = threads
        try:
            self._file = self.path.open("rb")
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise failure(error, "read", self.path) from error
        try:
            self._blocks = BlockReader(self._file, self.path, self._budget)
            self.namespace = self._header()
        except BaseException:
            self._file.close()
            raise
        self._thread: str | None = None
        self._position = 0
        self._branches: list[_Branch] = []
        self._lanes: set[LaneKey] = set()
        self._window = Window()
        self._counts = [0, 0, 0, 0, 0]

    def __enter__(self) -> BundleReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def position(self) -> int:
        """Return how many bytes of the file were read."""
        return self._blocks.position

    def events(self) -> Iterator[Event]:
        """Yield what the bundle holds, in order; the last is always the totals. Raise Corrupted at the first damage."""
        with self._telling():
            skipping = True
            kind = records.HEADER
            while kind != END:
                kind, data = self._read()
                if kind == records.THREAD:
                    skipping = not self._begin(data)
                    if not skipping:
                        assert self._thread is not None
                        yield Began(self._thread)
                elif kind == END:
                    yield self._totals(data)
                elif not skipping:
                    yield self._event(kind, data)
                elif self._thread is None:
                    raise DecodeError("a bundle begins with something that belongs to no thread")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Say of what is not as it must be that the file is damaged."""
        try:
            yield
        except (DecodeError, InvalidInput) as error:
            raise self._blocks.damaged(error.what) from error
        except OSError as error:
            raise failure(error, "read", self.path) from error

    def _header(self) -> str:
        with self._telling():
            kind, data = self._read()
            if kind != records.HEADER:
                raise DecodeError("it does not begin as a bundle does")
            (namespace,) = records.unpack_names(data, 1)
            return namespace

    def _begin(self, data: bytes) -> bool:
        (self._thread,) = records.unpack_names(data, 1)
        records.checked_fields({"thread_id": self._thread, "namespace": self.namespace})
        self._position, self._branches, self._lanes, self._window = 0, [], set(), Window()
        if self._threads is not None and self._thread not in self._threads:
            return False
        self._counts[0] += 1
        return True

    def _event(self, kind: int, data: bytes) -> Event:
        assert self._thread is not None
        place = (self.namespace, self._thread)
        match kind:
            case records.LANE:
                self._add_branch(*records.unpack_lane(data, *place))
                return self._checkpoint(b"".join(self._next(records.CHECKPOINT)))
            case records.CHECKPOINT:
                return self._checkpoint(data)
            case records.INTERRUPT:
                self._counts[2] += 1
                stored = records.unpack_record(data, "interrupt", *place)
                interrupts.record_of(stored)  # every byte of it checked
                return interrupts.row_of(stored)
            case records.EFFECT:
                self._counts[3] += 1
                return ledger.row_of(records.unpack_record(data, "effect", *place))
            case records.DAMAGE:
                self._counts[4] += 1
                checkpoint, what = records.unpack_damage(data)
                return Note(what, "damaged when it was exported", self._thread, checkpoint)
        raise DecodeError("it holds a record of an unknown type")

    def _read(self) -> tuple[int, bytes]:
        self._budget.spend(EVENT_WORK)
        kind, parts = self._blocks.read()
        return kind, b"".join(parts)

    def _next(self, wanted: int, held: int = 0) -> list[bytes]:
        kind, parts = self._blocks.read(held)
        if kind != wanted:
            raise DecodeError("a record is not where it belongs")
        return parts

    def _add_branch(self, lane: LaneKey, origin: str | None) -> None:
        if lane in self._lanes:
            raise DecodeError("a branch begins twice")
        self._lanes.add(lane)
        self._branches.append(_Branch(lane, origin))

    def _checkpoint(self, data: bytes) -> Step:
        record = CheckpointRecord.unpack(data)
        if record.lane >= len(self._branches):
            raise DecodeError("a checkpoint is of no branch")
        base: State | None = {} if record.base is None else self._window.get(record.base)
        if base is None:
            raise DecodeError("a checkpoint refers to a state that is not at hand")
        in_place = record.base == record.lane
        held = check_size(base, record, in_place, self._budget)
        between = {edit.key: self._next(records.VALUE_BYTES) for edit in record.edits if edit.length}
        writes = []
        for _ in range(record.writes):
            data = b"".join(self._next(records.WRITE, held))
            held += len(data)
            writes.append(records.unpack_write(data))
        state = follow(base, record, between, in_place)
        self._position += 1
        self._counts[1] += 1
        branch = self._branches[record.lane]
        row = self._row(branch, record, state, tuple(writes))
        before, branch.last = branch.last, (row.id, row.digest)
        left = self._window.put(record.lane, state)
        return Step(row, record.lane, branch.origin, record, state, between, left, before)

    def _row(self, branch: _Branch, record: CheckpointRecord, state: State, writes: tuple[WriteRow, ...]) -> Row:
        """Return the checkpoint's row, its description and digest checked."""
        if record.follows and branch.last is None:
            raise DecodeError("the first checkpoint of a branch claims to follow another")
        parent, above = branch.last if record.follows and branch.last else (record.parent_id, record.parent_digest)
        row = Row(
            branch.lane,
            0,
            self._position,
            record.id,
            parent,
            above,
            record.step,
            record.created_us,
            record.digest,
            record.notes,
            size_of(state),
            record.tags,
            writes,
        )
        meta = bare(CheckpointMeta, _checked_values(row))
        expected = checkpoint_digest(
            above or NO_PARENT, root_digest(entries_of(state)), list(state), meta, row.created_us, row.notes
        )
        if expected != record.digest:
            raise DecodeError(f"checkpoint {row.id} does not match its digest")
        return row

    def _totals(self, data: bytes) -> Totals:
        counts = records.unpack_numbers(data[DIGEST_BYTES:], 5)
        if self._threads is None and counts != self._counts:
            raise DecodeError("it does not hold as much as it says")
        threads, checkpoints, interrupts, effects, damaged = counts
        return Totals(threads, checkpoints, interrupts, effects, damaged, data[:DIGEST_BYTES])


def _checked_values(row: Row) -> dict[str, object]:
    try:
        return records.checked_fields(values_of(row))
    except (Corrupted, OverflowError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DecodeError(f"the description of checkpoint {row.id} cannot be read") from error


def checkpoint_of(step: Step) -> Checkpoint:
    """Return the checkpoint as a load would give it."""
    payload = {key: partial(from_body, value.kind, value.count, value.parts) for key, value in step.state.items()}
    return assemble(step.row, values_of(step.row), payload)


def read_bundle(
    path: str | os.PathLike[str], *, threads: Collection[str] | None = None, limits: BundleLimits | None = None
) -> Iterator[Checkpoint]:
    """Iterate over the checkpoints of a bundle without any store, thread by thread, oldest first; each is verified."""
    with BundleReader(path, threads, limits) as reader:
        for event in reader.events():
            if isinstance(event, Step):
                yield checkpoint_of(event)


def verify_bundle(path: str | os.PathLike[str], *, limits: BundleLimits | None = None) -> Totals:
    """Check every byte, state and digest of a bundle and return how much it holds; raise Corrupted at damage.

    A bundle that asks for more memory or work than ``limits`` allow raises LimitExceeded.
    """
    with BundleReader(path, limits=limits) as reader:
        for event in reader.events():
            if isinstance(event, Totals):
                return event
    raise AssertionError("a bundle ends with its totals, or with an error")  # pragma: no cover
