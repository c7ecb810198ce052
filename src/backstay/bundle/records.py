"""The records of a bundle: encode and decode them, and refuse every record that breaks the format. No I/O.

A bundle holds no number that a store assigned: no sequence, stream or thread numbers, no addresses. The checkpoints of
a thread come in the order of the thread, across all its branches; branches are numbered in the order they appear.

A value is described by what it shares with the same key of the *base*, an earlier state: ``prefix`` bytes at its start
and ``suffix`` bytes at its end. Only the bytes between are in the bundle. Both are as long as possible, so the bytes of
a bundle follow from its content alone, and a list that grows costs only its new items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ormsgpack

from backstay.bundle.blocks import DIGEST_BYTES
from backstay.codec.msgpack import has_more_items_than
from backstay.errors import DecodeError, InvalidInput
from backstay.model.fields import DESCRIPTION_BYTES_MAX, check_fields
from backstay.model.ids import check_id
from backstay.operations.arguments import KEY_LENGTH_MAX, KEYS_MAX
from backstay.pieces.body import BYTES, FOREIGN, LIST, MAP, TAG_LENGTH_MAX, TEXT, VALUE
from backstay.pieces.manifest import SYSTEM_NAMES, Key
from backstay.store.base import BranchKey, WriteRow
from backstay.store.layout import uuid_bytes, uuid_text
from backstay.store.records import Kind, Record

HEADER, THREAD, BRANCH, CHECKPOINT, VALUE_BYTES, WRITE, INTERRUPT, EFFECT, DAMAGE = b"HTLCVWIEX"
"""The types of records, without the end."""

_KINDS = {VALUE, LIST, MAP, TEXT, BYTES}
_INT_MAX = 2**63 - 1
_EDIT_FIELDS = 6
_KEYS_MAX = KEYS_MAX + len(SYSTEM_NAMES)
_ITEMS_MAX = 128 + _KEYS_MAX * (_EDIT_FIELDS + 3)  # all keys edited, and named in the order and as removed
_SMALL_BYTES = 64 * 1024
_REASON_LENGTH_MAX = 1000


@dataclass(frozen=True, slots=True)
class Edit:
    """How a value differs from the base's, as described above. The ``length`` bytes between have their own record."""

    key: Key
    kind: str
    count: int
    prefix: int
    suffix: int
    length: int


@dataclass(slots=True)
class CheckpointRecord:
    """One checkpoint. ``parent_id`` is None without a parent, or if the checkpoint ``follows`` its branch's last."""

    branch: int
    id: str
    follows: bool
    parent_id: str | None
    parent_digest: bytes | None
    base: int | None  # the branch whose newest state is the base
    step: int
    created_us: int
    digest: bytes
    notes: bytes
    tags: tuple[str, ...]
    order: list[Key] | None  # all keys; None = the base's without the removed, then those that are new
    removed: list[Key] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    writes: int = 0  # records of pending writes that follow

    def pack(self) -> bytes:
        """Return the record's bytes."""
        return ormsgpack.packb(
            [
                self.branch,
                _short(self.id),
                0 if self.follows else None if self.parent_id is None else _short(self.parent_id),
                self.parent_digest,
                self.base,
                self.step,
                self.created_us,
                self.digest,
                self.notes,
                list(self.tags),
                self.order,
                self.removed,
                [[edit.key, edit.kind, edit.count, edit.prefix, edit.suffix, edit.length] for edit in self.edits],
                self.writes,
            ]
        )

    @classmethod
    def unpack(cls, data: bytes) -> CheckpointRecord:
        """Decode a record; raise DecodeError if the bytes are not one."""
        fields = _unpack(data, 14)
        branch, name, parent, parent_digest, base, step, created_us = fields[:7]
        digest, notes, tags, order, removed, edits, writes = fields[7:]
        follows = type(parent) is int and parent == 0
        record = cls(
            _number(branch),
            _name(name),
            follows,
            None if follows or parent is None else _name(parent),
            None if parent_digest is None else _digest(parent_digest),
            None if base is None else _number(base),
            _number(step),
            _of(created_us, int),
            _digest(digest),
            _of(notes, bytes),
            tuple(_of(tag, str) for tag in _of(tags, list)),
            None if order is None else _keys(order),
            _keys(removed),
            [_edit(each) for each in _of(edits, list)],
            _number(writes),
        )
        if len(record.notes) > DESCRIPTION_BYTES_MAX:
            raise DecodeError("a description in the bundle is larger than the format allows")
        if (record.parent_id is None) != (record.parent_digest is None):
            raise DecodeError("a checkpoint names a parent without its digest, or a digest without a parent")
        if len({edit.key for edit in record.edits}) < len(record.edits) or len(record.edits) > _KEYS_MAX:
            raise DecodeError("a checkpoint changes a key twice, or too many keys")
        return record


def pack_branch(branch: BranchKey, origin: str | None) -> bytes:
    """Return the record that starts a branch."""
    return ormsgpack.packb([branch.scope, branch.name, None if origin is None else _short(origin)])


def unpack_branch(data: bytes, namespace: str, thread: str) -> tuple[BranchKey, str | None]:
    """Return a branch's name and the checkpoint it was forked from."""
    scope, branch, origin = _unpack(data, 3)
    if scope != "":
        check_id(scope, "scope")
    return BranchKey(namespace, thread, scope, check_id(branch, "branch")), None if origin is None else _name(origin)


def pack_names(*names: str) -> bytes:
    """Return a record that consists of names."""
    return ormsgpack.packb(list(names))


def unpack_names(data: bytes, count: int) -> list[str]:
    """Return the names of such a record."""
    return [_of(name, str) for name in _unpack(data, count)]


def unpack_damage(data: bytes) -> tuple[str | None, str]:
    """Return the checkpoint that could not be exported, if known, and the reason."""
    checkpoint, what = unpack_names(data, 2)
    return check_id(checkpoint, "id") if checkpoint else None, what[:_REASON_LENGTH_MAX]


def pack_numbers(*numbers: int) -> bytes:
    """Return the counts at a bundle's end."""
    return ormsgpack.packb(list(numbers))


def unpack_numbers(data: bytes, count: int) -> list[int]:
    """Return the counts of a bundle's end."""
    return [_number(number) for number in _unpack(data, count)]


def pack_write(row: WriteRow) -> bytes:
    """Return the record of a pending write."""
    return ormsgpack.packb([row.task_id, row.index, row.channel, row.kind, row.count, row.task_path, row.body])


def unpack_write(data: bytes) -> WriteRow:
    """Return a pending write."""
    task, index, channel, kind, count, path, body = _unpack(data, 7)
    name = (_of(task, str), _of(index, int), _of(channel, str))
    return WriteRow(*name, _kind(kind), _number(count), _of(body, bytes), _of(path, str))


def pack_record(record: Record) -> bytes:
    """Return the record of an interrupt or effect, sealed as if it were just stored."""
    checkpoint = None if record.checkpoint is None else _short(record.checkpoint)
    key = record.key if record.kind == "effect" else _short(record.key)
    place = (record.branch.scope, record.branch.name, key, checkpoint)
    return ormsgpack.packb([*place, record.open, record.body])


def unpack_record(data: bytes, kind: Kind, namespace: str, thread: str) -> Record:
    """Return an interrupt or an effect as a store would have it."""
    scope, branch_name, key, checkpoint, is_open, body = _unpack(data, 6)
    branch = BranchKey(namespace, thread, _of(scope, str), check_id(branch_name, "branch"))
    name = _of(key, str) if kind == "effect" else _name(key)
    belongs = None if checkpoint is None else _name(checkpoint)
    return Record(kind, branch, name, _of(body, bytes), _of(is_open, bool), belongs, version=1)


# The parts of records ---------------------------------------------------------------------------------------------


def _unpack(data: bytes, count: int) -> list[Any]:
    # Each byte can become an empty list of 56 bytes, so the items of a large record are counted before it is unpacked.
    if len(data) > _SMALL_BYTES and has_more_items_than(data, _ITEMS_MAX):
        raise DecodeError("a record of the bundle has an unknown form")
    try:
        plain = ormsgpack.unpackb(data)
    except ValueError as error:
        raise DecodeError("a record of the bundle cannot be decoded") from error
    if not isinstance(plain, list) or len(plain) != count:
        raise DecodeError("a record of the bundle has an unknown form")
    return plain


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind or (type(value) is int and not -_INT_MAX <= value <= _INT_MAX):
        raise DecodeError(f"a record of the bundle holds {type(value).__name__} instead of {kind.__name__}")
    return value


def _number(value: Any) -> int:
    number: int = _of(value, int)
    if number < 0:
        raise DecodeError("a record of the bundle holds a negative count")
    return number


def _digest(value: Any) -> bytes:
    digest: bytes = _of(value, bytes)
    if len(digest) != DIGEST_BYTES:
        raise DecodeError("a digest in the bundle has the wrong length")
    return digest


def _short(name: str) -> bytes | str:
    return uuid_bytes(name) or name


def _name(stored: Any) -> str:
    """Return an id. A UUID must be stored as its 16 bytes."""
    if type(stored) is bytes and len(stored) == 16:
        return uuid_text(stored)
    if uuid_bytes(_of(stored, str)) is not None:
        raise DecodeError("a UUID in the bundle is stored as text instead of bytes")
    return check_id(stored, "id")


def _kind(kind: Any) -> str:
    text: str = _of(kind, str)
    if text not in _KINDS and not (text.startswith(FOREIGN) and 2 <= len(text) <= TAG_LENGTH_MAX + 1):
        raise DecodeError("a value in the bundle has an unknown kind")
    return text


def _key(key: Any) -> Key:
    if type(key) is int and key in SYSTEM_NAMES:
        return key
    if len(_of(key, str)) > KEY_LENGTH_MAX:
        raise DecodeError("a key in the bundle is too long")
    return str(key)


def _keys(keys: Any) -> list[Key]:
    return [_key(key) for key in _of(keys, list)]


def _edit(plain: Any) -> Edit:
    fields: Sequence[Any] = _of(plain, list)
    if len(fields) != _EDIT_FIELDS:
        raise DecodeError("a value in the bundle has an unknown form")
    key, kind, *numbers = fields
    return Edit(_key(key), _kind(kind), *map(_number, numbers))


def checked_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return a record's fields; raise DecodeError if no save could have produced them."""
    try:
        return check_fields(values)
    except (InvalidInput, TypeError, KeyError) as error:
        raise DecodeError(f"a checkpoint's description in the bundle is invalid: {error}") from error
