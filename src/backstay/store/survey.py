"""A survey: what a store's lanes need, worked out from their manifests alone, beside what the store says they need.

It goes lane by lane, and keeps only which blobs and which ranges of streams are needed at all. If any manifest cannot
be read it is ``blind``: then nobody may say of anything that it is not needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from backstay.errors import BackstayError, Corrupted
from backstay.pieces.coverage import Coverage, is_needed, merge_ranges
from backstay.pieces.manifest import Source
from backstay.store.finding import (
    INCONSISTENT,
    MISSING,
    ORPHAN,
    REBUILD,
    RESTORE,
    UNREACHABLE,
    Finding,
    about_lane,
    source_name,
)
from backstay.store.lane import LaneKey

if TYPE_CHECKING:
    from backstay.store.base import Row

LOST_BASE = b""
"""What a store gives as the name of a base whose row is gone: no blob has it, so reading it fails."""


class References(NamedTuple):
    """How a lane's references differ from what its manifests need."""

    lacking: set[Source]
    unneeded: set[Source]  # nothing if a manifest of the lane cannot be read


class LaneFacts(NamedTuple):
    """A lane as its row shows it, and the highest seq of its checkpoints: 0 if it has none."""

    key: LaneKey
    number: int
    head: int
    last_seq: int
    newest: int
    leased: bool

    @property
    def is_empty(self) -> bool:
        """Tell whether it should not be there: without a checkpoint there is a lane only as long as it is leased."""
        return not self.newest and (self.last_seq > 0 or not self.leased)


class Survey:
    """Takes in lanes, then tells what is needed. ``read_blob`` gives the bytes of bases and tables."""

    def __init__(self, read_blob: Callable[[bytes], bytes]) -> None:
        self._read_blob = read_blob
        self._streams: dict[int, list[tuple[int, int]]] = {}
        self._blobs: set[bytes] = set()
        self.blind = False

    def add_lane(self, manifests: Iterable[tuple[bytes | None, bytes]], referred: Collection[Source]) -> References:
        """Take in a lane's (base, manifest) pairs and the sources that the store says it needs."""
        coverage = Coverage(self._checked_blob)
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
        """Return the blobs that nothing needs."""
        return [] if self.blind else [name for name in blobs if name not in self._blobs]

    def is_unneeded(self, stream: int, start: int, size: int) -> bool:
        """Tell whether nothing needs any of these bytes of a stream."""
        return not self.blind and not is_needed(start, start + size, self._streams.get(stream, []))

    def missing(self, blobs: Collection[bytes], streams: Collection[int]) -> list[Finding]:
        """Return what is needed and not among what there is."""
        lacking: list[Source] = [*sorted(self._blobs - set(blobs)), *sorted(set(self._streams) - set(streams))]
        what = "bytes that checkpoints need are not there"
        return [Finding(MISSING, source_name(source), what, repair=RESTORE) for source in lacking]

    def _checked_blob(self, name: bytes) -> bytes:
        data = self._read_blob(name)
        if hashlib.sha256(data).digest() != name:
            raise Corrupted(f"{source_name(name)} does not match its digest")
        return data


def sources_of(row: Row, read_blob: Callable[[bytes], bytes]) -> set[Source]:
    """Return the sources that a row's manifest needs; none if it cannot be read, for then nobody knows."""
    try:
        return Coverage(read_blob).add(row.manifest, row.base)
    except BackstayError:
        return set()


def lane_findings(facts: LaneFacts, references: References) -> list[Finding]:
    """Return what a rebuild would put right in a lane."""
    found = []
    if facts.is_empty:
        found.append(about_lane(MISSING, facts.key, "the newest checkpoint of the branch is not there"))
    elif facts.newest and facts.head != facts.newest:
        found.append(head_is_not_newest(facts.key))
    if facts.last_seq < facts.newest:
        found.append(about_lane(INCONSISTENT, facts.key, "its last number is lower than its newest checkpoint's"))
    if references.lacking:
        what = f"it does not refer to {len(references.lacking)} sources that its checkpoints need"
        found.append(about_lane(INCONSISTENT, facts.key, what))
    if references.unneeded:
        what = f"it refers to {len(references.unneeded)} sources that none of its checkpoints needs"
        found.append(about_lane(INCONSISTENT, facts.key, what))
    return found


def head_is_not_newest(lane: LaneKey) -> Finding:
    """Return the finding about a branch whose head is another than its newest checkpoint."""
    return about_lane(INCONSISTENT, lane, "its head is not its newest")


def number_is_used(namespace: str, thread: str) -> Finding:
    """Return the finding about a thread that would give a number out twice."""
    what = "its next number is not higher than those of its checkpoints"
    return Finding(INCONSISTENT, f"thread {thread!r}", what, thread, namespace=namespace, repair=REBUILD)


def unneeded_bytes(source: Source) -> Finding:
    """Return the finding about bytes that belong to nothing."""
    return Finding(ORPHAN, source_name(source), "bytes that no checkpoint needs", repair=REBUILD)


def without_checkpoint(what: str, name: str, checkpoint: str | None, thread: str | None = None) -> Finding:
    """Return the finding about an interrupt or a tag whose checkpoint is gone."""
    return Finding(ORPHAN, f"{what} {name}", "its checkpoint is not there", thread, checkpoint, repair=REBUILD)


def out_of_reach(what: str, count: int) -> Finding:
    """Return the finding about rows whose thread or branch is not there."""
    return Finding(UNREACHABLE, f"{count} rows of {what}", "the thread or branch they belong to is not there")
