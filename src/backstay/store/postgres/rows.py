"""Ids and rows as the tables store them. Bytes only, no I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from backstay.pieces.manifest import Source
from backstay.store.base import BranchKey, Row
from backstay.store.layout import (
    SEQ_MAX,
    Chunk,
    checksum_of,
    unpack_or_nothing,
    unreadable_id,
    uuid_bytes,
    uuid_text,
)
from backstay.store.writes import Packed, read

_TEXT, _LONG_TEXT = b"\1", b"\2\2"
_UUID_BYTES = 16


def pack_id(namespace: str, name: str) -> bytes:
    """Return an id as it is stored: a UUID of the default namespace as its bytes, any other as text with its namespace.

    Names hold no NUL, so the namespace cannot be mistaken for part of an id.
    """
    raw = None if namespace else uuid_bytes(name)
    return raw if raw is not None else _pack_text(f"{namespace}\0{name}")


def unpack_id(stored: bytes) -> str:
    """Return the id that ``pack_id`` stored."""
    if len(stored) == _UUID_BYTES:
        return uuid_text(stored)
    name = stored[stored.find(b"\0") + 1 :] if stored.startswith((_TEXT, _LONG_TEXT)) else b""
    try:
        return name.decode() if name and b"\0" not in name else unreadable_id(stored)
    except ValueError:
        return unreadable_id(stored)


def pack_task(task: str) -> bytes:
    """Return a task's id as it is stored: a UUID as its bytes."""
    raw = uuid_bytes(task)
    return raw if raw is not None else _pack_text(task)


def unpack_task(stored: bytes) -> str:
    """Return the id that ``pack_task`` stored."""
    if len(stored) == _UUID_BYTES:
        return uuid_text(stored)
    return stored[len(_LONG_TEXT) if stored.startswith(_LONG_TEXT) else len(_TEXT) :].decode(errors="replace")


def _pack_text(text: str) -> bytes:
    """Return an id that is not a UUID: never 16 bytes long."""
    data = text.encode()
    return (_TEXT if len(data) + len(_TEXT) != _UUID_BYTES else _LONG_TEXT) + data


def reference_columns(
    sources: Collection[Source], owned: Collection[int] = ()
) -> tuple[list[int], list[bool], list[bytes]]:
    """Return sources as the columns of ``ref``: streams, whether the branch owns them, and digests of blobs."""
    streams = [source if isinstance(source, int) else 0 for source in sources]
    digests = [source if isinstance(source, bytes) else b"" for source in sources]
    return streams, [stream in owned for stream in streams], digests


def split_fresh(address: int, body: bytes, checks: bytes) -> list[Chunk]:
    """Return the bytes of each save in a row of ``fresh`` as a row of ``chunk``; if it is unclear, one damaged row."""
    chunks: list[Chunk] = []
    start = 0
    for mark in range(0, len(checks), 8):
        size = int.from_bytes(checks[mark : mark + 4])
        chunks.append((address + start, size, body[start : start + size] + checks[mark + 4 : mark + 8]))
        start += size
    if start == len(body) and len(checks) % 8 == 0:
        return chunks
    return [(address, len(body), body + checksum_of(body + b"damaged"))]


BRANCH_COLUMNS = "br.id, t.id, t.namespace, t.name, br.scope, br.name"
ROW_COLUMNS = """c.key, c.id, c.parent, c.parent_digest, c.step, c.created, c.digest, c.size, c.notes,
  ARRAY(SELECT g.name FROM {schema}.tag g WHERE g.checkpoint = c.key ORDER BY g.name)"""
PAYLOAD_COLUMNS = "c.base, b.size, b.body, c.manifest, p.digest"
WRITE_COLUMNS = """(SELECT pg_catalog.array_agg(ARRAY[w.task, pg_catalog.int4send(w.size), w.body])
  FROM {schema}.write w WHERE w.thread = t.id AND w.scope = br.scope AND w.checkpoint = c.id)"""


def read_row(branch: BranchKey, thread: int, fields: tuple[Any, ...], payload: bool, writes: bool) -> Row:
    """Return a row from its columns: ``ROW_COLUMNS``, then ``PAYLOAD_COLUMNS`` and ``WRITE_COLUMNS`` if asked for."""
    key, name, parent, parent_digest, step, created, digest, size, notes, tags = fields[:10]
    base = base_data = None
    manifest = b""
    if payload:
        base, base_size, base_body, manifest, present_parent_digest = fields[10:15]
        parent_digest = parent_digest or present_parent_digest
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
        parent_digest or None,
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
