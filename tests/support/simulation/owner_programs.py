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
from backstay.store.records import KINDS, RUNNING, Fence, Kind, Record, RunFacts, RunQuery, StoredRun
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
_OPEN = [True, True, True, False]
_FACTS = [
    *(RunFacts("queued", graph, "1", due) for graph in ("g", "h") for due in (0, 3, 60, None)),
    *(RunFacts(RUNNING, "g", fingerprint) for fingerprint in ("1", "2")),
    *(RunFacts(RUNNING, "h", "1"), RunFacts("completed", "g", "1"), RunFacts("failed", "h", "2")),
]
"""What a store may know of a run."""

_GRAPHS = [[("g", "1")], [("h", "1"), ("g", "1"), ("g", "2")], [("h", "2"), ("none", "1")], []]
_STATUSES = ["queued", RUNNING, "completed", "failed"]
_WITH_RUN = [None, None, "r0", "r1"]
_SEEN = [0, 0, 0, 0, -1, 1]  # how far the version that a writer saw is from the one that is stored
_SELDOM = [True, False, False, False, False]

CHOICES: list[tuple[str, Sequence[Sequence[Any]]]] = [
    ("tick", [[0, 1, 9, 50]]),
    ("reboot", [_SELDOM]),
    ("acquire", [BRANCHES, _TOKENS, _TTLS, [0, 0, 0, 1], _WITH_RUN, _FACTS, _SEEN]),
    ("acquire", [BRANCHES, _TOKENS, _TTLS, [0, 0, 0, 1], _WITH_RUN, _FACTS, _SEEN]),
    ("renew", [BRANCHES, _OFFSETS, _SOMEONE, _TTLS]),
    ("release", [BRANCHES, _OFFSETS, _SOMEONE, _WITH_RUN, _FACTS, _SEEN]),
    ("release", [BRANCHES, [0], [HOLDER], ["r0", "r1"], _FACTS, [0, -1, 1]]),
    ("claim", [range(4), _TOKENS, _TTLS, _GRAPHS, [(), (), ("x", "z")], _SELDOM]),
    ("claim", [range(4), _TOKENS, _TTLS, _GRAPHS, [(), (), ("x", "z")], _SELDOM]),
    ("save", [BRANCHES, _CHECKPOINTS, _ANYONE, _TTLS]),
    ("save", [BRANCHES, _CHECKPOINTS, _ANYONE, _TTLS]),
    ("save", [BRANCHES, _CHECKPOINTS, _ANYONE, _TTLS]),
    ("look", [BRANCHES, _CHECKPOINTS]),
    ("commit", [_ANYONE, _TTLS]),
    ("delete", [list(combinations(_CHECKPOINTS, 2)), [True, False], _ANYONE]),
    ("delete_thread", [["t", "u"], [None, *_TOKENS], _SELDOM]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _OPEN, _FACTS]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _OPEN, _FACTS]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _OPEN, _FACTS]),
    ("put", [KINDS, BRANCHES, _RECORDS, _CHECKPOINTS, _SEEN, _OPEN, _FACTS]),
    ("put_fenced", [BRANCHES, _RECORDS, _SEEN, _OFFSETS, _ANYONE, _WITH_RUN, _FACTS]),
    ("put_fenced", [BRANCHES, _RECORDS, _SEEN, _OFFSETS, _ANYONE, _WITH_RUN, _FACTS]),
    ("put_again", []),
    ("drop", [KINDS, BRANCHES, _RECORDS, _SEEN]),
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
        self.put_last: dict[int, tuple[Record, Fence | None, Record | None]] = {}
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
                answers.append(
                    (type(error), str(error), {name: _unnumbered(each) for name, each in vars(error).items()})
                )
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

    def acquire(
        self, number: int, key: BranchKey, token: str, ttl: int, over: int, name: str | None, facts: RunFacts, seen: int
    ) -> object:
        """Take a lease, sometimes over that of a dead holder, and sometimes with a run."""
        request = LeaseRequest(token, token, ttl, over=over * self._epoch(key))
        return self.each(lambda store: store.acquire(key, request, _run_of(store, number, key, name, facts, seen)))

    def renew(self, _: int, key: BranchKey, offset: int, who: str, ttl: int) -> object:
        """Extend a lease, with the right epoch or nearly."""
        epoch, claim = self._epoch(key) + offset, self._claim(key, who, ttl)
        return self.each(lambda store: store.renew(key, epoch, claim or NOBODY))

    def release(
        self, number: int, key: BranchKey, offset: int, who: str, name: str | None, facts: RunFacts, seen: int
    ) -> object:
        """Give a lease back, with the right epoch or nearly, and sometimes store a run with it."""
        epoch, token = self._epoch(key) + offset, (self._claim(key, who, 1) or NOBODY).token
        return self.each(lambda store: store.release(key, epoch, token, _run_of(store, number, key, name, facts, seen)))

    def claim(
        self,
        number: int,
        count: int,
        token: str,
        ttl: int,
        graphs: list[tuple[str, str]],
        dead: tuple[str, ...],
        picky: bool,
    ) -> object:
        """Take runs that nobody executes; then the token holds their branches, one run each."""
        before = self.backends[0]
        open_before = {each.record.branch: each for each in before.runs(RunQuery(""))}
        held_before = {row.branch: row for row in before.leases("", None, False)}

        def change(run: Record) -> Record | None:
            assert run.run is not None
            if picky and run.key == _RECORDS[0]:
                return None
            return replace(run, body=f"{number}".encode(), run=run.run._replace(status=RUNNING, due_us=None))

        held = self.each(
            lambda store: store.claim("", graphs, count, LeaseRequest(token, token, ttl), self.moment.us, dead, change)
        )
        assert isinstance(held, list)
        assert len(held) <= count
        assert len({each.branch for each in held}) == len(held)
        running = {row.branch: row for row in before.leases("", None, False)}
        for each in held:
            assert each.branch in open_before
            assert (running[each.branch].owner, running[each.branch].left_us) == (token, ttl)
            was = held_before.get(each.branch)
            assert was is None or was.left_us <= 0 or was.token in dead, "it was taken from a holder that is alive"
            assert each.run is not None
            assert each.run.run is not None
            assert (each.run.run.graph, each.run.run.fingerprint) in graphs
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
        self,
        number: int,
        kind: Kind,
        key: BranchKey,
        name: str,
        checkpoint: str,
        seen: int,
        is_open: bool,
        facts: RunFacts,
    ) -> object:
        """Write a record, with the right version or nearly; an interrupt mostly of the newest checkpoint."""
        newest = self.backends[0].find(Query("", key.thread, limit=1))
        if newest and number % 4:
            key, checkpoint = newest[0].branch, newest[0].id
        record = Record(kind, key, name, f"{number}".encode(), is_open, checkpoint if kind == "interrupt" else None)
        return self._put(replace(record, run=facts if kind == "run" else None), seen, None)

    def put_fenced(
        self,
        number: int,
        key: BranchKey,
        name: str,
        seen: int,
        offset: int,
        who: str | None,
        run: str | None,
        facts: RunFacts,
    ) -> object:
        """Write a record under a lease, or where there must be none, and sometimes a run with it."""
        claim = self._claim(key, who, 1)
        fence = Fence(None if number % 3 else self._epoch(key) + offset, None if claim is None else claim.token)
        record = Record("effect", key, name, f"{number}".encode(), True)
        return self._put(record, seen, fence, lambda store: _run_of(store, number, key, run, facts, -(number % 3)))

    def _put(
        self,
        record: Record,
        seen: int,
        fence: Fence | None,
        run: Callable[[Backend], Record | None] = lambda store: None,
    ) -> object:
        def ask(store: Backend) -> Record:
            given = _as_seen(store, record, seen)
            self.put_last[id(store)] = given, fence, run(store)
            return store.put_record(*self.put_last[id(store)])

        return self.each(ask)

    def drop(self, _: int, kind: Kind, key: BranchKey, name: str, seen: int) -> object:
        """Delete a record, if it is as it was seen."""
        record = Record(kind, key, name, b"", True)
        return self.each(lambda store: store.drop_records([_as_seen(store, record, seen)]))

    def put_again(self, _: int) -> object:
        """Repeat the last write of a record, as after a lost answer."""
        return self.each(lambda store: store.put_record(*self.put_last[id(store)])) if self.put_last else None


def _as_seen(store: Backend, record: Record, seen: int) -> Record:
    """Return a record with the version that is stored, or nearly."""
    stored = store.record(record.kind, record.branch, record.key)
    version, number = (stored.version, stored.number) if stored is not None else (0, 0)
    return replace(record, version=max(0, version + seen), number=number)


def _run_of(store: Backend, number: int, key: BranchKey, name: str | None, facts: RunFacts, seen: int) -> Record | None:
    """Return the run to be stored with another change."""
    if name is None:
        return None
    return _as_seen(store, Record("run", key, name, f"{number}".encode(), facts.status != "completed", run=facts), seen)


def _unnumbered(answer: object) -> object:
    """Return the answer without the numbers of branches and threads, which each store gives as it likes."""
    if isinstance(answer, list):
        return [_unnumbered(each) for each in answer]
    if isinstance(answer, Head):
        return replace(answer, number=0, owned={}, row=answer.row and answer.row._replace(thread_number=0))
    if isinstance(answer, StoredRun):
        return StoredRun(
            replace(answer.record, number=0), answer.lease and replace(answer.lease, number=0), answer.step
        )
    if isinstance(answer, LeaseGrant):
        return replace(answer, number=0, run=answer.run and replace(answer.run, number=0))
    if isinstance(answer, Branch | LeaseStatus | Committed | Record):
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
    found += [backend.run(key) for key in BRANCHES]
    for query in (
        *(RunQuery("", status=status) for status in (None, *_STATUSES)),
        *(RunQuery("", graph=graph) for graph in ("g", "h")),
        *(RunQuery("", thread=thread, limit=2) for thread in ("t", "u")),
        RunQuery("", status=RUNNING, graph="g"),
    ):
        page = backend.runs(query)
        assert [each.record.number for each in page] == sorted((e.record.number for e in page), reverse=True)
        assert all(query.names(each.record) for each in page)
        found += page
    found.append(backend.count_runs("", _STATUSES))
    return _unnumbered(found)
