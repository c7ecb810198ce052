"""Changes that nobody needs to hear of: LangGraph writes such values itself, and takes them back as they come.

Exceptions in its channel for errors come back as text. Its own channels hold tuples (of interrupts, of a value and
whether it is final), and it takes lists for them. What a graph is called with waits in ``__start__`` only until the
graph reads it, and is validated then. A pair such as ``("user", "hello")`` is a message, as a list or as a tuple. And
``message.text`` is of a subclass of str that adds nothing but a deprecated way to call it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from langgraph.types import Interrupt

from backstay.integrations.langgraph.serde.fidelity import Change, pattern_of

UNNAMED: Final = "value"
"""The path of a value of which nobody said where it is."""

_MESSAGE_TEXT: Final = "langchain_core.messages.base.TextAccessor"
_ERRORS: Final = "__error__"
_OWN: Final = re.compile(r"__(error|interrupt|resume|scheduled|no_writes|start|input)__|__pregel_.*|branch:.*|join:.*")
_PLACE: Final = re.compile(r"(channel_values|writes)\.")
_ROLES: Final = frozenset(
    {"ai", "assistant", "developer", "function", "human", "placeholder", "system", "tool", "user"}
)


def is_expected(change: Change, path: str) -> bool:
    """Tell whether a change, in the value at this path, is one that LangGraph does not mind."""
    if (change.before, change.after) == (_MESSAGE_TEXT, "str"):
        return True
    channel = _channel(path)
    is_own = _OWN.fullmatch(channel) is not None
    if change.path == path:
        if isinstance(change.value, BaseException):
            return is_errors(path)
        if path == UNNAMED and type(change.value) is tuple and _is_own_tuple(change.value):
            return True
    return type(change.value) is tuple and change.after == "list" and (is_own or _is_message(change.value))


def is_errors(path: str) -> bool:
    """Tell whether LangGraph's own errors are written to this path, or may be."""
    return path == UNNAMED or _channel(path) == _ERRORS


def place_of(path: str) -> str:
    """Return a path without indices, and the same for a channel's value and what is about to be written to it."""
    return _PLACE.sub("", pattern_of(path), count=1)


def _channel(path: str) -> str:
    return re.sub(r"\[[0-9:]*\]\Z", "", _PLACE.sub("", path, count=1))


def _is_own_tuple(value: tuple[Any, ...]) -> bool:
    """Tell whether a tuple is one of interrupts, or a value and whether the nodes that give it have finished."""
    return all(type(item) is Interrupt for item in value) or (len(value) == 2 and type(value[1]) is bool)


def _is_message(value: tuple[Any, ...]) -> bool:
    return len(value) == 2 and type(value[0]) is str and value[0] in _ROLES
