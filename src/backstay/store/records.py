"""Records: small mutable rows, each with a version that every write must name.

A record is a run, an interrupt or an effect. The store knows its name, its branch and whether it is open, and of a run
what lists and claims need; the body is sealed bytes, and the rules (who may start, decide, consume or end it) are pure
functions in ``operations/``. A writer reads a record, computes the next one, and stores it if no other writer was
faster.

A record with a checkpoint is deleted with it. Effects are deleted with their branch, when a delete removes the branch's
last checkpoint. Runs, like everything else, are deleted with their thread. Retention deletes effects and runs earlier,
once nothing can ask for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from backstay.errors import Conflict, NotFound
from backstay.store.leases import BranchKey, LeaseStatus

Kind = Literal["run", "interrupt", "effect"]

KINDS: tuple[Kind, ...] = ("run", "interrupt", "effect")
"""All kinds. Their positions in this list are stored, so a new kind comes last."""

RUNNING = "running"
"""The status of a run that a process executes. Once its lease has ended, the run can be claimed."""


class RunFacts(NamedTuple):
    """The part of a run that a store knows, to list and to claim it."""

    status: str
    graph: str  # the name of the graph or loop
    fingerprint: str  # of the graph: a claim names the graphs that the claimer can execute
    due_us: int | None = None  # when it may be claimed, by the callers' clock; None: not now


@dataclass(frozen=True, slots=True)
class Record:
    """One record. Later writes change only ``body``, ``open``, ``run`` and the version."""

    kind: Kind
    branch: BranchKey
    key: str  # the id of a run or an interrupt, the key of an effect
    body: bytes  # sealed: opaque to the store
    open: bool  # a run that has not ended, an interrupt that is not consumed, an effect without a receipt
    checkpoint: str | None = None  # the checkpoint it belongs to and is deleted with
    version: int = 0  # 0 = not stored; each write adds one
    number: int = 0  # given by the store in the order of first writes, never reused
    run: RunFacts | None = None  # of a run


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Which runs ``Backend.runs`` returns, newest first."""

    namespace: str
    thread: str | None = None
    status: str | None = None
    graph: str | None = None
    before: int | None = None  # only runs with a lower number
    limit: int = 100

    def names(self, record: Record) -> bool:
        """Return whether the query asks for this run."""
        run = record.run
        return (
            run is not None
            and record.branch.namespace == self.namespace
            and self.thread in (None, record.branch.thread)
            and self.status in (None, run.status)
            and self.graph in (None, run.graph)
            and (self.before is None or record.number < self.before)
        )


class StoredRun(NamedTuple):
    """A run as lists return it, with the lease of its branch and the step of the branch's newest checkpoint."""

    record: Record
    lease: LeaseStatus | None  # None: free
    step: int | None  # None: no checkpoint


class Fence(NamedTuple):
    """The right to write a record: ``epoch`` must be the branch's (None = any).

    ``token`` is the writer's lease token; without one, no lease may run on the branch.
    """

    epoch: int | None = None
    token: str | None = None


def digest_of(*parts: bytes) -> bytes:
    """Return the digest of parts, each with its length before it, so that different lists have different digests."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def record_id(kind: Kind, branch: BranchKey, key: str) -> bytes:
    """Return a record's name as a digest. An interrupt's id is unique in its namespace, other keys in their branch."""
    parts = (kind, branch.namespace, key) if kind == "interrupt" else (*branch, key)
    if kind == "run":
        parts = (kind, *parts)
    return digest_of(*(part.encode(errors="surrogatepass") for part in parts))


def is_repeated(record: Record, stored: Record | None) -> bool:
    """Return whether this write was stored before, so that its result is returned again."""
    return stored is not None and (stored.version, stored.body) == (record.version + 1, record.body)


def winner(record: Record, stored: Record | None) -> Record | None:
    """Return the stored record if another writer changed it, None if this writer wins; NotFound if it was deleted."""
    if stored is None and record.version:
        raise record_is_gone(record)
    is_seen = stored is None or (stored.version, stored.number) == (record.version, record.number)
    return None if is_seen else stored


def written(record: Record, stored: Record | None, number: int) -> Record:
    """Return the record as a write stores it; ``number`` is for a new one."""
    first = stored or record
    return Record(
        first.kind,
        first.branch,
        first.key,
        record.body,
        record.open,
        first.checkpoint,
        record.version + 1,
        number if stored is None else stored.number,
        record.run,
    )


def once_per_branch(claimable: Iterable[tuple[Record, Record | None]]) -> Iterator[tuple[Record, Record]]:
    """Yield runs with the runs as claimed, except those that a claim leaves, or whose branch it already takes."""
    taken: set[BranchKey] = set()
    for run, changed in claimable:
        if changed is not None and run.branch not in taken:
            taken.add(run.branch)
            yield run, changed


def run_changed(run: Record, stored: Record | None) -> Conflict:
    """Return the error for a verb whose run another writer has changed. Nothing was stored."""
    return Conflict(
        f"another process changed run {run.key}",
        winner=stored,
        thread=run.branch.thread,
        hint="Read the run again, and repeat the call",
    )


def record_is_gone(record: Record) -> NotFound:
    """Return the error for a write to a deleted record."""
    deleted_with = "thread or branch" if record.checkpoint is None else "checkpoint"
    return NotFound(
        f"{record.kind} {record.key!r}",
        thread=record.branch.thread,
        checkpoint=record.checkpoint,
        hint=f"It was deleted with its {deleted_with}",
    )


def checkpoint_is_gone(record: Record) -> NotFound:
    """Return the error for a new record whose checkpoint does not exist."""
    return NotFound(
        str(record.checkpoint),
        thread=record.branch.thread,
        checkpoint=record.checkpoint,
        hint=f"The {record.kind} needs a checkpoint in its own thread and scope: save one first",
    )
