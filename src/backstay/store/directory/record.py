"""Records: facts as bytes. The head of a record is a fact without its blobs and chunks, which are its payload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ormsgpack

from backstay.errors import Corrupted, DecodeError
from backstay.store.base import Row, WriteRow
from backstay.store.boot import Moment
from backstay.store.lane import LaneKey
from backstay.store.layout import COMPRESS_AT_ONCE_BYTES, COMPRESS_BYTES_MIN, pack_body
from backstay.store.memory.chunks import Body
from backstay.store.memory.fact import (
    BytesKept,
    Counters,
    Deleted,
    Fact,
    LaneDropped,
    LaneSet,
    Marked,
    Rebuilt,
    RecordSet,
    RowSet,
    Saved,
    Several,
    Tagged,
    ThreadDeleted,
    ThreadMark,
    Wrote,
)
from backstay.store.records import Record
from backstay.store.tenure import Tenure

Placed = Callable[[int, int], Body]  # (stored size, size) -> the bytes of the payload that come next


def encode(fact: Fact) -> tuple[bytes, bytes]:
    """Return the head and the payload of a fact's record."""
    parts: list[bytes] = []
    head = ormsgpack.packb(_packed(fact, parts), default=tuple, option=ormsgpack.OPT_NON_STR_KEYS)
    return head, b"".join(parts)


def decode(head: bytes, placed: Placed) -> Fact:
    """Return the fact of a record's head; its blobs and chunks are where ``placed`` says."""
    try:
        return _unpacked(ormsgpack.unpackb(head, option=ormsgpack.OPT_NON_STR_KEYS), placed)
    except (ValueError, TypeError, KeyError, IndexError, DecodeError) as error:
        raise Corrupted("a record of the log is none that this version knows") from error


def _packed(fact: Fact, parts: list[bytes]) -> list[Any]:
    kind = _NUMBERS[type(fact)]
    return [kind, *_KINDS[kind].pack(fact, parts)]


def _unpacked(packed: list[Any], placed: Placed) -> Fact:
    return _KINDS[packed[0]].unpack(packed[1:], placed)


# Each kind of fact ------------------------------------------------------------------------------------------------


def _pack_saved(fact: Saved, parts: list[bytes]) -> list[Any]:
    needs = list(fact.sources.items())
    return [
        _pack_row(fact.row),
        fact.lane_number,
        _pack_bytes(fact, parts),
        needs,
        fact.origin,
        fact.tenure,
        fact.replaces,
    ]


def _unpack_saved(fields: list[Any], placed: Placed) -> Saved:
    row, number, kept, needs, origin, tenure, replaces = fields
    extended = None if tenure is None else Tenure(*tenure)
    return Saved(_unpack_row(row), number, *_unpack_bytes(kept, placed), dict(needs), origin, extended, replaces)


def _pack_lane(fact: LaneSet, _: list[bytes]) -> list[Any]:
    return [fact.key, fact.number, fact.thread_number, fact.tenure, fact.last_seq, fact.origin]


def _unpack_lane(fields: list[Any], _: Placed) -> LaneSet:
    key, number, thread_number, tenure, last_seq, origin = fields
    return LaneSet(LaneKey(*key), number, thread_number, Tenure(*tenure), last_seq, origin)


def _pack_wrote(fact: Wrote, _: list[bytes]) -> list[Any]:
    return [fact.lane, fact.thread_number, fact.checkpoint, [_fields(row) for row in fact.rows]]


def _unpack_wrote(fields: list[Any], _: Placed) -> Wrote:
    lane, thread_number, checkpoint, rows = fields
    return Wrote(LaneKey(*lane), thread_number, checkpoint, [WriteRow(*row) for row in rows])


def _pack_deleted(fact: Deleted, _: list[bytes]) -> list[Any]:
    return [fact.namespace, dict(fact.digests), fact.counters, list(fact.threads), fact.keeps_bytes]


def _unpack_deleted(fields: list[Any], _: Placed) -> Deleted:
    namespace, digests, counters, threads, keeps_bytes = fields
    return Deleted(namespace, digests, Counters(*counters), [ThreadMark(*mark) for mark in threads], keeps_bytes)


def _pack_row(row: Row) -> list[Any]:
    """Return a row without its writes and its base's bytes."""
    return [list(row.lane), *row[1:11], row.tags, row.base, row.manifest]


def _unpack_row(fields: list[Any]) -> Row:
    lane, *names, tags, base, manifest = fields
    return Row._make((LaneKey(*lane), *names, tuple(tags), (), base, None, manifest))


def _unpack_record(fields: list[Any], _: Placed) -> RecordSet:
    (kind, lane, *rest), thread_number, expiry = fields
    return RecordSet(Record(kind, LaneKey(*lane), *rest), thread_number, None if expiry is None else Moment(*expiry))


class _Kind(NamedTuple):
    fact: type
    pack: Callable[[Any, list[bytes]], list[Any]]
    unpack: Callable[[list[Any], Placed], Fact]


_KINDS = (
    _Kind(Saved, _pack_saved, _unpack_saved),
    _Kind(LaneSet, _pack_lane, _unpack_lane),
    _Kind(
        LaneDropped,
        lambda fact, _: [fact.key, fact.counters],
        lambda fields, _: LaneDropped(LaneKey(*fields[0]), Counters(*fields[1])),
    ),
    _Kind(Wrote, _pack_wrote, _unpack_wrote),
    _Kind(
        Tagged,
        lambda fact, _: [fact.lane, fact.checkpoint, fact.tags],
        lambda fields, _: Tagged(LaneKey(*fields[0]), fields[1], tuple(fields[2])),
    ),
    _Kind(Deleted, _pack_deleted, _unpack_deleted),
    _Kind(
        ThreadDeleted,
        lambda fact, _: [fact.namespace, fact.thread, dict(fact.digests), fact.counters],
        lambda fields, _: ThreadDeleted(fields[0], fields[1], fields[2], Counters(*fields[3])),
    ),
    _Kind(RecordSet, lambda fact, _: [_fields(fact.record), fact.thread_number, fact.expiry], _unpack_record),
    _Kind(
        Marked,
        lambda fact, _: [fact.counters, list(fact.threads)],
        lambda fields, _: Marked(Counters(*fields[0]), [ThreadMark(*mark) for mark in fields[1]]),
    ),
    _Kind(
        BytesKept,
        lambda fact, parts: [_pack_bytes(fact, parts)],
        lambda fields, placed: BytesKept(*_unpack_bytes(fields[0], placed)),
    ),
    _Kind(
        Several,
        lambda fact, parts: [[_packed(each, parts) for each in fact.facts]],
        lambda fields, placed: Several([_unpacked(each, placed) for each in fields[0]]),
    ),
    _Kind(
        RowSet,
        lambda fact, _: [_pack_row(fact.row), fact.sources, fact.last_seq],
        lambda fields, _: RowSet(_unpack_row(fields[0]), tuple(fields[1]), fields[2]),
    ),
    _Kind(Rebuilt, lambda fact, _: [fact.drops], lambda fields, _: Rebuilt(fields[0])),
)
"""A kind's place in this list is its number in the files: new ones come at the end."""

_NUMBERS = {kind.fact: number for number, kind in enumerate(_KINDS)}


# Parts ------------------------------------------------------------------------------------------------------------


def _fields(row: Record | WriteRow) -> list[Any]:
    return [getattr(row, name) for name in row.__slots__]


def _pack_bytes(fact: Saved | BytesKept, parts: list[bytes]) -> list[Any]:
    def add(body: Body, least: int) -> tuple[int, int]:
        data = body.read()
        parts.append(pack_body(data, least))
        return len(parts[-1]), len(data)

    blobs = [(name, *add(body, COMPRESS_BYTES_MIN)) for name, body in fact.blobs.items()]
    return [blobs, [(stream, offset, *add(body, COMPRESS_AT_ONCE_BYTES)) for stream, offset, body in fact.chunks]]


def _unpack_bytes(
    packed: Iterable[Iterable[Any]], placed: Placed
) -> tuple[Mapping[bytes, Body], list[tuple[int, int, Body]]]:
    blobs, chunks = packed
    kept = {name: placed(stored, size) for name, stored, size in blobs}
    return kept, [(stream, offset, placed(stored, size)) for stream, offset, stored, size in chunks]
