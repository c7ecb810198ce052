"""Ids and rows as the tables store them. Bytes only, no I/O."""

from __future__ import annotations

from typing import Any

from backstay.store.base import BranchKey, Row
from backstay.store.layout import SEQ_MAX, unpack_or_nothing, unreadable_id, uuid_bytes, uuid_text
from backstay.store.writes import Packed, read

_UUID, _TEXT = b"\0", b"\1"
_UUID_BYTES = 17


def pack_id(namespace: str, name: str) -> bytes:
    """Return an id as it is stored: a UUID of the default namespace as its bytes, any other as text with its namespace.

    Names hold no NUL, so the namespace cannot be mistaken for part of an id.
    """
    raw = None if namespace else uuid_bytes(name)
    return _UUID + raw if raw is not None else _TEXT + f"{namespace}\0{name}".encode()


def unpack_id(stored: bytes) -> str:
    """Return the id that ``pack_id`` stored."""
    if stored[:1] == _UUID and len(stored) == _UUID_BYTES:
        return uuid_text(stored[1:])
    name = stored[stored.find(b"\0") + 1 :] if stored[:1] == _TEXT else b""
    try:
        return name.decode() if name and b"\0" not in name else unreadable_id(stored)
    except ValueError:
        return unreadable_id(stored)


def pack_task(task: str) -> bytes:
    """Return a task's id as it is stored: a UUID as its bytes."""
    raw = uuid_bytes(task)
    return _UUID + raw if raw is not None else _TEXT + task.encode()


def unpack_task(stored: bytes) -> str:
    """Return the id that ``pack_task`` stored."""
    return uuid_text(stored[1:]) if stored[:1] == _UUID else stored[1:].decode(errors="replace")


BRANCH_COLUMNS = "br.id, t.id, t.namespace, t.name, br.scope, br.name"
ROW_COLUMNS = """c.key, c.id, c.parent, c.parent_digest, c.step, c.created, c.digest, c.size, c.notes,
  ARRAY(SELECT g.name FROM {schema}.tag g WHERE g.checkpoint = c.key ORDER BY g.name)"""
# If the base's row is missing its name is empty, which no blob has: that is damage, unlike a row without a base.
BASE_NAME = "CASE WHEN c.base IS NOT NULL THEN coalesce(b.digest, ''::bytea) END"
PAYLOAD_COLUMNS = f"{BASE_NAME}, b.size, b.body, c.manifest, p.digest"
WRITE_COLUMNS = """(SELECT pg_catalog.array_agg(ARRAY[w.task, pg_catalog.int4send(w.size), w.body])
  FROM {schema}.write w WHERE w.thread = t.id AND w.scope = br.scope AND w.checkpoint = c.id)"""


def read_row(branch: BranchKey, thread: int, fields: tuple[Any, ...], payload: bool, writes: bool) -> Row:
    """Return a row from its columns: ``ROW_COLUMNS``, then ``PAYLOAD_COLUMNS`` and ``WRITE_COLUMNS`` if asked for."""
    key, name, parent, parent_digest, step, created, digest, size, notes, tags = fields[:10]
    base = base_data = None
    manifest = b""
    if payload:
        base, base_size, base_body, manifest, present_parent_digest = fields[10:15]
        parent_digest = present_parent_digest if parent_digest is None else parent_digest
        base_data = unpack_or_nothing(base_size, base_body) if base_body is not None else None
    name = unpack_id(name)
    packed = [
        (unpack_task(task), Packed(int.from_bytes(size, signed=True), body))
        for task, size, body in (fields[-1] or () if writes else ())
    ]
    return Row(
        branch,
        thread,
        key & SEQ_MAX,
        name,
        None if parent is None else unpack_id(parent),
        parent_digest,
        step,
        created,
        digest,
        notes,
        size,
        tuple(tags),
        read(packed, branch.thread, name),
        base,
        base_data,
        manifest,
    )
