"""Backstay's own codec as a serializer for LangGraph: saved values come back equal, types included, or are refused.

LangGraph's format has no tuples and no large ints, and finds classes by name. This one has no such losses, but a class
of your own must be registered with ``backstay.register`` before it can be stored. Loading runs no constructor of
yours: objects are filled field by field, and only of registered classes. This module registers the classes that
LangGraph itself stores, a closed list. Values that LangGraph's own serializer wrote can still be read, so you can
switch at any time.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from langchain_core.documents import Document
from langchain_core.messages import RemoveMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.store.base import Item
from langgraph.types import Command, Interrupt, Overwrite, Send, TimeoutPolicy

from backstay.codec import decode, encode
from backstay.codec.registry import BY_CLASS, register
from backstay.errors import DecodeError
from backstay.langgraph.serde.changes import UNNAMED, is_errors
from backstay.langgraph.serde.decode import CHUNKS, MESSAGES
from backstay.langgraph.serde.safe import SafeSerializer

TAG: Final = "backstay"
"""The tag of values in our own codec."""


class ExactSerializer(SerializerProtocol):
    """A serializer that returns exactly what it was given, or refuses it with the path of the part it cannot store.

    ``older`` reads values with other tags: by default a ``SafeSerializer``.
    """

    def __init__(self, *, older: SerializerProtocol | None = None) -> None:
        self._older = SafeSerializer() if older is None else older

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return a value as (tag, bytes)."""
        return self.dumps_at(obj, UNNAMED)

    def dumps_at(self, obj: Any, path: str) -> tuple[str, bytes]:
        """Return a value as (tag, bytes); EncodeError names the part that cannot be stored, starting with this path."""
        if isinstance(obj, BaseException) and is_errors(path):
            # LangGraph records a task's error, and only checks whether there is one.
            obj = repr(obj)
        return TAG, encode(obj, path)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value."""
        tag, content = data
        return decode(content) if tag == TAG else self._older.loads_typed(data)


def _send_from(content: Any) -> Send:
    node, arg, timeout = content
    if type(node) is not str or not (timeout is None or type(timeout) is TimeoutPolicy):
        raise DecodeError("the stored content of a Send is damaged")
    return Send(node, arg, timeout=timeout)


def _item_from(content: Any) -> Item:
    value, key, namespace, created_at, updated_at = content
    if type(namespace) is not tuple or type(created_at) is not datetime or type(updated_at) is not datetime:
        raise DecodeError("the stored content of an Item is damaged")
    return Item(value=value, key=key, namespace=namespace, created_at=created_at, updated_at=updated_at)


_CLASSES: Final[dict[str, tuple[type, ...]]] = {
    "langchain": (*MESSAGES, *CHUNKS, RemoveMessage, Document),
    "langgraph": (Command, Interrupt, Overwrite, TimeoutPolicy, _DeltaSnapshot),
}

# Unless the program has registered a class under a name of its own.
for package, classes in _CLASSES.items():
    for cls in classes:
        if cls not in BY_CLASS:
            register(cls, name=f"{package}.{cls.__name__.lstrip('_')}")
if Send not in BY_CLASS:
    register(Send, name="langgraph.Send", encode=lambda send: [send.node, send.arg, send.timeout], decode=_send_from)
if Item not in BY_CLASS:
    register(
        Item,
        name="langgraph.Item",
        encode=lambda item: [getattr(item, name) for name in Item.__slots__],
        decode=_item_from,
    )
