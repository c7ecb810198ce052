"""Read a bundle record by record: rebuild every state and check every digest, without storing anything.

``import_bundle`` stores the events that a reader yields, and ``read_bundle`` shows them. The window and one state bound
the memory; ``BundleLimits`` bound both memory and work.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from backstay.bundle import records
from backstay.bundle.blocks import DIGEST_BYTES, END, EVENT_WORK, BlockReader, Budget, BundleLimits
from backstay.bundle.records import CheckpointRecord
from backstay.bundle.report import Note
from backstay.bundle.state import State, Window, check_size, entries_of, follow, size_of
from backstay.errors import Corrupted, DecodeError, InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta, unchecked
from backstay.operations import interrupts, ledger
from backstay.operations.interrupts import InterruptRow
from backstay.operations.ledger import EffectRow
from backstay.operations.load import assemble, expected_digest
from backstay.operations.rows import NO_PARENT, values_of
from backstay.pieces.manifest import Key
from backstay.store.atomic import failure
from backstay.store.base import BranchKey, Row, WriteRow


@dataclass(frozen=True, slots=True)
class ThreadStarted:
    """A thread starts: the events that follow belong to it."""

    thread: str


@dataclass(slots=True)
class BundleCheckpoint:
    """One checkpoint with its whole state."""

    row: Row  # without payload; ``seq`` is its place in the thread
    origin: str | None  # the checkpoint that the branch was forked from
    record: CheckpointRecord
    state: State
    between: dict[Key, list[bytes]]  # the new bytes of each changed value
    left: list[int]  # branches whose states left the window
    before: tuple[str, bytes] | None  # id and digest of the checkpoint before it in its branch


@dataclass(frozen=True, slots=True)
class Totals:
    """How much a bundle holds. ``digest`` is the same for the same content, from every kind of store."""

    threads: int
    checkpoints: int
    interrupts: int
    effects: int
    damaged: int  # checkpoints that could not be exported
    digest: bytes


_COUNTED = (records.THREAD, records.CHECKPOINT, records.INTERRUPT, records.EFFECT, records.DAMAGE)
"""The records whose number is at the end of a bundle."""

Event = ThreadStarted | BundleCheckpoint | InterruptRow | EffectRow | Note | Totals


@dataclass(slots=True)
class _BundleBranch:
    key: BranchKey
    origin: str | None
    last: tuple[str, bytes] | None = None  # id and digest of its newest checkpoint so far


class BundleReader:
    """An open bundle. Use it in a ``with`` block; ``events`` can be read once."""

    def __init__(
        self, path: str | os.PathLike[str], threads: Collection[str] | None = None, limits: BundleLimits | None = None
    ) -> None:
        self.path = Path(path)
        self._budget = Budget(limits or BundleLimits(), str(self.path))
        self._threads = threads
        self._thread: str | None = None
        self._position = 0
        self._branches: list[_BundleBranch] = []
        self._keys: set[BranchKey] = set()  # of the branches
        self._window = Window()
        self._counts: Counter[int] = Counter()  # by type of record
        try:
            self._file = self.path.open("rb")
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise failure(error, "read", self.path) from error
        try:
            self._blocks = BlockReader(self._file, self.path, self._budget)
            with self._as_damage():
                kind, data = self._read()
                if kind != records.HEADER:
                    raise DecodeError("its first record is not a header")
                (self.namespace,) = records.unpack_names(data, 1)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> BundleReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def position(self) -> int:
        """Return how many bytes of the file were read."""
        return self._blocks.position

    def events(self) -> Iterator[Event]:
        """Yield the content in order, with the totals as the last event. Raise Corrupted at the first damage."""
        with self._as_damage():
            skipping = True
            kind = records.HEADER
            while kind != END:
                kind, data = self._read()
                if kind == records.THREAD:
                    (self._thread,) = records.unpack_names(data, 1)
                    records.checked_fields({"thread_id": self._thread, "namespace": self.namespace})
                    self._position, self._branches, self._keys, self._window = 0, [], set(), Window()
                    skipping = self._threads is not None and self._thread not in self._threads
                    if not skipping:
                        self._counts[kind] += 1
                        yield ThreadStarted(self._thread)
                elif kind == END:
                    counts = records.unpack_numbers(data[DIGEST_BYTES:], 5)
                    if self._threads is None and counts != [self._counts[each] for each in _COUNTED]:
                        raise DecodeError("it does not hold as many records as its end says")
                    threads, checkpoints, interrupts, effects, damaged = counts
                    yield Totals(threads, checkpoints, interrupts, effects, damaged, data[:DIGEST_BYTES])
                elif not skipping:
                    yield self._event(kind, data)
                elif self._thread is None:
                    raise DecodeError("its first records belong to no thread")

    @contextlib.contextmanager
    def _as_damage(self) -> Iterator[None]:
        """Report a record that breaks the format as damage of the file."""
        try:
            yield
        except (DecodeError, InvalidInput) as error:
            raise self._blocks.damaged(error.what) from error
        except OSError as error:
            raise failure(error, "read", self.path) from error

    def _read(self) -> tuple[int, bytes]:
        self._budget.spend(EVENT_WORK)
        kind, parts = self._blocks.read()
        return kind, b"".join(parts)

    def _next(self, wanted: int, held: int = 0) -> list[bytes]:
        kind, parts = self._blocks.read(held)
        if kind != wanted:
            raise DecodeError("a record is in the wrong place")
        return parts

    def _event(self, kind: int, data: bytes) -> Event:
        assert self._thread is not None
        place = (self.namespace, self._thread)
        self._counts[kind] += 1
        match kind:
            case records.BRANCH:
                key, origin = records.unpack_branch(data, *place)
                if key in self._keys:
                    raise DecodeError("a branch starts twice")
                self._keys.add(key)
                self._branches.append(_BundleBranch(key, origin))
                self._counts[records.CHECKPOINT] += 1
                return self._checkpoint(b"".join(self._next(records.CHECKPOINT)))
            case records.CHECKPOINT:
                return self._checkpoint(data)
            case records.INTERRUPT:
                stored = records.unpack_record(data, "interrupt", *place)
                interrupts.record_of(stored)  # verifies every byte
                return interrupts.row_of(stored)
            case records.EFFECT:
                return ledger.row_of(records.unpack_record(data, "effect", *place))
            case records.DAMAGE:
                checkpoint, what = records.unpack_damage(data)
                return Note(what, "damaged when it was exported", self._thread, checkpoint)
        raise DecodeError("it holds a record of an unknown type")

    def _checkpoint(self, data: bytes) -> BundleCheckpoint:
        record = CheckpointRecord.unpack(data)
        if record.branch >= len(self._branches):
            raise DecodeError("a checkpoint belongs to no branch")
        branch = self._branches[record.branch]
        base: State | None = {} if record.base is None else self._window.get(record.base)
        if base is None:
            raise DecodeError("a checkpoint refers to a state that is not in the window")
        in_place = record.base == record.branch
        held = check_size(base, record, in_place, self._budget)
        between = {edit.key: self._next(records.VALUE_BYTES) for edit in record.edits if edit.length}
        writes = []
        for _ in range(record.writes):
            data = b"".join(self._next(records.WRITE, held))
            held += len(data)
            writes.append(records.unpack_write(data))
        state = follow(base, record, between, in_place)
        self._position += 1
        row = _verified_row(branch, record, state, self._position, tuple(writes))
        before, branch.last = branch.last, (row.id, row.digest)
        left = self._window.put(record.branch, state)
        return BundleCheckpoint(row, branch.origin, record, state, between, left, before)


def _verified_row(
    branch: _BundleBranch, record: CheckpointRecord, state: State, position: int, writes: tuple[WriteRow, ...]
) -> Row:
    """Return the row of a checkpoint; raise DecodeError if its description or its digest is wrong."""
    parent_id, parent_digest = record.parent_id, record.parent_digest
    if record.follows:
        if branch.last is None:
            raise DecodeError("the first checkpoint of a branch claims to follow another")
        parent_id, parent_digest = branch.last
    row = Row(
        branch=branch.key,
        thread_number=0,
        seq=position,
        id=record.id,
        parent_id=parent_id,
        parent_digest=parent_digest,
        step=record.step,
        created_us=record.created_us,
        digest=record.digest,
        notes=record.notes,
        size=size_of(state),
        tags=record.tags,
        writes=writes,
    )
    try:
        values = records.checked_fields(values_of(row))
    except (Corrupted, OverflowError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DecodeError(f"the description of checkpoint {row.id} cannot be read") from error
    meta = unchecked(CheckpointMeta, values)
    if record.digest != expected_digest(row, meta, entries_of(state), parent_digest or NO_PARENT):
        raise DecodeError(f"checkpoint {row.id} does not match its digest")
    return row


def read_bundle(
    path: str | os.PathLike[str], *, threads: Collection[str] | None = None, limits: BundleLimits | None = None
) -> Iterator[Checkpoint]:
    """Iterate over the checkpoints of a bundle without a store, thread by thread, oldest first. Each is verified."""
    with BundleReader(path, threads, limits) as reader:
        for event in reader.events():
            if isinstance(event, BundleCheckpoint):
                yield assemble(event.row, values_of(event.row), event.state)


def check_bundle(path: str | os.PathLike[str], *, limits: BundleLimits | None = None) -> Totals:
    """Check every byte, state and digest of a bundle and return how much it holds. Raise Corrupted at the first damage.

    A bundle that needs more memory or work than ``limits`` allow raises LimitExceeded.
    """
    with BundleReader(path, limits=limits) as reader:
        for event in reader.events():
            if isinstance(event, Totals):
                return event
    raise AssertionError("a bundle ends with its totals, or with an error")  # pragma: no cover
