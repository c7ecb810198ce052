"""A checkpoint taken out of a store, as a file: everything of it that could be read, and why it was taken out.

The file is ``BSQ1``, the SHA-256 of the rest, and the rest: a msgpack map, described in docs/repair.md. Its name is
made of hashes, so that no id becomes a path, and taking the same checkpoint out twice gives the same file.
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
from backstay.pieces.piece import Piece, Range, piece_length
from backstay.store.atomic import write_whole
from backstay.store.base import Backend, Finding, Row
from backstay.thread.records import all_records
from backstay.upkeep.overlay import Overlay
from backstay.upkeep.search import tip_of

MAGIC = b"BSQ1"
SUFFIX = ".quarantine"
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What a quarantine file holds. ``values`` is None if not even the manifest could be read."""

    checkpoint: dict[str, Any]  # the row: lane, id, digest, notes, manifest and so on, as they were stored
    values: list[dict[str, Any]] | None  # key, kind, count, size, digest, and parts: [offset, bytes] that could be read
    writes: list[dict[str, Any]]
    interrupts: list[dict[str, Any]]
    findings: list[dict[str, Any]]  # why


def describe(store: Overlay, row: Row, findings: Sequence[Finding]) -> Quarantined:
    """Return everything that can be read of a checkpoint."""
    checkpoint = {name: value for name, value in row._asdict().items() if name not in ("lane", "writes")}
    checkpoint["lane"], checkpoint["tags"] = list(row.lane), list(row.tags)
    return Quarantined(
        checkpoint,
        _values(store, row),
        [asdict(write) for write in row.writes],
        _interrupts(store, row),
        [finding.to_dict() for finding in findings],
    )


def write_quarantine(folder: Path, quarantined: Quarantined) -> Path:
    """Write a file that is there whole and for good when this returns; return its path."""
    body = ormsgpack.packb(asdict(quarantined))
    digest = hashlib.sha256(body).digest()
    named = quarantined.checkpoint
    name = hashlib.sha256("\0".join((named["lane"][0], named["id"])).encode()).hexdigest()
    path = folder / f"{name[:32]}-{digest.hex()[:16]}{SUFFIX}"
    write_whole(path, MAGIC + digest + body)
    return path


def read_quarantine(path: str | Path) -> Quarantined:
    """Read a quarantine file; Corrupted if it is not as it was written."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    digest, body = data[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES], data[len(MAGIC) + _DIGEST_BYTES :]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != digest:
        raise Corrupted("this is no quarantine file, or a damaged one", path=str(path))
    return Quarantined(**ormsgpack.unpackb(body))


def _values(store: Overlay, row: Row) -> list[dict[str, Any]] | None:
    try:
        lives = tip_of(store, row).lives
    except BackstayError:
        return None
    return [
        {
            "key": key,
            "kind": live.entry.kind,
            "count": live.entry.count,
            "size": live.entry.size,
            "digest": live.entry.digest,
            "parts": _parts(store, [live.entry.body] if live.entry.body is not None else live.pieces),
        }
        for key, live in lives.items()
    ]


def _parts(store: Overlay, pieces: Sequence[Piece]) -> list[tuple[int, bytes]]:
    """Return the pieces that can be read, each with its place in the value."""
    parts: list[tuple[int, bytes]] = []
    position = 0
    for piece in pieces:
        try:
            data = b"".join(store.fetch([piece])[0]) if isinstance(piece, Range) else piece
            parts.append((position, data))
        except BackstayError:
            pass  # what cannot be read is what is missing between the parts
        position += piece_length(piece)
    return parts


def _interrupts(store: Overlay | Backend, row: Row) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with contextlib.suppress(BackstayError):  # what can be read before that is kept
        for each in all_records(store, "interrupt", row.lane.namespace, row.lane.thread):
            if each.checkpoint == row.id:
                found.append({**asdict(each), "lane": list(each.lane)})
    return found
