"""How ids and rows are laid out in the tables. Bytes only, no I/O."""

from __future__ import annotations

from typing import Any

from holdfast.store.base import LaneKey, Row
from holdfast.store.layout import SEQ_MAX, unpack_or_nothing, unreadable_id, uuid_bytes, uuid_text

StoredId = str | bytes
_UUID_BYTES = 16


def pack_id(namespace: str, name: str) -> StoredId:
    """Return an id as it is stored: a UUID as 16 bytes; outside the default namespace prefixed by it.

    Ids hold no NUL, so the prefix cannot be mistaken for part of an id.
    """
    if namespace:
        return f"{namespace}\0{name}"
    return uuid_bytes(name) or name


def unpack_id(stored: StoredId) -> str:
    """Return the id that ``pack_id`` stored."""
    if isinstance(stored, bytes) and len(stored) == _UUID_BYTES:
        return uuid_text(stored)
    name = stored[stored.find("\0") + 1 :] if isinstance(stored, str) else ""
    return name if name and "\0" not in name else unreadable_id(stored)


ROW_COLUMNS = "c.key, c.id, c.parent, c.parent_digest, c.step, c.created, c.digest, c.size, c.notes"
# A base whose row is gone has an empty name, which no blob has: that is damage, and not the same as to have none.
BASE_NAME = "iif(c.base IS NULL, NULL, coalesce(b.digest, x''))"
PAYLOAD_COLUMNS = f"{BASE_NAME}, b.size, b.body, c.manifest, p.digest"


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
            parent_digest = present_parent_digest if parent_digest is None else parent_digest
            base_data = unpack_or_nothing(base_size, base_body) if base_body is not None else None
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
