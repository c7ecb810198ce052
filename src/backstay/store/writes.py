"""The pending writes of a task, packed into one row, for both SQL stores. Bytes only, no I/O.

A task's writes are stored and read together, and many are smaller than the overhead of a row. So they are one row:
msgpack of ``[path, write, write, …]`` in the order of their indexes, compressed if that is shorter, and a CRC-32 over
that, the checkpoint's id and the task's. A write is ``[index, channel, kind, count, body]``, plus its own path if that
differs from the first one's.

Small writes are mostly alike: names of channels, and the fields of a chat message. The compression dictionary holds
these words, so a message of fifty characters takes half the space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

import ormsgpack

from backstay.codec.compression import Words
from backstay.errors import Corrupted, DecodeError, EncodeError
from backstay.store.base import WriteRow

_WORDS = Words(
    b"=null =msgpack ={msgpack =[msgpack branch:to: __interrupt__ __resume__ __error__ "
    b"~__pregel_push, ~__pregel_pull, messages"
    b"\xbelangchain_core.messages.system\xadSystemMessage"
    b"\xbclangchain_core.messages.tool\xabToolMessage\xactool_call_id\xa6status\xa7success\xa8artifact"
    b"\xbdlangchain_core.messages.human\xacHumanMessage\x86\xa7content\xda\xb1additional_kwargs\x80"
    b"\xb1response_metadata\x80\xa4type\xa5human\xa4name\xc0\xa2id\xd9$"
    b"\xbalangchain_core.messages.ai\xa9AIMessage\x89\xa7content\xb1additional_kwargs\x80"
    b"\xb1response_metadata\x80\xa4type\xa2ai\xa4name\xc0\xa2id\xd9$lc_run--"
    b"\xaatool_calls\x90\xb2invalid_tool_calls\x90\xaeusage_metadata\xc0\xb3model_validate_json"
)
"""Part of the format of both SQL stores: never changed."""

_COMPRESS_BYTES_MIN = 64
_CRC_BYTES = 4
_HINT = "Restore a copy of the store, or delete the checkpoint"
_TYPES = (int, str, str, int, bytes)
_UNKNOWN = ("channel", "kind", "count")


class Packed(NamedTuple):
    """The stored writes of one task: a body of exactly this size, without its checksum, is not compressed."""

    size: int
    body: bytes


def by_task(writes: Iterable[WriteRow]) -> dict[str, list[WriteRow]]:
    """Return the writes grouped by task, in order."""
    tasks: dict[str, list[WriteRow]] = {}
    for row in writes:
        tasks.setdefault(row.task_id, []).append(row)
    return tasks


def merge(existing: Iterable[WriteRow], new: Iterable[WriteRow], replace: bool) -> list[WriteRow]:
    """Return a task's writes with ``new`` ones added, by index; an existing index stays unless ``replace``."""
    kept = {row.index: row for row in existing}
    for row in new:
        if replace or row.index not in kept:
            kept[row.index] = row
    return [kept[index] for index in sorted(kept)]


def pack(rows: Sequence[WriteRow], checkpoint: str) -> Packed:
    """Return the writes of one task, at least one, in their stored form."""
    path = rows[0].task_path
    packed: list[Any] = [path]
    for row in rows:
        write = [row.index, row.channel, row.kind, row.count, row.body]
        packed.append(write if row.task_path == path else [*write, row.task_path])
    try:
        data = ormsgpack.packb(packed)
    except TypeError as error:  # half a character, or a number beyond 64 bits
        raise EncodeError(f"the writes of task {rows[0].task_id!r} cannot be encoded: {error}") from error
    compressed = _WORDS.compress(data) if len(data) >= _COMPRESS_BYTES_MIN else data
    body = compressed if len(compressed) < len(data) else data
    return Packed(len(data), body + _checksum(body, checkpoint, rows[0].task_id))


def unpack(task: str, packed: Packed, checkpoint: str) -> list[WriteRow]:
    """Return the writes that ``pack`` stored; DecodeError if the bytes are not these writes."""
    size, body = packed.size, packed.body[:-_CRC_BYTES]
    if packed.body[-_CRC_BYTES:] != _checksum(body, checkpoint, task):
        raise DecodeError("packed writes do not match their checksum")
    data = body if len(body) == size else _WORDS.decompress(body, size)
    try:
        path, *writes = ormsgpack.unpackb(data)
        rows = [_row(task, path, *write) for write in writes]
    except (TypeError, ValueError) as error:
        raise DecodeError(f"{len(data)} bytes are not packed writes") from error
    if not rows or any(first.index >= second.index for first, second in pairwise(rows)):
        raise DecodeError(f"{len(data)} bytes are not packed writes")
    return rows


def _checksum(body: bytes, checkpoint: str, task: str) -> bytes:
    names = f"{checkpoint}\0{task}".encode(errors="surrogatepass")
    return crc32(names, crc32(body)).to_bytes(_CRC_BYTES)


class UnreadableWrites(WriteRow):
    """Replaces the writes of a task whose bytes are damaged. Its missing fields raise Corrupted when they are read.

    So damage in one row hides no other row, and the task does not look unfinished.
    """

    __slots__ = ("checkpoint", "thread")
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]] = {  # so that ``asdict`` leaves the missing fields out
        field.name: field for field in fields(WriteRow) if field.name not in _UNKNOWN
    }

    def __init__(self, task: str, body: bytes, thread: str, checkpoint: str) -> None:
        known = {"task_id": task, "index": 0, "body": body, "task_path": "", "thread": thread, "checkpoint": checkpoint}
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _UNKNOWN:
            raise damaged_writes(self.task_id, self.thread, self.checkpoint)
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"Unreadable(task_id={self.task_id!r})"


def damaged_writes(task: str, thread: str, checkpoint: str) -> Corrupted:
    """Return the error for writes that cannot be read."""
    what = f"the writes of task {task!r} at checkpoint {checkpoint} are damaged"
    return Corrupted(what, thread=thread, checkpoint=checkpoint, hint=_HINT)


def read(tasks: Iterable[tuple[str, Packed]], thread: str, checkpoint: str) -> tuple[WriteRow, ...]:
    """Return all writes of a checkpoint, by path, task and index."""
    rows: list[WriteRow] = []
    for task, packed in tasks:
        try:
            rows += unpack(task, packed, checkpoint)
        except DecodeError:
            rows.append(UnreadableWrites(task, packed.body, thread, checkpoint))
    rows.sort(key=lambda row: (row.task_path, row.task_id, row.index))
    return tuple(rows)


def merged(
    task: str, stored: Packed, new: Iterable[WriteRow], replace: bool, thread: str, checkpoint: str
) -> Packed | None:
    """Return the new content of a task's row with ``new`` writes added; None if nothing changes."""
    try:
        existing = unpack(task, stored, checkpoint)
    except DecodeError as error:
        raise damaged_writes(task, thread, checkpoint) from error
    rows = merge(existing, new, replace)
    return None if rows == existing else pack(rows, checkpoint)


def _row(task: str, path: Any, *stored: Any) -> WriteRow:
    write, own = stored[:5], stored[5:] or (path,)
    if tuple(map(type, write)) != _TYPES or tuple(map(type, (path, *own))) != (str, str):
        raise TypeError("a field of another type")
    index, channel, kind, count, body = write
    return WriteRow(task, index, channel, kind, count, body, own[0])
