"""The records of ``compat.backend``: ``CheckpointMetadata`` and ``Checkpoint``, with their dictionary form.

They are plain and can be changed; what counts is their state when they are put. ``to_dict`` and ``from_dict`` copy all
the way down. Keys that this version does not know are kept in ``extra`` and written again, so that nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from backstay.compat.plain_json import copied, copied_list, copied_object
from backstay.errors import InvalidInput
from backstay.model.fields import check_fields

_REQUIRED = ("thread_id", "checkpoint_id", "step", "created_at")


def _now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass
class CheckpointMetadata:
    """A checkpoint without its payload."""

    thread_id: str  # the conversation
    checkpoint_id: str  # unique in the store
    step: int  # as the caller counts; the order of a thread is the order in which its checkpoints were put
    parent_checkpoint_id: str | None = None  # None when put: the thread's newest
    created_at: str = field(default_factory=_now)  # ISO 8601 with an offset; information only
    tags: list[str] = field(default_factory=list)
    summary: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata as a dictionary of its own."""
        known = {name: getattr(self, name) for name in _METADATA}
        return copied_object({**self.extra, **known}, "metadata")


@dataclass
class Checkpoint:
    """A complete snapshot of an agent at run time."""

    metadata: CheckpointMetadata
    messages: list[dict[str, Any]]  # the conversation, serialised
    state: dict[str, Any]
    tools_result: dict[str, Any]
    next_node: str = ""  # to be executed next
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as a dictionary of its own, ready for JSON; EncodeError names what JSON cannot say."""
        known = {name: getattr(self, name) for name in _PAYLOAD}
        return {**copied_object(self.extra, "extra"), "metadata": self.metadata.to_dict(), **_copied_each(known)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Checkpoint:
        """Make a checkpoint of what ``to_dict`` gave; InvalidInput names a required key that is missing."""
        metadata = _required(plain, "metadata", "")
        if not isinstance(metadata, Mapping):
            raise InvalidInput("metadata must be a mapping", path="metadata")
        for name in _REQUIRED:
            _required(metadata, name, "metadata.")
        known = {name: copied(metadata[name], f"metadata.{name}") for name in _METADATA if name in metadata}
        payload: dict[str, Any] = {"messages": [], "state": {}, "tools_result": {}}
        payload.update(_copied_each({name: plain[name] for name in _PAYLOAD if name in plain}))
        return cls(
            metadata=CheckpointMetadata(**known, extra=_unknown(metadata, _METADATA, "metadata")),
            **payload,
            extra=_unknown(plain, (*_PAYLOAD, "metadata"), "checkpoint"),
        )


_METADATA = tuple(item.name for item in fields(CheckpointMetadata) if item.name != "extra")
_PAYLOAD = tuple(item.name for item in fields(Checkpoint) if item.name not in ("metadata", "extra"))


def check(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's dictionary; raise InvalidInput that names the first field that cannot be stored."""
    plain = checkpoint.to_dict()
    metadata = plain["metadata"]
    _check_extra(checkpoint.metadata.extra, _METADATA)
    _check_extra(checkpoint.extra, (*_PAYLOAD, "metadata"))
    check_fields(
        {
            "id": metadata["checkpoint_id"],
            "thread_id": metadata["thread_id"],
            "step": metadata["step"],
            "parent_id": metadata["parent_checkpoint_id"],
            "tags": metadata["tags"],
            "summary": metadata["summary"],
            "next_node": plain["next_node"] if plain["next_node"] != "" else None,
        }
    )
    copied_list(plain["messages"], "messages")
    for name in ("state", "tools_result"):
        copied_object(plain[name], name)
    return plain


def moment_of(text: object) -> datetime:
    """Return the moment that ``created_at`` names; InvalidInput if it does not name one."""
    try:
        moment = datetime.fromisoformat(text) if type(text) is str else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidInput(
            "created_at must be ISO 8601 text with an offset",
            path="metadata.created_at",
            hint='For example "2026-01-31T12:00:00+00:00"; without an offset nobody knows which moment it is',
        )
    return moment.astimezone(UTC)


def _required(plain: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in plain:
        raise InvalidInput(f"{place}{name} is missing", path=f"{place}{name}", hint="Pass what to_dict() returned")
    return plain[name]


def _copied_each(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copied(value, name) for name, value in values.items()}


def _unknown(plain: Mapping[str, Any], known: tuple[str, ...], path: str) -> dict[str, Any]:
    return copied_object({key: value for key, value in plain.items() if key not in known}, path)


def _check_extra(extra: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in extra:
        if name in known:
            raise InvalidInput(f"extra holds {name!r}, which is a field of its own", hint=f"Set {name} instead")
