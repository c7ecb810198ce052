"""Plan how damaged checkpoints can be restored, and from where. Planning changes nothing.

First the bytes: the plan looks for missing bytes by their digest, in the same store and then in the backup. Then the
rows: a damaged row is rewritten if its digest can be proven. The plan tries everything out on an ``Overlay``, so it
states what a repair will achieve, not what it might achieve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from backstay.errors import BackstayError
from backstay.maintenance.check import check_row
from backstay.maintenance.report import RepairAction
from backstay.maintenance.search import (
    OccupiedRanges,
    Overlay,
    entries_of,
    find_bytes,
    find_missing,
    is_intact,
    place,
    rows_of,
    state_of,
    with_base,
)
from backstay.model.checkpoint import CheckpointMeta, unchecked
from backstay.operations.cursor import Access
from backstay.operations.load import expected_digest
from backstay.operations.rows import CHECKSUM_BYTES, NO_PARENT, checksum, values_of
from backstay.pieces.manifest import INLINE_BYTES_MAX, Entries, Entry, Key, encode_manifest
from backstay.store.base import Backend, Query, Row

ROUNDS_MAX = 4
"""The first round finds lost bases, the second journals, the third tables, the fourth the values in these tables."""

RESTORE, RESTORE_FROM_BACKUP = "restore", "restore from backup"


@dataclass(slots=True)
class RestorePlan:
    """The bytes and rows to write, the checkpoints that this restores, and those that it cannot."""

    overlay: Overlay
    rows: list[Row] = field(default_factory=list)  # to be rewritten
    actions: list[RepairAction] = field(default_factory=list)
    restored: list[Row] = field(default_factory=list)  # all that become good, by bytes or by rows
    unrepairable: list[Row] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # ids of rows that the store cannot return


def plan_restore(access: Access, damaged: tuple[str, ...], backup: Access | None) -> RestorePlan:
    """Return how to restore the checkpoints with these ids."""
    plan = RestorePlan(Overlay(access.store))
    rows: list[Row] = []
    for name in damaged:
        try:
            found = access.store.find(Query(access.services.namespace, ids=(name,), payload=True, writes=True))
        except BackstayError:
            found = []
        rows += found
        if not found:
            plan.unreadable.append(name)
    if not rows:
        return plan
    rows.sort(key=lambda row: (row.thread_number, row.seq))  # parents come before their children
    search = _RestoreSearch(access, backup, plan.overlay, set(damaged))
    search.restore_bytes(rows)
    evidence = search.evidence(rows)
    while rows:
        left = []
        for row in rows:
            written = row if is_good(plan.overlay, row) else rewritten(plan.overlay, row, evidence, search)
            if written is None:
                left.append(row)
                continue
            plan.restored.append(written)
            from_backup = search.used_backup(row)
            what = "its missing bytes are restored"
            if written is not row:
                plan.rows.append(written)
                evidence.learn(written)
                from_backup = from_backup or row.id in evidence.twins
                what = "its row is rewritten"
            name = RESTORE_FROM_BACKUP if from_backup else RESTORE
            branch = row.branch
            plan.actions.append(RepairAction(name, f"checkpoint {row.id}", what, branch.thread, row.id, branch.name))
        if len(left) == len(rows):
            break
        rows = left  # a restored checkpoint may confirm its parent's digest
    plan.unrepairable = rows
    return plan


class _RestoreSearch:
    """Looks for the bytes that damaged checkpoints are missing, remembers where it found them, fills the overlay."""

    def __init__(self, access: Access, backup: Access | None, overlay: Overlay, damaged: set[str]) -> None:
        self._access = access
        self._backup = backup
        self._overlay = overlay
        self._found: dict[bytes, bytes] = {}
        self._from_backup: set[bytes] = set()
        self._looked_for: set[bytes] = set()
        self._missing: dict[str, set[bytes]] = {}  # by checkpoint
        self._occupied = OccupiedRanges()
        self._children: dict[str, list[Row]] = {}
        for row in rows_of(access.store, access.services.namespace):
            if row.id not in damaged:
                self._occupied.add(access.store, row)
            if row.parent_id in damaged:
                self._children.setdefault(str(row.parent_id), []).append(row)

    def restore_bytes(self, rows: list[Row]) -> None:
        """Put all missing bytes that are found, here or in the backup, into the overlay."""
        for _ in range(ROUNDS_MAX):
            missing = []
            for row in rows:
                try:
                    missing.append(each := find_missing(self._overlay, row))
                except BackstayError:  # its manifest is unreadable, so the missing bytes are not known
                    continue
                self._missing.setdefault(row.id, set()).update(each.digests)
            wanted = {digest for each in missing for digest in each.digests}
            if wanted <= self._looked_for:
                return
            self._look_for(wanted - self._looked_for)
            for each in missing:
                for digest in each.blobs & set(self._found):
                    self._overlay.blobs[digest] = self._found[digest]
                for digest, pieces in each.values.items():
                    if digest in self._found:
                        place(self._overlay, self._occupied, self._found[digest], pieces)

    def evidence(self, rows: list[Row]) -> Evidence:
        """Return what this store and the backup prove about these checkpoints."""
        twins: dict[str, Row] = {}
        ancestors: dict[str, bytes] = {}
        for row in rows if self._backup is not None else ():
            twin = self._twin(row.id)
            if twin is not None and twin.branch[1:] == row.branch[1:]:
                twins[row.id] = twin
            parent = None if row.parent_id is None else self._twin(row.parent_id)
            if parent is not None:
                ancestors[parent.id] = parent.digest
        return Evidence(twins, self._children, ancestors)

    def read_value(self, digest: bytes) -> bytes | None:
        """Return the bytes with this digest from any place that has them; None if they are lost."""
        if digest not in self._looked_for:
            self._look_for({digest})
        return self._found.get(digest)

    def used_backup(self, row: Row) -> bool:
        """Return whether any bytes that a checkpoint was missing came from the backup."""
        return not self._from_backup.isdisjoint(self._missing.get(row.id, ()))

    def _twin(self, name: str) -> Row | None:
        """Return the same checkpoint in the backup, if it is good there."""
        assert self._backup is not None
        store, namespace = self._backup.store, self._backup.services.namespace
        try:
            found = store.find(Query(namespace, ids=(name,), payload=True))
            if not found or not is_good(Overlay(store), found[0]):
                return None
            return _flat(found[0], entries_of(store, found[0]))
        except BackstayError:
            return None

    def _look_for(self, wanted: set[bytes]) -> None:
        self._looked_for |= wanted
        self._found.update(find_bytes(self._access.store, self._access.services.namespace, wanted))
        left = wanted - set(self._found)
        if left and self._backup is not None:
            found = find_bytes(self._backup.store, self._backup.services.namespace, left)
            self._found.update(found)
            self._from_backup.update(found)


def is_good(store: Overlay, row: Row) -> bool:
    """Return whether a row passes its check with the bytes of the overlay."""
    return not check_row(cast(Backend, store), with_base(store, row))


# Rewriting rows ---------------------------------------------------------------------------------------------------
#
# No source is trusted by itself. A rewritten row is right only if the digest computed from all of it is the
# checkpoint's own digest, and only the row's digest column, one of its children, or its twin in a backup can prove
# that.


@dataclass(slots=True)
class Evidence:
    """The facts that other rows prove about damaged checkpoints. All mappings are by checkpoint id."""

    twins: Mapping[str, Row]  # the same checkpoints in a backup, verified there
    children: dict[str, list[Row]]  # in this store
    ancestors: Mapping[str, bytes]  # digests of parents that the backup has
    restored: dict[str, bytes] = field(default_factory=dict)  # digests of rows that were rewritten

    def learn(self, row: Row) -> None:
        """Add a rewritten row: its digest is known now, and it may confirm its parent's digest."""
        self.restored[row.id] = row.digest
        if row.parent_id is not None:
            self.children.setdefault(row.parent_id, []).append(row)

    def parent_digests(self, row: Row) -> list[bytes]:
        """Return the digests that a row's parent may have."""
        if row.parent_id is None:
            return [NO_PARENT]
        twin = self.twins.get(row.id)
        candidates = (
            self.restored.get(row.parent_id),
            row.parent_digest,
            None if twin is None else twin.parent_digest,
            self.ancestors.get(row.parent_id),
        )
        return list(dict.fromkeys(digest for digest in candidates if digest is not None))

    def confirms(self, store: Overlay, row: Row, digest: bytes, source: Row) -> bool:
        """Return whether any row other than ``source``, which supplied the content, confirms the row's digest."""
        twin = self.twins.get(row.id)
        if digest == row.digest or (twin is not None and twin is not source and digest == twin.digest):
            return True
        for child in self.children.get(row.id, ()):
            try:
                if _digest(child, entries_of(store, child), digest) == child.digest:
                    return True
            except BackstayError:  # this child cannot be read
                continue
        return False


def rewritten(store: Overlay, row: Row, evidence: Evidence, search: _RestoreSearch) -> Row | None:
    """Return a good row to replace a damaged one; None if there is no proof of its content.

    Values that are not where the row says become blobs in the overlay.
    """
    own: Entries | None
    try:
        own = entries_of(store, row)
    except BackstayError:
        own = None
    twin = evidence.twins.get(row.id)
    sources = [] if own is None else [(row, own)]
    if twin is not None:
        sources.append((twin, entries_of(store, twin)))
    for source, entries in sources:
        described = row._replace(
            parent_id=source.parent_id,
            step=source.step,
            created_us=source.created_us,
            size=source.size,
            notes=source.notes,
        )
        for parent in evidence.parent_digests(described):
            digest = _digest(described, entries, parent)
            if digest is None or not evidence.confirms(store, row, digest, source):
                continue
            proven = described._replace(parent_digest=None if described.parent_id is None else parent, digest=digest)
            result = _with_manifest(store, proven, own or {}, entries, search)
            if result is not None and is_good(store, result):
                return result
    return None


def _digest(row: Row, entries: Entries, parent: bytes) -> bytes | None:
    """Return the digest of a row with these entries and this parent; None if its description cannot be read."""
    try:
        # The checksum of a row covers its digest, which is what is looked for here, so it is not compared.
        body = row.notes[:-CHECKSUM_BYTES]
        own = checksum(body, row.id, row.parent_id, row.step, row.created_us, row.digest, row.size)
        meta = unchecked(CheckpointMeta, values_of(row._replace(notes=body + own)))
        return expected_digest(row, meta, entries, parent)
    except BackstayError:
        return None


def _with_manifest(store: Overlay, row: Row, own: Entries, wanted: Entries, search: _RestoreSearch) -> Row | None:
    """Return the row with a manifest of the wanted entries: intact entries as they are, all others in blobs."""
    intact, opens = _intact_entries(store, row, own)
    if opens and list(intact.items()) == list(wanted.items()):
        return row
    entries: Entries = {}
    for key, entry in wanted.items():
        here = intact.get(key)
        if here is not None and (here.kind, here.count, here.digest) == (entry.kind, entry.count, entry.digest):
            entries[key] = here
            continue
        data = entry.body if entry.body is not None else search.read_value(entry.digest)
        if data is None:
            return None
        if len(data) > INLINE_BYTES_MAX:
            store.blobs[entry.digest] = data
            entries[key] = Entry(entry.kind, entry.count, len(data), entry.digest)
        else:
            entries[key] = Entry(entry.kind, entry.count, len(data), entry.digest, body=data)
    return _flat(row._replace(size=sum(entry.size for entry in entries.values())), entries)


def _flat(row: Row, entries: Entries) -> Row:
    """Return the row with a manifest of these entries that needs neither a base nor a journal."""
    return row._replace(manifest=encode_manifest(entries), base=None, base_data=None)


def _intact_entries(store: Overlay, row: Row, own: Entries) -> tuple[dict[Key, Entry], bool]:
    """Return the entries of a row whose bytes are where the row says, and whether the whole row can be opened."""
    opens = True
    try:
        values = state_of(store, row).values
    except BackstayError:  # a base or table is lost: entries that need neither may still be intact
        opens = False
        plain = {key: entry for key, entry in own.items() if entry.table is None}
        values = state_of(store, _flat(row, plain)).values
    intact = {
        key: value.entry
        for key, value in values.items()
        if value.entry.body is not None or is_intact(store, value.pieces, value.entry.digest)
    }
    return intact, opens
