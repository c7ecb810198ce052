"""Reachability: which blobs and ranges of streams the branches need, derived from their manifests alone.

It reads one branch at a time and compares its needs with the store's references. If a manifest cannot be read it is
``blind``: then nothing may be called unneeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from backstay.errors import BackstayError, Corrupted
from backstay.pieces.manifest import STREAM_BYTES_MAX, Coverage, Source, is_needed, merge_ranges, subtract_ranges
from backstay.store.finding import (
    INCONSISTENT,
    MISSING,
    ORPHAN,
    REBUILD,
    RESTORE,
    UNREACHABLE,
    Finding,
    about_branch,
    source_name,
)
from backstay.store.leases import BranchKey

if TYPE_CHECKING:
    from backstay.store.base import Row


B = TypeVar("B")
ByteRange = tuple[int, int]


class References(NamedTuple):
    """How a branch's references differ from its manifests' needs."""

    missing: set[Source]
    unneeded: set[Source]  # empty if a manifest of the branch cannot be read


class BranchFacts(NamedTuple):
    """A branch's row, and the highest seq of its checkpoints: 0 if it has none."""

    key: BranchKey
    number: int
    head: int
    last_seq: int
    newest: int
    leased: bool

    @property
    def is_empty(self) -> bool:
        """Return whether the branch should not exist: without a checkpoint it may exist only while it is leased."""
        return not self.newest and (self.last_seq > 0 or not self.leased)


class Reachability:
    """Collects the needs of branches. ``read_blob`` returns the bytes of bases and tables."""

    def __init__(self, read_blob: Callable[[bytes], bytes]) -> None:
        self._read_blob = read_blob
        self._streams: dict[int, list[tuple[int, int]]] = {}
        self._blobs: set[bytes] = set()
        self.blind = False

    def add_branch(self, manifests: Iterable[tuple[bytes | None, bytes]], referred: Collection[Source]) -> References:
        """Add a branch's (base, manifest) pairs; compare them with the sources that the store has as its references."""

        def checked_blob(name: bytes) -> bytes:
            data = self._read_blob(name)
            if hashlib.sha256(data).digest() != name:
                raise Corrupted(f"{source_name(name)} does not match its digest")
            return data

        coverage = Coverage(checked_blob)
        needed: set[Source] = set()
        whole = True
        for base, manifest in manifests:
            try:
                needed |= coverage.add(manifest, base)
            except BackstayError:
                whole = False
        self.blind = self.blind or not whole
        for source in needed:
            if isinstance(source, bytes):
                self._blobs.add(source)
            else:
                known = self._streams.get(source, [])
                self._streams[source] = merge_ranges([*known, *coverage.ranges(source)])
        return References(needed - set(referred), set(referred) - needed if whole else set())

    def unneeded_blobs(self, blobs: Iterable[bytes]) -> list[bytes]:
        """Return the blobs that no branch needs."""
        return [] if self.blind else [name for name in blobs if name not in self._blobs]

    def is_unneeded(self, stream: int, start: int, size: int) -> bool:
        """Return whether no branch needs any of these bytes of a stream."""
        return not self.blind and not is_needed(start, start + size, self._streams.get(stream, []))

    def missing(self, blobs: Collection[bytes], streams: Collection[int]) -> list[Finding]:
        """Return a finding for each needed source that does not exist."""
        missing: list[Source] = [*sorted(self._blobs - set(blobs)), *sorted(set(self._streams) - set(streams))]
        what = "bytes that checkpoints need are missing"
        return [Finding(MISSING, source_name(source), what, repair=RESTORE) for source in missing]


class Losses(NamedTuple, Generic[B]):
    """Sources that a delete may have made unneeded."""

    sources: set[Source]  # those that may hold bytes which no checkpoint needs any more
    of_branch: dict[B, set[Source]]  # those that each branch may no longer need
    needed: set[Source]  # all that the deleted checkpoints needed
    torn: dict[int, tuple[list[ByteRange], list[ByteRange]]]  # of streams needed in part: what was lost, what is needed
    is_exact: bool  # False if a manifest could not be read


def losses(
    deleted: Iterable[tuple[B, bytes | None, bytes]],
    near: Iterable[tuple[B, bytes | None, bytes]],
    read_blob: Callable[[bytes], bytes],
) -> Losses[B]:
    """Return what deleted checkpoints needed and none of the checkpoints ``near`` them needs.

    Each is given as its branch, base and manifest.

    Near are those before and after a deleted one in its branch, its branch's origin, and the first ones of its forks.
    Their bytes stay. So a delete in a branch that only grew loses nothing, and no other manifest has to be read.
    """
    before, after = Coverage(read_blob), Coverage(read_blob)
    of_branch: dict[B, set[Source]] = {}
    for branch, base, manifest in deleted:
        of_branch.setdefault(branch, set()).update(before.add(manifest, base))
    needed: set[Source] = set().union(*of_branch.values())
    kept: set[Source] = set()
    for branch, base, manifest in near:
        sources = after.add(manifest, base)
        kept |= sources
        of_branch.get(branch, set()).difference_update(sources)
    torn = {}
    for source in needed & kept:
        if isinstance(source, int):
            still = after.ranges(source)
            gone = subtract_ranges(before.ranges(source), still)
            if gone:
                torn[source] = (gone, still)
    return Losses((needed - kept) | torn.keys(), of_branch, needed, torn, True)


class Collectable(Protocol[B]):
    """The references and bytes of a store, as ``collect`` needs them."""

    @property
    def lost(self) -> dict[int, list[ByteRange]]:
        """Return the ranges of streams that earlier deletes lost, in stored ranges that they had to keep.

        A store must forget a range when it removes the bytes there: new ones may get their place. Some may be missing:
        then more manifests are read.
        """

    def read_blob(self, name: bytes) -> bytes:
        """Return the bytes of a blob; Corrupted if they are missing."""

    def manifests(self, branch: B) -> Iterable[tuple[bytes | None, bytes]]:
        """Iterate over the base and manifest of every checkpoint of a branch."""

    def is_scattered(self, branch: B, source: Source) -> bool:
        """Return whether the checkpoints that need a byte of a source may be anywhere in a branch.

        Otherwise they follow each other: none needed it again after one that did not, and no repair changed one.
        """

    def referring(self, source: Source) -> Iterable[B]:
        """Return the branches that refer to a source."""

    def unrefer(self, branch: B, sources: Collection[Source]) -> None:
        """Remove references of a branch."""

    def chunks(self, stream: int, start: int, end: int) -> Iterable[ByteRange]:
        """Return the stored ranges of a stream that overlap this one."""

    def drop_chunks(self, stream: int, chunks: Collection[ByteRange]) -> int:
        """Remove stored ranges; return how many bytes that freed."""

    def drop_blob(self, name: bytes) -> int:
        """Remove a blob if it exists; return how many bytes that freed."""


def collect(store: Collectable[B], lost: Losses[B]) -> int:
    """Remove lost references and bytes that no branch needs now; return how many bytes that freed.

    Bytes first: a store that does this again after an interrupt finds them by the references. Other manifests of a
    branch are read only if a source is scattered there, or if it is a stream that other branches need too.
    """
    scan = _Scan(store)
    loose: dict[B, set[Source]] = {}
    for branch, sources in lost.of_branch.items():
        if lost.is_exact and not any(store.is_scattered(branch, source) for source in sources):
            loose[branch] = sources
        else:
            loose[branch] = scan.unneeded(branch, sources)
    freed = 0
    for source in lost.sources:
        users = [branch for branch in store.referring(source) if source not in loose.get(branch, ())]
        if isinstance(source, bytes):
            freed += 0 if users else store.drop_blob(source)
            continue
        unneeded = None
        if len(users) == 1 and source in lost.torn and not store.is_scattered(users[0], source):
            unneeded = _inside(store, source, *lost.torn[source])
        freed += store.drop_chunks(source, scan.unneeded_chunks(source, users) if unneeded is None else unneeded)
    for branch, sources in loose.items():
        store.unrefer(branch, sources)
    return freed


class _Scan(Generic[B]):
    """The needs of whole branches, by all their manifests; each branch is read once, and only if it is asked for."""

    def __init__(self, store: Collectable[B]) -> None:
        self._store = store
        self._coverage = Coverage(store.read_blob)
        self._needs: dict[B, set[Source] | None] = {}  # None = a manifest cannot be read, so it may need anything

    def _needs_of(self, branch: B) -> set[Source] | None:
        if branch not in self._needs:
            needed: set[Source] = set()
            try:
                for base, manifest in self._store.manifests(branch):
                    needed |= self._coverage.add(manifest, base)
                self._needs[branch] = needed
            except BackstayError:
                self._needs[branch] = None
        return self._needs[branch]

    def unneeded(self, branch: B, sources: set[Source]) -> set[Source]:
        """Return the sources that a branch does not need."""
        needed = self._needs_of(branch)
        return set() if needed is None else sources - needed

    def unneeded_chunks(self, stream: int, branches: Sequence[B]) -> list[ByteRange]:
        """Return the stored ranges of a stream that none of these branches needs."""
        if None in [self._needs_of(branch) for branch in branches]:
            return []
        needed = self._coverage.ranges(stream) if branches else []
        return [chunk for chunk in self._store.chunks(stream, 0, STREAM_BYTES_MAX) if not is_needed(*chunk, needed)]


def _inside(
    store: Collectable[B], stream: int, lost: Iterable[ByteRange], kept: list[ByteRange]
) -> list[ByteRange] | None:
    """Return the stored ranges that lie in lost ones; None if one lies there only in part, and not in kept ones."""
    gone = merge_ranges([*store.lost.get(stream, ()), *lost])
    found, left = [], []
    for start, end in lost:
        for chunk in store.chunks(stream, start, end):
            if not subtract_ranges([chunk], gone):
                found.append(chunk)
            elif is_needed(*chunk, kept):
                left.append(chunk)
            else:
                return None
    within = [(max(start, first), min(end, last)) for first, last in left for start, end in gone]
    store.lost[stream] = merge_ranges((start, end) for start, end in within if start < end)
    return found


def sources_of(row: Row, read_blob: Callable[[bytes], bytes]) -> set[Source]:
    """Return the sources that a row's manifest needs; none if it cannot be read."""
    try:
        return Coverage(read_blob).add(row.manifest, row.base)
    except BackstayError:
        return set()


def branch_findings(facts: BranchFacts, references: References) -> list[Finding]:
    """Return what a rebuild would repair in a branch."""
    found = []
    if facts.is_empty:
        found.append(about_branch(MISSING, facts.key, "its newest checkpoint is missing"))
    elif facts.newest and facts.head != facts.newest:
        found.append(head_is_not_newest(facts.key))
    if facts.last_seq < facts.newest:
        found.append(
            about_branch(INCONSISTENT, facts.key, "its last sequence number is lower than its newest checkpoint's")
        )
    if references.missing:
        what = f"it does not refer to {len(references.missing)} sources that its checkpoints need"
        found.append(about_branch(INCONSISTENT, facts.key, what))
    if references.unneeded:
        what = f"it refers to {len(references.unneeded)} sources that none of its checkpoints needs"
        found.append(about_branch(INCONSISTENT, facts.key, what))
    return found


def head_is_not_newest(branch: BranchKey) -> Finding:
    """Return the finding about a branch whose head is not its newest checkpoint."""
    return about_branch(INCONSISTENT, branch, "its head is not its newest checkpoint")


def number_used_twice(namespace: str, thread: str) -> Finding:
    """Return the finding about a thread that would use a sequence number twice."""
    what = "its next sequence number is already used by a checkpoint"
    return Finding(INCONSISTENT, f"thread {thread!r}", what, thread, namespace=namespace, repair=REBUILD)


def unneeded_bytes(source: Source) -> Finding:
    """Return the finding about unreferenced bytes."""
    return Finding(ORPHAN, source_name(source), "bytes that no checkpoint needs", repair=REBUILD)


def without_checkpoint(what: str, name: str, checkpoint: str | None, thread: str | None = None) -> Finding:
    """Return the finding about a record or a tag whose checkpoint does not exist."""
    return Finding(ORPHAN, f"{what} {name}", "its checkpoint does not exist", thread, checkpoint, repair=REBUILD)


def out_of_reach(what: str, count: int) -> Finding:
    """Return the finding about rows whose thread or branch does not exist."""
    return Finding(UNREACHABLE, f"{count} rows of {what}", "their thread or branch does not exist")
