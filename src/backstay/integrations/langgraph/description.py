"""What a LangGraph checkpoint says besides its values: versions, what each node has seen, metadata.

Names of channels and nodes stay the same from step to step while their numbers change: names are kept as the record's
``RUN``, which costs nothing while it stays, and numbers as its ``MARKS``. LangGraph's metadata is the record's own, so
that lists can filter by it; ``source`` is its trigger.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.serde.base import SerializerProtocol

from backstay.errors import DecodeError
from backstay.integrations.langgraph.names import Place
from backstay.integrations.langgraph.values import Typed, dump, load
from backstay.model.checkpoint import Notes
from backstay.store.layout import uuid_bytes

SOURCES = frozenset({"input", "loop", "update", "fork"})
ID, PARENT, NS = "backstay:checkpoint_id", "backstay:parent_id", "backstay:checkpoint_ns"
"""Metadata of ours: LangGraph's names where they cannot be told from ours. Nobody sees them in a tuple's metadata."""

_KNOWN = frozenset({"v", "id", "ts", "channel_values", "channel_versions", "versions_seen", "updated_channels"})
_ABSENT = False  # of updated_channels, which may also be None

Versions = Mapping[str, Any]


def run_and_marks(checkpoint: Checkpoint, serde: SerializerProtocol) -> tuple[dict[str, Any], list[Any]]:
    """Return what stays from step to step, and what changes."""
    versions, seen = checkpoint["channel_versions"], checkpoint["versions_seen"]
    names: dict[str, int] = {}
    for name in (*versions, *(channel for each in seen.values() for channel in each)):
        names.setdefault(name, len(names))
    run: dict[str, Any] = {
        "v": checkpoint["v"],
        "channels": list(names),
        "versions": len(versions),
        "seen": [[node, [names[channel] for channel in each]] for node, each in seen.items()],
    }
    others = {key: dump(serde, value, key) for key, value in checkpoint.items() if key not in _KNOWN}
    if others:
        run["others"] = {key: [typed.tag, typed.data] for key, typed in others.items()}
    updated: Any = checkpoint.get("updated_channels", _ABSENT)
    if updated:
        updated = [names.get(name, name) for name in updated]
    ts = checkpoint["ts"]
    marks = [
        list(versions.values()),
        [version for each in seen.values() for version in each.values()],
        updated,
        None if _is_plain(ts) else ts,
    ]
    return run, marks


def versions_in(run: Mapping[str, Any], marks: list[Any]) -> dict[str, Any]:
    """Return the version of each channel."""
    return dict(zip(run["channels"], marks[0], strict=False))


def checkpoint_from(
    run: Mapping[str, Any],
    marks: list[Any],
    values: dict[str, Any],
    checkpoint_id: str,
    created: datetime,
    serde: SerializerProtocol,
) -> Checkpoint:
    """Return the checkpoint that was put."""
    try:
        channels = run["channels"]
        seen_versions = iter(marks[1])
        checkpoint: dict[str, Any] = {
            "v": run["v"],
            "ts": created.isoformat() if marks[3] is None else marks[3],
            "id": checkpoint_id,
            "channel_values": values,
            "channel_versions": dict(zip(channels[: run["versions"]], marks[0], strict=True)),
            "versions_seen": {
                node: {channels[number]: next(seen_versions) for number in numbers} for node, numbers in run["seen"]
            },
        }
        if marks[2] is not _ABSENT:
            updated = marks[2]
            checkpoint["updated_channels"] = updated and [
                channels[each] if type(each) is int else each for each in updated
            ]
        for key, (tag, data) in run.get("others", {}).items():
            checkpoint[key] = load(serde, Typed(tag, data), key)
    except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise DecodeError("it is no checkpoint of a LangGraph run", hint="Was it saved by something else?") from error
    return checkpoint  # type: ignore[return-value]  # all keys of the TypedDict, and those it does not know


def notes_for(place: Place, checkpoint: Checkpoint, parent: str | None, metadata: Mapping[str, Any]) -> Notes:
    """Return the record's fields; what would not come back from our own names is noted in the metadata."""
    kept = {key: _plain(value) for key, value in metadata.items()}
    notes: Notes = {"metadata": kept, "created_at": _moment(checkpoint["ts"])}
    if kept.get("source") in SOURCES:
        notes["trigger"] = kept.pop("source")
    if uuid_bytes(checkpoint["id"]) is None:
        kept[ID] = str(checkpoint["id"])
    if parent is not None and uuid_bytes(parent) is None:
        kept[PARENT] = str(parent)
    if place.scope != place.ns:
        kept[NS] = place.ns
    return notes


def metadata_of(trigger: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata as LangGraph gave it."""
    metadata = {key: value for key, value in kept.items() if key not in (ID, PARENT, NS)}
    if trigger in SOURCES:
        metadata = {"source": trigger, **metadata}
    return metadata


def _plain(value: Any) -> Any:
    """Return a metadata value as LangGraph's own savers give it back: plain texts (ids are ``ReadId``), no tuples."""
    if isinstance(value, str):
        return str(value) if type(value) is not str else value
    if type(value) is dict:
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return [_plain(each) for each in value]
    return value


def _moment(ts: object) -> datetime:
    try:
        moment = datetime.fromisoformat(str(ts))
    except ValueError:
        return datetime.now(UTC)  # ts is kept beside it as it is
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)


def _is_plain(ts: object) -> bool:
    """Tell whether a time stamp comes back from the record's moment as it is."""
    try:
        return type(ts) is str and datetime.fromisoformat(ts).astimezone(UTC).isoformat() == ts
    except ValueError:
        return False
