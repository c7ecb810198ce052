"""The records of the interface, and how they are stored.

Records are plain and can be changed; a put stores their values at that time.

``to_dict`` and ``from_dict`` make deep copies. Unknown keys are kept in ``extra`` and written again, so that no data of
a newer version is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from backstay.compat import upsert
from backstay.compat.adapter import copied, copied_list, copied_object
from backstay.compat.upsert import Draft, Found, join_state, split_state
from backstay.errors import InvalidInput
from backstay.model.checkpoint import CheckpointFields
from backstay.model.fields import check_fields

ADAPTER = "backend"

_REQUIRED = ("thread_id", "checkpoint_id", "step", "created_at")


@dataclass
class CheckpointMetadata:
    """A checkpoint without its payload."""

    thread_id: str  # the conversation
    checkpoint_id: str  # unique in the store
    step: int  # the caller's count; the order of a thread is the order in which its checkpoints were put
    parent_checkpoint_id: str | None = None  # None when put: the thread's newest
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())  # ISO 8601 with an offset
    tags: list[str] = field(default_factory=list)
    summary: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata as a new dictionary."""
        known = {name: getattr(self, name) for name in METADATA}
        return copied_object({**self.extra, **known}, "metadata")


@dataclass
class Checkpoint:
    """A complete snapshot of an agent at run time."""

    metadata: CheckpointMetadata
    messages: list[dict[str, Any]]  # the conversation, serialized
    state: dict[str, Any]
    tools_result: dict[str, Any]
    next_node: str = ""  # to be executed next
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as a new dictionary for JSON. EncodeError names a value that JSON cannot hold."""
        known = {name: copied(getattr(self, name), name) for name in PAYLOAD}
        return {**copied_object(self.extra, "extra"), "metadata": self.metadata.to_dict(), **known}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Checkpoint:
        """Make a checkpoint from the result of ``to_dict``. InvalidInput names a required key that is missing."""
        metadata = plain.get("metadata")
        missing = [] if "metadata" in plain else ["metadata"]
        if isinstance(metadata, Mapping):
            missing = [f"metadata.{name}" for name in _REQUIRED if name not in metadata]
        if missing:
            raise InvalidInput(f"{missing[0]} is missing", path=missing[0], hint="Pass the result of to_dict()")
        if not isinstance(metadata, Mapping):
            raise InvalidInput("metadata must be a mapping", path="metadata")
        known = {name: copied(metadata[name], f"metadata.{name}") for name in METADATA if name in metadata}
        payload: dict[str, Any] = {"messages": [], "state": {}, "tools_result": {}}
        payload.update({name: copied(plain[name], name) for name in PAYLOAD if name in plain})
        return cls(
            metadata=CheckpointMetadata(**known, extra=_unknown(metadata, METADATA, "metadata")),
            **payload,
            extra=_unknown(plain, (*PAYLOAD, "metadata"), "checkpoint"),
        )


METADATA = tuple(item.name for item in fields(CheckpointMetadata) if item.name != "extra")
PAYLOAD = tuple(item.name for item in fields(Checkpoint) if item.name not in ("metadata", "extra"))


def _unknown(plain: Mapping[str, Any], known: tuple[str, ...], path: str) -> dict[str, Any]:
    return copied_object({key: value for key, value in plain.items() if key not in known}, path)


def checked(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's dictionary. InvalidInput names the first field that cannot be stored."""
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidInput(f"a checkpoint must be a Checkpoint, not {type(checkpoint).__name__}")
    plain = checkpoint.to_dict()
    metadata = plain["metadata"]
    for extra, known in ((checkpoint.metadata.extra, METADATA), (checkpoint.extra, (*PAYLOAD, "metadata"))):
        for name in extra:
            if name in known:
                raise InvalidInput(f"extra must not hold {name!r}, which is a field", hint=f"Set {name} instead")
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


# Between records and stored checkpoints ---------------------------------------------------------------------------


def draft_of(plain: dict[str, Any], created_at: datetime | None = None) -> Draft:
    """Return what to store for a dictionary. ``created_at`` is the time of one whose own text does not say it."""
    metadata = plain["metadata"]
    text, tags = metadata["created_at"], metadata["tags"]
    if created_at is None:
        with suppress(ValueError, TypeError, OverflowError):
            moment = datetime.fromisoformat(text)
            created_at = None if moment.tzinfo is None else moment.astimezone(UTC)
        if created_at is None:
            raise InvalidInput(
                "created_at must be ISO 8601 text with an offset",
                path="metadata.created_at",
                hint='For example "2026-01-31T12:00:00+00:00". Without an offset the time is ambiguous',
            )
    extra = {key: value for key, value in metadata.items() if key not in METADATA}
    upsert.check_names(tags, "tag")
    upsert.check_names(extra, "metadata key")
    others = {"messages": plain["messages"], "tool_results": plain["tools_result"]}
    original: dict[str, Any] = {}
    state = join_state(plain["state"], others, original)
    if created_at.isoformat() != text:
        original["created_at"] = text
    if sorted(set(tags)) != tags:
        original["tags"] = tags
    unknown = {key: value for key, value in plain.items() if key not in (*PAYLOAD, "metadata")}
    if unknown:
        original["extra"] = unknown
    values: CheckpointFields = {
        "created_at": created_at,
        "tags": tags,
        "summary": metadata["summary"],
        "next_node": plain["next_node"] or None,
        "metadata": extra,
    }
    return Draft(
        adapter=ADAPTER,
        thread=metadata["thread_id"],
        id=metadata["checkpoint_id"],
        step=metadata["step"],
        parent=metadata["parent_checkpoint_id"],
        state=state,
        fields=values,
        original=original,
        as_dict=_without_parent(plain),
    )


def checkpoint_of(found: Found) -> Checkpoint:
    """Return a stored checkpoint as a record."""
    if found.as_dict is not None:
        metadata = {**found.as_dict["metadata"], "parent_checkpoint_id": found.parent}
        return Checkpoint.from_dict({**found.as_dict, "metadata": metadata})
    whole = found.checkpoint.state
    # A checkpoint that was saved by other means may hold other types under these names; then they stay in the state.
    kinds = {"messages": list, "tool_results": dict}
    others: dict[str, Any] = {name: whole[name] for name, kind in kinds.items() if isinstance(whole.get(name), kind)}
    return Checkpoint(
        metadata=metadata_of(found),
        messages=others.get("messages", []),
        state=split_state(found, others),
        tools_result=others.get("tool_results", {}),
        next_node=found.meta.next_node or "",
        extra=copied_object(found.original.get("extra", {}), "extra"),
    )


def metadata_of(found: Found) -> CheckpointMetadata:
    """Return the metadata of a stored checkpoint as a record."""
    if found.as_dict is not None:
        return checkpoint_of(found).metadata
    meta = found.meta
    return CheckpointMetadata(
        thread_id=meta.thread_id,
        checkpoint_id=meta.id,
        step=found.step,
        parent_checkpoint_id=found.parent,
        created_at=found.original.get("created_at", meta.created_at.isoformat()),
        tags=found.tags,
        summary=meta.summary,
        extra=found.metadata,
    )


def as_dict(found: Found) -> dict[str, Any]:
    """Return a stored checkpoint as a dictionary without its parent, to compare it with a draft."""
    return found.as_dict if found.as_dict is not None else _without_parent(checkpoint_of(found).to_dict())


def _without_parent(plain: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in plain["metadata"].items() if key != "parent_checkpoint_id"}
    return {**plain, "metadata": metadata}
