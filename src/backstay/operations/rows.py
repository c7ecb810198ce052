"""Convert between the rows of a store and the checkpoints of a caller: fields, digests, frames, pending writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal
from zlib import crc32

import ormsgpack

from backstay.codec import decode_stored, encode
from backstay.errors import Corrupted, DecodeError, EncodeError, InvalidInput
from backstay.model.checkpoint import (
    EPOCH,
    FIELD_KEYS,
    FIELD_TYPES,
    CheckpointFields,
    CheckpointMeta,
    SavedCheckpoint,
    Write,
    fields_from_plain,
    fields_to_plain,
    unchecked,
)
from backstay.model.fields import DESCRIPTION_BYTES_MAX, STEP_MAX, check_fields, check_tags
from backstay.model.frame import FrameStack, NextNode
from backstay.model.ids import check_label
from backstay.pieces.body import from_body, to_body
from backstay.pieces.manifest import Key
from backstay.store.base import Backend, BranchKey, Row, WriteRow
from backstay.store.layout import UNREADABLE, uuid_bytes, uuid_text

OnDamage = Literal["raise", "mark"]
"""How a list handles an entry that cannot be read: raise its error, or return a ``Damaged`` in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """Takes the place of a stored entry that cannot be read; ``error`` says what is wrong and what to do next."""

    thread_id: str | None  # None: a part of the store that may hold entries of any thread
    id: str | None  # of the checkpoint, interrupt or session, or the effect's key; None if that cannot be read either
    seq: int  # its number in the order of the list; 0 if it is not known
    error: Corrupted


def check_on_damage(on_damage: object) -> OnDamage:
    """Return ``on_damage``, checked."""
    if on_damage not in ("raise", "mark"):
        raise InvalidInput(f"on_damage is {on_damage!r:.40}", hint='Pass "raise" or "mark"')
    return "mark" if on_damage == "mark" else "raise"


NO_PARENT = bytes(32)
CHECKSUM_BYTES = 4
_PAYLOAD_FIELDS = ("frames", "path")  # stored with the payload
_RUN_ID = FIELD_KEYS["run_id"]  # stored as 16 bytes if it is a UUID
MICROSECOND = timedelta(microseconds=1)
_EXACT_US = 4_102_444_800_000_000  # until the year 2100 a float of seconds names every microsecond exactly
_from_timestamp = datetime.fromtimestamp


def to_microseconds(moment: datetime) -> int:
    """Return a UTC moment as whole microseconds since 1970."""
    return (moment - EPOCH) // MICROSECOND


def from_microseconds(count: int) -> datetime:
    """Return the UTC moment of ``to_microseconds``."""
    if 0 <= count < _EXACT_US:
        return _from_timestamp(count / 1_000_000, UTC)  # three times as fast as the other way
    try:
        return EPOCH + timedelta(microseconds=count)
    except (OverflowError, TypeError) as error:
        raise DecodeError("a stored time is out of range") from error


def new_checkpoint(
    branch: BranchKey, name: str, parent_id: str | None, step: int, created: datetime, notes: CheckpointFields
) -> SavedCheckpoint:
    """Return a checkpoint that is about to be saved, with its metadata. Only the caller's fields are checked here."""
    values: dict[str, Any] = {
        "id": name,
        "thread_id": branch.thread,
        "namespace": branch.namespace,
        "scope": branch.scope,
        "branch": branch.name,
        "parent_id": parent_id,
        "step": step,
        "created_at": created,
    }
    if notes:
        values.update(check_fields({key: value for key, value in notes.items() if key not in _PAYLOAD_FIELDS}))
    return unchecked(SavedCheckpoint, values)


def encode_fields(meta: CheckpointMeta, described: bool = True) -> bytes:
    """Return the encoded fields that differ from their defaults; nothing if it has none (``described=False``)."""
    plain = fields_to_plain(meta.__dict__) if described else {}
    run_id = plain.get(_RUN_ID)
    if run_id is not None:
        plain[_RUN_ID] = _packed_run_id(run_id)
    body = encode(plain, "checkpoint") if plain else b""
    if len(body) > DESCRIPTION_BYTES_MAX:
        raise too_large("the description of a checkpoint", len(body), DESCRIPTION_BYTES_MAX, "checkpoint", plain)
    return body


def checksum(
    body: bytes, name: str, parent_id: str | None, step: int, created_us: int, digest: bytes, size: int
) -> bytes:
    """Return the checksum that is stored after the encoded fields and covers everything that lists show.

    The digest of a checkpoint covers more but needs the manifest, and a list of thousands must detect damage without
    reading it.
    """
    columns = f"{name}\0{parent_id or ''}\0{step} {created_us} {size}".encode()
    return crc32(digest, crc32(columns, crc32(body))).to_bytes(CHECKSUM_BYTES)


def too_large(what: str, size: int, most: int, path: str, fields: Mapping[str, Any]) -> EncodeError:
    """Return the error for a value that is too large for lists; its path leads to the largest part."""
    inner: Any = fields
    while isinstance(inner, dict) and inner:
        name = max(inner, key=lambda key: len(encode(inner[key])))
        path, inner = f"{path}.{name}", inner[name]
    return EncodeError(
        f"{what} takes {size} bytes encoded, more than {most}; {path:.200} is the largest part",
        path=path,
        hint="Put large values into the state, which lists do not read",
    )


@lru_cache(maxsize=64)
def _packed_run_id(run_id: str) -> bytes | str:
    """Return the shorter form of a run's id; cached, because it is the same in every step of the run."""
    return uuid_bytes(run_id) or run_id


def decode_fields(notes: bytes) -> dict[str, Any]:
    """Return the encoded fields as values of a checkpoint."""
    try:
        values = fields_from_plain(decode_stored(notes))
        run_id = values.get("run_id")
        if type(run_id) is bytes:
            values["run_id"] = uuid_text(run_id)
        for name, value in values.items():  # no other type was ever written, and readers rely on that
            if type(value) not in FIELD_TYPES[name]:
                raise TypeError(name)
    except DecodeError:
        raise
    except (InvalidInput, AttributeError, KeyError, TypeError, ValueError) as error:  # damaged bytes that still decode
        raise DecodeError("its fields do not have the expected form") from error
    return values


def checkpoint_digest(
    parent: bytes, root: bytes, keys: Sequence[Key], meta: CheckpointMeta, created_us: int, body: bytes
) -> bytes:
    """Return the digest over the parent's digest, the content, the order of its keys and the encoded fields."""
    identity = (
        meta.id,
        meta.namespace,
        meta.thread_id,
        meta.scope,
        meta.branch,
        meta.parent_id or "",
        meta.step,
        created_us,
        keys,
    )
    return hashlib.sha256(b"".join((parent, root, ormsgpack.packb(identity), body))).digest()


def parent_digest(row: Row) -> bytes | None:
    """Return the digest of the parent of a row that was read with its payload; None if the parent is missing."""
    return NO_PARENT if row.parent_id is None else row.parent_digest


def meta_of(row: Row) -> CheckpointMeta:
    """Return a stored checkpoint's metadata."""
    return unchecked(CheckpointMeta, values_of(row))


def entry_of(row: Row) -> CheckpointMeta | Damaged:
    """Return a stored checkpoint's metadata, or ``Damaged`` if it cannot be read."""
    try:
        return meta_of(row)
    except Corrupted as error:
        return Damaged(thread_id=row.branch.thread, id=readable_id(row), seq=row.seq, error=error)


def readable_id(row: Row) -> str | None:
    """Return a row's id; None if it cannot be read."""
    return None if UNREADABLE in row.id else row.id


def damaged(row: Row, what: str, path: str | None = None) -> Corrupted:
    """Return the error about a checkpoint that cannot be read."""
    name = readable_id(row)
    which = f"checkpoint number {row.seq}" if row.seq else "the newest checkpoint"
    place = f"checkpoint {name}" if name else f"{which} of branch {row.branch.name!r}"
    hint = "Run store.check() to see what is affected; older checkpoints may be intact"
    return Corrupted(f"{place}: {what}", thread=row.branch.thread, checkpoint=name, path=path, hint=hint)


def values_of(row: Row) -> dict[str, Any]:
    """Return the fields of a checkpoint from its row; Corrupted if any cannot be read. Lists call it for every row."""
    key, _, seq, name, parent_id, _, step, created_us, digest, notes, size, tags = row[:12]
    namespace, thread, scope, branch = key
    try:
        body = notes[:-CHECKSUM_BYTES]
        if notes[-CHECKSUM_BYTES:] != checksum(body, name, parent_id, step, created_us, digest, size):
            raise DecodeError("its fields do not match their checksum" if notes else "its row is missing")
        values = {
            "id": name,
            "thread_id": thread,
            "namespace": namespace,
            "scope": scope,
            "branch": branch,
            "seq": seq,
            "parent_id": parent_id,
            "step": step,
            "created_at": from_microseconds(created_us),
            "tags": tags,
            "digest": digest,
            "size": size,
        }
        if body:
            values.update(decode_fields(body))
    except (DecodeError, TypeError, ValueError) as error:
        raise damaged(row, error.what if isinstance(error, DecodeError) else "its row cannot be read") from error
    return values


def tag(store: Backend, namespace: str, name: str, add: Iterable[str], remove: Iterable[str]) -> tuple[str, ...]:
    """Change a checkpoint's tags and return all it has."""
    return store.tag(namespace, name, check_tags(tuple(add)), check_tags(tuple(remove)))


def write(store: Backend, branch: BranchKey, name: str, writes: Iterable[Write], replaces: bool) -> None:
    """Store results of finished tasks with a checkpoint."""
    store.write(branch, name, write_rows(writes), replaces)


def write_rows(writes: object) -> list[WriteRow]:
    """Return pending writes with their values encoded; raise InvalidInput for anything else."""
    if isinstance(writes, str | bytes) or not isinstance(writes, Iterable):
        raise InvalidInput(f"writes must be a list of Write, not {type(writes).__name__}")
    writes = list(writes)
    for write in writes:
        if not isinstance(write, Write):
            raise InvalidInput(f"writes must be a list of Write, not of {type(write).__name__}")
        for name in ("task_id", "channel", "task_path"):
            check_label(getattr(write, name), f"{name} of a write")
        if type(write.index) is not int or abs(write.index) > STEP_MAX:
            raise InvalidInput(f"index of a write must be a whole number, not {write.index!r:.40}")
    return list(map(write_row, writes))


def write_row(write: Write) -> WriteRow:
    """Return a pending write with its value encoded."""
    body = to_body(write.value, f"writes[{write.task_id}][{write.index}]")
    return WriteRow(write.task_id, write.index, write.channel, body.kind, body.count, body.data, write.task_path)


def write_of(row: WriteRow) -> Write:
    """Return a stored pending write."""
    return Write(row.task_id, row.index, row.channel, from_body(row.kind, row.count, [row.body]), row.task_path)


# Frames: the short form in which a position is stored with every step ---------------------------------------------
#
# A frame repeats itself: its node is the next one to run, and the visit follows from the counts. So a frame is stored
# as a list ``[graph, next, last node, cursor, visits]``, followed by a map of the fields that cannot be derived.
# ``next`` is the name of a node, another continuation as it is, or None. The steps of the outermost frame equal its
# cursor unless they are given. Frames that a caller saved are stored as maps of all their fields; both are read.

NO_FRAMES = FrameStack()


def shorten_frames(frames: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return plain frames in their short form."""
    short = []
    for index, given in enumerate(frames):
        frame = dict(given)
        todo, last, cursor = frame.pop("continuation", None), frame.pop("last_node", None), frame.pop("cursor", 0)
        visits = frame.pop("visits", {})
        following = todo["node"] if todo is not None and todo["kind"] == NextNode.kind else todo
        fields = [frame.pop("graph_id"), following, last, cursor, visits]
        for name, value in _derived(following, last, cursor, visits, is_outermost=not index).items():
            if frame.get(name, 0) == value:
                frame.pop(name, None)
            else:
                frame.setdefault(name, 0)
        short.append([*fields, frame] if frame else fields)
    return short


def read_frames(stored: Sequence[Any], state: Mapping[str, Any]) -> FrameStack:
    """Return a stack from either form; the outermost frame without a state has the checkpoint's own."""
    plain = []
    for index, each in enumerate(stored):
        match each:
            case dict():
                plain.append(each)
            case [str() as graph, following, last, int() as cursor, dict() as visits, *more] if len(more) <= 1:
                frame = {"graph_id": graph, "last_node": last, "cursor": cursor, "visits": visits}
                if following is not None:
                    is_node = isinstance(following, str)
                    frame["continuation"] = NextNode(following).to_plain() if is_node else following
                frame.update(_derived(following, last, cursor, visits, is_outermost=not index))
                frame.update(more[0] if more else {})
                plain.append(frame)
            case _:
                raise DecodeError(
                    "a stored frame does not have a known form", hint="A newer version of Backstay may have written it"
                )
    if plain and "state" not in plain[0]:
        plain[0] = {**plain[0], "state": state}
    return FrameStack.from_plain(plain)


def _derived(
    following: Any, last: str | None, cursor: int, visits: Mapping[str, int], is_outermost: bool
) -> dict[str, Any]:
    """Return the fields that can be derived from the others."""
    steps = cursor if is_outermost else 0
    if isinstance(following, str):
        return {"node_id": following, "visit": visits.get(following, 0) + 1, "steps": steps}
    return {"node_id": last, "visit": 1, "steps": steps}
