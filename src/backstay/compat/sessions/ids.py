"""Ids of sessions and checkpoints in the directory layout, where an id becomes part of a path.

So only a plain alphabet is accepted: no separator, no leading dot, nothing that a pattern, a shell or another file
system would read differently. Made ones have 122 bits that never repeat, and sort by the moment they were made.
"""

from __future__ import annotations

import os
import re
import time
from typing import TypeVar

from backstay.errors import InvalidInput
from backstay.model.ids import IdMaker

SAFE_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_SAFE = re.compile(SAFE_ID)
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
"""Names that are no files on Windows, whatever extension they have."""

_maker = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)

I = TypeVar("I", bound="Identifier")  # noqa: E741


class Identifier(str):
    """An id: plain text, of a type that says what it names. On the wire it is the bare text."""

    __slots__ = ()

    @classmethod
    def new(cls: type[I]) -> I:
        """Return a new id."""
        return cls(_maker.make())


class SessionId(Identifier):
    """Names a session: a directory below the root."""

    __slots__ = ()


class CheckpointId(Identifier):
    """Names a checkpoint of a session."""

    __slots__ = ()


class AgentId(Identifier):
    """Names an agent."""

    __slots__ = ()


class TaskId(Identifier):
    """Names a task."""

    __slots__ = ()


def check_safe(value: object, what: str) -> str:
    """Return an id as plain text if it can be part of a path; ``what`` names it in the error."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is {type(value).__name__}, not text")
    text = str(value)
    if not _SAFE.fullmatch(text):
        raise InvalidInput(
            f"{what} {text[:200]!r} cannot be part of a file's name",
            hint="Use 1 to 128 ASCII letters, digits, dots, underscores and hyphens, beginning with a letter or digit",
        )
    if text.endswith(".") or text.partition(".")[0].lower() in _DEVICES:
        raise InvalidInput(f"{what} {text!r} is no file's name on Windows", hint="Choose another, so the tree can move")
    return text


def check_twins(name: str, others: set[str], what: str) -> None:
    """Refuse an id that differs from another only in upper and lower case: many file systems take them for one."""
    if name in others:
        return
    twin = next((other for other in sorted(others) if other.casefold() == name.casefold()), None)
    if twin is not None:
        raise InvalidInput(f"{what} {name!r} differs from {twin!r} only in case", hint="Choose another id")
