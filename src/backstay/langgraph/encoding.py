"""How a LangGraph checkpoint is stored as one of ours, and back: channel values, versions and metadata.

**Values.** LangGraph's serializer returns (tag, bytes). msgpack writes the length of a list or dictionary before its
elements, so a growing one changes its first bytes. As in ``pieces.body`` that header is left out and the count is
stored next to the bytes: growth becomes a pure append. Reading restores the header, so the serializer gets exactly the
bytes it returned.

**Names and versions.** Names of channels and nodes stay the same from step to step while their numbers change. So the
names are stored under ``RUN``, which costs nothing while it stays the same, and the numbers under ``VERSIONS``.

**Metadata.** LangGraph's metadata is the record's own metadata, so that lists can filter by it; ``source`` is the
record's trigger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.serde.base import SerializerProtocol

from backstay.codec.msgpack import VALUE_BYTES_MAX, header
from backstay.errors import BackstayError, DecodeError, EncodeError
from backstay.langgraph.names import GraphLocation
from backstay.model.checkpoint import CheckpointFields, CheckpointMeta
from backstay.pieces.body import FOREIGN, Body
from backstay.store.layout import uuid_bytes

# Values -----------------------------------------------------------------------------------------------------------

MSGPACK = "msgpack"
LIST, MAP = FOREIGN + "[" + MSGPACK, FOREIGN + "{" + MSGPACK
"""The kinds of lists and dictionaries in msgpack without their header."""

HEADS = {LIST: (0x90, 0xDC), MAP: (0x80, 0xDE)}  # the first byte with up to 15 elements (plus the count), with more


@dataclass(frozen=True, slots=True)
class Typed:
    """Bytes of LangGraph's serializer under their tag. As a channel's value they are stored without encoding."""

    tag: str
    data: bytes


def dump(serde: SerializerProtocol, value: Any, path: str) -> Typed:
    """Return a value as the serializer writes it, or raise EncodeError with its path."""
    if type(value) is Typed:
        return value
    try:
        dumps_at = getattr(serde, "dumps_at", None)
        tag, data = serde.dumps_typed(value) if dumps_at is None else dumps_at(value, path)
    except BackstayError:
        raise
    except Exception as error:
        raise EncodeError(
            f"{path} cannot be stored: {error}",
            path=path,
            hint="Store plain values, or pass another serde= to the saver",
        ) from error
    if len(data) > VALUE_BYTES_MAX:
        raise EncodeError(
            f"{path} takes {len(data)} bytes when encoded; the limit is {VALUE_BYTES_MAX}",
            path=path,
            hint="Split it over several channels, or save the data elsewhere and store its address",
        )
    return Typed(tag, bytes(data))


def load(serde: SerializerProtocol, typed: Typed, path: str) -> Any:
    """Return the value that the serializer reads from its bytes."""
    try:
        return serde.loads_typed((typed.tag, typed.data))
    except BackstayError as error:
        if error.path is None:
            error.path = path
        raise
    except Exception as error:
        raise DecodeError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            path=path,
            hint="Use the serializer, and the key, that wrote it",
        ) from error


def to_body(typed: Typed) -> Body:
    """Return a value's bytes as they are stored."""
    tag, data = typed.tag, typed.data
    if tag == MSGPACK and data:
        first = data[0]
        for kind, (short, long) in HEADS.items():
            if first & 0xF0 == short:
                return Body(kind, first & 0x0F, data[1:])
            if first in (long, long + 1):
                size = 2 if first == long else 4
                count = int.from_bytes(data[1 : 1 + size])
                # Only the shortest header is left out: reading could not restore another one.
                if len(data) > size and data.startswith(header(count, short, long)):
                    return Body(kind, count, data[1 + size :])
    return Body(FOREIGN + tag, 0, data)


def from_body(kind: str, count: int, parts: Sequence[bytes]) -> Typed:
    """Return the bytes that the serializer wrote."""
    heads = HEADS.get(kind)
    if heads is not None:
        return Typed(MSGPACK, b"".join((header(count, *heads), *parts)))
    return Typed(kind[len(FOREIGN) :], b"".join(parts))


# Names and versions -----------------------------------------------------------------------------------------------

_KNOWN = frozenset({"v", "id", "ts", "channel_values", "channel_versions", "versions_seen", "updated_channels"})
_ABSENT = False  # of updated_channels, which may also be None


def names_and_versions(checkpoint: Checkpoint, serde: SerializerProtocol) -> tuple[dict[str, Any], list[Any]]:
    """Return the part of a checkpoint that stays from step to step, and the part that changes."""
    versions, seen = checkpoint["channel_versions"], checkpoint["versions_seen"]
    numbers: dict[str, int] = {}
    for name in (*versions, *(channel for each in seen.values() for channel in each)):
        numbers.setdefault(name, len(numbers))
    names: dict[str, Any] = {
        "v": checkpoint["v"],
        "channels": list(numbers),
        "versions": len(versions),
        "seen": [[node, [numbers[channel] for channel in each]] for node, each in seen.items()],
    }
    others = {key: dump(serde, value, key) for key, value in checkpoint.items() if key not in _KNOWN}
    if others:
        names["others"] = {key: [typed.tag, typed.data] for key, typed in others.items()}
    updated: Any = checkpoint.get("updated_channels", _ABSENT)
    if updated:
        updated = [numbers.get(name, name) for name in updated]
    # The time stamp is stored only if the record's own time would not give exactly the same text.
    ts: Any = checkpoint["ts"]
    try:
        is_plain = type(ts) is str and datetime.fromisoformat(ts).astimezone(UTC).isoformat() == ts
    except ValueError:
        is_plain = False
    seen_versions = [version for each in seen.values() for version in each.values()]
    return names, [list(versions.values()), seen_versions, updated, None if is_plain else ts]


def versions_in(names: Mapping[str, Any], versions: list[Any]) -> dict[str, Any]:
    """Return the version of each channel."""
    return dict(zip(names["channels"], versions[0], strict=False))


def checkpoint_from(
    names: Mapping[str, Any],
    versions: list[Any],
    values: dict[str, Any],
    checkpoint_id: str,
    created: datetime,
    serde: SerializerProtocol,
) -> Checkpoint:
    """Return the checkpoint that was put."""
    try:
        channels = names["channels"]
        channel_versions, seen, updated, ts = versions[:4]
        seen_versions = iter(seen)
        checkpoint: dict[str, Any] = {
            "v": names["v"],
            "ts": created.isoformat() if ts is None else ts,
            "id": checkpoint_id,
            "channel_values": values,
            "channel_versions": dict(zip(channels[: names["versions"]], channel_versions, strict=True)),
            "versions_seen": {
                node: {channels[number]: next(seen_versions) for number in numbers} for node, numbers in names["seen"]
            },
        }
        if updated is not _ABSENT:
            checkpoint["updated_channels"] = updated and [
                channels[each] if type(each) is int else each for each in updated
            ]
        for key, (tag, data) in names.get("others", {}).items():
            checkpoint[key] = load(serde, Typed(tag, data), key)
    except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise DecodeError(
            "the stored names and versions do not describe a LangGraph checkpoint",
            hint="Another program may have saved to this thread: use a thread of its own for each graph",
        ) from error
    return checkpoint  # type: ignore[return-value]  # all keys of the TypedDict, and those it does not know


# Metadata ---------------------------------------------------------------------------------------------------------

SOURCES = frozenset({"input", "loop", "update", "fork"})
ID, PARENT, NS = "backstay:checkpoint_id", "backstay:parent_id", "backstay:checkpoint_ns"
"""Metadata of ours: LangGraph's names if ours do not determine them. A tuple's metadata never shows them."""


def fields_for(
    location: GraphLocation, checkpoint: Checkpoint, parent: str | None, metadata: Mapping[str, Any]
) -> CheckpointFields:
    """Return the record's fields; LangGraph's names go to the metadata if our own do not determine them."""
    stored = {key: _plain(value) for key, value in metadata.items()}
    try:
        created = datetime.fromisoformat(str(checkpoint["ts"]))
    except ValueError:
        created = datetime.now(UTC)  # the time stamp itself is stored with the versions
    created = (created if created.tzinfo is not None else created.replace(tzinfo=UTC)).astimezone(UTC)
    fields: CheckpointFields = {"metadata": stored, "created_at": created}
    if stored.get("source") in SOURCES:
        fields["trigger"] = stored.pop("source")
    if uuid_bytes(checkpoint["id"]) is None:
        stored[ID] = str(checkpoint["id"])
    if parent is not None and uuid_bytes(parent) is None:
        stored[PARENT] = str(parent)
    if location.scope != location.ns:
        stored[NS] = location.ns
    return fields


def names_of(meta: CheckpointMeta) -> tuple[GraphLocation, str, str | None]:
    """Return the thread and namespace of a checkpoint, its id, and its parent's id or None."""
    stored, location = meta.metadata, GraphLocation(meta.thread_id, meta.metadata.get(NS, meta.scope))
    checkpoint_id = stored.get(ID) or location.original(meta.id)
    if checkpoint_id is None:
        raise not_langgraph()
    if PARENT in stored:
        return location, str(checkpoint_id), str(stored[PARENT])
    return location, str(checkpoint_id), None if meta.parent_id is None else location.original(meta.parent_id)


def not_langgraph() -> DecodeError:
    """Return the error for a checkpoint that another program has saved to a graph's thread."""
    return DecodeError(
        "the checkpoint was not saved by LangGraph",
        hint="Change a graph's thread only with graph.update_state(…); use another thread for your own checkpoints",
    )


def metadata_of(trigger: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that LangGraph gave."""
    metadata = {key: value for key, value in stored.items() if key not in (ID, PARENT, NS)}
    if trigger in SOURCES:
        metadata = {"source": trigger, **metadata}
    return metadata


def _plain(value: Any) -> Any:
    """Return a metadata value as LangGraph's own savers return it: plain texts (ids are ``ReadId``), no tuples."""
    if isinstance(value, str):
        return str(value) if type(value) is not str else value
    if type(value) is dict:
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return [_plain(each) for each in value]
    return value
