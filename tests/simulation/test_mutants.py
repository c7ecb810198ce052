"""Stores that are wrong on purpose: each must be caught by the machine or the contract, or they prove nothing."""

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from backstay.errors import Conflict, Fenced
from backstay.store.base import Backend, BranchKey, Commit, Committed, Head, Removed, Row
from backstay.store.leases import LeaseGrant, LeaseRequest, LeaseRow
from backstay.store.memory import MemoryStore
from backstay.store.memory.chunks import Content, StoredBytes
from backstay.store.memory.tables import MemoryBranch, Tables
from backstay.store.records import Fence, Record
from backstay.testing.contract import StoreContract
from backstay.testing.drafts import damage
from support.simulation.machine import StoreMachine
from support.simulation.owner_programs import OwnerProgram, owner_program


def up_to_date(commit: Commit, branch: Any) -> Commit:
    """Return the commit as if its writer had seen the branch as it is."""
    if branch is None:
        return replace(commit, number=0, last_seq=0, head_seq=0)
    return replace(commit, number=branch.number, last_seq=branch.last_seq, head_seq=branch.rows[-1].seq)


class LastWriterWins(MemoryStore):
    """Takes every commit, whatever its writer has seen."""

    def commit(self, commit: Commit) -> Committed:
        return super().commit(up_to_date(commit, self._tables.branches.get(commit.branch)))


class CachedReads(MemoryStore):
    """Answers every other look at a head from memory."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[BranchKey, Head | None] = {}

    def head(self, branch: BranchKey) -> Head | None:
        if branch in self._cache:
            return self._cache.pop(branch)
        self._cache[branch] = super().head(branch)
        return self._cache[branch]


class DropsSharedBlobs(MemoryStore):
    """Deletes all blobs of a deleted checkpoint's branch that its head does not name, whoever else needs them."""

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
    """Deletes the beginning of every stream of a branch in which something is deleted."""

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
        thread = self._tables.threads.get(commit.branch[:2])
        if thread is not None:
            thread.next_seq = commit.created_us // 1_000_000
        return super().commit(commit)


class ReusesNumbers(MemoryStore):
    """Counts on from the newest that is there."""

    def commit(self, commit: Commit) -> Committed:
        thread = self._tables.threads.get(commit.branch[:2])
        if thread is not None:
            there = [row.seq for row in self._tables.rows.values() if row.branch[:2] == commit.branch[:2]]
            thread.next_seq = max(there, default=0) + 1
        return super().commit(commit)


class ReplacesSilently(MemoryStore):
    """Puts another checkpoint in the place of one that has the same id."""

    def commit(self, commit: Commit) -> Committed:
        existing = self._tables.rows.get((commit.branch.namespace, commit.id))
        if existing is not None and existing.digest != commit.digest:
            self.delete(existing.branch.namespace, [existing.id], False)
            commit = up_to_date(commit, self._tables.branches.get(commit.branch))
        return super().commit(commit)


class ForgetfulTables(Tables):
    def take_rows_out(self, digests: Mapping[str, bytes], space: str) -> None:
        super().take_rows_out(digests, space)
        for branch in self.branches.values():
            branch.rows = [row._replace(parent_digest=None) if row.parent_id in digests else row for row in branch.rows]
            self.rows.update({(space, row.id): row for row in branch.rows if row.branch.namespace == space})


class ForgetsParents(MemoryStore):
    """Leaves the children of deleted checkpoints without their parent's digest."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tables = ForgetfulTables(StoredBytes())


class Hoard(StoredBytes):
    def drop(self, *_: object) -> list[Content]:
        return []

    def drop_chunks(self, *_: object) -> list[Content]:
        return []


class KeepsEverything(MemoryStore):
    """Never gives a byte back."""

    def __init__(self) -> None:
        super().__init__()
        self._tables.bytes = Hoard()


# Leases -----------------------------------------------------------------------------------------------------------


class RenewsForAnyone(MemoryStore):
    """Does not look at the token of who renews."""

    def renew(self, branch: BranchKey, epoch: int, claim: LeaseRequest) -> None:
        found = self._tables.branches.get(branch)
        token = (found.lease.token if found else None) or claim.token
        super().renew(branch, epoch, claim._replace(token=token))


class RenewsForOldHolders(MemoryStore):
    """Does not look at the epoch of who renews."""

    def renew(self, branch: BranchKey, epoch: int, claim: LeaseRequest) -> None:
        super().renew(
            branch, self._tables.branches[branch].lease.epoch if branch in self._tables.branches else epoch, claim
        )


class TakesLeasesThatRun(MemoryStore):
    """Does not look whether a lease still runs."""

    def acquire(self, branch: BranchKey, request: LeaseRequest, run: Record | None = None) -> LeaseGrant:
        found = self._tables.branches.get(branch)
        if found is not None and found.lease.token != request.token:
            found.lease = LeaseRow(found.lease.epoch)
        return super().acquire(branch, request, run)


class NeverTakesLeasesOver(MemoryStore):
    """Holds a lease for its owner until it is given back."""

    def acquire(self, branch: BranchKey, request: LeaseRequest, run: Record | None = None) -> LeaseGrant:
        found = self._tables.branches.get(branch)
        if found is not None and found.lease.token not in (None, request.token):
            raise Fenced("held", epoch=0, current=found.lease.epoch, owner=found.lease.owner)
        return super().acquire(branch, request, run)


class KeepsTheEpoch(MemoryStore):
    """Gives a lease that was free or had expired to the next holder under the old epoch."""

    def acquire(self, branch: BranchKey, request: LeaseRequest, run: Record | None = None) -> LeaseGrant:
        there = self._tables.branches.get(branch)
        epoch = there.lease.epoch if there else 1
        held = super().acquire(branch, request, run)
        self._tables.branches[branch].lease = self._tables.branches[branch].lease._replace(epoch=epoch)
        return replace(held, epoch=epoch)


class ForgetsTheFence(MemoryStore):
    """Looks at the head only when something is committed."""

    def _check_writer(self, branch: MemoryBranch | None, commit: Commit) -> None:
        free = None if branch is None else replace(branch, lease=LeaseRow())
        super()._check_writer(free, replace(commit, epoch=0, claim=None))


class TrustsTheClock(MemoryStore):
    """Lets everybody write who holds the lease by the clock, or when nobody does; the epoch counts for nothing."""

    def _check_writer(self, branch: MemoryBranch | None, commit: Commit) -> None:
        epoch = branch.lease.epoch if branch else 0
        runs = branch is not None and branch.lease.left_us(self._clock()) > 0
        super()._check_writer(branch, replace(commit, epoch=epoch, claim=commit.claim if runs else None))


class FencesBeforeIds(MemoryStore):
    """Refuses a commit of an old holder without looking whether it was stored before."""

    def commit(self, commit: Commit) -> Committed:
        branch = self._tables.branches.get(commit.branch)
        if branch is not None:
            token = None if commit.claim is None else commit.claim.token
            branch.lease.check_writer(branch.key, commit.epoch, token, self._clock())
        return super().commit(commit)


class NeverExtends(MemoryStore):
    """Lets a lease run out while its holder writes."""

    def commit(self, commit: Commit) -> Committed:
        branch = self._tables.branches.get(commit.branch)
        before = branch.lease if branch else LeaseRow()
        done = super().commit(commit)
        self._tables.branches[commit.branch].lease = before
        return done


class ReleasesAnyonesLease(MemoryStore):
    """Gives back whatever lease there is."""

    def release(self, branch: BranchKey, epoch: int, token: str, run: Record | None = None) -> None:
        lease = self._tables.branches[branch].lease if branch in self._tables.branches else LeaseRow()
        super().release(branch, lease.epoch, lease.token or token, run)


class ReleasesTheThread(MemoryStore):
    """Forgets a thread with its last branch, and with it which numbers were given out."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tables.has_more = lambda *_, **__: False  # type: ignore[method-assign]


class ClaimsTwice(MemoryStore):
    """Hands runs out without taking the leases of their branches."""

    def claim(self, *given: Any) -> list[LeaseGrant]:
        before = {key: branch.lease for key, branch in self._tables.branches.items()}
        held = super().claim(*given)
        for key, lease in before.items():
            self._tables.branches[key].lease = lease
        return held


class ClaimsRunsThatAreExecuted(MemoryStore):
    """Does not look whether the leases of the runs it hands out have ended."""

    def claim(self, *given: Any) -> list[LeaseGrant]:
        for branch in self._tables.branches.values():
            branch.lease = branch.lease._replace(expires_us=0)
        return super().claim(*given)


class ClaimsForAnyGraph(MemoryStore):
    """Hands out the runs of every version of a graph."""

    def claim(self, namespace: str, graphs: Collection[tuple[str, str]], *given: Any) -> list[LeaseGrant]:
        return super().claim(namespace, [(name, version) for name, _ in graphs for version in "12"], *given)


class ClaimsBeforeTheTime(MemoryStore):
    """Hands out runs that are not due yet."""

    def claim(
        self, namespace: str, graphs: Any, count: int, request: LeaseRequest, now_us: int, *given: Any
    ) -> list[LeaseGrant]:
        return super().claim(namespace, graphs, count, request, 2**62, *given)


class ClaimsABranchTwice(MemoryStore):
    """Hands out two runs of one branch at once."""

    def claim(
        self, namespace: str, graphs: Any, count: int, request: LeaseRequest, now_us: int, dead: Any, change: Any
    ) -> list[LeaseGrant]:
        held = super().claim(namespace, graphs, count, request, now_us, dead, change)
        if 0 < len(held) < count:
            held += super().claim(namespace, graphs, count - len(held), request, now_us, [*dead, request.token], change)
        return held


class ForgetsTheRun(MemoryStore):
    """Releases a lease, and does not store how its run ended."""

    def release(self, branch: BranchKey, epoch: int, token: str, run: Record | None = None) -> None:
        super().release(branch, epoch, token)


class TakesTheLeaseAlone(MemoryStore):
    """Takes a lease although another writer has changed its run."""

    def acquire(self, branch: BranchKey, request: LeaseRequest, run: Record | None = None) -> LeaseGrant:
        try:
            return super().acquire(branch, request, run)
        except Conflict:
            super().acquire(branch, request)
            raise


class DeletesFromUnderLeases(MemoryStore):
    """Lets everybody delete, whoever holds the branch."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        for name in checkpoints:
            row = self._tables.rows.get((namespace, name))
            token = token if row is None else self._tables.branches[row.branch].lease.token
        return super().delete(namespace, checkpoints, protect, token, **more)


class LeavesTheLease(MemoryStore):
    """Keeps the lease of a branch that is emptied for the next branch of that name."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        before = {key: (branch.number, branch.lease) for key, branch in self._tables.branches.items()}
        removed = super().delete(namespace, checkpoints, protect, token, **more)
        for key, (number, lease) in before.items():
            if key not in self._tables.branches and lease.token is not None:
                self._tables.thread(key.namespace, key.thread, self._tables.last_number + 1)
                self._tables.set_lease(self._tables.branch(key, number), lease)
        return removed


# Records ----------------------------------------------------------------------------------------------------------


class Broken(MemoryStore):
    """Looks at the record that is stored before a write."""

    def stored(self, record: Record) -> Record | None:
        return self._tables.records.find(record.kind, record.branch, record.key)


class IgnoresVersions(Broken):
    """Lets the last writer win, whatever it saw."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        stored = self.stored(record)
        if stored is not None:
            record = replace(record, version=stored.version, number=stored.number)
        return super().put_record(record, fence, run)


class IgnoresNumbers(Broken):
    """Takes a record that was made again under its name for the one that its writer saw."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        stored = self.stored(record)
        number = 0 if stored is None else stored.number
        return super().put_record(replace(record, number=number), fence, run)


class WritesUnfenced(MemoryStore):
    """Lets everybody write a record, whoever holds the branch."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        return super().put_record(record, None, run)


class AnswersTheFenced(Broken):
    """Looks whether a record is there before it looks who asks."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        stored = self.stored(record)
        if stored is not None and stored.version != record.version:
            fence = None
        return super().put_record(record, fence, run)


class FencesRepetitions(MemoryStore):
    """Refuses the repetition of a write by who lost the lease since."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        if fence is not None:
            branch = self._tables.branches.get(record.branch)
            (branch.lease if branch else LeaseRow()).check_writer(record.branch, *fence, self._clock())
        return super().put_record(record, fence, run)


class MakesWhatIsGone(Broken):
    """Stores a record that went as a new one."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        if self.stored(record) is None:
            record = replace(record, version=0)
        return super().put_record(record, fence, run)


class NeverCloses(MemoryStore):
    """Takes every record for an open one."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        return super().put_record(replace(record, open=True), fence, run)


class TablesWithoutQuestions(Tables):
    def awaited(self, namespace: str, thread: str) -> set[str | None]:
        return set()


class SparesHeadsOnly(MemoryStore):
    """Deletes checkpoints that wait for a decision."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tables = TablesWithoutQuestions(StoredBytes())


class LeavesRecords(MemoryStore):
    """Deletes checkpoints and branches, and keeps their records."""

    def delete(
        self, namespace: str, checkpoints: Collection[str], protect: bool, token: str | None = None, **more: Any
    ) -> Removed:
        before = list(self._tables.records)
        removed = super().delete(namespace, checkpoints, protect, token, **more)
        for record in before:
            self._tables.records.put(record)
        return removed


class LeavesThreadsRecords(MemoryStore):
    """Deletes threads and keeps their records."""

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        before = list(self._tables.records)
        removed = super().delete_thread(namespace, thread, token)
        for record in before:
            self._tables.records.put(record)
        return removed


class ForgetsEffectsWithTheLease(MemoryStore):
    """Deletes a branch that was only leased, and its effects with it."""

    def release(self, branch: BranchKey, epoch: int, token: str, run: Record | None = None) -> None:
        super().release(branch, epoch, token, run)
        if branch not in self._tables.branches:
            self._tables.records.drop(
                record for record in self._tables.records if record.branch == branch and record.kind == "effect"
            )


def caught_by_machine(mutant: type[MemoryStore]) -> bool:
    """Tell whether the machine finds the mutant to differ from the model."""

    class Machine(StoreMachine):
        def open_backends(self) -> list[Backend]:
            return self.backends if hasattr(self, "backends") else [mutant()]

    chosen = settings(
        max_examples=600,
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
        ClaimsRunsThatAreExecuted,
        ClaimsForAnyGraph,
        ClaimsBeforeTheTime,
        ClaimsABranchTwice,
        ForgetsTheRun,
        TakesTheLeaseAlone,
        DeletesFromUnderLeases,
        LeavesTheLease,
        IgnoresVersions,
        WritesUnfenced,
        AnswersTheFenced,
        MakesWhatIsGone,
        NeverCloses,
        SparesHeadsOnly,
        LeavesRecords,
        LeavesThreadsRecords,
        ForgetsEffectsWithTheLease,
    ]
    contract: ClassVar = [*machine, ReplacesSilently, *owners, IgnoresNumbers, FencesRepetitions]

    @pytest.mark.parametrize("mutant", machine, ids=lambda mutant: mutant.__name__)
    def test_the_machine_catches_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_machine(mutant)

    @pytest.mark.parametrize("mutant", contract, ids=lambda mutant: mutant.__name__)
    def test_the_contract_catches_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_contract(mutant)

    @pytest.mark.parametrize("mutant", owners, ids=lambda mutant: mutant.__name__)
    def test_random_programs_of_owners_catch_it(self, mutant: type[MemoryStore]) -> None:
        assert caught_by_programs(mutant)

    @pytest.mark.parametrize("harness", [caught_by_machine, caught_by_contract, caught_by_programs])
    def test_the_store_they_are_made_of_is_not_caught(self, harness: Callable[[type[MemoryStore]], bool]) -> None:
        assert not harness(MemoryStore)
