"""Stores that are wrong on purpose: each must be caught by the machine or the contract, or they prove nothing."""

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
from backstay.store.effects import DONE, INTENDED, EffectRow, intent
from backstay.store.interrupts import InterruptRow
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from backstay.errors import Fenced
from backstay.store.base import Backend, Commit, Committed, Head, LaneKey, Removed, Row
from backstay.store.leases import Claim, Held
from backstay.store.memory import MemoryStore
from backstay.store.memory.chunks import Body, KeptBytes
from backstay.store.memory.lane import KeptLane
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


# Sessions and interrupts ------------------------------------------------------------------------------------------


class KeepsTheLastReason(MemoryStore):
    """Lets a session end again."""

    def end(self, namespace: str, session: str, ended_us: int, reason: str) -> bool:
        kept = self._tables.sessions._kept
        if (namespace, session) in kept:
            row = kept[namespace, session].row
            kept[namespace, session] = kept[namespace, session]._replace(row=replace(row, ended_us=None, reason=None))
        return super().end(namespace, session, ended_us, reason)


class WakesTheDead(MemoryStore):
    """Takes a beat of a session that has ended for a sign of life."""

    def beat(self, namespace: str, session: str, seen_us: int, ttl_us: int) -> bool:
        return super().beat(namespace, session, seen_us, ttl_us) or (namespace, session) in self._tables.sessions._kept


class DecidesAgain(MemoryStore):
    """Lets the last decision win."""

    def decide(
        self, namespace: str, interrupt: str, digest: bytes, decision: bytes, by: str, decided_us: int
    ) -> InterruptRow:
        row = self._tables.interrupts.find(namespace, interrupt)
        if row is not None:
            self._tables.interrupts.put(replace(row, decision=None))
        return super().decide(namespace, interrupt, digest, decision, by, decided_us)


class DecidesTheUnseen(MemoryStore):
    """Does not look what a decision is about."""

    def decide(
        self, namespace: str, interrupt: str, digest: bytes, decision: bytes, by: str, decided_us: int
    ) -> InterruptRow:
        row = self._tables.interrupts.find(namespace, interrupt)
        shown = digest if row is None else row.digest
        return super().decide(namespace, interrupt, shown, decision, by, decided_us)


class ConsumesTwice(MemoryStore):
    """Hands a decision out to everybody who asks."""

    def consume(self, namespace: str, interrupt: str, by: str, epoch: int, consumed_us: int) -> InterruptRow:
        row = self._tables.interrupts.find(namespace, interrupt)
        if row is not None:
            self._tables.interrupts.put(replace(row, consumer=None))
        return super().consume(namespace, interrupt, by, epoch, consumed_us)


class NeverHandsOver(MemoryStore):
    """Keeps a decision for its first consumer, also if that one was fenced out."""

    def consume(self, namespace: str, interrupt: str, by: str, epoch: int, consumed_us: int) -> InterruptRow:
        row = self._tables.interrupts.find(namespace, interrupt)
        if row is not None and row.consumer is not None:
            return row
        return super().consume(namespace, interrupt, by, epoch, consumed_us)


class SparesHeadsOnly(MemoryStore):
    """Deletes checkpoints that wait for a decision."""

    def _is_protected(self, row: Row, protect: bool, tagged: bool, forked: bool) -> bool:
        return protect and self._tables.is_head(row)


class LeavesInterrupts(MemoryStore):
    """Deletes checkpoints and keeps their interrupts."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        before = list(self._tables.interrupts)
        removed = super().delete(namespace, checkpoints, protect, token, **more)
        for row in before:
            self._tables.interrupts.put(row)
        return removed


# Effects ----------------------------------------------------------------------------------------------------------


class BeginsUnderway(MemoryStore):
    """Lets anybody begin what somebody else has begun."""

    def begin_effect(self, row: EffectRow, *given: Any, **named: Any) -> EffectRow:
        answer = super().begin_effect(row, *given, **named)
        return self._keep_effect(intent(row, answer.number)) if answer.status == INTENDED else answer


class RepeatsDoneEffects(MemoryStore):
    """Takes a done effect for a failed one."""

    def begin_effect(self, row: EffectRow, *given: Any, **named: Any) -> EffectRow:
        answer = super().begin_effect(row, *given, **named)
        return self._keep_effect(intent(row, answer.number)) if answer.status == DONE else answer


class BeginsUnfenced(MemoryStore):
    """Asks nobody for a lease who begins an effect."""

    def begin_effect(
        self, row: EffectRow, epoch: int | None, token: str | None, retry_of: int | None = None
    ) -> EffectRow:
        return self._keep_effect(self._tables.effects.begun(row, retry_of))


class ReplaysToTheFenced(MemoryStore):
    """Looks whether the effect is there before it looks who asks."""

    def begin_effect(self, row: EffectRow, *given: Any, **named: Any) -> EffectRow:
        return self._tables.effects.find(row.lane, row.key) or super().begin_effect(row, *given, **named)


class TakesAnyReceipt(MemoryStore):
    """Lets anybody end an effect."""

    def end_effect(self, lane: LaneKey, key: str, attempt: int, owner: str, *given: Any) -> EffectRow:
        row = self._tables.effects.find(lane, key)
        return super().end_effect(lane, key, row.attempt if row else 0, row.owner if row else "", *given)


class ReplacesReceipts(MemoryStore):
    """Takes the last receipt, not the first."""

    def settle_effect(self, lane: LaneKey, key: str, *given: Any) -> EffectRow:
        row = self._tables.effects.find(lane, key)
        if row is not None:
            self._tables.effects.put(replace(row, status=INTENDED))
        return super().settle_effect(lane, key, *given)


class FencesReceipts(MemoryStore):
    """Refuses the receipt of who lost the lease."""

    def end_effect(self, lane: LaneKey, *given: Any) -> EffectRow:
        found = self._tables.lanes.get(lane)
        if found is not None and found.tenure.epoch > 1:
            raise found.tenure.refusal(lane, 1, self._clock())
        return super().end_effect(lane, *given)


class ForgetsEffectsWithTheLease(MemoryStore):
    """Deletes a branch that was only leased, and its effects with it."""

    def release(self, lane: LaneKey, epoch: int, token: str) -> None:
        super().release(lane, epoch, token)
        if lane not in self._tables.lanes:
            self._tables.effects.drop(*lane)


class LeavesEffects(MemoryStore):
    """Deletes threads and keeps their effects."""

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        before = self._tables.effects.listed(namespace, thread, 0, 1000)
        removed = super().delete_thread(namespace, thread, token)
        for row in before:
            self._tables.effects.put(row)
        return removed


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
        KeepsTheLastReason,
        WakesTheDead,
        DecidesAgain,
        DecidesTheUnseen,
        ConsumesTwice,
        NeverHandsOver,
        SparesHeadsOnly,
        LeavesInterrupts,
    ]
    effects: ClassVar = [
        BeginsUnderway,
        RepeatsDoneEffects,
        BeginsUnfenced,
        ReplaysToTheFenced,
        TakesAnyReceipt,
        ReplacesReceipts,
        FencesReceipts,
        ForgetsEffectsWithTheLease,
        LeavesEffects,
    ]
    contract: ClassVar = [*machine, ReplacesSilently, *owners, *effects]

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
