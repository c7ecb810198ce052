"""Rows of the SQLite tables: ids, checkpoints, branches and pending writes, read and written.

Any program that can write the file can put values of any type into a row, so every row is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import contains
from typing import Any, NamedTuple

import apsw

from backstay.errors import Corrupted
from backstay.pieces.manifest import is_needed, merge_ranges
from backstay.store.base import Row, WriteRow
from backstay.store.layout import IS_UUID, SEQ_BITS, SEQ_MAX, unpack_or_nothing, unreadable_id, uuid_bytes, uuid_text
from backstay.store.leases import NO_LEASE, BranchKey, LeaseRow
from backstay.store.records import KINDS, Kind
from backstay.store.sqlite import queries
from backstay.store.writes import Packed, by_task, merge, merged, pack, read

StoredId = str | bytes
Bound = Sequence[Any] | Mapping[str, Any]
_UUID_BYTES = 16
CHECK_HINT = "store.check() lists what is affected; restore a copy of the file"

PIECE_BYTES = 260
"""Large rows in key order leave a third of each page empty; small pieces that are always added at the end do not.

Smaller pieces cost more rows, larger ones leave more of each page empty.
"""

INLINE_BYTES_MAX = 80
"""Shorter bodies are in the task's own row: a piece would cost more than the emptier page does."""

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "text": (str,), "bytes": (bytes,), "id": (str, bytes)}


def fetch_all(connection: apsw.Connection, statement: str, bound: Bound = ()) -> list[tuple[Any, ...]]:
    """Return all rows."""
    return connection.execute(statement, bound).fetchall()


def fetch_one(connection: apsw.Connection, statement: str, bound: Bound = ()) -> tuple[Any, ...] | None:
    """Return the first row, or None."""
    return connection.execute(statement, bound).fetchone()


def fetch_value(connection: apsw.Connection, statement: str, bound: Bound = ()) -> Any:
    """Return the first column of the first row, or None."""
    row = connection.execute(statement, bound).fetchone()
    return None if row is None else row[0]


class ColumnTypes:
    """The column types that a row of a table must have."""

    def __init__(self, table: str, columns: str) -> None:
        """Take the table's name and for each column its type, with a question mark if it may be NULL."""
        self._table = table
        self._columns = [
            (*_TYPES[each.rstrip("?")], *((type(None),) if each.endswith("?") else ())) for each in columns.split()
        ]
        self._known: set[tuple[type, ...]] = set()  # a handful: looking one up costs less than looking at each value

    def fits(self, fields: Sequence[Any]) -> bool:
        """Return whether all values have these types."""
        found = tuple(map(type, fields))
        if found not in self._known and all(map(contains, self._columns, found)):
            self._known.add(found)
        return found in self._known

    def check(self, fields: Sequence[Any]) -> None:
        """Raise Corrupted if a value has another type."""
        found = tuple(map(type, fields))
        if found in self._known:
            return
        for number, (one, types) in enumerate(zip(found, self._columns, strict=True)):
            if one not in types:
                what = f"a row of table {self._table} holds a value that Backstay never writes"
                raise Corrupted(f"{what}: column {number + 1} has type {one.__name__}", hint=CHECK_HINT)
        self._known.add(found)


def pack_id(namespace: str, name: str) -> StoredId:
    """Return an id as it is stored: a UUID as 16 bytes; outside the default namespace prefixed by it.

    Ids hold no NUL, so the prefix cannot be mistaken for part of an id.
    """
    if namespace:
        return f"{namespace}\0{name}"
    return bytes.fromhex(name.replace("-", "")) if IS_UUID(name) else name


def unpack_id(stored: StoredId) -> str:
    """Return the id that ``pack_id`` stored."""
    if isinstance(stored, bytes) and len(stored) == _UUID_BYTES:
        return uuid_text(stored)
    name = stored[stored.find("\0") + 1 :] if isinstance(stored, str) else ""
    return name if name and "\0" not in name else unreadable_id(stored)


NUMBER_BITS = 48
NUMBER_MAX = (1 << NUMBER_BITS) - 1
"""A record's place is its kind in the bits above these and its number, so each kind is one range of the table."""


def span_of_kind(kind: Kind, after: int = 0) -> tuple[int, int]:
    """Return the exclusive bounds of the places of a kind's records, optionally only of those with higher numbers."""
    place = KINDS.index(kind) + 1
    return place << NUMBER_BITS | min(max(after, 0), NUMBER_MAX), (place + 1) << NUMBER_BITS


def kind_of(place: int) -> Kind:
    """Return the kind of the record at this place."""
    number = (place >> NUMBER_BITS) - 1
    if not 0 <= number < len(KINDS):
        raise Corrupted("a row of table record has an unknown kind", hint=CHECK_HINT)
    return KINDS[number]


_BRANCH = ColumnTypes("thread or branch", "text text text text")
_ROW = ColumnTypes("checkpoint", "int id id? bytes? int int bytes int bytes")
_ROW_WITH_PAYLOAD = ColumnTypes(
    "checkpoint or blob", "int id id? bytes? int int bytes int bytes bytes? int? bytes? bytes bytes?"
)


def read_branch(fields: Sequence[Any]) -> BranchKey:
    """Return a branch's key from its columns."""
    _BRANCH.check(fields)
    return BranchKey(*fields)


def read_row(branch: BranchKey, thread: int, fields: tuple[Any, ...], payload: bool, tags: tuple[str, ...]) -> Row:
    """Return a row from its columns: ``ROW_COLUMNS``, then ``PAYLOAD_COLUMNS`` if there is a payload."""
    return read_rows(branch, thread, [fields], payload, {fields[0]: tags})[0]


def read_rows(
    branch: BranchKey, thread: int, found: list[tuple[Any, ...]], payload: bool, tags: dict[int, tuple[str, ...]]
) -> list[Row]:
    """Return the rows of one branch, given newest first."""
    rows: list[Row] = []
    child_parent, child_parent_text = None, ""
    _BRANCH.check(branch)
    shape = _ROW_WITH_PAYLOAD if payload else _ROW
    for fields in found:
        if not shape.fits(fields):
            # Without a description, so its readers report that it is damaged.
            rows.append(Row(branch, thread, fields[0] & SEQ_MAX, unpack_id(fields[1]), None, None, 0, 0, b"", b"", 0))
            continue
        key, name, parent, parent_digest, step, created, digest, size, notes = fields[:9]
        base = base_data = None
        manifest = b""
        if payload:
            base, base_size, base_body, manifest, present_parent_digest = fields[9:14]
            parent_digest = present_parent_digest if parent_digest is None else parent_digest
            base_data = unpack_or_nothing(base_size, base_body) if base_body is not None else None
        # A row is nearly always the parent of the row before it in the list, so its text is known already.
        text = child_parent_text if name == child_parent else unpack_id(name)
        child_parent, child_parent_text = parent, "" if parent is None else unpack_id(parent)
        rows.append(
            Row(
                branch,
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


# Threads and branches ------------------------------------------------------------------------------------------------


class BranchRow(NamedTuple):
    """A branch's row, with the next sequence number of its thread."""

    number: int = 0
    thread: int = 0
    head: int = 0
    last_seq: int = 0
    next_seq: int = 0
    lease: LeaseRow = NO_LEASE


NO_BRANCH = BranchRow()
_BRANCH_ROW = ColumnTypes("branch or thread", "int int int int int int text? text? int? text?")
_LEASE = ColumnTypes("branch", "int text? text? int? text?")


def find_branch(connection: apsw.Connection, key: BranchKey) -> BranchRow | None:
    """Return a branch's row, or None."""
    found = connection.execute(queries.BRANCH, key).fetchone()
    if found is None:
        return None
    _BRANCH_ROW.check(found)
    number, thread, head, last_seq, next_seq, epoch, owner, token, expires, boot = found
    return BranchRow(number, thread, head, last_seq, next_seq, LeaseRow(epoch, owner, token, expires or 0, boot or ""))


def add_branch(connection: apsw.Connection, key: BranchKey) -> BranchRow:
    """Create a branch without a checkpoint, and its thread if it does not exist."""
    thread, next_seq = thread_of(connection, key)
    number = fetch_value(connection, queries.ADD_BRANCH, (thread, key.scope, key.name))
    return BranchRow(number, thread, next_seq=next_seq)


def thread_of(connection: apsw.Connection, branch: BranchKey) -> tuple[int, int]:
    """Return the thread's number and next sequence number; create the thread if it does not exist."""
    found = fetch_one(connection, queries.THREAD, branch[:2])
    if found is not None:
        return int(found[0]), int(found[1])
    return int(fetch_value(connection, queries.ADD_THREAD, branch[:2])), 1


def read_lease(epoch: int, owner: str | None, token: str | None, expires: int | None, boot: str | None) -> LeaseRow:
    """Return a branch's lease from its columns."""
    _LEASE.check((epoch, owner, token, expires, boot))
    return LeaseRow(epoch, owner, token, expires or 0, boot or "")


def branch_of(connection: apsw.Connection, key: int) -> tuple[int, BranchKey]:
    """Return the thread's number and the branch of the checkpoint with this key."""
    found = fetch_one(connection, queries.BRANCH_BY_ID, (key >> SEQ_BITS,))
    if found is None:
        raise Corrupted("a checkpoint belongs to a branch that does not exist", hint=CHECK_HINT)
    return found[0], BranchKey(*found[1:])


# Pending writes ---------------------------------------------------------------------------------------------------


def put_writes(
    connection: apsw.Connection, branch: BranchKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool
) -> None:
    """Store the results of finished tasks; see ``Backend.write``."""
    thread = thread_of(connection, branch)[0]
    name = pack_id(branch.namespace, checkpoint)
    for task, new in by_task(writes).items():
        key = (thread, branch.scope, name, uuid_bytes(task) or task)
        found = fetch_one(connection, queries.WRITES_OF_TASK, key)
        if found is None:
            _put(connection, key, pack(merge((), new, replace)))
            continue
        stored = merged(task, _packed(connection, *found), new, replace, branch.thread, checkpoint)
        if stored is not None:
            drop_writes(connection, queries.DROP_WRITES_OF_TASK, key)
            _put(connection, key, stored)


def with_writes(connection: apsw.Connection, row: Row) -> Row:
    """Return the row with its pending writes."""
    name = pack_id(row.branch.namespace, row.id)
    found = fetch_all(connection, queries.WRITES, (row.thread_number, row.branch.scope, name))
    if not found:
        return row
    tasks = [
        (uuid_text(task) if isinstance(task, bytes) else task, _packed(connection, *stored)) for task, *stored in found
    ]
    return row._replace(writes=read(tasks, row.branch.thread, row.id))


def drop_writes(connection: apsw.Connection, statement: str, bound: tuple[object, ...]) -> None:
    """Drop rows of writes and their pieces, by one of the DROP_WRITES statements."""
    for pieces, first in fetch_all(connection, statement, bound):
        if isinstance(first, int):
            connection.execute(queries.DROP_PIECES, (first, first + pieces))


def lost_pieces(connection: apsw.Connection) -> list[int]:
    """Return the numbers of pieces that no row refers to."""
    needed = merge_ranges([(first, first + pieces) for first, pieces in fetch_all(connection, queries.PIECES_NEEDED)])
    return [number for (number,) in connection.execute(queries.PIECES) if not is_needed(number, number + 1, needed)]


def _put(connection: apsw.Connection, key: tuple[int, str, StoredId, StoredId], packed: Packed) -> None:
    size, body = packed
    if len(body) <= INLINE_BYTES_MAX:
        connection.execute(queries.ADD_WRITES, (*key, size, 0, body))
        return
    first = fetch_value(connection, queries.NEXT_PIECE)
    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
    connection.executemany(queries.ADD_PIECE, list(enumerate(pieces, first)))
    connection.execute(queries.ADD_WRITES, (*key, size, len(pieces), first))


def _packed(connection: apsw.Connection, size: int, pieces: int, body: object) -> Packed:
    if isinstance(body, int):
        found = fetch_all(connection, queries.PIECES_OF, (body, body + pieces))
        return Packed(size, b"".join(piece for (piece,) in found))
    return Packed(size, body if isinstance(body, bytes) else b"")
