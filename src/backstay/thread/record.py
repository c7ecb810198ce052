"""Between a store's rows and the caller's records: notes, digests, metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from zlib import crc32

import ormsgpack

from backstay.codec import decode_stored, encode
from backstay.errors import Corrupted, DecodeError, EncodeError, InvalidInput
from backstay.model.checkpoint import (
    EPOCH,
    NOTE_KEYS,
    NOTE_TYPES,
    CheckpointMeta,
    Notes,
    Write,
    bare,
    notes_from_plain,
    notes_to_plain,
)
from backstay.model.damaged import Damaged
from backstay.model.fields import DESCRIPTION_BYTES_MAX, STEP_MAX, check_fields, check_tags
from backstay.model.ids import check_label
from backstay.pieces.body import from_body, to_body
from backstay.pieces.manifest import Key
from backstay.store.base import Backend, LaneKey, Row, WriteRow
from backstay.store.layout import UNREADABLE, uuid_bytes, uuid_text

NO_PARENT = bytes(32)
CHECKSUM_BYTES = 4
_ELSEWHERE = ("frames", "path")  # notes that are kept with the payload
_RUN_ID = NOTE_KEYS["run_id"]  # stored as 16 bytes if it is a UUID
MICROSECOND = timedelta(microseconds=1)
_EXACT_US = 4_102_444_800_000_000  # until the year 2100 a float of seconds names every microsecond exactly
_from_timestamp = datetime.fromtimestamp


def to_microseconds(moment: datetime) -> int:
    """Return a UTC moment as whole microseconds since 1970."""
    return (moment - EPOCH) // MICROSECOND


def from_microseconds(count: int) -> datetime:
    """Return the UTC moment of ``to_microseconds``."""
    if 0 <= count < _EXACT_US:
        return _from_timestamp(count / 1_000_000, UTC)  # a third of the other way's time
    try:
        return EPOCH + timedelta(microseconds=count)
    except (OverflowError, TypeError) as error:
        raise DecodeError("a stored moment is none that a calendar has") from error


def new_meta(
    lane: LaneKey, name: str, parent_id: str | None, step: int, created: datetime, notes: Notes
) -> CheckpointMeta:
    """Return the metadata of a checkpoint that is about to be saved. Only what a caller gave needs checking here."""
    values: dict[str, Any] = {
        "id": name,
        "thread_id": lane.thread,
        "namespace": lane.namespace,
        "scope": lane.scope,
        "branch": lane.branch,
        "parent_id": parent_id,
        "step": step,
        "created_at": created,
    }
    if notes:
        values.update(check_fields({key: value for key, value in notes.items() if key not in _ELSEWHERE}))
    return bare(CheckpointMeta, values)


def encode_notes(meta: CheckpointMeta, created_us: int, described: bool = True) -> bytes:
    """Return the described fields as bytes, none for those at their defaults, and a checksum of all that lists show.

    Of one that was not ``described``, only the checksum. The checkpoint's digest covers more, but needs the manifest; a
    list of thousands must notice damage without it.
    """
    plain = notes_to_plain(meta.__dict__) if described else {}
    run_id = plain.get(_RUN_ID)
    if run_id is not None:
        plain[_RUN_ID] = _packed(run_id)
    body = encode(plain, "checkpoint") if plain else b""
    if len(body) > DESCRIPTION_BYTES_MAX:
        raise too_large("the description of a checkpoint", len(body), DESCRIPTION_BYTES_MAX, "checkpoint", plain)
    return body + checksum(body, meta.id, meta.parent_id, meta.step, created_us)


def checksum(body: bytes, name: str, parent_id: str | None, step: int, created_us: int) -> bytes:
    """Return the checksum that stands behind the notes."""
    beside = f"{name}\0{parent_id or ''}\0{step} {created_us}".encode()
    return crc32(beside, crc32(body)).to_bytes(CHECKSUM_BYTES)


def too_large(what: str, size: int, most: int, path: str, fields: Mapping[str, Any]) -> EncodeError:
    """Return the error for something that every list would read again; its path leads to the largest part of it."""
    inner: Any = fields
    while isinstance(inner, dict) and inner:
        name = max(inner, key=lambda key: len(encode(inner[key])))
        path, inner = f"{path}.{name}", inner[name]
    return EncodeError(
        f"{what} takes {size} bytes encoded, more than {most}; {path:.200} is the largest part",
        path=path,
        hint="Put large values into the state, which lists do not read",
    )


@lru_cache(maxsize=64)
def _packed(run_id: str) -> bytes | str:
    """Return the shorter form of a run's id, which is the same in every step of the run."""
    return uuid_bytes(run_id) or run_id


def decode_notes(notes: bytes) -> dict[str, Any]:
    """Return the described fields that differ from their defaults."""
    try:
        values = notes_from_plain(decode_stored(notes))
        run_id = values.get("run_id")
        if type(run_id) is bytes:
            values["run_id"] = uuid_text(run_id)
        for name, value in values.items():  # no other form was ever written; what reads it relies on that
            if type(value) not in NOTE_TYPES[name]:
                raise TypeError(name)
    except DecodeError:
        raise
    except (InvalidInput, AttributeError, KeyError, TypeError, ValueError) as error:  # damaged, yet something else
        raise DecodeError("its description is not of the known form") from error
    return values


def checkpoint_digest(
    parent: bytes, root: bytes, keys: Sequence[Key], meta: CheckpointMeta, created_us: int, notes: bytes
) -> bytes:
    """Return the digest that covers the parent's digest, the content, the order of its keys and the description."""
    identity = (
        meta.id,
        meta.namespace,
        meta.thread_id,
        meta.scope,
        meta.branch,
        meta.parent_id or "",
        meta.step,
        created_us,
        list(keys),
    )
    return hashlib.sha256(b"".join((parent, root, ormsgpack.packb(list(identity)), notes))).digest()


def parent_digest(row: Row) -> bytes | None:
    """Return the digest of the parent of a row found with its payload; None if it should be there and is not."""
    return NO_PARENT if row.parent_id is None else row.parent_digest


def meta_of(row: Row) -> CheckpointMeta:
    """Return a stored checkpoint's metadata."""
    return bare(CheckpointMeta, values_of(row))


def entry_of(row: Row) -> CheckpointMeta | Damaged:
    """Return a stored checkpoint's metadata as lists show it, or what stands for it."""
    try:
        return meta_of(row)
    except Corrupted as error:
        return Damaged(thread_id=row.lane.thread, id=readable_id(row), seq=row.seq, error=error)


def readable_id(row: Row) -> str | None:
    """Return a row's id; None if it cannot be read."""
    return None if UNREADABLE in row.id else row.id


def damaged(row: Row, what: str, path: str | None = None) -> Corrupted:
    """Return the error about a checkpoint that cannot be read."""
    name = readable_id(row)
    which = f"checkpoint number {row.seq}" if row.seq else "the newest checkpoint"
    place = f"checkpoint {name}" if name else f"{which} of branch {row.lane.branch!r}"
    hint = "Run store.verify() to see what is affected; older checkpoints may be intact"
    return Corrupted(f"{place}: {what}", thread=row.lane.thread, checkpoint=name, path=path, hint=hint)


def values_of(row: Row) -> dict[str, Any]:
    """Return the record's fields of a row; Corrupted if any cannot be read. A list of a thousand does it as often."""
    lane, _, seq, name, parent_id, _, step, created_us, digest, notes, size, tags = row[:12]
    namespace, thread, scope, branch = lane
    try:
        body = notes[:-CHECKSUM_BYTES]
        if notes[-CHECKSUM_BYTES:] != checksum(body, name, parent_id, step, created_us):
            raise DecodeError("its description does not match its checksum" if notes else "it is not there")
        values = {
            "id": name,
            "thread_id": thread,
            "namespace": namespace,
            "scope": scope,
            "branch": branch,
            "seq": seq,
            "parent_id": parent_id,
            "step": step,
            "created_at": from_microseconds(created_us),
            "tags": tags,
            "digest": digest,
            "size": size,
        }
        if body:
            values.update(decode_notes(body))
    except (DecodeError, TypeError, ValueError) as error:
        raise damaged(row, error.what if isinstance(error, DecodeError) else "its row cannot be read") from error
    return values


def tag(store: Backend, namespace: str, name: str, add: Iterable[str], remove: Iterable[str]) -> tuple[str, ...]:
    """Change a checkpoint's tags and return all it has."""
    return store.tag(namespace, name, check_tags(tuple(add)), check_tags(tuple(remove)))


def write(store: Backend, lane: LaneKey, name: str, writes: Iterable[Write], replaces: bool) -> None:
    """Keep results of finished tasks beside a checkpoint."""
    store.write(lane, name, write_rows(writes), replaces)


def write_rows(writes: object) -> list[WriteRow]:
    """Return pending writes with their values encoded; raise InvalidInput unless they are writes that can be stored."""
    if isinstance(writes, str | bytes) or not isinstance(writes, Iterable):
        raise InvalidInput(f"writes must be a list of Write, not {type(writes).__name__}")
    return [write_row(_checked_write(write)) for write in writes]


def _checked_write(write: object) -> Write:
    if not isinstance(write, Write):
        raise InvalidInput(f"writes must be a list of Write, not of {type(write).__name__}")
    for name in ("task_id", "channel", "task_path"):
        check_label(getattr(write, name), f"{name} of a write")
    if type(write.index) is not int or abs(write.index) > STEP_MAX:
        raise InvalidInput(f"index of a write must be a whole number, not {write.index!r:.40}")
    return write


def write_row(write: Write) -> WriteRow:
    """Return a pending write with its value encoded."""
    body = to_body(write.value, f"writes[{write.task_id}][{write.index}]")
    return WriteRow(write.task_id, write.index, write.channel, body.kind, body.count, body.data, write.task_path)


def write_of(row: WriteRow) -> Write:
    """Return a stored pending write."""
    return Write(row.task_id, row.index, row.channel, from_body(row.kind, row.count, [row.body]), row.task_path)
