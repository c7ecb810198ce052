"""Rows of the SQLite tables: ids, seals, threads, branches, checkpoints and pending writes, read and written.

SQLite pages have no checksums, and any program that can write the file can put any value into a row. So every row is
checked before it is used: a checkpoint by its own checksum and digest, every other row by its **seal**, a CRC-32 of its
columns. A damaged page can also hide a row. So an answer like "there is no such branch" is given only after a second
look, through another index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import contains
from sqlite3 import Connection
from typing import Any, NamedTuple
from zlib import crc32

import ormsgpack

from backstay.errors import Corrupted
from backstay.pieces.manifest import is_needed, merge_ranges
from backstay.store.base import Row, WriteRow, no_checkpoint
from backstay.store.layout import (
    IS_UUID,
    SEQ_BITS,
    SEQ_MAX,
    UNREADABLE,
    unpack_or_nothing,
    unreadable_id,
    uuid_bytes,
    uuid_text,
)
from backstay.store.leases import NO_LEASE, BranchKey, LeaseRow
from backstay.store.records import KINDS, Kind
from backstay.store.sqlite import queries
from backstay.store.writes import Packed, by_task, merge, merged, pack, read

StoredId = str | bytes
Bound = Sequence[Any] | Mapping[str, Any]
_UUID_BYTES = 16
_CRC_BYTES = 4
CHECK_HINT = "store.check() lists what is affected; docs/repair.md says how to repair it"

PIECE_BYTES = 260
"""Large rows in key order leave a third of each page empty; small pieces that are always added at the end do not.

Smaller pieces cost more rows, larger ones leave more of each page empty.
"""

INLINE_BYTES_MAX = 80
"""Shorter bodies are in the task's own row: a piece would cost more than the emptier page does."""

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "text": (str,), "bytes": (bytes,), "id": (str, bytes)}


def fetch_all(connection: Connection, statement: str, bound: Bound = ()) -> list[tuple[Any, ...]]:
    """Return all rows."""
    return connection.execute(statement, bound).fetchall()


def fetch_one(connection: Connection, statement: str, bound: Bound = ()) -> tuple[Any, ...] | None:
    """Return the first row, or None."""
    found: tuple[Any, ...] | None = connection.execute(statement, bound).fetchone()
    return found


def fetch_value(connection: Connection, statement: str, bound: Bound = ()) -> Any:
    """Return the first column of the first row, or None."""
    row = connection.execute(statement, bound).fetchone()
    return None if row is None else row[0]


def seal(*columns: object) -> int:
    """Return the checksum of a row's columns; one that no row has if they cannot be what we stored."""
    try:
        return crc32(ormsgpack.packb(columns))
    except (TypeError, ValueError):  # text that is not UTF-8
        return -1


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
        if found in self._known:
            return True
        if not all(map(contains, self._columns, found)):
            return False
        self._known.add(found)
        return True

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


def pack_tags(tags: Sequence[str], name: StoredId) -> bytes | None:
    """Return tags as they are stored with the checkpoint of this id: each after a NUL, then a NUL and a checksum."""
    if not tags:
        return None
    packed = b"".join(b"\0" + tag.encode() for tag in sorted(tags)) + b"\0"
    return packed + seal(packed, name).to_bytes(_CRC_BYTES)


def unpack_tags(stored: bytes | None, name: StoredId) -> tuple[str, ...] | None:
    """Return the tags that ``pack_tags`` stored, in order; None if they are damaged."""
    if stored is None:
        return ()
    packed, found = stored[:-_CRC_BYTES], stored[-_CRC_BYTES:]
    is_sound = seal(packed, name).to_bytes(_CRC_BYTES, signed=False) == found
    return tuple(packed[1:-1].decode().split("\0")) if is_sound else None


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


# Checkpoints ------------------------------------------------------------------------------------------------------

_ROW = ColumnTypes("checkpoint", "int id id? bytes? int int int bytes int bytes bytes?")
_ROW_WITH_PAYLOAD = ColumnTypes(
    "checkpoint or blob", "int id id? bytes? int int int bytes int bytes bytes? bytes? int? bytes? bytes bytes?"
)


def lost_row(branch: BranchKey, thread: int, seq: int, name: str = UNREADABLE) -> Row:
    """Return a row without a description, which takes the place of one that cannot be read or is missing."""
    return Row(branch, thread, seq, name, None, None, 0, 0, b"", b"", 0)


def read_row(branch: BranchKey, thread: int, fields: tuple[Any, ...], payload: bool) -> Row:
    """Return a row from its columns: ``ROW_COLUMNS``, then ``PAYLOAD_COLUMNS`` if there is a payload."""
    return read_rows(branch, thread, [fields], payload)[0]


def read_rows(branch: BranchKey, thread: int, found: Sequence[tuple[Any, ...]], payload: bool) -> list[Row]:
    """Return the rows of one branch, given newest first."""
    rows: list[Row] = []
    child_parent, child_parent_text = None, ""
    shape = _ROW_WITH_PAYLOAD if payload else _ROW
    for fields in found:
        if not shape.fits(fields):
            rows.append(lost_row(branch, thread, fields[0] & SEQ_MAX, unpack_id(fields[1])))
            continue
        key, name, parent, parent_digest, _, step, created, digest, size, notes, stored_tags = fields[:11]
        tags = () if stored_tags is None else unpack_tags(stored_tags, name)
        if tags is None:
            rows.append(lost_row(branch, thread, key & SEQ_MAX, unpack_id(name)))
            continue
        base = base_data = None
        manifest = b""
        if payload:
            base, base_size, base_body, manifest, present_parent_digest = fields[11:16]
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
                tags,
                (),
                base,
                base_data,
                manifest,
            )
        )
    return rows


def find_checkpoint(connection: Connection, namespace: str, name: str) -> tuple[int, bytes]:
    """Return the key and digest of a checkpoint; NotFound if it does not exist."""
    stored = pack_id(namespace, name)
    found = fetch_one(connection, queries.IDENTITY, (stored,))
    if found is None:
        if fetch_one(connection, queries.IS_HIDDEN, (stored,)) is not None:
            raise hidden_checkpoint(name)
        raise no_checkpoint(name)
    return found[0], found[1]


def hidden_checkpoint(name: str) -> Corrupted:
    """Return the error for a checkpoint that its index has lost."""
    return Corrupted(f"checkpoint {name} cannot be found by its id", checkpoint=name, hint=CHECK_HINT)


# Threads and branches ---------------------------------------------------------------------------------------------


class BranchRow(NamedTuple):
    """A branch's row, with its thread's number and floor."""

    key: BranchKey
    thread: int
    floor: int
    number: int
    head: int = 0
    last_seq: int = 0
    lease: LeaseRow = NO_LEASE
    origin: StoredId | None = None


_BRANCH_ROW = ColumnTypes("branch or thread", "int int int int int int int text? text? int? text? id? int int?")
_NAMES = ColumnTypes("thread or branch", "text text text text")


def read_branch(fields: Sequence[Any], key: BranchKey) -> BranchRow:
    """Return a branch's row from ``BRANCH_COLUMNS`` and its names; Corrupted if it is damaged."""
    _NAMES.check(key)
    _BRANCH_ROW.check(fields)
    thread, floor, thread_seal, number, head, last_seq, epoch, owner, token, expires, boot, origin, _, _ = fields
    if thread_seal != seal(thread, key.namespace, key.thread, floor) or not is_sound(fields, key):
        raise damaged_branch(key)
    return BranchRow(
        key, thread, floor, number, head, last_seq, LeaseRow(epoch, owner, token, expires or 0, boot or ""), origin
    )


def readable_names(key: BranchKey) -> BranchKey:
    """Return the names of a branch whose row is damaged, for lists."""
    return BranchKey(*(name if isinstance(name, str) else UNREADABLE for name in key))


def is_sound(fields: Sequence[Any], key: BranchKey) -> bool:
    """Return whether a branch's row, given as ``BRANCH_COLUMNS``, matches its seals; its thread's row is another."""
    thread, _, _, number, head, last_seq, epoch, owner, token, expires, boot, origin, own, lease = fields
    if own != _seal_branch(number, thread, key, origin) ^ seal_place(number, head, last_seq, epoch):
        return False
    if token is None:
        return (owner, expires, boot, lease) == (None, None, None, None)
    return bool(lease == seal(number, epoch, owner, token, expires, boot))


def damaged_branch(key: BranchKey) -> Corrupted:
    """Return the error for a branch whose row, or whose thread's row, is damaged or cannot be found by its name."""
    return Corrupted(
        f"the row of branch {key.name!r}, or of its thread, is damaged",
        thread=key.thread,
        hint="Other threads are not affected. Repair the store with store.repair(): see docs/repair.md",
    )


def _seal_branch(number: int, thread: int, key: BranchKey, origin: StoredId | None) -> int:
    return seal(number, thread, key.scope, key.name, origin)


def seal_place(number: int, head: int, last_seq: int, epoch: int) -> int:
    """Return the part of a branch's seal that changes with every save.

    The seal is this part XOR the rest, so that a save can change it without knowing the rest.
    """
    return seal(number, head, last_seq, epoch, 0)


def find_branch(connection: Connection, key: BranchKey) -> BranchRow | None:
    """Return a branch's row, or None if there is no such branch."""
    found = connection.execute(queries.BRANCH, key).fetchone()
    if found is None:
        check_absent(connection, key)
        return None
    return read_branch(found, key)


def check_absent(connection: Connection, key: BranchKey) -> None:
    """Raise Corrupted if a branch that was not found exists after all."""
    if connection.execute(queries.BRANCH_AGAIN, key).fetchone() is not None:
        raise damaged_branch(key)


def put_branch(connection: Connection, row: BranchRow) -> None:
    """Write everything about an existing branch that can change."""
    epoch, owner, token, expires, boot = row.lease
    lease: tuple[Any, ...] = (None,) * 5
    if token is not None:
        lease = (owner, token, expires, boot, seal(row.number, epoch, owner, token, expires, boot))
    own = _seal_branch(row.number, row.thread, row.key, row.origin)
    own ^= seal_place(row.number, row.head, row.last_seq, epoch)
    connection.execute(
        queries.PUT_BRANCH, (row.head, row.last_seq, epoch, *lease[:4], row.origin, own, lease[4], row.number)
    )


def add_branch(connection: Connection, key: BranchKey) -> BranchRow:
    """Create a branch without a checkpoint, and its thread if it does not exist."""
    thread, floor = thread_of(connection, key)
    number = fetch_value(connection, queries.ADD_BRANCH, (thread, key.scope, key.name))
    row = BranchRow(key, thread, floor, number)
    put_branch(connection, row)
    return row


def thread_of(connection: Connection, branch: BranchKey) -> tuple[int, int]:
    """Return the thread's number and floor; create the thread if it does not exist."""
    found = find_thread(connection, branch.namespace, branch.thread)
    if found is not None:
        return found
    number = int(fetch_value(connection, queries.ADD_THREAD, branch[:2]))
    put_floor(connection, number, branch.namespace, branch.thread, 0)
    return number, 0


def find_thread(connection: Connection, namespace: str, name: str) -> tuple[int, int] | None:
    """Return a thread's number and floor, or None if there is no such thread."""
    found = fetch_one(connection, queries.THREAD, (namespace, name))
    if found is None:
        if fetch_one(connection, queries.THREAD_AGAIN, (namespace, name)) is not None:
            raise damaged_branch(BranchKey(namespace, name, "", ""))
        return None
    number, floor, own = found
    if own != seal(number, namespace, name, floor):
        raise damaged_branch(BranchKey(namespace, name, "", ""))
    return int(number), int(floor)


def put_floor(connection: Connection, number: int, namespace: str, name: str, floor: int) -> None:
    """Write a thread's floor."""
    connection.execute(queries.PUT_FLOOR, (floor, seal(number, namespace, name, floor), number))


def branch_of(connection: Connection, key: int) -> BranchRow:
    """Return the branch of the checkpoint with this key."""
    found = fetch_one(connection, queries.BRANCH_BY_ID, (key >> SEQ_BITS,))
    if found is None:
        raise Corrupted("a checkpoint belongs to a branch that does not exist", hint=CHECK_HINT)
    return read_branch(found[4:], BranchKey(*found[:4]))


# Counters ---------------------------------------------------------------------------------------------------------


def count_up(connection: Connection, name: str, by: int) -> int:
    """Add to a counter and return its new value."""
    found = fetch_one(connection, queries.COUNTER, (name,))
    if found is None or found[1] != seal(name, found[0]):
        raise Corrupted(f"the counter {name!r} of the store is damaged", hint=CHECK_HINT)
    value = int(found[0]) + by
    connection.execute(queries.PUT_COUNTER, (name, value, seal(name, value)))
    return value


# Pending writes ---------------------------------------------------------------------------------------------------


def put_writes(
    connection: Connection, branch: BranchKey, checkpoint: str, writes: Sequence[WriteRow], replace: bool
) -> None:
    """Store the results of finished tasks; see ``Backend.write``."""
    thread = thread_of(connection, branch)[0]
    name = pack_id(branch.namespace, checkpoint)
    for task, new in by_task(writes).items():
        key = (thread, branch.scope, name, uuid_bytes(task) or task)
        found = fetch_one(connection, queries.WRITES_OF_TASK, key)
        if found is None:
            _put(connection, key, pack(merge((), new, replace), checkpoint))
            continue
        stored = merged(task, _packed(connection, *found), new, replace, branch.thread, checkpoint)
        if stored is not None:
            drop_writes(connection, queries.DROP_WRITES_OF_TASK, key)
            _put(connection, key, stored)


def with_writes(connection: Connection, row: Row) -> Row:
    """Return the row with its pending writes."""
    name = pack_id(row.branch.namespace, row.id)
    key = (row.thread_number, row.branch.scope, name)
    found = fetch_all(connection, queries.WRITES, key)
    if len(found) != fetch_value(connection, queries.WRITES_AGAIN, key):
        raise Corrupted(
            f"some pending writes of checkpoint {row.id} cannot be found",
            thread=row.branch.thread,
            checkpoint=row.id,
            hint=CHECK_HINT,
        )
    if not found:
        return row
    tasks = [
        (uuid_text(task) if isinstance(task, bytes) else task, _packed(connection, *stored)) for task, *stored in found
    ]
    return row._replace(writes=read(tasks, row.branch.thread, row.id))


def drop_writes(connection: Connection, statement: str, bound: tuple[object, ...]) -> None:
    """Drop rows of writes and their pieces, by one of the DROP_WRITES statements."""
    for pieces, first in fetch_all(connection, statement, bound):
        if isinstance(first, int):
            connection.execute(queries.DROP_PIECES, (first, first + pieces))


def lost_pieces(connection: Connection) -> list[int]:
    """Return the numbers of pieces that no row refers to."""
    needed = merge_ranges([(first, first + pieces) for first, pieces in fetch_all(connection, queries.PIECES_NEEDED)])
    return [number for (number,) in connection.execute(queries.PIECES) if not is_needed(number, number + 1, needed)]


def _put(connection: Connection, key: tuple[int, str, StoredId, StoredId], packed: Packed) -> None:
    size, body = packed
    if len(body) <= INLINE_BYTES_MAX:
        connection.execute(queries.ADD_WRITES, (*key, size, 0, body))
        return
    first = fetch_value(connection, queries.NEXT_PIECE)
    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
    connection.executemany(queries.ADD_PIECE, list(enumerate(pieces, first)))
    connection.execute(queries.ADD_WRITES, (*key, size, len(pieces), first))


def _packed(connection: Connection, size: int, pieces: int, body: object) -> Packed:
    if isinstance(body, int):
        found = fetch_all(connection, queries.PIECES_OF, (body, body + pieces))
        return Packed(size, b"".join(piece for (piece,) in found))
    return Packed(size, body if isinstance(body, bytes) else b"")
