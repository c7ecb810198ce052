"""May one line of checkpoints, written and read by many at once, look like this? Decided in linear time.

Checkpoint ids are unique and each names its parent, so the chain that is in the store at the end *is* the order in
which its checkpoints landed: no order has to be searched for. What remains to ask is whether there are moments at which
they landed, one after the other, such that every call had its effect between its beginning and its end:

    append i   landed after it began and before it was acknowledged
    read       that saw checkpoint k: k landed before the read ended, and k+1 after the read began
    conflict   on parent k: k+1 landed before the conflict was told, or k after the call began

So every call is a bound on a moment, from above or from below. Since moments rise along the chain, they exist exactly
if no lower bound at or before a place is above an upper bound at or behind it. Running maxima from the left and running
minima from the right tell that, and which two calls contradict each other names the violation:

    kind                  what is wrong                                              how it is found
    lost                  acknowledged, but not in the chain                         places of ids
    duplicate             twice in the chain                                         places of ids
    phantom               in the chain, but nobody appended it                       appends by id
    applied-failure       in the chain, but its append was told to have failed       appends by id
    fork                  two with the same parent, in the chain or acknowledged     children by parent
    gap                   its parent is not the one before it                        neighbours
    seq                   numbers do not rise                                        neighbours
    misreported           an answer differs from the chain: parent, seq, epoch       the place it names
    order                 acknowledged before another began that stands before it    max of begins, up to it
    future-read           saw what had not begun when the read ended                 max of begins, up to what it saw
    stale-read            saw less than was acknowledged before it began             min of acknowledgements behind that
    backward-read         saw less than another read that ended before it began      min of ends of reads behind that
    dirty-read            saw what is not in the chain                               places of ids
    unjustified-conflict  its parent was the head during the whole call              max of begins; calls by time
    stale-epoch           behind a higher epoch, or landed after one was granted     max of epochs; min of higher grants
    grant                 epochs granted twice, or not rising in time                grants sorted by epoch
    unjustified-fence     its epoch was the highest, and not given back              min of begins of higher grants

An append of unknown outcome may be in the chain or not; if it is, it is bounded from below as every other. Attempts
with the same id are one append: it began with the first that may have stored it, and the first acknowledgement counts.
Two calls at the same nanosecond count as concurrent.

The "or" of a conflict needs no search either: going through time, one knows at its beginning whether k has landed. So
the answer is exact: a history of appends, reads and conflicts is accepted if and only if such moments exist. Work and
memory are linear in the calls and the length of the chain, but for two sorts: of acknowledgements, reads and conflicts
by time, and of grants by epoch.

Not judged is a conflict whose parent was not recorded, and an epoch whose acquisition was not. Deletes, rewinds and
replaced checkpoints are outside of it; a fork's first checkpoint belongs into ``initial``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, pairwise
from typing import NamedTuple

from backstay.model.checkpoint import MAIN
from backstay.testing.history import NEVER, UNTOLD, Action, Branch, Error, History, Operation, Outcome
from backstay.testing.verdict import Kind, Verdict, Violation
from backstay.thread.store import Store

ALWAYS = -NEVER
"""The time of what was there from the beginning."""


class Link(NamedTuple):
    """One checkpoint of a chain as the store has it; ``epoch`` if the store keeps it."""

    id: str
    parent_id: str | None
    seq: int
    epoch: int | None = None


Chain = Sequence[Link]  # oldest first
Found = Iterator[tuple[Kind, str]]
Bounds = list[tuple[int, int]]  # for each place of a chain a time, and the place it comes from


def chain_of(store: Store, thread_id: str, branch: str = MAIN) -> list[Link]:
    """Return what a store has of a branch, oldest first."""
    newest_first = store.thread(thread_id, branch=branch).history()
    return [Link(meta.id, meta.parent_id, meta.seq) for meta in newest_first][::-1]


def chains_of(store: Store, branches: Iterable[Branch]) -> dict[Branch, list[Link]]:
    """Return what a store has of several branches, for instance of all that a history names."""
    return {branch: chain_of(store, *branch) for branch in branches}


def check_chain(
    history: History, final: Mapping[Branch, Chain], initial: Mapping[Branch, Chain] | None = None
) -> Verdict:
    """Compare what workers were told with the chains that the store has after they ended.

    ``initial`` are the chains that it had before they began, if it had any.
    """
    before = initial or {}
    calls: dict[Branch, list[Operation]] = {branch: [] for branch in (*before, *final)}
    for operation in history.operations:
        calls.setdefault(operation.branch, []).append(operation)
    violations: list[Violation] = []
    counts: Counter[str] = Counter()
    for branch, operations in calls.items():
        check = _Check(branch, operations, final.get(branch, ()), before.get(branch, ()))
        violations += check.run()
        counts.update(check.counts())
    return Verdict(tuple(violations), **counts)


@dataclass(slots=True)
class _Append:
    """All that was told about one checkpoint: the attempts to append it, taken together."""

    began: int = NEVER  # the first attempt that may have stored it
    acked: int = NEVER
    failed: Error | None = None  # how an attempt ended that stored nothing
    parents: dict[str | None, None] = field(default_factory=dict)  # the heads that attempts were to build on
    parent_is_open: bool = False  # one did not say
    seqs: dict[int, None] = field(default_factory=dict)
    epochs: dict[int | None, None] = field(default_factory=dict)

    @property
    def epoch(self) -> int | None:
        """Return the epoch it was stored with; None if it has none, or attempts carried several."""
        return next(iter(self.epochs)) if len(self.epochs) == 1 else None

    def add(self, attempt: Operation) -> None:
        if attempt.outcome is Outcome.FAIL:
            if attempt.error is not Error.TAKEN:  # which says nothing about this one: another has its id
                self.failed = attempt.error
            return
        self.began = min(self.began, attempt.invoked)
        if attempt.outcome is Outcome.OK:
            self.acked = min(self.acked, attempt.completed)
        if attempt.parent is UNTOLD:
            self.parent_is_open = True
        else:
            self.parents[attempt.parent] = None
        if attempt.seq is not None:
            self.seqs[attempt.seq] = None
        self.epochs[attempt.epoch] = None


class _Check:
    """The check of one branch: what is known of it, then what is wrong with it."""

    def __init__(self, branch: Branch, operations: Sequence[Operation], chain: Chain, initial: Chain) -> None:
        self.branch = branch
        self.chain = chain
        self.size = len(chain)
        self.initial = {link.id for link in initial}
        self.appends: dict[str, _Append] = {}
        for link in initial:
            self.appends[link.id] = _Append(began=ALWAYS, acked=ALWAYS, parent_is_open=True, seqs={link.seq: None})
        for operation in operations:
            if operation.action is Action.APPEND and operation.id is not None:
                self.appends.setdefault(operation.id, _Append()).add(operation)
        self.reads = [o for o in operations if o.action is Action.READ and o.outcome is Outcome.OK]
        self.failures = [o for o in operations if o.action is Action.APPEND and o.outcome is Outcome.FAIL]
        self.leases = [o for o in operations if o.action in (Action.ACQUIRE, Action.RELEASE)]

    def run(self) -> Iterator[Violation]:
        steps = (
            self._find_lost_and_strangers,
            self._find_broken_links,
            self._find_other_parents,
            self._find_other_numbers,
            self._find_wrong_order,
            self._find_wrong_reads,
            self._find_wrong_conflicts,
            self._find_wrong_grants,
            self._find_stale_epochs,
            self._find_wrong_fences,
        )
        for find in steps:
            for kind, text in find():
                yield Violation(kind, self.branch, text)

    def counts(self) -> Counter[str]:
        """Return the figures of the verdict."""
        unknown = [name for name, append in self.appends.items() if append.began < NEVER == append.acked]
        return Counter(
            stored=self.size,
            acknowledged=sum(append.acked < NEVER for append in self.appends.values()) - len(self.initial),
            reads=len(self.reads),
            conflicts=sum(failure.error is Error.CONFLICT for failure in self.failures),
            unknown=len(unknown),
            unknown_applied=sum(name in self.places for name in unknown),
        )

    # What is known ------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> dict[str | None, int]:
        """Return where each checkpoint first stands. Nothing (None) stands before the first."""
        found: dict[str | None, int] = {None: -1}
        for place, link in enumerate(self.chain):
            found.setdefault(link.id, place)
        return found

    @cached_property
    def begun(self) -> Bounds:
        """Return for each place the latest beginning of an append up to it."""
        return _latest_up_to([ALWAYS if append is None else append.began for append in self._placed()])

    @cached_property
    def acked(self) -> Bounds:
        """Return for each place, and the one behind the last, the earliest acknowledgement from it on."""
        return _earliest_from([NEVER if append is None else append.acked for append in self._placed()])

    @cached_property
    def sights(self) -> list[tuple[int, Operation]]:
        """Return the reads that saw what they could have seen, with its place."""
        placed = [(self.places[read.id], read) for read in self.reads if read.id in self.places]
        return [(place, read) for place, read in placed if place < 0 or self.begun[place][0] <= read.completed]

    @cached_property
    def seen(self) -> Bounds:
        """Return for each place, and the one behind the last, the earliest end of a read that saw it or a later one."""
        ends = [NEVER] * self.size
        for place, read in self.sights:
            if place >= 0:
                ends[place] = min(ends[place], read.completed)
        return _earliest_from(ends)

    @cached_property
    def unseen(self) -> Bounds:
        """Return for each place the latest beginning of a read that rightly did not see it."""
        begins = [ALWAYS] * (self.size + 1)
        for place, read in self.sights:
            if self._landed_by(place + 1) >= read.invoked:
                begins[place + 1] = max(begins[place + 1], read.invoked)
        return _latest_up_to(begins)

    @cached_property
    def grants(self) -> list[tuple[int, int, int]]:
        """Return epoch, beginning and end of each acquisition, by epoch."""
        taken = (lease for lease in self.leases if lease.action is Action.ACQUIRE and lease.outcome is Outcome.OK)
        return sorted((lease.epoch, lease.invoked, lease.completed) for lease in taken if lease.epoch is not None)

    @cached_property
    def lasting_grants(self) -> list[tuple[int, int, int]]:
        """Return the grants since a lease was last given back while the branch may have had no checkpoint.

        Such a branch may go with its lease, and the epochs of the next one of that name begin anew.
        """
        given_back = (o for o in self.leases if o.action is Action.RELEASE and o.outcome is not Outcome.FAIL)
        gone = max((o.completed for o in given_back if o.invoked < self._landed_by(0)), default=ALWAYS)
        return [grant for grant in self.grants if grant[1] > gone]

    def _placed(self) -> Iterator[_Append | None]:
        """Yield for each place the append that was to land there; None where no moment is known."""
        for place, link in enumerate(self.chain):
            append = self.appends.get(link.id)
            yield None if append is None or append.began == NEVER or self.places[link.id] != place else append

    def _link(self, name: str | None) -> Link | None:
        place = self.places.get(name, -1)
        return self.chain[place] if place >= 0 else None

    def _landed_by(self, place: int) -> int:
        """Return the earliest moment at which somebody knew that the checkpoint at a place had landed."""
        return min(self.acked[place][0], self.seen[place][0])

    def _not_before(self, place: int) -> int:
        """Return the latest moment at which the checkpoint at a place cannot have landed."""
        return NEVER if place == self.size else max(self.begun[place][0], self.unseen[place][0])

    # What is wrong ------------------------------------------------------------------------------------------------

    def _find_lost_and_strangers(self) -> Found:
        """Find what is in the chain and should not be, and the other way round."""
        for place, link in enumerate(self.chain):
            append = self.appends.get(link.id)
            if self.places[link.id] != place:
                yield Kind.DUPLICATE, f"{_show(link)} is in the chain twice"
            elif append is None or (append.began == NEVER and append.failed is None):
                yield Kind.PHANTOM, f"nobody appended {_show(link)}"
            elif append.began == NEVER:
                yield Kind.APPLIED_FAILURE, f"{_show(link)} is in the chain, but its append failed: {append.failed}"
        for name, append in self.appends.items():
            if append.acked < NEVER and name not in self.places:
                yield Kind.LOST, f"{name} was acknowledged and is not in the chain"

    def _find_broken_links(self) -> Found:
        """Find checkpoints whose parent is not the one before them, and numbers that do not rise."""
        children: dict[str | None, str] = {}
        before: Link | None = None
        for place, link in enumerate(self.chain):
            if self.places[link.id] == place:  # the second of a duplicate proves nothing more
                expected = before.id if before else None
                sibling = children.setdefault(link.parent_id, link.id)
                if link.parent_id != expected and link.id not in self.initial:
                    if sibling != link.id:
                        yield Kind.FORK, f"{_show(link)} has the same parent as {sibling}: {link.parent_id}"
                    else:
                        yield Kind.GAP, f"{_show(link)} has the parent {link.parent_id} but follows {expected}"
                if before is not None and link.seq <= before.seq:
                    yield Kind.SEQ, f"{_show(link)} follows {_show(before)}"
            before = link

    def _find_other_parents(self) -> Found:
        """Find appends that were accepted on top of another head than they asked for, or got lost with it."""
        children = {link.parent_id: link.id for link in reversed(self.chain)}
        for name, append in self.appends.items():
            link = self._link(name)
            accepted = append.acked < NEVER or (link is not None and append.began < NEVER)
            if not accepted or append.parent_is_open or (link is not None and link.parent_id in append.parents):
                continue
            siblings = {children.setdefault(parent, name): parent for parent in append.parents}
            siblings.pop(name, None)
            for sibling, parent in siblings.items():
                yield Kind.FORK, f"{name} was accepted on top of {parent}, the parent of {sibling}"
            if link is not None and not siblings:
                yield Kind.MISREPORTED, f"{_show(link)} has the parent {link.parent_id}, which it was not to build on"

    def _find_other_numbers(self) -> Found:
        """Find answers with other numbers or epochs than the chain has."""
        for name, append in self.appends.items():
            link = self._link(name)
            if link is None:
                continue
            for seq in append.seqs:
                if seq != link.seq:
                    yield Kind.MISREPORTED, f"{_show(link)} was acknowledged as seq {seq}"
            if None not in (link.epoch, append.epoch) and link.epoch != append.epoch:
                yield Kind.MISREPORTED, f"{_show(link)} has epoch {link.epoch}, its append carried {append.epoch}"
        for read in self.reads:
            link = self._link(read.id)
            if link is not None and read.seq is not None and read.seq != link.seq:
                yield Kind.MISREPORTED, f"{_show(link)} was read as seq {read.seq}"

    def _find_wrong_order(self) -> Found:
        """Find appends that stand behind one that began after they were acknowledged."""
        for link, append, (latest, place) in zip(self.chain, self._placed(), self.begun, strict=True):
            if append is not None and append.acked < latest:
                later = _show(self.chain[place])
                yield Kind.ORDER, f"{_show(link)} was acknowledged before {later} began, but stands behind it"

    def _find_wrong_reads(self) -> Found:
        """Find reads that saw too little, too much, or what is not there."""
        for read in self.reads:
            place = self.places.get(read.id)
            if place is None:
                yield Kind.DIRTY_READ, f"a read saw {read.id}, which is not in the chain"
                continue
            begun = self.begun[place] if place >= 0 else (ALWAYS, place)
            acked, seen = self.acked[place + 1], self.seen[place + 1]
            if begun[0] > read.completed:
                unborn = _show(self.chain[begun[1]])
                yield Kind.FUTURE_READ, f"a read saw {read.id} and ended before the append of {unborn} began"
            elif acked[0] < read.invoked:
                missed = _show(self.chain[acked[1]])
                yield Kind.STALE_READ, f"a read saw {read.id} and began after {missed} had been acknowledged"
            elif seen[0] < read.invoked:
                missed = _show(self.chain[seen[1]])
                yield Kind.BACKWARD_READ, f"a read saw {read.id} and began after another had seen {missed}"

    def _find_wrong_conflicts(self) -> Found:
        """Find conflicts that were told although the head was the append's parent during the whole call.

        Going through time, ``landed`` is the last place that has certainly landed. A conflict that begins when its
        parent has is a proof, at its end, that the next one has too.
        """
        places = [(append.acked, place) for place, append in enumerate(self._placed()) if append is not None]
        places += [(read.completed, place) for place, read in self.sights]
        moments: list[tuple[int, bool, int, Operation | None]] = [(time, True, place, None) for time, place in places]
        for failure in self.failures:
            place = None if failure.parent is UNTOLD else self.places.get(failure.parent)
            if place is not None and failure.error is Error.CONFLICT:
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
                    yield Kind.UNJUSTIFIED_CONFLICT, text
                else:
                    landed = max(landed, place)

    def _find_wrong_grants(self) -> Found:
        """Find acquisitions that got no higher epoch than those before them."""
        latest = ALWAYS
        for before, after in pairwise(self.lasting_grants):
            latest = max(latest, before[1])
            if before[0] == after[0]:
                yield Kind.GRANT, f"epoch {after[0]} was granted twice"
            elif after[2] < latest:
                yield Kind.GRANT, f"epoch {after[0]} was granted before the acquisition of a lower one began"

    def _find_stale_epochs(self) -> Found:
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
                yield Kind.STALE_EPOCH, f"{_show(link)} with epoch {epoch} follows {highest[1]} with {highest[0]}"
            elif self._not_before(place) > granted[epoch]:
                yield Kind.STALE_EPOCH, f"{_show(link)} with epoch {epoch} landed after a higher one was granted"
            else:
                highest = (epoch, link.id)

    def _find_wrong_fences(self) -> Found:
        """Find holders that were fenced although nobody can have taken the lease and they had not given it back."""
        fenced = [failure for failure in self.failures if failure.error is Error.FENCED]
        # A lease given back is as good as taken by the next; an acquisition of unknown outcome may have got any epoch.
        changes = [
            (NEVER if lease.epoch is None else lease.epoch + (lease.action is Action.RELEASE), lease.invoked)
            for lease in self.leases
            if lease.outcome is not Outcome.FAIL
        ]
        higher = _of_higher((failure.epoch for failure in fenced), changes)
        granted = {epoch for epoch, _, _ in self.grants}
        for failure in fenced:
            if failure.epoch in granted and higher[failure.epoch] > failure.completed:
                yield (
                    Kind.UNJUSTIFIED_FENCE,
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


def _show(link: Link) -> str:
    return f"{link.id} (seq {link.seq})"
