"""What LangGraph's own savers keep: their rows as frozen records, every value in the bytes it was stored in.

SQLite keeps a checkpoint as one value of its serializer, which is cut into its channels here. PostgreSQL keeps it as
JSON with the small values in it, the others in a table by channel and version. Nothing that names a type is decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import ormsgpack
from langgraph.checkpoint.serde.base import CipherProtocol

from backstay.errors import DecodeError
from backstay.integrations.langgraph.serde.safe import with_tag
from backstay.integrations.langgraph.stock import raw
from backstay.integrations.langgraph.values import MSGPACK, Typed

VALUES = "channel_values"
SENDS = "__pregel_tasks"  # the channel of what was sent to nodes; before version 4 it had another place
SENDS_VERSION = 4

JSON, NULL, BYTES, PICKLE = "json", "null", "bytes", "pickle"

_PLAIN = ("v", "id", "ts", "channel_versions", "versions_seen", "updated_channels")
_DEFAULTS = {"v": int, "ts": str, "channel_versions": dict, "versions_seen": dict}
_SHAPES: Mapping[str, type | tuple[type, ...]] = {**_DEFAULTS, "updated_channels": (list, type(None))}


class Spot(NamedTuple):
    """Where a checkpoint is in its thread, and what it follows."""

    ns: str
    id: str
    parent: str | None


@dataclass(frozen=True, slots=True)
class StockWrite:
    """One pending write, with the number under which it was stored."""

    task: str
    path: str
    idx: int
    channel: str
    value: Typed


@dataclass(frozen=True, slots=True)
class StockCheckpoint:
    """A checkpoint as ``put`` takes it, except that each value is the bytes it was stored in."""

    spot: Spot
    checkpoint: Mapping[str, Any]
    metadata: Mapping[str, Any]
    writes: tuple[StockWrite, ...]
    lost: tuple[str, ...] = ()  # what cannot be carried over, each with its reason


class StockThread(Protocol):
    """One thread of a source."""

    spots: Sequence[Spot]  # in the order of their ids, but parents first
    strays: int  # writes whose checkpoint is not there

    def read(self, spot: Spot) -> StockCheckpoint:
        """Return a checkpoint; a damaged one is a ``DecodeError``."""


class Source(Protocol):
    """The tables of a saver, open for reading as they are at one moment."""

    shown: str  # where it is, without secrets

    def threads(self) -> Iterator[str]:
        """Yield the names of all threads."""

    def thread(self, name: str) -> StockThread:
        """Return what there is of a thread, which may be nothing."""

    def close(self) -> None:
        """Let go of it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def ordered(spots: Iterable[Spot]) -> list[Spot]:
    """Return spots by id, as LangGraph does, but a parent before its children; a ring of parents as it comes."""
    waiting = {(spot.ns, spot.id): spot for spot in sorted(spots, key=lambda spot: (spot.id, spot.ns))}
    found: list[Spot] = []
    for first in list(waiting):
        line: dict[tuple[str, str], Spot] = {}
        key = first
        while key in waiting and key not in line:
            line[key] = waiting[key]
            key = (key[0], line[key].parent or "")
        for key in reversed(line):
            found.append(waiting.pop(key))
    return found


def value_of(tag: object, data: object) -> Typed:
    """Return a stored value that may be carried over: one that is whole, and no pickle."""
    if not isinstance(tag, str) or not isinstance(data, bytes):
        raise DecodeError("has no type or no bytes")
    if tag.partition("+")[0] == PICKLE:
        raise DecodeError("is a pickle, which is not opened")
    if tag == MSGPACK:
        _check_whole(data)
    return Typed(tag, data)


def _check_whole(data: bytes) -> None:
    try:
        rest = len(data) - raw.end_of(data)
    except DecodeError as error:
        raise DecodeError(f"is damaged: {error.what}") from error
    if rest:
        raise DecodeError(f"is damaged: {rest} bytes follow its end")


def opened(tag: object, data: object, cipher: CipherProtocol | None) -> tuple[object, object]:
    """Return what is inside an encrypted value, if there is a key; what is not encrypted as it is."""
    if cipher is None or not isinstance(tag, str) or not isinstance(data, bytes) or "+" not in tag:
        return tag, data
    inner, name = tag.split("+", 1)
    try:
        return inner, cipher.decrypt(name, data)
    except Exception as error:  # whatever a cipher raises
        raise DecodeError(f"cannot be decrypted: {type(error).__name__}") from error


def sealed(value: Any, cipher: CipherProtocol | None) -> Any:
    """Return stored bytes encrypted, if there is a key and they are not yet; anything else as it is."""
    if cipher is None or type(value) is not Typed or "+" in value.tag:
        return value
    tag, plain = with_tag(value.tag, value.data)
    name, data = cipher.encrypt(plain)
    return Typed(f"{tag}+{name}", data)


def writes_of(rows: Iterable[tuple[Any, ...]]) -> tuple[tuple[StockWrite, ...], tuple[str, ...]]:
    """Return writes of (task, path, idx, channel, tag, bytes) in LangGraph's order, and what is wrong with others."""
    writes, lost = [], []
    for task, path, idx, channel, tag, data in rows:
        try:
            writes.append(StockWrite(task, path, idx, channel, value_of(tag, data)))
        except DecodeError as error:
            lost.append(f"the write {idx} of task {task} to {channel!r} {error.what}")
    return tuple(sorted(writes, key=lambda write: (write.path, write.task, write.idx))), tuple(lost)


def checked(checkpoint: dict[str, Any], spot: Spot) -> dict[str, Any]:
    """Return a checkpoint whose plain parts have the shape that LangGraph gives them."""
    if checkpoint.get("id") != spot.id:
        raise DecodeError("the checkpoint in the row is not the one that the row names")
    for name, make in _DEFAULTS.items():
        checkpoint.setdefault(name, make())
    for name, shape in _SHAPES.items():
        if name in checkpoint and not isinstance(checkpoint[name], shape):
            raise DecodeError(f"its {name} has another shape than LangGraph gives it")
    if not _are_versions(checkpoint["channel_versions"]) or not all(
        isinstance(node, str) and _are_versions(seen) for node, seen in checkpoint["versions_seen"].items()
    ):
        raise DecodeError("its versions are none")
    return checkpoint


def _are_versions(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(version, str | int | float) for name, version in value.items()
    )


# SQLite: one value --------------------------------------------------------------------------------------------------


def split(tag: object, data: object, spot: Spot) -> dict[str, Any]:
    """Return a checkpoint that was stored as one value: its values, and what LangGraph does not know, as bytes."""
    if tag == MSGPACK and isinstance(data, bytes):
        fields, plain = dict(raw.msgpack_items(data)), raw.plain_msgpack
        values = {name: _slice(value) for name, value in raw.msgpack_items(fields.pop(VALUES, b"\x80"))}
        others = {name: _slice(value) for name, value in fields.items() if name not in _PLAIN}
    elif tag == JSON and isinstance(data, bytes):
        fields, plain = dict(raw.json_items(data)), raw.plain_json
        values = {name: Typed(JSON, value) for name, value in raw.json_items(fields.pop(VALUES, b"{}"))}
        others = {name: Typed(JSON, value) for name, value in fields.items() if name not in _PLAIN}
    elif isinstance(tag, str) and "+" in tag:
        raise DecodeError(f"is encrypted as a whole ({tag}), so its channels cannot be told apart")
    else:
        raise DecodeError(f"is of the type {tag!r}, which is not opened")
    known = {name: plain(fields[name]) for name in _PLAIN if name in fields}
    return checked({**known, VALUES: values, **others}, spot)


def _slice(data: bytes) -> Typed:
    """Return a part of a msgpack value as the serializer would have given it alone."""
    if data == raw.NIL:
        return Typed(NULL, b"")
    binary = raw.binary_in(data)
    return Typed(MSGPACK, data) if binary is None else Typed(BYTES, binary)


def metadata_of(data: object) -> dict[str, Any]:
    """Return a row's metadata: JSON, or msgpack in old files."""
    if data is None:
        return {}
    if isinstance(data, str):
        data = data.encode()
    if not isinstance(data, bytes):
        raise DecodeError("its metadata is neither text nor bytes")
    found = raw.plain_json(data) if data.lstrip()[:1] == b"{" else raw.plain_msgpack(data)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise DecodeError("its metadata is no object")
    return found


# PostgreSQL: JSON, and the rest by channel and version ----------------------------------------------------------------


def joined(
    checkpoint: object, blobs: Mapping[str, tuple[str, bytes | None]], spot: Spot
) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint of its JSON and its channels' bytes, and what is wrong with the others."""
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(VALUES) or {}, dict):
        raise DecodeError("is no checkpoint")
    values = {name: _encoded(value) for name, value in (checkpoint.get(VALUES) or {}).items()}
    others = {name: value if name in _PLAIN else _encoded(value) for name, value in checkpoint.items()}
    lost = []
    for channel, (tag, data) in blobs.items():
        try:
            values[channel] = value_of(tag, data)
        except DecodeError as error:
            values.pop(channel, None)  # what stands in the JSON is only a mark
            lost.append(f"the channel {channel!r} {error.what}")
    return checked({**others, VALUES: values}, spot), lost


def _encoded(value: object) -> Typed:
    """Return what PostgreSQL kept as JSON in the serializer's bytes; as JSON still if msgpack has no room for it."""
    if value is None:
        return Typed(NULL, b"")
    try:
        return Typed(MSGPACK, ormsgpack.packb(value))
    except (ValueError, TypeError):  # an integer of more than 64 bits
        return Typed(JSON, json.dumps(value).encode())


def add_sends(checkpoint: dict[str, Any], sends: Sequence[Typed]) -> None:
    """Give a checkpoint of before version 4 what its parent's tasks sent, as LangGraph does when it reads it."""
    if not sends:
        return
    tags = {send.tag for send in sends}
    if tags == {MSGPACK}:
        value = Typed(MSGPACK, raw.array_of([send.data for send in sends]))
    elif tags == {JSON}:
        value = Typed(JSON, b"[" + b",".join(send.data for send in sends) + b"]")
    else:
        raise DecodeError(f"has types that make no list: {', '.join(sorted(tags))}")
    versions = checkpoint["channel_versions"]
    if not versions:
        raise DecodeError("has no version")
    checkpoint[VALUES][SENDS] = value
    checkpoint["channel_versions"] = {**versions, SENDS: max(versions.values())}
