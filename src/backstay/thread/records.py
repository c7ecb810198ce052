"""Records as they are stored: one seal over every column, made and checked here and nowhere else.

The body of a record is a list of plain fields behind a seal. The seal covers the kind, the place, the key, the
checkpoint, the version, whether it is open, and the fields. So a record is never taken for another one or for an older
version of itself, and a flipped bit in any column is an error and not a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import ormsgpack

from backstay.codec.depth import has_more_items_than
from backstay.errors import Corrupted
from backstay.model.damaged import Damaged
from backstay.store.base import Backend, LaneKey
from backstay.store.layout import UNREADABLE
from backstay.store.records import Kind, Record, digest_of
from backstay.thread.damage import read_each, unread

PAGE_ROWS = 100
_SEAL_BYTES = 32
_SMALL_BYTES = 64 * 1024
_HINTS = {
    "session": "Nothing else is affected. Look at the thread itself to see how far it came",
    "interrupt": "Do not act on it; record a new interrupt and ask again",
    "effect": "Do not rely on it. Find out whether it was done; under another key it can be done again",
}

T = TypeVar("T")
Types = Sequence[type | tuple[type, ...]]


def seal(record: Record, is_open: bool, fields: list[Any]) -> Record:
    """Return the record with these fields as its body, sealed for the version that storing it gives."""
    packed = ormsgpack.packb(fields)
    body = _seal(record, record.version + 1, is_open, packed) + packed
    return Record(record.kind, record.lane, record.key, body, is_open, record.checkpoint, record.version, record.number)


def unseal(record: Record, types: Types) -> list[Any]:
    """Return the fields of a stored record; Corrupted if anything of it is not as it was written."""
    given, packed = record.body[:_SEAL_BYTES], record.body[_SEAL_BYTES:]
    if given != _seal(record, record.version, record.open, packed):
        raise damaged(record, "it does not match its digest")
    try:
        # Each byte can be an empty list of 56 bytes, so a large body is unpacked only if it has few items.
        if len(packed) > _SMALL_BYTES and has_more_items_than(packed, len(types) + 1):
            raise ValueError("more items than any record has")
        fields = ormsgpack.unpackb(packed)
        is_known = len(fields) == len(types) and all(map(isinstance, fields, types))
    except (ValueError, TypeError) as error:
        raise damaged(record, "it cannot be read") from error
    if not is_known:
        raise damaged(record, "it is not of the known form")
    return list(fields)


def unstored(record: Record) -> Record:
    """Return a record as it is before it is stored: sealed then, it says nothing of the store it came from."""
    return replace(record, version=0, number=0, left_us=0)


def _seal(record: Record, version: int, is_open: bool, packed: bytes) -> bytes:
    place = (record.kind, *record.lane, record.key, "" if record.checkpoint is None else f"of {record.checkpoint}")
    return digest_of(*(part.encode() for part in place), b"%d %d" % (version, is_open), packed)


def damaged(record: Record, what: str) -> Corrupted:
    """Return the error about a record that cannot be relied on."""
    name = repr(record.key) if record.kind == "effect" else record.key.rstrip(UNREADABLE)
    return Corrupted(
        f"{record.kind} {name}: {what}",
        thread=record.lane.thread,
        checkpoint=record.checkpoint,
        hint=_HINTS[record.kind],
    )


def confirm(store: Backend, stored: Record) -> Record:
    """Repeat the write that made a record as it is, and return it as it is now.

    A read shows what a synchronous standby may not have yet; an answer that rests on it must last like a write's.
    """
    return store.put_record(replace(stored, version=stored.version - 1))


def find_by_id(store: Backend, kind: Kind, namespace: str, name: str) -> Record | None:
    """Return a session or an interrupt, whose id is its name in the whole namespace."""
    return store.record(kind, LaneKey(namespace, "", "", ""), name)


def all_records(
    store: Backend, kind: Kind, namespace: str, thread: str | None, open_only: bool = False
) -> Iterator[Record]:
    """Give records, the one stored first first; between pages nothing is held."""
    after = 0
    while page := store.records(kind, namespace, thread, open_only, after, PAGE_ROWS):
        yield from page
        if len(page) < PAGE_ROWS:
            return
        after = page[-1].number


@dataclass(slots=True)
class RecordPages(Generic[T]):
    """A list of records for users, read page by page; between pages nothing is held."""

    kind: Kind
    namespace: str
    thread: str | None
    open_only: bool
    read: Callable[[Record], T]
    after: int = 0
    done: bool = False
    begun: bool = False

    def next_page(self, store: Backend) -> list[T | Damaged]:
        """Return the next page and remember where it ended."""
        lost = [] if self.begun else unread(store, self.namespace, self.thread)
        self.begun = True
        rows = store.records(self.kind, self.namespace, self.thread, self.open_only, self.after, PAGE_ROWS)
        self.done = len(rows) < PAGE_ROWS
        if rows:
            self.after = rows[-1].number
        return [*lost, *read_each(rows, self.read, lambda row: (row.lane.thread, row.key, row.number))]
