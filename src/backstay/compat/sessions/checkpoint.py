"""The record of a session's checkpoint, its ids, and its summary, as the session files have them.

A record accepts any values; ``check`` refuses a record that cannot be saved. Reading a file checks only the types of
its fields: a record that was accepted once must not become unreadable because a rule became stricter.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from backstay.errors import DecodeError, InvalidInput
from backstay.model.fields import check_cost, check_fields
from backstay.model.ids import IdMaker, check_count, check_label

# Ids become parts of paths. So they have a plain alphabet: no separator, no leading dot, no character that a pattern, a
# shell or another file system would read differently. New ids have 122 bits, never repeat, and sort by creation time.


_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
"""Device names on Windows; no file can have them, with any extension."""

_maker = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)

I = TypeVar("I", bound="Identifier")  # noqa: E741
T = TypeVar("T")


class Identifier(str):
    """An id: text with a type that says what it identifies. In JSON it is plain text."""

    __slots__ = ()

    @classmethod
    def new(cls: type[I]) -> I:
        """Return a new id."""
        return cls(_maker.make())


class SessionId(Identifier):
    """Identifies a session: a directory below the root."""

    __slots__ = ()


class CheckpointId(Identifier):
    """Identifies a checkpoint of a session."""

    __slots__ = ()


class AgentId(Identifier):
    """Identifies an agent."""

    __slots__ = ()


class TaskId(Identifier):
    """Identifies a task."""

    __slots__ = ()


def check_safe(value: object, what: str) -> str:
    """Return an id as plain text if it can be part of a path; ``what`` is its name in the error."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be text, not {type(value).__name__}")
    text = str(value)
    if not _SAFE.fullmatch(text):
        raise InvalidInput(
            f"{what} {text[:200]!r} cannot be part of a file name",
            hint="Use 1 to 128 ASCII letters, digits, dots, underscores and hyphens; start with a letter or digit",
        )
    if text.endswith(".") or text.partition(".")[0].lower() in _DEVICES:
        raise InvalidInput(f"{what} {text!r} is not a valid file name on Windows", hint="Choose another id")
    return text


def check_twins(name: str, others: Mapping[str, str], what: str) -> None:
    """Refuse an id that differs from another only in case: on many file systems both are the same file.

    ``others`` has the other ids by their form without case.
    """
    twin = others.get(name.casefold(), name)
    if twin != name:
        raise InvalidInput(f"{what} {name!r} differs from {twin!r} only in case", hint="Choose another id")


class AgentState(StrEnum):
    """The states of an agent, by their names in files."""

    IDLE = "idle"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    WAITING_TOOL = "waiting_tool"
    STOPPED = "stopped"
    ERROR = "error"
    COMPLETED = "completed"

    @classmethod
    def parse(cls, text: str) -> AgentState:
        """Return the state with this name."""
        try:
            return cls(text)
        except ValueError:
            raise InvalidInput(f"there is no agent state {text!r}", hint=f"Use one of {', '.join(cls)}") from None


ITERATION_MAX = 2**31 - 1
TEXT_LENGTH_MAX = 65536


class MessageRole(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


def utc_now() -> datetime:
    """Return the current time."""
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

    def check(self, *, roles: bool = False) -> None:
        """Raise InvalidInput, with the name of the field, if the record cannot be saved.

        With ``roles``, every message must also be an object with one of the four roles.
        """
        check_safe(self.checkpoint_id, "checkpoint_id")
        check_safe(self.session_id, "session_id")
        check_fields({"created_at": self.created_at})
        check_label(self.trigger, "trigger", length_max=TEXT_LENGTH_MAX)
        if check_count(self.iteration, "iteration") > ITERATION_MAX:
            raise InvalidInput("iteration must be less than 2**31")
        check_count(self.tokens_used, "tokens_used")
        check_cost(self.cost_estimate)
        if self.resume_hint is not None:
            check_label(self.resume_hint, "resume_hint", length_max=TEXT_LENGTH_MAX)
        for name in ("messages", "tool_calls_pending"):
            if type(getattr(self, name)) is not list:
                raise InvalidInput(f"{name} must be a list, not {type(getattr(self, name)).__name__}")
        for index, message in enumerate(self.messages if roles else ()):
            if not isinstance(message, dict):
                raise InvalidInput(f"messages[{index}] must be a dict, not {type(message).__name__}")
            if not isinstance(message.get("role"), str) or message["role"] not in set(MessageRole):
                raise InvalidInput(
                    f"messages[{index}].role is missing or unknown", hint=f"Use one of {', '.join(MessageRole)}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as the JSON object that is stored."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain.update(checkpoint_id=str(self.checkpoint_id), session_id=str(self.session_id))
        plain.update(created_at=moment_text(self.created_at), cost_estimate=float(self.cost_estimate))
        return plain

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CheckpointData:
        """Rebuild a record. DecodeError names a field that is missing or has the wrong type."""
        reader = FieldReader(record)
        return cls(
            checkpoint_id=reader.of("checkpoint_id", str),
            session_id=reader.of("session_id", str),
            created_at=reader.moment("created_at"),
            trigger=reader.of("trigger", str),
            iteration=reader.of("iteration", int),
            messages=reader.of("messages", list),
            tool_calls_pending=reader.of("tool_calls_pending", list),
            tool_results=reader.value("tool_results"),
            tokens_used=reader.of("tokens_used", int),
            cost_estimate=reader.number("cost_estimate"),
            resume_hint=reader.optional_text("resume_hint"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """A checkpoint as lists show it. ``seq`` orders the session; files of the older writer have None."""

    checkpoint_id: str
    session_id: str
    created_at: datetime
    trigger: str
    iteration: int
    checksum: str
    seq: int | None = None


def moment_text(moment: datetime) -> str:
    """Return a time as RFC 3339 text in UTC."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


_NOT_OF = {str: "not text", int: "not a whole number", bool: "neither true nor false", list: "not a list"}


class FieldReader:
    """Reads fields of a stored object and checks their types."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def value(self, name: str) -> Any:
        """Return a required field."""
        if name not in self._record:
            raise DecodeError(f"has no field {name!r}")
        return self._record[name]

    def of(self, name: str, kind: type[T]) -> T:
        """Return a field of this type. In Python a bool is an int; here it is not."""
        value = self.value(name)
        if not isinstance(value, kind) or (kind is int and type(value) is not int):
            raise DecodeError(f"{name} is {_NOT_OF[kind]}")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a text, None if it is null or missing."""
        return None if self._record.get(name) is None else self.of(name, str)

    def number(self, name: str) -> float:
        """Return a number."""
        value = self.value(name)
        if type(value) is not int and type(value) is not float:
            raise DecodeError(f"{name} is not a number")
        return float(value)

    def moment(self, name: str) -> datetime:
        """Return a time. One without a time zone, as the older writer stored, counts as UTC."""
        text = self.of(name, str)
        try:
            moment = datetime.fromisoformat(text)
            return moment.replace(tzinfo=UTC) if moment.utcoffset() is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            raise DecodeError(f"{name} is not a time") from None
