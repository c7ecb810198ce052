"""Stores that are wrong on purpose: each must be caught by the machine or the contract, or they prove nothing."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.store.base import Backend, Commit, Committed, Head, LaneKey, Removed, Row
from holdfast.store.memory import MemoryStore
from holdfast.testing.contract import StoreContract
from holdfast.testing.drafts import damage
from holdfast.testing.machine import StoreMachine


def up_to_date(commit: Commit, lane: Any) -> Commit:
    """Return the commit as if its writer had seen the lane as it is."""
    if lane is None:
        return replace(commit, number=0, last_seq=0, head_seq=0)
    return replace(commit, number=lane.number, last_seq=lane.last_seq, head_seq=lane.rows[-1].seq)


class LastWriterWins(MemoryStore):
    """Takes every commit, whatever its writer has seen."""

    def commit(self, commit: Commit) -> Committed:
        return super().commit(up_to_date(commit, self._lanes.get(commit.lane)))


class CachedReads(MemoryStore):
    """Answers every other look at a head from memory."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[LaneKey, Head | None] = {}

    def head(self, lane: LaneKey) -> Head | None:
        if lane in self._cache:
            return self._cache.pop(lane)
        self._cache[lane] = super().head(lane)
        return self._cache[lane]


class DropsSharedBlobs(MemoryStore):
    """Deletes all blobs of a deleted checkpoint's lane that its head does not name, whoever else needs them."""

    def delete(self, namespace: str, checkpoints: Collection[str], spare_heads: bool) -> Removed:
        blobs = [b for row in self._doomed(namespace, checkpoints) for b in self._blobs if b in row.manifest]
        removed = super().delete(namespace, checkpoints, spare_heads)
        for blob in blobs if removed.checkpoints else ():
            self._blobs.pop(blob, None)
        return removed

    def _doomed(self, namespace: str, checkpoints: Collection[str]) -> list[Row]:
        return [row for name in checkpoints if (row := self._rows.get((namespace, name))) is not None]


class DropsNeededChunks(MemoryStore):
    """Deletes the beginning of every stream of a lane in which something is deleted."""

    def delete(self, namespace: str, checkpoints: Collection[str], spare_heads: bool) -> Removed:
        removed = super().delete(namespace, checkpoints, spare_heads)
        for stream, chunks in self._streams.items() if removed.checkpoints else ():
            self._streams[stream] = chunks[1:] or chunks
        return removed


class DeletesHalf(MemoryStore):
    """Stops in the middle of a delete, yet says that all is done."""

    def delete(self, namespace: str, checkpoints: Collection[str], spare_heads: bool) -> Removed:
        names = list(checkpoints)
        removed = super().delete(namespace, names[: (len(names) + 1) // 2], spare_heads)
        return replace(removed, checkpoints=len(names))


class NumbersByClock(MemoryStore):
    """Takes the clock for an order."""

    def commit(self, commit: Commit) -> Committed:
        thread = self._threads.get(commit.lane[:2])
        if thread is not None:
            thread.next_seq = commit.created_us // 1_000_000
        return super().commit(commit)


class ReusesNumbers(MemoryStore):
    """Counts on from the newest that is there."""

    def commit(self, commit: Commit) -> Committed:
        thread = self._threads.get(commit.lane[:2])
        if thread is not None:
            there = [row.seq for row in self._rows.values() if row.lane[:2] == commit.lane[:2]]
            thread.next_seq = max(there, default=0) + 1
        return super().commit(commit)


class ReplacesSilently(MemoryStore):
    """Puts another checkpoint in the place of one that has the same id."""

    def commit(self, commit: Commit) -> Committed:
        existing = self._rows.get((commit.lane.namespace, commit.id))
        if existing is not None and existing.digest != commit.digest:
            self._remove([existing])
            commit = up_to_date(commit, self._lanes.get(commit.lane))
        return super().commit(commit)


class ForgetsParents(MemoryStore):
    """Leaves the children of deleted checkpoints without their parent's digest."""

    def _orphaned(self, row: Row, digests: dict[tuple[str, str], bytes]) -> Row:
        return row


class KeepsEverything(MemoryStore):
    """Never gives a byte back."""

    def _trim(self, *_: object) -> int:
        return 0


def caught_by_machine(mutant: type[MemoryStore]) -> bool:
    """Tell whether the machine finds the mutant to differ from the model."""

    class Machine(StoreMachine):
        def open_backends(self) -> list[Backend]:
            return self.backends if hasattr(self, "backends") else [mutant()]

    chosen = settings(
        max_examples=150,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(Machine, settings=chosen)
    except Exception:
        return True
    return False


def caught_by_contract(mutant: type[MemoryStore]) -> bool:
    """Tell whether some test of the contract, or the check after it, fails for the mutant."""
    contract = StoreContract()
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_") and list(inspect.signature(test).parameters) == ["backend"]:
            backend = mutant()
            try:
                test(backend)
                if damage(backend):
                    return True
            except (Exception, pytest.fail.Exception):  # the second is what pytest.raises raises
                return True
    return False


class TestMutants:
    machine: ClassVar = [
        LastWriterWins,
        CachedReads,
        DropsSharedBlobs,
        DropsNeededChunks,
        DeletesHalf,
        NumbersByClock,
        ReusesNumbers,
        ForgetsParents,
        KeepsEverything,
    ]
    contract: ClassVar = [*machine, ReplacesSilently]

    @pytest.mark.row("C1", "C3", "C4")
    @pytest.mark.parametrize("mutant", machine, ids=lambda mutant: mutant.__name__)
    def test_the_machine_catches_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_machine(mutant)

    @pytest.mark.row("C1", "C2", "C3", "C4")
    @pytest.mark.parametrize("mutant", contract, ids=lambda mutant: mutant.__name__)
    def test_the_contract_catches_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_contract(mutant)

    @pytest.mark.parametrize("harness", [caught_by_machine, caught_by_contract], ids=["machine", "contract"])
    def test_the_store_they_are_made_of_is_not_caught(self, harness: Callable[[type[MemoryStore]], bool]) -> None:
        assert not harness(MemoryStore)
