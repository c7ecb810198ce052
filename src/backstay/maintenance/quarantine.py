"""Quarantine files: a damaged checkpoint taken out of a store, with everything in it that is still readable, and why.

A file is ``BSQ1``, the SHA-256 of the rest, and the rest: a msgpack map, described in docs/repair.md. Its name is made
from hashes, so that no id becomes a path, and quarantining the same checkpoint twice gives the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ormsgpack

from backstay.errors import BackstayError, Corrupted, StoreError
from backstay.maintenance.search import Overlay, state_of
from backstay.operations.records import all_records
from backstay.pieces.head_state import StoredValue
from backstay.pieces.manifest import Range, piece_length
from backstay.store.atomic import write_whole
from backstay.store.base import Finding, Row

MAGIC = b"BSQ1"
SUFFIX = ".quarantine"
_DIGEST_BYTES = 32
_SEARCH_BYTES_MIN = 32


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The content of a quarantine file. ``values`` is None if the manifest was unreadable."""

    checkpoint: dict[str, Any]  # the stored row: branch, id, digest, notes, manifest and so on
    values: list[dict[str, Any]] | None  # key, kind, count, size, digest, and parts: [offset, bytes] that were readable
    writes: list[dict[str, Any]]
    interrupts: list[dict[str, Any]]
    findings: list[dict[str, Any]]  # why it was quarantined


def describe(store: Overlay, row: Row, findings: Sequence[Finding]) -> Quarantined:
    """Return everything in a checkpoint that can be read."""
    checkpoint = {name: value for name, value in row._asdict().items() if name not in ("branch", "writes")}
    checkpoint["branch"], checkpoint["tags"] = list(row.branch), list(row.tags)
    values: list[dict[str, Any]] | None
    try:
        values = [
            {
                "key": key,
                "kind": value.entry.kind,
                "count": value.entry.count,
                "size": value.entry.size,
                "digest": value.entry.digest,
                "parts": _readable_parts(store, value),
            }
            for key, value in state_of(store, row).values.items()
        ]
    except BackstayError:
        values = None
    interrupts: list[dict[str, Any]] = []
    with contextlib.suppress(BackstayError):  # if the list ends with an error, the interrupts before it are kept
        for each in all_records(store, "interrupt", row.branch.namespace, row.branch.thread):
            if each.checkpoint == row.id:
                interrupts.append({**asdict(each), "branch": list(each.branch)})
    writes = [asdict(write) for write in row.writes]
    return Quarantined(checkpoint, values, writes, interrupts, [finding.to_dict() for finding in findings])


def _readable_parts(store: Overlay, value: StoredValue) -> list[tuple[int, bytes]]:
    """Return the pieces of a value that can be read, each with its offset. Gaps between them are lost bytes."""
    parts: list[tuple[int, bytes]] = []
    position = 0
    for piece in value.pieces if value.entry.body is None else [value.entry.body]:
        found = _readable(store, piece) if isinstance(piece, Range) else [(0, piece)]
        parts += [(position + offset, data) for offset, data in found]
        position += piece_length(piece)
    return parts


def _readable(store: Overlay, piece: Range) -> list[tuple[int, bytes]]:
    """Return the parts of a range that can be read. It may be stored in many rows, and not all of these are damaged."""
    try:
        return [(0, b"".join(store.fetch([piece])[0]))]
    except BackstayError:
        half = piece.length // 2
        if half < _SEARCH_BYTES_MIN:
            return []
    first, second = Range(piece.source, piece.start, half), Range(piece.source, piece.start + half, piece.length - half)
    return _readable(store, first) + [(half + offset, data) for offset, data in _readable(store, second)]


def write_quarantine(folder: Path, quarantined: Quarantined) -> Path:
    """Write a quarantine file and return its path. The file is complete and durable when this returns."""
    body = ormsgpack.packb(asdict(quarantined))
    digest = hashlib.sha256(body).digest()
    checkpoint = quarantined.checkpoint
    name = hashlib.sha256("\0".join((checkpoint["branch"][0], checkpoint["id"])).encode()).hexdigest()
    path = folder / f"{name[:32]}-{digest.hex()[:16]}{SUFFIX}"
    write_whole(path, MAGIC + digest + body)
    return path


def read_quarantine(path: str | Path) -> Quarantined:
    """Read a quarantine file; raise Corrupted if it changed since it was written."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    digest, body = data[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES], data[len(MAGIC) + _DIGEST_BYTES :]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != digest:
        raise Corrupted(
            f"{path} is not a quarantine file, or it is damaged", path=str(path), hint="Use another copy of the file"
        )
    return Quarantined(**ormsgpack.unpackb(body))
