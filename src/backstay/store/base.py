"""The store contract: what every place that keeps checkpoints must do, and nothing else.

A store keeps *rows* (one per checkpoint), *lanes* (the storage side of branches, each with a head), *blobs* and
*streams* (the bytes that manifests point to). It knows nothing of values, keys or Python objects: manifests and notes
are bytes to it, except that deleting must read manifests to know which bytes are still needed.

Order      Each commit gets a sequence number: strictly rising within its thread, never reused, also after deletes.
           Only a deleted thread takes its numbers along. Newest always means the highest number, never a clock.
One writer A commit names the lane, its last seq and its head that it saw, and its epoch. If any is out of date nothing
           is stored. A lane made anew under an old name is another lane. While a lease runs, only its holder writes.
Atomic     A verb happens wholly or not at all, also when the process or the machine dies in the middle of it.
Durable    When ``commit``, ``write``, ``tag`` or ``delete`` returns, its effect survives a power cut (not ``memory:``).
Fresh      A read sees every commit that returned before it began, from whichever process.
Errors     Only those of ``backstay.errors``; a failed verb says whether its effect is certain (``OutcomeUnknown``).
Threads    Every verb may be called from any thread at any time; none holds a lock after it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from backstay.errors import Corrupted, IdTaken, InvalidInput, NotFound
from backstay.pieces.manifest import Source
from backstay.pieces.piece import Range
from backstay.store.finding import Finding as Finding  # every user of the contract needs it
from backstay.store.lane import LaneKey as LaneKey  # and this
from backstay.store.layout import UNREADABLE
from backstay.store.leases import Claim, Leases
from backstay.store.mending import Mending
from backstay.store.records import Records

PAGE_ROWS_MAX = 1000
"""The most rows ``find`` returns at once; asking for more gives this many."""


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
    """One checkpoint as a store keeps it. A tuple, because lists make thousands of them."""

    lane: LaneKey
    thread_number: int  # rises in the order in which threads were first saved
    seq: int
    id: str
    parent_id: str | None
    parent_digest: bytes | None  # with the payload, always; else only if the parent itself was deleted
    step: int
    created_us: int
    digest: bytes
    notes: bytes
    size: int
    tags: tuple[str, ...] = ()
    writes: tuple[WriteRow, ...] = ()  # only if asked for
    base: bytes | None = None  # the base blob's name; this and the next two only if the payload was asked for
    base_data: bytes | None = None
    manifest: bytes = b""


def head_is_lost(lane: LaneKey) -> Corrupted:
    """Return the error about a branch whose newest checkpoint is not there."""
    return Corrupted(
        f"the newest checkpoint of branch {lane.branch!r} is not there",
        thread=lane.thread,
        hint="Repair the store: see docs/repair.md. Older checkpoints can be found with history()",
    )


def lost_head(lane: LaneKey, thread_number: int) -> Row:
    """Return what stands in a list for a branch's newest row if that is not there."""
    return Row(lane, thread_number, 0, UNREADABLE, None, None, 0, 0, b"", b"", 0)


@dataclass(frozen=True, slots=True)
class Head:
    """A lane as a writer must know it. ``row`` is None if it was leased and has no checkpoint yet."""

    row: Row | None
    number: int  # the lane's own number, never given to another lane
    last_seq: int  # the highest seq ever given in this lane; with the number, what the next commit must name
    epoch: int
    owned: Mapping[int, int]  # the streams this lane may extend, with their ends


@dataclass(slots=True)
class Commit:
    """One checkpoint to add at the end of a lane, with all bytes that are new."""

    lane: LaneKey
    number: int  # the lane the writer saw and ...
    last_seq: int  # ... its last seq and ...
    head_seq: int  # ... its head's, which is lower if later ones were deleted; all 0 = there is no lane yet
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
    sources: Collection[Source] = ()  # what the manifest needs and the lane's head does not
    owned: Collection[int] = ()  # streams that begin with this commit and belong to this lane
    requires: str | None = None  # id of the checkpoint whose sources are taken over: the parent, which must still exist
    parent_digest: bytes | None = None  # the parent's, if it is required (then it must be this), a head is replaced, or
    # the parent may be missing: the row keeps it then, unless the parent is there and has it
    origin: str | None = None  # what a lane that begins here was forked from, if that need not be there any more
    replaces_head: bool = False  # the head has this very id and is to be replaced
    claim: Claim | None = None  # the lease it is written under, which it extends

    @property
    def forked_from(self) -> str | None:
        """Return the origin of a lane that begins with this commit."""
        return self.requires if self.requires is not None else self.origin

    @property
    def keeps_parent_digest(self) -> bool:
        """Tell whether the row must keep the parent's digest unless the parent is there and has it."""
        return self.parent_digest is not None and self.requires is None and not self.replaces_head

    def row(self, thread_number: int, seq: int) -> Row:
        """Return the row that this commit makes."""
        return Row(
            self.lane,
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

    number: int  # the lane's
    seq: int
    fresh: bool


def id_is_taken(commit: Commit) -> IdTaken:
    """Return the error for a commit whose id exists with other content, or elsewhere."""
    return IdTaken(
        f"checkpoint {commit.id} exists with other content",
        thread=commit.lane.thread,
        checkpoint=commit.id,
        hint="Give each checkpoint its own id, or none",
    )


def required_is_gone(commit: Commit) -> NotFound:
    """Return the error for a commit whose source was deleted or replaced."""
    return NotFound(str(commit.requires), checkpoint=commit.requires, hint="It was deleted in the meantime")


def following(commit: Commit, first: Commit, before: Committed) -> Commit:
    """Return a commit of a batch as it must be to come right after another one."""
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
    """Refuse what cannot be one ``commit_all``."""
    if len({commit.id for commit in commits}) < len(commits):
        raise InvalidInput("a checkpoint is there twice in what is to be stored at once")
    if len({commit.lane for commit in commits}) > 1 or any(commit.replaces_head for commit in commits):
        raise InvalidInput("what is stored at once is new and of one branch")


def one_by_one(
    commits: Sequence[Commit], stored: Mapping[str, Stored], number: int, add: Callable[[Commit], Committed]
) -> list[Committed]:
    """Do a ``commit_all`` by adding each; for stores that can undo it, or have nothing to undo."""
    done = first_results(commits, stored, number) or []
    if not done:
        for commit in commits:
            done.append(add(following(commit, commits[0], done[-1]) if done else commit))
    return done


Stored = tuple[int, int, bytes]  # of a checkpoint: its lane's number, its seq, its digest


def first_results(commits: Sequence[Commit], stored: Mapping[str, Stored], number: int) -> list[Committed] | None:
    """Return what ``commit_all`` gave when these were stored in this lane; None if none of them is stored."""
    if not stored:
        return None
    for commit in commits:
        found = stored.get(commit.id)
        if found is None or found[0] != number or found[2] != commit.digest:
            taken = next(each.id for each in commits if each.id in stored)
            raise IdTaken(
                f"checkpoint {taken} exists, in another place or with other content",
                thread=commit.lane.thread,
                checkpoint=taken,
                hint="Import into an empty branch, or only what is not there yet",
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
    heads_of_threads: bool = False  # only the newest row of every thread; then newest means the thread made last
    before: int | None = None  # only rows with a lower number (of the thread, if ``heads_of_threads``)
    step_max: int | None = None
    tag: str | None = None
    limit: int = PAGE_ROWS_MAX
    payload: bool = False
    writes: bool = False

    def __post_init__(self) -> None:
        if self.thread is None and self.ids is None and not self.heads_of_threads:
            raise InvalidInput("a query names a thread or ids, or asks for the heads of all threads")
        if self.heads_of_threads and (self.thread, self.branch, self.ids, self.payload) != (None, None, None, False):
            raise InvalidInput("the heads of all threads are narrowed by scope, tag and step, and have no payload")

    def names(self, row: Row) -> bool:
        """Tell whether a row is of the thread, scope and branch asked for, and before the cursor."""
        lane = row.lane
        return (
            lane.namespace == self.namespace
            and self.thread in (None, lane.thread)
            and self.scope in (None, lane.scope)
            and self.branch in (None, lane.branch)
            and (self.before is None or (row.thread_number if self.heads_of_threads else row.seq) < self.before)
        )


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane as lists show it. ``origin`` is the checkpoint it was forked from, ``head`` the id of its newest one."""

    key: LaneKey
    head: str | None
    head_seq: int
    last_seq: int
    epoch: int
    origin: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """What a delete took away."""

    checkpoints: int = 0
    lanes: int = 0
    bytes: int = 0  # of blobs and streams

    def __add__(self, other: Removed) -> Removed:
        """Return both together."""
        return Removed(self.checkpoints + other.checkpoints, self.lanes + other.lanes, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes a store takes: in all, and per source (as stored, so compressed)."""

    total: int
    sources: Mapping[Source, int]
    rows: int  # bytes of manifests, notes and the like


class Backend(Leases, Records, Mending, Protocol):
    """All verbs: those on checkpoints here, the others in their own files. What holds for all stands at the top."""

    url: str

    def head(self, lane: LaneKey) -> Head | None:
        """Return the lane's head with its payload, or None if the lane does not exist; Corrupted if it is lost."""

    def find(self, query: Query) -> list[Row]:
        """Return matching rows, newest first, at most ``limit``; the row numbers make the cursor for the next page.

        A row that is damaged is among them. Its id has ``layout.UNREADABLE`` in it if that cannot be read, or if the
        row of a head is not there at all.
        """

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        """Return what is wrong with parts of the store that cannot be read at all and may hold rows of a thread.

        Without a thread: rows of any. All lists of a store may lack what such a part held.
        """

    def lanes(self, namespace: str, thread: str | None, scope: str | None) -> list[Lane]:
        """Return the lanes of a thread (or of all) that have a checkpoint, oldest first."""

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        """Return the bytes of each range, in order, in whatever parts they are kept. If any lack: Corrupted."""

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` stream numbers that were never given out before and never will be again."""

    def commit(self, commit: Commit) -> Committed:
        """Add a checkpoint at the end of a lane.

        The lane is made if ``number`` is 0. An id that exists with the same digest gives the first result again and
        changes nothing; with another digest it raises IdTaken. Another epoch, a lease held under another token than
        the claim's, or a lease that still runs if there is no claim, raises Fenced; a lane that moved Conflict; a
        missing ``requires`` NotFound.
        """

    def commit_all(self, commits: Sequence[Commit]) -> list[Committed]:
        """Add many checkpoints at the end of one lane, in order, all or none: for imports.

        The first is checked as by ``commit``; each of the others builds on the one before it, whatever number, seqs,
        epoch, claim and ``requires`` it says; none replaces a head. If all are stored already, with these digests and
        in this lane, the first results come back; if only some are, or otherwise: IdTaken.
        """

    def write(self, lane: LaneKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool) -> None:
        """Keep the results of finished tasks beside a checkpoint, which need not be there yet.

        The key is (task_id, index). An existing one is kept unless ``replace``.
        """

    def tag(self, namespace: str, checkpoint: str, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        """Change a checkpoint's tags and return them all. Raises NotFound."""

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
        """Delete checkpoints, their writes, tags and records, and every byte that nothing needs any more.

        Ids that are not there are skipped. With ``protect`` no lane's head goes, and no checkpoint with an open
        record; with ``tagged`` none that has a tag, with ``forked`` none that a lane was forked from.
        If a head goes, the next older one becomes the head, and a lane without any is deleted with its effects; if that
        would take it from under a lease that runs and is not the token's: Fenced, and nothing is deleted.
        """

    def delete_thread(self, namespace: str, thread: str, token: str | None = None) -> Removed:
        """Delete a thread with all its scopes, branches and effects, and every byte that nothing needs any more.

        If a lease on any of them runs and is not the token's: Fenced, and nothing is deleted.
        """

    def sizes(self) -> Sizes:
        """Return how many bytes everything takes."""

    def check(self) -> list[Finding]:
        """Look for damage below the level of checkpoints: pages, references, bytes that belong to nothing.

        Everything that ``rebuild`` would find and put right is part of it.
        """

    def compact(self) -> int:
        """Make the store as small as it can be without changing anything in it; return the bytes given back."""

    def close(self) -> None:
        """Release everything. Closing twice is fine; any other verb raises StoreError afterwards."""
