"""Could one branch, written and read by many workers at once, look like this? Decided in linear time.

Checkpoint ids are unique and each names its parent, so the chain that the store holds at the end *is* the order in
which its checkpoints landed: there is no order to search for. One question remains. Are there moments at which they
landed, one after the other, such that every call had its effect between its start and its end?

    append i   landed after it started and before it was acknowledged
    read       that saw checkpoint k: k landed before the read ended, and k+1 after the read started
    conflict   on parent k: k+1 landed before the conflict was raised, or k after the call started

So every call is a bound on a moment, from above or from below. Since moments rise along the chain, they exist exactly
if no lower bound at or before a place is above an upper bound at or after it. Running maxima from the left and running
minima from the right decide that, and the two calls that contradict each other name the violation:

    kind                  what is wrong                                              how it is found
    lost                  acknowledged, but not in the chain                         places of ids
    duplicate             twice in the chain                                         places of ids
    phantom               in the chain, but never appended                           appends by id
    applied-failure       in the chain, but its append failed                        appends by id
    fork                  two with the same parent, in the chain or acknowledged     children by parent
    gap                   its parent is not the one before it                        neighbours
    seq                   numbers do not rise                                        neighbours
    misreported           an answer differs from the chain: parent, seq, epoch       the place it names
    order                 acknowledged before the start of one that precedes it      max of starts, up to it
    future-read           saw what had not started when the read ended               max of starts, up to what it saw
    stale-read            saw less than was acknowledged before it started           min of acknowledgements after that
    backward-read         saw less than another read that ended before it started    min of ends of reads after that
    dirty-read            saw what is not in the chain                               places of ids
    unjustified-conflict  its parent was the head during the whole call              max of starts; calls by time
    stale-epoch           after a higher epoch, or landed after one was granted      max of epochs; min of higher grants
    grant                 epochs granted twice, or not rising in time                grants sorted by epoch
    unjustified-fence     its epoch was the highest, and not released                min of starts of higher grants

An append with an unknown outcome may be in the chain or not; if it is, it has a lower bound like every other. Attempts
with the same id are one append: it started with the first that may have stored it, and the first acknowledgement
counts. Two calls at the same nanosecond count as concurrent.

The "or" of a conflict needs no search either: going through time, it is known at its start whether k has landed. So the
answer is exact: a history of appends, reads and conflicts is accepted if and only if such moments exist. Work and
memory are linear in the calls and the length of the chain, except for two sorts: of acknowledgements, reads and
conflicts by time, and of grants by epoch.

A conflict is not checked if its parent was not recorded, nor an epoch if its acquisition was not. Deletes, rewinds and
replaced checkpoints are not covered; the first checkpoint of a fork belongs in ``initial``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, count, pairwise
from typing import NamedTuple

from backstay.model.checkpoint import MAIN
from backstay.thread.store import Store
from support.simulation.history import (
    NEVER,
    UNSPECIFIED,
    BranchName,
    CallError,
    CallHistory,
    CallKind,
    CallOutcome,
    RecordedCall,
)


class ViolationKind(StrEnum):
    """What can be wrong with a history; the table above says how each is found."""

    LOST = "lost"  # acknowledged, but not in the chain
    DUPLICATE = "duplicate"  # twice in the chain
    PHANTOM = "phantom"  # in the chain, but never appended
    APPLIED_FAILURE = "applied-failure"  # in the chain, but its append failed
    FORK = "fork"  # two with the same parent
    GAP = "gap"  # its parent is not the one before it
    SEQ = "seq"  # numbers do not rise
    MISREPORTED = "misreported"  # an answer differs from the chain
    ORDER = "order"  # acknowledged before the start of one that precedes it
    FUTURE_READ = "future-read"  # saw what had not started
    STALE_READ = "stale-read"  # did not see what had been acknowledged
    BACKWARD_READ = "backward-read"  # did not see what another read had seen
    DIRTY_READ = "dirty-read"  # saw what is not in the chain
    UNJUSTIFIED_CONFLICT = "unjustified-conflict"  # its parent was the head during the whole call
    STALE_EPOCH = "stale-epoch"  # after a higher epoch, or landed after one was granted
    GRANT = "grant"  # epochs were granted twice, or falling
    UNJUSTIFIED_FENCE = "unjustified-fence"  # its epoch was the highest, and not released


@dataclass(frozen=True, slots=True)
class Violation:
    """One contradiction."""

    kind: ViolationKind
    branch: BranchName
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.branch}: {self.text}"


@dataclass(frozen=True)
class ChainVerdict:
    """What a check has looked at and found. It is true if nothing is wrong."""

    violations: tuple[Violation, ...]
    stored: int = 0  # checkpoints in the chains
    acknowledged: int = 0  # appends
    reads: int = 0
    conflicts: int = 0
    unknown: int = 0  # appends whose outcome their caller does not know
    unknown_applied: int = 0  # those of them that are in the chains

    @property
    def kinds(self) -> set[ViolationKind]:
        """Return the kinds of violations found."""
        return {violation.kind for violation in self.violations}

    def __bool__(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        figures = (
            f"{self.acknowledged} acknowledged, {self.conflicts} conflicts, {self.reads} reads, {self.unknown} unknown "
            f"({self.unknown_applied} applied), {self.stored} stored, {len(self.violations)} violations"
        )
        return "\n  ".join((figures, *map(str, self.violations)))


ALWAYS = -NEVER
"""The time of what existed from the start."""


class ChainLink(NamedTuple):
    """One checkpoint of a chain as the store has it; ``epoch`` if the store has it."""

    id: str
    parent_id: str | None
    seq: int
    epoch: int | None = None


Chain = Sequence[ChainLink]  # oldest first
Found = Iterator[tuple[ViolationKind, str]]
Bounds = list[tuple[int, int]]  # for each place of a chain a time, and the place it comes from


def chain_of(store: Store, thread_id: str, branch: str = MAIN) -> list[ChainLink]:
    """Return the chain of a branch, oldest first."""
    newest_first = store.thread(thread_id, branch=branch).history()
    return [ChainLink(meta.id, meta.parent_id, meta.seq) for meta in newest_first][::-1]


def chains_of(store: Store, branches: Iterable[BranchName]) -> dict[BranchName, list[ChainLink]]:
    """Return the chains of several branches, for example of all that a history names."""
    return {branch: chain_of(store, *branch) for branch in branches}


def check_chain(
    history: CallHistory, final: Mapping[BranchName, Chain], initial: Mapping[BranchName, Chain] | None = None
) -> ChainVerdict:
    """Compare the answers that workers got with the chains that the store has after they ended.

    ``initial`` are the chains that it had before they started, if any.
    """
    before = initial or {}
    by_branch: dict[BranchName, list[RecordedCall]] = {branch: [] for branch in (*before, *final)}
    for call in history.calls:
        by_branch.setdefault(call.branch, []).append(call)
    violations: list[Violation] = []
    counts: Counter[str] = Counter()
    for branch, calls in by_branch.items():
        check = _BranchCheck(branch, calls, final.get(branch, ()), before.get(branch, ()))
        violations += check.run()
        counts.update(check.counts())
    return ChainVerdict(tuple(violations), **counts)


@dataclass(slots=True)
class _Append:
    """All attempts to append one checkpoint, taken together."""

    started: int = NEVER  # the first attempt that may have stored it
    acked: int = NEVER
    failed: CallError | None = None  # how an attempt ended that stored nothing
    parents: dict[str | None, None] = field(default_factory=dict)  # the heads that attempts named
    parent_is_open: bool = False  # one attempt named no head
    seqs: dict[int, None] = field(default_factory=dict)
    epochs: dict[int | None, None] = field(default_factory=dict)

    @property
    def epoch(self) -> int | None:
        """Return the epoch it was stored with; None if it has none, or attempts carried several."""
        return next(iter(self.epochs)) if len(self.epochs) == 1 else None

    def add(self, attempt: RecordedCall) -> None:
        if attempt.outcome is CallOutcome.FAIL:
            if attempt.error is not CallError.TAKEN:  # TAKEN says nothing about this one: another checkpoint has its id
                self.failed = attempt.error
            return
        self.started = min(self.started, attempt.invoked)
        if attempt.outcome is CallOutcome.OK:
            self.acked = min(self.acked, attempt.completed)
        if attempt.parent is UNSPECIFIED:
            self.parent_is_open = True
        else:
            self.parents[attempt.parent] = None
        if attempt.seq is not None:
            self.seqs[attempt.seq] = None
        self.epochs[attempt.epoch] = None


class _BranchCheck:
    """The check of one branch: what is known of it, then what is wrong with it."""

    def __init__(self, branch: BranchName, calls: Sequence[RecordedCall], chain: Chain, initial: Chain) -> None:
        self.branch = branch
        self.chain = chain
        self.size = len(chain)
        self.initial = {link.id for link in initial}
        self.appends: dict[str, _Append] = {}
        for link in initial:
            self.appends[link.id] = _Append(started=ALWAYS, acked=ALWAYS, parent_is_open=True, seqs={link.seq: None})
        for call in calls:
            if call.action is CallKind.APPEND and call.id is not None:
                self.appends.setdefault(call.id, _Append()).add(call)
        self.reads = [o for o in calls if o.action is CallKind.READ and o.outcome is CallOutcome.OK]
        self.failures = [o for o in calls if o.action is CallKind.APPEND and o.outcome is CallOutcome.FAIL]
        self.leases = [o for o in calls if o.action in (CallKind.ACQUIRE, CallKind.RELEASE)]

    def run(self) -> Iterator[Violation]:
        steps = (
            self.find_lost_and_unexpected,
            self.find_broken_links,
            self.find_other_parents,
            self.find_other_numbers,
            self.find_wrong_order,
            self.find_wrong_reads,
            self.find_wrong_conflicts,
            self.find_wrong_grants,
            self.find_stale_epochs,
            self.find_wrong_fences,
        )
        for find in steps:
            for kind, text in find():
                yield Violation(kind, self.branch, text)

    def counts(self) -> Counter[str]:
        """Return the figures of the verdict."""
        unknown = [name for name, append in self.appends.items() if append.started < NEVER == append.acked]
        return Counter(
            stored=self.size,
            acknowledged=sum(append.acked < NEVER for append in self.appends.values()) - len(self.initial),
            reads=len(self.reads),
            conflicts=sum(failure.error is CallError.CONFLICT for failure in self.failures),
            unknown=len(unknown),
            unknown_applied=sum(name in self.places for name in unknown),
        )

    # What is known ------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> dict[str | None, int]:
        """Return the first place of each checkpoint. Nothing (None) is before the first."""
        found: dict[str | None, int] = {None: -1}
        for place, link in enumerate(self.chain):
            found.setdefault(link.id, place)
        return found

    @cached_property
    def starts(self) -> Bounds:
        """Return for each place the latest start of an append up to it."""
        return _latest_up_to([ALWAYS if append is None else append.started for append in self._placed()])

    @cached_property
    def acked(self) -> Bounds:
        """Return for each place, and the one after the last, the earliest acknowledgement from it on."""
        return _earliest_from([NEVER if append is None else append.acked for append in self._placed()])

    @cached_property
    def sights(self) -> list[tuple[int, RecordedCall]]:
        """Return the reads that saw what they could have seen, with its place."""
        placed = [(self.places[read.id], read) for read in self.reads if read.id in self.places]
        return [(place, read) for place, read in placed if place < 0 or self.starts[place][0] <= read.completed]

    @cached_property
    def seen(self) -> Bounds:
        """Return for each place, and the one after the last, the earliest end of a read that saw it or a later one."""
        ends = [NEVER] * self.size
        for place, read in self.sights:
            if place >= 0:
                ends[place] = min(ends[place], read.completed)
        return _earliest_from(ends)

    @cached_property
    def unseen(self) -> Bounds:
        """Return for each place the latest start of a read that rightly did not see it."""
        starts_unseen = [ALWAYS] * (self.size + 1)
        for place, read in self.sights:
            if self._landed_by(place + 1) >= read.invoked:
                starts_unseen[place + 1] = max(starts_unseen[place + 1], read.invoked)
        return _latest_up_to(starts_unseen)

    @cached_property
    def grants(self) -> list[tuple[int, int, int]]:
        """Return epoch, start and end of each acquisition, by epoch."""
        taken = (lease for lease in self.leases if lease.action is CallKind.ACQUIRE and lease.outcome is CallOutcome.OK)
        return sorted((lease.epoch, lease.invoked, lease.completed) for lease in taken if lease.epoch is not None)

    @cached_property
    def lasting_grants(self) -> list[tuple[int, int, int]]:
        """Return the grants since a lease was last released while the branch may have had no checkpoint.

        Such a branch is deleted with its lease, and the epochs of the next branch of that name start again.
        """
        released = (o for o in self.leases if o.action is CallKind.RELEASE and o.outcome is not CallOutcome.FAIL)
        gone = max((o.completed for o in released if o.invoked < self._landed_by(0)), default=ALWAYS)
        return [grant for grant in self.grants if grant[1] > gone]

    def _placed(self) -> Iterator[_Append | None]:
        """Yield for each place the append that landed there; None where no moment is known."""
        for place, link in enumerate(self.chain):
            append = self.appends.get(link.id)
            yield None if append is None or append.started == NEVER or self.places[link.id] != place else append

    def _link(self, name: str | None) -> ChainLink | None:
        place = self.places.get(name, -1)
        return self.chain[place] if place >= 0 else None

    def _landed_by(self, place: int) -> int:
        """Return the earliest moment at which a worker knew that the checkpoint at a place had landed."""
        return min(self.acked[place][0], self.seen[place][0])

    def _not_before(self, place: int) -> int:
        """Return the latest moment at which the checkpoint at a place cannot have landed."""
        return NEVER if place == self.size else max(self.starts[place][0], self.unseen[place][0])

    # What is wrong ------------------------------------------------------------------------------------------------

    def find_lost_and_unexpected(self) -> Found:
        """Find what is in the chain and should not be, and what is missing."""
        for place, link in enumerate(self.chain):
            append = self.appends.get(link.id)
            if self.places[link.id] != place:
                yield ViolationKind.DUPLICATE, f"{_show(link)} is in the chain twice"
            elif append is None or (append.started == NEVER and append.failed is None):
                yield ViolationKind.PHANTOM, f"no worker appended {_show(link)}"
            elif append.started == NEVER:
                yield (
                    ViolationKind.APPLIED_FAILURE,
                    f"{_show(link)} is in the chain, but its append failed: {append.failed}",
                )
        for name, append in self.appends.items():
            if append.acked < NEVER and name not in self.places:
                yield ViolationKind.LOST, f"{name} was acknowledged and is not in the chain"

    def find_broken_links(self) -> Found:
        """Find checkpoints whose parent is not the one before them, and numbers that do not rise."""
        children: dict[str | None, str] = {}
        before: ChainLink | None = None
        for place, link in enumerate(self.chain):
            if self.places[link.id] == place:  # the second of a duplicate proves nothing more
                expected = before.id if before else None
                sibling = children.setdefault(link.parent_id, link.id)
                if link.parent_id != expected and link.id not in self.initial:
                    if sibling != link.id:
                        yield ViolationKind.FORK, f"{_show(link)} has the same parent as {sibling}: {link.parent_id}"
                    else:
                        yield ViolationKind.GAP, f"{_show(link)} has the parent {link.parent_id} but follows {expected}"
                if before is not None and link.seq <= before.seq:
                    yield ViolationKind.SEQ, f"{_show(link)} follows {_show(before)}"
            before = link

    def find_other_parents(self) -> Found:
        """Find appends that were accepted on another head than they named, or that were lost with it."""
        children = {link.parent_id: link.id for link in reversed(self.chain)}
        for name, append in self.appends.items():
            link = self._link(name)
            accepted = append.acked < NEVER or (link is not None and append.started < NEVER)
            if not accepted or append.parent_is_open or (link is not None and link.parent_id in append.parents):
                continue
            siblings = {children.setdefault(parent, name): parent for parent in append.parents}
            siblings.pop(name, None)
            for sibling, parent in siblings.items():
                yield ViolationKind.FORK, f"{name} was accepted on top of {parent}, the parent of {sibling}"
            if link is not None and not siblings:
                yield (
                    ViolationKind.MISREPORTED,
                    f"{_show(link)} has the parent {link.parent_id}, which its append did not name",
                )

    def find_other_numbers(self) -> Found:
        """Find answers with other numbers or epochs than the chain has."""
        for name, append in self.appends.items():
            link = self._link(name)
            if link is None:
                continue
            for seq in append.seqs:
                if seq != link.seq:
                    yield ViolationKind.MISREPORTED, f"{_show(link)} was acknowledged as seq {seq}"
            if None not in (link.epoch, append.epoch) and link.epoch != append.epoch:
                yield (
                    ViolationKind.MISREPORTED,
                    f"{_show(link)} has epoch {link.epoch}, its append carried {append.epoch}",
                )
        for read in self.reads:
            link = self._link(read.id)
            if link is not None and read.seq is not None and read.seq != link.seq:
                yield ViolationKind.MISREPORTED, f"{_show(link)} was read as seq {read.seq}"

    def find_wrong_order(self) -> Found:
        """Find appends that come after one that started after they were acknowledged."""
        for link, append, (latest, place) in zip(self.chain, self._placed(), self.starts, strict=True):
            if append is not None and append.acked < latest:
                later = _show(self.chain[place])
                yield ViolationKind.ORDER, f"{_show(link)} was acknowledged before {later} started, but comes after it"

    def find_wrong_reads(self) -> Found:
        """Find reads that saw too little, too much, or what is not in the chain."""
        for read in self.reads:
            place = self.places.get(read.id)
            if place is None:
                yield ViolationKind.DIRTY_READ, f"a read saw {read.id}, which is not in the chain"
                continue
            starts = self.starts[place] if place >= 0 else (ALWAYS, place)
            acked, seen = self.acked[place + 1], self.seen[place + 1]
            if starts[0] > read.completed:
                future = _show(self.chain[starts[1]])
                yield ViolationKind.FUTURE_READ, f"a read saw {read.id} and ended before the append of {future} started"
            elif acked[0] < read.invoked:
                missed = _show(self.chain[acked[1]])
                yield ViolationKind.STALE_READ, f"a read saw {read.id} and started after {missed} had been acknowledged"
            elif seen[0] < read.invoked:
                missed = _show(self.chain[seen[1]])
                yield ViolationKind.BACKWARD_READ, f"a read saw {read.id} and started after another had seen {missed}"

    def find_wrong_conflicts(self) -> Found:
        """Find conflicts that were raised although the head was the append's parent during the whole call.

        Going through time, ``landed`` is the last place that has certainly landed. A conflict that starts after its
        parent has landed proves, at its end, that the next one has landed too.
        """
        places = [(append.acked, place) for place, append in enumerate(self._placed()) if append is not None]
        places += [(read.completed, place) for place, read in self.sights]
        moments: list[tuple[int, bool, int, RecordedCall | None]] = [
            (time, True, place, None) for time, place in places
        ]
        for failure in self.failures:
            place = None if failure.parent is UNSPECIFIED else self.places.get(failure.parent)
            if place is not None and failure.error is CallError.CONFLICT:
                moments += [(failure.invoked, False, place, failure), (failure.completed, True, place + 1, failure)]
        landed, proofs = -1, set[int]()
        for time, ends, place, conflict in sorted(moments, key=lambda moment: moment[:2]):
            if not ends:
                if place <= landed:
                    proofs.add(id(conflict))
            elif conflict is None:
                landed = max(landed, place)
            elif id(conflict) in proofs:
                if self._not_before(place) > time:
                    text = f"{conflict.id} was refused while its parent {conflict.parent} was the head"
                    yield ViolationKind.UNJUSTIFIED_CONFLICT, text
                else:
                    landed = max(landed, place)

    def find_wrong_grants(self) -> Found:
        """Find acquisitions that got no higher epoch than those before them."""
        latest = ALWAYS
        for before, after in pairwise(self.lasting_grants):
            latest = max(latest, before[1])
            if before[0] == after[0]:
                yield ViolationKind.GRANT, f"epoch {after[0]} was granted twice"
            elif after[2] < latest:
                yield ViolationKind.GRANT, f"epoch {after[0]} was granted before the acquisition of a lower one started"

    def find_stale_epochs(self) -> Found:
        """Find epochs that fall along the chain, or land after a higher one was granted."""
        carried = [
            append.epoch if append is not None and link.epoch is None else link.epoch
            for link, append in zip(self.chain, self._placed(), strict=True)
        ]
        granted = _of_higher(carried, ((epoch, completed) for epoch, _, completed in self.lasting_grants))
        highest: tuple[int, str] | None = None
        for place, (link, epoch) in enumerate(zip(self.chain, carried, strict=True)):
            if epoch is None:
                continue
            if highest is not None and epoch < highest[0]:
                yield (
                    ViolationKind.STALE_EPOCH,
                    f"{_show(link)} with epoch {epoch} follows {highest[1]} with {highest[0]}",
                )
            elif self._not_before(place) > granted[epoch]:
                yield (
                    ViolationKind.STALE_EPOCH,
                    f"{_show(link)} with epoch {epoch} landed after a higher one was granted",
                )
            else:
                highest = (epoch, link.id)

    def find_wrong_fences(self) -> Found:
        """Find holders that were fenced although they had not released the lease and no other worker took it."""
        fenced = [failure for failure in self.failures if failure.error is CallError.FENCED]
        # A released lease counts as taken by the next; an acquisition of unknown outcome may have got any epoch.
        changes = [
            (NEVER if lease.epoch is None else lease.epoch + (lease.action is CallKind.RELEASE), lease.invoked)
            for lease in self.leases
            if lease.outcome is not CallOutcome.FAIL
        ]
        higher = _of_higher((failure.epoch for failure in fenced), changes)
        granted = {epoch for epoch, _, _ in self.grants}
        for failure in fenced:
            if failure.epoch in granted and higher[failure.epoch] > failure.completed:
                yield (
                    ViolationKind.UNJUSTIFIED_FENCE,
                    f"{failure.id} was refused while its epoch {failure.epoch} was the highest",
                )


def _latest_up_to(times: Sequence[int]) -> Bounds:
    return list(accumulate(zip(times, count(), strict=False), max))


def _earliest_from(times: Sequence[int]) -> Bounds:
    backwards = zip((NEVER, *reversed(times)), count(len(times), -1), strict=False)
    return list(accumulate(backwards, min))[::-1]


def _of_higher(epochs: Iterable[int | None], times: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return for each epoch the earliest of the times that belong to a higher one."""
    own = {epoch: NEVER for epoch in epochs if epoch is not None}
    for epoch, moment in times:
        own[epoch] = min(own.get(epoch, NEVER), moment)
    found, earliest = {}, NEVER
    for epoch in sorted(own, reverse=True):
        found[epoch] = earliest
        earliest = min(earliest, own[epoch])
    return found


def _show(link: ChainLink) -> str:
    return f"{link.id} (seq {link.seq})"
