"""Verifying: every byte of every checkpoint against its digest, and every digest against its parent's.

Costs what is stored, not what the states add up to: a value that grew since the checkpoint before is read on from where
that one ended. Every finding names its place, and the work goes on after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Corrupted, DecodeError, HoldfastError
from holdfast.model.checkpoint import CheckpointMeta, bare
from holdfast.pieces.manifest import Entry, Key
from holdfast.pieces.piece import Piece, Range
from holdfast.pieces.tip import Tip
from holdfast.store.base import Backend, Finding, Row
from holdfast.thread.cursor import Context
from holdfast.thread.load import decode_live, expected_digest, open_tip
from holdfast.thread.perform import Flow, ask
from holdfast.thread.record import parent_digest, values_of
from holdfast.thread.removal import rows_of


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification looked at and what it found. It is true if nothing is wrong."""

    checkpoints: int
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.checkpoints} checkpoints verified, nothing wrong"
        lines = [f"{self.checkpoints} checkpoints verified, {len(self.findings)} findings:"]
        lines += [f"  {finding.kind}: {finding.where}: {finding.what}" for finding in self.findings]
        return "\n".join(lines)


@dataclass(slots=True)
class _Checked:
    """A value of the previous checkpoint whose bytes were found good; a longer one need only be read on from there."""

    entry: Entry
    pieces: list[Piece]
    hasher: Any


def verify_lanes(context: Context, thread: str | None, whole_store: bool) -> Flow[Report]:
    """Verify every checkpoint of a thread or of all; go on after each finding."""
    findings: list[Finding] = []
    count = 0
    if whole_store:
        findings += yield from ask(lambda store: store.check())
    try:
        lanes = yield from ask(lambda store: store.lanes(context.namespace, thread, None))
    except Corrupted as error:
        return Report(0, (*findings, Finding("damaged", "branches", error.what)))
    for lane in lanes:
        try:
            rows = yield from rows_of(lane.key, payload=True)
        except HoldfastError as error:
            findings.append(Finding("damaged", f"branch {lane.key.branch}", error.what, lane.key.thread))
            continue
        checked: dict[Key, _Checked] = {}
        for row in reversed(rows):
            count += 1
            findings += yield from _verify_row(row, checked)
        if rows and (rows[0].id, rows[0].seq) != (lane.head, lane.head_seq):
            findings.append(
                Finding("inconsistent", f"branch {lane.key.branch}", "its head is not its newest", lane.key.thread)
            )
    return Report(count, tuple(findings))


def verify_row(row: Row) -> Flow[Report]:
    """Verify one checkpoint."""
    return Report(1, tuple((yield from _verify_row(row, {}))))


def _verify_row(row: Row, checked: dict[Key, _Checked]) -> Flow[list[Finding]]:
    try:
        tip = yield from open_tip(row, {})
    except HoldfastError as error:
        checked.clear()
        return [_finding(row, "damaged", error.what)]
    findings = []
    for key in tip.lives:
        problem = yield from _verify_value(tip, key, checked)
        if problem:
            findings.append(_finding(row, "damaged", problem, str(key)))
    for key in [key for key in checked if key not in tip.lives]:
        del checked[key]
    parent = parent_digest(row)
    if parent is None:
        findings.append(_finding(row, "missing", f"its parent {row.parent_id} is not there"))
    else:
        try:
            meta = bare(CheckpointMeta, values_of(row))
        except DecodeError as error:
            return [*findings, _finding(row, "damaged", f"its notes cannot be read: {error.what}")]
        if expected_digest(row, meta, tip.entries(), parent) != row.digest:
            findings.append(_finding(row, "damaged", "description or content does not match the digest"))
    return findings


def _verify_value(tip: Tip, key: Key, checked: dict[Key, _Checked]) -> Flow[str | None]:
    """Check one value's bytes; return what is wrong, if anything."""
    live = tip.lives[key]
    before = checked.get(key)
    if before is not None and before.entry == live.entry:
        return None
    try:
        if live.parts is None:
            hasher, ranges = _remaining(before, live.pieces)
            wanted = [piece for piece in ranges if isinstance(piece, Range)]
            found = iter((yield from ask(_fetching(wanted))))
            for piece in ranges:
                for part in next(found) if isinstance(piece, Range) else (piece,):
                    hasher.update(part)
        else:
            hasher = live.hasher
            decode_live(live)
    except HoldfastError as error:
        checked.pop(key, None)
        return error.what
    if hasher.digest() != live.entry.digest:
        checked.pop(key, None)
        return "its bytes do not match their digest"
    checked[key] = _Checked(live.entry, live.pieces, hasher)
    return None


def _remaining(before: _Checked | None, pieces: list[Piece]) -> tuple[Any, list[Piece]]:
    """Return a hasher and the pieces it has yet to see: only the new end if the value merely grew."""
    if before is not None and before.pieces and len(pieces) >= len(before.pieces):
        last, now = before.pieces[-1], pieces[len(before.pieces) - 1]
        if (
            pieces[: len(before.pieces) - 1] == before.pieces[:-1]
            and isinstance(last, Range)
            and isinstance(now, Range)
            and (now.source, now.start) == (last.source, last.start)
            and now.length >= last.length
        ):
            rest: list[Piece] = [*pieces[len(before.pieces) :]]
            if now.length > last.length:
                rest.insert(0, Range(now.source, now.start + last.length, now.length - last.length))
            return before.hasher.copy(), rest
    return hashlib.sha256(), pieces


def _finding(row: Row, kind: str, what: str, key: str | None = None) -> Finding:
    where = f"checkpoint {row.id}" + (f", state.{key}" if key else "")
    return Finding(kind, where, what, row.lane.thread, row.id, key)


def _fetching(ranges: list[Range]) -> Callable[[Backend], list[list[bytes]]]:
    return lambda store: store.fetch(ranges)
