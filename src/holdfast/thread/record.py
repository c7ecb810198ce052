"""Between a store's rows and the caller's records: notes, digests, metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import ormsgpack

from holdfast.codec import decode, encode
from holdfast.model.checkpoint import (
    EPOCH,
    CheckpointMeta,
    Notes,
    Write,
    bare,
    notes_from_plain,
    notes_to_plain,
)
from holdfast.pieces.body import from_body, to_body
from holdfast.pieces.manifest import Key
from holdfast.store.base import LaneKey, Row, WriteRow

NO_PARENT = bytes(32)
_MICROSECOND = timedelta(microseconds=1)


def to_microseconds(moment: datetime) -> int:
    """Return a UTC moment as whole microseconds since 1970."""
    return (moment - EPOCH) // _MICROSECOND


def from_microseconds(count: int) -> datetime:
    """Return the UTC moment of ``to_microseconds``."""
    return EPOCH + timedelta(microseconds=count)


def utc(moment: datetime) -> datetime:
    """Return an aware moment in UTC; a naive one is returned as it is, to be refused by the record."""
    return moment.astimezone(UTC) if moment.tzinfo is not None else moment


def new_meta(
    lane: LaneKey, name: str, parent_id: str | None, step: int, created: datetime, notes: Notes
) -> CheckpointMeta:
    """Return the checked metadata of a checkpoint that is about to be saved."""
    described = {key: value for key, value in notes.items() if key not in ("frames", "path", "step", "created_at")}
    return CheckpointMeta(
        id=name,
        thread_id=lane.thread,
        namespace=lane.namespace,
        scope=lane.scope,
        branch=lane.branch,
        parent_id=parent_id,
        step=step,
        created_at=utc(created),
        **described,  # type: ignore[arg-type]  # Notes' keys are fields of the record; its constructor checks the values
    )


def encode_notes(meta: CheckpointMeta) -> bytes:
    """Return the described fields as bytes; nothing at all if they are all at their defaults."""
    plain = notes_to_plain(meta)
    return encode(plain, "notes") if plain else b""


def needle(name: str, value: object) -> bytes:
    """Return the bytes that the notes of a checkpoint with this field (or metadata key) must contain."""
    return encode(name, "filter") + encode(value, f"filter.{name}")


def checkpoint_digest(parent: bytes, root: bytes, keys: Sequence[Key], meta: CheckpointMeta, notes: bytes) -> bytes:
    """Return the digest that covers the parent's digest, the content, the order of its keys and the description."""
    identity = (
        meta.id,
        meta.namespace,
        meta.thread_id,
        meta.scope,
        meta.branch,
        meta.parent_id or "",
        meta.step,
        to_microseconds(meta.created_at),
        list(keys),
    )
    return hashlib.sha256(b"".join((parent, root, ormsgpack.packb(list(identity)), notes))).digest()


def meta_of(row: Row) -> CheckpointMeta:
    """Return a stored checkpoint's metadata. This is what lists cost, so it does nothing twice."""
    return bare(CheckpointMeta, values_of(row))


def values_of(row: Row) -> dict[str, Any]:
    """Return the record's fields of a row."""
    values = notes_from_plain(decode(row.notes)) if row.notes else {}
    lane = row.lane
    values.update(
        id=row.id,
        thread_id=lane.thread,
        namespace=lane.namespace,
        scope=lane.scope,
        branch=lane.branch,
        seq=row.seq,
        parent_id=row.parent_id,
        step=row.step,
        created_at=from_microseconds(row.created_us),
        tags=row.tags,
        digest=row.digest,
        size=row.size,
    )
    return values


def write_row(write: Write) -> WriteRow:
    """Return a pending write with its value encoded."""
    body = to_body(write.value, f"writes[{write.task_id}][{write.index}]")
    return WriteRow(write.task_id, write.index, write.channel, body.kind, body.count, body.data, write.task_path)


def write_of(row: WriteRow) -> Write:
    """Return a stored pending write."""
    return Write(row.task_id, row.index, row.channel, from_body(row.kind, row.count, [row.body]), row.task_path)
