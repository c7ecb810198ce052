"""The rows of LangGraph's own savers as frozen records, with every value in the bytes it was stored in.

SqliteSaver stores a checkpoint as one value of its serializer, which is split into channels here. PostgresSaver stores
it as JSON with the small values in it, and the others in a table by channel and version. Values that name a type are
never decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import ormsgpack
from langgraph.checkpoint.serde.base import CipherProtocol

from backstay.errors import DecodeError
from backstay.langgraph.encoding import MSGPACK, Typed
from backstay.langgraph.importer import slices
from backstay.langgraph.serde.safe import with_tag

VALUES = "channel_values"
SENDS = "__pregel_tasks"  # the channel of messages to nodes; before version 4 they were stored elsewhere
SENDS_VERSION = 4

JSON, NULL, BYTES, PICKLE = "json", "null", "bytes", "pickle"

_PLAIN = ("v", "id", "ts", "channel_versions", "versions_seen", "updated_channels")
_DEFAULTS = {"v": int, "ts": str, "channel_versions": dict, "versions_seen": dict}
_SHAPES: Mapping[str, type | tuple[type, ...]] = {**_DEFAULTS, "updated_channels": (list, type(None))}


class SourceRef(NamedTuple):
    """A checkpoint's place in its thread, and its parent."""

    ns: str
    id: str
    parent: str | None


@dataclass(frozen=True, slots=True)
class SourceWrite:
    """One pending write, with its number."""

    task: str
    path: str
    idx: int
    channel: str
    value: Typed


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A checkpoint as ``put`` takes it, but with each value in the bytes it was stored in."""

    ref: SourceRef
    checkpoint: Mapping[str, Any]
    metadata: Mapping[str, Any]
    writes: tuple[SourceWrite, ...]
    lost: tuple[str, ...] = ()  # what cannot be imported, each with its reason


@dataclass(frozen=True, slots=True)
class SourceThread:
    """One thread of a source; it may have no checkpoints."""

    refs: Sequence[SourceRef]  # in the order of their ids, but parents before their children
    orphan_writes: int  # how many writes have no checkpoint
    read: Callable[[SourceRef], SourceCheckpoint]  # raises DecodeError for a damaged checkpoint


class Source(Protocol):
    """The tables of a saver, open for reading in one snapshot."""

    shown: str  # its path or URL, without secrets

    def threads(self) -> Iterator[str]:
        """Yield the names of all threads."""

    def thread(self, name: str) -> SourceThread:
        """Return a thread."""

    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ordered(refs: Iterable[SourceRef]) -> list[SourceRef]:
    """Return refs by id, as LangGraph does, but a parent before its children; a cycle of parents in any order."""
    waiting = {(ref.ns, ref.id): ref for ref in sorted(refs, key=lambda ref: (ref.id, ref.ns))}
    found: list[SourceRef] = []
    for first in list(waiting):
        line: dict[tuple[str, str], SourceRef] = {}
        key = first
        while key in waiting and key not in line:
            line[key] = waiting[key]
            key = (key[0], line[key].parent or "")
        for key in reversed(line):
            found.append(waiting.pop(key))
    return found


def value_of(tag: object, data: object) -> Typed:
    """Return a stored value that may be imported: it is complete and not a pickle."""
    if not isinstance(tag, str) or not isinstance(data, bytes):
        raise DecodeError("has no type or no bytes")
    if tag.partition("+")[0] == PICKLE:
        raise DecodeError("is a pickle, and pickles are never loaded")
    if tag == MSGPACK:
        try:
            rest = len(data) - slices.end_of(data)
        except DecodeError as error:
            raise DecodeError(f"is damaged: {error.what}") from error
        if rest:
            raise DecodeError(f"is damaged: {rest} bytes follow its end")
    return Typed(tag, data)


def decrypted_value(tag: object, data: object, cipher: CipherProtocol | None) -> tuple[object, object]:
    """Return an encrypted value decrypted, if there is a key; any other value unchanged."""
    if cipher is None or not isinstance(tag, str) or not isinstance(data, bytes) or "+" not in tag:
        return tag, data
    inner, name = tag.split("+", 1)
    try:
        return inner, cipher.decrypt(name, data)
    except Exception as error:  # a cipher may raise any error
        raise DecodeError(f"cannot be decrypted: {type(error).__name__}") from error


def encrypted_value(value: Any, cipher: CipherProtocol | None) -> Any:
    """Return stored bytes encrypted, if there is a key and they are not encrypted yet; anything else unchanged."""
    if cipher is None or type(value) is not Typed or "+" in value.tag:
        return value
    tag, plain = with_tag(value.tag, value.data)
    name, data = cipher.encrypt(plain)
    return Typed(f"{tag}+{name}", data)


def writes_of(rows: Iterable[tuple[Any, ...]]) -> tuple[tuple[SourceWrite, ...], tuple[str, ...]]:
    """Return writes of (task, path, idx, channel, tag, bytes) in LangGraph's order, and the problems of the others."""
    writes, lost = [], []
    for task, path, idx, channel, tag, data in rows:
        try:
            writes.append(SourceWrite(task, path, idx, channel, value_of(tag, data)))
        except DecodeError as error:
            lost.append(f"the write {idx} of task {task} to {channel!r} {error.what}")
    return tuple(sorted(writes, key=lambda write: (write.path, write.task, write.idx))), tuple(lost)


def checked(checkpoint: dict[str, Any], ref: SourceRef) -> dict[str, Any]:
    """Return a checkpoint after checking that its plain parts have the types that LangGraph gives them."""
    if checkpoint.get("id") != ref.id:
        raise DecodeError("the row and the checkpoint in it have different ids")
    for name, make in _DEFAULTS.items():
        checkpoint.setdefault(name, make())
    for name, shape in _SHAPES.items():
        if name in checkpoint and not isinstance(checkpoint[name], shape):
            raise DecodeError(f"its {name} has an unexpected type")
    if not _are_versions(checkpoint["channel_versions"]) or not all(
        isinstance(node, str) and _are_versions(seen) for node, seen in checkpoint["versions_seen"].items()
    ):
        raise DecodeError("its versions are not valid")
    return checkpoint


def _are_versions(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(version, str | int | float) for name, version in value.items()
    )


# SQLite: one value --------------------------------------------------------------------------------------------------


def split(tag: object, data: object, ref: SourceRef) -> dict[str, Any]:
    """Return a checkpoint that was stored as one value; its channels and unknown fields stay bytes."""
    items: Callable[[bytes], Iterable[tuple[str, bytes]]]
    if tag == MSGPACK and isinstance(data, bytes):
        items, plain, value_in, empty = slices.msgpack_items, slices.plain_msgpack, _slice, b"\x80"
    elif tag == JSON and isinstance(data, bytes):
        items, plain, value_in, empty = slices.json_items, slices.plain_json, partial(Typed, JSON), b"{}"
    elif isinstance(tag, str) and "+" in tag:
        raise DecodeError(f"is encrypted as a whole ({tag}), so it cannot be split into channels without serde=")
    else:
        raise DecodeError(f"has the type {tag!r}, which is never loaded")
    fields = dict(items(data))
    values = {name: value_in(value) for name, value in items(fields.pop(VALUES, empty))}
    others = {name: value_in(value) for name, value in fields.items() if name not in _PLAIN}
    known = {name: plain(fields[name]) for name in _PLAIN if name in fields}
    return checked({**known, VALUES: values, **others}, ref)


def _slice(data: bytes) -> Typed:
    """Return a part of a msgpack value as the serializer would have written it by itself."""
    if data == slices.NIL:
        return Typed(NULL, b"")
    binary = slices.binary_in(data)
    return Typed(MSGPACK, data) if binary is None else Typed(BYTES, binary)


def metadata_of(data: object) -> dict[str, Any]:
    """Return a row's metadata: JSON, or msgpack in old files."""
    if data is None:
        return {}
    if isinstance(data, str):
        data = data.encode()
    if not isinstance(data, bytes):
        raise DecodeError("its metadata is neither text nor bytes")
    found = slices.plain_json(data) if data.lstrip()[:1] == b"{" else slices.plain_msgpack(data)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise DecodeError("its metadata is not an object")
    return found


# PostgreSQL: JSON, and the rest by channel and version ----------------------------------------------------------------


def joined(
    checkpoint: object, blobs: Mapping[str, tuple[str, bytes | None]], ref: SourceRef
) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint from its JSON and the bytes of its channels, and the problems of the others."""
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(VALUES) or {}, dict):
        raise DecodeError("is not a checkpoint")
    values = {name: _encoded(value) for name, value in (checkpoint.get(VALUES) or {}).items()}
    others = {name: value if name in _PLAIN else _encoded(value) for name, value in checkpoint.items()}
    lost = []
    for channel, (tag, data) in blobs.items():
        try:
            values[channel] = value_of(tag, data)
        except DecodeError as error:
            values.pop(channel, None)  # the value in the JSON is only a placeholder
            lost.append(f"the channel {channel!r} {error.what}")
    return checked({**others, VALUES: values}, ref), lost


def _encoded(value: object) -> Typed:
    """Return a value that PostgreSQL stored as JSON in the serializer's bytes; as JSON if msgpack cannot hold it."""
    if value is None:
        return Typed(NULL, b"")
    try:
        return Typed(MSGPACK, ormsgpack.packb(value))
    except (ValueError, TypeError):  # an integer of more than 64 bits
        return Typed(JSON, json.dumps(value).encode())


def add_sends(checkpoint: dict[str, Any], sends: Sequence[Typed]) -> None:
    """Add the messages of its parent's tasks to a checkpoint before version 4, as LangGraph does on reading."""
    if not sends:
        return
    tags = {send.tag for send in sends}
    if tags == {MSGPACK}:
        value = Typed(MSGPACK, slices.array_of([send.data for send in sends]))
    elif tags == {JSON}:
        value = Typed(JSON, b"[" + b",".join(send.data for send in sends) + b"]")
    else:
        raise DecodeError(f"their types cannot be combined in a list: {', '.join(sorted(tags))}")
    versions = checkpoint["channel_versions"]
    if not versions:
        raise DecodeError("the checkpoint has no versions")
    checkpoint[VALUES][SENDS] = value
    checkpoint["channel_versions"] = {**versions, SENDS: max(versions.values())}
