"""Mutations as bytes. The head of a log record is a mutation without its blobs and chunks, which are the payload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ormsgpack

from backstay.errors import Corrupted, DecodeError
from backstay.store.base import Row, WriteRow
from backstay.store.layout import COMPRESS_AT_ONCE_BYTES, COMPRESS_BYTES_MIN, pack_body
from backstay.store.leases import BranchKey, LeaseRow
from backstay.store.memory.chunks import Content
from backstay.store.memory.mutations import (
    BranchDropped,
    BranchStored,
    BytesStored,
    CheckpointsDeleted,
    CheckpointStored,
    Mutation,
    MutationGroup,
    NumbersReserved,
    Rebuilt,
    RecordsDropped,
    RecordStored,
    RowRestored,
    TagsChanged,
    ThreadDeleted,
    WritesStored,
)
from backstay.store.memory.tables import Counters, ThreadNumbers
from backstay.store.records import Record, RunFacts

Placed = Callable[[int, int], Content]  # (stored size, size) -> the next bytes of the payload


def encode(mutation: Mutation) -> tuple[bytes, bytes]:
    """Return the head and the payload of a mutation's record."""
    parts: list[bytes] = []
    head = ormsgpack.packb(_packed(mutation, parts), default=tuple, option=ormsgpack.OPT_NON_STR_KEYS)
    return head, b"".join(parts)


def decode(head: bytes, placed: Placed) -> Mutation:
    """Return the mutation of a record's head; ``placed`` says where its blobs and chunks are."""
    try:
        return _unpacked(ormsgpack.unpackb(head, option=ormsgpack.OPT_NON_STR_KEYS), placed)
    except (ValueError, TypeError, KeyError, IndexError, DecodeError) as error:
        raise Corrupted("this version of Backstay does not know a record in the log") from error


def _packed(mutation: Mutation, parts: list[bytes]) -> list[Any]:
    kind = _KIND_NUMBERS[type(mutation)]
    return [kind, *_KINDS[kind].pack(mutation, parts)]


def _unpacked(packed: list[Any], placed: Placed) -> Mutation:
    return _KINDS[packed[0]].unpack(packed[1:], placed)


def _pack_row(row: Row) -> list[Any]:
    """Return a row without its writes and its base's bytes."""
    return [list(row.branch), *row[1:11], row.tags, row.base, row.manifest]


def _unpack_row(fields: list[Any]) -> Row:
    branch, *names, tags, base, manifest = fields
    return Row._make((BranchKey(*branch), *names, tuple(tags), (), base, None, manifest))


def _slots(row: Record | WriteRow) -> list[Any]:
    return [getattr(row, name) for name in row.__slots__]


def _unpack_record(fields: list[Any]) -> Record:
    kind, branch, key, body, is_open, checkpoint, version, number, run = fields
    facts = None if run is None else RunFacts(*run)
    return Record(kind, BranchKey(*branch), key, body, is_open, checkpoint, version, number, facts)


def _pack_bytes(mutation: CheckpointStored | BytesStored, parts: list[bytes]) -> list[Any]:
    def add(body: Content, least: int) -> tuple[int, int]:
        data = body.read()
        parts.append(pack_body(data, least))
        return len(parts[-1]), len(data)

    blobs = [(name, *add(body, COMPRESS_BYTES_MIN)) for name, body in mutation.blobs.items()]
    return [blobs, [(stream, offset, *add(body, COMPRESS_AT_ONCE_BYTES)) for stream, offset, body in mutation.chunks]]


def _unpack_bytes(
    packed: Iterable[Iterable[Any]], placed: Placed
) -> tuple[Mapping[bytes, Content], list[tuple[int, int, Content]]]:
    blobs, chunks = packed
    found = {name: placed(stored, size) for name, stored, size in blobs}
    return found, [(stream, offset, placed(stored, size)) for stream, offset, stored, size in chunks]


class _MutationKind(NamedTuple):
    """A class of mutations, its fields as a list, and the mutation from that list."""

    mutation: type
    pack: Callable[[Any, list[bytes]], list[Any]]
    unpack: Callable[[list[Any], Placed], Mutation]


_KINDS = (
    _MutationKind(
        CheckpointStored,
        lambda it, parts: [
            _pack_row(it.row),
            it.branch_number,
            _pack_bytes(it, parts),
            list(it.sources.items()),
            it.origin,
            it.lease,
            it.replaces,
        ],
        lambda fields, placed: CheckpointStored(
            _unpack_row(fields[0]),
            fields[1],
            *_unpack_bytes(fields[2], placed),
            dict(fields[3]),
            fields[4],
            None if fields[5] is None else LeaseRow(*fields[5]),
            fields[6],
        ),
    ),
    _MutationKind(
        BranchStored,
        lambda it, _: [it.key, it.number, it.thread_number, it.lease, it.last_seq, it.origin],
        lambda fields, _: BranchStored(
            BranchKey(*fields[0]), fields[1], fields[2], LeaseRow(*fields[3]), fields[4], fields[5]
        ),
    ),
    _MutationKind(
        BranchDropped,
        lambda it, _: [it.key, it.counters],
        lambda fields, _: BranchDropped(BranchKey(*fields[0]), Counters(*fields[1])),
    ),
    _MutationKind(
        WritesStored,
        lambda it, _: [it.branch, it.thread_number, it.checkpoint, [_slots(row) for row in it.rows]],
        lambda fields, _: WritesStored(
            BranchKey(*fields[0]), fields[1], fields[2], [WriteRow(*row) for row in fields[3]]
        ),
    ),
    _MutationKind(
        TagsChanged,
        lambda it, _: [it.branch, it.checkpoint, it.tags],
        lambda fields, _: TagsChanged(BranchKey(*fields[0]), fields[1], tuple(fields[2])),
    ),
    _MutationKind(
        CheckpointsDeleted,
        lambda it, _: [
            it.namespace,
            dict(it.digests),
            list(it.branches.items()),
            it.counters,
            list(it.threads),
            it.keeps_bytes,
        ],
        lambda fields, _: CheckpointsDeleted(
            fields[0],
            fields[1],
            {BranchKey(*key): is_empty for key, is_empty in fields[2]},
            Counters(*fields[3]),
            [ThreadNumbers(*each) for each in fields[4]],
            fields[5],
        ),
    ),
    _MutationKind(
        ThreadDeleted,
        lambda it, _: [it.namespace, it.thread, dict(it.digests), it.counters],
        lambda fields, _: ThreadDeleted(fields[0], fields[1], fields[2], Counters(*fields[3])),
    ),
    _MutationKind(
        RecordStored,
        lambda it, _: [_slots(it.record), it.thread_number],
        lambda fields, _: RecordStored(_unpack_record(fields[0]), fields[1]),
    ),
    _MutationKind(
        NumbersReserved,
        lambda it, _: [it.counters, list(it.threads)],
        lambda fields, _: NumbersReserved(Counters(*fields[0]), [ThreadNumbers(*each) for each in fields[1]]),
    ),
    _MutationKind(
        BytesStored,
        lambda it, parts: [_pack_bytes(it, parts)],
        lambda fields, placed: BytesStored(*_unpack_bytes(fields[0], placed)),
    ),
    _MutationKind(
        MutationGroup,
        lambda it, parts: [[_packed(each, parts) for each in it.mutations]],
        lambda fields, placed: MutationGroup([_unpacked(each, placed) for each in fields[0]]),
    ),
    _MutationKind(
        RowRestored,
        lambda it, _: [_pack_row(it.row), it.sources, it.last_seq],
        lambda fields, _: RowRestored(_unpack_row(fields[0]), tuple(fields[1]), fields[2]),
    ),
    _MutationKind(Rebuilt, lambda it, _: [it.drops], lambda fields, _: Rebuilt(fields[0])),
    _MutationKind(
        RecordsDropped,
        lambda it, _: [list(it.names), it.counters],
        lambda fields, _: RecordsDropped(
            [(kind, BranchKey(*branch), key, version) for kind, branch, key, version in fields[0]], Counters(*fields[1])
        ),
    ),
)
"""A kind's index in this list is its number in the files: new kinds come at the end."""

_KIND_NUMBERS = {kind.mutation: number for number, kind in enumerate(_KINDS)}
