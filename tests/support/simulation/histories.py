"""Where the histories come from that the chain checker is tried with.

Workers that race for the head of a branch, in threads or processes; stores that are wrong on purpose; a simulated
race, right by construction; ways to spoil it; and a search that finds out slowly what the checker knows fast.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import backstay
from backstay.errors import Conflict, Fenced
from support.simulation.chain import ChainLink, ChainVerdict, ViolationKind, check_chain
from support.simulation.history import (
    NEVER,
    UNSPECIFIED,
    BranchName,
    CallError,
    CallHistory,
    CallKind,
    CallOutcome,
    CallRecorder,
    Parent,
    RecordedCall,
    RecordedThread,
)

B = BranchName("t")
SHARED = "shared"
ROUNDS_WITHOUT_END = 1_000_000

# Racing workers -----------------------------------------------------------------------------------------------------


def race(recorded: RecordedThread, rounds: int, seed: int, each_round: Callable[[], object] = lambda: None) -> None:
    """Look and save, now and then without looking: what others saved meanwhile is then a conflict."""
    rng = Random(seed)
    for number in range(rounds):
        if rng.random() < 0.8:
            recorded.latest()
        try:
            if rng.random() < 0.5:
                recorded.save({"by": seed, "n": number})
            else:
                recorded.append(set={"by": seed, "n": number})
        except Conflict:
            recorded.latest()
        each_round()


def race_as_process(path: str, history: str, rounds: int, seed: int) -> None:
    """Race with other processes, and say after each round that one more is done."""
    with backstay.open(path) as store, CallRecorder(history) as recorder:
        race(RecordedThread(store.thread(SHARED), recorder), rounds, seed, lambda: os.write(1, b"\n"))


# Wrong stores -------------------------------------------------------------------------------------------------------


class Right:
    """Passes everything on to a real thread; what is wrong comes in the subclasses."""

    def __init__(self, thread: backstay.Thread) -> None:
        self.thread = thread
        self.id = thread.id
        self.branch = thread.branch
        self.append = thread.append

    def save(self, state: Mapping[str, Any], **options: Any) -> backstay.Checkpoint:
        return self.thread.save(state, **options)

    def latest(self) -> backstay.Checkpoint | None:
        return self.thread.latest()


class LastWriterWins(Right):
    """Takes every save, whatever its writer has seen."""

    def save(self, state: Mapping[str, Any], **options: Any) -> backstay.Checkpoint:
        try:
            return super().save(state, **options)
        except Conflict:
            self.thread.latest()
            return super().save(state, **options)


class CachedReads(Right):
    """Answers from memory what it has once read or written, as if nobody else wrote."""

    cached: backstay.Checkpoint | None = None

    def save(self, state: Mapping[str, Any], **options: Any) -> backstay.Checkpoint:
        self.cached = super().save(state, **options)
        return self.cached

    def latest(self) -> backstay.Checkpoint | None:
        self.cached = self.cached or super().latest()
        return self.cached


class Register:
    """The smallest store with leases: a chain and an epoch. It shares nothing with the library but the errors."""

    def __init__(self) -> None:
        self.chain: list[ChainLink] = []
        self.epoch = 0

    @property
    def head(self) -> ChainLink | None:
        return self.chain[-1] if self.chain else None

    def acquire(self) -> int:
        self.epoch += 1
        return self.epoch

    def append(self, name: str, parent: str | None, epoch: int) -> int:
        """Add a checkpoint and return its number; if it is there already, return that."""
        for link in self.chain:
            if link.id == name:
                return link.seq
        self.check(epoch)
        if parent != (self.head.id if self.head else None):
            raise Conflict(f"{parent} is not the newest")
        self.chain.append(ChainLink(name, parent, len(self.chain) + 1))
        return len(self.chain)

    def check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced("a newer owner holds this", epoch=epoch, current=self.epoch)


class Unfenced(Register):
    """Trusts that whoever lost the lease has noticed."""

    def check(self, epoch: int) -> None:
        pass


# A simulated race ---------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """Calls on one branch and the chain they left."""

    calls: list[RecordedCall]
    chain: list[ChainLink]

    def judged(self) -> ChainVerdict:
        return check_chain(CallHistory(self.calls), {B: self.chain})

    def acknowledged(self) -> list[tuple[int, int]]:
        """Return the places whose append was acknowledged, each with the call that said so."""
        places = {link.id: place for place, link in enumerate(self.chain)}
        return [
            (places[call.id], number)
            for number, call in enumerate(self.calls)
            if call.action is CallKind.APPEND and call.outcome is CallOutcome.OK and call.id in places
        ]

    def reads(self) -> list[int]:
        return [number for number, call in enumerate(self.calls) if call.action is CallKind.READ]

    def end(self) -> int:
        """Return a time after everything."""
        times = (time for call in self.calls for time in (call.invoked, call.completed) if time != NEVER)
        return max(times, default=0) + 1

    def with_call(self, number: int, **changes: Any) -> Story:
        calls = list(self.calls)
        calls[number] = replace(calls[number], **changes)
        return Story(calls, self.chain)

    def with_calls(self, *calls: RecordedCall) -> Story:
        return Story([*self.calls, *calls], self.chain)

    def with_chain(self, links: list[ChainLink]) -> Story:
        return Story(self.calls, links)


def simulate(rng: Random, count: int, *, leases: bool = True, retries: bool = True) -> Story:
    """Play calls on a register: each begins, has its effect and ends at random moments, all different."""
    store, calls, names = Register(), list[RecordedCall](), list[str]()
    moments = []
    for number in range(count):
        begin = rng.randrange(3 * count)
        effect = begin + rng.randint(1, 10)
        times = (begin, effect, effect + rng.randint(1, 10))
        moments.append([3 * (time * count + number) + phase for phase, time in enumerate(times)])
    for begin, _, end in sorted(moments, key=lambda times: times[1]):
        call = RecordedCall(action=CallKind.READ, branch=B, invoked=begin, completed=end)
        dice = rng.random()
        if dice < 0.35:
            seen = store.head
            told = {"id": seen.id, "seq": seen.seq} if seen else {"id": None}
            calls.append(replace(call, outcome=CallOutcome.OK, **told))
        elif dice < 0.42 and leases:
            calls.append(replace(call, action=CallKind.ACQUIRE, outcome=CallOutcome.OK, epoch=store.acquire()))
        else:
            again = retries and names and rng.random() < 0.1
            names.append(rng.choice(names) if again else f"c{len(names)}")
            calls.append(_append(rng, store, replace(call, action=CallKind.APPEND, id=names[-1])))
    return Story(sorted(calls, key=lambda call: call.invoked), store.chain)


def _append(rng: Random, store: Register, call: RecordedCall) -> RecordedCall:
    """Append on the head or on an old one, under the current epoch or an old one; tell the outcome or not."""
    links = [None, *store.chain]
    base = links[-1] if rng.random() < 0.7 else rng.choice(links)
    parent = base.id if base else None
    epoch = store.epoch if rng.random() < 0.8 else rng.randint(0, store.epoch)
    call = replace(call, parent=parent, epoch=epoch or None)
    if rng.random() < 0.1:
        return replace(call, outcome=CallOutcome.FAIL, error=CallError.REFUSED)
    if rng.random() < 0.05:
        return replace(call, completed=NEVER)
    try:
        told = replace(call, outcome=CallOutcome.OK, seq=store.append(call.id or "", parent, epoch))
    except Conflict:
        told = replace(call, outcome=CallOutcome.FAIL, error=CallError.CONFLICT)
    except Fenced:
        told = replace(call, outcome=CallOutcome.FAIL, error=CallError.FENCED)
    return told if rng.random() < 0.9 else replace(call, completed=NEVER)


# A story told in a line ---------------------------------------------------------------------------------------------

CALL = re.compile(r"(?P<sign>[+~]?)(?P<id>\w+|-)(<(?P<parent>\w+|[-?]))?(#(?P<seq>\d+))?(@(?P<epoch>\d))? ")
TIME = re.compile(r"(?P<begin>\d+)\.\.(?P<end>\d*) ?(?P<error>\w*)")
LINK = re.compile(r"(?P<id>\w+)(<(?P<parent>\w+))?(#(?P<seq>\d+))?(@(?P<epoch>\d+))?")


def told(text: str) -> Story:
    """Read a story: its calls, then the chain.

    ``b<a 30..40`` appends b on top of a, from 30 to 40; ``-`` is nothing, ``?`` is not told, no end is an unknown
    outcome, and a word at the end is an error. ``a 30..40`` is a read that saw a. ``#`` is a seq, ``@`` an epoch.
    ``+1 30..40`` acquires epoch 1, ``~1 30..40`` gives it back.
    """
    calls, _, links = text.partition("=>")
    chain: list[ChainLink] = []
    for place, match in enumerate(map(LINK.fullmatch, links.split()), 1):
        assert match is not None, text
        parent = match["parent"] or (chain[-1].id if chain else None)
        epoch = int(match["epoch"]) if match["epoch"] else None
        chain.append(ChainLink(match["id"], parent, int(match["seq"] or place), epoch))
    return Story([_told_call(each.strip()) for each in calls.split(",")], chain)


def _told_call(text: str) -> RecordedCall:
    what = CALL.match(text)
    when = TIME.fullmatch(text, what.end()) if what else None
    assert what is not None
    assert when is not None, text
    outcome = CallOutcome.FAIL if when["error"] else CallOutcome.OK if when["end"] else CallOutcome.UNKNOWN
    epoch = what["id"] if what["sign"] else what["epoch"]
    signs = {"+": CallKind.ACQUIRE, "~": CallKind.RELEASE, "": CallKind.APPEND if what["parent"] else CallKind.READ}
    return RecordedCall(
        action=signs[what["sign"]],
        branch=B,
        invoked=int(when["begin"]),
        completed=int(when["end"] or NEVER),
        outcome=outcome,
        error=CallError(when["error"]) if when["error"] else None,
        id=None if what["id"] == "-" or what["sign"] else what["id"],
        parent={"-": None, "?": UNSPECIFIED}.get(what["parent"] or "?", what["parent"]),
        seq=int(what["seq"]) if what["seq"] else None,
        epoch=int(epoch) if epoch else None,
    )


# Ways to spoil it ---------------------------------------------------------------------------------------------------


def relinked(links: list[ChainLink]) -> list[ChainLink]:
    """Return links in this order as if they had always been in it: whole, and numbered as before."""
    seqs, parents = sorted(link.seq for link in links), [None, *(link.id for link in links)]
    return [link._replace(parent_id=parents[place], seq=seqs[place]) for place, link in enumerate(links)]


def lose_one(story: Story, rng: Random) -> Story:
    place, _ = rng.choice(story.acknowledged())
    return story.with_chain(relinked([link for other, link in enumerate(story.chain) if other != place]))


def swap_two(story: Story, rng: Random) -> Story:
    often = Counter(call.id for call in story.calls if call.action is CallKind.APPEND)
    once = [often[link.id] == 1 for link in story.chain]  # a second attempt may name the parent that it gets now
    place = rng.choice([place for place, (one, other) in enumerate(pairwise(once)) if one and other])
    links = list(story.chain)
    links[place : place + 2] = links[place + 1], links[place]
    return story.with_chain(relinked(links))


def repeat_one(story: Story, rng: Random) -> Story:
    link = rng.choice(story.chain)
    return story.with_chain([*story.chain, ChainLink(link.id, story.chain[-1].id, story.chain[-1].seq + 1)])


def add_a_stranger(story: Story, _: Random) -> Story:
    return story.with_chain(relinked([*story.chain, ChainLink("stranger", None, NEVER)]))


def apply_a_failure(story: Story, rng: Random) -> Story:
    tried = {call.id for call in story.calls if call.outcome is not CallOutcome.FAIL}
    failed = [call for call in story.calls if call.error is not None and call.id not in tried]
    return story.with_chain(relinked([*story.chain, ChainLink(rng.choice(failed).id or "", None, NEVER)]))


def cut_a_link(story: Story, rng: Random) -> Story:
    place, links = rng.randrange(len(story.chain)), list(story.chain)
    links[place] = links[place]._replace(parent_id="elsewhere")
    return story.with_chain(links)


def repeat_a_number(story: Story, rng: Random) -> Story:
    place, links = rng.randrange(1, len(story.chain)), list(story.chain)
    links[place] = links[place]._replace(seq=links[place - 1].seq)
    return story.with_chain(links)


def tell_another_number(story: Story, rng: Random) -> Story:
    place, number = rng.choice(story.acknowledged())
    return story.with_call(number, seq=story.chain[place].seq + 1)


def acknowledge_too_early(story: Story, rng: Random) -> Story:
    _, number = rng.choice([found for found in story.acknowledged() if found[0] > 0])
    return story.with_call(number, invoked=-2, completed=-1)


def read_too_little(story: Story, rng: Random) -> Story:
    late = [
        (number, story.chain[place].parent_id)
        for place, acknowledgement in story.acknowledged()
        for number in story.reads()
        if story.calls[acknowledgement].completed < story.calls[number].invoked
    ]
    number, seen = rng.choice(late)
    return story.with_call(number, id=seen, seq=None)


def read_too_much(story: Story, rng: Random) -> Story:
    began: dict[str | None, int] = {}
    for call in story.calls:
        if call.action is CallKind.APPEND and call.outcome is not CallOutcome.FAIL:
            began.setdefault(call.id, call.invoked)
    early = [
        (number, link)
        for link in story.chain
        for number in story.reads()
        if story.calls[number].completed < began[link.id]
    ]
    number, seen = rng.choice(early)
    return story.with_call(number, id=seen.id, seq=None)


def read_what_is_not_there(story: Story, rng: Random) -> Story:
    return story.with_call(rng.choice(story.reads()), id="nowhere", seq=None)


def _after(story: Story, order: int, action: CallKind, **told: Any) -> RecordedCall:
    """Return a call that comes after all others, as the first or a later one."""
    begin = story.end() + 2 * order
    return RecordedCall(
        action=action, branch=B, invoked=begin, completed=begin + 1, **{"outcome": CallOutcome.OK, **told}
    )


def read_backwards(story: Story, rng: Random) -> Story:
    link = rng.choice(story.chain)
    there, back = (_after(story, order, CallKind.READ, id=seen) for order, seen in enumerate((link.id, link.parent_id)))
    return story.with_calls(there, back)


def fork(story: Story, rng: Random) -> Story:
    taken = rng.choice(story.chain)
    return story.with_calls(_after(story, 0, CallKind.APPEND, id="fork", parent=taken.parent_id))


def refuse_for_nothing(story: Story, _: Random) -> Story:
    parent: Parent = story.chain[-1].id if story.chain else None
    told = {"outcome": CallOutcome.FAIL, "error": CallError.CONFLICT}
    look = _after(story, 0, CallKind.READ, id=parent)
    return story.with_calls(look, _after(story, 1, CallKind.APPEND, id="refused", parent=parent, **told))


def let_an_old_owner_write(story: Story, rng: Random) -> Story:
    epoch = rng.choice([call.epoch for call in story.calls if call.action is CallKind.ACQUIRE]) or 0
    parent = story.chain[-1].id if story.chain else None
    late = _after(story, 0, CallKind.APPEND, id="late", parent=parent, epoch=epoch - 1)
    return story.with_calls(late).with_chain(relinked([*story.chain, ChainLink("late", parent, NEVER)]))


def grant_an_epoch_again(story: Story, rng: Random) -> Story:
    epoch = rng.choice([call.epoch for call in story.calls if call.action is CallKind.ACQUIRE])
    return story.with_calls(_after(story, 0, CallKind.ACQUIRE, epoch=epoch))


def fence_for_nothing(story: Story, _: Random) -> Story:
    epoch = max(call.epoch or 0 for call in story.calls if call.action is CallKind.ACQUIRE)
    told = {"outcome": CallOutcome.FAIL, "error": CallError.FENCED}
    return story.with_calls(_after(story, 0, CallKind.APPEND, id="fenced", epoch=epoch, **told))


SPOILERS: dict[Callable[[Story, Random], Story], set[ViolationKind]] = {
    lose_one: {ViolationKind.LOST},
    swap_two: {ViolationKind.FORK, ViolationKind.MISREPORTED},
    repeat_one: {ViolationKind.DUPLICATE},
    add_a_stranger: {ViolationKind.PHANTOM},
    apply_a_failure: {ViolationKind.APPLIED_FAILURE},
    cut_a_link: {ViolationKind.GAP},
    repeat_a_number: {ViolationKind.SEQ},
    tell_another_number: {ViolationKind.MISREPORTED},
    acknowledge_too_early: {ViolationKind.ORDER},
    read_too_little: {ViolationKind.STALE_READ},
    read_too_much: {ViolationKind.FUTURE_READ},
    read_what_is_not_there: {ViolationKind.DIRTY_READ},
    read_backwards: {ViolationKind.BACKWARD_READ, ViolationKind.STALE_READ},
    fork: {ViolationKind.FORK},
    refuse_for_nothing: {ViolationKind.UNJUSTIFIED_CONFLICT},
    let_an_old_owner_write: {ViolationKind.STALE_EPOCH},
    grant_an_epoch_again: {ViolationKind.GRANT},
    fence_for_nothing: {ViolationKind.UNJUSTIFIED_FENCE},
}
"""Each with the kinds of which the checker must name one. What finds nothing to spoil raises Index- or ValueError."""


def meddle(story: Story, rng: Random) -> Story:
    """Change something that may make the story wrong, or not."""
    number = rng.randrange(len(story.calls))
    call = story.calls[number]
    dice = rng.random()
    if dice < 0.4 and story.reads():
        seen = rng.choice([None, *(link.id for link in story.chain)])
        return story.with_call(rng.choice(story.reads()), id=seen, seq=None)
    if dice < 0.8:
        reach = max(story.end() // 2, 1)
        begin = call.invoked + rng.randint(-reach, reach)
        end = NEVER if call.completed == NEVER else begin + rng.randint(1, reach)
        return story.with_call(number, invoked=begin, completed=end)
    return story.with_chain(story.chain[:-1])


# A search -----------------------------------------------------------------------------------------------------------


def exists_order(story: Story) -> bool:
    """Tell whether the calls can be put into an order that fits their times and leaves the chain; try every one."""
    ids = [link.id for link in story.chain]

    def effects(call: RecordedCall, length: int) -> Iterator[int]:
        """Yield how long the chain can be after the call, if it is so long before it."""
        head = ids[length - 1] if length else None
        if call.action is CallKind.READ:
            if call.id == head:
                yield length
        elif call.outcome is CallOutcome.FAIL:
            if call.error is not CallError.CONFLICT or call.parent != head:
                yield length
        elif length < len(ids) and ids[length] == call.id and call.parent == head:
            yield length + 1

    def search(left: tuple[RecordedCall, ...], length: int) -> bool:
        if length == len(ids) and all(call.outcome is CallOutcome.UNKNOWN for call in left):
            return True
        first_end = min((call.completed for call in left), default=NEVER)
        return any(
            search((*left[:number], *left[number + 1 :]), after)
            for number, call in enumerate(left)
            if call.invoked <= first_end
            for after in effects(call, length)
        )

    return search(tuple(story.calls), 0)
