"""Verifying: every byte of every checkpoint against its digest, and every digest against its parent's.

Costs what is stored, not what the states add up to: a value that grew since the checkpoint before is read on from where
that one ended. Rows are read page by page, so memory is bounded. Every finding names its place, and the work goes on
after it. ``verify_lanes`` is all of it; ``upkeep.check`` uses the same parts and looks at more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backstay.errors import BackstayError, Corrupted, NotFound
from backstay.model.checkpoint import CheckpointMeta, bare
from backstay.pieces.manifest import Entry, Key
from backstay.pieces.piece import Piece, Range, grown_by
from backstay.pieces.tip import Tip
from backstay.store.base import PAGE_ROWS_MAX, Backend, Finding, Lane, LaneKey, Query, Row
from backstay.store.finding import DAMAGED, MISSING, RESTORE, about_lane
from backstay.store.survey import head_is_not_newest
from backstay.thread.cursor import Context
from backstay.thread.load import decode_live, expected_digest, find_row, open_tip
from backstay.thread.record import parent_digest, values_of, write_of

PAGE_ROWS = 200
"""How many rows, with their manifests, are in memory at once."""

Note = Callable[[Row, list[Finding]], None]
"""Is told of every checkpoint what was found in it: nothing, if it is good."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification looked at and found. It is true if nothing is wrong; what a crash left behind is harmless."""

    checkpoints: int
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return all(finding.is_harmless for finding in self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.checkpoints} checkpoints verified, nothing wrong"
        lines = [f"{self.checkpoints} checkpoints verified, {len(self.findings)} findings:"]
        lines += [f"  {finding}" for finding in self.findings]
        return "\n".join(lines)


@dataclass(slots=True)
class _Checked:
    """A value of the previous checkpoint whose bytes were found good; a longer one need only be read on from there."""

    entry: Entry
    pieces: list[Piece]
    hasher: Any


def verify_thread(store: Backend, context: Context, lane: LaneKey, name: str | None) -> Report:
    """Verify one checkpoint, or all of a thread."""
    if name is None:
        return verify_lanes(store, context, lane.thread, whole_store=False)
    row = find_row(store, context.namespace, name)
    if row is None:
        raise NotFound(name, checkpoint=name, thread=lane.thread)
    return verify_row(store, row)


def verify_row(store: Backend, row: Row) -> Report:
    """Verify one checkpoint."""
    return Report(1, tuple(_verify_row(store, row, {})))


def verify_lanes(store: Backend, context: Context, thread: str | None, whole_store: bool) -> Report:
    """Verify every checkpoint of a thread or of all; go on after each finding."""
    findings: list[Finding] = []
    count = 0

    def note(_: Row, found: list[Finding]) -> None:
        nonlocal count
        count += 1
        findings.extend(found)

    if whole_store:
        findings += store.check()
    findings += walk_lanes(store, context, thread, note)
    return Report(count, tuple(dict.fromkeys(findings)))


def walk_lanes(store: Backend, context: Context, thread: str | None, note: Note) -> list[Finding]:
    """Verify every checkpoint of a thread or of all, and return what is to be said of the branches themselves."""
    try:
        lanes = store.lanes(context.namespace, thread, None)
    except BackstayError as error:
        return [Finding(DAMAGED, "branches", error.what, thread, namespace=context.namespace)]
    findings: list[Finding] = []
    for lane in lanes:
        try:
            findings += _verify_lane(store, lane, note)
        except BackstayError as error:
            findings.append(about_lane(DAMAGED, lane.key, error.what, None))
    return findings


def page_ends(store: Backend, lane: LaneKey, rows: int) -> list[int]:
    """Return where the pages of a branch end, oldest first: each is the rows before one of these numbers.

    They are read from the end on, as all lists are, but without payloads; of them only these numbers are kept.
    """
    ends: list[int] = []
    before: int | None = None
    while True:
        page = store.find(Query(*lane, before=before))
        ends += [row.seq + 1 for row in page[::rows]]
        if len(page) < PAGE_ROWS_MAX:
            return ends[::-1]
        before = page[-1].seq


def _verify_lane(store: Backend, lane: Lane, note: Note) -> list[Finding]:
    """Verify a branch from its oldest checkpoint on."""
    findings: list[Finding] = []
    checked: dict[Key, _Checked] = {}
    newest: Row | None = None
    for end in page_ends(store, lane.key, PAGE_ROWS):
        query = Query(*lane.key, before=end, limit=PAGE_ROWS, payload=True, writes=True)
        try:
            page = store.find(query)
        except BackstayError as error:
            findings.append(about_lane(DAMAGED, lane.key, f"checkpoints before number {end}: {error.what}", None))
            checked.clear()
            continue
        for row in reversed(page):
            if newest is None or row.seq > newest.seq:  # else some went meanwhile, and older ones came again
                newest = row
                note(row, (_verify_row(store, row, checked)))
    seems_newest = newest is None or (newest.id, newest.seq) == (lane.head, lane.head_seq)
    if not seems_newest and not (_head_is_newest(store, lane.key)):  # else it moved while this was being read
        findings.append(head_is_not_newest(lane.key))
    return findings


def _head_is_newest(store: Backend, lane: LaneKey) -> bool:
    """Tell whether a branch's head is its newest checkpoint, looking until nobody changes it meanwhile."""
    query = Query(*lane, limit=1)
    head = _place_of_head(store, lane)
    while True:
        rows = store.find(query)
        newest = (rows[0].id, rows[0].seq) if rows else None
        again = _place_of_head(store, lane)
        if head == again:
            return newest == head
        head = again


def _place_of_head(store: Backend, lane: LaneKey) -> tuple[str, int] | None:
    lanes = store.lanes(lane.namespace, lane.thread, lane.scope)
    return next(((each.head or "", each.head_seq) for each in lanes if each.key == lane), None)


def _verify_row(store: Backend, row: Row, checked: dict[Key, _Checked]) -> list[Finding]:
    try:
        tip = open_tip(store, row, {})
    except BackstayError as error:
        checked.clear()
        return [_finding(row, DAMAGED, error.what)]
    findings = []
    for key in tip.lives:
        problem = _verify_value(store, tip, key, checked)
        if problem:
            findings.append(_finding(row, DAMAGED, problem, str(key), f", state.{key}"))
    for key in [key for key in checked if key not in tip.lives]:
        del checked[key]
    return findings + _verify_writes(row) + _verify_digest(row, tip)


def _verify_writes(row: Row) -> list[Finding]:
    """Check that pending writes can be read; they have no digest."""
    findings = []
    for write in row.writes:
        try:
            write_of(write)
        except BackstayError as error:
            place = f"writes[{write.task_id}][{write.index}]"
            findings.append(_finding(row, DAMAGED, error.what, place, f", {place}", None))
    return findings


def _verify_digest(row: Row, tip: Tip) -> list[Finding]:
    parent = parent_digest(row)
    if parent is None:
        return [_finding(row, MISSING, f"its parent {row.parent_id} is not there")]
    try:
        meta = bare(CheckpointMeta, values_of(row))
    except Corrupted as error:
        return [_finding(row, DAMAGED, error.what)]
    if expected_digest(row, meta, tip.entries(), parent) != row.digest:
        return [_finding(row, DAMAGED, "description or content does not match the digest")]
    return []


def _verify_value(store: Backend, tip: Tip, key: Key, checked: dict[Key, _Checked]) -> str | None:
    """Check one value's bytes; return what is wrong, if anything."""
    live = tip.lives[key]
    before = checked.get(key)
    if before is not None and before.entry == live.entry:
        return None
    try:
        if live.parts is None:
            hasher, ranges = _remaining(before, live.pieces)
            wanted = [piece for piece in ranges if isinstance(piece, Range)]
            found = iter(store.fetch(wanted))
            for piece in ranges:
                for part in next(found) if isinstance(piece, Range) else (piece,):
                    hasher.update(part)
        else:
            hasher = live.hasher
            decode_live(live)
    except BackstayError as error:
        checked.pop(key, None)
        return error.what
    if hasher.digest() != live.entry.digest:
        checked.pop(key, None)
        return "its bytes do not match their digest"
    checked[key] = _Checked(live.entry, live.pieces, hasher)
    return None


def _remaining(before: _Checked | None, pieces: list[Piece]) -> tuple[Any, list[Piece]]:
    """Return a hasher and the pieces it has yet to see: only the new end if the value merely grew."""
    rest = None if before is None else grown_by(before.pieces, pieces)
    return (hashlib.sha256(), pieces) if before is None or rest is None else (before.hasher.copy(), rest)


def _finding(
    row: Row, kind: str, what: str, key: str | None = None, place: str = "", repair: str | None = RESTORE
) -> Finding:
    namespace, thread, scope, branch = row.lane
    return Finding(kind, f"checkpoint {row.id}{place}", what, thread, row.id, key, branch, scope, namespace, repair)
