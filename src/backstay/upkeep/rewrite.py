"""A damaged row written anew: the same content under the same digest, with what could not be trusted replaced.

Nothing is believed because of where it came from. A row counts as right only if the digest worked out from all of it is
the checkpoint's own; and that is its own only if its column, one of its children or its twin in a backup says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from backstay.errors import BackstayError
from backstay.model.checkpoint import CheckpointMeta, bare
from backstay.pieces.manifest import INLINE_BYTES_MAX, Entries, Entry, Key, encode_manifest
from backstay.store.base import Backend, Row
from backstay.thread.load import expected_digest
from backstay.thread.record import NO_PARENT, values_of
from backstay.thread.verify import verify_row
from backstay.upkeep.overlay import Overlay
from backstay.upkeep.search import entries_of, is_right, tip_of, with_base

ReadValue = Callable[[bytes], bytes | None]
"""Returns the bytes with a digest, verified; None if they are nowhere."""


@dataclass(slots=True)
class Testimony:
    """What is known of damaged checkpoints from elsewhere."""

    twins: Mapping[str, Row]  # by id: the same checkpoints in a backup, verified there
    children: dict[str, list[Row]]  # by id: in this store
    ancestors: Mapping[str, bytes]  # by id: digests of parents that a backup has
    settled: dict[str, bytes] = field(default_factory=dict)  # by id: digests that were put right

    def learn(self, row: Row) -> None:
        """Take in a row that was made good: it tells its digest, and may vouch for its parent's."""
        self.settled[row.id] = row.digest
        if row.parent_id is not None:
            self.children.setdefault(row.parent_id, []).append(row)

    def parent_digests(self, row: Row) -> list[bytes]:
        """Return what the digest of a row's parent may be."""
        if row.parent_id is None:
            return [NO_PARENT]
        twin = self.twins.get(row.id)
        candidates = (
            self.settled.get(row.parent_id),
            row.parent_digest,
            None if twin is None else twin.parent_digest,
            self.ancestors.get(row.parent_id),
        )
        return list(dict.fromkeys(digest for digest in candidates if digest is not None))

    def vouches(self, row: Row, digest: bytes, teller: Row) -> bool:
        """Tell whether anything but the one who told the content says that this is the row's digest."""
        twin = self.twins.get(row.id)
        if digest == row.digest or (twin is not None and twin is not teller and digest == twin.digest):
            return True
        return any(_is_parent(digest, child) for child in self.children.get(row.id, ()))


def is_good(store: Overlay, row: Row) -> bool:
    """Tell whether a row would verify, with what was put into the overlay."""
    return bool(verify_row(cast(Backend, store), with_base(store, row)))


def rewritten(store: Overlay, row: Row, testimony: Testimony, read_value: ReadValue) -> Row | None:
    """Return a row that is good, in the place of one that is not; None if there is none.

    Values that are not where the row says become blobs, which are put into the overlay.
    """
    own = _entries(store, row)
    twin = testimony.twins.get(row.id)
    told = [] if own is None else [(row, own)]
    if twin is not None:
        told.append((twin, entries_of(twin)))
    for teller, entries in told:
        described = row._replace(
            parent_id=teller.parent_id, step=teller.step, created_us=teller.created_us, notes=teller.notes
        )
        for parent in testimony.parent_digests(described):
            digest = _digest(described, entries, parent)
            if digest is not None and testimony.vouches(row, digest, teller):
                kept = None if described.parent_id is None else parent
                settled = described._replace(parent_digest=kept, digest=digest)
                placed = _placed(store, settled, own or {}, entries, read_value)
                if placed is not None and is_good(store, placed):
                    return placed
    return None


def _is_parent(digest: bytes, child: Row) -> bool:
    try:
        return _digest(child, entries_of(child), digest) == child.digest
    except BackstayError:
        return False


def _digest(row: Row, entries: Entries, parent: bytes) -> bytes | None:
    """Return the digest that a row with these entries and this parent must have; None if its notes cannot be read."""
    try:
        return expected_digest(row, bare(CheckpointMeta, values_of(row)), entries, parent)
    except BackstayError:
        return None


def _entries(store: Overlay, row: Row) -> Entries | None:
    try:
        return entries_of(with_base(store, row))
    except BackstayError:
        return None


def _placed(store: Overlay, row: Row, own: Entries, wanted: Entries, read_value: ReadValue) -> Row | None:
    """Return the row with a manifest of what is wanted: as it is here, where that is right, else in blobs."""
    right, opens = _right_here(store, row, own)
    if opens and list(right.items()) == list(wanted.items()):
        return row
    entries: Entries = {}
    for key, entry in wanted.items():
        here = right.get(key)
        if here is not None and (here.kind, here.count, here.digest) == (entry.kind, entry.count, entry.digest):
            entries[key] = here
            continue
        data = entry.body if entry.body is not None else read_value(entry.digest)
        if data is None:
            return None
        if len(data) > INLINE_BYTES_MAX:
            store.blobs[entry.digest] = data
            entries[key] = Entry(entry.kind, entry.count, len(data), entry.digest)
        else:
            entries[key] = Entry(entry.kind, entry.count, len(data), entry.digest, body=data)
    size = sum(entry.size for entry in entries.values())
    return row._replace(size=size, manifest=encode_manifest(entries, {}), base=None, base_data=None)


def _right_here(store: Overlay, row: Row, own: Entries) -> tuple[dict[Key, Entry], bool]:
    """Return those entries of a row whose bytes are where it says, and whether the row itself can be opened."""
    opens = True
    try:
        lives = tip_of(store, row).lives
    except BackstayError:  # a base or table is lost: what needs none may be right all the same
        opens = False
        plain = {key: entry for key, entry in own.items() if entry.table is None}
        lives = tip_of(store, row._replace(manifest=encode_manifest(plain, {}), base=None, base_data=None)).lives
    right = {
        key: live.entry
        for key, live in lives.items()
        if live.entry.body is not None or is_right(store, live.pieces, live.entry.digest)
    }
    return right, opens
