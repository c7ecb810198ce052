"""Records that no remaining checkpoint can ask for: calls, effects and runs that retention may delete.

A run that is resumed or replayed asks again for the calls and effects after its checkpoint, and for no others. So a
record of a graph is obsolete if each remaining checkpoint that could ask for it has counted its visit of its node. A
checkpoint can ask for the records of its own line of history, and a replay also for those of the lines that it was
forked from. A record of a loop is obsolete if each remaining checkpoint of its round is at its turn or after it.

Records that cannot be judged are kept: those under the caller's own keys, those without a receipt, those of a line
whose run is not known or not over, and all records of a thread with a checkpoint that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from backstay.errors import Corrupted, DecodeError, NotFound
from backstay.model.checkpoint import COPIES, Checkpoint, CheckpointMeta
from backstay.model.runs import RunStatus
from backstay.operations import ledger, run_records
from backstay.operations.ledger import TurnPlace, place_of
from backstay.operations.listing import every_branch
from backstay.operations.load import get
from backstay.operations.question import line_name_of
from backstay.operations.records import PAGE_ROWS, all_records
from backstay.operations.rows import Damaged, meta_of
from backstay.operations.run_records import RunRow
from backstay.operations.runs import loop_run_of
from backstay.store.base import PAGE_ROWS_MAX, Backend, Branch, BranchKey, Query
from backstay.store.records import Record

_TRIES = 5
"""How often the checkpoints of a thread are read again if it changes meanwhile; then its records wait for the next
prune."""

Visits = Mapping[str, int]
Line = tuple[BranchKey, str]


@dataclass(slots=True)
class Gone:
    """Runs and rounds whose checkpoints a prune deletes: proof that a key is not a caller's own."""

    runs: set[tuple[BranchKey, str]] = field(default_factory=set)
    rounds: set[tuple[BranchKey, int]] = field(default_factory=set)

    def add(self, branch: BranchKey, metas: Iterable[CheckpointMeta]) -> None:
        """Note the runs and rounds of checkpoints of a branch."""
        for meta in metas:
            if meta.graph is not None:
                self.runs.add((branch, _run_name(meta)))
            elif (found := loop_run_of(meta)) is not None:
                self.rounds.add((branch, found.number))


@dataclass(slots=True)
class Dropped:
    """How many records of a thread were deleted, and what could not be read."""

    effects: int = 0
    runs: int = 0
    damaged: list[Damaged] = field(default_factory=list)


def drop_obsolete(
    store: Backend, namespace: str, thread: str, gone: Gone, without: Collection[str], dry_run: bool
) -> Dropped:
    """Delete the obsolete records of a thread; a dry run counts them, as if the checkpoints ``without`` were gone."""
    done = Dropped()
    try:
        runs = [run_records.row_of(record) for record in all_records(store, "run", namespace, thread)]
        needs = _Needs(store, namespace, thread, runs, gone, without)
        lines = _drop_effects(store, namespace, thread, needs, done, dry_run)
        if lines is not None:
            _drop_runs(store, runs, needs, lines, done, dry_run)
    except (Corrupted, DecodeError) as error:
        damage = error if isinstance(error, Corrupted) else Corrupted(error.what, thread=thread, hint=error.hint)
        done.damaged.append(Damaged(thread_id=thread, id=damage.checkpoint, seq=0, error=damage))
    return done


def _drop_effects(
    store: Backend, namespace: str, thread: str, needs: _Needs, done: Dropped, dry_run: bool
) -> set[Line] | None:
    """Delete obsolete calls and effects; return the lines that still have some, or None if the thread is too busy."""
    left: set[Line] = set()
    after = 0
    while page := store.records("effect", namespace, thread, False, after, PAGE_ROWS):
        after = page[-1].number
        of_runs = [(record, place) for record in page if (place := place_of(record.key)) is not None]

        def choose(of_runs: Sequence[tuple[Record, Any]] = of_runs) -> list[Record]:
            return [record for record, place in of_runs if not record.open and needs.is_obsolete(record, place)]

        to_drop = needs.settled(choose, dry_run) if any(not record.open for record, _ in of_runs) else []
        if to_drop is None:
            return None
        for record in to_drop:
            ledger.row_of(record)  # a damaged one may be without a receipt: then the thread keeps its records
        done.effects += len(to_drop) if dry_run or not to_drop else store.drop_records(to_drop)
        names = {record.key for record in to_drop}
        left.update(
            (record.branch, place.line)
            for record, place in of_runs
            if not isinstance(place, TurnPlace) and record.key not in names
        )
        if len(page) < PAGE_ROWS:
            break
    return left


def _drop_runs(
    store: Backend, runs: Sequence[RunRow], needs: _Needs, lines: set[Line], done: Dropped, dry_run: bool
) -> None:
    """Delete the records of runs that are over and have neither a checkpoint nor a call or effect left.

    The newest run of each branch stays, and so do runs that were started with a key: the key must not start another.
    """
    named = {(branch, name) for branch, line in lines for name in _names_in(line)}
    over = [row for row in runs if needs.is_run_over(row) and not needs.is_newest(row) and row.key is None]
    over = [row for row in over if (row.stored.branch, row.id) not in named]

    def choose() -> list[Record]:
        return [row.stored for row in over if row.id not in needs.run_ids]

    to_drop = needs.settled(choose, dry_run) if over else []
    if to_drop:
        done.runs += len(to_drop) if dry_run else store.drop_records(to_drop)


class _Moved(Exception):
    """The thread has changed while it was read."""


class _Needs:
    """The records that the remaining checkpoints of a thread can ask for. They are read when first needed."""

    def __init__(
        self,
        store: Backend,
        namespace: str,
        thread: str,
        runs: Sequence[RunRow],
        gone: Gone,
        without: Collection[str],
    ) -> None:
        self._store, self._namespace, self._thread = store, namespace, thread
        self._gone, self._without = gone, without
        self._runs = {(row.stored.branch, row.id): row for row in runs}
        self._newest = {row.stored.branch: row.id for row in runs}  # they are listed oldest first
        self._seen: list[Branch] | None = None  # the branches as they were when their checkpoints were read
        self._heads: dict[BranchKey, CheckpointMeta] = {}
        self._asked: dict[Line, list[Visits]] = {}  # of each line: the visits of the checkpoints that can ask for it
        self._ended: dict[Line, list[Visits]] = {}  # the same for checkpoints that end a run: they ask for nothing
        self._turns: dict[tuple[BranchKey, int], int] = {}  # of each round: the first turn that a checkpoint is at
        self.run_ids: set[str] = set()

    def settled(self, choose: Callable[[], list[Record]], dry_run: bool) -> list[Record] | None:
        """Return the records that ``choose`` takes, or None if the thread changes all the time.

        A fork or rewind may copy a checkpoint while another call deletes it. So the choice counts only if no branch has
        changed since the checkpoints were read: any later copy is a copy of one that was seen.
        """
        for _ in range(_TRIES):
            try:
                if self._seen is None:
                    self._read()
                found = choose()
                if not found or dry_run or self._branches() == self._seen:
                    return found
            except (_Moved, NotFound):
                pass
            self._seen = None
        return None

    def is_obsolete(self, record: Record, place: ledger.NodePlace | TurnPlace) -> bool:
        """Return whether no remaining checkpoint can ask for a call or effect that has its receipt."""
        branch = record.branch
        if isinstance(place, TurnPlace):
            turn = self._turns.get((branch, place.round))
            return (branch, place.round) in self._gone.rounds if turn is None else place.iteration <= turn
        asked = self._asked.get((branch, place.line))
        if asked is None:
            if self._is_line_over(branch, place.line):
                return True
            asked = self._ended.get((branch, place.line))
        return asked is not None and all(place.visit <= visits.get(place.node, 0) for visits in asked)

    def is_run_over(self, row: RunRow) -> bool:
        """Return whether a run can never be resumed: a failed one can, unless its branch has another run since."""
        return row.is_over or (row.status is RunStatus.FAILED and not self.is_newest(row))

    def is_newest(self, row: RunRow) -> bool:
        """Return whether a run is the newest of its branch."""
        return self._newest[row.stored.branch] == row.id

    def _is_line_over(self, branch: BranchKey, line: str) -> bool:
        for name in _names_in(line):
            if (row := self._runs.get((branch, name))) is not None:
                return self.is_run_over(row)
            if (branch, name) in self._gone.runs:
                head = self._heads.get(branch)
                return head is not None and (head.is_over or _run_name(head) != name)
        return False

    # Reading ------------------------------------------------------------------------------------------------------

    def _branches(self) -> list[Branch]:
        return list(every_branch(self._store, self._namespace, self._thread))

    def _read(self) -> None:
        """Read the remaining checkpoints: all without their states, and the position of the oldest of each line."""
        store, namespace, thread = self._store, self._namespace, self._thread
        for unread in store.unread(namespace, thread):
            raise unread
        self._heads, self._asked, self._ended, self._turns, self.run_ids = {}, {}, {}, {}, set()
        seen = self._branches()
        by_branch: dict[BranchKey, list[CheckpointMeta]] = {}
        query = Query(namespace, thread)
        while page := store.find(query):
            for row in page:
                if row.id not in self._without:
                    by_branch.setdefault(row.branch, []).append(meta_of(row))
            if len(page) < PAGE_ROWS_MAX:
                break
            query = Query(namespace, thread, before=page[-1].seq)
        for branch, metas in by_branch.items():
            self._heads[branch] = metas[0]
            self.run_ids.update(map(_run_name, metas))
            for meta in metas:
                self._add_turn(branch, meta)
            for checkpoint in self._oldest_of_lines([meta for meta in reversed(metas) if meta.graph is not None]):
                self._add_lines(branch, checkpoint)
        self._seen = seen

    def _add_turn(self, branch: BranchKey, meta: CheckpointMeta) -> None:
        """Note the turn of a loop that a checkpoint is at, and those that a loop would start with there."""
        found = loop_run_of(meta)
        turns_here = [] if found is None else [(found.number, found.iteration)]
        if found is None:
            turns_here.append((meta.step, 0))
        if found is None or found.finished:
            turns_here.append((meta.step + 1, 0))
        for number, turn in turns_here:
            known = self._turns.get((branch, number))
            self._turns[branch, number] = turn if known is None else min(known, turn)

    def _add_lines(self, branch: BranchKey, checkpoint: Checkpoint) -> None:
        visits = checkpoint.frames.frames[0].visits if checkpoint.frames else {}
        own = (branch, line_name_of(checkpoint))
        if checkpoint.is_over:
            self._ended.setdefault(own, []).append(visits)
            return
        sources = [(branch._replace(name=name), line) for name, line in checkpoint.run.get("effects_from", ())]
        for line in (own, *sources):
            self._asked.setdefault(line, []).append(visits)

    def _oldest_of_lines(self, metas: Sequence[CheckpointMeta]) -> list[Checkpoint]:
        """Return the oldest checkpoint of each line of a branch, given oldest first.

        A rewind starts another line of the same run, but its checkpoint may be deleted. So the line is read from the
        stored options, of as few checkpoints as possible: a line never comes back once another has started.
        """
        found: list[Checkpoint] = []
        copies = 0

        def part(meta: CheckpointMeta) -> tuple[str, int]:
            nonlocal copies
            copies += meta.trigger in COPIES
            return _run_name(meta), copies

        for _, same in groupby(metas, part):
            group = list(same)
            while group:
                oldest = self._load(group[0])
                found.append(oldest)
                group = group[self._first_of_another_line(group, line_name_of(oldest)) :]
        return found

    def _first_of_another_line(self, group: Sequence[CheckpointMeta], line: str) -> int:
        """Return how many checkpoints of a group, from its oldest on, are of this line."""
        if len(group) == 1 or line_name_of(self._load(group[-1])) == line:
            return len(group)
        low, high = 0, len(group) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if line_name_of(self._load(group[middle])) == line:
                low = middle
            else:
                high = middle
        return high

    def _load(self, meta: CheckpointMeta) -> Checkpoint:
        found = get(self._store, self._namespace, meta.id, keys=())
        if found is None:
            raise _Moved
        return found


def _run_name(meta: CheckpointMeta) -> str:
    return meta.run_id or meta.id


def _names_in(line: str) -> list[str]:
    """Return the ids that the run of a line may have: the line may be named after the run and a checkpoint."""
    return [line, *(line[:at] for at, letter in enumerate(line) if letter == "@")]
