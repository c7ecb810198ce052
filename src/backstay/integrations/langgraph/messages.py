"""Which messages of a list are the same as last time, found without encoding them again.

Messages may be changed in place, so that it is the same object proves nothing. What proves it is that everything the
serializer would write of it is the same: a message of one of LangChain's own classes is written as its class and its
fields. So their fields are kept, with copies of whatever could be changed, and compared with those of the next list: a
twentieth of the time of encoding them. Python takes 1, 1.0 and True for equal: a message that has a number anywhere is
compared by its packed fields as well. One with anything in it that is not plain data is not kept, nor is its list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ormsgpack
from langchain_core import messages

MESSAGE_CLASSES = frozenset(
    {
        messages.AIMessage,
        messages.ChatMessage,
        messages.FunctionMessage,
        messages.HumanMessage,
        messages.SystemMessage,
        messages.ToolMessage,
    }
)

_TEXTS = frozenset({str, type(None)})
_NUMBERS = frozenset({int, float, bool, bytes})

# With these, a value that is not of exactly one of msgpack's own types is refused, never converted.
_PLAIN_ONLY = (
    ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_UUID
)


@dataclass(slots=True)
class KnownMessages:
    """A list of messages as it is stored."""

    _classes: list[type] = field(default_factory=list)
    _fields: list[dict[str, Any]] = field(default_factory=list)
    _extras: list[dict[str, Any] | None] = field(default_factory=list)
    _packed: dict[int, bytes] = field(default_factory=dict)  # by place in the list, of messages with numbers

    @classmethod
    def of(cls, elements: Sequence[Any]) -> KnownMessages | None:
        """Return what is to be known of a list; None if it has anything but messages with plain fields."""
        known = cls()
        return known if known.extend(elements) else None

    @property
    def count(self) -> int:
        """Return how many messages there are."""
        return len(self._classes)

    @property
    def size(self) -> int:
        """Return about how many bytes this takes; texts are shared with the messages."""
        return 600 * len(self._classes)

    def begin(self, elements: Sequence[Any]) -> bool:
        """Tell whether a list begins with these very messages."""
        count = len(self._classes)
        head = elements[:count]
        if list(map(type, head)) != self._classes or [each.__dict__ for each in head] != self._fields:
            return False
        if [each.__pydantic_extra__ for each in head] != self._extras:
            return False
        return all(_pack(head[place]) == packed for place, packed in self._packed.items())

    def extend(self, elements: Sequence[Any]) -> bool:
        """Take more messages in; False if that cannot be, and then nothing is known any more."""
        for element in elements:
            if type(element) not in MESSAGE_CLASSES:
                return False
            kept, extra = _Copy(element.__dict__), _Copy(element.__pydantic_extra__)
            if not kept.is_plain or not extra.is_plain:
                return False
            if kept.has_numbers or extra.has_numbers:
                packed = _pack(element)
                if packed is None:
                    return False
                self._packed[len(self._classes)] = packed
            self._classes.append(type(element))
            self._fields.append(kept.value)
            self._extras.append(extra.value)
        return True


class _Copy:
    """A copy of plain data that shares nothing that could be changed."""

    __slots__ = ("has_numbers", "is_plain", "value")

    def __init__(self, value: Any) -> None:
        self.is_plain, self.has_numbers = True, False
        self.value = self._copied(value)

    def _copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _TEXTS:
            return value
        if kind is dict:
            return {self._copied(key): self._copied(each) for key, each in value.items()}
        if kind is list:
            return [self._copied(each) for each in value]
        self.has_numbers = True
        self.is_plain = self.is_plain and kind in _NUMBERS
        return value


def _pack(message: Any) -> bytes | None:
    try:
        return ormsgpack.packb([message.__dict__, message.__pydantic_extra__], option=_PLAIN_ONLY)
    except (TypeError, ValueError):
        return None
