"""Random programs of leases and records: stores must agree on every answer, and no rule may break.

The clock is the program's own, so leases expire, and the machine reboots, whenever it likes. What cannot be seen by
comparing stores with each other is checked by itself: epochs never fall, and whatever is stored came from the holder.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

from backstay.errors import BackstayError
from backstay.store.base import Backend, Branch, BranchKey, Commit, Committed, Head, Query
from backstay.store.leases import Clock, ClockReading, LeaseGrant, LeaseRequest, LeaseStatus
from backstay.store.records import KINDS, Fence, Kind, Record
from backstay.testing.drafts import branch_key, damage, draft

BRANCHES = [branch_key(), branch_key(name="b"), branch_key("u")]
HOLDER = "whoever holds it"
NOBODY = LeaseRequest("nobody", "nobody", 1)
STEPS_MAX = 80

_TOKENS = ["x", "y", "z"]
_SOMEONE = [HOLDER, HOLDER, "x", "y"]
_ANYONE = [None, None, None, *_SOMEONE]
_OFFSETS = [0, 0, 0, -1, 1]
_TTLS = [1, 10, 100, 100]
_CHECKPOINTS = [f"c{number}" for number in range(8)]
_RECORDS = ["r0", "r1"]
_Details = tuple[bool, int | None]  # whether a record is open, and its time to live
_DETAILS: list[_Details] = [(True, 1), (True, 100), (True, None), (False, None)]
_SEEN = [0, 0, 0, 0, -1, 1]  # how far the version that a writer saw is from the one that is stored
_SELDOM = [True, False, False, False, False]

CHOICES: list[tuple[str, Sequence[Sequence[Any]]]] = [
    ("tick", [[0, 1, 9, 50]]),
    ("reboot", [_SELDOM]),
    ("acquire", [BRANCHES, _TOKENS, _TTLS]),
    ("acquire", [BRANCHES, _TOKENS, _TTLS]),
    ("renew", [BRANCHES, _OFFSETS, _SOMEONE, _TTLS]),
    ("release", [BRANCHES, _OFFSETS, _SOMEONE]),
    ("claim", [range(4), _TOKENS, _TTLS]),
    ("save", [BRANCHES, _CHECKPOINTS, _ANYONE, _TTLS]),
    ("save", [BRANCHES, _CHECKPOINTS, _ANYONE, _TTLS]),
    ("save", [BRANCHES, _CHECKPOINTS, _ANYONE, _TTLS]),
    ("look", [BRANCHES, _CHECKPOINTS]),
    ("commit", [_ANYONE, _TTLS]),
    ("delete", [list(combinations(_CHECKPOINTS, 2)), [True, False], _ANYONE]),
    ("delete_thread", [["t", "u"], [None, *_TOKENS], _SELDOM]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _DETAILS]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _DETAILS]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _DETAILS]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _DETAILS]),
    ("put_fenced", [BRANCHES, _RECORDS, _SEEN, _OFFSETS, _ANYONE]),
    ("put_fenced", [BRANCHES, _RECORDS, _SEEN, _OFFSETS, _ANYONE]),
    ("put_again", []),
]
"""What may happen at every step: a method of ``OwnerProgram``, and what each of its arguments may be."""

Step = tuple[Any, ...]


def owner_program(seed: int) -> list[Step]:
    """Return the program with this number."""
    random = Random(seed)
    chosen = random.choices(CHOICES, k=random.randrange(STEPS_MAX))
    return [(verb, *map(random.choice, choices)) for verb, choices in chosen]


class OwnerProgram:
    """One run of one program on several stores side by side."""

    def __init__(self, stores: Sequence[Callable[[Clock], Backend]]) -> None:
        self.moment = ClockReading(1, "boot 0")
        self.backends = [store(lambda: self.moment) for store in stores]
        self.late: list[Commit] = []
        self.put_last: dict[int, tuple[Record, int | None, Fence | None]] = {}
        self.epochs: dict[int, int] = {}
        self.answers: Counter[str] = Counter()

    def run(self, steps: Sequence[Step]) -> Counter[str]:
        """Do every step on every store; return how often each verb was answered, and how."""
        with contextlib.ExitStack() as stack:
            for backend in self.backends:
                stack.callback(backend.close)
            for number, (verb, *details) in enumerate(steps):
                answer = getattr(self, verb)(number, *details)
                self.answers[f"{verb}: {answer[0].__name__ if isinstance(answer, tuple) else 'done'}"] += 1
                self.check(number, verb)
            assert not any(damage(backend) for backend in self.backends)
        return self.answers

    def check(self, number: int, verb: str) -> None:
        """Demand that all stores show the same, and that no branch's epoch has fallen."""
        first, *others = [_shown(backend) for backend in self.backends]
        assert all(other == first for other in others), f"the stores differ after step {number}, {verb}"
        for row in self.backends[0].leases("", None, False):
            assert row.epoch >= self.epochs.get(row.number, 0)
            self.epochs[row.number] = row.epoch

    def each(self, ask: Callable[[Backend], object]) -> object:
        """Ask every store and demand the same answer; an error of ours is one: its type, its text, what it carries."""
        answers = []
        for backend in self.backends:
            try:
                answers.append(_unnumbered(ask(backend)))
            except BackstayError as error:
                answers.append((type(error), str(error), vars(error)))
        assert all(answer == answers[0] for answer in answers), f"the stores differ: {answers}"
        return answers[0]

    # The steps ----------------------------------------------------------------------------------------------------

    def tick(self, _: int, us: int) -> None:
        """Let time pass."""
        self.moment = self.moment._replace(us=self.moment.us + us)

    def reboot(self, number: int, really: bool) -> None:
        """Begin anew to count the time."""
        if really:
            self.moment = ClockReading(1, f"boot {number + 1}")

    def acquire(self, _: int, key: BranchKey, token: str, ttl: int) -> object:
        """Take a lease."""
        return self.each(lambda store: store.acquire(key, LeaseRequest(token, token, ttl)))

    def renew(self, _: int, key: BranchKey, offset: int, who: str, ttl: int) -> object:
        """Extend a lease, with the right epoch or nearly."""
        epoch, claim = self._epoch(key) + offset, self._claim(key, who, ttl)
        return self.each(lambda store: store.renew(key, epoch, claim or NOBODY))

    def release(self, _: int, key: BranchKey, offset: int, who: str) -> object:
        """Give a lease back, with the right epoch or nearly."""
        epoch, claim = self._epoch(key) + offset, self._claim(key, who, 1)
        return self.each(lambda store: store.release(key, epoch, (claim or NOBODY).token))

    def claim(self, _: int, count: int, token: str, ttl: int) -> object:
        """Take what has expired; then all that the token holds came back, and runs."""
        held = self.each(lambda store: store.claim("", count, LeaseRequest(token, token, ttl)))
        assert isinstance(held, list)
        running = [row for row in self.backends[0].leases("", None, False) if row.owner == token]
        assert {each.branch for each in held} == {row.branch for row in running}
        assert all(row.left_us == ttl for row in running)
        return held

    def look(self, number: int, key: BranchKey, name: str) -> None:
        """Make a commit for the branch as it is now, to be stored later."""
        self.late = [draft(backend, key, {"n": number}, name) for backend in self.backends]

    def commit(self, _: int, who: str | None, ttl: int) -> object:
        """Commit what was made when somebody last looked."""
        return self._commit(self.late, who, ttl) if self.late else None

    def save(self, number: int, key: BranchKey, name: str, who: str | None, ttl: int) -> object:
        """Look and commit at once."""
        return self._commit([draft(backend, key, {"n": number}, name) for backend in self.backends], who, ttl)

    def _commit(self, drafts: list[Commit], who: str | None, ttl: int) -> object:
        first, made = drafts[0], dict(zip(map(id, self.backends), drafts, strict=True))
        claim = self._claim(first.branch, who, ttl)
        before = self._lease(first.branch)
        answer = self.each(lambda store: store.commit(replace(made[id(store)], claim=claim)))
        if isinstance(answer, Committed) and answer.fresh:
            self._check_writer(before, first, claim)
        return answer

    def _check_writer(self, before: LeaseStatus | None, commit: Commit, claim: LeaseRequest | None) -> None:
        """Demand that what was just stored came from who held the lease, or that none ran."""
        if claim is None:
            assert before is None or before.left_us <= 0
            return
        after = self._lease(commit.branch)
        assert before is not None
        assert after is not None
        assert (before.owner, before.epoch) == (claim.owner, commit.epoch)
        assert (after.owner, after.epoch, after.left_us) == (claim.owner, commit.epoch, claim.ttl_us)

    def _lease(self, key: BranchKey) -> LeaseStatus | None:
        return next((row for row in self.backends[0].leases("", None, False) if row.branch == key), None)

    def _epoch(self, key: BranchKey) -> int:
        head = self.backends[0].head(key)
        return 0 if head is None else head.epoch

    def _claim(self, key: BranchKey, who: str | None, ttl: int) -> LeaseRequest | None:
        """Return the request of an owner, or of the present holder: None if there is none. Owners are tokens."""
        if who == HOLDER:
            lease = self._lease(key)
            who = None if lease is None else lease.owner
        return None if who is None else LeaseRequest(who, who, ttl)

    def delete(self, _: int, names: tuple[str, ...], protect: bool, who: str | None) -> object:
        """Delete checkpoints."""
        rows = self.backends[0].find(Query("", ids=names))
        claim = self._claim(rows[0].branch, who, 1) if rows else None
        token = claim and claim.token
        return self.each(lambda store: replace(store.delete("", names, protect, token), bytes=0))

    def delete_thread(self, _: int, thread: str, token: str | None, really: bool) -> object:
        """Delete a thread."""
        if not really:
            return None
        return self.each(lambda store: replace(store.delete_thread("", thread, token), bytes=0))

    def put(
        self, number: int, kind: Kind, key: BranchKey, name: str, checkpoint: str, seen: int, details: _Details
    ) -> object:
        """Write a record, with the right version or nearly; an interrupt mostly of the newest checkpoint."""
        newest = self.backends[0].find(Query("", key.thread, limit=1))
        if newest and number % 4:
            key, checkpoint = newest[0].branch, newest[0].id
        is_open, ttl = details
        record = Record(kind, key, name, f"{number}".encode(), is_open, checkpoint if kind == "interrupt" else None)
        return self._put(record, seen, ttl, None)

    def put_fenced(self, number: int, key: BranchKey, name: str, seen: int, offset: int, who: str | None) -> object:
        """Write a record under a lease, or where there must be none."""
        claim = self._claim(key, who, 1)
        fence = Fence(None if number % 3 else self._epoch(key) + offset, None if claim is None else claim.token)
        return self._put(Record("effect", key, name, f"{number}".encode(), True), seen, None, fence)

    def _put(self, record: Record, seen: int, ttl: int | None, fence: Fence | None) -> object:
        def ask(store: Backend) -> Record:
            stored = store.record(record.kind, record.branch, record.key)
            version, number = (stored.version, stored.number) if stored is not None else (0, 0)
            given = replace(record, version=max(0, version + seen), number=number)
            self.put_last[id(store)] = given, ttl, fence
            return store.put_record(given, ttl, fence)

        return self.each(ask)

    def put_again(self, _: int) -> object:
        """Repeat the last write of a record, as after a lost answer."""
        return self.each(lambda store: store.put_record(*self.put_last[id(store)])) if self.put_last else None


def _unnumbered(answer: object) -> object:
    """Return the answer without the numbers of branches and threads, which each store gives as it likes."""
    if isinstance(answer, list):
        return [_unnumbered(each) for each in answer]
    if isinstance(answer, Head):
        return replace(answer, number=0, owned={}, row=answer.row and answer.row._replace(thread_number=0))
    if isinstance(answer, Branch | LeaseGrant | LeaseStatus | Committed | Record):
        return replace(answer, number=0)
    return answer


def _shown(backend: Backend) -> object:
    found: list[object] = [backend.head(key) for key in BRANCHES]
    found += [row._replace(thread_number=0) for name in ("t", "u") for row in backend.find(Query("", name))]
    found += [row.branch.thread for row in backend.find(Query("", heads_of_threads=True))]
    found += backend.branches("", None, None)
    found += backend.leases("", None, False)
    found += backend.leases("", None, True)
    for kind in KINDS:
        found += backend.records(kind, "", None, False, 0, 100)
        found += backend.records(kind, "", "t", True, 0, 100)
    return _unnumbered(found)
