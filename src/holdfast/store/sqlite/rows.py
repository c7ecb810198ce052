"""How values are laid out in the tables: ids, keys, addresses, compressed bodies. Bytes only, no I/O."""

from __future__ import annotations

import threading
from typing import Any

from holdfast.codec import compress, decompress
from holdfast.pieces.piece import OFFSET_BITS
from holdfast.store.base import LaneKey, Row, WriteRow

SEQ_BITS = 32
SEQ_MAX = (1 << SEQ_BITS) - 1
COMPRESS_BYTES_MIN = 256
REMEMBERED_BYTES_MIN = 32768

StoredId = str | bytes


def key_of(lane: int, seq: int) -> int:
    """Return a checkpoint's primary key."""
    return lane << SEQ_BITS | seq


def address_of(stream: int, offset: int) -> int:
    """Return the address of a byte of a stream."""
    return stream << OFFSET_BITS | offset


def pack_id(namespace: str, name: str) -> StoredId:
    """Return an id as it is stored: a UUID as 16 bytes; outside the default namespace prefixed by it.

    Ids hold no NUL, so the prefix cannot be mistaken for part of an id.
    """
    if namespace:
        return f"{namespace}\0{name}"
    if len(name) == 36:
        try:
            raw = bytes.fromhex(name.replace("-", ""))
        except ValueError:
            return name
        if len(raw) == 16 and _uuid_text(raw) == name:
            return raw
    return name


def unpack_id(stored: StoredId) -> str:
    """Return the id that ``pack_id`` stored."""
    if isinstance(stored, bytes):
        return _uuid_text(stored)
    return stored[stored.find("\0") + 1 :]


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def pack_body(data: bytes, least: int = COMPRESS_BYTES_MIN) -> bytes:
    """Return the bytes compressed if that makes them shorter; only then do they differ in length from the original."""
    if len(data) < least:
        return data
    packed = compress(data)
    return packed if len(packed) < len(data) else data


class _Last(threading.local):
    """The large body this thread unpacked last: reading a history walks through one row of a stream many times."""

    body = plain = b""


_last = _Last()


def unpack_body(size: int, body: bytes) -> bytes:
    """Return the original bytes of ``pack_body``, which were ``size`` long."""
    if len(body) == size:
        return body
    if size < REMEMBERED_BYTES_MIN:
        return decompress(body, size)
    if body != _last.body or size != len(_last.plain):  # comparing costs a fiftieth of unpacking, and is never wrong
        _last.body, _last.plain = b"", b""
        _last.plain = decompress(body, size)
        _last.body = body
    return _last.plain


ROW_COLUMNS = "c.key, c.id, c.parent, c.parent_digest, c.step, c.created, c.digest, c.size, c.notes"
PAYLOAD_COLUMNS = "b.digest, b.size, b.body, c.manifest, p.digest"


def read_row(lane: LaneKey, thread: int, fields: tuple[Any, ...], payload: bool, tags: tuple[str, ...]) -> Row:
    """Return a row from its columns: ``ROW_COLUMNS``, then ``PAYLOAD_COLUMNS`` if there is a payload."""
    return read_rows(lane, thread, [fields], payload, {fields[0]: tags})[0]


def read_rows(
    lane: LaneKey, thread: int, found: list[tuple[Any, ...]], payload: bool, tags: dict[int, tuple[str, ...]]
) -> list[Row]:
    """Return the rows of one lane, given newest first."""
    rows: list[Row] = []
    child_parent, child_parent_text = None, ""
    for fields in found:
        key, name, parent, parent_digest, step, created, digest, size, notes = fields[:9]
        base = base_data = None
        manifest = b""
        if payload:
            base, base_size, base_body, manifest, present_parent_digest = fields[9:14]
            parent_digest = parent_digest or present_parent_digest
            base_data = unpack_body(base_size, base_body) if base_body is not None else None
        # A row is nearly always the parent of the one before it in the list, whose text is at hand then.
        text = child_parent_text if name == child_parent else unpack_id(name)
        child_parent, child_parent_text = parent, "" if parent is None else unpack_id(parent)
        rows.append(
            Row(
                lane,
                thread,
                key & SEQ_MAX,
                text,
                child_parent_text or None,
                parent_digest,
                step,
                created,
                digest,
                notes,
                size,
                tags.get(key, ()),
                (),
                base,
                base_data,
                manifest,
            )
        )
    return rows


def read_write(fields: tuple[Any, ...]) -> WriteRow:
    """Return a pending write from its columns."""
    task, position, path, channel, kind, count, body = fields
    return WriteRow(task, position, channel, kind, count, body, path)
