"""Check a store, a thread or a checkpoint, byte by byte. A check changes nothing and continues after every problem.

Every checkpoint is compared with its digest, and every digest with its parent's. The cost depends on the bytes stored,
not on the sum of the states: if a value only grew since the checkpoint before, only its new bytes are read. A check
also reads pending writes, effects, interrupts and runs. It reads all lists page by page, so its memory is bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backstay.errors import BackstayError, Corrupted, DecodeError
from backstay.maintenance.report import COUNTED, Report
from backstay.model.checkpoint import Checkpoint, CheckpointMeta, unchecked
from backstay.model.ids import check_id
from backstay.operations import interrupts, ledger
from backstay.operations.cursor import Access, Services
from backstay.operations.listing import every_branch
from backstay.operations.load import expected_digest, find_row, get, open_head_state
from backstay.operations.records import all_records
from backstay.operations.rows import damaged, parent_digest, readable_id, values_of, write_of
from backstay.operations.run_records import row_of as run_of
from backstay.pieces.head_state import StoredValue
from backstay.pieces.manifest import Entry, Key, Piece, Range, grown_by
from backstay.store.base import PAGE_ROWS_MAX, Backend, Branch, BranchKey, Finding, Query, Row, no_checkpoint
from backstay.store.finding import DAMAGED, GOOD, MISSING, RESTORE, about_branch
from backstay.store.reachability import head_is_not_newest
from backstay.store.records import Kind, Record

PAGE_ROWS = 200
"""How many rows, with their manifests, are in memory at once."""


def check(
    store: Backend, services: Services, thread: str | None = None, checkpoint: str | None = None, every: bool = False
) -> Report:
    """Check a whole namespace and the store below it, or one thread, or one checkpoint.

    ``every`` also lists each good record in the report.
    """
    checking = _StoreCheck(store, services.namespace, every)
    if checkpoint is not None:
        row = find_row(store, services.namespace, checkpoint)
        if row is None:
            raise no_checkpoint(checkpoint, thread)
        checking.add_checkpoint(row, check_row(store, row))
    else:
        if thread is None:
            try:
                checking.findings += store.check()
            except (Corrupted, DecodeError) as error:
                checking.findings.append(Finding(DAMAGED, "store", error.what))
        else:
            check_id(thread, "thread id")
        checking.check_branches(thread)
        for kind in _READERS:
            checking.check_records(kind, thread)
    findings = tuple(dict.fromkeys(checking.findings))
    return Report(store.url, services.namespace, thread, checking.good, findings, tuple(checking.entries))


@dataclass(slots=True)
class _StoreCheck:
    """One check: counts the good records and collects the findings."""

    store: Backend
    namespace: str
    every: bool
    good: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    findings: list[Finding] = field(default_factory=list)
    entries: list[Finding] = field(default_factory=list)

    def add_good(self, word: str, branch: BranchKey, where: str, checkpoint: str | None, key: str | None) -> None:
        self.good[word] += 1
        if self.every:
            namespace, thread, scope, name = branch
            self.entries.append(
                Finding(GOOD, where, "every byte verified", thread, checkpoint, key, name, scope, namespace)
            )

    def add_checkpoint(self, row: Row, found: list[Finding]) -> None:
        if found:
            self.findings += found
        else:
            self.add_good("checkpoints", row.branch, f"checkpoint {row.id}", row.id, None)
            self.good["writes"] += len(row.writes)

    def check_branches(self, thread: str | None) -> None:
        """Check every checkpoint of a thread or of all threads, branch by branch."""
        try:
            for branch in every_branch(self.store, self.namespace, thread):
                try:
                    self.check_branch(branch)
                except BackstayError as error:
                    self.findings.append(about_branch(DAMAGED, branch.key, error.what, None))
        except BackstayError as error:
            self.findings.append(Finding(DAMAGED, "branches", error.what, thread, namespace=self.namespace))

    def check_branch(self, branch: Branch) -> None:
        """Check a branch from its oldest checkpoint to its newest."""
        verified: dict[Key, _VerifiedValue] = {}
        newest: Row | None = None
        for end in page_ends(self.store, branch.key, PAGE_ROWS):
            query = Query(*branch.key, before=end, limit=PAGE_ROWS, payload=True, writes=True)
            try:
                page = self.store.find(query)
            except BackstayError as error:
                what = f"checkpoints before number {end}: {error.what}"
                self.findings.append(about_branch(DAMAGED, branch.key, what, None))
                verified.clear()
                continue
            for row in reversed(page):
                # A deletion during the check moves older rows into this page. They were checked before.
                if newest is not None and row.seq <= newest.seq:
                    continue
                newest = row
                if readable_id(row) is None:  # a placeholder: nothing with this id can be restored or quarantined
                    what = damaged(row, "its row, or that of its branch, is missing or cannot be read").what
                    self.findings.append(about_branch(DAMAGED, branch.key, what, None))
                else:
                    self.add_checkpoint(row, check_row(self.store, row, verified))
        if newest is None or not newest.seq or (newest.id, newest.seq) == (branch.head, branch.head_seq):
            return  # a placeholder without a number says that the branch's own row is damaged, so its head is unknown
        if not _head_is_newest(self.store, branch):  # otherwise it only moved during the check
            self.findings.append(head_is_not_newest(branch.key))

    def check_records(self, kind: Kind, thread: str | None) -> None:
        """Check all effects, interrupts or runs."""
        try:
            for stored in all_records(self.store, kind, self.namespace, thread):
                key = stored.key if kind == "effect" else None
                where = f"{kind} {stored.key if key is None else repr(key)}"
                try:
                    _READERS[kind](stored)
                except BackstayError as error:
                    space, name, scope, branch = stored.branch
                    self.findings.append(
                        Finding(DAMAGED, where, error.what, name, stored.checkpoint, key, branch, scope, space)
                    )
                else:
                    self.add_good(f"{kind}s", stored.branch, where, stored.checkpoint, key)
        except BackstayError as error:
            self.findings.append(Finding(DAMAGED, f"{kind}s", error.what, thread, namespace=self.namespace))


_READERS: dict[Kind, Callable[[Record], object]] = {
    "effect": ledger.record_of,
    "interrupt": interrupts.record_of,
    "run": run_of,
}
"""The function that reads a record of each kind and verifies its digest."""


def page_ends(store: Backend, branch: BranchKey, rows: int) -> list[int]:
    """Return where the pages of a branch end, oldest first: each page is the rows before one of these numbers.

    Stores list the newest first. This reads such lists without payloads and keeps only the numbers.
    """
    ends: list[int] = []
    before: int | None = None
    while True:
        page = store.find(Query(*branch, before=before))
        ends += [row.seq + 1 for row in page[::rows]]
        if len(page) < PAGE_ROWS_MAX:
            return ends[::-1]
        before = page[-1].seq


def _head_is_newest(store: Backend, branch: Branch) -> bool:
    """Return whether a branch's head is its newest checkpoint. Reads again until no writer moved the head meanwhile."""
    key = branch.key

    def head() -> tuple[str, int] | None:
        found = store.branches(key.namespace, key.thread, key.scope, branch.number - 1, 1)
        return next(((each.head or "", each.head_seq) for each in found if each.key == key), None)

    before = head()
    while True:
        rows = store.find(Query(*key, limit=1))
        newest = (rows[0].id, rows[0].seq) if rows else None
        after = head()
        if before == after:
            return newest == after
        before = after


# One checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _VerifiedValue:
    """A value of the previous checkpoint whose bytes are good. If it only grew since, only the new bytes are read.

    Literals at its end are left out of ``pieces`` and ``hasher``: when the value grows, they grow, or move to a stream.
    """

    entry: Entry
    pieces: list[Piece]
    hasher: Any


def check_row(store: Backend, row: Row, verified: dict[Key, _VerifiedValue] | None = None) -> list[Finding]:
    """Check one checkpoint. ``verified`` has the values of the checkpoint before it, and afterwards its own."""
    verified = {} if verified is None else verified
    try:
        state = open_head_state(store, row, {})
    except BackstayError as error:
        verified.clear()
        return [_finding(row, DAMAGED, error.what)]
    findings = []
    for key, value in state.values.items():
        problem = _check_value(store, key, value, verified)
        if problem:
            findings.append(_finding(row, DAMAGED, problem, str(key), f", state.{key}"))
    for key in [key for key in verified if key not in state.values]:
        del verified[key]
    for write in row.writes:  # pending writes have no digest: they are good if they can be read
        try:
            write_of(write)
        except BackstayError as error:
            place = f"writes[{write.task_id}][{write.index}]"
            findings.append(_finding(row, DAMAGED, error.what, place, f", {place}", None))
    parent = parent_digest(row)
    if parent is None:
        return [*findings, _finding(row, MISSING, f"its parent {row.parent_id} does not exist")]
    try:
        meta = unchecked(CheckpointMeta, values_of(row))
    except Corrupted as error:
        return [*findings, _finding(row, DAMAGED, error.what)]
    if expected_digest(row, meta, state.entries(), parent) != row.digest:
        findings.append(_finding(row, DAMAGED, "description or content does not match the digest"))
    return findings


def _check_value(store: Backend, key: Key, value: StoredValue, verified: dict[Key, _VerifiedValue]) -> str | None:
    """Check one value's bytes; return the problem, if there is one."""
    before = verified.get(key)
    if before is not None and before.entry == value.entry:
        return None
    try:
        if value.parts is None:
            end = next((at for at in range(len(value.pieces), 0, -1) if isinstance(value.pieces[at - 1], Range)), 0)
            stored = value.pieces[:end]
            literals = [piece for piece in value.pieces[end:] if isinstance(piece, bytes)]
            new = None if before is None else grown_by(before.pieces, stored)
            hasher = hashlib.sha256() if before is None or new is None else before.hasher.copy()
            pieces = stored if new is None else new
            found = iter(store.fetch([piece for piece in pieces if isinstance(piece, Range)]))
            for piece in pieces:
                for part in next(found) if isinstance(piece, Range) else (piece,):
                    hasher.update(part)
            whole = hasher.copy()
            for literal in literals:
                whole.update(literal)
        else:
            stored, hasher = value.pieces, value.hasher
            whole = hasher
            value.value()
    except BackstayError as error:
        verified.pop(key, None)
        return error.what
    if whole.digest() != value.entry.digest:
        verified.pop(key, None)
        return "its bytes do not match their digest"
    verified[key] = _VerifiedValue(value.entry, stored, hasher)
    return None


def _finding(
    row: Row, kind: str, what: str, key: str | None = None, place: str = "", repair: str | None = RESTORE
) -> Finding:
    namespace, thread, scope, branch = row.branch
    return Finding(kind, f"checkpoint {row.id}{place}", what, thread, row.id, key, branch, scope, namespace, repair)


# The newest good checkpoint ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewestGood:
    """The newest checkpoint of a branch that passes its check."""

    checkpoint: Checkpoint
    from_backup: bool  # whether it was loaded from the backup
    skipped: int  # how many newer checkpoints are damaged


def newest_good(access: Access, branch: BranchKey, backup: Access | None) -> NewestGood | None:
    """Load a branch's checkpoints, newest first, until one passes its check; then those of the backup; else None."""
    stores = [(access.store, branch, False)]
    if backup is not None:
        stores.append((backup.store, BranchKey(backup.services.namespace, *branch[1:]), True))
    skipped = 0
    for store, key, from_backup in stores:
        query: Query | None = Query(*key, limit=PAGE_ROWS)
        while query is not None:
            try:
                page = store.find(query)
            except BackstayError:  # the list breaks off here
                break
            for row in page:
                try:
                    found = get(store, key.namespace, row.id)
                except BackstayError:
                    skipped += 1
                    continue
                if found is not None:
                    return NewestGood(found, from_backup, skipped)
            query = Query(*key, limit=PAGE_ROWS, before=page[-1].seq) if len(page) == PAGE_ROWS else None
    return None
