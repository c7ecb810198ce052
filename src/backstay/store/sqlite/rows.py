"""How ids and rows are laid out in the tables, and how a statement's rows are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import contains
from typing import Any

import apsw

from backstay.errors import Corrupted
from backstay.store.base import LaneKey, Row
from backstay.store.layout import SEQ_MAX, unpack_or_nothing, unreadable_id, uuid_bytes, uuid_text
from backstay.store.records import KINDS, Kind

StoredId = str | bytes
Bound = Sequence[Any] | Mapping[str, Any]
_UUID_BYTES = 16
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "text": (str,), "bytes": (bytes,), "id": (str, bytes)}


def every(connection: apsw.Connection, statement: str, bound: Bound = ()) -> list[tuple[Any, ...]]:
    """Return all rows."""
    return connection.execute(statement, bound).fetchall()


def one(connection: apsw.Connection, statement: str, bound: Bound = ()) -> tuple[Any, ...] | None:
    """Return the first row, or None."""
    return connection.execute(statement, bound).fetchone()


def scalar(connection: apsw.Connection, statement: str, bound: Bound = ()) -> Any:
    """Return the first column of the first row, or None."""
    row = connection.execute(statement, bound).fetchone()
    return None if row is None else row[0]


class Shape:
    """The types that a row of a table must have; whoever can write the file can put any others there."""

    def __init__(self, table: str, columns: str) -> None:
        """Take the table's name and for each column its type, with a question mark if it may be NULL."""
        self._table = table
        self._columns = [
            (*_TYPES[each.rstrip("?")], *((type(None),) if each.endswith("?") else ())) for each in columns.split()
        ]
        self._known: set[tuple[type, ...]] = set()  # a handful: looking one up costs less than looking at each value

    def fits(self, fields: Sequence[Any]) -> bool:
        """Tell whether all values are of these types."""
        found = tuple(map(type, fields))
        if found not in self._known and all(map(contains, self._columns, found)):
            self._known.add(found)
        return found in self._known

    def check(self, fields: Sequence[Any]) -> None:
        """Raise Corrupted if a value is of another type."""
        found = tuple(map(type, fields))
        if found in self._known:
            return
        for number, (one, types) in enumerate(zip(found, self._columns, strict=True)):
            if one not in types:
                what = f"a row of table {self._table} holds a value that Backstay never writes there"
                raise Corrupted(
                    f"{what}: the type of value {number + 1} is {one.__name__}",
                    hint="store.verify() shows what is affected; restore a copy of the file",
                )
        self._known.add(found)


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


NUMBER_BITS = 48
NUMBER_MAX = (1 << NUMBER_BITS) - 1
"""Of a record's place: its kind is above these, so that each kind is one stretch of the table."""


def span_of_kind(kind: Kind, after: int = 0) -> tuple[int, int]:
    """Return the exclusive bounds of the places of records of a kind, optionally only those with higher numbers."""
    place = KINDS.index(kind) + 1
    return place << NUMBER_BITS | min(max(after, 0), NUMBER_MAX), (place + 1) << NUMBER_BITS


def kind_of(place: int) -> Kind:
    """Return the kind of the record at this place."""
    number = (place >> NUMBER_BITS) - 1
    if not 0 <= number < len(KINDS):
        raise Corrupted("a row of table record is of no known kind", hint="store.verify() shows what is affected")
    return KINDS[number]


ROW_COLUMNS = "c.key, c.id, c.parent, c.parent_digest, c.step, c.created, c.digest, c.size, c.notes"
# A base whose row is gone has an empty name, which no blob has: that is damage, and not the same as to have none.
BASE_NAME = "iif(c.base IS NULL, NULL, coalesce(b.digest, x''))"
PAYLOAD_COLUMNS = f"{BASE_NAME}, b.size, b.body, c.manifest, p.digest"


_LANE = Shape("thread or lane", "text text text text")
_ROW = Shape("checkpoint", "int id id? bytes? int int bytes int bytes")
_ROW_WITH_PAYLOAD = Shape(
    "checkpoint or blob", "int id id? bytes? int int bytes int bytes bytes? int? bytes? bytes bytes?"
)


def read_lane(fields: Sequence[Any]) -> LaneKey:
    """Return a lane's key from its columns."""
    _LANE.check(fields)
    return LaneKey(*fields)


def read_row(lane: LaneKey, thread: int, fields: tuple[Any, ...], payload: bool, tags: tuple[str, ...]) -> Row:
    """Return a row from its columns: ``ROW_COLUMNS``, then ``PAYLOAD_COLUMNS`` if there is a payload."""
    return read_rows(lane, thread, [fields], payload, {fields[0]: tags})[0]


def _odd_row(lane: LaneKey, thread: int, fields: tuple[Any, ...]) -> Row:
    """Return what stands for a row with odd values: it lacks a description, so its readers say that it is damaged."""
    return Row(lane, thread, fields[0] & SEQ_MAX, unpack_id(fields[1]), None, None, 0, 0, b"", b"", 0)


def read_rows(
    lane: LaneKey, thread: int, found: list[tuple[Any, ...]], payload: bool, tags: dict[int, tuple[str, ...]]
) -> list[Row]:
    """Return the rows of one lane, given newest first."""
    rows: list[Row] = []
    child_parent, child_parent_text = None, ""
    _LANE.check(lane)
    shape = _ROW_WITH_PAYLOAD if payload else _ROW
    for fields in found:
        if not shape.fits(fields):
            rows.append(_odd_row(lane, thread, fields))
            continue
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
