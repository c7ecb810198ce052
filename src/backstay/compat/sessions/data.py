"""The record of a session's checkpoint, and its summary, as the directory layout has them.

A record carries whatever it is given; ``check`` says what may be saved. Reading an older file checks only that its
fields are of the right kind: a record that was accepted once must not become unreadable by a stricter rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from backstay.compat.sessions.ids import CheckpointId, SessionId, check_safe
from backstay.errors import DecodeError, InvalidInput
from backstay.model.ids import check_label
from backstay.model.usage import check_cost, check_count

ITERATION_MAX = 2**31 - 1
TEXT_LENGTH_MAX = 65536


class MessageRole(StrEnum):
    """Who said a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


def utc_now() -> datetime:
    """Return the present moment."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointData:
    """One checkpoint of a session. ``messages``, ``tool_calls_pending`` and ``tool_results`` hold any JSON values."""

    checkpoint_id: str = field(default_factory=CheckpointId.new)  # plain text becomes a CheckpointId
    session_id: str = field(default_factory=SessionId.new)
    created_at: datetime = field(default_factory=utc_now)
    trigger: str = "manual"
    iteration: int = 0
    messages: list[Any] = field(default_factory=list)
    tool_calls_pending: list[Any] = field(default_factory=list)
    tool_results: Any = None
    tokens_used: int = 0
    cost_estimate: float = 0.0
    resume_hint: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("checkpoint_id", CheckpointId), ("session_id", SessionId)):
            value = getattr(self, name)
            if type(value) is str:
                object.__setattr__(self, name, kind(value))

    def check(self) -> None:
        """Raise InvalidInput, naming the field, unless the record may be saved."""
        check_safe(self.checkpoint_id, "checkpoint_id")
        check_safe(self.session_id, "session_id")
        if not isinstance(self.created_at, datetime) or self.created_at.utcoffset() is None:
            raise InvalidInput("created_at is no moment with a time zone", hint="Write datetime.now(UTC)")
        check_label(self.trigger, "trigger", length_max=TEXT_LENGTH_MAX)
        if check_count(self.iteration, "iteration") > ITERATION_MAX:
            raise InvalidInput("iteration is 2**31 or more")
        check_count(self.tokens_used, "tokens_used")
        check_cost(self.cost_estimate)
        if self.resume_hint is not None:
            check_label(self.resume_hint, "resume_hint", length_max=TEXT_LENGTH_MAX)
        for name in ("messages", "tool_calls_pending"):
            if type(getattr(self, name)) is not list:
                raise InvalidInput(f"{name} is {type(getattr(self, name)).__name__}, not a list")
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages[{index}]")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as the JSON object that is stored."""
        return {
            "checkpoint_id": str(self.checkpoint_id),
            "session_id": str(self.session_id),
            "created_at": moment_text(self.created_at),
            "trigger": self.trigger,
            "iteration": self.iteration,
            "messages": self.messages,
            "tool_calls_pending": self.tool_calls_pending,
            "tool_results": self.tool_results,
            "tokens_used": self.tokens_used,
            "cost_estimate": float(self.cost_estimate),
            "resume_hint": self.resume_hint,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CheckpointData:
        """Rebuild a record; raise DecodeError that names the field that is missing or of the wrong kind."""
        reader = FieldReader(record)
        return cls(
            checkpoint_id=reader.text("checkpoint_id"),
            session_id=reader.text("session_id"),
            created_at=reader.moment("created_at"),
            trigger=reader.text("trigger"),
            iteration=reader.integer("iteration"),
            messages=reader.items("messages"),
            tool_calls_pending=reader.items("tool_calls_pending"),
            tool_results=reader.value("tool_results"),
            tokens_used=reader.integer("tokens_used"),
            cost_estimate=reader.number("cost_estimate"),
            resume_hint=reader.optional_text("resume_hint"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """A checkpoint as lists show it; ``seq`` is its place in the session's order, None in files of the older writer."""

    checkpoint_id: str
    session_id: str
    created_at: datetime
    trigger: str
    iteration: int
    checksum: str
    seq: int | None = None


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise InvalidInput(f"{where} is {type(message).__name__}, not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in set(MessageRole):
        raise InvalidInput(f"{where}.role is missing or unknown", hint=f"Use one of {', '.join(MessageRole)}")


def moment_text(moment: datetime) -> str:
    """Return a moment as RFC 3339 text in UTC."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


class FieldReader:
    """Takes fields out of a stored object, each of the kind that is asked for."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def value(self, name: str) -> Any:
        """Return a field that must be there."""
        if name not in self._record:
            raise DecodeError(f"has no field {name!r}")
        return self._record[name]

    def text(self, name: str) -> str:
        """Return a field of text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise DecodeError(f"{name} is no text")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a field of text, None if it is null or missing."""
        return None if self._record.get(name) is None else self.text(name)

    def integer(self, name: str) -> int:
        """Return a field that is a whole number."""
        value = self.value(name)
        if type(value) is not int:
            raise DecodeError(f"{name} is no whole number")
        return value

    def number(self, name: str) -> float:
        """Return a field that is a number."""
        value = self.value(name)
        if type(value) is not int and type(value) is not float:
            raise DecodeError(f"{name} is no number")
        return float(value)

    def boolean(self, name: str) -> bool:
        """Return a field that is true or false."""
        value = self.value(name)
        if not isinstance(value, bool):
            raise DecodeError(f"{name} is neither true nor false")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a field that is a list."""
        value = self.value(name)
        if not isinstance(value, list):
            raise DecodeError(f"{name} is no list")
        return value

    def moment(self, name: str) -> datetime:
        """Return a field that is a moment; one without a time zone, as an older writer left them, counts as UTC."""
        text = self.text(name)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise DecodeError(f"{name} is no moment") from None
        return moment.replace(tzinfo=UTC) if moment.utcoffset() is None else moment.astimezone(UTC)
