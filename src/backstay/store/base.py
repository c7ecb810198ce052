"""The store contract: what every store must do, and nothing else.

A store holds *rows* (one per checkpoint), *branches* (each with a head), *blobs* and *streams* (the bytes that
manifests point to), and small *records*. It knows nothing about values, keys or Python objects: manifests and notes are
bytes to it, except that a delete reads manifests to find out which bytes are still needed.

Order      Each commit gets a sequence number that rises within its thread and is never reused, even after deletes. Only
           a deleted thread loses its numbers. Newest always means the highest number, never a clock.
One writer A commit names the branch, its last seq, the head it builds on, and its epoch. If one of them is out of date,
           nothing is stored. A deleted branch that is created again under its old name is another branch. While a lease
           runs, only its holder writes.
Atomic     A verb happens completely or has no effect, even if the process or the machine dies in the middle. Only
           ``delete_thread`` may take several such steps.
Durable    When ``commit``, ``write``, ``tag`` or ``delete`` returns, its effect survives a power failure (except in
           ``memory:``).
Fresh      A read sees every commit that returned before the read started, from any process.
Errors     Verbs raise only errors of ``backstay.errors``. If the outcome is uncertain, the error is ``OutcomeUnknown``.
Threads    Every verb may be called from any thread at any time. No verb holds a lock after it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from backstay.errors import Conflict, Corrupted, IdTaken, InvalidInput, NotFound
from backstay.model.fields import check_tags
from backstay.pieces.manifest import Range, Source
from backstay.store.finding import Finding as Finding  # re-exported, because every user of the contract needs it
from backstay.store.layout import UNREADABLE
from backstay.store.leases import BranchKey as BranchKey  # so is this
from backstay.store.leases import LeaseGrant, LeaseRequest, LeaseStatus
from backstay.store.records import Fence, Kind, Record, RunQuery, StoredRun

PAGE_ROWS_MAX = 1000
"""The most rows that ``find`` returns at once, even if the limit is higher."""


@dataclass(frozen=True, slots=True)
class WriteRow:
    """One pending write, its value encoded: ``kind`` and ``body`` as in ``pieces.body``."""

    task_id: str
    index: int
    channel: str
    kind: str
    count: int
    body: bytes
    task_path: str = ""


class Row(NamedTuple):
    """One stored checkpoint. A tuple, because lists create thousands of them."""

    branch: BranchKey
    thread_number: int  # threads are numbered in the order of their first save
    seq: int
    id: str
    parent_id: str | None
    parent_digest: bytes | None  # always with the payload; otherwise only if it is stored with the row
    step: int
    created_us: int
    digest: bytes
    notes: bytes
    size: int
    tags: tuple[str, ...] = ()
    writes: tuple[WriteRow, ...] = ()  # only if the query asks for them
    base: bytes | None = None  # the base blob's name; this and the next two only with the payload
    base_data: bytes | None = None
    manifest: bytes = b""


def head_is_lost(branch: BranchKey) -> Corrupted:
    """Return the error for a branch whose newest checkpoint is missing."""
    return Corrupted(
        f"the newest checkpoint of branch {branch.name!r} is missing",
        thread=branch.thread,
        hint="Repair the store with store.repair(): see docs/repair.md. history() lists the older checkpoints",
    )


def lost_head(branch: BranchKey, thread_number: int) -> Row:
    """Return a placeholder for lists, for a branch whose newest row is missing."""
    return Row(branch, thread_number, 0, UNREADABLE, None, None, 0, 0, b"", b"", 0)


@dataclass(frozen=True, slots=True)
class Head:
    """The facts about a branch that a writer needs. ``row`` is None if it was only leased and has no checkpoint yet."""

    row: Row | None
    number: int  # the branch's number, never reused
    last_seq: int  # the highest seq ever used in this branch; the next commit must name it
    epoch: int
    owned: Mapping[int, int]  # the streams that this branch may extend, each with its end


@dataclass(slots=True)
class Commit:
    """One checkpoint to add at the end of a branch, with all new bytes."""

    branch: BranchKey
    number: int  # the number of the branch that the writer saw,
    last_seq: int  # its last seq,
    head_seq: int  # and its head's seq, which is lower if later ones were deleted; all three 0 = a new branch
    epoch: int
    id: str
    parent_id: str | None
    step: int
    created_us: int
    digest: bytes
    notes: bytes
    size: int
    manifest: bytes
    base: bytes | None
    tags: tuple[str, ...] = ()
    blobs: Mapping[bytes, bytes] = field(default_factory=dict)
    chunks: Sequence[tuple[int, int, bytes]] = ()  # (stream, offset, bytes)
    sources: Collection[Source] = ()  # needed by the manifest but not by the branch's head
    owned: Collection[int] = ()  # streams that start with this commit and belong to this branch
    requires: str | None = None  # id of the checkpoint whose sources this takes over, which must still exist
    # The parent's digest, if the parent is required (then it must match), if another checkpoint is required, if a head
    # is replaced, or if the parent may be missing. The row keeps the digest unless the parent has it and is the
    # branch's head, or a new branch's origin: only there does a delete of the parent look for children.
    parent_digest: bytes | None = None
    origin: str | None = None  # the checkpoint that a new branch was forked from, which may be deleted by now
    replaces_head: bool = False  # replace the head, which has the same id
    claim: LeaseRequest | None = None  # the writer's lease, which this commit extends

    @property
    def forked_from(self) -> str | None:
        """Return the origin of a branch that starts with this commit."""
        return self.origin if self.origin is not None else self.requires

    def replaces(self, digest: bytes, seq: int) -> bool:
        """Return whether this commit replaces a head of its id; False if that head is its own result."""
        return self.replaces_head and (digest != self.digest or seq == self.head_seq)

    @property
    def keeps_parent_digest(self) -> bool:
        """Return whether the row keeps the parent's digest unless the parent exists and has it."""
        return self.parent_digest is not None and self.requires is None and not self.replaces_head

    def may_take(self, digest: bytes) -> bool:
        """Return whether the required checkpoint may have this digest; a parent must have the digest given for it."""
        return self.requires != self.parent_id or self.parent_digest in (None, digest)

    def row(self, thread_number: int, seq: int) -> Row:
        """Return the row of this commit."""
        return Row(
            self.branch,
            thread_number,
            seq,
            self.id,
            self.parent_id,
            None,
            self.step,
            self.created_us,
            self.digest,
            self.notes,
            self.size,
            tuple(sorted(self.tags)),
            (),
            self.base,
            None,
            self.manifest,
        )


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit's result; ``fresh`` is False if the same checkpoint was stored before."""

    number: int  # the branch's
    seq: int
    fresh: bool


def id_is_taken(commit: Commit) -> IdTaken:
    """Return the error for a commit whose id is used by another checkpoint."""
    return IdTaken(
        f"checkpoint {commit.id} exists with different content",
        thread=commit.branch.thread,
        checkpoint=commit.id,
        hint="Use a new id for each checkpoint, or omit the id",
    )


def branch_moved(commit: Commit) -> Conflict:
    """Return the error for a commit whose writer did not see the branch's newest checkpoint."""
    return Conflict(
        f"another writer changed branch {commit.branch.name!r} since it was read",
        thread=commit.branch.thread,
        checkpoint=commit.id,
        hint="Load the newest checkpoint, then save again",
    )


def no_checkpoint(checkpoint: str, thread: str | None = None) -> NotFound:
    """Return the error for a checkpoint that does not exist."""
    hint = "It may have been deleted: see thread.history()"
    return NotFound(f"checkpoint {checkpoint} does not exist", checkpoint=checkpoint, thread=thread, hint=hint)


def tags_after(before: Collection[str], add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
    """Return the tags of a checkpoint after a change, in order; raise InvalidInput if they are too many."""
    return check_tags(sorted({*before, *add}.difference(remove)))


def required_is_gone(commit: Commit) -> NotFound:
    """Return the error for a commit whose parent was deleted or replaced."""
    return NotFound(
        f"checkpoint {commit.requires} does not exist",
        checkpoint=commit.requires,
        hint="It was deleted in the meantime: load the newest checkpoint, then save again",
    )


def following(commit: Commit, first: Commit, before: Committed) -> Commit:
    """Return a commit of a batch, changed to follow another one."""
    return replace(
        commit,
        number=before.number,
        last_seq=before.seq,
        head_seq=before.seq,
        epoch=first.epoch,
        claim=first.claim,
        requires=None,
        replaces_head=False,
    )


def check_batch(commits: Sequence[Commit]) -> None:
    """Raise InvalidInput if ``commit_all`` cannot store these commits."""
    if len({commit.id for commit in commits}) < len(commits):
        raise InvalidInput("the batch contains the same checkpoint id twice")
    if len({commit.branch for commit in commits}) > 1 or any(commit.replaces_head for commit in commits):
        raise InvalidInput("a batch must hold new checkpoints of one branch")


def commit_one_by_one(
    commits: Sequence[Commit], stored: Mapping[str, StoredPlace], number: int, add: Callable[[Commit], Committed]
) -> list[Committed]:
    """Do a ``commit_all`` by adding one commit after the other, in a store that can undo them."""
    done = first_results(commits, stored, number) or []
    if not done:
        for commit in commits:
            done.append(add(following(commit, commits[0], done[-1]) if done else commit))
    return done


StoredPlace = tuple[int, int, bytes]  # its branch's number, its seq, its digest


def first_results(commits: Sequence[Commit], stored: Mapping[str, StoredPlace], number: int) -> list[Committed] | None:
    """Return the results of the ``commit_all`` call that stored these commits; None if none of them is stored."""
    if not stored:
        return None
    for commit in commits:
        found = stored.get(commit.id)
        if found is None or found[0] != number or found[2] != commit.digest:
            taken = next(each.id for each in commits if each.id in stored)
            raise IdTaken(
                f"checkpoint {taken} exists in another branch or with different content",
                thread=commit.branch.thread,
                checkpoint=taken,
                hint="Import into an empty branch, or leave out the checkpoints that exist",
            )
    return [Committed(number, stored[commit.id][1], False) for commit in commits]


@dataclass(frozen=True, slots=True)
class Query:
    """Which rows ``find`` returns, newest first: of one thread, or with these ids, or the heads of all threads."""

    namespace: str
    thread: str | None = None
    scope: str | None = None
    branch: str | None = None
    ids: tuple[str, ...] | None = None
    heads_of_threads: bool = False  # only the newest row of every thread, newest thread first
    before: int | None = None  # only rows with a lower number (of the thread, if ``heads_of_threads``)
    tag: str | None = None
    limit: int = PAGE_ROWS_MAX
    payload: bool = False
    writes: bool = False
    surely: bool = False  # with ids: look for a row that is not found in every other way too, which takes longer

    def __post_init__(self) -> None:
        if self.thread is None and self.ids is None and not self.heads_of_threads:
            raise InvalidInput("a query must name a thread or ids, or ask for the heads of all threads")
        if self.heads_of_threads and (self.thread, self.branch, self.ids, self.payload) != (None, None, None, False):
            raise InvalidInput("a query for heads of threads takes only scope and tag, and no payload")

    def covers(self, branch: BranchKey) -> bool:
        """Return whether the query asks for rows of this branch."""
        return (
            branch.namespace == self.namespace
            and self.thread in (None, branch.thread)
            and self.scope in (None, branch.scope)
            and self.branch in (None, branch.name)
        )

    def names(self, row: Row) -> bool:
        """Return whether a row has the query's thread, scope and branch, and is before the cursor."""
        before = self.before
        return self.covers(row.branch) and (
            before is None or (row.thread_number if self.heads_of_threads else row.seq) < before
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch as lists show it. ``origin`` is the checkpoint it was forked from, ``head`` its newest checkpoint."""

    key: BranchKey
    number: int  # in the order of creation, never reused
    head: str | None
    head_seq: int
    last_seq: int
    epoch: int
    origin: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """The numbers of what a delete removed."""

    checkpoints: int = 0
    branches: int = 0
    bytes: int = 0  # of blobs and streams

    def __add__(self, other: Removed) -> Removed:
        """Return the sum of two deletes."""
        return Removed(self.checkpoints + other.checkpoints, self.branches + other.branches, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a store takes: in total, and per source as stored (compressed)."""

    total: int
    sources: Mapping[Source, int]


class NamespaceTotals(NamedTuple):
    """The content of a namespace in numbers."""

    threads: int
    branches: int
    checkpoints: int
    full_copy_bytes: int  # the size of full copies of all states


class Backend(Protocol):
    """The verbs of a store. The rules for all of them are at the top of this file."""

    url: str

    # Reading ------------------------------------------------------------------------------------------------------

    def head(self, branch: BranchKey) -> Head | None:
        """Return the branch's head with its payload; None if there is no such branch; Corrupted if the row is lost."""

    def find(self, query: Query) -> list[Row]:
        """Return matching rows, newest first, at most ``limit``; the row numbers are the cursor for the next page.

        Damaged rows are included. The id of a row contains ``layout.UNREADABLE`` if the id cannot be read, or if the
        row of a head is missing.
        """

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        """Return an error for each part of the store that cannot be read and may hold rows of the thread (None = any).

        Lists of the store may miss the rows in such a part.
        """

    def branches(
        self, namespace: str, thread: str | None, scope: str | None, after: int = 0, limit: int = PAGE_ROWS_MAX
    ) -> list[Branch]:
        """Return the branches of a thread (None = of all) that have a checkpoint, oldest first.

        Only those with a higher number than ``after``; at most ``limit``, and never more than ``PAGE_ROWS_MAX``.
        """

    def forked(self, namespace: str, checkpoints: Collection[str]) -> set[str]:
        """Return the ids among these that a branch was forked from."""

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        """Return the bytes of each range, in order, in their stored parts. Corrupted if any are missing."""

    def sizes(self, sources: Collection[Source] | None = None) -> Sizes:
        """Return how many bytes the store takes, and how many each of these sources takes (None = every source)."""

    def totals(self, namespace: str) -> NamespaceTotals:
        """Count what a namespace holds, without reading its states; a branch counts once it had a checkpoint."""

    # Writing ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` stream numbers. They were never given out before and never will be again."""

    def commit(self, commit: Commit) -> Committed:
        """Add a checkpoint at the end of a branch.

        The branch is created if ``number`` is 0. If the id exists with the same digest, nothing changes and the first
        result is returned again, also if it replaced a head; with another digest: IdTaken. Fenced if the epoch is not
        the branch's, if the lease's token is not the claim's, or if a lease runs and there is no claim. Conflict if the
        branch moved. NotFound if ``requires`` does not exist.
        """

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        """Add many checkpoints at the end of one branch, in order, all or none. Used by imports.

        The first is checked as by ``commit``. Each later one builds on the commit before it, so their number, seqs,
        epoch, claim and ``requires`` are ignored; none of them replaces a head. If all are already stored in this
        branch with these digests, the first results are returned. If only some are, or with another digest: IdTaken.
        """

    def write(self, branch: BranchKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        """Store the results of finished tasks with a checkpoint, which need not exist yet.

        The key is (task_id, index). An existing result stays unless ``replace``.
        """

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        """Change a checkpoint's tags and return all of them. Raises NotFound, and InvalidInput if they are too many."""

    # Deleting -----------------------------------------------------------------------------------------------------

    def delete(
        self,
        namespace: str,
        checkpoints: Collection[str],
        protect: bool,
        token: str | None = None,
        *,
        tagged: bool = False,
        forked: bool = False,
    ) -> Removed:
        """Delete checkpoints, their writes, tags and records, and every byte that no other checkpoint needs.

        Missing ids are skipped. ``protect`` keeps heads and checkpoints with an open record, ``tagged`` keeps
        checkpoints with a tag, ``forked`` keeps checkpoints that a branch was forked from. If a head is deleted, the
        next older checkpoint becomes the head; a branch without any is deleted with its effects. Fenced, and nothing is
        deleted, if that head's branch has a running lease with another token.
        """

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        """Delete a thread with all its scopes, branches and records, and every byte that no other thread needs.

        Fenced, and nothing is deleted, if a lease with another token runs on one of its branches. A store may delete a
        large thread in several transactions, its newest checkpoints first. Between them the thread is whole but
        smaller: after a crash, or a lease that starts meanwhile (Fenced), a repeated call deletes the rest.
        """

    def compact(self, full: bool = False) -> int:
        """Make the store as small as possible without changing its content; return how many bytes that freed.

        Other verbs continue meanwhile. ``full`` may make them wait, if the store cannot become smaller otherwise.
        """

    # Leases -------------------------------------------------------------------------------------------------------

    def acquire(self, branch: BranchKey, request: LeaseRequest, run: Record | None = None) -> LeaseGrant:
        """Take the branch's lease; create the branch, without a checkpoint, if it does not exist.

        If the lease is free, expired or of the epoch ``request.over``, the epoch rises by one. If it has the request's
        token, it is extended and the epoch stays. If another token holds it: Fenced, with the holder. ``run`` is stored
        in the same step, as by ``put_record``; if another writer changed it, Conflict, and nothing changes.
        """

    def renew(self, branch: BranchKey, epoch: int, request: LeaseRequest) -> None:
        """Extend the lease by the requested time from now, even if it expired, as long as no other holder took it.

        Fenced if the epoch or the token differs, or if the branch does not exist.
        """

    def release(self, branch: BranchKey, epoch: int, token: str, run: Record | None = None) -> None:
        """Release the lease. A branch that never had a checkpoint is removed, and its thread too if that is empty.

        Does nothing if this epoch was released before or the branch does not exist. Fenced if another holder took it.
        ``run`` is stored in the same step; if another writer changed it, Conflict, and nothing changes.
        """

    def leases(self, namespace: str, thread: str | None, expired_only: bool) -> list[LeaseStatus]:
        """Return unreleased leases, earliest expiry first."""

    def claim(
        self,
        namespace: str,
        graphs: Collection[tuple[str, str]],
        count: int,
        request: LeaseRequest,
        now_us: int,
        dead: Collection[str],
        change: Callable[[Record], Record | None],
    ) -> list[LeaseGrant]:
        """Take the leases of up to ``count`` runs of these graphs (name and fingerprint) that no process executes.

        First the runs with the status ``RUNNING`` whose lease has ended or has a ``dead`` token, then those that are
        due at ``now_us``, earliest first, unless another holder has their branch. ``change`` is a pure function that
        returns the run as claimed, or None to leave it. Several workers may claim at the same time: each run goes to
        one of them, and none waits for another. A repeated call with the same token may return other runs; the leases
        of a lost answer expire.
        """

    # Records ------------------------------------------------------------------------------------------------------

    def record(self, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        """Return one record, or None. For an interrupt only the branch's namespace matters."""

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        """Store a record if its version and number are the stored ones; return the record as it is stored now.

        Version 0 means that the record must not exist. The returned record shows whether this writer won. The steps:

        1. If the stored version is one higher and the body the same, this write was stored before: return the record
           without checking the fence.
        2. Check the fence like a commit's, even if nothing would be stored: Fenced.
        3. NotFound if a version is named and the record does not exist, or if a new record names a checkpoint that is
           not in the branch's thread and scope.
        4. Store it with the next version, unless another writer was faster. The thread is created if it does not exist.

        ``run`` is stored in the same step, if ``record`` is; if another writer changed it: Conflict, and neither is
        stored.
        """

    def records(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int
    ) -> list[Record]:
        """Return records with a higher number than ``after``, in that order.

        At most ``limit``, and never more than ``PAGE_ROWS_MAX``.
        """

    def drop_records(self, records: Collection[Record]) -> int:
        """Delete these records, except those that were changed since they were read; return how many were deleted."""

    def run(self, branch: BranchKey) -> StoredRun | None:
        """Return the newest run of a branch, or None."""

    def runs(self, query: RunQuery) -> list[StoredRun]:
        """Return runs, newest first; at most ``PAGE_ROWS_MAX``. The cost grows with the page, not with the store."""

    def count_runs(self, namespace: str, statuses: Collection[str]) -> dict[str, int]:
        """Return how many runs have each of these statuses; those that none has are left out."""

    # Checking and repairing, below the level of checkpoints. Each verb may run while others save. ------------------

    def check(self) -> list[Finding]:
        """Look for damaged pages, wrong references and unreferenced bytes: everything that ``rebuild`` would repair."""

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        """Derive heads, sequence numbers and references again from rows and manifests; return what was wrong.

        ``drop`` also removes unreferenced bytes, and tags and interrupts without a checkpoint. If a manifest cannot be
        read, it is unknown which bytes it needs, so nothing is dropped. ``dry_run`` changes nothing. Every finding has
        ``repair`` = "rebuild"; a sound store has none. If some of the store's own files cannot be read, a rebuild may
        repair only those (kind "damaged"), and the next rebuild the rest.
        """

    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        """Put these bytes at exactly these addresses, and replace the rows with these branches and ids.

        The caller has checked them: this verb does not compare anything with a digest. ``chunks`` are (stream, offset,
        bytes). Existing bytes are overwritten, missing ones added, all others left alone; where the bytes of a stream
        can no longer be decompressed, the rest of that row is lost. Rows keep their seq, tags and writes, and their
        branch refers to what their manifests need; NotFound if there is no row with the id. A writer that saw a head
        before it was restored gets a Conflict, because it relies on the old addresses.
        """

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        """Remove a checkpoint with its tags, writes and interrupts, even if its manifest cannot be read.

        As with ``delete``, the next older checkpoint becomes the head, children keep the digest, and a branch without a
        checkpoint is removed; but no bytes and no effects are deleted. NotFound if there is no such checkpoint. Fenced
        if a lease runs on the branch, unless ``force``.
        """

    def backup(self, path: Path) -> None:
        """Write a copy of everything, as of one moment, to a new file or directory. Other verbs continue meanwhile.

        StoreRefused if the store has no files.
        """

    def close(self) -> None:
        """Release everything. Closing twice does nothing; after that any other verb raises StoreError."""
