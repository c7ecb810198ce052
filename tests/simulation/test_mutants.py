"""Stores that are wrong on purpose: each must be caught by the machine or the contract, or they prove nothing."""

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from backstay.errors import Fenced
from backstay.store.base import Backend, Commit, Committed, Head, LaneKey, Removed, Row
from backstay.store.leases import Claim, Held
from backstay.store.memory import MemoryStore
from backstay.store.memory.chunks import Body, KeptBytes
from backstay.store.memory.lane import KeptLane
from backstay.store.memory.records import KeptRecord
from backstay.store.records import Fence, Record
from backstay.store.tenure import Tenure
from backstay.testing.contract import StoreContract
from backstay.testing.drafts import damage
from backstay.testing.machine import StoreMachine
from backstay.testing.owner_programs import OwnerProgram, owner_program


def up_to_date(commit: Commit, lane: Any) -> Commit:
    """Return the commit as if its writer had seen the lane as it is."""
    if lane is None:
        return replace(commit, number=0, last_seq=0, head_seq=0)
    return replace(commit, number=lane.number, last_seq=lane.last_seq, head_seq=lane.rows[-1].seq)


class LastWriterWins(MemoryStore):
    """Takes every commit, whatever its writer has seen."""

    def commit(self, commit: Commit) -> Committed:
        return super().commit(up_to_date(commit, self._tables.lanes.get(commit.lane)))


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

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        kept = self._tables.bytes.blobs
        blobs = [b for row in self._doomed(namespace, checkpoints) for b in kept if b in row.manifest]
        removed = super().delete(namespace, checkpoints, protect, token, **more)
        for blob in blobs if removed.checkpoints else ():
            self._tables.bytes.blobs.pop(blob, None)
        return removed

    def _doomed(self, namespace: str, checkpoints: Collection[str]) -> list[Row]:
        return [row for name in checkpoints if (row := self._tables.rows.get((namespace, name))) is not None]


class DropsNeededChunks(MemoryStore):
    """Deletes the beginning of every stream of a lane in which something is deleted."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        removed = super().delete(namespace, checkpoints, protect, token, **more)
        for stream, chunks in self._tables.bytes.streams.items() if removed.checkpoints else ():
            self._tables.bytes.streams[stream] = chunks[1:] or chunks
        return removed


class DeletesHalf(MemoryStore):
    """Stops in the middle of a delete, yet says that all is done."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        names = list(checkpoints)
        removed = super().delete(namespace, names[: (len(names) + 1) // 2], protect, token, **more)
        return replace(removed, checkpoints=len(names))


class NumbersByClock(MemoryStore):
    """Takes the clock for an order."""

    def commit(self, commit: Commit) -> Committed:
        thread = self._tables.threads.get(commit.lane[:2])
        if thread is not None:
            thread.next_seq = commit.created_us // 1_000_000
        return super().commit(commit)


class ReusesNumbers(MemoryStore):
    """Counts on from the newest that is there."""

    def commit(self, commit: Commit) -> Committed:
        thread = self._tables.threads.get(commit.lane[:2])
        if thread is not None:
            there = [row.seq for row in self._tables.rows.values() if row.lane[:2] == commit.lane[:2]]
            thread.next_seq = max(there, default=0) + 1
        return super().commit(commit)


class ReplacesSilently(MemoryStore):
    """Puts another checkpoint in the place of one that has the same id."""

    def commit(self, commit: Commit) -> Committed:
        existing = self._tables.rows.get((commit.lane.namespace, commit.id))
        if existing is not None and existing.digest != commit.digest:
            self.delete(existing.lane.namespace, [existing.id], False)
            commit = up_to_date(commit, self._tables.lanes.get(commit.lane))
        return super().commit(commit)


class ForgetsParents(MemoryStore):
    """Leaves the children of deleted checkpoints without their parent's digest."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tables._orphaned = lambda row, digests: row  # type: ignore[method-assign]


class Hoard(KeptBytes):
    def trim(self, *_: object) -> list[Body]:
        return []


class KeepsEverything(MemoryStore):
    """Never gives a byte back."""

    def __init__(self) -> None:
        super().__init__()
        self._tables.bytes = Hoard()


# Leases -----------------------------------------------------------------------------------------------------------


class RenewsForAnyone(MemoryStore):
    """Does not look at the token of who renews."""

    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        found = self._tables.lanes.get(lane)
        token = (found.tenure.token if found else None) or claim.token
        super().renew(lane, epoch, claim._replace(token=token))


class RenewsForOldHolders(MemoryStore):
    """Does not look at the epoch of who renews."""

    def renew(self, lane: LaneKey, epoch: int, claim: Claim) -> None:
        super().renew(lane, self._tables.lanes[lane].tenure.epoch if lane in self._tables.lanes else epoch, claim)


class TakesLeasesThatRun(MemoryStore):
    """Does not look whether a lease still runs."""

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        found = self._tables.lanes.get(lane)
        if found is not None and found.tenure.token != claim.token:
            found.tenure = Tenure(found.tenure.epoch)
        return super().acquire(lane, claim)


class NeverTakesLeasesOver(MemoryStore):
    """Holds a lease for its owner until it is given back."""

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        found = self._tables.lanes.get(lane)
        if found is not None and found.tenure.token not in (None, claim.token):
            raise Fenced("held", epoch=0, current=found.tenure.epoch, owner=found.tenure.owner)
        return super().acquire(lane, claim)


class KeepsTheEpoch(MemoryStore):
    """Gives a lease that was free or had expired to the next holder under the old epoch."""

    def acquire(self, lane: LaneKey, claim: Claim) -> Held:
        there = self._tables.lanes.get(lane)
        epoch = there.tenure.epoch if there else 1
        held = super().acquire(lane, claim)
        self._tables.lanes[lane].tenure = self._tables.lanes[lane].tenure._replace(epoch=epoch)
        return replace(held, epoch=epoch)


class ForgetsTheFence(MemoryStore):
    """Looks at the head only when something is committed."""

    def _check_writer(self, lane: KeptLane | None, commit: Commit) -> None:
        free = None if lane is None else replace(lane, tenure=Tenure())
        super()._check_writer(free, replace(commit, epoch=0, claim=None))


class TrustsTheClock(MemoryStore):
    """Lets everybody write who holds the lease by the clock, or when nobody does; the epoch counts for nothing."""

    def _check_writer(self, lane: KeptLane | None, commit: Commit) -> None:
        epoch = lane.tenure.epoch if lane else 0
        runs = lane is not None and lane.tenure.left_us(self._clock()) > 0
        super()._check_writer(lane, replace(commit, epoch=epoch, claim=commit.claim if runs else None))


class FencesBeforeIds(MemoryStore):
    """Refuses a commit of an old holder without looking whether it was stored before."""

    def commit(self, commit: Commit) -> Committed:
        lane = self._tables.lanes.get(commit.lane)
        if lane is not None:
            token = None if commit.claim is None else commit.claim.token
            lane.tenure.check_writer(lane.key, commit.epoch, token, self._clock())
        return super().commit(commit)


class NeverExtends(MemoryStore):
    """Lets a lease run out while its holder writes."""

    def commit(self, commit: Commit) -> Committed:
        lane = self._tables.lanes.get(commit.lane)
        before = lane.tenure if lane else Tenure()
        done = super().commit(commit)
        self._tables.lanes[commit.lane].tenure = before
        return done


class ReleasesAnyonesLease(MemoryStore):
    """Gives back whatever lease there is."""

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        tenure = self._tables.lanes[lane].tenure if lane in self._tables.lanes else Tenure()
        super().release(lane, tenure.epoch, tenure.token or token)


class ReleasesTheThread(MemoryStore):
    """Forgets a thread with its last lane, and with it which numbers were given out."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tables.has_more = lambda *_, **__: False  # type: ignore[method-assign]


class ClaimsTwice(MemoryStore):
    """Hands expired leases out without taking them."""

    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        before = {key: lane.tenure for key, lane in self._tables.lanes.items()}
        held = super().claim(namespace, count, claim)
        for key, tenure in before.items():
            self._tables.lanes[key].tenure = tenure
        return held


class ClaimsLeasesThatRun(MemoryStore):
    """Does not look whether the leases it hands out have expired."""

    def claim(self, namespace: str, count: int, claim: Claim) -> list[Held]:
        for lane in self._tables.lanes.values():
            lane.tenure = lane.tenure._replace(expires_us=0)
        return super().claim(namespace, count, claim)


class DeletesFromUnderLeases(MemoryStore):
    """Lets everybody delete, whoever holds the lane."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        for name in checkpoints:
            row = self._tables.rows.get((namespace, name))
            token = token if row is None else self._tables.lanes[row.lane].tenure.token
        return super().delete(namespace, checkpoints, protect, token, **more)


class LeavesTheLease(MemoryStore):
    """Keeps the lease of a lane that is emptied for the next lane of that name."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        before = dict(self._tables.lanes)
        removed = super().delete(namespace, checkpoints, protect, token, **more)
        for key, lane in before.items():
            if key not in self._tables.lanes and lane.tenure.token is not None:
                self._tables.lanes[key] = lane
        return removed


# Records ----------------------------------------------------------------------------------------------------------


class Broken(MemoryStore):
    """Looks at the record that is stored before a write."""

    def stored(self, record: Record) -> Record | None:
        kept = self._tables.records.find(record.kind, record.lane, record.key)
        return None if kept is None else kept.record


class IgnoresVersions(Broken):
    """Lets the last writer win, whatever it saw."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        stored = self.stored(record)
        if stored is not None:
            record = replace(record, version=stored.version, number=stored.number)
        return super().put_record(record, ttl_us, fence)


class IgnoresNumbers(Broken):
    """Takes a record that was made again under its name for the one that its writer saw."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        stored = self.stored(record)
        number = 0 if stored is None else stored.number
        return super().put_record(replace(record, number=number), ttl_us, fence)


class WritesUnfenced(MemoryStore):
    """Lets everybody write a record, whoever holds the lane."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        return super().put_record(record, ttl_us, None)


class AnswersTheFenced(Broken):
    """Looks whether a record is there before it looks who asks."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        stored = self.stored(record)
        if stored is not None and stored.version != record.version:
            fence = None
        return super().put_record(record, ttl_us, fence)


class FencesRepetitions(MemoryStore):
    """Refuses the repetition of a write by who lost the lease since."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        if fence is not None:
            lane = self._tables.lanes.get(record.lane)
            (lane.tenure if lane else Tenure()).check_writer(record.lane, *fence, self._clock())
        return super().put_record(record, ttl_us, fence)


class MakesWhatIsGone(Broken):
    """Stores a record that went as a new one."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        if self.stored(record) is None:
            record = replace(record, version=0)
        return super().put_record(record, ttl_us, fence)


class LivesForEver(MemoryStore):
    """Keeps the first time to live."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        return super().put_record(record, None if record.version else ttl_us, fence)


class NeverCloses(MemoryStore):
    """Takes every record for an open one."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        return super().put_record(replace(record, open=True), ttl_us, fence)


class SparesHeadsOnly(MemoryStore):
    """Deletes checkpoints that wait for a decision."""

    def _is_protected(self, row: Row, protect: bool, tagged: bool, forked: bool) -> bool:
        return protect and self._tables.is_head(row)


class LeavesRecords(MemoryStore):
    """Deletes checkpoints and branches, and keeps their records."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        before = list(self._tables.records)
        removed = super().delete(namespace, checkpoints, protect, token, **more)
        for record in before:
            self._tables.records.put(KeptRecord(record, None))
        return removed


class LeavesThreadsRecords(MemoryStore):
    """Deletes threads and keeps their records."""

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        before = list(self._tables.records)
        removed = super().delete_thread(namespace, thread, token)
        for record in before:
            self._tables.records.put(KeptRecord(record, None))
        return removed


class ForgetsEffectsWithTheLease(MemoryStore):
    """Deletes a branch that was only leased, and its effects with it."""

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        super().release(lane, epoch, token)
        if lane not in self._tables.lanes:
            self._tables.records.drop(lambda record: record.lane == lane)


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
    except Exception as error:
        return is_a_finding(error)
    return False


def is_a_finding(error: BaseException) -> bool:
    """Tell whether an error is about what the mutant does; one that does not even run would prove nothing."""
    if isinstance(error, AttributeError | TypeError | NameError):
        raise error
    return True


def cases(test: Callable[..., None]) -> Iterator[dict[str, object]]:
    """Return the arguments of every case of a test, as pytest would; none of them if it needs more than a store."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    names = [mark.args[0] for mark in marks]
    if set(inspect.signature(test).parameters) == {"backend", *names}:
        for values in itertools.product(*(mark.args[1] for mark in marks)):
            yield dict(zip(names, values, strict=True))


def caught_by_contract(mutant: type[MemoryStore]) -> bool:
    """Tell whether some test of the contract, or the check after it, fails for the mutant."""
    for name, test in inspect.getmembers(StoreContract(), inspect.ismethod):
        for case in cases(test) if name.startswith("test_") else ():
            backend = mutant()
            try:
                test(backend, **case)
                if damage(backend):
                    return True
            except (Exception, pytest.fail.Exception) as error:  # the second is what pytest.raises raises
                return is_a_finding(error)
    return False


def caught_by_programs(mutant: type[MemoryStore]) -> bool:
    """Tell whether some random program of owners goes otherwise on the mutant, or breaks a rule there."""
    for seed in range(200):
        try:
            OwnerProgram([partial(mutant, "memory:"), partial(MemoryStore, "memory:")]).run(owner_program(seed))
        except Exception as error:
            return is_a_finding(error)
    return False


@pytest.mark.effort(2)
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
    owners: ClassVar = [
        RenewsForAnyone,
        RenewsForOldHolders,
        TakesLeasesThatRun,
        NeverTakesLeasesOver,
        KeepsTheEpoch,
        ForgetsTheFence,
        TrustsTheClock,
        FencesBeforeIds,
        NeverExtends,
        ReleasesAnyonesLease,
        ReleasesTheThread,
        ClaimsTwice,
        ClaimsLeasesThatRun,
        DeletesFromUnderLeases,
        LeavesTheLease,
        IgnoresVersions,
        WritesUnfenced,
        AnswersTheFenced,
        MakesWhatIsGone,
        LivesForEver,
        NeverCloses,
        SparesHeadsOnly,
        LeavesRecords,
        LeavesThreadsRecords,
        ForgetsEffectsWithTheLease,
    ]
    contract: ClassVar = [*machine, ReplacesSilently, *owners, IgnoresNumbers, FencesRepetitions]

    @pytest.mark.row("C1", "C3", "C4")
    @pytest.mark.parametrize("mutant", machine, ids=lambda mutant: mutant.__name__)
    def test_the_machine_catches_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_machine(mutant)

    @pytest.mark.row("C1", "C2", "C3", "C4", "C5", "C7", "C8")
    @pytest.mark.parametrize("mutant", contract, ids=lambda mutant: mutant.__name__)
    def test_the_contract_catches_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_contract(mutant)

    @pytest.mark.row("C1", "C5", "C7", "C8")
    @pytest.mark.parametrize("mutant", owners, ids=lambda mutant: mutant.__name__)
    def test_random_programs_of_owners_catch_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_programs(mutant)

    @pytest.mark.parametrize("harness", [caught_by_machine, caught_by_contract, caught_by_programs])
    def test_the_store_they_are_made_of_is_not_caught(self, harness: Callable[[type[MemoryStore]], bool]) -> None:
        assert not harness(MemoryStore)
