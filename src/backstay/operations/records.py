"""Sealed records: runs, interrupts and effects, each with a digest over every column.

The body of a record is a digest (the seal) followed by a list of plain fields. The seal covers the kind, the branch,
the key, the checkpoint, the version, whether it is open, and the fields. So a record cannot be confused with another or
with an older version of itself, and a flipped bit in any column raises an error instead of giving a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import ormsgpack

from backstay.codec.msgpack import has_more_items_than
from backstay.errors import Corrupted
from backstay.operations.listing import read_each, unreadable
from backstay.operations.rows import Damaged
from backstay.store.base import Backend, BranchKey
from backstay.store.layout import UNREADABLE
from backstay.store.records import Kind, Record, RunFacts, digest_of

PAGE_ROWS = 100
_SEAL_BYTES = 32
_SMALL_BYTES = 64 * 1024
_BYTES_PER_ITEM, _ITEMS_MAX = 16, 100_000
"""A run lists the interrupts that it waits for, each by an id of more than so many bytes, and never so many."""

_HINTS = {
    "run": "The thread's checkpoints are not affected. Look at its history to see how far the run came",
    "interrupt": "Do not act on it. Record a new interrupt and ask again",
    "effect": "Do not rely on it. Find out whether it was done; to do it again, use another key",
}

T = TypeVar("T")
Types = Sequence[type | tuple[type, ...]]


def seal(record: Record, is_open: bool, fields: list[Any], run: RunFacts | None = None) -> Record:
    """Return the record with these fields as its body, sealed for its next version."""
    packed = ormsgpack.packb(fields)
    body = _seal(record, record.version + 1, is_open, packed) + packed
    return Record(
        record.kind, record.branch, record.key, body, is_open, record.checkpoint, record.version, record.number, run
    )


def unseal(record: Record, types: Types) -> list[Any]:
    """Return the fields of a stored record; Corrupted if any part of it was changed."""
    given, packed = record.body[:_SEAL_BYTES], record.body[_SEAL_BYTES:]
    if given != _seal(record, record.version, record.open, packed):
        raise damaged(record, "it does not match its digest")
    try:
        # Each byte may decode to an empty list of 56 bytes, so a large body is unpacked only if it has few items.
        items_max = len(types) + 1 + min(len(packed) // _BYTES_PER_ITEM, _ITEMS_MAX)
        if len(packed) > _SMALL_BYTES and has_more_items_than(packed, items_max):
            raise ValueError("more items than any record has")
        fields = ormsgpack.unpackb(packed)
        is_known = len(fields) == len(types) and all(map(isinstance, fields, types))
    except (ValueError, TypeError) as error:
        raise damaged(record, "it cannot be read") from error
    if not is_known:
        raise damaged(record, "it does not have the expected form")
    return list(fields)


def unstored(record: Record) -> Record:
    """Return a record as it was before it was stored, without the version and number that its store gave it."""
    return replace(record, version=0, number=0)


def _seal(record: Record, version: int, is_open: bool, packed: bytes) -> bytes:
    place = (record.kind, *record.branch, record.key, "" if record.checkpoint is None else f"of {record.checkpoint}")
    return digest_of(*(part.encode(errors="surrogatepass") for part in place), b"%d %d" % (version, is_open), packed)


def damaged(record: Record, what: str) -> Corrupted:
    """Return the error for a damaged record."""
    name = repr(record.key) if record.kind == "effect" else record.key.rstrip(UNREADABLE)
    return Corrupted(
        f"{record.kind} {name}: {what}",
        thread=record.branch.thread,
        checkpoint=record.checkpoint,
        hint=_HINTS[record.kind],
    )


def confirm(store: Backend, stored: Record) -> Record:
    """Repeat the last write of a record and return the record as it is now.

    A read may show a write that a synchronous standby does not have yet. A result based on it must be as durable as a
    write, so the write is repeated.
    """
    return store.put_record(replace(stored, version=stored.version - 1))


def find_by_id(store: Backend, kind: Kind, namespace: str, name: str) -> Record | None:
    """Return an interrupt by its id, which is unique in the namespace."""
    return store.record(kind, BranchKey(namespace, "", "", ""), name)


def all_records(
    store: Backend, kind: Kind, namespace: str, thread: str | None, open_only: bool = False
) -> Iterator[Record]:
    """Yield records, oldest first; no lock is held between pages."""
    after = 0
    while page := store.records(kind, namespace, thread, open_only, after, PAGE_ROWS):
        yield from page
        if len(page) < PAGE_ROWS:
            return
        after = page[-1].number


@dataclass(slots=True)
class RecordPages(Generic[T]):
    """A list of records, read page by page; no lock is held between pages."""

    kind: Kind
    namespace: str
    thread: str | None
    open_only: bool
    read: Callable[[Record], T]
    is_skipped: Callable[[Backend, Record], bool] | None = None
    after: int = 0
    done: bool = False
    started: bool = False

    def next_page(self, store: Backend) -> list[T | Damaged]:
        """Return the next page and remember where it ended."""
        lost = [] if self.started else unreadable(store, self.namespace, self.thread)
        self.started = True
        rows = store.records(self.kind, self.namespace, self.thread, self.open_only, self.after, PAGE_ROWS)
        self.done = len(rows) < PAGE_ROWS
        if rows:
            self.after = rows[-1].number
        if self.is_skipped is not None:
            rows = [row for row in rows if not self.is_skipped(store, row)]
        return [*lost, *read_each(rows, self.read, lambda row: (row.branch.thread, row.key, row.number))]
