"""Reachability: which blobs and ranges of streams the branches need, derived from their manifests alone.

It reads one branch at a time and compares its needs with the store's references. If a manifest cannot be read it is
``blind``: then nothing may be called unneeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from backstay.errors import BackstayError, Corrupted
from backstay.pieces.manifest import Coverage, Source, is_needed, merge_ranges
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
